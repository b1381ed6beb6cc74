"""A stand-in for HCCL: gloo carries the collectives of NPU tensors, whose memory is this process's.

torch.distributed asks PyTorch's dispatcher for its operators (``c10d::allreduce_`` ...). Those for NPU tensors are replaced by
ones that call the same operator with CPU tensors over the same memory, on the same group, in which gloo serves the CPU.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from portable.rehearsal.handles import lowered
from portable_ascend.host_acl.device import HostDevice
from portable_ascend.host_acl.kernels import operators

NAME = "hccl"
# These end when the other side has come: waiting for one before the next is started could wait for ever.
_POINT_TO_POINT = frozenset({"send", "recv_", "recv_any_source_"})
# The dispatcher's names of what torch.distributed calls otherwise.
_NAMES = {
    "allreduce_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather_into_tensor",
    "_reduce_scatter_base_": "reduce_scatter_tensor",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all_single",
    "recv_any_source_": "recv",
    "allreduce_coalesced_": "all_reduce_coalesced",
    "allgather_coalesced_": "all_gather_coalesced",
    "allgather_into_tensor_coalesced_": "all_gather_into_tensor_coalesced",
}
_LOCAL = frozenset({"check_for_nan"})
_work = torch._C._distributed_c10d._create_work_from_future  # type: ignore[attr-defined]


def register(device: HostDevice) -> tuple[torch.library.Library, ...]:
    """Take the place of the vendor's backend, if this PyTorch has gloo; the libraries answered keep it there."""
    if not (dist.is_available() and dist.is_gloo_available()):
        return ()
    # The vendor registered its own under the same name, and PyTorch has no way to take a registration back.
    dist.Backend._plugins[NAME.upper()] = dist.Backend._BackendPlugin(_create, False)
    library = torch.library.Library("c10d", "IMPL")
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for operator in operators("c10d"):
        if has(operator._name, "CPU") and has(operator._name, "PrivateUse1"):
            library.impl(operator._name[6:], partial(_carry, device, operator), "PrivateUse1", allow_override=True)
    return (library,)


class Carrier(dist.ProcessGroupGloo):  # type: ignore[misc]
    """Gloo, with what torch_npu's Python side asks of its own group: it gathers and sends past PyTorch's dispatcher."""

    def allgather(self, outputs: Any, inputs: Any, *options: Any) -> Any:
        """Gather one tensor of each rank on all."""
        return super().allgather(_low(outputs), _low(inputs), *options)  # type: ignore[misc]

    def gather(self, outputs: Any, inputs: Any, *options: Any) -> Any:
        """Gather one tensor of each rank on one."""
        return super().gather(_low(outputs), _low(inputs), *options)  # type: ignore[misc]

    def batch_isend_irecv(self, kinds: list[str], tensors: list[torch.Tensor], peers: list[int]) -> Any:
        """Start several sends and receives, and answer one work for all of them."""
        works = []
        for kind, tensor, peer in zip(kinds, tensors, peers, strict=True):
            start = self.send if kind in ("isend", "send") else self.recv  # type: ignore[attr-defined]
            works.append(start(_low([tensor]), peer, 0))
        return _Works(works)


def _low(tensors: Any) -> Any:
    """CPU tensors over the same memory."""
    return tree_map_only(torch.Tensor, lambda tensor: lowered(tensor.detach()), tensors)


class _Works:
    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


# A Python object passed into PyTorch keeps its class only while Python holds it too, so for the life of the process.
_kept: list[Carrier] = []


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> Carrier:
    carrier = Carrier(dist.PrefixStore(NAME, store), rank, size, timeout)
    _kept.append(carrier)
    return carrier


def _carry(device: HostDevice, operator: Any, /, *args: Any) -> Any:
    name = operator._name[6:]
    for argument in args:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            _serve_cpu(dist.ProcessGroup.unbox(argument), device.kind)
    out = operator(*tree_map_only(torch.Tensor, lambda tensor: device.host(tensor.detach()), args))
    if name in _LOCAL:
        return out
    if not device.recorder.paused:
        device.recorder.collective(_NAMES.get(name, name.rstrip("_")))
    if name in _POINT_TO_POINT:
        return out
    return _finished(operator, args, out)


def _serve_cpu(group: Any, kind: str) -> None:
    """Let the group's backend for NPU tensors take CPU tensors too, unless the group has one for them."""
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:
        gloo = group._get_backend(torch.device(kind))
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)


def _finished(operator: Any, args: Any, out: Any) -> Any:
    """What the operator answers, with the caller's own tensors in place of those of the CPU."""
    answers = list(out) if isinstance(out, tuple) else [out]
    work = dist.Work.unbox(answers[-1]) if isinstance(answers[-1], torch.ScriptObject) else answers[-1]
    if work is None:
        return out
    work.wait()
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(args[0])
    answers[-1] = _work(future).boxed()
    if len(answers) > 1:
        answers[0] = args[0]
    return tuple(answers) if len(answers) > 1 else answers[0]
