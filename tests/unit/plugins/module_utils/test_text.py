# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import pytest
from ansible_collections.gpufarm.core.plugins.module_utils.text import clean, clean_all


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
