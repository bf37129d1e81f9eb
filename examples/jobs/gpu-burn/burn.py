"""Multiplies matrices on every GPU that it was given for a while, and fails where two equal products differ."""

from __future__ import annotations

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


def main() -> None:
    if not torch.cuda.device_count():
        sys.exit("no GPU was given")
    seconds = float(os.environ.get("BURN_SECONDS", "60"))
    for device in range(torch.cuda.device_count()):
        name = torch.cuda.get_device_name(device)
        print(f"GPU {device} {name}: {burn(device, seconds):.1f} TFLOP/s", flush=True)


if __name__ == "__main__":
    main()
