# Copyright (c) gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where nvidia-smi is on this node, and what the kernel says of its GPUs."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi.listings import parse_proc_information
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi.values import int_of, text_of
from ansible_collections.gpufarm.core.plugins.module_utils.pci import normal_bus_id

WSL_DIRECTORY = "/usr/lib/wsl/lib"


def find_nvidia_smi(path: str | None = None, search: str | None = None) -> str | None:
    """The given program, or nvidia-smi from PATH, or the one that Windows gives a WSL distribution.

    WSL's init adds its folder to PATH of login shells only; sudo and systemd units do without.
    """
    if path:
        return shutil.which(path, path=search)
    return shutil.which("nvidia-smi", path=search) or shutil.which("nvidia-smi", path=WSL_DIRECTORY)


def read_file(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def entries(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir())
    except OSError:
        return []


def detect_platform(root: Path) -> str:
    release = read_file(root / "proc/sys/kernel/osrelease") or ""
    if "microsoft" in release.lower():
        return "wsl"
    # A kernel that the user built has any release name, but only WSL has these two together.
    guest = (root / "dev/dxg").exists() and (root / WSL_DIRECTORY[1:]).is_dir()
    return "wsl" if guest else "linux"


def kernel_modules(root: Path) -> str | None:
    """Of which kind the NVIDIA kernel module is that is loaded, as it says itself."""
    version = read_file(root / "proc/driver/nvidia/version") or ""
    return "open" if "Open Kernel Module" in version else "proprietary" if "Kernel Module" in version else None


def kernel_gpus(root: Path) -> dict[str, dict[str, str | None]]:
    """What the NVIDIA kernel module says of its GPUs, by PCI address; it knows those that no longer answer too."""
    found = {}
    for entry in entries(root / "proc/driver/nvidia/gpus"):
        bus_id = normal_bus_id(entry.name)
        information = read_file(entry / "information")
        if bus_id and information is not None:
            found[bus_id] = parse_proc_information(information)
    return found


def kernel_has_mig(root: Path) -> bool:
    """Whether the kernel module has a GPU instance on any GPU."""
    gpus = entries(root / "proc/driver/nvidia/capabilities")
    return any(entry.name.startswith("gi") for gpu in gpus for entry in entries(gpu / "mig"))


def topology(bus_id: str | None, root: Path) -> tuple[int | None, str | None, str | None]:
    """NUMA node, near CPUs and root bus of a PCI device, as sysfs has them."""
    address = normal_bus_id(bus_id)
    if address is None:
        return None, None, None
    folder = root / "sys/bus/pci/devices" / address
    node = int_of(read_file(folder / "numa_node"))
    if node == -1:
        # The firmware assigns no node, as in many virtual machines; with a single node there is no doubt.
        node = int_of(read_file(root / "sys/devices/system/node/online"))
    # The folder is a link to its place below the bridge of a processor, such as .../pci0000:16/0000:16:01.0/...
    above = (_ROOT_BUS.match(part) for part in folder.resolve().parts)
    bus = next((match.group(1) for match in above if match), None)
    return node, text_of(read_file(folder / "local_cpulist")), bus


_ROOT_BUS = re.compile(r"^pci([0-9a-f]{4,8}:[0-9a-f]{2})$")


# The kernel gives its first pid namespace this number, and no other one.
HOST_PID_NAMESPACE = "pid:[4026531836]"


def sees_pids_of_the_driver(root: Path) -> bool:
    """Whether /proc has the processes that the driver names: it names them by the host's pids."""
    try:
        # Path.readlink needs Python 3.9, which not all nodes have.
        return os.readlink(root / "proc/self/ns/pid") == HOST_PID_NAMESPACE  # noqa: PTH115
    except OSError:
        return False


def process_affinity(pid: int | None, root: Path) -> str | None:
    """The CPUs on which a process may run; None of one that has ended."""
    status = read_file(root / f"proc/{pid}/status") or ""
    match = re.search(r"^Cpus_allowed_list:\s*(\S+)", status, re.MULTILINE)
    return match.group(1) if match else None
