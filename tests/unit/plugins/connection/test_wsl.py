"""The connection, through a wsl.exe whose distributions are this machine: real processes, no answer made up."""

from __future__ import annotations

import base64
import os
import random
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.errors import AnsibleConnectionFailure, AnsibleError, AnsibleFileNotFound
from ansible.playbook.play_context import PlayContext
from ansible_collections.gpufarm.core.plugins.connection import wsl
from ansible_collections.gpufarm.core.plugins.module_utils import wsl as module_utils
from ansible_collections.gpufarm.core.plugins.plugin_utils import interop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.simulator.windows.host import PROGRAM_FILES, SYSTEM32, Distribution, Machine, Windows

pytestmark = pytest.mark.controller
ROOT = Path(__file__).resolve().parents[4]
ME = {"me": os.geteuid()}
OPTIONS = yaml.safe_load(wsl.DOCUMENTATION)["options"]
LOST_DISK = "Wsl/Service/CreateInstance/MountVhd/HCS/ERROR_FILE_NOT_FOUND"
# Each is an argument that a command has to get as it is.
HOSTILE = {
    "double quotes": 'say "hi"',
    "single quotes": "it's",
    "both": """ "'"'" """,
    "backslashes": "a\\b\\\\c\\",
    "backslash and quote": '\\" \\\\" \\\\\\"',
    "percent": "%PATH% %% 100%",
    "caret and bang": "^ ^^ !PATH! !",
    "dollar": "$HOME ${HOME} $(id) `id` $$",
    "operators": "a & b && c | d > e < f ; g",
    "newlines": "one\ntwo\r\nthree\n",
    "tab and blanks": "\t  a   b\t",
    "glob": "* ? [a-z] ~ {a,b}",
    "utf-8": "Grüße, 世界, 🖥",
    "no utf-8": os.fsdecode(b"\xff\xfe\x80"),
    "leading dash": "-n",
    "leading dashes": "--exec",
    "option of wsl.exe": "-d other",
    "empty": "",
    "blank": " ",
    "hash": "# no comment",
    "control characters": "\x01\x07\x1b[31m\x7f",
    "template": "{{ 7 * 7 }} {% raw %}",
    "long": "x" * 20_000,
}


def connect(windows: Windows, options: dict[str, Any] | None = None) -> wsl.Connection:
    connection = wsl.Connection(PlayContext(), None)
    connection._options = {
        **{name: option.get("default") for name, option in OPTIONS.items()},
        "distribution": "Debian",
        "wsl_exe": str(windows.mounted(SYSTEM32)),
        **(options or {}),
    }
    return connection


@pytest.fixture
def windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Windows:
    home = tmp_path / "home of me"
    home.mkdir()
    monkeypatch.setenv("GPUFARM_WSL_HOME", str(home))
    monkeypatch.delenv("WSL_UTF8", raising=False)
    debian = Distribution("Debian", default=True, users=ME)
    return Windows.create(tmp_path / "windows", Machine("PC1", [debian, Distribution("Stopped", "Stopped", users=ME)]))


def quoted(text: str) -> str:
    return "'" + text.replace("'", "'\"'\"'") + "'"


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_what_a_command_holds_arrives_as_it_is(windows: Windows, text: str) -> None:
    code, stdout, stderr = connect(windows).exec_command(f"printf %s {quoted(text)}")
    assert (code, stdout, stderr) == (0, os.fsencode(text), b"")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=60))
def test_any_text_arrives_as_it_is(windows: Windows, text: str) -> None:
    assert connect(windows).exec_command(f"printf %s {quoted(text)}")[1] == text.encode()


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_nothing_hostile_meets_windows(windows: Windows, text: str) -> None:
    connect(windows).exec_command(f": {quoted(text)}")
    ((_program, line),) = windows.calls()
    assert line.startswith('-d Debian --exec /bin/sh -c "')
    script = line.split('"')[1]
    assert line.endswith(f'"{script}"')
    assert not set(script) & set("\"\\%^!'`\n\r\t")


