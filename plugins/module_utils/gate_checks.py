# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a node's gate learns of a GPU only by letting it compute, which it does while nobody else has the GPU.

A check takes a second or two (levels C(start) and C(quick) of C(gpu_benchmark)) and little memory. Nobody has a GPU on
which no process computes, which no allocation of the node holds, and which no process that Nomad has started was given.
A token may not see every namespace, and with CDI a container's environment no longer says what it was given: it has
every GPU then, unless its allocation is seen. What is unknown counts as busy. A GPU that is busy keeps its last record:

    verdict (ok, failed), level, checked_at (time in UTC), findings (code, found, expected, next_step)
"""

from __future__ import annotations

import calendar
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils import gate, gpu_benchmark, nomad
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_benchmark.devices import Device, devices_of
from ansible_collections.gpufarm.core.plugins.module_utils.nomad_programs import Program
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi.facts import Facts, Gpu
from ansible_collections.gpufarm.core.plugins.module_utils.problem import Finding
from ansible_collections.gpufarm.core.plugins.module_utils.text import utc

START, QUICK = "start", "quick"
LIMIT_S = 60
"""What one check of all GPUs may take; what has not ended then is left out."""
STEP_S = 20
"""What a step of it may take; a GPU that has not ended it then hangs."""
MEMORY_SHARE = 0.05
WRONG = ("memory_errors", "wrong_results", "peer_wrong")
"""These are nobody else's fault, whoever came meanwhile."""
NOBODYS = ("internal", "over")
"""Errors that say nothing of a GPU."""

Records = dict[str, Any]


def due(records: Mapping[str, Any], every: Mapping[str, int], acknowledged: str, now: float) -> str | None:
    """The level at which a GPU has to be checked now; None where it has not."""
    for level in (QUICK, START):
        if every[level] > 0 and _is_due(records.get(level), every[level], acknowledged, now):
            return level
    return None


def _is_due(record: Mapping[str, Any] | None, every: int, acknowledged: str, now: float) -> bool:
    if record is None:
        return True
    age = now - epoch(record["checked_at"])
    # A repair is known to be done. A clock that was put back would delay the check for ever.
    repaired = record["verdict"] != "ok" and acknowledged[:1].isdigit() and acknowledged > record["checked_at"]
    return age >= every or age < 0 or repaired


def epoch(text: str) -> int:
    """Seconds since the epoch of a time as C(utc) writes it."""
    return calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%SZ"))


def holders(facts: Facts, allocations: Iterable[Mapping[str, Any]], programs: Iterable[Program]) -> dict[str, str]:
    """UUIDs of GPUs to who has them, for people; a divided GPU is one, whoever has a part of it."""
    seen = list(allocations)
    held = {uuid: str(told["id"])[:8] for (_node, uuid), told in nomad.devices_in_use(seen).items()}
    known = {each.get("ID") for each in seen if each.get("ClientStatus") not in nomad.ENDED}
    given = [(program, _wants(program, program.allocation in known)) for program in programs]
    found = {}
    for gpu in facts["gpus"]:
        if not gpu["uuid"]:
            continue
        devices = devices_of(facts, [gpu["uuid"], *(each["uuid"] for each in gpu["mig_devices"] or () if each["uuid"])])
        names = {"all", str(gpu["index"]), *(device.uuid for device in devices)}
        who = [f"allocation {held[device.uuid]}" for device in devices if device.uuid in held]
        who += [f"{program.name} of allocation {program.allocation[:8]}" for program, wants in given if names & wants]
        who += _computing(gpu)
        if who:
            found[gpu["uuid"]] = ", ".join(dict.fromkeys(who))
    return found


def _wants(program: Program, known: bool) -> set[str]:
    """What a program was given, by its environment. The container toolkit's CDI writes void there, or names of CDI."""
    wants = set((program.devices or "").split(","))
    return {"all"} if not known and any(each == "void" or "=" in each for each in wants) else wants


def _computing(gpu: Gpu) -> list[str]:
    if gpu["processes"] is None:
        return ["nobody knows who, because nvidia-smi lists no processes here"]
    return Device(gpu["uuid"] or "", gpu).processes


