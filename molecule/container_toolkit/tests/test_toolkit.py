from __future__ import annotations

import json
import re

import pytest
from testinfra.host import Host

from tests.testinfra.helpers import gpu_uuids


def test_four_packages_have_one_version(host: Host) -> None:
    packages = ["nvidia-container-toolkit", "nvidia-container-toolkit-base", "libnvidia-container-tools",
                "libnvidia-container1"]  # fmt: skip
    assert {host.package(name).version.split("-")[0] for name in packages} == {"1.20.1"}


def test_docker_has_the_runtime_that_nomad_asks_for(host: Host) -> None:
    runtimes = json.loads(host.check_output("docker info --format '{{json .Runtimes}}'"))
    assert "nvidia" in runtimes
    assert json.loads(host.file("/etc/docker/daemon.json").content_string)["runtimes"]["nvidia"]


def test_cdi_lists_every_gpu(host: Host) -> None:
    devices = host.check_output("nvidia-ctk cdi list 2>/dev/null").split()
    if host.backend.get_hostname() == "toolkit-wsl":
        assert devices == ["nvidia.com/gpu=all"]
        return
    if host.backend.get_hostname() == "toolkit-mig":
        migs = re.findall(r"UUID: (MIG-[^)]+)", host.check_output("nvidia-smi -L"))
        assert len(migs) == 14
        assert {f"nvidia.com/gpu={name}" for name in [*migs, "0:0", "1:6", "all"]} <= set(devices)
        assert not {f"nvidia.com/gpu={uuid}" for uuid in gpu_uuids(host)} & set(devices)
        return
    uuids = gpu_uuids(host)
    assert len(uuids) == 4
    assert {f"nvidia.com/gpu={name}" for name in [*uuids, "0", "3", "all"]} <= set(devices)


def test_container_sees_only_its_gpu(host: Host) -> None:
    if host.backend.get_hostname() != "toolkit-t4":
        pytest.skip("WSL cannot separate GPUs, and MIG devices have no /proc of their own here")
    # A root file system of the node's own files: the runtime, not an image, is under test.
    wanted = gpu_uuids(host)[2]
    image = host.check_output(
        "tar -C / -c bin lib lib64 usr/bin usr/lib/x86_64-linux-gnu etc/ld.so.conf etc/ld.so.conf.d usr/lib64 "
        "--exclude='*nvidia*' --exclude='*libcuda*' 2>/dev/null | docker import -"
    )
    seen = host.check_output(
        f"docker run --rm --network none --runtime nvidia -e NVIDIA_VISIBLE_DEVICES={wanted} {image} nvidia-smi -L"
    )
    assert wanted in seen
    assert len(seen.splitlines()) == 1


def test_docker_that_was_there_is_left_alone(host: Host) -> None:
    if host.backend.get_hostname() != "toolkit-t4":
        pytest.skip("the role brought Docker here")
    assert host.package("docker-ce").is_installed
    assert not host.package("docker.io").is_installed
    now = host.check_output("docker inspect --format '{{.Id}} {{.State.StartedAt}} {{.State.Running}}' before")
    assert now.endswith(" true")
    assert now == host.file("/root/container-before").content_string.strip()
