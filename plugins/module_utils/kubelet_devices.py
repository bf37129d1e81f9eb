# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which GPUs of this machine the kubelet has given to pods, also to those on whose GPUs nothing computes yet.

It is in the kubelet's checkpoint, which has no names of pods and forgets those that have ended only when the next one
gets a device. So a pod counts while a process of it runs, while it has a cgroup, which the kubelet keeps until the pod
has ended, and while it is new, as its sandbox may not have begun. What pods claim is in another file, by drivers, whose
devices have names of their own: NVIDIA's has C(gpu-0), and of another's that gives GPUs it may be any.
"""

from __future__ import annotations

import glob
import json
import re
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

CHECKPOINT = "device-plugins/kubelet_internal_checkpoint"
CLAIMS = "dra_manager_state"
GPU_DRIVER = "gpu.nvidia.com"
OTHER_DRIVERS = ("compute-domain.nvidia.com", "gpu.amd.com", "gpu.intel.com")
"""Of these nobody gets a GPU of NVIDIA's, though their names sound so."""
NEW_S = 600
# With cgroups v1 they are there for each controller.
POD_FOLDERS = ("*kubepods*/*pod*", "*kubepods*/*/*pod*", "*/*kubepods*/*pod*", "*/*kubepods*/*/*pod*")

_UID = re.compile("[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
# A part of a GPU has the GPU's name first.
_GPU = re.compile("(gpu-[0-9]+)(?:-mig-.+)?")
# Other drivers give GPUs of NVIDIA's as well, such as HAMi's, or have NVIDIA's CDI give them.
_SOUNDS_SO = re.compile("gpu|nvidia")


def kubelet_devices(
    kubelet: Path = Path("/var/lib/kubelet"), proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> dict[str, str]:
    """Devices to the pod that has each; C(all) where nobody knows which GPU.

    They are UUIDs of GPUs and MIG devices, or, of those that are claimed, names such as C(gpu.nvidia.com/gpu-0).
    """
    path = kubelet / CHECKPOINT
    try:
        checkpoint = _text(path)
        given = {} if checkpoint is None else _given(json.loads(checkpoint))
        path = kubelet / CLAIMS
        claimed = _claimed(_text(path) or "")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return {"all": f"nobody knows which pod, because {path} cannot be read ({type(error).__name__}: {error})"}
    uids = given.keys() | claimed.keys()
    runs = _running(uids, kubelet, proc, cgroups) if uids else set()
    return {
        device: f"pod {uid}{how}"
        for pods, how in ((given, ""), (claimed, ", by a claim"))
        for uid in sorted(runs & pods.keys(), reverse=True)
        for device in pods[uid]
    }


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def _given(checkpoint: Mapping[str, Any]) -> dict[str, set[str]]:
    """UIDs of pods to the devices that each has been given."""
    found: dict[str, set[str]] = {}
    for entry in checkpoint["Data"]["PodDeviceEntries"] or ():
        ids = entry["DeviceIDs"] or []
        # By NUMA node since Kubernetes 1.20.
        listed = ids if isinstance(ids, list) else [each for of_one in ids.values() for each in of_one]
        # What is shared by time slices has a number behind it.
        found.setdefault(entry["PodUID"], set()).update(each.partition("::")[0] for each in listed)
    return found


def _claimed(state: str) -> dict[str, set[str]]:
    """UIDs of pods to the GPUs that each claims, as Kubernetes has it since 1.32, with each driver that has a part."""
    found: dict[str, set[str]] = {}
    try:
        for claim in json.loads(json.loads(state)["Data"])["ClaimInfoStateList"] or ():
            drivers = claim["DriverState"] or {GPU_DRIVER: {"Devices": None}}
            gpus = {gpu for name, of_one in drivers.items() for gpu in _gpus(name, of_one["Devices"] or ())}
            for uid in claim["PodUIDs"] or ():
                found.setdefault(uid, set()).update(gpus)
    except (ValueError, TypeError, KeyError, AttributeError):
        # Its layout changes with releases. UIDs in it are of pods, and of claims, of which nothing runs.
        return {uid: {"all"} for uid in _UID.findall(state)}
    return found


def _gpus(driver: str, devices: Collection[Mapping[str, Any]]) -> set[str]:
    """What a claim has of a driver. That has said nothing yet where it has not prepared the claim."""
    if driver == GPU_DRIVER and devices:
        names = [_GPU.fullmatch(device["DeviceName"]) for device in devices]
        return {f"{GPU_DRIVER}/{name[1]}" if name else "all" for name in names}
    kinds = [each.partition("=")[0] for device in devices for each in device["CDIDeviceIDs"] or ()]
    sounds_so = driver not in OTHER_DRIVERS and any(_SOUNDS_SO.search(each) for each in (driver, *kinds))
    return {"all"} if sounds_so else set()


def _running(uids: Collection[str], kubelet: Path, proc: Path, cgroups: Path) -> set[str]:
    found = {uid for uid in uids if _is_new(kubelet / "pods" / uid)}
    for pattern in POD_FOLDERS:
        # Unlike that of Path, it passes over what ends meanwhile.
        folders = glob.glob(f"{glob.escape(str(cgroups))}/{pattern}")  # noqa: PTH207
        found.update(_named(uids, "\n".join(folders)))
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            groups = (folder / "cgroup").read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        found.update(_named(uids, groups))
    return found


def _named(uids: Collection[str], groups: str) -> set[str]:
    # systemd's names have no dashes.
    return {uid for uid in uids if uid in groups or uid.replace("-", "_") in groups}


def _is_new(folder: Path) -> bool:
    try:
        return folder.stat().st_mtime > time.time() - NEW_S
    except OSError:
        return False
