#!/usr/bin/python
# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: nomad_gpu_job_verify
short_description: Prove by a job that Nomad hands out every GPU
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - Runs a short task on every GPU of every node, or on a sample, and compares the UUID that the task sees with the one
    that it was pinned to. So the whole way is proven that a user's job takes, from the scheduler through the device
    plugin, the task driver and the container toolkit to the driver.
  - Each node gets one batch job with a task group for each GPU. The node is pinned by C(${node.unique.id}), the GPU by
    a device constraint on C(${device.ids}). Nothing is restarted or rescheduled.
  - The task runs C(nvidia-smi -L). With O(driver=docker) it must see its GPU and no other. Under WSL and with
    O(driver=raw_exec) nothing separates GPUs, so its GPU must be among those it sees, and RV(gpus[].isolated=false).
    With O(driver=raw_exec) E(NVIDIA_VISIBLE_DEVICES) of the task must also be the UUID.
  - With O(level=start) and O(level=quick) the task then has its GPU compute by the program of
    M(gpufarm.core.nvidia_gpu_benchmark), and the answer is judged by what the card itself says that it can do. A GPU
    that does not start, hangs, computes wrongly or is too slow has failed.
  - MIG devices are proven as the devices that they are in Nomad.
  - Its jobs are always stopped and purged, also after an error and when the time is over.
extends_documentation_fragment:
  - gpufarm.core.nomad
  - gpufarm.core.nomad.actiongroup_nomad
attributes:
  check_mode:
    support: full
    description: Registers and purges nothing. Every GPU on which a job would run is returned as V(skipped).
  diff_mode:
    support: none
    description: The farm is as it was before.
  idempotent:
    support: full
    description: >-
      Leaves the farm as it was, apart from the records of ended allocations that Nomad keeps until it collects its
      garbage, and is therefore not a change. Purging what a killed run left behind is one.
options:
  nodes:
    description:
      - Names or IDs of the nodes to prove. A node of the list that is not there, not ready, without GPUs, or closed to
        work is a problem. An empty list is an error, because a proof of nothing proves nothing.
      - If not set, these are all ready nodes with GPUs, of which there must be one; those that are closed to work are
        skipped.
    type: list
    elements: str
  sample:
    description:
      - Number of GPUs of each node on which a job runs, chosen anew at random in each run, free ones first.
      - If not set, all of them.
    type: int
  level:
    description:
      - What the task does. V(list) lists GPUs, and its GPU computes nothing.
      - V(start) also starts a context on its GPU, writes 64 MiB (or four times the cache, if that is more) and reads
        each word again, in half a second.
      - V(quick) takes all figures and checks each result, and tests half of the free memory, in two seconds.
      - Copies to and from the host are told and not judged, because the tasks of a node share its links. So are
        clocks, and the bandwidth of MIG devices.
    type: str
    choices: [list, start, quick]
    default: list
  driver:
    description:
      - Task driver. V(raw_exec) needs no image, but must be switched on for the clients. For O(level=start) and
        O(level=quick) it needs C(python3) on the node, 3.8 or newer.
    type: str
    choices: [docker, raw_exec]
    default: docker
  image:
    description:
      - Image for O(driver=docker). Any that has a C library and C(/bin/sh); the container toolkit brings C(nvidia-smi)
        and the driver's C(libcuda.so.1). For O(level=start) and O(level=quick) it needs C(python3), 3.8 or newer, and
        nothing of CUDA.
      - Name a version. Nomad pulls C(:latest) for each task, but not a version that the node has already.
      - If not set, C(nvidia/cuda:12.8.1-base-ubuntu24.04), and C(python:3.13.7-slim-bookworm) for O(level=start) and
        O(level=quick).
    type: str
  priority:
    description:
      - Priority of the jobs, from 1 to 10. Nomad preempts only allocations whose priority is lower by ten or more, so
        none is ever preempted for a proof.
    type: int
    default: 10
  cpu_mhz:
    description:
      - CPU of each task in MHz.
    type: int
    default: 100
  memory_mib:
    description:
      - Memory of each task in MiB. If not set, 256, and 1024 for O(level=start) and O(level=quick), of which 64 are
        pinned for copies.
    type: int
  timeout:
    description:
      - Seconds for the whole proof. What has no verdict then has failed with the code C(timeout). Nodes to which it did
        not come are a problem with the code C(not_begun).
      - O(parallel) nodes that have the image take some ten seconds, and then the next ones begin. A farm of thousands
        of nodes needs more time than the default.
    type: int
    default: 600
  parallel:
    description:
      - Number of nodes whose jobs run at once.
    type: int
    default: 50
  skip_busy:
    description:
      - Whether a GPU that another allocation holds, or for whose task the node has no room, is reported as V(busy).
        With V(false) it has failed.
      - What is not ours is never stopped, either way.
    type: bool
    default: true
