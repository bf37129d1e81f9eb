#!/usr/bin/python
# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Keep the namespaces of a farm's teams, the node pools, and how many GPUs each team may use."""

from __future__ import annotations

DOCUMENTATION = r"""
module: nomad_tenancy
short_description: Keep Nomad's namespaces, their GPU budgets, and node pools
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - Makes namespaces and node pools, changes those that differ, and deletes those that are to be absent. Others are left
    alone. What is left out of an element stays as it is in Nomad; only a budget that is left out is taken away.
  - A budget is written into the meta of its namespace, as C(gpufarm_gpus), where all who may see the namespace can read
    it. On Nomad Enterprise a resource quota of the name C(gpufarm-NAMESPACE) keeps to it as well, with a limit on
    C(nvidia/gpu) in each region. The open-source build has no quotas; there M(gpufarm.core.nomad_gpu_info) tells who is
    over a budget, and nothing stops them.
  - All is checked before the first change.
extends_documentation_fragment:
  - gpufarm.core.nomad
  - gpufarm.core.nomad.actiongroup_nomad
attributes:
  check_mode:
    support: full
    description: Can run in C(check_mode) and says what would change.
  diff_mode:
    support: full
    description: Shows the namespaces and node pools that change.
  idempotent:
    support: full
    description: Where all is as wanted nothing is written.
  platform:
    description: Runs wherever Nomad's HTTP API can be reached.
options:
  token:
    description:
      - A management token, which alone may change namespaces and node pools. Not needed where Nomad has no ACLs.
  namespaces:
    description:
      - Namespaces, each a name once.
    type: list
    elements: dict
    default: []
    suboptions:
      name:
        description: Letters, digits and dashes, at most 128.
        type: str
        required: true
      state:
        description: One that still has jobs, volumes or variables cannot be deleted, nor can V(default).
        type: str
        choices: [present, absent]
        default: present
      description:
        description: For people.
        type: str
      gpus:
        description:
          - How many GPUs its jobs may use at a time, in each region. A MIG device counts as one. Left out, there is no
            budget. Nomad Enterprise keeps to it from 1.9 on.
        type: int
      meta:
        description: Metadata for people and programs. Keys that are not named stay.
        type: dict
      enabled_task_drivers:
        description: The only task drivers that its jobs may use. Empty, all.
        type: list
        elements: str
      disabled_task_drivers:
        description: Task drivers that its jobs may not use.
        type: list
        elements: str
      enabled_network_modes:
        description: The only network modes that its jobs may use, such as V(bridge). Empty, all. Nomad 1.8.4 or newer.
        type: list
        elements: str
      disabled_network_modes:
        description: Network modes that its jobs may not use, such as V(host). Nomad 1.8.4 or newer.
        type: list
        elements: str
  node_pools:
    description:
      - Node pools, each a name once. Nodes say themselves which one they are in.
    type: list
    elements: dict
    default: []
    suboptions:
      name:
        description: Letters, digits, dashes and underscores, at most 128. V(all) and V(default) are Nomad's own.
        type: str
        required: true
      state:
        description: One that still has nodes or jobs cannot be deleted.
        type: str
        choices: [present, absent]
        default: present
      description:
        description: For people.
        type: str
      meta:
        description: Metadata for people and programs. Keys that are not named stay.
        type: dict
seealso:
  - module: gpufarm.core.nomad_gpu_info
  - module: gpufarm.core.nomad_acl
"""

EXAMPLES = r"""
- name: Have two teams
  gpufarm.core.nomad_tenancy:
    address: https://nomad.example.com:4646
    token: "{{ vault_nomad_management_token }}"
    namespaces:
      - name: research
        gpus: 8
        enabled_task_drivers: [docker]
      - name: inference
        gpus: 4
    node_pools:
      - name: h200
        description: The two racks by the window
"""

RETURN = r"""
enforced:
  description: >-
    Whether Nomad itself keeps namespaces to their budgets, as only Nomad Enterprise does; null where none has a
    budget.
  type: bool
  returned: success
  sample: false
"""

