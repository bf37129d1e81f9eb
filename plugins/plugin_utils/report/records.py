# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The document of the report, schema 1. Times are ISO 8601 in UTC; None is what nobody told."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

from ansible_collections.gpufarm.core.plugins.module_utils import nomad
from ansible_collections.gpufarm.core.plugins.module_utils.health import problems as health
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi.facts import Process

SCHEMA = 1
VERDICTS = ("critical", "unknown", "warning", "ok")
"""From what needs a look first to what needs none."""


class Notice(TypedDict):
    """What could not be asked or used."""

    found: str
    expected: str
    action: str


def notice(found: str, expected: str, action: str = "correct the variable and make the report again") -> Notice:
    return {"found": found, "expected": expected, "action": action}


class BenchmarkBefore(TypedDict):
    """What one acceptance says of a GPU."""

    date: str
    # start, quick or full.
    level: str
    # Of the GPU, ok or failed; a problem of no single GPU is one of each.
    verdict: str
    # Whether its node was accepted.
    accepted: bool
    # As nvidia_gpu_acceptance records them.
    figures: dict[str, float | None]


class Benchmark(BenchmarkBefore):
    """The newest one."""

    node: str
    # Each with code and found.
    outliers: list[dict[str, str]]
    # Earlier ones, the newest first.
    before: list[BenchmarkBefore]


class MigDevice(TypedDict):
    uuid: str | None
    profile: str | None
    # That of its GPU instance, which compute instances of the same one share.
    memory_total_mib: int | None
    gpu_instance_id: int | None
    # As that of a GPU.
    hidden: bool | None
    allocation: dict[str, Any] | None
    # None where no acceptance is known.
    benchmark: Benchmark | None


class Gpu(TypedDict):
    index: int | None
    uuid: str | None
    serial: str | None
    model: str | None
    pci_bus_id: str | None
    # nvidia-smi, or nomad for what Nomad last knew of a host that gave no answer.
    source: str
    verdict: str
    memory_total_mib: int | None
    memory_used_mib: int | None
    utilization_gpu_percent: int | None
    power_draw_w: float | None
    power_limit_w: float | None
    temperature_gpu_c: int | None
    vbios_version: str | None
    gsp_firmware_version: str | None
    nomad_driver_version: str | None
    mig_mode: str | None
    mig_mode_pending: str | None
    # The next three are None without Nomad. A hidden GPU is one that Nomad does not have on purpose; it has no share,
    # others one from 0 to 1; of a divided GPU it is what is held of its MIG devices, without the hidden.
    in_nomad: bool | None
    hidden: bool | None
    allocated_share: float | None
    allocations: list[dict[str, Any]]
    # None where they cannot be seen.
    processes: list[Process] | None
    numa_node: int | None
    # CPUs of processes that may run on none of those next to the GPU.
    far_cpus: list[str]
    mig_devices: list[MigDevice]
    # None where no acceptance is known.
    benchmark: Benchmark | None


class Problem(health.Problem):
    # node, nomad or kubernetes.
    source: str


class NodeInNomad(TypedDict):
    id: str
    status: str
    eligibility: str
    drain: bool
    datacenter: str
    node_pool: str | None
    version: str | None
    # Why the gate closed it.
    reason: str | None


class PodUse(TypedDict):
    """A pod that holds GPUs; Kubernetes does not tell which."""

    node: str
    namespace: str
    pod: str
    phase: str
    # Its kinds together, each MIG device as one.
    gpus: int


class NodeInKubernetes(TypedDict):
    name: str
    # ready, not ready or unknown.
    status: str
    schedulable: bool
    # Why the gate or a maintenance cordoned it.
    reason: str | None
    version: str | None
    # GPUs and MIG devices, each as often as it is offered, and those of them that pods hold.
    devices_allocatable: int
    devices_used: int
    # The GPUs that pods hold; None where some are MIG devices or shared.
    gpus_used: int | None


class NodeSums(TypedDict):
    utilization_percent: float | None
    power_draw_w: float | None
    allocated_gpus: float | None


class Node(NodeSums):
    """Sick ones come first."""

    name: str
    nomad_name: str
    # Nomad's; None of a node of Kubernetes alone.
    region: str | None
    asked_at: str | None
    # answered, unreachable, failed, not_asked or not_in_inventory.
    state: str
    reason: str | None
    verdict: str
    platform: str | None
    driver_version: str | None
    cuda_version: str | None
    gpus_expected: int | None
    nomad: NodeInNomad | None
    # Whether the inventory has it in kubernetes_nodes, and how it is there as far as anybody tells.
    in_kubernetes: bool
    kubernetes: NodeInKubernetes | None
    problems: list[Problem]
    gpus: list[Gpu]


class Summary(TypedDict):
    nodes: int
    nodes_answered: int
    nodes_unanswered: int
    gpus: int
    # Without those that are hidden from Nomad and are not in Kubernetes.
    allocatable_gpus: int
    # None when no host says it.
    gpus_expected: int | None
    gpus_expected_nodes: int
    verdicts: dict[str, int]
    node_verdicts: dict[str, int]
    mig_devices: int
    # In Nomad. MIG devices count as the share of their GPU; None without Nomad.
    allocated_gpus: float | None
    # What pods of Kubernetes hold on the nodes that answered; None without an answer of Kubernetes, and where some is a
    # MIG device or a shared GPU.
    pod_gpus: int | None
    # The mean, of so many GPUs that told it; power is a sum.
    utilization_percent: float | None
    utilization_gpus: int
    power_draw_w: float | None
    power_gpus: int
    memory_used_mib: float | None
    memory_total_mib: float | None


