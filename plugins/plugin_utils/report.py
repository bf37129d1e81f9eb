# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The farm's report as one document of data.

C(build) puts the answers of the nodes and of Nomad together, and adds one line to the history. Nothing here needs
Ansible or touches the machine. It runs on the control node only, in a filter.

A host that gave no answer stays in the report with the reason. What nobody told is null and never guessed: sums and
shares say of how many GPUs they are.

The document (schema 1); times are ISO 8601 in UTC
    C(schema), C(title), C(made_at), C(currency), C(productivity)
    C(summary)
        C(nodes), C(nodes_answered), C(nodes_unanswered); C(gpus), C(gpus_expected) (null when no host says it);
        C(verdicts) of GPUs: C(critical), C(warning), C(ok), C(unknown) to numbers; C(node_verdicts) likewise;
        C(mig_devices); C(allocated_gpus) (MIG devices count as the share of their GPU, null without Nomad);
        C(utilization_percent) (mean) of C(utilization_gpus) GPUs that told it; C(power_draw_w) (sum) of C(power_gpus)
        GPUs that told it; C(memory_used_mib) and C(memory_total_mib)
    C(nomad)
        C(answered), C(server), C(asked_at), C(failures) as a list of C(server) and C(reason)
    C(notices)
        what could not be asked or used, each with C(found), C(expected) and C(action)
    C(nodes), sick ones first
        C(name), C(nomad_name), C(asked_at), C(state) (answered, unreachable, failed, not_asked, not_in_inventory),
        C(reason) (null when answered), C(verdict) (critical, warning, ok, unknown), C(platform), C(driver_version),
        C(cuda_version), C(gpus_expected), C(utilization_percent), C(power_draw_w), C(allocated_gpus);
        C(nomad): null, or C(id), C(status), C(eligibility), C(drain), C(datacenter), C(node_pool), C(version),
        C(reason);
        C(problems): C(code), C(severity), C(uuid), C(pci_bus_id), C(found), C(expected), C(action), C(message),
        C(source) (node or nomad);
        C(gpus): C(index), C(uuid), C(model), C(pci_bus_id), C(source) (nvidia-smi, or nomad for what Nomad last knew of
        a host that gave no answer), C(verdict), C(memory_total_mib), C(memory_used_mib), C(utilization_gpu_percent),
        C(power_draw_w), C(power_limit_w), C(temperature_gpu_c), C(vbios_version), C(gsp_firmware_version),
        C(nomad_driver_version), C(mig_mode), C(mig_mode_pending), C(in_nomad) (null without Nomad), C(allocated_share)
        (0 to 1, null without Nomad), C(allocations), C(processes) (null where they cannot be seen), C(mig_devices) with
        C(uuid), C(profile), C(memory_total_mib), C(allocation)
    C(drift), by platform and model
        C(platform), C(model), C(gpus), C(nodes), C(fields): C(field), C(agrees), C(majority), C(values) as C(value),
        C(gpus), C(nodes) (names), the majority first, and C(unknown_gpus)
    C(mig)
        C(gpus): C(node), C(index), C(model), C(mode), C(pending), C(devices); C(profiles): C(model), C(profile),
        C(devices), C(allocated) (null without Nomad)
    C(users)
        C(jobs): C(namespace), C(job_id), C(devices), C(gpus) (shares added up), C(models), C(nodes) (names),
        C(allocations) (number), C(utilization_percent), C(power_draw_w) (of whole GPUs); C(outside): C(program),
        C(gpus), C(memory_used_mib), C(nodes), for processes on GPUs that no allocation holds
    C(cost)
        C(models): C(model), C(gpus), C(gpus_critical), C(relative_throughput), C(throughput), C(price_per_hour),
        C(cost_per_hour), C(return) = throughput x productivity / cost per hour, C(allocated_gpus), C(utilized_gpus)
        (utilisation added up) of C(utilization_gpus) GPUs that told it, C(idle_cost_per_hour) (held by no job),
        C(unused_cost_per_hour) (the part that did not compute), C(return_allocated), C(return_utilized); money is in
        C(currency). C(total): the same sums over the models that have both numbers. C(unpriced): names of models
        without them. C(unmatched): names that the user gave and no GPU has.
    C(history)
        C(path), C(points): C(made_at), C(gpus), C(utilization_percent), C(power_draw_w), C(allocated_gpus)

The history is a file of JSON lines, one for each run, the newest last. A line has C(made_at), C(gpus),
C(allocated_gpus), C(utilization_sum_percent) of C(utilization_gpus) GPUs, C(power_draw_w) of C(power_gpus) GPUs, and
C(nodes): name to the same sums. Old lines lose C(nodes) when the file would get larger than HISTORY_BYTES.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import posixpath
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils import nomad as nomad_api
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi import normal_bus_id

