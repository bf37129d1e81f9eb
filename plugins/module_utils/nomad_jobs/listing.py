# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a task saw."""

from __future__ import annotations

from collections.abc import Sequence

from ansible_collections.gpufarm.core.plugins.module_utils.gpu_proof.listing import Listing, devices_in
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_proof.work import empty_gpu
from ansible_collections.gpufarm.core.plugins.module_utils.nomad_jobs.records import Pin
from ansible_collections.gpufarm.core.plugins.module_utils.problem import Finding


def devices_seen(listing: Listing, uuid: str) -> list[str]:
    """What of the listing competes with this device: MIG devices stand for their GPU where one of them is meant."""
    if not uuid.startswith("MIG-"):
        return [gpu for gpu, _migs in listing.gpus]
    return devices_in(listing)


def judge_listing(
    pin: Pin, assigned: Sequence[str], listing: Listing, driver: str
) -> tuple[Finding | None, list[str], bool | None]:
    """What is wrong, which devices were seen, and whether the task was kept to its own."""
    seen = devices_seen(listing, pin.uuid)
    wanted = pin.uuid.lower()
    there = {uuid.lower() for uuid in seen}
    separates = driver == "docker" and not listing.wsl
    isolated = separates and there == {wanted} if seen else None
    task = "the container" if driver == "docker" else "the task"
    if [uuid.lower() for uuid in assigned] != [wanted]:
        finding = Finding(
            "wrong_gpu",
            f"that Nomad assigned {', '.join(assigned) or 'no GPU'}",
            f"GPU {pin.uuid}, which the job is pinned to",
            "check with 'nomad node status -verbose' for two nodes or devices with the same ID",
        )
    elif not seen:
        finding = Finding(
            "gpu_not_seen",
            f"no GPU that nvidia-smi lists in {task}",
            f"GPU {pin.uuid} alone" if separates else f"GPU {pin.uuid}",
            "run nvidia-smi on the node, then check the container toolkit's mode and its CDI specification"
            if driver == "docker"
            else "run nvidia-smi on the node as the user of the Nomad client",
        )
    elif wanted not in there:
        finding = Finding(
            "wrong_gpu" if separates else "gpu_not_seen",
            f"that {task} sees {', '.join(seen)}",
            f"GPU {pin.uuid} alone" if separates else f"GPU {pin.uuid} among them",
            "restart Nomad on the node, and write the CDI specification anew, because GPUs changed after it was made",
        )
    elif separates and there != {wanted}:
        others = [uuid for uuid in seen if uuid.lower() != wanted]
        finding = Finding(
            "extra_gpus_seen",
            f"that {task} also sees {', '.join(others)}",
            f"GPU {pin.uuid} alone",
            "check that the image does not set NVIDIA_VISIBLE_DEVICES, that the container is not privileged, and the "
            "mode of the container toolkit",
        )
    elif driver != "docker" and (listing.visible or "").lower() != wanted:
        finding = Finding(
            "wrong_gpu",
            f"NVIDIA_VISIBLE_DEVICES={listing.visible or ''} in the task",
            f"NVIDIA_VISIBLE_DEVICES={pin.uuid}",
            "check the version of the device plugin, and that nothing else sets this variable",
        )
    elif wanted in {uuid.lower() for uuid in listing.empty}:
        finding = empty_gpu(pin.uuid)
    else:
        return None, seen, isolated
    return finding, seen, isolated
