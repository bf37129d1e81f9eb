#!/usr/bin/python
# Copyright (c) 2026, gpufarm contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: nvidia_gpu_acceptance
short_description: Judge whether nodes are fit for work by what their GPUs did, and keep the record
version_added: 1.0.0
author:
  - gpufarm contributors (@gpufarm)
description:
  - Puts together what M(gpufarm.core.nvidia_gpu_health) and M(gpufarm.core.nvidia_gpu_benchmark) found on each node,
    and compares each GPU with its siblings of the run and with its own last acceptance.
  - A sibling is a GPU of the same model, a MIG device one with the same profile, with the same number of
    multiprocessors and the same power limit. Copies with the host are compared with a GPU's own past only, because
    slots differ; copies by NVLink only where the boards have as many links between two GPUs.
  - Adds a line of JSON for each node to the file of records, whatever the verdict. Used by C(playbooks/accept.yml) on
    the control machine.
  - A node that is not fit is an answer and not an error. The module fails where the file cannot be read or written.
attributes:
  check_mode:
    support: full
    description: Judges as without, and writes nothing.
  diff_mode:
    support: none
    description: Shows no difference.
  idempotent:
    support: none
    description: Each run has its records.
  platform:
    platforms: posix
    support: full
    description: Runs on the control machine.
options:
  path:
    description:
      - The file of records. It is made where it is missing, with its folder.
    type: path
    required: true
  level:
    description:
      - The level of the benchmark where neither its result nor the node tells it.
    type: str
    choices: [start, quick, full]
    default: quick
  nodes:
    description:
      - The nodes to judge. Without one it is only seen whether the file can be read and written.
      - Each with its name in Nomad (C(node)), the name of the host (C(host)), and the results of
        M(gpufarm.core.nvidia_gpu_health) (C(probe)) and of M(gpufarm.core.nvidia_gpu_benchmark) (C(benchmark)), which
        may be those of a failed or unreachable host. Its own C(close_on) is the lowest verdict of a problem of the
        probe with which it fails, V(critical) or V(warning).
      - Its own C(level) is that at which it was to be measured, O(level) where it has none.
      - GPUs whose UUIDs are in its C(ignored), which Nomad has no use for, are not judged by the benchmark,
        nor are pairs with one. With C(gpus_expected) set, a number that the probe holds it to, none is missed that it
        had at its last acceptance. With a C(dcgm_diag_level) it fails where DCGM's diagnosis has run no test.
    type: list
    elements: dict
    default: []
  siblings:
    description:
      - Nodes of the same run that are judged already. Their GPUs are compared with.
    type: list
    elements: dict
    default: []
  benchmark_options:
    description:
      - Of hosts, by their names, the options that they give to M(gpufarm.core.nvidia_gpu_benchmark). The module fails
        where one of them cannot be used, so that it is known before a node is closed.
    type: dict
    default: {}
  health_options:
    description:
      - The same for M(gpufarm.core.nvidia_gpu_health).
    type: dict
    default: {}
  siblings_min:
    description:
      - How many other GPUs of its kind a GPU needs, to be judged by them.
    type: int
    default: 3
  sibling_percent:
    description:
      - Share of their median by which a GPU may be slower, however alike the others are. V(0) judges nothing by
        siblings. It is no part of the median that it is judged by.
    type: float
    default: 10
  sibling_mads:
    description:
      - Standard deviations by which it may be slower where that is more, as the median of the differences from their
        median (MAD) tells them. Up to three times O(sibling_percent).
    type: float
    default: 5
  past_percent:
    description:
      - Share by which a GPU may be slower than at its last acceptance at this level, by its UUID or serial number and
        with the same power limit. V(0) judges nothing by its past.
    type: float
    default: 10
notes:
  - "Codes beside those of the probe and of the benchmark: C(not_probed) and C(not_measured), a node that gave no
    answer; C(dcgm_not_run), a diagnosis of DCGM that was asked for and did not come to its end; C(gpu_missing), a GPU
    of the node's last acceptance that is gone where it has fewer than then; C(slow_among_siblings);
    C(slower_than_before); C(nvlink_down), fewer active NVLinks than at its last acceptance in this node (or nobody
    knows how many), than most of its model have, or than a neighbour, of which the probe tells."
seealso:
  - module: gpufarm.core.nvidia_gpu_benchmark
  - module: gpufarm.core.nvidia_gpu_health