notes:
  - "The codes of GPUs that failed are: C(not_placed), Nomad did not place the job, and its own reason is told;
    C(task_failed), the task did not start or did not end well, and its last telling event and the end of its stderr are
    told; C(wrong_gpu), Nomad assigned or the task saw another GPU; C(gpu_not_seen), the task did not see its GPU;
    C(extra_gpus_seen), a container saw more than its GPU; C(mig_empty), the GPU's MIG mode is on and it has no MIG
    device; C(gpu_unhealthy), the device plugin calls the GPU unhealthy; C(no_python), there is no
    C(python3); C(no_answer), the program that measures did not get that far, or said nothing that tells what its GPU
    did; C(timeout), there was no verdict in time; C(log_unreadable), the log of the task could not be read."
  - "Those of GPUs that did not do what they should are the codes of M(gpufarm.core.nvidia_gpu_benchmark): C(no_cuda),
    C(context_failed), C(hung), C(crashed), C(failed), C(memory_errors), C(wrong_results), C(slow_memory), C(slow_fp32)
    and C(slow_tensor). If there are several, the code is the worst's, and all are told. C(failed) is also a task of
    which something is told that cannot be judged."
  - A task whose container Docker did not start for nothing that has to do with a GPU, as it happens on a busy machine,
    and one whose log was lost, say nothing of a GPU. Each is tried once more, and has failed if it is so again.
  - The program comes with the job, once for each node and packed, in its meta. Each of its steps may take a fourth of
    O(timeout), 60 seconds at most.
  - "The codes of GPUs that are V(busy) are: C(gpu_busy), another allocation holds the GPU; C(node_full), the node has
    no room for the task."
  - "The codes of GPUs that are V(skipped) are: C(not_sampled), O(sample) left it out; C(node_closed), the node is
    ineligible or drained and was not named; C(not_begun), the time was over before; C(check_mode), a job would have
    run."
  - "The codes of nodes are: C(node_missing), no node has this name or ID; C(node_down), its status is not ready;
    C(no_devices), Nomad reports not one GPU; C(not_begun), the time was over before a job ran there; C(job_left), a job
    could not be purged."
  - With ACLs the token needs C(node:read), and C(submit-job), C(read-job), C(list-jobs) and C(read-logs) in the
    namespace. Where it may not read the jobs of other namespaces, it cannot be told which job holds a GPU.
  - The IDs of its jobs begin with C(gpufarm-verify-), and their meta says which module made them. Jobs of a former run
    that was killed are purged once they are older than an hour.
  - Nomad's Docker driver removes an image some minutes after its last use, so a proof may pull it again.
  - The task asks only for its GPU, and of the network for nothing.
seealso:
  - module: gpufarm.core.nomad_gpu_verify
  - module: gpufarm.core.nomad_gpu_info
  - module: gpufarm.core.nvidia_gpu_benchmark
"""

EXAMPLES = r"""
- name: A job on every GPU sees the GPU that it was pinned to
  gpufarm.core.nomad_gpu_job_verify:
    address: https://nomad.example.com:4646
  delegate_to: localhost
  run_once: true

- name: One GPU of each of these nodes, with an image of one's own
  gpufarm.core.nomad_gpu_job_verify:
    nodes: [gpu01, gpu02]
    sample: 1
    image: images.example.com/cuda:12.8.1-base
    timeout: 300
  delegate_to: localhost
  run_once: true

- name: Every GPU computes, and as fast as it should
  gpufarm.core.nomad_gpu_job_verify:
    level: quick
  delegate_to: localhost
  run_once: true

- name: Nodes without Docker
  gpufarm.core.nomad_gpu_job_verify:
    driver: raw_exec
    skip_busy: false
  delegate_to: localhost
  run_once: true
