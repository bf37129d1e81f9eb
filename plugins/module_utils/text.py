# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Text from outside, before anybody sees it."""

from __future__ import annotations

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
