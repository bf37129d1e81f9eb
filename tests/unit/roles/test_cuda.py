"""Which versions of CUDA a repository has, as the package managers list its packages, and what the role refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.template import Templar, trust_as_template
from ansible_collections.gpufarm.core.tests.unit.playbooks import playbook_helper
from ansible_collections.gpufarm.core.tests.unit.roles import role_helper

ROOT = Path(__file__).resolve().parents[3]
APT = """\
cuda-toolkit-13-0
cuda-toolkit-12-8-config-common
cuda-toolkit-config-common
cuda-toolkit-12-8
cuda-toolkit-13
"""
OLD = {"nvidia_driver_branch": "570"}
DNF = """\
Available Packages
cuda-toolkit-12-8.x86_64                  12.8.1-1      nvidia-cuda
cuda-toolkit-12-8-config-common.noarch    12.8.90-1     nvidia-cuda
cuda-toolkit-13-0.x86_64                  13.0.2-1      nvidia-cuda
"""


@pytest.mark.parametrize(("said", "found"), [(APT, ["12.8", "13.0"]), (DNF, ["12.8", "13.0"]), ("", []), (None, [])])
def test_versions_of_the_repository(said: str | None, found: list[str]) -> None:
    known = {**role_helper.variables("cuda"), "__cuda_packages": {"stdout": said}}
    assert role_helper.value("__cuda_versions", known) == found


@pytest.mark.parametrize(
    ("version", "refusal", "more", "told"),
    [
        ("13.0", "", {}, ""),
        ("13", "", {}, 'cuda_version is "13". Expected: major and minor version'),
        (13.0, "", {}, "cuda_version is the number 13.0, and YAML takes 12.10 for 12.1. Expected: major and minor "
         'version such as "13.0", in quotes. Next step: correct cuda_version.'),
        ("13.0\n", "", {}, 'cuda_version is "13.0\n"'),
        ("13.0.1", "", {}, 'cuda_version is "13.0.1". Expected: major and minor version'),
        ("13.0", "it is Mint. Next step:", {}, "it is Mint. Next step: install CUDA yourself"),
        # What the role would refuse only when the driver has been exchanged.
        (
            "13.0", "", OLD,
            "nvidia_driver_branch is 570, and cuda_version 13.0. Expected: branch 580 or newer, which CUDA 13.0 needs. "
            "Next step: set nvidia_driver_branch so, or cuda_version to one of an older major version.",
        ),
        ("12.8", "", OLD, ""),
        ("13.0", "", {"nvidia_driver_branch": 580}, ""),
        ("13.0", "", {**OLD, "nvidia_driver_managed": False}, ""),
        ("13.0", "", {**OLD, "_common_is_wsl": True}, ""),
        ("13.0", "", {**OLD, "common_scope": "remove"}, ""),
    ],
)  # fmt: skip
def test_what_is_refused(version: object, refusal: str, more: dict[str, object], told: str) -> None:
    given = {"cuda_version": version, "__nvidia_repository_refusal": refusal, "_common_is_wsl": False, **more}
    found = role_helper.value("__cuda_refusal", {**role_helper.variables("cuda"), **given})
    assert found.startswith(told) and bool(found) is bool(told)


@pytest.mark.parametrize(
    ("version", "packages", "wanted"),
    [
        ("13.0", [], ["cuda-toolkit-13-0"]),
        ("12.8", ["cuda-nvcc", "libcublas-dev"], ["cuda-nvcc-12-8", "libcublas-dev-12-8"]),
        ("12.8", ["cuda-nvcc-12-8", "cuda-nvcc"], ["cuda-nvcc-12-8"]),
        # A name may end in a number of its own.
        ("3.0", ["libcufile-1"], ["libcufile-1-3-0"]),
    ],
)
def test_parts_are_of_the_version(version: str, packages: list[str], wanted: list[str]) -> None:
    known = {**role_helper.variables("cuda"), "cuda_version": version, "cuda_packages": packages}
    assert role_helper.value("__cuda_wanted", known) == wanted
    assert role_helper.value("__cuda_packages_wrong", known) == []
    # A host is asked for them before anything else.
    assert role_helper.value("__cuda_looks_at", known)["packages"] == wanted


@pytest.mark.parametrize("packages", [[], ["cuda-nvcc", "libcublas-dev"]])
def test_a_bundle_has_what_is_wanted(packages: list[str]) -> None:
    others = ("_common", "nvidia_repository", "nvidia_driver", "docker", "container_toolkit", "nomad", "nomad_client")
    known = role_helper.variables(*others, "shared_data", "farm", "cuda")
    known |= {"ansible_facts": role_helper.facts("Debian: Debian 13"), "_common_host": role_helper.host()}
    known |= {"inventory_hostname": "gpu1", "groups": {"gpu_nodes": ["gpu1"]}, "gpu_node_cuda": True}
    *_others, cuda = role_helper.value("__farm_bundle_wanted", {**known, "cuda_packages": packages})
    wanted = [f"{name}-13-0" for name in packages] or ["cuda-toolkit-13-0"]
    assert cuda == {"packages": wanted, "first": []}


@pytest.mark.parametrize(
    ("packages", "wrong"),
    [
        (["cuda-nvcc", "cuda-nvcc-13-0", "libcublas-dev-12-8"], "libcublas-dev-12-8"),
        (["cuda-nvcc-113-0"], "cuda-nvcc-113-0"),
        (["cuda-*", "cuda-nvcc=13.0.88-1", "--allow-downgrades"], "cuda-*, cuda-nvcc=13.0.88-1, --allow-downgrades"),
        # A name that is no list is one of letters.
        ("cuda-nvcc", "-"),
    ],
)
def test_packages_that_are_none_of_the_version_are_refused(packages: list[str] | str, wrong: str) -> None:
    known = {**role_helper.variables("cuda"), "cuda_packages": packages, "__nvidia_repository_refusal": ""}
    assert role_helper.value("__cuda_refusal", known) == (
        f"cuda_packages has {wrong}. Expected: names of packages, without a version or with that of cuda_version, as "
        "cuda-nvcc or cuda-nvcc-13-0. Next step: correct cuda_packages."
    )


def test_all_that_came_from_here_goes() -> None:
    """A later run knows one cuda_version; what somebody has installed himself is not noted, and stays."""
    names = ("12.8", "11.8", "notes.txt", "13.0-untried", "libcublas-dev-12-8", "cuda-nvcc-13-0")
    notes = [{"path": f"/var/lib/gpufarm/cuda/{name}"} for name in names]
    known = {**role_helper.variables("cuda"), "cuda_version": "13.0"}
    found = role_helper.value("__cuda_gone", {**known, "__cuda_ours": {"files": notes}})
    toolkits = ["cuda-toolkit-11-8", "cuda-toolkit-12-8", "cuda-toolkit-13-0"]
    assert found == ["cuda-nvcc-13-0", *toolkits, "libcublas-dev-12-8"]
    assert role_helper.value("__cuda_gone", known) == ["cuda-toolkit-13-0"]
    parts = {**known, "cuda_packages": ["cuda-nvcc", "cuda-cudart"]}
    assert role_helper.value("__cuda_gone", parts) == ["cuda-cudart-13-0", "cuda-nvcc-13-0"]


def test_what_is_noted_before_the_toolkit_is_installed_is_what_the_removal_reads() -> None:
    install, absent, check = (
        yaml.safe_load((ROOT / f"roles/cuda/tasks/{name}.yml").read_text())
        for name in ("install", "absent", "absent_check")
    )
    (steps,) = (step["block"] for step in install[0]["block"] if "block" in step)
    note, toolkit = ([step["name"] for step in steps].index(name) for name in (
        "Note what is from here, and that nobody has seen it work", "Have the CUDA toolkit",
    ))  # fmt: skip
    assert note < toolkit
    assert steps[note]["ansible.builtin.copy"]["dest"] == "{{ item }}"
    parts = ["cuda-nvcc", "libcublas-dev"]
    for packages, there, ours in (
        ([], (), ["cuda-toolkit-13-0"]),
        ([], ("installed cuda-toolkit-13-0=13.0.2-1",), []),
        ([], ("installed cuda-toolkit-13=1", "config-files cuda-toolkit-13-0=13.0.2-1"), ["cuda-toolkit-13-0"]),
        (parts, ("installed cuda-nvcc-13-0=13.0.88-1", "installed libcublas-dev-12-8=1"), ["libcublas-dev-13-0"]),
    ):
        known = {**role_helper.variables("cuda"), "cuda_packages": packages}
        known["_common_host"] = role_helper.host(packages=there)
        known["here"] = trust_as_template(f"{{{{ {steps[note]['when']} }}}}")
        known["noted"] = trust_as_template(steps[note]["loop"])
        assert role_helper.value("here", known) is bool(ours)
        if ours:
            noted = [f"/var/lib/gpufarm/cuda/{name}" for name in (*ours, "13.0-untried")]
            assert role_helper.value("noted", known) == noted
            files = {"files": [{"path": path} for path in noted]}
            assert set(ours) <= set(role_helper.value("__cuda_gone", {**known, "__cuda_ours": files}))
    (look,) = (step for step in check if "ansible.builtin.find" in step)
    assert (look["ansible.builtin.find"]["paths"], look["register"]) == ("{{ __cuda_ours_dir }}", "__cuda_ours")
    (gone,) = (step["vars"]["common_packages"] for step in absent if "vars" in step)
    assert gone == "{{ __cuda_gone }}" and "{{ __cuda_ours_dir }}" in absent[-1]["loop"]


NAMED = """\
cuda-nvcc-13-0
cuda-toolkit-13-0-config-common
cuda-cudart-dev-13-0.x86_64               13.0.96-1     nvidia-cuda
cuda-nvcc-12-8
"""


@pytest.mark.parametrize(
    ("packages", "version", "named", "has"),
    [
        (["cuda-nvcc", "no"], "13.0", APT + NAMED, "12.8, 13.0, and of 13.0 cuda-cudart-dev, cuda-nvcc, cuda-toolkit"),
        (["cuda-nvcc"], "99.9", DNF, "12.8, 13.0"),
        ([], "99.9", "", "no version"),
    ],
)
def test_what_the_repository_has_instead_is_told(packages: list[str], version: str, named: str, has: str) -> None:
    asks, refuses = role_helper.tasks_of("cuda/tasks/install.yml")[-3:-1]
    known = {**role_helper.variables("_common", "cuda"), "cuda_version": version, "cuda_packages": packages}
    known |= {"inventory_hostname": "gpu1", "_common_bundle": ""}
    known |= {"ansible_failed_result": {"msg": "Some failed", "failures": ["No package cuda-x available."]}}
    known |= {"__cuda_packages": {"stdout": named}}
    known |= {"refusal": trust_as_template(refuses["ansible.builtin.fail"]["msg"])}
    known |= {"_common_family": role_helper.variables("_common")["_common_families"]["Debian"]}
    known |= {"asked": trust_as_template(asks["ansible.builtin.command"])}
    assert role_helper.value("asked", known).split() == ["apt-cache", "pkgnames", *["cuda-toolkit-"] * (not packages)]
    told = role_helper.value("refusal", known)
    wanted = ", ".join(role_helper.value("__cuda_wanted", known))
    assert told.startswith(f"gpu1: {wanted} could not be installed (Some failed: No package cuda-x available). ")
    parts = ", and all of cuda_packages" * bool(packages)
    assert f"Found in its repository for this distribution: {has}. Expected: {version} among them{parts}. " in told
    step = "and cuda_packages to what it has" if packages else "to a version that it has"
    assert told.endswith(f"bring that repository up to date, or set cuda_version {step}.")


@pytest.mark.parametrize(
    ("also", "driver", "parts"),
    [
        (["cuda"], True, ["cuda"]),
        (["cuda", "driver"], True, ["cuda", "nvidia_driver", "nvidia_repository"]),
        # Nobody else takes anything from the repository.
        (["cuda"], False, ["cuda", "nvidia_repository"]),
        ([], True, []),
    ],
)
def test_remove_also_cuda(also: list[str], driver: bool, parts: list[str]) -> None:
    plays = yaml.safe_load((ROOT / "playbooks/remove.yml").read_text(encoding="utf-8"))
    tasks = [
        task for play in plays for task in play.get("tasks", []) if "nvidia_repository_unused" in task.get("vars", {})
    ]
    known = {**role_helper.variables("_common"), "remove_also": also, "_common_is_wsl": False,
             "nvidia_driver_managed": driver, "gpu_node_cuda": True}  # fmt: skip
    known["nvidia_repository_unused"] = trust_as_template(tasks[0]["vars"]["nvidia_repository_unused"])
    assert Templar(None, variables=known).template(trust_as_template(tasks[0]["loop"])) == parts
    assert tasks[0]["ansible.builtin.include_role"] == {"name": "gpufarm.core.{{ part }}", "tasks_from": "absent.yml"}


SIMULATED = """\
NOTE: This is only a simulation!
Inst cuda-toolkit-13-0-config-common (13.0.96-1 NVIDIA:13.0 [all])
Inst cuda-driver-dev-13-0 (13.0.96-1 NVIDIA:13.0 [amd64])
Inst libnvidia-container1 [1.19.0-1] (1.20.1-1 NVIDIA:13.0 [amd64])
Inst libnvjitlink-13-0 (13.0.88-1 NVIDIA:13.0 [amd64])
Conf cuda-drivers (580.95.05-1 NVIDIA:13.0 [amd64])
"""
ASKED = """\
Dependencies resolved.
================================================================
 Package                    Arch    Version         Repository   Size
