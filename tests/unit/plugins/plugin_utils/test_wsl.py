"""Windows machines that are asked: by interop, by a real sshd, by PowerShell Remoting."""

from __future__ import annotations

import base64
import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpufarm.core.plugins.module_utils import commands
from ansible_collections.gpufarm.core.plugins.module_utils import wsl as module_utils
from ansible_collections.gpufarm.core.plugins.plugin_utils import wsl

from tests.simulator.tools import BuildError
from tests.simulator.windows import PACKAGES, openssh, powershell
from tests.simulator.windows import wsl as simulated
from tests.simulator.windows.host import HANGS, PROGRAM_FILES, SYSTEM32, Distribution, Machine, Windows
from tests.simulator.windows.sshd import PATIENCE, Sshd, can_have_users

pytestmark = pytest.mark.controller
ME = {"me": os.geteuid()}
PC = wsl.Host("pc1")
QUESTION = wsl.Question(exclude=("docker-desktop*",), timeout_s=PATIENCE)
POWERSHELL = r"C:\Windows\System32\WindowsPowerShell\v1.0\powershell.exe"
NVIDIA_SMI = """\
#!/bin/sh
[ "$*" = "--query-gpu=name,uuid,driver_version --format=csv,noheader" ] || exit 2
echo "NVIDIA GeForce RTX 4090, GPU-11111111-2222-3333-4444-555555555555, 581.57"
"""


def machine() -> Machine:
    return Machine(
        "PC1",
        [
            Distribution("Debian", default=True, users=ME),
            Distribution("Old", "Stopped", 1, users=ME),
            Distribution("docker-desktop", users=ME),
        ],
    )


@pytest.fixture
def windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Windows:
    monkeypatch.delenv("WSL_UTF8", raising=False)
    return Windows.create(tmp_path / "windows", machine())


def local(windows: Windows, question: wsl.Question = QUESTION, program: str = SYSTEM32) -> dict[str, Any]:
    host = wsl.Host("here", connection="local", wsl_exe=str(windows.mounted(program)))
    return wsl.ask_local(host, question)


def by_script(
    windows: Windows,
    question: wsl.Question = QUESTION,
    host: wsl.Host = PC,
) -> dict[str, Any]:
    said = powershell.run(windows, wsl.script(host, question))
    return wsl.read(host, wsl.parse_answer(host, said), question)


WAYS = pytest.mark.parametrize("ask", [local, by_script])
A_ROW = (
    "Expected: a row with name, state and version for each distribution. "
    "Next step: run `wsl.exe --list --verbose` there and compare."
)


def states(answer: dict[str, Any]) -> dict[str, tuple[str, bool, bool]]:
    return {each["name"]: (each["state"], each["running"], "kernel" in each) for each in answer["distributions"]}


@WAYS
@pytest.mark.parametrize("language", ["en", "de", "zh"])
@pytest.mark.parametrize("double_cr", [False, True])
def test_a_machine_in_any_language(windows: Windows, ask: Any, language: str, double_cr: bool) -> None:
    with windows.changed() as changed:
        changed.language, changed.double_cr = language, double_cr
    assert states(ask(windows)) == {
        "Debian": ("Running", True, True),
        "Old": ("Stopped", False, False),
        "docker-desktop": ("Running", True, False),
    }


@WAYS
def test_a_machine_is_asked_for_two_lists_and_once_inside_what_runs(windows: Windows, ask: Any) -> None:
    ask(windows)
    first, *others = [line for _program, line in windows.calls()]
    assert first == "--list --running --quiet"
    assert sorted(others) == ["--list --verbose", "-d Debian --exec /bin/sh"]
    assert windows.machine.distributions[1].state == "Stopped"


@WAYS
def test_nothing_is_looked_into_on_request(windows: Windows, ask: Any) -> None:
    answer = ask(windows, dataclasses.replace(QUESTION, details="none"))
    assert states(answer)["Debian"] == ("Running", True, False)
    assert len(windows.calls()) == 2


@WAYS
def test_all_are_started_on_request_but_for_appliances(windows: Windows, ask: Any) -> None:
    with windows.changed() as changed:
        changed.distributions[2].state = "Stopped"
    answer = ask(windows, dataclasses.replace(QUESTION, details="all"))
    assert states(answer)["Old"] == ("Running", True, True)
    assert states(answer)["docker-desktop"] == ("Stopped", False, False)
    assert [each.state for each in windows.machine.distributions] == ["Running", "Running", "Stopped"]


@WAYS
def test_what_runs_without_an_answer_runs(windows: Windows, ask: Any) -> None:
    answer = ask(windows, dataclasses.replace(QUESTION, details="all"))
    assert states(answer)["docker-desktop"] == ("Running", True, False)


@WAYS
@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_machine_without_a_distribution(windows: Windows, ask: Any, language: str) -> None:
    with windows.changed() as changed:
        changed.language, changed.distributions = language, []
    assert ask(windows)["distributions"] == []


