"""Arguments of ops that take one of a few values: a name in Python, a number in the op's schema.

No op takes a string, because torch's conversion of a string for a native kernel allocates a copy that nobody frees. The
numbers are those of the enumerations in ``csrc``.
"""

from __future__ import annotations

import enum
from typing import Any

from .packed_formats import FORMATS


class Choice(enum.IntEnum):
    """One of a few values. ``Activation("gelu_tanh")``, ``Activation(3)`` and ``Activation.GELU_TANH`` are equal."""

    @property
    def label(self) -> str:
        """The name that users pass and read."""
        return self.name.lower()

    @classmethod
    def _missing_(cls, value: object) -> Choice | None:
        return next((member for member in cls if member.label == value), None)

    @classmethod
    def of(cls, value: Any) -> Any:
        """Return the member that ``value`` names or numbers, or ``value`` itself, which ``choice_reason`` refuses."""
        try:
            return cls(value)
        except ValueError:
            return value


class Activation(Choice):
    """``Activation`` of ``csrc/common/dtype.h``; CLAMPED_SWIGLU and SQUARED_RELU are of ``fused_experts`` only, SIGMOID
    of ``fused_swiglu``."""

    NONE = 0
    RELU = 1
    SILU = 2
    GELU_TANH = 3
    GELU = 4
    CLAMPED_SWIGLU = 5
    SQUARED_RELU = 6
    SIGMOID = 7


class GateActivation(Choice):
    """``GateActivation`` of ``csrc/gated_rms_norm/gated_rms_norm_params.h``."""

    SILU = 0
    SIGMOID = 1


class NormKind(Choice):
    """``NormKind`` of ``csrc/common/dtype.h``; the factors of RMS_OFFSET are ``1 + weight``."""

    NONE = 0
    RMS = 1
    LAYER = 2
    RMS_OFFSET = 3

    @property
    def is_rms(self) -> bool:
        return self in (NormKind.RMS, NormKind.RMS_OFFSET)

    @property
    def weight_offset(self) -> float:
        """What is added to the weight."""
        return 1.0 if self == NormKind.RMS_OFFSET else 0.0


class Scoring(Choice):
    """``Scoring`` of ``csrc/choose_experts/choose_experts_params.h``: what a router's scores are of its logits."""

    SOFTMAX = 0
    SIGMOID = 1


class InputQuants(Choice):
    """``InputQuants`` of ``csrc/fake_quantize/fake_quantize_params.h``: what a product's input is rounded to."""

    FP8_BLOCK = 0
    FP8_ROW = 1
    FP8_ROW_NARROW = 2
    INT8_ROW_NARROW = 3
    INT8_OUTLIERS = 4
    FP8_BLOCK_NARROW = 5
    INT8_ROW = 6

    @property
    def is_narrow(self) -> bool:
        """Whether steps on the way are rounded to the input's type, or the scale alone is."""
        return self.name.endswith("_NARROW") or self is InputQuants.INT8_ROW

    @property
    def is_block(self) -> bool:
        """Whether neighbors share a scale, instead of a row."""
        return self in (InputQuants.FP8_BLOCK, InputQuants.FP8_BLOCK_NARROW)


class PackedFormat(Choice):
    """``PackedFormat`` of ``csrc/weights/formats.generated.h``; ``packed_formats.py`` describes the formats."""

    _ignore_ = ("each", "number")
    for number, each in enumerate(FORMATS):
        vars()[each.upper()] = number


#: what ``patch(lm_head=...)`` takes: "fp16" leaves the head as it is, any other name is a format
HEADS = ("fp16", "int8")


class Rotation(Choice):
    """``Rotation`` of ``csrc/latent_attention/latent_attention_params.h``: which elements turn together."""

    HALVES = 0
    NEIGHBORS = 1
    NEIGHBORS_TO_HALVES = 2


class Approximation(Choice):
    """Approximations of ``fused_gelu``, named as in ``torch.nn.functional.gelu``."""

    NONE = 0
    TANH = 1
