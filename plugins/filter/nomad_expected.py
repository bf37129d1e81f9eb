# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: nomad_expected
short_description: What Nomad must have of a node, by the facts of its GPUs
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - Makes an entry of O(gpufarm.core.nomad_gpu_verify#module:expected) from what M(gpufarm.core.nvidia_smi_facts) found
    on the node.
  - Of a GPU with MIG on, its MIG devices are expected.
positional: node, ignored
options:
  _input:
    description: C(ansible_facts.nvidia_smi) of the node, with the default subsets or more.
    type: dict
    required: true
  node:
    description: Name of the node in Nomad.
    type: str
    required: true
  ignored:
    description: UUIDs that the device plugin hides, as its C(ignored_gpu_ids) has them.
    type: list
    elements: str
    default: []
"""

EXAMPLES = r"""
- name: Nomad has the GPUs that nvidia-smi shows on each node
  gpufarm.core.nomad_gpu_verify:
    expected:
      - "{{ ansible_facts.nvidia_smi | gpufarm.core.nomad_expected(inventory_hostname) }}"
  delegate_to: localhost
"""

RETURN = r"""
_value:
  description: >-
    C(node), C(uuids) and C(driver_version); C(models) too, unless a GPU has MIG on, because Nomad names MIG devices in
    its own way. C(count) too, where a GPU is so sick that its UUID is not known, and C(mig_unknown), where nobody tells
    the MIG devices of a GPU.
  type: dict
  sample:
    node: gpu01
    uuids: [GPU-551ac2af-e5cb-e273-ad80-0bc34a4646c1]
    driver_version: 580.159.04
    models: [NVIDIA H100 80GB HBM3]
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError


def nomad_expected(facts: Mapping[str, Any], node: str, ignored: Sequence[str] = ()) -> dict[str, Any]:
    # Not where the filter is loaded: design.md.
    from ansible_collections.gpufarm.core.plugins.module_utils import nomad

    try:
        return nomad.expected_of_facts(facts, node, ignored)
    except (KeyError, TypeError) as error:
        raise AnsibleFilterError(
            f"{node}: the facts of its GPUs lack {error}. Expected: ansible_facts.nvidia_smi as the module "
            "nvidia_smi_facts returns it. Next step: gather it with its default subsets and pass it on as it is."
        ) from error


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"nomad_expected": nomad_expected}
