# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What there is to measure on a node, and who has it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi.facts import Facts, Gpu, computes, serves_mps

UNSEEN_WORK_PERCENT = 20
"""What a desktop draws is less, what a game draws more."""


@dataclasses.dataclass(frozen=True)
class Device:
    """A GPU or MIG device, with what nvidia-smi says of the GPU."""

    uuid: str
    gpu: Gpu | None

    @property
    def processes(self) -> list[str]:
        """Who computes on it. Who only draws does not, nor does an idle server of MPS that shares its GPU."""
        instance = self.instance
        gpu = self.gpu
        # Before Volta nobody is listed but the server. A divided GPU is newer, and tells no utilisation.
        rests = gpu is not None and (gpu["utilization_gpu_percent"] == 0 or gpu["mig_mode"] == "Enabled")
        shared = gpu is not None and gpu["compute_mode"] == "Default" and rests
        return [
            f"{process['name'] or 'a process'} (pid {process['pid']})"
            for process in (gpu["processes"] if gpu else None) or ()
            if computes(process)
            and not (shared and serves_mps(process))
            and (instance is None or process["gpu_instance_id"] in (None, instance))
        ]

    @property
    def instance(self) -> int | None:
        """The GPU instance of a MIG device."""
        for device in (self.gpu["mig_devices"] if self.gpu else None) or ():
            if device["uuid"] == self.uuid:
                return device["gpu_instance_id"]
        return None


def who_is_unknown(gpu: Gpu, on_wsl: bool) -> bool:
    """Whether nothing tells if somebody has a GPU; under WSL its utilisation does."""
    return gpu["processes"] is None and (not on_wsl or gpu["utilization_gpu_percent"] is None)


def unseen_work(gpu: Gpu, on_wsl: bool) -> str:
    """What a GPU does for programs that nobody lists, for people; elsewhere it may be the driver's own start."""
    percent = gpu["utilization_gpu_percent"] or 0
    return (
        f"{percent} % busy with what is not listed here, as Windows' programs"
        if on_wsl and percent > UNSEEN_WORK_PERCENT
        else ""
    )


def parts_of(gpu: Gpu) -> list[str]:
    return [device["uuid"] for device in gpu["mig_devices"] or () if device["uuid"]]


def devices_of(facts: Facts, wanted: Sequence[str] | None) -> list[Device]:
    """What there is to measure: a divided GPU is its MIG devices. Those that were named come as they were named."""
    known: dict[str, Device] = {}
    all_of: list[Device] = []
    for gpu in facts["gpus"]:
        whole = [gpu["uuid"]] if gpu["uuid"] and gpu["status"] == "ok" else []
        mine = parts_of(gpu) if gpu["mig_mode"] == "Enabled" else whole
        for uuid in mine:
            known[uuid] = Device(uuid, gpu)
            all_of.append(known[uuid])
    if wanted is None:
        return all_of
    return [known.get(uuid, Device(uuid, None)) for uuid in dict.fromkeys(wanted)]
