#!/usr/bin/python
# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: nvidia_gpu_benchmark
short_description: Measure what each NVIDIA GPU of a node does under load
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - Lets each GPU, or each MIG device of a GPU that is divided, allocate, compute, copy and check its memory, and
    compares how fast it was with what the card itself says that it can do.
  - Needs Python and the driver's C(libcuda.so.1), nothing else. The driver compiles the kernels, which are text.
  - A GPU that is slow, computes wrongly, or does not start is an answer and not an error. The module fails for wrong
    options, and where there is no GPU to measure.
  - GPUs are measured side by side, each by a process of its own. One that hangs is named, and the others are measured.
    Copies to and from the host are made by one GPU at a time, because GPUs share links and memory of the host.
    MIG devices that share a GPU instance are measured one after another.
options:
  level:
    description:
      - V(start) starts a context, allocates, and has one kernel's result checked, in half a second a GPU.
      - V(quick) takes all figures, in two seconds and some for pairs of GPUs, and tests O(memory_share) of the
        free memory.
      - V(full) tests nearly all free memory with more patterns, and works without a break for O(soak) seconds.
    type: str
    choices: [start, quick, full]
    default: quick
  devices:
    description:
      - UUIDs of the GPUs or MIG devices to measure. By default all of the node.
    type: list
    elements: str
  busy:
    description:
      - Whether to measure GPUs that a process computes on too. It gets less of the GPU meanwhile, and the figures are
        lower than they could be. Without it one of O(devices) that C(nvidia-smi) does not tell of is left alone too,
        one whose processes it does not list, and under WSL, where it lists none of Windows', one that works all the
        same.
    type: bool
    default: false
  memory_share:
    description:
      - Share of the free memory that is tested, above V(0) and up to V(0.98). V(0.5) by default, and V(0.95) at level
        V(full). Level V(start) tests at most 64 MiB or four times the cache, whichever is more. Of an integrated GPU,
        whose memory is that of the host, at most V(0.5) is tested, whatever is given.
    type: float
  soak:
    description:
      - How many seconds each GPU works without a break at level V(full).
    type: float
    default: 60
  peers:
    description:
      - Whether to copy between each pair of whole GPUs, from level V(quick) on.
    type: bool
    default: true
  memory_min_percent:
    description:
      - Least share of the memory's bandwidth, from its clock and the width of its bus, that reading must reach. V(0)
        judges nothing, here and below. It is not judged on an integrated GPU.
      - By default V(85), and V(65) on cards of before Ampere and on GDDR with ECC, which do not reach more.
    type: float
  fp32_min_percent:
    description:
      - Least share of what the multiprocessors can do in single precision at the clock that they ran at.
    type: float
    default: 85
  tensor_min_percent:
    description:
      - Least share of what the tensor cores can do at that clock. The instruction that all architectures have does not
        reach all of it on the newest. Not judged where cards of one architecture differ much (Turing, H20).
    type: float
    default: 50
  host_min_percent:
    description:
      - Least share of what the link of PCI Express can do with all its lanes, for the slower way between host and GPU.
        Where a slot has fewer lanes than the card, give it a lower value. It is not judged on an integrated GPU, nor
        where copies go by NVLink-C2C, as on Grace.
    type: float
    default: 65
  clock_min_percent:
    description:
      - Least share of the highest clock under load, that of O(soak) too. It is not judged where a power limit or a
        setting held it down, and below level V(full) only where another reason was seen, such as heat.
    type: float
    default: 80
  peer_min_percent:
    description:
      - Least share of what two GPUs could copy each way by their NVLinks, as many as C(nvidia-smi topo -m) says that
        they have between them, at the rate of C(nvidia-smi nvlink -s); 316 GB/s on H100 and H200 with 18 links, 198
        GB/s on A100 with 12. Where only bridges of PCI Express are between them (PIX, PXB), of generation and lanes. It
        is not judged where the way leads through a processor, where GPUs cannot reach each other's memory, and where
        nobody tells.
    type: float
    default: 66
  peer_min_gb_per_s:
    description:
      - Least bandwidth from GPU to GPU in GB/s, whatever is between them. It is not judged by default.
    type: float
    default: 0
  path:
    description:
      - The C(nvidia-smi) to ask, as in M(gpufarm.core.nvidia_smi_facts).
    type: path
  timeout:
    description:
      - How many seconds each step of each GPU may take, and each call of C(nvidia-smi).
    type: float
    default: 60
