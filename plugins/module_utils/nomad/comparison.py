# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the nodes of a farm should have, against what Nomad knows of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils.gpu_verdicts import (
    Expected,
    NodeVerdict,
    counted,
    gpus_in_words,
    may_be,
)
from ansible_collections.gpufarm.core.plugins.module_utils.nomad.nodes import Gpu, Node, lives, rank
from ansible_collections.gpufarm.core.plugins.module_utils.problem import Problem, problem_of


def expected_of_facts(facts: Mapping[str, Any], node: str, ignored: Iterable[str] = ()) -> dict[str, Any]:
    """What Nomad must have of a node with these C(nvidia_smi) facts, as an entry of nomad_gpu_verify's C(expected).

    The plugin lists each MIG device under a name of its own and not the GPU that it is on, so models are those of
    nodes without MIG. It hides the UUIDs in C(ignored). A GPU that the driver could not start may have no UUID and no
    model; Nomad must have it all the same, so it counts. GPUs whose MIG devices nobody tells are named by themselves,
    so that the others are compared all the same. Of a node whose GPUs could not be asked, Nomad must have at least one.
    A KeyError names what the facts lack.
    """
    if not facts["available"]:
        # It must have one at least.
        return {"node": node}
    expected: dict[str, Any] = {"node": node, "driver_version": facts["driver_version"]}
    divided = [gpu for gpu in facts["gpus"] if gpu["mig_mode"] == "Enabled"]
    unknown = [gpu for gpu in divided if gpu["mig_devices"] is None]
    if unknown:
        expected["mig_unknown"] = [gpu["uuid"] or "" for gpu in unknown]
    devices: list[Mapping[str, Any]] = []
    for gpu in facts["gpus"]:
        if gpu in unknown:
            continue
        # A divided GPU without devices is lost to jobs, so it is missing under its own UUID.
        devices += gpu["mig_devices"] or [gpu] if gpu in divided else [gpu]
    hidden = {uuid.lower() for uuid in ignored}
    devices = [device for device in devices if (device["uuid"] or "").lower() not in hidden]
    expected["uuids"] = [device["uuid"] for device in devices if device["uuid"]]
    if len(expected["uuids"]) < len(devices):
        expected["count"] = len(devices)
    if not divided and all(gpu["name"] for gpu in devices):
        expected["models"] = sorted({gpu["name"] for gpu in devices})
    return expected


def compare(
    expected: Iterable[Expected],
    actual: Iterable[Node],
    allow_extra_nodes: bool = True,
    require_eligible: bool = False,
) -> list[NodeVerdict]:
    """Judge every expected node, and those others that must not be as they are; each in the order given."""
    nodes = list(actual)
    by_name: dict[str, list[Node]] = {}
    by_id: dict[str, Node] = {}
    for node in nodes:
        by_name.setdefault(node["name"], []).append(node)
        by_id[node["id"]] = node
    verdicts: list[NodeVerdict] = []
    by_node_id: dict[str, NodeVerdict] = {}
    seen: set[str] = set()
    for wanted in expected:
        candidates = by_name.get(wanted.node) or ([by_id[wanted.node]] if wanted.node in by_id else [])
        verdict = _judge(wanted, candidates, require_eligible)
        verdicts.append(verdict)
        for node in candidates:
            seen.add(node["id"])
            by_node_id[node["id"]] = verdict
    extra: dict[str, NodeVerdict] = {}

    def verdict_of(node: Node) -> NodeVerdict:
        if node["id"] in by_node_id:
            return by_node_id[node["id"]]
        if node["id"] not in extra:
            extra[node["id"]] = NodeVerdict(node["name"], node["id"], node["status"], None, len(node["gpus"]), [])
        return extra[node["id"]]

    if not allow_extra_nodes:
        for node in nodes:
            if node["id"] not in seen and node["gpus"] and node["status"] != "down":
                verdict_of(node).problems.append(_unexpected_node(node))
    for node, problem in _duplicates(nodes):
        verdict_of(node).problems.append(problem)
    return verdicts + list(extra.values())


def extra_gpu_nodes(expected: Iterable[Expected], actual: Iterable[Node]) -> list[str]:
    """Names of living nodes with GPUs that nobody expects, sorted."""
    known = {wanted.node for wanted in expected}
    names = {
        node["name"]
        for node in actual
        if node["gpus"] and node["status"] != "down" and node["name"] not in known and node["id"] not in known
    }
    return sorted(names)


