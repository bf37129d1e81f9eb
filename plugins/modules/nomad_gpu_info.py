#!/usr/bin/python
# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: nomad_gpu_info
short_description: List the GPUs that Nomad knows
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - Lists Nomad's nodes with their GPUs, as the device plugins reported them. One request reads the whole farm.
  - A GPU is a device of the type C(gpu). HashiCorp's NVIDIA plugin lists each MIG instance as a device of its own and
    not the GPU that it is on. The attributes of a device are those of the first GPU of its model on that node.
  - C(healthy) is what the plugin says, and HashiCorp's plugin never says that a GPU is unhealthy.
extends_documentation_fragment:
  - gpufarm.core.nomad
  - gpufarm.core.nomad.actiongroup_nomad
  - gpufarm.core.attributes.read_only
options:
  filter:
    description:
      - Expression of Nomad's own filter language that chooses the nodes, evaluated by the server, such as
        V(NodeClass == "gpu" and Status == "ready").
      - See U(https://developer.hashicorp.com/nomad/api-docs#filtering).
    type: str
  node_name:
    description:
      - Only nodes with one of these names. O(filter) must be true for them, too.
      - A name that Nomad does not know is no error.
    type: list
    elements: str
  gather_allocations:
    description:
      - Also tell which allocation holds each GPU. This is a second request, for the allocations of O(namespace), or of
        all namespaces that the token may read when it is not set.
    type: bool
    default: false
  gather_usage:
    description:
      - Also tell how many GPUs each namespace, job and node pool uses, of the nodes that O(filter) and O(node_name)
        choose, and which budget a namespace has. Requests for the allocations, as with O(gather_allocations), and for
        the namespaces, of which a token sees those that it has a right in. Of one whose jobs it may not read it counts
        none, so it needs C(namespace:read-job) in all.
    type: bool
    default: false
  gather_reasons:
    description:
      - Also tell why the gate, or a maintenance, has taken nodes with GPUs out of work. The list of nodes does not have
        it, so each such node is read by a request of its own, the first fifty of them.
    type: bool
    default: false
  gather_gpus:
    description:
      - With V(false) no node has GPUs, and the answer is a hundredth of the size. What is asked of nodes with GPUs only
        cannot be had then; O(gather_usage) can.
    type: bool
    default: true
  only_gpu_nodes:
    description:
      - Leave out nodes without a GPU.
    type: bool
    default: false
seealso:
  - module: gpufarm.core.nomad_gpu_verify
  - module: gpufarm.core.nomad_tenancy
"""

EXAMPLES = r"""
- name: Read which GPU is used by which job
  gpufarm.core.nomad_gpu_info:
    address: https://nomad.example.com:4646
    token: "{{ nomad_token }}"
    filter: Datacenter == "dc1" and Status == "ready"
    gather_allocations: true
  register: farm
  delegate_to: localhost
  run_once: true

- name: Show the GPUs that no job holds
  ansible.builtin.debug:
    msg: "{{ farm.nodes | map(attribute='gpus') | flatten | selectattr('allocation', 'none') | map(attribute='uuid') }}"

- name: Read how many GPUs each team uses, and may use
  gpufarm.core.nomad_gpu_info:
    address: https://nomad.example.com:4646
    token: "{{ nomad_token }}"
    gather_gpus: false
    gather_usage: true
  register: use
  delegate_to: localhost
  run_once: true
"""

RETURN = r"""
nodes:
  description: >-
    The nodes, sorted by name. Of several with one name the last one counts: the newest that is not down, because a
    client that lost its data registers anew.
  type: list
  elements: dict
  returned: success
  contains:
    id:
      description: Nomad's ID of the node.
      type: str
      sample: 282de321-2e0d-83b0-30d3-e93839ed5f74
    name:
      description: Name of the node.
      type: str
      sample: gpu01
    address:
      description: Address at which the node advertises its HTTP API.
      type: str
      sample: 192.0.2.10
    status:
      description: Status of the node.
      type: str
      sample: ready
    eligibility:
      description: Whether the scheduler places work on the node, V(eligible) or V(ineligible).
      type: str
      sample: eligible
    drain:
      description: Whether the node is being drained.
      type: bool
      sample: false
    datacenter:
      description: Datacenter of the node.
      type: str
      sample: dc1
    node_pool:
      description: Node pool; null for Nomad before 1.6.
      type: str
      sample: default
    node_class:
      description: Node class; null when it has none.
      type: str
      sample: gpu
    version:
      description: Version of Nomad on the node.
      type: str
      sample: 1.11.3
    create_index:
      description: Nomad's index of the node's registration.
      type: int
      sample: 812
    modify_index:
      description: Nomad's index of the node's last change.
      type: int
      sample: 1040
    closed_for:
      description: >-
        Why the gate or a maintenance has taken the node out of work; null when neither has, when it is not known, or
        with O(gather_reasons=false).
      type: str
      sample: "maintenance: driver branch 580"
    gpus:
      description: GPUs of the node.
      type: list
      elements: dict
      contains:
        uuid:
          description: UUID as nvidia-smi shows it; of MIG devices the one that starts with C(MIG-).
          type: str
          sample: GPU-4404041a-04cf-1ccf-9e70-f139a9b1e23c
        model:
          description: Name of the model.
          type: str
          sample: NVIDIA H100 80GB HBM3
        vendor:
          description: Vendor in Nomad's device ID.
          type: str
          sample: nvidia
        type:
          description: Type in Nomad's device ID.
          type: str
          sample: gpu
        device_id:
          description: Nomad's device ID, as a job's C(device) block can ask for it.
          type: str
          sample: nvidia/gpu/NVIDIA H100 80GB HBM3
        memory_mib:
          description: Memory in MiB; null when the plugin does not report it.
          type: int
          sample: 81559
        driver_version:
          description: Driver version that Nomad knows. It can be older than the driver is; null when not reported.
          type: str
          sample: 580.159.04
        healthy:
          description: Whether the plugin calls the device healthy.
          type: bool
          sample: true
        health_description:
          description: Why the device is not healthy; null when no reason is given.
          type: str
          sample: null
        pci_bus_id:
          description: PCI address as the plugin writes it; null when not reported.
          type: str
          sample: "00000000:1A:00.0"
        numa_node:
          description: NUMA node of that PCI address; null when the agent does not report it.
          type: int
          sample: 0
        mig:
          description: Whether this is a MIG device.
          type: bool
          sample: false
        mig_profile:
          description: MIG profile in the model's name; null when there is none.
          type: str
          sample: 1g.10gb
        allocation:
          description: The allocation that holds the GPU; null when none does, or with O(gather_allocations=false).
          type: dict
          contains:
            id:
              description: ID of the allocation.
              type: str
              sample: 5456bd7a-9fc0-c0dd-6131-cbee77f57577
            namespace:
              description: Namespace of the job.
              type: str
              sample: default
            job_id:
              description: ID of the job.
              type: str
              sample: training
            task_group:
              description: Name of the task group.
              type: str
              sample: trainer
            task:
              description: Name of the task that asked for the device.
              type: str
              sample: train
            client_status:
              description: Status of the allocation on its client.
              type: str
              sample: running
        allocation_id:
          description: ID of that allocation, for short.
          type: str
          sample: 5456bd7a-9fc0-c0dd-6131-cbee77f57577
usage:
  description: >-
    GPUs that allocations hold, by who uses them. A MIG device counts as one, as it does for Nomad's scheduler. Null
    with O(gather_usage=false).
  type: dict
  returned: success
  contains:
    namespaces:
      description: The namespaces that the token sees, sorted by name.
      type: list
      elements: dict
      contains:
        namespace:
          description: Name of the namespace.
          type: str
          sample: research
        gpus:
          description: Number of GPUs that its jobs hold.
          type: int
          sample: 6
        budget:
          description: >-
            Number of GPUs that they may hold in a region, as M(gpufarm.core.nomad_tenancy) has declared it; null where
            nobody has.
          type: int
          sample: 8
    jobs:
      description: The jobs that hold GPUs, the largest first.
      type: list
      elements: dict
      contains:
        namespace:
          description: Namespace of the job.
          type: str
          sample: research
        job_id:
          description: ID of the job.
          type: str
          sample: training
        gpus:
          description: Number of GPUs that it holds.
          type: int
          sample: 4
    node_pools:
      description: The node pools that have nodes, sorted by name.
      type: list
      elements: dict
      contains:
        node_pool:
          description: Name of the node pool.
          type: str
          sample: default
        nodes:
          description: Number of its nodes.
          type: int
          sample: 2
        gpus:
          description: Number of their GPUs; null with O(gather_gpus=false).
          type: int
          sample: 12
        gpus_used:
          description: Number of these that allocations hold.
          type: int
          sample: 6
gpu_count:
  description: Number of GPUs in RV(nodes).
  type: int
  returned: success
  sample: 12
index:
  description: Nomad's index of the answer.
  type: int
  returned: success
  sample: 1042
"""

import contextlib
import platform
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufarm.core.plugins.module_utils import gate, nomad, nomad_options

# The filter is a part of the address, which proxies limit to 8 KiB; more names are picked from the whole answer.
FILTERED_NAMES = 50
# As many as somebody still reads.
READ_REASONS = 50


def read_nodes(
    client: nomad.Client, expression: str | None, names: list[str], with_gpus: bool
) -> tuple[list[nomad.Node], int]:
    """The nodes, described, and the index of the answer."""
    conditions = [expression] if expression else []
    by_name = nomad.name_filter(names)
    if names and len(names) <= FILTERED_NAMES:
        conditions.append(by_name)
    query = {"resources": "true"} if with_gpus else {}
    if conditions:
        query["filter"] = " and ".join(f"({condition})" for condition in conditions)
    answer = client.items("/v1/nodes", query)
    wanted = set(names)
    nodes = [nomad.describe_node(node) for node in answer.items if not wanted or node.get("Name") in wanted]
    return sorted(nodes, key=lambda node: (node["name"], nomad.rank(node), node["id"])), answer.index


def read_allocations(client: nomad.Client) -> dict[tuple[str, str], dict[str, Any]]:
    query = dict(nomad.ALLOCATIONS_QUERY)
    if not client.connection.namespace:
        query["namespace"] = "*"
    return nomad.devices_in_use(client.items("/v1/allocations", query).items)


def read_namespaces(client: nomad.Client) -> list[dict[str, Any]]:
    only = client.connection.namespace
    every = client.items("/v1/namespaces", {}).items
    return [each for each in every if not only or only == "*" or each.get("Name") == only]


def read_reasons(client: nomad.Client, nodes: list[nomad.Node]) -> dict[str, str | None]:
    """IDs of closed nodes to why they are, by the gate or by the maintenance, as far as Nomad tells it."""
    closed = [node["id"] for node in nodes if node["gpus"] and node["eligibility"] != "eligible"]
    reasons: dict[str, str | None] = {}
    # What one node does not tell is no failure; it is asked once.
    hurried = nomad.Client(client.connection, repeat=())
    for node_id in closed[:READ_REASONS]:
        with contextlib.suppress(nomad.NomadError):
            meta = (hurried.call("GET", gate.node_path(node_id)) or {}).get("Meta") or {}
            reasons[node_id] = gate.closed_for(meta)
    return reasons


def apply(params: dict[str, Any]) -> dict[str, Any]:
    connection = nomad_options.connection_of(params)
    wanted = [name for name in ("only_gpu_nodes", "gather_reasons", "gather_allocations") if params[name]]
    if wanted and not params["gather_gpus"]:
        raise nomad.NomadError(
            found=f"gather_gpus is false and {wanted[0]} is true",
            expected="nodes with their GPUs, of which that is asked",
            next_step=f"leave out gather_gpus or {wanted[0]}",
        )
    client = nomad.Client(connection)
    nodes, index = read_nodes(client, params["filter"], params["node_name"] or [], params["gather_gpus"])
    if params["only_gpu_nodes"]:
        nodes = [node for node in nodes if node["gpus"]]
    in_use = read_allocations(client) if params["gather_allocations"] or params["gather_usage"] else {}
    usage = None
    if params["gather_usage"]:
        usage = nomad.usage_of(in_use, nodes, read_namespaces(client), params["gather_gpus"])
    reasons = read_reasons(client, nodes) if params["gather_reasons"] else {}

    def held(node: nomad.Node, gpu: nomad.Gpu) -> dict[str, Any]:
        allocation = in_use.get((node["id"], gpu["uuid"])) if params["gather_allocations"] else None
        return {**gpu, "allocation": allocation, "allocation_id": allocation["id"] if allocation else None}

    return {
        "changed": False,
        "nodes": [
            {**node, "closed_for": reasons.get(node["id"]), "gpus": [held(node, gpu) for gpu in node["gpus"]]}
            for node in nodes
        ],
        "usage": usage,
        "gpu_count": sum(len(node["gpus"]) for node in nodes),
        "index": index,
    }


def argument_spec() -> dict[str, Any]:
    return {
        **nomad_options.argument_spec(),
        "filter": {"type": "str"},
        "node_name": {"type": "list", "elements": "str"},
        "gather_allocations": {"type": "bool", "default": False},
        "gather_usage": {"type": "bool", "default": False},
        "gather_reasons": {"type": "bool", "default": False},
        "gather_gpus": {"type": "bool", "default": True},
        "only_gpu_nodes": {"type": "bool", "default": False},
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec=argument_spec(),
        required_together=nomad_options.REQUIRED_TOGETHER,
        supports_check_mode=True,
    )
    try:
        result = apply(module.params)
    except nomad.NomadError as error:
        module.fail_json(msg=f"{platform.node()}: {error}")
    module.exit_json(**result)


if __name__ == "__main__":
    main()
