# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The lines that a program prints, one at a time, with a limit of time.

Nothing here needs Ansible: the gate on a node runs the same code.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, cast

from ansible_collections.gpufarm.core.plugins.module_utils.commands import KILL_WAIT, reap, start

MAX_LINE_BYTES = 64 * 1024


class SourceError(Exception):
    """A source of the kernel log gives none; the message says why."""


def lines_of(argv: Sequence[str], timeout: float) -> Iterator[bytes]:
    """The lines that a program prints, one at a time; SourceError when it fails or does not end in time."""
    deadline = time.monotonic() + timeout
    process = start(argv, subprocess.STDOUT)
    output = cast(IO[bytes], process.stdout)
    try:
        yield from lines_in(_chunks(output.fileno(), deadline, " ".join(argv), timeout))
        returncode = process.wait(max(deadline - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        raise slow(" ".join(argv), timeout) from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        # Not by Popen's own context, which waits without limit for one that hangs in the kernel.
        reap(process, time.monotonic() + KILL_WAIT)
        output.close()
    if returncode:
        raise SourceError(f"{' '.join(argv)} ended with exit code {returncode}")


def slow(what: str, timeout: float) -> SourceError:
    return SourceError(f"{what} did not end within {timeout:.3g} s")


def _chunks(descriptor: int, deadline: float, what: str, timeout: float) -> Iterator[bytes]:
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([descriptor], [], [], left)[0]:
            raise slow(what, timeout)
        chunk = os.read(descriptor, 1 << 16)
        if not chunk:
            return
        yield chunk


def lines_in(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The lines in these chunks; of one that is longer than the kernel writes them, the start."""
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        yield from whole
        rest = rest[:MAX_LINE_BYTES]
    if rest:
        yield rest
