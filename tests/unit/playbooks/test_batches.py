# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How many nodes at a time a playbook takes, and what ends it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.template import trust_as_template
from ansible_collections.gpufarm.core.tests.unit.playbooks import playbook_helper
from ansible_collections.gpufarm.core.tests.unit.playbooks.playbook_helper import LOCAL
from ansible_collections.gpufarm.core.tests.unit.roles import role_helper

PLAYBOOKS = ("site.yml", "kubernetes.yml", "remove.yml", "wsl_hosts.yml")


def batched(name: str) -> dict[str, Any]:
    """The play that drains nodes a batch after the other."""
    plays = yaml.safe_load((playbook_helper.ROOT / "playbooks" / name).read_text(encoding="utf-8"))
    (found,) = [play for play in plays if "site_serial" in str(play.get("serial")) and "drain" in play["serial"]]
    return dict(found)


def begin(play: dict[str, Any]) -> dict[str, Any]:
    (found,) = [task for task in play["tasks"] if "batch_" in str(task.get("ansible.builtin.import_role"))]
    return dict(found)


def test_every_playbook_that_drains_goes_by_the_same_batches() -> None:
    plays = [batched(name) for name in PLAYBOOKS]
    assert len({play["serial"] for play in plays}) == 1
    for play in plays:
        assert begin(play)["ansible.builtin.import_role"]["tasks_from"] == "batch_begin.yml"
        assert begin(play)["tags"] == ["always"]


@pytest.mark.parametrize("name", PLAYBOOKS)
def test_what_this_run_drains_goes_in_batches(name: str) -> None:
    """A Windows machine has nodes, and they the policy; elsewhere what --limit leaves out is no reason."""
    play = batched(name)
    given = {
        "__farm_drains": trust_as_template(play["vars"]["__farm_drains"]),
        "serial": trust_as_template(play["serial"]),
        "groups": {"gpu_nodes": ["one", "other"], "kubernetes_nodes": ["one", "other"]},
        "hostvars": {"one": {"node_maintenance_policy": "drain"}, "other": {}, "windows": {}},
    }
    for hosts, drains in ((["one", "other"], True), (["other", "windows"], name == "wsl_hosts.yml")):
        here = {**given, "ansible_play_hosts_all": hosts}
        assert role_helper.value("__farm_drains", here) is drains
        assert role_helper.value("serial", here) == ("20%" if drains else "100%")
    assert role_helper.value("serial", {**given, "ansible_play_hosts_all": [], "site_serial": 3}) == 3
    # Of who imports the playbook, which no host knows of.
    imported = {**given, "ansible_play_hosts_all": ["windows"], "node_maintenance_policy": "drain"}
    assert role_helper.value("serial", imported) == "20%"
    # As --list-hosts asks it.
    assert role_helper.value("serial", {key: given[key] for key in ("serial", "__farm_drains", "groups")}) == "100%"


def run(folder: Path, policy: str, before: list[int], lost: list[int], *options: str) -> tuple[int, list[str], str]:
    """Run batches as those of site.yml on ten nodes, of which some are lost before and some there."""
    site = batched("site.yml")
    fail = {"ansible.builtin.fail": {"msg": "broken"}, "when": "inventory_hostname in lost"}
    change = {"ansible.builtin.debug": {"msg": "{{ inventory_hostname }} is changed."}}
    plays = [
        {"hosts": "gpu_nodes", "vars": {"lost": [f"node{number}" for number in before]}, "tasks": [fail]},
        {
            "hosts": "gpu_nodes", "serial": site["serial"], "tasks": [begin(site), fail, change],
            "vars": {"lost": [f"node{number}" for number in lost], "__farm_drains": site["vars"]["__farm_drains"]},
        },
        {"hosts": "gpu_nodes", "tasks": [{"ansible.builtin.debug": {"msg": "This comes next."}}]},
    ]  # fmt: skip
    (folder / "parts.yml").write_text(
        yaml.safe_dump([{"gather_facts": False, **play} for play in plays], sort_keys=False), encoding="utf-8"
    )
    nodes: dict[str, dict[str, str]] = {f"node{number}": {"node_maintenance_policy": policy} for number in range(10)}
    nodes["away"] = {"node_maintenance_policy": "drain"}
    hosts = {"all": {"vars": LOCAL, "children": {"gpu_nodes": {"hosts": nodes}}}}
    result = playbook_helper.run_playbook(folder, hosts, str(folder / "parts.yml"), "--limit", "!away", *options)
    said = " ".join((result.stdout + result.stderr).split())
    return result.returncode, sorted(re.findall(r"(\w+) is changed[.]", said)), said


def test_what_the_inventory_has_drained_goes_by_parts_until_one_fails(tmp_path: Path) -> None:
    """A host that was lost before is no reason to end, and no batch goes on because it had one."""
    code, changed, said = run(tmp_path, "drain", [0, 2], [3])
    assert (code, changed) == (2, ["node1"]), said
    assert (
        "node3: failed above, so no further batch begins. Hosts that stay as they are: 6 (node4, node5, node6, node7, "
        "node8, ...). Expected: every host of a batch well before work is moved away in the next. Next step: mend what "
        "failed and run this again, or leave it out by --limit."
    ) in said
    assert "This comes next." not in said


def test_the_rest_of_a_batch_comes_to_its_end_and_no_later_one_begins(tmp_path: Path) -> None:
    """Ansible goes on where a host of a batch was lost before; so every batch looks for itself."""
    code, changed, said = run(tmp_path, "drain", [0, 4, 9], [1], "-e", "site_serial=4")
    assert (code, changed) == (2, ["node2", "node3"]), said
    told = set(re.findall(r"(node\d): failed above, .*? as they are: (\d) \((.*?)\)", said))
    assert told == {("node1", "4", "node5, node6, node7, node8"), ("node1", "1", "node8")}


def test_what_drains_nothing_goes_on_without_those_that_fail(tmp_path: Path) -> None:
    code, changed, said = run(tmp_path, "refuse", [0], [3], "-e", "site_serial=5")
    assert (code, len(changed)) == (2, 8), said
    assert "This comes next." in said and "no further batch" not in said


def test_check_mode_and_what_is_refused_end_no_run() -> None:
    (guard,) = [task for task in role_helper.tasks_of("farm/tasks/batch_begin.yml") if "ansible.builtin.fail" in task]
    given = {"acts": trust_as_template("{{ " + " and ".join(f"({one})" for one in guard["when"]) + " }}")}
    for checks, drains, lost, acts in (
        (False, True, ["node0"], True), (True, True, ["node0"], False), (False, False, ["node0"], False),
        (False, True, [], False),
    ):  # fmt: skip
        here = {"ansible_check_mode": checks, "__farm_drains": drains, "__farm_batch_lost": lost}
        assert role_helper.value("acts", {**given, **here}) is acts
