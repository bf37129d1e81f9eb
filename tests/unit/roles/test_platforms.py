"""What roles take from a host's distribution: to add one is to add it to one file, and who is not there is told so.

Each has the key file that NVIDIA signs its repository with, and the one fingerprint of that file; and WSL is known.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi import node
from ansible_collections.gpufarm.core.tests.unit.roles import role_helper
from ansible_collections.gpufarm.core.tests.unit.roles.role_helper import ROLES

NAMES = ("_common", "nvidia_repository", "nvidia_driver", "cuda", "docker", "container_toolkit")
FILE = "_common/vars/main/platforms.yml"
KNOWN = ("Debian 12", "Debian 13", "Ubuntu 22.04", "Ubuntu 24.04", "Ubuntu 26.04", "RedHat 9", "RedHat 10")
WSL = "6.6.87.2-microsoft-standard-WSL2"
# Without one the driver has nothing to drive.
GPU = {"vendor": "10de", "class": "030200", "device": "2330", "nvswitch_bridge": False}
SIGNS = ("/dev/dxg", node.WSL_DIRECTORY)
# As somebody would write it who adds it.
MADE_UP = """
  Linux Sencha 7:
    docker: [docker-client]
    driver: {open: [sencha-open], proprietary: [sencha-closed], branch_by: pinning}
    cuda: {name: sencha7, key: {file: 89ABCDEF.pub, fingerprint: 0123456789ABCDEF0123456789ABCDEF89ABCDEF}}
