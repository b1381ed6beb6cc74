"""What `portable info` shows, as data. `portable.info_view` turns it into tables."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

import portable
from portable import _loading, plugins, selection
from portable.backend import Backend
from portable.compiling import explain_compile
from portable.policy import precision_policy

SCHEMA = 1


@dataclass(frozen=True)
class DeviceInfo:
    """One device: its name, generation, memory in bytes, and the dtypes it stores and multiplies."""

    index: int
    name: str
    generation: str | None
    memory: int | None
    storage: tuple[str, ...]
    matmul: tuple[str, ...]


@dataclass(frozen=True)
class BackendInfo:
    """One backend: whether it can run here, and if so with which devices and choices."""

    name: str
    vendor: str
    device_type: str
    provider: str
    active: bool
    available: bool
    execution: str
    reason: str
    next_step: str
    devices: tuple[DeviceInfo, ...] = ()
    precision: dict[str, Any] = field(default_factory=dict)
    compile: dict[str, Any] = field(default_factory=dict)
    process_group: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Info:
    """Everything `portable info` knows. ``schema`` grows when a field changes its meaning."""

    schema: int
    versions: dict[str, str]
    active: str | None
    problem: str | None
    backends: tuple[BackendInfo, ...]
    plugin_problems: tuple[dict[str, str], ...]

    def as_dict(self) -> dict[str, Any]:
        """The same as plain containers, for JSON."""
        return asdict(self)


def collect() -> Info:
    """Ask every backend. Never raises because of one of them; a wrong PORTABLE_BACKEND is reported as ``problem``."""
    found = plugins.registry()
    active, problem = None, None
    try:
        active = selection.active().spec.name
    except portable.errors.PortableError as error:
        problem = str(error)
    ranked = sorted(found.backends.values(), key=lambda b: (-b.spec.priority, b.spec.name))
    backends = []
    for backend in ranked:
        provider = found.providers[backend.spec.name]
        described = found.guarded(provider, "describe", partial(_describe, backend, active, provider))
        backends.append(described or _minimal(backend, active, provider))
    return Info(
        SCHEMA,
        _versions(),
        active,
        problem,
        tuple(backends),
        tuple({"plugin": p.plugin, "phase": p.phase, "message": p.message} for p in found.problems),
    )


def _minimal(backend: Backend, active: str | None, provider: str) -> BackendInfo:
    spec, answer = backend.spec, selection.availability(backend)
    return BackendInfo(
        spec.name,
        spec.vendor,
        spec.device_type,
        provider,
        spec.name == active,
        answer.available,
        answer.execution,
        answer.reason,
        answer.next_step,
    )


def _describe(backend: Backend, active: str | None, provider: str) -> BackendInfo:
    base = _minimal(backend, active, provider)
    if not base.available:
        return base
    backend.load()
    choice = explain_compile(backend)
    values = {
        **asdict(base),
        "devices": tuple(_device(backend, index) for index in range(selection.availability(backend).device_count)),
        "precision": asdict(precision_policy(backend)),
        "compile": {"backend": choice.backend or "eager", "reason": choice.reason, "options": dict(choice.kwargs)},
        "process_group": backend.spec.process_group,
        "versions": dict(backend.versions()),
        "environment": {key: os.environ[key] for key in backend.spec.environment if key in os.environ},
    }
    return BackendInfo(**values)


def _device(backend: Backend, index: int) -> DeviceInfo:
    generation = backend.generation(index)
    return DeviceInfo(
        index,
        backend.device_name(index),
        generation.name if generation else None,
        backend.total_memory(index),
        tuple(sorted(generation.storage)) if generation else (),
        tuple(sorted(generation.matmul)) if generation else (),
    )


def _versions() -> dict[str, str]:
    versions = {
        "portable": portable.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
    }
    for name in ("torch-npu", "torch-neuronx", "torchvision", "triton"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    for name, error in _loading.autoload_errors.items():
        versions[f"torch.backends entry {name}"] = f"failed to load: {error}"
    return versions
