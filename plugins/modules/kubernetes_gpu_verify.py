#!/usr/bin/python
# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: kubernetes_gpu_verify
short_description: Prove through Kubernetes that every GPU is there
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - Compares what every node should have, from facts or written by hand, with what pods can get there, and fails with a
    table and a message for each problem when anything is wrong.
  - Asks every few seconds until everything is right or O(timeout) is over, because a device plugin that has just been
    started needs a while to report its GPUs.
  - The words and verdicts are those of M(gpufarm.core.nomad_gpu_verify), so what is expected can be the same for both.
  - A GPU that the device plugin calls unhealthy stays in the capacity of the node and is not allocatable. One lost GPU
    makes the plugin call all GPUs of its node unhealthy, and it does not recover by itself. That is named, with the pod
    to restart once the GPUs are well.
extends_documentation_fragment:
  - gpufarm.core.kubernetes
  - gpufarm.core.kubernetes.actiongroup_kubernetes
  - gpufarm.core.attributes.read_only
options:
  expected:
    description:
      - What the nodes should have. What is left out is not compared; a node of which nothing but the name is given must
        have at least one GPU. An empty list is an error, because a comparison of nothing proves nothing.
    type: list
    elements: dict
    required: true
    suboptions:
      node:
        description:
          - Name of the node in Kubernetes.
        type: str
        required: true
      count:
        description:
          - Number of GPUs, where each MIG device counts as one. The default is the number of O(expected[].uuids), or
            the sum of O(expected[].models) when that is a dictionary.
        type: int
      uuids:
        description:
          - UUIDs of the GPUs that must be there. Kubernetes knows none, so only their number is compared.
            M(gpufarm.core.kubernetes_gpu_job_verify) compares them.
        type: list
        elements: str
      models:
        description:
          - As a dictionary, the number of GPUs of each model. As a list, the models that there must be.
          - A model is named as nvidia-smi does, such as V(NVIDIA H100 80GB HBM3) or V(Tesla T4). It is compared with
            the label of GPU feature discovery, which names one model of the node.
        type: raw
      memory_mib_min:
        description:
          - Memory in MiB that GPUs must have at least, by the label of GPU feature discovery.
        type: int
      driver_version:
        description:
          - Driver version that GPU feature discovery must report, which is the one that nvidia-smi shows on the node.
        type: str
      mig:
        description:
          - V(true) when all devices must be MIG devices, V(false) when none may be one.
        type: bool
      mig_profiles:
        description:
          - Number of MIG devices of each profile, such as C(1g.10gb).
          - With the strategy V(single) of the device plugin they have the name of whole GPUs, and their profile is in
            the label C(nvidia.com/gpu.product) of GPU feature discovery. Where it does not run, only their number is
            compared.
        type: dict
      mig_unknown:
        description:
          - UUIDs of GPUs in MIG mode whose MIG devices nobody tells. They, and MIG devices that are not expected, may
            be there, so that numbers are the least.
        type: list
        elements: str
  timeout:
    description:
      - Seconds to wait until everything is right; V(0) looks once.
    type: int
    default: 120
  allow_extra_nodes:
    description:
      - Whether nodes with GPUs may be there that are not in O(expected). They are named in RV(extra_nodes) either way.
      - The default fits a run that is limited to some hosts. Set it to V(false) where O(expected) is the whole cluster.
    type: bool
    default: true
  require_eligible:
    description:
      - Whether a node that is cordoned counts as a problem.
    type: bool
    default: false
notes:
  - "The codes of problems are: C(node_missing), no node has this name; C(node_down), it is not ready;
    C(node_ineligible), it is cordoned and O(require_eligible=true); C(node_unexpected), a node with GPUs is not in the
    list and O(allow_extra_nodes=false); C(no_devices), Kubernetes has no GPU there; C(gpu_unhealthy), the node
    has GPUs that no pod can get; C(count_mismatch), the number of GPUs is another one; C(sharing_unknown), it is a
    multiple, as where GPUs are shared and GPU feature discovery does not tell; C(model_mismatch), the model is another;
    C(memory_too_small), GPUs have less memory; C(driver_version_stale), another driver version is reported;
    C(mig_mismatch), the MIG devices are others."
  - What only GPU feature discovery tells is not compared where it does not run, and RV(nodes[].not_compared) says so.
  - The user of the kubeconfig needs the right to C(list) nodes. With that to C(list) pods in all namespaces the device
    plugin's pod is named where a node's GPUs are missing or unhealthy.