@WAYS
def test_a_distribution_that_does_not_start_is_no_end(windows: Windows, ask: Any) -> None:
    with windows.changed() as changed:
        changed.distributions[0].broken = "Wsl/Service/CreateInstance/MountVhd/HCS/ERROR_FILE_NOT_FOUND"
    debian = ask(windows)["distributions"][0]
    assert debian["error"].startswith("The system cannot find the file specified. Error code: Wsl/Service/CreateInst")
    assert debian["running"]


@WAYS
def test_a_distribution_whose_answer_breaks_off(windows: Windows, ask: Any) -> None:
    with windows.changed() as changed:
        changed.distributions[0].cut_after = 30
    assert "its answer breaks off: @@release" in ask(windows)["distributions"][0]["error"]


@WAYS
def test_a_list_that_fails_is_no_empty_list(windows: Windows, ask: Any) -> None:
    with windows.changed() as changed:
        changed.list_fails = True
    with pytest.raises(wsl.WslError) as failure:
        ask(windows)
    name, program = ("here", windows.mounted(SYSTEM32)) if ask is local else ("pc1", "wsl.exe")
    assert str(failure.value) == (
        f"{name}: {program} does not list the distributions: The system cannot find the file specified. {A_ROW}"
    )


def test_what_powershell_may_not_do_is_said(windows: Windows) -> None:
    with windows.changed() as changed:
        changed.constrained = True
    with pytest.raises(wsl.WslError, match=r"pc1: PowerShell ended with: Cannot invoke method. ") as failure:
        by_script(windows)
    assert str(failure.value).endswith(
        ". Expected: a script that may start programs. Next step: look whether a policy limits PowerShell there "
        "($ExecutionContext.SessionState.LanguageMode)."
    )


@pytest.mark.parametrize("quote", ["'", "\u2018", "\u2019", "\u201a", "\u201b"])
def test_a_path_with_any_of_powershells_quotes(windows: Windows, quote: str) -> None:
    path = f"D:\\it{quote}; Get-Evil {quote}"
    with pytest.raises(wsl.WslError) as failure:
        by_script(windows, host=wsl.Host("a", wsl_exe=path))
    assert f"no wsl.exe answered ({path}: The system cannot find the file specified)" in str(failure.value)


@WAYS
def test_an_excluded_name_means_the_same_everywhere(windows: Windows, ask: Any) -> None:
    question = dataclasses.replace(QUESTION, details="all", exclude=("DEBIAN", "Ol?", "docker*"))
    ask(windows, question)
    assert [each.state for each in windows.machine.distributions] == ["Running", "Stopped", "Running"]
    asked = [line.split()[1] for _program, line in windows.calls() if line.startswith("-d")]
    assert asked == ["Debian"]
    assert [question.excludes(name) for name in ("Debian", "Old", "docker-desktop")] == [False, True, True]


def test_names_of_a_machine_steer_no_terminal(windows: Windows) -> None:
    with windows.changed() as changed:
        changed.name = "PC\x1b[31m"
    assert by_script(windows)["computer_name"] == "PC [31m"


def test_local_system_is_refused(windows: Windows) -> None:
    with windows.changed() as changed:
        changed.local_system = True
    with pytest.raises(wsl.WslError) as failure:
        by_script(windows)
    refused = "Running WSL as local system is not supported. Error code: Wsl/Service/WSL_E_LOCAL_SYSTEM_NOT_SUPPORTED"
    assert str(failure.value) == (
        f"pc1: no wsl.exe answered (wsl.exe: {refused}; {PROGRAM_FILES}: {refused}). Expected: one on PATH or "
        f"{PROGRAM_FILES}. Next step: ask as the user who owns the distributions, never as LocalSystem."
    )


def test_without_a_session_the_full_path_is_tried(windows: Windows) -> None:
    with windows.changed() as changed:
        changed.session_zero_fails = True
    assert by_script(windows)["program"] == PROGRAM_FILES
    with windows.changed() as changed:
        changed.has_program_files = False
    with pytest.raises(wsl.WslError) as failure:
        by_script(windows)
    assert str(failure.value) == (
        f"pc1: no wsl.exe answered (wsl.exe: The file cannot be accessed by the system; {PROGRAM_FILES}: The system "
        f"cannot find the file specified). {OWNER}"
    )


OWNER = (
    f"Expected: one on PATH or {PROGRAM_FILES}. Next step: log on as the user who owns the distributions and run "
    "`wsl.exe --version`; without a session it needs WSL 2.2.4 or newer."
)


def test_a_wsl_exe_that_ends_without_a_word(windows: Windows) -> None:
    windows.mounted(SYSTEM32).write_text("#!/bin/sh\nexit 3\n", encoding="utf-8")
    with pytest.raises(wsl.WslError) as failure:
        local(windows)
    assert str(failure.value) == f"here: no wsl.exe answered ({windows.mounted(SYSTEM32)}: exit code 3). {OWNER}"


def test_a_path_of_wsl_exe_that_was_given_is_the_only_one(windows: Windows) -> None:
    assert by_script(windows, host=wsl.Host("a", wsl_exe=PROGRAM_FILES))["program"] == PROGRAM_FILES
    with pytest.raises(
        wsl.WslError, match=r"no wsl.exe answered \(D:\\it's: The system cannot find the file specified"
    ):
        by_script(windows, host=wsl.Host("a", wsl_exe=r"D:\it's"))


