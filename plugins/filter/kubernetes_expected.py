# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: kubernetes_expected
short_description: What Kubernetes must have of a node, by the facts of its GPUs
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - Makes an entry of O(gpufarm.core.kubernetes_gpu_verify#module:expected) from what M(gpufarm.core.nvidia_smi_facts)
    found on the node.
  - Of a GPU with MIG on, its MIG devices are expected, each profile as often as it is there.
positional: node, misses_empty
options:
  _input:
    description: C(ansible_facts.nvidia_smi) of the node, with the default subsets or more.
    type: dict
    required: true
  node:
    description: Name of the node in Kubernetes.
    type: str
    required: true
  misses_empty:
    description:
      - Whether a GPU whose MIG mode is on and that has no MIG device is missing. With V(false) it is meant to be so,
        and is in C(mig_unknown).
    type: bool
    default: true
"""

EXAMPLES = r"""
- name: Kubernetes has the GPUs that nvidia-smi shows on each node
  gpufarm.core.kubernetes_gpu_verify:
    expected:
      - "{{ ansible_facts.nvidia_smi | gpufarm.core.kubernetes_expected(inventory_hostname) }}"
  delegate_to: localhost
"""

RETURN = r"""
_value:
  description: >-
    C(node), C(uuids), C(driver_version) and C(models); C(mig_profiles) too, where a GPU can be divided,
    C(mig_unknown), where nobody tells its MIG devices or it is to have none, and C(count), where a GPU is so sick that
    its UUID is not known. C(node) alone, where the driver does not answer.
  type: dict
  sample:
    node: gpu01
    uuids: [GPU-551ac2af-e5cb-e273-ad80-0bc34a4646c1]
    driver_version: 580.159.04
    models: [NVIDIA H100 80GB HBM3]
"""

from collections.abc import Callable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError


def kubernetes_expected(facts: Mapping[str, Any], node: str, misses_empty: bool = True) -> dict[str, Any]:
    # Not where the filter is loaded: design.md.
    from ansible_collections.gpufarm.core.plugins.module_utils import kubernetes

    try:
        return kubernetes.expected_of_facts(facts, node, misses_empty)
    except (KeyError, TypeError) as error:
        raise AnsibleFilterError(
            f"{node}: the facts of its GPUs lack {error}. Expected: ansible_facts.nvidia_smi as the module "
            "nvidia_smi_facts returns it. Next step: gather it with its default subsets and pass it on as it is."
        ) from error


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"kubernetes_expected": kubernetes_expected}
