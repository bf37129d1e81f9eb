"""How WSL reads .wslconfig (src/shared/configfile/configfile.cpp), letter by letter as there."""

from __future__ import annotations

import re
from pathlib import Path

ESCAPES = {"\\": "\\", '"': '"', "b": "\b", "n": "\n", "t": "\t", "\r": "", "\n": ""}


def read(path: Path) -> dict[str, str]:
    """Return what counts of a file, by ``section.key`` in small letters; nothing where there is no file."""
    # _wfopen(..., "rt,ccs=UTF-8"): a mark says which encoding it is and is left out, and CR LF is one newline.
    raw = path.read_bytes() if path.is_file() else b""
    return parse(raw.decode("utf-16" if raw.startswith(b"\xff\xfe") else "utf-8-sig"))


def parse(text: str) -> dict[str, str]:
    """Return the same of a text without a mark."""
    reader = Reader(text.replace("\r\n", "\n"))
    found: dict[str, str] = {}
    section = ""
    while reader.char:
        reader.take(r"[ \t\r\n]")
        if reader.char == "[":
            reader.next()
            word = reader.name()
            closed = reader.char == "]"
            reader.next() if closed else None
            reader.take(r"[ \t]")
            if word and closed and reader.char in ("", "\n", "\r", "#"):
                section = word
            if reader.char != "\r":
                reader.skip()
            continue
        key = reader.name()
        reader.take(r"[ \t]")
        if not key or reader.char != "=":
            reader.skip()
            continue
        reader.next()
        value = reader.value()
        if value is not None:
            # The first of two counts; the other is a warning.
            found.setdefault(f"{section}.{key}".lower(), value)
        if value is None or reader.char == "#":
            reader.skip()
    return found


class Reader:
    """One letter at a time."""

    def __init__(self, text: str) -> None:
        self.letters = iter(text)
        self.char = ""
        self.next()

    def next(self) -> None:
        self.char = next(self.letters, "")

    def take(self, pattern: str) -> str:
        """Take letters of a kind."""
        found = ""
        while self.char and re.fullmatch(pattern, self.char):
            found += self.char
            self.next()
        return found

    def name(self) -> str:
        return self.take("[A-Za-z0-9]") if re.fullmatch("[A-Za-z]", self.char) else ""

    def skip(self) -> None:
        """Leave out what is left of a line."""
        self.take(r"[^\n]")

    def value(self) -> str | None:
        self.take(r"[ \t]")
        value, kept, quoted = "", 0, False
        while self.char not in ("", "\n", "\r") and (self.char != "#" or quoted):
            this = self.char
            if this == "\\":
                self.next()
                if self.char not in ESCAPES:
                    return None
                value += ESCAPES[self.char]
            elif this == '"':
                quoted = not quoted
            else:
                value += this
            if this not in (" ", "\t"):
                kept = len(value)
            self.next()
        return None if quoted else value[:kept]
