"""Windows' own programs as tasks, scripts and modules start them: wsl.exe, netsh.exe and others."""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.simulator.windows import command_line, powershell
from tests.simulator.windows.host import HANGS, PROGRAM_FILES, ROOT, SYSTEM32, Windows

NVIDIA_SMI = r"C:\Windows\System32\nvidia-smi.exe"
# A program that does not end holds its distribution (LifetimeManager.cpp counts the clients); here it ends at once.
FOREVER = re.compile(r"-d (\S+) --exec /bin/sleep infinity")
WSL = "import sys; sys.path.insert(0, sys.argv[1]); from tests.simulator.windows import programs as p; p.wsl_child()"


def run(windows: Windows, path: str, arguments: str, environment: Mapping[str, str] | None = None) -> tuple[int, bytes]:
    """Run a program, and return its code and what it prints."""
    name = path.rpartition("\\")[2].lower()
    if path == PROGRAM_FILES and not windows.machine.has_program_files:
        raise FileNotFoundError(path)
    if name == "wsl.exe" and windows.machine.installed:
        return _wsl(windows, PROGRAM_FILES if path == PROGRAM_FILES else SYSTEM32, arguments, environment or {})
    known: dict[str, Callable[[Windows, str], tuple[int, str]]] = {"netsh.exe": netsh, "powershell.exe": _script}
    if windows.machine.gpus:
        known["nvidia-smi.exe"] = nvidia_smi
    if name not in known:
        raise FileNotFoundError(path)
    windows.log(path, arguments)
    while windows.machine.seconds.get(path, 0) >= HANGS:
        time.sleep(60)
    code, text = known[name](windows, arguments)
    return code, text.encode()


def held(windows: Windows, task: str, path: str, arguments: str) -> int:
    """Run what a task starts; a program that does not end holds its distribution for as long as the task runs."""
    forever = FOREVER.fullmatch(arguments)
    code, _said = run(windows, path, arguments.replace("/bin/sleep infinity", "/bin/true") if forever else arguments)
    if forever and code == 0:
        with windows.changed() as machine:
            machine.holds[task] = forever.group(1)
    return code


def _wsl(windows: Windows, path: str, arguments: str, environment: Mapping[str, str]) -> tuple[int, bytes]:
    # In a process of its own, because the programs of distributions write to its streams.
    done = subprocess.run(
        [sys.executable, "-SEc", WSL, str(ROOT), str(windows.folder), path, arguments],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False,
        env={**os.environ, "WSL_UTF8": environment.get("WSL_UTF8", "")},
    )  # fmt: skip
    return done.returncode, done.stdout


def wsl_child() -> None:
    """Be wsl.exe in session 0, which SSH, PSRP and tasks have."""
    from tests.simulator.windows import wsl  # noqa: PLC0415 # of another process

    _code, _root, folder, path, arguments = sys.argv
    sys.exit(wsl.main(Windows(Path(folder)), path, arguments, {"WSL_UTF8": os.environ["WSL_UTF8"]}, session=0) & 0xFF)


def _script(windows: Windows, arguments: str) -> tuple[int, str]:
    """Run ``powershell.exe -EncodedCommand``; an error that nobody catches ends it with 1, and exit with its code."""
    words = command_line.split(f"powershell.exe {arguments}")[1:]
    if words[:-1] != ["-NoProfile", "-NonInteractive", "-EncodedCommand"]:
        # A policy of the domain may forbid files of scripts (AllSigned), whatever -ExecutionPolicy says.
        raise ValueError(f"powershell.exe {arguments} is not doubled")
    interpreter = powershell.Interpreter(windows)
    try:
        said = interpreter.run(base64.b64decode(words[-1], validate=True).decode("utf-16-le"))
    except powershell.Thrown as error:
        return 1, str(error)
    return interpreter.code, "".join(f"{line}\r\n" for line in said)


def netsh(windows: Windows, arguments: str) -> tuple[int, str]:
    """Run ``netsh.exe interface portproxy``: add also changes what is there, delete wants it to be there."""
    words = command_line.split(f"netsh.exe {arguments}")[1:]
    if words[:2] != ["interface", "portproxy"] or words[3:4] != ["v4tov4"]:
        raise ValueError(f"netsh.exe {arguments} is not doubled")
    if words[2:] == ["show", "v4tov4"]:
        return 0, _proxies(windows)
    given = dict(word.split("=", 1) for word in words[4:])
    here = f"{given['listenaddress']}/{given['listenport']}"
    with windows.changed() as machine:
        if words[2] == "add" and not machine.netsh_fails:
            machine.portproxy[here] = f"{given['connectaddress']}/{given['connectport']}"
        elif words[2] == "delete" and here in machine.portproxy:
            del machine.portproxy[here]
        else:
            return 1, "The system cannot find the file specified.\r\n\r\n"
    return 0, "\r\n"


def _proxies(windows: Windows) -> str:
    """Return the table of port proxies, whose head is in Windows' language."""
    heads = {
        "de": ("Abhören auf ipv4:", "Verbinden mit ipv4:", "Adresse", "Anschluss"),
        "en": ("Listen on ipv4:", "Connect to ipv4:", "Address", "Port"),
        "zh": ("侦听 ipv4:", "连接到 ipv4:", "地址", "端口"),
    }
    listen, connect, address, port = heads[windows.machine.language]
    rows: list[tuple[str, ...]] = [(address, port, address, port), ("-" * 15, "-" * 10, "-" * 15, "-" * 10)]
    rows += [(*here.split("/"), *there.split("/")) for here, there in windows.machine.portproxy.items()]
    lines = ["", f"{listen:<28}{connect}", "", *(f"{a:<16}{b:<12}{c:<16}{d}" for a, b, c, d in rows), ""]
    return "".join(f"{line}\r\n" for line in lines) if windows.machine.portproxy else "\r\n"


def nvidia_smi(windows: Windows, arguments: str) -> tuple[int, str]:
    """Print a line a GPU; the model of the driver is WDDM, TCC or MCDM."""
    if arguments != "--query-gpu=name,driver_version,driver_model.current --format=csv,noheader":
        raise ValueError(f"nvidia-smi.exe {arguments} is not doubled")
    if windows.machine.smi_fails:
        return 9, (
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest "
            "NVIDIA driver is installed and running.\r\n\r\n"
        )
    return 0, "".join(
        f"{gpu['name']}, {gpu['driver_version']}, {gpu['driver_model']}\r\n" for gpu in windows.machine.gpus
    )
