"""wsl.exe: lists distributions, and runs commands in them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from tests.simulator.docker import docker_binary
from tests.simulator.windows import command_line as lines
from tests.simulator.windows import life
from tests.simulator.windows.host import HANGS, SYSTEM32, Distribution, Machine, Windows

# localization/strings/<language>/Resources.resw; the last is Windows' own text for ERROR_CANT_ACCESS_FILE, as seen in
# WSL#9221 and WSL#10190 (German and simplified Chinese are assumed).
TEXTS = {
    "en": {
        "versions": "WSL version: {}\nKernel version: 6.6.87.2-1\nWSLg version: 1.0.66\nMSRDC version: 1.2.6074\n"
        "Direct3D version: 1.611.1-81528511\nDXCore version: 10.0.26100.1-240331-1435.ge-release\n"
        "Windows version: 10.0.{}.4061",
        "none": "Windows Subsystem for Linux has no installed distributions.\n"
        "You can resolve this by installing a distribution with the instructions below:\n\n"
        "Use 'wsl.exe --list --online' to list available distributions\nand 'wsl.exe --install <Distro>' to install.",
        "not_running": "There are no running distributions.",
        "no_such": "There is no distribution with the supplied name.",
        "no_user": "User not found.",
        "disk": "The system cannot find the file specified.",
        "local_system": "Running WSL as local system is not supported.",
        "usage": "Invalid command line argument: {}\nPlease use 'wsl.exe --help' to get a list of supported arguments.",
        "code": "{}\nError code: {}",
        "missing": "Argument {} is missing a required parameter.",
        "no_access": "The file cannot be accessed by the system.",
        "done": "The operation completed successfully. ",
    },
    "de": {
        "versions": "WSL-Version: {}\nKernelversion: 6.6.87.2-1\nWSLg-Version: 1.0.66\nMSRDC-Version: 1.2.6074\n"
        "Direct3D-Version: 1.611.1-81528511\nDXCore-Version: 10.0.26100.1-240331-1435.ge-release\n"
        "Windows-Version: 10.0.{}.4061",
        "none": "Windows-Subsystem für Linux verfügt über keine installierten Distributionen.\n"
        "Sie können dies beheben, indem Sie eine Distribution mit den folgenden Anweisungen installieren:",
        "not_running": "Es werden keine Distributionen ausgeführt.",
        "no_such": "Es ist keine Distribution mit dem angegebenen Namen vorhanden.",
        "no_user": "Benutzer nicht gefunden.",
        "disk": "Das System kann die angegebene Datei nicht finden.",
        "local_system": "Das Ausführen von WSL als lokales System wird nicht unterstützt.",
        "usage": "Ungültiges Befehlszeilenargument: {}",
        "code": "{}\nFehlercode: {}",
        "missing": "Für Argument {} fehlt ein erforderlicher Parameter.",
        "no_access": "Das System kann nicht auf die Datei zugreifen.",
        "done": "Der Vorgang wurde erfolgreich beendet. ",
    },
    "zh": {
        "versions": "WSL 版本: {}\n内核版本: 6.6.87.2-1\nWSLg 版本: 1.0.66\nMSRDC 版本: 1.2.6074\n"
        "Direct3D 版本: 1.611.1-81528511\nDXCore 版本: 10.0.26100.1-240331-1435.ge-release\n"
        "Windows 版本: 10.0.{}.4061",
        "none": "适用于 Linux 的 Windows 子系统没有已安装的分发。\n可按照以下说明安装分发来解决此问题:",
        "not_running": "没有正在运行的分发。",
        "no_such": "不存在具有所提供名称的分发。",
        "no_user": "找不到用户。",
        "disk": "系统找不到指定的文件。",
        "local_system": "不支持将 WSL 作为本地系统运行。",
        "usage": "无效的命令行参数: {}",
        "code": "{}\n错误代码: {}",
        "missing": "参数 {} 缺少必需的参数。",
        "no_access": "系统无法访问此文件。",
        "done": "操作成功完成。 ",
    },
}
# WslMain returns -1 for each error of its own, so that callers can tell it from one of a Linux program.
FAILED = 0xFFFFFFFF
# What a distribution's own files lie over, and what its kernel says of itself.
ENTER = """\
set -e
root=$1; shift
for part in etc usr; do
    [ ! -d "$root/$part" ] || mount -t overlay overlay -o "lowerdir=$root/$part:/$part" "/$part"
