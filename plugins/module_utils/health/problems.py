# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What can be wrong with a GPU or its node: severity, action, expectation and next step of each code."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, TypedDict

from ansible_collections.gpufarm.core.plugins.module_utils import xid
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi.failures import NEXT_STEPS, WSL_STEPS
from ansible_collections.gpufarm.core.plugins.module_utils.problem import Finding, sentences
from ansible_collections.gpufarm.core.plugins.module_utils.xid import CRITICAL, IGNORE, WARNING

if TYPE_CHECKING:
    from ansible_collections.gpufarm.core.plugins.module_utils.health.options import HealthOptions


@dataclasses.dataclass(frozen=True)
class Kind:
    """What is the same for every problem of a code."""

    severity: str
    action: str
    expected: str


_ANSWERS = "every GPU to answer nvidia-smi"


PROBLEMS: dict[str, Kind] = {
    # The reasons of nvidia_smi_facts; reset_required and gpu_lost are those of single GPUs, too.
    "not_installed": Kind(CRITICAL, "update_driver", "an installed driver"),
    "driver_not_loaded": Kind(CRITICAL, "reboot", "a loaded driver"),
    "library_not_found": Kind(CRITICAL, "update_driver", "the driver's library libnvidia-ml.so.1"),
    "library_mismatch": Kind(CRITICAL, "reboot", "kernel module and libraries of one version"),
    "no_devices": Kind(CRITICAL, "check_hardware", "at least one GPU"),
    "access_blocked": Kind(CRITICAL, "check_configuration", "a GPU that the operating system lets through"),
    "permission_denied": Kind(CRITICAL, "check_configuration", "permission to use the GPUs"),
    "gpu_lost": Kind(CRITICAL, "reboot", _ANSWERS),
    "reset_required": Kind(CRITICAL, "reset_gpu", "a GPU that needs no reset"),
    "interrupt_issue": Kind(CRITICAL, "check_hardware", "interrupts from every GPU"),
    "timeout": Kind(CRITICAL, "reboot", "an answer of nvidia-smi in time"),
    "crashed": Kind(CRITICAL, "update_driver", "an nvidia-smi that runs to its end"),
    "unsupported": Kind(CRITICAL, "update_driver", "an nvidia-smi that knows -q -x"),
    "invalid_output": Kind(CRITICAL, "update_driver", "a whole answer of nvidia-smi"),
    "unknown_error": Kind(CRITICAL, "reboot", _ANSWERS),
    "gpu_unreadable": Kind(CRITICAL, "check_configuration", _ANSWERS),
    "gpu_count": Kind(CRITICAL, "check_hardware", "{gpus} GPUs"),
    "infiniband_ports": Kind(CRITICAL, "check_hardware", "{infiniband_ports} active ports of InfiniBand"),
    "infiniband_link_downed": Kind(WARNING, "check_hardware", "at most {infiniband_link_downed_max}"),
    "roce_ports": Kind(CRITICAL, "check_hardware", "{roce_ports} active ports of RoCE"),
    "roce_link_downed": Kind(WARNING, "check_hardware", "at most {roce_link_downed_max}"),
    "gpu_init_failed": Kind(CRITICAL, "reset_gpu", "a GPU that the driver can start"),
    "sensors_failed": Kind(WARNING, "watch", "a value from every sensor"),
    "inforom_corrupted": Kind(WARNING, "contact_support", "an infoROM that can be read"),
    "compute_prohibited": Kind(CRITICAL, "check_configuration", "a compute mode in which jobs may use the GPU"),
    "recovery_action": Kind(CRITICAL, "drain_and_reset", "None"),
    "ecc_uncorrected": Kind(CRITICAL, "drain_and_reset", "at most {ecc_uncorrected_max}"),
    "ecc_corrected": Kind(WARNING, "watch", "at most {ecc_corrected_max}"),
    "ecc_disabled": Kind(WARNING, "check_configuration", "ECC enabled"),
    "ecc_mode_pending": Kind(WARNING, "reset_gpu", "one ECC mode before and after a reset"),
    "unrepairable_memory": Kind(CRITICAL, "contact_support", "memory that can be repaired"),
    "channel_repair_pending": Kind(CRITICAL, "drain_and_reset", "no channel of memory that waits to be repaired"),
    "tpc_repair_pending": Kind(CRITICAL, "drain_and_reset", "no part of the chip that waits to be repaired"),
    "sram_threshold_exceeded": Kind(CRITICAL, "contact_support", "fewer errors in SRAM than the threshold"),
    "row_remap_pending": Kind(CRITICAL, "drain_and_reset", "no row of memory that waits to be replaced"),
    "row_remap_failed": Kind(CRITICAL, "contact_support", "a spare row for every row that failed"),
    "retired_pages_pending": Kind(CRITICAL, "drain_and_reset", "no page of memory that waits to be retired"),
    "retired_pages": Kind(WARNING, "contact_support", "at most {retired_pages_max}"),
    "hw_slowdown": Kind(WARNING, "check_hardware", "none of {throttle_reasons}"),
    "temperature": Kind(WARNING, "check_hardware", "less than the card's own limits"),
    "pcie_width": Kind(WARNING, "check_hardware", "all lanes"),
    "pcie_generation": Kind(WARNING, "check_hardware", "generation {pcie_generation_min} or newer"),
    "nvlink_down": Kind(WARNING, "check_nvlink", "as many active links as its neighbours of the same model"),
    "nvlink_errors": Kind(WARNING, "check_nvlink", "links without errors"),
    "fabric_not_ready": Kind(CRITICAL, "check_nvlink", "state Completed with status Success"),
    "fabric_unhealthy": Kind(CRITICAL, "check_nvlink", "a healthy fabric with its full bandwidth"),
    "fabric_manager": Kind(
        CRITICAL, "check_configuration", "an active unit nvidia-fabricmanager on a host with NVSwitch"
    ),
    "vgpu_unlicensed": Kind(WARNING, "check_configuration", "a vGPU with its licence, without which it gets slower"),
    "persistence_off": Kind(WARNING, "check_configuration", "persistence mode Enabled"),
    "process_without_owner": Kind(WARNING, "reset_gpu", "a living process for all memory in use"),
    "mig_pending": Kind(WARNING, "reset_gpu", "one MIG mode before and after a reset"),
    "mig_empty": Kind(CRITICAL, "check_configuration", "MIG devices where MIG mode is on"),
    "check_failed": Kind(WARNING, "check_configuration", "an answer"),
    # What the node's gate finds when it lets a GPU without work compute, as nvidia_gpu_benchmark does.
    "benchmark_hung": Kind(CRITICAL, "reset_gpu", "a GPU that computes to the end"),
    "benchmark_context_failed": Kind(CRITICAL, "reset_gpu", "a GPU that CUDA can use"),
    "benchmark_failed": Kind(CRITICAL, "reset_gpu", "a GPU that CUDA can use"),
    "benchmark_crashed": Kind(WARNING, "reset_gpu", "a process that computes to its end"),
    "benchmark_no_cuda": Kind(WARNING, "update_driver", "a driver by which CUDA can use the GPU"),
    "benchmark_memory_errors": Kind(CRITICAL, "drain_and_reset", "every pattern read as it was written"),
    "benchmark_wrong_results": Kind(CRITICAL, "contact_support", "the same result as worked out on the host"),
    "benchmark_peer_wrong": Kind(CRITICAL, "check_nvlink", "what was sent to another GPU"),
    "benchmark_peers_failed": Kind(WARNING, "check_nvlink", "copies between all GPUs"),
    "benchmark_slow_memory": Kind(CRITICAL, "check_hardware", "memory as fast as that of its siblings"),
    "benchmark_slow_fp32": Kind(CRITICAL, "check_hardware", "what its multiprocessors can do"),
    "benchmark_slow_tensor": Kind(CRITICAL, "check_hardware", "what its tensor cores can do"),
    # Who else is at work on the machine slows these down, too.
    "benchmark_slow_host_copies": Kind(WARNING, "check_hardware", "what its PCI Express link can do"),
}


