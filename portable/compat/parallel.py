"""Data-parallel wrappers: DistributedDataParallel, FullyShardedDataParallel, and DataParallel over threads."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import DataParallel
from torch.utils._pytree import tree_map

from portable.compat.patching import Patches
from portable.compat.target import SOURCE, Target

_FSDP = "torch.distributed.fsdp.fully_sharded_data_parallel"  # takes a second to import, and most programs do not


def install(patches: Patches, target: Callable[[], Target]) -> None:
    """Replace the constructors, and run DataParallel on one device."""
    _data_parallel(patches, target)
    if torch.distributed.is_available():
        _ddp(patches, target)
        patches.when_imported(_FSDP, lambda: _fsdp(patches, target))


def _ddp(patches: Patches, target: Callable[[], Target]) -> None:
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


def _fsdp(patches: Patches, target: Callable[[], Target]) -> None:
    wrapper = sys.modules[_FSDP].FullyShardedDataParallel
    init = wrapper.__init__

    @functools.wraps(init)
    def fsdp_init(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("device_id") is not None:
            kwargs["device_id"] = target().device(kwargs["device_id"], "FullyShardedDataParallel(device_id=)")
        init(self, *args, **kwargs)

    patches.set(wrapper, "__init__", fsdp_init)


def _data_parallel(patches: Patches, target: Callable[[], Target]) -> None:
    """nn.DataParallel copies the module to several CUDA devices with functions that only CUDA has. The module on one device
    computes the same; PyTorch itself does that where it is told that there is no kind of device to spread over."""
    module_of = sys.modules[DataParallel.__module__]
    patches.set(module_of, "_get_available_device_type", lambda: None)
    init, forward = DataParallel.__init__, DataParallel.forward

    @functools.wraps(init)
    def new_init(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, dim: int = 0) -> None:
        here = target()
        here.note("changed", "nn.DataParallel", "the module itself on one device; DistributedDataParallel uses several")
        init(self, module)
        devices = list(range(here.count())) if device_ids is None else list(device_ids)
        if len(devices) == 1:  # as PyTorch does
            module.to(here.device(devices[0], "nn.DataParallel(device_ids=)"))

    @functools.wraps(forward)
    def new_forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        inputs, kwargs = _beside(self.module, (inputs, kwargs), target())
        return forward(self, *inputs, **kwargs)

    def data_parallel(
        module: Any, inputs: Any, device_ids: Any = None, output_device: Any = None, dim: int = 0, module_kwargs: Any = None
    ) -> Any:
        here = target()
        here.note("changed", "nn.parallel.data_parallel", "one call on one device")
        inputs = inputs if isinstance(inputs, tuple) else (inputs,)
        inputs, kwargs = _beside(module, (inputs, module_kwargs or {}), here)
        return module(*inputs, **kwargs)

    patches.set(DataParallel, "__init__", new_init)
    patches.set(DataParallel, "forward", new_forward)
    function = torch.nn.parallel.data_parallel
    if not callable(function):  # the module of that name, if it hides the function
        function = module_of.data_parallel  # type: ignore[unreachable]
    wrapped = functools.wraps(function)(data_parallel)
    patches.set(module_of, "data_parallel", wrapped)
    if torch.nn.parallel.data_parallel is function:
        patches.set(torch.nn.parallel, "data_parallel", wrapped)


def _beside(module: torch.nn.Module, inputs: Any, here: Target) -> Any:
    """Tensors of the inputs where the module's parameters are, as DataParallel's scattering leaves them."""
    parameter = next(module.parameters(), None)
    device = here.device(SOURCE, "nn.DataParallel inputs") if parameter is None else parameter.device
    return tree_map(lambda value: value.to(device) if isinstance(value, torch.Tensor) else value, inputs)
