"""A token's step of a short causal convolution over each channel, or those of several tokens in turn."""

from __future__ import annotations

import torch

from ..choices import Activation
from ..registry import OpSpec, Sample, choice_reason, nbytes, register, shape_reason, tensor_reasons
from .fused_swiglu import activate
from .recurrence import in_turn, tokens_reason, written_reason

ACTIVATIONS = (Activation.NONE, Activation.RELU, Activation.SILU, Activation.GELU_TANH, Activation.GELU)
#: inputs that a channel sees, the new one among them
MAX_WIDTH = 16


def reference(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: Activation = Activation.NONE,
    input_gate: torch.Tensor | None = None,
    output_gate: torch.Tensor | None = None,
    tokens: int = 1,
) -> torch.Tensor:
    """Append a token to the last inputs of every channel, and compute ``activation(sum(weight * inputs) + bias)``.

    Args:
        x: [batch * tokens, channels] float32, float16 or bfloat16, any strides (columns of a projection). The tokens of
            a sequence follow each other.
        conv_state: [batch, channels, width], x's dtype, contiguous: the last ``width`` inputs, newest last. It moves by
            one input for each token, in place. Width 1 to 16.
        weight: [channels, width], x's dtype.
        bias: [channels], x's dtype, or None.
        activation: of the sum: ``"none"``, ``"silu"``, ``"relu"``, ``"gelu_tanh"`` or ``"gelu"``.
        input_gate: like x; the input is then ``input_gate * x``, rounded to x's dtype (LFM2). None for nothing.
        output_gate: like x; the result is multiplied by it (LFM2). None for nothing.
        tokens: of each sequence.

    Returns:
        [batch * tokens, channels] of x's dtype, contiguous.

    Raises:
        OpInputError: shapes, dtypes or devices do not fit, or the activation is unknown.

    Source: transformers ``models/qwen3_next/modeling_qwen3_next.py@5.24``, ``causal_conv1d_update``;
    ``models/lfm2/modeling_lfm2.py@5.24``, ``Lfm2ShortConv``.
    """
    if tokens > 1:
        step = lambda x, before, behind: reference(x, conv_state, weight, bias, activation, before, behind)  # noqa: E731
        return in_turn(step, tokens, (x, input_gate, output_gate))
    if input_gate is not None:
        x = input_gate * x
    inputs = torch.cat((conv_state[..., 1:], x[..., None]), dim=-1)
    conv_state.copy_(inputs)
    if x.dtype == torch.float64:  # PyTorch's convolution takes a thousand times as long
        out = (inputs * weight).sum(-1)
        out = out if bias is None else out + bias
    else:
        out = torch.nn.functional.conv1d(inputs, weight[:, None], bias, groups=weight.shape[0])[..., 0]
    out = activate(out, activation)
    return (out if output_gate is None else output_gate * out).contiguous()


def fake(x):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def why_not(
    x, conv_state, weight, bias=None, activation=Activation.NONE, input_gate=None, output_gate=None, tokens=1
) -> list[str]:
    if x.dim() != 2 or weight.dim() != 2 or not 1 <= weight.shape[1] <= MAX_WIDTH:
        found = f"x {tuple(x.shape)} and weight {tuple(weight.shape)}"
        return [f"got {found}, expected [batch * tokens, channels] and [channels, 1 to {MAX_WIDTH}]"]
    if reasons := tokens_reason(x, tokens):
        return reasons
    rows, channels = x.shape
    batch = rows // tokens
    gates = dict(input_gate=input_gate, output_gate=output_gate)
    reasons = tensor_reasons(x, conv_state=conv_state, weight=weight, bias=bias, **gates)
    reasons += choice_reason("activation", activation, ACTIVATIONS)
    reasons += shape_reason("weight", weight, (channels, weight.shape[1])) + shape_reason("bias", bias, (channels,))
    reasons += shape_reason("conv_state", conv_state, (batch, channels, weight.shape[1]))
    for name, gate in gates.items():
        reasons += shape_reason(name, gate, (rows, channels))
    return reasons + written_reason("conv_state", conv_state)


def moved(x, conv_state, weight, bias, input_gate, output_gate) -> int:
    return 2 * nbytes(x, conv_state) + nbytes(weight, bias, input_gate, output_gate)


def samples(device: torch.device, dtype: torch.dtype):
    def randn(*shape):
        return torch.randn(*shape, device=device, dtype=dtype)

    def call(batch, channels, width, bias=True, activation=Activation.SILU, gates=(False, False), tokens=1):
        """The columns of one projection: x, and in front of and behind it the gates."""
        projected = randn(batch * tokens, 3 * channels)
        before, x, after = projected[:, :channels], projected[:, channels : 2 * channels], projected[:, 2 * channels :]
        of_gates = (gate if given else None for gate, given in zip((before, after), gates, strict=True))
        weight = randn(channels, width) * width**-0.5
        row = randn(channels) if bias else None
        return Sample(x, randn(batch, channels, width), weight, row, activation, *of_gates, tokens)

    yield call(1, 96, 4)
    yield call(2, 40, 3, bias=False, activation=Activation.NONE, gates=(True, True))  # LFM2
    yield call(1, 8192, 4, bias=False)
    yield call(3, 111, 4, activation=Activation.GELU)
    yield call(2, 24, 1, activation=Activation.RELU, gates=(True, False))
    yield call(1, 7, MAX_WIDTH, activation=Activation.GELU_TANH, gates=(False, True))
    yield call(1, 96, 4, tokens=7)
    yield call(3, 41, 3, activation=Activation.NONE, gates=(True, True), tokens=2)
    yield call(2, 9, MAX_WIDTH, tokens=37)
    yield call(1, 130, 4, bias=False, gates=(True, False), tokens=16)
    yield call(2, 140, 4, gates=(True, True), tokens=50)
    yield call(1, 9, MAX_WIDTH, tokens=5)
    yield Sample(randn(2, 48), randn(2, 48, 4), randn(48, 4), None, Activation.SILU)


SPEC = register(
    OpSpec(
        name="short_convolution",
        schema=(
            "(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias=None, int activation=0, "
            "Tensor? input_gate=None, Tensor? output_gate=None, int tokens=1) -> Tensor"
        ),
        reference=reference,
        fake=fake,
        why_not=why_not,
        bytes=moved,
        samples=samples,
    )
)