@pytest.mark.parametrize("code", [0, 1, 2, 126, 127, 128, 137, 254, 255])
def test_return_codes_are_those_of_the_command(windows: Windows, code: int) -> None:
    assert connect(windows).exec_command(f"echo out; echo err >&2; exit {code}") == (code, b"out\n", b"err\n")


def test_a_command_costs_one_start_of_wsl(windows: Windows) -> None:
    connection = connect(windows)
    connection.exec_command("true")
    connection.exec_command("cat", in_data=b"x")
    assert len(windows.calls()) == 2


def test_a_file_costs_one_start_of_wsl(windows: Windows, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    connection = connect(windows)
    connection.put_file(str(tmp_path / "file"), str(tmp_path / "there"))
    connection.fetch_file(str(tmp_path / "there"), str(tmp_path / "back"))
    assert len(windows.calls()) == 2


def test_commands_run_at_home_under_the_shell_that_was_asked_for(windows: Windows, tmp_path: Path) -> None:
    connection = connect(windows)
    assert connection.exec_command("pwd")[1].decode().strip() == str(tmp_path / "home of me")
    connection._play_context.executable = "/bin/bash"
    assert connection.exec_command("echo $BASH")[1] == b"/bin/bash\n"


def test_a_command_is_no_pattern_of_file_names(windows: Windows, tmp_path: Path) -> None:
    (tmp_path / "home of me" / "echo one").touch()
    assert connect(windows).exec_command("echo *")[1] == b"echo one\n"


def test_standard_input_belongs_to_the_command(windows: Windows) -> None:
    data = random.Random(1).randbytes(300_000)  # noqa: S311 # no secret
    assert connect(windows).exec_command("cat", in_data=data) == (0, data, b"")
    assert connect(windows).exec_command("cat")[1] == b""


def test_a_module_comes_through_standard_input(windows: Windows) -> None:
    connection = connect(windows)
    assert connection.has_pipelining
    code, stdout, _ = connection.exec_command(f"{sys.executable} -", in_data=b"import sys; print(len(sys.argv))")
    assert (code, stdout) == (0, b"1\n")


@pytest.mark.parametrize("size", [0, 1, 4096, 65_537, 20_000_000])
@pytest.mark.parametrize("name", ["plain", 'it\'s "100%" -n', "-n", "Grüße 世界"])
def test_files_go_there_and_back(windows: Windows, tmp_path: Path, size: int, name: str) -> None:
    if size > 4096 and name != "plain":
        name = "plain"
    data = bytes(range(256)) * 10 + b"\r\n\x1a\0\xff\xfe" + random.Random(size).randbytes(size)  # noqa: S311
    data = data[:size] if size < 2000 else data
    (tmp_path / "file").write_bytes(data)
    connection = connect(windows)
    connection.put_file(str(tmp_path / "file"), name)
    assert (tmp_path / "home of me" / name).read_bytes() == data
    connection.fetch_file(name, str(tmp_path / "back"))
    assert (tmp_path / "back").read_bytes() == data


REFUSED = (
    r"( or directory)?\. Expected: a path that the user of this connection may use\. "
    r"Next step: correct it, or what that user may do there\.$"
)


def test_a_file_that_is_not_there(windows: Windows, tmp_path: Path) -> None:
    connection = connect(windows)
    with pytest.raises(AnsibleFileNotFound) as failure:
        connection.put_file(str(tmp_path / "missing"), "there")
    # Ansible adds words of its own.
    assert str(failure.value).startswith(
        f"Debian: {tmp_path}/missing is not there to be copied. Expected: a file where Ansible runs. Next step: "
        "correct its path."
    )
    with pytest.raises(AnsibleError, match=f"^Debian: missing cannot be read: .*No such file{REFUSED}"):
        connection.fetch_file("missing", str(tmp_path / "back"))
    assert not (tmp_path / "back").exists()


def test_a_place_where_nobody_may_write(windows: Windows, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 1_000_000)
    with pytest.raises(AnsibleError, match=f"^Debian: /proc/nowhere cannot be written: .*{REFUSED}"):
        connect(windows).put_file(str(tmp_path / "file"), "/proc/nowhere")


def test_a_file_that_arrives_short_is_an_error(windows: Windows, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 1_000_000)
    with windows.changed() as machine:
        machine.distributions[0].cut_after = 1000
    connection = connect(windows)
    with pytest.raises(AnsibleError) as fetched:
        connection.fetch_file(str(tmp_path / "file"), str(tmp_path / "back"))
    assert str(fetched.value) == (
        f"Debian: of the 1000000 bytes of {tmp_path}/file, 1000 arrived. "
        "Next step: look whether the distribution was terminated meanwhile, and run it again."
    )
    assert not (tmp_path / "back").exists()
    with windows.changed() as machine:
        machine.distributions[0].cut_after = 0
    with pytest.raises(AnsibleError) as put:
        connection.put_file(str(tmp_path / "file"), "there")
    assert str(put.value) == (
        f"Debian: of the 1000000 bytes of {tmp_path}/file, 0 arrived in there. "
        "Next step: look whether the distribution was terminated meanwhile, and run it again."
    )


def test_a_user_is_the_one_that_was_asked_for(windows: Windows) -> None:
    connection = connect(windows, {"remote_user": "me"})
    assert connection.exec_command("echo $USER")[1] == b"me\n"
    assert windows.calls()[0][1].startswith("-d Debian -u me --exec /bin/sh -c ")


@pytest.mark.parametrize(
    "says",
    [(language, utf8, double) for language in ("en", "de", "zh") for utf8 in ("1", "") for double in (False, True)],
    ids=str,
)
@pytest.mark.parametrize(
    "refusal",
    [
        (
            {"distribution": "Gone"},
            None,
            "Gone: wsl.exe has no such distribution. Expected: one of this Windows user's, as `wsl.exe --list` prints "
            "them. Next step: set wsl_distribution.",
        ),
        (
            {"remote_user": "nobody"},
            None,
            "Debian: the distribution has no user 'nobody'. Next step: set ansible_user.",
        ),
        (
            {},
            LOST_DISK,
            "Debian: the distribution does not start. Next step: `wsl.exe -d Debian` in a terminal of Windows.",
        ),
    ],
    ids=["distribution", "user", "disk"],
)
def test_what_wsl_itself_refuses_is_said_with_the_next_step(
    windows: Windows,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    says: tuple[str, str, bool],
    refusal: tuple[dict[str, Any], str | None, str],
) -> None:
    (language, utf8, double_cr), (options, broken, expected) = says, refusal
    monkeypatch.setenv("WSL_UTF8", utf8)
    monkeypatch.setenv("WSLENV", "WSL_UTF8")
    with windows.changed() as machine:
        machine.language, machine.double_cr = language, double_cr
        machine.distributions[0].broken = broken
    connection = connect(windows, options)
    (tmp_path / "file").write_bytes(b"x")
    attempts: list[Callable[[], object]] = [
        lambda: connection.exec_command("true"),
        lambda: connection.put_file(str(tmp_path / "file"), "there"),
        lambda: connection.fetch_file("there", str(tmp_path / "back")),
    ]
    for attempt in attempts:
        with pytest.raises(AnsibleConnectionFailure) as failure:
            attempt()
        assert str(failure.value).startswith(f"{expected} wsl.exe says: ")
        assert "Wsl/Service/" in str(failure.value)
        assert str(failure.value).isprintable()
    assert not (tmp_path / "back").exists()


def test_a_message_without_a_code_is_one_of_wsl_too(windows: Windows) -> None:
    with windows.changed() as machine:
        machine.distributions[0].broken = "no code"
    with pytest.raises(AnsibleConnectionFailure, match=r"Debian: the distribution does not start"):
        connect(windows).exec_command("true")


def test_255_with_output_is_the_commands_own(windows: Windows) -> None:
    assert connect(windows).exec_command("echo no; exit 255") == (255, b"no\n", b"")


def test_a_stopped_distribution_starts_with_its_first_command(windows: Windows) -> None:
    assert connect(windows, {"distribution": "Stopped"}).exec_command("true")[0] == 0
    assert windows.machine.distributions[1].state == "Running"
    assert len(windows.calls()) == 1


def test_a_distribution_that_was_terminated_starts_again(windows: Windows) -> None:
    program = str(windows.mounted(SYSTEM32))
    ended = subprocess.run([program, "--terminate", "Debian"], capture_output=True, check=True)
    assert module_utils.readable(ended.stdout) == "The operation completed successfully."
    assert windows.machine.distributions[0].state == "Stopped"
    assert connect(windows).exec_command("exit 3")[0] == 3
    assert windows.machine.distributions[0].state == "Running"
    failed = subprocess.run([program, "--terminate", "Fedora"], capture_output=True, check=False)
    assert (failed.returncode, module_utils.error_code(failed.stdout)) == (255, "Wsl/Service/WSL_E_DISTRO_NOT_FOUND")


@pytest.mark.parametrize("double_cr", [False, True])
def test_a_stopped_distribution_stays_stopped_on_request(windows: Windows, double_cr: bool) -> None:
    with windows.changed() as machine:
        machine.double_cr = double_cr
    with pytest.raises(AnsibleConnectionFailure) as failure:
        connect(windows, {"distribution": "Stopped", "start": False}).exec_command("true")
    assert str(failure.value) == (
        "Stopped: the distribution does not run. Expected: it runs, for ansible_wsl_start is false. "
        "Next step: `wsl.exe -d Stopped`, or ansible_wsl_start: true."
    )
    assert windows.machine.distributions[1].state == "Stopped"
    connection = connect(windows, {"start": False})
    assert connection.exec_command("exit 3")[0] == 3
    assert connection.exec_command("exit 4")[0] == 4
    assert [line.split()[0] for _program, line in windows.calls()] == ["--list", "--list", "-d", "-d"]


def test_windows_that_does_not_answer_is_told(windows: Windows, monkeypatch: pytest.MonkeyPatch) -> None:
    windows.mounted(SYSTEM32).write_text("#!/bin/sh\nexec sleep 600\n", encoding="utf-8")
    monkeypatch.setattr(interop, "ANSWER_S", 0.2)
    told = r"Debian: .*wsl.exe did not answer within 0.2 s. Expected: an answer in seconds. Next step: run it by hand"
    with pytest.raises(AnsibleConnectionFailure, match=told):
        connect(windows, {"start": False}).exec_command("true")


def test_interop_that_is_switched_off(windows: Windows) -> None:
    # What Linux finds there then: a Windows program that nothing is registered for.
    program = windows.mounted(SYSTEM32)
    program.write_bytes(b"MZ\x90\0" + bytes(4096))
    with pytest.raises(AnsibleConnectionFailure) as failure:
        connect(windows).exec_command("true")
    assert str(failure.value) == (
        f"Debian: this distribution cannot run {program}: interop with Windows is switched off. Expected: `[interop] "
        "enabled` is not false in /etc/wsl.conf, and /proc/sys/fs/binfmt_misc has WSLInterop. Next step: correct it, "
        "then `wsl.exe --terminate` this distribution from Windows."
    )


def test_what_is_left_behind_holds_nobody_up(windows: Windows) -> None:
    with windows.changed() as machine:
        machine.waits_for_background = True
    command = "echo out; echo err >&2; sleep 600 & echo $!; exit 3"
    code, stdout, stderr = connect(windows).exec_command(command, in_data=b"x" * 300_000)
    first, pid = stdout.decode().split()
    try:
        assert (code, first, stderr) == (3, "out", b"err\n")
        # It lives on, as after a command of SSH.
        assert Path(f"/proc/{pid}").exists()
    finally:
        os.kill(int(pid), 9)


def test_privilege_escalation_with_something_left_behind(windows: Windows) -> None:
    with windows.changed() as machine:
        machine.waits_for_background = True
    connection = connect(windows)
    connection.set_become_plugin(Become('it is "s3cret" %PATH%'))
    command = connection.become.command("sleep 600 & echo $!; exit 7")
    code, stdout, _stderr = connection.exec_command(command, sudoable=True)
    os.kill(int(stdout), 9)
    assert code == 7


SAYS = " (<3>WSL (302) ERROR: UtilConnectUnix:533: connect failed 111)"


@pytest.mark.parametrize("session", ["/run/WSL/9_interop", None])
@pytest.mark.parametrize(("state", "said"), [("lost", ""), ("stale", SAYS)])
def test_an_interop_without_a_session_is_no_command_that_failed(
    windows: Windows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, state: str, said: str, session: str | None
) -> None:
    monkeypatch.delenv("WSL_INTEROP", raising=False)
    if session:
        monkeypatch.setenv("WSL_INTEROP", session)
    with windows.changed() as machine:
        machine.interop = state
    found = repr(session) if session else "not set"
    expected = re.escape(
        f"Debian: nothing came of {windows.mounted(SYSTEM32)}{said}; WSL_INTEROP is {found}. Expected: it names the "
        "socket of a session that lives, in /run/WSL. Next step: run Ansible in a new terminal of this distribution, "
        "or set WSL_INTEROP."
    )
    with pytest.raises(AnsibleConnectionFailure, match=expected):
        connect(windows).exec_command("true")
    with pytest.raises(AnsibleConnectionFailure, match=expected):
        connect(windows, {"start": False}).exec_command("true")
    (tmp_path / "file").write_bytes(b"x")
    if state == "stale":
        with pytest.raises(AnsibleConnectionFailure, match=expected):
            connect(windows).put_file(str(tmp_path / "file"), "there")
        with pytest.raises(AnsibleConnectionFailure, match=expected):
            connect(windows).fetch_file("there", str(tmp_path / "back"))


def test_a_distribution_without_a_shell_is_said(windows: Windows) -> None:
    with windows.changed() as machine:
        machine.distributions[0].without = ["/bin/sh"]
    with pytest.raises(AnsibleConnectionFailure) as failure:
        connect(windows).exec_command("true")
    assert str(failure.value) == (
        "Debian: the distribution cannot start /bin/sh (<3>WSL (9) ERROR: execvpe(/bin/sh) failed: No such file or "
        "directory). Expected: it has one. Next step: `wsl.exe -d Debian` in a terminal of Windows."
    )


def test_a_command_that_fails_silently_is_the_commands_own(windows: Windows) -> None:
    assert connect(windows).exec_command("exit 1") == (1, b"", b"")
    said = b"<3>WSL (1) ERROR: of mine\n"
    assert connect(windows).exec_command(f"printf '{said.decode()}' >&2; exit 1") == (1, b"", said)


def test_what_a_command_says_of_wsl_is_the_commands_own(windows: Windows) -> None:
    said = "Error code: Wsl/Service/WSL_E_DISTRO_NOT_FOUND"
    assert connect(windows).exec_command(f"echo {said}; exit 255") == (255, f"{said}\n".encode(), b"")


@pytest.mark.parametrize("after", [0, 3])
def test_a_distribution_that_ends_meanwhile_is_no_command_that_failed(windows: Windows, after: int) -> None:
    with windows.changed() as machine:
        machine.distributions[0].cut_after = after
    with pytest.raises(AnsibleConnectionFailure) as failure:
        connect(windows).exec_command("echo out; sleep 600")
    assert str(failure.value) == (
        "Debian: wsl.exe ended with 1 too early. Expected: the distribution runs until a command has ended. "
        "Next step: look whether it was terminated meanwhile, and run it again."
    )


@pytest.mark.parametrize("start", [True, False])
def test_a_name_may_be_written_in_any_case(windows: Windows, start: bool) -> None:
    assert connect(windows, {"distribution": "DEBIAN", "start": start}).exec_command("exit 3")[0] == 3


def test_a_wsl_exe_that_nobody_may_run(windows: Windows) -> None:
    program = windows.mounted(SYSTEM32)
    program.chmod(stat.S_IRUSR)
    with pytest.raises(AnsibleConnectionFailure) as failure:
        connect(windows).exec_command("true")
    assert str(failure.value) == (
        f"Debian: {program} cannot be started: [Errno 13] Permission denied: '{program}'. Expected: it starts as in a "
        "terminal of this distribution. Next step: run it there, and mend what it says."
    )


def test_wsl_exe_is_the_first_of_path_then_where_windows_has_it(
    windows: Windows, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(windows.mounted(PROGRAM_FILES).parent), prepend=os.pathsep)
    connect(windows, {"wsl_exe": None}).exec_command("true")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(module_utils, "PLACES", (str(tmp_path / "nowhere"), str(windows.mounted(SYSTEM32))))
    connect(windows, {"wsl_exe": None}).exec_command("true")
    assert [program for program, _line in windows.calls()] == [PROGRAM_FILES, SYSTEM32]
    monkeypatch.setattr(module_utils, "PLACES", ())
    for named, tried in ((None, "neither on PATH nor below /mnt/c"), ("/no/wsl.exe", "/no/wsl.exe")):
        with pytest.raises(AnsibleConnectionFailure) as failure:
            connect(windows, {"wsl_exe": named}).exec_command("true")
        assert str(failure.value) == (
            f"Debian: wsl.exe was not found ({tried}). Expected: Ansible runs in a WSL distribution of that Windows "
            "machine, with drive C mounted. Next step: set ansible_wsl_exe."
        )


@pytest.mark.parametrize("name", ["a b", 'a"b', "", "ä", "a;b", "{{ 7 * 7 }}"])
def test_a_name_that_no_distribution_has_is_refused_before_windows_sees_it(windows: Windows, name: str) -> None:
    with pytest.raises(AnsibleConnectionFailure) as failure:
        connect(windows, {"distribution": name}).exec_command("true")
    assert str(failure.value) == (
        f"{name!r} cannot be the name of a WSL distribution. Expected: letters, digits, dots, underscores and dashes. "
        "Next step: set wsl_distribution to a name that `wsl.exe --list` prints."
    )
    assert not windows.calls()


@pytest.mark.parametrize("user", ["a b", 'a"b', "-d", "a\nb"])
def test_a_user_that_wsl_cannot_be_given_is_refused(windows: Windows, user: str) -> None:
    with pytest.raises(AnsibleConnectionFailure) as failure:
        connect(windows, {"remote_user": user}).exec_command("true")
    told = (
        f"Debian: {user!r} cannot be given to wsl.exe as a user. Expected: a name without blanks and quotes, and no "
        "dash before it. Next step: set ansible_user."
    )
    assert str(failure.value) == told
    assert not windows.calls()


def test_a_command_that_windows_cannot_take_is_refused(windows: Windows) -> None:
    with pytest.raises(
        AnsibleError, match=r"the command has 25002 characters, .* Expected: at most 32766. Next step: "
    ):
        connect(windows).exec_command(": " + "x" * 25_000)
    assert not windows.calls()


class Become:
    """sudo as Ansible builds it: a prompt on stderr, the success line on stdout."""

    prompt = "[sudo via ansible, key=abc] password:"
    success = "BECOME-SUCCESS-abc"
    name = "sudo"
    _id = "abc"

    def __init__(self, password: str | None) -> None:
        self.password = password

    def expect_prompt(self) -> bool:
        return True

    def get_option(self, _name: str) -> str | None:
        return self.password

    def check_success(self, output: bytes) -> bool:
        return self.success.encode() in output

    def check_password_prompt(self, output: bytes) -> bool:
        return self.prompt.encode() in output

    def strip_become_success(self, output: bytes) -> bytes:
        return output.split(self.success.encode() + b"\n", 1)[-1]

    def strip_become_prompt(self, output: bytes) -> bytes:
        return output.split(self.prompt.encode(), 1)[-1]

    def command(self, then: str) -> str:
        return (
            f"printf '%s' {quoted(self.prompt)} >&2; IFS= read -r given; "
            f'if [ "$given" = \'it is "s3cret" %PATH%\' ]; then echo {self.success}; {then}; '
            "else echo 'Sorry, try again.' >&2; exit 1; fi"
        )


def test_privilege_escalation_answers_the_prompt(windows: Windows) -> None:
    connection = connect(windows)
    connection.set_become_plugin(Become('it is "s3cret" %PATH%'))
    command = connection.become.command("echo before; cat; echo odd >&2; exit 7")
    assert connection.exec_command(command, in_data=b"in\0put", sudoable=True) == (7, b"before\nin\0put", b"odd\n")
    assert connection.exec_command("echo plain", sudoable=False) == (0, b"plain\n", b"")


@pytest.mark.parametrize("password", ["wrong", None])
def test_privilege_escalation_that_is_refused(windows: Windows, password: str | None) -> None:
    connection = connect(windows)
    connection.set_become_plugin(Become(password))
    with pytest.raises(
        AnsibleError,
        match=r"^Debian: privilege escalation did not succeed .*Sorry, try again.*Next step: set "
        r"ansible_become_password, or let the user become without one\.$",
    ):
        connection.exec_command(connection.become.command("true"), sudoable=True)


def test_privilege_escalation_that_never_answers(windows: Windows) -> None:
    connection = connect(windows, {"become_timeout": 1})
    connection.set_become_plugin(Become("x"))
    with pytest.raises(AnsibleError, match=r"privilege escalation did not succeed. Next step: "):
        connection.exec_command("sleep 600", sudoable=True)


def test_privilege_escalation_in_a_distribution_that_is_gone(windows: Windows) -> None:
    connection = connect(windows, {"distribution": "Gone"})
    connection.set_become_plugin(Become("x"))
    with pytest.raises(AnsibleConnectionFailure, match=r"Gone: wsl.exe has no such distribution"):
        connection.exec_command("true", sudoable=True)


PLAY = """
- hosts: all
  gather_facts: true
  tasks:
    - ansible.builtin.copy:
        src: {source}
        dest: {folder}/there
        mode: "0640"
    - ansible.builtin.fetch:
        src: {folder}/there
        dest: {folder}/back
        flat: true
    - ansible.builtin.command:
        argv: [printf, "%s", "{{{{ said }}}}"]
      register: printed
    - ansible.builtin.raw: exit 9
      register: ended
      failed_when: ended.rc != 9
    - ansible.builtin.assert:
        that:
          - printed.stdout == said
          - ansible_facts.user_id is truthy
    - ansible.builtin.command: id -un
      become: true
      become_method: ansible.builtin.su
      register: became
      failed_when: became.stdout != 'root'
      when: root
"""


@pytest.mark.parametrize("pipelining", [True, False])
def test_a_playbook_runs_through_it(windows: Windows, tmp_path: Path, pipelining: bool) -> None:
    said = 'Grüße "it\'s" 100% \\'
    (tmp_path / "source").write_bytes(bytes(range(256)) * 5000)
    play = PLAY.format(source=tmp_path / "source", folder=tmp_path)
    (tmp_path / "play.yml").write_text(play, encoding="utf-8")
    variables = {
        "ansible_connection": "gpufarm.core.wsl",
        "ansible_wsl_exe": str(windows.mounted(SYSTEM32)),
        "ansible_python_interpreter": sys.executable,
        "ansible_remote_tmp": str(tmp_path / "remote"),
        "ansible_pipelining": pipelining,
        "wsl_distribution": "Debian",
        "said": said,
        # Who would have to type a password otherwise.
        "root": os.geteuid() == 0,
    }
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": {"pc1": variables}}}), encoding="utf-8")
    result = subprocess.run(
        [Path(sys.executable).with_name("ansible-playbook"), "-i", tmp_path / "hosts.yml", tmp_path / "play.yml"],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections")},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert "unreachable=0    failed=0" in result.stdout
    assert (tmp_path / "back").read_bytes() == (tmp_path / "source").read_bytes()
    assert (tmp_path / "there").stat().st_mode & 0o777 == 0o640
    scripts = [line.split("$(echo ")[1].split("|")[0] for _program, line in windows.calls()]
    assert any(b"python" in base64.b64decode(script) for script in scripts)
