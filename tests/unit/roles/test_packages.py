"""docs/packages.md is what the roles decide now, and they decide for every platform and architecture."""

from __future__ import annotations

import re

import pytest

from tests.readmes import packages
from tests.readmes.packages import Host

NVIDIA = "https://developer.download.nvidia.com/compute/cuda/repos"
TOOLKIT = "https://nvidia.github.io/libnvidia-container"
# The folder of NVIDIA's repository for each platform, as upstream has it.
FOLDERS = {
    "Debian: Debian 12": "debian12",
    "Debian: Debian 13": "debian13",
    "Debian: Ubuntu 22.04": "ubuntu2204",
    "Debian: Ubuntu 24.04": "ubuntu2404",
    "Debian: Ubuntu 26.04": "ubuntu2604",
    **{
        f"RedHat: {name} {version}": f"rhel{version}"
        for version in (9, 10)
        for name in ("RedHat", "Rocky", "AlmaLinux")
    },
}
# What the folders of both repositories are called for an architecture.
NAMES = {"x86_64": ("x86_64", "deb/amd64", "rpm/x86_64"), "aarch64": ("sbsa", "deb/arm64", "rpm/aarch64")}


def test_document_is_not_stale() -> None:
    assert packages.PATH.read_text(encoding="utf-8") == packages.text(), "Next step: make readmes"


def test_platforms_are_those_of_the_roles() -> None:
    assert {platform for _name, platform, _wsl in packages.platforms()} == set(FOLDERS)


@pytest.mark.parametrize("architecture", NAMES)
@pytest.mark.parametrize("platform", FOLDERS)
def test_every_combination_is_decided(platform: str, architecture: str) -> None:
    rows = packages.rows(Host(platform, architecture))
    rpm = platform.startswith("RedHat")
    nvidia, deb, rpms = NAMES[architecture]
    address = f"{NVIDIA}/{FOLDERS[platform]}/{nvidia}"
    assert rows["NVIDIA's repository: address"] == f"`{address}`"
    assert re.fullmatch(rf"`{address}/[0-9A-Fa-f]{{8}}\.pub`", rows["NVIDIA's repository: key"])
    key, pinned = rows["NVIDIA's repository: key"][-13:-5].upper(), rows["NVIDIA's repository: its fingerprint"]
    assert pinned.endswith(f"{key}`") or (pinned.startswith("none is known") and platform.endswith(" 10"))
    assert rows["toolkit's repository: address"] == f"`{TOOLKIT}/stable/{rpms if rpm else deb}`"
    assert rows["CUDA"] == "`cuda-toolkit-13-0`"
    assert packages.KERNEL in rows["kernel headers"]
    for row, told in rows.items():
        assert told and "{{" not in told and "VARIABLE" not in told, row
    # What one architecture has, the other has, so that a table has no holes.
    assert list(rows) == list(packages.rows(Host(platform, "x86_64")))


@pytest.mark.parametrize(
    ("platform", "branch", "modules", "asked", "kept"),
    [
        ("Debian: Debian 13", "580", "open", "`nvidia-driver-cuda=580.*`, `nvidia-kernel-open-dkms=580.*`",
         "`nvidia-driver-pinning-580`"),
        ("Debian: Ubuntu 24.04", "580", "proprietary", "`cuda-drivers=580.*`", "`nvidia-driver-pinning-580`"),
        ("RedHat: RedHat 9", "570", "open", "`nvidia-open`", "`dnf --assumeyes module enable nvidia-driver:570-open`"),
        ("RedHat: Rocky 9", "580", "proprietary", "`cuda-drivers`",
         "`dnf --assumeyes module enable nvidia-driver:580-dkms`"),
        ("RedHat: AlmaLinux 10", "580", "open", "`nvidia-open`",
         "`dnf --assumeyes versionlock add *nvidia*580* cuda-drivers*580*`"),
    ],
)  # fmt: skip
def test_the_driver_of_a_branch_and_what_keeps_it(
    platform: str, branch: str, modules: str, asked: str, kept: str
) -> None:
    rows = dict(packages.driver(Host(platform, "aarch64"), branch))
    assert (rows[f"{modules} modules"], rows[f"{modules} modules kept by"]) == (asked, kept)


@pytest.mark.parametrize(
    ("platform", "branch", "asked"),
    [
        ("Debian: Ubuntu 22.04", "570", ["nvidia-fabricmanager-570=570.*"]),
        ("Debian: Ubuntu 22.04", "580", ["nvidia-fabricmanager=580.*"]),
        ("RedHat: RedHat 9", "570", ["nvidia-fabric-manager-VERSION-*"]),
        ("RedHat: RedHat 10", "595", ["nvidia-fabricmanager-VERSION-*"]),
    ],
)
def test_fabric_manager_is_of_the_drivers_version(platform: str, branch: str, asked: list[str]) -> None:
    host = Host(platform, "x86_64")
    assert packages.fabric_manager(host, branch, packages.SWITCH) == asked
    assert packages.fabric_manager(host, branch, packages.BRIDGE) == [*asked, "nvlsm", "infiniband-diags"]


def test_dnf_takes_the_toolkit_by_its_signed_lists_and_the_driver_by_its_signed_packages() -> None:
    rows = packages.rows(Host("RedHat: RedHat 9", "x86_64"))
    assert rows["NVIDIA's repository: verified"] == "`gpgcheck=1`, `repo_gpgcheck=0`"
    assert rows["toolkit's repository: verified"] == "`gpgcheck=0`, `repo_gpgcheck=1`"


def test_rebuilds_are_decided_as_rhel_and_wsl_gets_no_driver() -> None:
    headings = list(packages.sections())
    assert "RHEL 9, Rocky 9, AlmaLinux 9" in headings and "RHEL 10, Rocky 10, AlmaLinux 10" in headings
    wsl = packages.rows(Host("Debian: Ubuntu 24.04", "x86_64", wsl=True))
    assert wsl["NVIDIA's repository: address"] == f"`{NVIDIA}/wsl-ubuntu/x86_64`"
    assert not [row for row in wsl if "driver" in row or "headers" in row]
