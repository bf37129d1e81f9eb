"""Measures every GPU as nvidia_gpu_benchmark does, and holds it to what this project expects of H100 and H200.

    python tests/hardware/benchmark.py

Needs Python and the driver, nothing else. Changes nothing. Ends with 1 when a real card is
told to be sick, when a figure is below what is expected, when it takes too long, or when something is left behind.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".collections"))

from ansible_collections.gpufarm.core.plugins.module_utils import gpu_benchmark, nvidia_smi
from ansible_collections.gpufarm.core.plugins.module_utils.gpu_benchmark import measuring

# Least share in percent of the card's own limit, on compute capability 9.0; elsewhere it is what the module judges. For
# arithmetic it is the limit at the clock of that work: under the tensor cores' it falls to some 1,830 of 1,980 MHz.
EXPECTED = gpu_benchmark.Thresholds(memory_min_percent=93, fp32_min_percent=90, tensor_min_percent=60)

# Seconds a GPU, from its first call to its last. Of several side by side the driver starts one after another, and they
# take turns with copies: each may take as long as all of them in a row.
SECONDS = {"start": 0.5, "quick": 2.0}


def measure(level: str) -> dict[str, Any]:
    """As a job does: the file alone, in a process that knows nothing of this one."""
    line = [sys.executable, "-I", measuring.__file__, "--level", level, "--format", "json", "--soak", "5"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode == 2:
        raise SystemExit(done.stderr)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def cards() -> dict[str, gpu_benchmark.Card]:
    facts = nvidia_smi.collect(nvidia_smi.resolve_subsets(["all"]))
    return {
        str(gpu["uuid"]): gpu_benchmark.Card(
            pcie_generation=gpu["pcie"]["generation_max"],
            pcie_width=gpu["pcie"]["width_max"] or gpu["pcie"]["width_current"],
            memory_total_mib=gpu["memory_total_mib"],
        )
        for gpu in facts["gpus"]
    }


def wrong(level: str, answer: Mapping[str, Any], known: Mapping[str, gpu_benchmark.Card]) -> Iterator[str]:
    for device in answer["devices"]:
        hopper = device["compute_capability"] == "9.0"
        thresholds = EXPECTED if hopper else gpu_benchmark.Thresholds()
        card = known.get(device["uuid"], gpu_benchmark.Card())
        for finding in gpu_benchmark.judge_device(device, card, thresholds, level):
            yield f"{device['uuid']}: {finding.code}, {finding.found}; expected {finding.expected}"
        limit = SECONDS[level] * len(answer["devices"]) if level in SECONDS else None
        if limit is not None and hopper and (device["duration_s"] or limit) > limit:
            yield f"{device['uuid']}: level {level} took {device['duration_s']} s, expected {limit} at most"
    facts = nvidia_smi.collect(nvidia_smi.resolve_subsets(["all"]))
    pairs = gpu_benchmark.with_limits(answer["peers"], facts["gpus"], nvidia_smi.collect_topology(None, 60))
    for pair in pairs:
        sys.stdout.write(f"{pair['from']} {json.dumps(pair)}\n")
        if pair["nvlink"] and pair["limit_gb_per_s"] is None:
            yield f"{pair['from']}: nobody tells what NVLink could do to {pair['to']}"
    for finding in gpu_benchmark.judge_peers(pairs, answer["peers_error"], EXPECTED):
        yield f"{finding.uuid}: {finding.code}, {finding.found}"


def left_behind() -> Iterator[str]:
    """What still computes, or is still in use of a memory, after the one that measured was killed outright."""
    line = [sys.executable, "-I", measuring.__file__, "--level", "full", "--soak", "60"]

    def asked(query: str) -> list[str]:
        line = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
        return subprocess.run(line, capture_output=True, text=True, check=True).stdout.split()

    def processes() -> list[str]:
        return asked("--query-compute-apps=pid")

    def memory() -> list[str]:
        """In use of each GPU, in MiB."""
        return asked("--query-gpu=memory.used")

    before, used = processes(), memory()
    with subprocess.Popen(line, stdout=subprocess.DEVNULL) as child:
        until = time.monotonic() + 20
        while processes() == before and time.monotonic() < until:
            time.sleep(0.1)
        if processes() == before:
            yield "nvidia-smi shows no process that measures"
        elif memory() == used:
            yield "nvidia-smi shows no memory of the process that measures"
        child.kill()
    until = time.monotonic() + 10
    while (processes(), memory()) != (before, used) and time.monotonic() < until:
        time.sleep(0.1)
    if processes() != before:
        yield f"after a kill nvidia-smi shows {processes()}, before it was {before}"
    if memory() != used:
        yield f"after a kill {memory()} MiB are in use, before it was {used}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    known, found = cards(), []
    # The first of all reads the driver's library from the disk, which is no time of the GPU's.
    measure("start")
    for level in measuring.LEVELS:
        begun = time.monotonic()
        answer = measure(level)
        sys.stdout.write(f"-- {level}, {time.monotonic() - begun:.2f} s in all\n{measuring.table(answer)}\n")
        for device in answer["devices"]:
            card = known.get(device["uuid"], gpu_benchmark.Card())
            sys.stdout.write(f"{device['uuid']} could do {json.dumps(gpu_benchmark.limits_of(device, card))}\n")
        found += [f"{level}: {line}" for line in wrong(level, answer, known)]
    found += left_behind()
    for line in found:
        sys.stdout.write(f"WRONG {line}\n")
    sys.stdout.write(f"{len(known)} GPU(s), {len(found)} wrong\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
