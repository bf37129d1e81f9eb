#!/usr/bin/python
# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: nvidia_mig
short_description: Divide GPUs into the MIG instances of a layout
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - Brings about the state "each GPU has these MIG instances, and no others", with C(nvidia-smi).
  - It does the least. GPU instances that are there and fit stay, those with work in them before others, so that a
    layout which has more of the same makes only those. Each instance has one compute instance, which has all of it.
  - Nothing that holds work is destroyed. Where processes are in the way the module changes nothing on that GPU and
    names them. Use P(gpufarm.core.nvidia_mig#role), which takes the node out of the farm's work first.
  - A GPU keeps no instances over a reboot, and since Hopper not even its MIG mode. The role brings them back.
requirements:
  - A driver that answers, and root.
attributes:
  check_mode:
    support: full
    description: Tells what would go and come. Of a GPU whose MIG mode is off some drivers do not tell their profiles.
  diff_mode:
    support: full
    description: Shows the instances of each GPU before and after.
  idempotent:
    support: full
    description: Running the module again changes nothing.
  platform:
    platforms: posix
    support: full
    description: Linux only. Under WSL there is no MIG.
options:
  layout:
    description:
      - The layout of every GPU that no entry of O(gpus) has another one for.
      - >-
        A dictionary of the number of instances by the name of their profile, such as V({"1g.10gb": 7}), the name of a
        layout in O(layouts), or V(disabled) for whole GPUs. Empty leaves the GPUs as they are.
    type: raw
    default: ""
  gpus:
    description:
      - Layouts of single GPUs. An entry with a UUID comes before one with an index, and that before one with a model.
    type: list
    elements: dict
    default: []
    suboptions:
      uuid:
        description:
          - UUID of the GPU.
        type: str
      index:
        description:
          - Number of the GPU, as C(nvidia-smi) counts.
        type: int
      model:
        description:
          - Product name of the GPUs, such as V(NVIDIA A100-SXM4-80GB). A node may have none of them.
        type: str
      layout:
        description:
          - As O(layout).
        type: raw
        required: true
  layouts:
    description:
      - Layouts by their name.
    type: dict
    default: {}
  reset:
    description:
      - Whether a GPU may be reset whose MIG mode takes effect only then. Otherwise the module fails and says so.
    type: bool
    default: false
  path:
    description:
      - Path of C(nvidia-smi), where it is not in C(PATH).
    type: path
  timeout:
    description:
      - Seconds after which a call of C(nvidia-smi) is killed.
    type: float
    default: 60
seealso:
  - module: gpufarm.core.nvidia_smi_facts
  - name: MIG User Guide
    description: What the profiles of each GPU are.
    link: https://docs.nvidia.com/datacenter/tesla/mig-user-guide/
"""

EXAMPLES = r"""
- name: Every GPU is seven small ones
  gpufarm.core.nvidia_mig:
    layout:
      1g.10gb: 7

- name: GPU 0 is for notebooks, all others are whole
  gpufarm.core.nvidia_mig:
    layout: disabled
    gpus:
      - index: 0
        layout: notebooks
    layouts:
      notebooks:
        3g.40gb: 1
        1g.10gb: 4
"""

RETURN = r"""
gpus:
  description: The GPUs that have a layout.
  type: list
  elements: dict
  returned: success
  contains:
    index:
      description: Number of the GPU.
      type: int
      sample: 0
    uuid:
      description: UUID of the GPU.
      type: str
      sample: GPU-551ac2af-e5cb-e273-ad80-0bc34a4646c1
    name:
      description: Product name.
      type: str
      sample: NVIDIA H100 80GB HBM3
    mig_mode:
      description: MIG mode now; in check mode what it was.
      type: str
      sample: Enabled
    instances:
      description: GPU instances now, by their places; in check mode what they were.
      type: list
      elements: dict
      sample: [{id: 7, profile: 1g.10gb, start: 0}]
    create_at_boot:
      description: The instances of the layout as C(nvidia-smi mig -cgi) takes them; empty for a whole GPU.
      type: list
      elements: str
      sample: ["19:0", "19:1"]
    changes:
      description: What was, or would be, done, in words.
      type: list
      elements: str
      sample: [enable MIG, "create 1g.10gb at 0"]
    processes:
      description: Processes on instances that go, or on a GPU whose MIG mode changes, or that they are unknown.
      type: list
      elements: str
      sample: ["1234 (python)"]
"""

import dataclasses
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufarm.core.plugins.module_utils.commands import Command, run_commands
from ansible_collections.gpufarm.core.plugins.module_utils.mig.listings import (
    Instance,
    Profile,
    parse_instances,
    parse_profiles,
)
from ansible_collections.gpufarm.core.plugins.module_utils.mig.planning import Plan, plan
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi.facts import Gpu
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi.gathering import collect
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi.node import find_nvidia_smi
from ansible_collections.gpufarm.core.plugins.module_utils.problem import FoundError
from ansible_collections.gpufarm.core.plugins.module_utils.text import clean

DISABLED = "disabled"
# What nvidia-smi says, and may fail with, where there is nothing to list.
NOTHING = re.compile(r"No (GPU instances|compute instances|MIG-enabled devices) found")


class MigError(FoundError):
    """A layout that was not brought about."""


# --- the task -------------------------------------------------------------------------------------


def layout_of(value: Any, layouts: dict[str, Any], where: str) -> dict[str, int] | None:
    """A layout as numbers by profile: none for whole GPUs, None where a GPU is left as it is."""
    if value is None or value == "":
        return None
    if value == DISABLED:
        return {}
    if isinstance(value, str):
        if value not in layouts or isinstance(layouts[value], str):
            raise MigError(
                found=f"{where} is '{value}'",
                expected=f"{DISABLED}, numbers by profile such as {{'1g.10gb': 7}}, or the name of a layout: "
                f"{', '.join(sorted(layouts)) or 'there is none'}",
                next_step="correct it, or add the layout of that name",
            )
        return layout_of(layouts[value], {}, f"the layout {value}")
    if isinstance(value, dict) and value:
        try:
            numbers = {str(name): int(str(number)) for name, number in value.items()}
        except ValueError:
            numbers = {}
        if numbers and all(number > 0 for number in numbers.values()):
            return numbers
    raise MigError(
        found=f"{where} is {value!r}",
        expected="numbers above 0 by profile, such as {'1g.10gb': 7}",
        next_step=f"correct it; whole GPUs are '{DISABLED}'",
    )


def rule_for(gpu: Gpu, rules: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The entry for a GPU, the narrowest first."""
    for key, name in (("uuid", "uuid"), ("index", "index"), ("model", "name")):
        for rule in rules:
            if rule[key] is not None and rule[key] == gpu[name]:  # type: ignore[literal-required]
                return rule
    return None


def check_rules(rules: list[dict[str, Any]], gpus: list[Gpu]) -> None:
    for rule in rules:
        given = {key: rule[key] for key in ("uuid", "index", "model") if rule[key] is not None}
        # A model may be on other nodes only.
        known = rule["model"] is not None or any(rule_for(gpu, [rule]) for gpu in gpus)
        if len(given) != 1 or not known:
            there = ", ".join(f"{gpu['index']} ({gpu['uuid']})" for gpu in gpus)
            raise MigError(
                found=f"an entry of 'gpus' is for {given or 'no GPU'}",
                expected=f"one of uuid, index and model, of a GPU of this node: {there}",
                next_step="correct the entry",
            )


# --- the node -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU with its layout, and what it has."""

    gpu: Gpu
    layout: dict[str, int]
    profiles: list[Profile]
    instances: list[Instance]

    @property
    def name(self) -> str:
        # Of a GPU that does not answer nvidia-smi may know neither.
        more = ", ".join(filter(None, (self.gpu["name"], self.gpu["uuid"])))
        return f"GPU {self.gpu['index']}" + (f" ({more})" if more else "")

    @property
    def mode(self) -> str:
        return "Enabled" if self.layout else "Disabled"

    @property
    def mode_fits(self) -> bool:
        return self.gpu["mig_mode"] == self.mode == (self.gpu["mig_mode_pending"] or self.mode)

    @property
    def busy(self) -> frozenset[int]:
        """GPU instances with work in them."""
        found = [process["gpu_instance_id"] for process in self.gpu["processes"] or []]
        return frozenset(number for number in found if number is not None)

    @property
    def known(self) -> bool:
        """Whether a plan can be made: some drivers tell no profiles while MIG is off."""
        return bool(self.profiles) or not self.layout

    def plan(self) -> Plan:
        if not self.layout:
            return Plan(tuple(self.instances), ())
        return plan(self.name, self.layout, self.profiles, self.instances, self.busy)

    def in_the_way(self, steps: Plan) -> list[str]:
        """Processes that what is to be done would end."""
        going = {instance.id for instance in steps.destroy}
        if self.gpu["processes"] is None and (going or not self.mode_fits):
            return ["unknown ones, as nvidia-smi lists none"]
        return [
            f"{process['pid']} ({process['name']})"
            for process in self.gpu["processes"] or []
            if not self.mode_fits or process["gpu_instance_id"] in going
        ]


def said(answer: Command) -> str:
    return clean(" ".join((answer.words or answer.error or "nothing").split())).rstrip(".")


class Node:
    """The GPUs of this machine, asked and changed by nvidia-smi."""

    def __init__(self, params: dict[str, Any]) -> None:
        self.params = params
        self.binary = find_nvidia_smi(params["path"], None) or ""

    def call(self, *arguments: str) -> Command:
        return run_commands([[self.binary, *arguments]], self.params["timeout"])[0]

    def listed(self, what: str) -> str:
        """A list of nvidia-smi mig, which is empty only where nvidia-smi says so."""
        answer = self.call("mig", what)
        if answer.returncode == 0 or (answer.returncode is not None and NOTHING.match(answer.stdout)):
            return answer.stdout
        if answer.timed_out:
            why = f"did not end within {answer.limit:g} s"
        elif answer.error:
            why = f"could not be started ({answer.error})"
        else:
            why = f"ended with {answer.returncode} and said: {said(answer)}"
        raise MigError(
            found=f"`nvidia-smi mig {what}` {why}",
            expected="a list, or that there is nothing to list",
            next_step="run it on this host, and see the kernel's log",
        )

    def change(self, what: str, *arguments: str, minor: int | None = None) -> None:
        """Have nvidia-smi do something, or fail with what it said, and with who holds the GPU of a minor number."""
        answer = self.call(*arguments)
        if answer.returncode != 0:
            raise MigError(
                found=f"`nvidia-smi {' '.join(arguments)}`, to {what}, ended with {answer.returncode} and said: "
                f"{said(answer)}{held(minor)}",
                expected="that it does so",
                next_step="mend what it names, and run this again; what is done is found as it is",
            )

    def targets(self) -> list[Target]:
        """The GPUs that have a layout, as they are now."""
        facts = collect(
            frozenset({"min", "mig", "processes"}), path=self.params["path"], timeout=self.params["timeout"]
        )
        if not facts["available"] or facts["platform"] == "wsl":
            raise MigError(
                found="this is a WSL distribution" if facts["available"] else str(facts["message"]).rstrip("."),
                expected="a driver that lists its GPUs, and no WSL, where there is no MIG",
                next_step="run gpufarm.core.nvidia_driver on this host first, or give it no layout",
            )
        params, gpus = self.params, facts["gpus"]
        check_rules(params["gpus"], gpus)
        wanted = []
        for gpu in gpus:
            rule = rule_for(gpu, params["gpus"])
            where = f"the layout of GPU {gpu['index']}" if rule else "the option 'layout'"
            wanted.append(layout_of(rule["layout"] if rule else params["layout"], params["layouts"], where))
        found = []
        for gpu, layout in zip(gpus, wanted):
            if layout is None or (not layout and gpu["mig_mode"] is None and gpu["status"] == "ok"):
                continue
            target = Target(gpu, layout, [], [])
            if gpu["status"] != "ok":
                raise MigError(
                    found=f"{target.name} does not answer: {clean(str(gpu['status_message'])).rstrip('.')}",
                    expected="a GPU that answers",
                    next_step="run playbooks/health.yml, which says what to do, or leave it out of the layout",
                )
            if gpu["mig_mode"] is None:
                raise MigError(
                    found=f"{target.name} has no MIG mode",
                    expected="a GPU that can be divided: A30, A100, H100 and newer of their kind",
                    next_step=f"give this GPU no layout, or '{DISABLED}'",
                )
            found.append(target)
        if not any(target.layout or target.gpu["mig_mode"] == "Enabled" for target in found):
            return found
        profiles = parse_profiles(self.listed("-lgip"), self.listed("-lgipp"))
        instances = parse_instances(self.listed("-lgi"), self.listed("-lci"))
        return [
            dataclasses.replace(target, profiles=profiles.get(number, []), instances=instances.get(number, []))
            for target in found
            if (number := target.gpu["index"]) is not None
        ]

    # --- the change -------------------------------------------------------------------------------

    def again(self, target: Target) -> Target:
        return next(each for each in self.targets() if each.gpu["uuid"] == target.gpu["uuid"])

    def destroy(self, target: Target, going: Sequence[Instance]) -> None:
        for instance in going:
            where = ("-i", str(target.gpu["uuid"]), "-gi", str(instance.id))
            if instance.compute:
                self.change(f"destroy what is in {instance.profile}", "mig", *where, "-dci")
            self.change(f"destroy {instance.profile}", "mig", *where, "-dgi")

    def bring_about(self, target: Target) -> None:
        """Have the layout on one GPU: what is too much goes, then the mode, then what is missing."""
        uuid = str(target.gpu["uuid"])
        going = target.plan() if target.known else Plan((), ())
        holders = target.in_the_way(going)
        if holders and target.gpu["processes"] is None:
            raise MigError(
                found=f"nvidia-smi does not list the processes on {target.name}{held(target.gpu['minor_number'])}",
                expected="a list, because what computes there would be ended",
                next_step="see what `nvidia-smi -q -d PIDS` says of them on this host; where nobody uses that GPU, "
                f"{', '.join(told(target)['changes'])} by nvidia-smi yourself, and run this again",
            )
        if holders:
            raise MigError(
                found=f"on {target.name} are processes, {', '.join(holders)}",
                expected="none on what is to go",
                next_step="end them, or have the role gpufarm.core.nvidia_mig take the node out of work first",
            )
        self.destroy(target, going.destroy)
        if not target.mode_fits:
            self.set_mode(target)
            target = self.again(target)
        coming = target.plan().create
        if coming:
            specification = ",".join(f"{profile.id}:{start}" for profile, start in coming)
            self.change("create the instances", "mig", "-i", uuid, "-cgi", specification, "-C")

    def set_mode(self, target: Target) -> None:
        uuid, minor = str(target.gpu["uuid"]), target.gpu["minor_number"]
        verb = "enable" if target.layout else "disable"
        self.change(f"{verb} MIG", "-i", uuid, "-mig", "1" if target.layout else "0", minor=minor)
        if self.again(target).mode_fits:
            return
        if self.params["reset"]:
            self.change("have the MIG mode take effect", "-i", uuid, "--gpu-reset", minor=minor)
            if self.again(target).mode_fits:
                return
        raise MigError(
            found=f"the MIG mode of {target.name} is pending{held(minor)}",
            expected=f"{target.mode} at once, or after a reset of the GPU",
            next_step="reboot the node"
            + (
                ""
                if self.params["reset"]
                else ", or set 'reset' (nvidia_mig_reset of the role), for which nothing may hold it"
            ),
        )


def device_holders(minor: int | None, root: str) -> list[str]:
    """Processes that have a GPU's device open, as programs that only watch it do, which nvidia-smi does not list."""
    found = []
    for folder in sorted(Path(root, "proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        try:
            links = [str(link.readlink()) for link in (folder / "fd").iterdir()]
            name = (folder / "comm").read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            continue
        if minor is not None and f"/dev/nvidia{minor}" in links and folder.name != str(os.getpid()):
            found.append(f"{folder.name} ({clean(name)})")
    return found


def held(minor: int | None) -> str:
    """Who holds a GPU, for people."""
    holders = device_holders(minor, "/")
    return f"; it is held by {', '.join(holders)}" if holders else ""


# --- what is told ---------------------------------------------------------------------------------


def told(target: Target) -> dict[str, Any]:
    steps = target.plan() if target.known else Plan((), ())
    changes = [f"destroy {instance.profile} at {instance.start}" for instance in steps.destroy]
    if not target.mode_fits:
        changes.append("enable MIG" if target.layout else "disable MIG")
    changes += [f"create {profile.name} at {start}" for profile, start in steps.create]
    changes += [] if target.known else [f"create {number} of {name}" for name, number in target.layout.items()]
    ids = {profile.name: profile.id for profile in target.profiles}
    going = {instance.id for instance in steps.destroy}
    stays = [instance for instance in target.instances if instance.id not in going] if target.layout else []
    planned = [(instance.start, instance.profile) for instance in stays]
    planned += [(start, profile.name) for profile, start in steps.create]
    return {
        "index": target.gpu["index"],
        "uuid": target.gpu["uuid"],
        "name": target.gpu["name"],
        "mig_mode": target.gpu["mig_mode"],
        "instances": [
            {"id": each.id, "profile": each.profile, "start": each.start}
            for each in sorted(target.instances, key=lambda each: each.start)
        ],
        "create_at_boot": [f"{ids[name]}:{start}" for start, name in sorted(planned)] if target.known else [],
        "changes": changes,
        "processes": target.in_the_way(steps),
    }


def shown(targets: list[Target]) -> str:
    lines = []
    for target in targets:
        lines.append(f"{target.name}: MIG {target.gpu['mig_mode']}")
        instances = sorted(target.instances, key=lambda each: each.start)
        lines += [f"  {instance.profile} at {instance.start}" for instance in instances]
    return "".join(f"{line}\n" for line in lines)


def apply(module: AnsibleModule) -> dict[str, Any]:
    node = Node(module.params)
    before = node.targets()
    result = [told(target) for target in before]
    after = before
    changed = any(each["changes"] for each in result)
    if changed and not module.check_mode:
        for target, each in zip(before, result):
            if each["changes"]:
                node.bring_about(target)
        after = node.targets()
        result = [{**told(new), "changes": each["changes"]} for new, each in zip(after, result)]
        left = [re.sub("^", f"{new.name}: ", change) for new in after for change in told(new)["changes"]]
        if left:
            raise MigError(
                found=f"nvidia-smi did what it was asked for, and this is still to be done: {'; '.join(left)}",
                expected="the layout",
                next_step="see `nvidia-smi mig -lgi` and the kernel's log on this host",
            )
    answer: dict[str, Any] = {"changed": changed, "gpus": result}
    if module._diff:
        answer["diff"] = {"before": shown(before), "after": shown(after)}
    return answer


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "layout": {"type": "raw", "default": ""},
            "gpus": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": {
                    "uuid": {"type": "str"},
                    "index": {"type": "int"},
                    "model": {"type": "str"},
                    "layout": {"type": "raw", "required": True},
                },
            },
            "layouts": {"type": "dict", "default": {}},
            "reset": {"type": "bool", "default": False},
            "path": {"type": "path"},
            "timeout": {"type": "float", "default": 60},
        },
        supports_check_mode=True,
    )
    try:
        result = apply(module)
    except FoundError as error:
        module.fail_json(msg=f"{platform.node()}: {error}")
    module.exit_json(**result)


if __name__ == "__main__":
    main()
