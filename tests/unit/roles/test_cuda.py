"""Which versions of CUDA a repository has, as the package managers list its packages, and what the role refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from ansible.template import Templar, trust_as_template
from ansible_collections.gpufarm.core.tests.unit.roles import role_helper

ROOT = Path(__file__).resolve().parents[3]
APT = """\
cuda-toolkit-13-0
cuda-toolkit-12-8-config-common
cuda-toolkit-config-common
cuda-toolkit-12-8
cuda-toolkit-13
"""
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
    ("version", "refusal", "told"),
    [
        ("13.0", "", ""),
        ("13", "", 'cuda_version is "13". Expected: major and minor version'),
        ("13.0.1", "", 'cuda_version is "13.0.1". Expected: major and minor version'),
        ("13.0", "the distribution is Linux Mint.", "the distribution is Linux Mint. Next step: install CUDA yourself"),
    ],
)
def test_what_is_refused(version: str, refusal: str, told: str) -> None:
    given = {"cuda_version": version, "__nvidia_repository_refusal": refusal}
    found = role_helper.value("__cuda_refusal", {**role_helper.variables("cuda"), **given})
    assert found.startswith(told) and bool(found) is bool(told)


def test_every_version_that_came_from_here_goes() -> None:
    """A later run knows one cuda_version; what somebody has installed himself is not noted, and stays."""
    notes = [{"path": f"/var/lib/gpufarm/cuda/{name}"} for name in ("12.8", "11.8", "notes.txt")]
    known = {**role_helper.variables("cuda"), "cuda_version": "13.0"}
    found = role_helper.value("__cuda_gone", {**known, "__cuda_ours": {"files": notes}})
    assert found == ["cuda-toolkit-11-8", "cuda-toolkit-12-8", "cuda-toolkit-13-0"]
    assert role_helper.value("__cuda_gone", known) == ["cuda-toolkit-13-0"]


def test_what_is_noted_before_the_toolkit_is_installed_is_what_the_removal_reads() -> None:
    install, absent = (
        yaml.safe_load((ROOT / f"roles/cuda/tasks/{name}.yml").read_text()) for name in ("install", "absent")
    )
    (steps,) = (step["block"] for step in install[0]["block"] if "block" in step)
    note, toolkit = ([step["name"] for step in steps].index(name) for name in (
        "Note that this toolkit is from here", "Have the CUDA toolkit",
    ))  # fmt: skip
    assert note < toolkit
    assert steps[note]["ansible.builtin.copy"]["dest"] == "{{ __cuda_ours_dir }}/{{ cuda_version }}"
    (look,) = (step for step in absent if "ansible.builtin.find" in step)
    assert (look["ansible.builtin.find"]["paths"], look["register"]) == ("{{ __cuda_ours_dir }}", "__cuda_ours")
    (gone,) = (step["vars"]["common_packages"] for step in absent if "vars" in step)
    assert gone == "{{ __cuda_gone }}" and "{{ __cuda_ours_dir }}" in absent[-1]["loop"]


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
    tasks = [task for play in plays for task in play.get("tasks", []) if "that were asked for" in task["name"]]
    known = {"remove_also": also, "_common_is_wsl": False, "nvidia_driver_managed": driver, "gpu_node_cuda": True}
    known["nvidia_repository_unused"] = trust_as_template(tasks[0]["vars"]["nvidia_repository_unused"])
    assert Templar(None, variables=known).template(trust_as_template(tasks[0]["loop"])) == parts
    assert tasks[0]["ansible.builtin.include_role"] == {"name": "gpufarm.core.{{ part }}", "tasks_from": "absent.yml"}
