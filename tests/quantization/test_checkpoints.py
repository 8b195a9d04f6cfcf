"""Layers of other packages, made by the description of their layouts: the same weights come out, or a reason."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from models import SHORT, build, counting, require_native
from torch import nn

import hf_fastpath
from hf_fastpath.decode.calls.named_calls import run
from hf_fastpath.errors import NoCounterpart
from hf_fastpath.linears.checkpoints import FAMILIES, family_of
from hf_fastpath.linears.packed_linear import PackedLinear
from hf_fastpath.ops.packed_gemv import SPEC
from hf_fastpath.quantization import PackedWeight, ReorderedWeight
from hf_fastpath.reasons import REASONS
from hf_fastpath.replacing.counterparts import repacked
from hf_fastpath.replacing.rewriting import Rewriting

ROWS, COLUMNS = 24, 256
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def of_package(package: str, name: str, base: type = nn.Module) -> type:
    """Make an empty class that seems to be of a package."""
    return type(name, (base,), {"__module__": f"{package}.somewhere"})


def words(numbers: list[int], bits: int, order=None) -> list[int]:
    """Make int32 words of ``numbers``: the first in the lowest bits; ``order`` says which number each place holds."""
    count, found = 32 // bits, []
    for start in range(0, len(numbers), count):
        word = 0
        for place in range(count):
            which = place if order is None else order[place]
            word |= numbers[start + which] << (bits * place)
        found.append(word - (1 << 32) if word >= 1 << 31 else word)
    return found


def packed_rows(matrix: torch.Tensor, bits: int, order=None) -> torch.Tensor:
    return torch.tensor([words(row, bits, order) for row in matrix.tolist()], dtype=torch.int32)


class Case:
    """Numbers from 0 up [out, in], zeros and scales [out, groups], and the weight that they stand for."""

    def __init__(self, bits=4, group=128, symmetric=False, rows=ROWS, columns=COLUMNS, dtype=torch.float16):
        self.bits, self.group = bits, columns if group == -1 else group
        shape = rows, -(-columns // self.group)
        self.numbers = torch.randint(0, 1 << bits, (rows, columns))
        half = torch.full(shape, 1 << (bits - 1))
        self.zeros = half if symmetric else torch.randint(0, 1 << bits, shape)
        self.scales = (torch.rand(shape) * 0.02 + 0.001).to(dtype)
        self.places = torch.arange(columns) // self.group
        self.weight = self.stands_for()

    def stands_for(self) -> torch.Tensor:
        return (self.numbers - self.zeros[:, self.places]) * self.scales.float()[:, self.places]

    def shuffled(self) -> Case:
        """Let inputs of a group lie anywhere, as with activation order."""
        self.places = self.places[torch.randperm(len(self.places))]
        self.weight = self.stands_for()
        return self


def gptq(case: Case, version: int = 2, cls: str = "TorchLinear") -> nn.Module:
    """Make qweight [in / per word, out], qzeros [groups, out / per word], g_idx [in]; version 1 has zeros less one."""
    made = of_package("gptqmodel", cls)()
    made.in_features, made.out_features = case.numbers.shape[1], case.numbers.shape[0]
    made.bits, made.group_size, made.bias = case.bits, case.group, None
    made.register_buffer("qweight", packed_rows(case.numbers, case.bits).t().contiguous())
    zeros = case.zeros if version == 2 else case.zeros - 1
    made.register_buffer("qzeros", packed_rows(zeros.t(), case.bits))
    made.register_buffer("scales", case.scales.t().contiguous())
    made.register_buffer("g_idx", case.places.int())
    made.qzero_format = lambda: version
    return made


def awq(case: Case) -> nn.Module:
    """Make qweight [in, out / 8] and qzeros [groups, out / 8], both in AWQ's order."""
    made = of_package("gptqmodel", "AwqTorchLinear")()
    made.in_features, made.out_features = case.numbers.shape[1], case.numbers.shape[0]
    made.bits, made.group_size, made.bias = 4, case.group, None
    made.register_buffer("qweight", packed_rows(case.numbers.t(), 4, AWQ_ORDER))
    made.register_buffer("qzeros", packed_rows(case.zeros.t(), 4, AWQ_ORDER))
    made.register_buffer("scales", case.scales.t().contiguous())
    return made


