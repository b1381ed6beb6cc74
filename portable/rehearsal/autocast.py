"""torch.autocast on the emulated device: which operators run in which precision.

PyTorch leaves the lists to each device. These are CUDA's: the macros AT_FORALL_* of aten/src/ATen/autocast_mode.h (PyTorch
2.13), whose policies are followed too, with the cache of weights that were cast.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch

from portable.rehearsal.schemas import overload

LOWER = (  # AT_FORALL_LOWER_PRECISION_FP
    "_convolution.deprecated", "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d",
    "conv_transpose2d.input", "conv_transpose3d.input", "convolution", "prelu", "addmm", "addmv", "addr", "matmul",
    "einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot",
    "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
    "_scaled_dot_product_flash_attention", "scaled_dot_product_attention",
)  # fmt: skip
# CUDA has one kernel for these layers and casts for it (_cudnn_rnn_cast_reflatten); here they are one operator too.
RECURRENT = (
    "lstm.input", "lstm.data", "gru.input", "gru.data", "rnn_tanh.input", "rnn_tanh.data", "rnn_relu.input", "rnn_relu.data",
)  # fmt: skip
FLOAT32 = (  # AT_FORALL_FP32, and norm of AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh", "tan",
    "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm", "rms_norm",
    "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity", "poisson_nll_loss",
    "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss",
    "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss",
    "multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp",
    "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_nearest3d",
    "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_trilinear3d",
    "upsample_bicubic2d", "_upsample_bicubic2d_aa", "norm.Scalar", "norm.ScalarOpt_dim",
)  # fmt: skip
FLOAT32_RESULT = (  # AT_FORALL_FP32_SET_OPT_DTYPE
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm", "linalg_matrix_norm",
    "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList",
)  # fmt: skip
WIDEST = (  # AT_FORALL_PROMOTE
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot", "scatter_add",
)  # fmt: skip
_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32})


class _Weights:
    """Weights that were cast inside the outermost autocast block, so that each is cast once and collects one gradient."""

    def __init__(self) -> None:
        self._cast: dict[tuple[int, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}
        clear = torch.clear_autocast_cache

        def clear_all() -> None:
            self._cast.clear()
            clear()

        torch.clear_autocast_cache = clear_all

    def cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The tensor in another dtype."""
        if not (
            tensor.dtype == torch.float32
            and tensor.requires_grad
            and tensor.is_leaf
            and not tensor._is_view()
            and torch.is_autocast_cache_enabled()
        ):
            return tensor.to(dtype)
        key = id(tensor), dtype
        found = self._cast.get(key)
        if found is None:
            found = self._cast[key] = (tensor, tensor.to(dtype))  # holding the weight keeps its id its own
        return found[1]


class Autocast:
    """The policies for one device type."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._weights = _Weights()

    def _convert(self, value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, torch.Tensor):
            if value.dtype in _FLOATS and value.dtype != dtype and value.device.type == self._kind:
                return self._weights.cast(value, dtype)
            return value
        if isinstance(value, (list, tuple)):
            return type(value)(self._convert(item, dtype) for item in value)
        return value

    def _run(self, operator: Any, dtype: torch.dtype, args: Any, kwargs: Any) -> Any:
        """Run an operator with its floating-point tensors (float64 apart) in one dtype."""
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            args = [self._convert(value, dtype) for value in args]
            kwargs = {name: self._convert(value, dtype) for name, value in kwargs.items()}
            return operator(*args, **kwargs)

    def lower(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        """In autocast's dtype."""
        return self._run(operator, torch.get_autocast_dtype(self._kind), args, kwargs)

    def float32(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        """In float32."""
        return self._run(operator, torch.float32, args, kwargs)

    def float32_result(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        """With ``dtype=torch.float32``, unless the caller names a dtype or the input is no floating-point tensor."""
        place = next(i for i, argument in enumerate(operator._schema.arguments) if argument.name == "dtype")
        asked = args[place] if place < len(args) else kwargs.get("dtype")
        first = args[0]
        if asked is None and first.device.type == self._kind and first.is_floating_point():
            args = args[:place]
            kwargs = {**kwargs, "dtype": torch.float32}
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            return operator(*args, **kwargs)

    def widest(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        """In float32 if an input has it, else in autocast's dtype."""
        wide = any(self._float32_in(value) for value in (*args, *kwargs.values()))
        return self._run(operator, torch.float32 if wide else torch.get_autocast_dtype(self._kind), args, kwargs)

    def _float32_in(self, value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            return value.dtype == torch.float32 and value.device.type == self._kind
        return isinstance(value, (list, tuple)) and any(map(self._float32_in, value))

    def banned(self, *args: Any, **kwargs: Any) -> NoReturn:
        """``binary_cross_entropy``, which half precision overflows."""
        raise RuntimeError(
            "binary_cross_entropy and nn.BCELoss are unsafe to autocast: a sigmoid in half precision rounds to 0 and 1. "
            "Pass the values before the sigmoid to binary_cross_entropy_with_logits (nn.BCEWithLogitsLoss), or call it with "
            f"torch.autocast({self._kind!r}, enabled=False)."
        )


def register(kind: str) -> tuple[torch.library.Library, ...]:
    """Give PyTorch the lists for a device type; they hold as long as the libraries answered."""
    rest = torch.library.Library("_", "IMPL")
    rest.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    policies = Autocast(kind)
    lists: tuple[tuple[tuple[str, ...], Callable[..., Any]], ...] = (
        (LOWER + RECURRENT, policies.lower),
        (FLOAT32, policies.float32),
        (FLOAT32_RESULT, policies.float32_result),
        (WIDEST, policies.widest),
        (("binary_cross_entropy",), policies.banned),
    )
    for names, policy in lists:
        for name in names:
            try:
                operator = overload(name)
            except AttributeError:
                continue  # a few come and go with PyTorch's versions
            aten.impl(name, partial(policy, operator), "AutocastPrivateUse1")
    return rest, aten