seealso:
  - module: gpufarm.core.kubernetes_gpu_info
  - module: gpufarm.core.kubernetes_gpu_job_verify
  - module: gpufarm.core.nomad_gpu_verify
"""

EXAMPLES = r"""
- name: Every GPU of the cluster is there
  gpufarm.core.kubernetes_gpu_verify:
    kubeconfig: ~/.kube/farm.conf
    expected:
      - node: gpu01
        models:
          NVIDIA H100 80GB HBM3: 8
        driver_version: 580.159.04
      - node: gpu02
        mig_profiles:
          1g.10gb: 14
    allow_extra_nodes: false
  delegate_to: localhost
  run_once: true

- name: Kubernetes has the GPUs that nvidia-smi shows on each node
  gpufarm.core.kubernetes_gpu_verify:
    expected:
      - "{{ ansible_facts.nvidia_smi | gpufarm.core.kubernetes_expected(inventory_hostname) }}"
  delegate_to: localhost
"""

RETURN = r"""
nodes:
  description: The verdict on every expected node in the order given, then on others that have problems.
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
    verdict:
      description: V(ok) or V(failed).
      type: str
      sample: failed
    gpus_expected:
      description: Number of GPUs that the node should have; null when no number is given.
      type: int
      sample: 8
    gpus_found:
      description: Number of GPUs that pods can get there.
      type: int
      sample: 0
    problems:
      description: What is wrong with the node, as in RV(problems).
      type: list
      elements: dict
      sample: []
    product:
      description: Model in the form of GPU feature discovery; null where it does not run.
      type: str
      sample: NVIDIA-H100-80GB-HBM3
    plugin:
      description: >-
        The device plugin's pod, by whose restart GPUs that are well again become allocatable. Null where the node has
        the number and kind of GPUs that is expected, or may have it (C(sharing_unknown)), where no such pod runs, or
        where pods may not be listed; and beyond the first twenty nodes with such problems.
      type: dict
      sample: {namespace: nvidia-device-plugin, name: nvidia-device-plugin-x7k2p}
    not_compared:
      description: Options of O(expected) that could not be compared, because GPU feature discovery does not tell it.
      type: list
      elements: str
      sample: [models, driver_version]
problems:
  description: All problems of all nodes.
  type: list
  elements: dict
  returned: always, once Kubernetes answered
  contains:
    node:
      description: Name of the node.
      type: str
      sample: gpu01
    code:
      description: One of the codes in the notes.
      type: str
      sample: gpu_unhealthy
    expected:
      description: What was expected, for people.
      type: str
      sample: 8 GPUs
    found:
      description: What was found, for people.
      type: str
      sample: 0 of 8 GPUs allocatable as nvidia.com/gpu
    message:
      description: Node, found, expected and the next step.
      type: str
      sample: >-
        Node gpu01: found 0 of 8 GPUs allocatable as nvidia.com/gpu. Expected: 8 GPUs. Next step: look for a lost GPU
        with nvidia-smi and in the kernel log: one makes the device plugin call all GPUs of the node unhealthy, and it
        never calls them healthy again. Once all are well, restart it with 'kubectl -n nvidia-device-plugin delete pod
        nvidia-device-plugin-x7k2p'.
    uuid:
      description: Always null, because Kubernetes knows no UUID; it is there for who reads both schedulers.
      type: str
      sample: null
extra_nodes:
  description: Names of nodes with GPUs that are not in O(expected), sorted.
  type: list
  elements: str
  returned: always, once Kubernetes answered
  sample: [gpu99]
