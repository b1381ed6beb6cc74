"""torch.autocast on the emulated device: which operators run in which precision.

PyTorch leaves the lists to each device. These are CUDA's (PyTorch documentation, "Automatic Mixed Precision: Autocast Op
Reference"), as operators of ATen.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

LOWER = (
    "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input", "convolution",
    "prelu", "addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm",
    "chain_matmul", "linalg_multi_dot", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell",
    "rnn_relu_cell", "scaled_dot_product_attention",
)  # fmt: skip
FLOAT32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh", "tan",
    "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm", "rms_norm", "group_norm",
    "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss",
    "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss",
    "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss",
    "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp", "upsample_nearest1d",
    "upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d", "prod", "prod.dim_int", "softmax.int", "log_softmax.int",
    "cumprod", "cumsum", "linalg_vector_norm", "sum", "sum.dim_IntList", "norm.Scalar", "norm.ScalarOpt_dim",
)  # fmt: skip
WIDEST = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sampler", "index_put", "tensordot", "scatter_add", "stack",
    "cat",
)  # fmt: skip
_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32})


def _lower(kind: str, args: Any) -> torch.dtype:
    return torch.get_autocast_dtype(kind)


def _float32(kind: str, args: Any) -> torch.dtype:
    return torch.float32


def _widest(kind: str, args: Any) -> torch.dtype:
    found = {leaf.dtype for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor) and leaf.device.type == kind}
    return torch.float32 if torch.float32 in found else torch.get_autocast_dtype(kind)


def _cast(operator: Any, kind: str, choose: Callable[[str, Any], torch.dtype], *args: Any, **kwargs: Any) -> Any:
    """Run an operator with its floating-point tensors in the chosen dtype."""
    dtype = choose(kind, (args, kwargs))

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.dtype in _FLOATS and tensor.dtype != dtype and tensor.device.type == kind else tensor

    with torch._C._ExcludeDispatchKeyGuard(_KEYS):
        args, kwargs = tree_map_only(torch.Tensor, convert, (args, kwargs))
        return operator(*args, **kwargs)


def register(kind: str) -> tuple[torch.library.Library, ...]:
    """Give PyTorch the lists for a device type; they hold as long as the libraries answered."""
    rest = torch.library.Library("_", "IMPL")
    rest.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    for names, choose in ((LOWER, _lower), (FLOAT32, _float32), (WIDEST, _widest)):
        for name in names:
            packet, _, overload = name.partition(".")
            operator = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
            if operator is not None:  # a few come and go with PyTorch's versions
                aten.impl(name, partial(_cast, operator, kind, choose), "AutocastPrivateUse1")
    return rest, aten
