# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import pytest
from ansible_collections.gpufarm.core.plugins.module_utils.text import clean, clean_all, in_utc


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("00000000:00:06.0" + "\0" * 16, "00000000:00:06.0"),
        ("\x1b[31mred\x1b[0m", "[31mred [0m"),
        ("a\tb\r\nc", "a b  c"),
        ("\u202egnp.exe", "gnp.exe"),  # turns the direction of what follows
        ("\ud800half", "half"),  # cannot be written as UTF-8
        ("  two  spaces  ", "  two  spaces  "),
        ("Größe 数", "Größe 数"),
        ("", ""),
    ],
)
def test_what_steers_is_gone_and_what_can_be_read_stays(raw: str, expected: str) -> None:
    assert clean(raw) == expected
    assert clean(raw).isprintable()
    clean(raw).encode()


def test_every_text_of_an_answer_is_cleaned() -> None:
    found = {"a\x00": ["b\x1b[2J", {"c": "d\x00\x00", "e": 1}], "f": None, "g": True}
    assert clean_all(found) == {"a": ["b [2J", {"c": "d", "e": 1}], "f": None, "g": True}


@pytest.mark.parametrize(
    ("text", "utc"),
    [
        ("2026-11-30T02:41:00+01:00", "2026-11-30T01:41:00Z"),
        ("2026-11-29T20:11:00.25-05:30", "2026-11-30T01:41:00.25Z"),
        ("2026-11-30T01:41:00Z", "2026-11-30T01:41:00Z"),
        ("2026-11-30", "2026-11-30"),
        ("", ""),
    ],
)
def test_one_time_of_servers_in_several_zones_is_one_text(text: str, utc: str) -> None:
    assert in_utc(text) == utc