import dataclasses
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufarm.core.plugins.module_utils import nomad, nomad_options
from ansible_collections.gpufarm.core.plugins.module_utils.text import clean

DEVICE = "nvidia/gpu"
DEVICES_SINCE = (1, 9)
OWN_QUOTA = "gpufarm-"
CAPABILITIES = {
    "enabled_task_drivers": "EnabledTaskDrivers",
    "disabled_task_drivers": "DisabledTaskDrivers",
    "enabled_network_modes": "EnabledNetworkModes",
    "disabled_network_modes": "DisabledNetworkModes",
}


@dataclasses.dataclass(frozen=True)
class Kind:
    """What people call it, its option, its path, and the names that it may have."""

    word: str
    option: str
    every: str
    path: str
    pattern: str
    letters: str


NAMESPACE = Kind(
    "namespace", "namespaces", "/v1/namespaces", "/v1/namespace", "[a-zA-Z0-9-]{1,128}", "letters, digits and dashes"
)
NODE_POOL = Kind(
    "node pool",
    "node_pools",
    "/v1/node/pools",
    "/v1/node/pool",
    "[a-zA-Z0-9_-]{1,128}",
    "letters, digits, dashes and underscores",
)


def may_not(found: str) -> nomad.NomadError:
    return nomad.NomadError(
        found=found,
        expected="a management token, which alone may change namespaces and node pools",
        next_step="set 'token' or NOMAD_TOKEN to one",
    )


def check(kind: Kind, wanted: Sequence[Mapping[str, Any]]) -> None:
    """Raise NomadError for what Nomad would refuse, or take for something else."""
    names: set[str] = set()
    for each in wanted:
        name = each["name"]
        if not re.fullmatch(kind.pattern, name):
            raise nomad.NomadError(
                found=f"'{name}' is given as the name of a {kind.word}",
                expected=f"{kind.letters}, at most 128",
                next_step=f"correct it in {kind.option}",
            )
        if name in names:
            raise nomad.NomadError(
                found=f"the {kind.word} '{name}' is given twice",
                expected="each once",
                next_step=f"take one of them out of {kind.option}",
            )
        names.add(name)
        if name in ("all", "default") if kind is NODE_POOL else (name, each["state"]) == ("default", "absent"):
            raise nomad.NomadError(
                found=f"the {kind.word} '{name}' is to be {each['state']}",
                expected=f"a {kind.word} that is not Nomad's own",
                next_step=f"take it out of {kind.option}",
            )
        if (each.get("gpus") or 0) < 0:
            raise nomad.NomadError(
                found=f"the {kind.word} '{name}' may use {each['gpus']} GPUs",
                expected="a number from 0 on, or none where it has no budget",
                next_step=f"correct 'gpus' in {kind.option}",
            )


