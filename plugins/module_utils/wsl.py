# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What wsl.exe prints, as plain data. Nothing here runs anything."""

from __future__ import annotations

import re
import shutil
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils.text import clean

# wsl.exe refuses other names when a distribution is registered, and reads its own options by blanks alone: a name or a
# user that needs quotes cannot be given to it (ParseArgument in src/windows/common/helpers.cpp).
NAME = re.compile(r"[a-zA-Z0-9._-]+")
# Where a distribution finds wsl.exe if Windows' folders are not on its PATH. The second is needed where no user is
# logged on (WSL#9231).
PLACES = ("/mnt/c/Windows/System32/wsl.exe", "/mnt/c/Program Files/WSL/wsl.exe")
# Where Windows has its PowerShell.
POWERSHELL = "Windows/System32/WindowsPowerShell/v1.0/powershell.exe"
STATES = ("Stopped", "Running", "Installing", "Uninstalling", "Converting", "Exporting")

_ROW = re.compile(r"([* ]) ([a-zA-Z0-9._-]+) +(\S+(?: \S+)*) +([0-9]{1,3})[ \t]*")
_HEADER = re.compile(r"(?:  )?\S+(?: \S+)* {2,}\S+(?: \S+)* {2,}\S+(?: \S+)*[ \t]*")
# How a row ends, whatever stands before it: its version has a column of its own, one space away from a long state.
_ROW_END = re.compile(r"(?: {2,}|\S {2,}\S.* )[0-9]{1,3}[ \t]*$")
# The end of an error's text, the same in every language: "Error code: Wsl/Service/WSL_E_DISTRO_NOT_FOUND".
_ERROR_CODE = re.compile(r"(?:^|[\s:\uff1a])(Wsl/[A-Za-z0-9_/]+)\s*$")


def programs(named: str | None) -> list[str]:
    """Where wsl.exe may be, as a distribution sees it: that which was named alone, else PATH before PLACES."""
    return [named] if named else list(dict.fromkeys(filter(None, [shutil.which("wsl.exe"), *PLACES])))


def powershells(wsl_exe: str | None) -> list[str]:
    """Where powershell.exe may be: on the drive of a known wsl.exe, else on PATH, else on drive C as it is mounted."""
    for place in PLACES:
        drive, found, rest = (wsl_exe or "").rpartition(place[len("/mnt/c/") :])
        if found and not rest:
            return [drive + POWERSHELL]
    return list(dict.fromkeys(filter(None, [shutil.which("powershell.exe"), f"/mnt/c/{POWERSHELL}"])))


class DamagedListError(ValueError):
    """A list of distributions that cannot be read to its end; the message holds the line."""


def is_utf16(raw: bytes) -> bool:
    """Told by NUL bytes: of a list about half; in a Chinese message perhaps only those of its line ends."""
    return raw.count(0) * 5 > len(raw) or (0 < raw.count(b"\n\0") == raw.count(b"\n"))


def decode(raw: bytes) -> str:
    """Text of wsl.exe in any of its encodings, its lines ended by a newline alone.

    A byte order mark is rare and tells nothing that the NUL bytes do not. What is neither UTF-16 nor UTF-8 comes from a
    console's code page: its letters do not matter, its ASCII does.
    """
    if is_utf16(raw):
        text = raw.decode("utf-16-le" if raw[1::2].count(0) >= raw[::2].count(0) else "utf-16-be")
    else:
        text = raw.decode("utf-8", errors="replace")
    # Where text mode is applied twice a line ends in \r\r\n (tailscale#3170).
    return text.lstrip("\ufeff").replace("\r", "")


def readable(raw: bytes) -> str:
    """The same on one line, for messages; damage is shown, not raised."""
    try:
        text = decode(raw)
    except UnicodeDecodeError:
        text = raw.replace(b"\0", b"").decode("ascii", errors="replace")
    return " ".join(clean(text).split())


def error_code(raw: bytes) -> str | None:
    """The code with which wsl.exe itself ends an error, such as Wsl/Service/WSL_E_DISTRO_NOT_FOUND."""
    match = _ERROR_CODE.search(readable(raw[-4096:]))
    return match.group(1) if match else None


def parse_names(raw: bytes) -> list[str]:
    """The names that C(wsl.exe --list --quiet) prints, with or without C(--running)."""
    return [line.strip() for line in decode(raw).split("\n") if NAME.fullmatch(line.strip())]


def parse_distribution_list(raw: bytes) -> list[dict[str, Any]]:
    """What C(wsl.exe --list --verbose) prints: name, state, version and whether it is the default.

    Only the place of a column tells what it is: header and messages are localised. A text without a row, such as the
    message that there is no distribution, is an empty list. Once a list has begun, each line is a row or damage.
    """
    try:
        lines = [line for line in decode(raw).split("\n") if line.strip()]
    except UnicodeDecodeError as error:
        raise DamagedListError(
            f"The list of distributions ends or breaks inside a character at byte {error.start} of {len(raw)}"
        ) from None
    rows: list[dict[str, Any]] = []
    begun = False
    for line in lines:
        row = _ROW.fullmatch(line)
        if row:
            marker, name, state, version = row.groups()
            rows.append({"name": name, "state": state, "version": int(version), "default": marker == "*"})
            begun = True
        elif begun or line.startswith("* ") or _ROW_END.search(line):
            raise DamagedListError(f"The list of distributions has a line that is none of its rows: {line.strip()!r}")
        else:
            begun = _HEADER.fullmatch(line) is not None
    if sum(row["default"] for row in rows) > 1:
        raise DamagedListError("The list of distributions has more than one default")
    return rows
