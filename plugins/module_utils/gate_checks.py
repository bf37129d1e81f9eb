# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a node's gate learns of a GPU only by letting it compute, which it does while nobody else has the GPU.

A check takes a second or two (levels C(start) and C(quick) of C(gpu_benchmark)) and little memory. Nobody has a GPU on
which no process computes, which no allocation of the node holds, which no process was given by its environment, and
which the kubelet has given to no pod. A plain container that was given all GPUs, or some by CDI, is not seen before it
computes. A token may not see every namespace, and with CDI a container's environment no longer says what it was given:
it has every GPU then, unless its allocation is seen. Under WSL nobody lists Windows' programs, of which the GPU's
utilisation tells. What is unknown counts as busy. A GPU that is busy keeps its last record:

    verdict (ok, failed), level, checked_at (time in UTC), findings (code, found, expected, next_step)
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ansible_collections.gpufarm.core.plugins.module_utils import gate, gpu_benchmark, nomad
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_benchmark.devices import (
    Device,
    devices_of,
    parts_of,
    unseen_work,
    who_is_unknown,
)
from ansible_collections.gpufarm.core.plugins.module_utils.kubelet_devices import GPU_DRIVER
from ansible_collections.gpufarm.core.plugins.module_utils.nomad_programs import Program
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi.facts import Facts, Gpu
from ansible_collections.gpufarm.core.plugins.module_utils.pci import normal_bus_id
from ansible_collections.gpufarm.core.plugins.module_utils.problem import Finding
from ansible_collections.gpufarm.core.plugins.module_utils.text import epoch, utc

START, QUICK = "start", "quick"
LIMIT_S = 60
"""What one check of all GPUs may take; what has not ended then is left out."""
STEP_S = 20
"""What a step of it may take; a GPU that has not ended it then hangs."""
MEMORY_SHARE = 0.05
SLOW = ("slow_memory", "slow_fp32", "slow_tensor", "slow_host_copies")
"""A job that came and went meanwhile may be the cause, so they are measured twice."""
WRONG = ("memory_errors", "wrong_results", "peer_wrong")
"""These are nobody else's fault, whoever came meanwhile."""
NOBODYS = ("internal", "over")
"""Errors that say nothing of a GPU."""
OVER = "the check was over before it had come to its end"
NEXT_STEPS = {
    "slow_host_copies": "compare generation and width of the PCI Express link with a sibling's, and reseat the card; "
    "if it is meant to be so, set severities: {benchmark_slow_host_copies: ignore}",
}
"""Where that of the benchmark names an option that the gate has not."""

AGAIN_S = 3600
"""A GPU that failed is checked again after so long at the latest."""

if TYPE_CHECKING:
    Records = dict[str, Any]


def kept(last: Mapping[str, Records | None], every: Mapping[str, int]) -> dict[str, Records]:
    """The last records, without those of a level that is asked for no more: it would never be passed."""
    return {
        uuid: {level: record for level, record in (records or {}).items() if every.get(level, 0) > 0}
        for uuid, records in last.items()
    }


def due(records: Mapping[str, Any], every: Mapping[str, int], acknowledged: str, now: float) -> str | None:
    """The level at which a GPU has to be checked now; None where it has not."""
    for level in (QUICK, START):
        if every[level] > 0 and _is_due(records.get(level), every[level], acknowledged, now):
            return level
    return None


def _repaired_at(acknowledged: Mapping[str, str], uuid: str) -> str:
    """The later of both times; what is none begins with a letter."""
    told = [acknowledged.get(each, "none") for each in ("all", uuid)]
    return max((text for text in told if text[:1].isdigit()), default="none")


def _is_due(record: Mapping[str, Any] | None, every: int, acknowledged: str, now: float) -> bool:
    if record is None:
        return True
    age = now - epoch(record["checked_at"])
    # A repair is known to be done. A clock that was put back would delay the check for ever.
    repaired = record["verdict"] != "ok" and acknowledged[:1].isdigit() and acknowledged > record["checked_at"]
    return age >= (every if record["verdict"] == "ok" else min(every, AGAIN_S)) or age < 0 or repaired


