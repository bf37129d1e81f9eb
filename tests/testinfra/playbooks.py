"""Runs the collection's playbooks against a farm that a scenario has built."""

from __future__ import annotations

import subprocess

from tests.simulator import farm
from tests.simulator.cache import ROOT
from tests.simulator.docker import docker
from tests.simulator.farm import ansible


def run_playbook(name: str, playbook: str, *options: str, **extra: object) -> tuple[int, str]:
    """Run a playbook against the farm ``name`` and return its exit code and all that it said."""
    result = subprocess.run(
        ansible.command(f"playbooks/{playbook}", extra, *options), cwd=ROOT, env=farm.environment(name),
        capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    return result.returncode, result.stdout + result.stderr


def restart_nomad(name: str, node: str) -> None:
    """Restart a node's agent; tests do it more often in a minute than the unit's start limit allows."""
    docker("exec", f"{name}-{node}", "sh", "-c", "systemctl reset-failed nomad && systemctl restart nomad")


def words(text: str) -> str:
    """Return Ansible's output without its line breaks, so that a sentence can be looked for."""
    return " ".join(text.split())
