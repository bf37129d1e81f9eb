# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The driver of the distribution's own packages, in the hands of a real apt.

Its lists have the packages of bookworm and noble by name, source, version and dependency as packages.debian.org and
packages.ubuntu.com tell them, and NVIDIA's repository beside them, as a host has it for CUDA.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ansible.template import trust_as_template
from ansible_collections.gpufarm.core.tests.unit.patience import PATIENCE_S
from ansible_collections.gpufarm.core.tests.unit.roles import role_helper

pytestmark = pytest.mark.skipif(not shutil.which("apt-get"), reason="apt is needed to see what apt would do")

# Name, version, source, dependencies, and what it provides.
Listed = dict[str, list[tuple[str, ...]]]
GSP = "firmware-nvidia-gsp-{0}"


def debian(version: str, revision: str, *names: str) -> list[tuple[str, ...]]:
    full, source = f"{version}-{revision}", "nvidia-graphics-drivers"
    found: list[tuple[str, ...]] = [
        ("libcuda1", full, source, f"libnvidia-ptxjitcompiler1 (= {full})", ""),
        ("libnvidia-ptxjitcompiler1", full, source, "", ""),
        ("nvidia-smi", full, source, f"libnvidia-ml1 (= {full})", ""),
        ("libnvidia-ml1", full, source, "", ""),
        ("libnvidia-cfg1", full, source, "", ""),
        ("nvidia-kernel-dkms", full, source, GSP.format(version), ""),
        ("firmware-nvidia-gsp", full, source, "", GSP.format(version)),
        ("nvidia-open-kernel-dkms", full, "nvidia-open-gpu-kernel-modules", GSP.format(version), ""),
        ("nvidia-persistenced", "535.171.04-1~deb12u1", "nvidia-persistenced", "libnvidia-cfg1", ""),
    ]
    return [each for each in found if not names or each[0] in names]


NVIDIAS = [
    (name, f"{version}-1", "nvidia-graphics-drivers", "", "")
    for version in ("580.95.05", "570.195.03", "535.274.02", "535.261.03")
    for name in (
        "libcuda1", "nvidia-smi", "nvidia-kernel-dkms", "nvidia-persistenced", "nvidia-driver-cuda",
        "nvidia-fabricmanager-570",
    )
]  # fmt: skip
# Security has all of it but the open modules.
BOOKWORM: Listed = {
    "bookworm/non-free": debian("535.261.03", "1"),
    "bookworm-security/non-free": [
        each for each in debian("535.309.01", "0+deb12u1")
        if each[0] not in ("nvidia-open-kernel-dkms", "nvidia-persistenced")
    ],
    "": NVIDIAS,
}  # fmt: skip


def server(branch: str, version: str) -> list[tuple[str, ...]]:
    full, source = f"{version}-0ubuntu0.24.04.1", f"nvidia-graphics-drivers-{branch}-server"
    common, of_version = f"nvidia-kernel-common-{branch}-server", f"nvidia-kernel-common-{branch}-server-{version}"
    found: list[tuple[str, ...]] = [
        (common, full, source, "", of_version),
        (f"libnvidia-compute-{branch}-server", full, source, of_version, ""),
        (f"nvidia-utils-{branch}-server", full, source, f"libnvidia-compute-{branch}-server, {of_version}", ""),
        (f"nvidia-fabricmanager-{branch}", full, f"fabric-manager-{branch}", of_version, ""),
    ]
    for kind in ("", "-open"):
        found += [
            (f"nvidia-kernel-source-{branch}-server{kind}", full, source, "", ""),
            (
                f"nvidia-headless-no-dkms-{branch}-server{kind}", full, source,
                f"libnvidia-compute-{branch}-server (= {full}), nvidia-kernel-source-{branch}-server{kind} (= {full})",
                "",
            ),
            (f"nvidia-dkms-{branch}-server{kind}", full, source, f"nvidia-kernel-source-{branch}-server{kind}", ""),
            (
                f"nvidia-headless-{branch}-server{kind}", full, source,
                f"nvidia-dkms-{branch}-server{kind}, nvidia-headless-no-dkms-{branch}-server{kind}", "",
            ),
        ]  # fmt: skip
    return found