"""


def value(
    name: str, platform: str, *, kernel: str = "6.12.0", has: tuple[str, ...] = (), folder: Path = ROLES, **given: Any
) -> Any:
    known = {
        **role_helper.variables(*NAMES, folder=folder),
        "ansible_facts": role_helper.facts(platform, kernel),
        "_common_host": role_helper.host("/usr/bin/gpgv", *has, pci_devices=[GPU]),
    }
    return role_helper.value(name, {**known, **given})


@pytest.fixture
def roles(tmp_path: Path) -> Path:
    """The roles with one file changed."""
    shutil.copytree(ROLES, tmp_path / "roles")
    with (tmp_path / "roles" / FILE).open("a", encoding="utf-8") as file:
        file.write(MADE_UP)
    return tmp_path / "roles"


def test_a_distribution_is_added_in_one_file(roles: Path) -> None:
    def found(name: str) -> Any:
        return value(name, "Debian: Linux Sencha 7.2", kernel="6.12.1-sencha", folder=roles)

    cuda = {
        "name": "nvidia-cuda",
        "url": "https://developer.download.nvidia.com/compute/cuda/repos/sencha7/x86_64",
        "key_url": "https://developer.download.nvidia.com/compute/cuda/repos/sencha7/x86_64/89ABCDEF.pub",
        "fingerprints": ["0123456789ABCDEF0123456789ABCDEF89ABCDEF"],
        "obsolete": [
            "cuda-sencha7-x86_64.list",
            "cuda.list",
            "archive_uri-https_developer_download_nvidia_com_compute_cuda_repos_sencha7_x86_64_-n/a.list",
        ],
    }
    assert found("__nvidia_repository_cuda") == {**cuda, "packages": []}
    assert found("__nvidia_driver_repository") == {
        **cuda,
        "packages": ["nvidia-driver-pinning-580", "sencha-open=580.*"],
        "others": ["nvidia-driver-pinning-*", "linux-headers-6.12.1-sencha"],
        "also": ["linux-headers-6.12.1-sencha"],
    }
    assert found("__docker_wanted") == ["docker.io", "iptables", "docker-client"]
    assert (
        found("__container_toolkit_repository")["url"]
        == "https://nvidia.github.io/libnvidia-container/stable/deb/amd64"
    )
    assert "/usr/bin/gpgv" in found("_common_verifiers")
    assert found("_common_family")["packages"] == "apt"
    for role in ("nvidia_repository", "nvidia_driver", "cuda", "docker", "container_toolkit"):
        assert found(f"__{role}_refusal") == "", role
    # Who is refused is told of it, too.
    assert "RedHat 10, Linux Sencha 7, or a" in value("__cuda_refusal", "Debian: Linux Mint 22", folder=roles)


def test_what_the_file_names_is_there() -> None:
    known = role_helper.variables("_common")
    assert tuple(known["_common_platforms"]) == KNOWN
    for family in known["_common_families"].values():
        for place in (
            "_common/tasks/{}_repository",
            "nvidia_driver/tasks/install-{}",
            "container_toolkit/tasks/install-{}",
        ):
            assert (ROLES / f"{place.format(family['packages'])}.yml").is_file(), place
    for name, platform in known["_common_platforms"].items():
        assert set(platform["driver"]) == {"open", "proprietary", "branch_by"}, name
        assert (ROLES / f"nvidia_driver/tasks/branch-{platform['driver']['branch_by']}.yml").is_file(), name


MINT = "the distribution is Linux Mint 22. Expected: Debian 12, Debian 13, Ubuntu 22.04,"


@pytest.mark.parametrize(
    ("platform", "told"),
    [
        ("Debian: Linux Mint 22", MINT),
        # What an old version of a distribution lacks is not that of a new one.
        ("Debian: Debian 11.9", "the distribution is Debian 11.9. Expected: Debian 12, Debian 13,"),
        ("Debian: Ubuntu 24.10", "the distribution is Ubuntu 24.10. Expected: "),
        ("Debian: Pop!_OS 24.04", "the distribution is Pop!_OS 24.04. Expected: "),
        ("RedHat: Rocky 8.10", "the distribution is Rocky 8.10. Expected: "),
        ("RedHat: Fedora 41", "the distribution is Fedora 41. Expected: "),
        ("Archlinux: Archlinux rolling", "the distribution is Archlinux rolling. Expected: "),
        *[(f"Debian: {name}", "") for name in KNOWN[:5]],
        ("Debian: Debian 12.11", ""),
        *[(f"RedHat: {name}", "") for name in ("RedHat 9.4", "RedHat 10.0", "Rocky 9.5", "AlmaLinux 10.1", "CentOS 9")],
    ],
)
def test_a_distribution_that_nobody_knows_is_refused(platform: str, told: str) -> None:
    refusals = {
        role: value(f"__{role}_refusal", platform, nvidia_repository_key_fingerprints=["A" * 40])
        for role in ("nvidia_repository", "nvidia_driver", "cuda")
    }
    for role, refusal in refusals.items():
        assert refusal.startswith(told) and bool(refusal) is bool(told), role
    if told:
        assert refusals["nvidia_repository"].endswith("RedHat 9, RedHat 10, or a rebuild of RHEL. Next step:")
        step = "rebuild of RHEL. Next step: install the driver yourself and set `nvidia_driver_managed: false`."
        assert refusals["nvidia_driver"].endswith(step)
        assert value("__nvidia_driver_refusal", platform, nvidia_driver_managed="no") == ""
        assert "rebuild of RHEL. Next step: install CUDA yourself" in refusals["cuda"]


@pytest.mark.parametrize(
    ("platform", "known"),
    [("Debian: Linux Mint 22", True), ("RedHat: Fedora 41", True), ("Archlinux: Archlinux rolling", False)],
)
def test_docker_needs_the_family_alone(platform: str, known: bool) -> None:
    for role in ("docker", "container_toolkit"):
        refusal = value(f"__{role}_refusal", platform)
        assert bool(refusal) is not known
        assert known or refusal.endswith("or a rebuild of RHEL. Next step: take this host out of the play.")
    assert not known or value("__docker_wanted", platform)


@pytest.mark.parametrize(
    ("platform", "refused"), [("Debian: Kali 2024.4", False), ("RedHat: Rocky 9.5", True), ("Suse: SLES 15.6", True)]
)
def test_on_wsl_the_family_is_enough(platform: str, refused: bool) -> None:
    refusal = value("__cuda_refusal", platform, kernel=WSL)
    assert bool(refusal) is refused
    assert value("__nvidia_driver_refusal", platform, kernel=WSL) == ""
    if refused:
        assert " on WSL. Expected: one of the family Debian. Next step: " in refusal
    else:
        assert value("__nvidia_repository_source", platform, kernel=WSL)["name"] == "wsl-ubuntu"


@pytest.mark.parametrize(
    ("kernel", "has", "wsl"),
    [
        (WSL, (), True),
        ("6.6.87.2-Microsoft", (), True),
        ("6.6.87.2-WSL2-xanmod1", SIGNS, True),
        ("6.6.87.2-WSL2-xanmod1", SIGNS[:1], False),
        ("6.12.0", SIGNS[1:], False),
        ("6.12.0", (), False),
    ],
)
def test_wsl_is_what_the_facts_call_so(tmp_path: Path, kernel: str, has: tuple[str, ...], wsl: bool) -> None:
    assert value("_common_is_wsl", "Debian: Debian 13.1", kernel=kernel, has=has) is wsl
    (tmp_path / "proc/sys/kernel").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/osrelease").write_text(kernel, encoding="utf-8")
    for path in has:
        (tmp_path / path[1:]).mkdir(parents=True)
    assert node.detect_platform(tmp_path) == ("wsl" if wsl else "linux")


def key_of(platform: str, kernel: str = "6.12.0") -> Any:
    return value("__nvidia_repository_source", platform, kernel=kernel)["key"]


@pytest.mark.parametrize(
    ("platform", "file"),
    [
        ("Debian: Debian 12.11", "3bf863cc.pub"),
        ("Debian: Debian 13.1", "8793F200.pub"),
        ("Debian: Ubuntu 22.04", "3bf863cc.pub"),
        ("Debian: Ubuntu 24.04", "3bf863cc.pub"),
        ("Debian: Ubuntu 26.04", "60DF8A40.pub"),
        ("RedHat: RedHat 9.4", "D42D0685.pub"),
        ("RedHat: Rocky 9.5", "D42D0685.pub"),
    ],
)
def test_file_and_fingerprint_belong_together(platform: str, file: str) -> None:
    key = key_of(platform)
    assert key["file"] == file
    assert len(key["fingerprint"]) == 40
    assert key["fingerprint"].endswith(file.removesuffix(".pub").upper())


def test_wsl_uses_the_key_of_its_own_repository() -> None:
    assert key_of("Debian: Debian 13.1", kernel=WSL)["file"] == "3bf863cc.pub"


def test_no_fingerprint_is_made_up_for_rhel_10() -> None:
    assert key_of("RedHat: RedHat 10.0") == {"file": "CDF6BA43.pub", "fingerprint": ""}
    assert value("__nvidia_repository_cuda", "RedHat: RedHat 10.0")["fingerprints"] == []
    mine = value("__nvidia_repository_cuda", "RedHat: RedHat 10.0", nvidia_repository_key_fingerprints=["A" * 40])
    assert mine["fingerprints"] == ["A" * 40]


@pytest.mark.parametrize(
    ("role", "else_"),
    [
        ("nvidia_driver", "install the driver yourself and set `nvidia_driver_managed: false`."),
        ("cuda", "install CUDA yourself and leave `gpu_node_cuda` out for this host."),
    ],
)
def test_a_key_whose_fingerprint_is_not_known_is_refused_before_anything_changes(role: str, else_: str) -> None:
    assert value(f"__{role}_refusal", "RedHat: Rocky 10.1") == (
        "no fingerprint is known of CDF6BA43.pub, the key of NVIDIA's repository for Rocky 10.1. Expected: one to pin "
        "in nvidia_repository_key_fingerprints. Next step: compare what `gpg --show-keys --with-fingerprint "
        "CDF6BA43.pub` prints of it (it is at https://developer.download.nvidia.com/compute/cuda/repos/rhel10/x86_64/"
        "CDF6BA43.pub) with what NVIDIA publishes, and set nvidia_repository_key_fingerprints to that; or " + else_
    )
    mine = value(f"__{role}_refusal", "RedHat: Rocky 10.1", nvidia_repository_url="https://me:secret@mine.example/cuda")
    assert "(it is at https://mine.example/cuda/rhel10/x86_64/CDF6BA43.pub)" in mine
    for given in (
        {"nvidia_repository_key_fingerprints": ["A" * 40]}, {"common_scope": "remove"}, {"common_scope": "bundle"}
    ):  # fmt: skip
        assert value(f"__{role}_refusal", "RedHat: Rocky 10.1", **given) == ""
    assert value(f"__{role}_refusal", "RedHat: Rocky 9.5") == ""


@pytest.mark.parametrize(
    ("platform", "packages"),
    [
        ("Debian: Debian 12.11", ["docker.io", "iptables"]),
        ("Debian: Debian 13.1", ["docker.io", "iptables", "docker-cli"]),
        ("Debian: Ubuntu 24.04", ["docker.io", "iptables"]),
        ("RedHat: Rocky 9.5", ["docker-ce", "docker-ce-cli", "containerd.io"]),
    ],
)
def test_packages_of_docker(platform: str, packages: list[str]) -> None:
    assert value("__docker_wanted", platform) == packages
    assert value("__docker_wanted", platform, docker_packages=["mine"]) == ["mine"]


@pytest.mark.parametrize(
    ("platform", "kernel", "name", "asked"),
    [
        ("RedHat: RedHat 10.2", "6.12.0-124.8.1.el10_1.x86_64", "kernel-modules-extra",
         "kernel-modules-extra-6.12.0-124.8.1.el10_1.x86_64"),
        ("RedHat: Rocky 10.0", "6.12.0-55.el10.aarch64+64k", "kernel-64k-modules-extra",
         "kernel-64k-modules-extra-6.12.0-55.el10.aarch64"),
        # Of Oracle, of ELRepo, and one's own.
        ("RedHat: OracleLinux 10.0", "6.12.0-107.59.3.3.el10uek.x86_64", "", ""),
        ("RedHat: AlmaLinux 10.1", "6.15.2-1.el10.elrepo.x86_64", "", ""),
        ("RedHat: AlmaLinux 10.1", WSL, "", ""),
        ("RedHat: Rocky 9.5", "5.14.0-503.el9.x86_64", "", ""),
    ],
)  # fmt: skip
def test_docker_has_the_modules_that_rhel_10_brings_no_more(platform: str, kernel: str, name: str, asked: str) -> None:
    docker = ["docker-ce", "docker-ce-cli", "containerd.io"]
    assert value("__docker_wanted", platform, kernel=kernel) == docker + [asked] * bool(asked)
    assert value("__docker_looks_at", platform, kernel=kernel)["packages"] == docker + [name] * bool(name)
    # Those of another kernel do not do.
    for release, missing in (("124.8.1.el10_1", "124" not in kernel), ("55.el10", "-55" not in kernel)):
        there = (*(f"installed {each}=1" for each in docker), f"installed {name}=6.12.0-{release}")
        found = value("__docker_missing", platform, kernel=kernel, _common_host=role_helper.host(packages=there))
        assert found == [asked] * (bool(asked) and missing)
    # Docker that runs has it, wherever it comes from.
    runs = {"docker.service": {"enabled": "enabled", "active": "active"}}
    host = role_helper.host(packages=tuple(f"installed {each}=1" for each in docker), units=runs)
    assert value("__docker_missing", platform, kernel=kernel, _common_host=host) == []
    # They came for the kernel, too.
    assert value("__docker_going", platform, kernel=kernel) == docker


@pytest.mark.parametrize(
    ("platform", "modules", "packages"),
    [
        ("Debian: Debian 13.1", "open", ["nvidia-driver-cuda=580.*", "nvidia-kernel-open-dkms=580.*"]),
        ("Debian: Debian 12.11", "proprietary", ["nvidia-driver-cuda=580.*", "nvidia-kernel-dkms=580.*"]),
        ("Debian: Ubuntu 24.04", "open", ["nvidia-open=580.*"]),
        ("Debian: Ubuntu 22.04", "proprietary", ["cuda-drivers=580.*"]),
    ],
)
def test_packages_of_the_driver(platform: str, modules: str, packages: list[str]) -> None:
    assert value("__nvidia_driver_wanted", platform, nvidia_driver_kernel_modules=modules) == packages


@pytest.mark.parametrize(
    ("platform", "kernel", "more"),
    [
        ("Debian: Debian 13.1", "6.12.57+deb13-amd64", ["linux-headers-amd64"]),
        ("Debian: Debian 12.11", "6.1.0-40-cloud-amd64", ["linux-headers-cloud-amd64"]),
        ("Debian: Debian 12.11", "6.1.0-40-rt-arm64", ["linux-headers-rt-arm64"]),
        ("Debian: Debian 12.11", "6.9.0-mine", []),
        ("Debian: Ubuntu 24.04", "6.8.0-1-generic", []),
        ("RedHat: Rocky 9.5", "5.14.0-503.el9.x86_64", ["kernel-headers"]),
        ("RedHat: AlmaLinux 10.1", "6.12.0-124.8.1.el10_1.x86_64", ["kernel-headers"]),
    ],
)
def test_headers_of_the_running_kernel_and_on_debian_of_the_next(platform: str, kernel: str, more: list[str]) -> None:
    running = f"{'kernel-devel' if platform.startswith('RedHat') else 'linux-headers'}-{kernel}"
    assert value("_common_family", platform, kernel=kernel)["headers"] == [running, *more]


@pytest.mark.parametrize(
    ("kernel", "package"),
    [
        ("5.14.0-570.el9.aarch64+64k", "kernel-64k-devel-5.14.0-570.el9.aarch64"),
        ("5.14.0-570.el9.x86_64+rt", "kernel-rt-devel-5.14.0-570.el9.x86_64"),
        ("5.14.0-570.el9.x86_64+debug", "kernel-debug-devel-5.14.0-570.el9.x86_64"),
        ("5.14.0-570.el9.aarch64+64k-debug", "kernel-64k-debug-devel-5.14.0-570.el9.aarch64"),
        ("5.15.0-300.163.18.el9uek.x86_64", "kernel-uek-devel-5.15.0-300.163.18.el9uek.x86_64"),
    ],
)
def test_headers_of_another_kind_of_kernel(kernel: str, package: str) -> None:
    """Its kind is in the name of the package, and not in the version."""
    assert value("_common_family", "RedHat: OracleLinux 9.6", kernel=kernel)["headers"] == [package, "kernel-headers"]


@pytest.mark.parametrize(
    ("platform", "bundle", "told"),
    [
        ("Debian: Debian 12.11", "~/bundle", ""),
        ("Debian: Debian 12.11", "/srv/bundle", ""),
        ("Debian: Debian 12.11", "bundle", "gpufarm_bundle is bundle, which is another folder for each playbook. "),
        # They have a mirror.
        ("RedHat: Rocky 9.5", "bundle", ""),
    ],
)
def test_a_bundle_has_one_place(platform: str, bundle: str, told: str) -> None:
    looked_at = role_helper.host("/run/systemd/system")
    found = value("_common_refusal", platform, _common_host=looked_at, gpufarm_bundle=bundle)
    assert found.startswith(told) and bool(found) is bool(told)
    assert value("_common_bundle", platform, gpufarm_bundle=bundle) == ("" if "Rocky" in platform else bundle)


@pytest.mark.parametrize(
    ("host", "answered", "told"),
    [
        (0, 0, ""),
        (-299, 0, ""),
        (-3600, 0, "the clock is 3600 s behind that of the control machine. Expected: at most 300 s, because"),
        (3600, 0, " s ahead of that of the control machine. Expected: at most 300 s, because"),
        # Who answers late is not wrong.
        (3600, 3600, ""),
    ],
)
def test_a_clock_that_is_wrong_is_refused(host: int, answered: int, told: str) -> None:
    """It was asked C(answered) seconds ago, and said a time that is C(host) seconds from that of who asked."""
    asked_at = int(time.time()) - answered
    clock = {"asked_at": asked_at, "host": asked_at + host}
    looked_at = role_helper.host("/run/systemd/system", clock=clock)
    found = value("_common_refusal", "Debian: Debian 12.11", _common_host=looked_at)
    assert (told in found and found.endswith("`timedatectl set-ntp true`.")) if told else found == ""
    # Who leaves need not be right.
    assert value("_common_refusal", "Debian: Debian 12.11", _common_host=looked_at, common_scope="remove") == ""
    # The role wsl asks for itself.
    assert value("_common_refusal", "Debian: Debian 12.11", kernel=WSL, _common_host=looked_at) == ""


@pytest.mark.parametrize(
    ("platform", "has", "check", "refused"),
    [
        ("Debian: Debian 12.11", (), True, True),
        ("Debian: Debian 12.11", ("/usr/lib/python3/dist-packages/apt/__init__.py",), True, False),
        ("Debian: Debian 12.11", (), False, False),
        ("RedHat: Rocky 9.5", (), True, False),
    ],
)
def test_check_mode_needs_what_asks_apt(platform: str, has: tuple[str, ...], check: bool, refused: bool) -> None:
    """A run without check mode brings it."""
    looked_at = role_helper.host("/run/systemd/system", *has)
    found = value("_common_refusal", platform, _common_host=looked_at, ansible_check_mode=check)
    assert found.startswith("python3-apt is not installed") == refused
    assert ("Next step: run `apt-get install python3-apt` on this host" in found) == refused
