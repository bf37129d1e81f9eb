# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""When a server that is overloaded, or just starts, is asked again."""

from __future__ import annotations

import email.utils
import time

STATUS = frozenset({429, 500, 502, 503, 504})
LONGEST_S = 30.0


def pause_s(attempt: int, retry_after: str | None = None, first_s: float = 1.0) -> float | None:
    """Seconds to wait after attempt number C(attempt), the first is 1; None when that is longer than anybody waits.

    What the server asks for in its header C(Retry-After), as seconds or as a date, counts; otherwise C(first_s), and
    twice as long each time.
    """
    asked = _seconds(retry_after or "")
    if asked is None:
        return min(LONGEST_S, first_s * 2.0 ** (attempt - 1))
    return asked if asked <= LONGEST_S else None


def _seconds(text: str) -> float | None:
    plain = text.strip()
    if plain.isdecimal():
        return float(plain)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(plain).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        # Python before 3.10 says TypeError.
        return None