def check(
    facts: Facts,
    last: Mapping[str, Records],
    every: Mapping[str, int],
    acknowledged: str,
    busy: Callable[[Facts | None], Mapping[str, str]],
) -> tuple[dict[str, Records], dict[str, str]]:
    """The records of each GPU, by level, and why one that should be checked was not.

    C(busy) says who has which GPU: at first by these facts, and then by new ones. It raises NomadError where nobody
    knows.
    """
    now = time.time()
    records = {gpu["uuid"]: dict(last.get(gpu["uuid"]) or {}) for gpu in facts["gpus"] if gpu["uuid"]}
    wanted = {
        gpu["uuid"]: level
        for gpu in facts["gpus"]
        if gpu["uuid"] and gpu["status"] == "ok"
        for level in [due(records[gpu["uuid"]], every, acknowledged, now)]
        if level
    }
    if not wanted:
        return records, {}
    try:
        left_out = {uuid: f"busy: {who}" for uuid, who in busy(facts).items() if uuid in wanted}
    except nomad.NomadError as error:
        return records, dict.fromkeys(wanted, f"unknown whether it is busy: {error}")
    # One level in a run, so that a run has an end.
    levels = {level for uuid, level in wanted.items() if uuid not in left_out}
    level = QUICK if QUICK in levels else START
    chosen = [uuid for uuid in wanted if uuid not in left_out and wanted[uuid] == level]
    if not chosen:
        return records, left_out
    found = _measure(facts, chosen, level)
    if any(found.values()):
        found, meanwhile = _without_doubt(found, busy)
        left_out.update(meanwhile)
    for uuid, findings in found.items():
        if findings is None or uuid in left_out:
            left_out.setdefault(uuid, "the check was over before it had come to its end")
            continue
        record = {
            "verdict": "failed" if findings else "ok",
            "level": level,
            "checked_at": utc(now),
            "findings": [
                {key: getattr(each, key) for key in ("code", "found", "expected", "next_step")} for each in findings
            ],
        }
        # What is more holds for what is less.
        records[uuid].update(dict.fromkeys((START, QUICK) if level == QUICK else (START,), record))
    return records, left_out


def _without_doubt(
    found: Mapping[str, Sequence[Finding] | None], busy: Callable[[Facts | None], Mapping[str, str]]
) -> tuple[dict[str, Sequence[Finding] | None], dict[str, str]]:
    """What a job cannot be the cause of that came meanwhile, and which GPUs have got one."""
    try:
        now = busy(None)
    except nomad.NomadError as error:
        now = dict.fromkeys(found, f"unknown: {error}")
    certain = {
        uuid: findings if findings is None or uuid not in now else [each for each in findings if each.code in WRONG]
        for uuid, findings in found.items()
    }
    return certain, {uuid: f"busy meanwhile: {who}" for uuid, who in now.items() if uuid in found and not certain[uuid]}


def _measure(facts: Facts, chosen: Sequence[str], level: str) -> dict[str, Sequence[Finding] | None]:
    """What is wrong with each of these GPUs; None where it was not measured to its end, and nobody is to blame."""
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
    found: dict[str, list[Finding]] = {uuid: [] for uuid in chosen}
    unknown = set(chosen) - set(owner.values())
    for device in answer["devices"]:
        uuid = owner[device["uuid"]]
        gpu = gpus[uuid]
        code = (device["error"] or {}).get("code")
        if code in NOBODYS or not (device["error"] or device["memory"]):
            unknown.add(uuid)
            device["error"] = None
        card = gpu_benchmark.Card(
            pcie_generation=gpu["pcie"]["generation_max"],
            pcie_width=gpu["pcie"]["width_max"] or gpu["pcie"]["width_current"],
            memory_total_mib=gpu["memory_total_mib"],
        )
        told = gpu_benchmark.judge_device(device, card, gpu_benchmark.Thresholds(), level)
        part = "" if device["uuid"] == uuid else f"{device['uuid']}: "
        found[uuid] += [_named(each, part) for each in told]
    peers_error = answer["peers_error"] or {}
    between = None if peers_error.get("code") in NOBODYS else answer["peers_error"]
    for each in gpu_benchmark.judge_peers(answer["peers"], between, gpu_benchmark.Thresholds()):
        # Of copies that failed nobody knows which GPU is to blame.
        for uuid in [each.uuid] if each.uuid else chosen:
            found[uuid].append(each)
    return {uuid: None if uuid in unknown and not findings else findings for uuid, findings in found.items()}


def _named(finding: Finding, part: str) -> Finding:
    return Finding(finding.code, f"{part}{finding.found}", finding.expected, finding.next_step)


def findings_of(records: Mapping[str, Records]) -> Iterable[Finding]:
    """What the records say is wrong, for the verdict on the node; each thing once."""
    for uuid, levels in records.items():
        seen = set()
        for level in (QUICK, START):
            record = levels.get(level)
            for each in (record or {}).get("findings", ()):
                if each["code"] not in seen:
                    seen.add(each["code"])
                    when = f"{each['found']}, when it was checked at {levels[level]['checked_at']}"
                    yield Finding(f"benchmark_{each['code']}", when, each["expected"], each["next_step"], uuid=uuid)


def may_compute(node: gate.GateNode) -> str:
    """Why nothing may compute on this node for now; empty where it may."""
    if node.meta.get(gate.MAINTENANCE_KEY):
        return f"in maintenance ({node.meta[gate.MAINTENANCE_KEY]})"
    if not node.eligible and (not node.marks or node.drained_by_others):
        return "closed by somebody else, who may be at work on it"
    return ""
