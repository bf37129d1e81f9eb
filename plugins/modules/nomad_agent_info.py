#!/usr/bin/python
# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: nomad_agent_info
short_description: Ask a Nomad agent how it is
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - Asks one agent, normally that of the host where the module runs, how it and its NVIDIA device plugin are, and waits
    for a state where it is told to.
  - A device plugin that ends and cannot be started again, or hangs, leaves its GPUs in Nomad for ever, so that Nomad's
    list of devices does not tell. Its statistics get no newer, which does.
extends_documentation_fragment:
  - gpufarm.core.nomad
  - gpufarm.core.nomad.actiongroup_nomad
  - gpufarm.core.attributes.read_only
attributes:
  check_mode:
    description: Never changes anything, and asks and waits all the same.
  platform:
    description: Runs wherever Nomad's HTTP API can be reached, usually on the agent's own host, so no proxy is used.
options:
  wait_for:
    description:
      - What must come before O(timeout) is over. Only with V(nothing) the module never fails because of Nomad.
      - V(answer), an agent that tells its health, well or not.
      - V(leader), servers with a leader.
      - V(servers), a leader, and every server of the region alive, as before one of them may be restarted. Without the
        rules C(agent:read) and C(node:read) the leader is all that is waited for.
      - V(word), an agent that tells whether its servers have a leader, also that they have none.
      - V(client), a client that heartbeats to a server. This needs the rule C(agent:read).
      - V(permission), an agent that lets the token ask for its state, which needs the rule C(agent:read), as where
        tokens come from another region.
    type: str
    choices: [nothing, answer, leader, word, servers, client, permission]
    default: nothing
  timeout:
    description:
      - Seconds to wait for O(wait_for), asking once a second. With V(0) it is asked once.
      - No request takes longer than what is left of them, or one second, or O(request_timeout).
    type: int
    default: 60
  plugin_age_max:
    description:
      - How many seconds older than the client's own statistics those of the GPUs may be.
    type: float
    default: 60
  certificate_days:
    description:
      - Whether to look, where O(address) is one of HTTPS, when the certificates end with which the agent runs and which
        O(client_cert) and O(ca_cert) hold, and for how many days they have to. Of one that ends sooner there is a
        warning; one that has expired is an error, without a wait, unless O(wait_for=nothing).
    type: int
    version_added: 1.0.0
  plugin_log:
    description:
      - Whether to read in the journal of this host's unit C(nomad), too, what the agent that runs now, or ran last, and
        its NVIDIA device plugin have said of the GPUs. This needs root. Nomad tells it to nobody.
    type: bool
    default: false
    version_added: 1.0.0
notes:
  - Without the rule C(node:read) a client does not tell its statistics, and RV(state) is never V(plugin_stopped).
seealso:
  - module: gpufarm.core.nomad_gpu_verify
"""

EXAMPLES = r"""
- name: Read how this host's agent is
  gpufarm.core.nomad_agent_info:
    token: "{{ vault_nomad_token }}"
  register: agent

- name: Wait for a client that heartbeats to its servers
  gpufarm.core.nomad_agent_info:
    token: "{{ vault_nomad_token }}"
    wait_for: client
    timeout: 40
"""

RETURN = r"""
state:
  description: >-
    V(ok); V(stopped), nothing answers; V(unhealthy), the agent answers that it is not well; V(plugin_stopped), the
    device plugin gives no statistics any more. Where a client never had statistics of GPUs, as with MIG, it counts as
    V(ok).
  type: str
  returned: success, and when what is waited for did not come
  sample: ok
message:
  description: >-
    What the agent's C(/v1/agent/health) said, why it could not be asked, or how old the statistics of GPUs are; null
    where RV(state) is V(ok).
  type: str
  returned: success, and when what is waited for did not come
  sample: "client: no known servers"
version:
  description: >-
    Version of the agent that runs, by C(/v1/agent/self), which is not that of the program once this was replaced; null
    when it did not tell, as without the rule C(agent:read).
  type: str
  returned: success, and when what is waited for did not come
  sample: 1.11.3
