"""Attention as a part of a decoder layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ... import architecture as arch
from ...compat import MIN_WINDOW, ShardStyle, attention_function, caps_scores, is_known_code, name_of, rotation_function
from ...ops.queries import takes_head_dim
from ...reasons import Cause, class_name
from ...registry import PLAIN_TENSORS
from ..ranks.rank_calls import style_of
from .modules import (
    child,
    dropout_reason,
    found_at,
    in_features,
    is_on,
    number,
    out_features,
    projection_reason,
    weight_and_bias,
)
from .numbers import positive_reason, softcap_reason
from .parts import NormPart, Part


@dataclass(frozen=True)
class AttentionPart(Part):
    """An attention module with separate or fused query, key and value projections.

    Attributes:
        window: positions a token sees, itself included; None for all.
    """

    window: int | None

    @property
    def spec(self) -> arch.AttentionSpec:
        return self.architecture.attention

    def projections(self) -> list[nn.Module]:
        return [child(self.module, name) for name in (*self.spec.qkv, self.spec.out)]

    @property
    def head_norms(self) -> list[NormPart]:
        """Norms over query and key, or none."""
        return [NormPart(self.architecture, child(self.module, name)) for name in self.spec.head_norms or ()]

    def parameters(self) -> list[torch.Tensor | None]:
        if self.other_reason() is not None:
            return []
        found = [p for linear in self.projections() for p in weight_and_bias(linear)]
        return found + [p for norm in self.head_norms for p in norm.parameters()] + [self.sinks]

    @property
    def head_dim(self) -> int:
        return getattr(self.module, self.spec.head_dim)

    @property
    def num_heads(self) -> int:
        # the config may have been edited since the model was made, and the model's own code does not read it
        return in_features(child(self.module, self.spec.out)) // self.head_dim

    @property
    def num_kv_heads(self) -> int:
        heads = sum(out_features(linear) for linear in self.projections()[:-1]) // self.head_dim
        return (heads - self.num_heads) // 2

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def repeats_kv(self) -> bool:
        """Whether the cache holds every key and value ``group`` times."""
        return is_on(self.module, self.spec.repeats_kv) and self.group > 1

    @property
    def value_shape(self) -> tuple[int, int]:
        """As :attr:`cache_shape`, of values."""
        return self.cache_shape

    @property
    def cache_shape(self) -> tuple[int, int]:
        """Number of heads, and head_dim, of the keys that the cache holds for a position."""
        return self.num_heads if self.repeats_kv else self.num_kv_heads, self.head_dim

    @property
    def scaling(self) -> float:
        return self.head_dim**-0.5 if self.spec.scaling is None else float(getattr(self.module, self.spec.scaling))

    @property
    def softcap(self) -> float:
        """Soft-cap of the scores; 0 for none."""
        applies = self.spec.softcap is not None and caps_scores(self.module.config)
        return number(self.module, self.spec.softcap, default=0.0) if applies else 0.0

    @property
    def sinks(self) -> torch.Tensor | None:
        """A score for each head that takes part in the softmax beside the scores of positions, or None."""
        return None if self.spec.sinks is None else getattr(self.module, self.spec.sinks)

    @property
    def rotates(self) -> bool:
        """Whether rotary embedding is applied to queries and keys."""
        return self.architecture.rotary is not None and is_on(self.module, self.spec.rotates, default=True)

    @property
    def layer_type(self) -> str | None:
        """The kind of layer that the rotary embedding is asked for; None if the embedding knows no kinds."""
        if self.spec.layer_types is None:
            return None
        module: Any = self.module
        kinds, index = getattr(module.config, self.spec.layer_types), module.layer_idx
        return kinds[index] if index < len(kinds) else None

    @property
    def is_composed(self) -> bool:
        """Whether there is more between the norm and the cache than ``ops.qkv_rope_append`` does."""
        interleaved = self.spec.by_kv_head and self.num_kv_heads > 1
        is_gathered = style_of(self.projections()[0]) is ShardStyle.GATHERED
        return interleaved or self.repeats_kv or is_gathered

    def other_reason(self) -> str | None:
        return self._own_reason("attention")

    def reason(self) -> str | None:
        if (reason := self.other_reason()) is not None:
            return reason
        # 0 is no switch that is off, but a number to clip or to cap to
        values = [(path, found_at(self.module, path)) for path in self.spec.refuse]
        odd = [path for path, value in values if value is not None and value is not False]
        odd += [path for path in self.spec.require if not found_at(self.module, path)]
        if odd:
            return Cause("unsupported_config", f"{odd[0]}={found_at(self.module, odd[0])!r}", self.module)
        if self.window is not None and self.window < MIN_WINDOW:
            return Cause("unsupported_config", f"sliding_window={self.window}", self.module)
        if not takes_head_dim(self.head_dim):
            return Cause("unsupported_head_dim", f"{self.spec.head_dim}={self.head_dim}", self.module)
        if getattr(self.module, "sliding_window", self.window) != self.window:
            what = f"sliding_window={self.module.sliding_window}, of the layer's cache {self.window}"
            return Cause("unsupported_config", what, self.module)
        numbers = [positive_reason(self.module, self.spec.scaling)]
        if caps_scores(self.module.config):
            numbers.append(softcap_reason(self.module, self.spec.softcap))
        if (reason := next(filter(None, numbers), None)) is not None:
            return reason
        if len({norm.eps for norm in self.head_norms}) > 1:
            return Cause("unsupported_config", "norms of queries and keys with different eps", self.module)
        if self.sinks is not None and type(self.sinks) not in PLAIN_TENSORS:
            return Cause("unsupported_projection", f"{self.spec.sinks} is {class_name(self.sinks)}", self.module)
        home = self.architecture.module
        function = attention_function(self.module)
        if not is_known_code(function, home):
            config: Any = self.module.config
            what = f"attn_implementation={config._attn_implementation!r}, {name_of(function)}"
            return Cause("attention_function", what, self.module)
        function = rotation_function(self.module)
        if not is_known_code(function, home):
            return Cause("class_forward", f"apply_rotary_pos_emb is {name_of(function)}", self.module)
        reasons = [self._code_reason()]
        reasons += [projection_reason(linear, self.architecture) for linear in self.projections()]
        reasons += [dropout_reason(self.module, self.spec.attention_dropout)]
        reasons += [norm.reason() for norm in self.head_norms]
        reasons += [dropout_reason(self.module, self.spec.residual_dropout)]
        return next((reason for reason in reasons if reason), None) or self._heads_reason()

    def _heads_reason(self) -> str | None:
        """Return a reason if the projections' features are not those of whole heads, as of pruned projections."""
        features = [out_features(linear) for linear in self.projections()[:-1]]
        of_heads, of_keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        separate, together = [of_heads, of_keys, of_keys], [of_heads + 2 * of_keys]
        if features in (separate, together) and of_keys > 0 and self.num_heads % self.num_kv_heads == 0:
            return None
        what = f"projections of {features} features to {of_heads}, in heads of {self.head_dim}"
        return Cause("unsupported_config", what, self.module)