NUMBERED = re.compile(r"^(?:s?xid_[1-9][0-9]{0,5}|dcgm_[a-z0-9_]+)$")


# Where the general step would send people the wrong way.
_STEPS = {
    **{
        reason: step.rstrip(".") for reason, step in NEXT_STEPS.items() if reason in PROBLEMS
    },
    "gpu_count": "look for the missing GPU with 'lspci -d 10de:' and in the kernel log; drain the node and reseat it",
    "compute_prohibited": "run 'nvidia-smi -c DEFAULT', or leave the node drained if it is meant to be out of use",
    "ecc_disabled": "run 'nvidia-smi -e 1' and reset the GPU, or set ecc_required to false",
    "fabric_manager": "read 'journalctl -u nvidia-fabricmanager'; its version must be exactly that of the driver",
    "fabric_not_ready": "check that nvidia-fabricmanager runs and has the driver's version, then reset the GPUs",
    "persistence_off": "enable nvidia-persistenced, or set persistence_required to false",
    "vgpu_unlicensed": "read 'journalctl -u nvidia-gridd', and check the token in /etc/nvidia/ClientConfigToken",
    "mig_empty": "divide the GPU ('journalctl -u gpufarm-mig' tells why a layout is missing), or turn its MIG mode off",
    "temperature": "check fans, air flow and dust, and the load of the neighbours",
    "hw_slowdown": "check cooling and power supply of the node",
    "pcie_width": "reseat the GPU; if the slot is wired so, set severities or pcie_width_min",
    "pcie_generation": "reseat the GPU and check the slot's setting in the firmware",
    "infiniband_ports": "look at the cables and the subnet manager with 'ibstat', or correct infiniband_ports",
    "roce_ports": "look at the cables and the switch with 'rdma link', or correct roce_ports",
    "process_without_owner": "end what still holds /dev/nvidia* ('fuser -v /dev/nvidia*'), or reset the GPU",
}  # fmt: skip
# The same under WSL, where neither lspci nor the kernel log tells of a GPU.
_WSL_STEPS = {
    **{reason: step.rstrip(".") for reason, step in WSL_STEPS.items() if reason in PROBLEMS},
    "gpu_count": WSL_STEPS["no_devices"].rstrip("."),
}