class NomadRegion(TypedDict):
    region: str
    # The server that answered for it; None where none did.
    server: str | None
    asked_at: str | None


class AgentCertificate(TypedDict):
    host: str
    # Null where it is the one with which the agent runs.
    path: str | None
    not_after: str
    days_left: int
    # ok, ends_soon or expired.
    state: str


class NomadAnswer(TypedDict):
    # Whether a server of each region answered.
    answered: bool
    regions: list[NomadRegion]
    # Each with server, region and reason.
    failures: list[dict[str, str]]
    # Of each agent that has told any, the one that ends first; those that end first come first.
    certificates: list[AgentCertificate]


class KubernetesAnswer(TypedDict):
    answered: bool
    # The host that asked the cluster.
    host: str
    asked_at: str | None


class DriftValue(TypedDict):
    value: str
    gpus: int
    nodes: list[str]


class DriftField(TypedDict):
    field: str
    agrees: bool
    majority: str | None
    # The majority first.
    values: list[DriftValue]
    unknown_gpus: int


class Drift(TypedDict):
    """Versions of one platform and model."""

    platform: str
    model: str
    gpus: int
    nodes: int
    fields: list[DriftField]


class MigGpu(TypedDict):
    node: str
    index: int | None
    model: str | None
    mode: str | None
    pending: str | None
    devices: list[MigDevice]


class MigProfile(TypedDict):
    model: str
    profile: str
    devices: int
    # None without Nomad.
    allocated: int | None


class Mig(TypedDict):
    gpus: list[MigGpu]
    profiles: list[MigProfile]


class JobUse(TypedDict):
    region: str | None
    namespace: str
    job_id: str
    devices: int
    # Shares added up.
    gpus: float
    models: list[str]
    nodes: list[str]
    allocations: int
    # The next two are of whole GPUs.
    utilization_percent: float | None
    power_draw_w: float | None


class ProgramUse(TypedDict):
    """Processes that compute alone, on GPUs that no allocation holds; the server of MPS is none."""

    program: str
    gpus: int
    memory_used_mib: float | None
    nodes: list[str]


class NamespaceUse(nomad.NamespaceUse):
    # Nomad's.
    region: str


class Users(TypedDict):
    # Those that a budget or a job has. Empty without Nomad.
    namespaces: list[NamespaceUse]
    jobs: list[JobUse]
    pods: list[PodUse]
    # Left out are nodes on which pods hold GPUs, or may hold some.
    outside: list[ProgramUse]


# Money is in the document's currency. A return is throughput x productivity / cost per hour; utilized GPUs are
# utilisation added up, of so many GPUs that told it; idle is what no job holds of those that are not hidden from Nomad
# (allocatable), unused what did not compute. The return of what is allocated is that of these GPUs' money, too.
CostTotal = TypedDict(
    "CostTotal",
    {
        "gpus": int,
        "gpus_critical": int,
        "throughput": "float | None",
        "cost_per_hour": "float | None",
        "return": "float | None",
        "allocatable_gpus": "float | None",
        "allocated_gpus": "float | None",
        "utilized_gpus": "float | None",
        "utilization_gpus": int,
        "idle_cost_per_hour": "float | None",
        "unused_cost_per_hour": "float | None",
        "return_allocated": "float | None",
        "return_utilized": "float | None",
    },
)


class CostRow(CostTotal):  # pylint: disable=inherit-non-class  # made by a call, for a key that is a keyword
    """The same of one model."""

    model: str
    relative_throughput: float | None
    price_per_hour: float | None


class Cost(TypedDict):
    models: list[CostRow]
    # Over the models that have both numbers.
    total: CostTotal | None
    # Names of models without them, and names that the user gave and no GPU has.
    unpriced: list[str]
    unmatched: list[str]


class Sums(TypedDict):
    gpus: int
    utilization_sum_percent: float
    utilization_gpus: int
    power_draw_w: float
    power_gpus: int


class HistoryLine(Sums):
    """A line of the history, a file of JSON lines, the newest last; old ones lose their nodes as the file grows."""

    made_at: str
    allocated_gpus: float | None
    nodes: NotRequired[dict[str, Sums]]


class Point(TypedDict):
    made_at: str
    gpus: int
    utilization_percent: float | None
    power_draw_w: float | None
    allocated_gpus: float | None


class History(TypedDict):
    path: str | None
    points: list[Point]


class Acceptances(TypedDict):
    path: str | None
    # Why it or a part of it could not be read. Nobody knows then whether a GPU without benchmark was accepted.
    unread: str | None


class Document(TypedDict):
    schema: int
    title: str
    made_at: str
    currency: str
    productivity: float
    summary: Summary
    nomad: NomadAnswer
    # None where the inventory has no nodes of Kubernetes.
    kubernetes: KubernetesAnswer | None
    notices: list[Notice]
    nodes: list[Node]
    drift: list[Drift]
    mig: Mig
    users: Users
    cost: Cost
    acceptances: Acceptances
    history: History
