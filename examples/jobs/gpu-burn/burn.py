"""Multiplies matrices on every GPU that it was given for a while, and fails where two equal products differ."""

from __future__ import annotations

import os
import sys
import time

import torch


def burn(device: int, seconds: float, size: int = 8192) -> float:
    """Return TFLOP/s of one GPU; RuntimeError where it computes differently from one time to the next."""
    torch.manual_seed(device)
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=f"cuda:{device}") for _ in range(2))
    expected = left @ right
    torch.cuda.synchronize(device)
    begun, products = time.monotonic(), 0
    while time.monotonic() - begun < seconds:
        for _ in range(20):
            product = left @ right
        torch.cuda.synchronize(device)
        products += 20
        if not torch.equal(product, expected):
            raise RuntimeError(f"GPU {device}: product {products} differs from the first of the same matrices")
    return products * 2 * size**3 / (time.monotonic() - begun) / 1e12


def main() -> None:
    if not torch.cuda.device_count():
        sys.exit("no GPU was given")
    seconds = float(os.environ.get("BURN_SECONDS", "60"))
    for device in range(torch.cuda.device_count()):
        name = torch.cuda.get_device_name(device)
        print(f"GPU {device} {name}: {burn(device, seconds):.1f} TFLOP/s", flush=True)


if __name__ == "__main__":
    main()
