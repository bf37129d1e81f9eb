# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The nodes and their GPUs, from the answers of the hosts and of Nomad."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, cast

from ansible_collections.gpufarm.core.plugins.module_utils import gpu_verdicts, kubernetes, nomad, problem
from ansible_collections.gpufarm.core.plugins.module_utils.pci import normal_bus_id
from ansible_collections.gpufarm.core.plugins.plugin_utils.report.records import (
    VERDICTS,
    Gpu,
    MigDevice,
    Node,
    NodeInKubernetes,
    NodeInNomad,
    NodeSums,
    Problem,
)
from ansible_collections.gpufarm.core.plugins.plugin_utils.report.sums import mean, natural_key, one_line, total

# The region of who names none.
REGION = "global"


class ListedNode(nomad.Node):
    """A node as nomad_gpu_info lists it."""

    closed_for: str | None


class ListedKubernetesNode(kubernetes.Node):
    """A node as kubernetes_gpu_info lists it."""

    closed_for: str | None


@dataclasses.dataclass(frozen=True)
class NomadView:
    """What the first server of a region that answered knows."""

    server: str
    asked_at: str | None
    nodes: list[ListedNode]
    namespaces: list[nomad.NamespaceUse]


@dataclasses.dataclass(frozen=True)
class Cluster:
    """What the host that asked Kubernetes was told; nodes as kubernetes_gpu_info lists them, None without an answer."""

    host: str
    hosts: frozenset[str]
    asked_at: str | None
    nodes: list[ListedKubernetesNode] | None
    failure: str | None


def cluster_of(entry: Mapping[str, Any] | None) -> Cluster | None:
    """The answer of Kubernetes; None where the inventory has no nodes of it."""
    if not entry:
        return None
    result = entry.get("result") or {}
    nodes = result.get("nodes")
    listed = list(nodes) if isinstance(nodes, Sequence) else None
    return Cluster(
        host=str(entry.get("host")),
        hosts=frozenset(entry.get("hosts") or ()),
        asked_at=entry.get("asked_at"),
        nodes=listed,
        failure=None if listed is not None else failure_reason(result),
    )


def failure_reason(result: Mapping[str, Any]) -> str:
    """Why a task gave no answer, in one line: Ansible's message, or the end of what the module wrote."""
    for key in ("msg", "module_stderr", "module_stdout", "exception"):
        text = str(result.get(key) or "").strip()
        if text and not text.startswith("MODULE FAILURE"):
            return one_line(text if key == "msg" else text.splitlines()[-1])
    return one_line(result.get("msg") or "no reason was given")


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


def nomad_views(servers: Sequence[Mapping[str, Any]]) -> tuple[dict[str, NomadView], list[dict[str, str]]]:
    """The first server of each region that answered, and those before it that did not."""
    views: dict[str, NomadView] = {}
    failures: list[dict[str, str]] = []
    for entry in servers:
        region = str(entry.get("region") or REGION)
        result = entry.get("result") or {}
        if region in views:
            continue
        if isinstance(result.get("nodes"), Sequence):
            used = (result.get("usage") or {}).get("namespaces") or []
            views[region] = NomadView(entry["server"], entry.get("asked_at"), list(result["nodes"]), list(used))
        else:
            failures.append({"server": str(entry.get("server")), "region": region, "reason": failure_reason(result)})
    return views, failures


def _health_keys(gpu: Mapping[str, Any]) -> list[str]:
    keys = [str(gpu.get("uuid") or "").lower(), normal_bus_id(gpu.get("pci_bus_id")) or ""]
    return [key for key in keys if key]


def is_mig(gpu: Mapping[str, Any]) -> bool:
    return gpu.get("mig_mode") == "Enabled"


def _allocation(device: Mapping[str, Any] | None) -> dict[str, Any] | None:
    found = (device or {}).get("allocation")
    return dict(found) if found else None


