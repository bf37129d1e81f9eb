"""Times the collection of GPU facts against nvidia-smi itself, side by side, in one run.

With a real driver, on this machine's GPUs. Without one, against recorded answers that are replayed for four GPUs in the
time that nvidia-smi took on a host with four H200: that measures what the module adds, not what a driver makes of its
calls. Prints the medians and the ratios; the limits are 1.5 (default subset to `-L`) and 1.1 (all to `-q -x`).
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".collections"))

from ansible_collections.gpufarm.core.plugins.module_utils import nvidia_smi

RECORDED = Path(__file__).parents[1] / "unit/plugins/module_utils/nvidia_smi_corpus"
# Seconds that a host with four H200 took; `--version` and `nvlink -s` run beside the others and are quicker.
SECONDS = {"list": 0.058, "csv": 0.058, "xml": 0.40, "version": 0.02}


def recorded(kind: str, gpus: int = 4) -> str:
    """Return what nvidia-smi said of one H100, said of as many."""
    name = {"list": "list.txt", "version": "version.txt"}.get(kind, kind)
    text = (RECORDED / f"580.159.04-h100-queried.{name}").read_text(encoding="utf-8")
    if kind == "version":
        return text
    if kind == "csv":
        # Recorded before the performance state was asked for.
        text = text.replace("\n", ", P0\n")
    one = re.search(r"<gpu id=.*</gpu>\n", text, re.DOTALL) if kind == "xml" else re.search(r".+", text, re.DOTALL)
    assert one
    (uuid,) = set(re.findall(r"GPU-[0-9a-f-]{36}", one[0]))
    buses = sorted(set(re.findall(r"[0-9A-Fa-f]{8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.0", one[0])))
    many = ""
    for number in range(gpus):
        each = one[0].replace(uuid, f"{uuid[:-1]}{number}")
        for bus in buses:
            each = each.replace(bus, f"{bus[:9]}{number + 1:02X}{bus[11:]}")
        many += each
    return text.replace(one[0], many)


def replayed(folder: Path) -> str:
    """Write an nvidia-smi that says what was recorded after the time that it took, and return its path."""
    for kind in SECONDS:
        (folder / kind).write_text(recorded(kind), encoding="utf-8")
    say = {kind: f"sleep {seconds}; exec cat {folder}/{kind}" for kind, seconds in SECONDS.items()}
    program = folder / "nvidia-smi"
    program.write_text(
        f"#!/bin/sh\ncase $1 in\n-L) {say['list']} ;;\n--query-gpu=*) {say['csv']} ;;\n"
        f"-q) {say['xml']} ;;\n--version) {say['version']} ;;\n*) exit 1 ;;\nesac\n",
        encoding="utf-8",
    )
    program.chmod(0o755)
    return str(program)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        binary = nvidia_smi.find_nvidia_smi()
        if binary is None:
            sys.stdout.write("nvidia_smi_facts: no nvidia-smi here, so recorded answers of 4 GPUs are replayed\n")
        else:
            sys.stdout.write(f"nvidia_smi_facts: the driver's own {binary}\n")
        return measure(binary or replayed(Path(folder)), rounds)


def measure(binary: str, rounds: int) -> int:
    def call(*arguments: str) -> Callable[[], object]:
        return lambda: subprocess.run([binary, *arguments], capture_output=True, check=True)

    def facts(*subsets: str) -> Callable[[], object]:
        chosen = nvidia_smi.resolve_subsets(list(subsets))

        def gather() -> None:
            found = nvidia_smi.collect(chosen, path=binary)
            if not found["available"]:
                sys.exit(f"nvidia_smi_facts: {found['reason']}: {found['message']}")

        return gather

    actions: dict[str, Callable[[], object]] = {
        "nvidia-smi -L": call("-L"),
        "facts, default subset": facts("min", "mig", "topology"),
        "nvidia-smi -q -x": call("-q", "-x"),
        "facts, all": facts("all"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            begun = time.perf_counter()
            action()
            seconds[name].append(time.perf_counter() - begun)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    for name, value in median.items():
        sys.stdout.write(f"{name:24} {value * 1000:8.1f} ms\n")
    found = {
        "default / -L": (median["facts, default subset"] / median["nvidia-smi -L"], 1.5),
        "all / -q -x": (median["facts, all"] / median["nvidia-smi -q -x"], 1.1),
    }
    for name, (times, limit) in found.items():
        sys.stdout.write(f"{name:<16} {times:.2f} (limit {limit})\n")
    return int(any(times > limit for times, limit in found.values()))


if __name__ == "__main__":
    sys.exit(main())