def built(kernel: str, branch: str, version: str) -> list[tuple[str, ...]]:
    """Return a kernel and the modules of one driver version that Ubuntu has built for it."""
    common = f"nvidia-kernel-common-{branch}-server"
    return [
        (f"linux-image-{kernel}-generic", f"{kernel}.1", "linux-signed", "", ""),
        *(
            (
                f"linux-modules-nvidia-{branch}-server{kind}-{kernel}-generic", f"{kernel}.1+{version}",
                "linux-restricted-modules",
                f"linux-image-{kernel}-generic, {common} (<= {version}-1), {common} (>= {version})", "",
            )
            for kind in ("", "-open")
        ),
    ]  # fmt: skip


def flavour(kernel: str, branch: str, version: str) -> list[tuple[str, ...]]:
    """Return the metapackages that bring it, and its modules."""
    common = f"nvidia-kernel-common-{branch}-server"
    return [
        ("linux-image-generic", f"{kernel}.1", "linux-meta", f"linux-image-{kernel}-generic", ""),
        *(
            (
                f"linux-modules-nvidia-{branch}-server{kind}-generic", f"{kernel}.1", "linux-restricted-modules",
                f"linux-modules-nvidia-{branch}-server{kind}-{kernel}-generic, {common} (>= {version})", "",
            )
            for kind in ("", "-open")
        ),
    ]  # fmt: skip


TRANSITIONAL = ("nvidia-headless-no-dkms-565-server-open", "565.57.01-0ubuntu1", "x", "nvidia-utils-580-server", "")
RUNNING, NEXT, LAST = "6.8.0-40", "6.8.0-41", "6.8.0-42"
NOBLE: Listed = {
    "noble-updates/restricted": [
        TRANSITIONAL, *server("570", "570.195.03"), *server("580", "580.95.05"), *built(RUNNING, "580", "580.95.05"),
        *flavour(RUNNING, "580", "580.95.05"),
    ],
    "": NVIDIAS,
}  # fmt: skip
# NVIDIA's package of these has the same name.
PROPRIETARY = {"nvidia_driver_kernel_modules": "proprietary"}
UBUNTU = {"platform": "Debian: Ubuntu 24.04", "kernel": f"{RUNNING}-generic"}
KERNELS = ("linux-image-generic", f"linux-image-{RUNNING}-generic")