def shares_of(devices: Sequence[MigDevice]) -> list[float]:
    """What each MIG device is of all that its GPU is divided into: all together are 1, whatever was left undivided.

    It goes by their memory, or by their number where that is unknown. Compute instances share the memory of their GPU
    instance, with which nvidia-smi tells each of them, by their slices (2c.3g.71gb has two).
    """
    slices = [int(found[1]) if (found := re.match(r"(\d+)c\.", device["profile"] or "")) else 1 for device in devices]
    # Where its GPU instance is not known, a device is one.
    instances = [device["gpu_instance_id"] for device in devices]
    keys = [number if number is not None else ("unknown", place) for place, number in enumerate(instances)]
    of_instance: dict[Any, int] = defaultdict(int)
    for key, own in zip(keys, slices, strict=True):
        of_instance[key] += own
    sizes = [
        (device["memory_total_mib"] or 0) * own / of_instance[key]
        for device, own, key in zip(devices, slices, keys, strict=True)
    ]
    weights = sizes if all(sizes) else [1.0] * len(devices)
    return [weight / sum(weights) for weight in weights]


def _allocated_share(devices: Sequence[MigDevice]) -> float:
    """How much is held of what a GPU is divided into, without what is hidden."""
    devices = [device for device in devices if not device["hidden"]]
    shares = zip(shares_of(devices), devices, strict=True)
    return float(round(sum(share for share, device in shares if device["allocation"]), 4))


def _gpu(
    found: Mapping[str, Any],
    verdict: str,
    devices: Mapping[str, Mapping[str, Any]] | None,
    source: str,
    ignored: Collection[str] = (),
) -> Gpu:
    """One GPU from nvidia-smi's facts and from Nomad's devices by UUID (None without Nomad)."""
    known = devices or {}

    def is_hidden(uuid: Any) -> bool | None:
        # Where Nomad has it all the same, it counts, and its problem tells.
        return None if devices is None else str(uuid).lower() in ignored and str(uuid).lower() not in devices

    own = known.get(str(found.get("uuid")).lower())
    migs: list[MigDevice] = [
        {
            "uuid": device.get("uuid"),
            "profile": device.get("profile"),
            "memory_total_mib": device.get("memory_total_mib"),
            "gpu_instance_id": device.get("gpu_instance_id"),
            "hidden": is_hidden(device.get("uuid")),
            "allocation": _allocation(known.get(str(device.get("uuid")).lower())),
            "benchmark": None,
        }
        for device in found.get("mig_devices") or []
    ]
    whole = _allocation(own)
    listed = [known[str(mig["uuid"]).lower()] for mig in migs if str(mig["uuid"]).lower() in known]
    listed += [own] if own else []
    # The device plugin hides MIG devices by their own UUIDs.
    hidden = (
        not own and all(mig["hidden"] for mig in migs) if migs and devices is not None else is_hidden(found.get("uuid"))
    )
    # Nomad lists a GPU as a whole for a while after MIG was switched on.
    share = None if devices is None or hidden else 1.0 if whole else _allocated_share(migs)
    return {
        "index": found.get("index"),
        "uuid": found.get("uuid"),
        "serial": found.get("serial"),
        "model": found.get("name"),
        "pci_bus_id": found.get("pci_bus_id"),
        "source": source,
        "verdict": verdict,
        "memory_total_mib": found.get("memory_total_mib"),
        "memory_used_mib": found.get("memory_used_mib"),
        "utilization_gpu_percent": found.get("utilization_gpu_percent"),
        "power_draw_w": found.get("power_draw_w"),
        "power_limit_w": found.get("power_limit_w"),
        "temperature_gpu_c": found.get("temperature_gpu_c"),
        "vbios_version": found.get("vbios_version"),
        "gsp_firmware_version": found.get("gsp_firmware_version"),
        "nomad_driver_version": listed[0].get("driver_version") if listed else None,
        "mig_mode": found.get("mig_mode"),
        "mig_mode_pending": found.get("mig_mode_pending"),
        "in_nomad": None if devices is None else bool(listed),
        "hidden": hidden,
        "allocated_share": share,
        "allocations": [held for held in [*(mig["allocation"] for mig in migs), whole] if held],
        "processes": found.get("processes"),
        "numa_node": found.get("numa_node"),
        "far_cpus": _far_cpus(found),
        "mig_devices": migs,
        "benchmark": None,
    }


def _cpus(listed: str) -> set[int]:
    """CPUs as the kernel lists them, such as 0-15,32."""
    ends = [part.partition("-")[::2] for part in listed.split(",") if part]
    return {cpu for first, last in ends for cpu in range(int(first), int(last or first) + 1)}


