"""commands: exit codes, streams, users, stdin, background, kill, list, connect."""

import time

import pytest
from e2b import CommandExitException
from e2b.exceptions import AuthenticationException, InvalidArgumentException, NotFoundException, TimeoutException


def test_output_and_exit_code(sandbox):
    result = sandbox.commands.run("echo out; echo err >&2")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "out\n", "err\n")


def test_a_failing_command_raises_with_its_exit_code_and_output(sandbox):
    with pytest.raises(CommandExitException) as caught:
        sandbox.commands.run("echo before; exit 7")
    assert caught.value.exit_code == 7
    assert caught.value.stdout == "before\n"
    assert caught.value.error == "exit status 7"


def test_death_by_signal_is_told(sandbox):
    with pytest.raises(CommandExitException) as caught:
        sandbox.commands.run("kill -9 $$")
    assert caught.value.exit_code == -1
    assert caught.value.error == "signal: killed"


def test_callbacks_see_the_output_as_it_comes(sandbox):
    seen = []
    result = sandbox.commands.run(
        "for i in 1 2 3; do echo $i; sleep 0.3; done", on_stdout=lambda text: seen.append((time.monotonic(), text))
    )
    assert "".join(text for _, text in seen) == result.stdout == "1\n2\n3\n"
    assert seen[-1][0] - seen[0][0] > 0.4


def test_multi_byte_text_survives_chunk_borders(sandbox):
    result = sandbox.commands.run("python3 -c \"print('ä€😀' * 30000, end='')\"")
    assert result.stdout == "ä€😀" * 30000


def test_ten_megabytes_of_output(sandbox):
    result = sandbox.commands.run("head -c 10000000 /dev/zero | tr '\\0' x", timeout=80)
    assert len(result.stdout) == 10_000_000


def test_default_user_and_directory(sandbox):
    assert sandbox.commands.run("whoami; pwd; echo $HOME").stdout == "user\n/home/user\n/home/user\n"


def test_root_can_be_asked_for_and_sudo_needs_no_password(sandbox):
    assert sandbox.commands.run("whoami", user="root").stdout == "root\n"
    assert sandbox.commands.run("sudo whoami").stdout == "root\n"


def test_an_unknown_user_is_an_authentication_error(sandbox):
    with pytest.raises(AuthenticationException, match="nobody-of-that-name"):
        sandbox.commands.run("true", user="nobody-of-that-name")


def test_working_directory(sandbox):
    assert sandbox.commands.run("pwd", cwd="/tmp").stdout == "/tmp\n"
    with pytest.raises(InvalidArgumentException, match="/no/such/dir"):
        sandbox.commands.run("pwd", cwd="/no/such/dir")


def test_environment(sandbox):
    assert sandbox.commands.run("echo \"$X|$Y\"", envs={"X": "a b", "Y": "ü'\""}).stdout == "a b|ü'\"\n"


def test_stdin_is_closed_unless_asked_for(sandbox):
    assert sandbox.commands.run("cat").stdout == ""


def test_stdin_can_be_sent_and_closed(sandbox):
    handle = sandbox.commands.run("cat", stdin=True, background=True)
    sandbox.commands.send_stdin(handle.pid, "one\n")
    sandbox.commands.send_stdin(handle.pid, "two\n")
    sandbox.commands.close_stdin(handle.pid)
    assert handle.wait().stdout == "one\ntwo\n"


def test_a_background_command_is_listed_and_can_be_killed(sandbox):
    handle = sandbox.commands.run("sleep 300", background=True)
    listed = {process.pid: process for process in sandbox.commands.list()}
    assert handle.pid in listed
    assert listed[handle.pid].args[-1] == "sleep 300"
    assert sandbox.commands.kill(handle.pid) is True
    with pytest.raises(CommandExitException):
        handle.wait()
    assert handle.pid not in {process.pid for process in sandbox.commands.list()}
    assert sandbox.commands.kill(handle.pid) is False


def test_connecting_to_a_running_command_gets_its_end(sandbox):
    handle = sandbox.commands.run("sleep 1.5; echo late", background=True)
    handle.disconnect()
    result = sandbox.commands.connect(handle.pid).wait()
    assert result.exit_code == 0 and result.stdout == "late\n"


def test_connecting_to_an_unknown_process_is_not_found(sandbox):
    with pytest.raises(NotFoundException):
        sandbox.commands.connect(999999)


def test_a_time_limit_ends_the_wait_and_not_the_process(sandbox):
    handle = sandbox.commands.run("sleep 4; echo done > /tmp/survived", background=True, timeout=1)
    with pytest.raises(TimeoutException):
        handle.wait()
    assert sandbox.files.exists("/tmp/survived") is False
    time.sleep(4)
    assert sandbox.files.read("/tmp/survived") == "done\n"


def test_a_command_that_closes_its_output_early_still_reports_its_exit(sandbox):
    with pytest.raises(CommandExitException) as caught:
        sandbox.commands.run("echo said; exec >&- 2>&-; sleep 1; exit 3")
    assert caught.value.exit_code == 3 and caught.value.stdout == "said\n"


def test_a_child_that_keeps_the_output_open_does_not_hold_the_command(sandbox):
    start = time.monotonic()
    result = sandbox.commands.run("sleep 50 & echo started")
    assert result.stdout == "started\n"
    assert time.monotonic() - start < 20


def test_tools_that_agents_expect_are_there(sandbox):
    script = "for t in bash sudo python3 python pip git curl node; do command -v $t >/dev/null || echo missing $t; done"
    assert sandbox.commands.run(script).stdout == ""
    assert sandbox.commands.run("python -c 'print(6*7)'").stdout == "42\n"
    assert sandbox.commands.run("node -e 'console.log(6*7)'").stdout == "42\n"


def test_no_process_stays_as_a_zombie(sandbox):
    for _ in range(5):
        sandbox.commands.run("(sleep 0.1 &) ; true")
    time.sleep(1)
    zombies = sandbox.commands.run("grep -l '^State:.Z' /proc/[0-9]*/status 2>/dev/null | wc -l")
    assert zombies.stdout.strip() == "0"
