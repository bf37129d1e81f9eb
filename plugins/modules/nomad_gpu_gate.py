#!/usr/bin/python
# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: nomad_gpu_gate
short_description: Close Nomad nodes with sick GPUs, and open them again
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - Makes a sick node ineligible, so that Nomad places nothing new on it, and drains it on request. The reason is in the
    node's meta (C(gpufarm_gate), C(gpufarm_gate_reason), C(gpufarm_gate_since), C(gpufarm_gate_closed_by)), beside what
    the gate has to remember (C(gpufarm_gate_memory)).
  - Makes a healthy node eligible again, and only one that this gate has closed. What an operator has closed or drained
    stays as it is.
  - Closes no node at all where that would leave more of them closed than O(max_closed). One cause, such as an update of
    the driver, can make every probe of a farm fail.
  - A node that is down takes no meta. It is drained with the reason in the meta of the drain, which moves nothing,
    because nothing runs there any more.
extends_documentation_fragment:
  - gpufarm.core.nomad
  - gpufarm.core.nomad.actiongroup_nomad
  - gpufarm.core.gate
attributes:
  check_mode:
    support: full
    description: Can run in C(check_mode) and returns what it would do.
  diff_mode:
    support: full
    description: Returns eligibility, drain and meta of each node that changes, before and after.
  idempotent:
    support: full
    description: A node that is as it should be is not touched.
  platform:
    description: Runs wherever Nomad's HTTP API can be reached, usually on a server.
options:
  nodes:
    description:
      - The nodes and their health. Nodes that are not named stay as they are.
  drain:
    description:
      - Whether what runs on a sick node is moved away. Otherwise it may end there.
    type: bool
    default: false
  drain_deadline:
    description:
      - Seconds that allocations have to end by themselves before they are stopped. V(0) waits without limit.
    type: int
    default: 3600
  max_closed:
    description:
      - How many nodes this gate may have closed, as a number such as V(5), or as a percentage such as V(20%) of the
        nodes that have devices in Nomad or are in O(nodes). A percentage is at least one node.
      - Those that are closed already count. With one more, no node is closed and the module fails; nodes are opened all
        the same.
    type: str
    default: 20%
notes:
  - The token needs the rule C(node:write).
  - Nodes are changed one by one. When one of them cannot be changed, the others are still done, and the module fails
    with what is missing.
seealso:
  - module: gpufarm.core.nvidia_gpu_health
  - module: gpufarm.core.nomad_gpu_verify
"""

EXAMPLES = r"""
- name: A node with a lost GPU gets no new work
  gpufarm.core.nomad_gpu_gate:
    address: https://nomad.example.com:4646
    nodes:
      - node: gpu01
        healthy: false
        reason: gpu_lost GPU-3672890b-e127-9850-0c65-415ee8cf8a17
      - node: gpu02
        healthy: true
  delegate_to: localhost
  run_once: true
"""

RETURN = r"""
nodes:
  description: What was done with each node, in the order given.
  type: list
  elements: dict
  returned: always, once Nomad answered
  contains:
    name:
      description: Node as it was given.
      type: str
      sample: gpu01
    id:
      description: Nomad's ID of the node; null when Nomad does not know it.
      type: str
      sample: 282de321-2e0d-83b0-30d3-e93839ed5f74
    status:
      description: Status of the node before; null when Nomad does not know it.
      type: str
      sample: ready
    eligible:
      description: Whether Nomad places work on the node, after this run; null when Nomad does not know it.
      type: bool
      sample: false
    draining:
      description: Whether the node was being drained before.
      type: bool
      sample: false
    action:
      description: >-
        V(close); V(open); V(wait), healthy and not open yet, for O(open_after) or O(closed_min); V(update), only its
        reason, its drain or what the gate remembers changed; V(held), not closed because of O(max_closed); V(none); or
        V(failed).
      type: str
      sample: close
    message:
      description: What was done and why.
      type: str
      sample: "closed: gpu_lost GPU-3672890b-e127-9850-0c65-415ee8cf8a17"