def holders(
    facts: Facts,
    allocations: Iterable[Mapping[str, Any]],
    programs: Iterable[Program],
    pods: Mapping[str, str],
) -> dict[str, str]:
    """UUIDs of GPUs to who has them, for people; a divided GPU is one, whoever has a part of it.

    C(pods) are those that C(kubelet_devices) tells.
    """
    seen = list(allocations)
    held = {uuid: str(told["id"])[:8] for (_node, uuid), told in nomad.devices_in_use(seen).items()}
    known = {each.get("ID") for each in seen if each.get("ClientStatus") not in nomad.ENDED}
    given = [(program, _wants(program, program.allocation in known)) for program in programs]
    claimed = {name: _claimed(name, facts["gpus"]) for name in pods if name.startswith(f"{GPU_DRIVER}/")}
    found = {}
    for gpu in facts["gpus"]:
        if not gpu["uuid"]:
            continue
        devices = devices_of(facts, [gpu["uuid"], *(each["uuid"] for each in gpu["mig_devices"] or () if each["uuid"])])
        names = {"all", *(device.uuid for device in devices)}
        who = [f"allocation {held[device.uuid]}" for device in devices if device.uuid in held]
        who += [_told(program) for program, wants in given if any(_means(want, names, gpu) for want in wants)]
        # Numbers are names of what other device plugins have.
        who += [pods[name] for name in sorted(names & pods.keys())]
        who += [pods[name] for name, uuids in claimed.items() if gpu["uuid"] in uuids]
        who += _computing(gpu, facts["platform"] == "wsl")
        if who:
            found[gpu["uuid"]] = ", ".join(dict.fromkeys(who))
    return found


def _told(program: Program) -> str:
    return f"{program.name} of allocation {program.allocation[:8]}" if program.allocation else program.name


def _wants(program: Program, known: bool) -> set[str]:
    """What a program was given, by its environment. The container toolkit's CDI writes void there, or names of CDI."""
    wants = set((program.devices or "").split(","))
    return (
        {"all"} if program.allocation and not known and any(each == "void" or "=" in each for each in wants) else wants
    )


def _means(want: str, names: Collection[str], gpu: Gpu) -> bool:
    """Whether the container toolkit, which takes more names than these, gives the GPU or a part of it for this one."""
    plain = want.strip().lower()
    if plain in {name.lower() for name in names} or re.fullmatch(rf"{gpu['index']}(:[0-9]+)?", plain):
        return True
    address = normal_bus_id(plain)
    return address is not None and address == normal_bus_id(gpu["pci_bus_id"])


def _claimed(name: str, gpus: Sequence[Gpu]) -> list[str | None]:
    """UUIDs of the GPUs that the driver can mean by a name: it counts by minor numbers, and did by indexes."""
    number = int(name.rpartition("-")[2])
    may_be = [gpu["uuid"] for gpu in gpus if {None, number} & {gpu["index"], gpu["minor_number"]}]
    return may_be or [gpu["uuid"] for gpu in gpus]


def _computing(gpu: Gpu, on_wsl: bool) -> list[str]:
    if who_is_unknown(gpu, on_wsl):
        return ["nobody knows who, because nvidia-smi lists no processes here"]
    return Device(gpu["uuid"] or "", gpu).processes or [*filter(None, [unseen_work(gpu, on_wsl)])]


