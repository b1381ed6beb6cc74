"""One step of Adam and its kin for one tensor, by the operators' documentation in the wheel (torch_npu/_op_plugin_docs.py).

``out`` holds variable, first and second moment, which are changed in place; `portable_ascend.host_acl.kernels` answers the
caller's own tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from portable_ascend.host_acl.vendor.refusals import check_floats, refuse, wide

State = tuple[Tensor, Tensor, Tensor]


def _state(operator: str, out: Sequence[Tensor], grad: Tensor) -> State:
    if len(out) != 3 or any(t.shape != grad.shape for t in out):
        refuse(operator, f"out of shapes {[tuple(t.shape) for t in out]}", f"three of the gradient's, {tuple(grad.shape)}")
    var, m, v = out
    check_floats(operator, var=var, m=m, v=v, grad=grad)
    return var, m, v


def _write(state: State, *values: Tensor) -> State:
    for tensor, value in zip(state, values, strict=True):
        tensor.copy_(value)
    return state


def npu_apply_adam(
    beta1_power: float,
    beta2_power: float,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    grad: Tensor,
    use_locking: bool | None,
    use_nesterov: bool | None,
    *,
    out: Sequence[Tensor],
) -> State:
    """Adam (Kingma, Ba 2015): the step's size is ``lr sqrt(1 - beta2_power) / (1 - beta1_power)``.

    Args:
        beta1_power, beta2_power: beta1 and beta2 to the number of this step.
        use_nesterov: ``beta1 m + (1 - beta1) grad`` takes the place of m.
    """
    state = _state("npu_apply_adam", out, grad)
    var, m, v = map(wide, state)
    g = wide(grad)
    m = m + (g - m) * (1 - beta1)
    v = v + (g * g - v) * (1 - beta2)
    step = lr * (1 - beta2_power) ** 0.5 / (1 - beta1_power)
    top = beta1 * m + (1 - beta1) * g if use_nesterov else m
    return _write(state, var - step * top / (v.sqrt() + epsilon), m, v)


def npu_apply_adam_w(
    beta1_power: float,
    beta2_power: float,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    grad: Tensor,
    max_grad_norm: Tensor | None,
    amsgrad: bool | None,
    maximize: bool | None,
    *,
    out: Sequence[Tensor],
) -> State:
    """AdamW (Loshchilov, Hutter 2019).

    Args:
        beta1_power, beta2_power: beta1 and beta2 to the number of the step before this one.
        max_grad_norm: with amsgrad, the greatest second moment before this step. It is read only, as the schema says: the
            caller keeps the greatest itself.
    """
    state = _state("npu_apply_adam_w", out, grad)
    if amsgrad and max_grad_norm is None:
        refuse("npu_apply_adam_w", "amsgrad=True without max_grad_norm", "the greatest second moments so far with it")
    var, m, v = map(wide, state)
    g = -wide(grad) if maximize else wide(grad)
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    second = v
    if amsgrad and max_grad_norm is not None:
        second = torch.maximum(wide(max_grad_norm), v)
    corrected = (second / (1 - beta2_power * beta2)).sqrt() + epsilon
    return _write(state, var - lr / (1 - beta1_power * beta1) * m / corrected - lr * weight_decay * var, m, v)


def npu_bert_apply_adam(
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    grad: Tensor,
    max_grad_norm: float,
    global_grad_norm: float,
    weight_decay: float,
    step_size: float | None = None,
    adam_mode: int = 0,
    *,
    out: Sequence[Tensor],
) -> State:
    """Adam as BERT was trained with it (Devlin et al. 2018): no correction of the moments, decay added to the update.

    Args:
        max_grad_norm: gradients are scaled down so that global_grad_norm is at most this; none if it is not above 0.
    """
    if adam_mode != 0:
        raise NotImplementedError(
            f"npu_bert_apply_adam was given adam_mode={adam_mode}, whose formula is not documented. Use 0, or an Ascend device."
        )
    state = _state("npu_bert_apply_adam", out, grad)
    var, m, v = map(wide, state)
    g = wide(grad)
    if max_grad_norm > 0 and global_grad_norm > max_grad_norm:
        g = g * (max_grad_norm / global_grad_norm)
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    return _write(state, var - lr * (m / (v.sqrt() + epsilon) + weight_decay * var), m, v)


IN_PLACE: Mapping[str, Callable[..., Any]] = {
    "npu::npu_apply_adam.out": npu_apply_adam,
    "npu::npu_apply_adam_w.out": npu_apply_adam_w,
    "npu::npu_bert_apply_adam.out": npu_bert_apply_adam,
}
"""Operators that change the tensors in ``out`` and answer them."""
