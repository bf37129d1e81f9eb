"""The state of one Windows machine: a folder that its programs, and the tests, read and write."""

from __future__ import annotations

import fcntl
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
# Longer than anybody waits; JSON has no infinity.
HANGS = 1e9
SYSTEM32 = r"C:\Windows\System32\wsl.exe"
PROGRAM_FILES = r"C:\Program Files\WSL\wsl.exe"
POWERSHELL = r"C:\Windows\System32\WindowsPowerShell\v1.0\powershell.exe"
USER_SID = "S-1-5-21-1004336348-1177238915-682003330-1001"
# What GetAllNetworkInterfaces of .NET lists: those without a cable, and WSL's own switch, too.
INTERFACES = (
    {"Name": "Ethernet", "OperationalStatus": "Up", "addresses": ["fe80::4b1c:9f3a:20d7:8e51%12/64", "192.0.2.31/24"]},
    {"Name": "Wi-Fi", "OperationalStatus": "Down", "addresses": ["198.51.100.7/24"]},
    {"Name": "Ethernet 2", "OperationalStatus": "Up", "addresses": ["169.254.83.107/16"]},
    {"Name": "vEthernet (WSL (Hyper-V firewall))", "OperationalStatus": "Up", "addresses": ["172.20.0.1/20"]},
    {"Name": "Loopback Pseudo-Interface 1", "OperationalStatus": "Up", "addresses": ["::1/128", "127.0.0.1/8"]},
)
# A program that WSL's interop starts: its file is a Windows program there, so only its name and place are the same.
PROGRAM = """\
#!{python} -SE
import sys
sys.path.insert(0, {root!r})
from tests.simulator.windows import interop
sys.exit(interop.main({folder!r}, {path!r}, sys.argv[1:]))
"""


@dataclass
class Distribution:
    """One distribution. Its commands run in a container, or on this machine below a folder with files of its own."""

    name: str
    state: str = "Running"
    version: int = 2
    default: bool = False
    container: str | None = None
    # Its etc and usr lie over this machine's; without it, commands run on this machine as it is.
    root: str | None = None
    users: dict[str, int] = field(default_factory=lambda: {"root": 0})
    # The code with which every start of it fails, as that of a disk that is lost.
    broken: str | None = None
    # Programs that it does not have, though this machine does.
    without: list[str] = field(default_factory=list)
    # Another program than wsl.exe ends it after so many bytes of a command's output.
    cut_after: int | None = None
    # Seconds that pass, by the clock of those who ask, before anything in it answers; HANGS for ever.
    seconds: float = 0
    # What it starts keeps standard output open after its end, or reading it fails.
    holds: bool = False
    faulty: bool = False
    # When its last client ended, by the machine's clock.
    idle_since: float = 0.0


