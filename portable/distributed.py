"""`pt.distributed`: one call that joins the processes torchrun started, and thin DDP and FSDP2 helpers.

Nothing here replaces torch.distributed; the helpers only fill in what depends on the backend: the process-group backend,
this process's device, ``device_ids``, and the device mesh.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from portable.errors import ConfigurationError, DeviceIndexError
from portable.selection import active

# What torchrun sets for every worker (PyTorch documentation, "torchrun (Elastic Launch)", environment variables).
_RANKS = ("RANK", "WORLD_SIZE")
_NEEDED = (*_RANKS, "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class World:
    """This process's place among the others.

    Attributes:
        rank: 0 to world_size - 1 over all machines.
        local_rank: the same within this machine.
        world_size: number of processes.
        device: the device this process computes on.
        backend: name of the process-group backend in use.
    """

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    backend: str

    @property
    def is_main(self) -> bool:
        """Whether this is the process that prints and writes files."""
        return self.rank == 0


def init(backend: str | None = None, *, timeout: timedelta | None = None) -> World:
    """Join the other processes and choose this process's device.

    Under torchrun the ranks come from its environment; without it this is a world of one process. A group that exists
    already is taken as it is.

    Args:
        backend: process-group backend; by default the one the active backend declares (nccl, hccl, neuron, gloo), together
            with gloo for tensors on the CPU where the two can be combined.
        timeout: how long a collective may take before it fails; PyTorch's default if None.

    Raises:
        ConfigurationError: torchrun's environment is incomplete or not numeric, or PyTorch was built without the backend.
        DeviceIndexError: more processes on this machine than devices.
    """
    from torch import distributed as dist

    here = active()
    if not dist.is_available():
        raise ConfigurationError(
            "pt.distributed.init() was called, but this PyTorch was built without torch.distributed. "
            "Install a build that has it, or run in a single process without this call."
        )
    if not dist.is_initialized():
        launched = any(key in os.environ for key in (*_RANKS, "LOCAL_RANK"))
        local_rank = _local_rank() if launched else 0
        name = backend or _group_backend()
        _check_built(name)
        options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
        if not launched:
            options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        if here.group_before_device:
            dist.init_process_group(name, **options)
            device = _local_device(local_rank)
        else:
            device = _local_device(local_rank)
            dist.init_process_group(name, **options)
    else:
        # Made elsewhere (torch.multiprocessing, MPI), perhaps without torchrun's variables: then one machine is assumed.
        local_rank = dist.get_node_local_rank(fallback_rank=dist.get_rank())
        device = _local_device(local_rank)
    return World(dist.get_rank(), local_rank, dist.get_world_size(), device, str(dist.get_backend()))


def _local_rank() -> int:
    missing = [key for key in _NEEDED if key not in os.environ]
    if missing:
        raise ConfigurationError(
            f"pt.distributed.init() found a part of torchrun's environment, but {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set. Start the script with torchrun, or set all of "
            f"{', '.join(_NEEDED)} (and LOCAL_RANK)."
        )
    for key in (*_RANKS, "LOCAL_RANK", "MASTER_PORT"):
        if not os.environ.get(key, "0").isdecimal():
            raise ConfigurationError(
                f"the environment variable {key} is {os.environ[key]!r}, which is not a whole number of 0 or more. "
                "Start the script with torchrun, which sets it."
            )
    rank, size = (int(os.environ[key]) for key in _RANKS)
    if rank >= size:
        raise ConfigurationError(
            f"the environment says RANK={rank} and WORLD_SIZE={size}, but ranks run from 0 to WORLD_SIZE - 1. "
            "Start the script with torchrun, which sets both."
        )
    return int(os.environ.get("LOCAL_RANK", rank))


def _group_backend() -> str:
    spec = active().spec
    if spec.device_type == "cpu" or not spec.composite_group:
        return spec.process_group
    return f"cpu:gloo,{spec.device_type}:{spec.process_group}"


def _check_built(name: str) -> None:
    """Refuse a process-group backend that this PyTorch lacks; ``name`` may combine several ("cpu:gloo,cuda:nccl")."""
    from torch import distributed as dist

    for part in name.split(","):
        wanted = part.rpartition(":")[2].strip()
        if not dist.is_backend_available(wanted):
            raise ConfigurationError(
                f"the process-group backend {wanted!r} was asked for, but this PyTorch ({torch.__version__}) was built without "
                f"it. Leave the argument out (the {active().spec.name} backend uses {_group_backend()!r}), or install a "
                "build or plugin that has it."
            )


def _local_device(local_rank: int) -> torch.device:
    from portable.devices import device_count

    here = active()
    if here.spec.device_type != "cpu" and not here.one_device_per_process and local_rank >= device_count():
        raise DeviceIndexError(
            f"process {local_rank} of this machine needs a device of its own, but the {here.spec.name} backend has "
            f"{device_count()}. Start at most that many processes per machine (torchrun --nproc-per-node)."
        )
    return here.claim_device(local_rank)


def _need_group(caller: str) -> None:
    from torch import distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigurationError(
            f"pt.distributed.{caller}() was called, but this process has joined no group. Call pt.distributed.init() first."
        )


def ddp(model: nn.Module, **kwargs: Any) -> nn.parallel.DistributedDataParallel:
    """Wrap a model that is on this process's device in DistributedDataParallel.

    Args:
        model: its parameters lie on one device (or on several that the model itself moves activations between).
        kwargs: further arguments of DistributedDataParallel.

    Raises:
        ConfigurationError: `init` has not been called.
    """
    _need_group("ddp")
    devices = {parameter.device for parameter in model.parameters()}
    single = len(devices) == 1 and "cpu" not in {device.type for device in devices}
    kwargs.setdefault("device_ids", list(devices) if single else None)
    return nn.parallel.DistributedDataParallel(model, **kwargs)


def fsdp(model: nn.Module, blocks: Iterable[nn.Module] | type[nn.Module] = (), **kwargs: Any) -> nn.Module:
    """Shard a model's parameters, gradients and optimizer state with FSDP2 (``fully_shard``), in place.

    Args:
        model: the model; it becomes an FSDPModule and is returned.
        blocks: submodules that are gathered one at a time (usually the transformer blocks), inner ones before those that
            contain them; or their class.
        kwargs: further arguments of fully_shard (``mp_policy``, ``reshard_after_forward`` ...); ``mesh`` spans all
            processes by default.

    Raises:
        ConfigurationError: `init` has not been called.
    """
    _need_group("fsdp")
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if "mesh" not in kwargs:
        kwargs["mesh"] = init_device_mesh(active().spec.device_type, (dist.get_world_size(),))
    if isinstance(blocks, type):
        kind = blocks
        # modules() lists a container before its contents; fully_shard wants the contents first, and the model last.
        found = [module for module in model.modules() if isinstance(module, kind) and module is not model]
        blocks = reversed(found)
    for block in blocks:
        fully_shard(block, **kwargs)
    fully_shard(model, **kwargs)
    return model


def shutdown() -> None:
    """Leave the group; does nothing without one."""
    from torch import distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
