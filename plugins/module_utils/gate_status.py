# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the gate of a node tells after each run, and how it is kept.

The status file is the whole of it; the metrics are the same in Prometheus' words. C(remember) brings in what only
earlier runs know: a GPU that is gone is in no answer of nvidia-smi.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ansible_collections.gpufarm.core.plugins.module_utils.health.kernel_log import boot_id
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi.facts import empty_gpu
from ansible_collections.gpufarm.core.plugins.module_utils.text import utc
from ansible_collections.gpufarm.core.plugins.module_utils.xid import IGNORE

FAILED = "failed"
MISSING = "missing"
"""The verdict on a GPU that nvidia-smi has listed since the node started, and lists no more."""
VERDICTS = ("ok", "warning", "critical", MISSING)


def status_of(**known: Any) -> dict[str, Any]:
    """What is known, and null for the rest."""
    unknown: dict[str, Any] = {
        "verdict": None, "healthy": None, "reason": None, "action": FAILED, "state": None, "problems": [],
        "nomad_problems": None, "gpus": None, "gpus_expected": None, "gpus_found": None, "xids": None,
        "kernel_log": None, "remembered": None, "probed_at": None,
    }  # fmt: skip
    return {**unknown, **known, "checked_at": utc()}


def of_probe(
    found: Mapping[str, Any], checks: Mapping[str, Any] | None = None, left_out: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The part of the status that is what the probe and the checks of GPUs without work said."""
    facts = found["nvidia_smi"]
    # Otherwise nvidia-smi could not tell which GPUs there are.
    counted = facts["gpus"] or facts["reason"] == "no_devices"
    return {
        "verdict": found["verdict"],
        "problems": found["problems"],
        "gpus": [
            {
                **{key: gpu[key] for key in ("index", "uuid", "name", "pci_bus_id", "verdict")},
                **_measured(known),
                "checks": (checks or {}).get(gpu["uuid"], {}),
                "check_left_out": (left_out or {}).get(gpu["uuid"]),
            }
            for gpu, known in zip(found["gpus"], facts["gpus"])
        ],
        "xids": [{key: event[key] for key in ("code", "uuid", "pci_bus_id", "count")} for event in found["xids"]],
        "kernel_log": found["checks"]["kernel_log"],
        "remembered": {"boot_id": boot_id(), "xids": [each for each in found["xids"] if each["severity"] != IGNORE]},
        "probed_at": utc(),
        "gpus_found": sum(gpu["status"] == "ok" for gpu in facts["gpus"]) if counted else None,
    }


def _measured(gpu: Mapping[str, Any]) -> dict[str, Any]:
    """What nvidia-smi counts and measures of a GPU."""
    return {
        "ecc_corrected": gpu["ecc"]["corrected"]["volatile"],
        "ecc_uncorrected": gpu["ecc"]["uncorrected"]["volatile"],
        "clocks_event_reasons_counters": gpu["clocks_event_reasons_counters"],
        "utilization_gpu_percent": gpu["utilization_gpu_percent"],
        "power_draw_w": gpu["power_draw_w"],
        "power_limit_enforced_w": gpu["power_limit_enforced_w"],
    }


def remember(status: Mapping[str, Any], last: Mapping[str, Any]) -> dict[str, Any]:
    """The status with the GPUs that the last one had and that this run did not see, and without a probe with its Xids.

    They are C(missing) where nvidia-smi tells which GPUs there are, and of an unknown verdict (null) where it does not.
    """
    counted = status["gpus_found"] is not None
    seen = status["gpus"] or []
    names = {gpu[key] for gpu in seen for key in ("uuid", "pci_bus_id") if gpu[key]}
    gone = [
        {**gpu, "index": None, **_measured(empty_gpu()), "verdict": MISSING if counted else None}
        for gpu in last.get("gpus") or []
        if not names & {gpu.get("uuid"), gpu.get("pci_bus_id")}
    ]
    remembered = last.get("remembered") if status["remembered"] is None else status["remembered"]
    return {**status, "remembered": remembered, "gpus": [*seen, *gone] if status["gpus"] is not None or gone else None}


def read(path: str) -> dict[str, Any]:
    """The last status; empty where there is none that can be used."""
    try:
        last = json.loads(Path(path).read_text(encoding="utf-8"))
        gpus = last["gpus"]
        whole = all(isinstance(gpu["uuid"] or gpu["pci_bus_id"], str) for gpu in gpus or [])
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return last if whole else {}


@contextlib.contextmanager
def alone(path: str) -> Iterator[bool]:
    """Whether this run is the only one that writes this status, which holds until the end of the block."""
    lock = Path(f"{path}.lock")
    with contextlib.ExitStack() as stack:
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            # Unlike flock's, no process that was forked and hangs in the driver keeps it.
            file = stack.enter_context(open(lock, "a", opener=lambda name, flags: os.open(name, flags, 0o600)))
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True


def write(path: str, text: str) -> None:
    """Replace a file in one step, so that a reader never sees half of it. Everybody may read it."""
    folder = Path(path).parent
    handle, staged = tempfile.mkstemp(dir=folder, prefix=f".{Path(path).name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            # By its handle: the folder can be another user's, who could put a link in the place of the name.
            os.fchmod(file.fileno(), 0o644)
            file.write(text)
        Path(staged).replace(path)
    except BaseException:
        Path(staged).unlink()
        raise
