"""patch(weights=...): the model decodes as one with the dequantized weights does, and comes back bit for bit."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from models import SHORT, build
from quantized import packed_in, with_dequantized
from torch import nn

import hf_fastpath
from hf_fastpath import traffic
from hf_fastpath.linears.packed_linear import PackedLinear
from hf_fastpath.quantization import FORMATS

over_formats = pytest.mark.parametrize("format", FORMATS)
#: families with separate and fused projections, Conv1D, biases, a mixture, norms over heads, a window
FAMILIES = ("gpt2", "llama", "mistral", "phi3", "qwen2", "qwen3", "gemma2", "mixtral", "opt", "falcon")


@pytest.fixture(autouse=True)
def native(request):
    kind = request.node.callspec.params.get("device", "cpu") if hasattr(request.node, "callspec") else "cpu"
    if not hf_fastpath.native.loader.is_native(kind):
        pytest.skip(f"no native library for {kind}")


def prompt(batch: int = 2, length: int = 9) -> torch.Tensor:
    return torch.randint(3, 300, (batch, length))


@pytest.mark.every(3)
@over_formats
@pytest.mark.parametrize("family", FAMILIES)
def test_decodes_as_the_dequantized_model(device, family, format):
    stock = build(family).to(device)
    ours = hf_fastpath.patch(copy.deepcopy(stock), weights=format, quiet=True)
    same = with_dequantized(stock, ours)
    ids = prompt().to(device)
    want = same.generate(ids, **SHORT)
    assert torch.equal(ours.generate(ids, **SHORT), want)
    found = hf_fastpath.report(ours).stats
    assert found["fallback_tokens"] == 0 and found["fast_tokens"] > 0
    with torch.no_grad():
        torch.testing.assert_close(ours(want).logits, same(want).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.each_value
@over_formats
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_half_precision_within_stocks_error(device, format, dtype):
    """The mean error of a token's logits, against float64 with the same quants, is compared with stock's."""
    stock = build("llama").to(device, dtype)
    ours = hf_fastpath.patch(copy.deepcopy(stock), weights=format, quiet=True)
    same = with_dequantized(stock, ours)
    exact = with_dequantized(stock, ours).double()
    for name, packed in packed_in(ours).items():
        exact.get_submodule(name).weight = nn.Parameter(packed.packed.dequantize(torch.float64))
    errors = []
    for ids in (prompt(1).to(device), prompt(3).to(device)):
        for model in (ours, same):
            out = model.generate(
                ids, max_new_tokens=2, do_sample=False, output_logits=True, return_dict_in_generate=True
            )
            want = exact(out.sequences[:, :-1]).logits[:, -2:]
            errors.append((torch.stack(out.logits, 1).double() - want).abs().mean())
    assert sum(errors[::2]) <= 1.5 * sum(errors[1::2])


@over_formats
@pytest.mark.parametrize("family", ("gpt2", "mistral", "mixtral"))
def test_unpatch_restores_bit_for_bit(device, family, format):
    model = build(family).to(device)
    modules, before = dict(model.named_modules()), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    hf_fastpath.patch(model, weights=format, lm_head="int8", quiet=True)
    assert type(model.get_output_embeddings()) is PackedLinear
    hf_fastpath.unpatch(model)
    assert dict(model.named_modules()) == modules
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in parameters.items()}
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_originals_can_be_freed():
    model = hf_fastpath.patch(build("llama"), weights="int4", keep_original=False, quiet=True)
    want = model.generate(prompt(), **SHORT)
    assert want.shape[0] == 2
    with pytest.raises(ValueError, match="keep_original=False"):
        hf_fastpath.unpatch(model)
    assert packed_in(model)


def test_freed_originals_leave_tied_embeddings():
    model = build("gpt2")
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    ids = prompt()
    want = hf_fastpath.patch(copy.deepcopy(model), weights="int8", lm_head="int8", quiet=True).generate(ids, **SHORT)
    hf_fastpath.patch(model, weights="int8", lm_head="int8", keep_original=False, quiet=True)
    assert torch.equal(model.generate(ids, **SHORT), want)


def test_modules_elsewhere_than_the_kernels_are_stocks():
    model = hf_fastpath.patch(build("llama"), weights="int8", quiet=True).to("meta")
    assert hf_fastpath.report(model).loop == "unsupported_device"


def test_a_fault_on_the_way_leaves_the_model_as_it_was(monkeypatch):
    from hf_fastpath.replacing import quantizing

    real, calls = quantizing.quantize, []

    def third_fails(*args):
        calls.append(args)
        if len(calls) == 3:
            raise MemoryError("no room")
        return real(*args)

    monkeypatch.setattr(quantizing, "quantize", third_fails)
    model = build("llama")
    modules, before = dict(model.named_modules()), copy.deepcopy(model.state_dict())
    with pytest.raises(MemoryError):
        hf_fastpath.patch(model, weights="int8", quiet=True)
    assert dict(model.named_modules()) == modules and not hasattr(model, "_hf_fastpath")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_weights_that_are_not_finite_are_refused():
    model = build("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] = float("nan")
    with pytest.raises(ValueError, match="infinities or NaN"):
        hf_fastpath.patch(model, weights="int8", quiet=True)
    assert not packed_in(model)


def test_bytes_of_a_step_are_those_of_the_quants():
    model = build("llama")
    full = traffic.weight_bytes(model)
    linears = [m for layer in model.model.layers for m in layer.modules() if type(m) is nn.Linear]
    hf_fastpath.patch(model, weights="int4_g32", quiet=True)
    format = FORMATS["int4_g32"]
    quantized = sum(format.nbytes(*linear.weight.shape) for linear in linears)
    assert traffic.weight_bytes(model) == full - sum(linear.weight.nbytes for linear in linears) + quantized


def test_saving_says_what_helps(tmp_path):
    model = hf_fastpath.patch(build("llama"), weights="int8", quiet=True)
    with pytest.raises(ValueError, match="unpatch"):
        model.save_pretrained(tmp_path)
    hf_fastpath.unpatch(model).save_pretrained(tmp_path)
    assert (tmp_path / "config.json").is_file()


def test_copies_and_casts():
    model = hf_fastpath.patch(build("llama"), weights="int4_g32", quiet=True)
    ids = prompt()
    want = model.generate(ids, **SHORT)
    twin = copy.deepcopy(model)
    assert torch.equal(twin.generate(ids, **SHORT), want)
    assert hf_fastpath.report(twin).stats["fast_tokens"] > 0
    hf_fastpath.unpatch(twin)
    assert not packed_in(twin) and packed_in(model)
    half = model.half()
    linear = half.model.layers[0].mlp.down_proj
    assert linear.quants.dtype == torch.uint8 and linear.scales.dtype == torch.float16
    assert half.generate(ids, **SHORT).shape == want.shape
    stored = io.BytesIO()
    torch.save(linear, stored)
    stored.seek(0)
    loaded = torch.load(stored, weights_only=False)
    assert torch.equal(loaded.packed.dequantize(), linear.packed.dequantize())


def test_gradients_reach_what_is_in_front():
    model = hf_fastpath.patch(build("llama"), weights="int8", quiet=True)
    model(prompt(), labels=prompt()).loss.backward()
    assert model.model.embed_tokens.weight.grad.abs().sum() > 0


def op_names(model: nn.Module) -> list[str]:
    """Return the op names of the one plan that the model has."""
    (plan,) = vars(model)["_hf_fastpath"].plans
    return [name.removesuffix(".default") for name in plan.program.op_names()]


def test_projections_of_one_input_are_one_product():
    ours = hf_fastpath.patch(build("llama"), weights="int4", quiet=True)
    ours.generate(prompt(1), **SHORT)
    names = [name for name in op_names(ours) if "packed" in name]
    once = ["packed_qkv_rope_append", "packed_gemv", "packed_gemv_swiglu", "packed_gemv"]
    assert [name.split("::")[-1].split(".")[0] for name in names] == once * len(ours.model.layers)


def test_devices_without_kernels_are_refused():
    with torch.device("meta"):
        model = build("llama").to("meta")
    with pytest.raises(ValueError, match="no kernels for meta"):
        hf_fastpath.patch(model, weights="int8", quiet=True)


def test_what_a_quantized_head_shares_with_the_embedding_stays(device):
    model = build("llama", tie_word_embeddings=True).to(device)
    weight = model.lm_head.weight
    ours = hf_fastpath.patch(model, weights="int8", lm_head="int8", quiet=True)
    assert ours.get_input_embeddings().weight is weight and weight.device.type == device.type
    ours.generate(prompt().to(device), **SHORT)
    found = hf_fastpath.report(ours).stats
    assert found["fallback_tokens"] == 0 and found["fast_tokens"] > 0, found["reasons"]
    assert hf_fastpath.unpatch(ours).lm_head.weight is weight and weight.device.type == device.type
