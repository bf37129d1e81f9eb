# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""How a program of Windows is started from inside a WSL distribution, and what it means when nothing comes of it."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from ansible.errors import AnsibleConnectionFailure, AnsibleError, AnsibleFileNotFound
from ansible_collections.gpufarm.core.plugins.module_utils import wsl

# CreateProcessW takes no more, the program's name included.
LONGEST_COMMAND_LINE = 32_766
# How WSL's own programs of Linux begin what they print.
SAYS = (b"<3>WSL (", b"<3>init: (")
# For a question, however slow Windows starts.
ANSWER_S = 300
# How long wsl.exe may take to end after its command has. What is left behind in the distribution keeps it (WSL#12886).
FAREWELL_S = 0.5


def said(raw: bytes) -> str:
    """What a program has printed, in parentheses, if anything."""
    text = wsl.readable(raw)
    return f" ({text})" if text else ""


@dataclass(frozen=True)
class Program:
    """A program of Windows, and the host for which it is run."""

    host: str
    path: str

    @classmethod
    def found(cls, host: str, name: str, option: str, named: str | None, places: Sequence[str]) -> Program:
        """The first of the places that is there."""
        for place in [named] if named else places:
            if Path(place).is_file():
                return cls(host, place)
        raise AnsibleConnectionFailure(
            f"{host}: {name} was not found ({named or 'neither on PATH nor below /mnt/c'}). Expected: Ansible "
            f"runs in a WSL distribution of that Windows machine, with drive C mounted. Next step: set {option}."
        )

    def require_short(self, arguments: Sequence[str], command: str) -> None:
        """Raise where a command makes too long a command line."""
        length = len(self.path) + sum(len(argument) + 3 for argument in arguments)
        if length > LONGEST_COMMAND_LINE:
            raise AnsibleError(
                f"{self.host}: the command has {len(command)} characters, which makes a Windows command line of "
                f"{length}. Expected: at most {LONGEST_COMMAND_LINE}. Next step: put it into a file (copy, script)."
            )

    @contextlib.contextmanager
    def running(self, arguments: Sequence[str], **streams: Any) -> Iterator[subprocess.Popen[bytes]]:
        """The running program, which is killed where its user is cut off, as a task is by its timeout.

        Popen itself would wait for its end then, however long that takes.
        """
        process = self._started(arguments, **streams)
        try:
            yield process
        except BaseException:
            process.kill()
            raise
        finally:
            try:
                process.wait(FAREWELL_S)
            except subprocess.TimeoutExpired:
                # It is left alone, for it carries what was left behind; Popen's destructor need not warn.
                process.returncode = 0
            for stream in (process.stdin, process.stdout, process.stderr):
                # What is not sent yet has nobody to go to.
                with contextlib.suppress(OSError):
                    if stream:
                        stream.close()

    def _started(self, arguments: Sequence[str], **streams: Any) -> subprocess.Popen[bytes]:
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
        try:
            # A folder of Windows' own: of one of Linux, wsl.exe and cmd.exe would complain.
            return subprocess.Popen([self.path, *arguments], cwd=Path(self.path).parent, **streams)
        except OSError as error:
            if error.errno == errno.ENOEXEC:
                raise AnsibleConnectionFailure(
                    f"{self.host}: this distribution cannot run {self.path}: interop with Windows is switched off. "
                    "Expected: `[interop] enabled` is not false in /etc/wsl.conf, and /proc/sys/fs/binfmt_misc has "
                    "WSLInterop. Next step: correct it, then `wsl.exe --terminate` this distribution from Windows."
                ) from None
            raise AnsibleConnectionFailure(
                f"{self.host}: {self.path} cannot be started: {error}. Expected: it starts as in a terminal of this "
                "distribution. Next step: run it there, and mend what it says."
            ) from None

    def source(self, path: str) -> BinaryIO:
        """A file of the control node that is to be copied."""
        try:
            return Path(path).open("rb")
        except FileNotFoundError:
            raise AnsibleFileNotFound(
                f"{self.host}: {path} is not there to be copied. Expected: a file where Ansible runs. Next step: "
                "correct its path."
            ) from None

    def refuse_file(self, failed: str, text: str) -> NoReturn:
        """Raise what the other side has said of a file that it did not write or read."""
        raise AnsibleError(
            f"{self.host}: {failed}: {text.rstrip('.')}. Expected: a path that the user of this connection may use. "
            "Next step: correct it, or what that user may do there."
        )

    def answered(self, arguments: Sequence[str]) -> tuple[int, bytes, bytes]:
        """Exit code and output of a program that is asked something, and given nothing."""
        with self.running(arguments, stdin=subprocess.DEVNULL) as process:
            try:
                stdout, stderr = process.communicate(timeout=ANSWER_S)
            except subprocess.TimeoutExpired:
                raise AnsibleConnectionFailure(
                    f"{self.host}: {self.path} did not answer within {ANSWER_S} s. Expected: an answer in seconds. "
                    "Next step: run it by hand; where it hangs there, too, `wsl.exe --shutdown` from Windows."
                ) from None
        return process.returncode, stdout, stderr

    def refuse_silence(self, stderr: bytes) -> None:
        """Raise what Linux itself says, or does not say, where it did not start a Windows program."""
        if not stderr or stderr.startswith(SAYS):
            found = repr(os.environ["WSL_INTEROP"]) if os.environ.get("WSL_INTEROP") else "not set"
            raise AnsibleConnectionFailure(
                f"{self.host}: nothing came of {self.path}{said(stderr)}; WSL_INTEROP is {found}. Expected: it "
                "names the socket of a session that lives, in /run/WSL. Next step: run Ansible in a new terminal of "
                "this distribution, or set WSL_INTEROP."
            )
