"""What several scenarios ask their nodes."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from testinfra.host import Host

from tests.simulator import farm
from tests.simulator.docker import PATIENCE, DockerError, docker

UUID = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def gpu_uuids(host: Host) -> list[str]:
    """Return the UUIDs that ``nvidia-smi -L`` lists on the node."""
    return UUID.findall(str(host.check_output("PATH=$PATH:/usr/lib/wsl/lib nvidia-smi -L")))


def nomad_api(host: Host, path: str) -> Any:
    """Return what the agent on the node answers for a path of Nomad's API."""
    program = f"import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:4646{path}').read().decode())"
    return json.loads(host.check_output("python3 -c %s", program))


def nomad_gpus(host: Host, node: str) -> list[str]:
    """Return the UUIDs of the GPUs that Nomad has for a node."""
    for found in nomad_api(host, "/v1/nodes?resources=true"):
        if found["Name"] == node:
            devices = found["NodeResources"]["Devices"] or []
            return [instance["ID"] for device in devices for instance in device["Instances"]]
    raise AssertionError(f"Nomad has no node {node}")


def restarts(host: Host, unit: str) -> int:
    """Return how often a unit's main process was started in this boot."""
    return len(
        str(host.check_output("journalctl -b -u %s --grep 'Started ' --output cat --no-pager", unit)).splitlines()
    )


def driver_parts_of_packages(host: Host) -> list[str]:
    """Return what packages of the node have of a Linux driver's: its libraries and its kernel modules.

    The library that CUDA's toolkit has for linking is none.
    """
    found = host.run("dpkg-query --search '*libnvidia-ml.so*' '*libcuda.so*' '*/nvidia*.ko*'")
    return [line for line in found.stdout.splitlines() if "/stubs/" not in line]


def wait_for(what: str, found: Callable[[], bool]) -> None:
    """Wait until something is so, as long as a busy machine may take."""
    for _ in range(600):
        if found():
            return
        time.sleep(0.5)
    raise AssertionError(f"{what}: not so after 5 minutes")


@contextmanager
def full(container: str, folder: str) -> Iterator[None]:
    """Have a folder of a node on a file system of its own, which is full."""
    script = f"""
        mkdir -p /run/full
        mount -t tmpfs -o size=$(($(du -sk {folder} | cut -f1) + 512))k full /run/full
        cp -a {folder}/. /run/full/
        ! dd if=/dev/zero of=/run/full/.filler bs=4k 2>/dev/null
        mount --bind /run/full {folder}"""
    docker("exec", container, "sh", "-euc", script)
    try:
        yield
    finally:
        docker("exec", container, "umount", folder, "/run/full")


def daemon_reloads(container: str) -> int:
    """Return how often systemd has read its units again in this boot of a node."""
    said = docker(
        "exec", container, "sh", "-c", "journalctl -b _PID=1 --grep '^Reloading' --output cat --no-pager || true"
    )
    return sum(line.startswith("Reloading") for line in said.splitlines())


def boot_id(container: str) -> str:
    """Return the ID of a node's boot."""
    return docker("exec", container, "cat", "/proc/sys/kernel/random/boot_id").strip()


def reboot(container: str) -> None:
    """Reboot a node and wait until it has booted."""
    before = boot_id(container)
    docker("exec", container, "systemctl", "reboot")
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            if boot_id(container) != before:
                break
        except DockerError:
            pass
        time.sleep(0.5)
    farm.wait_for_systemd(container)
