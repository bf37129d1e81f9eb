# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""All sources of a node, asked one after the other, and judged."""

from __future__ import annotations

import platform as python_platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils.health.dcgm import dcgm_findings
from ansible_collections.gpufarm.core.plugins.module_utils.health.infiniband import infiniband_findings, roce_findings
from ansible_collections.gpufarm.core.plugins.module_utils.health.kernel_log import (
    SOURCES,
    kernel_events,
    with_remembered,
)
from ansible_collections.gpufarm.core.plugins.module_utils.health.node import (
    acknowledged_at,
    acknowledged_of,
    fabric_manager_state,
    processes_without_owner,
)
from ansible_collections.gpufarm.core.plugins.module_utils.health.options import HealthOptions, seconds_of
from ansible_collections.gpufarm.core.plugins.module_utils.health.verdict import judge
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi import Facts, collect, resolve_subsets
from ansible_collections.gpufarm.core.plugins.module_utils.pci import normal_bus_id
from ansible_collections.gpufarm.core.plugins.module_utils.xid_events import Event


def probe(options: HealthOptions, *, root: str = "/", search: str | None = None) -> dict[str, Any]:
    """Ask every source on this node, and judge. Never raises because a GPU is sick."""
    base = Path(root)

    def ask(subsets: Sequence[str], failed: dict[str, str] | None = None) -> Facts:
        chosen = resolve_subsets(subsets)
        return collect(chosen, path=options.path, timeout=options.timeout, root=root, search=search, failed=failed)

    # How GPUs reach each other is asked of each by the rest, and no problem.
    failed: dict[str, str] = {}
    facts = ask(["all", "!peers"], failed)
    acknowledged, repaired = acknowledged_at(options.acknowledged_file, time.time())
    since = max(repaired, seconds_of(options.xid_since) if options.xid_since is not None else 0.0)
    own = acknowledged_of(options.acknowledged_file, [gpu["uuid"] for gpu in facts["gpus"]], time.time())
    since_of = {
        address: own[gpu["uuid"]][1]
        for gpu in facts["gpus"]
        if gpu["uuid"] in own and (address := normal_bus_id(gpu["pci_bus_id"]))
    }
    events: list[Event] = []
    if facts["platform"] == "wsl":
        kernel_log = "skipped: under WSL the driver writes its log in Windows"
    else:
        kernel_log, events = kernel_events(since, options.timeout, base, search, since_of)
        if kernel_log not in SOURCES:
            events = with_remembered(events, options.status_file, base, since, since_of)
    dcgm, findings = dcgm_findings(options, search)
    processes, orphans = processes_without_owner(facts, base, lambda: ask(["!min", "processes"]))
    infiniband, of_ports = infiniband_findings(options, base)
    roce, of_roce = roce_findings(options, base)
    fabric_manager, fabric_manager_version = fabric_manager_state(base, search, options.timeout)
    checks = {
        "nvidia_smi": "ok" if facts["reason"] is None else facts["reason"],
        **{
            source: f"failed: {failed[source]}" if source in failed else "ok" if facts["gpus"] else "skipped: no GPU"
            for source in ("nvlink", "mig")
        },
        "kernel_log": kernel_log,
        "acknowledged": acknowledged,
        "acknowledged_gpus": {uuid: told for uuid, (told, _at) in own.items()},
        "dcgm": dcgm,
        "fabric_manager": fabric_manager,
        "fabric_manager_version": fabric_manager_version,
        "infiniband": infiniband,
        "roce": roce,
        "processes": processes,
    }
    host = python_platform.node()
    verdict = judge(
        facts, events, findings, options, host=host, checks=checks, orphans=orphans, others=[*of_ports, *of_roce]
    )
    return {**verdict, "checks": checks, "nvidia_smi": facts}
