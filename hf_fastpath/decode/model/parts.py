"""The parts of a decoder layer: norms, MLPs and mixtures of experts; :mod:`.attention_part` has attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ... import architecture as arch
from ...architecture import Architecture
from ...choices import Activation
from ...compat import activation_of, experts_function, is_known_code, is_sharded, name_of
from ...linears.packed_experts import PackedExperts
from ...native import loader
from ...ops import packed_experts
from ...ops.choose_experts import MAX_EXPERTS
from ...ops.fused_experts import EXPERT_GATES, MAX_TOP_K
from ...reasons import Cause, class_name
from ...registry import FLOAT_DTYPES, PLAIN_TENSORS
from ..ranks.rank_calls import shard_of
from .modules import (
    child,
    dropout_reason,
    is_on,
    is_transposed,
    odd_module,
    odd_tensor,
    own_code_reason,
    projection_reason,
    weight_and_bias,
)
from .numbers import number_reason
from .weight import Weight, halves, weight_of


@dataclass(frozen=True)
class Part:
    """A module in a role. Its inner modules may be replaced after patching, so they are looked up at every use."""

    architecture: Architecture
    module: nn.Module

    def parameters(self) -> list[torch.Tensor | None]:
        """Return the parameters that the kernels read; None stands for a bias that is not there."""
        raise NotImplementedError

    def other_reason(self) -> str | None:
        """Return why the module is none that the role was made for, so that its inside is unknown; or None."""
        raise NotImplementedError

    def reason(self) -> str | None:
        """Return why the kernels cannot stand in for the module right now, or None."""
        raise NotImplementedError

    def _own_reason(self, kind: str) -> str | None:
        return (
            None if self.architecture.part_of(self.module) == kind else Cause("class_not_supported", module=self.module)
        )

    def _code_reason(self, module: nn.Module | None = None) -> str | None:
        """Return the :func:`own_code_reason` of the module or of one inside it."""
        return own_code_reason(self.module if module is None else module, self.architecture.module)


class HeadPart(Part):
    """The projection that makes logits."""

    def parameters(self) -> list[torch.Tensor | None]:
        return list(weight_and_bias(self.module))

    def other_reason(self) -> str | None:
        return None

    def reason(self) -> str | None:
        return projection_reason(self.module, self.architecture)


class NormPart(Part):
    """A norm."""

    @property
    def eps(self) -> float:
        return getattr(self.module, self.architecture.norm.eps)

    def parameters(self) -> list[torch.Tensor | None]:
        return list(weight_and_bias(self.module))

    def other_reason(self) -> str | None:
        if self.architecture.norm.is_torchs:
            return None if type(self.module) is nn.LayerNorm else Cause("class_not_supported", module=self.module)
        return self._own_reason("norm")

    def reason(self) -> str | None:
        if (reason := self.other_reason()) is not None:
            return reason
        if (what := odd_tensor(self.parameters())) is not None:
            return odd_module(self.module, what)
        present = [p for p in self.parameters() if p is not None]
        if any(map(is_sharded, present)):
            return Cause("sharded", module=self.module)
        if (odd := next((p for p in present if p.dim() != 1), None)) is not None:
            return Cause("unsupported_config", f"weight of shape {tuple(odd.shape)}", self.module)
        if (odd := next((p for p in present if p.dtype not in FLOAT_DTYPES), None)) is not None:
            return Cause("dtype", f"weight is {odd.dtype}", self.module)
        return self.eps_reason() or self._code_reason()

    def eps_reason(self) -> str | None:
        """Return why the kernels cannot add epsilon, or None."""
        return number_reason(self.module, self.architecture.norm.eps)


class MLPPart(Part):
    """A plain or gated MLP."""

    @property
    def spec(self) -> arch.MLPSpec:
        spec = self.architecture.dense_mlp
        assert spec is not None
        return spec

    @property
    def up(self) -> nn.Module:
        return child(self.module, self.spec.up)

    @property
    def down(self) -> nn.Module:
        return child(self.module, self.spec.down)

    @property
    def gate(self) -> nn.Module | None:
        return None if self.spec.gate is None else child(self.module, self.spec.gate)

    @property
    def activation(self) -> Activation | None:
        return activation_of(child(self.module, self.spec.activation))

    @property
    def is_fused(self) -> bool:
        """Whether gate and up are one projection."""
        return self.spec.gate == self.spec.up

    def gate_and_up(self) -> list[tuple[Weight, torch.Tensor | None]]:
        """Return weight and bias of gate and up: of two projections, or the halves of one projection as views."""
        gate = None if self.is_fused else self.gate
        weight, bias = weight_of(self.up)
        if gate is not None:
            return [weight_of(gate), (weight, bias)]
        return list(zip(halves(weight), (None, None) if bias is None else bias.chunk(2)))

    def projections(self) -> list[nn.Module]:
        gate = None if self.is_fused else self.gate
        return [linear for linear in (gate, self.up, self.down) if linear is not None]

    def parameters(self) -> list[torch.Tensor | None]:
        if self.other_reason() is not None:
            return []
        return [p for linear in self.projections() for p in weight_and_bias(linear)]

    @property
    def constants(self) -> tuple:
        """What a decode plan records beside parameters."""
        return (self.activation,)

    def activation_reason(self) -> str | None:
        """Return why the fused activation cannot stand in, or None."""
        if self.activation is None or (self.spec.gate is not None and self.activation == Activation.RELU):
            return Cause("unsupported_activation", module=child(self.module, self.spec.activation))
        return own_code_reason(child(self.module, self.spec.activation))

    def other_reason(self) -> str | None:
        if self.architecture.dense_mlp is None:  # all MLPs of the family are mixtures
            return Cause("class_not_supported", module=self.module)
        return self._own_reason("mlp" if self.spec.class_name is not None else "layer")

    def reason(self) -> str | None:
        if (reason := self.other_reason()) is not None:
            return reason
        reasons = [self.activation_reason(), self._code_reason()]
        reasons += [projection_reason(linear, self.architecture) for linear in self.projections()]
        if self.is_fused and (self.up.bias is not None or is_transposed(self.up)):
            reasons.append(Cause("unsupported_config", "gate and up in one, with a bias or transposed", self.up))
        reasons.append(dropout_reason(self.module, self.spec.dropout))
        return next((reason for reason in reasons if reason), None)


class MoEPart(Part):
    """A mixture of experts."""

    @property
    def spec(self) -> arch.MoESpec:
        spec = self.architecture.moe
        assert spec is not None
        return spec

    @property
    def router(self) -> Any:
        return child(self.module, self.spec.router)

    @property
    def experts(self) -> Any:
        return child(self.module, self.spec.experts)

    @property
    def packed(self) -> PackedExperts | None:
        """The experts if their weights are quantized, else None."""
        experts = self.experts
        return experts if type(experts) is PackedExperts else None

    @property
    def activation(self) -> Activation | None:
        if (packed := self.packed) is not None:
            return packed.how.activation
        name = self.spec.activation
        return Activation.CLAMPED_SWIGLU if name is None else activation_of(child(self.experts, name))

    @property
    def top_k(self) -> int:
        return getattr(self.router, self.spec.top_k)

    @property
    def is_normalized(self) -> bool:
        """Whether the weights of a token's experts are made to sum to one."""
        normalized = self.spec.normalized
        return is_on(self.router, normalized) if isinstance(normalized, str) else normalized

    @property
    def constants(self) -> tuple:
        """What a decode plan records beside parameters."""
        return self.activation, self.top_k, self.is_normalized, *self.gate_limits

    @property
    def gate_limits(self) -> tuple[float, ...]:
        """alpha and limit of a clamped gate."""
        if (packed := self.packed) is not None:
            return packed.how.alpha, packed.how.limit
        clamped = self.spec.clamped
        return () if clamped is None else tuple(float(getattr(self.experts, name)) for name in clamped[1:])

    def stacks(self) -> list[Any]:
        """Return the weights of all experts: gate and up, and down."""
        if (packed := self.packed) is not None:
            return [packed.packed.gate_up, packed.packed.down]
        return [getattr(self.experts, name) for name in (self.spec.gate_up, self.spec.down)]

    def stack_biases(self) -> list[torch.Tensor | None]:
        """Return the biases of all experts, in the same order."""
        if (packed := self.packed) is not None:
            return list(packed.biases)
        names = self.spec.gate_up_bias, self.spec.down_bias
        return [None if name is None else getattr(self.experts, name) for name in names]

    def parameters(self) -> list[torch.Tensor | None]:
        if self.other_reason() is not None:
            return []
        stacks = self.stacks() if self.packed is None else []  # as of PackedLinear
        return [*weight_and_bias(self.router), *stacks, *self.stack_biases()]

    def _constants_reason(self) -> str | None:
        """Return why a step cannot hold the numbers of router and experts, or None."""
        paths = () if self.spec.clamped is None or self.packed is not None else self.spec.clamped[1:]
        reasons = [number_reason(self.experts, path) for path in paths]
        if type(self.top_k) is not int or self.top_k < 1:
            reasons.append(Cause("unsupported_config", f"{self.spec.top_k}={self.top_k!r}", self.router))
        return next(filter(None, reasons), None)

    def _gate_reason(self) -> str | None:
        """Return a reason if the experts' method that applies the gate, if there is one, is not the family's own."""
        if self.spec.clamped is None or self.packed is not None:
            return None
        name, experts = self.spec.clamped[0], self.experts
        method = getattr(experts, name)
        if is_known_code(getattr(method, "__func__", method), self.architecture.module):
            return None
        return Cause("class_forward", f"{name} is {name_of(method)}", experts)

    def _is_of(self, module: nn.Module, class_name: str) -> bool:
        cls = type(module)
        return (cls.__module__, cls.__name__) == (self.architecture.module, class_name)

    def other_reason(self) -> str | None:
        spec = self.spec
        if not self._is_of(self.module, spec.class_name):
            return Cause("class_not_supported", module=self.module)
        if (reason := self._code_reason()) is not None:  # asked first: a forward on the instance may change the inside
            return reason
        inside = (self.router, spec.router_class), (self.experts, spec.experts_class)
        known = (pair for pair in inside if type(pair[0]) is not PackedExperts)
        other = next((module for module, class_name in known if not self._is_of(module, class_name)), None)
        return None if other is None else odd_module(other)

    def reason(self) -> str | None:
        if (reason := self.other_reason()) is not None:
            return reason
        spec, router, experts = self.spec, self.router, self.experts
        present = [p for p in self.parameters() if p is not None]
        if (odd := next((p for p in present if type(p) not in PLAIN_TENSORS or p.stride(-1) != 1), None)) is not None:
            return odd_module(self.module, f"a weight is {class_name(odd)}")
        if (odd := next((p for p in present if p.dtype not in FLOAT_DTYPES), None)) is not None:
            return Cause("dtype", f"a weight is {odd.dtype}", self.module)
        if (reason := self._constants_reason()) is not None:
            return reason
        if self.top_k > MAX_TOP_K or len(router.weight) > MAX_EXPERTS:
            what = f"{self.top_k} of {len(router.weight)} experts, at most {MAX_TOP_K} of {MAX_EXPERTS} are covered"
            return Cause("unsupported_config", what, self.module)
        if getattr(experts, "_is_expert_parallel", False) and shard_of(experts) is None:
            return Cause("unsupported_config", "experts on several devices", experts)
        if self.activation not in EXPERT_GATES or not all(value > 0 for value in self.gate_limits):
            return Cause("unsupported_activation", f"gate {self.activation}, limits {self.gate_limits}", experts)
        if (reason := self._gate_reason()) is not None:
            return reason
        if (packed := self.packed) is not None:
            where = packed.quants.device.type
            if where not in packed_experts.native and not packed.is_described:
                code = loader.why_not_native(where) or "no_native_library"
                return Cause(code, f"quantized weights on {where}", packed)
            return self._code_reason(router) or own_code_reason(packed, type(packed).__module__)
        function = experts_function(experts)
        if not is_known_code(function, self.architecture.module):
            return Cause("experts_function", name_of(function), experts)
        reasons = [self._code_reason(module) for module in (router, experts)]
        if spec.activation is not None:
            reasons.append(own_code_reason(child(experts, spec.activation)))
        reasons.append(dropout_reason(self.module, spec.jitter))
        return next((reason for reason in reasons if reason), None)


FeedForwardPart = MLPPart | MoEPart


def feed_forward_part(architecture: Architecture, module: nn.Module) -> FeedForwardPart:
    """Return ``module`` as a mixture of experts if it is one or the family has no other MLP, else as an MLP."""
    if architecture.dense_mlp is None or (
        architecture.moe is not None and type(module).__name__ == architecture.moe.class_name
    ):
        return MoEPart(architecture, module)
    return MLPPart(architecture, module)
