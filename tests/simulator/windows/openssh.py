"""What OpenSSH for Windows does with the command of a session: it gives it to cmd.exe, or to the shell that is set.

A real sshd runs this as its forced command, with the folder of the machine.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

from tests.simulator.windows import wsl
from tests.simulator.windows.host import PROGRAM_FILES, SYSTEM32, Windows

# cmd.exe takes no longer command line.
LONGEST = 8191


def cmd(windows: Windows, line: str) -> int:
    """Run a line as cmd.exe /c does: variables between percent signs first, then carets and operators."""
    if len(line) > LONGEST:
        sys.stderr.write("The command line is too long.\r\n")
        return 1
    line = expanded(windows, line)
    plain, quoted, index = "", False, 0
    while index < len(line):
        char = line[index]
        if char == '"':
            quoted = not quoted
        elif char == "^" and not quoted:
            index += 1
            char = line[index : index + 1]
        elif char in "&|<>" and not quoted:
            sys.stderr.write(f"{char} is not doubled\r\n")
            return 1
        plain += char
        index += 1
    # sshd puts quotes around the whole line, so those of the program stay.
    program, rest = re.fullmatch(r'("[^"]*"|[^ ]*) ?(.*)', plain, re.DOTALL).groups()  # type: ignore[union-attr] # any
    return start(windows, program.strip('"'), rest)


def expanded(windows: Windows, line: str) -> str:
    """Return a line with its variables between percent signs; what is no variable stays as it is."""
    known = {"computername": windows.machine.name, "path": r"C:\Windows\system32"}
    return re.sub(r"%(\w+)%", lambda found: known.get(found.group(1).lower(), found.group()), line)


def shell_of_powershell(windows: Windows, line: str) -> int:
    """Run a line as powershell.exe -c does; what is given to a program is taken apart and put together again."""
    program, token, literal = line.partition(" --% ")
    if token and re.fullmatch(r"[\w.]+", program):
        # about_Parsing: the rest is the program's as it is, but for variables, up to a line break or a pipe.
        if re.search(r"[\r\n|&]", re.sub(r'"[^"]*("|$)', "", literal)):
            sys.stderr.write("what follows --% and its end is not doubled\r\n")
            return 1
        return start(windows, program, expanded(windows, literal))
    # The operator that takes a text for a program's name.
    line = re.sub(r"^& ", "", line)
    words = []
    for found in re.finditer(r"""'((?:[^']|'')*)'|"([^"$`]*)"|([^\s'"$`;|&<>(){}@,#]+)|(\S)""", line):
        single, double, bare, other = found.groups()
        if other is not None:
            sys.stderr.write(f"{other} is not doubled\r\n")
            return 1
        words.append(single.replace("''", "'") if single is not None else double if double is not None else bare)
    # Windows PowerShell puts quotes around what has blanks, and leaves quotes inside as they are.
    rest = " ".join(f'"{word}"' if " " in word else word for word in words[1:])
    return start(windows, words[0] if words else "", rest)


def start(windows: Windows, program: str, rest: str) -> int:
    if program in ("powershell", "powershell.exe") and windows.machine.has_powershell:
        # Most sessions start wsl.exe, and each would load it.
        from tests.simulator.windows import powershell  # noqa: PLC0415

        windows.log("powershell.exe", rest)
        return powershell.main(windows, rest)
    places = {"wsl": SYSTEM32, "wsl.exe": SYSTEM32, SYSTEM32: SYSTEM32, PROGRAM_FILES: PROGRAM_FILES}
    if program in places and windows.machine.installed:
        return wsl.main(windows, places[program], rest, {}, session=0) & 0xFF
    sys.stderr.write(f"'{program}' is not recognized as an internal or external command,\r\n"
                     "operable program or batch file.\r\n")  # fmt: skip
    return 1


def cut(windows: Windows, command: str) -> None:
    """End the session as a network that fails does: what it was to start runs, and nobody hears of it."""
    expression = windows.machine.cut
    if expression is None or not re.search(expression, command):
        return
    with windows.changed() as machine:
        machine.cut = None
    session = os.getppid()
    os.kill(session, signal.SIGKILL)
    while os.getppid() == session:
        time.sleep(0.01)


def main(folder: str) -> int:
    """Run the command of this session."""
    windows = Windows(Path(folder))
    windows.log("ssh", os.environ.get("SSH_CONNECTION", ""))
    command = os.environ.get("SSH_ORIGINAL_COMMAND", "")
    cut(windows, command)
    sys.stdout.write(windows.machine.banner)
    powershell_is_set = re.search("powershell|pwsh", windows.machine.default_shell or "", re.IGNORECASE)
    return (shell_of_powershell if powershell_is_set else cmd)(windows, command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