class World:
    """A host with lists, packages, preferences, and a role that asks."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for folder in ("lists/partial", "cache/archives/partial", "sources", "preferences.d", "lib"):
            (root / folder).mkdir(parents=True)
        self.installed: dict[str, tuple[str, ...]] = {}
        # As NVIDIA's keyring package has it.
        self.prefer("cuda-repository-pin-600", "Package: *\nPin: release l=NVIDIA CUDA\nPin-Priority: 600\n")
        places = {
            "Dir::State": root, "Dir::State::lists": root / "lists", "Dir::State::status": root / "status",
            "Dir::Cache": root / "cache", "Dir::Etc::sourcelist": "/dev/null",
            "Dir::Etc::sourceparts": root / "sources", "Dir::Etc::preferences": "/dev/null",
            "Dir::Etc::preferencesparts": root / "preferences.d",
            "APT::Sandbox::User": "root", "Acquire::Languages": "none", "APT::Architecture": "amd64",
        }  # fmt: skip
        (root / "apt.conf").write_text("".join(f'{name} "{value}";\n' for name, value in places.items()))

    def prefer(self, name: str, text: str) -> None:
        (self.root / "preferences.d" / name).write_text(text)

    def run(self, script: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "APT_CONFIG": str(self.root / "apt.conf"), "TMPDIR": str(self.root)}
        return subprocess.run(
            ["/bin/bash", "-c", script], input=stdin, capture_output=True, text=True, check=False, env=env,
            timeout=PATIENCE_S,
        )  # fmt: skip

    def list(self, listed: Listed) -> None:
        """Have these in the lists, and nothing else."""
        shutil.rmtree(self.root / "repositories", ignore_errors=True)
        for path in (self.root / "sources").iterdir():
            path.unlink()
        for number, (place, packages) in enumerate(listed.items()):
            suite, _slash, component = place.partition("/")
            folder = self.root / f"repositories/{number}"
            release = folder / f"dists/{suite}" if place else folder
            index = f"{component}/binary-amd64/Packages" if place else "Packages"
            (release / index).parent.mkdir(parents=True, exist_ok=True)
            text = "\n".join(stanza(package) for package in packages)
            (release / index).write_text(text)
            told = "Origin: NVIDIA\nLabel: NVIDIA CUDA\n"
            if place:
                origin = "Ubuntu" if "noble" in suite else "Debian"
                told = f"Origin: {origin}\nSuite: {suite}\nComponents: {component}\n"
            digest = hashlib.sha256(text.encode()).hexdigest()
            (release / "Release").write_text(f"{told}Architectures: amd64\nSHA256:\n {digest} {len(text)} {index}\n")
            (self.root / f"sources/{number}.list").write_text(
                f"deb [trusted=yes arch=amd64] file:{folder} {f'{suite} {component}' if place else '/'}\n"
            )
        self.have()
        updated = self.run("apt-get update")
        assert updated.returncode == 0, updated

    def have(self, *packages: tuple[str, ...]) -> None:
        """Have them installed as well."""
        self.installed |= {package[0]: package for package in packages}
        text = "\n".join(stanza(each, "Status: install ok installed\n") for each in self.installed.values())
        (self.root / "status").write_text(text)

    def known(self, **given: Any) -> dict[str, Any]:
        facts = role_helper.facts(given.pop("platform", "Debian: Debian 12.12"), given.pop("kernel", "6.1.0-40-amd64"))
        packages = tuple(f"installed {name}={each[1]}" for name, each in self.installed.items())
        return {
            **role_helper.variables("_common", "nvidia_driver"), "inventory_hostname": "node1",
            "nvidia_driver_source": "distribution", "_common_is_wsl": False, "ansible_facts": facts,
            "_common_host": role_helper.host(packages=packages), **given,
        }  # fmt: skip

    def ask(self, **given: Any) -> tuple[str, dict[str, Any]]:
        """Return what the role says against it, nothing where it would go on, and all that it knows then."""
        known = self.known(**given)
        repository = {"packages": role_helper.value("__nvidia_driver_of_repository", known)["packages"]}
        known |= {"common_repository": repository}
        for listing, demand, answer in (
            ("List the versions that there are", "Require the driver branch to exist", "__nvidia_driver_branches"),
            ("Ask apt for the driver", "Require packages that apt can install together", "__nvidia_driver_found"),
        ):
            task, required = the_task(listing), the_task(demand)["ansible.builtin.assert"]
            script = template(task["ansible.builtin.shell"], known)
            ran = self.run(script, template(task["args"].get("stdin", ""), known))
            assert ran.returncode == 0 or answer == "__nvidia_driver_found", ran
            known[answer] = {
                "rc": ran.returncode, "stdout": ran.stdout, "stdout_lines": ran.stdout.splitlines(),
                "stderr_lines": ran.stderr.splitlines(),
            }  # fmt: skip
            if not template(f"{{{{ {required['that']} }}}}", known):
                return str(template(required["fail_msg"], known)), known
        return "", known

    def install(self, known: dict[str, Any]) -> dict[str, str]:
        """Have apt do as it has answered, by the preferences that hold; what there is then, of the driver."""
        self.prefer("gpufarm-nvidia-driver", role_helper.value("__nvidia_driver_preferences_text", known))
        self.change("install", *role_helper.value("__nvidia_driver_answered", known))
        return self.driver()

    def change(self, *command: str) -> None:
        """Change packages as apt-get would."""
        done = self.run(f"apt-get --simulate --no-install-recommends --allow-downgrades {' '.join(command)}")
        assert done.returncode == 0, done
        for name in re.findall(r"(?m)^Remv (\S+)", done.stdout):
            del self.installed[name]
        for name, version in re.findall(r"(?m)^Inst (\S+) (?:\[\S+\] )?\((\S+)", done.stdout):
            shown = self.run(f"apt-cache show {name}={version}").stdout
            fields = dict(re.findall(r"(?m)^(\w+): (.*)$", shown.split("\n\n")[0]))
            wanted = [fields.get(field, "") for field in ("Source", "Depends", "Provides")]
            self.have((name, version, *wanted))

    def driver(self) -> dict[str, str]:
        return {name: each[1] for name, each in self.installed.items() if "nvidia" in name or name == "libcuda1"}


def stanza(package: tuple[str, ...], status: str = "") -> str:
    name, version, source, depends, provides = package
    more = "".join(
        f"{field}: {text}\n" for field, text in (("Depends", depends), ("Provides", provides)) if text
    )  # fmt: skip
    about = "NVIDIA headless metapackage (transitional package)" if package == TRANSITIONAL else "a package"
    return (
        f"Package: {name}\n{status}Version: {version}\nSource: {source}\nArchitecture: amd64\nMaintainer: x\n{more}"
        f"Filename: ./{name}_{version}.deb\nSize: 1\nSHA256: {'a' * 64}\nDescription: {about}\n"
    )


def the_task(name: str) -> dict[str, Any]:
    tasks = role_helper.tasks_of("nvidia_driver/tasks/branch-preferences.yml")
    return next(task for task in tasks if task["name"] == name)


def template(text: str, known: dict[str, Any]) -> Any:
    return role_helper.value("asked", {**known, "asked": trust_as_template(text)})


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_debians_driver_is_of_one_version_and_stays(world: World) -> None:
    """Not of NVIDIA's repository, which a pin of its own prefers, nor of security, whose open modules are not there."""
    world.list(BOOKWORM)
    told, known = world.ask(nvidia_driver_branch="535")
    assert told == ""
    there = world.install(known)
    assert there.pop("nvidia-persistenced") == "535.171.04-1~deb12u1"
    assert {"libcuda1", "nvidia-smi", "nvidia-open-kernel-dkms", "firmware-nvidia-gsp", "libnvidia-ml1"} <= set(there)
    assert set(there.values()) == {"535.261.03-1"}
    world.change("dist-upgrade")
    assert {**there, "nvidia-persistenced": "535.171.04-1~deb12u1"} == world.driver()
    # Proprietary ones, and the newest of all.
    told, known = world.ask(nvidia_driver_branch="535", nvidia_driver_kernel_modules="proprietary")
    assert told == "" and "nvidia-kernel-dkms=535.309.01-0+deb12u1" in role_helper.value(
        "__nvidia_driver_answered", known
    )