class Problem(TypedDict):
    """One thing that is wrong; uuid and pci_bus_id are None for the node."""

    code: str
    severity: str
    uuid: str | None
    pci_bus_id: str | None
    found: str
    expected: str
    action: str
    message: str


def problem_of(
    finding: Finding,
    host: str,
    options: HealthOptions,
    uuid: str | None,
    pci_bus_id: str | None,
    *,
    on_wsl: bool = False,
) -> Problem | None:
    """The problem as it is told; None where its severity is to be ignored."""
    kind = PROBLEMS.get(finding.code, Kind(WARNING, "watch", ""))
    severity = options.severities.get(finding.code, finding.severity or kind.severity)
    if severity == IGNORE:
        return None
    if uuid and uuid.lower() in {each.lower() for each in options.ignored_gpus}:
        severity = WARNING
    action = finding.action or kind.action
    values = {**dataclasses.asdict(options), "throttle_reasons": ", ".join(options.throttle_reasons)}
    expected = finding.expected or kind.expected.format_map(values)
    known = {**_STEPS, **_WSL_STEPS} if on_wsl else _STEPS
    step = finding.next_step or known.get(finding.code) or xid.ACTIONS[action]
    where = " ".join(part for part in (f"Node {host}", _named(uuid, pci_bus_id)) if part)
    found = finding.found.rstrip(".")
    return {
        "code": finding.code,
        "severity": severity,
        "uuid": uuid,
        "pci_bus_id": pci_bus_id,
        "found": found,
        "expected": expected,
        "action": action,
        "message": f"{where}: found {sentences(found, expected, step[:1].lower() + step[1:])}",
    }


def _named(uuid: str | None, pci_bus_id: str | None) -> str:
    if uuid and pci_bus_id:
        return f"GPU {uuid} at {pci_bus_id}"
    return f"GPU {uuid}" if uuid else f"device {pci_bus_id}" if pci_bus_id else ""
