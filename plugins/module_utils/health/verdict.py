# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The verdict on a node and each of its GPUs, from answers alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils import xid
from ansible_collections.gpufarm.core.plugins.module_utils.health.options import HealthOptions
from ansible_collections.gpufarm.core.plugins.module_utils.health.problems import Problem, problem_of
from ansible_collections.gpufarm.core.plugins.module_utils.health.rules import (
    findings_of_gpu,
    findings_of_links,
    findings_of_node,
)
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi.facts import Facts
from ansible_collections.gpufarm.core.plugins.module_utils.pci import normal_bus_id, padded_bus_id
from ansible_collections.gpufarm.core.plugins.module_utils.problem import Finding
from ansible_collections.gpufarm.core.plugins.module_utils.text import utc
from ansible_collections.gpufarm.core.plugins.module_utils.xid import CRITICAL, IGNORE, WARNING
from ansible_collections.gpufarm.core.plugins.module_utils.xid_events import Event


def _judge_event(event: Event, answers: bool, options: HealthOptions) -> Finding | None:
    often = "once" if event.count == 1 else f"{event.count} times"
    when = f"at {utc(event.last)}" if event.count == 1 else f"from {utc(event.first)} to {utc(event.last)}"
    said = f", saying: {event.text}" if event.text else ""
    if event.kind == "init":
        if answers:
            return None
        return Finding("gpu_init_failed", f"that the driver failed {often} to start the GPU {when}{said}")
    if event.kind == "sxid":
        severity, action = (WARNING, "watch") if event.fatal is not True else (CRITICAL, "check_nvlink")
        name = "NVSwitch error"
    else:
        row = xid.lookup(event.number, event.text, event.fatal)
        severity, action, name = row.severity, row.action, row.name
        most = options.xid_repeats_max
        # A job that fails writes many lines, and what follows each end of a job says nothing.
        if most is not None and (severity, action) == (IGNORE, "check_app") and event.incidents > most:
            severity, action = WARNING, "watch"
    label = "SXid" if event.kind == "sxid" else "Xid"
    expected = f"no {label} {event.number}"
    found = f"{label} {event.number} ({name}) {often} {when}{said}"
    return Finding(event.code, found, expected, severity=severity, action=action)


def worst(problems: Iterable[Problem]) -> str:
    severities = {problem["severity"] for problem in problems}
    return CRITICAL if CRITICAL in severities else WARNING if WARNING in severities else "ok"


MAX_REASON = 500


def reason_of(problems: Sequence[Problem]) -> str | None:
    """One line of printable ASCII on what is wrong; None when nothing is. Warnings count where nothing is critical."""
    severity = worst(problems)
    devices: dict[str, list[str]] = {}
    for problem in problems:
        if problem["severity"] != severity:
            continue
        # The first block of a UUID names a GPU within a node.
        device = (problem["uuid"] or "")[:12] or problem["pci_bus_id"]
        named = devices.setdefault(problem["code"], [])
        if device and device not in named:
            named.append(device)
    line = "; ".join(" ".join([code, *named]) for code, named in devices.items())
    line = "".join(char if " " <= char <= "~" else "?" for char in line)
    return (line if len(line) <= MAX_REASON else line[: MAX_REASON - 4] + " ...") or None


def judge(
    facts: Facts,
    xids: Sequence[Event],
    dcgm: Sequence[Finding],
    options: HealthOptions,
    *,
    host: str = "",
    checks: Mapping[str, Any] | None = None,
    orphans: Mapping[int, Sequence[int]] | None = None,
    others: Sequence[Finding] = (),
) -> dict[str, Any]:
    """The verdict on the node and on each GPU, from answers alone; C(orphans) are dead pids by position of the GPU, and
    C(others) what is known of the node from elsewhere.
    """
    gpus = facts["gpus"]
    told: list[tuple[Finding, str | None, str | None]] = []
    on_wsl = facts["platform"] == "wsl"
    links = findings_of_links(gpus)
    for position, gpu in enumerate(gpus):
        findings = list(findings_of_gpu(gpu, options, on_wsl))
        if position in links:
            findings.append(links[position])
        dead = (orphans or {}).get(position)
        if dead:
            pids = ", ".join(str(pid) for pid in dead)
            findings.append(Finding("process_without_owner", f"memory held by processes that ended: {pids}"))
        told += [(finding, gpu["uuid"], gpu["pci_bus_id"]) for finding in findings]
    told += [(finding, None, None) for finding in findings_of_node(facts, options, checks or {})]

    by_bus = {normal_bus_id(gpu["pci_bus_id"]): gpu for gpu in gpus if gpu["pci_bus_id"]}
    by_uuid = {gpu["uuid"]: gpu for gpu in gpus if gpu["uuid"]}
    events = []
    for event in xids:
        known = by_bus.get(event.pci_bus_id) if event.pci_bus_id else None
        uuid = known["uuid"] if known and known["uuid"] else event.uuid
        address = known["pci_bus_id"] if known else padded_bus_id(event.pci_bus_id) if event.pci_bus_id else None
        told_of = _judge_event(event, known is not None and known["status"] == "ok", options)
        if told_of:
            told.append((told_of, uuid, address))
        severity = options.severities.get(event.code, (told_of.severity if told_of else None) or CRITICAL)
        events.append(
            {
                "code": event.code,
                "severity": severity if told_of else IGNORE,
                "uuid": uuid,
                "pci_bus_id": address,
                "count": event.count,
                "first_at": utc(event.first),
                "last_at": utc(event.last),
                "text": event.text,
            }
        )
    for finding in (*dcgm, *others):
        whose = by_uuid.get(finding.uuid) if finding.uuid else None
        told.append((finding, finding.uuid, whose["pci_bus_id"] if whose else None))

    made = (problem_of(finding, host, options, uuid, address, on_wsl=on_wsl) for finding, uuid, address in told)
    return {**_verdict(gpus, [problem for problem in made if problem]), "xids": events}


def add(found: Mapping[str, Any], findings: Iterable[Finding], options: HealthOptions, host: str) -> dict[str, Any]:
    """What a probe has found, with what somebody else found of its GPUs."""
    addresses = {gpu["uuid"]: gpu["pci_bus_id"] for gpu in found["gpus"]}
    made = [problem_of(each, host, options, each.uuid, addresses.get(each.uuid)) for each in findings]
    return {**found, **_verdict(found["gpus"], [*found["problems"], *(problem for problem in made if problem)])}


def _verdict(gpus: Iterable[Mapping[str, Any]], problems: list[Problem]) -> dict[str, Any]:
    problems.sort(key=lambda problem: problem["severity"] != CRITICAL)
    verdicts = []
    for gpu in gpus:
        own = [problem for problem in problems if _is_about(problem, gpu)]
        verdicts.append(
            {
                **{key: gpu[key] for key in ("index", "uuid", "name", "pci_bus_id")},
                "verdict": worst(own),
                "problems": own,
            }
        )
    return {
        "verdict": worst(problems),
        "reason": reason_of(problems),
        "gpus": verdicts,
        "problems": problems,
    }


def _is_about(problem: Problem, gpu: Mapping[str, Any]) -> bool:
    if problem["uuid"] and gpu["uuid"]:
        return bool(problem["uuid"] == gpu["uuid"])
    return problem["pci_bus_id"] is not None and problem["pci_bus_id"] == gpu["pci_bus_id"]