SCHEMA = 1
HISTORY_LINES = 500
HISTORY_BYTES = 4 << 20
VERDICTS = ("critical", "unknown", "warning", "ok")
"""From what needs a look first to what needs none."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What the user asked for."""

    title: str = "GPU farm"
    currency: str = "EUR"
    productivity: float = 1.0
    models: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    history_path: str | None = None


@dataclasses.dataclass(frozen=True)
class Price:
    """What the user says of one GPU model; None where nothing usable was said."""

    relative_throughput: float | None
    price_per_hour: float | None


@dataclasses.dataclass(frozen=True)
class NomadView:
    """What the first server that answered knows."""

    server: str
    asked_at: str | None
    nodes: list[dict[str, Any]]
    reasons: Mapping[str, str]


# --- small sums ------------------------------------------------------------------------------


def known_numbers(values: Iterable[Any]) -> list[float]:
    return [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]


def mean(values: Iterable[Any]) -> float | None:
    known = known_numbers(values)
    return round(sum(known) / len(known), 1) if known else None


def total(values: Iterable[Any], digits: int = 2) -> float | None:
    known = known_numbers(values)
    return round(sum(known), digits) if known else None


def natural_key(text: str) -> list[tuple[int, int, str]]:
    """Sorts gpu2 before gpu10 and driver 570.9 before 570.86."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.findall(r"[0-9]{1,18}|[^0-9]+", text)]


def _one_line(text: Any) -> str:
    return " ".join(str(text).split())


# --- the answers of the nodes and of Nomad -----------------------------------------------------


def failure_reason(result: Mapping[str, Any]) -> str:
    """Why a task gave no answer, in one line: Ansible's message, or the end of what the module wrote."""
    for key in ("msg", "module_stderr", "module_stdout", "exception"):
        text = str(result.get(key) or "").strip()
        if text and not text.startswith("MODULE FAILURE"):
            return _one_line(text if key == "msg" else text.splitlines()[-1])
    return _one_line(result.get("msg") or "no reason was given")


def state_of(answer: Mapping[str, Any] | None) -> tuple[str, str | None]:
    """Whether a host answered, and if not, why."""
    health = (answer or {}).get("health")
    if not health:
        return "not_asked", "it was left out of this run (--limit), or failed before it could be asked"
    if health.get("unreachable"):
        return "unreachable", failure_reason(health)
    if "verdict" not in health:
        return "failed", failure_reason(health)
    return "answered", None


def nomad_view(servers: Sequence[Mapping[str, Any]]) -> tuple[NomadView | None, list[dict[str, str]]]:
    """The first server that answered, and those before it that did not."""
    failures: list[dict[str, str]] = []
    for entry in servers:
        result = entry.get("result") or {}
        if isinstance(result.get("nodes"), Sequence):
            view = NomadView(entry["server"], entry.get("asked_at"), list(result["nodes"]), entry.get("reasons") or {})
            return view, failures
        failures.append({"server": str(entry.get("server")), "reason": failure_reason(result)})
    return None, failures


def _health_keys(gpu: Mapping[str, Any]) -> list[str]:
    keys = [str(gpu.get("uuid") or "").lower(), normal_bus_id(gpu.get("pci_bus_id")) or ""]
    return [key for key in keys if key]


def _is_mig(gpu: Mapping[str, Any]) -> bool:
    return gpu.get("mig_mode") == "Enabled"


def _allocation(device: Mapping[str, Any] | None) -> dict[str, Any] | None:
    found = (device or {}).get("allocation")
    return dict(found) if found else None


def _allocated_share(devices: Sequence[Mapping[str, Any]]) -> float:
    """How much of a GPU its MIG devices hold; by their memory, or by their number where that is unknown."""
    if not devices:
        return 0.0
    sizes = [device["memory_total_mib"] for device in devices]
    weights = sizes if all(sizes) else [1] * len(devices)
    held = sum(weight for weight, device in zip(weights, devices, strict=True) if device["allocation"])
    return float(round(held / sum(weights), 4))


def _gpu(
    found: Mapping[str, Any], verdict: str, devices: Mapping[str, Mapping[str, Any]] | None, source: str
) -> dict[str, Any]:
    """One GPU from nvidia-smi's facts and from Nomad's devices by UUID (None without Nomad)."""
    known = devices or {}
    own = known.get(str(found.get("uuid")).lower())
    migs = [
        {
            "uuid": device.get("uuid"),
            "profile": device.get("profile"),
            "memory_total_mib": device.get("memory_total_mib"),
            "allocation": _allocation(known.get(str(device.get("uuid")).lower())),
        }
        for device in found.get("mig_devices") or []
    ]
    whole = _allocation(own)
    listed = [known[str(mig["uuid"]).lower()] for mig in migs if str(mig["uuid"]).lower() in known]
    listed += [own] if own else []
    gpu = {
        "index": found.get("index"),
        "uuid": found.get("uuid"),
        "model": found.get("name"),
        "pci_bus_id": found.get("pci_bus_id"),
        "source": source,
        "verdict": verdict,
        **{
            key: found.get(key)
            for key in (
                "memory_total_mib",
                "memory_used_mib",
                "utilization_gpu_percent",
                "power_draw_w",
                "power_limit_w",
                "temperature_gpu_c",
                "vbios_version",
                "gsp_firmware_version",
                "mig_mode",
                "mig_mode_pending",
                "processes",
            )
        },
        "nomad_driver_version": listed[0].get("driver_version") if listed else None,
        "in_nomad": None if devices is None else bool(listed),
        "allocations": [held for held in [*(mig["allocation"] for mig in migs), whole] if held],
        "mig_devices": migs,
    }
    # Nomad lists a GPU as a whole for a while after MIG was switched on.
    gpu["allocated_share"] = None if devices is None else 1.0 if whole else _allocated_share(migs)
    return gpu


