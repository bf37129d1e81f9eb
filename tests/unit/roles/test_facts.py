"""Roles run with facts cleared: what they read of Ansible's own facts, the first task of each gathers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from ansible.template import trust_as_template
from ansible_collections.gpufarm.core.tests.unit.playbooks import playbook_helper
from ansible_collections.gpufarm.core.tests.unit.roles import role_helper

ROLES = Path(__file__).resolve().parents[3] / "roles"
# Gathered by the collection's own modules.
OWN = {"nvidia_smi"}


def test_every_fact_that_roles_read_is_gathered() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in ROLES.rglob("*") if path.suffix in (".yml", ".j2"))
    read = set(re.findall(r"ansible_facts\[?\.?['\"]?([a-z_]+)", text)) - OWN
    tasks = yaml.safe_load((ROLES / "_common/tasks/requirements.yml").read_text(encoding="utf-8"))
    (gather,) = [task for task in tasks if "ansible.builtin.setup" in task]
    gathered = set(re.findall(r"'([a-z_]+)'", str(gather["when"])))
    assert "os_family" in read
    assert read - {"keys"} <= gathered


def test_every_public_role_enters_preflight() -> None:
    entered = {
        path.relative_to(ROLES).parts[0]
        for path in ROLES.rglob("tasks/*.yml")
        if re.search(r"tasks_from: preflight\.yml|name: gpufarm\.core\.nomad$", path.read_text("utf-8"), re.MULTILINE)
    }
    public = {path.name for path in ROLES.iterdir() if path.is_dir() and not path.name.startswith("_")}
    assert entered == public


def test_what_kind_of_host_it_is_comes_after_the_refusal_and_is_known_anew_after_a_reboot() -> None:
    """A refused host may be of an architecture for which nothing can be worked out."""
    tasks = role_helper.tasks_of("_common/tasks/requirements.yml")
    facts = tasks[-1]["ansible.builtin.set_fact"]
    assert "ansible.builtin.fail" in tasks[-2]
    # From a cache, as it was before the last boot.
    stale = role_helper.facts("Debian: Debian 12.13", kernel="6.1.0-48-amd64")
    known = {**role_helper.variables("_common"), "ansible_facts": stale}
    for kernel in ("6.1.0-49-amd64", "6.1.0-50-amd64"):
        known["_common_host"] = role_helper.host(kernel=kernel)
        found = {
            name: role_helper.value("asked", {**known, "asked": trust_as_template(text)})
            for name, text in facts.items()
        }
        assert f"linux-headers-{kernel}" in found["_common_family"]["headers"]
        assert found["_common_is_wsl"] is False and found["_common_platform"]["cuda"]["name"] == "debian12"
        # As a later play has them.
        known |= found


@pytest.mark.parametrize("role", ["node_tuning", "nvidia_driver"])
def test_the_kernel_is_known_anew_after_a_reboot_of_the_run_s_own(role: str) -> None:
    tasks = role_helper.tasks_of(f"{role}/tasks/reboot.yml")
    (reboot,) = (number for number, task in enumerate(tasks) if "ansible.builtin.reboot" in task)
    assert "gpufarm.core._common', 'tasks_from': 'kernel.yml'" in role_helper.included(tasks[reboot + 1])
    look, know = role_helper.tasks_of("_common/tasks/kernel.yml")
    known = {
        **role_helper.variables("_common"), "ansible_facts": role_helper.facts("RedHat: Rocky 10.0", kernel="6.12.0-1"),
        "_common_host": role_helper.host(kernel="6.12.0-1"), "_common_family": {}, "_common_platform": {},
    }  # fmt: skip
    known[look["register"]] = {"kernel": "6.12.0-124.8.1.el10_1.x86_64"}
    known |= {name: trust_as_template(text) for name, text in know["vars"].items()}
    found = {
        name: role_helper.value("asked", {**known, "asked": trust_as_template(text)})
        for name, text in know["ansible.builtin.set_fact"].items()
    }
    assert found["_common_family"]["headers"][0] == "kernel-devel-6.12.0-124.8.1.el10_1.x86_64"
    assert found["_common_platform"]["docker"] == ["kernel-modules-extra-6.12.0-124.8.1.el10_1.x86_64"]


def test_a_look_at_a_host_asks_nothing_of_what_is_known_of_another(tmp_path: Path) -> None:
    """Ansible sets what one host finds for all of its play where a role is entered with run_once."""
    other = {"_common_is_wsl": True, "_common_family": {}, "_common_platform": {}}
    enter = {"name": "gpufarm.core._common", "tasks_from": "preflight.yml"}
    play = {
        "hosts": "all", "gather_facts": False,
        "tasks": [{"ansible.builtin.set_fact": other}, {"ansible.builtin.include_role": enter}],
    }  # fmt: skip
    (tmp_path / "play.json").write_text(json.dumps([play]), encoding="utf-8")
    ran = playbook_helper.run_playbook(
        tmp_path, {"all": {"hosts": {"gpu1": playbook_helper.LOCAL}}}, str(tmp_path / "play.json")
    )
    # Where systemd does not run, what is said of that is another thing on WSL.
    assert ran.returncode == 0 or "systemd does not run here. Expected: " in ran.stdout, ran.stdout
    assert "wsl_terminate" not in ran.stdout