def merged(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """What a namespace or a node pool is to be; what nobody has said of it stays."""
    after = {**found, "Name": wanted["name"]}
    # What Nomad answers is without control characters here.
    if wanted["description"] is not None:
        after["Description"] = clean(wanted["description"])
    meta = {**(found.get("Meta") or {}), **{key: clean(str(value)) for key, value in (wanted["meta"] or {}).items()}}
    if "gpus" in wanted:
        meta.pop(nomad.BUDGET_KEY, None)
        if wanted["gpus"] is not None:
            meta[nomad.BUDGET_KEY] = str(wanted["gpus"])
        had = found.get("Capabilities") or {}
        said = {field: wanted[option] for option, field in CAPABILITIES.items() if wanted[option] is not None}
        capabilities = {**had, **said}
        after["Capabilities"] = capabilities if any(capabilities.values()) else None
    after["Meta"] = meta or None
    return after


def shown(found: Mapping[str, Any]) -> dict[str, Any]:
    """What can be changed of it."""
    fields = ("Description", "Meta", "Capabilities", "Quota")
    told = {field: found[field] for field in fields if found.get(field)}
    if "Capabilities" in told:
        told["Capabilities"] = {field: value for field, value in told["Capabilities"].items() if value}
    return told


class Tenancy:
    """The namespaces and node pools of a farm, and what was to be written."""

    def __init__(self, client: nomad.Client, check_mode: bool) -> None:
        self._client = client
        self._check_mode = check_mode
        self.changed = False
        self.before: dict[str, Any] = {}
        self.after: dict[str, Any] = {}

    def _write(self, method: str, path: str, body: Any = None) -> None:
        self.changed = True
        if not self._check_mode:
            self._client.call(method, path, body)

    def found(self, kind: Kind) -> dict[str, dict[str, Any]]:
        return {each["Name"]: each for each in self._client.items(kind.every, {}).items}

    def have(self, kind: Kind, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
        name = wanted["Name"]
        before, after = shown(found.get(name, {})), shown(wanted)
        if name in found and before == after:
            return
        self.before[f"{kind.word} {name}"] = before if name in found else None
        self.after[f"{kind.word} {name}"] = after
        self._write("POST", f"{kind.path}/{name}", wanted)

    def lack(self, kind: Kind, found: Mapping[str, Any], name: str) -> None:
        if name not in found:
            return
        self.before[f"{kind.word} {name}"] = shown(found[name])
        self.after[f"{kind.word} {name}"] = None
        try:
            self._write("DELETE", f"{kind.path}/{name}")
        except nomad.NomadError as error:
            if not error.said:
                raise
            # Reasons come as a list, whoever of the servers has been asked.
            said = re.sub(r"^(rpc error: )?(\d+ errors? occurred: \* )?", "", " ".join(error.said.split()))
            raise nomad.NomadError(
                found=f"Nomad keeps the {kind.word} '{name}': {said.replace(' * ', '; ')}",
                expected=f"a {kind.word} that nothing uses any more",
                next_step="stop its jobs, or bring its nodes elsewhere, and run this again; the garbage collection of "
                "Nomad, `nomad system gc`, forgets jobs that have ended",
                status=error.status,
            ) from None

    def require_management(self) -> None:
        """Have a token that sees everything; from others Nomad keeps a part without a word."""
        if not self._client.connection.token:
            return
        own = self._client.own_token()
        if own and own["Type"] != "management":
            raise may_not(f"the token '{own['Name']}' is of type {own['Type']}")

    def quotas(self) -> dict[str, dict[str, Any]] | None:
        """The quotas of Nomad Enterprise; None where there are none for devices."""
        try:
            found = {each["Name"]: each for each in self._client.items("/v1/quotas", {}).items}
        except nomad.NomadError as error:
            if error.status == 501:
                return None
            raise
        build = self._client.call("GET", "/v1/agent/self")["member"]["Tags"]["build"]
        version = tuple(int(part) for part in re.findall("[0-9]+", build)[:2])
        return found if version >= DEVICES_SINCE else None

    def have_quotas(self, found: Mapping[str, Any], budgets: Mapping[str, int]) -> None:
        regions = [str(region) for region in self._client.call("GET", "/v1/regions")] if budgets else []
        for namespace, gpus in budgets.items():
            name = OWN_QUOTA + namespace
            quota = found.get(name) or {"Name": name, "Description": "A GPU budget of gpufarm.core"}
            limits = {limit["Region"]: limit for limit in quota.get("Limits") or []}
            if {region: _count(limits.get(region)) for region in regions} == dict.fromkeys(regions, gpus):
                continue
            for region in regions:
                limit = (limits.get(region) or {}).get("RegionLimit") or {}
                others = [device for device in limit.get("Devices") or [] if device["Name"] != DEVICE]
                devices = [*others, {"Name": DEVICE, "Count": gpus}]
                limits[region] = {"Region": region, "RegionLimit": {**limit, "Devices": devices}}
            self._write("POST", "/v1/quota", {**quota, "Limits": list(limits.values())})

    def lack_quotas(self, namespaces: Iterable[str]) -> None:
        for name in namespaces:
            self._write("DELETE", f"/v1/quota/{OWN_QUOTA}{name}")


def _count(limit: Mapping[str, Any] | None) -> int | None:
    devices = ((limit or {}).get("RegionLimit") or {}).get("Devices") or []
    return next((device["Count"] for device in devices if device["Name"] == DEVICE), None)


def require_own_quotas(wanted: Mapping[str, Mapping[str, Any]], budgets: Iterable[str]) -> None:
    for name in budgets:
        quota = wanted[name].get("Quota")
        if quota and quota != OWN_QUOTA + name:
            raise nomad.NomadError(
                found=f"the namespace '{name}' has the quota '{quota}'",
                expected=f"none, or '{OWN_QUOTA}{name}', which has the limit that 'gpus' says",
                next_step="leave out 'gpus' and give that quota a limit on devices, or take it from the namespace",
            )


def absent(wanted: Iterable[Mapping[str, Any]]) -> list[str]:
    return [each["name"] for each in wanted if each["state"] == "absent"]


def present(wanted: Iterable[Mapping[str, Any]], found: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {each["name"]: merged(found.get(each["name"], {}), each) for each in wanted if each["state"] == "present"}


def apply(tenancy: Tenancy, namespaces: Sequence[Mapping[str, Any]], pools: Sequence[Mapping[str, Any]]) -> bool | None:
    """Have what is wanted; whether Nomad keeps to the budgets."""
    check(NAMESPACE, namespaces)
    check(NODE_POOL, pools)
    tenancy.require_management()
    found, found_pools = tenancy.found(NAMESPACE), tenancy.found(NODE_POOL)
    wanted = present(namespaces, found)
    budgets = {name: budget for name, each in wanted.items() if (budget := nomad.budget_of(each)) is not None}
    quotas = tenancy.quotas() if namespaces else None
    # As the quotas say: a run that was cut off may have left one behind.
    had = [each["name"] for each in namespaces if OWN_QUOTA + each["name"] in (quotas or {})]
    if quotas is not None:
        require_own_quotas(wanted, budgets)
    for pool in present(pools, found_pools).values():
        tenancy.have(NODE_POOL, found_pools, pool)
    # A namespace names a quota that is there.
    if quotas is not None:
        tenancy.have_quotas(quotas, budgets)
    for name, namespace in wanted.items():
        if quotas is not None and name in budgets:
            namespace["Quota"] = OWN_QUOTA + name
        elif namespace.get("Quota") == OWN_QUOTA + name:
            namespace["Quota"] = ""
        tenancy.have(NAMESPACE, found, namespace)
    for name in absent(namespaces):
        tenancy.lack(NAMESPACE, found, name)
    tenancy.lack_quotas(name for name in had if name not in budgets)
    # Last, because jobs of a namespace that goes may be in it.
    for name in absent(pools):
        tenancy.lack(NODE_POOL, found_pools, name)
    return quotas is not None if budgets else None


def argument_spec() -> dict[str, Any]:
    name: dict[str, Any] = {"type": "str", "required": True}
    state: dict[str, Any] = {"type": "str", "choices": ["present", "absent"], "default": "present"}
    both = {"name": name, "state": state, "description": {"type": "str"}, "meta": {"type": "dict"}}
    lists = {option: {"type": "list", "elements": "str"} for option in CAPABILITIES}
    of_namespaces = {**both, "gpus": {"type": "int"}, **lists}
    return {
        **nomad_options.argument_spec(),
        "namespaces": {"type": "list", "elements": "dict", "default": [], "options": of_namespaces},
        "node_pools": {"type": "list", "elements": "dict", "default": [], "options": both},
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec=argument_spec(),
        required_together=nomad_options.REQUIRED_TOGETHER,
        supports_check_mode=True,
    )
    try:
        tenancy = Tenancy(nomad.Client(nomad_options.connection_of(module.params)), module.check_mode)
        enforced = apply(tenancy, module.params["namespaces"], module.params["node_pools"])
    except nomad.NomadError as error:
        told = may_not(error.found) if error.status == 403 else error
        module.fail_json(msg=f"{platform.node()}: {told}")
    module.exit_json(
        changed=tenancy.changed, enforced=enforced, diff={"before": tenancy.before, "after": tenancy.after}
    )


if __name__ == "__main__":
    main()