attributes:
  check_mode:
    support: full
    description: Can run in C(check_mode) and measures the same as without, since it changes nothing.
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
  - It needs GPUs without work. On a node of a farm, drain it first, as M(gpufarm.core.nomad_node_maintenance) does.
  - The part that measures is one file, C(plugins/module_utils/gpu_benchmark/measuring.py), that also runs as a
    program, in a container too. See C(python3 measuring.py --help).
  - "Codes: C(hung), it got no further; C(crashed), its process ended by itself; C(no_cuda), there is no library of
    the driver, or it compiles nothing for this card, as for one older than compute capability 6.0;
    C(context_failed), CUDA could not use it; C(failed), a later call of CUDA failed; C(gpu_busy), a process computes
    on it; C(gpu_unknown), C(nvidia-smi) does not tell of it, or not who computes on it;
    C(not_measured), a GPU that is lost, or divided without a MIG device; C(memory_errors) and C(wrong_results), it
    computes wrongly; C(slow_memory), C(slow_fp32), C(slow_tensor), C(slow_host_copies), C(slow_clock) and
    C(slow_peer), it is slower than it should be; C(ecc_errors) and C(xid), what came up
    meanwhile; C(peer_wrong) and C(peers_failed), copies between GPUs."
seealso:
  - module: gpufarm.core.nvidia_gpu_health
  - module: gpufarm.core.nomad_gpu_job_verify
"""

EXAMPLES = r"""
- name: Measure the GPUs of a drained node
  gpufarm.core.nvidia_gpu_benchmark:
  register: benchmark

- name: Every GPU does what it should
  ansible.builtin.assert:
    that: benchmark.passed
    fail_msg: "{{ benchmark.problems | map(attribute='message') | join('\n') }}"

- name: Work for an hour without a break, on all memory
  gpufarm.core.nvidia_gpu_benchmark:
    level: full
    soak: 3600
"""

RETURN = r"""
passed:
  description: Whether nothing is wrong with any GPU that was to be measured. One that was left alone as busy does not
    count; one that C(nvidia-smi) does not tell of, or not who computes on it, that is lost, or that is divided without
    a MIG device does.
  returned: always
  type: bool
  sample: false
level:
  description: The level that was asked for.
  returned: always
  type: str
  sample: quick