leader:
  description: Address and port of the leader, by C(/v1/status/leader); null when there is none, or it is not known.
  type: str
  returned: success, and when what is waited for did not come
  sample: 192.0.2.1:4647
leads:
  description: >-
    Whether this agent is the leader, by C(/v1/agent/self); null when it did not tell, or with O(wait_for) other than
    V(servers) and V(word).
  type: bool
  returned: success, and when what is waited for did not come
  sample: true
encrypted:
  description: Whether the server's gossip is encrypted, by C(/v1/agent/self); null as with RV(leads).
  type: bool
  returned: success, and when what is waited for did not come
  sample: false
peers:
  description: >-
    Names in Nomad of the servers of the agent's region, itself included, by C(/v1/agent/members), also of those that do
    not answer; null as with RV(leads).
  type: list
  elements: str
  returned: success, and when what is waited for did not come
  sample: [server01, server02, server03]
servers_version:
  description: >-
    The oldest version of Nomad among the servers of the agent's region that are alive, by C(/v1/agent/members); null
    when it did not tell, as without the rule C(node:read), or with O(wait_for) other than V(nothing).
  type: str
  returned: success, and when what is waited for did not come
  sample: 1.11.3
uptime:
  description: >-
    Seconds since the host was started, by C(Uptime) in C(/v1/client/stats); null when not known, as of an agent that is
    no client.
  type: int
  returned: success, and when what is waited for did not come
  sample: 86400
servers:
  description: >-
    Addresses of the servers that the client knows, by C(/v1/agent/self); null when it did not tell, or with O(wait_for)
    other than V(client).
  type: list
  elements: str
  returned: success, and when what is waited for did not come
  sample: ["192.0.2.1:4647"]
driver_versions:
  description: >-
    Versions of the NVIDIA driver that Nomad has of the node's GPUs, by C(/v1/node/:id), which are those of the agent's
    start; empty when it has no GPU; null when it did not tell, or with O(wait_for) other than V(client).
  type: list
  elements: str
  returned: success, and when what is waited for did not come
  sample: [580.159.04]
maintenance:
  description: >-
    What M(gpufarm.core.nomad_node_maintenance) took the node out of work for; null where it did not, and where
    RV(driver_versions) is.
  type: str
  returned: success, and when what is waited for did not come
  sample: driver branch 580
meta:
  description: >-
    Metadata of the node, by C(/v1/node/:id); null when it did not tell, or with O(wait_for) other than V(client).
  type: dict
  returned: success, and when what is waited for did not come
  sample: {gpu_model: NVIDIA H100 80GB HBM3, gpu_count: "8"}
certificates:
  description: >-
    When the agent's certificates end, as far as they could be read; null without O(certificate_days).
  type: list
  elements: dict
  returned: success, and when what is waited for did not come
  contains:
    of:
      description: >-
        V(agent) for the one with which it runs, V(file) for the first in O(client_cert), V(ca) for that of O(ca_cert)
        which ends last, V(chain) for one between these two that ends before the one in O(client_cert).
      type: str
      sample: file
    path:
      description: Where it lies, null for V(agent).
      type: str
      sample: /etc/nomad.d/tls/agent.pem
    not_after:
      description: Its end, in UTC.
      type: str
      sample: "2027-11-21T15:11:02Z"
    days_left:
      description: Whole days until then, negative afterwards.
      type: int
      sample: 364
    state:
      description: V(ok), V(ends_soon), where O(certificate_days) are not left, or V(expired).
      type: str
      sample: ok
plugin_log:
  description: What the device plugin has said, and why it most likely has no GPUs; null without O(plugin_log=true).
  type: dict
  returned: success, and when what is waited for did not come
  contains:
    lines:
      description: Its newest errors and warnings, and the agent's about it, the newest last.
      type: list
      elements: str
      sample: ["unable to initialize Nvidia driver: reason=\"nvml: Driver/library version mismatch\""]
    cause:
      description: The likely cause where Nomad has no GPU of the node. A plugin that says nothing may be well.
      type: str
      sample: "a driver mismatch: the kernel module that is loaded and the libraries are of two versions"
    message:
      description: Both, and the next step, for people.
      type: str
      sample: >-
        The device plugin has said: unable to initialize Nvidia driver: reason="nvml: Driver/library version mismatch".
        Likely cause: a driver mismatch: the kernel module that is loaded and the libraries are of two versions. Next
        step: reboot the node, by playbooks/site.yml with nvidia_driver_reboot.
