"""torch.distributed: "nccl" and CUDA devices in process groups and meshes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from portable.compat.patching import Patches
from portable.compat.target import SOURCE, Target

GROUP = "nccl"


def install(patches: Patches, target: Callable[[], Target]) -> None:
    """Replace the functions that name a backend or a device."""
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