table:
  description: The same as text in columns.
  type: str
  returned: always, once Nomad answered
  sample: |-
    NODE   STATUS  ELIGIBLE  ACTION  WHY
    gpu01  ready   no        close   closed: gpu_lost GPU-3672890b-e127-9850-0c65-415ee8cf8a17
"""

import dataclasses
import platform
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufarm.core.plugins.module_utils import gate, nomad, nomad_options
from ansible_collections.gpufarm.core.plugins.module_utils.text import columns, utc

# Requests to one agent at a time.
WORKERS = 8
# How long the servers may take to miss an agent, and Nomad's answer for a node that it cannot reach.
HEARTBEAT_S = 90
NO_PATH = 404
PAUSE_S = 1.0
# Of the reasons why nodes were to be closed, so many are told.
REASONS = 5


@dataclasses.dataclass(frozen=True)
class Done:
    """What became of one node."""

    name: str
    node: gate.GateNode | None
    decision: gate.Decision

    @property
    def eligible(self) -> bool | None:
        if self.node is None:
            return None
        if self.decision.action == "close":
            return False
        return True if self.decision.action == "open" else self.node.eligible

    def result(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "id": self.node.id if self.node else None,
            "status": self.node.status if self.node else None,
            "eligible": self.eligible,
            "draining": self.node.draining if self.node else False,
            "action": self.decision.action,
            "message": self.decision.message,
        }


def failed(name: str, node: gate.GateNode | None, why: str) -> Done:
    return Done(name, node, gate.Decision("failed", why))


def do_node(client: nomad.Client, name: str, listed: gate.GateNode | None, wish: gate.Wish, check_mode: bool) -> Done:
    if listed is None:
        return failed(
            name,
            None,
            f"Node {name}: Nomad knows no such node. Expected: its name or ID in Nomad. "
            "Next step: check that the Nomad client runs there ('nomad node status')",
        )
    node = listed
    deadline = time.monotonic() + HEARTBEAT_S
    while True:
        try:
            node = gate.read_node(client, listed.id)
            decision = gate.decide(node, wish, utc())
            if decision.changes and not check_mode:
                gate.carry_out(client, node, decision, wish)
        except nomad.NomadError as error:
            # Its agent has just stopped and takes no mark; once the servers miss it, a drain is the mark.
            if error.status != NO_PATH or wish.healthy or time.monotonic() > deadline:
                return failed(name, node, f"Node {name}: {error}")
            time.sleep(PAUSE_S)
        else:
            return Done(name, node, decision)


def held(client: nomad.Client, done: list[Done], marked: set[str], max_closed: str) -> str:
    """Why none of the nodes that are to be closed may be; empty when they may."""
    closing = [each.node for each in done if each.node and each.decision.action == "close"]
    known = {each.node.id for each in done if each.node}
    closed = marked - known
    closed |= {
        each.node.id
        for each in done
        if each.node and each.node.marks and not each.node.eligible and each.decision.action != "open"
    }
    farm = len(gate.nodes_with_devices(client) | known) if closing else 0
    why = gate.brake(closing, closed, farm, max_closed)
    if not why:
        return ""
    reasons = Counter(each.decision.message for each in done if each.decision.action == "close").most_common(REASONS)
    return "\n".join([why, *(f"{number} x {reason}" for reason, number in reasons)])


def hold(each: Done) -> Done:
    if each.decision.action != "close":
        return each
    return dataclasses.replace(each, decision=gate.Decision("held", f"not {each.decision.message}"))


def check_options(params: dict[str, Any]) -> None:
    items = params["nodes"]
    names = [item["node"] for item in items]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise nomad.NomadError(
            found=f"node {twice[0]} is twice in the option 'nodes'",
            expected="one entry a node",
            next_step="merge the entries",
        )
    for item in items:
        if not item["healthy"] and not (item["reason"] or "").strip():
            raise nomad.NomadError(
                found=f"node {item['node']} is not healthy and no reason is given",
                expected="a reason, because somebody will ask",
                next_step="set 'nodes[].reason'",
            )
    for option, unit, least in (
        ("drain_deadline", "seconds", 0),
        ("open_after", "probes", 1),
        ("closed_min", "seconds", 0),
    ):
        for given in (params, *items):
            value = given.get(option)
            if value is not None and value < least:
                raise nomad.NomadError(
                    found=f"{option} is {value}", expected=f"{unit}, {least} or more", next_step="correct the option"
                )
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


def table(done: list[Done]) -> str:
    rows = []
    for each in done:
        eligible = "-" if each.eligible is None else "yes" if each.eligible else "no"
        status = each.node.status if each.node else "-"
        rows.append((each.name, status, eligible, each.decision.action, each.decision.message))
    return columns(("NODE", "STATUS", "ELIGIBLE", "ACTION", "WHY"), rows)


def states(done: list[Done]) -> dict[str, str]:
    """Eligibility, drain and meta of the nodes that change, before and after, as text."""
    before, after = [], []
    for each in done:
        node, decision = each.node, each.decision
        if node is None or not decision.changes:
            continue
        draining = (node.draining or decision.drain) and not decision.cancel_drain
        meta = {**node.meta, **(decision.meta or {})}
        before.append(describe(each.name, node.eligible, node.draining, node.meta))
        after.append(describe(each.name, bool(each.eligible), draining, meta))
    return {"before": "".join(before), "after": "".join(after)}


def describe(name: str, eligible: bool, draining: bool, meta: Any) -> str:
    lines = [f"{name}: {'eligible' if eligible else 'ineligible'}{', draining' if draining else ''}"]
    lines += [f"  {key} = {meta[key]}" for key in gate.KEYS if meta.get(key)]
    return "\n".join(lines) + "\n"


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **nomad_options.argument_spec(),
            "nodes": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": {
                    "node": {"type": "str", "required": True},
                    "healthy": {"type": "bool", "required": True},
                    "reason": {"type": "str"},
                    "drain": {"type": "bool"},
                    "drain_deadline": {"type": "int"},
                    "index": {"type": "int"},
                    "uptime": {"type": "int"},
                },
            },
            "drain": {"type": "bool", "default": False},
            "drain_deadline": {"type": "int", "default": 3600},
            "max_closed": {"type": "str", "default": "20%"},
            "open_after": {"type": "int", "default": 1},
            "closed_min": {"type": "int", "default": 0},
        },
        required_together=nomad_options.REQUIRED_TOGETHER,
        supports_check_mode=True,
    )
    params = module.params
    connection = nomad_options.connection_of(params)
    try:
        check_options(params)
        client = nomad.Client(connection)
        listed = gate.find_nodes(client, [item["node"] for item in params["nodes"]])
        marked = gate.marked_nodes(client)

        def look(item: dict[str, Any]) -> Done:
            node = listed[item["node"]]
            if item["healthy"] and node is not None and node.eligible and node.id not in marked and not node.marks:
                # Most nodes of a farm: nothing to ask and nothing to do.
                return Done(item["node"], node, gate.Decision("none", "healthy and open"))
            return do_node(client, item["node"], node, wish_of(item, params), check_mode=True)

        def do(item: dict[str, Any], seen: Done) -> Done:
            if not seen.decision.changes:
                return seen
            return do_node(client, item["node"], seen.node, wish_of(item, params), check_mode=False)

        with ThreadPoolExecutor(WORKERS) as pool:
            done = list(pool.map(look, params["nodes"]))
            why_held = held(client, done, marked, params["max_closed"])
            if why_held:
                done = [hold(each) for each in done]
            if not module.check_mode:
                done = list(pool.map(do, params["nodes"], done))
    except nomad.NomadError as error:
        module.fail_json(msg=f"{platform.node()}: {error}")

    wrong = [each for each in done if each.decision.action == "failed"]
    result = {
        "changed": any(each.decision.changes for each in done),
        "nodes": [each.result() for each in done],
        "table": table(done),
        "diff": states(done),
    }
    told = [f"{platform.node()}: found {why_held}"] if why_held else []
    if wrong:
        told.append(f"{platform.node()}: {len(wrong)} of {len(done)} nodes could not be set:")
        told += [each.decision.message for each in wrong]
    if told:
        module.fail_json(msg="\n".join(told), **result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