"""

import contextlib
import dataclasses
import json
import math
import platform
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufarm.core.plugins.module_utils import (
    gate,
    nomad,
    nomad_certificates,
    nomad_options,
    nomad_plugin_log,
)
from ansible_collections.gpufarm.core.plugins.module_utils.text import clean_all

PAUSE_S = 1.0
SHORTEST_S = 1.0
# What Nomad's servers add to the time that they have given a client, heartbeat_grace.
HEARTBEAT_GRACE_S = 10.0
# A server that has just started knows no token until it has read again what it knew, a moment after it has a leader.
REFUSED_S = 30.0
# HTTP 500 is an answer about a state here; an agent that takes no more connections at the moment has answered nothing.
REPEAT = frozenset({429})
STALE = {"stale": "true"}


@dataclasses.dataclass
class Answers:
    """What the agent has said so far."""

    status: int | None = None
    """HTTP status of its health."""
    message: str | None = None
    leader: str | None = None
    leads: bool | None = None
    encrypted: bool | None = None
    peers: list[str] | None = None
    servers_version: str | None = None
    stats: dict[str, Any] | None = None
    told_itself: bool = False
    version: str | None = None
    servers: list[str] | None = None
    node_id: str | None = None
    node: Mapping[str, Any] | None = None


class NotYetError(nomad.NomadError):
    """Not the answer that is waited for; what was expected is told by the goal alone."""

    def __init__(self, found: str) -> None:
        super().__init__(found, "", "", transient=True)


def health_message(error: nomad.NomadError) -> str:
    """What the client and the server in an agent say of themselves, or else the whole answer."""
    try:
        told = clean_all(json.loads(error.said))
    except ValueError:
        return error.found
    parts = told.items() if isinstance(told, dict) else ()
    sick = [f"{name}: {part.get('message')}" for name, part in parts if isinstance(part, dict) and not part.get("ok")]
    return "; ".join(sick) or error.found


def ask_health(client: nomad.Client, answers: Answers) -> None:
    try:
        client.text("/v1/agent/health", {})
    except nomad.NomadError as error:
        answers.status, answers.message = error.status, health_message(error)
        if error.status != 500:
            raise
    else:
        answers.status, answers.message = 200, None


def ask_leader(client: nomad.Client, answers: Answers, query: Mapping[str, str] | None = None) -> None:
    path = "/v1/status/leader"
    answers.leader = None
    found = client.call("GET", path, query=query)
    if not isinstance(found, str) or not re.search(r".:[0-9]+$", found):
        raise NotYetError(f"{client.url(path, {})} answered '{str(found or '')[:200]}'")
    answers.leader = found


def ask_self(client: nomad.Client, answers: Answers) -> Any:
    answers.told_itself = True
    own = client.call("GET", "/v1/agent/self")
    answers.version = version_of(inner(inner(own, "config"), "Version"))
    return own


def version_of(told: Mapping[str, Any]) -> str | None:
    """As Nomad writes it in one: C(1.11.3), C(1.12.0-beta.1), C(1.11.3+ent)."""
    if not told.get("Version"):
        return None
    parts = (("", "Version"), ("-", "VersionPrerelease"), ("+", "VersionMetadata"))
    return str(clean_all("".join(f"{mark}{told[key]}" for mark, key in parts if told.get(key))))


def ask_members(client: nomad.Client, answers: Answers) -> None:
    # Servers of which some have TLS already cannot ask a leader that has not.
    ask_leader(client, answers, STALE)
    try:
        own = inner(ask_self(client, answers), "stats")
        told = client.call("GET", "/v1/agent/members")
    except nomad.NomadError as error:
        if error.status != 403:
            raise
        # Where ACLs begin with this very restart there is no token yet.
        return
    answers.leads = inner(own, "nomad").get("leader") == "true"
    answers.encrypted = inner(own, "serf").get("encrypted") == "true"
    states = member_states(told)
    answers.peers = sorted(str(name).removesuffix(f".{told.get('ServerRegion')}") for name in states)
    away = away_members(states, client.call("GET", "/v1/status/peers", query=STALE))
    if away:
        raise NotYetError(", ".join(away))


def ask_word(client: nomad.Client, answers: Answers) -> None:
    """As ask_members, to whom no leader and servers that are away are no answer yet."""
    try:
        ask_members(client, answers)
    except nomad.NomadError as error:
        if not isinstance(error, NotYetError) and "No cluster leader" not in error.said:
            raise


def member_states(told: Any) -> dict[Any, Any]:
    """Servers of the agent's region that have not left, and how they are."""
    return {each.get("Name"): each.get("Status") for each in members_of_region(told) if each.get("Status") != "left"}


