"""Starts its own processes, as training scripts without torchrun do: one per device, joined by NCCL."""
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

TABLE = torch.arange(4.0, device="cuda")  # at import, in the children too


class Mine:
    """Pickled from __main__ to the children."""

    def __init__(self, factor):
        self.factor = factor


def work(gpu, world, address, mine):
    torch.cuda.set_device(gpu)
    dist.init_process_group(backend="nccl", init_method=address, world_size=world, rank=gpu)
    net = DistributedDataParallel(torch.nn.Linear(4, 1, bias=False).cuda(gpu), device_ids=[gpu])
    with torch.no_grad():
        net.module.weight.fill_(mine.factor)
    net(TABLE.cuda(gpu) + gpu).sum().backward()
    if gpu == 0:
        print("gradient", net.module.weight.grad.flatten().tolist(), __name__, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(work, nprocs=2, args=(2, f"file://{sys.argv[1]}", Mine(2.0)))
