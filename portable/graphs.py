"""Recorded graphs of kernels (CUDA graphs, Ascend's NPUGraph), for backends that have them.

Elsewhere every call raises `UnsupportedError`, which names the alternative; ask `is_supported` first.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from portable.selection import call


def is_supported() -> bool:
    """Whether the active backend records graphs."""
    return not getattr(call("CUDAGraph"), "portable_unsupported", False)


def Graph(*args: Any, **kwargs: Any) -> Any:
    """A new, empty graph (``torch.cuda.CUDAGraph``, ``torch.npu.NPUGraph``)."""
    return call("CUDAGraph")(*args, **kwargs)


CUDAGraph = Graph


def graph(graph: Any, *args: Any, **kwargs: Any) -> AbstractContextManager[Any]:
    """Context manager: record the block's kernels into ``graph``; arguments as in torch.cuda.graph."""
    return call("graph")(graph, *args, **kwargs)


def make_graphed_callables(callables: Any, sample_args: Any, **kwargs: Any) -> Any:
    """Replace callables by recorded graphs; arguments as in torch.cuda.make_graphed_callables."""
    return call("make_graphed_callables")(callables, sample_args, **kwargs)


def is_current_stream_capturing() -> bool:
    """Whether a recording is under way on the current stream."""
    return bool(call("is_current_stream_capturing")())


def graph_pool_handle() -> Any:
    """A memory pool that graphs may share."""
    return call("graph_pool_handle")()
