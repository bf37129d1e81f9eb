# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the kernel log of this boot says of GPUs."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from ansible_collections.gpufarm.core.plugins.module_utils import xid_events
from ansible_collections.gpufarm.core.plugins.module_utils.command_lines import SourceError, lines_in, lines_of, slow
from ansible_collections.gpufarm.core.plugins.module_utils.commands import program_path
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi.node import read_file
from ansible_collections.gpufarm.core.plugins.module_utils.text import clean, utc
from ansible_collections.gpufarm.core.plugins.module_utils.xid_events import Event

_KERNEL_FACILITY = "0"


_SYSLOG_LINE = re.compile(r"^<([0-9]{1,4})>\s*(?:\[\s*([0-9]{1,12}\.[0-9]{1,9})\])?\s*(?:\[\s*[TC][0-9]+\])?\s?(.*)")


_KMSG_LINE = re.compile(r"^([0-9]{1,4}),([0-9]{1,20}),([0-9]{1,20}),[^;]*;(.*)")


_ESCAPED = re.compile(r"\\x([0-9a-fA-F]{2})")


@dataclasses.dataclass
class _Seen:
    """How much of the log was read: a kernel that wrote nothing since it started cannot be."""

    records: int = 0
    said: str = ""
    first: float | None = None
    """When the first message was written, in seconds since the epoch."""


SOURCES = ("journal", "dmesg", "kmsg")
PARTIAL_S = 300
"""A kernel writes from its first second on. A log that begins later than this has lost what came before."""


def journal_records(lines: Iterable[bytes], seen: _Seen) -> Iterator[tuple[float, str]]:
    """Time and message of the entries that C(journalctl --output=json) prints."""
    for line in lines:
        if not line.startswith(b"{"):
            seen.said = clean(line.decode("utf-8", "replace").strip()) or seen.said
            continue
        if not seen.records:
            seen.first = _time_of(line)
        seen.records += 1
        # A message that is not UTF-8, as a process can be named, is printed as a list of numbers.
        if not any(needle in line for needle in xid_events.NEEDLES) and not re.search(rb'"MESSAGE"\s*:\s*\[', line):
            continue
        try:
            entry = json.loads(line)
            message, at = entry["MESSAGE"], float(entry["__REALTIME_TIMESTAMP"]) / 1e6
            if isinstance(message, list):
                message = bytes(message).decode("utf-8", "replace")
        except (ValueError, KeyError, TypeError):
            continue
        if isinstance(message, str) and entry.get("SYSLOG_FACILITY", _KERNEL_FACILITY) == _KERNEL_FACILITY:
            yield at, message


def _time_of(line: bytes) -> float | None:
    try:
        return float(json.loads(line)["__REALTIME_TIMESTAMP"]) / 1e6
    except (ValueError, KeyError, TypeError):
        return None


def kernel_records(lines: Iterable[bytes], seen: _Seen, started: float) -> Iterator[tuple[float, str]]:
    """Time and message of the lines that C(dmesg --raw) prints, or that /dev/kmsg gives."""
    for line in lines:
        text = line.decode("utf-8", "replace")
        syslog, kmsg = _SYSLOG_LINE.match(text), _KMSG_LINE.match(text)
        if kmsg:
            priority, after = int(kmsg.group(1)), int(kmsg.group(3)) / 1e6
            message = _ESCAPED.sub(lambda match: chr(int(match.group(1), 16)), kmsg.group(4))
        elif syslog:
            priority, after, message = int(syslog.group(1)), float(syslog.group(2) or 0), syslog.group(3)
        else:
            seen.said = clean(text.strip()) or seen.said
            continue
        # Who writes to /dev/kmsg cannot speak as the kernel: that is facility 0 alone.
        if priority >> 3 == 0:
            if not seen.records:
                seen.first = started + after
            seen.records += 1
            yield started + after, message


def _kmsg_chunks(path: Path, timeout: float) -> Iterator[bytes]:
    deadline = time.monotonic() + timeout
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while True:
            if time.monotonic() > deadline:
                raise slow(f"reading {path}", timeout)
            try:
                chunk = os.read(descriptor, 1 << 16)
            except BlockingIOError:
                return
            except BrokenPipeError:
                # The kernel overwrote what was next; reading goes on behind it.
                continue
            if not chunk:
                return
            yield chunk
    finally:
        os.close(descriptor)