================================================================
Installing:
 cuda-toolkit-13-0          x86_64  13.0.2-1        nvidia-cuda  8.9 k
Installing dependencies:
 cuda-toolkit-13-0-config-common-with-a-long-name
                            noarch  13.0.96-1       nvidia-cuda  7.9 k
 kmod-nvidia-open-dkms      noarch  3:580.95.05-1   nvidia-cuda  12 M

Transaction Summary
Operation aborted.
"""


@pytest.mark.parametrize(
    ("said", "count", "drivers"),
    [
        (SIMULATED, 4, []),
        (SIMULATED + "Inst cuda-drivers (580-1 x)\nInst libcuda1 [570-1] (580-1 x)\n", 6, ["cuda-drivers", "libcuda1"]),
        (SIMULATED + "Inst nvidia-kernel-open-dkms (580-1 x)\n", 5, ["nvidia-kernel-open-dkms"]),
        (ASKED, 3, ["kmod-nvidia-open-dkms"]),
        ("", 0, []),
    ],
)
def test_a_driver_that_would_come_with_the_toolkit_is_seen(said: str, count: int, drivers: list[str]) -> None:
    known = {**role_helper.variables("cuda"), "__cuda_would_come": {"stdout": said}}
    assert len(role_helper.value("__cuda_would_install", known)) == count
    assert role_helper.value("__cuda_would_install_drivers", known) == drivers


def test_it_is_asked_before_anything_is_installed() -> None:
    install = yaml.safe_load((ROOT / "roles/cuda/tasks/install.yml").read_text(encoding="utf-8"))
    names = [step["name"] for step in install[0]["block"]]
    asked = ["Ask the package manager what would be installed", "Require that no driver comes with it"]
    assert names[1:] == [*asked, "Install the toolkit alone"]
    main = yaml.safe_load((ROOT / "roles/cuda/tasks/main.yml").read_text(encoding="utf-8"))
    assert [step["name"] for step in main].index("Require a driver that the toolkit works with, or none") == 3
    # A cache of facts may have that of another day.
    assert main[2]["when"] == "(__nvidia_driver_checked | default({})).msg | default('') != ansible_play_name"


@pytest.mark.parametrize(
    ("facts", "asks"),
    [
        ({}, True),
        ({"nvidia_smi": {"gpus": []}}, False),
        ({"nvidia_smi": {"gpus": [{"mig_mode": None, "mig_devices": None}]}}, False),
        # Of its own the role has asked for the driver alone.
        ({"nvidia_smi": {"gpus": [{"mig_mode": "Enabled", "mig_devices": None}]}}, True),
        ({"nvidia_smi": {"gpus": [{"mig_mode": "Enabled", "mig_devices": []}]}}, False),
    ],
)
def test_a_program_is_tried_on_what_a_gpu_is_divided_into(facts: dict[str, object], asks: bool) -> None:
    look = yaml.safe_load((ROOT / "roles/cuda/tasks/try.yml").read_text(encoding="utf-8"))[0]
    assert "mig" in look["gpufarm.core.nvidia_smi_facts"]["gather_subset"]
    known = {"ansible_facts": facts, "here": trust_as_template(f"{{{{ {look['when']} }}}}")}
    assert role_helper.value("here", known) is asks


@pytest.mark.parametrize(
    ("version", "driver", "wsl", "told"),
    [
        ("13.0", "570.195.03", False, "driver 570.195.03 runs. Expected: branch 580 or newer, which CUDA 13.0 needs. "),
        ("13.0", "570.195.03", True, "driver 570.195.03 runs. Expected: branch 580 or newer, which CUDA 13.0 needs. "),
        ("13.0", "580.95.05", False, ""),
        ("12.8", "570.195.03", False, ""),
        ("12.8", "470.256.02", False, "driver 470.256.02 runs. Expected: branch 525 or newer"),
        ("14.1", "580.95.05", False, ""),
        ("13.0", None, False, ""),
    ],
)
def test_a_driver_that_is_too_old_for_the_release(version: str, driver: str | None, wsl: bool, told: str) -> None:
    smi = {"available": driver is not None, "driver_version": driver}
    known = {**role_helper.variables("cuda"), "cuda_version": version, "_common_is_wsl": wsl}
    known |= {"ansible_facts": {"nvidia_smi": smi}, "_common_host": role_helper.host()}
    found = role_helper.value("__cuda_driver_refusal", known)
    assert found.startswith(told) and bool(found) is bool(told)
    assert not told or ("install a newer driver in Windows" if wsl else "set nvidia_driver_branch to one") in found
    assert role_helper.value("__cuda_driver_refusal", {**known, "__nvidia_driver_to_come": True}) == ""
    assert role_helper.value("__cuda_driver_refusal", {**known, "cuda_packages": ["cuda-compat"]}) == ""
    compat = (f"installed cuda-compat-{version.replace('.', '-')}=580.95.05-1",)
    assert (
        role_helper.value("__cuda_driver_refusal", {**known, "_common_host": role_helper.host(packages=compat)}) == ""
    )


def test_where_nothing_was_tried_nothing_is_wrong() -> None:
    """Ansible makes the text of an assertion that holds, too."""
    tries = yaml.safe_load((ROOT / "roles/cuda/tasks/try.yml").read_text(encoding="utf-8"))
    (wanted,) = (step["ansible.builtin.assert"] for step in tries if "ansible.builtin.assert" in step)
    known = {**role_helper.variables("cuda"), "__cuda_tried": {"skipped": True}, "inventory_hostname": "bare"}
    known |= {"that": trust_as_template(f"{{{{ {wanted['that']} }}}}"), "text": trust_as_template(wanted["fail_msg"])}
    assert role_helper.value("that", known) is True
    assert "exit code none" in role_helper.value("text", known)


NVCC = """#!/bin/sh
echo "Cuda compilation tools, release {}, V{}.88"
"""
INSTALLED = "Package: {}-13-0\nStatus: install ok installed\nArchitecture: amd64\nVersion: 13.0.88-1\nDescription: x\n"
# What is installed, what is asked for, what version.json and nvcc say, and what is told.
VERIFIED = {
    "whole": (["cuda-toolkit"], [], "13.0.2", "13.0", ""),
    "cut": (["cuda-toolkit"], [], "", "13.0", '/cuda/version.json says "nothing". Expected: CUDA 13.0. Next step: '),
    "part": (["cuda-nvcc"], ["cuda-nvcc"], "", "13.0", ""),
    # Whose compiler is nobody's package.
    "library": (["libcublas"], ["libcublas"], "", "12.8", ""),
    "other": (["cuda-nvcc"], ["cuda-nvcc"], "", "12.8", '/cuda/bin/nvcc says "Cuda compilation tools, release 12.8, '),
    "lost": (["cuda-compiler", "cuda-nvcc"], ["cuda-compiler"], "", "", '/cuda/bin/nvcc says "nothing, or is not the'),
    "missing": (
        ["cuda-nvcc"], ["cuda-nvcc", "cuda-cudart-dev"], "", "13.0",
        "not installed: cuda-cudart-dev-13-0. Expected: all of cuda_packages. Next step: run gpufarm.core.cuda on this",
    ),
}  # fmt: skip


def test_what_is_there_of_what_was_asked_for_is_verified(tmp_path: Path) -> None:
    hosts: dict[str, dict[str, Any]] = {}
    for name, (there, packages, version, release, _told) in VERIFIED.items():
        place = tmp_path / name
        (place / "bin").mkdir(parents=True)
        (place / "version.json").write_text(f'{{"cuda": {{"version": "{version}"}}}}' if version else "", "utf-8")
        if release:
            (place / "bin/nvcc").write_text(NVCC.format(release, release), encoding="utf-8")
            (place / "bin/nvcc").chmod(0o755)
        (place / "status").write_text("\n".join(INSTALLED.format(package) for package in there), encoding="utf-8")
        hosts[name] = {**playbook_helper.LOCAL, "cuda_packages": packages}
    folder = f"{tmp_path}/{{{{ inventory_hostname }}}}"
    play = {"hosts": "all", "gather_facts": False, "environment": {"DPKG_ADMINDIR": folder}, "tasks": [
        {"ansible.builtin.import_role": {"name": "gpufarm.core.cuda", "tasks_from": "verify.yml"}},
    ]}  # fmt: skip
    (tmp_path / "play.yml").write_text(json.dumps([play]), encoding="utf-8")
    given = {"__cuda_dir": folder, "cuda_verify_program": False}
    ran = playbook_helper.run_playbook(
        tmp_path, {"all": {"hosts": hosts}}, str(tmp_path / "play.yml"), "--extra-vars", json.dumps(given)
    )
    said = " ".join(ran.stdout.split())
    for name, (_there, _packages, _version, _release, told) in VERIFIED.items():
        failed = re.search(rf"{name} : ok=\d+ changed=0 unreachable=0 failed=([01])", said)
        assert failed and failed[1] == ("1" if told else "0"), name + ran.stdout
        assert not told or f"{name}: {told}" in said.replace(f"{tmp_path}/{name}", "/cuda"), name + ran.stdout


@pytest.mark.parametrize(
    ("asked", "there", "nvcc", "compiles"),
    [
        ([], [], True, True),
        (["cuda-nvcc", "cuda-cudart-dev"], ["cuda-nvcc-13-0", "cuda-cudart-dev-13-0"], True, True),
        (["cuda-compiler"], ["cuda-compiler-13-0", "cuda-nvcc-13-0", "cuda-cudart-devel-13-0"], True, True),
        (["cuda-nvcc"], ["cuda-nvcc-13-0", "cuda-cudart-dev-12-8"], True, False),
        (["cuda-cudart-dev"], ["cuda-nvcc-12-8", "cuda-cudart-dev-13-0"], False, False),
    ],
)
def test_a_program_is_compiled_where_all_that_it_needs_is_there(
    asked: list[str], there: list[str], nvcc: bool, compiles: bool
) -> None:
    looked = {"packages": [*(f"installed {name}=13.0.88-1" for name in there), "config-files cuda-nvcc-13-0=13.0.88-1"]}
    known = {**role_helper.variables("cuda"), "cuda_packages": asked, "__cuda_looked": looked}
    assert role_helper.value("__cuda_has_nvcc", known) is nvcc
    *_others, tries = role_helper.tasks_of("cuda/tasks/verify.yml")
    assert role_helper.value("tries", {**known, "tries": trust_as_template(f"{{{{ {tries['when']} }}}}")}) is compiles