@dataclass
class Machine:
    """What the programs of the machine go by."""

    name: str
    distributions: list[Distribution] = field(default_factory=list)
    language: str = "en"
    # Store WSL before 2.2.4: the wsl.exe of PATH fails without an interactive session (WSL#9231).
    session_zero_fails: bool = False
    local_system: bool = False
    # Text mode applied twice, as a relay between wsl.exe and the reader may do (tailscale#3170).
    double_cr: bool = False
    # Before 0.64.0 wsl.exe does not know WSL_UTF8.
    knows_utf8: bool = True
    # The value DefaultShell of HKLM\\SOFTWARE\\OpenSSH; OpenSSH takes cmd.exe where there is none.
    default_shell: str | None = None
    installed: bool = True
    has_program_files: bool = True
    has_powershell: bool = True
    openssh: bool = True
    # The connection is cut, once, when a command in which this expression is found has come over SSH, or when a module
    # that was asked so has done it.
    cut: str | None = None
    # The code page of consoles is 65001, so .NET begins a program's input with a byte order mark.
    console_utf8: bool = False
    # What a profile prints before an answer.
    banner: str = ""
    # The same as of a distribution, of a program that has to list them.
    seconds: dict[str, float] = field(default_factory=dict)
    # Commands in distributions that wait for each other: none answers before so many have been started.
    crowd: int = 0
    # Whether wsl.exe itself lives on while a process that it has started in the background does (WSL#12886).
    waits_for_background: bool = False
    # What Linux programs find that have no WSL_INTEROP, or one of a session that has ended: "lost" or "stale".
    interop: str = ""
    # What its policy lets PowerShell do: nothing.
    constrained: bool = False
    # A list that fails without a row, as that of a service that does not answer.
    list_fails: bool = False
    # Distributions that somebody starts, by the number of the list that shows it first.
    comes: dict[str, int] = field(default_factory=dict)
    # What `wsl.exe --version` says; empty is the one of Windows itself, which does not know that option.
    release: str = "2.6.3"
    newest_release: str = "2.6.3"
    # The code with which an update fails, as without a network.
    update_fails: str = ""
    # Whether nvidia-smi.exe finds no driver that runs; it says so on standard output.
    smi_fails: bool = False
    # The build of Windows: mirrored networking needs 22621.
    build: int = 26100
    # Whether it falls back to NAT there, too, as where another part of it is missing (WSL#13793); it is assumed that
    # `wslinfo --networking-mode` tells so then.
    mirrored_fails: bool = False
    # Who owns the distributions; others have none of them.
    user: str = "alice"
    password: str = "of-alice"
    # Whether a task runs without a password, which is assumed.
    s4u: bool = True
    # Whether what is asked of the machine runs elevated; interop does so in a terminal of an administrator only.
    administrator: bool = True
    # Whether others see what an administrator has registered, as older Windows may let them; both are assumed.
    shows_tasks: bool = False
    # Whether Ansible runs in one of its distributions, however it reaches Windows.
    control_node: bool = False
    gpus: list[dict[str, str]] = field(default_factory=list)
    interfaces: list[dict[str, Any]] = field(default_factory=lambda: [dict(each) for each in INTERFACES])
    # The address from which Windows sends to other networks; none where no route leads there.
    route: str = "192.0.2.31"
    # Seconds since the machine was made. Nothing passes by itself.
    clock: float = 0.0
    # The settings that the running virtual machine was started with, and how often one was started.
    running: dict[str, str] | None = None
    starts: int = 0
    # When the last distribution of it ended.
    empty_since: float = 0.0
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)
    # Which distribution each running task holds.
    holds: dict[str, str] = field(default_factory=dict)
    # Windows' own: administrators, backup operators, users of performance logs ("Log on as a batch job").
    rights: dict[str, list[str]] = field(default_factory=lambda: {
        "SeBatchLogonRight": ["S-1-5-32-544", "S-1-5-32-551", "S-1-5-32-559"]
    })  # fmt: skip
    portproxy: dict[str, str] = field(default_factory=dict)
    # Whether its distributions have no IPv4 address, as where nothing gives them one.
    no_ipv4: bool = False
    # Whether netsh.exe refuses to add one.
    netsh_fails: bool = False
    firewall: dict[str, dict[str, Any]] = field(default_factory=dict)
    hyper_v_firewall: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def account(self) -> str:
        """The user as Windows names the account; another domain than its own has none of that name."""
        return f"{self.name.upper()}\\{self.user}"

    @property
    def sids(self) -> list[str]:
        """The user and the groups that count in the token; that of administrators does so where it is elevated."""
        return [USER_SID, *(["S-1-5-32-544"] if self.administrator else []), "S-1-5-32-545", "S-1-1-0"]


class Windows:
    """A machine in its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def create(cls, folder: Path, machine: Machine) -> Windows:
        folder.mkdir(parents=True, exist_ok=True)
        windows = cls(folder)
        windows._write(machine)
        (folder / "calls").touch()
        for path in (SYSTEM32, PROGRAM_FILES, POWERSHELL):
            program = windows.mounted(path)
            program.parent.mkdir(parents=True, exist_ok=True)
            program.write_text(
                PROGRAM.format(python=sys.executable, root=str(ROOT), folder=str(folder), path=path), encoding="utf-8"
            )
            program.chmod(0o755)
        return windows

    def mounted(self, path: str) -> Path:
        """Return where a distribution of this machine has a file of drive C."""
        return self.folder / "mnt/c" / path.removeprefix("C:\\").replace("\\", "/")

    @property
    def machine(self) -> Machine:
        known = json.loads((self.folder / "machine.json").read_text(encoding="utf-8"))
        return Machine(**{**known, "distributions": [Distribution(**each) for each in known["distributions"]]})

    @contextmanager
    def changed(self) -> Iterator[Machine]:
        """Give the machine to change; nobody else changes it meanwhile."""
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            machine = self.machine
            yield machine
            self._write(machine)

    def _write(self, machine: Machine) -> None:
        new = self.folder / "machine.json.new"
        new.write_text(json.dumps(asdict(machine)), encoding="utf-8")
        new.replace(self.folder / "machine.json")

    def log(self, program: str, command_line: str) -> None:
        with (self.folder / "calls").open("a", encoding="utf-8") as calls:
            calls.write(json.dumps([program, command_line]) + "\n")

    def hanging(self) -> list[int]:
        """Return the processes that hang and were never ended."""
        note = self.folder / "hanging"
        pids = [int(pid) for pid in note.read_text(encoding="ascii").split()] if note.exists() else []
        return [pid for pid in pids if Path(f"/proc/{pid}").exists()]

    def calls(self) -> list[Any]:
        """Return what was started, in order: program and command line."""
        return [json.loads(line) for line in (self.folder / "calls").read_text(encoding="utf-8").splitlines()]
