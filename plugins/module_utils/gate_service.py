# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The gate that a node keeps by itself, run by a systemd timer that the role gpu_health installs.

It probes the GPUs as the module nvidia_gpu_health does, compares them with what Nomad has of this node, and closes or
opens the node. It asks its own agent, and servers for its own node only, so that a farm of any size can run it. Nothing
of Ansible is needed. C(main) writes a status file at the end of each run, whatever came of it:

    verdict (ok, warning, critical; null without a probe), healthy (null when nobody knows, because Nomad could not be
    asked), reason (null when healthy or unknown), action (of the gate, or failed) and message, state (open, or who
    keeps the node closed: node, farm, maintenance, others; null when Nomad could not be asked), problems (as
    nvidia_gpu_health returns them), nomad_problems (as nomad_gpu_verify returns them; null when Nomad could not be
    asked), gpus (index, uuid, name, pci_bus_id, verdict, ecc_corrected and ecc_uncorrected of each,
    with clocks_event_reasons_counters, utilization_gpu_percent, power_draw_w and power_limit_enforced_w, as
    nvidia_smi_facts returns them; a verdict of missing where nvidia-smi lists it no more, null where nobody knows; null
    for all before the first probe),
    gpus_expected (null where nobody said), gpus_found (that answer; null where nvidia-smi cannot tell), xids (code,
    uuid, pci_bus_id, count), kernel_log (where they were read, with partial and why where it has lost its beginning),
    remembered (boot_id, and those xids of that start of the kernel that are not to be ignored, as nvidia_gpu_health
    returns them: they count until the next one, or until they are acknowledged, also where the log has lost them),
    probed_at and checked_at (times in UTC)

With a folder of node_exporter's textfile collector in its configuration it writes the same there as metrics.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils import (
    gate,
    gate_checks,
    gate_metrics,
    gate_status,
    health,
    nomad,
)
from ansible_collections.gpufarm.core.plugins.module_utils.gate_status import FAILED, status_of
from ansible_collections.gpufarm.core.plugins.module_utils.kubelet_devices import kubelet_devices
from ansible_collections.gpufarm.core.plugins.module_utils.nomad_programs import nomad_programs
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi import Facts, collect, resolve_subsets
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi.facts import serves_mps
from ansible_collections.gpufarm.core.plugins.module_utils.problem import FoundError, Problem, sentences
from ansible_collections.gpufarm.core.plugins.module_utils.text import utc

CONFIG = "/etc/gpufarm/health.json"
STATUS = "/run/gpufarm/health.json"

NO_NODE = 404
HEALTHY, SICK, BROKEN = 0, 3, 2
"""Exit codes: the node may have work, it may not, the gate could not do its work; 1 is Python's own for a defect."""

KEYS: dict[str, type] = {
    "connection": dict, "health": dict, "ignored": list, "drain": bool, "drain_deadline": int, "close_on": str,
    "plugin_age_max": int, "open_after": int, "closed_min": int, "textfile_dir": str,
    "check_start": int, "check_quick": int,
}  # fmt: skip

# systemd ends the unit after TimeoutStartSec, and then nobody says what was found. A unit test holds these together.
PROBE_LIMIT_S = 400
RUN_LIMIT_S = 790
REQUEST_LIMIT_S = 10
NOMAD_WAIT_S = 20
"""What an agent that just started gets, until it has its devices."""
DCGM_LEVEL_MAX = 1
"""DCGM's first level takes seconds. The others take minutes to hours, and the GPUs from the jobs."""

UTILIZATION_S = 2
"""By then nvidia-smi's utilisation, that of a second at most, has nothing of a check in it."""


class ConfigError(FoundError):
    """The configuration cannot be used; the text says what was found, what was expected and what to do."""


class TooLateError(BaseException):
    """The run did not end in time. No source that may fail swallows it."""