done
[ ! -f "$root/osrelease" ] || mount --bind "$root/osrelease" /proc/sys/kernel/osrelease
mount -t tmpfs tmpfs /run
[ ! -e "$root/systemd" ] || mkdir -p /run/systemd/system
exec "$@"
"""


class Failed(Exception):
    """wsl.exe ends with a message of its own."""


@dataclass(frozen=True)
class Process:
    """One run of wsl.exe."""

    windows: Windows
    machine: Machine
    environment: Mapping[str, str]

    def text(self, name: str, *values: str) -> str:
        return TEXTS[self.machine.language][name].format(*values)

    def print(self, text: str) -> None:
        """Print as the C runtime does: UTF-16LE without a mark unless WSL_UTF8 is exactly 1 (WslClient.cpp, Main)."""
        utf8 = self.environment.get("WSL_UTF8") == "1" and self.machine.knows_utf8
        end = "\r\r\n" if self.machine.double_cr else "\r\n"
        raw = f"{text}\n".replace("\n", end).encode("utf-8" if utf8 else "utf-16-le")
        sys.stdout.buffer.write(raw)
        sys.stdout.buffer.flush()

    def fail(self, name: str, code: str | None = None) -> NoReturn:
        """Raise what is printed on stdout: PrintMessage writes there by default (wslutil.h)."""
        message = self.text(name)
        raise Failed(self.text("code", message, code) if code else message)


def main(windows: Windows, path: str, command_line: str, environment: Mapping[str, str], session: int) -> int:
    """Run wsl.exe with what follows its name on the command line, and return its exit code as Windows has it."""
    windows.log(path, command_line)
    process = Process(windows, windows.machine, environment)
    while seconds(process.machine, path, command_line) >= HANGS:
        time.sleep(60)
    if process.machine.session_zero_fails and session == 0 and path == SYSTEM32:
        process.print(process.text("no_access"))
        return 1
    try:
        if process.machine.local_system and session == 0:
            # LxssUserSessionFactory.cpp: refused by the service, whatever was asked.
            process.fail("local_system", "Wsl/Service/WSL_E_LOCAL_SYSTEM_NOT_SUPPORTED")
        return _options(process, command_line.strip())
    except Failed as failure:
        process.print(str(failure))
        return FAILED


def seconds(machine: Machine, path: str, command_line: str) -> float:
    """Return how long a run takes by the clock of those who ask; HANGS where it never ends."""
    words = command_line.split()
    if words[:1] != ["-d"]:
        return machine.seconds.get(path, 0)
    return next((each.seconds for each in machine.distributions if each.name.casefold() == words[1].casefold()), 0)


def _argument(rest: str) -> tuple[str, str]:
    """Return the next option and what follows it: options end at a blank, and quotes mean nothing (helpers.cpp)."""
    match = re.match(r"[^ \t]*", rest)
    word = match.group() if match else ""
    return word, rest[len(word) :].lstrip()


def _options(process: Process, rest: str) -> int:
    name = user = None
    while rest:
        option, following = _argument(rest)
        if option in ALONE:
            return ALONE[option](process, rest)
        if option in ("--distribution", "-d", "--user", "-u", "--cd"):
            value, following = _argument(following)
            if not value:
                process.print(process.text("missing", option))
                return FAILED
            if option in ("--distribution", "-d"):
                name = value
                _distribution(process, name)
            elif option != "--cd":
                user = value
            rest = following
        elif option in ("--exec", "-e"):
            return _run(process, name, user, lines.split(following))
        elif option.startswith("-") and option != "--":
            process.print(process.text("usage", option))
            return FAILED
        else:
            # Without --exec a shell of the user gets the command line as it is: $SHELL -c commandLine.
            shell = ["/bin/sh", "-c", following if option == "--" else rest]
            return _run(process, name, user, shell)
    return _run(process, name, user, ["/bin/sh", "-l"])


def _whole(process: Process, rest: str) -> int:
    """What concerns WSL as a whole; the one that comes with Windows knows none of it (tailscale#3170 has its usage)."""
    if process.machine.update_fails and rest in ("--install --no-distribution", "--update"):
        process.fail("disk", process.machine.update_fails)
    if rest == "--install --no-distribution" or (rest == "--update" and process.machine.newest_release):
        with process.windows.changed() as machine:
            # The installer ends what runs.
            life.shut_down(machine)
            machine.release = machine.newest_release
        return 0
    if not process.machine.release:
        process.print(process.text("usage", rest))
        return FAILED
    if rest in ("--version", "-v"):
        process.print(process.text("versions", process.machine.release, str(process.machine.build)))
    elif rest == "--shutdown":
        with process.windows.changed() as machine:
            life.shut_down(machine)
    else:
        process.print(process.text("usage", rest))
        return FAILED
    return 0


def _list(process: Process, rest: str) -> int:
    options = rest.split()[1:]
    wanted = {{"-v": "--verbose", "-q": "--quiet"}.get(option, option) for option in options}
    if not wanted <= {"--verbose", "--quiet", "--running", "--all"} or {"--verbose", "--quiet"} <= wanted:
        process.print(process.text("usage", " ".join(options)))
        return FAILED
    if process.machine.list_fails and "--verbose" in wanted:
        process.fail("disk")
    if "--verbose" in wanted and process.machine.comes:
        shown = sum("--verbose" in line for _path, line in process.windows.calls())
        with process.windows.changed() as machine:
            for each in machine.distributions:
                if machine.comes.get(each.name) == shown:
                    life.started(process.windows, machine, each)
            process = Process(process.windows, machine, process.environment)
    # ListDistributionsHelper: the default first, and no order is promised of the others.
    every = sorted(process.machine.distributions, key=lambda each: not each.default)
    if "--verbose" in wanted:
        # --running is ignored together with --verbose.
        if not every:
            process.fail("none")
        width = max(4, *(len(each.name) for each in every)) + 4
        rows = [(" ", "NAME", "STATE", "VERSION")]
        rows += [("*" if each.default else " ", each.name, each.state, str(each.version)) for each in every]
        process.print("\n".join(f"{mark} {name:<{width}}{state:<16}{version}" for mark, name, state, version in rows))
        return 0
    if "--running" in wanted:
        every = [each for each in every if each.state == "Running"]
        if not every and "--quiet" not in wanted:
            process.print(process.text("not_running"))
            return FAILED
    if "--all" not in wanted:
        every = [each for each in every if each.state in ("Running", "Stopped")]
    if not every and "--quiet" not in wanted:
        process.fail("none")
    for each in every:
        process.print(each.name)
    return 0


def _distribution(process: Process, name: str | None) -> Distribution:
    for each in process.machine.distributions:
        # wsl::shared::string::IsEqual without regard to case.
        if (each.name.casefold() == name.casefold()) if name else each.default:
            return each
    if name is None:
        return process.fail("none")
    return process.fail("no_such", "Wsl/Service/WSL_E_DISTRO_NOT_FOUND")


def _terminate(process: Process, rest: str) -> int:
    name = rest.split(" ", 1)[-1] if " " in rest else ""
    _distribution(process, name)
    with process.windows.changed() as machine:
        life.ended(machine, next(each for each in machine.distributions if each.name == name))
    process.print(process.text("done"))
    return 0


# Options that nothing else stands beside.
ALONE: dict[str, Callable[[Process, str], int]] = {
    **dict.fromkeys(("--list", "-l"), _list),
    **dict.fromkeys(("--terminate", "-t"), _terminate),
    **dict.fromkeys(("--version", "-v", "--shutdown", "--update", "--install"), _whole),
}


def _run(process: Process, name: str | None, user: str | None, argv: list[str]) -> int:
    distribution = _distribution(process, name)
    if distribution.broken:
        process.fail("disk", distribution.broken)
    user = user or next(iter(distribution.users))
    if user not in distribution.users:
        process.fail("no_user", "Wsl/Service/WSL_E_USER_NOT_FOUND")
    _used(process, distribution)
    while process.machine.crowd > sum(line.startswith("-d ") for _path, line in process.windows.calls()):
        time.sleep(0.05)
    try:
        if argv[0] in distribution.without:
            raise FileNotFoundError
        if argv in (["wslinfo", "--networking-mode"], ["hostname", "-I"], ["cat", "/proc/sys/kernel/random/boot_id"]):
            return _told(process, distribution, argv)
        command = entered(distribution, user, argv)
        if distribution.cut_after is not None:
            return _cut(command, distribution.cut_after)
        # Standard streams are relayed as they are, whatever WSL_UTF8 says: they are the Linux program's.
        if process.machine.waits_for_background:
            code = _until_all_have_ended(command, user)
        else:
            code = subprocess.run(command, env=_environment(user), check=False).returncode
    except FileNotFoundError:
        # SessionLeaderCreateProcess: FATAL_ERROR("execvpe({}) failed: {}").
        sys.stderr.write(f"<3>WSL (9) ERROR: execvpe({argv[0]}) failed: No such file or directory\n")
        return 1
    _used(process, distribution)
    return code & 0xFF


def _used(process: Process, distribution: Distribution) -> None:
    """Whoever runs a command in a stopped distribution has started it; its timer begins when the command ends."""
    with process.windows.changed() as machine:
        ours = next((each for each in machine.distributions if each.name == distribution.name), None)
        if ours:
            life.started(process.windows, machine, ours)


def _told(process: Process, distribution: Distribution, argv: list[str]) -> int:
    """What a distribution says of its network, whose second address is Docker's, and of its kernel."""
    machine = process.windows.machine
    said = {
        "wslinfo": life.networking_mode(machine) if distribution.version == 2 else "wsl1",
        "hostname": "2001:db8::2 " if machine.no_ipv4 else f"{life.address(machine)} 172.17.0.1 ",
        "cat": life.boot_id(machine),
    }
    sys.stdout.write(f"{said[argv[0]]}\n")
    sys.stdout.flush()
    return 0


def _cut(command: list[str], after: int) -> int:
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=_environment("root"), start_new_session=True) as running:
        assert running.stdout
        sys.stdout.buffer.write(running.stdout.read(after))
        sys.stdout.buffer.flush()
        # All that runs in the distribution ends with it.
        os.killpg(running.pid, signal.SIGKILL)
    # The relay in the distribution is gone, and with it the code of what it ran.
    return 1


