# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Settings of .wslconfig, changed one by one. Nothing here reads or writes a file.

The grammar is that of src/shared/configfile/configfile.cpp in microsoft/WSL: names are read without regard to case, the
first of two settings counts, a comment may stand behind a value, a backslash escapes, and a line that cannot be read is
skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*")
# What was experimental once is read under both names (WslCoreConfig.cpp).
BOTH = {"networkingmode", "dnstunneling", "firewall", "autoproxy"}

_SECTION = re.compile(r"\[([A-Za-z][A-Za-z0-9]*)\][ \t]*(?=[\r\n#]|\Z)")
_KEY = re.compile(r"([A-Za-z][A-Za-z0-9]*)[ \t]*=[ \t]*")
_ESCAPES = {"\\": "\\", '"': '"', "b": "\b", "n": "\n", "t": "\t", "\r": ""}


@dataclass(frozen=True)
class Setting:
    """One setting, or with an empty key the beginning of a section."""

    section: str
    key: str
    value: str
    # Where its value is in the text, and where its line ends, before what ends it.
    start: int
    stop: int
    end: int


def _line_end(text: str, at: int) -> int:
    found = text.find("\n", at)
    if found < 0:
        return len(text)
    return found - 1 if found > at and text[found - 1] == "\r" else found


def _value(text: str, at: int) -> tuple[str, int, int] | None:
    """Value, its end without the blanks behind it, and the end of what was read; nothing where it cannot be read."""
    value, kept, stop, quoted = "", 0, at, False
    while at < len(text) and text[at] not in "\r\n":
        char = text[at]
        if char == "#" and not quoted:
            break
        if char == "\\":
            if text.startswith(("\\\n", "\\\r\n"), at):
                # Windows reads its lines in text mode, so both are one newline there.
                at = text.index("\n", at) + 1
                kept, stop = len(value), at
                continue
            if text[at + 1 : at + 2] not in _ESCAPES:
                return None
            value += _ESCAPES[text[at + 1]]
            at += 1
        elif char == '"':
            quoted = not quoted
        else:
            value += char
        at += 1
        if char not in " \t":
            kept, stop = len(value), at
    return None if quoted else (value[:kept], stop, at)


def settings(text: str) -> Iterator[Setting]:
    """Every setting of a text that WSL reads, and the beginning of every section, in order."""
    section = ""
    at = 1 if text.startswith("\ufeff") else 0
    while at < len(text):
        if text[at] in " \t\r\n":
            at += 1
            continue
        end = _line_end(text, at)
        opened = _SECTION.match(text, at)
        named = _KEY.match(text, at)
        if opened:
            section = opened.group(1).lower()
            comment = text[opened.end() : opened.end() + 1] == "#"
            yield Setting(section, "", "", at, opened.end(), end if comment else opened.end())
            at = end if comment else opened.end()
        elif named:
            found = _value(text, named.end())
            if found is None:
                # It is skipped to the end of the line at which reading stopped.
                at = _skipped(text, named.end())
                continue
            value, stop, after = found
            comment = text[after : after + 1] == "#"
            end = _line_end(text, after) if comment else after
            yield Setting(section, named.group(1).lower(), value, named.end(), max(stop, named.end()), end)
            at = end
        else:
            at = end


def _skipped(text: str, at: int) -> int:
    """The end of the line at which a value that cannot be read ends: it may have gone over several."""
    while at < len(text) and text[at] not in "\r\n":
        if text.startswith(("\\\n", "\\\r\n"), at):
            at = text.index("\n", at) + 1
        elif text[at] == "\\":
            at += 2
            if text[at - 1 : at] not in _ESCAPES:
                break
        else:
            at += 1
    return _line_end(text, min(at, len(text)))


def written(value: Any) -> str:
    """A value as WSL has it in memory."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, (str, int)):
        raise ValueError(f"a value of .wslconfig is a word, a number or a boolean, not {value!r}")
    if not all(char.isprintable() for char in str(value)):
        raise ValueError(f"a value of .wslconfig has only letters that can be printed, not {value!r}")
    return str(value)


def quoted(value: str) -> str:
    """A value as the file has it."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"' if "#" in value or value != value.strip(" \t") else escaped


def merged(text: str, wanted: Mapping[str, Mapping[str, Any]]) -> str:
    """The text with these settings, by section and key; all else in it is as it was."""
    for section, keys in wanted.items():
        for key, value in keys.items():
            if not NAME.fullmatch(str(section)) or not NAME.fullmatch(str(key)):
                raise ValueError(f"{section}.{key} is no setting: names are letters and digits")
            text = _with(text, str(section), str(key), written(value))
    return text


def _with(text: str, section: str, key: str, value: str) -> str:
    known = list(settings(text))
    sections = {section.lower()}
    if key.lower() in BOTH and section.lower() in ("wsl2", "experimental"):
        sections = {"wsl2", "experimental"}
    for each in known:
        if each.key == key.lower() and each.section in sections:
            same = each.value == value or (value in ("true", "false") and each.value.lower() == value)
            return text if same else text[: each.start] + quoted(value) + text[each.stop :]
    newline = "\r\n" if "\r\n" in text or "\n" not in text else "\n"
    line = f"{key}={quoted(value)}"
    ours = [each for each in known if each.section == section.lower()]
    if ours:
        return f"{text[: ours[-1].end]}{newline}{line}{text[ours[-1].end :]}"
    gap = "" if not text.strip("\ufeff \t\r\n") else newline if text.endswith("\n") else newline * 2
    return f"{text}{gap}[{section}]{newline}{line}{newline}"
