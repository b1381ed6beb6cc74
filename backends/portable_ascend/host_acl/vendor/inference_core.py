"""What the vendor's attention operators for inference share: checks and arithmetic, one sequence at a time.

Source: "torch_npu.npu_fused_infer_attention_score", "..._v2", "npu_prompt_flash_attention" and "npu_incre_flash_attention"
(Ascend/op-plugin, docs/zh/custom_APIs); layouts and shapes of the answers: the meta kernels in the wheel
(torch_npu/op_plugin/meta/_meta_registrations.py).

The pages do not say these, which are assumed: a bias (pse_shift) is added after the scale; rows behind a sequence's own length
are zero; the logarithm of the sum of a row that sees no key is infinite.
"""

from __future__ import annotations

import torch
from torch import Tensor

from portable_ascend.host_acl.vendor import arithmetic, masks
from portable_ascend.host_acl.vendor.arithmetic import Problem
from portable_ascend.host_acl.vendor.inference_request import TRIANGLES, Request, check
from portable_ascend.host_acl.vendor.inference_sequences import Sequences, sequences
from portable_ascend.host_acl.vendor.layouts import Layout
from portable_ascend.host_acl.vendor.masks import Sparsity


def compute(request: Request) -> tuple[Tensor, Tensor]:
    """(output, logarithm of the sums): float32 (B, N, Sq, 1) or (T, N, 1), or of shape (0,) where not asked for.

    Raises:
        ValueError: what the pages do not allow.
        NotImplementedError: sparse_mode 9.
    """
    check(request)
    found = sequences(request)
    sparsity, zero_rows = _sparsity(request, found)
    outs, sums = [], []
    for index, query in enumerate(found.queries):
        out, lse = _attend(request, found, index, sparsity, zero_rows)
        rest = query.shape[1] - out.shape[1]
        outs.append(torch.nn.functional.pad(out, (0, 0, 0, rest)))
        sums.append(torch.nn.functional.pad(lse, (0, rest)))
    return _arrange(request, outs), _logarithms(request, sums)


def _attend(request: Request, all_: Sequences, index: int, sparsity: Sparsity, zero_rows: bool) -> tuple[Tensor, Tensor]:
    """Output (N, used, Dv) and logarithms (N, used) of one sequence."""
    query, key, value = all_.queries[index][:, : all_.used[index]], all_.keys[index], all_.values[index]
    length, keys = query.shape[1], key.shape[1]
    if not keys or not length:
        return query.new_zeros(query.shape[0], length, value.shape[2]), torch.full((query.shape[0], length), torch.inf)

    def masked(_: int, start: int, stop: int) -> Tensor | None:
        return masks.masked(sparsity, index, start, stop, length, keys)

    bias = request.bias
    if bias is not None:
        bias = bias[index if bias.shape[0] > 1 else 0, :, :length, :keys].unsqueeze(0)
    problem = Problem(
        query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0), request.scale, masked, bias, sink=request.sink,
        zero_rows=zero_rows or sparsity.zeroes_rows(length, keys),
    )  # fmt: skip
    out, maxima, sums = arithmetic.forward(problem)
    lse = (maxima + sums.log())[0]
    mask = masked(0, 0, length)
    if mask is not None and problem.zero_rows and problem.sink is None:
        lse = lse.masked_fill(mask.expand(query.shape[0], length, keys).all(-1), torch.inf)
    return out[0], lse


