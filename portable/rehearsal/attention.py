"""scaled_dot_product_attention on the emulated device.

The profile's rule decides which path the real device would take; it is counted, and a path without a flash kernel takes the
memory of all scores. The numbers are the CPU's for the same call: PyTorch's CPU flash kernel where the CPU would take it, else
PyTorch's own decomposition.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from portable.rehearsal.device import Device
from portable.rehearsal.observing import attention_call

_aten = torch.ops.aten
_fused = _aten._scaled_dot_product_fused_attention_overrideable.default
_fused_backward = _aten._scaled_dot_product_fused_attention_overrideable_backward.default
_FLASH = int(torch._C._SDPBackend.FLASH_ATTENTION)  # type: ignore[attr-defined, call-overload]

_DEFAULTS = (None, None, None, None, 0.0, False)  # query, key, value, mask, dropout, causal


class Attention:
    """Attention of one device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        profile = device.profile
        self._plain = profile.attention.value.plain
        self._round = profile.matmul_dtype.value
        device.override(_fused, self._forward)
        device.override(_fused_backward, self._backward)

    def register(self) -> torch.library.Library:
        """Give PyTorch the device's attention; it lasts as long as the library answered."""
        library = torch.library.Library("aten", "IMPL")
        for key in ("AutogradPrivateUse1", "PrivateUse1"):
            library.impl("scaled_dot_product_attention", self.attend, key)
        return library

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """See torch.nn.functional.scaled_dot_product_attention."""
        if isinstance(query, FakeTensor):  # Dynamo asks for shapes only
            return query.new_empty((*query.shape[:-1], value.shape[-1]))
        device = self._device
        call = attention_call(query, key, value, attn_mask, dropout_p, is_causal)
        if device.observer.attention(call) == self._plain:
            device.memory[query.device.index].transient(call.scores)
        host = [None if t is None else device.host(t.detach()) for t in (query, key, value, attn_mask)]
        learned = attn_mask is not None and attn_mask.requires_grad and torch.is_grad_enabled()
        choice = torch._fused_sdp_choice(*host, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)  # type: ignore[arg-type, misc]
        if choice == _FLASH and not learned:
            return _fused(query, key, value, attn_mask, dropout_p, is_causal, False, scale=scale)[0]
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = _additive(attn_mask, query.dtype)
        return _aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]

    def _rounded(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        if self._round is None:
            return list(tensors)
        return [t.to(self._round).float() if t.dtype == torch.float32 else t for t in tensors]

    def _forward(self, operator: Any, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The overrideable kernel: (output, logsumexp, then what only CUDA's kernels use)."""
        query, key, value, mask, dropout, causal = (*args, *_DEFAULTS[len(args) :])[:6]
        query, key, value = self._rounded(query, key, value)
        if mask is not None and mask.dtype == torch.bool:
            mask = _additive(mask, query.dtype)
        out, logsumexp = _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout, causal, attn_mask=mask, scale=kwargs.get("scale")
        )
        nothing = torch.empty(0, dtype=torch.int32)
        return out, logsumexp, nothing, nothing.clone(), query.shape[2], key.shape[2], *(nothing.clone() for _ in range(3))

    def _backward(self, operator: Any, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        grad, query, key, value, mask, _, out, logsumexp, _, _, _, _, dropout, causal = args[:14]
        query, key, value = self._rounded(query, key, value)
        if mask is not None and mask.dtype == torch.bool:
            mask = _additive(mask, query.dtype)
        grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, logsumexp, dropout, causal, attn_mask=mask, scale=kwargs.get("scale")
        )
        return *grads, None


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A boolean mask (True: attend) as numbers to add to the scores, as PyTorch's CPU path makes it."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), float("-inf"))
