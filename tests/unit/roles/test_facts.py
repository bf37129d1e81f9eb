"""Roles run with facts cleared: what they read of Ansible's own facts, the first task of each gathers."""

from __future__ import annotations

import json
import re
from pathlib import Path

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
    (gather, *_) = yaml.safe_load((ROLES / "_common/tasks/requirements.yml").read_text(encoding="utf-8"))
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
    known = {**role_helper.variables("_common"), "_common_host": role_helper.host()}
    for kernel in ("6.1.0-49-amd64", "6.1.0-50-amd64"):
        known["ansible_facts"] = role_helper.facts("Debian: Debian 12.13", kernel=kernel)
        found = {
            name: role_helper.value("asked", {**known, "asked": trust_as_template(text)})
            for name, text in facts.items()
        }
        assert f"linux-headers-{kernel}" in found["_common_family"]["headers"]
        assert found["_common_is_wsl"] is False and found["_common_platform"]["cuda"]["name"] == "debian12"
        # As a later play has them.
        known |= found


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