def _judge(wanted: Expected, candidates: list[Node], require_eligible: bool) -> NodeVerdict:
    name = wanted.node
    if not candidates:
        problem = problem_of(
            name,
            "node_missing",
            "no such node",
            "a node of this name in Nomad",
            "check that the Nomad client runs there, reaches the servers and has this name ('nomad node status')",
        )
        return NodeVerdict(name, None, None, wanted.number, 0, [problem])
    # A client that lost its data registers anew; its former self stays listed as down for a day.
    living = [node for node in candidates if lives(node)]
    node = max(candidates, key=rank)
    problems: list[Problem] = []
    if len(living) > 1:
        problems.append(
            problem_of(
                name,
                "node_duplicate",
                f"{len(living)} of them ({', '.join(sorted(each['id'] for each in living))})",
                "one living node of this name",
                "give each machine a name of its own, and never clone Nomad's data_dir",
            )
        )
    if node["status"] != "ready":
        problems.append(
            problem_of(
                name,
                "node_down",
                f"status {node['status'] or 'unknown'}",
                "status ready",
                "look at the Nomad client on the node ('journalctl -u nomad') and at its way to the servers",
            )
        )
    if require_eligible and (node["drain"] or node["eligibility"] != "eligible"):
        problems.append(
            problem_of(
                name,
                "node_ineligible",
                "a node that is being drained" if node["drain"] else f"eligibility {node['eligibility'] or 'unknown'}",
                "a node that takes work",
                f"find out why it was taken out, then run 'nomad node eligibility -enable {node['id']}'",
            )
        )
    problems += _judge_gpus(wanted, node)
    return NodeVerdict(name, node["id"], node["status"], wanted.number, len(node["gpus"]), problems)


def _judge_gpus(wanted: Expected, node: Node) -> list[Problem]:
    name = wanted.node
    if not node["gpus"] and wanted.number != 0:
        return [
            problem_of(
                name,
                "no_devices",
                "no GPU device at all",
                wanted.wish,
                "check nvidia-smi on the node and that the device plugin is in plugin_dir with a plugin block of its "
                "name, then restart Nomad there, because it never retries a plugin that could not load the driver",
            )
        ]
    problems = _judge_uuids(wanted, node) if wanted.uuids is not None else []
    problems += _judge_models(wanted, node)
    found = len(node["gpus"])
    # A list of what is missing says more than two numbers.
    told = problems and (wanted.uuids is not None or wanted.model_counts is not None)
    if not wanted.is_number(found) and not told:
        problems.append(
            problem_of(
                name,
                "count_mismatch",
                gpus_in_words(found),
                wanted.wish,
                "compare with 'nvidia-smi -L' on the node, and restart Nomad there if that is right",
            )
        )
    problems += _judge_mig(wanted, node)
    for gpu in node["gpus"]:
        problems += _judge_gpu(wanted, gpu)
    problems += _judge_driver(wanted, node)
    return problems


def _judge_uuids(wanted: Expected, node: Node) -> list[Problem]:
    there = {gpu["uuid"].lower(): gpu["uuid"] for gpu in node["gpus"]}
    listed = {uuid.lower(): uuid for uuid in wanted.uuids or ()}
    unknown = {uuid.lower() for uuid in wanted.mig_unknown}
    problems = [
        problem_of(
            wanted.node,
            "gpu_missing",
            f"{gpus_in_words(len(there))} without it",
            f"GPU {uuid}",
            "check 'nvidia-smi -L' and the kernel log for Xid errors on the node, then restart Nomad there",
            uuid=uuid,
        )
        for key, uuid in listed.items()
        if key not in there
    ]
    problems += [
        problem_of(
            wanted.node,
            "gpu_unexpected",
            f"GPU {uuid}",
            f"only the {gpus_in_words(len(listed))} of the list",
            "add it to what is expected if it was built in, or restart Nomad on the node if it is no longer there",
            uuid=uuid,
        )
        for key, uuid in there.items()
        if not may_be(key, listed, unknown)
    ]
    return problems


