"""pt.cuda_compat on an accelerator: what test_cuda_compat_accelerator.py runs in a process that has an emulated one.

Prints one JSON object: question to answer. Nothing here, and nothing in portable/compat, names the device's type but through
its backend; a wrong translation would show as a tensor elsewhere.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import emulated_device
import torch
from torch import nn

emulated_device.install("widget", device_count=2)

import portable as pt  # noqa: E402

X = torch.arange(6.0).reshape(2, 3)


def where(*tensors: torch.Tensor) -> list[str]:
    return [str(tensor.device) for tensor in tensors]


def error(call: Any) -> str:
    try:
        call()
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"
    return "no error"


def places(found: dict[str, Any]) -> None:
    found["to"] = where(X.to("cuda"), X.to("cuda:1"), X.to(1), X.to(device=torch.device("cuda", 0)), X.cuda(), X.cuda(1))
    found["factories"] = where(torch.zeros(2, device="cuda:1"), torch.arange(3, device=1), X.new_ones(2, device="cuda"))
    found["like"] = where(torch.zeros_like(X.cuda(1)), torch.zeros_like(X, device="cuda:1"))
    found["modules"] = where(
        nn.Linear(2, 2).cuda(1).weight, nn.Linear(2, 2).to("cuda").weight, nn.Linear(2, 2, device=1).weight
    )
    with torch.device("cuda:1"):
        found["default"] = where(torch.zeros(1), nn.Linear(1, 1).weight)
    with torch.cuda.device(1):
        # A move to the current device is resolved in C++, where the emulated one has none.
        found["current"] = [torch.cuda.current_device(), *where(torch.zeros(1, device="cuda"))]
    torch.cuda.set_device("cuda:1")
    found["set"] = [torch.cuda.current_device(), *where(torch.zeros(1, device="cuda"))]
    torch.cuda.set_device(0)
    found["back"] = where(X.cuda().cpu(), X.cuda().to("cpu"))
    found["values"] = (X.cuda() @ X.cuda().T).cpu().tolist() == (X @ X.T).tolist()


def answers(found: dict[str, Any]) -> None:
    on, host = X.cuda(1), X
    found["is_cuda"] = [on.is_cuda, host.is_cuda, nn.Linear(1, 1).cuda().weight.is_cuda]
    found["type"] = [on.type(), host.type(), isinstance(on, torch.cuda.FloatTensor), isinstance(host, torch.cuda.FloatTensor)]
    found["get_device"] = on.get_device()
    found["counts"] = [torch.cuda.is_available(), torch.cuda.device_count(), torch.accelerator.device_count()]
    found["accelerator"] = [str(torch.accelerator.current_accelerator()), torch.get_device_module() is torch.cuda]
    found["accelerator stream"] = torch.accelerator.current_stream("cuda:1").device.type
    torch.cuda.synchronize(torch.device("cuda", 1))
    found["streams"] = [
        torch.cuda.Stream(device="cuda:1").device.type,
        isinstance(torch.cuda.current_stream(), torch.cuda.Stream),
        torch.Stream("cuda:1").device.type,
        isinstance(torch.cuda.Stream(), torch.Stream),
    ]
    found["beyond"] = error(lambda: X.to("cuda:5"))
    found["graph"] = error(torch.cuda.CUDAGraph)


def training(found: dict[str, Any]) -> None:
    def losses(device: Any, fused: bool) -> list[float]:
        torch.manual_seed(3)
        net = nn.DataParallel(nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 2))).to(device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, **({"fused": True, "capturable": True} if fused else {}))
        scaler = torch.amp.GradScaler(enabled=False)
        values = []
        for _ in range(4):
            loss = net(X).square().mean()  # the inputs are on the host: DataParallel moves them
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            values.append(loss.item())
        return values

    on_device = losses(torch.device("cuda"), True)
    found["losses equal"] = on_device == losses("cpu", False)
    found["mm on device"] = emulated_device.calls["aten::addmm"] > 0
    wrapped = nn.DataParallel(nn.Linear(3, 2), device_ids=[1])
    found["one id"] = where(wrapped.module.weight, wrapped(X))
    found["function"] = where(nn.parallel.data_parallel(nn.Linear(3, 2).cuda(1), X, [1]))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        found["autocast"] = str((X.cuda() @ X.cuda().T).dtype)
    scripted = torch.jit.script(_scripted)
    found["script"] = where(scripted(2))


def _scripted(n: int) -> torch.Tensor:
    return torch.ones(n, device="cuda:1")


def main() -> None:
    found: dict[str, Any] = {}
    with pt.cuda_compat() as mode:
        found["backend"] = mode.backend.spec.name
        for part in (places, answers, training):
            part(found)
        found["changed"] = sorted({entry.construct for entry in mode.recorder.entries() if entry.kind == "changed"})
        found["no equivalent"] = sorted({entry.construct for entry in mode.recorder.entries() if entry.kind == "no equivalent"})
        found["details"] = sorted({entry.detail for entry in mode.recorder.entries() if entry.construct == "Tensor.to"})
    found["is_cuda after"] = "is_cuda" in vars(torch.Tensor)
    found["accelerator after"] = str(torch.accelerator.current_accelerator())
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
