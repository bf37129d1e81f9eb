"""Runs the collection's playbooks against a farm that a scenario has built."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tests.simulator import farm
from tests.simulator.cache import ROOT
from tests.simulator.docker import docker
from tests.simulator.farm import ansible


def environment(name: str) -> dict[str, str]:
    """Return the environment of a run against the farm, without Molecule's colours, which part hosts and counts."""
    return {**farm.environment(name), "ANSIBLE_FORCE_COLOR": "0", "ANSIBLE_NOCOLOR": "1"}


def run_playbook(name: str, playbook: str, *options: str, **extra: object) -> tuple[int, str]:
    """Run a playbook against the farm ``name`` and return its exit code and all that it said."""
    result = subprocess.run(
        ansible.command(f"playbooks/{playbook}", extra, *options), cwd=ROOT, env=environment(name),
        capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    return result.returncode, result.stdout + result.stderr


class Run(NamedTuple):
    """How a playbook ended; ``changed`` counts by host."""

    code: int
    output: str
    changed: dict[str, int]


def run_in_scenario(playbook: str | Path, *options: str) -> Run:
    """Run a playbook of the repository against the nodes of the scenario whose tests run."""
    # All of the inventory: the hosts and variables of the scenario's own are in a file beside Molecule's.
    inventory = str(Path(os.environ["MOLECULE_INVENTORY_FILE"]).parent)
    result = subprocess.run(
        [str(Path(sys.executable).with_name("ansible-playbook")), "-i", inventory, str(playbook), *options],
        cwd=ROOT, env=environment(os.environ["GPUFARM_FARM"]),
        capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    changed = {
        host: int(count) for host, count in re.findall(r"^(\S+) +: ok=.* changed=([0-9]+)", result.stdout, re.MULTILINE)
    }
    return Run(result.returncode, result.stdout + result.stderr, changed)


def enter(*parts: str, limit: str = "all", **extra: object) -> Run:
    """Enter parts of roles, such as ``cuda/verify``, on nodes of the scenario whose tests run."""
    variables = json.dumps({"parts": parts, **extra})
    return run_in_scenario(".config/molecule/enter.yml", "--limit", limit, "--extra-vars", variables)


def restart_nomad(name: str, node: str) -> None:
    """Restart a node's agent."""
    docker("exec", f"{name}-{node}", "systemctl", "restart", "nomad")


def words(text: str) -> str:
    """Return Ansible's output without its line breaks, so that a sentence can be looked for."""
    return " ".join(text.split())


def changed_tasks(output: str) -> list[str]:
    """Return the names of the tasks and handlers that Ansible's output shows as changed."""
    found = []
    title = ""
    for line in output.splitlines():
        heading = re.match(r"(?:TASK|RUNNING HANDLER) \[(?:\S+ : )?(.*)\]", line)
        title = heading[1] if heading else title
        if line.startswith("changed: ["):
            found.append(title)
    return found
