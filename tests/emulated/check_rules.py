"""The profile's rules about numbers, paths and memory: what is refused, what is wrong without a word, what is counted."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

GIB = 2**30


def line(offset: int) -> str:
    """The line that calls this, moved by some lines, as the recorder writes it."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return f"{Path(__file__).relative_to(Path.cwd())}:{frame.f_back.f_lineno + offset}"


def kinds(recorder: Any) -> set[str]:
    return {kind for kind, _, _ in recorder.findings}


# -- 64-bit labels over 32-bit arithmetic ------------------------------------------------------------------------------------


def test_float64_keeps_its_label_and_loses_its_precision(dev: torch.device, recorder: Any) -> None:
    x = torch.tensor([1.0, 0.1], dtype=torch.float64)
    there = x.to(dev) * 3
    where = line(-1)
    assert there.dtype == torch.float64 and there.element_size() == 8
    assert torch.equal(there.cpu(), (x.float() * 3).double()) and not torch.equal(there.cpu(), x * 3)
    ((key, entry),) = recorder.findings.items()
    assert key == ("float64 computed in float32", "aten::mul", where)
    assert entry[0] == 2 and "1.5e-08" in entry[1]  # 0.1 in float32 is 0.100000001490116


def test_results_that_need_float64_are_found(dev: torch.device, recorder: Any) -> None:
    x = torch.tensor([2.0**24, 1.0], dtype=torch.float64, device=dev)  # both are exact in float32, their sum is not
    assert x.sum().item() == 2.0**24
    assert "results need more than float32: off by 6.0e-08" in recorder.findings[next(iter(recorder.findings))][1]


def test_no_false_alarm_for_float64(dev: torch.device, recorder: Any) -> None:
    x = torch.tensor([1.0, 0.5, 3.0], dtype=torch.float64, device=dev)
    assert (x + x).tolist() == [2, 1, 6] and (x * x).sum().item() == 10.25 and x.clone().cpu().dtype == torch.float64
    rate = torch.tensor(0.1, dtype=torch.float64, device=dev)  # a learning rate: a number, which keeps its precision
    assert rate.item() == 0.1 and (torch.ones(2, device=dev) * rate).dtype == torch.float32
    torch.tensor([0.1], dtype=torch.float64, device=dev).cpu()  # moved, not computed with
    assert kinds(recorder) == set()


def test_several_outputs_come_back_as_float32(dev: torch.device) -> None:
    values, indices = torch.tensor([[1.0, 3.0]], dtype=torch.float64, device=dev).max(1)
    assert values.dtype == torch.float32 and values.item() == 3 and indices.dtype == torch.int64


def test_float64_out_is_refused(dev: torch.device) -> None:
    out = torch.empty(2, dtype=torch.float64, device=dev)
    with pytest.raises(TypeError, match="dtype float64"):
        torch.add(torch.ones(2, device=dev), 1, out=out)
    x = torch.ones(2, dtype=torch.float64, device=dev)
    assert torch.add(x, 1, out=out) is out and out.tolist() == [2, 2], "an input has it"
    wide = torch.zeros(4, dtype=torch.float64, device=dev)
    assert torch.cat([x, x], out=wide).tolist() == [1, 1, 1, 1], "an input in a list has it"


def test_int64_wraps_at_32_bits(dev: torch.device, recorder: Any) -> None:
    ids = torch.tensor([3, 70_000], device=dev)
    hashed = ids * 1_000_003
    assert hashed.dtype == torch.int64
    assert hashed.tolist() == [3_000_009, (70_000 * 1_000_003 + 2**31) % 2**32 - 2**31]
    assert (torch.tensor([2**31 - 1], device=dev) + 1).item() == -(2**31)
    assert torch.full((4,), 2**30, device=dev).sum().item() == 0
    assert kinds(recorder) == {"int64 computed in int32"} and len(recorder.findings) == 3


