# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The kubelet's checkpoint as its source writes it: {"Data": {"PodDeviceEntries", "RegisteredDevices"}, "Checksum"}."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpufarm.core.plugins.module_utils.kubelet_devices import (
    CHECKPOINT,
    CLAIMS,
    NEW_S,
    kubelet_devices,
)

UIDS = [f"4f3c35b2-9d43-4c5f-9a41-9b9a9a0d6a5{number}" for number in range(4)]
GROUPS = (
    # cgroup v2 with systemd, and v1 with cgroupfs.
    "0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{dashed}.slice/cri-containerd-1.scope\n",
    "12:devices:/kubepods/besteffort/pod{uid}/1\n",
)


def entry(uid: str, devices: Any, resource: str = "nvidia.com/gpu") -> dict[str, Any]:
    return {"PodUID": uid, "ContainerName": "main", "ResourceName": resource, "DeviceIDs": devices, "AllocResp": "CgAS"}


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A kubelet whose first two pods run; the last two have ended, and one of these a moment ago."""
    entries = [
        entry(UIDS[0], {"-1": ["GPU-0"], "1": ["GPU-1::2"]}),
        entry(UIDS[1], ["MIG-1"], "nvidia.com/mig-1g.10gb"),
        entry(UIDS[2], {"0": ["GPU-2"]}),
        entry(UIDS[3], {"0": ["GPU-3"]}),
    ]
    data = {"Data": {"PodDeviceEntries": entries, "RegisteredDevices": {"nvidia.com/gpu": ["GPU-0"]}}, "Checksum": 1}
    (tmp_path / CHECKPOINT).parent.mkdir()
    (tmp_path / CHECKPOINT).write_text(json.dumps(data), encoding="utf-8")
    for number, groups in enumerate(GROUPS):
        folder = tmp_path / "proc" / str(number + 1)
        folder.mkdir(parents=True)
        uid = UIDS[number]
        (folder / "cgroup").write_text(groups.format(uid=uid, dashed=uid.replace("-", "_")), encoding="utf-8")
    # One that has ended meanwhile, and no process.
    (tmp_path / "proc/99").mkdir()
    (tmp_path / "proc/self").mkdir()
    for uid in UIDS:
        (tmp_path / "pods" / uid).mkdir(parents=True)
        age = 1 if uid == UIDS[3] else 2 * NEW_S
        os.utime(tmp_path / "pods" / uid, (time.time() - age,) * 2)
    return tmp_path


def test_what_pods_have_that_run_or_are_new(machine: Path) -> None:
    assert kubelet_devices(machine, machine / "proc", machine / "cgroup") == {
        "GPU-0": f"pod {UIDS[0]}", "GPU-1": f"pod {UIDS[0]}", "MIG-1": f"pod {UIDS[1]}", "GPU-3": f"pod {UIDS[3]}",
    }  # fmt: skip


@pytest.mark.parametrize(
    "folder",
    [
        "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{dashed}.slice",
        "kubepods.slice/kubepods-pod{dashed}.slice",
        "kubepods/besteffort/pod{uid}",
        "kubepods/pod{uid}",
        # With cgroups v1, and with a root of the kubelet's own.
        "cpuset/kubepods/burstable/pod{uid}",
        "systemd/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{dashed}.slice",
        "kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{dashed}.slice",
    ],
)
def test_a_pod_without_a_process_that_has_not_ended(machine: Path, folder: str) -> None:
    """With CRI-O no process of a pod runs while its image comes, and between two starts."""
    cgroups = machine / "cgroup"
    (cgroups / folder.format(uid=UIDS[2], dashed=UIDS[2].replace("-", "_"))).mkdir(parents=True)
    assert kubelet_devices(machine, machine / "proc", cgroups)["GPU-2"] == f"pod {UIDS[2]}"


def test_a_machine_without_a_kubelet_and_a_kubelet_without_pods(tmp_path: Path, machine: Path) -> None:
    assert kubelet_devices(*[tmp_path / "none"] * 3) == {}
    (machine / CHECKPOINT).write_text('{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}},"Checksum":0}')
    assert kubelet_devices(machine, machine / "proc", machine / "cgroup") == {}


def claims(*listed: dict[str, Any]) -> str:
    """Claims as Kubernetes writes them since 1.32: JSON within JSON."""
    data = {"kind": "DRACheckpoint", "apiVersion": "checkpoint.dra.kubelet.k8s.io/v1", "ClaimInfoStateList": listed}
    return json.dumps({"Data": json.dumps(data), "Checksum": 1})


def claim(pod: str, **drivers: list[dict[str, Any]] | None) -> dict[str, Any]:
    """One claim; drivers are named with double underscores for hyphens and single ones for dots."""
    state = {name.replace("__", "-").replace("_", "."): {"Devices": devices} for name, devices in drivers.items()}
    return {
        "ClaimUID": "067798be-454e-4be4-9047-1aa06aea63f7", "ClaimName": "training-gpu-x7k2p", "Namespace": "default",
        "PodUIDs": {pod: {}}, "DriverState": state,
    }  # fmt: skip


def device(name: str, *cdi: str) -> dict[str, Any]:
    """A device that a driver has prepared; the share is new in 1.35."""
    return {
        "PoolName": "gpu01", "DeviceName": name, "ShareID": None, "RequestNames": ["one"],
        "CDIDeviceIDs": list(cdi) or None,
    }  # fmt: skip


def gpu(name: str) -> dict[str, Any]:
    return device(name, f"k8s.gpu.nvidia.com/device={name}")


def by_claim(machine: Path, text: str) -> dict[str, str]:
    """What is given by claims, beside what the device plugin gives."""
    before = kubelet_devices(machine, machine / "proc", machine / "cgroup")
    (machine / CLAIMS).write_text(text, encoding="utf-8")
    told = kubelet_devices(machine, machine / "proc", machine / "cgroup")
    assert before.items() <= told.items()
    return {name: pod for name, pod in told.items() if name not in before}


@pytest.mark.parametrize(
    ("drivers", "found"),
    [
        ({"gpu_nvidia_com": [gpu("gpu-0"), gpu("gpu-11")]}, {"gpu.nvidia.com/gpu-0", "gpu.nvidia.com/gpu-11"}),
        # As the driver named parts first, and does now.
        (
            {"gpu_nvidia_com": [gpu("gpu-1-mig-9-0-4"), gpu("gpu-2-mig-1g10gb-19-0")]},
            {"gpu.nvidia.com/gpu-1", "gpu.nvidia.com/gpu-2"},
        ),
        # A GPU that is handed through, one that is not prepared yet, and one beside a NIC.
        ({"gpu_nvidia_com": [gpu("gpu-vfio-0")]}, {"all"}),
        ({"gpu_nvidia_com": None}, {"all"}),
        ({"dra_net": [device("eth1")], "gpu_nvidia_com": [gpu("gpu-0")]}, {"gpu.nvidia.com/gpu-0"}),
        ({"dra_net": [device("eth1")]}, set()),
        ({"dra_net": None}, set()),
        (
            {
                "sriovnetwork_k8snetworkplumbingwg_io": [
                    device("0000-08-00-1", "k8snetworkplumbingwg.io/vf=0000-08-00-1")
                ]
            },
            set(),
        ),
        # Channels between nodes, which are NVIDIA's and no GPUs.
        (
            {
                "compute__domain_nvidia_com": [
                    device("channel-0", "k8s.compute-domain.nvidia.com/claim=067798be-channel-0")
                ]
            },
            set(),
        ),
        ({"gpu_amd_com": [device("gpu-0", "k8s.gpu.amd.com/device=gpu-0")]}, set()),
        # Others that give NVIDIA's.
        ({"hami__core__gpu_project__hami_io": [device("hami-gpu-0")]}, {"all"}),
        ({"composite_example_com": [device("pair-0", "nvidia.com/gpu=0")]}, {"all"}),
        ({}, {"all"}),
    ],
)
def test_a_claim_counts_by_its_driver_and_its_device(
    machine: Path, drivers: dict[str, list[dict[str, Any]] | None], found: set[str]
) -> None:
    told = by_claim(machine, claims(claim(UIDS[0], **drivers)))
    assert told == dict.fromkeys(found, f"pod {UIDS[0]}, by a claim")


def test_a_claim_that_nobody_understands_may_have_any_gpu(machine: Path) -> None:
    """A pod has all of them, whatever it claims besides."""
    nic = claim(UIDS[1], dra_net=[device("eth1")])
    for spoiled in ({**nic, "DriverState": None}, {**nic, "DriverState": {"dra.net": []}}, {"PodUIDs": {UIDS[1]: {}}}):
        assert by_claim(machine, claims(spoiled)) == {"all": f"pod {UIDS[1]}, by a claim"}
        (machine / CLAIMS).unlink()
    # Formerly it was no JSON within JSON.
    older = {"version": "v1", "entries": [{"ClaimUID": UIDS[2], "PodUIDs": {UIDS[0]: {}}}], "checksum": 1}
    assert by_claim(machine, json.dumps(older)) == {"all": f"pod {UIDS[0]}, by a claim"}
    (machine / CLAIMS).unlink()
    (machine / CHECKPOINT).unlink()
    told = by_claim(
        machine, claims(claim(UIDS[0], gpu_nvidia_com=[gpu("gpu-0")]), claim(UIDS[0], dra_net=[device("a")]))
    )
    assert told == {"gpu.nvidia.com/gpu-0": f"pod {UIDS[0]}, by a claim"}


def test_a_claim_of_a_pod_that_has_ended_is_nobodys(machine: Path) -> None:
    assert by_claim(machine, claims(claim(UIDS[2], gpu_nvidia_com=[gpu("gpu-0")]))) == {}
    (machine / CLAIMS).unlink()
    (machine / CLAIMS).mkdir()
    told = kubelet_devices(machine, machine / "proc", machine / "cgroup")
    assert list(told) == ["all"] and f"because {machine / CLAIMS} cannot be read" in told["all"]


@pytest.mark.parametrize("text", ["", "[]", '{"Data": {}}', '{"Data": {"PodDeviceEntries": [{"PodUID": "a"}]}}'])
def test_a_checkpoint_that_nobody_understands_gives_all_away(machine: Path, text: str) -> None:
    (machine / CHECKPOINT).write_text(text, encoding="utf-8")
    told = kubelet_devices(machine, machine / "proc", machine / "cgroup")
    assert list(told) == ["all"] and f"because {machine / CHECKPOINT} cannot be read" in told["all"]