def test_another_version_is_exchanged_whole_and_held(world: World) -> None:
    world.list(BOOKWORM)
    old = [each for each in debian("535.247.01", "1~deb12u1") if each[0] != "nvidia-kernel-dkms"]
    world.have(*old)
    # What is there of the branch stays.
    assert role_helper.value("__nvidia_driver_version_own", world.known(nvidia_driver_branch="535")) == "535.247.01"
    asked = {"nvidia_driver_branch": "535", "nvidia_driver_version": "535.261.03"}
    told, known = world.ask(**asked)
    assert told == ""
    there = world.install(known)
    assert {version for name, version in there.items() if name != "nvidia-persistenced"} == {"535.261.03-1"}
    assert "Pin: version 535.261.03-*" in role_helper.value("__nvidia_driver_preferences_text", world.known(**asked))


@pytest.mark.parametrize(
    ("listed", "given", "told"),
    [
        (
            BOOKWORM, {"nvidia_driver_branch": "580", **PROPRIETARY},
            "node1: driver branch 580 is not among the packages of Debian 12.12. Found in its repository for this "
            "distribution: 535. Expected: 580 among them. Next step: set nvidia_driver_branch to one of them, or leave "
            "nvidia_driver_source out, so that the driver comes from NVIDIA.",
        ),
        (
            {"": NVIDIAS}, {"nvidia_driver_branch": "535", **PROPRIETARY},
            "Found in its repository for this distribution: no branch at all. Expected: 535 among them. Next step: "
            "have contrib, non-free and non-free-firmware among the components of the entry for Debian in "
            "/etc/apt/sources.list.d or /etc/apt/sources.list of this host, and run this again.",
        ),
        (
            BOOKWORM, {"nvidia_driver_branch": "535", "nvidia_driver_version": "535.1.1"},
            "node1: driver version 535.1.1 is not among the packages of Debian 12.12. Found in its repository for this "
            "distribution: 535.261.03. Expected: 535.1.1 among them. Next step: set nvidia_driver_version to one of",
        ),
        # Without non-free-firmware.
        (
            {"bookworm/contrib": [each for each in debian("535.261.03", "1") if "gsp" not in each[0]]},
            {"nvidia_driver_branch": "535"},
            "node1: apt cannot install driver 535.261.03 of Debian (nvidia-open-kernel-dkms : Depends: "
            "firmware-nvidia-gsp-535.261.03 but it is not installable E: Unable to correct problems, you have held "
            "broken packages.). Expected: nvidia-open-kernel-dkms=535.261.03-*, libcuda1=535.261.03-*, "
            "nvidia-smi=535.261.03-*, nvidia-persistenced. Next step: have contrib, non-free and non-free-firmware "
            "among the components of this host, and mend what apt names.",
        ),
        # A transitional package is no branch.
        (
            NOBLE, {**UBUNTU, "nvidia_driver_branch": "565"},
            "node1: driver branch 565 is not among the packages of Ubuntu 24.04. Found in its repository for this "
            "distribution: 570, 580. Expected: 565 among them. Next step: set nvidia_driver_branch to one of them",
        ),
        (
            {"": NVIDIAS}, UBUNTU,
            "no branch at all. Expected: 580 among them. Next step: have restricted and multiverse among the compo",
        ),
        # A kernel of one's own, and one whose modules are of an older driver.
        (
            NOBLE, {**UBUNTU, "kernel": "6.9.0-mine"},
            "node1: apt cannot install driver 580.95.05 of Ubuntu (E: Unable to locate package "
            "linux-modules-nvidia-580-server-open-6.9.0-mine",
        ),
        (
            {"noble-updates/restricted": [
                *server("580", "580.173.02"), *built(RUNNING, "580", "580.95.05"), *built(NEXT, "580", "580.173.02"),
            ]},
            UBUNTU,
            "Next step: bring the kernel up to date and boot it, because Ubuntu has built these modules for its newest "
            "kernels alone, or set `nvidia_driver_precompiled: false`, so that DKMS builds them.",
        ),
    ],
)  # fmt: skip
def test_what_the_distribution_does_not_have_is_told_with_what_it_has(
    world: World, listed: Listed, given: dict[str, Any], told: str
) -> None:
    world.list(listed)
    said, _known = world.ask(**given)
    assert told in said, said


