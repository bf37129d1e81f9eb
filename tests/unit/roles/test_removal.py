# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Roles that go ask whether their packages may before they change anything; the programs are doubles with notes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ansible_collections.gpufarm.core.tests.unit.patience import PATIENCE_S
from ansible_collections.gpufarm.core.tests.unit.roles import role_helper

ROOT = role_helper.ROLES.parent
NVSWITCH = {"address": "0000:05:00.0", "vendor": "10de", "device": "22a3", "class": "068000", "nvswitch_bridge": False}
NOTES = '#!/bin/sh\necho "${0##*/} $*" >>"${0%/*}/asked"\n'
PROGRAMS = {
    "systemctl": """case "$1" in
        show) printf 'LoadState=loaded\\nActiveState=active\\nUnitFileState=enabled\\n' ;;
        is-enabled) echo enabled ;;
    esac
    """,
    "dpkg-query": "echo installed nvidia-open",
    "apt-get": """case "$*" in
        *autoremove) ;;
        *) printf 'Purg nvidia-open [580]\\nPurg mine [1]\\n' ;;
    esac
    """,
    "apt-mark": """case "$1" in showmanual) echo nvidia-open ;; esac""",
    "dnf": """case "$*" in
        *repoquery*) echo mine ;;
        *--assumeno*) printf 'Removing:\\n nvidia-open  noarch  3:580\\n'; exit 1 ;;
    esac
    """,
}
HELD = 'echo "$1" | sed -n "s/showhold/nvidia-open/p; s/showmanual/nvidia-open/p"'
NEEDED = PROGRAMS["dnf"].replace("exit 1", "printf 'Removing dependent packages:\\n mine  noarch  1.0\\n'; exit 1")


def remove(folder: Path, packages: str, programs: dict[str, str]) -> tuple[int, str, list[str]]:
    """Remove the driver of a node with NVSwitches; the end, what was told, and what the programs were asked."""
    (folder / "bin").mkdir()
    for name, text in {**PROGRAMS, **programs}.items():
        (folder / "bin" / name).write_text(NOTES + text, encoding="ascii")
        (folder / "bin" / name).chmod(0o755)
    (folder / "modules.conf").touch()
    there = {"enabled": "enabled", "active": "active"}
    unit = {"nvidia-fabricmanager.service": there, "nvidia-persistenced.service": there}
    given = {
        # A removal's preflight has looked at the host, which Nomad has left.
        "common_scope": "remove",
        "_common_checked": "remove",
        "_common_host": role_helper.host(pci_devices=[NVSWITCH], units=unit),
        "_common_family": {"packages": packages},
        "_common_platform": {"driver": {"branch_by": "stream"}},
        "_common_is_wsl": False,
        "__nomad_left": True,
        "__nvidia_driver_modules_path": str(folder / "modules.conf"),
        "nvidia_driver_packages": ["nvidia-open"],
        "nvidia_driver_fabric_manager_package": "nvidia-fabricmanager",
    }
    role = {"name": "gpufarm.core.nvidia_driver", "tasks_from": "absent.yml", "rolespec_validate": False}
    play = {
        "hosts": "localhost", "connection": "local", "gather_facts": False,
        "tasks": [{"ansible.builtin.include_role": role}],
        "environment": {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"},
    }  # fmt: skip
    (folder / "play.yml").write_text(json.dumps([play]), encoding="utf-8")
    ran = subprocess.run(
        [str(Path(sys.executable).with_name("ansible-playbook")), "--extra-vars", json.dumps(given),
         str(folder / "play.yml")],
        cwd=ROOT, env={**os.environ, "COLUMNS": "1000"}, capture_output=True, text=True, check=False,
        timeout=PATIENCE_S,
    )  # fmt: skip
    asked = (folder / "bin/asked").read_text(encoding="utf-8").splitlines()
    return ran.returncode, " ".join((ran.stdout + ran.stderr).split()), asked


@pytest.mark.parametrize(
    ("packages", "programs", "told"),
    [
        ("apt", {"apt-mark": 'echo "$1" | sed -n "s/showmanual/mine/p"'},
         "localhost: with nvidia-open, nvidia-driver-pinning-*, nvidia-fabricmanager would go what somebody has "
         "installed by name: mine. Expected: packages that may go, without others. Next step: remove those first"),
        ("apt", {"apt-mark": HELD},
         "localhost: somebody has told apt to hold nvidia-open, which would go. Expected: packages that may go, "
         "without others. Next step: run `apt-mark unhold` for them if they may go."),
        ("apt", {"apt-get": "echo 'E: Unmet dependencies.' >&2; exit 100"},
         "localhost: apt-get cannot work out what goes with nvidia-open, nvidia-driver-pinning-*, nvidia-fabricmanager "
         "(E: Unmet dependencies.). Expected: "),
        ("dnf", {"dnf": NEEDED},
         "localhost: with nvidia-open, nvidia-fabricmanager would go what somebody has installed by name: mine."),
    ],
)  # fmt: skip
def test_a_driver_that_may_not_go_leaves_fabric_manager_running(
    tmp_path: Path, packages: str, programs: dict[str, str], told: str
) -> None:
    code, said, asked = remove(tmp_path, packages, programs)
    assert code == 2 and told in said, said
    assert "changed=0" in said and (tmp_path / "modules.conf").exists()
    assert [line for line in asked if line.startswith("systemctl")] == []


def test_daemons_stop_before_their_packages_go(tmp_path: Path) -> None:
    code, said, asked = remove(tmp_path, "dnf", {})
    assert code == 0, said
    steps = [line for line in asked if line.startswith(("systemctl stop", "dnf --assume"))]
    question, answer = (
        f"dnf --assume{word} --setopt=clean_requirements_on_remove=True remove nvidia-open nvidia-fabricmanager"
        for word in ("no", "yes")
    )
    stops = [f"systemctl stop nvidia-{name}.service" for name in ("fabricmanager", "persistenced")]
    assert steps == [question, *stops, question, answer]
    assert not (tmp_path / "modules.conf").exists()


@pytest.mark.parametrize("role", ["container_toolkit", "cuda", "docker", "nvidia_driver"])
def test_a_role_asks_first_whether_its_packages_may_go(role: str) -> None:
    told = yaml.safe_load((role_helper.ROLES / role / "tasks/absent.yml").read_text(encoding="utf-8"))
    asks = told[1].get("ansible.builtin.include_tasks") or told[1].get("ansible.builtin.import_tasks")
    assert (told[0]["ansible.builtin.import_role"]["tasks_from"], asks) == ("preflight.yml", "absent_check.yml")
    *_others, last = yaml.safe_load((role_helper.ROLES / role / "tasks/absent_check.yml").read_text(encoding="utf-8"))
    (goes,) = (task for task in told if "packages_absent.yml" in str(task))
    assert last["ansible.builtin.include_role"]["tasks_from"] == "packages_absent_check.yml"
    assert last["vars"]["common_packages"] == goes["vars"]["common_packages"]
