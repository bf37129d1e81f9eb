"""Multiplies matrices on every GPU that it was given for a while, and fails where two equal products differ."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time

import torch


def burn(device: int, seconds: float, size: int = 8192) -> float:
    """Return TFLOP/s of one GPU; RuntimeError where it computes differently from one time to the next."""
    torch.manual_seed(device)
    left, right = torch.randn(2, size, size, dtype=torch.bfloat16, device=f"cuda:{device}")
    expected = left @ right
    torch.cuda.synchronize(device)
    begun, rounds = time.monotonic(), 0
    while time.monotonic() - begun < seconds:
        # The GPU is asked for several before anybody waits, so it never waits itself.
        products = [left @ right for number in range(4)]
        rounds += 1
        if not all(torch.equal(product, expected) for product in products):
            raise RuntimeError(f"GPU {device}: a product of round {rounds} differs from the first of the same matrices")
    return rounds * 4 * 2 * size**3 / (time.monotonic() - begun) / 1e12


def tell(device: int, seconds: float) -> None:
    name = torch.cuda.get_device_name(device)
    # In one piece, for others write there, too.
    print(f"GPU {device} {name}: {burn(device, seconds):.1f} TFLOP/s\n", end="", flush=True)


def main() -> None:
    devices = range(torch.cuda.device_count())
    if not devices:
        sys.exit("no GPU was given")
    seconds = float(os.environ.get("BURN_SECONDS", "60"))
    # What an error of CUDA leaves of a process is of no use, so each GPU has its own; CUDA does not survive a fork.
    start = multiprocessing.get_context("spawn")
    processes = [start.Process(target=tell, args=(device, seconds)) for device in devices]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    failed = [f"GPU {device} failed" for device in devices if processes[device].exitcode]
    sys.exit("\n".join(failed) or 0)


if __name__ == "__main__":
    main()