def test_no_false_alarm_for_int64(dev: torch.device, recorder: Any) -> None:
    ids = torch.tensor([[1, 5, 50_000]], device=dev)
    table = nn.Embedding(50_001, 4).to(dev)
    F.cross_entropy(table(ids)[0], ids[0] % 4).backward()
    seed = torch.tensor(2**40 + 1, device=dev)
    assert seed.item() == 2**40 + 1 and seed.clone().cpu().item() == 2**40 + 1
    assert torch.arange(5, device=dev).cumsum(0).tolist() == [0, 1, 3, 6, 10] and (ids > 3).sum().item() == 2
    x = torch.randn(4, 8, device=dev)
    assert x.gather(1, x.argmax(1, keepdim=True)).shape == (4, 1) and x.topk(2).indices.dtype == torch.int64
    assert kinds(recorder) == set()


def test_complex_is_refused(dev: torch.device) -> None:
    makers = [
        lambda: torch.zeros(2, dtype=torch.complex64, device=dev),
        lambda: torch.zeros(2, dtype=torch.complex64).to(dev),
        lambda: torch.ones(2, device=dev).to(torch.complex128),
        lambda: torch.fft.fft(torch.ones(4, device=dev)),
        lambda: torch.view_as_complex(torch.ones(2, 2, device=dev)),
        lambda: torch.polar(torch.ones(2, device=dev), torch.ones(2, device=dev)),
        lambda: torch.ones(2, device=dev) * 1j,
    ]
    for make in makers:
        with pytest.raises(RuntimeError, match="complex numbers as pairs of real ones"):
            make()


def test_integer_products_are_exact_to_24_bits(dev: torch.device, recorder: Any) -> None:
    a = torch.tensor([[4096, 1]], device=dev)
    assert (a @ torch.tensor([[4096], [0]], device=dev)).item() == 2**24 and kinds(recorder) == set()
    assert (a @ torch.tensor([[4096], [1]], device=dev)).item() == 2**24, "2^24 + 1 has no float32"
    assert recorder.findings[next(iter(recorder.findings))][1].startswith("exact to 24 bits only: off by up to 1;")


def test_float32_products_are_exact_by_default(dev: torch.device) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(5, 7), torch.randn(7, 3)
    assert torch.equal((a.to(dev) @ b.to(dev)).cpu(), a @ b)


