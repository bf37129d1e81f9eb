#!/usr/bin/python
# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: nomad_node_maintenance
short_description: Take a Nomad node out of work for a change, and put it back
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - With O(state=out), closes the node of the agent that is asked and sees it empty, or refuses where something runs
    there.
  - With O(state=in), probes the node's GPUs, compares them with what Nomad has of the node, and gives it back what it
    was before; a node that was closed already stays closed.
  - What it is out for and since when is in the node's meta (C(gpufarm_maintenance)), so a run that ended in between is
    finished by the next one. M(gpufarm.core.nomad_gpu_gate) and the gate of the node open no node that has this mark.
  - Run it on the node itself.
extends_documentation_fragment:
  - gpufarm.core.nomad
  - gpufarm.core.nomad.actiongroup_nomad
  - gpufarm.core.maintenance
attributes:
  check_mode:
    support: full
    description: >-
      Refuses as without, changes nothing, and waits for nothing but an answer. Whether the GPUs would answer after the
      change, nobody knows then.
  diff_mode:
    support: none
    description: RV(message) tells what was done.
  platform:
    platforms: Linux, WSL 2
    support: full
    description: Runs on the node, as root.
options:
  policy:
    description:
      - What becomes of allocations that run there. With V(refuse) the module fails and nothing is changed; those that
        somebody has stopped already are waited for. With V(drain) the node is drained as C(nomad node drain) does it.
        Services move at once. Batch jobs have O(deadline) to end and are stopped then, since Nomad 1.11 for good.
        System jobs are stopped last, and come back with the node.
    type: str
    choices: [refuse, drain]
    default: refuse
  deadline:
    description:
      - Seconds that batch jobs have to end by themselves before the drain stops them.
    type: int
    default: 3600
  without_jobs_of:
    description:
      - Owner of jobs, as M(gpufarm.core.nomad_owned_jobs) keeps them, which are taken away next. With O(state=out)
        their allocations are no reason to refuse, and are not waited for. What their jobs have dispatched counts.
    type: str
    default: ""
  ends_gpu_work:
    description:
      - Whether the change ends what computes on a GPU, as a reboot does. With O(state=out) it is then refused also for
        processes with a context of CUDA's that neither Nomad nor Kubernetes has started. With O(policy=drain) they have
        O(deadline) to end, and a warning names those that have not. Not seen under WSL.
    type: bool
    default: false
  timeout:
    description:
      - Seconds that an agent which was started a moment ago has until it is ready and has its GPUs, with O(state=in).
    type: int
    default: 120
  health:
    description:
      - Options of M(gpufarm.core.nvidia_gpu_health) for the probe.
    type: dict
    default: {}
  close_on:
    description:
      - The lowest verdict of the probe with which the node stays out.
    type: str
    choices: [critical, warning]
    default: critical
  ignored_gpu_ids:
    description:
      - UUIDs of GPUs that the device plugin hides from Nomad.
    type: list
    elements: str
    default: []
  plugin_age_max:
    description:
      - How many seconds older than the client's own statistics those of the GPUs may be.
    type: float
    default: 60
notes:
  - The token needs the rules C(agent:read), C(node:write), and C(namespace:read-job) in every namespace. What runs in
    one that it may not read is only seen by its processes, where these keep E(NOMAD_ALLOC_ID).
  - Nomad drains at most for O(deadline), and this module waits five minutes longer for the last tasks to end; with
    O(policy=refuse) five minutes. A node that is not empty by then stays closed where it was drained, or was out
    before; otherwise it is given back as it was.
  - Servers that elect a leader have three minutes at each step.
  - Where Ansible ends before the node is empty, so does this module. The node keeps its mark, and a drain goes on in
    Nomad.
seealso:
  - module: gpufarm.core.nomad_gpu_gate
  - module: gpufarm.core.nvidia_gpu_health
"""

EXAMPLES = r"""
- name: Have no work on the node
  gpufarm.core.nomad_node_maintenance:
    state: out
    change: new firmware
    policy: drain
    deadline: 600

- name: Install the firmware
  ansible.builtin.command: /opt/vendor/update-firmware

- name: Let the node work again
  gpufarm.core.nomad_node_maintenance:
    state: in
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
  sample: out for new firmware, after it was drained of train.worker[0] (6b1f0c0a)
node:
  description: Name of the node in Nomad; null where no client runs, or the owner has no node in maintenance here.
  type: str
  returned: success
  sample: gpu01
maintenance:
  description: What the node is out of work for, after this run; null where it is not, or no client runs here.
  type: str
  returned: success
  sample: new firmware
closed:
  description: Whether the owner has the node out after a run with O(state=out) that failed, or may have.
  type: bool
  returned: failure
  sample: false
