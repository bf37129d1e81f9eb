#!/usr/bin/python
# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: kubernetes_gpu_job_verify
short_description: Prove by a pod that Kubernetes hands out every GPU
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - Runs a pod on every free GPU of every node, or on a sample, and looks at what each sees. So the whole way is proven
    that a user's pod takes, from the scheduler through the device plugin, the kubelet and the container engine with its
    toolkit to the driver.
  - A pod cannot ask Kubernetes for a certain GPU. So a node gets as many pods at once as it has free GPUs of each kind,
    each with one, and none ends before all have spoken. Each must see one GPU, no two the same, and together they have
    seen all. With O(expected) the UUIDs are compared with those that nvidia-smi lists on the node.
  - The pods run C(nvidia-smi -L) as a user without rights, so they fit the strictest of Kubernetes' pod security
    standards, and tolerate the taint C(nvidia.com/gpu).
  - With O(level=start) and O(level=quick) each then has its GPU compute by the program of
    M(gpufarm.core.nvidia_gpu_benchmark), and the answer is judged by what the card itself says that it can do. A GPU
    that does not start, hangs, computes wrongly or is too slow has failed.
  - MIG devices are proven as the resources that they are in Kubernetes.
  - Its pods are always removed, also after an error and when the time is over.
extends_documentation_fragment:
  - gpufarm.core.kubernetes
  - gpufarm.core.kubernetes.actiongroup_kubernetes
attributes:
  check_mode:
    support: full
    description: Creates and removes nothing. Every GPU on which a pod would run is returned as V(skipped).
  diff_mode:
    support: none
    description: The cluster is as it was before.
  idempotent:
    support: full
    description: >-
      Leaves the cluster as it was, apart from events that Kubernetes keeps for a while, and is therefore not a change.
      Removing what a killed run left behind is one.
