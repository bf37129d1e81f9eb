# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: wsl
short_description: Run tasks in another WSL distribution of the same Windows machine
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - Runs commands in a WSL distribution from inside a distribution of the same Windows machine and user, through WSL's
    interop and C(wsl.exe), without SSH.
  - Files travel through standard input and output, binary safe and of any size.
  - For distributions of another Windows machine there is P(community.general.wsl#connection). The inventory plugin
    P(gpufarm.core.wsl#inventory) fills in the variables of both.
extends_documentation_fragment:
  - connection_pipelining
options:
  distribution:
    description: Name of the distribution, as C(wsl.exe --list) prints it.
    type: str
    default: inventory_hostname
    vars:
      - name: inventory_hostname
      - name: wsl_distribution
      - name: ansible_wsl_distribution
  remote_user:
    description:
      - User in the distribution.
      - If not set, it is the distribution's default user.
    type: str
    vars:
      - name: ansible_user
      - name: ansible_wsl_user
    ini:
      - section: defaults
        key: remote_user
    env:
      - name: ANSIBLE_REMOTE_USER
    cli:
      - name: user
    keyword:
      - name: remote_user
  wsl_exe:
    description:
      - Path of C(wsl.exe) as this distribution sees it.
      - If not set, it is the first on E(PATH), else where Windows and WSL's own package have it below C(/mnt/c).
    type: str
    vars:
      - name: ansible_wsl_exe
  start:
    description:
      - Whether a command may start a distribution that is stopped, as C(wsl.exe) does by itself.
      - If V(false), each connection first asks which distributions run, at the cost of one more start of C(wsl.exe).
    type: bool
    default: true
    vars:
      - name: ansible_wsl_start
  become_timeout:
    description: Seconds to wait for the password prompt, or the success, of privilege escalation.
    type: int
    default: 10
    vars:
      - name: ansible_wsl_become_timeout
notes:
  - Each command costs one start of C(wsl.exe), as does each file.
  - A command of more than about 24,000 bytes is refused, because Windows takes no command line of more than 32,766
    characters. Modules do not count, for they come as files or, with pipelining, through standard input.
  - The distribution needs C(/bin/sh), C(cat), C(wc) and C(base64).
"""

EXAMPLES = r"""
# An inventory
all:
  vars:
    ansible_connection: gpufarm.core.wsl
  hosts:
    Debian:
    build:
      wsl_distribution: Ubuntu-24.04
      ansible_user: root
"""

import base64
import contextlib
import os
import re
import secrets
import selectors
import shlex
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn, cast

from ansible.errors import AnsibleConnectionFailure, AnsibleError
from ansible.module_utils.common.text.converters import to_bytes, to_text
from ansible.plugins.connection import ConnectionBase
from ansible.utils.display import Display
from ansible_collections.gpufarm.core.plugins.module_utils import wsl
from ansible_collections.gpufarm.core.plugins.plugin_utils import interop

display = Display()

# wsl.exe ends with -1 for an error of its own; Linux keeps the last byte.
OWN_ERROR = 255
CHUNK = 65_536
# Without any it succeeds, too.
RUNNING = ("--list", "--running", "--quiet")


class End(NamedTuple):
    """How a command has ended."""

    text: bytes
    code: int


def parted(text: bytes | bytearray, mark: bytes) -> End | None:
    """What a command has printed on a stream, and its exit code, which follows its mark; None where there is none yet.

    What comes later is of processes that it has left behind.
    """
    found = re.search(mark + rb"(\d{1,3})\r?\n", text)
    return End(bytes(text[: found.start()]), int(found[1])) if found else None


def converse(process: subprocess.Popen[bytes], given: bytes, seen: dict[IO[bytes], bytearray], mark: bytes) -> None:
    """Send what is given, and read each stream until the mark; a process left behind keeps it open for longer."""
    left = memoryview(given)
    stdin = cast("IO[bytes]", process.stdin)
    reading = {stream for stream, text in seen.items() if not parted(text, mark)}
    with selectors.DefaultSelector() as selector:
        for stream in reading:
            selector.register(stream, selectors.EVENT_READ)
        selector.register(stdin, selectors.EVENT_WRITE)
        while reading:
            for key, _events in selector.select():
                stream = cast("IO[bytes]", key.fileobj)
                if stream is stdin:
                    try:
                        left = left[os.write(stdin.fileno(), left[:CHUNK]) :]
                    except BrokenPipeError:
                        left = left[:0]
                    if not left:
                        selector.unregister(stdin)
                        stdin.close()
                    continue
                text = seen[stream]
                begin = max(0, len(text) - len(mark) - 5)
                chunk = os.read(stream.fileno(), CHUNK)
                text += chunk
                if not chunk or parted(text[begin:], mark):
                    selector.unregister(stream)
                    reading.remove(stream)


class Connection(ConnectionBase):  # type: ignore[misc] # ansible-core has no types
    """Commands in a distribution, through wsl.exe."""

    transport = "gpufarm.core.wsl"
    has_pipelining = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._connected = False

    def _connect(self) -> Connection:
        if not self._connected:
            self._program = interop.Program.found(
                self._name, "wsl.exe", "ansible_wsl_exe", self.get_option("wsl_exe"), wsl.programs(None)
            )
            if not wsl.NAME.fullmatch(self._name):
                raise AnsibleConnectionFailure(
                    f"{self._name!r} cannot be the name of a WSL distribution. Expected: letters, digits, dots, "
                    "underscores and dashes. Next step: set wsl_distribution to a name that `wsl.exe --list` prints."
                )
            user = self.get_option("remote_user")
            if user and (user.startswith("-") or any(char in user for char in ' \t\r\n"')):
                raise AnsibleConnectionFailure(
                    f"{self._name}: {user!r} cannot be given to wsl.exe as a user. Expected: a name without blanks and "
                    "quotes, and no dash before it. Next step: set ansible_user."
                )
            if not self.get_option("start"):
                self._require_running()
            display.vvv(f"ESTABLISH WSL CONNECTION FOR USER: {user or '(default)'}", host=self._name)
            self._connected = True
        return self

    @property
    def _name(self) -> str:
        return str(self.get_option("distribution"))

    def _require_running(self) -> None:
        code, stdout, stderr = self._program.answered(RUNNING)
        self._refuse_own_error(code, stdout)
        if code:
            self._refuse_unfinished(code, stdout, stderr)
        # wsl.exe takes a name in any case.
        if self._name.casefold() not in [name.casefold() for name in wsl.parse_names(stdout)]:
            raise AnsibleConnectionFailure(
                f"{self._name}: the distribution does not run{interop.said(stderr)}. Expected: it runs, for "
                f"ansible_wsl_start is false. Next step: `wsl.exe -d {self._name}`, or ansible_wsl_start: true."
            )

    def _arguments(self, command: str, mark: bytes, marked: Sequence[str]) -> list[str]:
        """Options of wsl.exe for a command of a shell, whose exit code follows a mark on the streams C(marked).

        The command is wrapped so that what Windows' command line has to carry is letters, digits and blanks: neither
        its quoting rules nor its code pages touch what a user has written, and standard input stays free.
        """
        shell = self._play_context.executable or "/bin/sh"
        code = base64.b64encode(to_bytes(command, errors="surrogate_or_strict")).decode("ascii")
        # IFS and -f keep the unquoted word whole; they end with this shell.
        ends = "".join(f"echo {mark.decode()}$r{stream};" for stream in marked)
        script = f"cd 2>/dev/null;set -f;IFS=;c=$(echo {code}|base64 -d)&&{shell} -c $c;r=$?;{ends}exit $r"
        user = self.get_option("remote_user")
        arguments = ["-d", self._name, *(["-u", user] if user else []), "--exec", "/bin/sh", "-c", script]
        self._program.require_short(arguments, command)
        return arguments

    def _refuse_own_error(self, code: int, stdout: bytes) -> None:
        """Raise what wsl.exe itself has to say; it comes on standard output, in Windows' language."""
        if code != OWN_ERROR and code >= 0:
            return
        found = wsl.error_code(stdout)
        if not found and not wsl.is_utf16(stdout[:4096]):
            return
        user = self.get_option("remote_user")
        next_step = {
            "WSL_E_DISTRO_NOT_FOUND": "wsl.exe has no such distribution. Expected: one of this Windows user's, as "
            "`wsl.exe --list` prints them. Next step: set wsl_distribution.",
            "WSL_E_USER_NOT_FOUND": f"the distribution has no user {user!r}. Next step: set ansible_user.",
        }.get(
            (found or "").rpartition("/")[2],
            f"the distribution does not start. Next step: `wsl.exe -d {self._name}` in a terminal of Windows.",
        )
        raise AnsibleConnectionFailure(f"{self._name}: {next_step} wsl.exe says: {wsl.readable(stdout)}")

    def _refuse_interop(self, stderr: bytes) -> None:
        """Raise what Linux itself says where it did not start a Windows program, or WSL's init no program of Linux."""
        if b" failed" in stderr and b"execvpe(" in stderr and stderr.startswith(interop.SAYS):
            raise AnsibleConnectionFailure(
                f"{self._name}: the distribution cannot start /bin/sh{interop.said(stderr)}. Expected: it has one. "
                f"Next step: `wsl.exe -d {self._name}` in a terminal of Windows."
            )
        # A distribution that was ended before it had said anything leaves interop as it was.
        if stderr or self._program.answered(RUNNING)[0]:
            self._program.refuse_silence(stderr)

    def _refuse_unfinished(self, code: int, stdout: bytes, stderr: bytes) -> NoReturn:
        """Raise why something has not come to its end, at which it would have left its mark."""
        self._refuse_own_error(code, stdout)
        if not stdout:
            self._refuse_interop(stderr)
        raise AnsibleConnectionFailure(
            f"{self._name}: wsl.exe ended with {code} too early{interop.said(stderr)}. Expected: the distribution runs "
            "until a command has ended. Next step: look whether it was terminated meanwhile, and run it again."
        )

    def exec_command(self, cmd: str, in_data: bytes | None = None, sudoable: bool = True) -> tuple[int, bytes, bytes]:
        super().exec_command(cmd, in_data=in_data, sudoable=sudoable)
        display.vvv(f"EXEC {to_text(cmd)}", host=self._name)
        mark = secrets.token_hex(16).encode()
        with self._conversing(self._arguments(cmd, mark, ("", ">&2"))) as (process, seen):
            if sudoable and self.become and self.become.expect_prompt():
                self._escalate(process, seen, mark)
            converse(process, in_data or b"", seen, mark)
            stdout, stderr = (bytes(text) for text in seen.values())
            out, err = parted(stdout, mark), parted(stderr, mark)
            if out is None or err is None:
                self._refuse_unfinished(process.wait(), stdout, stderr)
        return out.code, out.text, err.text

    @contextlib.contextmanager
    def _conversing(self, arguments: list[str]) -> Iterator[tuple[subprocess.Popen[bytes], dict[IO[bytes], bytearray]]]:
        """A running wsl.exe, and what it has printed so far on standard output and on standard error."""
        with self._program.running(arguments) as process:
            streams = [cast("IO[bytes]", each) for each in (process.stdin, process.stdout, process.stderr)]
            for stream in streams:
                os.set_blocking(stream.fileno(), False)
            yield process, {stream: bytearray() for stream in streams[1:]}

    def _escalate(self, process: subprocess.Popen[bytes], seen: dict[IO[bytes], bytearray], mark: bytes) -> None:
        """Answer a password prompt, and take out what was printed until privilege escalation had succeeded."""
        stdout, stderr = seen
        until = time.monotonic() + self.get_option("become_timeout")
        answered = False
        with selectors.DefaultSelector() as selector:
            for stream in seen:
                selector.register(stream, selectors.EVENT_READ)
            while not self.become.check_success(bytes(seen[stdout])):
                if not answered and any(self.become.check_password_prompt(bytes(text)) for text in seen.values()):
                    os.write(
                        cast("IO[bytes]", process.stdin).fileno(),
                        to_bytes(self.become.get_option("become_pass") or "") + b"\n",
                    )
                    answered = True
                ended = not selector.get_map() or all(parted(text, mark) for text in seen.values())
                ready = [] if ended else selector.select(max(0.0, until - time.monotonic()))
                if not ready:
                    process.kill()
                    self._refuse_own_error(process.wait(), bytes(seen[stdout]))
                    said = b" ".join(end.text if (end := parted(text, mark)) else text for text in seen.values())
                    raise AnsibleError(
                        f"{self._name}: privilege escalation did not succeed{interop.said(said)}. "
                        "Next step: set ansible_become_password, or let the user become without one."
                    )
                for key, _events in ready:
                    stream = stdout if key.fileobj is stdout else stderr
                    chunk = os.read(stream.fileno(), CHUNK)
                    seen[stream] += chunk
                    if not chunk:
                        selector.unregister(stream)
        seen[stdout][:] = self.become.strip_become_success(bytes(seen[stdout]))
        seen[stderr][:] = self.become.strip_become_prompt(bytes(seen[stderr]))

    def put_file(self, in_path: str, out_path: str) -> None:
        super().put_file(in_path, out_path)
        display.vvv(f"PUT {in_path} TO {out_path}", host=self._name)
        target = shlex.quote(self._absolute(out_path))
        mark = secrets.token_hex(16).encode()
        with self._program.source(to_text(in_path)) as source:
            size = os.fstat(source.fileno()).st_size
            arguments = self._arguments(f"cat >{target} && wc -c <{target}", mark, (">&2",))
            with self._program.running(arguments, stdin=source) as process:
                stdout, stderr = process.communicate()
        self._said_of_file(process.returncode, stdout, stderr, mark, f"{out_path} cannot be written")
        if stdout.strip() != str(size).encode():
            raise AnsibleError(
                f"{self._name}: of the {size} bytes of {in_path}, {wsl.readable(stdout) or 0} arrived in {out_path}. "
                "Next step: look whether the distribution was terminated meanwhile, and run it again."
            )

    def _said_of_file(self, code: int, stdout: bytes, stderr: bytes, mark: bytes, failed: str) -> bytes:
        """Raise why a file was refused; else return what was said of it, whether or not all of it has arrived."""
        end = parted(stderr, mark)
        if end is None:
            self._refuse_own_error(code, stdout)
            if stderr.startswith(interop.SAYS):
                self._refuse_interop(stderr)
            return stderr
        if end.code:
            self._program.refuse_file(failed, wsl.readable(end.text or stdout))
        return end.text

    def fetch_file(self, in_path: str, out_path: str) -> None:
        super().fetch_file(in_path, out_path)
        display.vvv(f"FETCH {in_path} TO {out_path}", host=self._name)
        source = shlex.quote(self._absolute(in_path))
        target = Path(to_text(out_path))
        mark = secrets.token_hex(16).encode()
        with target.open("wb") as file:
            # The size goes ahead on another stream, so that a file that ends too early is told from a short one.
            arguments = self._arguments(f"wc -c <{source} >&2 && cat {source}", mark, (">&2",))
            with self._program.running(arguments, stdout=file) as process:
                _nothing, stderr = process.communicate(b"")
            arrived = os.fstat(file.fileno()).st_size
        try:
            with target.open("rb") as file:
                beginning = file.read(4096)
            said = self._said_of_file(process.returncode, beginning, stderr, mark, f"{in_path} cannot be read")
            size = (said.split() or [b"?"])[-1]
            # A log may have grown meanwhile.
            if not size.isdigit() or arrived < int(size):
                raise AnsibleError(
                    f"{self._name}: of the {wsl.readable(size)} bytes of {in_path}, {arrived} arrived. "
                    "Next step: look whether the distribution was terminated meanwhile, and run it again."
                )
        except AnsibleError:
            target.unlink(missing_ok=True)
            raise

    @staticmethod
    def _absolute(path: str) -> str:
        # A relative path that begins with a dash would be an option; home is where commands run.
        return path if path.startswith(("/", "./")) else f"./{path}"

    def reset(self) -> None:
        self.close()

    def close(self) -> None:
        self._connected = False
