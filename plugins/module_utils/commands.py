# Copyright (c) gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Programs run side by side, with a limit of time that holds for their children too.

Nothing here needs Ansible: the gate on a node runs the same code.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ansible_collections.gpufarm.core.plugins.module_utils.problem import FoundError

if TYPE_CHECKING:
    Runner = Callable[[Sequence[Sequence[str]], float], "list[Command]"]


# Far above what 16 GPUs with thousands of processes print, far below what would hurt the node.
MAX_OUTPUT_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class Command:
    """What a call came to; C(returncode) is None when it could not be started or did not end in time."""

    argv: tuple[str, ...]
    returncode: int | None
    stdout: str = ""
    stderr: str = ""
    timed_out: bool = False
    error: str | None = None
    limit: float = 0.0

    @property
    def words(self) -> str:
        return "\n".join(part for part in (self.stdout.strip(), self.stderr.strip()) if part)


SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"


def program_path(name: str, search: str | None) -> str | None:
    """A program of that name in PATH, or where a system has them; with C(search) there only."""
    return shutil.which(name, path=search) or (shutil.which(name, path=SYSTEM_PATH) if search is None else None)


def environment() -> dict[str, str]:
    """The caller's environment in the C locale: messages are matched, and numbers have a point."""
    return dict(os.environ, LC_ALL="C")


@dataclass
class _Child:
    process: subprocess.Popen[bytes]
    output: dict[str, bytearray] = field(default_factory=lambda: {"stdout": bytearray(), "stderr": bytearray()})
    open_pipes: int = 0

    def start(self, selector: selectors.BaseSelector) -> None:
        for name, pipe in (("stdout", self.process.stdout), ("stderr", self.process.stderr)):
            if pipe is not None:
                selector.register(pipe, selectors.EVENT_READ, (self, name))
                self.open_pipes += 1

    def read(self, name: str, data: bytes) -> bool:
        """Take what came; False when there is no more to come, or more than can be right."""
        self.output[name] += data
        if len(self.output[name]) > MAX_OUTPUT_BYTES:
            self.kill()
        elif data:
            return True
        self.open_pipes -= 1
        return False

    def kill(self) -> None:
        # Each call leads its own process group, so this reaches what a wrapper script started too.
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def result(self, argv: Sequence[str], left: float, limit: float) -> Command:
        try:
            returncode: int | None = self.process.wait(max(left, 0.05))
        except subprocess.TimeoutExpired:
            returncode = None
        stdout, stderr = (bytes(self.output[name]).decode("utf-8", "replace") for name in ("stdout", "stderr"))
        return Command(tuple(argv), returncode, stdout, stderr, timed_out=returncode is None, limit=limit)

    def end(self, deadline: float) -> None:
        reap(self.process, deadline)
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


def reap(process: subprocess.Popen[bytes], deadline: float) -> None:
    """Take leave of a killed process, of one that no signal reaches because it hangs in the driver too."""
    try:
        process.wait(max(deadline - time.monotonic(), 0.05))
    except subprocess.TimeoutExpired:
        # Popen's destructor need not warn.
        process.returncode = -signal.SIGKILL


# Calls that initialise NVML at the same moment hold each other up: beside C(nvidia-smi -q -x), 220 ms on a host with
# two H200, C(nvlink -s) cost 14 ms when it started with it, and 4 ms when it started 20 to 40 ms later.
HEAD_START = 0.03


# How long the killed may take to be gone, all of one moment together.
KILL_WAIT = 1.0


# By how much C(collect) and C(run_commands) can be late: what was begun in time is asked to its end, call by call.
GRACE = 10.0


def start(argv: Sequence[str], stderr: int) -> subprocess.Popen[bytes]:
    """A program that has begun, and leads a process group of its own; who starts it ends it."""
    return subprocess.Popen(  # pylint: disable=ansible-bad-function  # the node's own gate has no module to run it
        list(argv),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=environment(),
        start_new_session=True,
    )


def run_commands(argvs: Sequence[Sequence[str]], timeout: float) -> list[Command]:
    """Run the calls at the same time; what has not ended after C(timeout) seconds is killed with all its children."""
    deadline = time.monotonic() + timeout
    children: dict[int, _Child] = {}
    results: dict[int, Command] = {}
    with selectors.DefaultSelector() as selector:
        try:
            for number, argv in enumerate(argvs):
                if number == 1 and "-q" in argvs[0]:
                    time.sleep(HEAD_START)
                try:
                    process = start(argv, subprocess.PIPE)
                except OSError as error:
                    results[number] = Command(tuple(argv), None, error=error.strerror or str(error))
                    continue
                children[number] = _Child(process)
                children[number].start(selector)
            while selector.get_map() and time.monotonic() < deadline:
                for key, _events in selector.select(max(deadline - time.monotonic(), 0)):
                    child, name = key.data
                    if not child.read(name, os.read(key.fd, 1 << 16)):
                        selector.unregister(key.fileobj)
            for number, child in children.items():
                results[number] = child.result(argvs[number], deadline - time.monotonic(), timeout)
        finally:
            for child in children.values():
                if child.process.returncode is None or child.open_pipes:
                    child.kill()
            given_up = time.monotonic() + KILL_WAIT
            for child in children.values():
                child.end(given_up)
    return [results[number] for number in sorted(results)]


def answer_of(argv: Sequence[str], timeout: float) -> Command:
    """What one call came to; FoundError when it could not be started or did not end in time."""
    (command,) = run_commands([argv], timeout)
    if command.error and not command.timed_out:
        raise FoundError(
            found=f"{argv[0]} could not be started ({command.error})",
            expected="a program that can be run on this host",
            next_step="mend or install it",
        )
    if command.timed_out:
        raise FoundError(
            found=f"{argv[0]} did not end within {timeout:g} s",
            expected="an answer",
            next_step="see what it waits for on this host, such as a lock, or files of a server that is away",
        )
    return command
