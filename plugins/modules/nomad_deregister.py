#!/usr/bin/python
# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Have a farm forget a machine whose agent was stopped for good."""

from __future__ import annotations

DOCUMENTATION = r"""
module: nomad_deregister
short_description: Have a Nomad farm forget a machine that has left
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - Deletes the node of a machine from the farm, and what was left of its former identities, that is, nodes of the same
    name, datacenter and address that are down. With O(server=true) the servers forget it as one of theirs, too.
  - Stop the agent of that machine first; one that still runs registers anew. Ask the agent of another machine.
extends_documentation_fragment:
  - gpufarm.core.nomad
  - gpufarm.core.nomad.actiongroup_nomad
attributes:
  check_mode:
    support: full
    description: Can run in C(check_mode) and says what the farm would forget.
  diff_mode:
    support: none
    description: RV(forgotten) tells what was done.
  idempotent:
    support: full
    description: What the farm does not know is not deleted.
  platform:
    description: Runs wherever Nomad's HTTP API can be reached, usually on a server, so no proxy is used.
options:
  name:
    description:
      - Name of the machine in Nomad.
    type: str
    required: true
  node_id:
    description:
      - ID of its node, which C(client/client-id) in the agent's data folder holds. Its node goes, whatever its status.
      - Without it, the nodes of that name that are down go where all of them have one datacenter and address.
    type: str
  server:
    description:
      - Whether the machine was a server.
    type: bool
    default: false
  timeout:
    description:
      - Seconds that the other servers have to see that it is stopped, with O(server=true), and again as many to go on
        without it.
    type: int
    default: 60
notes:
  - The token needs the rule C(node:write), and C(agent:write) with O(server=true).
seealso:
  - module: gpufarm.core.nomad_node_maintenance
"""

EXAMPLES = r"""
- name: Forget the node of a machine that is scrap
  gpufarm.core.nomad_deregister:
    name: gpu01
  delegate_to: server01
"""

RETURN = r"""
forgotten:
  description: IDs of the nodes, and the name of the server, that the farm forgot, or would in check mode.
  type: list
  elements: str
  returned: success
  sample: [6b1f0c0a-8f5e-3c37-9f0e-0a4c8e6c2b11]
kept:
  description: >-
    IDs of nodes that have the name and may be another machine's: they live, or have another datacenter or address. A
    warning names them.
  type: list
  elements: str
  returned: success
  sample: []
"""

import json
import platform
import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufarm.core.plugins.module_utils import gate, nomad, nomad_options

PAUSE_S = 1.0
NOT_FOUND = 404


def nodes_of(client: nomad.Client, name: str, node_id: str | None) -> tuple[list[str], list[str]]:
    """The IDs of the machine's nodes, and of those that only have its name."""
    wanted = f"Name == {json.dumps(name)}" + (f" or ID == {json.dumps(node_id)}" if node_id else "")
    nodes = list(client.items("/v1/nodes", {"filter": wanted}).items)
    alike = [node for node in nodes if node.get("Name") == name and node["ID"] != node_id]
    down = [node for node in alike if node.get("Status") == "down"]
    own = [node for node in nodes if node["ID"] == node_id] if node_id else down
    places = {(node.get("Datacenter"), node.get("Address")) for node in own}
    former = [node for node in down if places == {(node.get("Datacenter"), node.get("Address"))}]
    gone = ([node_id] if node_id and own else []) + [node["ID"] for node in former]
    return gone, [node["ID"] for node in alike if node["ID"] not in gone]


def purge(client: nomad.Client, node_id: str) -> None:
    try:
        client.call("PUT", f"{gate.node_path(node_id)}/purge")
    except nomad.NomadError as error:
        # Somebody else was faster.
        if error.status != NOT_FOUND:
            raise


def member_of(client: nomad.Client, name: str) -> tuple[str, str] | None:
    """The name of a server among the others and its address, as long as they know it."""
    told = client.call("GET", "/v1/agent/members") or {}
    full = f"{name}.{client.connection.region or told.get('ServerRegion')}"
    peers = client.call("GET", "/v1/status/peers") or []
    for member in told.get("Members") or []:
        address = f"{member.get('Addr')}:{(member.get('Tags') or {}).get('port')}"
        if member.get("Name") == full and (member.get("Status") != "left" or address in peers):
            return full, address
    return None


def seems_alive(client: nomad.Client, name: str) -> bool:
    members = (client.call("GET", "/v1/agent/members") or {}).get("Members") or []
    return any(member.get("Name") == name and member.get("Status") == "alive" for member in members)


def leave(client: nomad.Client, name: str, address: str, timeout: float) -> None:
    """Have the servers take one that is stopped out of their midst, and wait until none counts on its vote."""
    # Gossip that still takes it for alive when it is taken out does not hear later that it is back, and nobody adds it.
    # That it has stopped is seen half a minute later; one that runs is told below.
    deadline = time.monotonic() + timeout
    while seems_alive(client, name) and time.monotonic() < deadline:
        time.sleep(PAUSE_S)
    deadline = time.monotonic() + timeout
    client.call("PUT", "/v1/agent/force-leave", query={"node": name, "prune": "true"})
    # Its name goes at once, its vote only when the leader has heard of that.
    while member_of(client, name.rpartition(".")[0]) or address in (client.call("GET", "/v1/status/peers") or []):
        if time.monotonic() > deadline:
            raise nomad.NomadError(
                found=f"the servers still count on {name} ({address}), {timeout:g} s after it left",
                expected="servers that go on without it",
                next_step="check `nomad server members` and `nomad operator raft list-peers` on a server; its agent "
                "must not run",
            )
        time.sleep(PAUSE_S)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **nomad_options.argument_spec(),
            "name": {"type": "str", "required": True},
            "node_id": {"type": "str"},
            "server": {"type": "bool", "default": False},
            "timeout": {"type": "int", "default": 60},
        },
        required_together=nomad_options.REQUIRED_TOGETHER,
        supports_check_mode=True,
    )
    params: dict[str, Any] = module.params
    try:
        client = nomad.Client(nomad_options.connection_of(params), direct=True)
        gone, kept = nodes_of(client, params["name"], params["node_id"])
        member = member_of(client, params["name"]) if params["server"] else None
        if not module.check_mode:
            for node_id in gone:
                purge(client, node_id)
            if member:
                leave(client, *member, params["timeout"])
    except nomad.NomadError as error:
        module.fail_json(msg=f"{platform.node()}: {error}")
    if kept:
        module.warn(
            f"{platform.node()}: more nodes are named {params['name']} and stay in Nomad ({', '.join(kept)}): they "
            "live, or have another datacenter or address. Next step: purge those of the same machine by ID."
        )
    forgotten = gone + ([member[0]] if member else [])
    module.exit_json(changed=bool(forgotten), forgotten=forgotten, kept=kept)


if __name__ == "__main__":
    main()
