# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The kernel's lines about GPUs and NVSwitches as events.

Nothing here needs Ansible, and nothing beyond Python's standard library.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils.pci import normal_bus_id
from ansible_collections.gpufarm.core.plugins.module_utils.text import clean, epoch
from ansible_collections.gpufarm.core.plugins.module_utils.xid import lookup


@dataclass(frozen=True)
class Event:
    """What the kernel said of one device under one number, however often; times in seconds since the epoch."""

    kind: str
    number: int
    pci_bus_id: str | None
    uuid: str | None
    count: int
    first: float
    last: float
    text: str
    fatal: bool | None = None
    incidents: int = 1
    """Lines by different processes, and where none is named those that are a minute from the last."""

    @property
    def code(self) -> str:
        return "gpu_init_failed" if self.kind == "init" else f"{self.kind}_{self.number}"


# More devices and numbers than one machine can have; a log that names more is damaged or made up.
MAX_EVENTS = 1000
MAX_TEXT = 300
INCIDENT_S = 60

# Anchored: the kernel also repeats the names of processes, which anybody may choose.
_XID = re.compile(r"^NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)[^)]*\):\s*([0-9]{1,6})\b\s*,?\s*(.*)", re.DOTALL)
_SXID = re.compile(
    r"^nvidia-nvswitch[0-9]+: SXid \((?:PCI:)?([0-9a-fA-F:.]+)\):\s*([0-9]{1,6})\b\s*,?\s*(.*)", re.DOTALL
)
_SXID_DETAILS = re.compile(r"^(?:Data \{|Severity [0-9])")
# At the start: behind it is the name of the process, which anybody may choose.
_PID = re.compile(r"^pid='?([0-9]+)")
_UUID = re.compile(r"^NVRM: GPU at (?:PCI:)?([0-9a-fA-F:.]+): (GPU-[0-9a-fA-F-]{36})\b")
_INIT = re.compile(r"^NVRM: (?:GPU ([0-9a-fA-F:.]+): )?RmInitAdapter failed!\s*(.*)", re.DOTALL)
_OFF_BUS = re.compile(r"^NVRM: GPU (?:at )?(?:PCI:)?([0-9a-fA-F:.]+?):? (?:GPU )?has fallen off the bus", re.DOTALL)
_OFF_BUS_START = re.compile(r"^NVRM: The NVIDIA GPU ([0-9a-fA-F:.]+)")
_OFF_BUS_END = "fallen off the bus and is not responding to commands"
_CODE = re.compile(r"^(s?xid)_([0-9]{1,6})$")
_FATAL = re.compile(r"\b(non-?)?fatal\b", re.IGNORECASE)
# What every line above holds, so that a reader need not decode the rest of the log.
NEEDLES = (b"NVRM: ", b"SXid (")


def bus_id(address: str) -> str | None:
    """The address of a message as the facts have it: messages leave the function out, old ones the domain too."""
    bare = address.strip(":")
    return normal_bus_id(bare if "." in bare else f"{bare}.0")


def _fatal(text: str) -> bool | None:
    match = _FATAL.search(text)
    return None if match is None else match.group(1) is None


def _said(message: str, previous: str | None) -> tuple[str, int, str | None, str] | None:
    """Kind, number, address and text of a message; C(previous) is the GPU that an unfinished sentence is about."""
    match = _XID.match(message)
    if match:
        return "xid", int(match.group(2)), bus_id(match.group(1)), match.group(3)
    match = _SXID.match(message)
    if match:
        # What follows an SXid under the same number explains it.
        details = _SXID_DETAILS.match(match.group(3))
        return None if details else ("sxid", int(match.group(2)), bus_id(match.group(1)), match.group(3))
    match = _INIT.match(message)
    if match:
        return "init", 0, bus_id(match.group(1)) if match.group(1) else None, match.group(2)
    match = _OFF_BUS.match(message)
    if match:
        return "off_bus", 79, bus_id(match.group(1)), "GPU has fallen off the bus."
    if _OFF_BUS_END in message and message.startswith("NVRM: "):
        whole = _OFF_BUS_START.match(message)
        return "off_bus", 79, bus_id(whole.group(1)) if whole else previous, "GPU has fallen off the bus."
    return None


def _printable(text: str) -> str:
    return " ".join(clean(text).split())[:MAX_TEXT]


def event_of(told: Mapping[str, Any]) -> Event | None:
    """The Xid or SXid of which C(judge) has told so."""
    named = _CODE.match(told["code"])
    if not named:
        return None
    kind, number, text = named.group(1), int(named.group(2)), told["text"]
    first, last = epoch(told["first_at"]), epoch(told["last_at"])
    address = normal_bus_id(told["pci_bus_id"])
    return Event(kind, number, address, told["uuid"], told["count"], first, last, text, _judged_by(kind, number, text))


def _judged_by(kind: str, number: int, text: str) -> bool | None:
    return _fatal(text) if kind == "sxid" or lookup(number).by_text else None


def read_events(
    records: Iterable[tuple[float, str]], since: float = 0.0, since_of: Mapping[str, float] | None = None
) -> list[Event]:
    """The events in a kernel log, records of time and message, from C(since) on; the whole log is never held.

    C(since_of) has later times of single devices, by their addresses.
    """
    later = since_of or {}
    found: dict[tuple[str, int, str | None], Event] = {}
    uuids: dict[str | None, str] = {}
    processes: dict[tuple[str, int, str | None], set[str]] = {}
    unfinished: str | None = None
    for time, message in records:
        named = _UUID.match(message)
        if named:
            address = bus_id(named.group(1))
            if address and len(uuids) < MAX_EVENTS:
                uuids[address] = named.group(2)
            continue
        said = _said(message, unfinished)
        start = _OFF_BUS_START.match(message)
        unfinished = bus_id(start.group(1)) if start else unfinished
        if said is None or time < since:
            continue
        kind, number, address, text = said
        if address is not None and time < later.get(address, since):
            continue
        key = (kind, number, address)
        before = found.get(key)
        if before is None and len(found) >= MAX_EVENTS:
            continue
        fatal = _judged_by(kind, number, text)
        pid = _PID.match(text)
        known = processes.setdefault(key, set())
        new = pid[1] not in known if pid else before is not None and time - before.last > INCIDENT_S
        if pid and len(known) < MAX_EVENTS:
            known.add(pid[1])
        if before is None:
            found[key] = Event(kind, number, address, None, 1, time, time, _printable(text), fatal)
            continue
        # The worst of all counts, and the last text, save that of something milder.
        milder = before.fatal is True and fatal is not True
        found[key] = replace(
            before,
            count=before.count + 1,
            incidents=before.incidents + new,
            first=min(before.first, time),
            last=max(before.last, time),
            text=before.text if milder else _printable(text),
            fatal=before.fatal if milder or fatal is None else fatal,
        )
    # The sentence about the bus accompanies Xid 79; alone it stands for it.
    for key in [key for key in found if key[0] == "off_bus"]:
        event = found.pop(key)
        found.setdefault(("xid", 79, event.pci_bus_id), replace(event, kind="xid"))
    events = [replace(event, uuid=uuids.get(event.pci_bus_id)) for event in found.values()]
    return sorted(events, key=lambda event: (event.first, event.pci_bus_id or "", event.kind, event.number))