def check(
    facts: Facts,
    last: Mapping[str, Records],
    every: Mapping[str, int],
    acknowledged: Mapping[str, str],
    busy: Callable[[Facts | None], Mapping[str, str]],
    *,
    sick: Collection[str | None] = (),
    lanes: int | None = None,
) -> tuple[dict[str, Records], dict[str, str]]:
    """The records of each GPU, by level, and why one that should be checked was not.

    C(busy) says who has which GPU: at first by these facts, and then by new ones. It raises NomadError where nobody
    knows. Those that are C(sick) without a check are left alone. C(lanes) is how many each should have, if somebody
    has said so. C(acknowledged) is when repairs were declared, of a GPU by its UUID, and of all by C(all).
    """
    now = time.time()
    records = {gpu["uuid"]: dict(last.get(gpu["uuid"]) or {}) for gpu in facts["gpus"] if gpu["uuid"]}
    wanted, left_out = {}, {}
    for gpu in facts["gpus"]:
        uuid = gpu["uuid"]
        level = (
            due(records[uuid], every, _repaired_at(acknowledged, uuid), now) if uuid and gpu["status"] == "ok" else None
        )
        if not uuid or not level:
            continue
        if uuid in sick:
            left_out[uuid] = "critical by the probe"
        elif gpu["mig_mode"] == "Enabled" and not parts_of(gpu):
            left_out[uuid] = "MIG mode is on, and no MIG device of it is known"
        else:
            wanted[uuid] = level
    known: Facts | None = facts
    for level in (QUICK, START):
        chosen = [uuid for uuid in wanted if wanted[uuid] == level]
        try:
            who = busy(known) if chosen else {}
        except nomad.NomadError as error:
            left_out.update(dict.fromkeys(chosen, f"unknown whether it is busy: {error}"))
            continue
        left_out.update({uuid: f"busy: {who[uuid]}" for uuid in chosen if uuid in who})
        chosen = [uuid for uuid in chosen if uuid not in who]
        if not chosen:
            continue
        # What was known is old after that.
        known = None
        found, unknown = _measure(facts, chosen, level, lanes)
        if slow := [uuid for uuid in chosen if any(each.code in SLOW for each in found[uuid])]:
            again, open_still = _measure(facts, slow, level, lanes)
            found = {**found, **{uuid: _slow_twice(found[uuid], again[uuid]) for uuid in slow}}
            # Of what else was found the first time nobody doubts.
            unknown.update(
                {uuid: f"slow, and not measured again: {open_still[uuid]}" for uuid in open_still if not found[uuid]}
            )
        if any(found.values()):
            found, meanwhile = _without_doubt(found, busy)
            unknown.update(meanwhile)
        left_out.update(unknown)
        for uuid, findings in found.items():
            if uuid not in unknown:
                # What is more holds for what is less.
                levels = [each for each in (START, QUICK) if every[each] > 0 and each in (START, level)]
                records[uuid].update(dict.fromkeys(levels, _record(findings, level, now)))
    return records, left_out


def _record(findings: Iterable[Finding], level: str, now: float) -> dict[str, Any]:
    told = [{key: getattr(each, key) for key in ("code", "found", "expected", "next_step")} for each in findings]
    return {"verdict": "failed" if told else "ok", "level": level, "checked_at": utc(now), "findings": told}


def _slow_twice(first: Sequence[Finding], again: Sequence[Finding]) -> list[Finding]:
    """What two measurements found, and of what was slow what both did: a job that came and went explains the rest."""
    then, now = ({(each.code, each.uuid, each.peer): each for each in told} for told in (first, again))
    return [
        dataclasses.replace(each, found=f"{each.found}, and when measured again: {now[key].found}")
        if each.code in SLOW
        else each
        for key, each in {**now, **then}.items()
        if each.code not in SLOW or key in then.keys() & now.keys()
    ]


def _without_doubt(
    found: Mapping[str, Sequence[Finding]], busy: Callable[[Facts | None], Mapping[str, str]]
) -> tuple[dict[str, Sequence[Finding]], dict[str, str]]:
    """What a job cannot be the cause of that came meanwhile, and which GPUs have got one."""
    try:
        now = busy(None)
    except nomad.NomadError as error:
        now = dict.fromkeys(found, f"unknown: {error}")
    certain = {
        uuid: findings if uuid not in now else [each for each in findings if each.code in WRONG]
        for uuid, findings in found.items()
    }
    return certain, {uuid: f"busy meanwhile: {who}" for uuid, who in now.items() if uuid in found and not certain[uuid]}