gpus:
  description: The GPUs and MIG devices, in the order of C(nvidia-smi) or of O(devices).
  returned: always
  type: list
  elements: dict
  contains:
    uuid:
      description: UUID of the GPU or MIG device.
      type: str
      sample: GPU-73466fa5-45f2-f4ce-0991-77d3b3398071
    verdict:
      description: V(ok), V(failed), V(busy) where it was left alone, or V(unknown) where it was because
        C(nvidia-smi) does not tell of it, or not who computes on it. V(null) where nothing could be tried on it; a
        problem says why.
      type: str
      sample: ok
    name:
      description: Product name, from CUDA. V(null) where CUDA could not be asked, as all that follows.
      type: str
      sample: NVIDIA H100 80GB HBM3
    pci_bus_id:
      description: PCI address, as C(nvidia-smi) writes it.
      type: str
      sample: "00000000:00:06.0"
    compute_capability:
      description: Compute capability.
      type: str
      sample: "9.0"
    sm_count:
      description: Number of multiprocessors; of a MIG device, its own.
      type: int
      sample: 132
    sm_clock_max_mhz:
      description: Highest clock of the multiprocessors in MHz.
      type: int
      sample: 1980
    memory_clock_max_mhz:
      description: Highest clock of the memory in MHz.
      type: int
      sample: 2619
    memory_bus_width_bits:
      description: Width of the memory's bus in bits.
      type: int
      sample: 5120
    memory_total_mib:
      description: Memory in MiB, as CUDA counts it.
      type: int
      sample: 81079
    memory_free_mib:
      description: Memory in MiB that was free with a context.
      type: int
      sample: 80552
    ecc_enabled:
      description: Whether ECC is on. V(null) where CUDA does not tell.
      type: bool
      sample: true
    integrated:
      description: Whether its memory is that of the host. V(null) where CUDA does not tell.
      type: bool
      sample: false
    context_s:
      description: How many seconds a context took to start.
      type: float
      sample: 0.099
    compile_s:
      description: How many seconds the driver took to compile the kernels.
      type: float
      sample: 0.098
    duration_s:
      description: How many seconds all of it took, waiting for other GPUs included.
      type: float
      sample: 0.87
    memory:
      description: The test of memory. Its C(error_samples) name the first wrong words by their place in it.
      type: dict
      sample: {tested_mib: 40276, patterns: [random, walking], errors: 0, error_samples: []}
    figures:
      description: >-
        What was measured, in GB/s (10^9 bytes) and TFLOP/s. A copy within the memory counts as read and written. Each
        is V(null) at level V(start), and where the architecture lacks it.
      type: dict
      sample:
        memory_read_gb_per_s: 3134.6
        memory_write_gb_per_s: 3193.6
        memory_copy_gb_per_s: 2995.0
        host_to_device_gb_per_s: 54.8
        device_to_host_gb_per_s: 54.9
        fp32_tflop_per_s: 64.0
        fp16_tensor_tflop_per_s: 652.8
        bf16_tensor_tflop_per_s: 654.4
    limits:
      description: What the card can do by its own attributes. V(null) where it does not tell. Those of an integrated
        GPU say nothing of its memory and of copies with the host, and none says how fast NVLink-C2C is.
      type: dict
      sample: {memory_gb_per_s: 3352.3, fp32_tflop_per_s: 66.9, tensor_tflop_per_s: 1070.5, host_gb_per_s: 63.0}
    percent:
      description: What reading memory, single precision, the better of the tensor figures, and the slower way between
        host and GPU reached of RV(gpus[].limits).
      type: dict
      sample: {memory: 93.5, fp32: 95.7, tensor: 61.1, host: 87.0}
    sm_clock_mhz:
      description: Clock of the multiprocessors during single precision in MHz, as a kernel counted it.
      type: float
      sample: 1976.0
    sm_clock_tensor_mhz:
      description: The same during the better of the tensor figures. V(null) without them.
      type: float
      sample: 1950.0
    wrong_results:
      description: Number of wrong results of each kind of work. V(null) at level V(start).
      type: dict
      sample: {memory_read: 0, fp32: 0, fp16_tensor: 0, bf16_tensor: 0, host_copies: 0}
    soak:
      description: What came of the work without a break; the lowest rate of a try, and the lowest clock of a second, by
        its best try. V(null) below level V(full).
      type: dict
      sample: {seconds: 60.0, rounds: 19, errors: 0, fp32_tflop_per_s_min: 62.3, sm_clock_mhz_min: 1980.0}
    load:
      description: >-
        What C(nvidia-smi) saw meanwhile; the highest of power and temperature, the lowest clock of the busy GPU, and
        the reasons for which its clocks were held down. V(null) where it saw nothing.
      type: dict
      sample: {power_draw_max_w: 412.5, temperature_gpu_max_c: 46, sm_clock_min_mhz: 1980, throttle_reasons: []}
    ecc_uncorrected:
      description: Number of memory errors that came meanwhile and that ECC could not correct. V(null) without ECC.
      type: int
      sample: 0
    ecc_corrected:
      description: Number of memory errors that came meanwhile and that ECC corrected. V(null) without ECC.
      type: int
      sample: 0
    xids:
      description:
        - Xids that the kernel logged of the GPU meanwhile. For a MIG device those are left out that say nothing of the
          GPU, as of a job that failed, which may be of another MIG device.
      type: list
      elements: str
      sample: []
peers:
  description: Copies between whole GPUs, one entry for each ordered pair.
  returned: always
  type: list
  elements: dict
  contains:
    from:
      description: UUID of the GPU that sent.
      type: str
      sample: GPU-73466fa5-45f2-f4ce-0991-77d3b3398071
    to:
      description: UUID of the GPU that received.
      type: str
      sample: GPU-ef42cbb5-b164-c088-467f-1707e65b3394
    access:
      description: Whether they can reach each other's memory.
      type: bool
      sample: true
    nvlink:
      description: Whether that is by NVLink. V(null) where the driver does not tell.
      type: bool
      sample: true
    gb_per_s:
      description: Direct copies in GB/s. V(null) without access.
      type: float
      sample: 391.8
    way:
      description: How they are connected, in the words of C(nvidia-smi topo -m). V(null) where it does not tell.
      type: str
      sample: NV18
    limit_gb_per_s:
      description: What that way could give, in GB/s. V(null) where it is not known.
      type: float
      sample: 478.1
    percent:
      description: Share of it that was reached, in percent. V(null) where it is not known.
      type: float
      sample: 81.9
    by_host_gb_per_s:
      description: Copies in GB/s when neither may reach the other's memory, so that they go through the host.
      type: float
      sample: 36.9
    errors:
      description: Number of wrong words that arrived.
      type: int
      sample: 0