table:
  description: The verdicts as text in columns, failed nodes first.
  type: str
  returned: always, once Kubernetes answered
  sample: |-
    NODE   STATUS  EXPECTED  FOUND  VERDICT  PROBLEMS
    gpu01  ready   8         0      failed   gpu_unhealthy
    gpu02  ready   14        14     ok       -
waited_s:
  description: Seconds until everything was right, or until the time was over.
  type: float
  returned: always, once Kubernetes answered
  sample: 3.2
"""

import platform
import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufarm.core.plugins.module_utils import gpu_verdicts, kubernetes, kubernetes_options
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_verdicts import Expected, Look
from ansible_collections.gpufarm.core.plugins.module_utils.problem import FoundError

# A list of thousands of nodes takes seconds, so the apiserver gets at least that time to itself.
PAUSE_S = 2.0
CAUSED_BY_PLUGIN = ("no_devices", "gpu_unhealthy", "count_mismatch", "mig_mismatch")


def look_once(
    nodes: list[kubernetes.Node], wanted: list[Expected], params: dict[str, Any], plugins: dict[str, kubernetes.Plugin]
) -> Look:
    verdicts = kubernetes.compare(wanted, nodes, params["allow_extra_nodes"], params["require_eligible"], plugins)
    return Look(verdicts, kubernetes.extra_gpu_nodes(wanted, nodes))


def restartable(plugin: kubernetes.Plugin | None) -> dict[str, str] | None:
    return {"namespace": plugin.namespace, "name": plugin.name} if plugin and plugin.running else None


def look_again(client: kubernetes.Client, wanted: list[Expected], params: dict[str, Any]) -> dict[str, Any]:
    """Look until everything is right or the time is over, and say what came of it."""
    started = time.monotonic()
    deadline = started + max(0, params["timeout"])
    nodes: list[kubernetes.Node] | None = None
    while True:
        asked = time.monotonic()
        try:
            nodes = kubernetes.read_nodes(client)
        except kubernetes.KubernetesError as error:
            # A control plane that starts or is overloaded; an answer that came before counts.
            if not error.transient or (nodes is None and time.monotonic() >= deadline):
                raise
        if nodes is not None and (not look_once(nodes, wanted, params, {}).problems or time.monotonic() >= deadline):
            break
        time.sleep(max(0.0, min(max(PAUSE_S, time.monotonic() - asked), deadline - time.monotonic())))
    look = look_once(nodes, wanted, params, {})
    sick = [problem.node for problem in look.problems if problem.code in CAUSED_BY_PLUGIN]
    plugins = kubernetes.read_plugins(client, sick) if sick else {}
    if plugins:
        look = look_once(nodes, wanted, params, plugins)
    result = gpu_verdicts.result_of(look, time.monotonic() - started)
    by_name = {node["name"]: node for node in nodes}
    wishes = {wish.node: wish for wish in wanted}
    for entry in result["nodes"]:
        node = by_name.get(entry["name"])
        entry["product"] = node["product"] if node else None
        entry["plugin"] = restartable(plugins.get(entry["name"]))
        wish = wishes.get(entry["name"])
        entry["not_compared"] = kubernetes.not_compared(wish, node) if wish else []
    if look.problems:
        result["msg"] = f"{platform.node()}: {gpu_verdicts.message(look, time.monotonic() - started)}"
    return result


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **kubernetes_options.argument_spec(),
            "expected": gpu_verdicts.EXPECTED,
            "timeout": {"type": "int", "default": 120},
            "allow_extra_nodes": {"type": "bool", "default": True},
            "require_eligible": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    try:
        wanted = gpu_verdicts.read_expected(module.params["expected"])
        client = kubernetes.Client(kubernetes_options.connection_of(module.params))
        result = look_again(client, wanted, module.params)
    except FoundError as error:
        module.fail_json(msg=f"{platform.node()}: {error}")
    if result["problems"]:
        module.fail_json(**result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