def test_it_is_told_before_anything_changes() -> None:
    tasks = role_helper.tasks_of("nvidia_driver/tasks/branch-preferences.yml")
    names = [task["name"] for task in tasks]
    before = tasks[: names.index("Have no work where the driver is exchanged")]
    assert len(before) == 5
    assert {task.get("changed_when", False) for task in before} == {False}
    assert not any(
        "apt" in module or "copy" in module for task in before for module in task if module.startswith("ansible.")
    )


def test_modules_that_ubuntu_has_signed_come_with_their_kernels(world: World) -> None:
    """And a kernel for which there are none of this driver does not come, nor a newer driver beneath what runs."""
    world.list(NOBLE)
    world.have(*(each for each in NOBLE["noble-updates/restricted"] if each[0] in KERNELS))
    told, known = world.ask(**UBUNTU)
    assert told == ""
    there = world.install(known)
    modules = "linux-modules-nvidia-580-server-open"
    assert {f"{modules}-{RUNNING}-generic", f"{modules}-generic", "libnvidia-compute-580-server"} <= set(there)
    assert not [name for name in there if "dkms-" in name.replace("no-dkms", "") or name.startswith("nvidia-dkms")]
    # The next kernel, for which Ubuntu has built this driver.
    world.list({"noble-updates/restricted": [
        *server("580", "580.95.05"), *built(NEXT, "580", "580.95.05"), *flavour(NEXT, "580", "580.95.05"),
    ]})  # fmt: skip
    world.change("dist-upgrade")
    assert {f"linux-image-{NEXT}-generic", f"{modules}-{NEXT}-generic"} <= set(world.installed)
    # The one after it, for which Ubuntu has built another.
    world.list({"noble-updates/restricted": [
        *server("580", "580.173.02"), *built(NEXT, "580", "580.173.02"), *built(LAST, "580", "580.173.02"),
        *flavour(LAST, "580", "580.173.02"),
    ]})  # fmt: skip
    before = world.installed.copy()
    world.change("dist-upgrade")
    assert world.installed == before
    # Which is asked for.
    asked = {**UBUNTU, "kernel": f"{NEXT}-generic", "nvidia_driver_version": "580.173.02"}
    told, known = world.ask(**asked)
    assert told == ""
    there = world.install(known)
    assert there["libnvidia-compute-580-server"] == "580.173.02-0ubuntu0.24.04.1"
    assert there[f"{modules}-{NEXT}-generic"] == f"{NEXT}.1+580.173.02"
    assert {f"linux-image-{LAST}-generic", f"{modules}-{LAST}-generic"} <= set(world.installed)
    # Their kernels know Canonical's key.
    host = role_helper.host()
    path = role_helper.value("__nvidia_driver_secure_boot_path", known)
    host["files"].append({"path": path, "checksum": hashlib.sha1(b"\x06\0\0\0\x01").hexdigest()})  # noqa: S324
    for precompiled, told_of in ((True, 0), (False, 1)):
        given = world.known(**UBUNTU, nvidia_driver_precompiled=precompiled, _common_host=host)
        assert len(role_helper.value("__nvidia_driver_in_the_way", given)) == told_of


