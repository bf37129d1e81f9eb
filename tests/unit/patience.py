# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How long a test waits for something that comes: no verdict may hang on how busy the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_S = 300

T = TypeVar("T")


def wait_for(look: Callable[[], T]) -> T:
    """The first answer of ``look`` that is true."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := look()):
        assert time.monotonic() < deadline, f"not within {PATIENCE_S} s"
        time.sleep(0.02)
    return found
