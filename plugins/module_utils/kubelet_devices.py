# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which GPUs of this machine the kubelet has given to pods, also to those on whose GPUs nothing computes yet.

It is in the kubelet's checkpoint, which has no names of pods and forgets those that have ended only when the next one
gets a device. So a pod counts while a process of it runs, and while it is new, as its sandbox may not have begun.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

CHECKPOINT = "device-plugins/kubelet_internal_checkpoint"
NEW_S = 600


def kubelet_devices(kubelet: Path = Path("/var/lib/kubelet"), proc: Path = Path("/proc")) -> dict[str, str]:
    """IDs of devices, as UUIDs of GPUs and MIG devices, to the pod that has each; C(all) where nobody knows which."""
    path = kubelet / CHECKPOINT
    try:
        given = _given(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return {"all": f"nobody knows which pod, because {path} cannot be read ({type(error).__name__}: {error})"}
    runs = _running(given, kubelet, proc) if given else set()
    return {device: f"pod {uid}" for uid, devices in given.items() if uid in runs for device in devices}


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


def _running(uids: Collection[str], kubelet: Path, proc: Path) -> set[str]:
    found = {uid for uid in uids if _is_new(kubelet / "pods" / uid)}
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            groups = (folder / "cgroup").read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        # systemd's names have no dashes.
        found.update(uid for uid in uids if uid in groups or uid.replace("-", "_") in groups)
    return found


def _is_new(folder: Path) -> bool:
    try:
        return folder.stat().st_mtime > time.time() - NEW_S
    except OSError:
        return False
