"""Tensor-parallel models: what this rank has of each module, as a model of plain modules.

transformers makes the weights of a model with a ``tp_plan`` DTensors, and puts its collectives into forwards on the
instances. A decode plan needs neither: it reads this rank's shards where they lie, and adds up the ranks' outputs
behind the products that need it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .. import compat
from ..architecture import Architecture
from ..compat import ShardStyle
from ..reasons import Cause
from .local_models import LocalPart, copied, has_local, rebuilt
from .parts import MoEPart
from .rank_calls import SHARD_KEY, Shard, shard_of
from .ranks import Ranks
from .structure import model_part


def local_model(architecture: Architecture, model: nn.Module, ranks: Ranks) -> nn.Module:
    """Return a model of this rank's shards: its tensors are those of ``model``, and its sizes are the rank's.

    Modules of which the rank has all are those of ``model`` itself.
    """
    dtype = model.get_input_embeddings().weight.dtype

    def local(module: nn.Module, children: dict[str, Any]) -> nn.Module:
        parallel = compat.parallel_forward(module)
        shard = None if parallel is None else _shard(architecture, module, parallel.style, ranks, dtype)
        is_attention = architecture.part_of(module) == "attention"
        if parallel is None and not is_attention and not has_local(module, children):
            return module
        made = _copy(module, children, parallel, shard)
        if is_attention:
            _divide_heads(architecture, made)
        return made

    return rebuilt(model, local)


def _copy(
    module: nn.Module, children: dict[str, Any], parallel: compat.Parallel | None, shard: Shard | None
) -> nn.Module:
    """Copy a module; the copy's own forward is the one from before the model was spread, if the module had one."""
    contents: dict[str, Any] = {}
    parameters = {name: None if p is None else compat.local_tensor(p) for name, p in module._parameters.items()}
    if shard is not None:
        contents[SHARD_KEY] = shard
        if shard.style is ShardStyle.ROWS and shard.ranks.rank:
            parameters["bias"] = None  # the sum is to hold the bias once
    forward = vars(module).get("forward") if parallel is None else parallel.inner
    own = getattr(forward, "__func__", None) is type(module).forward and forward.__self__ is module
    return copied(module, children, None if own else forward, _parameters=parameters, **contents)


