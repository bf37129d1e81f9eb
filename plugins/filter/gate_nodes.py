# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: gate_nodes
short_description: Judge nodes by their probes and by the scheduler's view
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - Puts together what M(gpufarm.core.nvidia_gpu_health) found on each node and what M(gpufarm.core.nomad_gpu_verify)
    found in Nomad, or M(gpufarm.core.kubernetes_gpu_verify) in Kubernetes. Used by C(playbooks/health.yml) and
    C(playbooks/kubernetes_health.yml).
  - A node is sick when its probe is critical, or when the scheduler's view of it is wrong.
  - A node that could not be probed and that the scheduler holds for well is not judged, because a broken way to it says
    nothing about its GPUs. Nor is one whose host cannot be reached and that Kubernetes does not know, because the host
    says what its node is called.
positional: verdicts
options:
  _input:
    description:
      - One entry for each node, with its name in the scheduler (C(node)), the name of the host (C(host)), the result of
        M(gpufarm.core.nvidia_gpu_health) (C(probe)), which may be that of a failed or unreachable host, and the state
        of the host's Nomad agent (C(agent)), as RV(gpufarm.core.nomad_agent_info#module:state) says it.
      - Its own C(close_on) goes before O(close_on); its own C(drain) and C(drain_deadline) are handed on.
    type: list
    elements: dict
    required: true
  verdicts:
    description: >-
      RV(gpufarm.core.nomad_gpu_verify#module:nodes) or RV(gpufarm.core.kubernetes_gpu_verify#module:nodes).
    type: list
    elements: dict
    required: true
  close_on:
    description: The lowest verdict of a probe that makes a node sick.
    type: str
    choices: [critical, warning]
    default: critical
  scheduler:
    description: Whose view O(verdicts) is, for the words of reasons and next steps.
    type: str
    choices: [nomad, kubernetes]
    default: nomad
"""

EXAMPLES = r"""
- name: Close sick nodes
  gpufarm.core.nomad_gpu_gate:
    nodes: "{{ (probes | gpufarm.core.gate_nodes(verify.nodes)).nodes }}"
"""

RETURN = r"""
_value:
  description: The judgement.
  type: dict
  contains:
    nodes:
      description: >-
        What O(gpufarm.core.nomad_gpu_gate#module:nodes) and O(gpufarm.core.kubernetes_gpu_gate#module:nodes) take, for
        every node that can be judged.
      type: list
      elements: dict
    sick:
      description: C(node), C(reason) and C(message) of every node that is not healthy.
      type: list
      elements: dict
    warnings:
      description: C(node) and C(reason) of every healthy node with a warning.
      type: list
      elements: dict
    unprobed:
      description: C(node) and C(message) of every node that is not judged.
      type: list
      elements: dict
    missing:
      description: Names of sick nodes that the scheduler does not know.
      type: list
      elements: str
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError


def gate_nodes(
    probes: Sequence[Mapping[str, Any]],
    verdicts: Sequence[Mapping[str, Any]],
    close_on: str = "critical",
    scheduler: str = "nomad",
) -> dict[str, Any]:
    # Not where the filter is loaded: design.md.
    from ansible_collections.gpufarm.core.plugins.module_utils import gate

    for owner, given in (("gate_nodes", close_on), *((probe["node"], probe.get("close_on")) for probe in probes)):
        if given not in (None, gate.CRITICAL, gate.WARNING):
            raise AnsibleFilterError(
                f"{owner}: close_on is '{given}'. Expected: critical or warning. "
                "Next step: correct gpu_health_close_on of this host."
            )
    if scheduler not in (gate.NOMAD, gate.KUBERNETES):
        raise AnsibleFilterError(
            f"gate_nodes: scheduler is '{scheduler}'. Expected: nomad or kubernetes. Next step: correct the option."
        )
    return gate.judge_farm(probes, verdicts, close_on, scheduler)


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"gate_nodes": gate_nodes}
