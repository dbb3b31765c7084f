"""Life cycle: create, inspect, list, connect, timeouts, kill."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone

import pytest
from e2b import AuthenticationException, Sandbox, SandboxException, SandboxQuery, SandboxState
from e2b.exceptions import NotFoundException, TimeoutException


def listed(**query):
    paginator = Sandbox.list(**query)
    found = []
    while paginator.has_next:
        found += paginator.next_items()
    return found


def test_a_new_sandbox_answers_and_describes_itself(make):
    sandbox = make(metadata={"purpose": "describe"}, timeout=100)
    assert sandbox.is_running()
    info = sandbox.get_info()
    assert info.sandbox_id == sandbox.sandbox_id
    assert info.name == "base"
    assert info.metadata["purpose"] == "describe"
    assert info.state == SandboxState.RUNNING
    assert timedelta(seconds=95) < info.end_at - info.started_at < timedelta(seconds=105)
    assert abs(info.started_at - datetime.now(timezone.utc)) < timedelta(seconds=30)
    assert info.cpu_count >= 1 and info.memory_mb >= 128


def test_kill_answers_true_once_and_the_sandbox_is_gone(make):
    sandbox = make()
    assert sandbox.kill() is True
    assert sandbox.kill() is False
    assert sandbox.is_running() is False
    with pytest.raises(NotFoundException):
        sandbox.get_info()


def test_a_command_in_a_killed_sandbox_fails_with_a_clear_error(make):
    sandbox = make()
    sandbox.kill()
    with pytest.raises(TimeoutException, match="not found|killed|timeout"):
        sandbox.commands.run("echo gone")


def test_killing_a_sandbox_breaks_a_running_command(make):
    sandbox = make()
    handle = sandbox.commands.run("sleep 60", background=True)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(handle.wait)
        time.sleep(0.5)
        sandbox.kill()
        with pytest.raises(Exception) as caught:
            waiting.result(timeout=30)
    assert "without an end event" not in str(caught.value)


def test_connect_gives_the_same_sandbox_and_never_shortens_its_time(make):
    sandbox = make(timeout=200)
    sandbox.files.write("/home/user/kept", "kept")
    before = sandbox.get_info().end_at
    other = Sandbox.connect(sandbox.sandbox_id, timeout=10)
    assert other.sandbox_id == sandbox.sandbox_id
    assert other.files.read("/home/user/kept") == "kept"
    assert other.get_info().end_at == before
    Sandbox.connect(sandbox.sandbox_id, timeout=400)
    assert other.get_info().end_at > before + timedelta(seconds=150)


def test_connect_to_an_unknown_sandbox_is_not_found():
    with pytest.raises(NotFoundException):
        Sandbox.connect("iaaaaaaaaaaaaaaaaaaaa")


def test_set_timeout_can_shorten_and_the_sandbox_ends_on_time(make):
    sandbox = make(timeout=300)
    sandbox.set_timeout(5)
    assert sandbox.is_running()
    time.sleep(6.5)
    assert sandbox.is_running() is False


def test_set_timeout_can_lengthen(make):
    sandbox = make(timeout=30)
    sandbox.set_timeout(500)
    info = sandbox.get_info()
    assert info.end_at - datetime.now(timezone.utc) > timedelta(seconds=450)


def test_lists_are_filtered_by_metadata(make):
    one = make(metadata={"group": "a b&c=d/ü%"})
    two = make(metadata={"group": "other"})
    found = {info.sandbox_id for info in listed(query=SandboxQuery(metadata={"group": "a b&c=d/ü%"}))}
    assert one.sandbox_id in found and two.sandbox_id not in found


def test_lists_are_paged_without_gaps_and_newest_first(make, run_label):
    made = [make().sandbox_id for _ in range(3)]
    paginator = Sandbox.list(query=SandboxQuery(metadata=run_label), limit=2)
    pages = []
    while paginator.has_next:
        pages.append([info.sandbox_id for info in paginator.next_items()])
    flat = [item for page in pages for item in page]
    assert all(len(page) <= 2 for page in pages)
    assert len(flat) == len(set(flat))
    assert [item for item in flat if item in made] == made[::-1]


def test_a_running_state_filter_finds_it(make, run_label):
    sandbox = make()
    found = listed(query=SandboxQuery(metadata=run_label, state=[SandboxState.RUNNING]))
    assert sandbox.sandbox_id in {info.sandbox_id for info in found}
    paused = listed(query=SandboxQuery(metadata=run_label, state=[SandboxState.PAUSED]))
    assert sandbox.sandbox_id not in {info.sandbox_id for info in paused}


def test_environment_given_at_create_reaches_every_command(make):
    sandbox = make(envs={"FROM_CREATE": "yes it does"})
    assert sandbox.commands.run("echo $FROM_CREATE").stdout == "yes it does\n"
    assert sandbox.commands.run("echo $FROM_CREATE", envs={"FROM_CREATE": "overridden"}).stdout == "overridden\n"


def test_siblings_have_identities_of_their_own(make):
    one, two = make(), make()
    question = "cat /etc/machine-id; hostname; head -c 16 /dev/urandom | od -An -tx1; echo $E2B_SANDBOX_ID"
    first, second = (s.commands.run(question).stdout.splitlines() for s in (one, two))
    assert all(a != b for a, b in zip(first, second, strict=True)), (first, second)
    assert first[-1] == one.sandbox_id


def test_the_guest_clock_is_right(make):
    sandbox = make()
    guest = float(sandbox.commands.run("date +%s.%N").stdout)
    assert abs(guest - time.time()) < 2


def test_a_wrong_key_is_an_authentication_error():
    with pytest.raises(AuthenticationException):
        Sandbox.create(api_key="e2b_" + "0" * 40)


def test_an_unknown_template_is_refused_by_name():
    with pytest.raises(SandboxException, match="no-such-template"):
        Sandbox.create("no-such-template")


# Not 0: the SDK of the generation before takes it for "not given".
@pytest.mark.parametrize("timeout", [-1, 10**9])
def test_a_timeout_out_of_range_is_refused(timeout):
    with pytest.raises(SandboxException, match="(?i)timeout"):
        Sandbox.create(timeout=timeout)


def test_twenty_sandboxes_at_once(make):
    with ThreadPoolExecutor(20) as pool:
        sandboxes = list(pool.map(lambda _: make(timeout=300), range(20)))
    assert len({s.sandbox_id for s in sandboxes}) == 20
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda s: s.commands.run("echo $E2B_SANDBOX_ID").stdout.strip(), sandboxes))
    assert answers == [s.sandbox_id for s in sandboxes]