def _shard(
    architecture: Architecture, module: nn.Module, style: ShardStyle | None, ranks: Ranks, dtype: torch.dtype
) -> Shard | None:
    if style in (None, ShardStyle.WHOLE):
        return None
    weight = module._parameters.get("weight")
    if style is ShardStyle.EXPERTS:
        total = features = getattr(module, architecture.moe.down).shape[1] if architecture.moe else 0
    elif weight is None:  # quantized
        total = features = module.out_features
    else:
        total, features = weight.shape
    if style is ShardStyle.ROWS:
        features = total
    elif style in (ShardStyle.COLUMNS, ShardStyle.GATHERED) and weight is not None:
        features = len(compat.local_tensor(weight))
    return Shard(ranks, style, ranks.rank * -(-total // ranks.size), total, features, dtype)


def _divide_heads(architecture: Architecture, attention: nn.Module) -> None:
    """Give an attention module of a local model a config with the rank's number of heads."""
    shard = shard_of(getattr(attention, architecture.attention.out))
    if shard is None:
        return
    config = copy.copy(attention.config)
    for name in ("num_attention_heads", "num_key_value_heads"):
        if (heads := getattr(config, name, None)) is not None:
            compat.set_entry(config, name, heads // shard.ranks.size)
    vars(attention)["config"] = config


@dataclass(frozen=True)
class ShardedPart(LocalPart):
    """What this rank has of a tensor-parallel model.

    Attributes:
        group: the ranks.
    """

    group: Ranks

    @property
    def ranks(self) -> Ranks:
        return self.group

    @property
    def vocab_size(self) -> int:
        shard = shard_of(self.head)
        return super().vocab_size if shard is None else shard.total

    @property
    def num_embeddings(self) -> int:
        shard = shard_of(self.embedding)
        return super().num_embeddings if shard is None else shard.total

    def reason(self) -> str | None:
        return self.other_reason() or self.spread_reason() or super().reason()

    def spread_reason(self) -> str | None:
        """Return why this way to spread the model is not covered, or None."""
        expected = {id(module): styles for module, styles in self._roles()}
        for name, module in self.whole.named_modules():
            parallel = compat.parallel_forward(module)
            sharded = [p for p in module._parameters.values() if compat.is_sharded(p)]
            if parallel is None:
                if sharded:
                    return Cause("sharded", f"{name} has DTensors and no forward of transformers' for them")
                continue
            if parallel.style is ShardStyle.WHOLE and not sharded:
                continue
            local = self.module.get_submodule(name)
            if parallel.style is None or expected.get(id(local)) is not parallel.style:
                style = parallel.name if parallel.style is None else parallel.style.value
                return Cause("sharded", f"{name} is spread by {style}")
            if sharded and not self._is_spread_as_said(module, parallel.style):
                return Cause("sharded", f"{name} is spread otherwise than its style {parallel.style.value} says")
        return self._heads_reason()

    def _roles(self) -> Iterator[tuple[nn.Module, ShardStyle]]:
        """Yield the modules that may be spread, and how; those of attention, or of an MLP, are spread all or none."""
        yield self.embedding, ShardStyle.VOCABULARY
        yield self.head, ShardStyle.GATHERED
        for layer in self.layers:
            groups = [layer.attention.projections()]
            if isinstance(layer.mlp, MoEPart):
                yield layer.mlp.experts, ShardStyle.EXPERTS
            else:
                groups.append(layer.mlp.projections())
            for *inner, out in groups:
                shards = [shard_of(module) for module in (*inner, out)]
                if all(shard is not None for shard in shards):
                    yield from ((module, ShardStyle.COLUMNS) for module in inner)
                    yield out, ShardStyle.ROWS

    def _heads_reason(self) -> str | None:
        for layer in self.layers:
            attention = layer.attention
            if shard_of(attention.projections()[-1]) is None:
                continue
            config = self.whole.config.get_text_config()
            heads = [config.num_attention_heads] * 2
            heads[1] = getattr(config, "num_key_value_heads", None) or heads[0]
            if any(count % self.group.size for count in heads):
                return Cause("sharded", f"{heads[0]} heads and {heads[1]} KV heads over {self.group.size} ranks")
        return None

    def _is_spread_as_said(self, module: nn.Module, style: ShardStyle) -> bool:
        parameters = {name: each for name, each in module._parameters.items() if each is not None}
        if style is ShardStyle.EXPERTS:
            names = self.architecture.moe.gate_up, self.architecture.moe.down
            if parameters.keys() != set(names) or not all(map(compat.is_sharded, parameters.values())):
                return False
            gate_up, down = (parameters[name] for name in names)
            return compat.halves_sharded_dim(gate_up) == 1 and compat.sharded_dim(down) == 2
        for name, parameter in parameters.items():
            dim = compat.sharded_dim(parameter) if compat.is_sharded(parameter) else None
            wanted = 0
            if style is ShardStyle.ROWS:
                wanted = None if name == "bias" else 1
            if dim != wanted:
                return False
        return True


@dataclass(frozen=True)
class Sharded:
    """The family of tensor-parallel models that an architecture describes.

    Attributes:
        ranks: the processes over which the model is spread.
    """

    architecture: Architecture
    ranks: Ranks

    @property
    def module(self) -> str:
        """Return the name of the transformers module that defines the architecture's classes."""
        return self.architecture.module

    def model_part(self, model: nn.Module) -> ShardedPart | None:
        """Return this rank's part of ``model`` in its roles as it is now, or None if it is not of this architecture."""
        whole = model_part(self.architecture, model)
        if whole is None:
            return None
        local = local_model(self.architecture, model, self.ranks)
        return ShardedPart(self.architecture, local, whole.windows, model, self.ranks)