def _until_all_have_ended(command: list[str], user: str) -> int:
    """Run a command, and end when nothing that it has left behind has its streams any more."""
    reader, writer = os.pipe()
    code = subprocess.run(command, env=_environment(user), check=False, pass_fds=(writer,)).returncode
    os.close(writer)
    os.read(reader, 1)
    return code & 0xFF


def _environment(user: str) -> dict[str, str]:
    # Nothing of Windows' environment reaches Linux but what WSLENV names, and we name nothing there.
    return {
        "HOME": os.environ.get("GPUFARM_WSL_HOME", "/tmp"),
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/lib/wsl/lib",
        "USER": user,
        "LANG": "C.UTF-8",
    }


def entered(distribution: Distribution, user: str, argv: list[str]) -> list[str]:
    """Return the command that runs a command inside a distribution."""
    if distribution.container:
        inside = {**_environment(user), "HOME": "/root", "WSL_DISTRO_NAME": distribution.name}
        given = [f"--env={name}={value}" for name, value in inside.items()]
        return [docker_binary(), "exec", "--interactive", "--user", user, *given, distribution.container, *argv]
    uid = distribution.users[user]
    if uid != os.geteuid():
        argv = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", *argv]
    if distribution.root:
        return ["unshare", "--mount", "/bin/sh", "-c", ENTER, "sh", distribution.root, *argv]
    return argv
