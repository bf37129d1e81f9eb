# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The settings files of WSL, changed key by key: /etc/wsl.conf, and .wslconfig has the same grammar.

WSL reads them as src/shared/configfile/configfile.cpp of microsoft/WSL does: names are letters and digits in any case,
of a key that is there twice the first counts, C(#) begins a comment also behind a value, a backslash at the end of a
line continues it. At a line that is none of this WSL stops reading /etc/wsl.conf; in .wslconfig it goes on behind it.
Tools for INI files know nothing of that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*")
_SECTION = re.compile(r"[ \t]*\[([A-Za-z][A-Za-z0-9]*)\][ \t]*(?:#.*)?\r?\n?", re.DOTALL)
_KEY = re.compile(r"[ \t]*([A-Za-z][A-Za-z0-9]*)[ \t]*=[ \t]*")
_ESCAPES = {"\\": "\\", '"': '"', "b": "\b", "n": "\n", "t": "\t", "\n": ""}


@dataclass(frozen=True)
class Line:
    """A line with those that continue it."""

    raw: str
    section: str
    # Empty where it is no setting.
    key: str = ""
    value: str | None = None
    # What stands in front of the value and behind it.
    before: str = ""
    after: str = ""

    @property
    def valid(self) -> bool:
        text = self.raw.strip(" \t\r\n")
        return self.value is not None or not text or text.startswith("#") or _SECTION.fullmatch(self.raw) is not None


def words(value: bool | int | str) -> str:
    """A value as WSL compares it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def quoted(value: str) -> str:
    """A value as it has to be written."""
    plain = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return f'"{plain}"' if plain != value or plain != plain.strip() or "#" in plain else plain


def _value(text: str, index: int) -> tuple[str | None, int]:
    """The value that begins there, None for one that cannot be read, and where it ends."""
    value, kept, inside = "", 0, False
    while index < len(text) and text[index] not in "\r\n":
        char = text[index]
        if char == "#" and not inside:
            break
        index += 1
        if char == '"':
            inside = not inside
        elif char == "\\":
            escaped = text[index : index + 1]
            if escaped not in _ESCAPES:
                return None, index
            value += _ESCAPES[escaped]
            index += 1
        else:
            value += char
        if char not in " \t":
            kept = len(value)
    return None if inside else value[:kept], index


def parsed(text: str) -> Iterator[Line]:
    """Each line of a file with what WSL makes of it."""
    section, index = "", 0
    while index < len(text):
        end = text.find("\n", index) + 1 or len(text)
        heading = _SECTION.fullmatch(text[index:end])
        section = heading[1].lower() if heading else section
        setting = _KEY.match(text, index, end)
        if setting:
            value, stop = _value(text, setting.end())
            if value is not None:
                end = text.find("\n", stop) + 1 or len(text)
            raw = text[index:end]
            # Blanks in front of a comment, or of the end of the line, are kept.
            kept = len(text[index:stop].rstrip(" \t")) if value is not None else len(raw.rstrip("\r\n"))
            kept = max(kept, len(setting[0]))
            yield Line(raw, section, setting[1].lower(), value, setting[0], raw[kept:])
        else:
            yield Line(text[index:end], section)
        index = end


def read(text: str) -> dict[str, dict[str, str]]:
    """What a file sets: section, key, value, names in small letters."""
    found: dict[str, dict[str, str]] = {}
    for line in parsed(text):
        if line.value is not None:
            found.setdefault(line.section, {}).setdefault(line.key, line.value)
    return found


def first_invalid(text: str) -> tuple[int, str] | None:
    """The number and text of the first line that WSL cannot read."""
    number = 1
    for line in parsed(text):
        if not line.valid:
            return number, line.raw.strip()
        number += line.raw.count("\n")
    return None


def changed(text: str, settings: Mapping[str, Mapping[str, Any]]) -> str:
    """The file with these settings; whatever they do not name stays as it is. A value of None takes a key out."""
    for section, keys in settings.items():
        for key, value in keys.items():
            lines = list(parsed(text))
            text = "".join(_without(lines, section, key) if value is None else _with(lines, section, key, words(value)))
    return text


def _without(lines: Sequence[Line], section: str, key: str) -> list[str]:
    return [line.raw for line in lines if (line.section, line.key) != (section.lower(), key.lower())]


def _with(lines: Sequence[Line], section: str, key: str, value: str) -> list[str]:
    raw = [line.raw for line in lines]
    for number, line in enumerate(lines):
        # The first counts.
        if (line.section, line.key) == (section.lower(), key.lower()):
            if not _same(line.value, value):
                raw[number] = f"{line.before}{quoted(value)}{line.after}"
            return raw
    ending = "\r\n" if raw and raw[0].endswith("\r\n") else "\n"
    new = f"{key} = {quoted(value)}{ending}"
    places = [number for number, line in enumerate(lines) if line.section == section.lower() and line.raw.strip()]
    place = places[-1] + 1 if places else len(raw)
    if place == len(raw) and raw and not raw[-1].endswith("\n"):
        raw[-1] += ending
    raw[place:place] = [new] if places else [*[ending] * bool(raw), f"[{section}]{ending}", new]
    return raw


def _same(found: str | None, wanted: str) -> bool:
    # WSL reads booleans in any case.
    return found == wanted or (found is not None and wanted in ("true", "false") and found.lower() == wanted)
