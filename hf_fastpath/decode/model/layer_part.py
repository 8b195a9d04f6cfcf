"""A decoder layer as a part of a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ... import architecture as arch
from ...reasons import Cause
from .attention_part import AttentionPart
from .modules import child, device_of, dropout_reason, is_on, number
from .numbers import number_reason
from .parts import FeedForwardPart, MoEPart, NormPart, Part, feed_forward_part


@dataclass(frozen=True)
class LayerPart(Part):
    """A decoder layer and its four parts.

    Attributes:
        window: sliding window of the layer's attention, or None.
    """

    window: int | None

    @property
    def spec(self) -> arch.LayerSpec:
        return self.architecture.layer

    def _norm(self, names: str | tuple[str, ...] | None) -> NormPart | None:
        if isinstance(names, tuple):
            names = next((name for name in names if hasattr(self.module, name)), None)
        module = None if names is None else child(self.module, names)
        return None if module is None else NormPart(self.architecture, module)

    @property
    def attention_norm(self) -> NormPart | None:
        return self._norm(self.spec.attention_norm)

    @property
    def attention(self) -> AttentionPart:
        return AttentionPart(self.architecture, child(self.module, self.spec.attention), self.window)

    @property
    def attention_post_norm(self) -> NormPart | None:
        return self._norm(self.spec.attention_post_norm)

    @property
    def mlp_norm(self) -> NormPart | None:
        own = self._norm(self.spec.mlp_norm)
        return self.attention_norm if own is None and self.is_parallel else own

    @property
    def mlp(self) -> FeedForwardPart:
        name = self.spec.mlp
        return feed_forward_part(self.architecture, self.module if name is None else child(self.module, name))

    @property
    def mlp_post_norm(self) -> NormPart | None:
        return self._norm(self.spec.mlp_post_norm)

    @property
    def norms(self) -> list[NormPart]:
        """Return the layer's norms, each once."""
        return [norm for name in self.spec.norms if (norm := self._norm(name)) is not None]

    @property
    def is_parallel(self) -> bool:
        """Whether attention and MLP take the same input."""
        parallel = self.spec.parallel
        return is_on(self.module, parallel) if isinstance(parallel, str) else parallel

    @property
    def residual_multiplier(self) -> float:
        return number(self.module, self.spec.residual_multiplier)

    @property
    def device(self) -> torch.device:
        return device_of(self.attention.projections()[-1])

    def projections(self) -> list[nn.Module]:
        """Return the projections of attention and MLP; the experts of a mixture are no projections."""
        mlp = self.mlp
        return self.attention.projections() + ([] if isinstance(mlp, MoEPart) else mlp.projections())

    def projection_groups(self) -> list[list[nn.Module]]:
        """Return the :meth:`projections`, those of one input together."""
        *qkv, out = self.attention.projections()
        if isinstance(self.mlp, MoEPart):
            return [qkv, [out]]
        *inputs, down = self.mlp.projections()
        return [qkv, [out], inputs, [down]]

    def parts(self) -> list[Part]:
        return [*self.norms, self.attention, self.mlp]

    def parameters(self) -> list[torch.Tensor | None]:
        return [parameter for part in self.parts() for parameter in part.parameters()]

    def other_reason(self) -> str | None:
        return self._own_reason("layer")

    def reason(self) -> str | None:
        if (reason := self.other_reason()) is not None:
            return reason
        spec = self.spec
        odd = [name for name in spec.refuse if getattr(self.module, name, False) is not False]
        odd += [name for name in spec.require if not getattr(self.module, name)]
        if odd:
            return Cause("unsupported_config", f"{odd[0]}={getattr(self.module, odd[0])!r}", self.module)
        if self.module.training and getattr(self.module, "gradient_checkpointing", False):
            return Cause("checkpointing", "gradient_checkpointing=True", self.module)
        reasons = [self._code_reason(), number_reason(self.module, self.spec.residual_multiplier)]
        reasons += [dropout_reason(self.module, name) for name in spec.dropouts]
        reasons += [part.reason() for part in self.parts()]
        return next((reason for reason in reasons if reason), None)
