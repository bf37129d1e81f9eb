# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the nodes of a farm should have, against what pods can get there.

Kubernetes counts GPUs and knows no UUID. What GPU feature discovery does not tell, as where it does not run, is not
compared, and that is said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils.gpu_verdicts import (
    Expected,
    NodeVerdict,
    counted,
    gpus_in_words,
)
from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes.nodes import (
    PLUGIN_GPU,
    READY,
    Node,
    Resource,
    devices,
    labelled_by_us,
    may_be_shared,
    model_key,
    profile_key,
    profile_of_gpus,
)
from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes.plugin import Plugin
from ansible_collections.gpufarm.core.plugins.module_utils.nomad import expected_of_facts as nomad_expected_of_facts
from ansible_collections.gpufarm.core.plugins.module_utils.problem import Problem, problem_of


def expected_of_facts(facts: Mapping[str, Any], node: str, misses_empty: bool = True) -> dict[str, Any]:
    """What Kubernetes must have of a node with these C(nvidia_smi) facts, as an entry of C(expected).

    It is what Nomad must have, and the profiles of MIG devices, which are resources of their own; the model of a GPU is
    known with MIG too. A divided GPU without devices may be there where it is not missed: with the strategy C(none) it
    is handed out as a whole one, with C(mixed) it is not.
    """
    if facts["available"] and not misses_empty:
        facts = {**facts, "gpus": [{**gpu, "mig_devices": gpu["mig_devices"] or None} for gpu in facts["gpus"]]}
    expected = nomad_expected_of_facts(facts, node)
    if "uuids" not in expected:
        return expected
    divided = [gpu for gpu in facts["gpus"] if gpu["mig_mode"] == "Enabled"]
    migs = [mig for gpu in divided for mig in gpu["mig_devices"] or ()]
    # None at all is a layout too: a plugin that has not noticed may offer as many MIG devices as there are GPUs.
    if any(gpu["mig_mode"] for gpu in facts["gpus"]) and all(mig["profile"] for mig in migs):
        expected["mig_profiles"] = dict(sorted(Counter(mig["profile"] for mig in migs).items()))
    if all(gpu["name"] for gpu in facts["gpus"]):
        expected["models"] = sorted({gpu["name"] for gpu in facts["gpus"]})
    return expected


def compare(
    expected: Iterable[Expected],
    actual: Iterable[Node],
    allow_extra_nodes: bool = True,
    require_eligible: bool = False,
    plugins: Mapping[str, Plugin] | None = None,
) -> list[NodeVerdict]:
    """Judge every expected node, and those others that must not be as they are; each in the order given.

    C(plugins) are the pods of the device plugin by node, where they were asked for.
    """
    nodes = {node["name"]: node for node in actual}
    verdicts, seen = [], set()
    for wanted in expected:
        seen.add(wanted.node)
        verdicts.append(_judge(wanted, nodes.get(wanted.node), require_eligible, (plugins or {}).get(wanted.node)))
    if not allow_extra_nodes:
        extra = (node for name, node in nodes.items() if name not in seen and node["gpus_capacity"])
        verdicts += [_verdict(None, node, [_unexpected_node(node)]) for node in extra]
    return verdicts


def extra_gpu_nodes(expected: Iterable[Expected], actual: Iterable[Node]) -> list[str]:
    """Names of nodes with GPUs that nobody expects, sorted."""
    known = {wanted.node for wanted in expected}
    return sorted({node["name"] for node in actual if node["gpus_capacity"] and node["name"] not in known})


def not_compared(wanted: Expected, node: Node | None) -> list[str]:
    """What was expected of a node and Kubernetes does not tell."""
    if node is None:
        return []
    unknown_mig = profile_of_gpus(node) is None and bool(node["gpus_capacity"])
    asked = {
        "models": (wanted.models is not None or wanted.model_counts is not None) and node["product"] is None,
        "memory_mib_min": wanted.memory_mib_min is not None and node["memory_mib"] is None,
        "driver_version": wanted.driver_version is not None and node["driver_version"] is None,
        "mig": wanted.mig is not None and unknown_mig,
        "mig_profiles": wanted.mig_profiles is not None and unknown_mig,
    }
    return [name for name, unknown in asked.items() if unknown]