# -- attention ---------------------------------------------------------------------------------------------------------------

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
# (name, query, key, value, dtype, options, reason why not flash or "")
REQUESTS: list[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], torch.dtype, dict[str, Any], str]] = [
    ("plain", (1, 2, 512, 64), (1, 2, 512, 64), (1, 2, 512, 64), F32, {}, ""),
    ("causal", (1, 2, 512, 64), (1, 2, 512, 64), (1, 2, 512, 64), F32, {"is_causal": True}, ""),
    ("bfloat16", (1, 2, 512, 64), (1, 2, 512, 64), (1, 2, 512, 64), BF16, {"is_causal": True}, ""),
    ("float16", (1, 2, 512, 64), (1, 2, 512, 64), (1, 2, 512, 64), F16, {}, ""),
    ("head 128", (1, 1, 512, 128), (1, 1, 512, 128), (1, 1, 512, 128), F32, {}, ""),
    ("head 8", (1, 1, 512, 8), (1, 1, 512, 8), (1, 1, 512, 8), F32, {}, ""),
    ("1024", (1, 1, 1024, 16), (1, 1, 1024, 16), (1, 1, 1024, 16), F32, {}, ""),
    ("1536", (1, 1, 1536, 8), (1, 1, 1536, 8), (1, 1, 1536, 8), F32, {}, ""),
    ("longer keys", (1, 1, 512, 16), (1, 1, 1024, 16), (1, 1, 1024, 16), F32, {}, ""),
    ("shorter keys", (1, 1, 1024, 16), (1, 1, 512, 16), (1, 1, 512, 16), F32, {}, ""),
    ("scale", (1, 1, 512, 16), (1, 1, 512, 16), (1, 1, 512, 16), F32, {"scale": 0.5}, ""),
    ("grouped", (1, 4, 512, 16), (1, 2, 512, 16), (1, 2, 512, 16), F32, {"enable_gqa": True}, ""),
    ("one key head", (1, 4, 512, 16), (1, 1, 512, 16), (1, 1, 512, 16), F32, {"enable_gqa": True}, ""),
    ("batch 3", (3, 1, 512, 8), (3, 1, 512, 8), (3, 1, 512, 8), F32, {}, ""),
    ("256", (1, 2, 256, 64), (1, 2, 256, 64), (1, 2, 256, 64), F32, {}, "256 and 256 are not both multiples of 512"),
    ("640", (1, 1, 640, 16), (1, 1, 640, 16), (1, 1, 640, 16), F32, {}, "640 and 640 are not both"),
    ("577", (1, 1, 577, 16), (1, 1, 577, 16), (1, 1, 577, 16), F32, {}, "577 and 577 are not both"),
    ("decode", (1, 2, 1, 64), (1, 2, 512, 64), (1, 2, 512, 64), F32, {}, "1 and 512 are not both"),
    ("keys 500", (1, 2, 512, 64), (1, 2, 500, 64), (1, 2, 500, 64), F32, {}, "512 and 500 are not both"),
    ("head 129", (1, 1, 512, 129), (1, 1, 512, 129), (1, 1, 512, 129), F32, {}, "head_dim 129 is above 128"),
    ("head 192", (1, 1, 512, 192), (1, 1, 512, 192), (1, 1, 512, 192), F32, {}, "head_dim 192 is above 128"),
    ("head 256", (1, 1, 512, 256), (1, 1, 512, 256), (1, 1, 512, 256), BF16, {}, "head_dim 256 is above 128"),
    ("value size", (1, 1, 512, 64), (1, 1, 512, 64), (1, 1, 512, 32), F32, {}, "key and value differ in shape"),
    ("bool mask", (1, 1, 512, 16), (1, 1, 512, 16), (1, 1, 512, 16), F32, {"attn_mask": torch.bool}, "a mask is given"),
    ("float mask", (1, 1, 512, 16), (1, 1, 512, 16), (1, 1, 512, 16), F32, {"attn_mask": torch.float32}, "a mask is given"),
    ("dropout", (1, 1, 512, 16), (1, 1, 512, 16), (1, 1, 512, 16), F32, {"dropout_p": 0.1}, "dropout_p is 0.1, not 0"),
    ("float64", (1, 1, 512, 16), (1, 1, 512, 16), (1, 1, 512, 16), torch.float64, {}, "dtypes are float64"),
    ("several", (1, 1, 100, 130), (1, 1, 512, 130), (1, 1, 512, 130), F32, {"dropout_p": 0.5}, "head_dim 130 is above 128"),
]  # fmt: skip


def test_the_table_is_large_enough() -> None:
    assert len(REQUESTS) >= 25 and len({name for name, *_ in REQUESTS}) == len(REQUESTS)


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: r[0])
def test_attention_path(dev: torch.device, recorder: Any, request_: Any) -> None:
    _, query, key, value, dtype, options, reason = request_
    options = dict(options)
    if "attn_mask" in options:
        options["attn_mask"] = torch.ones(query[-2], key[-2], device=dev).tril().to(options["attn_mask"])
    q, k, v = (torch.zeros(shape, device=dev, dtype=dtype) for shape in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, **options)
    assert out.shape == (*query[:-1], value[-1]) and out.dtype == dtype
    ((path, reasons, shapes, line),) = recorder.attention
    assert path == ("math, O(L^2) memory" if reason else "NKI flash")
    assert any(reason in found for found in reasons) if reason else reasons == ()
    assert str(query) in shapes and Path(__file__).name in line


def test_several_reasons_are_all_named(dev: torch.device, recorder: Any) -> None:
    q = torch.zeros(1, 1, 100, 130, device=dev)
    F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    ((_, reasons, _, _),) = recorder.attention
    assert len(reasons) == 3


