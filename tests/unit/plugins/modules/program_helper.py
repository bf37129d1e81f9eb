# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs a module as the program that it is on a node, with executables of a test in place of the node's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from ansible_collections.gpufarm.core.tests.unit.patience import PATIENCE_S

PROGRAM = """
import importlib, json, sys
from ansible.module_utils.testing import patch_module_args
module = importlib.import_module("ansible_collections.gpufarm.core.plugins.modules." + sys.argv[1])
with patch_module_args(json.loads(sys.argv[2])):
    module.main()
"""


def start(module: str, parameters: dict[str, Any]) -> subprocess.Popen[str]:
    """Start a module that a test ends."""
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    return subprocess.Popen([sys.executable, "-c", PROGRAM, module, json.dumps(parameters)], text=True, env=environment)


def run_as_program(module: str, folder: Path, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return what the module says with the executables of ``folder`` before the system's, in a foreign locale."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, module, json.dumps(parameters)],
        env={"PATH": f"{folder}:/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path), "LC_ALL": "de_DE.UTF-8"},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.stdout, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (1 if result.get("failed") else 0)
    return result