def load(path: str) -> dict[str, Any]:
    """The configuration as the role writes it."""
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError(f"it holds a {type(config).__name__}")
        # True is an int for isinstance.
        wrong = [key for key, kind in KEYS.items() if config.get(key).__class__ is not kind]
        if wrong:
            raise ValueError(f"{wrong[0]} is {config.get(wrong[0])!r} and no {KEYS[wrong[0]].__name__}")
        if config["close_on"] not in (gate.CRITICAL, gate.WARNING):
            raise ValueError(f"close_on is {config['close_on']!r} and neither critical nor warning")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be used ({error})",
            "the configuration that the role gpu_health writes",
            "run that role for this host again",
        ) from error
    return config


def options_of(mapping: Mapping[str, Any]) -> health.HealthOptions:
    """The options of a probe that a timer can make; ValueError says what is wrong with them."""
    options = health.HealthOptions.from_mapping(mapping)
    if (options.dcgm_diag_level or 0) > DCGM_LEVEL_MAX:
        raise ValueError(
            f"found dcgm_diag_level is {options.dcgm_diag_level}, which takes minutes to hours and the GPUs from jobs. "
            f"Expected: at most {DCGM_LEVEL_MAX} for a timer. Next step: take it out of gpu_health_options, and give "
            "it to playbooks/health.yml alone, for nodes without jobs."
        )
    health.refuse_longer(options, PROBE_LIMIT_S)
    return options