def test_the_switch_turns_flash_off(dev: torch.device, recorder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NEURONX_ENABLE_NKI_SDPA", "0")
    q = torch.zeros(1, 1, 512, 16, device=dev)
    F.scaled_dot_product_attention(q, q, q)
    assert [(path, why) for path, why, *_ in recorder.attention] == [
        ("math, O(L^2) memory", ("TORCH_NEURONX_ENABLE_NKI_SDPA is 0",))
    ]


def test_the_plain_path_takes_the_memory_of_all_scores(dev: torch.device, rehearsal: Any) -> None:
    memory = rehearsal.device.memory[0]

    def peak(length: int) -> int:
        q = torch.zeros(2, 4, length, 8, device=dev)
        memory.reset_peak()
        before = memory.used
        F.scaled_dot_product_attention(q, q, q)
        return int(memory.peak - before)

    assert peak(500) >= 2 * 4 * 500 * 500 * 4
    assert peak(512) < 2 * 4 * 512 * 512 * 4 / 8


def test_causal_with_unequal_lengths_is_a_hazard(dev: torch.device, recorder: Any) -> None:
    q, k = torch.zeros(1, 1, 4, 8, device=dev), torch.zeros(1, 1, 8, 8, device=dev)
    F.scaled_dot_product_attention(q, k, k, is_causal=True)
    assert "align the mask differently" in recorder.findings[next(iter(recorder.findings))][1]


# -- fallbacks, compilations, synchronisations -------------------------------------------------------------------------------


def test_fallbacks_are_counted_by_line(dev: torch.device, recorder: Any) -> None:
    x = torch.eye(3, device=dev)
    torch.linalg.cholesky(x)
    for _ in range(3):
        x.normal_()
    (x @ x + x).relu().sum()
    assert dict(recorder.fallbacks) == {("aten::linalg_cholesky_ex", line(-4)): 1, ("aten::normal_", line(-2)): 3}
    assert recorder.syncs == {("error check of torch.linalg", line(-5)): 1}


def test_the_tracking_of_the_package(dev: torch.device, recorder: Any) -> None:
    import torch_neuronx

    torch_neuronx.clear_op_tracking()
    x = torch.ones(2, 2, device=dev)
    torch.linalg.cholesky(x @ x + 9 * torch.eye(2, device=dev))
    assert "aten::linalg_cholesky_ex" in torch_neuronx.get_fallback_ops()
    assert "aten::mm" in torch_neuronx.get_executed_ops() and "aten::mm" not in torch_neuronx.get_fallback_ops()
    torch_neuronx.clear_op_tracking()
    assert not torch_neuronx.get_fallback_ops() and not torch_neuronx.get_executed_ops()
    assert recorder.fallbacks, "the counts of the rehearsal stay"


def test_each_new_signature_compiles_once(dev: torch.device, recorder: Any) -> None:
    def compiles() -> int:
        return int(recorder.compile_count)

    a, b = torch.ones(3, 4, device=dev), torch.ones(4, 2, device=dev)
    start = compiles()
    a @ b
    assert compiles() == start + 1
    a @ b
    torch.ones_like(a).sub_(1)  # other operators
    two = compiles()
    a @ b
    assert compiles() == two, "the same shapes and dtypes again"
    torch.ones(5, 4, device=dev) @ b
    three = compiles()
    (a.bfloat16() @ b.bfloat16()).view(-1)
    assert compiles() > three, "another dtype"
    x = a * 0.5
    four = compiles()
    for factor in (0.25, 0.1, 3.0):
        x = a * factor
    assert compiles() == four and x.shape == (3, 4), "a float is passed at run time"
    a.sum(0)
    five = compiles()
    a.sum(1)
    assert compiles() == five + 1, "an int is compiled in"
    a.t(), a[1:], a.view(12), a.detach()
    assert compiles() == five + 1, "views cost nothing"


def test_growing_shapes_compile_every_time(dev: torch.device, recorder: Any) -> None:
    for length in range(1, 9):
        torch.zeros(length, device=dev).exp()
    assert sum(n for (op, _), n in recorder.compiles.items() if op == "aten::exp") == 8


def test_synchronisations_carry_their_line(dev: torch.device, recorder: Any) -> None:
    x = torch.tensor([1.0, 0.0, 2.0], device=dev)
    base = line(1)
    x[0].item()
    str(x)
    x[x > 0]
    x.nonzero()
    x.cpu()
    x.tolist()
    if x[0] > 0:
        pass
    float(x[1])
    x[x > 0] = 3.0
    torch.equal(x, x)
    x.to("cpu")
    x.unique()
    x.masked_select(x > 0)
    first = int(base.rpartition(":")[2])
    got = {int(where.rpartition(":")[2]) - first: what for what, where in recorder.syncs}
    assert got == {
        0: "item", 1: "printing", 2: "boolean indexing", 3: "nonzero", 4: "copy to the CPU", 5: "copy to the CPU", 6: "item",
        8: "item", 9: "boolean indexing", 10: "equal", 11: "copy to the CPU", 12: "unique", 13: "masked_select",
    }  # fmt: skip


def test_what_does_not_synchronise(dev: torch.device, recorder: Any) -> None:
    x = torch.ones(4, 4, device=dev)
    mask = torch.ones(4, 4, dtype=torch.bool).to(dev)
    torch.where(mask, x, 0.0), x.masked_fill(mask, 1.0), x[torch.tensor([0, 1], device=dev)], x[1:3], x.shape, x.numel()
    x.copy_(torch.zeros(4, 4))
    assert not recorder.syncs and recorder.copies["to the device"][0] >= 2


# -- memory ------------------------------------------------------------------------------------------------------------------


def test_memory_is_counted_and_given_back(dev: torch.device, rehearsal: Any) -> None:
    neuron: Any = torch.neuron  # type: ignore[attr-defined]
    start = neuron.memory_allocated()
    x = torch.zeros(2**20, device=dev)
    y = x.view(2, -1)[0]
    assert neuron.memory_allocated() - start == 2**22, "a view takes nothing"
    del x
    assert neuron.memory_allocated() - start == 2**22, "the view holds the memory"
    del y
    assert neuron.memory_allocated() == start and neuron.max_memory_allocated() >= start + 2**22
    assert torch.zeros(1, device=dev).nbytes == 4 and neuron.get_device_properties().total_memory == 24 * GIB
    z = torch.zeros(1, device=dev)
    assert neuron.memory_allocated() - start == 256 and z.item() == 0, "rounded up"
    assert torch.accelerator.memory_allocated() == neuron.memory_allocated()


# -- the module --------------------------------------------------------------------------------------------------------------


def test_functions_that_the_package_lacks_are_absent(dev: torch.device) -> None:
    from portable_neuron.surface import ABSENT, SURFACE

    neuron: Any = torch.neuron  # type: ignore[attr-defined]
    assert [name for name in ABSENT if hasattr(neuron, name)] == []
    assert [name for name in SURFACE if not callable(getattr(neuron, name, None))] == []
    assert neuron.get_device_name() == "neuron:0" and neuron.get_device_properties().name == "trn2"
    assert neuron.is_available() and neuron.device_count() == 1 and neuron.current_device() == 0 and neuron.is_bf16_supported()
    assert neuron.get_amp_supported_dtype() == [torch.float32, torch.float16, torch.bfloat16]


def test_pinning_says_yes_to_everything(dev: torch.device) -> None:
    assert torch.ones(2).is_pinned() and torch.ones(2).pin_memory().tolist() == [1, 1]


def test_fused_optimizer_refuses_a_scaler(dev: torch.device) -> None:
    layer = nn.Linear(2, 1).to(dev)
    opt = torch.optim.AdamW(layer.parameters(), fused=True)
    scaler = torch.amp.GradScaler("neuron")
    scaler.scale(layer(torch.ones(1, 2, device=dev)).sum()).backward()
    with pytest.raises(RuntimeError, match="Train in bfloat16 without a scaler"):
        scaler.step(opt)


# -- the profile -------------------------------------------------------------------------------------------------------------


def test_every_rule_has_a_standing(rehearsal: Any) -> None:
    rows = list(rehearsal.profile.rows())
    assert len(rows) > 15 and all(rule.text and (rule.source or rule.assumed) for _, rule in rows)
    assumed = {name for name, rule in rows if rule.assumed}
    # Tagged (U), (I) or SRC (an ancestor's behaviour) in what was collected of the vendor's documents.
    assert {"computes_in", "refusals", "autocast_dtype", "attention", "kernels", "random", "pinned", "collectives"} <= assumed
    assert not assumed & {"memory", "integer_matmul_bits", "matmul_dtype", "compile_per_shape", "compile", "family"}


def test_what_this_is_called(rehearsal: Any) -> None:
    import portable as pt
    from portable import selection

    assert rehearsal.execution == "emulated"
    assert selection.find("neuron").probe().execution == "emulated"
    assert "emulated" in pt.get_device_name()
