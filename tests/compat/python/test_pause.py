"""Pause and resume: pause, connect, life cycle by timeout and by traffic, lists, kill of a paused one."""

import time
from importlib.metadata import version

import pytest
from e2b import Sandbox, SandboxException, SandboxQuery, SandboxState
from e2b.exceptions import NotFoundException

# The generation before cannot ask for a boot of a sandbox whose memory was kept.
HAS_ON_RESUME = tuple(int(part) for part in version("e2b").split(".")[:2]) >= (2, 60)


def boot_id(sandbox):
    return sandbox.commands.run("cat /proc/sys/kernel/random/boot_id").stdout.strip()


def listed(state, run_label):
    paginator = Sandbox.list(query=SandboxQuery(metadata=run_label, state=[state]))
    found = set()
    while paginator.has_next:
        found |= {info.sandbox_id for info in paginator.next_items()}
    return found


def wait_until_paused(sandbox):
    end = time.monotonic() + 60
    while sandbox.get_info().state != SandboxState.PAUSED:
        assert time.monotonic() < end, "it is not paused"
        time.sleep(0.2)


def test_a_paused_sandbox_goes_on_where_it_was_when_it_is_connected_to(make, run_label):
    sandbox = make(metadata={"purpose": "pause"})
    before = boot_id(sandbox)
    # Renamed when it is written: a file that is just being written is empty.
    ticking = "while true; do date +%s.%N > /tmp/next; mv /tmp/next /tmp/now; sleep 0.1; done"
    handle = sandbox.commands.run(ticking, background=True)
    sandbox.files.write("kept", "kept")
    assert sandbox.pause() is True
    assert sandbox.pause() is False
    assert sandbox.is_running() is False
    with pytest.raises(SandboxException, match="paused"):
        sandbox.files.read("kept")
    with pytest.raises(SandboxException):
        sandbox.commands.run("true")
    info = sandbox.get_info()
    assert (info.state, info.metadata["purpose"]) == (SandboxState.PAUSED, "pause")
    assert sandbox.sandbox_id in listed(SandboxState.PAUSED, run_label)
    assert sandbox.sandbox_id not in listed(SandboxState.RUNNING, run_label)

    same = Sandbox.connect(sandbox.sandbox_id, timeout=200)
    assert same.sandbox_id == sandbox.sandbox_id
    assert same.files.read("kept") == "kept"
    assert boot_id(same) == before
    # The handle from before the pause, with its token and its kept connections.
    assert sandbox.is_running()
    assert sandbox.commands.run("echo first").stdout == "first\n"
    assert handle.pid in {process.pid for process in sandbox.commands.list()}
    time.sleep(0.5)
    guest = float(sandbox.files.read("/tmp/now"))
    assert abs(guest - time.time()) < 3
    assert sandbox.sandbox_id in listed(SandboxState.RUNNING, run_label)
    assert sandbox.commands.kill(handle.pid) is True


def test_files_of_every_round_are_there_after_several_pauses(make):
    sandbox = make()
    for number in range(4):
        sandbox.files.write(f"round-{number}", f"content {number}")
        # The older name, which both generations have.
        assert sandbox.beta_pause() is True
        assert sandbox.connect(timeout=120).sandbox_id == sandbox.sandbox_id
        for earlier in range(number + 1):
            assert sandbox.files.read(f"round-{earlier}") == f"content {earlier}"


def test_a_running_command_breaks_at_a_pause_and_can_be_connected_to_afterwards(make):
    sandbox = make()
    script = "until [ -e /tmp/go ]; do sleep 0.2; done; echo late"
    handle = sandbox.commands.run(script, background=True)
    sandbox.pause()
    with pytest.raises(Exception) as caught:
        handle.wait()
    assert "without an end event" not in str(caught.value)
    sandbox.connect(timeout=120)
    again = sandbox.commands.connect(handle.pid)
    sandbox.files.write("/tmp/go", "")
    assert again.wait().stdout == "late\n"


def test_without_its_memory_a_sandbox_boots_with_its_files(make):
    sandbox = make()
    before = boot_id(sandbox)
    sandbox.files.write("kept", "kept")
    assert sandbox.pause(keep_memory=False) is True
    sandbox.connect(timeout=120)
    assert boot_id(sandbox) != before
    assert sandbox.files.read("kept") == "kept"
    assert sandbox.commands.run("echo $E2B_SANDBOX_ID").stdout.strip() == sandbox.sandbox_id


@pytest.mark.skipif(not HAS_ON_RESUME, reason="this SDK has no on_resume")
def test_a_boot_can_be_asked_for_although_memory_was_kept(make):
    sandbox = make()
    before = boot_id(sandbox)
    sandbox.files.write("kept", "kept")
    sandbox.pause()
    sandbox.connect(timeout=120, on_resume="reboot")
    assert boot_id(sandbox) != before
    assert sandbox.files.read("kept") == "kept"


def test_the_end_of_its_time_pauses_it_and_traffic_wakes_it(make):
    sandbox = make(lifecycle={"on_timeout": "pause", "auto_resume": True})
    info = sandbox.get_info()
    assert info.lifecycle["on_timeout"] == "pause" and info.lifecycle["auto_resume"] is True
    before = boot_id(sandbox)
    sandbox.commands.run("echo unflushed > /home/user/last")
    sandbox.set_timeout(1)
    wait_until_paused(sandbox)
    assert sandbox.files.read("/home/user/last") == "unflushed\n"
    assert boot_id(sandbox) == before
    assert sandbox.get_info().state == SandboxState.RUNNING


def test_the_end_of_its_time_can_keep_the_disk_alone(make):
    sandbox = make(lifecycle={"on_timeout": {"action": "pause", "keep_memory": False}})
    before = boot_id(sandbox)
    sandbox.files.write("kept", "kept")
    sandbox.set_timeout(1)
    wait_until_paused(sandbox)
    assert sandbox.is_running() is False
    sandbox.connect(timeout=120)
    assert boot_id(sandbox) != before
    assert sandbox.files.read("kept") == "kept"


def test_a_paused_sandbox_can_be_killed(make, run_label):
    sandbox = make()
    sandbox.pause()
    assert sandbox.kill() is True
    assert sandbox.kill() is False
    assert sandbox.sandbox_id not in listed(SandboxState.PAUSED, run_label)
    with pytest.raises(NotFoundException):
        sandbox.pause()
    with pytest.raises(NotFoundException):
        Sandbox.connect(sandbox.sandbox_id)


def test_the_time_of_a_paused_sandbox_cannot_be_set(make):
    sandbox = make()
    sandbox.pause()
    with pytest.raises(SandboxException, match="(?i)paused"):
        sandbox.set_timeout(100)
