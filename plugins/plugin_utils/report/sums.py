# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Sums of what is known."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Iterable
from typing import Any


def known_numbers(values: Iterable[Any]) -> list[float]:
    return [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]


def mean(values: Iterable[Any]) -> float | None:
    known = known_numbers(values)
    return round(sum(known) / len(known), 1) if known else None


def total(values: Iterable[Any], digits: int = 2) -> float | None:
    known = known_numbers(values)
    return round(sum(known), digits) if known else None


def natural_key(text: str) -> list[tuple[int, int, str]]:
    """Sorts gpu2 before gpu10 and driver 570.9 before 570.86."""
    # What else is a digit to Python, as the 2 of m², no number is made of.
    parts = re.findall(r"([0-9]{1,18})|([^0-9]+)", text)
    return [(0, int(digits), "") if digits else (1, 0, other) for digits, other in parts]


def one_line(text: Any) -> str:
    return " ".join(str(text).split())


def number_of(value: Any) -> float | None:
    """A number that money and throughput can be; YAML and extra variables also bring numbers as text."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) and number >= 0 else None


def parse_time(text: str) -> datetime.datetime:
    """A time with its zone, UTC where it has none."""
    found = datetime.datetime.fromisoformat(text)
    return found if found.tzinfo else found.replace(tzinfo=datetime.UTC)