def _gpus_of_answer(
    health: Mapping[str, Any], devices: Mapping[str, Mapping[str, Any]] | None
) -> tuple[list[dict[str, Any]], list[Mapping[str, Any]]]:
    """The GPUs of an answer for the report, and as nvidia-smi told them."""
    told = list((health.get("nvidia_smi") or {}).get("gpus") or [])
    judged = list(health.get("gpus") or [])
    by_key = {key: gpu for gpu in judged for key in _health_keys(gpu)}
    seen = {key for gpu in told for key in _health_keys(gpu)}
    # A GPU that only the health check knows of, such as one that fell off the bus, must not vanish.
    told += [gpu for gpu in judged if not seen.intersection(_health_keys(gpu))]
    gpus = []
    for found in told:
        match = next((by_key[key] for key in _health_keys(found) if key in by_key), None)
        verdict = str((match or {}).get("verdict") or ("ok" if found.get("status", "ok") == "ok" else "critical"))
        gpus.append(_gpu(found, verdict if verdict in VERDICTS else "unknown", devices, "nvidia-smi"))
    return gpus, told


def _gpus_of_nomad(node: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What Nomad last knew of a host that gave no answer; MIG devices are put together by their PCI address."""
    devices = {str(device["uuid"]).lower(): device for device in node["gpus"]}
    gpus: list[dict[str, Any]] = []
    parents: dict[str, dict[str, Any]] = {}
    for device in node["gpus"]:
        if not device.get("mig"):
            facts = {
                "uuid": device["uuid"],
                "name": device["model"],
                "pci_bus_id": device.get("pci_bus_id"),
                "memory_total_mib": device.get("memory_mib"),
            }
            gpus.append(_gpu(facts, "unknown", devices, "nomad"))
            continue
        bus = device.get("pci_bus_id")
        # Without an address nothing says which MIG devices share a GPU.
        key = normal_bus_id(bus) or device["uuid"]
        parent = parents.setdefault(
            key,
            {
                "name": re.sub(r"\s*\bMIG \S+.*$", "", device["model"]) or device["model"],
                "pci_bus_id": bus,
                "mig_mode": "Enabled",
                "mig_devices": [],
            },
        )
        parent["mig_devices"].append({"uuid": device["uuid"], "profile": device.get("mig_profile")})
    return gpus + [_gpu(parent, "unknown", devices, "nomad") for parent in parents.values()]


def _wanted_of_nomad(name: str, told: Sequence[Mapping[str, Any]], driver: str | None) -> nomad_api.Expected:
    """What Nomad should list for a host that answered; None where a driver does not tell UUIDs of MIG devices."""
    uuids: list[str] | None = []
    for gpu in told:
        if gpu.get("status", "ok") != "ok" or not gpu.get("uuid"):
            continue
        own = [device.get("uuid") for device in gpu.get("mig_devices") or []] if _is_mig(gpu) else [gpu["uuid"]]
        uuids = None if uuids is None or not all(own) else uuids + [str(uuid) for uuid in own]
    return nomad_api.Expected(
        node=name,
        uuids=None if uuids is None else tuple(uuids),
        # With nothing that works there is nothing to be listed with a version.
        driver_version=driver if uuids is None or uuids else None,
    )


def _problem_of_node(found: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("code", "severity", "uuid", "pci_bus_id", "found", "expected", "action", "message")
    return {**{key: found.get(key) for key in keys}, "source": "node"}


def _problem_of_nomad(found: nomad_api.Problem, uuids: Iterable[str]) -> dict[str, Any]:
    words = f"{found.found} {found.expected}".lower()
    named = [uuid for uuid in uuids if uuid.lower() in words]
    return {
        "code": found.code,
        "severity": "warning",
        "uuid": named[0] if len(named) == 1 else None,
        "pci_bus_id": None,
        "found": found.found,
        "expected": found.expected,
        "action": found.message.partition("Next step: ")[2].rstrip("."),
        "message": found.message,
        "source": "nomad",
    }


def _nomad_of_node(node: Mapping[str, Any], reasons: Mapping[str, str]) -> dict[str, Any]:
    keys = ("id", "status", "eligibility", "drain", "datacenter", "node_pool", "version")
    reason = (node.get("meta") or {}).get("gpufarm_gate_reason") or reasons.get(str(node.get("id")))
    return {**{key: node.get(key) for key in keys}, "reason": reason or None}


def _living(candidates: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    return next((node for node in candidates if node["status"] != "down"), candidates[0] if candidates else None)


def _worse(*verdicts: str) -> str:
    return min(verdicts, key=VERDICTS.index)


def _nodes(hosts: Sequence[str], answers: Sequence[Mapping[str, Any]], view: NomadView | None) -> list[dict[str, Any]]:
    by_host = {answer["name"]: answer for answer in answers}
    by_name: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for known in view.nodes if view else []:
        by_name[known["name"]].append(known)
    nodes = []
    wanted = []
    for host in hosts:
        answer = by_host.get(host)
        name = str((answer or {}).get("nomad_name") or host)
        known_node = _living(by_name.get(name, []))
        node, told = _node(host, name, answer, known_node, view)
        nodes.append(node)
        driver = node["driver_version"]
        wanted.append(
            _wanted_of_nomad(name, told, driver) if node["state"] == "answered" else nomad_api.Expected(node=name)
        )
    if view:
        _add_nomads_problems(nodes, wanted, view)
        names = {node["nomad_name"] for node in nodes}
        for name, candidates in by_name.items():
            extra = _living(candidates)
            if extra and extra["gpus"] and extra["status"] != "down" and name not in names:
                nodes.append(_node_outside(name, extra, view))
    return sorted(nodes, key=lambda node: (VERDICTS.index(node["verdict"]), natural_key(node["name"])))


def _node(
    host: str,
    name: str,
    answer: Mapping[str, Any] | None,
    known: Mapping[str, Any] | None,
    view: NomadView | None,
) -> tuple[dict[str, Any], list[Mapping[str, Any]]]:
    """One host of the inventory, and its GPUs as nvidia-smi told them."""
    state, reason = state_of(answer)
    health: Mapping[str, Any] = ((answer or {}).get("health") or {}) if state == "answered" else {}
    facts = health.get("nvidia_smi") or {}
    devices = None if view is None else {str(gpu["uuid"]).lower(): gpu for gpu in (known or {}).get("gpus") or []}
    told: list[Mapping[str, Any]] = []
    if state == "answered":
        gpus, told = _gpus_of_answer(health, devices)
        verdict = health["verdict"] if health["verdict"] in VERDICTS else "unknown"
    else:
        gpus, verdict = (_gpus_of_nomad(known) if known else []), "unknown"
    node = {
        "name": host,
        "nomad_name": name,
        "asked_at": (answer or {}).get("asked_at"),
        "state": state,
        "reason": reason,
        "verdict": verdict,
        "platform": facts.get("platform"),
        "driver_version": facts.get("driver_version"),
        "cuda_version": facts.get("cuda_version"),
        "gpus_expected": (answer or {}).get("gpus_expected"),
        "nomad": _nomad_of_node(known, view.reasons) if known and view else None,
        "problems": [_problem_of_node(problem) for problem in health.get("problems") or []],
        "gpus": gpus,
    }
    _sum_up(node)
    return node, told


def _node_outside(name: str, known: Mapping[str, Any], view: NomadView) -> dict[str, Any]:
    node = {
        "name": name,
        "nomad_name": name,
        "asked_at": None,
        "state": "not_in_inventory",
        "reason": "Nomad lists it with GPUs, and no host of the group gpu_nodes has this name",
        "verdict": "unknown",
        "platform": None,
        "driver_version": None,
        "cuda_version": None,
        "gpus_expected": None,
        "nomad": _nomad_of_node(known, view.reasons),
        "problems": [],
        "gpus": _gpus_of_nomad(known),
    }
    _sum_up(node)
    return node


def _sum_up(node: dict[str, Any]) -> None:
    gpus = node["gpus"]
    node["utilization_percent"] = mean(gpu["utilization_gpu_percent"] for gpu in gpus)
    node["power_draw_w"] = total(gpu["power_draw_w"] for gpu in gpus)
    node["allocated_gpus"] = total((gpu["allocated_share"] for gpu in gpus), 4)


def _add_nomads_problems(nodes: list[dict[str, Any]], wanted: list[nomad_api.Expected], view: NomadView) -> None:
    """Judge Nomad as nomad_gpu_verify does, so that both say the same in the same words."""
    actual = [
        nomad_api.ActualNode(
            id=known["id"],
            name=known["name"],
            status=known["status"],
            eligibility=known["eligibility"],
            drain=known["drain"],
            created=0,
            gpus=known["gpus"],
        )
        for known in view.nodes
    ]
    by_name: dict[str, list[nomad_api.Problem]] = defaultdict(list)
    for verdict in nomad_api.compare(wanted, actual):
        for problem in verdict.problems:
            by_name[verdict.name].append(problem)
    for node in nodes:
        uuids = [gpu["uuid"] for gpu in node["gpus"] if gpu["uuid"]]
        sick = {gpu["uuid"] for gpu in node["gpus"] if gpu["verdict"] == "critical"}
        for problem in by_name.get(node["nomad_name"], []):
            described = _problem_of_nomad(problem, uuids)
            # A GPU that is sick on the node may still be listed; the node's own problem says what is wrong with it.
            if problem.code == "gpu_unexpected" and described["uuid"] in sick:
                continue
            node["problems"].append(described)
            node["verdict"] = _worse(node["verdict"], "warning")
            for gpu in node["gpus"]:
                if described["uuid"] == gpu["uuid"]:
                    gpu["verdict"] = _worse(gpu["verdict"], "warning")


# --- what is derived from the nodes -------------------------------------------------------------


def _summary(nodes: list[dict[str, Any]], with_nomad: bool) -> dict[str, Any]:
    gpus = [gpu for node in nodes for gpu in node["gpus"]]
    verdicts = Counter(gpu["verdict"] for gpu in gpus)
    node_verdicts = Counter(node["verdict"] for node in nodes)
    utilization = known_numbers(gpu["utilization_gpu_percent"] for gpu in gpus)
    power = known_numbers(gpu["power_draw_w"] for gpu in gpus)
    expected = known_numbers(node["gpus_expected"] for node in nodes)
    return {
        "nodes": len(nodes),
        "nodes_answered": sum(1 for node in nodes if node["state"] == "answered"),
        "nodes_unanswered": sum(1 for node in nodes if node["state"] != "answered"),
        "gpus": len(gpus),
        "gpus_expected": int(sum(expected)) if expected else None,
        "gpus_expected_nodes": len(expected),
        "verdicts": {verdict: verdicts[verdict] for verdict in VERDICTS},
        "node_verdicts": {verdict: node_verdicts[verdict] for verdict in VERDICTS},
        "mig_devices": sum(len(gpu["mig_devices"]) for gpu in gpus),
        "allocated_gpus": round(sum(known_numbers(gpu["allocated_share"] for gpu in gpus)), 2) if with_nomad else None,
        "utilization_percent": mean(utilization),
        "utilization_gpus": len(utilization),
        "power_draw_w": total(power),
        "power_gpus": len(power),
        "memory_used_mib": total(gpu["memory_used_mib"] for gpu in gpus),
        "memory_total_mib": total(gpu["memory_total_mib"] for gpu in gpus),
    }


DRIFT_FIELDS = ("driver_version", "cuda_version", "vbios_version", "gsp_firmware_version", "nomad_driver_version")


def _drift(nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    groups: dict[tuple[str, str], list[tuple[dict[str, Any], dict[str, Any]]]] = defaultdict(list)
    for node in nodes:
        for gpu in node["gpus"]:
            if node["state"] == "answered":
                groups[node["platform"] or "unknown", gpu["model"] or "unknown"].append((node, gpu))
    found = []
    for (platform, model), members in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])):
        fields = []
        for field in DRIFT_FIELDS:
            holders: dict[str, list[str]] = defaultdict(list)
            for node, gpu in members:
                value = gpu[field] if field in gpu else node[field]
                if value is not None:
                    holders[str(value)].append(node["name"])
            # Of two equally frequent versions the newer one is called the majority: it is where the farm goes.
            ordered = sorted(holders, key=natural_key, reverse=True)
            ordered.sort(key=lambda value: -len(holders[value]))
            fields.append(
                {
                    "field": field,
                    "agrees": len(holders) <= 1,
                    "majority": ordered[0] if ordered else None,
                    "values": [
                        {"value": value, "gpus": len(holders[value]), "nodes": list(dict.fromkeys(holders[value]))}
                        for value in ordered
                    ],
                    "unknown_gpus": len(members) - sum(len(names) for names in holders.values()),
                }
            )
        names = {node["name"] for node, _gpu_ in members}
        found.append(
            {"platform": platform, "model": model, "gpus": len(members), "nodes": len(names), "fields": fields}
        )
    return found


def _mig(nodes: list[dict[str, Any]], with_nomad: bool) -> dict[str, Any]:
    gpus = []
    profiles: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for node in nodes:
        for gpu in node["gpus"]:
            pending = gpu["mig_mode_pending"] not in (None, gpu["mig_mode"])
            if not (_is_mig(gpu) or pending or gpu["mig_devices"]):
                continue
            gpus.append(
                {
                    "node": node["name"],
                    "index": gpu["index"],
                    "model": gpu["model"],
                    "mode": gpu["mig_mode"],
                    "pending": gpu["mig_mode_pending"] if pending else None,
                    "devices": gpu["mig_devices"],
                }
            )
            for device in gpu["mig_devices"]:
                key = (gpu["model"] or "unknown", device["profile"] or "not told")
                profiles[key].append(bool(device["allocation"]))
    return {
        "gpus": gpus,
        "profiles": [
            {
                "model": model,
                "profile": profile,
                "devices": len(held),
                "allocated": sum(held) if with_nomad else None,
            }
            for (model, profile), held in sorted(profiles.items())
        ],
    }


def _users(nodes: list[dict[str, Any]]) -> dict[str, Any]:
    jobs: dict[tuple[str, str], list[tuple[str, dict[str, Any], dict[str, Any]]]] = defaultdict(list)
    outside: dict[str, list[tuple[str, str, int | None]]] = defaultdict(list)
    for node in nodes:
        for gpu in node["gpus"]:
            for held in gpu["allocations"]:
                jobs[str(held.get("namespace")), str(held.get("job_id"))].append((node["name"], gpu, held))
            if not gpu["allocations"]:
                for process in gpu["processes"] or []:
                    # Displays draw on every gaming PC; only what computes uses the farm.
                    if "C" in str(process.get("type")):
                        program = posixpath.basename(str(process.get("name") or "").replace("\\", "/")) or "not told"
                        key = str(gpu["uuid"] or gpu["pci_bus_id"])
                        outside[program].append((node["name"], key, process.get("memory_used_mib")))
    found: list[dict[str, Any]] = []
    for (namespace, job), held in jobs.items():
        whole = {str(gpu["uuid"]): gpu for _node_, gpu, _held in held if not gpu["mig_devices"]}
        shares = [_share_of(gpu, allocation) for _node_, gpu, allocation in held]
        found.append(
            {
                "namespace": namespace,
                "job_id": job,
                "devices": len(held),
                "gpus": round(sum(shares), 2),
                "models": sorted({str(gpu["model"]) for _node_, gpu, _held in held}),
                "nodes": sorted({name for name, _gpu_, _held in held}, key=natural_key),
                "allocations": len({allocation.get("id") for _node_, _gpu_, allocation in held}),
                "utilization_percent": mean(gpu["utilization_gpu_percent"] for gpu in whole.values()),
                "power_draw_w": total(gpu["power_draw_w"] for gpu in whole.values()),
            }
        )
    found.sort(key=lambda user: (-user["gpus"], -user["devices"], user["namespace"], user["job_id"]))
    programs: list[dict[str, Any]] = [
        {
            "program": program,
            "gpus": len({key for _node_, key, _memory in used}),
            "memory_used_mib": total(memory for _node_, _key, memory in used),
            "nodes": sorted({name for name, _key, _memory in used}, key=natural_key),
        }
        for program, used in outside.items()
    ]
    return {"jobs": found, "outside": sorted(programs, key=lambda entry: (-entry["gpus"], entry["program"]))}


def _share_of(gpu: Mapping[str, Any], allocation: Mapping[str, Any]) -> float:
    """What one allocation's device is of its GPU."""
    own = [device["memory_total_mib"] for device in gpu["mig_devices"] if device["allocation"] == allocation]
    if not own:
        return 1.0
    sizes = [device["memory_total_mib"] for device in gpu["mig_devices"]]
    if not all(sizes):
        return 1 / len(sizes)
    # Two devices of one task are two entries here, each of which stands for its part.
    return float(sum(own) / len(own) / sum(sizes))


def _number(value: Any) -> float | None:
    """A number that money and throughput can be; YAML and extra variables also bring numbers as text."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) and number >= 0 else None


def read_prices(models: Any) -> tuple[dict[str, Price], list[dict[str, str]]]:
    """The user's numbers, and a notice for each that cannot be used."""
    example = "{'Tesla T4': {'relative_throughput': 0.3, 'price_per_hour': 0.4}}"
    if not isinstance(models, Mapping):
        return {}, [
            _notice(f"report_gpu_models is {_one_line(models)!r}", f"models with their numbers, such as {example}")
        ]
    prices = {}
    notices = []
    for model, given in models.items():
        if not isinstance(given, Mapping):
            notices.append(
                _notice(f"report_gpu_models has {_one_line(given)!r} for {model}", f"two numbers, such as {example}")
            )
            given = {}  # noqa: PLW2901
        for key in set(given) - {"relative_throughput", "price_per_hour"}:
            notices.append(
                _notice(
                    f"report_gpu_models has the key {_one_line(key)!r} for {model}",
                    "relative_throughput and price_per_hour",
                )
            )
        numbers = {}
        for key in ("relative_throughput", "price_per_hour"):
            numbers[key] = _number(given.get(key))
            if given.get(key) is not None and numbers[key] is None:
                notices.append(
                    _notice(
                        f"report_gpu_models has {_one_line(given[key])!r} as {key} of {model}", "a number from 0 on"
                    )
                )
        prices[str(model)] = Price(**numbers)
    return prices, notices


def _notice(
    found: str, expected: str, action: str = "correct the variable and make the report again"
) -> dict[str, str]:
    return {"found": found, "expected": expected, "action": action}


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else round(above / below, 4)


def _times(*factors: float | None) -> float | None:
    product = 1.0
    for factor in factors:
        if factor is None:
            return None
        product *= factor
    return round(product, 4)


def _cost(
    nodes: list[dict[str, Any]], prices: Mapping[str, Price], productivity: float, with_nomad: bool
) -> dict[str, Any]:
    by_model: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for node in nodes:
        for gpu in node["gpus"]:
            by_model[gpu["model"] or "unknown"].append(gpu)
    rows = [
        _cost_row(model, gpus, prices.get(model, Price(None, None)), productivity, with_nomad)
        for model, gpus in sorted(by_model.items(), key=lambda item: (-len(item[1]), item[0]))
    ]
    priced = [row for row in rows if row["relative_throughput"] is not None and row["price_per_hour"] is not None]
    return {
        "models": rows,
        "total": _cost_total(priced, productivity) if priced else None,
        "unpriced": [row["model"] for row in rows if row not in priced],
        "unmatched": sorted(set(prices) - set(by_model)),
    }


def _cost_row(
    model: str, gpus: list[dict[str, Any]], price: Price, productivity: float, with_nomad: bool
) -> dict[str, Any]:
    count = len(gpus)
    allocated = round(sum(known_numbers(gpu["allocated_share"] for gpu in gpus)), 4) if with_nomad else None
    told = known_numbers(gpu["utilization_gpu_percent"] for gpu in gpus)
    utilized = round(sum(told) / 100, 4) if told else None
    throughput = _times(count, price.relative_throughput)
    cost = _times(count, price.price_per_hour)
    gain = _ratio(_times(throughput, productivity), cost)
    return {
        "model": model,
        "gpus": count,
        "gpus_critical": sum(1 for gpu in gpus if gpu["verdict"] == "critical"),
        "relative_throughput": price.relative_throughput,
        "throughput": throughput,
        "price_per_hour": price.price_per_hour,
        "cost_per_hour": cost,
        "return": gain,
        "allocated_gpus": allocated,
        "utilized_gpus": utilized,
        "utilization_gpus": len(told),
        "idle_cost_per_hour": _times(price.price_per_hour, None if allocated is None else count - allocated),
        "unused_cost_per_hour": _times(price.price_per_hour, None if utilized is None else len(told) - utilized),
        "return_allocated": _times(gain, _ratio(allocated, count)),
        "return_utilized": _times(gain, _ratio(utilized, len(told))),
    }


def _cost_total(rows: list[dict[str, Any]], productivity: float) -> dict[str, Any]:
    def weighted(share: str, of: str) -> float | None:
        """Throughput that is used: each model's own share of its own throughput; None when one model's is unknown."""
        parts = [_times(row["throughput"], _ratio(row[share], row[of])) for row in rows]
        return None if any(part is None for part in parts) else sum(part for part in parts if part is not None)

    def complete(key: str) -> float | None:
        return None if any(row[key] is None for row in rows) else round(sum(row[key] for row in rows), 4)

    cost = complete("cost_per_hour")
    return {
        "gpus": sum(row["gpus"] for row in rows),
        "gpus_critical": sum(row["gpus_critical"] for row in rows),
        "throughput": complete("throughput"),
        "cost_per_hour": cost,
        "return": _ratio(_times(complete("throughput"), productivity), cost),
        "allocated_gpus": complete("allocated_gpus"),
        "utilized_gpus": complete("utilized_gpus"),
        "utilization_gpus": sum(row["utilization_gpus"] for row in rows),
        "idle_cost_per_hour": complete("idle_cost_per_hour"),
        "unused_cost_per_hour": complete("unused_cost_per_hour"),
        "return_allocated": _ratio(_times(weighted("allocated_gpus", "gpus"), productivity), cost),
        "return_utilized": _ratio(_times(weighted("utilized_gpus", "utilization_gpus"), productivity), cost),
    }


# --- history -----------------------------------------------------------------------------------


def _sums(gpus: list[dict[str, Any]]) -> dict[str, Any]:
    utilization = known_numbers(gpu["utilization_gpu_percent"] for gpu in gpus)
    power = known_numbers(gpu["power_draw_w"] for gpu in gpus)
    return {
        "gpus": len(gpus),
        "utilization_sum_percent": sum(utilization),
        "utilization_gpus": len(utilization),
        "power_draw_w": round(sum(power), 1),
        "power_gpus": len(power),
    }


def history_line(data: Mapping[str, Any]) -> dict[str, Any]:
    """What one run adds to the history."""
    return {
        "made_at": data["made_at"],
        **_sums([gpu for node in data["nodes"] for gpu in node["gpus"]]),
        "allocated_gpus": data["summary"]["allocated_gpus"],
        "nodes": {node["name"]: _sums(node["gpus"]) for node in data["nodes"]},
    }


_HISTORY_KEYS = ("utilization_sum_percent", "utilization_gpus", "power_draw_w", "power_gpus", "gpus")


def read_history(text: str, path: str | None = None) -> tuple[list[dict[str, Any]], dict[str, str] | None]:
    """The lines of a history, or the notice why it is none; such a file is somebody else's and stays as it is."""
    lines = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            good = isinstance(entry, dict) and all(
                _number(entry.get(key)) is not None and not isinstance(entry[key], str) for key in _HISTORY_KEYS
            )
            if good:
                parse_time(entry["made_at"])
        except (ValueError, KeyError, TypeError, RecursionError):
            good = False
        if not good:
            return [], _notice(
                f"line {number} of {path or 'the history'} is not one of a report's history",
                "a file of JSON lines that only reports wrote, or no file; nothing was written to it",
                "move the file away, or give another report_history",
            )
        lines.append(entry)
    return lines, None


def extend_history(lines: Sequence[Mapping[str, Any]], line: Mapping[str, Any]) -> str:
    """The text of the history with one more line, bounded in lines and in bytes."""
    texts: list[str] = []
    size = 0
    for entry in reversed([*lines, line][-HISTORY_LINES:]):
        text = json.dumps(entry, separators=(",", ":"), sort_keys=False)
        if texts and size + len(text) > HISTORY_BYTES:
            text = json.dumps({key: value for key, value in entry.items() if key != "nodes"}, separators=(",", ":"))
        texts.append(text)
        size += len(text) + 1
    return "".join(f"{text}\n" for text in reversed(texts))


def _points(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "made_at": line["made_at"],
            "gpus": line["gpus"],
            "utilization_percent": (
                round(line["utilization_sum_percent"] / line["utilization_gpus"], 1)
                if line["utilization_gpus"]
                else None
            ),
            "power_draw_w": line["power_draw_w"] if line["power_gpus"] else None,
            "allocated_gpus": line.get("allocated_gpus"),
        }
        for line in sorted(lines, key=lambda line: parse_time(line["made_at"]))
    ]


