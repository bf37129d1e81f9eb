#!/usr/bin/python
# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: kubernetes_gpu_gate
short_description: Cordon Kubernetes nodes with sick GPUs, and uncordon them again
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - Cordons the node of every sick host, so that Kubernetes places nothing new there, and uncordons it after a clean
    probe. Pods that run there are left alone, unless O(drain) has them evicted.
  - It uncordons only nodes that have its mark among their annotations, which it writes when it cordons one. A node that
    was cordoned without the mark stays cordoned, and so does one that C(gpufarm.core/maintenance) says is in
    maintenance.
  - Kubernetes does not tell who cordons a node. So a node with the mark is uncordoned after a clean probe even if
    somebody else cordoned it, too, or uncordoned and cordoned it again since the last run, or has emptied it by
    C(kubectl drain). Who works there has to set the annotation C(gpufarm.core/maintenance) to the reason,
    C(kubectl annotate node gpu01 gpufarm.core/maintenance=new-power-supply), and to remove it afterwards.
  - The rules are those of M(gpufarm.core.nomad_gpu_gate), and nothing else is shared. Each gate closes in its own
    scheduler only, by its own marks, its own O(max_closed) and when it is run. So a node that is in both schedulers can
    be open in one and closed in the other, and needs both gates.
  - It sees what it is told in O(nodes) and does not watch. Between two runs a sick node takes work.
extends_documentation_fragment:
  - gpufarm.core.kubernetes
  - gpufarm.core.kubernetes.actiongroup_kubernetes
  - gpufarm.core.gate
attributes:
  check_mode:
    support: full
    description: Tells what would be done.
  diff_mode:
    support: full
    description: Shows whether nodes can take work, and the gate's marks, before and after.
  idempotent:
    support: partial
    description: >-
      A node that is as its health asks for is not changed. A sick probe of a node that is cordoned is written down
      where O(nodes[].index) is given, because an older clean probe must not open it.
options:
  nodes:
    description:
      - The verdict on every node that was probed. If there is none, as where no host could be reached, nothing is done.
  drain:
    description:
      - Whether what runs on a sick node that this gate has cordoned is evicted, as far as disruption budgets allow it.
        Pods of DaemonSets and those that the kubelet has by itself stay. Nothing waits for their end; a pod that a
        budget holds is asked again by the next run.
    type: bool
    default: false
  drain_deadline:
    description:
      - Seconds after the cordon in which pods of jobs, and pods that nothing would start again, may end by themselves.
        The first run after that evicts them. V(0) is no limit.
    type: int
    default: 3600
  max_closed:
    description:
      - How many nodes the gate may have cordoned at once, as a number or as a percentage of the nodes with GPUs, at
        least one. If that would be exceeded, none is cordoned, and the module fails with the reasons.
    type: str
    default: 20%
notes:
  - "The annotations are C(gpufarm.core/gate) (V(closed) or V(open)), C(gpufarm.core/gate-reason),
    C(gpufarm.core/gate-since), C(gpufarm.core/gate-closed-by) and C(gpufarm.core/gate-memory)."
  - The user of the kubeconfig needs the right to C(list), C(get) and C(patch) nodes, and for O(drain) to C(list) pods
    and to C(create) C(pods/eviction).
seealso:
  - module: gpufarm.core.kubernetes_gpu_info
  - module: gpufarm.core.kubernetes_gpu_verify
  - module: gpufarm.core.nomad_gpu_gate
"""

EXAMPLES = r"""
- name: Cordon a node whose GPU has fallen off the bus
  gpufarm.core.kubernetes_gpu_gate:
    nodes:
      - node: gpu01
        healthy: false
        reason: "xid_79 on 0000:3B:00.0"
        drain: true
      - node: gpu02
        healthy: true
  delegate_to: localhost
  run_once: true

- name: Read what the node is before it is probed
  gpufarm.core.kubernetes_gpu_info:
    node_name: ["{{ inventory_hostname }}"]
    gather_pods: false
  register: before
  delegate_to: localhost

- name: Judge the GPUs of the node
  gpufarm.core.nvidia_gpu_health:
    gpus: 8
  register: health

- name: Cordon a sick node, and uncordon a healthy one if nothing newer is known
  gpufarm.core.kubernetes_gpu_gate:
    nodes:
      - node: "{{ inventory_hostname }}"
        healthy: "{{ health.verdict != 'critical' }}"
        reason: "{{ health.reason }}"
        index: "{{ before.nodes[0].resource_version }}"
  delegate_to: localhost