def _measure(
    facts: Facts, chosen: Sequence[str], level: str, lanes: int | None
) -> tuple[dict[str, Sequence[Finding]], dict[str, str]]:
    """What is wrong with each of these GPUs, and why one of which nothing is known was not measured to its end."""
    gpus = {gpu["uuid"]: gpu for gpu in facts["gpus"] if gpu["uuid"]}
    owner = {
        each.uuid: uuid
        for each in devices_of(facts, None)
        for uuid in [each.gpu["uuid"] if each.gpu else None]
        if uuid in chosen and uuid
    }
    devices = devices_of(facts, list(owner))
    answer = gpu_benchmark.measure(
        list(owner), level, memory_share=MEMORY_SHARE, timeout=STEP_S, limit_s=LIMIT_S,
        shared={each.uuid: (owner[each.uuid], each.instance) for each in devices},
    )  # fmt: skip
    found: dict[str, Sequence[Finding]] = {uuid: [] for uuid in chosen}
    unknown = dict.fromkeys(set(chosen) - set(owner.values()), OVER)
    for device in answer["devices"]:
        uuid = owner[device["uuid"]]
        gpu = gpus[uuid]
        error = device["error"] or {}
        if error.get("code") in NOBODYS or not (error or device["memory"]):
            own = error.get("code") == "internal"
            unknown[uuid] = f"the check failed by itself: {error['message'].splitlines()[-1]}" if own else OVER
            device["error"] = None
        card = gpu_benchmark.Card(
            pcie_generation=gpu["pcie"]["generation_max"],
            # A slot can have fewer lanes than the card, which is for the operator to judge.
            pcie_width=lanes or gpu["pcie"]["width_current"],
            c2c_mode=gpu["c2c_mode"],
            virtualization_mode=gpu["virtualization_mode"],
            memory_total_mib=gpu["memory_total_mib"],
        )
        told = gpu_benchmark.judge_device(device, card, gpu_benchmark.Thresholds(), level)
        part = "" if device["uuid"] == uuid else f"{device['uuid']}: "
        found[uuid] = [*found[uuid], *(_named(each, part, device["uuid"]) for each in told)]
    peers_error = answer["peers_error"] or {}
    between = None if peers_error.get("code") in NOBODYS else answer["peers_error"]
    for each in gpu_benchmark.judge_peers(answer["peers"], between, gpu_benchmark.Thresholds()):
        # Of copies that failed nobody knows which GPU is to blame.
        for uuid in [each.uuid] if each.uuid else chosen:
            found[uuid] = [*found[uuid], each]
    return found, {uuid: why for uuid, why in unknown.items() if not found[uuid]}


def _named(finding: Finding, part: str, uuid: str) -> Finding:
    step = NEXT_STEPS.get(finding.code, finding.next_step)
    return Finding(finding.code, f"{part}{finding.found}", finding.expected, step, uuid=uuid)


def findings_of(records: Mapping[str, Records], acknowledged_file: str) -> Iterable[Finding]:
    """What the records say is wrong, for the verdict on the node; each thing once."""
    for uuid, levels in records.items():
        seen = set()
        for level in (QUICK, START):
            record = levels.get(level)
            for each in (record or {}).get("findings", ()):
                if each["code"] not in seen:
                    seen.add(each["code"])
                    when = f"{each['found']}, when it was checked at {levels[level]['checked_at']}"
                    file = f"{acknowledged_file}-{uuid}"
                    step = f"{each['next_step']}; 'touch {file}' after the repair has it checked at once"
                    yield Finding(f"{gate.MEASURED}{each['code']}", when, each["expected"], step, uuid=uuid)


def may_compute(node: gate.GateNode) -> str:
    """Why nothing may compute on this node for now; empty where it may."""
    if node.meta.get(gate.MAINTENANCE_KEY):
        return f"in maintenance ({node.meta[gate.MAINTENANCE_KEY]})"
    if not node.eligible and (not node.marks or node.drained_by_others):
        return "closed by somebody else, who may be at work on it"
    return ""
