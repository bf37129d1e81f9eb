# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An end from outside, which must leave no work behind: it unwinds the program, and waits while that is removed."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def unwind() -> None:
    """From now on a signal is an exception."""
    for each in SIGNALS:
        signal.signal(each, _interrupted)


def _interrupted(number: int, _frame: Any) -> NoReturn:
    # Another one must not interrupt the removal.
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(128 + number)


def hold() -> list[int]:
    """From now on signals only become known, by this list; those that are ignored already stay so."""
    came: list[int] = []
    for each in SIGNALS:
        if signal.getsignal(each) is not signal.SIG_IGN:
            signal.signal(each, lambda number, _frame: came.append(number))
    return came


def release(came: Sequence[int]) -> None:
    """Make up for what came meanwhile."""
    unwind()
    if came:
        signal.raise_signal(came[0])


LOOK_EVERY_S = 2.0
"""How often is looked whether somebody still waits."""
_BECOMES = ("sudo", "su")
"""They start a session of their own between Ansible's and the module."""


def watch_controller() -> Callable[[], bool]:
    """What tells, whenever it is asked, whether nobody can get the module's answer any more.

    A terminal that hangs up ends what runs in it; with Ansible's pipelining there is none. Then a blank line each time,
    which Ansible skips before an answer, cannot be written; or who had started the session is gone, which is Ansible
    itself where it runs on the same machine. An end of what is above that is none of this.
    """
    before = _session()

    def gone() -> bool:
        now = _session()
        try:
            os.write(1, b"\n")
        except BlockingIOError:
            pass
        except OSError:
            return True
        return bool(before and now and now[0] == before[0] and now[1] != before[1])

    return gone


@contextlib.contextmanager
def ended_with_controller() -> Iterator[None]:
    """Unwound as by a signal is what is done within when nobody can get the module's answer any more."""
    gone = watch_controller()

    def look(*_signal: Any) -> None:
        if gone():
            signal.setitimer(signal.ITIMER_REAL, 0)
            _interrupted(signal.SIGHUP, None)

    signal.signal(signal.SIGALRM, look)
    # What is forked has no timer.
    signal.setitimer(signal.ITIMER_REAL, LOOK_EVERY_S, LOOK_EVERY_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _session() -> tuple[int, int] | None:
    """The leader of the session that Ansible has begun, and its parent; None where /proc does not show them."""
    pid = os.getpid()
    while pid > 1:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        name, _bracket, rest = stat.partition("(")[2].rpartition(") ")
        _state, parent, _group, session = rest.split()[:4]
        if pid == int(session) and name not in _BECOMES:
            return pid, int(parent)
        pid = int(parent)
    return None
