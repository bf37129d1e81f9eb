#!/usr/bin/python
# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Wait until an agent of W&B Launch polls its queues, or say why it does not."""

from __future__ import annotations

DOCUMENTATION = r"""
module: wandb_launch_agent_verify
short_description: Wait until a W&B Launch agent polls its queues
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - Reads what the agent itself says, in the journal of its unit or in the log of its job in Nomad, until it says that
    it polls. Where it has ended, or says nothing of the kind in time, the module fails with the agent's own words.
  - For an agent that the role P(gpufarm.core.wandb_launch_agent#role) has installed.
extends_documentation_fragment:
  - gpufarm.core.nomad
  - gpufarm.core.nomad.actiongroup_nomad
attributes:
  check_mode:
    support: full
    description: Changes nothing.
  diff_mode:
    support: none
    description: Changes nothing.
  idempotent:
    support: full
    description: Changes nothing.
  platform:
    description: Runs on the host of the unit, or wherever Nomad's HTTP API can be reached.
options:
  token:
    description:
      - ACL token. It needs the rules C(namespace:read-job) and C(namespace:read-logs). For a unit Nomad is not asked.
  unit:
    description:
      - Name of the agent's systemd unit.
    type: str
  job:
    description:
      - ID of the agent's job in Nomad.
    type: str
  base_url:
    description:
      - Address of W&B, for messages.
    type: str
    required: true
  entity:
    description:
      - Team or user of W&B, for messages.
    type: str
    required: true
  queues:
    description:
      - Queues of the agent, for messages.
    type: list
    elements: str
    required: true
  api_key:
    description:
      - The agent's key, so that it is told nowhere, whatever the agent says.
    type: str
  timeout:
    description:
      - Seconds after which an agent that neither polls nor ends counts as failed.
    type: int
    default: 300
"""

EXAMPLES = r"""
- name: Require an agent that polls
  gpufarm.core.wandb_launch_agent_verify:
    unit: gpufarm-wandb-launch.service
    base_url: https://api.wandb.ai
    entity: research
    queues: [gpus]
"""

RETURN = r"""
agent:
  description: What the agent said of itself last.
  type: str
  returned: success
  sample: agent launch-7 polling on queues gpus, running 0 out of a maximum of 4 jobs
"""

import dataclasses
import platform
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufarm.core.plugins.module_utils import nomad, nomad_options
from ansible_collections.gpufarm.core.plugins.module_utils.commands import answer_of
from ansible_collections.gpufarm.core.plugins.module_utils.problem import FoundError
from ansible_collections.gpufarm.core.plugins.module_utils.text import clean

# As roles/wandb_launch_agent/files/agent.py says it.
STARTS = "gpufarm: the launch agent starts"
TASK = "agent"
PAUSE_S = 1
ANSWER_S = 60
LOG_BYTES = 65536
# Of a unit's journal, which has what its runs print as well: far more than they print between two words of its status.
JOURNAL_LINES = 10000
LINES = 6
# Its status, which it says at its start and every five minutes.
STATUS = re.compile(r"launch: (agent .*running \d+ out of a maximum of \S+ jobs)")
# In the words of wandb 0.31.0, and what to do then.
CAUSES = (
    (
        "verify credentials|API_KEY invalid|not logged in",
        "correct wandb_launch_agent_api_key, or wandb_launch_agent_base_url where the key is of another server",
    ),
    ("requested queues", "make the queue in W&B, or correct wandb_launch_agent_queues"),
    (
        "run queues for|fetching entity|permission denied",
        "correct wandb_launch_agent_entity, or take a key of one who is in it",
    ),
    (
        "missing drivers",
        "have raw_exec on this host, by nomad_client_raw_exec and the role nomad_client, or choose another way",
    ),
    ("validation error|Extra inputs|Invalid", "correct wandb_launch_agent_options"),
)


@dataclasses.dataclass(frozen=True)
class Seen:
    """What is known of an agent now: its log, why it has ended or cannot begin, and where people read on."""

    log: str
    ended: str
    read: str
    # Which start it was, where another one comes by itself.
    again: str = ""


def status_of(log: str) -> str | None:
    """What the agent that runs now has said of itself last; None where it does not poll yet."""
    found = STATUS.findall(log.rpartition(STARTS)[2])
    return found[-1] if found else None


def words_of(log: str) -> str:
    """The agent's own words on why it ended, or its last ones."""
    lines = [clean(line.strip()) for line in log.rpartition(STARTS)[2].splitlines()]
    lines = [line for line in lines if line and "Find detailed error logs" not in line]
    errors = [line for line in lines if re.match("Error: |wandb: ERROR ", line)]
    return "; ".join((errors or lines)[-LINES:])


def problem(seen: Seen, entity: str, queues: list[str], base_url: str) -> FoundError:
    words = words_of(seen.log)
    advice = next((advice for pattern, advice in CAUSES if re.search(pattern, words or seen.ended)), "")
    general = f"see that {base_url} answers this host, and read {seen.read}"
    return FoundError(
        f"the launch agent {seen.ended or 'does not poll'}"
        + (f" ({words.rstrip('.')})" if words else ", and has said nothing"),
        f"one that polls {', '.join(queues)} of {entity} at {base_url}",
        advice or general,
    )


