#!/usr/bin/python
# Copyright (c) gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: nvidia_smi_facts
short_description: Gather facts about the NVIDIA GPUs of a node
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - Asks C(nvidia-smi) about the node's GPUs and returns the answers as the fact C(ansible_facts.nvidia_smi),
    with plain numbers whose unit is in the name of the key.
  - A node without GPU, without driver, or with a driver that does not work is an answer and not an error. The module
    succeeds, and RV(ansible_facts.nvidia_smi.available), RV(ansible_facts.nvidia_smi.reason) and
    RV(ansible_facts.nvidia_smi.message) say what is wrong.
  - Every key is always there. It is V(null) where the card, the driver or the platform gives no value, and where
    O(gather_subset) leaves it out.
options:
  gather_subset:
    description:
      - What to gather, in the manner of M(ansible.builtin.setup). An entry that starts with V(!) is left out.
      - V(min) is always gathered unless V(!min) is given, and exclusions alone mean everything but these. Index, name,
        UUID, PCI address and status of each GPU are returned in any case.
      - V(min) has serial number, architecture, minor number, memory, and the persistence, compute and MIG modes.
        V(mig) has the MIG devices. V(topology) has NUMA node, near CPUs and root bus. These three come from the listing
        call of C(nvidia-smi), which is fast.
      - V(nvlink) has the NVLinks, and V(peers) the GPUs that they lead to, each from a call of its own.
      - V(board), V(memory), V(power), V(temperature), V(utilization), V(ecc), V(clocks), V(pcie), V(fabric) and
        V(processes) need the full query, which takes about 0.1 seconds for each GPU. One of them costs as much as all.
      - V(all) is all of them.
    type: list
    elements: str
    default: [min, mig, topology]
  path:
    description:
      - The C(nvidia-smi) to run.
      - By default it is looked for in E(PATH), and then in C(/usr/lib/wsl/lib), where Windows provides it.
    type: path
  timeout:
    description:
      - How many seconds C(nvidia-smi) may take, all calls together. It is killed after that, because it hangs for ever
        on some sick GPUs.
      - The first call on a node without persistence mode initialises every GPU, which takes some seconds for each.
    type: float
    default: 60
attributes:
  check_mode:
    description: Can run in C(check_mode) and returns the same as without, since it changes nothing.
    support: full
  diff_mode:
    description: Will return details on what has changed (or possibly needs changing in C(check_mode)) in diff mode.
    support: N/A
  facts:
    description: Action returns an C(ansible_facts) dictionary that will update existing host facts.
    support: full
  idempotent:
    description: When run twice in a row, the second run changes nothing, as the first one did.
    support: full
  platform:
    description: Target OS families that can be operated against.
    support: full
    platforms: Linux, WSL 2
notes:
  - The subsets of the default were chosen so that gathering them takes hardly longer than C(nvidia-smi -L). With MIG
    on, C(nvidia-smi -L) runs as well, because nothing else tells UUIDs and profiles of MIG devices.
  - Where one GPU has fallen off the bus, C(nvidia-smi) often fails for all. The others are then asked one by one, and
    the lost one is returned with RV(ansible_facts.nvidia_smi.gpus[].status=lost).
  - On the default path the CUDA version comes from C(nvidia-smi --version), which drivers older than 530 or so lack.
    Any subset that needs the full query brings it on those as well.
seealso:
  - module: ansible.builtin.setup
"""

EXAMPLES = r"""
- name: Know which GPUs the node has
  gpufarm.core.nvidia_smi_facts:

- name: Every GPU answers
  ansible.builtin.assert:
    that:
      - ansible_facts.nvidia_smi.available
      - ansible_facts.nvidia_smi.gpus | rejectattr('status', 'eq', 'ok') | length == 0
    fail_msg: "{{ inventory_hostname }}: {{ ansible_facts.nvidia_smi.message }}"

- name: Know everything that nvidia-smi tells, except processes
  gpufarm.core.nvidia_smi_facts:
    gather_subset:
      - "!processes"

- name: Know the ECC counters of a node whose GPUs may hang
  gpufarm.core.nvidia_smi_facts:
    gather_subset:
      - ecc
    timeout: 20