def compressed(case: Case, symmetric: bool = False, strategy: str = "group", packed_zeros: bool = True) -> nn.Module:
    """Make weight_packed [out, in / per word], weight_scale [out, groups], zeros packed along out; all are from -8."""
    made = nn.Linear(1, 1, bias=False)
    del made.weight
    weights = SimpleNamespace(
        num_bits=case.bits, symmetric=symmetric, strategy=strategy, group_size=case.group, type="int", actorder=None
    )
    made.quantization_scheme = of_package("compressed_tensors", "QuantizationScheme", SimpleNamespace)(
        weights=weights, input_activations=None, output_activations=None
    )

    def hold(name, tensor):
        made.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    hold("weight_packed", packed_rows(case.numbers, case.bits))
    hold("weight_scale", case.scales)
    hold("weight_shape", torch.tensor(case.numbers.shape))
    if bool(case.places.diff().min() < 0) if len(case.places) > 1 else False:
        hold("weight_g_idx", case.places.int())
    if not symmetric and packed_zeros:
        hold("weight_zero_point", packed_rows(case.zeros.t(), case.bits).t().contiguous())
    elif not symmetric:
        hold("weight_zero_point", (case.zeros - (1 << (case.bits - 1))).to(torch.int8))
    return made


def autoawq(case: Case) -> nn.Module:
    made = awq(case)
    made.__class__, made.w_bit = of_package("awq", "WQLinear_GEMM"), 4
    return made


class _QData(torch.Tensor):
    """A stand-in for torchao's tensors, whose parts are attributes."""


def torchao(case: Case, cls: str = "IntxUnpackedToInt8Tensor") -> nn.Module:
    made = nn.Linear(1, 1, bias=False)
    half = 1 << (case.bits - 1)
    weight = torch.zeros(case.numbers.shape).as_subclass(of_package("torchao", cls, _QData))
    weight.qdata = (case.numbers - half).to(torch.int8)
    weight.scale, weight.zero_point = case.scales, (case.zeros - half).to(torch.int8)
    weight.block_size, weight.target_dtype = (1, case.group), {8: torch.int8, 4: torch.int4}[case.bits]
    made._parameters["weight"] = weight
    return made


def read(module: nn.Module):
    return family_of(module).read(module)


