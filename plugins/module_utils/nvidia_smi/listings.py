# Copyright (c) gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The other calls: C(-L), C(nvlink -s -e), C(--version), and what the kernel module writes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypedDict, cast

from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi.facts import Gpu, MigDevice, NvLink
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi.failures import damaged
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi.values import (
    first_of,
    identifier_of,
    int_of,
    version_of,
)

_LIST_GPU = re.compile(r"^GPU ([0-9]{1,4}): .+ \(UUID: ([^()\s]+)\)$")


_LIST_MIG = re.compile(r"^MIG (\S+)\s+Device\s+([0-9]{1,4}): \(UUID: ([^()\s]+)\)$")


_OLD_MIG_UUID = re.compile(r"^MIG-GPU-[0-9a-fA-F-]+/([0-9]{1,4})/([0-9]{1,4})$")


class Listed(TypedDict):
    """What C(-L) says of a GPU."""

    index: int
    uuid: str | None
    mig_devices: list[MigDevice]


def parse_list(text: str) -> list[Listed]:
    """C(nvidia-smi -L): index, uuid and mig_devices of each GPU; other lines (messages) are passed over."""
    gpus: list[Listed] = []
    for raw in text.splitlines():
        line = raw.strip()
        gpu, mig = _LIST_GPU.match(line), _LIST_MIG.match(line)
        if gpu:
            gpus.append(
                {
                    "index": int(gpu.group(1)),
                    "uuid": identifier_of(gpu.group(2)),
                    "mig_devices": [],
                }
            )
        elif mig and gpus:
            # Until driver 470 the UUID was made of the parent's UUID and the two instance numbers.
            old = _OLD_MIG_UUID.match(mig.group(3))
            gpus[-1]["mig_devices"].append(
                {
                    "index": int(mig.group(2)),
                    "uuid": identifier_of(mig.group(3)),
                    "profile": mig.group(1),
                    "gpu_instance_id": int(old.group(1)) if old else None,
                    "compute_instance_id": int(old.group(2)) if old else None,
                    "memory_total_mib": None,
                }
            )
        elif line.startswith(("GPU ", "MIG ")):
            raise damaged(f"nvidia-smi -L printed a line that names no GPU or MIG device: {line[:200]!r}.")
    return gpus


def merge_list(gpus: Sequence[Gpu], listing: Sequence[Listed]) -> list[Gpu]:
    """The GPUs with their MIG devices completed from C(-L): it alone has profile and UUID with most drivers."""
    by_uuid = {entry["uuid"]: entry for entry in listing if entry["uuid"]}
    merged = []
    for gpu in gpus:
        entry = by_uuid.get(gpu["uuid"] or "")
        if entry is None or gpu["mig_mode"] != "Enabled":
            merged.append(gpu)
            continue
        devices = entry["mig_devices"]
        if gpu["mig_devices"] is not None:
            listed = {device["index"]: device for device in devices}
            devices = [_completed(device, listed.get(device["index"], device)) for device in gpu["mig_devices"]]
        merged.append(cast(Gpu, {**gpu, "mig_devices": devices}))
    return merged


def _completed(device: MigDevice, listed: MigDevice) -> MigDevice:
    return cast(MigDevice, {key: first_of(value, listed.get(key)) for key, value in device.items()})


_NVLINK_GPU = re.compile(r"^GPU [0-9]{1,4}: .+ \(UUID: ([^()\s]+)\)$")


_NVLINK_LINE = re.compile(r"^Link ([0-9]{1,3}): (?:([0-9]{1,6}(?:\.[0-9]{1,9})?) GB/s|<inactive>)$")


# One that sleeps, or what comes after: neither up nor down.
_NVLINK_OTHER = re.compile(r"^Link [0-9]{1,3}: <[A-Za-z][A-Za-z _-]*>$")


# Cards since Blackwell count other things, in other words, among them C(Total link recovery events).
_NVLINK_ERRORS = re.compile(r"^Link ([0-9]{1,3}): (Replay|Recovery|CRC) Errors: (.*)$")