def _sparsity(request: Request, found: Sequences) -> tuple[Sparsity, bool]:
    """The mask, (B or 1, 1, Sq, Skv) or compressed, and whether rows that see nothing are asked to be zero."""
    mask, mode = request.mask, request.mode
    single = request.single and request.query_rope is None
    if single and request.precision > 1:
        request.refuse(f"inner_precise={request.precision} with queries of length 1", "0 and 1 with them")
    zero_rows = request.precision in (2, 3)
    batch = len(found.queries)
    queries = max((q.shape[1] for q in found.queries), default=0)
    keys = max((k.shape[1] for k in found.keys), default=0)
    _check_bias(request, batch, queries, keys)
    if mask is not None and mask.dtype not in (torch.bool, torch.int8, torch.uint8):
        request.refuse(f"an atten_mask of {mask.dtype}", "bool, int8 or uint8 (1: masked out)")
    if single:
        if mask is None or mode in TRIANGLES:  # the mode means nothing to one query, which sees all keys
            return Sparsity(), zero_rows
        mask = mask[:, None, None] if mask.dim() == 2 else mask.unsqueeze(1) if mask.dim() == 3 else mask
        _check_mask(request, mask, batch, 1, keys)
        return Sparsity(masks.ALL, mask), zero_rows
    if mode in TRIANGLES:
        if mask is None or tuple(mask.shape) not in _compressed_shapes():
            request.refuse(
                f"sparse_mode={mode} with {'no atten_mask' if mask is None else f'an atten_mask of shape {tuple(mask.shape)}'}",
                "the mask torch.triu(torch.ones(2048, 2048), diagonal=1).bool() with it",
            )
        if request.packed and mode == masks.LEFT_UP:
            request.refuse(f"sparse_mode={mode} with packed sequences", "0 without a mask, 3 and 4")
        return Sparsity(mode, mask, request.before, request.after), zero_rows
    if mask is None:
        if mode == masks.ALL:
            request.refuse("sparse_mode=1 without an atten_mask", "the whole mask with it")
        return Sparsity(), zero_rows
    if request.packed:
        request.refuse(f"an atten_mask with sparse_mode={mode} and packed sequences", "sparse_mode 3 or 4 with a mask")
    mask = mask[None, None] if mask.dim() == 2 else mask.unsqueeze(1) if mask.dim() == 3 else mask
    _check_mask(request, mask, batch, queries, keys)
    return Sparsity(mode, mask, request.before, request.after), zero_rows


def _compressed_shapes() -> tuple[tuple[int, ...], ...]:
    square = (masks.COMPRESSED, masks.COMPRESSED)
    return square, (1, *square), (1, 1, *square)


def _check_mask(request: Request, mask: Tensor, batch: int, queries: int, keys: int) -> None:
    sizes = mask.shape
    if mask.dim() != 4 or sizes[0] not in (1, batch) or sizes[1] != 1 or sizes[2] < queries or sizes[3] < keys:
        assert request.mask is not None
        request.refuse(
            f"an atten_mask of shape {tuple(request.mask.shape)} for {queries} queries and {keys} keys",
            f"({queries}, {keys}), (1, {queries}, {keys}), ({batch}, 1, {queries}, {keys}) and (1, 1, {queries}, {keys}), "
            "or longer ones" + (f"; ({batch}, {keys}) for one query" if queries == 1 else ""),
        )


def _check_bias(request: Request, batch: int, queries: int, keys: int) -> None:
    bias = request.bias
    if bias is None:
        return
    if bias.dtype != request.query.dtype:
        request.refuse(f"a pse_shift of {bias.dtype} with a query of {request.query.dtype}", "one dtype for both")
    sizes = bias.shape
    wrong = bias.dim() != 4 or sizes[0] not in (1, batch) or sizes[1] != request.heads
    if wrong or sizes[2] < queries or sizes[3] < keys:
        request.refuse(
            f"a pse_shift of shape {tuple(sizes)}", f"({batch} or 1, {request.heads}, {queries}, {keys}), or longer ones"
        )


def _arrange(request: Request, outs: list[Tensor]) -> Tensor:
    """The output in its layout, from (N, Sq, Dv) of each sequence."""
    if request.packed:
        tokens = request.query.shape[0 if request.layout_in == "TND" else 1]
        whole = torch.cat(outs, 1)
        whole = torch.nn.functional.pad(whole, (0, 0, 0, tokens - whole.shape[1]))
        return whole if request.layout_out == "NTD" else whole.transpose(0, 1).contiguous()
    if not outs:
        return torch.empty_like(request.query)
    whole = torch.stack(outs)
    if request.layout_out == "NSD":
        return whole[0]
    if request.layout_out == "NBSD":
        return whole.transpose(0, 1).contiguous()
    return Layout(request.layout_out, request.heads).from_bnsd(whole)


def _logarithms(request: Request, sums: list[Tensor]) -> Tensor:
    if not request.lse:
        return torch.empty(0)
    if request.packed:
        tokens = request.query.shape[0 if request.layout_in == "TND" else 1]
        whole = torch.cat(sums, 1)
        return torch.nn.functional.pad(whole, (0, tokens - whole.shape[1])).T.contiguous().unsqueeze(-1)
    return torch.stack(sums).unsqueeze(-1)
