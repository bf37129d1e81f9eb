#!/usr/bin/python
# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: kubernetes_gpu_labels
short_description: Label Kubernetes nodes with what NVIDIA's GPU feature discovery says of them
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - Asks NVIDIA's GPU feature discovery, which is in the image of the device plugin, once in the plugin's pod of each
    node, and gives the node the labels that it says, such as C(nvidia.com/gpu.product) and C(nvidia.com/gpu.memory), by
    which pods choose their nodes.
  - So the labels are those of this run. Where GPU feature discovery runs by itself, beside node-feature-discovery, the
    node keeps what that sets.
  - What it has set stands in the node's annotation C(gpufarm.core/gpu-labels), so that a label which no longer holds
    goes.
extends_documentation_fragment:
  - gpufarm.core.kubernetes
  - gpufarm.core.kubernetes.actiongroup_kubernetes
attributes:
  check_mode:
    support: full
    description: Asks as without, and changes nothing.
  diff_mode:
    support: none
    description: RV(nodes) tells the labels.
  idempotent:
    support: full
    description: A node that has its labels is not touched.
  platform:
    description: Runs wherever the apiserver can be reached.
options:
  state:
    description:
      - With V(absent) every node loses the labels that this module has set.
      - With V(refreshed) those of O(nodes) that have labels of this module's are asked and labelled anew, as after
        another driver or MIG layout. A pod that does not run yet is a failure, so that the task can be tried again.
    type: str
    choices: [present, refreshed, absent]
    default: present
  nodes:
    description:
      - Names of nodes in Kubernetes, which O(state=refreshed) needs. Others are not looked at, and those without labels
        of this module's, or where GPU feature discovery runs by itself, keep what they have.
    type: list
    elements: str
  namespace:
    description:
      - Namespace of the device plugin's pods. O(state=refreshed) finds them in all namespaces, whatever their labels.
    type: str
    default: kube-system
  selector:
    description:
      - Labels of the device plugin's pods. The default is that of NVIDIA's own manifest; those of its chart have
        C(app.kubernetes.io/name=nvidia-device-plugin).
    type: str
    default: name=nvidia-device-plugin-ds
notes:
  - The user of the kubeconfig needs the right to C(list) nodes, to C(list) and C(get) pods (with O(state=refreshed) in
    all namespaces), to C(get) and C(patch) nodes, and to C(create) C(pods/exec).
seealso:
  - module: gpufarm.core.kubernetes_gpu_info
"""

EXAMPLES = r"""
- name: Have nodes labelled with their GPUs
  gpufarm.core.kubernetes_gpu_labels:
    kubeconfig: ~/.kube/config
  delegate_to: localhost
  run_once: true

- name: Have the labels of a node whose MIG layout was changed
  gpufarm.core.kubernetes_gpu_labels:
    kubeconfig: ~/.kube/config
    state: refreshed
    nodes: [gpu01]
  delegate_to: localhost
  register: refreshed
  until: refreshed is succeeded
  retries: 12
  delay: 5
"""

RETURN = r"""
nodes:
  description: >-
    Each node on which the device plugin runs, or that had labels of this module's, sorted by name. With
    O(state=refreshed) those of O(nodes) whose labels are this module's.
  type: list
  elements: dict
  returned: always
  contains:
    name:
      description: Name of the node in Kubernetes.
      type: str
      sample: gpu01
    action:
      description: >-
        V(labelled), V(cleared), V(left) where GPU feature discovery runs by itself, V(none) where nothing was to be
        done, V(waiting) with O(state=refreshed) for a pod that does not run yet, or V(failed).
      type: str
      sample: labelled
    message:
      description: What was found, with labels that Kubernetes does not take and that are left out, or what went wrong.
      type: str
      sample: 18 labels
    labels:
      description: >-
        The node's labels of C(nvidia.com) as GPU feature discovery has told them, or as the node has them where it was
        left as it is.
      type: dict
      sample: {"nvidia.com/gpu.product": "NVIDIA-H200", "nvidia.com/gpu.memory": "143771", "nvidia.com/gpu.count": "8"}
"""

import dataclasses
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufarm.core.plugins.module_utils import kubernetes, kubernetes_labels, kubernetes_options
from ansible_collections.gpufarm.core.plugins.module_utils.problem import FoundError


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **kubernetes_options.argument_spec(),
            "state": {"type": "str", "choices": ["present", "refreshed", "absent"], "default": "present"},
            "nodes": {"type": "list", "elements": "str"},
            "namespace": {"type": "str", "default": "kube-system"},
            "selector": {"type": "str", "default": "name=nvidia-device-plugin-ds"},
        },
        required_if=[("state", "refreshed", ["nodes"])],
        supports_check_mode=True,
    )
    params: dict[str, Any] = module.params
    try:
        client = kubernetes.Client(kubernetes_options.connection_of(params))
        if params["state"] == "absent":
            done = kubernetes_labels.clear(client, module.check_mode)
        elif params["state"] == "refreshed":
            done = kubernetes_labels.refresh(client, params["nodes"], module.check_mode)
        else:
            done = kubernetes_labels.label(client, params["namespace"], params["selector"], module.check_mode)
    except FoundError as error:
        module.fail_json(msg=str(error), nodes=[])
    result = {
        "changed": any(each.action in ("labelled", "cleared") for each in done),
        "nodes": [dataclasses.asdict(each) for each in done],
    }
    failed = [f"{each.name}: {each.message}" for each in done if each.action in ("failed", "waiting")]
    if failed:
        module.fail_json(msg="; ".join(failed), **result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
