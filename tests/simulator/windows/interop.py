"""How a Windows program is started from Linux: /init makes a command line of the arguments, and takes few variables."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.simulator.windows import command_line, powershell, wsl
from tests.simulator.windows.host import POWERSHELL, Windows

# CreateProcessW takes no longer command line.
LONGEST = 32766


def windows_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that reach a Windows program: those that WSLENV names (UtilParseWslEnv, init/util.cpp)."""
    found = {"WSLENV": environment.get("WSLENV", "")}
    for entry in environment.get("WSLENV", "").split(":"):
        name, _slash, flags = entry.partition("/")
        # u is for the other direction only; paths would be translated.
        if name in environment and not set(flags) - {"w"}:
            found[name] = environment[name]
    return found


def main(folder: str, path: str, arguments: Sequence[str]) -> int:
    """Run a Windows program with Linux arguments; its exit code is cut to what Linux can hold."""
    # MultiByteToWideChar: what is no UTF-8 is lost.
    words = [os.fsencode(argument).decode("utf-8", "replace") for argument in arguments]
    line = command_line.joined(words)
    if len(line) + len(path) + 1 > LONGEST:
        # CreateNtProcessUtilityVm logs the program's name and errno, and ends with 1.
        sys.stderr.write(f"<3>WSL (1 - Relay) ERROR: CreateProcessEntryCommon: {path}: Invalid argument\n")
        return 1
    interop = Windows(Path(folder)).machine.interop
    if interop:
        if interop == "stale":
            sys.stderr.write("<3>WSL (302) ERROR: UtilConnectUnix:533: connect failed 111\n")
        return 1
    if path == POWERSHELL:
        Windows(Path(folder)).log(path, line)
        return powershell.main(Windows(Path(folder)), line) & 0xFF
    # Interop runs in the session of the user who has started the distribution.
    code = wsl.main(Windows(Path(folder)), path, line, windows_environment(os.environ), session=1)
    return code & 0xFF
