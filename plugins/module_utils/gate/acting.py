# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Nodes as the gate reads them from Nomad, and what was decided, done to them there."""

from __future__ import annotations

import dataclasses
import urllib.parse
from collections.abc import Iterable, Mapping
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils import nomad
from ansible_collections.gpufarm.core.plugins.module_utils.gate.deciding import (
    CLOSED,
    STATE_KEY,
    Decision,
    GateNode,
    Wish,
    gate_node,
)

_NANOSECONDS = 1_000_000_000


def carry_out(client: nomad.Client, node: GateNode, decision: Decision, wish: Wish) -> None:
    """Do what was decided. A node is marked before it is closed, and opened before its mark goes.

    So whatever stops in between leaves a node that the next run puts right.
    """
    path = node_path(node.id)
    opening = decision.action == "open"
    if decision.meta and not opening and node.status == "ready":
        _write_meta(client, node, decision.meta)
    if decision.drain:
        spec = {"Deadline": wish.drain_deadline_s * _NANOSECONDS, "IgnoreSystemJobs": True}
        client.call("POST", f"{path}/drain", {"NodeID": node.id, "DrainSpec": spec, "Meta": decision.meta})
    if decision.cancel_drain:
        client.call("POST", f"{path}/drain", {"NodeID": node.id, "DrainSpec": None, "MarkEligible": True})
    if decision.eligible is not None:
        word = "eligible" if decision.eligible else "ineligible"
        client.call("POST", f"{path}/eligibility", {"NodeID": node.id, "Eligibility": word})
    if decision.meta and opening:
        _write_meta(client, node, decision.meta)


def _write_meta(client: nomad.Client, node: GateNode, meta: Mapping[str, str | None]) -> None:
    client.call("POST", "/v1/client/metadata", {"NodeID": node.id, "Meta": dict(meta)})


def find_nodes(client: nomad.Client, names: Iterable[str]) -> dict[str, GateNode | None]:
    """Names or IDs of nodes to what Nomad lists of them; None where it has no such node. The list tells no meta.

    A client that lost its data registers anew, so of several nodes with one name the youngest that lives counts.
    """
    wanted = set(names)
    found: dict[str, dict[str, Any]] = {}
    for node in client.items("/v1/nodes", {}).items:
        for key in (node.get("Name"), node.get("ID")):
            if key in wanted and (key not in found or _rank(node) > _rank(found[key])):
                found[key] = node
    return {name: gate_node(found[name]) if name in found else None for name in wanted}


def _rank(node: Mapping[str, Any]) -> tuple[bool, bool, int]:
    return nomad.rank(nomad.describe_node(node))


def marked_nodes(client: nomad.Client) -> set[str]:
    """IDs of the nodes whose meta says that the gate closed them, but of former selves."""
    return _filtered(client, f'Meta.{STATE_KEY} == "{CLOSED}"')


def nodes_with_devices(client: nomad.Client) -> set[str]:
    """IDs of the nodes that have devices, most of which are GPUs, but of former selves."""
    return _filtered(client, "NodeResources.Devices is not empty")


def _filtered(client: nomad.Client, expression: str) -> set[str]:
    found = list(client.items("/v1/nodes", {"filter": expression}).items)
    # A machine that was made anew registers anew, and is listed as down beside that, with its meta, for a day.
    if any(node.get("Status") == "down" for node in found):
        living = {node.get("Name") for node in client.items("/v1/nodes", {"filter": 'Status != "down"'}).items}
        found = [node for node in found if node.get("Status") != "down" or node.get("Name") not in living]
    return {node.get("ID") or "" for node in found}


def node_path(node_id: str) -> str:
    return f"/v1/node/{urllib.parse.quote(node_id)}"


def read_node(client: nomad.Client, node_id: str) -> GateNode:
    """One node as it is now, its meta included."""
    return with_meta(client, gate_node(client.call("GET", node_path(node_id)) or {}))


def with_meta(client: nomad.Client, node: GateNode) -> GateNode:
    """The node with the meta that its client has."""
    if node.status != "ready":
        return node
    try:
        # The servers learn of new meta seconds later; the client has it at once.
        answer = client.call("GET", "/v1/client/metadata", query={"node_id": node.id}) or {}
    except nomad.NomadError as error:
        if error.status not in (404, 500):
            raise
        return node
    return dataclasses.replace(node, meta=answer.get("Meta") or {})
