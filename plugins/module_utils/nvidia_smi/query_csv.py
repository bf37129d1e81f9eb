# Copyright (c) gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""C(nvidia-smi --query-gpu)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi.facts import Answer, Gpu, empty_gpu
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi.failures import damaged
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi.values import (
    GPU_STATES,
    bare,
    fails,
    identifier_of,
    int_of,
    text_of,
    version_of,
)

# CUDA's compute capability names the architecture; the listing call knows no other field for it.
_ARCHITECTURES = {
    (3,): "Kepler",
    (5,): "Maxwell",
    (6,): "Pascal",
    (7, 0): "Volta",
    (7, 2): "Volta",
    (7, 5): "Turing",
    (8, 9): "Ada Lovelace",
    (8,): "Ampere",
    (9,): "Hopper",
    (10,): "Blackwell",
    (11,): "Blackwell",
    (12,): "Blackwell",
}


def architecture_of(compute_capability: str | None) -> str | None:
    match = re.match(r"^([0-9]{1,3})\.([0-9]{1,3})$", bare(compute_capability))
    if not match:
        return None
    major, minor = int(match.group(1)), int(match.group(2))
    return _ARCHITECTURES.get((major, minor), _ARCHITECTURES.get((major,)))


QUERY_FIELDS = (
    "index",
    "name",
    "uuid",
    "pci.bus_id",
    "driver_version",
    "memory.total",
    "memory.used",
    "serial",
    "persistence_mode",
    "compute_mode",
    "mig.mode.current",
    "mig.mode.pending",
    "compute_cap",
    # The cheapest that a GPU must answer itself: one that requires a reset still has its name, memory and modes.
    "pstate",
)


# Without these a line names no GPU; drivers that lack another one are asked again without it.
REQUIRED_FIELDS = frozenset(("index", "name", "uuid", "pci.bus_id", "memory.total"))


UNKNOWN_FIELD = re.compile(r'Field "([^"]+)" is not a valid field to query')


def parse_query_csv(text: str, fields: Sequence[str] = QUERY_FIELDS) -> Answer:
    """C(--query-gpu=<fields> --format=csv,noheader,nounits) in the shape of parse_query_xml."""
    gpus: list[Gpu] = []
    driver_version = None
    for line in text.splitlines():
        if not line.strip():
            continue
        values = [value.strip() for value in line.split(",")]
        row = {name: values[column] for column, name in enumerate(fields) if column < len(values)}
        index = int_of(row.get("index"))
        if len(values) != len(fields) or index is None:
            expected = f"{len(fields)} values with an index first"
            raise damaged(f"A line of nvidia-smi --query-gpu should have {expected}; found {line[:200]!r}.")
        gpu = empty_gpu()
        mig_mode = text_of(row.get("mig.mode.current"))
        state = next((GPU_STATES[word.lower()] for word in map(bare, values) if word.lower() in GPU_STATES), "ok")
        if state == "ok" and fails(row.get("memory.total")) and fails(row.get("memory.used")):
            state = "unreadable"
        gpu.update(
            {
                "index": index,
                "name": text_of(row.get("name")),
                "uuid": identifier_of(row.get("uuid")),
                "pci_bus_id": text_of(row.get("pci.bus_id")),
                "status": state,
                "status_message": None if state == "ok" else f"nvidia-smi --query-gpu says that the GPU is {state}.",
                "serial": identifier_of(row.get("serial")),
                "architecture": architecture_of(row.get("compute_cap")),
                "memory_total_mib": int_of(row.get("memory.total")),
                "memory_used_mib": int_of(row.get("memory.used")),
                "persistence_mode": text_of(row.get("persistence_mode")),
                "compute_mode": text_of(row.get("compute_mode")),
                "mig_mode": mig_mode,
                "mig_mode_pending": text_of(row.get("mig.mode.pending")),
                "mig_devices": None if mig_mode == "Enabled" else [],
            }
        )
        gpus.append(gpu)
        driver_version = driver_version or version_of(row.get("driver_version"))
    return {"driver_version": driver_version, "cuda_version": None, "attached_gpus": None, "gpus": gpus}