def run(
    config: Mapping[str, Any],
    last: Mapping[str, Any],
    probe: Callable[[Any], dict[str, Any]] = health.probe,
    *,
    alone: bool,
) -> dict[str, Any]:
    """Probe, check, compare, gate; a node that the probe calls sick is closed before anything is checked. The status
    tells of a Nomad that could not be asked; ValueError is one of the options. C(last) is the last status.
    """
    options = dataclasses.replace(options_of(config["health"]), ignored_gpus=tuple(config["ignored"]))
    connection = nomad.Connection(**{"request_timeout": REQUEST_LIMIT_S, **config["connection"]})
    try:
        before = gate.gate_node(own_node(nomad.Client(connection))).index
    except nomad.NomadError:
        # The probe says all the same what it finds. Should Nomad be back then, it may close the node and not open it.
        before = -1
    found = probe(options)
    every = {gate_checks.START: config["check_start"], gate_checks.QUICK: config["check_quick"]}
    records = gate_checks.kept({gpu["uuid"]: gpu.get("checks") for gpu in last.get("gpus") or []}, every)

    def told(records: Mapping[str, Any]) -> dict[str, Any]:
        present = {gpu["uuid"]: records.get(gpu["uuid"]) or {} for gpu in found["gpus"]}
        findings = gate_checks.findings_of(present, options.acknowledged_file)
        return health.add(found, findings, options, socket.gethostname())

    def gate_by(known: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return gated(nomad.Client(connection), config, known, before)
        except nomad.NomadError as error:
            closes = gate.closes(known["verdict"], config["close_on"])
            return {
                "healthy": False if closes else None,
                "reason": known["reason"] if closes else None,
                "message": str(error),
            }

    known = told(records)
    status = gate_by(known) if gate.closes(found["verdict"], config["close_on"]) else None
    records, left_out = checked(connection, every, options, found, records, alone=alone)
    now_known = told(records)
    if status is None or now_known["reason"] != known["reason"]:
        status = gate_by(now_known)
    return status_of(**gate_status.of_probe(now_known, records, left_out), **status, gpus_expected=options.gpus)


def checked(
    connection: nomad.Connection,
    every: Mapping[str, int],
    options: health.HealthOptions,
    found: Mapping[str, Any],
    before: Mapping[str, Any],
    *,
    alone: bool,
) -> tuple[dict[str, Any], dict[str, str]]:
    """The records of what GPUs without work did, new ones where they are due, and why others are not new."""
    if not any(seconds > 0 for seconds in every.values()):
        return {}, {}

    def busy(facts: Facts | None) -> Mapping[str, str]:
        if facts is None:
            subsets = ["processes", "mig"]
            known = (process for gpu in found["nvidia_smi"]["gpus"] for process in gpu["processes"] or ())
            if found["nvidia_smi"]["platform"] == "wsl" or any(map(serves_mps, known)):
                # Nothing else tells of Windows' programs, and of the clients of a server of MPS before Volta.
                subsets.append("utilization")
                time.sleep(UTILIZATION_S)
            facts = collect(resolve_subsets(subsets), path=options.path, timeout=options.timeout)
        client = nomad.Client(connection)
        node = gate.read_node(client, own_node_id(client))
        why = gate_checks.may_compute(node) if alone else "another run of the gate checks"
        if why:
            return {gpu["uuid"]: why for gpu in facts["gpus"] if gpu["uuid"]}
        allocations = client.items(f"{gate.node_path(node.id)}/allocations", {}).items
        return gate_checks.holders(facts, allocations, nomad_programs(others=True), kubelet_devices())

    return gate_checks.check(
        found["nvidia_smi"], before, every,
        {"all": found["checks"]["acknowledged"], **found["checks"]["acknowledged_gpus"]}, busy,
        sick={gpu["uuid"] for gpu in found["gpus"] if gpu["verdict"] == gate.CRITICAL}, lanes=options.pcie_width_min,
    )  # fmt: skip


def gated(client: nomad.Client, config: Mapping[str, Any], found: Mapping[str, Any], before: int) -> dict[str, Any]:
    """What there is to tell, after the gate has done with its own node what this probe asks for."""
    entry, problems, node, stats = judge(
        client, found, config["ignored"], close_on=config["close_on"], plugin_age_max=config["plugin_age_max"]
    )
    uptime = stats.get("Uptime")
    wish = gate.Wish(
        entry["healthy"], entry["reason"], config["drain"], config["drain_deadline"], gate.NODE,
        index=before, uptime=uptime if isinstance(uptime, int) else None,
        open_after=config["open_after"], closed_min_s=config["closed_min"],
    )  # fmt: skip
    node = gate.with_meta(client, node)
    decision = gate.decide(node, wish, utc())
    if decision.changes:
        # What the server next to the agent knows may be old; most runs change nothing and cost the leader nothing.
        node = gate.read_node(client, node.id)
        decision = gate.decide(node, wish, utc())
        gate.carry_out(client, node, decision, wish)
    return {
        "healthy": entry["healthy"],
        "reason": entry["reason"],
        "action": decision.action,
        "message": decision.message,
        "state": gate.state_after(node, decision, wish),
        "nomad_problems": [vars(problem) for problem in problems],
    }


def judge(
    client: nomad.Client,
    found: Mapping[str, Any],
    ignored: Sequence[str],
    *,
    close_on: str,
    plugin_age_max: float,
    wait_s: float | None = None,
) -> tuple[dict[str, Any], list[Problem], gate.GateNode, dict[str, Any]]:
    """What the probe and Nomad say of this node together, as C(gate.judge_farm) does; and what that was made of."""
    problems, node = compare(client, found["nvidia_smi"], ignored, NOMAD_WAIT_S if wait_s is None else wait_s)
    stats = statistics(client)
    judged = gate.judge_farm(
        [{"node": node.name, "probe": found, "agent": gate.agent_state(200, stats, plugin_age_max)}],
        [{"name": node.name, "problems": [{"code": problem.code} for problem in problems]}],
        close_on,
    )
    (entry,) = judged["nodes"]
    return entry, problems, node, stats


def own_node_id(client: nomad.Client) -> str:
    """The ID of this agent's node; empty where it is no client."""
    known = client.call("GET", "/v1/agent/self") or {}
    return ((known.get("stats") or {}).get("client") or {}).get("node_id") or ""


def own_node(client: nomad.Client, index: int = 0, wait: float = 0) -> dict[str, Any]:
    """The node of this agent, by its ID: several can have its name."""
    node_id = own_node_id(client)
    if not node_id:
        raise nomad.NomadError(
            found=f"the agent at {client.connection.address} is no client",
            expected="the Nomad client of this node",
            next_step="look at its configuration ('nomad agent-info'), and at nomad_bind_addr of this host",
        )
    try:
        found, newest = client.known(gate.node_path(node_id), index, wait)
    except nomad.NomadError as error:
        if error.status != NO_NODE:
            raise
        raise nomad.NomadError(
            found=f"Nomad knows no node {node_id}, which this agent says it is",
            expected="a client that its servers know",
            next_step="read `journalctl -u nomad` on this host",
            transient=True,
        ) from error
    return {**found, "Index": newest}


def statistics(client: nomad.Client) -> dict[str, Any]:
    """What the agent measured last; nothing when it does not say, which is no reason to keep a sick node open."""
    try:
        answer: dict[str, Any] = client.call("GET", "/v1/client/stats") or {}
    except nomad.NomadError:
        return {}
    return answer


def compare(
    client: nomad.Client, facts: Mapping[str, Any], ignored: Sequence[str], wait_s: float
) -> tuple[list[Problem], gate.GateNode]:
    """What is wrong with Nomad's view of this node, after an agent that just started had its time; and the node."""

    def fetch(index: int, wait: float) -> tuple[int, tuple[list[Problem], gate.GateNode]]:
        node = own_node(client, index, wait)
        actual = nomad.describe_node(node)
        said = nomad.expected_of_facts(facts, actual["name"], ignored)
        wanted = nomad.Expected(
            node=actual["name"],
            count=said.get("count"),
            uuids=tuple(said["uuids"]) if "uuids" in said else None,
            driver_version=said.get("driver_version"),
            mig_unknown=tuple(said.get("mig_unknown", ())),
        )
        (verdict,) = nomad.compare([wanted], [actual])
        return node["Index"], (verdict.problems, gate.gate_node(node))

    answer: tuple[list[Problem], gate.GateNode] = nomad.wait_until(fetch, lambda found: not found[0], wait_s)
    return answer


def write_status(path: str, status: Mapping[str, Any]) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    gate_status.write(path, json.dumps(status, indent=1) + "\n")


def _too_late(*_signal: Any) -> None:
    raise TooLateError(
        f"found that this run did not end within {RUN_LIMIT_S} s. Expected: an end. "
        "Next step: look for what hangs here (`ps -e -o stat,wchan,args`), and restart the host if it is the driver."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """C(arguments) are the configuration and the status file, if they are others."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    config_path, status_path = (given + [CONFIG, STATUS][len(given) :])[:2]
    config: dict[str, Any] = {}
    last = gate_status.read(status_path)
    defect: BaseException | None = None
    signal.signal(signal.SIGALRM, _too_late)
    signal.alarm(RUN_LIMIT_S)
    try:
        config = load(config_path)
        with gate_status.alone(status_path) as alone:
            status = run({**config, "health": {"status_file": status_path, **config["health"]}}, last, alone=alone)
    except (ConfigError, ValueError, TooLateError) as error:
        status = status_of(message=str(error))
    except BaseException as error:
        defect, status = error, status_of(message=f"{type(error).__name__}: {error}")
    finally:
        signal.alarm(0)
    written = tell(gate_status.remember(status, last), status_path, config)
    if defect:
        raise defect
    if not written:
        return BROKEN
    if status["action"] == FAILED:
        sys.stderr.write(f"{socket.gethostname()}: {status['verdict'] or 'no verdict'}: {status['message']}\n")
        return BROKEN
    sys.stdout.write(f"{status['verdict']}: {status['message']}\n")
    return HEALTHY if status["healthy"] else SICK


def tell(status: Mapping[str, Any], status_path: str, config: Mapping[str, Any]) -> bool:
    """Write the status, and the metrics where they are asked for; false where something could not be written."""
    said = _tell(
        status_path, lambda: write_status(status_path, status), "a folder with space on the node",
        "make room there (`df`)",
    )  # fmt: skip
    if not config.get("textfile_dir"):
        return said
    metrics = str(Path(config["textfile_dir"]) / gate_metrics.FILE)
    measured = _tell(
        metrics, lambda: gate_status.write(metrics, gate_metrics.text_of(status)),
        "the folder of node_exporter's textfile collector, with space",
        "have that folder and room there (`df`), or correct gpu_health_textfile_dir and run the role gpu_health again",
    )  # fmt: skip
    return said and measured


def _tell(path: str, write: Callable[[], None], expected: str, step: str) -> bool:
    try:
        write()
    except OSError as error:
        said = sentences(f"{path} cannot be written ({error})", expected, step)
        sys.stderr.write(f"{socket.gethostname()}: {said}\n")
        return False
    return True