def wait(look: Callable[[], Seen], timeout: float, clock: Callable[[], float], pause: Callable[[float], None]) -> Seen:
    """Look until the agent polls or has ended, or the time is over.

    One that had ended before the first look, and is to be started again, says nothing of what has been mended since.
    """
    deadline = clock() + timeout
    seen = look()
    before = seen.again
    while True:
        earlier = before and seen.again == before
        if (not earlier and (seen.ended or status_of(seen.log))) or clock() >= deadline:
            return seen
        pause(PAUSE_S)
        seen = look()


def of_unit(run: Callable[[list[str]], str], unit: str) -> Seen:
    """How a unit is, and what it has said since it was started last, or the end of that."""
    properties = ["ActiveState", "SubState", "Result", "ExecMainStatus", "InvocationID"]
    said = run(["systemctl", "show", unit, f"--property={','.join(properties)}"])
    state = dict(line.split("=", 1) for line in said.splitlines() if "=" in line)
    log = ""
    if state.get("InvocationID"):
        match = f"_SYSTEMD_INVOCATION_ID={state['InvocationID']}"
        log = run(["journalctl", "--no-pager", "--output=cat", f"--lines={JOURNAL_LINES}", match])
    starting = state.get("ActiveState") == "activating" and state.get("SubState") != "auto-restart"
    alive = state.get("ActiveState") in ("active", "reloading") or starting
    ended = "" if alive else f"has ended with {state.get('ExecMainStatus')}"
    again = state.get("InvocationID", "") if state.get("SubState") == "auto-restart" else ""
    return Seen(log, ended, f"`journalctl -u {unit}` on this host", again)


def refused(evaluation: Mapping[str, Any]) -> str:
    """Why Nomad has found no node for the agent, from an evaluation; empty where it has not failed."""
    for metric in (evaluation.get("FailedTGAllocs") or {}).values():
        counts = {**(metric.get("ConstraintFiltered") or {}), **(metric.get("DimensionExhausted") or {})}
        return f"cannot be placed by Nomad: {', '.join(sorted(counts)) or 'no node is ready for it'}"
    return ""


def of_job(client: nomad.Client, job: str) -> Seen:
    """How the newest allocation of a job is, and what its task has said."""
    read = f"`nomad alloc logs -stderr -job {job}`"
    version = client.call("GET", f"/v1/job/{job}")["Version"]
    allocations = [each for each in client.call("GET", f"/v1/job/{job}/allocations") if each["JobVersion"] == version]
    if not allocations:
        evaluations = client.call("GET", f"/v1/job/{job}/evaluations") or []
        newest: Mapping[str, Any] = max(evaluations, key=lambda each: each["CreateIndex"], default={})
        return Seen("", refused(newest), f"`nomad job status {job}`")
    last = max(allocations, key=lambda each: each["CreateIndex"])
    state = (last.get("TaskStates") or {}).get(TASK) or {}
    events = state.get("Events") or []
    log = ""
    try:
        query = {"task": TASK, "type": "stderr", "plain": "true", "origin": "end", "offset": str(LOG_BYTES)}
        log = client.text(f"/v1/client/fs/logs/{last['ID']}", query, LOG_BYTES)
    except nomad.NomadError as error:
        if error.status not in (404, 500):
            raise
    waits = state.get("State") == "pending" and any(event["Type"] == "Restarting" for event in events[-1:])
    ended = ""
    if waits or last["ClientStatus"] in ("failed", "complete", "lost"):
        codes = [event["DisplayMessage"] for event in events if event["Type"] in ("Terminated", "Driver Failure")]
        ended = f"has ended in Nomad ({codes[-1] if codes else last['ClientStatus']})"
    return Seen(log, ended, read, f"{last['ID']} {state.get('Restarts')}" if waits else "")


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **nomad_options.argument_spec(),
            "unit": {"type": "str"},
            "job": {"type": "str"},
            "base_url": {"type": "str", "required": True},
            "entity": {"type": "str", "required": True},
            "queues": {"type": "list", "elements": "str", "required": True},
            "api_key": {"type": "str", "no_log": True},
            "timeout": {"type": "int", "default": 300},
        },
        required_together=nomad_options.REQUIRED_TOGETHER,
        mutually_exclusive=[("unit", "job")],
        required_one_of=[("unit", "job")],
        supports_check_mode=True,
    )
    params = module.params
    connection = nomad_options.connection_of(params)

    try:
        if params["unit"]:

            def look() -> Seen:
                return of_unit(lambda words: answer_of(words, ANSWER_S).stdout, params["unit"])
        else:
            client = nomad.Client(connection)

            def look() -> Seen:
                return of_job(client, params["job"])

        seen = wait(look, params["timeout"], time.monotonic, time.sleep)
        status = None if seen.ended else status_of(seen.log)
        if status is None:
            raise problem(seen, params["entity"], params["queues"], params["base_url"])
    except (nomad.NomadError, FoundError) as error:
        module.fail_json(msg=f"{platform.node()}: {error}")
    module.exit_json(changed=False, agent=status)


if __name__ == "__main__":
    main()