def _far_cpus(found: Mapping[str, Any]) -> list[str]:
    """Where processes run that are kept off every CPU next to their GPU; one that may run anywhere is none."""
    near = found.get("cpu_affinity")
    listed = {process.get("cpu_affinity") for process in found.get("processes") or []} - {None}
    return sorted(cpus for cpus in listed if near and not _cpus(near) & _cpus(cpus))


def _gpus_of_answer(
    health: Mapping[str, Any], devices: Mapping[str, Mapping[str, Any]] | None, ignored: Collection[str]
) -> tuple[list[Gpu], list[Mapping[str, Any]]]:
    """The GPUs of an answer for the report, and as nvidia-smi told them."""
    told = [(gpu, _health_keys(gpu)) for gpu in (health.get("nvidia_smi") or {}).get("gpus") or []]
    judged = [(gpu, _health_keys(gpu)) for gpu in health.get("gpus") or []]
    by_key = {key: gpu for gpu, keys in judged for key in keys}
    seen = {key for _own, keys in told for key in keys}
    # A GPU that only the health check knows of, such as one that fell off the bus, must not vanish.
    told += [(gpu, keys) for gpu, keys in judged if not seen.intersection(keys)]
    gpus = []
    for found, keys in told:
        match = next((by_key[key] for key in keys if key in by_key), None)
        verdict = str((match or {}).get("verdict") or ("ok" if found.get("status", "ok") == "ok" else "critical"))
        gpus.append(_gpu(found, verdict if verdict in VERDICTS else "unknown", devices, "nvidia-smi", ignored))
    return gpus, [found for found, _keys in told]


def _gpus_of_nomad(node: nomad.Node) -> list[Gpu]:
    """What Nomad last knew of a host that gave no answer; MIG devices are put together by their PCI address."""
    devices = {device["uuid"].lower(): device for device in node["gpus"]}
    gpus: list[Gpu] = []
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


def _wanted(name: str, node: Node, told: Sequence[Mapping[str, Any]], ignored: Collection[str]) -> nomad.Expected:
    """What Nomad should have of a host; no UUIDs where a driver lists MIG devices and does not tell theirs."""
    if node["state"] != "answered":
        return nomad.Expected(node=name)
    driver = node["driver_version"]
    uuids: list[str] | None = []
    unknown = tuple(gpu.get("uuid") or "" for gpu in told if is_mig(gpu) and gpu.get("mig_devices") is None)
    for gpu in told:
        if gpu.get("status", "ok") != "ok" or not gpu.get("uuid"):
            continue
        own = [device.get("uuid") for device in gpu.get("mig_devices") or []] if is_mig(gpu) else [gpu["uuid"]]
        shown = [str(uuid) for uuid in own if str(uuid).lower() not in ignored]
        uuids = None if uuids is None or not all(own) else uuids + shown
    return nomad.Expected(
        node=name,
        uuids=None if uuids is None else tuple(uuids),
        # With nothing that works there is nothing to be listed with a version.
        driver_version=driver if uuids is None or uuids or unknown else None,
        mig_unknown=unknown,
    )


def _problem_of_node(found: Mapping[str, Any]) -> Problem:
    keys = ("code", "severity", "uuid", "pci_bus_id", "found", "expected", "action", "message")
    return cast(Problem, {**{key: found.get(key) for key in keys}, "source": "node"})


def _problem_of(source: str, found: problem.Problem, gpus: Iterable[Gpu]) -> Problem:
    # Until driver 470 the UUID of a MIG device has that of its GPU in it.
    named = (found.uuid or "").lower()
    return {
        "code": found.code,
        "severity": "warning",
        "uuid": next((gpu["uuid"] for gpu in gpus if gpu["uuid"] and gpu["uuid"].lower() in named), None),
        "pci_bus_id": None,
        "found": found.found,
        "expected": found.expected,
        "action": found.message.partition("Next step: ")[2].rstrip("."),
        "message": found.message,
        "source": source,
    }


def _nomad_of_node(node: ListedNode) -> NodeInNomad:
    return {
        "id": node["id"],
        "status": node["status"],
        "eligibility": node["eligibility"],
        "drain": node["drain"],
        "datacenter": node["datacenter"],
        "node_pool": node["node_pool"],
        "version": node["version"],
        "reason": node["closed_for"],
    }


