"""Work in child processes: two that are spawned, and a loader's."""

import sys

import torch
from torch import multiprocessing
from torch.utils.data import DataLoader, TensorDataset


def train(rank, steps):
    weight = torch.ones(3, device="cuda", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(steps):
        loss = weight.sum()
        loss.backward()
        optimizer.step()
        loss.item()  # MARK child


if __name__ == "__main__":
    multiprocessing.spawn(train, args=(4,), nprocs=2)
    data = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2, num_workers=2)
    total = sum(batch.to("cuda").sum().item() for (batch,) in data)  # MARK parent
    print("total", total, sys.argv[1:])
