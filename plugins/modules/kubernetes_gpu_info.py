#!/usr/bin/python
# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: kubernetes_gpu_info
short_description: List the GPUs that Kubernetes knows
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - Lists the nodes of a cluster with the GPUs that NVIDIA's device plugin offers on them, by kind, and the pods that
    hold some. Lists are read a page at a time, so a cluster of thousands of nodes needs no time limit of its own.
  - A kind is a resource, C(nvidia.com/gpu) or one for each MIG profile such as C(nvidia.com/mig-1g.10gb). Kubernetes
    counts GPUs and knows no UUID.
  - A model, the size of memory and the driver's version are known where GPU feature discovery labels the node, which
    the chart of the device plugin brings with C(gfd.enabled=true). Otherwise they are null.
  - C(kubectl) asks the apiserver, so a kubeconfig is enough, whatever way to log in it has.
extends_documentation_fragment:
  - gpufarm.core.kubernetes
  - gpufarm.core.kubernetes.actiongroup_kubernetes
  - gpufarm.core.attributes.read_only
options:
  label_selector:
    description:
      - Kubernetes' own expression that chooses nodes by their labels, evaluated by the apiserver, such as
        V(nvidia.com/gpu.present=true).
    type: str
  node_name:
    description:
      - Only nodes with one of these names. O(label_selector) must be true for them, too.
      - A name that Kubernetes does not know is no error.
    type: list
    elements: str
  gather_pods:
    description:
      - Also tell how many GPUs are in use and by which pods. These are more requests, for the pods of all namespaces
        that have not ended; of eight nodes or fewer with GPUs each is asked for its own.
    type: bool
    default: true
  only_gpu_nodes:
    description:
      - Leave out nodes without a GPU.
    type: bool
    default: false
notes:
  - The user of the kubeconfig needs the right to C(list) nodes, and pods in all namespaces with O(gather_pods=true).
seealso:
  - module: gpufarm.core.kubernetes_gpu_gate
  - module: gpufarm.core.kubernetes_gpu_verify
  - module: gpufarm.core.nomad_gpu_info
"""

EXAMPLES = r"""
- name: Read which GPUs pods hold
  gpufarm.core.kubernetes_gpu_info:
    kubeconfig: ~/.kube/farm.conf
    only_gpu_nodes: true
  register: farm
  delegate_to: localhost
  run_once: true

- name: Show how many GPUs pods can still get on each node, each as often as it is offered
  ansible.builtin.debug:
    msg: >-
      {{ item.name }}:
      {{ [(item.resources | map(attribute='allocatable') | sum)
      - (item.resources | map(attribute='used') | sum), 0] | max }}
  loop: "{{ farm.nodes }}"
  loop_control:
    label: "{{ item.name }}"
