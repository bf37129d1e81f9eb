# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import pytest
from ansible_collections.gpufarm.core.plugins.module_utils import retry

NOW = 1767225600.0  # Thu, 01 Jan 2026 00:00:00 GMT


@pytest.mark.parametrize(("attempt", "pause"), [(1, 1.0), (2, 2.0), (3, 4.0), (5, 16.0), (6, 30.0), (60, 30.0)])
def test_each_pause_is_twice_as_long_up_to_a_limit(attempt: int, pause: float) -> None:
    assert retry.pause_s(attempt) == pause
    assert retry.pause_s(attempt, "") == pause


def test_the_first_pause_can_be_shorter() -> None:
    assert [retry.pause_s(attempt, None, 0.5) for attempt in (1, 2, 3)] == [0.5, 1.0, 2.0]


@pytest.mark.parametrize(
    ("header", "pause"),
    [
        ("0", 0.0),
        (" 7 ", 7.0),
        ("30", 30.0),
        ("31", None),
        ("9" * 400, None),
        ("Thu, 01 Jan 2026 00:00:12 GMT", 12.0),
        ("Thu, 01 Jan 2026 01:00:12 +0100", 12.0),
        ("Wed, 31 Dec 2025 23:59:59 GMT", 0.0),
        ("Thu, 01 Jan 2026 00:00:31 GMT", None),
        ("-5", 2.0),
        ("soon", 2.0),
        ("Thu, 01 Jan 99999 00:00:12 GMT", 2.0),
        ("1.5", 2.0),
        ("²", 2.0),
    ],
)
def test_what_the_server_asks_for_counts(monkeypatch: pytest.MonkeyPatch, header: str, pause: float | None) -> None:
    monkeypatch.setattr(retry.time, "time", lambda: NOW)
    assert retry.pause_s(2, header) == pause


def test_only_what_may_pass_is_asked_again() -> None:
    assert sorted(retry.STATUS) == [429, 500, 502, 503, 504]
