# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An end from outside, which must leave no work behind: it unwinds the program, and waits while that is removed."""

from __future__ import annotations

import signal
from collections.abc import Sequence
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