def test_dkms_builds_where_nobody_wants_them(world: World) -> None:
    world.list(NOBLE)
    world.have(*(each for each in NOBLE["noble-updates/restricted"] if each[0] in KERNELS))
    told, known = world.ask(**UBUNTU, nvidia_driver_precompiled="no")
    assert told == "" and "nvidia-dkms-580-server-open" in world.install(known)
    assert "linux-image" not in role_helper.value("__nvidia_driver_preferences_text", known)
    assert role_helper.value("__nvidia_driver_headers_missing", known) == [f"linux-headers-{RUNNING}-generic"]
    assert role_helper.value("__nvidia_driver_headers_missing", world.known(**UBUNTU)) == []


@pytest.mark.parametrize(
    ("there", "given", "others"),
    [
        (["linux-modules-nvidia-580-server-open-6.8.0-40-generic", "linux-modules-nvidia-580-server-open-generic"],
         {}, []),
        (["linux-modules-nvidia-580-server-generic", "linux-modules-nvidia-570-server-open-generic",
          "nvidia-dkms-580-server-open"], {}, None),
        (["linux-modules-nvidia-580-server-open-generic"], {"nvidia_driver_kernel_modules": "proprietary"}, None),
        (["linux-modules-nvidia-580-server-generic"], {"nvidia_driver_kernel_modules": "proprietary"}, []),
        (["nvidia-dkms-580-server-open"], {"nvidia_driver_precompiled": False}, []),
        (["nvidia-dkms-580-server", "linux-modules-nvidia-580-server-open-generic"],
         {"nvidia_driver_precompiled": False}, None),
        (["nvidia-open-kernel-dkms"], {"platform": "Debian: Debian 13.1"}, []),
        (["nvidia-kernel-dkms"], {"platform": "Debian: Debian 13.1"}, None),
        (["nvidia-dkms-580-server"], {"nvidia_driver_source": "nvidia"}, []),
        (["nvidia-dkms-580-server"], {"nvidia_driver_packages": ["mine"]}, []),
    ],
)  # fmt: skip
def test_modules_that_the_kernel_would_take_instead(
    world: World, there: list[str], given: dict[str, Any], others: list[str] | None
) -> None:
    host = role_helper.host(packages=tuple(f"installed {name}=1" for name in there))
    known = world.known(**{**UBUNTU, **given}, _common_host=host)
    assert role_helper.value("__nvidia_driver_modules_of_others", known) == (there if others is None else others)


