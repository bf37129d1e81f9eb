# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The gate that a node keeps by itself, run by a systemd timer that the role gpu_health installs.

It probes the GPUs as the module nvidia_gpu_health does, compares them with what Nomad has of this node, and closes or
opens the node. Nothing of Ansible is needed. C(run) returns the status that is also written to a file:

    verdict (ok, warning, critical), healthy, reason (null when healthy), action and message (of the gate), problems (as
    nvidia_gpu_health returns them), nomad_problems (as nomad_gpu_verify returns them), checked_at (time in UTC)
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils import gate, health, nomad

CONFIG = "/etc/gpufarm/health.json"

HEALTHY, SICK, BROKEN = 0, 3, 2
"""Exit codes: the node may have work, it may not, the gate could not do its work; 1 is Python's own for a defect."""

KEYS: dict[str, type] = {
    "node": str, "connection": dict, "health": dict, "ignored": list, "drain": bool, "drain_deadline": int,
    "close_on": str, "plugin_age_max": int, "status_file": str,
}  # fmt: skip


class ConfigError(Exception):
    """The configuration cannot be used; the text says what was found, what was expected and what to do."""


def load(path: str) -> dict[str, Any]:
    """The configuration as the role writes it."""
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError(f"it holds a {type(config).__name__}")
        wrong = [key for key, kind in KEYS.items() if type(config.get(key)) is not kind]
        if wrong:
            raise ValueError(f"{wrong[0]} is {config.get(wrong[0])!r} and no {KEYS[wrong[0]].__name__}")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be used ({error}). Expected: the configuration that the role gpu_health writes. "
            "Next step: run that role for this host again."
        ) from error
    return config


def run(config: Mapping[str, Any], probe: Callable[[Any], dict[str, Any]] = health.probe) -> dict[str, Any]:
    """Probe, compare, gate; NomadError or ValueError when that is not possible."""
    found = probe(health.HealthOptions.from_mapping(config["health"]))
    client = nomad.Client(nomad.Connection(**config["connection"]))
    name = config["node"]
    said = nomad.expected_of_facts(found["nvidia_smi"], name, config["ignored"])
    wanted = nomad.Expected(
        node=name,
        count=said.get("count"),
        uuids=tuple(said["uuids"]) if "uuids" in said else None,
        driver_version=said.get("driver_version"),
    )
    problems = compare(client, wanted, config.get("nomad_timeout", 20))
    agent = gate.agent_state(200, statistics(client), config["plugin_age_max"])
    judged = gate.judge_farm(
        [{"node": name, "host": name, "probe": found, "agent": agent}],
        [{"name": name, "problems": [{"code": problem.code} for problem in problems]}],
        config["close_on"],
    )
    if judged["missing"]:
        raise nomad.NomadError(
            found=f"Nomad knows no node {name}",
            expected="this node",
            next_step="look at the Nomad client ('journalctl -u nomad') and at the name in the configuration",
        )
    (entry,) = judged["nodes"]
    listed = gate.find_nodes(client, [name], {"filter": nomad.name_filter([name])})[name]
    assert listed is not None, "it was compared above"
    node = gate.read_node(client, listed.id)
    wish = gate.Wish(entry["healthy"], entry["reason"], config["drain"], config["drain_deadline"], gate.NODE)
    decision = gate.decide(node, wish, gate.timestamp())
    if decision.changes:
        gate.carry_out(client, node, decision, wish)
    return {
        "verdict": found["verdict"],
        "healthy": entry["healthy"],
        "reason": entry["reason"],
        "action": decision.action,
        "message": decision.message,
        "problems": found["problems"],
        "nomad_problems": [vars(problem) for problem in problems],
        "checked_at": gate.timestamp(),
    }


def statistics(client: nomad.Client) -> dict[str, Any]:
    """What the agent measured last; nothing when it does not say, which is no reason to keep a sick node open."""
    try:
        answer: dict[str, Any] = client.call("GET", "/v1/client/stats") or {}
    except nomad.NomadError:
        return {}
    return answer


def compare(client: nomad.Client, wanted: nomad.Expected, timeout: float) -> list[nomad.Problem]:
    """What is wrong with Nomad's view of this node, after an agent that just started had its time."""

    def fetch(index: int, wait: float) -> tuple[int, list[nomad.Problem]]:
        answer = client.items(
            "/v1/nodes", {"resources": "true", "filter": nomad.name_filter([wanted.node])}, index, wait
        )
        (verdict,) = nomad.compare([wanted], [nomad.actual_node(node) for node in answer.items])
        return answer.index, verdict.problems

    problems: list[nomad.Problem] = nomad.wait_until(fetch, lambda found: not found, timeout)
    return problems


def write_status(path: str, status: Mapping[str, Any]) -> None:
    """Replace the status file in one step, so that a reader never sees half of it."""
    folder = Path(path).parent
    folder.mkdir(parents=True, exist_ok=True)
    handle, staged = tempfile.mkstemp(dir=folder, prefix=".health-")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(status, file, indent=1)
        file.write("\n")
    Path(staged).chmod(0o644)
    Path(staged).replace(path)


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        config = load(given[0] if given else CONFIG)
        status = run(config)
        write_status(config["status_file"], status)
    except (ConfigError, nomad.NomadError, ValueError, OSError) as error:
        sys.stderr.write(f"{socket.gethostname()}: {error}\n")
        return BROKEN
    sys.stdout.write(f"{status['verdict']}: {status['message']}\n")
    return HEALTHY if status["healthy"] else SICK
