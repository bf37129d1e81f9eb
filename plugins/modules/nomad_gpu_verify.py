#!/usr/bin/python
# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: nomad_gpu_verify
short_description: Prove through Nomad that every GPU is there
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - Compares what every node should have, from facts or written by hand, with what Nomad reports, and fails with a table
    and a message for each problem when anything is wrong.
  - Waits with Nomad's blocking queries until everything is right or O(timeout) is over, because a node that has just
    been started needs a while to report its GPUs.
  - Also finds UUIDs that more than one node reports, as cloned images do.
  - HashiCorp's plugin lists each MIG instance as a device, and not the GPU that it is on. What is expected of a node
    with MIG is thus its MIG devices.
extends_documentation_fragment:
  - gpufarm.core.nomad
  - gpufarm.core.nomad.actiongroup_nomad
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
          - Name of the node in Nomad, or its ID.
        type: str
        required: true
      count:
        description:
          - Number of GPUs. The default is the number of O(expected[].uuids), or the sum of O(expected[].models) when
            that is a dictionary.
        type: int
      uuids:
        description:
          - UUIDs of exactly the GPUs that must be there.
        type: list
        elements: str
      models:
        description:
          - As a dictionary, the number of GPUs of each model. As a list, the models that there must be, and no others,
            whatever their number.
          - A model is named as nvidia-smi does, such as V(NVIDIA H100 80GB HBM3) or V(Tesla T4).
        type: raw
      memory_mib_min:
        description:
          - Memory in MiB that each GPU must have at least.
        type: int
      driver_version:
        description:
          - Driver version that Nomad must report, which is the one that nvidia-smi shows on the node.
        type: str
      mig:
        description:
          - V(true) when all devices must be MIG devices, V(false) when none may be one.
        type: bool
      mig_profiles:
        description:
          - Number of MIG devices of each profile, such as C(1g.10gb), as the names of the devices tell it.
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
      - The default fits a run that is limited to some hosts. Set it to V(false) where O(expected) is the whole farm.
    type: bool
    default: true
  require_eligible:
    description:
      - Whether a node that is ineligible or drained counts as a problem.
    type: bool
    default: false
notes:
  - "The codes of problems are: C(node_missing), no node has this name; C(node_duplicate), several living nodes have it;
    C(node_down), its status is not ready; C(node_ineligible), it takes no work and O(require_eligible=true);
    C(node_unexpected), a node with GPUs is not in the list and O(allow_extra_nodes=false); C(no_devices), Nomad reports
    not one GPU on the node; C(gpu_missing), a UUID is not there; C(gpu_unexpected), a UUID is there that is not listed;
    C(count_mismatch), the number of GPUs is another one; C(model_mismatch), the models are others; C(memory_too_small),
    a GPU has less memory or does not report it; C(driver_version_stale), Nomad reports another driver version;
    C(mig_mismatch), the MIG devices are others; C(gpu_unhealthy), the plugin calls a GPU unhealthy; C(duplicate_uuid),
    the same UUID is on more than one node."
  - A client that lost its data registers as a new node, and its former self stays listed as down for a while. Nodes
    that are down are therefore ignored where a living one has the same name.
seealso:
  - module: gpufarm.core.nomad_gpu_info
"""

EXAMPLES = r"""
- name: Every GPU of the farm is there
  gpufarm.core.nomad_gpu_verify:
    address: https://nomad.example.com:4646
    expected:
      - node: gpu01
        models:
          NVIDIA H100 80GB HBM3: 8
        memory_mib_min: 80000
        driver_version: 580.159.04
      - node: gpu02
        count: 4
    allow_extra_nodes: false
  delegate_to: localhost
  run_once: true

- name: Nomad has the GPUs that nvidia-smi shows on each node
  gpufarm.core.nomad_gpu_verify:
    expected:
      - "{{ ansible_facts.nvidia_smi | gpufarm.core.nomad_expected(inventory_hostname) }}"
  delegate_to: localhost