def members_of_region(told: Any) -> list[Any]:
    members = (told.get("Members") if isinstance(told, Mapping) else None) or []
    return [each for each in members if inner(each, "Tags").get("region") == told.get("ServerRegion")]


def ask_servers_version(client: nomad.Client, answers: Answers) -> None:
    told = client.call("GET", "/v1/agent/members")
    alive = [each for each in members_of_region(told) if each.get("Status") == "alive"]
    builds = [str(clean_all(build)) for each in alive if (build := inner(each, "Tags").get("build"))]
    answers.servers_version = min(builds, key=release_numbers, default=None)


def release_numbers(version: str) -> list[int]:
    """The numbers that versions are compared by; what follows them, as +ent, is of the same release."""
    return [int(number) for number in re.split("[-+]", version)[0].split(".") if number.isdigit()]


def away_members(states: Mapping[Any, Any], peers: Any) -> list[str]:
    """Those that are not alive, and how they are."""
    away = [f"{name} is {state}" for name, state in states.items() if state != "alive"]
    # One that has just started may not have met the others yet, whom it knows as peers.
    missing = len(peers or []) - len(states)
    return away or [f"{missing} of {len(peers)} servers not met yet"] * (missing > 0)


def ask_stats(client: nomad.Client, answers: Answers) -> None:
    found = client.call("GET", "/v1/client/stats")
    answers.stats = found if isinstance(found, dict) else None


def ask_servers(client: nomad.Client, answers: Answers) -> None:
    answers.servers = None
    try:
        own = ask_self(client, answers)
    except nomad.NomadError as error:
        if error.status != 403:
            raise
        raise nomad.NomadError(
            found=error.found,
            expected="a token that may ask an agent for its state",
            next_step="set 'token' or NOMAD_TOKEN, or nomad_token of the roles, to one with agent:read",
            status=error.status,
        ) from error
    told = inner(inner(own, "stats"), "client")
    answers.node_id = told.get("node_id")
    answers.servers = [text for part in str(told.get("known_servers") or "").split(",") if (text := part.strip())]
    ttl, last = str(told.get("heartbeat_ttl") or "0s"), str(told.get("last_heartbeat") or "0s")
    # Servers that are gone are known for ever.
    if not answers.servers or seconds_of(ttl) == 0 or seconds_of(last) > seconds_of(ttl) + HEARTBEAT_GRACE_S:
        known = ", ".join(answers.servers) or "no servers"
        raise NotYetError(
            f"the client knows {known}, its heartbeat_ttl is {ttl} and its last_heartbeat {last} ago"
            if told
            else "an agent that is no client"
        )


def ask_permission(client: nomad.Client, answers: Answers) -> None:
    if not client.connection.token:
        raise nomad.NomadError(
            found="no token was given",
            expected="one that the authoritative region has made",
            next_step="set 'token' or NOMAD_TOKEN, or nomad_token of the roles, or bring the farm's folder of secrets",
        )
    try:
        ask_self(client, answers)
    except nomad.NomadError as error:
        if error.status != 403:
            raise
        # Unlike elsewhere this one passes.
        raise NotYetError(error.found) from error