"""

RETURN = r"""
nodes:
  description: What became of every node, in the order given.
  type: list
  elements: dict
  returned: always, once Kubernetes answered
  contains:
    name:
      description: Name of the node.
      type: str
      sample: gpu01
    id:
      description: Kubernetes' UID of the node; null when Kubernetes does not know it.
      type: str
      sample: 4f3c35b2-9d43-4c5f-9a41-9b9a9a0d6a51
    status:
      description: >-
        V(ready), V(not ready), or V(unknown) where Kubernetes has lost it; null when Kubernetes does not know it.
      type: str
      sample: ready
    eligible:
      description: Whether it takes work now, or would after a run without check mode; null when it is not known.
      type: bool
      sample: false
    action:
      description: >-
        V(close) and V(open) for what was cordoned and uncordoned, V(update) for new marks, V(wait) for a clean probe
        that is not the last one needed, V(drain) where nothing but pods were evicted, V(held) for what O(max_closed)
        kept from being cordoned, V(failed), or V(none).
      type: str
      sample: close
    message:
      description: What was done and why, with the pods that are evicted.
      type: str
      sample: "closed: xid_79 on 0000:3B:00.0"
table:
  description: The same as text in columns.
  type: str
  returned: always, once Kubernetes answered
  sample: |-
    NODE   STATUS  ELIGIBLE  ACTION  WHY
    gpu01  ready   no        close   closed: xid_79 on 0000:3B:00.0
    gpu02  ready   yes       none    healthy and open
