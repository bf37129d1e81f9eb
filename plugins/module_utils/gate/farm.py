# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What the probes of a farm's nodes and the view of its scheduler say together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils.gate.agent import AGENT_OK, PLUGIN_STOPPED
from ansible_collections.gpufarm.core.plugins.module_utils.gate.deciding import clean_reason
from ansible_collections.gpufarm.core.plugins.module_utils.problem import sentences

CRITICAL = "critical"
WARNING = "warning"
HARMLESS = ("driver_version_stale", "sharing_unknown")
"""What a scheduler's view has wrong of a node that is well, as the report says too."""
WISHES = ("drain", "drain_deadline", "index", "uptime")
NOMAD = "nomad"
KUBERNETES = "kubernetes"
_PLAYBOOKS = {NOMAD: "playbooks/health.yml", KUBERNETES: "playbooks/kubernetes_health.yml"}
_UNKNOWN_NODE = {
    NOMAD: "run playbooks/site.yml for it, because Nomad cannot close a node that it does not know",
    KUBERNETES: "check that the kubelet runs there and has this name ('kubectl get nodes')",
}


def closes(verdict: str | None, close_on: str) -> bool:
    """Whether a probe with this verdict closes its node."""
    return verdict == CRITICAL or (verdict == WARNING and close_on == WARNING)


def judge_farm(
    probes: Iterable[Mapping[str, Any]],
    verdicts: Iterable[Mapping[str, Any]],
    close_on: str = CRITICAL,
    scheduler: str = NOMAD,
) -> dict[str, Any]:
    """What the probes on the nodes and the scheduler's view say together.

    C(probes) are C({"node": name in Nomad, "host": name of the host, "probe": what nvidia_gpu_health returned, "agent":
    what agent_state says}), where the probe can be a failed or an unreachable one; C(close_on), C(drain),
    C(drain_deadline), C(index) and C(uptime) are the node's own, if it has some. C(verdicts) are the C(nodes) of
    nomad_gpu_verify, or of kubernetes_gpu_verify where C(scheduler) says so. Returns

    - C(nodes): what nomad_gpu_gate and kubernetes_gpu_gate take, for every node that can be judged,
    - C(unprobed): node and C(message) of those that could not be probed and that the scheduler holds for well: they
      stay as they are, because a broken way to them says nothing about their GPUs; and of hosts that nobody reaches
      and whose node has another name in Kubernetes,
    - C(missing): names of nodes that the scheduler does not know, and so cannot close,
    - C(sick): node, C(reason) and C(message) of all that are not healthy, the missing ones included,
    - C(warnings): node and C(reason) of those that are healthy with a warning.
    """
    by_name = {verdict["name"]: verdict for verdict in verdicts}
    judged: dict[str, list[Any]] = {"nodes": [], "unprobed": [], "missing": [], "sick": [], "warnings": []}
    for entry in probes:
        name, probe = entry["node"], entry.get("probe") or {}
        told_by_scheduler = [problem["code"] for problem in (by_name.get(name) or {}).get("problems") or []]
        codes = [code for code in told_by_scheduler if code not in HARMLESS]
        verdict = probe.get("verdict")
        agent = entry.get("agent") or AGENT_OK
        if agent != AGENT_OK and verdict is not None:
            codes.insert(0, agent if agent == PLUGIN_STOPPED else f"agent_{agent}")
        sick_by_probe = closes(verdict, entry.get("close_on") or close_on)
        told = ["not_probed"] if verdict is None else [probe["reason"]] if sick_by_probe else []
        reason = _reason(told, codes, scheduler)
        # Kubernetes' name of a node is its host's to say.
        stranger = scheduler == KUBERNETES and bool(probe.get("unreachable")) and "node_missing" in codes
        if verdict is None and (not codes or stranger):
            host = entry.get("host") or name
            message = _why_unknown(host, name, probe) if stranger else _why_unprobed(host, probe, scheduler)
            judged["unprobed"].append({"node": name, "message": message})
            continue
        sick = bool(codes) or sick_by_probe
        if sick:
            judged["sick"].append(
                {"node": name, "reason": reason, "message": _why_sick(name, reason, codes, scheduler)}
            )
        elif verdict == WARNING or told_by_scheduler:
            warned = [probe["reason"]] if verdict == WARNING else []
            judged["warnings"].append({"node": name, "reason": _reason(warned, told_by_scheduler, scheduler)})
        if "node_missing" in codes:
            judged["missing"].append(name)
        else:
            wishes = {key: entry[key] for key in WISHES if entry.get(key) is not None}
            judged["nodes"].append({"node": name, "healthy": not sick, "reason": reason if sick else None, **wishes})
    return judged


def _reason(told: list[str], codes: Iterable[str], scheduler: str) -> str:
    return clean_reason("; ".join(told + [f"{scheduler} {code}" for code in dict.fromkeys(codes)]))


def _why_sick(node: str, reason: str, codes: Iterable[str], scheduler: str) -> str:
    next_step = f"repair it and run {_PLAYBOOKS[scheduler]} again, which opens the node after a clean probe"
    if "node_missing" in codes:
        next_step = _UNKNOWN_NODE[scheduler]
    elif "agent_stopped" in codes:
        next_step = "read `journalctl -u nomad` there and start Nomad"
    elif PLUGIN_STOPPED in codes:
        next_step = "read `journalctl -u nomad` there, run playbooks/site.yml for it and restart Nomad"
    return f"Node {node}: found {sentences(reason, f'healthy GPUs that {scheduler.capitalize()} has', next_step)}"


def _why_unprobed(host: str, probe: Mapping[str, Any], scheduler: str) -> str:
    found = probe.get("msg") or "no answer"
    what = "cannot be reached" if probe.get("unreachable") else "could not be probed"
    return (
        f"{host}: {what} ({clean_reason(str(found))}). Expected: a host that Ansible reaches, with Python and root "
        f"rights. Next step: run `ansible {host} -m ansible.builtin.ping --become`. Its node stays as it is in "
        f"{scheduler.capitalize()}."
    )


def _why_unknown(host: str, node: str, probe: Mapping[str, Any]) -> str:
    found = clean_reason(str(probe.get("msg") or "no answer"))
    return (
        f"{host}: cannot be reached ({found}), and Kubernetes has no node {node}. Expected: a host that says what its "
        "node is called. Next step: mend the connection to it, or set kubernetes_node_name to what 'kubectl get nodes' "
        "calls it. Its node stays as it is in Kubernetes."
    )