@pytest.mark.parametrize(
    ("make", "case", "format"),
    (
        (gptq, dict(), "int4"),
        (gptq, dict(symmetric=True), "int4"),
        (gptq, dict(symmetric=True, group=32), "int4_g32"),
        (gptq, dict(symmetric=True, group=64), "int4_g32"),
        (gptq, dict(group=256), "int4"),
        (gptq, dict(group=-1, columns=200), "int4"),
        (gptq, dict(bits=2, rows=32), "int4"),
        (gptq, dict(bits=8, symmetric=True), "int8"),
        (gptq, dict(group=32), "int4_g32_zeros"),
        (gptq, dict(group=64, columns=320), "int4_g32_zeros"),
        (gptq, dict(group=96, columns=384), "int4_g32_zeros"),
        (gptq, dict(bits=2, rows=32, group=32), "int4_g32_zeros"),
        (gptq, dict(bits=8), "int8_g32_zeros"),
        (gptq, dict(bits=8, group=32), "int8_g32_zeros"),
        (gptq, dict(bits=8, group=64, symmetric=True, columns=352), "int8_g32_zeros"),
        (gptq, dict(bits=8, group=-1, columns=200), "int8_g32_zeros"),
        (awq, dict(group=32), "int4_g32_zeros"),
        (awq, dict(group=64), "int4_g32_zeros"),
        (autoawq, dict(), "int4"),
        (autoawq, dict(group=32), "int4_g32_zeros"),
        (compressed, dict(group=32, dtype=torch.bfloat16), "int4_g32_zeros"),
        (lambda case: compressed(case, packed_zeros=False), dict(group=64), "int4_g32_zeros"),
        (compressed, dict(bits=8, group=64), "int8_g32_zeros"),
        (lambda case: compressed(case, symmetric=True), dict(symmetric=True, bits=8, group=32), "int8_g32_zeros"),
        (torchao, dict(bits=8, group=128), "int8_g32_zeros"),  # zero points that take steps out of 8 bits
        (lambda case: gptq(case, version=1), dict(symmetric=True), "int4"),
        (awq, dict(), "int4"),
        (compressed, dict(), "int4"),
        (compressed, dict(dtype=torch.bfloat16), "int4"),
        (lambda case: compressed(case, packed_zeros=False), dict(), "int4"),
        (lambda case: compressed(case, symmetric=True), dict(symmetric=True), "int4"),
        (lambda case: compressed(case, symmetric=True), dict(symmetric=True, group=32, columns=352), "int4_g32"),
        (lambda case: compressed(case, symmetric=True), dict(symmetric=True, bits=8), "int8"),
        (lambda case: compressed(case, True, "channel"), dict(symmetric=True, bits=8, group=-1, columns=200), "int8"),
        (torchao, dict(), "int4"),
        (torchao, dict(symmetric=True, group=32), "int4_g32"),
        (lambda case: torchao(case, "Int8Tensor"), dict(symmetric=True, bits=8, group=-1), "int8_row"),
    ),
)
def test_the_same_weights_come_out(make, case, format):
    case = Case(**case)
    (packed,) = repacked([read(make(case))])
    assert packed.format.name == format and packed.in_features == case.numbers.shape[1]
    assert torch.equal(packed.dequantize(), case.weight)  # float16's and bfloat16's scales are held exactly


@pytest.mark.parametrize("symmetric", (False, True), ids=("zeros", "symmetric"))
@pytest.mark.parametrize("make", (lambda case: gptq(case), lambda case: compressed(case)), ids=("gptq", "compressed"))
@pytest.mark.parametrize("bits", (4, 8))
@pytest.mark.parametrize(("group", "columns"), ((128, 640), (64, 448), (32, 352)))
def test_inputs_in_the_order_of_their_activations(make, bits, symmetric, group, columns):
    cases = [Case(bits, group, symmetric, rows=rows, columns=columns).shuffled() for rows in (8, 16)]
    cases[1].places = cases[0].places
    first, second = repacked([read(make(case)) for case in cases[:1]] + [read(make(cases[0]))])
    assert isinstance(first, ReorderedWeight) and torch.equal(first.dequantize(), cases[0].weight)
    assert second.order is first.order  # the input is gathered once
    alone = repacked([read(make(Case(bits, group, symmetric, columns=columns).shuffled())), read(make(cases[0]))])
    assert alone[0].order is not alone[1].order
    layer = PackedLinear(first, None)
    for rows in (1, 3, 40):
        x = torch.randint(-2, 3, (rows, columns)).float()
        exact = x.double() @ cases[0].weight.double().t()
        torch.testing.assert_close(layer(x).double(), exact, rtol=1e-5, atol=1e-5 * float(exact.abs().max()))


