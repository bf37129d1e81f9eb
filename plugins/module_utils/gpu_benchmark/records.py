# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The file with the records of acceptances: a line of JSON for each node and run."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ansible_collections.gpufarm.core.plugins.module_utils.problem import FoundError

if TYPE_CHECKING:
    Record = Mapping[str, Any]

COLLECTION_VERSION = "1.0.0"
"""That of galaxy.yml, which a module cannot read."""

# As it is written; strptime alone takes a month of one digit, too.
_DATE = "%Y-%m-%dT%H:%M:%SZ"
_NEEDED = {"node": str, "verdict": str, "level": str, "gpus": list}
# What is left of the first line may be as short as it likes.
_BEGIN = b'{"date":"'
_NEEDED_OF_GPU = ("uuid", "serial", "model", "sm_count", "power_limit_w", "figures")


def _record(line: bytes) -> Record | None:
    try:
        found = json.loads(line)
        if datetime.datetime.strptime(found["date"], _DATE).strftime(_DATE) != found["date"]:
            return None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    good = (
        all(isinstance(found.get(key), kind) for key, kind in _NEEDED.items())
        and isinstance(found.get("problems", []), list)
        and all(
            isinstance(gpu, dict)
            and all(key in gpu for key in _NEEDED_OF_GPU)
            and isinstance(gpu["uuid"], str)
            and isinstance(gpu["serial"], (str, type(None)))
            for gpu in found["gpus"]
        )
    )
    return found if good else None


def parse(content: bytes, path: str) -> tuple[list[Record], list[int]]:
    """The records, and the numbers of lines that are none, as a run leaves them that was killed while it wrote.

    A file without a single record is somebody else's.
    """
    records, skipped = [], []
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            record = _record(line)
            if record is None:
                skipped.append(number)
            else:
                records.append(record)
    if skipped and not records and not _BEGIN.startswith(content.lstrip()[: len(_BEGIN)]):
        raise FoundError(
            f"{path} holds {len(skipped)} lines, and none is a record of an acceptance",
            "a file that only playbooks/accept.yml wrote, or none; nothing was written to it",
            "move the file away, or give another accept_records",
        )
    return records, skipped


def refusal(path: Path) -> None:
    """FoundError where who runs this could not write such a file; nothing is changed."""
    nearest = next(each for each in (path, *path.parents) if each.exists())
    right = nearest.is_file() if nearest == path else nearest.is_dir()
    if not right or not os.access(nearest, os.W_OK):
        raise FoundError(
            f"{nearest}, {'which cannot be written to' if right else 'which is of another kind'}",
            "a file, or a folder to make it in, that who runs Ansible may write to",
            "set accept_records to a file in a folder of your own",
        )


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """The file, made where it was missing, for this process alone: another run waits."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def content_of(descriptor: int) -> bytes:
    parts = []
    os.lseek(descriptor, 0, os.SEEK_SET)
    while part := os.read(descriptor, 1 << 20):
        parts.append(part)
    return b"".join(parts)


def append(descriptor: int, before: bytes, records: Sequence[Record]) -> None:
    """Add records: all, or none where there is no room for them."""
    text = "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records)
    # What is left of a line stays one that is none.
    data = (b"\n" if before and not before.endswith(b"\n") else b"") + text.encode()
    try:
        while data:
            data = data[os.write(descriptor, data) :]
        os.fsync(descriptor)
    except OSError:
        os.ftruncate(descriptor, len(before))
        raise