def _worse(*verdicts: str) -> str:
    return min(verdicts, key=VERDICTS.index)


def nodes_of(
    hosts: Mapping[str, str | None],
    answers: Sequence[Mapping[str, Any]],
    views: Mapping[str, NomadView],
    cluster: Cluster | None = None,
) -> list[Node]:
    """The nodes of hosts by their regions; those of none are in Kubernetes alone."""
    nodes = []
    for region in sorted({*hosts.values(), *views}, key=str):
        inside = [host for host, other in hosts.items() if other == region]
        nodes += _nodes_of_region(region, inside, answers, None if region is None else views.get(region))
    if cluster:
        _add_kubernetes(nodes, answers, cluster)
    return sorted(nodes, key=lambda node: (VERDICTS.index(node["verdict"]), natural_key(node["name"])))


def _nodes_of_region(
    region: str | None, hosts: Sequence[str], answers: Sequence[Mapping[str, Any]], view: NomadView | None
) -> list[Node]:
    by_host = {answer["name"]: answer for answer in answers}
    by_name: dict[str, ListedNode] = {}
    for known in view.nodes if view else []:
        by_name[known["name"]] = max(by_name.get(known["name"], known), known, key=nomad.rank)
    nodes = []
    wanted = []
    for host in hosts:
        answer = by_host.get(host)
        name = str((answer or {}).get("nomad_name") or host)
        ignored = {str(uuid).lower() for uuid in (answer or {}).get("ignored") or ()}
        node, told = _node(host, name, region, answer, known=by_name.get(name), view=view, ignored=ignored)
        nodes.append(node)
        wanted.append(_wanted(name, node, told, ignored))
    if view and region is not None:
        _add_nomads_problems(nodes, wanted, view)
        names = {node["nomad_name"] for node in nodes}
        for name, extra in by_name.items():
            if extra["gpus"] and extra["status"] != "down" and name not in names:
                nodes.append(_node_outside(name, region, extra))
    return nodes


def _node(
    host: str,
    name: str,
    region: str | None,
    answer: Mapping[str, Any] | None,
    *,
    known: ListedNode | None,
    view: NomadView | None,
    ignored: Collection[str],
) -> tuple[Node, list[Mapping[str, Any]]]:
    """One host of the inventory, and its GPUs as nvidia-smi told them."""
    state, reason = state_of(answer)
    health: Mapping[str, Any] = ((answer or {}).get("health") or {}) if state == "answered" else {}
    facts = health.get("nvidia_smi") or {}
    devices = None if view is None else {gpu["uuid"].lower(): gpu for gpu in (known["gpus"] if known else [])}
    told: list[Mapping[str, Any]] = []
    if state == "answered":
        gpus, told = _gpus_of_answer(health, devices, ignored)
        verdict = health["verdict"] if health["verdict"] in VERDICTS else "unknown"
    else:
        gpus, verdict = (_gpus_of_nomad(known) if known else []), "unknown"
    node: Node = {
        "name": host,
        "nomad_name": name,
        "region": region,
        "asked_at": (answer or {}).get("asked_at"),
        "state": state,
        "reason": reason,
        "verdict": verdict,
        "platform": facts.get("platform"),
        "driver_version": facts.get("driver_version"),
        "cuda_version": facts.get("cuda_version"),
        "gpus_expected": (answer or {}).get("gpus_expected"),
        "nomad": _nomad_of_node(known) if known else None,
        "in_kubernetes": False,
        "kubernetes": None,
        "problems": [_problem_of_node(problem) for problem in health.get("problems") or []],
        "gpus": gpus,
        **_sums_of(gpus),
    }
    return node, told


def _node_outside(name: str, region: str, known: ListedNode) -> Node:
    gpus = _gpus_of_nomad(known)
    return {
        "name": name,
        "nomad_name": name,
        "region": region,
        "asked_at": None,
        "state": "not_in_inventory",
        "reason": "Nomad lists it with GPUs, and no host of the group gpu_nodes"
        + (f" in region {region}" if region != REGION else "")
        + " has this name",
        "verdict": "unknown",
        "platform": None,
        "driver_version": None,
        "cuda_version": None,
        "gpus_expected": None,
        "nomad": _nomad_of_node(known),
        "in_kubernetes": False,
        "kubernetes": None,
        "problems": [],
        "gpus": gpus,
        **_sums_of(gpus),
    }