def test_a_byte_order_mark_before_the_questions_does_not_matter(windows: Windows) -> None:
    with windows.changed() as changed:
        changed.console_utf8 = True
    assert by_script(windows)["distributions"][0]["kernel"]


def test_an_openssh_that_is_not_there_tells_no_shell(windows: Windows) -> None:
    for openssh_is_there, default_shell, shell in (
        (False, None, "cmd"),
        (True, None, "cmd"),
        (True, POWERSHELL, "powershell"),
    ):
        with windows.changed() as changed:
            changed.openssh, changed.default_shell = openssh_is_there, default_shell
        assert by_script(windows)["shell"] == shell
    assert by_script(windows)["computer_name"] == "PC1"


def test_addresses_by_which_a_machine_may_be_reached(windows: Windows) -> None:
    """Those without a cable, and those that Windows has given itself, are none."""
    with windows.changed() as changed:
        changed.interfaces.append(
            {"Name": "以太网 2", "OperationalStatus": "Up", "addresses": ["198.51.100.4/25", "198.51.100.5/25"]}
        )
    assert by_script(windows)["addresses"] == [
        {"address": "192.0.2.31", "prefix": 24, "interface": "Ethernet", "default_route": True},
        {
            "address": "172.20.0.1", "prefix": 20, "interface": "vEthernet (WSL (Hyper-V firewall))",
            "default_route": False,
        },
        {"address": "198.51.100.4", "prefix": 25, "interface": "以太网 2", "default_route": False},
        {"address": "198.51.100.5", "prefix": 25, "interface": "以太网 2", "default_route": False},
    ]  # fmt: skip


def test_its_own_windows_tells_its_addresses_on_request(windows: Windows) -> None:
    def started() -> int:
        return [program for program, _line in windows.calls()].count(POWERSHELL)

    host = wsl.Host("pc", "local", wsl_exe=str(windows.mounted(SYSTEM32)))
    assert wsl.ask_local(host, QUESTION)["addresses"] is None
    assert started() == 0
    program = windows.mounted(POWERSHELL)
    asking = dataclasses.replace(host, list_addresses=True)
    assert wsl.ask_local(asking, QUESTION)["addresses"] == by_script(windows)["addresses"]
    assert started() == 1
    # No PowerShell, or none that may, is no reason to miss the distributions.
    with windows.changed() as changed:
        changed.constrained = True
    lacking = wsl.ask_local(asking, QUESTION)
    assert lacking["distributions"]
    assert (lacking["addresses"], lacking["addresses_error"]) == (None, f"{program} names no interface")
    program.unlink()
    lacking = wsl.ask_local(asking, QUESTION)
    assert lacking["distributions"]
    assert lacking["addresses"] is None
    assert lacking["addresses_error"].startswith(f"{program}: [Errno 2] No such file or directory")


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("exec sleep 600", "{}: no end in time"),
        ("echo refused >&2; exit 1", "{}: refused"),
        ('echo \'gpufarm-wsl {{"network": ["x"\'', "the answer of {} is damaged: "),
        ('echo \'gpufarm-wsl {{"network": [""]}}\'', "the answer of {} is damaged: "),
    ],
)
def test_why_a_windows_tells_no_addresses(windows: Windows, script: str, error: str) -> None:
    program = windows.mounted(POWERSHELL)
    program.write_text(f"#!/bin/sh\n{script.format()}\n", encoding="utf-8")
    patience = 0.2 if "sleep" in script else PATIENCE
    with pytest.raises(ValueError, match=re.escape(error.format(program))):
        wsl._addresses(str(windows.mounted(SYSTEM32)), time.monotonic() + patience)


def test_a_machine_without_a_default_route_has_addresses(windows: Windows) -> None:
    with windows.changed() as changed:
        changed.route = ""
    assert [each["default_route"] for each in by_script(windows)["addresses"]] == [False, False]