"""

RETURN = r"""
gpus:
  description: The verdict on every GPU of the nodes, in Nomad's order.
  type: list
  elements: dict
  returned: always, once Nomad answered
  contains:
    node:
      description: Name of the node.
      type: str
      sample: gpu01
    uuid:
      description: UUID of the GPU or MIG device.
      type: str
      sample: GPU-4404041a-04cf-1ccf-9e70-f139a9b1e23c
    model:
      description: Its model.
      type: str
      sample: NVIDIA H100 80GB HBM3
    verdict:
      description: V(ok), V(failed), V(busy) or V(skipped).
      type: str
      sample: ok
    code:
      description: One of the codes in the notes; null when the verdict is V(ok).
      type: str
      sample: null
    assigned:
      description: UUIDs that Nomad assigned to the task; null when nothing was placed.
      type: list
      elements: str
      sample: [GPU-4404041a-04cf-1ccf-9e70-f139a9b1e23c]
    seen:
      description: UUIDs that the task saw; null when it could not say.
      type: list
      elements: str
      sample: [GPU-4404041a-04cf-1ccf-9e70-f139a9b1e23c]
    isolated:
      description:
        - V(true) when a container saw this GPU alone. V(false) when it saw others too, and always under WSL and with
          O(driver=raw_exec), where nothing separates GPUs. Null when the task saw none.
      type: bool
      sample: true
    allocation_id:
      description: ID of the allocation; null when nothing was placed.
      type: str
      sample: 0ff7fbd5-7e8a-4a2c-4c4e-5f0c2f7c1f9e
    duration_s:
      description: Seconds from the registration of the node's job to the verdict; null when no job ran.
      type: float
      sample: 2.9
    benchmark:
      description: >-
        What the GPU did, as RV(gpufarm.core.nvidia_gpu_benchmark#module:gpus) has it, less what a task does not know.
        Null with O(level=list) and where there is no answer. Figures are in GB/s (10^9 bytes) and TFLOP/s; each is null
        where it is not known, and all are at O(level=start).
      type: dict
      contains:
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
            What was measured, in GB/s (10^9 bytes) and TFLOP/s. A copy within the memory counts as read and written.
            Each is V(null) at level V(start), and where the architecture lacks it.
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
          description: What the card can do by its own attributes. V(null) where it does not tell.
          type: dict
          sample: {memory_gb_per_s: 3352.3, fp32_tflop_per_s: 66.9, tensor_tflop_per_s: 1070.5, host_gb_per_s: null}
        percent:
          description: What reading memory, single precision and the better of the tensor figures reached of
            RV(gpus[].benchmark.limits).
          type: dict
          sample: {memory: 93.5, fp32: 95.7, tensor: 61.1, host: null}
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
    message:
      description: Node, GPU, found, expected and the next step; null when the verdict is V(ok).
      type: str
      sample: null
problems:
  description: All problems of GPUs and nodes.
  type: list
  elements: dict
  returned: always, once Nomad answered
  contains:
    node:
      description: Name of the node.
      type: str
      sample: gpu01
    uuid:
      description: UUID of the GPU or MIG device; null where the problem is the node's.
      type: str
      sample: GPU-4404041a-04cf-1ccf-9e70-f139a9b1e23c
    code:
      description: One of the codes in the notes.
      type: str
      sample: extra_gpus_seen
    expected:
      description: What was expected, for people.
      type: str
      sample: GPU GPU-4404041a-04cf-1ccf-9e70-f139a9b1e23c alone
    found:
      description: What was found, for people.
      type: str
      sample: that the container also sees GPU-92b7cca4-1b2f-4d5e-8f3a-0e7a6b9e1c22
    message:
      description: Node, GPU, found, expected and the next step.
      type: str
      sample: >-
        Node gpu01, GPU GPU-4404041a-04cf-1ccf-9e70-f139a9b1e23c: found that the container also sees
        GPU-92b7cca4-1b2f-4d5e-8f3a-0e7a6b9e1c22. Expected: GPU GPU-4404041a-04cf-1ccf-9e70-f139a9b1e23c alone. Next
        step: check that the image does not set NVIDIA_VISIBLE_DEVICES, that the container is not privileged, and the
        mode of the container toolkit.
counts:
  description: Number of GPUs by verdict.
  type: dict
  returned: always, once Nomad answered
  contains:
    ok:
      description: Number of GPUs that are proven.
      type: int
      sample: 7
    failed:
      description: Number of GPUs that failed.
      type: int
      sample: 1
    busy:
      description: Number of GPUs that were in use.
      type: int
      sample: 0
    skipped:
      description: Number of GPUs on which no job was to run.
      type: int
      sample: 0
table:
  description: The verdicts by node as text in columns, failed nodes first. With O(level=quick) also the lowest share,
    in percent, that a GPU of the node reached of what it can do.
  type: str
  returned: always, once Nomad answered
  sample: |-
    NODE   GPUS  OK  FAILED  BUSY  SKIPPED  REASONS
    gpu01  8     7   1       0     0        extra_gpus_seen
    gpu02  4     4   0       0     0        -
leftovers:
  description: IDs of jobs that killed runs had left behind and that were purged, or in check mode would be.
  type: list
  elements: str
  returned: always, once Nomad answered
  sample: []
waited_s:
  description: Seconds that the proof took.
  type: float
  returned: always, once Nomad answered
  sample: 12.4
"""

import dataclasses
import platform
import secrets
import time
from collections.abc import Mapping
from typing import Any, NoReturn

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpufarm.core.plugins.module_utils import (
    gpu_proof,
    gpu_verdicts,
    nomad,
    nomad_jobs,
    nomad_options,
    signals,
)
from ansible_collections.gpufarm.core.plugins.module_utils.problem import Problem

DEFAULTS = nomad_jobs.Settings()


def argument_spec() -> dict[str, Any]:
    return {
        **nomad_options.argument_spec(),
        "nodes": {"type": "list", "elements": "str"},
        "sample": {"type": "int"},
        "level": {"type": "str", "choices": list(gpu_proof.LEVELS), "default": DEFAULTS.level},
        "driver": {"type": "str", "choices": list(nomad_jobs.DRIVERS), "default": DEFAULTS.driver},
        "image": {"type": "str"},
        "priority": {"type": "int", "default": DEFAULTS.priority},
        "cpu_mhz": {"type": "int", "default": DEFAULTS.cpu_mhz},
        "memory_mib": {"type": "int"},
        "timeout": {"type": "int", "default": DEFAULTS.timeout},
        "parallel": {"type": "int", "default": DEFAULTS.parallel},
        "skip_busy": {"type": "bool", "default": DEFAULTS.skip_busy},
    }


def read_settings(params: Mapping[str, Any]) -> nomad_jobs.Settings:
    """The options that say how jobs run, checked."""
    limits = {
        "sample": (1, None),
        "priority": (1, nomad_jobs.PRIORITY_MAX),
        "cpu_mhz": (1, None),
        "memory_mib": (10, None),
        "timeout": (1, None),
        "parallel": (1, None),
    }
    for option, (least, most) in limits.items():
        value = params[option]
        if value is not None and (value < least or (most is not None and value > most)):
            raise nomad.NomadError(
                found=f"the option '{option}' is {value}",
                expected=f"at least {least}" if most is None else f"{least} to {most}",
                next_step=f"correct '{option}'",
            )
    if params["nodes"] == []:
        raise nomad.NomadError(
            found="the option 'nodes' is empty, so nothing would be proven",
            expected="at least one node",
            next_step="name the nodes to prove, or leave 'nodes' out to prove all",
        )
    if params["driver"] == "docker" and params["image"] == "":
        raise nomad.NomadError(
            found="the option 'image' is empty",
            expected="the name of an image with its version, because the driver is docker",
            next_step="correct 'image', or leave it out",
        )
    return nomad_jobs.Settings(**{field.name: params[field.name] for field in dataclasses.fields(nomad_jobs.Settings)})


@dataclasses.dataclass(frozen=True)
class Proof:
    """What one run found out."""

    results: list[nomad_jobs.JobResult]
    problems: list[Problem]
    leftovers: list[str]
    warnings: list[str]


def prove(client: nomad.Client, params: Mapping[str, Any], check_mode: bool) -> Proof:
    settings = read_settings(params)
    run = nomad_jobs.Run(client, settings, secrets.token_hex(4), time.monotonic() + settings.timeout)
    answer = client.items("/v1/nodes", {"resources": "true"})
    selected, problems = nomad_jobs.select_nodes(answer.items, params["nodes"])
    if not selected and not problems:
        raise nomad.NomadError(
            found="Nomad has no ready node with GPUs, so nothing would be proven",
            expected="at least one",
            next_step="check 'nomad node status' and the device plugin on the nodes",
        )
    leftovers, warnings = nomad_jobs.purge_leftovers(client, time.time(), check_mode)
    held = nomad_jobs.held_devices(client) if selected else {}
    results: dict[nomad_jobs.Pin, nomad_jobs.JobResult] = {}
    work = []
    for node in selected:
        pins = nomad_jobs.pins_of(node)
        sick = {gpu["uuid"]: gpu for gpu in node["gpus"] if not gpu["healthy"]}
        closed = nomad_jobs.closed_to_work(node)
        taken = nomad_jobs.take_sample(
            pins, params["sample"], lambda pin: (pin.node_id, pin.uuid) in held, secrets.SystemRandom().sample
        )
        to_run = []
        for pin in pins:
            holder = held.get((pin.node_id, pin.uuid))
            # Kept in Nomad's order, whatever comes of it.
            results[pin] = nomad_jobs.result_of(pin, None)
            if pin not in taken:
                results[pin] = nomad_jobs.skipped(
                    pin, "not_sampled", "that it is not part of the sample", "run without 'sample'"
                )
            elif closed and params["nodes"] is None:
                results[pin] = nomad_jobs.skipped(
                    pin, "node_closed", f"that {closed}", "name the node in 'nodes' to insist"
                )
            elif closed:
                results[pin] = nomad_jobs.result_of(pin, nomad_jobs.closed_finding(node, f"that {closed}"))
            elif pin.uuid in sick:
                results[pin] = nomad_jobs.result_of(pin, nomad_jobs.unhealthy_finding(sick[pin.uuid]))
            elif holder:
                verdict = "busy" if settings.skip_busy else "failed"
                results[pin] = nomad_jobs.result_of(pin, nomad_jobs.busy_finding(holder), verdict)
            elif check_mode:
                results[pin] = nomad_jobs.skipped(
                    pin, "check_mode", "check mode, so no job ran", "run without check mode"
                )
            else:
                to_run.append(pin)
        if to_run:
            work.append((node, to_run))
    try:
        results.update(nomad_jobs.prove(run, work))
    except nomad.NomadError as error:
        _refused(error, run.left, params["namespace"])
    everything = list(results.values())
    return Proof(
        everything, [*problems, *gpu_proof.problems_of(everything), *run.unproven, *run.left], leftovers, warnings
    )


def _refused(error: nomad.NomadError, left: list[Problem], namespace: str | None) -> NoReturn:
    """What ended the whole run, and which jobs that left behind."""
    if error.status == 403:
        error = nomad.NomadError(
            found=error.found,
            expected="a token that may run jobs and read them",
            next_step="set 'token' or NOMAD_TOKEN to one whose policy has submit-job, read-job, list-jobs and "
            f'read-logs in namespace {namespace or "default"}, and node {{ policy = "read" }}',
            status=403,
        )
    if not left:
        raise error
    raise nomad.NomadError(
        found=f"{error.found}, and {len(left)} job{' is' if len(left) == 1 else 's are'} left",
        expected="a proof that purges its jobs",
        next_step=" ".join(
            [str(error), *(problem.message for problem in left[: gpu_verdicts.MESSAGE_PROBLEMS])]
        ).rstrip("."),
    ) from error


def told(result: nomad_jobs.JobResult) -> dict[str, Any]:
    """A result as it is returned; found and expected are in the problems."""
    values = dataclasses.asdict(result)
    del values["expected"], values["found"]
    return values


def result_of(proof: Proof, waited: float) -> dict[str, Any]:
    return {
        "changed": bool(proof.leftovers),
        "gpus": [told(result) for result in proof.results],
        "problems": [dataclasses.asdict(problem) for problem in proof.problems],
        "counts": gpu_proof.counts(proof.results),
        "table": gpu_proof.table(proof.results, proof.problems),
        "leftovers": proof.leftovers,
        "waited_s": round(waited, 1),
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec=argument_spec(),
        required_together=nomad_options.REQUIRED_TOGETHER,
        supports_check_mode=True,
    )
    # An end from outside must unwind too, so that no job is left.
    signals.unwind()
    started = time.monotonic()
    try:
        client = nomad.Client(nomad_options.connection_of(module.params))
        proof = prove(client, module.params, module.check_mode)
    except nomad.NomadError as error:
        module.fail_json(msg=f"{platform.node()}: {error}")
    waited = time.monotonic() - started
    for warning in proof.warnings:
        module.warn(f"{platform.node()}: {warning}")
    result = result_of(proof, waited)
    if proof.problems:
        module.fail_json(msg=f"{platform.node()}: {gpu_proof.message(proof.results, proof.problems, waited)}", **result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