"""

EXAMPLES = r"""
- name: Judge what was measured
  gpufarm.core.nvidia_gpu_acceptance:
    path: /srv/farm/accepted.jsonl
    nodes:
      - node: gpu01
        host: rack1-a
        probe: "{{ hostvars['rack1-a'].probe }}"
        benchmark: "{{ hostvars['rack1-a'].benchmark }}"
  delegate_to: localhost
  run_once: true
"""

RETURN = r"""
path:
  description: The file of records.
  type: str
  returned: success
  sample: /srv/farm/accepted.jsonl
nodes:
  description: The records, as they are in the file.
  type: list
  elements: dict
  returned: success
  contains:
    date:
      description: When it was judged, in ISO 8601 and UTC.
      type: str
      sample: "2026-11-25T14:03:11Z"
    node:
      description: Name of the node in Nomad.
      type: str
      sample: gpu01
    host:
      description: Name of the host in the inventory.
      type: str
      sample: rack1-a
    verdict:
      description: V(accepted) or V(failed).
      type: str
      sample: accepted
    level:
      description: Level of the benchmark.
      type: str
      sample: quick
    driver_version:
      description: Version of the driver. V(null) where it is not known.
      type: str
      sample: 580.159.04
    collection_version:
      description: Version of this collection.
      type: str
      sample: 1.0.0
    gpus:
      description: The GPUs and MIG devices that were to be measured.
      type: list
      elements: dict
      contains:
        uuid:
          description: UUID of the GPU or MIG device.
          type: str
          sample: GPU-73466fa5-45f2-f4ce-0991-77d3b3398071
        serial:
          description: Serial number of the card. V(null) where it tells none.
          type: str
          sample: "1654922006245"
        model:
          description: Product name from CUDA, with the profile of a MIG device. V(null) where CUDA could not be asked.
          type: str
          sample: NVIDIA H100 80GB HBM3
        vbios_version:
          description: Version of the VBIOS. V(null) where the card tells none.
          type: str
          sample: 96.00.74.00.01
        power_limit_w:
          description: Power limit that is set, in watts. V(null) where the card tells none.
          type: float
          sample: 700.0
        sm_count:
          description: Number of multiprocessors. V(null) where CUDA could not be asked.
          type: int
          sample: 132
        verdict:
          description: RV(gpufarm.core.nvidia_gpu_benchmark#module:gpus[].verdict), and V(failed) where its siblings or
            its past say so. V(null) where nothing could be tried on it.
          type: str
          sample: ok
        figures:
          description: RV(gpufarm.core.nvidia_gpu_benchmark#module:gpus[].figures), and C(peer_gb_per_s), what it sends
            by NVLink to another GPU in the median, in GB/s.
          type: dict
          sample: {memory_read_gb_per_s: 3134.6, fp32_tflop_per_s: 64.0}
        peer_limit_gb_per_s:
          description: What NVLink could give between two GPUs of its node at most, in GB/s. C(peer_gb_per_s) is
            compared where this is the same, and with the GPU's own past in the same node. V(null) where it is not
            known.
          type: float
          sample: 478.1
        nvlinks:
          description: How many of its NVLinks were active after it had worked. V(null) where it is not known, as with
            MIG.
          type: int
          sample: 18
        siblings:
          description: By how many siblings it was judged. V(null) where it was not.
          type: int
          sample: 7
        accepted_before:
          description: By which acceptance of its own it was judged. V(null) where it was not.
          type: str
          sample: "2026-11-02T09:12:40Z"
    peers:
      description: Copies between whole GPUs, one entry for each ordered pair.
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
        nvlink:
          description: RV(gpufarm.core.nvidia_gpu_benchmark#module:peers[].nvlink).
          type: bool
          sample: true
        gb_per_s:
          description: RV(gpufarm.core.nvidia_gpu_benchmark#module:peers[].gb_per_s).
          type: float
          sample: 391.8
        limit_gb_per_s:
          description: RV(gpufarm.core.nvidia_gpu_benchmark#module:peers[].limit_gb_per_s).
          type: float
          sample: 478.1
    problems:
      description: Why it is not accepted.
      type: list
      elements: dict
      contains:
        uuid:
          description: UUID of the GPU or MIG device. V(null) for a problem of no single one.
          type: str
          sample: GPU-73466fa5-45f2-f4ce-0991-77d3b3398071
        code:
          description: Code of the problem.
          type: str
          sample: slow_among_siblings
        found:
          description: What was found.
          type: str
          sample: among 7 other GPUs of its model and power limit memory read at 2701 GB/s, where their median is 3141
        expected:
          description: What was expected.
          type: str
          sample: no more than 10 % below the median, or 5 standard deviations where that is more, up to 30 %
        message:
          description: Node, GPU, found, expected and the next step.
          type: str
          sample: >-
            Node gpu01, GPU GPU-73466fa5-45f2-f4ce-0991-77d3b3398071: found among 7 other GPUs of its model and power
            limit memory read at 2701 GB/s, where their median is 3141. Expected: no more than 10 % below the median, or
            5 standard deviations where that is more, up to 30 %. Next step: compare its clocks, temperature and VBIOS
            with theirs (nvidia-smi -q); if it stays so, have the card replaced.
unreadable:
  description: Numbers of lines of the file that are no record, as a run leaves them that was killed while it wrote.
  type: list
  elements: int
  returned: success
  sample: []
"""

import dataclasses
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_benchmark import (
    LEVELS,
    comparing,
    options,
    records,
)
from ansible_collections.gpufarm.core.plugins.module_utils.health import HealthOptions
from ansible_collections.gpufarm.core.plugins.module_utils.problem import Finding, FoundError, problem_of
from ansible_collections.gpufarm.core.plugins.module_utils.text import utc

if TYPE_CHECKING:
    Entry = dict[str, Any]

OF_PEER = ("from", "to", "nvlink", "gb_per_s", "limit_gb_per_s")
OF_PROBLEM = ("uuid", "code", "found", "expected", "message")


# What a module says that fails.
TOLD = re.compile(r"(?:\S+: )?(?:found )?(.+?)\. Expected: (.+?)\. Next step: (.+?)\.?", re.S)


def _silent(code: str, answer: Mapping[str, Any], expected: str) -> Finding:
    """Why there are no figures, in the answer's own words where it has an expectation and a next step."""
    said = str(answer.get("msg") or "it was not asked").strip()
    own = TOLD.fullmatch(said)
    if own and not answer.get("unreachable"):
        return Finding(code, *own.groups())
    said = said.rstrip(".")
    return Finding(
        code,
        f"no answer ({said})" if answer.get("unreachable") else said,
        expected,
        "look at the host (dmesg | grep -i -e nvrm -e xid), mend it, and run playbooks/accept.yml again",
    )


def facts_of(node: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the probe knows of the node's driver and GPUs; empty without a probe."""
    return (node.get("probe") or {}).get("nvidia_smi") or {}


def ignored_of(node: Mapping[str, Any]) -> set[str]:
    return {uuid.lower() for uuid in node.get("ignored") or ()}


def own_problems(node: Mapping[str, Any]) -> Iterator[Entry]:
    """What the probe and the benchmark found on a node, or why they did not."""
    probe, benchmark = node.get("probe") or {}, node.get("benchmark") or {}
    if "verdict" not in probe:
        yield told(node, _silent("not_probed", probe, "the health of its GPUs"))
    severe = ("critical", "warning") if node.get("close_on") == "warning" else ("critical",)
    for problem in probe.get("problems") or ():
        # What is slower for want of a link is for no job to find out.
        lost = problem["code"] == "nvlink_down" and (problem["uuid"] or "").lower() not in ignored_of(node)
        if lost or problem["severity"] in severe:
            yield {key: problem[key] for key in OF_PROBLEM}
    level, dcgm = node.get("dcgm_diag_level"), (probe.get("checks") or {}).get("dcgm", "ok")
    # What else DCGM is asked for may have failed alone.
    if level not in (None, "") and (dcgm in ("skipped", "not_installed") or " diag -r" in dcgm):
        yield told(
            node,
            Finding(
                "dcgm_not_run",
                f"DCGM's diagnosis not run to its end ({dcgm})",
                f"that of level {level}, as dcgm_diag_level in gpu_health_options says",
                "let dcgmi answer on this host, with GPUs that its tests know, and run playbooks/accept.yml again; or "
                "take dcgm_diag_level away",
            ),
        )
    if "gpus" not in benchmark:
        yield told(node, _silent("not_measured", benchmark, "figures of its GPUs"))
    for problem in benchmark.get("problems") or ():
        # Of a pair either end.
        ends = {uuid.lower() for uuid in (problem["uuid"], problem.get("peer")) if uuid}
        if not ends & ignored_of(node):
            yield {key: problem[key] for key in OF_PROBLEM}


def missing_from(node: Mapping[str, Any], past: Sequence[records.Record]) -> Iterator[Entry]:
    """GPUs of the node's last acceptance that are gone, where it has fewer than then: one may have been replaced.

    A MIG device tells of its GPU by the serial number, and of nothing without. A whole GPU has its UUID: the serial
    number is that of the board, which may have several.
    """
    now = facts_of(node).get("gpus") or ()
    last = next(
        (each for each in reversed(past) if each["verdict"] == "accepted" and each["node"] == node["node"]), None
    )
    if last is None or not now or node.get("gpus_expected") not in (None, ""):
        return
    ignored = ignored_of(node)
    then = {
        key: gpu
        for gpu in last["gpus"]
        for key in [gpu["serial"] if gpu["uuid"].startswith("MIG-") else gpu["uuid"]]
        if gpu["uuid"].lower() not in ignored and key
    }
    there = {name for gpu in now for name in (gpu["uuid"], gpu["serial"])}
    left = len([gpu for gpu in now if (gpu["uuid"] or "").lower() not in ignored])
    for key, gpu in then.items():
        if left < len(then) and key not in there:
            yield told(
                node,
                Finding(
                    "gpu_missing",
                    f"{left} GPU(s), and not this one (serial number {gpu['serial'] or 'unknown'})",
                    f"the {len(then)} with which the node was accepted on {last['date']}",
                    "look for it (lspci -d 10de:, dmesg), and run playbooks/accept.yml again; where it was taken out "
                    f"on purpose, set gpu_node_gpus of this host to {len(now)}",
                ),
                gpu["uuid"],
            )


def told(node: Mapping[str, Any], finding: Finding, uuid: str | None = None) -> Entry:
    problem = problem_of(
        node["node"], finding.code, finding.found, finding.expected, finding.next_step, uuid=uuid, named=bool(uuid)
    )
    return {key: getattr(problem, key) for key in OF_PROBLEM}


def peers_of(node: Mapping[str, Any]) -> list[Entry]:
    """What is kept of each pair of GPUs."""
    ignored = ignored_of(node)
    return [
        {key: pair.get(key) for key in OF_PEER}
        for pair in (node.get("benchmark") or {}).get("peers") or ()
        if not ignored & {pair["from"].lower(), pair["to"].lower()}
    ]


def links_of(gpu: Mapping[str, Any]) -> int | None:
    """How many NVLinks are active; None where it is not known, as with MIG."""
    links = gpu.get("nvlinks")
    return None if links is None else sum(1 for link in links if link["active"])


def gpus_of(node: Mapping[str, Any]) -> list[Entry]:
    """What is kept of each GPU, before it is judged by others."""
    there = facts_of(node).get("gpus") or ()
    whole = {gpu["uuid"]: gpu for gpu in there}
    for gpu in there:
        whole.update({part["uuid"]: gpu for part in gpu["mig_devices"] or ()})
    return [
        {
            "uuid": gpu["uuid"],
            **{key: whole.get(gpu["uuid"], {}).get(key) for key in ("serial", "vbios_version", "power_limit_w")},
            "model": gpu["name"],
            "sm_count": gpu["sm_count"],
            "verdict": gpu["verdict"],
            "figures": gpu["figures"]
            and {**gpu["figures"], "peer_gb_per_s": comparing.peer_figure(gpu["uuid"], peers_of(node))},
            "peer_limit_gb_per_s": comparing.peer_limit(peers_of(node)),
            "nvlinks": links_of(whole.get(gpu["uuid"], {})),
            "siblings": None,
            "accepted_before": None,
        }
        for gpu in (node.get("benchmark") or {}).get("gpus") or ()
        if gpu["uuid"].lower() not in ignored_of(node)
    ]


def level_of(node: Mapping[str, Any], otherwise: str) -> str:
    """The level that a node was, or was to be, measured at."""
    level: str = (node.get("benchmark") or {}).get("level") or node.get("level") or otherwise
    return level


def judge(
    nodes: Sequence[Mapping[str, Any]],
    others: Sequence[Mapping[str, Any]],
    past: Sequence[records.Record],
    level: str,
    allowed: comparing.Allowed,
    *,
    now: str,
) -> list[Entry]:
    """The records of these nodes."""
    gpus = {node["host"]: gpus_of(node) for node in nodes}
    # Groups of the inventory may have each their own.
    levels = {node["host"]: level_of(node, level) for node in nodes}
    at = [(gpu, levels[node["host"]]) for node in nodes for gpu in gpus[node["host"]]]
    at += [(gpu, level_of(node, level)) for node in others for gpu in gpus_of(node)]
    run = [gpu for gpu, _level in at]
    by_siblings = comparing.judge_siblings(at, allowed)
    before = comparing.accepted_before(past, run)
    # Where the probe told no GPUs, that is told and not each of their links.
    probed = [node for node in nodes if facts_of(node).get("gpus")]
    of_nodes = {gpu["uuid"]: node["node"] for node in probed for gpu in gpus[node["host"]]}
    lost = comparing.judge_links(run, before, allowed, nodes=of_nodes)
    made = []
    for node in nodes:
        problems = [*own_problems(node), *missing_from(node, past)]
        for gpu in gpus[node["host"]]:
            gpu["siblings"], slow = by_siblings[gpu["uuid"]]
            gpu["accepted_before"], slower = comparing.judge_past(
                gpu, levels[node["host"]], before, allowed, node=node["node"]
            )
            # The probe may have told the same of it.
            told_of = {(problem["code"], problem["uuid"]) for problem in problems}
            links = None if ("nvlink_down", gpu["uuid"]) in told_of else lost.get(gpu["uuid"])
            for finding in (slow, slower, links):
                if finding:
                    problems.append(told(node, finding, gpu["uuid"]))
                    gpu["verdict"] = "failed"
        made.append(
            {
                "date": now,
                "node": node["node"],
                "host": node["host"],
                "verdict": "failed" if problems else "accepted",
                "level": levels[node["host"]],
                "driver_version": facts_of(node).get("driver_version"),
                "collection_version": records.COLLECTION_VERSION,
                "gpus": gpus[node["host"]],
                "peers": peers_of(node),
                "problems": problems,
            }
        )
    return made


def refused(benchmark: Mapping[str, Any], health: Mapping[str, Any]) -> str | None:
    """What is wrong with what hosts give to the benchmark and to the probe, None where nothing is."""
    for host, given in benchmark.items():
        checked = ArgumentSpecValidator(options.argument_spec()).validate(given)
        wrong = (
            f"{'; '.join(checked.error_messages)}. Expected: options of nvidia_gpu_benchmark. Next step: correct it."
            if checked.error_messages
            else options.wrong_option(checked.validated_parameters)
        )
        if wrong:
            return f"{host}: accept_options: {wrong}"
    for host, given in health.items():
        try:
            HealthOptions.from_mapping(given)
        except ValueError as error:
            return f"{host}: gpu_health_options: {error}"
    return None


def main() -> None:
    allowed: dict[str, dict[str, Any]] = {
        field.name: {"type": "int" if isinstance(field.default, int) else "float", "default": field.default}
        for field in dataclasses.fields(comparing.Allowed)
    }
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "level": {"type": "str", "choices": list(LEVELS), "default": "quick"},
            "nodes": {"type": "list", "elements": "dict", "default": []},
            "siblings": {"type": "list", "elements": "dict", "default": []},
            "benchmark_options": {"type": "dict", "default": {}},
            "health_options": {"type": "dict", "default": {}},
            **allowed,
        },
        supports_check_mode=True,
    )
    wrong = refused(module.params["benchmark_options"], module.params["health_options"])
    if wrong:
        module.fail_json(msg=wrong)
    try:
        result = accept(module)
    except FoundError as error:
        module.fail_json(msg=f"{platform.node()}: found {error}")
    except OSError as error:
        module.fail_json(
            msg=f"{platform.node()}: found that {module.params['path']} cannot be read and written ({error}). "
            "Expected: a file of who runs Ansible, with room. Next step: check accept_records and the free space, and "
            "run this again; nodes that were taken out stay closed."
        )
    module.exit_json(**result)


def accept(module: AnsibleModule) -> Entry:
    params = module.params
    path = Path(params["path"]).absolute()
    allowed = comparing.Allowed(**{field.name: params[field.name] for field in dataclasses.fields(comparing.Allowed)})
    for field in dataclasses.fields(allowed):
        if getattr(allowed, field.name) < 0:
            raise FoundError(f"{field.name} is {getattr(allowed, field.name):g}", "0 or more", "correct it")
    records.refusal(path)

    def judged(content: bytes) -> tuple[list[Entry], list[int]]:
        past, skipped = records.parse(content, str(path))
        return judge(params["nodes"], params["siblings"], past, params["level"], allowed, now=utc()), skipped

    if module.check_mode or not params["nodes"]:
        made, skipped = judged(path.read_bytes() if path.exists() else b"")
        return {"changed": bool(made), "path": str(path), "nodes": made, "unreadable": skipped}
    with records.opened(path) as descriptor:
        before = records.content_of(descriptor)
        made, skipped = judged(before)
        records.append(descriptor, before, made)
    return {"changed": True, "path": str(path), "nodes": made, "unreadable": skipped}


if __name__ == "__main__":
    main()
