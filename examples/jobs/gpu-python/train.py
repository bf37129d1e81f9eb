"""Trains a small classifier on the assigned GPU and writes the model and its accuracy to $RESULT_DIR."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit(f"No GPU for PyTorch; CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')}")
    device = torch.device("cuda:0")
    torch.manual_seed(1)

    # Two interleaved spirals: small, without a download, and not linearly separable.
    points = 2000
    radius = torch.rand(points).sqrt() * 6
    label = torch.randint(0, 2, (points,))
    angle = radius + label * torch.pi
    inputs = torch.stack((radius * angle.cos(), radius * angle.sin()), dim=1) + torch.randn(points, 2) * 0.1
    inputs, label = inputs.to(device), label.to(device)

    model = torch.nn.Sequential(
        torch.nn.Linear(2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2)
    ).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _step in range(600):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), label)
        loss.backward()
        optimizer.step()
    accuracy = (model(inputs).argmax(dim=1) == label).float().mean().item()

    result = Path(os.environ["RESULT_DIR"])
    torch.save(model.state_dict(), result / "model.pt")
    report = {
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "gpu": torch.cuda.get_device_name(device),
        "loss": loss.item(),
        "accuracy": accuracy,
    }
    (result / "result.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