def boot_time(root: Path) -> float:
    """When the kernel started, in seconds since the epoch."""
    try:
        return time.time() - float((root / "proc/uptime").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0


def stamps_start() -> float:
    """When the clock that stamps messages was at zero, to about a second.

    NTP does not steer it, and it stands while the host sleeps, as it is with this one, which begins a moment later. By
    the uptime what is new looks minutes old after months (100 days at 30 ppm are 259 s).
    """
    return time.time() - time.clock_gettime(time.CLOCK_MONOTONIC_RAW)


def boot_id(root: Path = Path("/")) -> str | None:
    """Another one after each start of the kernel."""
    return (read_file(root / "proc/sys/kernel/random/boot_id") or "").strip() or None


def with_remembered(
    events: Iterable[Event], status_file: str, root: Path, since: float, since_of: Mapping[str, float]
) -> list[Event]:
    """The events of a log that is not whole, and those of this boot that the gate saw in it before."""
    known = {(each.kind, each.number, each.pci_bus_id): each for each in events}
    for each in _remembered(status_file, root):
        if each.last < max(since, since_of.get(each.pci_bus_id or "", since)):
            continue
        now = known.setdefault((each.kind, each.number, each.pci_bus_id), each)
        # The worst of all counts, as within a log.
        if each.fatal is True and now.fatal is not True:
            known[each.kind, each.number, each.pci_bus_id] = each
    return sorted(known.values(), key=lambda each: each.first)


def _remembered(status_file: str, root: Path) -> list[Event]:
    try:
        kept = json.loads(Path(status_file).read_text(encoding="utf-8"))["remembered"]
        events = [xid_events.event_of(each) for each in kept["xids"]] if kept["boot_id"] == boot_id(root) else []
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
    return [each for each in events if each]


def _partial(first: float | None, booted: float) -> str:
    """What is told of a log that was rotated, or whose buffer in the kernel was written over."""
    if first is None or not booted or first - booted <= PARTIAL_S:
        return ""
    return f", partial: its first message is of {utc(first)}, and the kernel started at {utc(booted)}"


def kernel_events(
    since: float, timeout: float, root: Path, search: str | None, since_of: Mapping[str, float] | None = None
) -> tuple[str, list[Event]]:
    """What the kernel log of this boot says of GPUs, and where it was read: the first source that has all of it,
    else the one that begins first. C(since_of) has later times of single devices, by their addresses.
    """
    booted, started = boot_time(root), stamps_start()
    deadline = time.monotonic() + timeout

    def left() -> float:
        # Half of what is left, so that a source that hangs leaves time for the next one.
        return max((deadline - time.monotonic()) / 2, 0.1)

    def journal(seen: _Seen) -> Iterator[tuple[float, str]]:
        options = ("--dmesg", "--boot", "--output=json", "--output-fields=MESSAGE,SYSLOG_FACILITY", "--no-pager")
        yield from journal_records(lines_of([_found("journalctl"), *options], left()), seen)

    def dmesg(seen: _Seen) -> Iterator[tuple[float, str]]:
        yield from kernel_records(lines_of([_found("dmesg"), "-r"], left()), seen, started)

    def kmsg(seen: _Seen) -> Iterator[tuple[float, str]]:
        yield from kernel_records(lines_in(_kmsg_chunks(root / "dev/kmsg", left())), seen, started)

    def _found(name: str) -> str:
        program = program_path(name, search)
        if program is None:
            raise SourceError(f"there is no {name}")
        return program

    sources: dict[str, Callable[[_Seen], Iterator[tuple[float, str]]]] = dict(zip(SOURCES, (journal, dmesg, kmsg)))
    failures: list[str] = []
    partial: list[tuple[float, str, list[Event]]] = []
    for name, read in sources.items():
        if name == "kmsg" and partial and program_path("dmesg", search):
            # The same buffer, of which dmesg has told what there is.
            break
        seen = _Seen()
        try:
            events = xid_events.read_events(read(seen), since, since_of)
            start = booted if name == "journal" else started
            lost = _partial(seen.first, start)
            if lost:
                partial.append(((seen.first or start) - start, name + lost, events))
                continue
            if seen.records:
                return name, events
            failures.append(f"{name} has no message of the kernel" + (f" ({seen.said[:120]})" if seen.said else ""))
        except (SourceError, OSError) as error:
            why = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
            failures.append(why + (f" ({seen.said[:120]})" if seen.said else ""))
    if partial:
        _first, name, events = min(partial, key=lambda each: each[0])
        return name, events
    return f"unreadable: {'; '.join(failures)}", []
