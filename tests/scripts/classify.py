"""An image classifier written for CUDA: loader workers, legacy spellings, DataParallel, streams, timing. Prints its accuracy."""
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Digits(Dataset):
    """Two patterns with noise."""

    def __init__(self, device_in_worker=None):
        generator = torch.Generator().manual_seed(0)
        self.labels = torch.randint(2, (48,), generator=generator)
        self.images = self.labels.view(-1, 1, 1, 1) + 0.05 * torch.randn(48, 1, 6, 6, generator=generator)
        self.device_in_worker = device_in_worker

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        label = self.labels[index]
        if self.device_in_worker:
            label = label + torch.zeros((), dtype=torch.long, device=self.device_in_worker)
        return self.images[index], label


def main():
    context = sys.argv[1] if len(sys.argv) > 1 else None
    torch.manual_seed(1)
    assert torch.cuda.is_available()
    device = torch.device("cuda")
    loader = DataLoader(
        Digits("cuda:0" if context else None), batch_size=8, num_workers=2 if context else 0, pin_memory=True,
        multiprocessing_context=context, persistent_workers=context is not None,
    )
    net = nn.DataParallel(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            for images, labels in loader:
                images, labels = images.cuda(non_blocking=True), labels.to(device, non_blocking=True)
                optimizer.zero_grad()
                F.cross_entropy(net(images), labels).backward()
                optimizer.step()
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) > 0
    with torch.no_grad():
        right = sum((net(images.cuda()).argmax(1) == labels.cuda()).sum().item() for images, labels in loader)
    print(f"accuracy {right}/48, peak {torch.cuda.max_memory_allocated() > 0}")


if __name__ == "__main__":
    main()
