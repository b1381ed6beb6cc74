"""torch.distributed: "nccl" and CUDA devices in process groups, meshes and data-parallel wrappers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from portable.compat.patching import Patches
from portable.compat.target import SOURCE, Target

GROUP = "nccl"


def install(patches: Patches, target: Callable[[], Target]) -> None:
    """Replace the functions that name a backend or a device, and what the wrappers' constructors take."""
    _data_parallel(patches, target)
    if not torch.distributed.is_available():
        return
    from torch import distributed as dist
    from torch.distributed import device_mesh, distributed_c10d

    for name in ("init_process_group", "new_group"):
        wrapped = _with_backend(getattr(dist, name), target)
        for owner in (dist, distributed_c10d):
            patches.set(owner, name, wrapped)
    for name in ("is_nccl_available", "is_backend_available"):
        wrapped = _available(getattr(dist, name))
        for owner in (dist, distributed_c10d):
            if name in vars(owner):
                patches.set(owner, name, wrapped)
    if hasattr(dist, "get_default_backend_for_device"):
        default = dist.get_default_backend_for_device

        @functools.wraps(default)
        def default_backend(device: Any) -> str:
            return default(target().device(device, "torch.distributed.get_default_backend_for_device"))

        patches.set(dist, "get_default_backend_for_device", default_backend)
    barrier = dist.barrier

    @functools.wraps(barrier)
    def new_barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return barrier(group, async_op, None if target().is_cpu else device_ids)

    patches.set(dist, "barrier", new_barrier)
    _mesh(patches, target, device_mesh)


def _group_name(here: Target, backend: Any) -> Any:
    """Translate "nccl" and composite names ("cpu:gloo,cuda:nccl")."""
    if not isinstance(backend, str):
        return backend
    ours = here.backend.spec.process_group
    if backend.lower() == GROUP:
        here.note("redirected", "torch.distributed backend", f"{GROUP} became {ours}")
        return ours
    if ":" not in backend:
        return backend
    pairs: dict[str, str] = {}
    for part in backend.split(","):
        device, _, name = part.strip().partition(":")
        translated = here.kind if device == SOURCE else device
        # On the CPU both halves of "cpu:gloo,cuda:nccl" mean the same device; the one written for the CPU stays.
        pairs.setdefault(translated, ours if name.lower() == GROUP else name)
    result = ",".join(f"{device}:{name}" for device, name in pairs.items())
    if result != backend:
        here.note("redirected", "torch.distributed backend", f"{backend} became {result}")
    return result


def _with_backend(original: Any, target: Callable[[], Target]) -> Any:
    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        here = target()
        if args and original.__name__ == "init_process_group":
            args = (_group_name(here, args[0]), *args[1:])
        if "backend" in kwargs:
            kwargs["backend"] = _group_name(here, kwargs["backend"])
        if kwargs.get("device_id") is not None:
            device = here.device(kwargs["device_id"], "init_process_group(device_id=)")
            # A group on the CPU is not bound to a device.
            kwargs["device_id"] = None if here.is_cpu else device
        return original(*args, **kwargs)

    return wrapped


def _available(original: Any) -> Any:
    """NCCL is available in the sense that asking for it works."""

    @functools.wraps(original)
    def available(backend: str = GROUP) -> bool:
        return True if backend.lower() == GROUP else bool(original(backend))

    return available


def _mesh(patches: Patches, target: Callable[[], Target], module: Any) -> None:
    original = module.init_device_mesh

    @functools.wraps(original)
    def init_device_mesh(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return original(target().type(device_type, "init_device_mesh"), *args, **kwargs)

    for owner in (module, torch.distributed):
        if "init_device_mesh" in vars(owner):
            patches.set(owner, "init_device_mesh", init_device_mesh)
    init = module.DeviceMesh.__init__

    @functools.wraps(init)
    def new_init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        init(self, target().type(device_type, "DeviceMesh"), *args, **kwargs)

    patches.set(module.DeviceMesh, "__init__", new_init)


def _data_parallel(patches: Patches, target: Callable[[], Target]) -> None:
    from torch.nn.parallel import DistributedDataParallel

    init = DistributedDataParallel.__init__

    @functools.wraps(init)
    def ddp_init(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kwargs: Any) -> None:
        here = target()
        if device_ids is not None:
            found = [here.device(device, "DistributedDataParallel(device_ids=)") for device in device_ids]
            device_ids = None if here.is_cpu else found
        if output_device is not None:
            where = here.device(output_device, "DistributedDataParallel(output_device=)")
            output_device = None if here.is_cpu else where
        init(self, module, device_ids, output_device, *args, **kwargs)

    patches.set(DistributedDataParallel, "__init__", ddp_init)
    _data_parallel_over_threads(patches, target)
    _fsdp(patches, target)


def _data_parallel_over_threads(patches: Patches, target: Callable[[], Target]) -> None:
    """nn.DataParallel asks PyTorch for the available kind of device; where it is told none it calls the module directly."""
    init = torch.nn.DataParallel.__init__

    @functools.wraps(init)
    def new_init(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, dim: int = 0) -> None:
        here = target()
        if here.is_cpu:
            here.note("changed", "nn.DataParallel", "the module itself: the CPU is one device")
            device_ids = output_device = None
        init(self, module, device_ids, output_device, dim)

    patches.set(torch.nn.DataParallel, "__init__", new_init)


def _fsdp(patches: Patches, target: Callable[[], Target]) -> None:
    if not torch.distributed.is_available():
        return
    from torch.distributed.fsdp import FullyShardedDataParallel

    init = FullyShardedDataParallel.__init__

    @functools.wraps(init)
    def fsdp_init(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("device_id") is not None:
            kwargs["device_id"] = target().device(kwargs["device_id"], "FullyShardedDataParallel(device_id=)")
        init(self, *args, **kwargs)

    patches.set(FullyShardedDataParallel, "__init__", fsdp_init)
