"""The process group of the emulated device.

gloo carries the bytes; the profile's `CollectiveRule` decides what is refused and what is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from portable.rehearsal.device import Device
from portable.rehearsal.profile import CollectiveRule


class Group(dist.ProcessGroup):
    """Collectives over the memory of the device's tensors. Each is done when the call returns.

    Args:
        device: the emulated device of this process.
        carrier: a gloo process group of the same processes.

    The methods are those that PyTorch's C++ calls, with its options objects; its stubs list further forms, for users.
    """

    def __init__(self, device: Device, carrier: Any) -> None:
        super().__init__(carrier.rank(), carrier.size())  # type: ignore[call-arg]
        self._device = device
        self._carrier = carrier
        self._rule: CollectiveRule = device.profile.collectives.value

    @property
    def _device_types(self) -> list[torch.device]:  # where PyTorch puts pickled objects that it sends
        return [torch.device(self._device.kind)]

    def getBackendName(self) -> str:
        """Name of the backend."""
        return self._rule.name

    name = getBackendName

    @property
    def group_name(self) -> Any:
        """Name under which PyTorch registered the group; its own property asks a C++ backend, which this one has not."""
        return dist.distributed_c10d._world.pg_names[self]

    pg_name = group_name

    # -- helpers -------------------------------------------------------------------------------------------------------------

    def _refuse(self, operation: str, reason: str) -> None:
        self._device.recorder.refuse(
            operation,
            NotImplementedError(
                f"{operation} was called on the process group {self._rule.name!r}, which does not do it: {reason}. "
                "Use a gloo group for it: group = dist.new_group(backend='gloo'), with tensors on the CPU."
            ),
        )

    def _lower(self, operation: str, tensors: Any) -> Any:
        if not isinstance(tensors, torch.Tensor):
            return [self._lower(operation, tensor) for tensor in tensors]
        if tensors.device.type != self._device.kind:
            raise RuntimeError(
                f"{operation}: a tensor on {tensors.device} was passed to the process group {self._rule.name!r}, which takes "
                f"tensors on {self._device.kind} only. Move it there, or use a gloo group for tensors on the CPU."
            )
        if tensors.dim() and tensors.shape[0] == 0:
            self._device.recorder.refuse(
                operation,
                RuntimeError(
                    f"{operation}: a tensor whose first dimension is 0 was passed, which {self._rule.name!r} refuses. "
                    "Pad it, or leave the call out on all ranks."
                ),
            )
        return self._device.host(tensors.detach())

    def _done(self, operation: str, answer: Any) -> Any:
        if not self._device.recorder.paused:
            self._device.recorder.collective(operation)
        return self._finished(answer)

    def _finished(self, answer: Any) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(answer)
        return torch._C._distributed_c10d._create_work_from_future(future)  # type: ignore[attr-defined]

    def _rounds(self, tensor: torch.Tensor) -> bool:
        integer = not tensor.dtype.is_floating_point and tensor.dtype is not torch.bool
        return self._rule.integer_bits is not None and integer

    def _through_floats(self, operation: str, outs: Sequence[torch.Tensor], run: Callable[[bool], None]) -> None:
        """Run a collective on integers as the device does, in float32; a finding if the exact answer differs.

        Args:
            outs: CPU tensors that hold the answer afterwards.
            run: runs the collective exactly (False), or on float32 copies of its inputs (True), into ``outs``.
        """
        run(False)
        exact = [out.clone() for out in outs]
        run(True)
        for out, right in zip(outs, exact, strict=True):
            if not torch.equal(out, right):
                worst = float((out.double() - right.double()).abs().max())
                self._device.recorder.finding(
                    "integer collective through float32",
                    operation,
                    f"exact to {self._rule.integer_bits} bits only: off by up to {worst:.0f}; "
                    "use a gloo group for large integers",
                    worst,
                )

    # -- collectives ---------------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        """Combine over all ranks, in place."""
        opts = opts or dist.AllreduceOptions()
        for host in self._lower("all_reduce", tensors):
            self._reduce("all_reduce", host, lambda part: self._carrier.allreduce([part], opts).wait())
        return self._done("all_reduce", tensors)

    def _reduce(self, operation: str, host: torch.Tensor, reduce: Callable[[torch.Tensor], Any]) -> None:
        if not self._rounds(host):
            reduce(host)
            return
        mine = host.clone()

        def run(floats: bool) -> None:
            part = mine.float() if floats else mine.clone()
            reduce(part)
            host.copy_(part)

        self._through_floats(operation, [host], run)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        """`allreduce` of several tensors."""
        plain = dist.AllreduceOptions()
        if opts is not None:
            plain.reduceOp = opts.reduceOp
        return self.allreduce(tensors, plain)

    def reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        """Combine over all ranks onto one."""
        for host in self._lower("reduce", tensors):
            self._reduce("reduce", host, lambda part: self._carrier.reduce([part], opts).wait())
        return self._done("reduce", tensors)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        """Copy one rank's tensors to all."""
        opts = opts or dist.BroadcastOptions()
        for host in self._lower("broadcast", tensors):
            if self._rule.sum_broadcast:
                self._reduce("broadcast", host, lambda part: self._carrier.broadcast([part], opts).wait())
            else:
                self._carrier.broadcast([host], opts).wait()
        return self._done("broadcast", tensors)

    def allgather(self, outs: list[list[torch.Tensor]], tensors: list[torch.Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        """Every rank gets the tensors of all."""
        self._carrier.allgather(self._lower("all_gather", outs), self._lower("all_gather", tensors)).wait()
        return self._done("all_gather", outs)

    def _allgather_base(self, out: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        host = self._lower("all_gather_into_tensor", tensor)
        parts = list(self._lower("all_gather_into_tensor", out).view(self.size(), *host.shape).unbind(0))
        self._carrier.allgather([parts], [host]).wait()
        return self._done("all_gather_into_tensor", out)

    all_gather_single = _allgather_base  # type: ignore[assignment]

    def allgather_into_tensor_coalesced(self, outs: list[torch.Tensor], tensors: list[torch.Tensor], opts: Any = None) -> Any:
        """`_allgather_base` of several tensors; PyTorch's functional collectives call it for one."""
        for out, tensor in zip(outs, tensors, strict=True):
            self._allgather_base(out, tensor, opts)
        return self._finished(outs)

    def gather(self, outs: list[list[torch.Tensor]], tensors: list[torch.Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        """One rank gets the tensors of all."""
        self._carrier.gather(self._lower("gather", outs), self._lower("gather", tensors), opts).wait()
        return self._done("gather", outs)

    def scatter(self, outs: list[torch.Tensor], tensors: list[list[torch.Tensor]], opts: Any = None) -> Any:  # type: ignore[override]
        """Each rank gets a tensor from one."""
        self._carrier.scatter(self._lower("scatter", outs), self._lower("scatter", tensors), opts).wait()
        return self._done("scatter", outs)

    def reduce_scatter(self, outs: list[torch.Tensor], tensors: list[list[torch.Tensor]], opts: Any = None) -> Any:  # type: ignore[override]
        """Combine lists of tensors over all ranks; each rank gets its part."""
        for out, parts in zip(outs, tensors, strict=True):
            self._reduce_scatter("reduce_scatter", out, torch.stack(self._lower("reduce_scatter", parts)), opts)
        return self._done("reduce_scatter", outs)

    def _reduce_scatter(self, operation: str, out: torch.Tensor, parts: torch.Tensor, opts: Any) -> None:
        reducing = dist.AllreduceOptions()
        if opts is not None:
            reducing.reduceOp = opts.reduceOp
        self._reduce(operation, parts, lambda part: self._carrier.allreduce([part], reducing).wait())
        self._lower(operation, out).copy_(parts[self.rank()])

    def _reduce_scatter_base(self, out: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        parts = self._lower("reduce_scatter_tensor", tensor).clone().view(self.size(), *out.shape)
        self._reduce_scatter("reduce_scatter_tensor", out, parts, opts)
        return self._done("reduce_scatter_tensor", out)

    reduce_scatter_single = _reduce_scatter_base  # type: ignore[assignment]

    def reduce_scatter_tensor_coalesced(self, outs: list[torch.Tensor], tensors: list[torch.Tensor], opts: Any = None) -> Any:
        """`_reduce_scatter_base` of several tensors; PyTorch's functional collectives call it for one."""
        name = "reduce_scatter_coalesced"
        if len(outs) > 1 and name in self._rule.refused:
            self._refuse(name, self._rule.refused[name])
        for out, tensor in zip(outs, tensors, strict=True):
            self._reduce_scatter_base(out, tensor, opts)
        return self._finished(outs)

    def alltoall_base(
        self, out: torch.Tensor, tensor: torch.Tensor, out_sizes: list[int], in_sizes: list[int], opts: Any = None
    ) -> Any:
        """Each rank sends a part of its tensor to every other."""
        if self._rule.even_splits and len({*out_sizes, *in_sizes}) > 1:
            self._refuse("all_to_all_single with uneven splits", "it takes equal splits only")
        host = self._lower("all_to_all_single", tensor)
        self._carrier.alltoall_base(self._lower("all_to_all_single", out), host, out_sizes, in_sizes).wait()
        return self._done("all_to_all_single", out)

    all_to_all_single = alltoall_base  # type: ignore[assignment]

    def alltoall(self, outs: list[torch.Tensor], tensors: list[torch.Tensor], opts: Any = None) -> Any:
        """Each rank sends a tensor to every other."""
        if self._rule.even_splits and len({t.numel() for t in (*outs, *tensors)}) > 1:
            self._refuse("all_to_all with tensors of different sizes", "it takes equal splits only")
        flat = torch.cat([host.flatten() for host in self._lower("all_to_all", tensors)])
        got = torch.empty_like(flat)
        self._carrier.alltoall_base(got, flat, [], []).wait()
        for out, part in zip(self._lower("all_to_all", outs), got.chunk(self.size()), strict=True):
            out.copy_(part.view(out.shape))
        return self._done("all_to_all", outs)

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks."""
        if self._rule.barrier_default_group_only and self is not dist.group.WORLD:
            self._refuse("barrier on a group other than the default one", "it has barriers for the default group only")
        self._carrier.barrier().wait()
        return self._done("barrier", None)

    def send(self, tensors: list[torch.Tensor], to: int, tag: int = 0) -> Any:
        """Point to point."""
        if "send" in self._rule.refused:
            self._refuse("send", self._rule.refused["send"])
        self._carrier.send(self._lower("send", tensors), to, tag).wait()
        return self._done("send", tensors)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> Any:
        """Point to point."""
        if "recv" in self._rule.refused:
            self._refuse("recv", self._rule.refused["recv"])
        self._carrier.recv(self._lower("recv", tensors), source, tag).wait()
        return self._done("recv", tensors)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> Any:
        """Point to point."""
        if "recv_anysource" in self._rule.refused:
            self._refuse("recv_anysource", self._rule.refused["recv_anysource"])
        self._carrier.recv_anysource(self._lower("recv_anysource", tensors), tag).wait()
        return self._done("recv_anysource", tensors)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> Any:
        """A barrier that names the ranks which do not come."""
        if "monitored_barrier" in self._rule.refused:
            self._refuse("monitored_barrier", self._rule.refused["monitored_barrier"])
        return self.barrier()


def register(device: Device) -> None:
    """Make the device's backend known to ``torch.distributed``."""
    if not (dist.is_available() and dist.is_gloo_available()):
        return

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> Group:
        carrier = dist.ProcessGroupGloo(dist.PrefixStore("carrier", store), rank, size, timeout)
        return Group(device, carrier)

    dist.Backend.register_backend(device.profile.collectives.value.name, create, devices=[device.kind])