def _judge_models(wanted: Expected, node: Node) -> list[Problem]:
    found = Counter(gpu["model"] for gpu in node["gpus"])
    if wanted.model_counts is not None and dict(found) != {
        model: number for model, number in wanted.model_counts.items() if number
    }:
        wish = counted(wanted.model_counts)
    elif wanted.models is not None and set(found) != set(wanted.models):
        wish = f"the models {', '.join(sorted(set(wanted.models))) or 'none'}"
    else:
        return []
    next_step = "correct the expected models, or look for a GPU that was exchanged or is missing"
    return [problem_of(wanted.node, "model_mismatch", counted(found), wish, next_step)]


def _judge_mig(wanted: Expected, node: Node) -> list[Problem]:
    next_step = "check 'nvidia-smi mig -lgi' on the node, and restart Nomad there after the layout was changed"
    if wanted.mig is not None:
        wrong = [gpu["uuid"] for gpu in node["gpus"] if gpu["mig"] is not wanted.mig]
        if wrong:
            wish = "only MIG devices" if wanted.mig else "no MIG device"
            return [problem_of(wanted.node, "mig_mismatch", ", ".join(wrong), wish, next_step)]
    if wanted.mig_profiles is not None:
        found = Counter(gpu["mig_profile"] or "without a profile" for gpu in node["gpus"] if gpu["mig"])
        layout = {profile: number for profile, number in wanted.mig_profiles.items() if number}
        if not wanted.is_layout(found, layout):
            wish = wanted.layout_in_words(layout)
            return [problem_of(wanted.node, "mig_mismatch", counted(found), wish, next_step)]
    return []


def _judge_gpu(wanted: Expected, gpu: Gpu) -> list[Problem]:
    problems = []
    memory = gpu["memory_mib"]
    if wanted.memory_mib_min is not None and (memory is None or memory < wanted.memory_mib_min):
        problems.append(
            problem_of(
                wanted.node,
                "memory_too_small",
                f"{'no size' if memory is None else f'{memory} MiB'} for GPU {gpu['uuid']} ({gpu['model']})",
                f"at least {wanted.memory_mib_min} MiB",
                "correct memory_mib_min, or check that this is the right card and MIG layout",
                uuid=gpu["uuid"],
            )
        )
    if not gpu["healthy"]:
        problems.append(
            problem_of(
                wanted.node,
                "gpu_unhealthy",
                f"GPU {gpu['uuid']} unhealthy ({gpu['health_description'] or 'no reason given'})",
                "healthy GPUs",
                "check the GPU with nvidia-smi and the kernel log, and drain the node if it is sick",
                uuid=gpu["uuid"],
            )
        )
    return problems


def _judge_driver(wanted: Expected, node: Node) -> list[Problem]:
    if wanted.driver_version is None:
        return []
    found = sorted({gpu["driver_version"] or "none" for gpu in node["gpus"]})
    if not node["gpus"] or found == [wanted.driver_version]:
        return []
    return [
        problem_of(
            wanted.node,
            "driver_version_stale",
            f"driver {', '.join(found)} in Nomad",
            f"driver {wanted.driver_version}",
            "restart Nomad on the node, because unchanged UUIDs keep it from reporting a new driver",
        )
    ]


def _unexpected_node(node: Node) -> Problem:
    return problem_of(
        node["name"],
        "node_unexpected",
        f"a node with {gpus_in_words(len(node['gpus']))} ({node['id']})",
        "only nodes of the list to have GPUs",
        "add it to what is expected, or take it out of the farm",
    )


def _duplicates(nodes: Iterable[Node]) -> Iterator[tuple[Node, Problem]]:
    """UUIDs that more than one living node reports, as cloned images do; once for each node."""
    holders: dict[str, list[Node]] = {}
    for node in nodes:
        if lives(node):
            for uuid in dict.fromkeys(gpu["uuid"] for gpu in node["gpus"]):
                holders.setdefault(uuid, []).append(node)
    for uuid, several in holders.items():
        if len(several) < 2:
            continue
        for node in several:
            others = ", ".join(f"{other['name']} ({other['id']})" for other in several if other is not node)
            yield (
                node,
                problem_of(
                    node["name"],
                    "duplicate_uuid",
                    f"GPU {uuid} also on {others}",
                    f"GPU {uuid} on one node only",
                    "look for a cloned image or a second Nomad client on the same machine, and stop one of them",
                    uuid=uuid,
                ),
            )
