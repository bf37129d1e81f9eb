# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Text: from outside before anybody sees it, and for people."""

from __future__ import annotations

import calendar
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any


def clean(text: str) -> str:
    """The text without what steers a terminal or a page instead of being read.

    HashiCorp's plugin sends the whole C array of a PCI address, with the NUL characters behind it.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else " " for char in text).strip()


def clean_all(value: Any) -> Any:
    """The same of every text in what was JSON."""
    if isinstance(value, dict):
        return {clean(key): clean_all(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [clean_all(inner) for inner in value]
    return clean(value) if isinstance(value, str) else value


def one_line(text: str, limit: int = 400) -> str:
    """The end of a text, because that is where programs say why they gave up."""
    flat = " ".join(clean(text).split()).rstrip(".")
    return flat if len(flat) <= limit else "..." + flat[-limit:]


def utc(seconds: float | None = None) -> str:
    """A time in ISO 8601, to the second, in UTC; now where none is given."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def epoch(text: str) -> int:
    """Seconds since the epoch of a time as C(utc) writes it."""
    return calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%SZ"))


_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)([.]\d+)?(?:Z|([+-])(\d\d):(\d\d))")


def in_utc(text: str) -> str:
    """A time of RFC 3339 in UTC, as which each of Nomad's servers writes it in its own zone; another text as it is."""
    found = _TIME.fullmatch(text)
    if not found:
        return text
    sign, hours, minutes = found[3], int(found[4] or 0), int(found[5] or 0)
    east_s = (hours * 3600 + minutes * 60) * (-1 if sign == "-" else 1)
    seconds = calendar.timegm(time.strptime(found[1], "%Y-%m-%dT%H:%M:%S")) - east_s
    return utc(seconds)[:-1] + (found[2] or "") + "Z"


def numbered(words: Mapping[str, int]) -> str:
    """Words that occur so many times, as one text."""
    return ", ".join(word if number == 1 else f"{word} ({number}x)" for word, number in words.items()) or "-"


def first_of(names: Sequence[str], limit: int) -> str:
    """The first few names, and how many there are besides."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def columns(head: Sequence[str], rows: Sequence[Sequence[str]], limit: int | None = None) -> str:
    """A table of text, a line for each node; C(limit) counts those lines."""
    shown = [head, *rows[:limit]]
    last = len(head) - 1
    widths = [max(len(row[column]) for row in shown) for column in range(last)]
    lines = ["  ".join([*(row[column].ljust(widths[column]) for column in range(last)), row[last]]) for row in shown]
    if limit is not None and len(rows) > limit:
        lines.append(f"... and {len(rows) - limit} more nodes")
    return "\n".join(lines)