options:
  nodes:
    description:
      - Names of the nodes to prove. A node of the list that is not there, not ready, without GPUs that pods can get,
        or cordoned is a problem. An empty list is an error, because a proof of nothing proves nothing.
      - If not set, these are the nodes of O(expected) and all others with GPUs, of which there must be one. One that is
        not ready, or of whose GPUs pods can get only some, is a problem then too. Those others that are cordoned are
        skipped.
    type: list
    elements: str
  expected:
    description:
      - What nvidia-smi lists on the nodes, as P(gpufarm.core.kubernetes_expected#filter) makes it of facts and as
        M(gpufarm.core.kubernetes_gpu_verify) takes it. Only C(uuids) and C(mig_unknown) matter here.
      - Its nodes count as named where O(nodes) is not set. Otherwise those that are not in O(nodes) are left alone.
    type: list
    elements: dict
    default: []
    suboptions:
      node:
        description:
          - Name of the node in Kubernetes.
        type: str
        required: true
      uuids:
        description:
          - UUIDs of its GPUs and MIG devices.
        type: list
        elements: str
      count:
        description:
          - Not compared here.
        type: int
      models:
        description:
          - Not compared here.
        type: raw
      memory_mib_min:
        description:
          - Not compared here.
        type: int
      driver_version:
        description:
          - Not compared here.
        type: str
      mig:
        description:
          - Not compared here.
        type: bool
      mig_profiles:
        description:
          - Not compared here.
        type: dict
      mig_unknown:
        description:
          - UUIDs of GPUs in MIG mode whose MIG devices nobody tells. Where there is one, a pod may see it, or a
            MIG device that is not in C(uuids).
        type: list
        elements: str
  sample:
    description:
      - Number of GPUs of each node on which a pod runs, free ones first. Which they are is the device plugin's choice.
      - If not set, all of them.
    type: int
  level:
    description:
      - What the pod does. V(list) lists GPUs, and its GPU computes nothing.
      - V(start) also starts a context on its GPU, writes 64 MiB (or four times the cache, if that is more) and reads
        each word again, in half a second.
      - V(quick) takes all figures and checks each result, and tests half of the free memory, in two seconds.
      - Copies to and from the host are told and not judged, because the pods of a node share its links. So are clocks
        and the bandwidth of MIG devices.
      - A GPU that is shared by time slices or MPS is only listed, as with V(list), because others compute there and
        have its memory.
    type: str
    choices: [list, start, quick]
    default: list
  namespace:
    description:
      - Namespace of the pods.
    type: str
    default: default
  image:
    description:
      - Image of the pods. Any that has a C library and C(/bin/sh); the container toolkit brings C(nvidia-smi) and the
        driver's C(libcuda.so.1). For O(level=start) and O(level=quick) it needs C(python3), 3.8 or newer, and nothing
        of CUDA.
      - Name a version, so that a node that has it pulls nothing.
      - If not set, C(docker.io/nvidia/cuda:12.8.1-base-ubuntu24.04), and
        C(docker.io/library/python:3.13.7-slim-bookworm) for O(level=start) and O(level=quick).
    type: str
  runtime_class:
    description:
      - RuntimeClass of the pods, mostly V(nvidia). If not set, the container engine's default runtime, which fits where
        that is NVIDIA's or the device plugin hands out devices by CDI.
    type: str
  priority_class:
    description:
      - PriorityClass of the pods. Name one with C(preemptionPolicy=Never) where pods of lower priority than the
        default run, because Kubernetes may remove such pods to make room for those of the proof. Only free GPUs are
        asked for, but one may be taken meanwhile, and processors and memory may be scarce.
      - Needed where the user may not C(list) pods in all namespaces, as it is not known then which GPUs are free.
    type: str
  memory_mib:
    description:
      - Memory of each pod in MiB, requested and at most. If not set, 256, and 1024 for O(level=start) and
        O(level=quick), of which 64 are pinned for copies.
    type: int
  tolerations:
    description:
      - Tolerations of the pods, as Kubernetes has them.
    type: list
    elements: dict
    default: [{key: nvidia.com/gpu, operator: Exists}]
  timeout:
    description:
      - Seconds for the whole proof, however many nodes there are. Where a pod has no verdict then, its GPU has failed
        with the code C(timeout). GPUs of nodes on which no pod has begun by then are V(skipped), and each such node is
        a problem with the code C(not_begun).
    type: int
    default: 600
  parallel:
    description:
      - Number of nodes whose pods run at once. The apiserver is asked for all of these pods once a second, which with
        O(level=start) and O(level=quick) are some 30 KB each.
    type: int
    default: 50
  skip_busy:
    description:
      - Whether a GPU that another pod holds, or for whose pod the node has no room, is reported as V(busy). With
        V(false) it has failed.
      - The proof itself stops nothing that is not its own. Kubernetes may, see O(priority_class).
    type: bool
    default: true
notes:
  - "The codes of GPUs that failed are: C(not_placed), Kubernetes took or placed no pod, and its own reason is told;
    C(task_failed), the pod did not start or did not end well; C(wrong_gpu), two pods saw the same GPU, or one saw a GPU
    that the node does not have; C(gpu_not_seen), the pod saw no GPU, or no pod was given this one; C(extra_gpus_seen),
    the pod saw more than one; C(mig_empty), the GPU's MIG mode is on and it has no MIG device; C(gpu_unhealthy), the
    GPU was lost before its pod had a place; C(timeout), there was no verdict in time; C(log_unreadable), the log of the
    pod could not be read; C(no_python), there is no C(python3); C(no_answer), the program that measures did not get
    that far, or said nothing that tells what its GPU did."
  - "Those of GPUs that did not do what they should are the codes of M(gpufarm.core.nvidia_gpu_benchmark): C(no_cuda),
    C(context_failed), C(hung), C(crashed), C(failed), C(memory_errors), C(wrong_results), C(slow_memory), C(slow_fp32)
    and C(slow_tensor). If there are several, the code is the worst's, and all are told. C(wrong_gpu) comes before
    them."
  - The program comes with each pod, packed, in its environment. Each of its steps may take a fourth of O(timeout), 60
    seconds at most.
  - "The codes of GPUs that are V(busy) are: C(gpu_busy), another pod holds the GPU; C(node_full), the node has no room
    for the pod."
  - "The codes of GPUs that are V(skipped) are: C(not_sampled), O(sample) left it out; C(node_closed), the node is
    cordoned, perhaps only since the proof began, and was not named; C(not_begun), the time was over before;
    C(check_mode), a pod would have run."
  - "The codes of nodes are: C(node_missing), no node has this name; C(node_down), it is not ready; C(no_devices), pods
    can get not one of its GPUs; C(gpu_unhealthy), they cannot get all; C(gpu_not_seen), as above; C(not_begun), the
    time was over before a pod ran there; C(job_left), a pod could not be removed."
  - The user of the kubeconfig needs the right to C(list) nodes, and in the namespace to C(create), C(list), C(delete)
    and C(deletecollection) pods and to C(get) C(pods/log). With that to C(list) pods in all namespaces it is known
    beforehand which GPUs are free, without it O(priority_class) is needed. With that to C(list) events more causes can
    be told.
  - The names of its pods begin with C(gpufarm-verify-). Where a run was killed, those that have started end by
    themselves a minute after O(timeout). One that waits for a place goes on waiting, and ends as soon as it starts. The
    next run in the same O(namespace) removes them all, once that minute is over.
  - Where GPUs are shared by time slices or MPS, several pods may see the same. Whether they are is told by labels and
    names, as RV(gpufarm.core.kubernetes_gpu_info#module:nodes[].resources[].shared) has it. Where no label
    tells it, they may be if a node has a multiple of O(expected[].uuids).
  - Under WSL a pod sees all GPUs. With several it is not known which is its own, unless E(NVIDIA_VISIBLE_DEVICES) says
    so there, and then none computes (C(no_answer)).
seealso:
  - module: gpufarm.core.kubernetes_gpu_verify
  - module: gpufarm.core.kubernetes_gpu_info
  - module: gpufarm.core.nomad_gpu_job_verify
"""

EXAMPLES = r"""
- name: A pod on every GPU sees one, and all are seen
  gpufarm.core.kubernetes_gpu_job_verify:
    kubeconfig: ~/.kube/farm.conf
    runtime_class: nvidia
  delegate_to: localhost
  run_once: true

- name: One GPU of each of these nodes, with an image of one's own
  gpufarm.core.kubernetes_gpu_job_verify:
    nodes: [gpu01, gpu02]
    sample: 1
    namespace: gpu-tests
    image: images.example.com/cuda:12.8.1-base
    timeout: 300
  delegate_to: localhost
  run_once: true

- name: Every GPU computes, and as fast as it should
  gpufarm.core.kubernetes_gpu_job_verify:
    level: quick
    runtime_class: nvidia
  delegate_to: localhost
  run_once: true

- name: The GPUs of a node are those that nvidia-smi lists there
  gpufarm.core.kubernetes_gpu_job_verify:
    nodes: ["{{ inventory_hostname }}"]
    expected:
      - "{{ ansible_facts.nvidia_smi | gpufarm.core.kubernetes_expected(inventory_hostname) }}"
  delegate_to: localhost
"""

RETURN = r"""
gpus:
  description: The verdict on every GPU of the nodes, by node and kind.
  type: list
  elements: dict
  returned: always, once Kubernetes answered
  contains:
    node:
      description: Name of the node.
      type: str
      sample: gpu01
    resource:
      description: Kind of GPU, as pods ask for it.
      type: str
      sample: nvidia.com/gpu
    model:
      description: Model of the node's GPUs in the form of GPU feature discovery; null where it does not run.
      type: str
      sample: NVIDIA-H100-80GB-HBM3
    uuid:
      description: UUID of the GPU or MIG device that the pod had; null where that is not known, or where none ran.
      type: str
      sample: GPU-4404041a-04cf-1ccf-9e70-f139a9b1e23c
    verdict:
      description: V(ok), V(failed), V(busy) or V(skipped).
      type: str
      sample: ok
    code:
      description: One of the codes in the notes; null when the verdict is V(ok).
      type: str
      sample: null
    seen:
      description: UUIDs that the pod saw; null when it could not say.
      type: list
      elements: str
      sample: [GPU-4404041a-04cf-1ccf-9e70-f139a9b1e23c]
    isolated:
      description:
        - V(true) when the pod saw one GPU alone. V(false) when it saw others too, and always under WSL, where nothing
          separates GPUs. Null when it saw none.
      type: bool
      sample: true
    pod:
      description: Name of the pod; null when none ran.
      type: str
      sample: gpufarm-verify-4be1c9a2-0
    duration_s:
      description: Seconds from the creation of the pod to the verdict; null when none ran.
      type: float
      sample: 2.9
    benchmark:
      description: >-
        What the GPU did, as RV(gpufarm.core.nomad_gpu_job_verify#module:gpus[].benchmark) has it. Null with
        O(level=list), where the GPU is shared, and where there is no answer.
      type: dict
      sample: null
    message:
      description: Node, found, expected and the next step; null when the verdict is V(ok).
      type: str
      sample: null
problems:
  description: What failed, by GPU and by node.
  type: list
  elements: dict
  returned: always, once Kubernetes answered
  contains:
    node:
      description: Name of the node.
      type: str
      sample: gpu01
    uuid:
      description: UUID of the GPU; null when the problem is the node's, or when it is not known.
      type: str
      sample: null
    code:
      description: One of the codes in the notes.
      type: str
      sample: gpu_not_seen
    expected:
      description: What was expected, for people.
      type: str
      sample: one nvidia.com/gpu
    found:
      description: What was found, for people.
      type: str
      sample: no GPU that nvidia-smi lists in the container
    message:
      description: Node, found, expected and the next step.
      type: str
      sample: >-
        Node gpu01: found no GPU that nvidia-smi lists in the container. Expected: one nvidia.com/gpu. Next step: set
        runtime_class if NVIDIA's runtime is not the engine's default, then check the container toolkit's mode and its
        CDI specification on the node.
counts:
  description: Number of GPUs by verdict.
  type: dict
  returned: always, once Kubernetes answered
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
      description: Number of GPUs on which no pod was to run.
      type: int
      sample: 0
table:
  description: The verdicts by node as text in columns, failed nodes first. With O(level=quick) also the lowest share,
    in percent, that a GPU of the node reached of what it can do.
  type: str
  returned: always, once Kubernetes answered
  sample: |-
    NODE   GPUS  OK  FAILED  BUSY  SKIPPED  REASONS
    gpu01  8     7   1       0     0        gpu_not_seen
    gpu02  4     4   0       0     0        -
leftovers:
  description: Names of pods that killed runs had left behind and that were removed, or in check mode would be.
  type: list
  elements: str
  returned: always, once Kubernetes answered
  sample: []
waited_s:
  description: Seconds that the proof took.
  type: float
  returned: always, once Kubernetes answered
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
    kubernetes,
    kubernetes_options,
    kubernetes_pods,
    signals,
)
from ansible_collections.gpufarm.core.plugins.module_utils.kubernetes_pods.judging import judge_together
from ansible_collections.gpufarm.core.plugins.module_utils.problem import Problem

NOT_TOLD = ("expected", "found", "ended")

DEFAULTS = kubernetes_pods.Settings()


def argument_spec() -> dict[str, Any]:
    expected = {key: value for key, value in gpu_verdicts.EXPECTED.items() if key != "required"}
    return {
        **kubernetes_options.argument_spec(),
        "nodes": {"type": "list", "elements": "str"},
        "expected": {**expected, "default": []},
        "sample": {"type": "int"},
        "level": {"type": "str", "choices": list(gpu_proof.LEVELS), "default": DEFAULTS.level},
        "namespace": {"type": "str", "default": DEFAULTS.namespace},
        "image": {"type": "str"},
        "runtime_class": {"type": "str"},
        "priority_class": {"type": "str"},
        "memory_mib": {"type": "int"},
        "tolerations": {"type": "list", "elements": "dict", "default": list(DEFAULTS.tolerations)},
        "timeout": {"type": "int", "default": DEFAULTS.timeout},
        "parallel": {"type": "int", "default": DEFAULTS.parallel},
        "skip_busy": {"type": "bool", "default": DEFAULTS.skip_busy},
    }


def read_settings(params: Mapping[str, Any]) -> kubernetes_pods.Settings:
    """The options that say how pods run, checked."""
    for option, least in {"sample": 1, "memory_mib": 10, "timeout": 1, "parallel": 1}.items():
        value = params[option]
        if value is not None and value < least:
            raise kubernetes.KubernetesError(
                f"the option '{option}' is {value}", f"at least {least}", f"correct '{option}'"
            )
    for option in ("namespace", "image"):
        if params[option] == "":
            raise kubernetes.KubernetesError(f"the option '{option}' is empty", "a name", f"correct '{option}'")
    if params["nodes"] == []:
        raise kubernetes.KubernetesError(
            "the option 'nodes' is empty, so nothing would be proven",
            "at least one node",
            "name the nodes to prove, or leave 'nodes' out to prove all",
        )
    names = [field.name for field in dataclasses.fields(kubernetes_pods.Settings)]
    return kubernetes_pods.Settings(**{name: params[name] for name in names})


@dataclasses.dataclass(frozen=True)
class Proof:
    """What one run found out."""

    results: list[kubernetes_pods.PodResult]
    problems: list[Problem]
    leftovers: list[str]
    warnings: list[str]


def uses_of(
    client: kubernetes.Client, nodes: list[kubernetes.Node], priority_class: str | None
) -> tuple[dict[str, Any], list[str]]:
    """What pods hold on these nodes; nothing where the user may not see it, as then the scheduler says it."""
    try:
        return dict(kubernetes.read_uses(client, [node["name"] for node in nodes])), []
    except kubernetes.KubernetesError as error:
        if error.reason != "Forbidden":
            raise
        if not priority_class:
            # The scheduler would make room for a pod on a GPU that is not free.
            raise kubernetes.KubernetesError(
                f"it is not known which GPUs are free ({error.found}), and without 'priority_class' pods of lower "
                "priority could be removed for this proof",
                "the right to list pods in all namespaces, or a PriorityClass that preempts nobody",
                "give the user that right, or set 'priority_class' to one with preemptionPolicy=Never",
            ) from error
        return {}, [f"it is not known which GPUs are free: {error}"]


def prove(client: kubernetes.Client, params: Mapping[str, Any], check_mode: bool) -> Proof:
    settings = read_settings(params)
    deadline = time.monotonic() + settings.timeout
    run = kubernetes_pods.Run(client, settings, secrets.token_hex(4), deadline)
    own = {item["node"]: item["uuids"] or [] for item in params["expected"]}
    named = list(own) if params["nodes"] is None else params["nodes"]
    selected, problems = kubernetes_pods.select_nodes(
        kubernetes.read_nodes(client), named, others=params["nodes"] is None
    )
    if not selected and not problems:
        raise kubernetes.KubernetesError(
            "Kubernetes has no ready node with GPUs, so nothing would be proven",
            "at least one",
            "check 'kubectl get nodes' and the device plugin's pods",
        )
    uses, warnings = uses_of(client, selected, settings.priority_class)
    leftovers, failed = kubernetes_pods.remove_leftovers(client, settings, time.time(), check_mode)
    warnings += [f"pod {name} of a killed run could not be removed: {error.found}" for name, error in failed.items()]
    results: dict[kubernetes_pods.Slot, kubernetes_pods.PodResult | None] = {}
    work = []
    for node in selected:
        name = node["name"]
        planned = kubernetes_pods.plan(
            node, uses.get(name, []), settings, own=len(own.get(name, [])), named=name in named, check_mode=check_mode
        )
        # Kept in Kubernetes' order, whatever comes of it.
        results.update(planned)
        to_run = [slot for slot, known in planned if known is None]
        if to_run:
            work.append(to_run)
    try:
        results.update(kubernetes_pods.prove(run, work))
    except kubernetes.KubernetesError as error:
        _refused(error, run.left)
    found = {slot: result for slot, result in results.items() if result is not None}
    unknown = {item["node"]: {uuid.lower() for uuid in item["mig_unknown"] or ()} for item in params["expected"]}
    judged, more = judge_together(found, own, unknown)
    everything = list(judged.values())
    problems += [*gpu_proof.problems_of(everything), *more, *run.unproven, *run.left]
    # An empty UUID is one that nobody knows.
    return Proof(
        everything, [dataclasses.replace(each, uuid=each.uuid or None) for each in problems], leftovers, warnings
    )


def _refused(error: kubernetes.KubernetesError, left: list[Problem]) -> NoReturn:
    """What ended the whole run, and which pods that left behind."""
    if not left:
        raise error
    raise kubernetes.KubernetesError(
        f"{error.found}, and {len(left)} pod{' is' if len(left) == 1 else 's are'} left",
        "a proof that removes its pods",
        " ".join([str(error), *(problem.message for problem in left[: gpu_verdicts.MESSAGE_PROBLEMS])]).rstrip("."),
    ) from error


def told(result: kubernetes_pods.PodResult) -> dict[str, Any]:
    """A result as it is returned; found and expected are in the problems."""
    values = {name: value for name, value in dataclasses.asdict(result).items() if name not in NOT_TOLD}
    return {**values, "uuid": result.uuid or None, "model": result.model or None}


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
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    signals.unwind()
    started = time.monotonic()
    try:
        client = kubernetes.Client(kubernetes_options.connection_of(module.params))
        proof = prove(client, module.params, module.check_mode)
    except kubernetes.KubernetesError as error:
        module.fail_json(msg=f"{platform.node()}: {error}")
    waited = time.monotonic() - started
    for warning in proof.warnings:
        module.warn(f"{platform.node()}: {warning}")
    result = result_of(proof, waited)
    if proof.problems:
        text = gpu_proof.message(proof.results, proof.problems, waited)
        module.fail_json(msg=f"{platform.node()}: {text}", **result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
