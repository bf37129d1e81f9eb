# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A host whose clock is an hour wrong is told of before anything of it, or on the control machine, has changed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ansible_collections.gpufarm.core.tests.unit.patience import PATIENCE_S
from ansible_collections.gpufarm.core.tests.unit.roles import role_helper

# What the host's own Python takes for the time; the control machine's is the true one.
WRONG = "import time\ntrue = time.time\ntime.time = lambda: true() + {seconds}\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="roles want root")
def test_nothing_changes_on_a_host_whose_clock_is_wrong(tmp_path: Path) -> None:
    root = role_helper.ROLES.parent
    hosts = {}
    for name, seconds in {"late": -3600, "early": 3600}.items():
        (tmp_path / f"clock-{name}").mkdir()
        (tmp_path / f"clock-{name}/sitecustomize.py").write_text(WRONG.format(seconds=seconds), encoding="utf-8")
        hosts[name] = {
            "clock": str(tmp_path / f"clock-{name}"), "nomad_config_dir": str(tmp_path / name / "nomad.d"),
            "nomad_bin_dir": str(tmp_path / name / "bin"),
        }  # fmt: skip
    given = {
        "ansible_connection": "local", "ansible_python_interpreter": sys.executable,
        "nomad_secrets_dir": str(tmp_path / "secrets"), "nomad_release_url": "http://127.0.0.1:1",
    }  # fmt: skip
    inventory = {"all": {"vars": given, "children": {"nomad_servers": {"hosts": hosts}}}}
    (tmp_path / "inventory.json").write_text(json.dumps(inventory), encoding="utf-8")
    play = {
        "hosts": "all", "environment": {"PYTHONPATH": "{{ clock }}"},
        "tasks": [{"ansible.builtin.include_role": {"name": "gpufarm.core.nomad_server"}}],
    }  # fmt: skip
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play]), encoding="utf-8")
    before = sorted(tmp_path.rglob("*"))
    # Whether it runs on this machine says nothing of a clock.
    systemd = json.dumps({"_common_systemd_runs": True})
    told = subprocess.run(
        [Path(sys.executable).with_name("ansible-playbook"), "-i", "inventory.json", "play.yml", "-e", systemd],
        cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False, env={**os.environ,
        "COLUMNS": "1000", "ANSIBLE_CONFIG": str(root / "ansible.cfg"),
        "ANSIBLE_COLLECTIONS_PATH": str(root / ".collections")},
    )  # fmt: skip
    assert told.returncode == 2, told.stdout + told.stderr
    words = " ".join(told.stdout.split())
    expected = "that of the control machine. Expected: at most 300 s, because certificates"
    assert re.search(rf"late: the clock is 3[56]\d\d s behind {expected}", words), words
    assert re.search(rf"early: the clock is 3[0-6]\d\d s ahead of {expected}", words), words
    assert "changed=0" in words and "changed=1" not in words
    assert [path for path in sorted(tmp_path.rglob("*")) if "__pycache__" not in str(path)] == before