def _verdict(number: int | None, node: Node, problems: list[Problem]) -> NodeVerdict:
    return NodeVerdict(node["name"], node["id"], node["status"], number, node["gpus_allocatable"], problems)


def _judge(wanted: Expected, node: Node | None, require_eligible: bool, plugin: Plugin | None) -> NodeVerdict:
    name = wanted.node
    if node is None:
        problem = problem_of(
            name,
            "node_missing",
            "no such node",
            "a node of this name in Kubernetes",
            "check that the kubelet runs there and has this name ('kubectl get nodes')",
        )
        return NodeVerdict(name, None, None, wanted.number, 0, [problem])
    problems: list[Problem] = []
    if node["status"] != READY:
        problems.append(
            problem_of(
                name,
                "node_down",
                f"status {node['status']}",
                f"status {READY}",
                f"look at the kubelet on the node ('journalctl -u kubelet') and at 'kubectl describe node {name}'",
            )
        )
    if require_eligible and not node["schedulable"]:
        problems.append(
            problem_of(
                name,
                "node_ineligible",
                "a cordoned node",
                "a node that takes work",
                f"find out why it was taken out, then run 'kubectl uncordon {name}'",
            )
        )
    problems += _judge_gpus(wanted, node, plugin)
    return _verdict(wanted.number, node, problems)


def _judge_gpus(wanted: Expected, node: Node, plugin: Plugin | None) -> list[Problem]:
    if not node["gpus_capacity"] and wanted.number != 0:
        return [
            problem_of(
                wanted.node,
                "no_devices",
                "no GPU at all" + (f", and {plugin.found}" if plugin else ""),
                wanted.wish,
                plugin.next_step
                if plugin and not plugin.running
                else "check nvidia-smi on the node, its label nvidia.com/gpu.present, and the log of the device "
                "plugin's pod there, which needs the NVIDIA runtime to see the driver",
            )
        ]
    problems = _judge_mig(wanted, node)
    # A list of what is missing says more than two numbers.
    if not wanted.is_number(node["gpus_capacity"]) and not problems:
        problems.append(_another_number(wanted, node))
    problems += [
        unhealthy(wanted.node, each, plugin) for each in node["resources"] if each["allocatable"] < each["capacity"]
    ]
    return problems + _judge_labels(wanted, node)


def _another_number(wanted: Expected, node: Node) -> Problem:
    found = gpus_in_words(node["gpus_capacity"])
    if may_be_shared(node, wanted.number or 0):
        return problem_of(
            wanted.node,
            "sharing_unknown",
            f"{found}, and no label that tells how often each is offered",
            wanted.wish,
            "run GPU feature discovery, which tells whether they are shared; if they are not, restart the device "
            "plugin's pod on the node, because it looks for GPUs only when it starts",
        )
    return problem_of(
        wanted.node,
        "count_mismatch",
        found,
        wanted.wish,
        "compare with 'nvidia-smi -L' on the node, and restart the device plugin's pod there if that is right, "
        "because it looks for GPUs only when it starts",
    )


def unhealthy(node: str, resource: Resource, plugin: Plugin | None = None) -> Problem:
    """Some or all GPUs of a kind that a node has and no pod can get."""
    total, well = devices(resource), devices(resource, "allocatable")
    found = f"{well} of {gpus_in_words(total)} allocatable as {resource['name']}"
    restart = f"restart {plugin.words if plugin else 'the pod of the device plugin on the node'}"
    if plugin and not plugin.running:
        found, step = f"{found}, and {plugin.found}", plugin.next_step
    elif well == 0:
        # k8s-device-plugin: a GPU that is lost no longer tells its UUID, so the plugin takes all for sick.
        step = (
            "look for a lost GPU with nvidia-smi and in the kernel log: one makes the device plugin call all GPUs of "
            f"the node unhealthy, and it never calls them healthy again. Once all are well, {restart}"
        )
    else:
        step = (
            "check the GPUs with nvidia-smi and the kernel log for Xid errors, and cordon the node if one is sick. "
            f"Once all are well, {restart}, because it never calls a GPU healthy again"
        )
    return problem_of(node, "gpu_unhealthy", found, gpus_in_words(total), step)