"""

RETURN = r"""
nodes:
  description: The verdict on every expected node in the order given, then on others that have problems.
  type: list
  elements: dict
  returned: always, once Nomad answered
  contains:
    name:
      description: Name of the node.
      type: str
      sample: gpu01
    id:
      description: Nomad's ID of the node; null when Nomad does not know it.
      type: str
      sample: 282de321-2e0d-83b0-30d3-e93839ed5f74
    status:
      description: Status of the node; null when Nomad does not know it.
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
      description: Number of GPUs that Nomad reports.
      type: int
      sample: 7
    problems:
      description: What is wrong with the node, as in RV(problems).
      type: list
      elements: dict
      sample: []
problems:
  description: All problems of all nodes.
  type: list
  elements: dict
  returned: always, once Nomad answered
  contains:
    node:
      description: Name of the node.
      type: str
      sample: gpu01
    code:
      description: One of the codes in the notes.
      type: str
      sample: gpu_missing
    expected:
      description: What was expected, for people.
      type: str
      sample: GPU GPU-4404041a-04cf-1ccf-9e70-f139a9b1e23c
    found:
      description: What was found, for people.
      type: str
      sample: 7 GPUs without it
    message:
      description: Node, found, expected and the next step.
      type: str
      sample: >-
        Node gpu01: found 7 GPUs without it. Expected: GPU GPU-4404041a-04cf-1ccf-9e70-f139a9b1e23c. Next step: check
        'nvidia-smi -L' and the kernel log for Xid errors on the node, then restart Nomad there.
    uuid:
      description: UUID of the GPU; null where no single one is meant.
      type: str
      sample: GPU-4404041a-04cf-1ccf-9e70-f139a9b1e23c
extra_nodes:
  description: Names of living nodes with GPUs that are not in O(expected), sorted.
  type: list
  elements: str
  returned: always, once Nomad answered
  sample: [gpu99]
table:
  description: The verdicts as text in columns, failed nodes first.
  type: str
  returned: always, once Nomad answered
  sample: |-
    NODE   STATUS  EXPECTED  FOUND  VERDICT  PROBLEMS
    gpu01  ready   8         7      failed   gpu_missing
    gpu02  ready   4         4      ok       -
waited_s:
  description: Seconds until everything was right, or until the time was over.
  type: float
  returned: always, once Nomad answered
  sample: 3.2
"""

import platform
import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufarm.core.plugins.module_utils import gpu_verdicts, nomad, nomad_options
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_verdicts import Expected, Look
from ansible_collections.gpufarm.core.plugins.module_utils.problem import FoundError


def look_again(module: AnsibleModule, client: nomad.Client, wanted: list[Expected]) -> Look:
    """Look until everything is right or the time is over."""
    params = module.params

    def fetch(index: int, wait: float) -> tuple[int, Look]:
        answer = client.items("/v1/nodes", {"resources": "true"}, index, wait)
        actual = [nomad.describe_node(node) for node in answer.items]
        verdicts = nomad.compare(wanted, actual, params["allow_extra_nodes"], params["require_eligible"])
        return answer.index, Look(verdicts, nomad.extra_gpu_nodes(wanted, actual))

    def good(look: Look) -> bool:
        return not any(verdict.problems for verdict in look.verdicts)

    look: Look = nomad.wait_until(fetch, good, max(0, params["timeout"]))
    return look


def argument_spec() -> dict[str, Any]:
    return {
        **nomad_options.argument_spec(),
        "expected": gpu_verdicts.EXPECTED,
        "timeout": {"type": "int", "default": 120},
        "allow_extra_nodes": {"type": "bool", "default": True},
        "require_eligible": {"type": "bool", "default": False},
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec=argument_spec(),
        required_together=nomad_options.REQUIRED_TOGETHER,
        supports_check_mode=True,
    )
    started = time.monotonic()
    connection = nomad_options.connection_of(module.params)
    try:
        wanted = gpu_verdicts.read_expected(module.params["expected"])
        look = look_again(module, nomad.Client(connection), wanted)
    except FoundError as error:
        module.fail_json(msg=f"{platform.node()}: {error}")
    waited = time.monotonic() - started
    result = gpu_verdicts.result_of(look, waited)
    if result["problems"]:
        module.fail_json(msg=f"{platform.node()}: {gpu_verdicts.message(look, waited)}", **result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