"""

RETURN = r"""
nodes:
  description: The nodes, sorted by name.
  type: list
  elements: dict
  returned: success
  contains:
    name:
      description: Name of the node.
      type: str
      sample: gpu01
    id:
      description: Kubernetes' UID of the node.
      type: str
      sample: 4f3c35b2-9d43-4c5f-9a41-9b9a9a0d6a51
    resource_version:
      description: >-
        Kubernetes' C(metadata.resourceVersion) of the node. As a number it is what
        O(gpufarm.core.kubernetes_gpu_gate#module:nodes[].index) takes where it is read before the probe.
      type: str
      sample: "48213"
    status:
      description: >-
        V(ready) or V(not ready), as the kubelet says; V(unknown) where Kubernetes has lost it.
      type: str
      sample: ready
    schedulable:
      description: Whether the scheduler may place pods on the node; V(false) where it is cordoned.
      type: bool
      sample: true
    closed_for:
      description: >-
        Why the gate or a maintenance has cordoned the node; null when neither has, or it takes work.
      type: str
      sample: "GPU GPU-551ac2af-e5cb-e273-ad80-0bc34a4646c1: found Xid 79. Expected: none. Next step: restart the node."
    taints:
      description: Taints of the node, from its specification.
      type: list
      elements: dict
      contains:
        key:
          description: Key of the taint.
          type: str
          sample: nvidia.com/gpu
        value:
          description: Its value; null when it has none.
          type: str
          sample: present
        effect:
          description: What becomes of pods that do not tolerate it.
          type: str
          sample: NoSchedule
    kubelet_version:
      description: Version of the kubelet; null when the node does not tell.
      type: str
      sample: v1.34.1
    labels:
      description: The labels of the node that begin with C(nvidia.com/).
      type: dict
      sample: {nvidia.com/gpu.present: "true", nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3}
    resources:
      description: The kinds of GPU that the node has, sorted by name. What is no longer offered is left out.
      type: list
      elements: dict
      contains:
        name:
          description: Name of the resource, as pods ask for it.
          type: str
          sample: nvidia.com/mig-1g.10gb
        mig_profile:
          description: >-
            MIG profile in that name, with a full stop for C(+); null for what has none, which with the strategy
            V(single) can be MIG devices too.
          type: str
          sample: 1g.10gb
        shared:
          description: Whether several pods get the same GPU, by time slices or MPS, as far as labels and names tell it.
          type: bool
          sample: false
        replicas:
          description: How often each GPU is offered, from its label; 1 where that is not told.
          type: int
          sample: 1
        capacity:
          description: Number that the node has, from C(status.capacity).
          type: int
          sample: 7
        allocatable:
          description: Number that pods can get, which are those that the device plugin calls healthy.
          type: int
          sample: 7
        used:
          description: >-
            Number that pods hold that have not ended, by what they request; null with O(gather_pods=false).
          type: int
          sample: 2
    gpus_capacity:
      description: Number of GPUs and MIG devices of the node, each counted once however often it is offered.
      type: int
      sample: 8
    gpus_allocatable:
      description: The same of those that pods can get. 0 with a capacity mostly means that one GPU is lost.
      type: int
      sample: 8
    gpus_used:
      description: >-
        What pods hold of all kinds together, as they request it; where GPUs are shared that can be more than there are.
        Null with O(gather_pods=false).
      type: int
      sample: 3
    product:
      description: >-
        Model in the form of GPU feature discovery, of several models on the node one; null where it does not run.
      type: str
      sample: NVIDIA-H100-80GB-HBM3
    memory_mib:
      description: Memory of a GPU in MiB, from GPU feature discovery; null where it does not run.
      type: int
      sample: 81559
    driver_version:
      description: Version of the driver, from GPU feature discovery; null where it does not run.
      type: str
      sample: 580.159.04
    mig_strategy:
      description: MIG strategy of the device plugin, from GPU feature discovery; null where it does not tell it.
      type: str
      sample: mixed
    pods:
      description: The pods that hold GPUs of the node, sorted; null with O(gather_pods=false).
      type: list
      elements: dict
      contains:
        namespace:
          description: Namespace of the pod.
          type: str
          sample: research
        name:
          description: Name of the pod.
          type: str
          sample: training-0
        phase:
          description: Phase of the pod, V(Pending), V(Running) or V(Unknown).
          type: str
          sample: Running
        gpus:
          description: Number of each kind that it holds.
          type: dict
          sample: {nvidia.com/gpu: 2}
gpu_count:
  description: Sum of RV(nodes[].gpus_capacity).
  type: int
  returned: success
  sample: 12
"""

import platform
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufarm.core.plugins.module_utils import (
    gate,
    kubernetes,
    kubernetes_gate,
    kubernetes_options,
)


def told(node: kubernetes.Node) -> dict[str, Any]:
    """A node as it is returned: annotations of all tools are no business of GPUs."""
    values: dict[str, Any] = {key: value for key, value in node.items() if key != "annotations"}
    marks = kubernetes_gate.gate_node(node).meta
    return {**values, "closed_for": None if node["schedulable"] else gate.closed_for(marks)}


def apply(params: dict[str, Any]) -> dict[str, Any]:
    client = kubernetes.Client(kubernetes_options.connection_of(params))
    nodes = kubernetes.read_nodes(client, params["label_selector"])
    if params["node_name"] is not None:
        nodes = [node for node in nodes if node["name"] in params["node_name"]]
    if params["only_gpu_nodes"]:
        nodes = [node for node in nodes if node["gpus_capacity"]]
    if params["gather_pods"]:
        uses = kubernetes.read_uses(client, [node["name"] for node in nodes if node["resources"]])
        nodes = [kubernetes.with_uses(node, uses.get(node["name"], [])) for node in nodes]
    return {
        "changed": False,
        "nodes": [told(node) for node in nodes],
        "gpu_count": sum(node["gpus_capacity"] for node in nodes),
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **kubernetes_options.argument_spec(),
            "label_selector": {"type": "str"},
            "node_name": {"type": "list", "elements": "str"},
            "gather_pods": {"type": "bool", "default": True},
            "only_gpu_nodes": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    try:
        result = apply(module.params)
    except kubernetes.KubernetesError as error:
        module.fail_json(msg=f"{platform.node()}: {error}")
    module.exit_json(**result)


if __name__ == "__main__":
    main()
