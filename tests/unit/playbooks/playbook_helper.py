# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs a playbook as a user does, over hosts that are this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from ansible_collections.gpufarm.core.tests.unit.plugins.module_utils import kubernetes_helper

ROOT = Path(__file__).resolve().parents[3]
LOCAL = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
# Seconds after which a playbook hangs, also on a machine that does much else.
HANGS_S = 600


# What roles ask of kubectl beside modules, who ask the API itself. Without a limit it may wait for ever.
KUBECTL = f"""#!/bin/sh
case "$*" in
    *' --request-timeout=30s get nodes --output=name') echo node/node00000; echo node/node00001 ;;
    *) exec {kubernetes_helper.KUBECTL} "$@" ;;
esac
"""


def asked_of(cluster: kubernetes_helper.Cluster, folder: Path) -> dict[str, str]:
    """Variables of hosts whose cluster this is."""
    kubectl = folder / "kubectl"
    kubectl.write_text(KUBECTL, encoding="utf-8")
    kubectl.chmod(0o755)
    return {"kubernetes_kubectl": str(kubectl), "kubernetes_kubeconfig": str(cluster.kubeconfig)}


def run_playbook(
    folder: Path,
    inventory: dict[str, Any],
    name: str,
    *options: str,
    before: Path | None = None,
    under: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """Run one of the collection's playbooks from ``folder``, where the inventory is written to.

    Collections in ``before`` stand before those that are installed. The words of ``under`` stand before the command.
    """
    (folder / "hosts.yml").write_text(yaml.safe_dump(inventory, sort_keys=False), encoding="utf-8")
    environment = {
        **os.environ,
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_COLLECTIONS_PATH": ":".join(str(path) for path in (before, ROOT / ".collections") if path),
        "ANSIBLE_LOCALHOST_WARNING": "False",
        "ANSIBLE_FORKS": "2",
        # Tests may run as root, whom Ansible never makes root again.
        "ANSIBLE_BECOME_ALLOW_SAME_USER": "True",
    }
    line = [*under, str(Path(sys.executable).with_name("ansible-playbook")), "-i", str(folder / "hosts.yml")]
    line += [str(ROOT / "playbooks" / name), *options]
    return subprocess.run(
        line, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=HANGS_S
    )
