# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How many nodes at a time a playbook takes, and what ends it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from ansible_collections.gpufarm.core.tests.unit.playbooks import playbook_helper
from ansible_collections.gpufarm.core.tests.unit.playbooks.playbook_helper import LOCAL

PLAYBOOKS = ("site.yml", "kubernetes.yml", "remove.yml", "wsl_hosts.yml")


def batched(name: str) -> dict[str, Any]:
    """The play that drains nodes a batch after the other."""
    plays = yaml.safe_load((playbook_helper.ROOT / "playbooks" / name).read_text(encoding="utf-8"))
    (found,) = [play for play in plays if "site_serial" in str(play.get("serial")) and "drain" in play["serial"]]
    return dict(found)


def parts(play: dict[str, Any]) -> list[dict[str, Any]]:
    return [task for task in play["tasks"] if "batch_" in str(task.get("ansible.builtin.import_role"))]


def test_every_playbook_that_drains_goes_by_the_same_batches() -> None:
    plays = [batched(name) for name in PLAYBOOKS]
    assert len({play["serial"] for play in plays}) == 1
    for play in plays:
        begin, done = parts(play)
        assert begin["ansible.builtin.import_role"]["tasks_from"] == "batch_begin.yml"
        assert done["ansible.builtin.import_role"]["tasks_from"] == "batch_done.yml"
        assert done is play["tasks"][-1] and begin["tags"] == done["tags"] == ["always"]


def run(folder: Path, policy: str) -> tuple[int, list[str], str]:
    """Run batches as those of site.yml on ten nodes, of which the first is lost before and the fourth there."""
    site = batched("site.yml")
    begin, done = parts(site)
    lost = {"ansible.builtin.fail": {"msg": "broken"}, "when": "inventory_hostname == lost"}
    change = {"ansible.builtin.debug": {"msg": "{{ inventory_hostname }} is changed."}}
    plays = [
        {"hosts": "gpu_nodes", "vars": {"lost": "node0"}, "tasks": [lost]},
        {
            "hosts": "gpu_nodes", "serial": site["serial"], "vars": {"lost": "node3"},
            "tasks": [begin, lost, change, done],
        },
        {"hosts": "gpu_nodes", "tasks": [{"ansible.builtin.debug": {"msg": "This comes next."}}]},
    ]  # fmt: skip
    (folder / "parts.yml").write_text(
        yaml.safe_dump([{"gather_facts": False, **play} for play in plays], sort_keys=False), encoding="utf-8"
    )
    nodes = {"hosts": {f"node{number}": {} for number in range(10)}, "vars": {"node_maintenance_policy": policy}}
    hosts = {"all": {"vars": LOCAL, "children": {"gpu_nodes": nodes}}}
    result = playbook_helper.run_playbook(folder, hosts, str(folder / "parts.yml"))
    said = " ".join((result.stdout + result.stderr).split())
    return result.returncode, sorted(re.findall(r"(\w+) is changed[.]", said)), said


def test_what_the_inventory_has_drained_goes_by_parts_until_one_fails(tmp_path: Path) -> None:
    """A host that was lost before is no reason to end; the rest of a batch comes to its end."""
    code, changed, said = run(tmp_path, "drain")
    assert (code, changed) == (2, ["node1", "node2"]), said
    assert (
        "node3: failed above, so no further batch begins, and node4, node5, node6, node7, node8, node9 stay as they "
        "are. Expected: every host of a batch well before work is moved away in the next. Next step: mend what failed"
    ) in said
    assert "This comes next." not in said


def test_what_drains_nothing_goes_all_at_once(tmp_path: Path) -> None:
    code, changed, said = run(tmp_path, "refuse")
    assert (code, len(changed)) == (2, 8), said
    assert "This comes next." in said and "no further batch" not in said