_NVLINK_COUNTER = re.compile(r"^Link [0-9]{1,3}: [A-Za-z][A-Za-z .()/-]*(?: - [0-9]+)?: ")


def parse_nvlink_status(text: str) -> dict[str, list[NvLink] | None]:
    """C(nvidia-smi nvlink -s -e): the links of each GPU by its UUID, None where they are not told, as in MIG mode.

    Without C(-e) the counters of errors are None.
    """
    links: dict[str, list[NvLink] | None] = {}
    unknown: dict[str, list[NvLink] | None] = {}
    uuid = None
    for raw in text.splitlines():
        line = raw.strip()
        gpu, link, errors = _NVLINK_GPU.match(line), _NVLINK_LINE.match(line), _NVLINK_ERRORS.match(line)
        if gpu:
            uuid = gpu.group(1)
            links[uuid] = []
        elif uuid is None:
            continue
        elif link:
            links[uuid] = [*(links[uuid] or []), _nvlink(int(link.group(1)), link.group(2))]
        elif errors:
            counted = {f"{errors.group(2).lower()}_errors": int_of(errors.group(3))}
            of = int(errors.group(1))
            links[uuid] = [
                cast(NvLink, {**state, **counted}) if state["link"] == of else state for state in links[uuid] or []
            ]
        elif _NVLINK_OTHER.match(line):
            unknown[uuid] = None
        elif "not supported" in line.lower():
            links[uuid] = None
        elif line.startswith("Link") and not _NVLINK_COUNTER.match(line):
            raise damaged(f"nvidia-smi nvlink -s -e printed a line that is no link's state: {line[:200]!r}.")
    return {**links, **unknown}


def _nvlink(number: int, speed: str | None) -> NvLink:
    return {
        "link": number,
        "active": speed is not None,
        "speed_gb_per_s": None if speed is None else float(speed),
        "replay_errors": None,
        "recovery_errors": None,
        "crc_errors": None,
    }


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """C(nvidia-smi topo -m): how two GPUs, by their indices, are connected, as C(NV18), C(PIX) or C(SYS)."""
    ways: dict[tuple[int, int], str] = {}
    columns: list[str] = []
    for raw in text.splitlines():
        words = _ESCAPE.sub("", raw).split("\t")
        if not columns and any(_TOPOLOGY_GPU.match(word) for word in words):
            columns = words
        row = _TOPOLOGY_GPU.match(words[0])
        if not row or not columns or words is columns:
            continue
        for name, way in zip(columns[1:], words[1:]):  # Python 3.9 has no strict
            column = _TOPOLOGY_GPU.match(name)
            if column and _TOPOLOGY_WAY.match(way.strip()):
                ways[int(row.group(1)), int(column.group(1))] = way.strip()
    return ways


_ESCAPE = re.compile("\x1b\\[[0-9;]*m")
_TOPOLOGY_GPU = re.compile(r"^\s*GPU([0-9]{1,4})\s*$")
_TOPOLOGY_WAY = re.compile(r"^(?:NV[0-9]{1,3}|PIX|PXB|PHB|NODE|SYS)$")


def parse_version(text: str) -> dict[str, str | None]:
    """C(nvidia-smi --version): the driver's version and the newest CUDA version it runs."""
    labels: dict[str, str | None] = {}
    for line in text.splitlines():
        label, _colon, value = line.partition(":")
        labels[label.strip().lower()] = version_of(value)
    return {
        "driver_version": first_of(labels.get("driver version"), labels.get("kmd version")),
        "cuda_version": first_of(labels.get("cuda version"), labels.get("cuda umd version")),
    }


def parse_proc_information(text: str) -> dict[str, str | None]:
    """A GPU's C(/proc/driver/nvidia/gpus/<address>/information) by its lower-case labels."""
    lines = (line.partition(":") for line in text.splitlines())
    return {label.strip().lower(): identifier_of(value) for label, colon, value in lines if colon}
