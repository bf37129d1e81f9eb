"""Compares what the collection finds out about a node with what kernel and driver say, on a machine with real GPUs.

    python tests/hardware/node.py

PCI devices as `host_info` lists them, kernel modules as the roles look for them, where GPUs are, and MIG profiles as
`nvidia_mig` reads them. Needs Python and the driver, nothing else, and changes nothing. Ends with 1 when something
disagrees.
"""

from __future__ import annotations

import argparse
import csv
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".collections"))

from ansible_collections.gpufarm.core.plugins.module_utils import nvidia_smi, pci
from ansible_collections.gpufarm.core.plugins.module_utils.mig import listings, planning

# Those that the role nvidia_driver looks at.
MODULES = ("nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm", "nvidia_peermem", "nouveau", "ib_umad")
NVIDIA = "10de"


def told(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def devices(root: Path, binary: str) -> Iterator[str]:
    """The bus against the kernel module and nvidia-smi, of which a container is shown a part."""
    found = {each["address"]: each for each in pci.devices_of([NVIDIA], root / "sys/bus/pci/devices")}
    gpus = {address for address, each in found.items() if each["class"].startswith("03")}
    bridges = {address for address, each in found.items() if each["class"].startswith("0680")}
    held = names(root / "proc/driver/nvidia/gpus")
    apart = " /proc/driver/nvidia" in read(root / "proc/self/mounts")
    if held - gpus or (gpus - held and not apart):
        yield f"GPUs on the bus are {sorted(gpus)}, the kernel module holds {sorted(held)}"
    switches = names(root / "proc/driver/nvidia-nvswitch/devices")
    if switches - bridges or (bridges - switches and not apart):
        yield f"NVSwitches on the bus are {sorted(bridges)}, the kernel module holds {sorted(switches)}"
    rows = told(binary, "--query-gpu=pci.bus_id,pci.device_id", "--format=csv,noheader").splitlines()
    for bus, device in csv.reader(rows, skipinitialspace=True):
        address = pci.normal_bus_id(bus) or bus
        here = found.get(address, {"vendor": "", "device": ""})
        if device.lower() != f"0x{here['device']}{here['vendor']}":
            yield f"{address}: nvidia-smi says {device}, the bus vendor {here['vendor']} and device {here['device']}"


def modules(root: Path, version: str | None) -> Iterator[str]:
    loaded = {line.split()[0] for line in read(root / "proc/modules").splitlines()}
    for name in MODULES:
        # A module that is part of the kernel has its folder, too, and no line.
        there = (root / "sys/module" / name / "initstate").exists()
        if there != (name in loaded):
            yield f"{name} is {'in /sys/module' if there else 'in /proc/modules'} alone"
    of_module, banner = read(root / "sys/module/nvidia/version").strip(), read(root / "proc/driver/nvidia/version")
    if of_module != version or of_module not in banner.split():
        yield f"/sys/module says driver {of_module!r}, nvidia-smi {version!r}, /proc/driver/nvidia {banner[:80]!r}"


def places(facts: nvidia_smi.Facts, matrix: str) -> Iterator[str]:
    """NUMA nodes and near CPUs against the last columns of `topo -m`."""
    for gpu in facts["gpus"]:
        row = re.search(rf"^GPU{gpu['index']}\t(.*)$", matrix, re.MULTILINE)
        words = row.group(1).split("\t") if row else []
        for fact, value in (("cpu_affinity", gpu["cpu_affinity"]), ("numa_node", gpu["numa_node"])):
            if value is not None and str(value) not in words:
                yield f"GPU {gpu['index']}: the fact {fact} is {value!r}, topo -m says {words}"
        peers = [str(peer["links"]) for peer in gpu["nvlink_peers"] or []]
        if sorted(peers) != sorted(word[2:] for word in words if re.match(r"NV\d", word)):
            yield f"GPU {gpu['index']}: the fact nvlink_peers is {gpu['nvlink_peers']}, topo -m says {words}"


def profiles(binary: str) -> tuple[int, list[str]]:
    """How many MIG profiles were read, and what is wrong: each row is read, has places, and can be had in full."""
    listed, placed = told(binary, "mig", "-lgip"), told(binary, "mig", "-lgipp")
    found = listings.parse_profiles(listed, placed)
    wrong = []
    rows = len(re.findall(r"^\|\s+\d+\s+MIG ", listed, re.MULTILINE))
    count = sum(len(each) for each in found.values())
    if rows != count:
        wrong.append(f"mig -lgip has {rows} rows, {count} were read")
    for gpu, each in found.items():
        for profile in each:
            name = f"GPU {gpu}: {profile.name} (ID {profile.id})"
            if not profile.starts or not profile.size or not profile.slices:
                wrong.append(f"{name} has no places: {profile.starts} of {profile.size} slices")
                continue
            try:
                planning.plan(f"GPU {gpu}", {profile.name: profile.total}, each, [], frozenset())
            except planning.LayoutError as error:
                wrong.append(f"{name} cannot be had {profile.total} times, as it says: {error}")
    return count, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("/"), help="where /proc and /sys are (for tests)")
    root = parser.parse_args().root
    binary = nvidia_smi.find_nvidia_smi()
    if binary is None:
        sys.stderr.write("no nvidia-smi here. Expected: a machine with an NVIDIA GPU. Next step: run this on one.\n")
        return 2
    facts = nvidia_smi.collect(nvidia_smi.resolve_subsets(["min", "topology", "peers"]), root=str(root))
    count, wrong = profiles(binary)
    wrong += devices(root, binary)
    wrong += modules(root, facts["driver_version"])
    wrong += places(facts, told(binary, "topo", "-m"))
    sys.stdout.writelines(f"{line}\n" for line in wrong)
    sys.stdout.write(
        f"{len(facts['gpus'])} GPU(s), driver {facts['driver_version']}, {count} MIG profiles: {len(wrong)} disagree\n"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