- name: GPUs that wait for a reset to remap memory rows
  ansible.builtin.debug:
    msg: >-
      {{ ansible_facts.nvidia_smi.gpus | selectattr('ecc.pending', 'true') | map(attribute='uuid') }}
"""

RETURN = r"""
ansible_facts:
  description: Facts to add to C(ansible_facts).
  returned: always
  type: complex
  contains:
    nvidia_smi:
      description: What C(nvidia-smi) says about this node.
      type: complex
      contains:
        available:
          description: Whether at least one GPU answers.
          type: bool
          sample: true
        reason:
          description:
            - Why no GPU answers, or that some do not. V(null) when all is well.
            - V(not_installed), there is no C(nvidia-smi).
            - V(driver_not_loaded), the kernel module does not run.
            - V(library_not_found), C(libnvidia-ml.so.1) is missing.
            - V(library_mismatch), kernel module and libraries are of different versions, as after an update.
            - V(no_devices), the driver runs and finds no GPU.
            - V(access_blocked), the operating system keeps the GPU away.
            - V(permission_denied), the user may not use the GPU or run C(nvidia-smi).
            - V(gpu_lost), a GPU fell off the bus or does not answer. The others are in
              RV(ansible_facts.nvidia_smi.gpus), and RV(ansible_facts.nvidia_smi.available) tells whether there are any.
            - V(reset_required), a GPU has to be reset before it can be used again.
            - V(interrupt_issue), the kernel gets no interrupts from a GPU.
            - V(timeout), C(nvidia-smi) did not end in time and was killed.
            - V(crashed), C(nvidia-smi) was ended by a signal.
            - V(unsupported), this C(nvidia-smi) does not know the call.
            - V(invalid_output), the answer of C(nvidia-smi) is damaged.
            - V(unknown_error), anything else, such as a GPU whose sensors answer with errors only.
          type: str
          sample: driver_not_loaded
        message:
          description: What was found and what to do next. V(null) when all is well.
          type: str
          sample: >-
            /usr/bin/nvidia-smi -q -x ended with exit code 9 and said: NVIDIA-SMI has failed because it couldn't
            communicate with the NVIDIA driver. Make sure that the latest NVIDIA driver is installed and running.
            Load the kernel module (modprobe nvidia), or reboot if the driver was just installed.
        platform:
          description: Whether this is Linux of its own (V(linux)) or a WSL distribution (V(wsl)).
          type: str
          sample: linux
        driver_version:
          description: Version of the driver; under WSL that of Windows.
          type: str
          sample: 580.159.04
        kernel_modules:
          description:
            - Of which kind the kernel modules are that are loaded, V(open) or V(proprietary). V(null) where none
              is, as under WSL.
          type: str
          sample: open
        cuda_version:
          description: The newest CUDA version that the driver runs.
          type: str
          sample: "13.0"
        gpus:
          description: The GPUs in the order of C(nvidia-smi), which is that of their PCI addresses.
          type: list
          elements: dict
          contains:
            index:
              description: Number of the GPU. V(null) for one that C(nvidia-smi) no longer counts.
              type: int
              sample: 0
            name:
              description: Product name.
              type: str
              sample: NVIDIA H100 80GB HBM3
            uuid:
              description: UUID of the GPU.
              type: str
              sample: GPU-551ac2af-e5cb-e273-ad80-0bc34a4646c1
            pci_bus_id:
              description: PCI address, as C(nvidia-smi) writes it.
              type: str
              sample: "00000000:00:06.0"
            status:
              description: >-
                V(ok) when the GPU answers, V(lost) when it does not, V(reset_required) when it must be reset first,
                V(unreadable) when C(nvidia-smi) may not or cannot read it for another reason.
              type: str
              sample: ok
            status_message:
              description: How that was found out. V(null) when RV(ansible_facts.nvidia_smi.gpus[].status=ok).
              type: str
              sample: null
            sensors_failed:
              description:
                - Sensors that answered with an error, such as C(ERR!), where a value was due. None on a healthy GPU.
                - They are C(temperature_gpu_c), C(power_draw_w), C(utilization_gpu_percent), C(performance_state),
                  C(clocks.sm_mhz) and C(memory_used_mib). V(null) where no subset needed the full query.
              type: list
              elements: str
              sample: []
            serial:
              description: Serial number of the board.
              type: str
              sample: "1752524020260"
            architecture:
              description: Architecture of the chip.
              type: str
              sample: Hopper
            minor_number:
              description: N of C(/dev/nvidiaN). V(null) under WSL.
              type: int
              sample: 0
            memory_total_mib:
              description: Memory in MiB.
              type: int
              sample: 81559
            memory_used_mib:
              description: Memory in use in MiB.
              type: int
              sample: 0
            persistence_mode:
              description: Whether the driver stays loaded while nobody uses the GPU, V(Enabled) or V(Disabled).
              type: str
              sample: Enabled
            compute_mode:
              description: Who may compute, such as V(Default), V(Exclusive_Process) or V(Prohibited).
              type: str
              sample: Default
            mig_mode:
              description: Whether the GPU is divided, V(Enabled) or V(Disabled). V(null) for a GPU that cannot be.
              type: str
              sample: Disabled
            mig_mode_pending:
              description: RV(ansible_facts.nvidia_smi.gpus[].mig_mode) after the next reset.
              type: str
              sample: Disabled
            mig_devices:
              description: The MIG devices; none where MIG is off. From subset V(mig).
              type: list
              elements: dict
              contains:
                index:
                  description: Number of the device on its GPU.
                  type: int
                  sample: 0
                uuid:
                  description: UUID of the device.
                  type: str
                  sample: MIG-feb88891-0321-5fef-9c87-d4af3b54259e
                profile:
                  description: Profile of the device.
                  type: str
                  sample: 1g.10gb
                gpu_instance_id:
                  description: Number of the GPU instance. Given together with a subset that needs the full query.
                  type: int
                  sample: 3
                compute_instance_id:
                  description: Number of the compute instance. Given together with a subset that needs the full query.
                  type: int
                  sample: 0
                memory_total_mib:
                  description: Memory in MiB. Given together with a subset that needs the full query.
                  type: int
                  sample: 9856
            numa_node:
              description: NUMA node next to the GPU. From subset V(topology).
              type: int
              sample: 0
            cpu_affinity:
              description: CPUs next to the GPU, as the kernel lists them. From subset V(topology).
              type: str
              sample: 0-15,32-47
            pci_root:
              description:
                - Bus of the root complex that the GPU hangs below. What one root complex has reaches each other without
                  the link between processors. From subset V(topology).
              type: str
              sample: "0000:16"
            nvlink_peers:
              description:
                - The other GPUs of the node that this one reaches by NVLink, over NVSwitches too. V(null) where
                  C(nvidia-smi) does not tell it. From subset V(peers).
              type: list
              elements: dict
              contains:
                index:
                  description: Index of the other GPU.
                  type: int
                  sample: 1
                links:
                  description: How many NVLinks lead to it.
                  type: int
                  sample: 18
            nvlinks:
              description: >-
                The NVLinks. V(null) while MIG is on, when they cannot be asked for, and where one is neither up nor
                down. From subset V(nvlink).
              type: list
              elements: dict
              contains:
                link:
                  description: Number of the link.
                  type: int
                  sample: 0
                active:
                  description: Whether the link is up.
                  type: bool
                  sample: true
                speed_gb_per_s:
                  description: Speed in GB/s. V(null) for a link that is down.
                  type: float
                  sample: 26.562
                replay_errors:
                  description:
                    - How often the link has sent something again since the driver was loaded. V(null) where the driver
                      does not tell it, as for the two following ones.
                  type: int
                  sample: 0
                recovery_errors:
                  description: How often the link has been brought up again since the driver was loaded.
                  type: int
                  sample: 0
                crc_errors:
                  description: How often what came over the link was damaged, since the driver was loaded.
                  type: int
                  sample: 0
            brand:
              description: Product line. From subset V(board), as the following ones.
              type: str
              sample: NVIDIA
            board_part_number:
              description: Part number of the board.
              type: str
              sample: 695-2G520-0200-000
            vbios_version:
              description: Version of the video BIOS.
              type: str
              sample: 96.00.DA.00.0C
            gsp_firmware_version:
              description: Version of the firmware of the GPU's system processor.
              type: str
              sample: 580.159.04
            virtualization_mode:
              description: Such as V(None), V(Pass-Through), V(VGPU) or V(Host VGPU).
              type: str
              sample: Pass-Through
            vgpu_licensed_product:
              description: What a vGPU needs a licence of, in its guest alone.
              type: str
              sample: NVIDIA AI Enterprise
            vgpu_license_status:
              description: >-
                Whether it has that licence, in the words of C(nvidia-smi), such as V(Unlicensed (Restricted\)) or
                V(Licensed (Expiry: 2026-7-7 16:1:44 GMT\)).
              type: str
              sample: Unlicensed (Restricted)
            addressing_mode:
              description: Whether the GPU can address the host's memory, V(HMM), V(ATS) or V(None).
              type: str
              sample: None
            c2c_mode:
              description: Whether NVLink-C2C joins GPU and processor, V(Enabled) or V(Disabled).
              type: str
              sample: Disabled
            driver_model:
              description: V(WDDM), V(TCC) or V(MCDM) where Windows runs the driver.
              type: str
              sample: null
            inforom_corrupted:
              description: Whether the card's memory for its own history is damaged.
              type: bool
              sample: false
            memory_free_mib:
              description: Free memory in MiB. From subset V(memory), as the following ones.
              type: int
              sample: 81079
            memory_reserved_mib:
              description: Memory in MiB that driver and firmware keep for themselves.
              type: int
              sample: 480
            bar1_total_mib:
              description: Size in MiB of the window through which the host maps the GPU's memory.
              type: int
              sample: 131072
            bar1_used_mib:
              description: How much of that window is in use, in MiB.
              type: int
              sample: 1
            power_draw_w:
              description: >-
                Power drawn in W, the average of the last second where the card measures that. From subset V(power),
                as the following ones.
              type: float
              sample: 70.54
            power_limit_w:
              description: Power limit in W that was set by software.
              type: float
              sample: 700.0
            power_limit_enforced_w:
              description: Power limit in W that holds at the moment.
              type: float
              sample: 700.0
            power_limit_default_w:
              description: Power limit in W that the card comes with.
              type: float
              sample: 700.0
            temperature_gpu_c:
              description: >-
                Temperature of the chip in degrees Celsius. From subset V(temperature), as the following ones.
              type: int
              sample: 34
            temperature_memory_c:
              description: Temperature of the memory in degrees Celsius.
              type: int
              sample: 37
            temperature_limits:
              description:
                - At what the card protects itself. Cards with the newer way tell margins in place of temperatures.
              type: dict
              contains:
                slowdown_c:
                  description: Temperature of the chip in degrees Celsius at which the hardware slows down.
                  type: int
                  sample: null
                shutdown_c:
                  description: Temperature of the chip in degrees Celsius at which the card turns itself off.
                  type: int
                  sample: null
                memory_max_c:
                  description: Temperature of the memory in degrees Celsius at which the card slows down.
                  type: int
                  sample: null
                margin_c:
                  description: How far the chip is from its limit now, in degrees Celsius; less is hotter.
                  type: int
                  sample: 53
                slowdown_margin_c:
                  description: Margin in degrees Celsius at which the hardware slows down.
                  type: int
                  sample: -2
                shutdown_margin_c:
                  description: Margin in degrees Celsius at which the card turns itself off.
                  type: int
                  sample: -8
            utilization_gpu_percent:
              description: >-
                Share of the last sample period in which the GPU computed. From subset V(utilization), as the next one.
              type: int
              sample: 0
            utilization_memory_percent:
              description: Share of the last sample period in which memory was read or written.
              type: int
              sample: 0
            ecc:
              description: Errors of the memory. From subset V(ecc).
              type: dict
              contains:
                mode:
                  description: Whether errors are corrected, V(Enabled) or V(Disabled). V(null) without ECC memory.
                  type: str
                  sample: Enabled
                mode_pending:
                  description: The mode after the next reset.
                  type: str
                  sample: Enabled
                corrected:
                  description: Errors that were corrected, of all memories together.
                  type: dict
                  contains:
                    volatile:
                      description: Since the driver was loaded.
                      type: int
                      sample: 0
                    aggregate:
                      description: Since the card was made.
                      type: int
                      sample: 0
                uncorrected:
                  description: Errors that could not be corrected, of all memories together.
                  type: dict
                  contains:
                    volatile:
                      description: Since the driver was loaded.
                      type: int
                      sample: 0
                    aggregate:
                      description: Since the card was made.
                      type: int
                      sample: 0
                sram_threshold_exceeded:
                  description: Whether the caches had so many errors that the card should be replaced.
                  type: bool
                  sample: false
                unrepairable_memory:
                  description: Whether memory is broken that no spare part replaces; the card should be.
                  type: bool
                  sample: false
                channel_repair_pending:
                  description: Whether a channel of the memory waits for a reset to be repaired.
                  type: bool
                  sample: false
                tpc_repair_pending:
                  description: Whether a part of the chip, a TPC, waits for a reset to be repaired.
                  type: bool
                  sample: false
                remapped_rows:
                  description: Rows of memory that were replaced by spare ones. Ampere and newer.
                  type: dict
                  contains:
                    corrected:
                      description: Because of errors that were corrected.
                      type: int
                      sample: 0
                    uncorrected:
                      description: Because of errors that could not be corrected.
                      type: int
                      sample: 0
                    pending:
                      description: Whether a row waits for a reset to be replaced.
                      type: bool
                      sample: false
                    failure:
                      description: Whether a row could not be replaced; the card should be.
                      type: bool
                      sample: false
                retired_pages:
                  description: Pages of memory that are no longer used. Older than Ampere.
                  type: dict
                  contains:
                    single_bit:
                      description: Because of several single bit errors.
                      type: int
                      sample: null
                    double_bit:
                      description: Because of a double bit error.
                      type: int
                      sample: null
                    pending:
                      description: Whether a page waits for a reset to be retired.
                      type: bool
                      sample: null
                pending:
                  description: Whether memory waits for a reset, as a row to be remapped or as a page to be retired.
                  type: bool
                  sample: false
            recovery_action:
              description: >-
                What the driver wants done to the GPU, such as V(None), V(Reset), V(Reboot) or V(Drain and Reset). From
                subset V(ecc).
              type: str
              sample: None
            performance_state:
              description: From V(P0), the fastest, to V(P15). From subset V(clocks), as the following ones.
              type: str
              sample: P0
            clocks:
              description: Clock frequencies in MHz.
              type: dict
              contains:
                graphics_mhz:
                  description: Of the graphics clock now.
                  type: int
                  sample: 345
                sm_mhz:
                  description: Of the multiprocessors now.
                  type: int
                  sample: 345
                memory_mhz:
                  description: Of the memory now.
                  type: int
                  sample: 2619
                graphics_max_mhz:
                  description: Of the graphics clock at most.
                  type: int
                  sample: 1980
                sm_max_mhz:
                  description: Of the multiprocessors at most.
                  type: int
                  sample: 1980
                memory_max_mhz:
                  description: Of the memory at most.
                  type: int
                  sample: 2619
            clocks_event_reasons:
              description: >-
                Why the clocks are not at their highest now, in the words of C(nvidia-smi), such as V(gpu_idle),
                V(sw_power_cap), V(hw_slowdown) or V(hw_thermal_slowdown).
              type: list
              elements: str
              sample: [gpu_idle]
            clocks_event_reasons_counters:
              description: >-
                For how many microseconds each of these has held the clocks down, as the driver counts them. Drivers
                since 580 or so. From subset V(clocks).
              type: dict
              contains:
                sw_power_cap_us:
                  description: The power limit.
                  type: int
                  sample: 31637354094
                sync_boost_us:
                  description: Another GPU of its group, which all have the clocks of the slowest.
                  type: int
                  sample: 0
                sw_thermal_slowdown_us:
                  description: The driver, because of the temperature of the GPU or of its memory.
                  type: int
                  sample: 0
                hw_thermal_slowdown_us:
                  description: The card itself, because it was too hot.
                  type: int
                  sample: 0
                hw_power_brake_slowdown_us:
                  description: A signal from outside, such as that of a power supply.
                  type: int
                  sample: 0
            pcie:
              description: The PCI Express link. From subset V(pcie).
              type: dict
              contains:
                generation_current:
                  description: Generation in use; lower while the GPU is idle.
                  type: int
                  sample: 5
                generation_max:
                  description: Highest generation of GPU and host together.
                  type: int
                  sample: 5
                generation_device_max:
                  description: Highest generation of the GPU.
                  type: int
                  sample: 5
                generation_host_max:
                  description: Highest generation of the host's port.
                  type: int
                  sample: 5
                width_current:
                  description: Lanes in use.
                  type: int
                  sample: 16
                width_max:
                  description: Lanes of GPU and host together at most.
                  type: int
                  sample: 16
                replay_count:
                  description: Packets that had to be sent again.
                  type: int
                  sample: 0
            fabric_state:
              description: >-
                How far the GPU is registered with the NVLink fabric, V(Completed) when it is. From subset V(fabric),
                as the following ones.
              type: str
              sample: Completed
            fabric_status:
              description: Result of that registration.
              type: str
              sample: Success
            fabric_health:
              description: How the GPU's links into the NVLink fabric are, in the words of C(nvidia-smi).
              type: dict
              contains:
                summary:
                  description: V(Healthy), V(Unhealthy) or V(Limited Capacity).
                  type: str
                  sample: Healthy
                bandwidth:
                  description: V(Full) or V(Degraded).
                  type: str
                  sample: Full
                route_recovery_in_progress:
                  description: Whether routes are being repaired.
                  type: str
                  sample: "False"
                route_unhealthy:
                  description: Whether a route is broken.
                  type: str
                  sample: "False"
                access_timeout_recovery:
                  description: Whether the GPU recovers from an access that timed out.
                  type: str
                  sample: "False"
                incorrect_configuration:
                  description: What is wrong with the configuration of the fabric, V(None) when nothing is.
                  type: str
                  sample: None
            processes:
              description: >-
                Processes that use the GPU. V(null) where they cannot be seen. From subset V(processes).
              type: list
              elements: dict
              contains:
                pid:
                  description: Number of the process.
                  type: int
                  sample: 29907
                type:
                  description: V(C) for computing, V(M+C) for a client of MPS, V(G) for graphics, V(C+G) for both.
                  type: str
                  sample: C
                name:
                  description: Its program.
                  type: str
                  sample: /usr/bin/python3
                cpu_affinity:
                  description:
                    - CPUs on which it may run. V(null) where the driver's numbers of processes are not those of this
                      place, as in a container and under WSL.
                  type: str
                  sample: 0-15,32-47
                memory_used_mib:
                  description: Its memory on the GPU in MiB.
                  type: int
                  sample: 47119
                gpu_instance_id:
                  description: GPU instance that it uses, with MIG.
                  type: int
                  sample: null
                compute_instance_id:
                  description: Compute instance that it uses, with MIG.
                  type: int
                  sample: null
"""

import math

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi import DEFAULT_SUBSETS, collect, resolve_subsets


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "gather_subset": {"type": "list", "elements": "str", "default": list(DEFAULT_SUBSETS)},
            "path": {"type": "path"},
            "timeout": {"type": "float", "default": 60},
        },
        supports_check_mode=True,
    )
    if not 0 < module.params["timeout"] < math.inf:
        module.fail_json(msg=f"timeout is {module.params['timeout']:g}; expected more than 0 seconds, and an end.")
    try:
        subsets = resolve_subsets(module.params["gather_subset"])
    except ValueError as error:
        module.fail_json(msg=str(error))
    facts = collect(subsets, path=module.params["path"], timeout=module.params["timeout"])
    module.exit_json(changed=False, ansible_facts={"nvidia_smi": facts})


if __name__ == "__main__":
    main()