problems:
  description: What is wrong.
  returned: always
  type: list
  elements: dict
  contains:
    node:
      description: Name of the node.
      type: str
      sample: gpu01
    uuid:
      description: UUID of the GPU or MIG device. V(null) for a problem of several. Of a pair of GPUs that is too slow,
        the one that is in more such pairs, and the one that sent where both are in as many.
      type: str
      sample: GPU-73466fa5-45f2-f4ce-0991-77d3b3398071
    peer:
      description: UUID of the other GPU, where copies between two are slow or wrong. V(null) otherwise.
      type: str
      sample: null
    code:
      description: One of the codes in the notes.
      type: str
      sample: slow_memory
    found:
      description: What was found.
      type: str
      sample: memory read at 1567 GB/s, 47 % of the 3352.3 that the card tells
    expected:
      description: What was expected.
      type: str
      sample: at least 85 %
    message:
      description: Node, GPU, found, expected and the next step.
      type: str
      sample: >-
        Node gpu01, GPU GPU-73466fa5-45f2-f4ce-0991-77d3b3398071: found memory read at 1567 GB/s, 47 % of the 3352.3
        that the card tells. Expected: at least 85 %. Next step: compare its memory clock with a sibling's, and look for
        remapped rows.
checks:
  description: Which sources could be asked. V(ok), or why not.
  returned: always
  type: dict
  contains:
    nvidia_smi:
      description: V(ok), or RV(gpufarm.core.nvidia_smi_facts#module:ansible_facts.nvidia_smi.reason).
      type: str
      sample: ok
    kernel_log:
      description: Where it was read, V(journal), V(dmesg) or V(kmsg); C(unreadable) and why, or V(skipped) under WSL.
      type: str
      sample: journal
"""

import dataclasses
import platform
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufarm.core.plugins.module_utils import gpu_benchmark, signals
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_benchmark import Card, Thresholds
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_benchmark.devices import (
    UNSEEN_WORK_PERCENT,
    Device,
    devices_of,
    parts_of,
    unseen_work,
    who_is_unknown,
)
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_benchmark.judging import percents
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_benchmark.options import (
    THRESHOLDS,
    argument_spec,
    wrong_option,
)
from ansible_collections.gpufarm.core.plugins.module_utils.health.kernel_log import kernel_events
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi import (
    Facts,
    Gpu,
    collect,
    collect_topology,
    resolve_subsets,
)
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi.facts import EccCounts
from ansible_collections.gpufarm.core.plugins.module_utils.pci import normal_bus_id
from ansible_collections.gpufarm.core.plugins.module_utils.problem import Finding, FoundError, problem_of
from ansible_collections.gpufarm.core.plugins.module_utils.xid import IGNORE, lookup
from ansible_collections.gpufarm.core.plugins.module_utils.xid_events import Event

ROOT = "/"

# So that a call takes hardly more of the node's time than it must.
SAMPLE_EVERY_S = 0.2

# Of those that are not measured, by the code of the problem that says why.
VERDICTS = {"gpu_busy": "busy", "gpu_unknown": "unknown"}
# Errors of the node or of this module, which say nothing of the GPU.
NOBODYS = ("library", "internal")


def left_alone_for(device: Device, on_wsl: bool) -> Iterator[Finding]:
    """Why a device is not measured without being told to."""
    if device.gpu is None:
        yield Finding(
            "gpu_unknown",
            "that nvidia-smi does not tell of it, so whether it is busy is unknown",
            "the UUID of a GPU or, of a divided one, of a MIG device, as nvidia-smi -L has it",
            "correct it or mend nvidia-smi, or measure it nevertheless with busy=true",
        )
    elif who_is_unknown(device.gpu, on_wsl):
        yield Finding(
            "gpu_unknown",
            "that nvidia-smi lists no processes of it, so whether it is busy is unknown",
            "the processes on it, or none",
            "see what nvidia-smi -q -d PIDS tells and mend it, or drain the node and measure it with busy=true",
        )
    elif device.processes:
        yield Finding(
            "gpu_busy",
            f"that {', '.join(device.processes)} computes on it",
            "a GPU without work",
            "drain the node, or measure it nevertheless with busy=true",
        )
    elif work := unseen_work(device.gpu, on_wsl):
        yield Finding(
            "gpu_busy",
            f"it {work}",
            f"a GPU without work, at most {UNSEEN_WORK_PERCENT} %",
            "end what Windows' task manager shows on it, or measure it nevertheless with busy=true",
        )


def missing_from(facts: Facts) -> Iterator[Finding]:
    """GPUs of the node on which there is nothing to measure, though something should be."""
    for gpu in facts["gpus"]:
        where = f"GPU {gpu['uuid'] or ''} at {gpu['pci_bus_id'] or 'an unknown address'}".replace("  ", " ")
        if gpu["status"] != "ok" or not gpu["uuid"]:
            said = gpu["status_message"] or "nvidia-smi tells no UUID"
            yield Finding(
                "not_measured",
                f"{where}: {gpu['status']}, {said.rstrip('.')}",
                "a GPU that can be measured",
                "do what nvidia_gpu_health says of it",
                uuid=gpu["uuid"],
            )
        elif gpu["mig_mode"] == "Enabled" and not parts_of(gpu):
            yield Finding(
                "not_measured",
                f"{where}: MIG mode on, and no MIG device",
                "a MIG device to measure",
                "make its MIG devices (role nvidia_mig), or switch MIG mode off",
                uuid=gpu["uuid"],
            )


def load_of(samples: Iterable[Mapping[str, Any]], uuid: str | None) -> dict[str, Any] | None:
    """What the samples say of a GPU while it worked."""
    mine = [sample[uuid] for sample in samples if uuid is not None and uuid in sample]
    busy = [sample for sample in mine if "gpu_idle" not in (sample["reasons"] or ())]
    if not mine:
        return None

    def values(key: str, of: Sequence[Mapping[str, Any]]) -> list[Any]:
        return [sample[key] for sample in of if sample[key] is not None]

    reasons = values("reasons", busy)
    return {
        "power_draw_max_w": max(values("power_draw_w", mine), default=None),
        "temperature_gpu_max_c": max(values("temperature_gpu_c", mine), default=None),
        "sm_clock_min_mhz": min(values("sm_mhz", busy), default=None),
        "throttle_reasons": sorted({reason for each in reasons for reason in each}) if reasons else None,
    }


def sample_of(facts: Facts) -> dict[str, Any]:
    return {
        gpu["uuid"]: {
            "power_draw_w": gpu["power_draw_w"],
            "temperature_gpu_c": gpu["temperature_gpu_c"],
            "sm_mhz": gpu["clocks"]["sm_mhz"],
            "reasons": gpu["clocks_event_reasons"],
        }
        for gpu in facts["gpus"]
        if gpu["uuid"]
    }


def _more(before: Gpu | None, after: Gpu | None, kind: str) -> int | None:
    """How many errors of the memory came between two looks at a GPU."""
    if not before or not after:
        return None
    ecc = [cast(Mapping[str, EccCounts], gpu["ecc"])[kind]["volatile"] for gpu in (before, after)]
    return None if ecc[0] is None or ecc[1] is None else max(ecc[1] - ecc[0], 0)


def xids_of(events: Iterable[Event], device: Device) -> list[str]:
    address = normal_bus_id(device.gpu["pci_bus_id"]) if device.gpu else None
    # A MIG device has its address in common with others, whose jobs fail by themselves.
    shared = device.uuid.startswith("MIG-")
    return [
        f"{event.code}: {event.text}"
        for event in events
        if address is not None
        and normal_bus_id(event.pci_bus_id) == address
        and not (shared and lookup(event.number, event.text, event.fatal).severity == IGNORE)
    ]


def card_of(before: Gpu | None, after: Gpu | None, load: Mapping[str, Any] | None, xids: Sequence[str]) -> Card:
    link: Mapping[str, Any] = after["pcie"] if after else {}
    return Card(
        pcie_generation=link.get("generation_max"),
        pcie_width=link.get("width_max") or link.get("width_current"),
        c2c_mode=after["c2c_mode"] if after else None,
        virtualization_mode=before["virtualization_mode"] if before else None,
        memory_total_mib=before["memory_total_mib"] if before else None,
        slow_reasons=load["throttle_reasons"] if load else None,
        ecc_uncorrected=_more(before, after, "uncorrected"),
        ecc_corrected=_more(before, after, "corrected"),
        xids=xids,
    )


def verdict_of(device: Mapping[str, Any], findings: Sequence[Finding]) -> str | None:
    """None where all that was found is that it could not be tried."""
    if device["error"] and device["error"]["code"] in NOBODYS and len(findings) == 1:
        return None
    return "failed" if findings else "ok"


def benchmark(params: Mapping[str, Any], root: str) -> dict[str, Any]:
    node, level = platform.node(), params["level"]

    def ask() -> Facts:
        return collect(resolve_subsets(["all", "!peers"]), path=params["path"], timeout=params["timeout"], root=root)

    def watch(tell: gpu_benchmark.Tell) -> None:
        # So that a call that goes on is ended too.
        signals.unwind()
        while True:
            tell(sample_of(ask()))
            time.sleep(SAMPLE_EVERY_S)

    before = ask()
    devices = devices_of(before, params["devices"])
    if not devices:
        raise FoundError(
            f"no GPU to measure: {(before['message'] or 'nvidia-smi lists no GPU, and no MIG device').rstrip('.')}",
            "at least one GPU or MIG device",
            "check nvidia-smi on the node",
        )
    on_wsl = before["platform"] == "wsl"
    left_alone = {} if params["busy"] else {each.uuid: why for each in devices for why in left_alone_for(each, on_wsl)}
    events: list[Event] = []
    begun = time.time()
    answer = gpu_benchmark.measure(
        [each.uuid for each in devices if each.uuid not in left_alone],
        level,
        memory_share=params["memory_share"],
        soak_s=params["soak"],
        timeout=params["timeout"],
        peers=params["peers"],
        sampler=watch if before["available"] else None,
        shared={each.uuid: (each.gpu["uuid"], each.instance) for each in devices if each.gpu},
    )
    after = ask()
    if after["platform"] == "wsl":
        log = "skipped: under WSL the driver writes its log in Windows"
    else:
        log, events = kernel_events(begun, params["timeout"], Path(root), None)
    ways = collect_topology(params["path"], params["timeout"]) if answer["peers"] else {}
    peers = gpu_benchmark.with_limits(answer["peers"], after["gpus"], ways)
    thresholds = Thresholds(**{name: params[name] for name in THRESHOLDS})
    later = {gpu["uuid"]: gpu for gpu in after["gpus"]}
    measured = {device["uuid"]: device for device in answer["devices"]}
    gpus, problems = [], []

    def told(finding: Finding, uuid: str | None) -> None:
        problem = problem_of(
            node, finding.code, finding.found, finding.expected, finding.next_step, uuid=uuid, named=bool(uuid)
        )
        problems.append({**dataclasses.asdict(problem), "peer": finding.peer})

    for each in devices:
        last = later.get(each.gpu["uuid"]) if each.gpu else None
        load = load_of(answer["samples"], each.gpu["uuid"] if each.gpu else None)
        xids = xids_of(events, each)
        card = card_of(each.gpu, last, load, xids)
        device = measured.get(each.uuid) or gpu_benchmark.empty_device(each.uuid)
        findings = gpu_benchmark.judge_device(device, card, thresholds, level)
        reason = left_alone.get(each.uuid)
        if reason:
            findings = [reason]
        for finding in findings:
            told(finding, each.uuid)
        limits = gpu_benchmark.limits_of(device, card)
        gpus.append(
            {
                "uuid": each.uuid,
                "verdict": VERDICTS[reason.code] if reason else verdict_of(device, findings),
                **{key: value for key, value in device.items() if key not in ("uuid", "error")},
                "limits": limits,
                "percent": percents(device["figures"], limits),
                "load": load,
                "ecc_uncorrected": card.ecc_uncorrected,
                "ecc_corrected": card.ecc_corrected,
                "xids": list(xids),
            }
        )
    for finding in missing_from(before) if params["devices"] is None else ():
        told(finding, finding.uuid)
    for finding in gpu_benchmark.judge_peers(peers, answer["peers_error"], thresholds):
        told(finding, finding.uuid)
    return {
        "passed": not [problem for problem in problems if problem["code"] != "gpu_busy"],
        "level": level,
        "gpus": gpus,
        "peers": peers,
        "problems": problems,
        "checks": {"nvidia_smi": before["reason"] or "ok", "kernel_log": log},
    }


def main() -> None:
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    wrong = wrong_option(module.params)
    if wrong:
        module.fail_json(msg=f"{platform.node()}: {wrong}")
    try:
        with signals.ended_with_controller():
            answer = benchmark(module.params, ROOT)
        module.exit_json(changed=False, **answer)
    except FoundError as error:
        module.fail_json(msg=f"{platform.node()}: {error}")


if __name__ == "__main__":
    main()
