# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""That tasks have nothing of their parent's to look through for garbage."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from ansible_collections.gpufarm.core.tests.unit.playbooks import playbook_helper

PLAYBOOKS = Path(__file__).resolve().parents[4] / "playbooks"
# Tells of the process in which a template is worked out.
TELLS = """
import gc

class FilterModule:
    def filters(self):
        return {"frozen_here": lambda _value: gc.get_freeze_count()}
"""


def test_what_the_parent_has_is_frozen_in_the_process_of_a_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Runs of tests are without garbage collection from the start.
    monkeypatch.delenv("ANSIBLE_CALLBACK_PLUGINS", raising=False)
    (play,) = yaml.safe_load((PLAYBOOKS / "require_hosts.yml").read_text(encoding="utf-8"))
    (freezes,) = [task for task in play["tasks"] if "gc_frozen" in str(task)]
    (tmp_path / "filter_plugins").mkdir()
    (tmp_path / "filter_plugins/tells.py").write_text(TELLS, encoding="utf-8")
    shown = {"ansible.builtin.debug": {"msg": "frozen={{ 1 | frozen_here }}"}}
    play = {"hosts": "all", "gather_facts": False, "tasks": [shown, freezes, shown]}
    (tmp_path / "play.json").write_text(json.dumps([play]), encoding="utf-8")
    hosts = {"all": {"hosts": {"gpu1": playbook_helper.LOCAL, "gpu2": playbook_helper.LOCAL}}}
    ran = playbook_helper.run_playbook(tmp_path, hosts, str(tmp_path / "play.json"))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    # The play goes on.
    one, two, *after = map(int, re.findall(r"frozen=(\d+)", ran.stdout))
    assert one == two == 0 and len(after) == 2 and min(after) > 10000, ran.stdout
