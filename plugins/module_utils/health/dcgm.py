# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What DCGM says."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils.commands import Command, program_path, run_commands
from ansible_collections.gpufarm.core.plugins.module_utils.health.options import HealthOptions
from ansible_collections.gpufarm.core.plugins.module_utils.problem import Finding
from ansible_collections.gpufarm.core.plugins.module_utils.text import clean
from ansible_collections.gpufarm.core.plugins.module_utils.xid import CRITICAL, WARNING

_DCGM_GPU = re.compile(r"^\|\s*([0-9]{1,4})\s*\|")


_DCGM_UUID = re.compile(r"Device UUID:\s*(GPU-[0-9a-fA-F-]{36})")


_DCGM_SEVERITIES = {"warning": WARNING, "warn": WARNING, "failure": CRITICAL, "fail": CRITICAL}


_DCGM_RUN = {"pass", *_DCGM_SEVERITIES}
"""Others are of a test that was not run: it was skipped, as on a card that is not supported."""


def parse_dcgm_discovery(text: str) -> dict[str, str]:
    """C(dcgmi discovery -l): DCGM numbers GPUs on its own, so its numbers by UUID."""
    uuids: dict[str, str] = {}
    number = None
    for line in text.splitlines():
        start, uuid = _DCGM_GPU.match(line), _DCGM_UUID.search(line)
        number = start.group(1) if start else number
        if uuid and number is not None:
            uuids[number] = uuid.group(1)
    return uuids


def dcgm_code(name: str) -> str:
    """C(PCIe system) as dcgm_pcie."""
    slug = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    return f"dcgm_{re.sub('_system$', '', slug)}"


def _json_of(text: str) -> Any:
    start, end = text.find("{"), text.rfind("}")
    if start < 0 or end < start:
        raise ValueError(text.strip()[:200] or "no output")
    return json.loads(text[start : end + 1])


_IMEX = re.compile(
    r"IMEX (?:daemon|domain) status is [\w-]+(?: \(not READY\))?"
    r"|Check IMEX installation, configuration, domain and daemon status,? and network connectivity"
)
"""What is told as a failure also where none runs (NVIDIA/NVSentinel#1471), and no job within the node needs."""


def _finding(name: str, status: str, words: str, device: tuple[str, str], uuids: Mapping[str, str]) -> Finding:
    group, number = device
    uuid = uuids.get(number) if group == "GPU" else None
    whose = "" if uuid or not group else f" for {group} {number}"
    words = " ".join(words.split())
    said = f": {words[:300]}" if words else ""
    found = clean(f"{status} of DCGM's {name}{whose}{said}")
    severity, action = _DCGM_SEVERITIES[status.lower()], "contact_support"
    if _IMEX.search(words) and not re.search(r"\w", _IMEX.sub("", words)):
        severity, action = WARNING, "check_configuration"
        found += " (IMEX serves NVLink between nodes only)"
    return Finding(dcgm_code(name), found, "a pass of DCGM", severity=severity, action=action, uuid=uuid)


def parse_dcgm_health(text: str, uuids: Mapping[str, str]) -> list[Finding]:
    """C(dcgmi health -c -j): what it warns of; ValueError when it says nothing usable."""
    body = _json_of(text).get("body")
    if not isinstance(body, dict) or not isinstance(body.get("Overall Health"), dict):
        raise ValueError("an answer without Overall Health")
    findings = []
    for group, devices in body.items():
        for number, device in (devices.get("children") or {}).items():
            errors = ((device.get("children") or {}).get("Errors") or {}).get("children") or {}
            for system, told in errors.items():
                if str(told.get("value")).lower() in _DCGM_SEVERITIES:
                    # One text of all that a system has met, in pieces as they fit into the table.
                    words = " ".join(str(part) for part in told.get("overflow") or [])
                    findings.append(_finding(system, told["value"], words, (group, number), uuids))
    overall = str(body["Overall Health"].get("value"))
    if overall.lower() in _DCGM_SEVERITIES and not findings:
        findings.append(_finding("health", overall, "", ("", ""), uuids))
    return findings


def _warning_text(warning: Any) -> str:
    return str(warning.get("warning", "")) if isinstance(warning, dict) else str(warning)


def parse_dcgm_diag(text: str, uuids: Mapping[str, str], level: int) -> Iterator[Finding]:
    """C(dcgmi diag -j): the tests that did not pass; ValueError, after them, when it ran none of its level.

    Above level 1 those of the category Deployment are none: any card passes them, as they are of the node's software.
    """
    answer = _json_of(text)
    report = next((part for part in answer.values() if isinstance(part, dict) and "test_categories" in part), None)
    if report is None:
        errors = [str(part["runtime_error"]) for part in answer.values() if "runtime_error" in part]
        raise ValueError("; ".join(errors) or "an answer without tests")
    run = False
    for category in report["test_categories"]:
        counts = level == 1 or category.get("category") != "Deployment"
        # DCGM has null there for a test of which it has no result.
        for test in filter(None, category.get("tests") or []):
            for result in filter(None, test.get("results") or []):
                status = str(result.get("status")).lower()
                run = run or (counts and status in _DCGM_RUN)
                if status not in _DCGM_SEVERITIES:
                    continue
                warnings = result.get("warnings") or []
                words = " ".join(map(_warning_text, warnings if isinstance(warnings, list) else [warnings]))
                group = result.get("entity_group") or ("GPU" if "gpu_id" in result or "gpu_ids" in result else "")
                numbers = str(result.get("entity_id", result.get("gpu_id", result.get("gpu_ids", "")))).split(",")
                for number in numbers:
                    yield _finding(test["name"], result["status"], words, (group, number.strip()), uuids)
    if not run:
        raise ValueError(f"an answer in which no test{' of a GPU' if level > 1 else ''} was run")


def dcgm_findings(options: HealthOptions, search: str | None) -> tuple[str, list[Finding]]:
    """What DCGM says, and whether it could be asked."""
    if not options.dcgm:
        return "skipped", []
    program = program_path("dcgmi", search)
    if program is None:
        return "not_installed", []
    health, discovery = run_commands([[program, "health", "-c", "-j"], [program, "discovery", "-l"]], options.timeout)
    uuids = parse_dcgm_discovery(discovery.stdout)
    findings: list[Finding] = []
    failures = []
    for command, parse in [(health, parse_dcgm_health), *_diag(program, options)]:
        try:
            if command.timed_out:
                raise ValueError(f"no answer within {command.limit:g} s")
            findings += parse(command.stdout, uuids)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            words = " ".join(clean(command.words if "{" not in command.stdout else str(error)).split())[:200]
            failures.append(f"{' '.join(command.argv[1:])}: {words or error}")
    return f"failed: {'; '.join(failures)}" if failures else "ok", findings


def _diag(program: str, options: HealthOptions) -> Iterator[tuple[Command, Callable[..., Iterable[Finding]]]]:
    level = options.dcgm_diag_level
    if level is not None:
        argv = [program, "diag", "-r", str(level), "-j"]
        parse = functools.partial(parse_dcgm_diag, level=level)
        yield run_commands([argv], options.dcgm_diag_timeout)[0], parse
