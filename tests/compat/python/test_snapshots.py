"""Snapshots and forks with the unmodified SDK."""

import time
from importlib.metadata import version

import pytest
from e2b import Sandbox
from e2b.exceptions import InvalidArgumentException, SandboxException, SandboxNotFoundException


def has(name):
    return hasattr(Sandbox, name)


needs_snapshots = pytest.mark.skipif(not has("create_snapshot"), reason=f"e2b {version('e2b')} knows no snapshots")
needs_fork = pytest.mark.skipif(not has("fork"), reason=f"e2b {version('e2b')} knows no forks")


@pytest.fixture
def kept():
    """Snapshots that are deleted at the end of the test."""
    ids = []
    yield ids
    for snapshot in ids:
        Sandbox.delete_snapshot(snapshot)


def ids_of(**filters):
    paginator = Sandbox.list_snapshots(**filters)
    found = set()
    while paginator.has_next:
        found |= {info.snapshot_id for info in paginator.next_items()}
    return found


@needs_snapshots
def test_sandboxes_start_from_a_snapshot_and_are_independent(make, kept):
    sandbox = make()
    sandbox.files.write("/home/user/app/config.json", '{"env": "test"}')
    counting = "n=0; while true; do n=$((n+1)); echo $n > /tmp/next; mv /tmp/next /tmp/count; sleep 0.05; done"
    handle = sandbox.commands.run(counting, background=True)
    while not sandbox.files.exists("/tmp/count"):
        time.sleep(0.05)
    snapshot = sandbox.create_snapshot()
    kept.append(snapshot.snapshot_id)
    assert sandbox.is_running()
    first, second = make(snapshot.snapshot_id), make(snapshot.snapshot_id)
    assert len({sandbox.sandbox_id, first.sandbox_id, second.sandbox_id}) == 3
    for child in (first, second):
        assert child.files.read("/home/user/app/config.json") == '{"env": "test"}'
        # The program goes on.
        assert handle.pid in {process.pid for process in child.commands.list()}
        before = int(child.files.read("/tmp/count"))
        time.sleep(0.5)
        assert int(child.files.read("/tmp/count")) > before
    first.files.write("/home/user/app/config.json", "changed")
    assert second.files.read("/home/user/app/config.json") == '{"env": "test"}'
    assert sandbox.files.read("/home/user/app/config.json") == '{"env": "test"}'


@needs_snapshots
def test_snapshots_are_listed_named_and_deleted(make, kept):
    sandbox = make()
    name = f"snap-{sandbox.sandbox_id[:8]}"
    named, plain = sandbox.create_snapshot(name=name), Sandbox.create_snapshot(sandbox.sandbox_id)
    kept.extend([named.snapshot_id, plain.snapshot_id])
    assert any(name in full for full in named.names)
    both = {named.snapshot_id, plain.snapshot_id}
    assert both <= ids_of()
    assert ids_of(sandbox_id=sandbox.sandbox_id) == both
    if "name" in Sandbox.list_snapshots.__code__.co_varnames:
        assert ids_of(name=name) == {named.snapshot_id}
        assert ids_of(name=f"{name}-missing") == set()
    assert make(name).is_running()
    assert Sandbox.delete_snapshot(plain.snapshot_id) is True
    assert Sandbox.delete_snapshot(plain.snapshot_id) is False
    with pytest.raises(SandboxException):
        Sandbox.create(plain.snapshot_id)


@needs_fork
def test_forks_go_on_from_where_their_parent_was(make):
    sandbox = make(envs={"FROM": "parent"})
    sandbox.files.write("state", "before")
    forks = sandbox.fork(count=2, timeout=120)
    try:
        assert all(isinstance(fork, Sandbox) for fork in forks)
        assert len({sandbox.sandbox_id, *(fork.sandbox_id for fork in forks)}) == 3
        for number, fork in enumerate(forks):
            assert fork.is_running()
            assert fork.files.read("state") == "before"
            assert fork.commands.run("echo $FROM").stdout == "parent\n"
            fork.files.write("state", f"fork {number}")
        assert [fork.files.read("state") for fork in forks] == ["fork 0", "fork 1"]
        assert sandbox.files.read("state") == "before"
    finally:
        for fork in forks:
            fork.kill()


@needs_fork
def test_forks_of_what_is_not_there_or_of_no_number_fail(make):
    sandbox = make()
    sandbox.kill()
    with pytest.raises(SandboxNotFoundException):
        sandbox.fork()
    with pytest.raises(InvalidArgumentException):
        Sandbox.fork("isomething", count=0)