def _judge_mig(wanted: Expected, node: Node) -> list[Problem]:
    strategy = node["mig_strategy"]
    divided = {each["mig_profile"]: each for each in node["resources"] if each["mig_profile"]}
    whole = sum(devices(each) for each in node["resources"] if not each["mig_profile"])
    step = (
        "check 'nvidia-smi mig -lgi' on the node and the device plugin's MIG strategy "
        f"({strategy or 'which GPU feature discovery does not tell'}), and restart the plugin's pod there after the "
        "layout was changed"
    )

    def problem(found: str, wish: str) -> list[Problem]:
        return [problem_of(wanted.node, "mig_mismatch", found, wish, step)]

    found = {str(profile): devices(each) for profile, each in divided.items()}
    layout = {profile_key(name): number for name, number in (wanted.mig_profiles or {}).items() if number}
    profile = profile_of_gpus(node)
    if profile and whole:
        found, whole = {profile: whole}, 0
    if wanted.mig is not None and profile is not None:
        wrong = whole if wanted.mig else sum(found.values())
        if wrong:
            kind = "whole GPUs" if wanted.mig else "MIG devices"
            return problem(f"{wrong} {kind}", "only MIG devices" if wanted.mig else "no MIG device")
    if wanted.mig_profiles is None:
        return []
    # They may be MIG devices, but then they have one profile all.
    alike = len(layout) == 1 and wanted.is_layout({"": whole}, {"": sum(layout.values())})
    if profile is None and (alike or not layout):
        return []
    if not found:
        found = {PLUGIN_GPU: whole} if whole and layout else {}
    return [] if wanted.is_layout(found, layout) else problem(counted(found), wanted.layout_in_words(layout))


def _judge_labels(wanted: Expected, node: Node) -> list[Problem]:
    """What GPU feature discovery says of all GPUs of a node together; of several models it names one."""
    problems = []
    models = {model for model, number in (wanted.model_counts or {}).items() if number} or set(wanted.models or ())
    product = node["product"]
    if models and product and product not in {model_key(model) for model in models}:
        problems.append(
            problem_of(
                wanted.node,
                "model_mismatch",
                product,
                f"the models {', '.join(sorted(models))}",
                "correct the expected models, or look for a GPU that was exchanged",
            )
        )
    memory, least = node["memory_mib"], wanted.memory_mib_min
    if least is not None and memory is not None and memory < least:
        problems.append(
            problem_of(
                wanted.node,
                "memory_too_small",
                f"{memory} MiB for its GPUs",
                f"at least {least} MiB",
                "correct memory_mib_min, or check that this is the right card and MIG layout",
            )
        )
    driver = node["driver_version"]
    if wanted.driver_version is not None and driver is not None and driver != wanted.driver_version:
        problems.append(
            problem_of(
                wanted.node,
                "driver_version_stale",
                f"driver {driver} in the node's labels",
                f"driver {wanted.driver_version}",
                "run playbooks/kubernetes.yml again, which labels the node anew"
                if labelled_by_us(node)
                else "restart the pods of GPU feature discovery and of the device plugin on the node",
            )
        )
    return problems


def _unexpected_node(node: Node) -> Problem:
    return problem_of(
        node["name"],
        "node_unexpected",
        f"a node with {gpus_in_words(node['gpus_capacity'])}",
        "only nodes of the list to have GPUs",
        "add it to what is expected, or take it out of the cluster",
    )
