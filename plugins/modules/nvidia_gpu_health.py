#!/usr/bin/python
# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: nvidia_gpu_health
short_description: Judge the health of each NVIDIA GPU of a node
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - Asks C(nvidia-smi), the kernel log, DCGM and Fabric Manager about the node's GPUs, and returns a verdict on the node
    and on each GPU, with what was found, what was expected and what to do next.
  - A sick GPU is an answer and not an error. The module fails for wrong options only.
  - A source that cannot be asked is told in RV(checks), and is a problem of its own. What the card, the driver or the
    platform does not give is no problem.
options:
  gpus:
    description:
      - Number of GPUs that the node must have. Without it a GPU that is lost to the kernel too goes unnoticed.
      - V(0) is for a node without GPUs, where a missing driver is no problem. One that fails in another way is.
    type: int
  path:
    description:
      - The C(nvidia-smi) to run, as in M(gpufarm.core.nvidia_smi_facts).
    type: path
  timeout:
    description:
      - How many seconds each source may take. It is killed after that. C(nvidia-smi) and the kernel log, DCGM, and
        Fabric Manager are sources; C(nvidia-smi) is asked a second time about processes that seem to have ended.
    type: float
    default: 60
  xid_since:
    description:
      - Time from which on Xids count, in ISO 8601 or as seconds since the epoch. A time without zone is local.
      - By default all since the node booted count, save those that O(acknowledged_file) covers.
    type: str
  xid_repeats_max:
    description:
      - How often an Xid that is mostly the fault of a job, such as 13 and 31, may come on one GPU since the node
        booted. More are a warning, because they may be the GPU's. Without it any number is fine.
      - What one process causes counts once, and where the kernel names no process what comes within a minute.
    type: int
  acknowledged_file:
    description:
      - Xids from before this file was last changed do not count. C(touch) it after a GPU was repaired without a reboot,
        as by C(nvidia-smi --gpu-reset).
      - That counts for all GPUs. For a single one the file has a dash and its UUID at the end of its name, as in
        C(/var/lib/gpufarm/health-acknowledged-GPU-73466fa5-45f2-f4ce-0991-77d3b3398071); the later time counts.
      - A file whose time lies in the future is ignored.
    type: path
    default: /var/lib/gpufarm/health-acknowledged
  status_file:
    description:
      - The status file of the role P(gpufarm.core.gpu_health#role). Where the kernel log has lost its beginning, or
        cannot be read, the Xids count that the gate has seen since the node booted and O(acknowledged_file) does not
        cover. Without the file, as on a node without that role, they are forgotten with the log.
    type: path
    default: /run/gpufarm/health.json
  ecc_required:
    description:
      - Whether a GPU that can have ECC must have it enabled.
    type: bool
    default: false
  ecc_uncorrected_max:
    description:
      - Number of memory errors since the driver was loaded that ECC may have failed to correct.
    type: int
    default: 0
  ecc_corrected_max:
    description:
      - Number of memory errors since the driver was loaded that ECC may have corrected. Without it any number is fine.
    type: int
  retired_pages_max:
    description:
      - Number of retired pages of memory, for single bit and double bit errors together, that a GPU may have. Cards of
        before Ampere count them. By NVIDIA's advice one with 60 or more may be replaced.
    type: int
    default: 59
  temperature_gpu_max_c:
    description:
      - Highest temperature of the chip in degrees Celsius. By default it is what the card slows down at, and shuts down
        at, where it tells that.
    type: int
  throttle_reasons:
    description:
      - Reasons of RV(gpufarm.core.nvidia_smi_facts#module:ansible_facts.nvidia_smi.gpus[].clocks_event_reasons) that
        count as C(hw_slowdown).
    type: list
    elements: str
    default: [hw_slowdown, hw_thermal_slowdown, hw_power_brake_slowdown]
  pcie_width_min:
    description:
      - Fewest lanes that the PCI Express link may have. By default all that card and slot have together.
    type: int
  pcie_generation_min:
    description:
      - Oldest generation of PCI Express that the link may run at. Of an idle GPU, whose link rests, the highest
        possible generation is judged. Without it any is fine.
    type: int
  nvlink_recoveries_max:
    description:
      - How often an NVLink may have been brought up again since the driver was loaded.
    type: int
    default: 0
  nvlink_errors_max:
    description:
      - How often an NVLink may have sent something again or received something damaged since the driver was loaded.
        Without it any number is fine, because links repair such errors by themselves.
    type: int
  infiniband_ports:
    description:
      - How many ports of InfiniBand the node should have that are active. Those of Ethernet do not count (see
        O(roce_ports)). Without it nobody asks.
    type: int
  infiniband_link_downed_max:
    description:
      - How often the link of a port of InfiniBand may have gone down since its counters were reset. Without it any
        number is fine.
    type: int
  roce_ports:
    description:
      - The same of adapters whose link is Ethernet.
    type: int
  roce_link_downed_max:
    description:
      - How often the link of such a port may have gone down since the driver of the adapter was loaded. Without it any
        number is fine.
    type: int
  persistence_required:
    description:
      - Whether persistence mode must be on. It is not asked for under WSL.
    type: bool
    default: true
  dcgm:
    description:
      - Whether to ask DCGM, where C(dcgmi) is installed. It answers once its watches are on (C(dcgmi health -s a)).
    type: bool
    default: true
  dcgm_diag_level:
    description:
      - Level of C(dcgmi diag) to run as well, from V(1), some seconds, to V(4), some hours. It needs GPUs that no job
        uses.
    type: int
    choices: [1, 2, 3, 4]
  dcgm_diag_timeout:
    description:
      - How many seconds C(dcgmi diag) may take.
    type: float
    default: 3600
  severities:
    description:
      - Severity of single problems, by code, in place of the default, V(ignore), V(warning) or V(critical). There are
        no wildcards.
    type: dict
    default: {}
  ignored_gpus:
    description:
      - UUIDs of GPUs that the scheduler does not hand out, such as those of C(nomad_device_nvidia_ignored_gpu_ids).
        What is wrong with one of them is a warning at most, because no job of the scheduler's gets it.
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    support: full
    description: Can run in C(check_mode) and returns the same as without, since it changes nothing.
  diff_mode:
    support: N/A
    description: Never changes anything.
  idempotent:
    support: full
    description: Never changes anything.
  platform:
    platforms: Linux, WSL 2
    support: full
    description: Target OS families that can be operated against.
notes:
  - Run it as root. Others often may not read the kernel log.
  - "The kernel log is that of the present boot, from C(journalctl), else from C(dmesg), else from C(/dev/kmsg). Under
    WSL the driver writes its log in Windows, so that no Xid is known."
  - "These codes are critical: the reasons of M(gpufarm.core.nvidia_smi_facts) C(not_installed), C(driver_not_loaded),
    C(library_not_found), C(library_mismatch), C(no_devices), C(access_blocked), C(permission_denied), C(gpu_lost),
    C(reset_required), C(interrupt_issue), C(timeout), C(crashed), C(unsupported), C(invalid_output) and
    C(unknown_error); C(gpu_unreadable), nvidia-smi cannot read this GPU, or all of its sensors fail;
    C(gpu_count), there are fewer than O(gpus); C(infiniband_ports) and C(roce_ports), fewer are active than
    O(infiniband_ports) and O(roce_ports) say;
    C(gpu_init_failed), the driver could not start it; C(compute_prohibited), its compute mode lets no job in;
    C(mig_empty), its MIG mode is on and it has no MIG device, so that it can run nothing;
    C(recovery_action), the driver wants it reset, drained or the node rebooted, or, as a warning, its IMEX domain
    recovered; C(ecc_uncorrected), more errors than
    O(ecc_uncorrected_max); C(sram_threshold_exceeded), the card should be replaced; C(row_remap_pending) and
    C(retired_pages_pending), memory waits for a reset to be replaced; C(row_remap_failed), memory could not be
    replaced; C(unrepairable_memory), memory is beyond repair; C(channel_repair_pending) and C(tpc_repair_pending),
    memory or a part of the chip waits for a reset to be repaired; C(fabric_not_ready), the GPU is not registered with
    the NVLink fabric; C(fabric_unhealthy), the fabric is broken or wrongly configured there, and a warning where it is
    only slow or recovers; C(fabric_manager), it does not run on a host with NVSwitch, and a warning where its unit was
    stopped and all GPUs say that their fabric is complete; and, of the role P(gpufarm.core.gpu_health#role), which lets
    a GPU without work compute: C(benchmark_hung), C(benchmark_context_failed), C(benchmark_failed),
    C(benchmark_memory_errors), C(benchmark_wrong_results), C(benchmark_peer_wrong), C(benchmark_slow_memory),
    C(benchmark_slow_fp32) and C(benchmark_slow_tensor), as
    M(gpufarm.core.nvidia_gpu_benchmark) says without C(benchmark_)."
  - "These codes are warnings: C(ecc_corrected), more errors than O(ecc_corrected_max); C(retired_pages), more than
    O(retired_pages_max), so that the card may be replaced; C(ecc_disabled), with O(ecc_required);
    C(ecc_mode_pending) and C(mig_pending), the mode changes at the next reset; C(hw_slowdown), the hardware holds the
    clocks down; C(temperature), it is hotter than O(temperature_gpu_max_c), or than its own limits, and critical where
    it turns itself off; C(sensors_failed), a sensor answers with an error; C(inforom_corrupted), the card cannot keep
    its history; C(pcie_width), lanes are
    missing; C(pcie_generation), the link is slower than O(pcie_generation_min); C(nvlink_down), fewer links are up than
    on a neighbour of the same model; C(nvlink_errors), a link has more errors than O(nvlink_recoveries_max) or
    O(nvlink_errors_max) allows; C(infiniband_link_downed), the link of a port went down more often than
    O(infiniband_link_downed_max), and C(roce_link_downed) than O(roce_link_downed_max); C(persistence_off), with
    O(persistence_required); C(vgpu_unlicensed), a guest's vGPU has no licence, without which it gets slower;
    C(process_without_owner), a process that ended still holds memory; C(check_failed), the kernel log, DCGM, NVLinks or
    MIG devices could not be asked; and of that role C(benchmark_crashed), C(benchmark_no_cuda),
    C(benchmark_peers_failed) and C(benchmark_slow_host_copies)."
  - C(xid_<number>) is an Xid, with severity and action from NVIDIA's catalogue. Faults of jobs, such as 13, 31 and
    43, are ignored as far as O(xid_repeats_max) allows, and 45, which follows each job that was ended; an unknown Xid
    is a warning. Xids 144 to 150 and 154 are judged
    by their message.
  - C(sxid_<number>) is an error of an NVSwitch, critical when its message says fatal.
  - C(dcgm_<system>) is what DCGM found in a system, such as C(dcgm_memory), or with a test of C(dcgmi diag). What it
    says of IMEX alone is a warning, as that serves NVLink between nodes only.
  - C(process_without_owner) is judged in the host's pid namespace only, because the driver names processes by the pids
    of the host.
seealso:
  - module: gpufarm.core.nvidia_smi_facts
  - module: gpufarm.core.nomad_gpu_verify
"""

EXAMPLES = r"""
- name: Judge the GPUs of the node
  gpufarm.core.nvidia_gpu_health:
    gpus: 8
  register: health

- name: No GPU is in a critical state
  ansible.builtin.assert:
    that: health.verdict != 'critical'
    fail_msg: "{{ health.problems | map(attribute='message') | join('\n') }}"

- name: Judge GPUs in slots with eight lanes, where a contained memory error is reason enough to drain
  gpufarm.core.nvidia_gpu_health:
    temperature_gpu_max_c: 85
    pcie_generation_min: 4
    severities:
      pcie_width: ignore
      xid_94: critical

- name: Judge drained GPUs with DCGM's short diagnosis
  gpufarm.core.nvidia_gpu_health:
    gpus: 4
    dcgm_diag_level: 1
"""

RETURN = r"""
verdict:
  description: The worst severity of RV(problems), V(ok), V(warning) or V(critical).
  returned: always
  type: str
  sample: critical
reason:
  description:
    - What is wrong in one line of printable ASCII with at most 500 characters. Warnings are in it where nothing is
      critical. A GPU is named by the start of its UUID. V(null) when nothing is wrong.
  returned: always
  type: str
  sample: gpu_lost GPU-3672890b; xid_79 GPU-3672890b; ecc_uncorrected GPU-4404041a GPU-7b1c1d5e
gpus:
  description: The verdict on each GPU, in the order of C(nvidia-smi).
  returned: always
  type: list
  elements: dict
  contains:
    index:
      description: Number of the GPU. V(null) for one that C(nvidia-smi) no longer counts.
      type: int
      sample: 3
    uuid:
      description: UUID of the GPU.
      type: str
      sample: GPU-3672890b-84a3-4d7e-93b9-0a5b5e2f7a11
    name:
      description: Product name.
      type: str
      sample: NVIDIA H100 80GB HBM3
    pci_bus_id:
      description: PCI address, as C(nvidia-smi) writes it.
      type: str
      sample: "00000000:1B:00.0"
    verdict:
      description: The worst severity of its problems, V(ok), V(warning) or V(critical).
      type: str
      sample: critical
    problems:
      description: What is wrong with the GPU, as in RV(problems).
      type: list
      elements: dict
      sample: []
problems:
  description: All problems of the node and its GPUs, the critical first.
  returned: always
  type: list
  elements: dict
  contains:
    code:
      description: One of the codes in the notes.
      type: str
      sample: xid_79
    severity:
      description: V(warning) or V(critical).
      type: str
      sample: critical
    uuid:
      description: UUID of the GPU. V(null) for a problem of the node, and where the UUID is not known.
      type: str
      sample: GPU-3672890b-84a3-4d7e-93b9-0a5b5e2f7a11
    pci_bus_id:
      description: PCI address of the GPU or NVSwitch. V(null) for a problem of the node.
      type: str
      sample: "00000000:1B:00.0"
    found:
      description: What was found, for people.
      type: str
      sample: >-
        Xid 79 (the GPU fell off the bus) once at 2026-11-21T14:43:33Z, saying: pid=123, name=python, GPU has fallen off
        the bus
    expected:
      description: What was expected, for people.
      type: str
      sample: no Xid 79
    action:
      description:
        - What to do, for programs. V(none), V(restart_app), V(check_app), V(reset_gpu), V(drain_and_reset), V(reboot),
          V(check_hardware), V(check_nvlink), V(check_configuration), V(update_driver), V(contact_support) or V(watch).
      type: str
      sample: reboot
    message:
      description: Node, GPU, found, expected and the next step.
      type: str
      sample: >-
        Node gpu01 GPU GPU-3672890b-84a3-4d7e-93b9-0a5b5e2f7a11 at 00000000:1B:00.0: found Xid 79 (the GPU fell off the
        bus) once at 2026-11-21T14:43:33Z, saying: pid=123, name=python, GPU has fallen off the bus. Expected: no Xid
        79. Next step: drain the node and power-cycle it; if it comes back, reseat or replace the GPU.
xids:
  description: The Xids and SXids in the kernel log, those of jobs included, and those that O(status_file) remembers;
    one entry for each device and number.
  returned: always
  type: list
  elements: dict
  contains:
    code:
      description: Code of the problem that it is, or would be.
      type: str
      sample: xid_31
    severity:
      description: V(ignore), V(warning) or V(critical).
      type: str
      sample: ignore
    uuid:
      description: UUID of the GPU. V(null) where it is not known.
      type: str
      sample: GPU-3672890b-84a3-4d7e-93b9-0a5b5e2f7a11
    pci_bus_id:
      description: PCI address of the GPU or NVSwitch.
      type: str
      sample: "00000000:1B:00.0"
    count:
      description: How often it was logged.
      type: int
      sample: 2
    first_at:
      description: Time of the first one, UTC in ISO 8601.
      type: str
      sample: "2026-11-21T14:43:33Z"
    last_at:
      description: Time of the last one, UTC in ISO 8601.
      type: str
      sample: "2026-11-21T15:02:10Z"
    text:
      description: What the kernel said last; of messages that are judged by their text, the worst.
      type: str
      sample: pid=123, name=python, Ch 00000008, intr 00000000. MMU Fault
checks:
  description: Which sources could be asked. What follows a colon says why not.
  returned: always
  type: dict
  contains:
    nvidia_smi:
      description: >-
        V(ok), or RV(gpufarm.core.nvidia_smi_facts#module:ansible_facts.nvidia_smi.reason).
      type: str
      sample: ok
    nvlink:
      description: V(ok), also where card or driver has none, C(skipped) without a GPU, or C(failed) and why.
      type: str
      sample: ok
    mig:
      description: The same of MIG devices.
      type: str
      sample: ok
    kernel_log:
      description: Where it was read, V(journal), V(dmesg) or V(kmsg), with C(partial) and why where it has lost its
        beginning, so that older Xids are known from O(status_file) alone; C(unreadable) and why, or C(skipped) under
        WSL.
      type: str
      sample: journal
    acknowledged:
      description: Time of O(acknowledged_file), UTC in ISO 8601; V(none), or C(ignored) and why.
      type: str
      sample: none
    acknowledged_gpus:
      description: The same of single GPUs that have a file of their own, by their UUIDs.
      type: dict
      sample: {}
    dcgm:
      description: V(ok), V(not_installed), V(skipped), or C(failed) and why.
      type: str
      sample: not_installed
    fabric_manager:
      description: V(ok) where its unit is active or its process lives, as in a container; V(not_needed) without
        NVSwitch, V(not_installed), C(skipped) and why, or C(failed) and why.
      type: str
      sample: not_needed
    fabric_manager_version:
      description: Version of the installed Fabric Manager. V(null) without NVSwitch, or where it is not known.
      type: str
      sample: 580.159.04
    infiniband:
      description: How many ports are active, of how many; C(skipped) where neither O(infiniband_ports) nor
        O(infiniband_link_downed_max) is set.
      type: str
      sample: 8 of 9 ports active
    roce:
      description: The same of ports that carry Ethernet, by O(roce_ports) and O(roce_link_downed_max).
      type: str
      sample: skipped
    processes:
      description: V(ok), or C(skipped) and why.
      type: str
      sample: ok
nvidia_smi:
  description: >-
    What C(nvidia-smi) says, as RV(gpufarm.core.nvidia_smi_facts#module:ansible_facts.nvidia_smi) with all subsets.
  returned: always
  type: dict
  sample: {available: true, driver_version: 580.159.04}
"""

import platform
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufarm.core.plugins.module_utils import health

TYPES: dict[str, dict[str, Any]] = {
    "gpus": {"type": "int"},
    "path": {"type": "path"},
    "timeout": {"type": "float"},
    "xid_since": {"type": "str"},
    "xid_repeats_max": {"type": "int"},
    "acknowledged_file": {"type": "path"},
    "status_file": {"type": "path"},
    "ecc_required": {"type": "bool"},
    "ecc_uncorrected_max": {"type": "int"},
    "ecc_corrected_max": {"type": "int"},
    "retired_pages_max": {"type": "int"},
    "temperature_gpu_max_c": {"type": "int"},
    "throttle_reasons": {"type": "list", "elements": "str"},
    "pcie_width_min": {"type": "int"},
    "pcie_generation_min": {"type": "int"},
    "nvlink_recoveries_max": {"type": "int"},
    "nvlink_errors_max": {"type": "int"},
    "infiniband_ports": {"type": "int"},
    "infiniband_link_downed_max": {"type": "int"},
    "roce_ports": {"type": "int"},
    "roce_link_downed_max": {"type": "int"},
    "persistence_required": {"type": "bool"},
    "dcgm": {"type": "bool"},
    "dcgm_diag_level": {"type": "int", "choices": [1, 2, 3, 4]},
    "dcgm_diag_timeout": {"type": "float"},
    "severities": {"type": "dict"},
    "ignored_gpus": {"type": "list", "elements": "str"},
}


def argument_spec() -> dict[str, dict[str, Any]]:
    """Each option's type, with the default that the on-node gate has too."""
    defaults = health.defaults()
    return {
        name: kind if defaults[name] is None else {**kind, "default": defaults[name]} for name, kind in TYPES.items()
    }


def main() -> None:
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    try:
        options = health.HealthOptions.from_mapping(module.params)
    except ValueError as error:
        module.fail_json(msg=f"{platform.node()}: {error}")
    module.exit_json(changed=False, **health.probe(options))


if __name__ == "__main__":
    main()
