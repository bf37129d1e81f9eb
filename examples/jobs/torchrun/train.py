"""Trains a small model on all GPUs of the task, one process each, with gradients averaged over NCCL."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(1024, 1).cuda(rank), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    truth = torch.randn(1024, 1, device=f"cuda:{rank}")
    torch.manual_seed(rank)
    for step in range(200):
        inputs = torch.randn(512, 1024, device=f"cuda:{rank}")
        loss = torch.nn.functional.mse_loss(model(inputs), inputs @ truth)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f} on {dist.get_world_size()} GPUs", flush=True)
    if rank == 0:
        folder = os.environ.get("RESULT_DIR", "/alloc")
        torch.save(model.module.state_dict(), f"{folder}/model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
