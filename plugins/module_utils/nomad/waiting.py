# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Waiting for a state of Nomad."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils.nomad.client import NomadError

LONGEST_WAIT = 60.0


def wait_until(
    fetch: Callable[[int, float], tuple[int, Any]],
    good: Callable[[Any], bool],
    timeout: float,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> Any:
    """Ask until the answer is good or the time is up; returns the last answer.

    C(fetch(index, wait)) returns the next index and an answer. What a server cannot tell for a moment, as while it
    elects a leader, is asked again; the last such error is raised when the time is up without any answer.
    """
    deadline = clock() + timeout
    index = 0
    answers: list[Any] = []
    while True:
        left = deadline - clock()
        try:
            index, answer = fetch(index, max(0.0, min(left, LONGEST_WAIT)))
        except NomadError as error:
            if not error.transient:
                raise
            if deadline - clock() <= 0:
                if answers:
                    return answers[0]
                raise
            index = 0
        else:
            answers = [answer]
            if good(answer) or deadline - clock() <= 0:
                return answer
        # Also where every answer has news, a busy farm must not be asked without a break.
        pause(min(0.5, max(0.05, deadline - clock())))