"""

import dataclasses
import platform
from collections.abc import Mapping
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufarm.core.plugins.module_utils import (
    gate,
    kubernetes,
    kubernetes_gate,
    kubernetes_options,
)
from ansible_collections.gpufarm.core.plugins.module_utils.problem import FoundError
from ansible_collections.gpufarm.core.plugins.module_utils.text import columns, utc


def check_options(params: dict[str, Any]) -> None:
    names = [item["node"] for item in params["nodes"]]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        found = f"node {twice[0]} is twice in the option 'nodes'"
        raise kubernetes.KubernetesError(found, "one entry a node", "merge the entries")
    for item in params["nodes"]:
        if not item["healthy"] and not (item["reason"] or "").strip():
            found = f"node {item['node']} is not healthy and no reason is given"
            raise kubernetes.KubernetesError(found, "a reason, because somebody will ask", "set 'nodes[].reason'")
    for option, least in (("open_after", 1), ("closed_min", 0), ("drain_deadline", 0)):
        for given in (params, *params["nodes"]):
            value = given.get(option)
            if value is not None and value < least:
                raise kubernetes.KubernetesError(f"{option} is {value}", f"{least} or more", "correct the option")
    gate.most_closed(params["max_closed"], 0)


def wish_of(item: dict[str, Any], params: dict[str, Any]) -> gate.Wish:
    drain, deadline = (
        params[option] if item[option] is None else item[option] for option in ("drain", "drain_deadline")
    )
    return gate.Wish(
        item["healthy"],
        item["reason"],
        drain,
        deadline,
        index=item["index"],
        uptime=item["uptime"],
        open_after=params["open_after"],
        closed_min_s=params["closed_min"],
    )


def held(nodes: dict[str, kubernetes.Node], wishes: dict[str, gate.Wish], max_closed: str) -> str:
    """Why none of the nodes that are to be cordoned may be; empty when they may."""
    closing, opening, reasons = [], set(), []
    for name, wish in wishes.items():
        node = nodes.get(name)
        if node is None:
            continue
        decision = kubernetes_gate.decide(node, wish, "")
        if decision.action == "close":
            closing.append(kubernetes_gate.gate_node(node, closing=True))
            reasons.append(decision.message)
        elif decision.action == "open":
            opening.add(node["id"])
    closed = {node["id"] for node in nodes.values() if kubernetes_gate.is_marked(node)} - opening
    farm = sum(1 for node in nodes.values() if node["gpus_capacity"] or node["name"] in wishes)
    why = gate.brake(closing, closed, farm, max_closed)
    return "\n".join([why, *dict.fromkeys(reasons)]) if why else ""


def do_node(client: kubernetes.Client, name: str, wish: gate.Wish, hold: bool, check_mode: bool) -> dict[str, Any]:
    """Set one node; what became of it, and its marks before and after."""
    node: kubernetes.Node | None = None
    decision = gate.Decision("failed", "")
    evicting = ""
    try:
        node, decision = kubernetes_gate.set_node(client, name, wish, utc, check_mode or hold)
        if hold and decision.action == "close":
            decision = gate.Decision("held", f"not {decision.message}")
        elif hold and decision.changes and not check_mode:
            # Only what would be cordoned is held.
            return do_node(client, name, wish, False, False)
        elif node:
            evicting = kubernetes_gate.drain(client, node, decision, wish, check_mode=check_mode)
    except kubernetes.KubernetesError as error:
        # What was done to the node before stays true.
        decision = dataclasses.replace(decision, action="failed", message=str(error))
    if evicting:
        action = "drain" if decision.action == "none" else decision.action
        decision = dataclasses.replace(decision, action=action, message=f"{decision.message}; {evicting}")
    if decision.action == "failed":
        step = "check that the kubelet runs there and has this name ('kubectl get nodes')"
        told = decision.message if "Next step: " in decision.message else f"{decision.message}. Next step: {step}."
        decision = dataclasses.replace(decision, message=f"Node {name}: {told}")
    eligible = node["schedulable"] if node and decision.eligible is None else decision.eligible
    meta = kubernetes_gate.gate_node(node).meta if node else {}
    return {
        "told": {
            "name": name,
            "id": node["id"] if node else None,
            "status": node["status"] if node else None,
            "eligible": eligible,
            "action": decision.action,
            "message": decision.message,
        },
        "changed": decision.changes or bool(evicting),
        "before": describe(name, bool(node and node["schedulable"]), meta),
        "after": describe(name, bool(eligible), {**meta, **(decision.meta or {})}),
    }


def describe(name: str, eligible: bool, meta: Mapping[str, Any]) -> str:
    lines = [f"{name}: {'schedulable' if eligible else 'cordoned'}"]
    lines += [f"  {kubernetes_gate.annotation(key)} = {meta[key]}" for key in gate.KEYS if meta.get(key)]
    return "\n".join(lines) + "\n"


def table(nodes: list[dict[str, Any]]) -> str:
    words = {None: "-", True: "yes", False: "no"}
    rows = [
        (each["name"], each["status"] or "-", words[each["eligible"]], each["action"], each["message"])
        for each in nodes
    ]
    return columns(("NODE", "STATUS", "ELIGIBLE", "ACTION", "WHY"), rows)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **kubernetes_options.argument_spec(),
            "nodes": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": {
                    "node": {"type": "str", "required": True},
                    "healthy": {"type": "bool", "required": True},
                    "reason": {"type": "str"},
                    "index": {"type": "int"},
                    "uptime": {"type": "int"},
                    "drain": {"type": "bool"},
                    "drain_deadline": {"type": "int"},
                },
            },
            "drain": {"type": "bool", "default": False},
            "drain_deadline": {"type": "int", "default": 3600},
            "max_closed": {"type": "str", "default": "20%"},
            "open_after": {"type": "int", "default": 1},
            "closed_min": {"type": "int", "default": 0},
        },
        supports_check_mode=True,
    )
    params = module.params
    try:
        check_options(params)
        client = kubernetes.Client(kubernetes_options.connection_of(params))
        nodes = {node["name"]: node for node in kubernetes.read_nodes(client)}
        wishes = {item["node"]: wish_of(item, params) for item in params["nodes"]}
        why_held = held(nodes, wishes, params["max_closed"])
        done: list[dict[str, Any]] = []
        for name, wish in wishes.items():
            node = nodes.get(name)
            if node and wish.healthy and node["schedulable"] and not kubernetes_gate.gate_node(node).marks:
                # Most nodes of a farm: nothing to ask and nothing to do.
                open_one = {"name": name, "id": node["id"], "status": node["status"], "eligible": True}
                told_one = {**open_one, "action": "none", "message": "healthy and open"}
                done.append({"told": told_one, "changed": False})
            else:
                done.append(do_node(client, name, wish, bool(why_held), module.check_mode))
    except FoundError as error:
        module.fail_json(msg=f"{platform.node()}: {error}")
    told = [each["told"] for each in done]
    changed = [each for each in done if each["changed"]]
    result = {
        "changed": bool(changed),
        "nodes": told,
        "table": table(told),
        "diff": {key: "".join(each[key] for each in changed) for key in ("before", "after")},
    }
    wrong = [each["message"] for each in told if each["action"] == "failed"]
    lines = [f"{platform.node()}: found {why_held}"] if why_held else []
    lines += [f"{platform.node()}: {len(wrong)} of {len(told)} nodes could not be set:", *wrong] if wrong else []
    if lines:
        module.fail_json(msg="\n".join(lines), **result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
