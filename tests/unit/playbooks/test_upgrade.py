# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What upgrade.yml does with hosts that are lost on the way, by the parts of the role farm that it enters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from ansible_collections.gpufarm.core.tests.unit.playbooks import playbook_helper
from ansible_collections.gpufarm.core.tests.unit.playbooks.playbook_helper import LOCAL

OK = {"state": "ok"}


def part(name: str) -> dict[str, Any]:
    return {"ansible.builtin.import_role": {"name": "gpufarm.core.farm", "tasks_from": name}}


def say(text: str) -> dict[str, Any]:
    return {"ansible.builtin.debug": {"msg": text}}


def run(folder: Path, hosts: Mapping[str, Mapping[str, Any]], *tasks: dict[str, Any], **play: Any) -> tuple[int, str]:
    """Run tasks on GPU nodes that are this machine, with the keywords of a play."""
    written = [{"hosts": "gpu_nodes", "gather_facts": False, **play, "tasks": list(tasks)}]
    (folder / "parts.yml").write_text(yaml.safe_dump(written, sort_keys=False), encoding="utf-8")
    inventory = {"gpu_nodes": {"hosts": {host: dict(given) for host, given in hosts.items()}, "vars": LOCAL}}
    result = playbook_helper.run_playbook(folder, inventory, str(folder / "parts.yml"))
    return result.returncode, " ".join((result.stdout + result.stderr).split())


def test_each_wave_has_its_own_speaker(tmp_path: Path) -> None:
    """Who is in another wave does not get to the question, and nothing would be compared with Nomad."""
    hosts = {"a": {"__nomad_agent": OK}, "b": {"__nomad_agent": OK}, "c": {"__nomad_agent": OK}}
    chosen = say("{{ inventory_hostname }} hears {{ __farm_speaker }}.")
    code, output = run(tmp_path, hosts, part("speaker.yml"), chosen, serial=[1, 2])
    assert code == 0, output
    for told in ("a hears a.", "b hears b.", "c hears b."):
        assert told in output


def test_a_wave_without_a_speaker_names_its_own_hosts(tmp_path: Path) -> None:
    stopped = {"__nomad_agent": {"state": "stopped", "message": "gone"}, "__nomad_local_url": "http://127.0.0.1:4646"}
    code, output = run(tmp_path, {"a": {"__nomad_agent": OK}, "b": stopped}, part("speaker.yml"), serial=[1, 1])
    assert code != 0
    assert 'b: no Nomad agent of b answers as healthy; here http://127.0.0.1:4646 said "gone".' in output