@pytest.mark.parametrize("is_shuffled", (False, True), ids=("", "act_order"))
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("make", ("gptq", "gptq_v1", "awq", "autoawq", "compressed", "compressed_symmetric"))
@pytest.mark.parametrize(("bits", "group"), ((4, 128), (4, 32), (4, -1), (8, 128), (8, 64)))
def test_tensors_are_freed_and_come_back(make, bits, group, dtype, is_shuffled):
    """Bit for bit, those of which nothing was rounded."""
    is_awq, symmetric = "awq" in make, make.endswith(("symmetric", "v1"))
    if is_awq and (bits == 8 or is_shuffled) or group == -1 and is_shuffled:
        pytest.skip("there is no such checkpoint")
    case = Case(bits, group, symmetric, columns=384, dtype=dtype)
    case = case.shuffled() if is_shuffled else case
    makers = dict(gptq_v1=lambda case: gptq(case, 1), compressed_symmetric=lambda case: compressed(case, True))
    layer = makers.get(make, globals().get(make))(case)
    tensors = dict(layer.named_parameters()) | dict(layer.named_buffers())
    before = {name: tensor.data.clone() for name, tensor in tensors.items()}
    family, weight = family_of(layer), read(layer)
    (made,) = repacked([weight])
    rewriting = Rewriting.of(family.written, weight, made)
    rewriting.release(layer, made)
    large = {"qweight", "qzeros", "scales", "weight_packed", "weight_scale", "weight_zero_point"} & before.keys()
    assert set(rewriting.names) == large and not any(tensors[name].numel() for name in large)
    rewriting(layer, made)
    for name, tensor in before.items():
        assert tensors[name].dtype == tensor.dtype and torch.equal(tensors[name].data, tensor), name


def test_scales_that_were_rounded_are_kept():
    layer = compressed(Case(dtype=torch.float32))
    weight = read(layer)
    (made,) = repacked([weight])
    rewriting = Rewriting.of(family_of(layer).written, weight, made)
    rewriting.release(layer, made)
    assert set(rewriting.names) == {"weight_packed", "weight_zero_point"} and layer.weight_scale.numel()


def test_float32_scales_are_rounded_to_float16():
    case = Case(dtype=torch.float32)
    (packed,) = repacked([read(compressed(case))])
    error = (packed.dequantize() - case.weight).abs()
    assert bool((error <= case.weight.abs() * 2.0**-11).all()) and bool(error.any())


def test_weights_of_one_input_lie_behind_each_other():
    cases = [Case(rows=rows, dtype=torch.bfloat16) for rows in (16, 8, 24)]
    cases[1].scales *= 64  # one multiplier has to serve all
    together = PackedWeight.joined(repacked([read(awq(case)) for case in cases]))
    assert together is not None and together.out_features == 48
    mixed = repacked([read(compressed(Case(group=128))), read(compressed(Case(group=32, symmetric=True), True))])
    assert [each.format.name for each in mixed] == ["int4", "int4_g32"]


def uneven_groups(case):
    made = gptq(case)
    made.g_idx[0] = made.g_idx[-1]
    return made


def one_group(case):
    made = compressed(case)
    made.register_parameter("weight_g_idx", nn.Parameter(torch.zeros(COLUMNS), requires_grad=False))
    return made


def quantized_activations(case):
    made = compressed(case)
    made.quantization_scheme.input_activations = SimpleNamespace(num_bits=8)
    return made


def float_quants(case):
    made = compressed(case)
    made.quantization_scheme.weights.type = "float"
    return made


def called(case):
    made = gptq(case)
    made.linear_mode = "inference"
    return made


def with_adapter(case):
    made = gptq(case)
    made.adapter = object()
    return made


def activations_of_torchao(case):
    made = torchao(case)
    made.weight.activation_quantization = "int8_asym_per_token"
    return made


def zero_of_sixteen(case):
    case.zeros[:] = 16
    return gptq(case, version=1)


@pytest.mark.parametrize(
    ("make", "case", "reason"),
    (
        (uneven_groups, dict(), "quantized_order"),
        (one_group, dict(), "quantized_order"),
        (called, dict(), "quantized_in_use"),
        (quantized_activations, dict(), "quantized_format"),
        (float_quants, dict(), "quantized_format"),
        (with_adapter, dict(), "quantized_format"),
        (activations_of_torchao, dict(), "quantized_activations"),
        (lambda case: gptq(case, cls="ExllamaV2Linear"), dict(), "quantized_kernel"),
        (lambda case: gptq(case, cls="MarlinLinear"), dict(), "quantized_kernel"),
        (zero_of_sixteen, dict(), "quantized_format"),
        (gptq, dict(group=16, symmetric=True), "quantized_format"),
        (compressed, dict(bits=8, group=16), "quantized_format"),
    ),
)
def test_what_has_no_counterpart_says_why(make, case, reason):
    with pytest.raises(NoCounterpart) as found:
        repacked([read(make(Case(**case)))])
    assert str(found.value) == reason and reason in REASONS


