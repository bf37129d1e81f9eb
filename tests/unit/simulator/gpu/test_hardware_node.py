"""tests/hardware/node.py, which is for real machines, on the double and a kernel of files."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.simulator.cache import ROOT
from tests.simulator.gpu import faults

from .conftest import Node

MakeNode = Callable[[str], Node]


def kernel(machine: Node, root: Path) -> None:
    """Write what a kernel has of the profile's GPUs, and of the modules that are loaded."""
    profile = machine.profile
    version = profile["driver"]["version"]
    text: dict[str, str] = {
        "proc/modules": "nvidia_uvm 1 0 - Live 0x0\nnvidia 2 1 nvidia_uvm, Live 0x0\n",
        "sys/module/nvidia/initstate": "live\n",
        "sys/module/nvidia_uvm/initstate": "live\n",
        "sys/module/nvidia/version": f"{version}\n",
        "proc/driver/nvidia/version": f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  a\n",
        "proc/self/mounts": "proc /proc proc rw 0 0\n",
    }
    for number in range(len(profile["gpus"])):
        bus, device, numa, cpus = (
            faults.value(profile, number, key) or ""
            for key in ("pci.pci_bus_id", "pci.pci_device_id", "numa_node", "cpu_affinity")
        )
        address = bus.lower().removeprefix("0000")
        folder = f"sys/bus/pci/devices/{address}"
        text |= {
            f"{folder}/vendor": "0x10de\n",
            f"{folder}/device": f"0x{device[:4].lower()}\n",
            f"{folder}/class": "0x030200\n",
            f"{folder}/numa_node": f"{numa}\n",
            f"{folder}/local_cpulist": f"{cpus}\n",
            f"proc/driver/nvidia/gpus/{address}/information": "",
        }
    for name, content in text.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content, encoding="ascii")


def compare(machine: Node, root: Path) -> subprocess.CompletedProcess[str]:
    script = str(ROOT / "tests/hardware/node.py")
    path = {"PATH": f"{machine.build}:{machine.environment['PATH']}"}
    return machine.run(sys.executable, script, "--root", str(root), extra=path, timeout=120)


@pytest.mark.parametrize(("name", "profiles"), [("h100-x8", 56), ("a30-x2", 10)])
def test_kernel_driver_and_collection_agree(node: MakeNode, tmp_path: Path, name: str, profiles: int) -> None:
    machine = node(name)
    kernel(machine, tmp_path / "kernel")
    done = compare(machine, tmp_path / "kernel")
    gpus, version = len(machine.profile["gpus"]), machine.profile["driver"]["version"]
    assert (done.returncode, done.stdout) == (
        0, f"{gpus} GPU(s), driver {version}, {profiles} MIG profiles: 0 disagree\n",
    ), done.stdout + done.stderr  # fmt: skip


def test_what_disagrees_is_told(node: MakeNode, tmp_path: Path) -> None:
    machine, root = node("t4-x4"), tmp_path / "kernel"
    kernel(machine, root)
    addresses = sorted(path.name for path in (root / "sys/bus/pci/devices").iterdir())
    (root / "sys/bus/pci/devices" / addresses[0] / "device").write_text("0x2330\n", encoding="ascii")
    (root / "sys/bus/pci/devices" / addresses[1] / "numa_node").write_text("7\n", encoding="ascii")
    (root / "proc/driver/nvidia/gpus/0000:ff:00.0").mkdir()
    (root / "proc/modules").write_text("nvidia 2 1 - Live 0x0\nnouveau 1 0 - Live 0x0\n", encoding="ascii")
    (root / "sys/module/nvidia/version").write_text("1.2\n", encoding="ascii")
    done = compare(machine, root)
    assert done.returncode == 1
    for told in (
        f"{addresses[0]}: nvidia-smi says 0x1EB810DE, the bus vendor 10de and device 2330",
        "the fact numa_node is 7, topo -m says",
        "the kernel module holds",
        "nvidia_uvm is in /sys/module alone",
        "nouveau is in /proc/modules alone",
        "/sys/module says driver '1.2'",
        ": 6 disagree",
    ):
        assert told in done.stdout, (told, done.stdout)
