"""Describes the assigned GPU by NVML and writes that to $RESULT_DIR; needs the package nvidia-ml-py only."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pynvml


def text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def main() -> None:
    assigned = os.environ["CUDA_VISIBLE_DEVICES"]
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(assigned.encode())
    report = {
        "cuda_visible_devices": assigned,
        "uuid": text(pynvml.nvmlDeviceGetUUID(handle)),
        "gpu": text(pynvml.nvmlDeviceGetName(handle)),
        "memory_total_mib": pynvml.nvmlDeviceGetMemoryInfo(handle).total // 2**20,
        "driver_version": text(pynvml.nvmlSystemGetDriverVersion()),
    }
    pynvml.nvmlShutdown()
    Path(os.environ["RESULT_DIR"], "result.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