NVSWITCH = {"vendor": "10de", "class": "068000", "device": "22a3", "nvswitch_bridge": False}
HELD = role_helper.host("/etc/apt/preferences.d/gpufarm-nvidia-driver")
PINNED = role_helper.host(packages=("installed nvidia-driver-pinning-580=580-1",))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, ""),
        (UBUNTU, ""),
        ({"_common_host": HELD}, ""),
        (
            {"platform": "RedHat: Rocky 9.5"},
            "nvidia_driver_source is distribution, and Rocky has no packages of a driver that this role knows. "
            "Expected: Debian or Ubuntu. Next step: leave it out, so that the driver comes from NVIDIA.",
        ),
        (
            {"_common_host": role_helper.host(pci_devices=[NVSWITCH])},
            "NVSwitches are on the bus, and nvidia_driver_source is distribution, but Debian has no Fabric Manager.",
        ),
        ({"_common_host": role_helper.host(pci_devices=[NVSWITCH]), **UBUNTU}, ""),
        (
            {
                "_common_host": role_helper.host(pci_devices=[NVSWITCH]),
                "nvidia_driver_fabric_manager_package": "mine",
            },
            "",
        ),
        (
            {"_common_host": PINNED},
            "nvidia_driver_source is distribution, and the driver here came from NVIDIA's repository. Expected: none "
            "of another source, because their packages share names and files. Next step: set "
            "`nvidia_driver_source: nvidia` to keep it, or take it away by `tasks_from: absent` of "
            "gpufarm.core.nvidia_driver, and run this again.",
        ),
        (
            {"_common_host": HELD, "nvidia_driver_source": "nvidia"},
            "nvidia_driver_source is nvidia, and the driver here came from the distribution. Expected: none",
        ),
        ({"_common_host": PINNED, "nvidia_driver_source": "nvidia"}, ""),
        # Who collects packages for others need not be like them.
        ({"_common_host": PINNED, "common_scope": "bundle", **UBUNTU}, ""),
        (
            {"common_scope": "bundle", "nvidia_driver_branch": "535"},
            "nvidia_driver_version is empty. Expected: a version, because the packages that Debian has of a branch are "
            "of several, and a bundle has one of each. Next step: set it to one that `apt-cache madison "
            "nvidia-open-kernel-dkms` tells.",
        ),
        ({"common_scope": "bundle", "nvidia_driver_branch": "535", "nvidia_driver_version": "535.261.03"}, ""),
    ],
)
def test_a_source_that_cannot_be(world: World, given: dict[str, Any], told: str) -> None:
    gpu = {"vendor": "10de", "class": "030200", "device": "2330", "nvswitch_bridge": False}
    known = world.known(**given, __nvidia_repository_refusal="")
    known["_common_host"] = {
        **known["_common_host"], "pci_devices": [gpu, *known["_common_host"]["pci_devices"]],
    }  # fmt: skip
    found = role_helper.value("__nvidia_driver_refusal", known)
    assert found.startswith(told) and bool(found) is bool(told), found
    assert role_helper.value("__nvidia_driver_refusal", {**known, "common_scope": "remove"}) == ""


def test_fabric_manager_of_ubuntu(world: World) -> None:
    known = world.known(**UBUNTU, _common_host=role_helper.host(pci_devices=[NVSWITCH]))
    assert role_helper.value("__nvidia_driver_fabric_wanted", known) == ["nvidia-fabricmanager-580=580.*"]


