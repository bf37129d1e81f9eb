#!/usr/bin/python
# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: kubernetes_node_maintenance
short_description: Take a Kubernetes node out of work for a change, and put it back
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - With O(state=out), cordons a node and sees it empty of pods, or refuses where some run there. Pods of DaemonSets and
    those that the kubelet has by itself stay and do not count.
  - With O(state=in), gives the node back what it was before; one that was cordoned already stays cordoned. Whether its
    GPUs are well is to be looked at before, as the role P(gpufarm.core.node_maintenance#role) does.
  - What it is out for and since when is among the node's annotations (C(gpufarm.core/maintenance)), so a run that ended
    in between is finished by the next one. M(gpufarm.core.kubernetes_gpu_gate) uncordons no node that has this mark.
extends_documentation_fragment:
  - gpufarm.core.kubernetes
  - gpufarm.core.kubernetes.actiongroup_kubernetes
  - gpufarm.core.maintenance
attributes:
  check_mode:
    support: full
    description: Refuses as without, changes nothing, and waits for nothing but an answer.
  diff_mode:
    support: none
    description: RV(message) tells what was done.
  platform:
    description: Runs wherever the apiserver can be reached.
options:
  node:
    description:
      - Name of the node in Kubernetes.
    type: str
    required: true
  policy:
    description:
      - What becomes of pods that run there. With V(refuse) the module fails and nothing is changed. With V(drain) they
        are evicted, as far as their disruption budgets allow it, and what they keep in volumes of kind C(emptyDir) is
        lost. Pods of jobs, and pods that nothing would start again, have O(deadline) to end before.
    type: str
    choices: [refuse, drain]
    default: refuse
  deadline:
    description:
      - Seconds that pods of jobs, and pods that nothing would start again, have to end by themselves before they are
        evicted.
    type: int
    default: 3600
notes:
  - Five minutes after O(deadline) the module gives up where pods still run, and the node stays cordoned.
  - An apiserver that has too much to do, or cannot be reached, has three minutes at each step.
  - Where Ansible ends before the node is empty, so does this module, and the node keeps its mark.
  - The user of the kubeconfig needs the right to C(get) and C(patch) nodes, to C(list) pods, and to C(create)
    C(pods/eviction).
seealso:
  - module: gpufarm.core.kubernetes_gpu_gate
  - module: gpufarm.core.nomad_node_maintenance
"""

EXAMPLES = r"""
- name: Have no work on the node
  gpufarm.core.kubernetes_node_maintenance:
    node: gpu01
    state: out
    change: new firmware
    policy: drain
    deadline: 600
  delegate_to: localhost

- name: Install the firmware
  ansible.builtin.command: /opt/vendor/update-firmware

- name: Let the node work again
  gpufarm.core.kubernetes_node_maintenance:
    node: gpu01
    state: in
  delegate_to: localhost
"""

RETURN = r"""
action:
  description: V(out), V(in), or V(none) where nothing was to be done.
  type: str
  returned: success
  sample: out
message:
  description: What was done and why, or why nothing was to be done.
  type: str
  returned: success
  sample: out for new firmware, after it was drained of default/train-0 (2 GPUs)
maintenance:
  description: What the node is out of work for, after this run; null where it is not.
  type: str
  returned: success
  sample: new firmware
gpus_before:
  description: >-
    Number of GPUs, or of MIG devices, that the node had for pods when it was taken out, with O(state=in); null where
    nobody had taken it out.
  type: int
  returned: success
  sample: 8
closed:
  description: Whether the owner has the node out after a run with O(state=out) that failed, or may have.
  type: bool
  returned: failure
  sample: false
pods:
  description: What ran there before, and was moved away.
  type: list
  elements: dict
  returned: success
  contains:
    namespace:
      description: Namespace of the pod.
      type: str
      sample: default
    name:
      description: Name of the pod.
      type: str
      sample: train-0
    gpus:
      description: Number of GPUs, or of MIG devices, that it held.
      type: int
      sample: 2
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufarm.core.plugins.module_utils import (
    kubernetes,
    kubernetes_maintenance,
    kubernetes_options,
    maintenance,
    signals,
)
from ansible_collections.gpufarm.core.plugins.module_utils.problem import FoundError


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **kubernetes_options.argument_spec(),
            "node": {"type": "str", "required": True},
            "state": {"type": "str", "choices": ["out", "in"], "required": True},
            "owner": {"type": "str", "default": "gpufarm.core"},
            "change": {"type": "str"},
            "policy": {
                "type": "str",
                "choices": [maintenance.REFUSE, maintenance.DRAIN],
                "default": maintenance.REFUSE,
            },
            "deadline": {"type": "int", "default": 3600},
        },
        required_if=[("state", "out", ["change"])],
        supports_check_mode=True,
    )
    params: dict[str, Any] = module.params
    gone = signals.watch_controller()
    work = None
    try:
        if params["deadline"] < 1:
            raise kubernetes.KubernetesError(
                f"deadline is {params['deadline']}", "seconds, 1 or more", "correct the option"
            )
        client = kubernetes.Client(kubernetes_options.connection_of(params))
        work = kubernetes_maintenance.Maintenance(client, params["node"], gone=gone)
        if params["state"] == "out":
            plan = maintenance.Plan(
                params["change"], params["owner"], params["policy"], params["deadline"], module.check_mode
            )
            result = work.take_out(plan)
        else:
            result = work.put_back(params["owner"], module.check_mode)
    except FoundError as error:
        told = f"Node {params['node']}: {error}"
        if gone():
            # The journal alone still takes it.
            module.log(told)
        module.fail_json(msg=told, closed=bool(work and work.closed))
    if result.warning:
        module.warn(f"Node {params['node']}: {result.warning}")
    module.exit_json(
        changed=result.action != "none",
        action=result.action,
        message=result.message,
        maintenance=result.maintenance,
        gpus_before=result.gpus,
        pods=[{"namespace": each.namespace, "name": each.name, "gpus": each.gpus} for each in result.work],
    )


if __name__ == "__main__":
    main()