def seconds_of(duration: str) -> float:
    """Go's text for a time, such as 1m2.5s."""
    units = {"h": 3600, "m": 60, "s": 1, "ms": 1e-3, "\N{MICRO SIGN}s": 1e-6, "us": 1e-6, "ns": 1e-9}
    parts = re.findall(r"([0-9]+(?:\.[0-9]*)?)([a-z\N{MICRO SIGN}]+)", duration)
    return sum(float(number) * units.get(unit, 0) for number, unit in parts)


def ask_node(client: nomad.Client, answers: Answers) -> None:
    found = client.call("GET", gate.node_path(answers.node_id or ""))
    answers.node = found if isinstance(found, dict) else None


def inner(value: Any, name: str) -> Mapping[str, Any]:
    found = value.get(name) if isinstance(value, Mapping) else None
    return found if isinstance(found, Mapping) else {}


@dataclasses.dataclass(frozen=True)
class Goal:
    """What is waited for, and the words where it does not come."""

    ask: Callable[[nomad.Client, Answers], None]
    """Notes an answer; NomadError where it is none, or not the one to wait for."""
    missing: str
    expected: str
    next_step: str


GOALS = {
    "answer": Goal(
        ask=ask_health,
        missing="no answer",
        expected="an agent that tells its health",
        next_step="read `journalctl -u nomad` on this host",
    ),
    "leader": Goal(
        ask=ask_leader,
        missing="no leader",
        expected="an elected leader",
        next_step="read `journalctl -u nomad` on every server and check that port 4648 is open between them",
    ),
    "word": Goal(
        ask=ask_word,
        missing="no word on a leader",
        expected="an agent that tells whether its servers have a leader",
        next_step="read `journalctl -u nomad` on this host; where the agent does not listen yet as it is to by now, "
        "`systemctl stop nomad` and run playbooks/site.yml, which starts it: one server after the other for another "
        "address, all together where TLS begins or ends, or its CA is another",
    ),
    "servers": Goal(
        ask=ask_members,
        missing="not all servers",
        expected="a leader and every server alive",
        next_step="read `journalctl -u nomad` on those that are not, or `nomad server force-leave` one that is gone",
    ),
    "client": Goal(
        ask=ask_servers,
        missing="no heartbeats",
        expected="heartbeats to a server",
        next_step="read `journalctl -u nomad` on this host, where `Permission denied` is that of servers that want a "
        "client introduced (nomad_client_introduction), and check that port 4647 of the servers is open to it; with "
        "TLS, also that its certificate has the name of this region",
    ),
    "permission": Goal(
        ask=ask_permission,
        missing="no permission",
        expected="an agent that knows the token, and its rule agent:read",
        next_step="read `journalctl -u nomad` on the servers of this region for what keeps them from the ACLs of the "
        "authoritative one, check that its ports 4647 and 4648 are open to them, and join them by `nomad server join` "
        "where `nomad server members` lacks that region",
    ),
}


def hurried(client: nomad.Client, deadline: float) -> nomad.Client:
    return client.within(max(SHORTEST_S, deadline - time.monotonic()))


def has_leader(client: nomad.Client) -> bool:
    try:
        ask_leader(client, Answers(), STALE)
    except nomad.NomadError:
        return False
    return True


def wait(goal: Goal, client: nomad.Client, answers: Answers, deadline: float) -> None:
    started = time.monotonic()
    refused: float | None = None
    while True:
        try:
            goal.ask(hurried(client, deadline), answers)
        except nomad.NomadError as error:
            # A certificate gets no better.
            if error.status is None and not error.transient:
                raise
            now = time.monotonic()
            # Neither does a token, once it is known who could know it.
            if error.status == 403 and has_leader(hurried(client, deadline)):
                refused = now if refused is None else refused
                if now - refused >= REFUSED_S or now >= deadline:
                    raise
            else:
                refused = None
            if now >= deadline:
                raise nomad.NomadError(
                    found=f"{goal.missing} in {now - started:.0f} s, at last {error.found}",
                    expected=goal.expected,
                    next_step=goal.next_step,
                ) from error
            time.sleep(min(PAUSE_S, deadline - now))
        else:
            return