@pytest.mark.parametrize(
    ("platform", "going"),
    [
        ("Debian: Debian 13.1", ["nvidia-driver-cuda", "nvidia-kernel-open-dkms", "nvidia-open-kernel-dkms", "libcuda1",
                                 "nvidia-driver-pinning-*"]),
        ("Debian: Ubuntu 24.04", ["nvidia-open", "nvidia-headless-no-dkms-*-server-open", "nvidia-headless-*-server",
                                  "linux-modules-nvidia-*-server-open-*", "nvidia-driver-pinning-*"]),
        ("RedHat: Rocky 9.5", ["nvidia-open", "cuda-drivers"]),
    ],
)  # fmt: skip
def test_the_driver_of_either_source_goes(world: World, platform: str, going: list[str]) -> None:
    for source in ("nvidia", "distribution"):
        known = world.known(platform=platform, nvidia_driver_source=source)
        assert set(going) <= set(role_helper.value("__nvidia_driver_going", known))
    absent = {task["name"]: task for task in role_helper.tasks_of("nvidia_driver/tasks/absent.yml")}
    held = absent["Have no version of the driver held for apt"]["ansible.builtin.file"]
    assert held == {"path": "{{ __nvidia_driver_preferences_path }}", "state": "absent"}


def test_nothing_is_asked_where_it_is_held_and_there(world: World) -> None:
    world.have(*(each for each in debian("535.261.03", "1") if each[0] != "nvidia-kernel-dkms"))
    known = world.known(nvidia_driver_branch="535", nvidia_driver_kernel_headers=False)
    text = role_helper.value("__nvidia_driver_preferences_text", known)
    repository = {"packages": role_helper.value("__nvidia_driver_of_repository", known)["packages"]}
    host = role_helper.host(
        "/etc/apt/preferences.d/gpufarm-nvidia-driver", packages=tuple(known["_common_host"]["packages"])
    )
    host["files"][0]["checksum"] = hashlib.sha1(text.encode()).hexdigest()  # noqa: S324
    names = ("ansible_facts", "_common_is_wsl", "nvidia_driver_source", "nvidia_driver_branch")
    asked = {name: known[name] for name in names} | {
        "common_repository": repository,
        "nvidia_driver_kernel_headers": False,
    }
    newer = {"nvidia_driver_version": "535.309.01"}
    cases = [
        {**asked, "_common_host": host},
        {**asked, "_common_host": {**host, "files": []}},
        {**asked, "_common_host": {**host, "packages": host["packages"][1:]}},
        {**asked, "_common_host": host, **newer, "common_repository": {"packages": ["libcuda1=535.309.01-*"]}},
    ]
    found = role_helper.values("__nvidia_driver_settled", ["_common", "nvidia_driver"], cases)
    assert found == [True, False, False, False]


@pytest.mark.parametrize(("source", "cuda", "names"), [
    ("nvidia", False, ["nvidia-cuda"]), ("distribution", False, []), ("distribution", True, ["nvidia-cuda"]),
])  # fmt: skip
def test_what_a_bundle_has_of_it(world: World, source: str, cuda: bool, names: list[str]) -> None:
    known = world.known(
        **UBUNTU, nvidia_driver_source=source, __farm_bundle_gpu=True, gpu_node_cuda=cuda,
        __container_toolkit_repository={"name": "toolkit"}, __nvidia_repository_cuda={"name": "nvidia-cuda"},
        _common_host=role_helper.host(packages=("installed linux-image-generic=1",)),
    )  # fmt: skip
    known = {**role_helper.variables("farm"), **known}
    repositories = role_helper.value("__farm_bundle_repositories", known)
    assert [each["name"] for each in repositories] == ["toolkit", *names]
    packages = [name for each in role_helper.value("__farm_bundle_of_hardware", known) for name in each["packages"]]
    own = source == "distribution"
    assert ("linux-modules-nvidia-580-server-generic" in packages) is own
    # Not of the collecting host's own version.
    world.have(*server("580", "580.95.05"))
    known |= {"_common_host": world.known()["_common_host"], "common_scope": "bundle"}
    text = role_helper.value("__farm_bundle_preferences", known)
    assert ("Pin: version 580.*\n" in text and "l=NVIDIA CUDA" in text) is own and bool(text) is own
    assert (f"linux-headers-{RUNNING}-generic" in packages) is not own
    assert ("nvidia-fabricmanager-580=580.*" in packages) is own
    assert ("cuda-drivers=580.*" in packages) is not own