allocations:
  description: What ran there before, and was moved away.
  type: list
  elements: dict
  returned: success
  contains:
    id:
      description: ID of the allocation.
      type: str
      sample: 6b1f0c0a-8f5e-3c37-9f0e-0a4c8e6c2b11
    name:
      description: Name of the allocation; that of its program where the token may not see it.
      type: str
      sample: train.worker[0]
    job:
      description: ID of the job; null where the token may not see it.
      type: str
      sample: train
"""

import platform
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufarm.core.plugins.module_utils import (
    gate_service,
    health,
    maintenance,
    nomad,
    nomad_options,
    nomad_plugin_log,
    signals,
)
from ansible_collections.gpufarm.core.plugins.module_utils.problem import FoundError

NONE = maintenance.Result("none", "this owner has taken no node out here")


def put_back(
    work: maintenance.Maintenance, client: nomad.Client, options: health.HealthOptions, params: dict[str, Any]
) -> maintenance.Result:
    """Open the node where its GPUs are well; NomadError where they are not."""
    node = work.marked_node(params["owner"], params["timeout"])
    if node is None:
        return NONE
    change = node.meta[maintenance.CHANGE_KEY]
    found = health.probe(options)
    entry, problems, _node, _stats = gate_service.judge(
        client,
        found,
        params["ignored_gpu_ids"],
        close_on=params["close_on"],
        plugin_age_max=params["plugin_age_max"],
        wait_s=params["timeout"],
    )
    if not entry["healthy"]:
        told = [problem["message"] for problem in found["problems"]] + [problem.message for problem in problems]
        if any(problem.code == "no_devices" for problem in problems):
            told.append(nomad_plugin_log.read().message)
        raise nomad.NomadError(
            found=f"{entry['reason']} after {change}. {' '.join(told)}".strip().rstrip("."),
            expected="healthy GPUs that Nomad has; the node stays out of work",
            next_step="mend what is named and run this again, which puts the node back",
        )
    return work.put_back(node.id)


def check_options(params: dict[str, Any]) -> health.HealthOptions:
    for option in ("deadline", "timeout"):
        if params[option] < 1:
            raise nomad.NomadError(
                found=f"{option} is {params[option]}", expected="seconds, 1 or more", next_step="correct the option"
            )
    return health.HealthOptions.from_mapping({"ignored_gpus": params["ignored_gpu_ids"], **params["health"]})


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **nomad_options.argument_spec(),
            "state": {"type": "str", "choices": ["out", "in"], "required": True},
            "owner": {"type": "str", "default": "gpufarm.core"},
            "change": {"type": "str"},
            "policy": {
                "type": "str",
                "choices": [maintenance.REFUSE, maintenance.DRAIN],
                "default": maintenance.REFUSE,
            },
            "deadline": {"type": "int", "default": 3600},
            "without_jobs_of": {"type": "str", "default": ""},
            "ends_gpu_work": {"type": "bool", "default": False},
            "timeout": {"type": "int", "default": 120},
            "health": {"type": "dict", "default": {}},
            "close_on": {"type": "str", "choices": ["critical", "warning"], "default": "critical"},
            "ignored_gpu_ids": {"type": "list", "elements": "str", "default": []},
            "plugin_age_max": {"type": "float", "default": 60},
        },
        required_if=[("state", "out", ["change"])],
        required_together=nomad_options.REQUIRED_TOGETHER,
        supports_check_mode=True,
    )
    params = module.params
    connection = nomad_options.connection_of(params)
    gone = signals.watch_controller()
    work = None
    try:
        options = check_options(params)
        client = nomad.Client(connection, direct=True)
        work = maintenance.Maintenance(client, gone=gone)
        if params["state"] == "out":
            plan = maintenance.Plan(
                params["change"],
                params["owner"],
                params["policy"],
                params["deadline"],
                module.check_mode,
                params["without_jobs_of"],
                params["ends_gpu_work"],
            )
            result = work.take_out(plan)
        elif module.check_mode:
            node = work.marked_node(params["owner"], 0)
            result = maintenance.Result("in", "would be put back after a clean probe", node) if node else NONE
        else:
            result = put_back(work, client, options, params)
    except (FoundError, ValueError) as error:
        told = f"{platform.node()}: {error}"
        if gone():
            # The journal alone still takes it.
            module.log(told)
        module.fail_json(msg=told, closed=bool(work and work.closed))
    except PermissionError as error:
        module.fail_json(
            msg=f"{platform.node()}: {error.filename} cannot be read. Expected: root, who sees what runs on this host. "
            "Next step: set become: true for this task.",
            closed=bool(work and work.closed),
        )
    if result.warning:
        module.warn(f"{platform.node()}: {result.warning}")
    module.exit_json(
        changed=result.action != "none",
        action=result.action,
        message=result.message,
        node=result.node.name if result.node else None,
        maintenance=result.maintenance,
        allocations=[{"id": each.id, "name": each.name, "job": each.job} for each in result.work],
    )


if __name__ == "__main__":
    main()