# --- the document ------------------------------------------------------------------------------


def parse_time(text: str) -> datetime.datetime:
    """A time with its zone, UTC where it has none."""
    found = datetime.datetime.fromisoformat(text)
    return found if found.tzinfo else found.replace(tzinfo=datetime.UTC)


def build(
    hosts: Sequence[str],
    answers: Sequence[Mapping[str, Any]],
    servers: Sequence[Mapping[str, Any]],
    options: Options,
    *,
    made_at: str,
    history: str = "",
) -> tuple[dict[str, Any], str | None]:
    """The document, and the new text of the history; None where the present one must not be written over.

    C(answers) has for each host C(name), C(nomad_name), C(asked_at), C(gpus_expected) and C(health), the registered
    result of nvidia_gpu_health. C(servers) has for each Nomad server that was asked C(server), C(asked_at), C(result),
    the registered result of nomad_gpu_info, and C(reasons), node ID to why the node is closed.
    """
    view, failures = nomad_view(servers)
    nodes = _nodes(hosts, answers, view)
    prices, notices = read_prices(options.models)
    productivity = _number(options.productivity)
    if productivity is None:
        notices.append(
            _notice(f"report_productivity is {_one_line(options.productivity)!r}; 1 was taken", "a number from 0 on")
        )
        productivity = 1.0
    lines, damaged = read_history(history, options.history_path)
    data: dict[str, Any] = {
        "schema": SCHEMA,
        "title": options.title,
        "made_at": made_at,
        "currency": options.currency,
        "productivity": productivity,
        "summary": _summary(nodes, view is not None),
        "nomad": {
            "answered": view is not None,
            "server": view.server if view else None,
            "asked_at": view.asked_at if view else None,
            "failures": failures,
        },
        "notices": _nomad_notices(view, failures) + notices + ([damaged] if damaged else []),
        "nodes": nodes,
        "drift": _drift(nodes),
        "mig": _mig(nodes, view is not None),
        "users": _users(nodes),
        "cost": _cost(nodes, prices, productivity, view is not None),
    }
    line = history_line(data)
    data["history"] = {"path": options.history_path, "points": _points([*lines[-HISTORY_LINES + 1 :], line])}
    return data, None if damaged else extend_history(lines, line)


def _nomad_notices(view: NomadView | None, failures: list[dict[str, str]]) -> list[dict[str, str]]:
    notices = []
    for failure in failures:
        # The modules' own errors say what to do; others, such as Ansible's, only what happened.
        found, _word, rest = failure["reason"].partition(" Expected: ")
        expected, _word, action = rest.partition(" Next step: ")
        notices.append(
            _notice(
                f"Nomad could not be asked on {failure['server']}: {found.rstrip('.')}",
                expected.rstrip(".") or "an answer from each server that was asked",
                action.rstrip(".") or "run playbooks/verify.yml and read 'journalctl -u nomad' on that server",
            )
        )
    if view is None and not failures:
        notices.append(
            _notice(
                "No Nomad server was asked",
                "a host in the group nomad_servers that is part of this run",
                "add the servers to the inventory, or make the report without --limit",
            )
        )
    return notices
