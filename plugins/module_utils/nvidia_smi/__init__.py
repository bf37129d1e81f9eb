# Copyright (c) gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What nvidia-smi says about a node's GPUs, as plain data.

Pure parsers (C(parse_*), C(merge_*)) turn text into records and never touch the machine; C(collect) runs nvidia-smi and
puts their results together. Nothing here needs Ansible, and nothing beyond Python's standard library.

Which call answers which question, and why
    C(nvidia-smi -q -x) reads every sensor of every GPU: about 0.1 s a GPU, 0.40 s on a host with four H200. The listing
    calls C(-L) and C(--query-gpu) cost about 0.014 s a GPU there. So the facts that playbooks branch on (subset C(min):
    identity, memory, modes, driver version) come from one C(--query-gpu) call with only cheap fields, and C(-q -x) runs
    when a subset was asked for that needs it, instead of the listing call and never in addition to it.
    What no call on that path gives is read where it is free: the minor number from /proc/driver/nvidia, NUMA node,
    CPU affinity and root bus from sysfs (C(topo -m) would cost a quarter of C(-q -x)).
    Calls that are needed besides the main one run at the same time as it, so they add little to the wall time:
    C(--version) for the CUDA version of the listing path, C(-L) for UUIDs and profiles of MIG devices (in the XML of
    few drivers only) when the kernel shows MIG instances, C(nvlink -s -e) and C(topo -m) when asked for. Only the main
    call may fail the gathering; the others leave their facts null, and C(collect) can tell why.

    C(--query-gpu) refuses a field that the driver does not know with exit code 2 before it asks any GPU, naming the
    field: the call is repeated without it. Such old drivers pay for one more initialisation of NVML, others nothing.
"""

from __future__ import annotations

from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi.facts import (
    DEFAULT_SUBSETS,
    IDENTITY_KEYS,
    SUBSETS,
    Facts,
    Gpu,
    empty_facts,
    empty_gpu,
    resolve_subsets,
)
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi.failures import (
    NEXT_STEPS,
    REASONS,
    WSL_STEPS,
    NvidiaSmiError,
)
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi.gathering import collect, collect_topology
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi.listings import (
    merge_list,
    parse_list,
    parse_nvlink_status,
    parse_topology,
    parse_version,
)
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi.node import find_nvidia_smi
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi.query_csv import parse_query_csv
from ansible_collections.gpufarm.core.plugins.module_utils.nvidia_smi.query_xml import parse_query_xml