def _sums_of(gpus: Sequence[Gpu]) -> NodeSums:
    return {
        "utilization_percent": mean(gpu["utilization_gpu_percent"] for gpu in gpus),
        "power_draw_w": total(gpu["power_draw_w"] for gpu in gpus),
        "allocated_gpus": total((gpu["allocated_share"] for gpu in gpus), 4),
    }


def _add_nomads_problems(nodes: list[Node], wanted: list[nomad.Expected], view: NomadView) -> None:
    """Judge Nomad as nomad_gpu_verify does, so that both say the same in the same words."""
    by_name: dict[str, list[problem.Problem]] = defaultdict(list)
    for verdict in nomad.compare(wanted, view.nodes):
        by_name[verdict.name] += verdict.problems
    for node in nodes:
        sick = {gpu["uuid"] for gpu in node["gpus"] if gpu["verdict"] == "critical"}
        for found in by_name.get(node["nomad_name"], []):
            described = _problem_of("nomad", found, node["gpus"])
            # A GPU that is sick on the node may still be listed; the node's own problem says what is wrong with it.
            if found.code == "gpu_unexpected" and described["uuid"] in sick:
                continue
            node["problems"].append(described)
            node["verdict"] = _worse(node["verdict"], "warning")
            for gpu in node["gpus"]:
                if described["uuid"] == gpu["uuid"]:
                    gpu["verdict"] = _worse(gpu["verdict"], "warning")


def may_have_pods(node: Node) -> bool:
    """Whether a process on the node may be a pod's: Kubernetes does not tell which GPUs a pod holds."""
    known = node["kubernetes"]
    return bool(known["devices_used"]) if known else node["in_kubernetes"]


def _in_kubernetes(node: ListedKubernetesNode, gpus: Sequence[Gpu]) -> NodeInKubernetes:
    parts = node["resources"]
    used = sum(part["used"] or 0 for part in parts)
    # With the strategy single, MIG devices have the name of whole GPUs.
    whole = not any(part["shared"] or part["mig_profile"] for part in parts) and not any(map(_is_divided, gpus))
    return {
        "name": node["name"],
        "status": node["status"],
        "schedulable": node["schedulable"],
        "reason": node["closed_for"],
        "version": node["kubelet_version"],
        "devices_allocatable": sum(part["allocatable"] for part in parts),
        "devices_used": used,
        "gpus_used": used if whole or not used else None,
    }


def _is_divided(gpu: Gpu) -> bool:
    return bool(gpu["mig_devices"])


def _add_kubernetes(nodes: list[Node], answers: Sequence[Mapping[str, Any]], cluster: Cluster) -> None:
    """Judge Kubernetes as kubernetes_gpu_verify does, so that both say the same in the same words."""
    by_host = {answer["name"]: answer for answer in answers if answer.get("kubernetes_name")}
    by_name = {node["name"]: node for node in cluster.nodes or []}
    for node in nodes:
        if node["state"] == "not_in_inventory" or node["name"] not in cluster.hosts:
            continue
        node["in_kubernetes"] = True
        answer = by_host.get(node["name"])
        if answer is None or cluster.nodes is None:
            continue
        name = str(answer["kubernetes_name"])
        known = by_name.get(name)
        node["kubernetes"] = _in_kubernetes(known, node["gpus"]) if known else None
        # Of a host that gave no answer, the name in Kubernetes is a guess.
        if known is None and node["state"] != "answered":
            continue
        facts = (answer["health"].get("nvidia_smi") or {}) if node["state"] == "answered" else {}
        told = answer["health"].get("problems") or ()
        # One that is meant to be so is told as a warning, or not at all.
        misses_empty = any((each["code"], each["severity"]) == ("mig_empty", "critical") for each in told)
        wanted = kubernetes.expected_of_facts(facts, name, misses_empty) if facts.get("available") else {"node": name}
        options = {**dict.fromkeys(gpu_verdicts.EXPECTED["options"]), **wanted}
        (verdict,) = kubernetes.compare(gpu_verdicts.read_expected([options]), [known] if known else [])
        for found in verdict.problems:
            node["problems"].append(_problem_of("kubernetes", found, node["gpus"]))
            node["verdict"] = _worse(node["verdict"], "warning")