def test_scales_that_are_not_finite_are_refused():
    case = Case()
    case.scales[3, 1] = float("inf")
    with pytest.raises(NoCounterpart, match="quantized_format"):
        repacked([read(awq(case))])


def test_only_the_classes_that_are_known():
    assert family_of(nn.Linear(4, 4)) is None
    made = gptq(Case())
    type(made).__module__ = "elsewhere"
    assert family_of(made) is None
    assert len({(family.name, family.package) for family in FAMILIES}) == len(FAMILIES)


def test_products_take_minus_128(device):
    """The quantizer never makes this quant, but checkpoints do."""
    case = Case(bits=8, symmetric=True, rows=40, columns=384)
    case.numbers[:, ::3] = 0
    case.scales = torch.ones_like(case.scales)
    (packed,) = repacked([read(compressed(case, symmetric=True))])
    layer = PackedLinear(packed, None).to(device)
    x = torch.randint(-4, 5, (3, 384)).float()
    expected = x @ (case.numbers - 128).float().t()
    assert torch.equal(run(SPEC.overload, x=x.to(device), packed=layer.packed).cpu(), expected)


@pytest.mark.parametrize("act_order", (False, True), ids=("", "act_order"))
@pytest.mark.parametrize("symmetric", (False, True), ids=("zeros", "symmetric"))
@pytest.mark.parametrize(("bits", "group"), ((4, 128), (4, 64), (4, 32), (4, -1), (8, 128), (8, 32)))
def test_every_weight_of_gptq_is_that_of_the_package(bits, group, symmetric, act_order):
    library = pytest.importorskip("gptqmodel.nn_modules.qlinear.torch", reason="gptqmodel is not installed")
    case = Case(bits, group, symmetric, columns=256)
    made = gptq(case.shuffled() if act_order else case)
    layer = library.TorchLinear(bits, group, symmetric, act_order, made.in_features, made.out_features)
    for name, tensor in made.named_buffers():
        setattr(layer, name, tensor)
    layer.qzero_format(format=2)
    (packed,) = repacked([read(layer)])
    expected = library.PackableQuantLinear.dequantize_weight(layer)
    assert expected.dtype == torch.float16 and torch.equal(packed.dequantize(torch.float16), expected.t())


@pytest.mark.parametrize("group", (128, 64, 32, -1))
def test_every_weight_of_awq_is_that_of_the_package(group):
    library = pytest.importorskip("gptqmodel.quantization.awq.utils.packing_utils", reason="gptqmodel is not installed")
    case = Case(4, group)
    made = awq(case)
    (packed,) = repacked([read(made)])
    expected = library.dequantize_gemm(made.qweight, made.qzeros, made.scales, 4, case.group)
    assert expected.dtype == torch.float16 and torch.equal(packed.dequantize(torch.float16), expected.t())


def test_a_model_whose_head_is_quantized_too_decodes_fast():
    """Our forward of the head does not count as a forward of the user's."""
    require_native(torch.device("cpu"))
    model = build("llama")
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            parent, _, attribute = name.rpartition(".")
            case = Case(8, -1, True, module.out_features, module.in_features)
            setattr(model.get_submodule(parent), attribute, torchao(case, "Int8Tensor").requires_grad_(False))
    hf_fastpath.patch(model, quiet=True)
    assert type(model.lm_head) is PackedLinear
    with counting(model) as counts:
        model.generate(torch.tensor([[5, 6, 7]]), **SHORT)
    assert counts.fast and not counts.fallback and not counts.reasons