def ask_rest(
    client: nomad.Client, answers: Answers, deadline: float, asked: Callable[[nomad.Client, Answers], None] | None
) -> None:
    """Ask once for all else; an agent that does not tell its health tells nothing."""
    # A server that has told of the leader by itself may not be able to ask it.
    leader = [ask_leader] * (answers.leader is None)
    others = (
        [ask_self] * (not answers.told_itself)
        + [ask_servers_version] * (asked is None)
        + [ask_node] * bool(answers.node_id)
    )
    for ask in (ask_health, *leader, ask_stats, *others):
        if ask is not asked:
            with contextlib.suppress(nomad.NomadError):
                ask(hurried(client, deadline), answers)
        if answers.status is None:
            return


def driver_versions(node: Mapping[str, Any]) -> list[str] | None:
    gpus = nomad.gpus_of_node(node)
    found = sorted({gpu["driver_version"] for gpu in gpus if gpu["driver_version"]})
    return found if found or not gpus else None


def result_of(answers: Answers, plugin_age_max: float) -> dict[str, Any]:
    state = gate.agent_state(answers.status, answers.stats, plugin_age_max)
    stats = answers.stats or {}
    message = answers.message
    if state == gate.PLUGIN_STOPPED:
        message = f"the statistics of GPUs are {gate.plugin_age_s(stats):.0f} s older than the client's own"
    uptime = stats.get("Uptime")
    return {
        "changed": False,
        "state": state,
        "message": message,
        "version": answers.version,
        "leader": answers.leader,
        "leads": answers.leads,
        "encrypted": answers.encrypted,
        "peers": answers.peers,
        "servers_version": answers.servers_version,
        "uptime": uptime if isinstance(uptime, int) else None,
        "servers": answers.servers,
        "driver_versions": driver_versions(answers.node) if answers.node else None,
        "maintenance": inner(answers.node, "Meta").get(gate.MAINTENANCE_KEY),
        "meta": inner(answers.node, "Meta") if answers.node else None,
    }


def argument_spec() -> dict[str, Any]:
    return {
        **nomad_options.argument_spec(),
        "wait_for": {"type": "str", "choices": ["nothing", *GOALS], "default": "nothing"},
        "timeout": {"type": "int", "default": 60},
        "plugin_age_max": {"type": "float", "default": gate.PLUGIN_AGE_MAX_S},
        "certificate_days": {"type": "int"},
        "plugin_log": {"type": "bool", "default": False},
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec=argument_spec(),
        required_together=nomad_options.REQUIRED_TOGETHER,
        supports_check_mode=True,
    )
    params = module.params
    goal = GOALS.get(params["wait_for"])
    deadline = time.monotonic() + params["timeout"] if goal else math.inf
    answers = Answers()
    failure = None
    try:
        client = nomad.Client(nomad_options.connection_of(params), REPEAT, direct=True)
    except nomad.NomadError as error:
        module.fail_json(msg=f"{platform.node()}: {error}")
    days, certificates = params["certificate_days"], None
    if days is not None:
        certificates = nomad_certificates.of_agent(client.connection, days)
        for text in nomad_certificates.told(certificates, nomad_certificates.ENDS_SOON, days):
            module.warn(f"{platform.node()}: {text}")
        expired = nomad_certificates.told(certificates, nomad_certificates.EXPIRED, days)
        if goal and expired:
            module.fail_json(msg=f"{platform.node()}: {' '.join(expired)}", certificates=certificates)
        for text in expired:
            module.warn(f"{platform.node()}: {text}")
    if goal:
        try:
            wait(goal, client, answers, deadline)
        except nomad.NomadError as error:
            failure = str(error)
    ask_rest(client, answers, deadline, goal.ask if goal else None)
    result = result_of(answers, params["plugin_age_max"])
    result["certificates"] = certificates
    found = nomad_plugin_log.read() if params["plugin_log"] else None
    result["plugin_log"] = found and {"lines": found.lines, "cause": found.cause, "message": found.message}
    if failure:
        module.fail_json(msg=f"{platform.node()}: {failure}", **result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