def test_local_programs_are_those_of_path_then_those_of_windows(
    windows: Windows, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = wsl.Host("here", connection="local")
    monkeypatch.setenv("PATH", str(windows.mounted(SYSTEM32).parent), prepend=os.pathsep)
    assert wsl.ask_local(here, QUESTION)["program"] == str(windows.mounted(SYSTEM32))
    windows.mounted(SYSTEM32).write_bytes(b"MZ" + bytes(100))
    monkeypatch.setattr(module_utils, "PLACES", (str(windows.mounted(PROGRAM_FILES)),))
    assert wsl.ask_local(here, QUESTION)["program"] == str(windows.mounted(PROGRAM_FILES))
    monkeypatch.setattr(module_utils, "PLACES", ())
    with pytest.raises(wsl.WslError, match=r"no wsl.exe answered \(.*wsl.exe: .*Exec format error"):
        wsl.ask_local(here, QUESTION)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    with pytest.raises(wsl.WslError) as failure:
        wsl.ask_local(here, QUESTION)
    assert str(failure.value) == f"here: no wsl.exe answered (none was found). {OWNER}"


def test_a_local_wsl_exe_that_never_answers(windows: Windows) -> None:
    windows.mounted(SYSTEM32).write_text("#!/bin/sh\nexec sleep 600\n", encoding="utf-8")
    with pytest.raises(wsl.WslError, match=r"no wsl.exe answered \(.*wsl.exe: no end in time\)"):
        local(windows, dataclasses.replace(QUESTION, timeout_s=1))


# --------------------------------------------------------------------------------------------------------------------
# What hangs. Time passes by a clock of the doubles, so that no machine is too slow for these.


class Calendar:
    """What ask_local has of time and of running programs: the slow take time by this clock alone."""

    def __init__(self, windows: Windows) -> None:
        self.windows, self.clock = windows, powershell.Clock()
        self.TimeoutExpired = subprocess.TimeoutExpired

    def monotonic(self) -> float:
        return self.clock.now

    def run(self, argv: list[str], *, timeout: float, **options: Any) -> subprocess.CompletedProcess[bytes]:
        path = next(path for path in (SYSTEM32, PROGRAM_FILES) if str(self.windows.mounted(path)) == argv[0])
        begun = self.clock.now
        taken = simulated.seconds(self.windows.machine, path, " ".join(argv[1:]))
        self.clock.now = max(self.clock.now, begun + min(timeout, taken))
        if taken > timeout:
            raise subprocess.TimeoutExpired(argv, timeout, b"\n@@release\n")
        return subprocess.run(argv, check=options.pop("check"), **options)


@pytest.fixture
def slowly(windows: Windows, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return both ways of asking, each with the time that it took."""
    question = dataclasses.replace(QUESTION, timeout_s=100)

    def ask(way: str) -> tuple[dict[str, Any], float]:
        if way == "local":
            calendar = Calendar(windows)
            monkeypatch.setattr(wsl, "time", calendar)
            monkeypatch.setattr(wsl, "subprocess", calendar)
            paths = tuple(str(windows.mounted(path)) for path in (SYSTEM32, PROGRAM_FILES))
            monkeypatch.setattr(module_utils, "PLACES", paths)
            monkeypatch.setenv("PATH", "/usr/bin:/bin")
            return wsl.ask_local(PC, question), calendar.clock.now
        clock = powershell.Clock()
        said = powershell.run(windows, wsl.script(PC, question), clock)
        assert windows.hanging() == []
        return wsl.read(PC, wsl.parse_answer(PC, said), question), clock.now

    yield ask
    for pid in windows.hanging():
        os.kill(pid, 9)


SLOWLY = pytest.mark.parametrize("way", ["local", "script"])


@SLOWLY
def test_a_wsl_exe_that_hangs_leaves_the_next_its_share(windows: Windows, slowly: Any, way: str) -> None:
    with windows.changed() as changed:
        changed.seconds = {SYSTEM32: HANGS, PROGRAM_FILES: 3}
    answer, taken = slowly(way)
    assert answer["program"].endswith("wsl.exe")
    assert "Program Files" in answer["program"]
    assert states(answer)["Debian"] == ("Running", True, True)
    assert taken <= 60


@SLOWLY
def test_distributions_that_hang_are_marked_and_the_others_answer(windows: Windows, slowly: Any, way: str) -> None:
    with windows.changed() as changed:
        changed.distributions += [Distribution(f"hangs{n}", users=ME, seconds=HANGS) for n in range(5)]
    answer, taken = slowly(way)
    assert states(answer)["Debian"] == ("Running", True, True)
    errors = [each["error"] for each in answer["distributions"] if each["name"].startswith("hangs")]
    assert errors == ["it did not answer in time"] * 5
    assert taken <= 101


def test_a_slow_distribution_is_waited_for_once(windows: Windows, slowly: Any) -> None:
    with windows.changed() as changed:
        changed.distributions[0].seconds = 70
        changed.distributions.append(Distribution("slow", users=ME, seconds=70))
    answer, taken = slowly("script")
    assert [states(answer)[name][2] for name in ("Debian", "slow")] == [True, True]
    assert 70 <= taken <= 80


@pytest.mark.parametrize("oddity", ["holds", "faulty"])
def test_streams_that_stay_open_or_fail_are_that_distributions_alone(
    windows: Windows, slowly: Any, oddity: str
) -> None:
    with windows.changed() as changed:
        changed.distributions.append(Distribution("odd", users=ME, **{oddity: True}))
    answer, taken = slowly("script")
    assert states(answer)["Debian"] == ("Running", True, True)
    # What had been said by then is whole.
    assert states(answer)["odd"] == ("Running", True, True)
    assert taken <= 80.1


def test_distributions_are_asked_at_the_same_time(windows: Windows) -> None:
    with windows.changed() as changed:
        changed.distributions.append(Distribution("other", users=ME))
        changed.crowd = 2
    assert [states(local(windows))[name][2] for name in ("Debian", "other")] == [True, True]


# --------------------------------------------------------------------------------------------------------------------
# From inside


@pytest.fixture
def root(tmp_path: Path) -> Path:
    if not can_have_users():
        pytest.skip("a container without CAP_SYS_ADMIN mounts nothing")
    root = tmp_path / "root"
    for folder in ("etc", "usr/lib/wsl/lib", "usr/bin"):
        (root / folder).mkdir(parents=True)
    release = 'PRETTY_NAME="Ubuntu 24.04.3 LTS"\nID=ubuntu\nVERSION_ID="24.04"\n'
    (root / "etc/os-release").write_text(release, encoding="utf-8")
    (root / "osrelease").write_text("6.6.87.2-microsoft-standard-WSL2\n", encoding="utf-8")
    (root / "systemd").touch()
    for name, text in (
        ("lib/wsl/lib/nvidia-smi", NVIDIA_SMI),
        ("bin/ip", "#!/bin/sh\necho '192.0.2.1 via 172.28.112.1 dev eth0 src 172.28.112.5 uid 0'\n"),
        ("bin/hostname", "#!/bin/sh\necho '172.28.112.9 fe80::1 '\n"),
    ):
        (root / "usr" / name).write_text(text, encoding="utf-8")
        (root / "usr" / name).chmod(0o755)
    return root


@WAYS
def test_what_a_distribution_is_from_inside(windows: Windows, ask: Any, root: Path) -> None:
    with windows.changed() as changed:
        changed.distributions[0] = Distribution("Ubuntu", default=True, root=str(root), users={"root": 0})
    assert ask(windows)["distributions"][0] == {
        "name": "Ubuntu",
        "state": "Running",
        "version": 2,
        "default": True,
        "running": True,
        "release": "Ubuntu 24.04.3 LTS",
        "release_id": "ubuntu",
        "release_version": "24.04",
        "kernel": "6.6.87.2-microsoft-standard-WSL2",
        "systemd": True,
        "ip": "172.28.112.5",
        "gpus": [
            {
                "name": "NVIDIA GeForce RTX 4090",
                "uuid": "GPU-11111111-2222-3333-4444-555555555555",
                "driver_version": "581.57",
            }
        ],
    }


def test_a_distribution_that_can_tell_little(windows: Windows, root: Path) -> None:
    for name in ("usr/bin/ip", "usr/lib/wsl/lib/nvidia-smi"):
        (root / name).write_text("#!/bin/sh\necho broken; exit 9\n", encoding="utf-8")
    (root / "systemd").unlink()
    (root / "etc/os-release").write_text("", encoding="utf-8")
    with windows.changed() as changed:
        changed.distributions = [Distribution("Odd", default=True, root=str(root), users={"root": 0})]
    odd = local(windows)["distributions"][0]
    assert (odd["release"], odd["release_id"], odd["systemd"], odd["ip"], odd["gpus"]) == (
        "", "", False, "172.28.112.9", [],
    )  # fmt: skip


@pytest.mark.parametrize("shell", ["/bin/sh", "/bin/bash"])
def test_what_it_asks_reads_none_of_the_questions(tmp_path: Path, shell: str) -> None:
    # dash has read the rest by then, bash reads a line at a time.
    (tmp_path / "ip").write_text("#!/bin/sh\ncat\necho nonsense >&2\n", encoding="utf-8")
    (tmp_path / "ip").chmod(0o755)
    done = subprocess.run(
        [shell], input=wsl.PROBE.encode(), capture_output=True, check=True, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}
    )
    assert wsl.parse_probe(done.stdout)["kernel"]
    assert done.stderr == b""


@WAYS
def test_a_release_without_an_end_of_line(windows: Windows, ask: Any, root: Path) -> None:
    (root / "etc/os-release").write_text("ID=odd\nPRETTY_NAME=Odd", encoding="utf-8")
    with windows.changed() as changed:
        changed.distributions = [Distribution("Odd", default=True, root=str(root), users={"root": 0})]
    odd = ask(windows)["distributions"][0]
    assert (odd["release"], odd["kernel"]) == ("Odd", "6.6.87.2-microsoft-standard-WSL2")


def test_an_answer_that_lacks_parts_is_no_end() -> None:
    assert wsl.parse_probe(b"@@release\nID=a@@kernel\n@@end\n")["kernel"] == ""


def test_a_line_of_nvidia_smi_that_is_no_gpu() -> None:
    raw = b"@@gpus\nNVIDIA-SMI has failed, so it, says\nNVIDIA T400, GPU-1, 581.57\n@@end\n"
    assert [gpu["uuid"] for gpu in wsl.parse_probe(raw)["gpus"]] == ["GPU-1"]


def test_an_answer_that_does_not_stop_is_read_to_a_limit() -> None:
    with pytest.raises(ValueError, match="breaks off"):
        wsl.parse_probe(b"@@release\n" + b"x=1\n" * 100_000 + b"@@end\n")


def test_a_distribution_that_does_not_answer_in_time() -> None:
    table = "  NAME    STATE           VERSION\n* a       Running         2\n"
    answer = wsl.Answer(
        "wsl.exe", wsl.Output(0, b"a\n"), wsl.Output(0, table.encode()), {"a": wsl.Output(None, b"@@release\n")}
    )
    assert wsl.read(PC, answer, QUESTION)["distributions"][0]["error"] == "it did not answer in time"


def test_what_steers_a_terminal_is_cut_out() -> None:
    raw = b'@@release\nPRETTY_NAME="a\x1b[31m"\n@@kernel\n@@systemd\n@@route\n@@addresses\n@@gpus\n@@end\n'
    assert wsl.parse_probe(raw)["release"] == "a [31m"


# --------------------------------------------------------------------------------------------------------------------
# What is sent, and what comes back


@pytest.mark.parametrize("details", ["none", "running", "all"])
def test_the_command_has_nothing_that_a_shell_would_touch(details: str) -> None:
    question = wsl.Question(details=details, exclude=("docker-desktop*", "podman-*", "rancher-desktop*", "it's?"))
    command = wsl.command(wsl.Host("a"), question)
    assert re.fullmatch(r"powershell\.exe -NoProfile -NonInteractive -EncodedCommand [A-Za-z0-9+/=]+", command)
    assert len(command) <= openssh.LONGEST
    script = base64.b64decode(command.split()[-1]).decode("utf-16-le")
    assert not re.search("@[A-Z]+@", script)
    assert wsl.PROBE.replace("'", "''") in script
    # Windows PowerShell reads a script without a mark by the console's code page.
    assert script.isascii()


def test_a_command_that_is_too_long_is_refused() -> None:
    with pytest.raises(
        wsl.WslError,
        match=r"^a: the command for Windows has \d+ characters\. Expected: at most 8191\. "
        r"Next step: shorten exclude_distributions\.$",
    ):
        wsl.command(wsl.Host("a"), wsl.Question(exclude=("x" * 500,)))


def test_the_longest_command_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    command = wsl.command(wsl.Host("a"), wsl.Question())
    monkeypatch.setattr(wsl, "LONGEST_COMMAND", len(command))
    assert wsl.command(wsl.Host("a"), wsl.Question()) == command


NO_ANSWER = (
    "Expected: a line that begins with gpufarm-wsl. Next step: run `powershell.exe -NoProfile -Command 1` there."
)


@pytest.mark.parametrize(
    ("text", "found"),
    [("", "nothing was printed"), ("'powershell.exe' is not recognized\r\n", "'powershell.exe' is not recognized")],
)
def test_an_answer_that_is_none(text: str, found: str) -> None:
    with pytest.raises(wsl.WslError) as failure:
        wsl.parse_answer(PC, text)
    assert str(failure.value) == f"pc1: PowerShell gave no answer: {found}. {NO_ANSWER}"


NOTHING = '{"code":0,"out":"","err":""}'


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ("{", "JSONDecodeError("),
        ("[]", "AttributeError("),
        ('{"program":"wsl.exe"}', "KeyError('names')"),
        (
            f'{{"program":"w","names":{NOTHING},"list":{NOTHING},"probes":{{}},"network":["VXAgeCAyNCBF"]}}',
            "AddressValueE",
        ),
        ('{"program":"w","names":{"code":0,"out":"A","err":""}}', "ValueError('Invalid base64-"),
    ],
)
def test_an_answer_that_is_damaged(said: str, error: str) -> None:
    text = f"gpufarm-wsl {said}"
    with pytest.raises(wsl.WslError) as failure:
        wsl.parse_answer(PC, text)
    found = str(failure.value)
    assert found.startswith(f"pc1: the answer of PowerShell is damaged: {error}")
    assert found.endswith(
        f" in {text[:200]!r}. Expected: one line of JSON. Next step: look what else prints there, and ask again."
    )


def test_what_is_printed_around_an_answer_is_left_out(windows: Windows) -> None:
    said = powershell.run(windows, wsl.script(wsl.Host("a"), QUESTION))
    assert wsl.parse_answer(PC, f"Welcome!\r\n{said}bye\r\n").program == "wsl.exe"


@pytest.mark.parametrize(
    ("listed", "error"),
    [
        (wsl.Output(None, b""), "pc1: wsl.exe does not list the distributions: no end in time"),
        (wsl.Output(4, b""), "pc1: wsl.exe does not list the distributions: exit code 4"),
        (
            wsl.Output(-1, b"x\nError code: Wsl/Service/E_UNEXPECTED\n"),
            "pc1: wsl.exe does not list the distributions: x Error code: Wsl/Service/E_UNEXPECTED",
        ),
        (
            wsl.Output(0, b"* a  Running\n"),
            "pc1: The list of distributions has a line that is none of its rows: '* a  Running'",
        ),
    ],
)
def test_a_list_that_cannot_be_had(listed: wsl.Output, error: str) -> None:
    with pytest.raises(wsl.WslError) as failure:
        wsl.read(PC, wsl.Answer("wsl.exe", wsl.Output(0, b""), listed, {}), QUESTION)
    assert str(failure.value) == f"{error}. {A_ROW}"


def test_where_states_are_translated_names_say_what_runs() -> None:
    table = "  NAME    STATUS          VERSION\n* a       Wird ausgeführt 2\n  b       Beendet         2\n"
    answer = wsl.Answer("wsl.exe", wsl.Output(0, b"a\n"), wsl.Output(0, table.encode("utf-16-le")), {})
    assert [each["running"] for each in wsl.read(PC, answer, QUESTION)["distributions"]] == [True, False]


# --------------------------------------------------------------------------------------------------------------------
# SSH


@pytest.fixture
def sshd(windows: Windows) -> Iterator[tuple[Windows, list[str]]]:
    try:
        server = Sshd(windows)
    except BuildError as error:
        pytest.skip(str(error))
    with server:
        configuration = server.folder / "client"
        configuration.write_text(server.client_configuration("pc1", "127.0.0.9"), encoding="utf-8")
        yield windows, ["-F", str(configuration)]


def over_ssh(arguments: list[str], **options: Any) -> dict[str, Any]:
    host = wsl.Host("pc1", **{"address": "pc1", "ssh_arguments": tuple(arguments), **options})
    return wsl.ask_ssh(host, QUESTION)


@pytest.mark.parametrize("default_shell", [None, POWERSHELL, r"C:\Program Files\PowerShell\7\pwsh.exe"])
@pytest.mark.parametrize("banner", ["", "Welcome to {{ 7 * 7 }}\r\n\r\n"])
def test_one_connection_answers_whatever_shell_is_there(
    sshd: tuple[Windows, list[str]], default_shell: str | None, banner: str
) -> None:
    windows, arguments = sshd
    with windows.changed() as changed:
        changed.default_shell, changed.banner = default_shell, banner
    answer = over_ssh(arguments)
    assert states(answer) == states(local(windows))
    assert answer["shell"] == ("powershell" if default_shell else "cmd")
    assert answer["computer_name"] == "PC1"
    assert answer["ssh"]["hostname"] == "127.0.0.1"
    assert [key.endswith("/ssh/key") for key in answer["ssh"]["identityfiles"]] == [True]
    assert [program for program, _line in windows.calls()].count("ssh") == 1


def test_ssh_errors_name_the_next_step(sshd: tuple[Windows, list[str]]) -> None:
    windows, arguments = sshd
    for given, address, options in (
        ([*arguments, "-o", "IdentityFile=/dev/null"], "pc1", {"user": "nobody-of-that-name"}),
        ([], "127.0.0.1", {"port": 1}),
    ):
        words = "Permission denied .*" if options.get("user") else "ssh: connect to host 127.0.0.1 port 1: .* refused"
        with pytest.raises(
            wsl.WslError,
            match=rf"^pc1: ssh cannot connect to {address}: .*{words}\. Expected: a connection without a password\. "
            rf"Next step: try `ssh {address}` as this user\.$",
        ):
            over_ssh(given, address=address, **options)
    with windows.changed() as changed:
        changed.has_powershell = False
    with pytest.raises(
        wsl.WslError,
        match=rf"^pc1: PowerShell gave no answer: 'powershell.exe' is not recognized as an internal .*\. {NO_ANSWER}$",
    ):
        over_ssh(arguments)


def test_a_host_that_never_answers_ends_in_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ssh").write_text("#!/bin/sh\nexec sleep 600\n", encoding="utf-8")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(wsl.WslError) as failure:
        wsl.ask_ssh(wsl.Host("a", address="a"), wsl.Question(timeout_s=1))
    ends = "Expected: a machine that is on. Next step: start it, or raise the option timeout."
    assert str(failure.value) == f"a: no answer within 1 s. {ends}"
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(
        wsl.WslError,
        match=r"^a: ssh cannot be started \(No such file.*\)\. Expected: OpenSSH's client\. Next step: install it\.$",
    ):
        wsl.ask_ssh(wsl.Host("a", address="a"), wsl.Question(timeout_s=1))
    # What it has said until then is told.
    late = commands.Command(("ssh",), None, stderr="Warning: remote port is slow.\r\n", timed_out=True)
    monkeypatch.setattr(wsl, "run_commands", lambda _argvs, _timeout: [late, late])
    with pytest.raises(wsl.WslError) as failure:
        wsl.ask_ssh(wsl.Host("a", address="a"), wsl.Question(timeout_s=1))
    assert str(failure.value) == f"a: no answer within 1 s (Warning: remote port is slow). {ends}"


# Notes its words in a file that has the name of the first.
NOTES = """\
#!/bin/sh
for word; do printf '%s\\n' "$word"; done >"{folder}/$1"
echo no >&2
exit 255
"""


def test_ssh_is_told_what_was_configured_and_never_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ssh").write_text(NOTES.format(folder=tmp_path), encoding="utf-8")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    host = wsl.Host("a", address="win", port=2222, user="alice", private_key="/k", ssh_arguments=("-J", "jump"))
    with pytest.raises(wsl.WslError, match=r"^a: ssh cannot connect to win: no\. Expected: "):
        wsl.ask_ssh(host, QUESTION)
    reached = ["-p", "2222", "-l", "alice", "-i", "/k", "-J", "jump", "--", "win"]
    assert (tmp_path / "-T").read_text(encoding="utf-8").splitlines() == [
        "-T", "-o", "BatchMode=yes", "-o", "RemoteCommand=none", "-o", "ClearAllForwardings=yes",
        "-o", f"ConnectTimeout={PATIENCE}", *reached, wsl.command(host, QUESTION),
    ]  # fmt: skip
    assert (tmp_path / "-G").read_text(encoding="utf-8").splitlines() == ["-G", *reached]


def test_an_answer_counts_though_its_connection_does_not_end(windows: Windows, monkeypatch: pytest.MonkeyPatch) -> None:
    said = powershell.run(windows, wsl.script(PC, QUESTION))
    late = [commands.Command(("ssh",), None, text, timed_out=True) for text in (said, "hostname x\n")]
    monkeypatch.setattr(wsl, "run_commands", lambda _argvs, _timeout: late)
    answer = wsl.ask_ssh(PC, QUESTION)
    assert states(answer) == states(local(windows))
    assert answer["ssh"] == {"hostname": "x", "identityfiles": []}


# --------------------------------------------------------------------------------------------------------------------
# PSRP: pypsrp up to its edge, which is a client that runs a script


@pytest.fixture
def pypsrp(windows: Windows, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []

    class Client:
        def __init__(self, server: str, **kwargs: Any) -> None:
            made.append({"server": server, **kwargs})

        def __enter__(self) -> Client:
            return self

        def __exit__(self, *_error: object) -> None:
            made[-1]["closed"] = True

        def execute_ps(self, script: str) -> tuple[str, Any, bool]:
            if not windows.machine.has_powershell:
                return "", types.SimpleNamespace(error=["Access is denied."]), True
            # Client joins the lines of Out-String by newlines.
            return "\n".join(powershell.run(windows, script).splitlines()), types.SimpleNamespace(error=[]), False

    module = types.ModuleType("pypsrp.client")
    module.Client = Client  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pypsrp", types.ModuleType("pypsrp"))
    monkeypatch.setitem(sys.modules, "pypsrp.client", module)
    return made


def test_powershell_remoting(windows: Windows, pypsrp: list[dict[str, Any]]) -> None:
    options = {"ssl": False, "auth": "ntlm", "connection_timeout": 5}
    host = wsl.Host("a", connection="psrp", address="win", port=5985, user="bob", password="x", psrp=options)
    assert states(wsl.ask_psrp(host, QUESTION)) == states(local(windows))
    assert pypsrp == [
        {
            "server": "win", "username": "bob", "password": "x", "port": 5985, "ssl": False, "auth": "ntlm",
            "connection_timeout": 5, "read_timeout": PATIENCE, "operation_timeout": PATIENCE * 2 // 3, "closed": True,
        }
    ]  # fmt: skip


def test_powershell_remoting_fails_with_what_was_said(
    windows: Windows, pypsrp: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = wsl.Host("a", connection="psrp", address="win")
    with windows.changed() as changed:
        changed.has_powershell = False
    with pytest.raises(wsl.WslError) as failure:
        wsl.ask_psrp(host, QUESTION)
    assert str(failure.value) == f"a: PowerShell gave no answer: Access is denied. {NO_ANSWER}"
    assert "port" not in pypsrp[0]

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(sys.modules["pypsrp.client"], "Client", refuse)
    with pytest.raises(wsl.WslError) as failure:
        wsl.ask_psrp(host, QUESTION)
    assert str(failure.value) == (
        "a: PSRP cannot ask win: ConnectionError: no route. Expected: PowerShell Remoting that lets this user in. "
        "Next step: try Enter-PSSession."
    )


def test_pypsrp_is_needed_for_its_hosts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pypsrp", None)
    with pytest.raises(
        wsl.WslError,
        match=r"^a: pypsrp is missing \(.*\)\. Expected: it is installed where Ansible runs\. "
        r"Next step: `pip install pypsrp`, or connection: ssh\.$",
    ):
        wsl.ask_psrp(wsl.Host("a", connection="psrp", address="win"), QUESTION)


def test_pypsrps_own_client_takes_what_it_is_given(windows: Windows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(PACKAGES)])
    client = importlib.import_module("pypsrp.client")
    scripts: list[str] = []

    def execute_ps(_client: object, script: str) -> tuple[str, Any, bool]:
        scripts.append(script)
        return powershell.run(windows, script), None, False

    # Its transport begins below; everything above is pypsrp's own.
    monkeypatch.setattr(client.Client, "execute_ps", execute_ps)
    options = {"ssl": True, "auth": "basic", "cert_validation": False, "path": "wsman"}
    host = wsl.Host("a", connection="psrp", address="win", port=5986, user="bob", password="x", psrp=options)
    assert states(wsl.ask_psrp(host, QUESTION)) == states(local(windows))
    assert scripts == [wsl.script(host, QUESTION)]
    with pytest.raises(wsl.WslError, match=r"PSRP cannot ask win: .*no-such-auth"):
        wsl.ask_psrp(dataclasses.replace(host, psrp={"auth": "no-such-auth"}), QUESTION)


def test_a_password_is_shown_nowhere() -> None:
    assert "s3cret" not in repr(wsl.Host("a", password="s3cret", psrp={"certificate_key_password": "s3cret"}))


def test_an_answer_is_plain_data_for_a_cache(windows: Windows) -> None:
    for answer in (local(windows), by_script(windows)):
        assert json.loads(json.dumps(answer)) == answer
