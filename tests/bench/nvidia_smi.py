"""Times the collection of GPU facts against nvidia-smi itself, side by side, on this machine's GPUs.

Needs a real driver: the double's nvidia-smi answers in a millisecond whatever it is asked.
Prints the medians and the ratios; the limits are 1.5 (default subset to `-L`) and 1.1 (all to `-q -x`).
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".collections"))

from ansible_collections.gpufarm.core.plugins.module_utils import nvidia_smi


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    rounds = parser.parse_args().rounds
    binary = nvidia_smi.find_nvidia_smi()
    if binary is None:
        sys.stdout.write("nvidia_smi_facts: no nvidia-smi here; run this on a machine with a GPU\n")
        return 0

    def call(*arguments: str) -> Callable[[], object]:
        return lambda: subprocess.run([binary, *arguments], capture_output=True, check=True)

    default = nvidia_smi.resolve_subsets(["min", "mig", "topology"])
    everything = nvidia_smi.resolve_subsets(["all"])
    actions: dict[str, Callable[[], object]] = {
        "nvidia-smi -L": call("-L"),
        "facts, default subset": lambda: nvidia_smi.collect(default),
        "nvidia-smi -q -x": call("-q", "-x"),
        "facts, all": lambda: nvidia_smi.collect(everything),
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
    sys.stdout.write(f"default / -L     {median['facts, default subset'] / median['nvidia-smi -L']:.2f} (limit 1.5)\n")
    sys.stdout.write(f"all / -q -x      {median['facts, all'] / median['nvidia-smi -q -x']:.2f} (limit 1.1)\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
