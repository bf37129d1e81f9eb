# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The settings files of WSL, changed key by key: /etc/wsl.conf and .wslconfig, which have one grammar.

WSL reads them as src/shared/configfile/configfile.cpp of microsoft/WSL does: names are letters and digits in any case,
of a key that is there twice the first counts, C(#) begins a comment also behind a value, a backslash escapes, and at
the end of a line continues it. Tools for INI files know nothing of that. Nothing here reads or writes a file.

Of .wslconfig Windows leaves out a byte order mark, reads CR LF as one newline, and goes on behind a line that is none
of this. /etc/wsl.conf is read byte by byte: a mark is such a line, a CR is a letter, and at such a line WSL stops.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils.problem import FoundError

NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*")
# What was experimental once is read under both names (WslCoreConfig.cpp).
BOTH = {"networkingmode", "dnstunneling", "firewall", "autoproxy"}

_SECTION = re.compile(r"\[([A-Za-z][A-Za-z0-9]*)\][ \t]*(?=[\r\n#]|\Z)")
# A line that begins as a section and is none ends with a carriage return alone, too.
_CUT_SECTION = re.compile(r"\[(?:[A-Za-z][A-Za-z0-9]*)?\]?[ \t]*(?=\r)")
_KEY = re.compile(r"([A-Za-z][A-Za-z0-9]*)[ \t]*=[ \t]*")
# ParseBool (stringshared.h).
_BOOLEANS = {"true": "true", "1": "true", "false": "false", "0": "false"}
_ESCAPES = {"\\": "\\", '"': '"', "b": "\b", "n": "\n", "t": "\t", "\r": ""}


@dataclass(frozen=True)
class Item:
    """What WSL finds: a setting, with an empty key the beginning of a section, or a line that it cannot read."""

    section: str
    key: str
    # None where it cannot be read.
    value: str | None
    # Where it is in the text, where its value begins and ends, and where its line ends, before what ends it.
    begin: int
    start: int
    stop: int
    end: int


def items(text: str, windows: bool) -> Iterator[Item]:
    """All that WSL finds in a text but blank lines and comments, in order."""
    section = ""
    at = 1 if windows and text.startswith("\ufeff") else 0
    while at < len(text):
        if text[at] in " \t\r\n":
            at += 1
            continue
        begin, end = at, _line_end(text, at)
        opened, named = _SECTION.match(text, at), _KEY.match(text, at)
        if opened:
            section = opened.group(1).lower()
            at = end if text.startswith("#", opened.end()) else opened.end()
            yield Item(section, "", "", begin, begin, opened.end(), at)
        elif named:
            value, stop, after = _value(text, named.end(), windows)
            # Of a value that cannot be read the rest of the line at which reading stopped is skipped.
            at = _line_end(text, after) if value is None or text.startswith("#", after) else after
            stop = at if value is None else max(stop, named.end())
            yield Item(section, named.group(1).lower(), value, begin, named.end(), stop, at)
        else:
            cut = _CUT_SECTION.match(text, at)
            at = cut.end() if cut else end
            if text[begin] != "#":
                yield Item(section, "", None, begin, begin, at, at)


def _line_end(text: str, at: int) -> int:
    found = text.find("\n", at)
    if found < 0:
        return len(text)
    return found - 1 if found > at and text[found - 1] == "\r" else found


def _value(text: str, at: int, windows: bool) -> tuple[str | None, int, int]:
    """Value, its end without the blanks behind it, and the end of what was read."""
    value, kept, stop, inside = "", 0, at, False
    while at < len(text) and text[at] not in "\r\n":
        char = text[at]
        if char == "#" and not inside:
            break
        if char == "\\":
            if text.startswith(("\\\n", "\\\r\n") if windows else "\\\n", at):
                at = text.index("\n", at) + 1
                kept, stop = len(value), at
                continue
            if text[at + 1 : at + 2] not in _ESCAPES:
                return None, stop, min(at + 1, len(text))
            value += _ESCAPES[text[at + 1]]
            at += 1
        elif char == '"':
            inside = not inside
        else:
            value += char
        at += 1
        if char not in " \t":
            kept, stop = len(value), at
    return None if inside else value[:kept], stop, at


def read(text: str, windows: bool) -> dict[str, dict[str, str]]:
    """What a file sets: section, key, value, names in small letters."""
    found: dict[str, dict[str, str]] = {}
    for item in items(text, windows):
        if item.key and item.value is not None:
            found.setdefault(item.section, {}).setdefault(item.key, item.value)
    return found


def value(text: str, section: str, key: str, windows: bool) -> str:
    """What counts of a setting, in whichever of its sections and case; empty where it is not set."""
    return next((item.value for item in items(text, windows) if item.value is not None and _is(item, section, key)), "")


def first_invalid(text: str, windows: bool) -> tuple[int, str] | None:
    """The number and text of the first line that WSL cannot read."""
    for item in items(text, windows):
        if item.value is None:
            return text.count("\n", 0, item.begin) + 1, text[item.begin : item.end].strip()
    return None


def written(value: bool | int | str) -> str:
    """A value as WSL has it in memory."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def quoted(value: str) -> str:
    """A value as the file has it."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"' if "#" in value or value != value.strip(" \t") else escaped


def changed(text: str, wanted: Mapping[str, Mapping[str, Any]], windows: bool) -> str:
    """The text with these settings, by section and key; all else in it is as it was. None takes a key out.

    FoundError: a setting that cannot be in such a file.
    """
    for section, keys in wanted.items():
        for key, value in keys.items():
            name = (str(section), str(key))
            _must_fit(name, value)
            text = _without(text, name, windows) if value is None else _with(text, name, written(value), windows)
    return text


def _must_fit(name: tuple[str, str], value: Any) -> None:
    if not all(NAME.fullmatch(word) for word in name):
        expected = "names of letters and digits"
    elif value is not None and not isinstance(value, (str, int)):
        expected = "a value that is a word, a number or a boolean"
    elif not str(value).isprintable():
        expected = "a value of letters that can be printed"
    else:
        return
    raise FoundError(f"{'.'.join(name)} with {value!r}", expected, "correct the setting")


def _is(item: Item, section: str, key: str) -> bool:
    sections = {section.lower()}
    if key.lower() in BOTH and sections <= {"wsl2", "experimental"}:
        sections = {"wsl2", "experimental"}
    return item.key == key.lower() and item.section in sections


def _without(text: str, name: tuple[str, str], windows: bool) -> str:
    for item in reversed(list(items(text, windows))):
        if _is(item, *name):
            # With the blanks in front of it, and the end of its line.
            text = text[: item.begin].rstrip(" \t") + re.sub(r"\A\r?\n", "", text[item.end :])
    return text


def _with(text: str, name: tuple[str, str], value: str, windows: bool) -> str:
    section, key = name
    known = list(items(text, windows))
    for each in known:
        # The first counts.
        if _is(each, section, key):
            same = each.value is not None and (each.value == value or value == _BOOLEANS.get(each.value.lower()))
            return text if same else text[: each.start] + quoted(value) + text[each.stop :]
    newline = "\r\n" if "\r\n" in text or (windows and "\n" not in text) else "\n"
    line = f"{key}={quoted(value)}"
    # Behind a line that cannot be read a new one might become a part of it.
    ours = [each for each in known if each.section == section.lower() and each.value is not None]
    if ours:
        return f"{text[: ours[-1].end]}{newline}{line}{text[ours[-1].end :]}"
    # A newline would continue a value that a backslash breaks off at the end; so it stays one that cannot be read.
    if text.endswith("\\") and known and known[-1].value is None and known[-1].end == len(text):
        text += "#"
    gap = "" if not text.strip("\ufeff \t\r\n") else newline if text.endswith("\n") else newline * 2
    return f"{text}{gap}[{section}]{newline}{line}{newline}"
