"""Tensor-parallel models: what this rank has of each module, as a model of plain modules.

transformers makes the weights of a model with a ``tp_plan`` DTensors, and puts its collectives into forwards on the
instances. A decode plan needs neither: it reads this rank's shards where they lie, and adds up the ranks' outputs
behind the products that need it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ... import compat
from ...architecture import Architecture
from ...compat import ShardStyle
from ...reasons import Cause
from ..model.modules import is_packed, weight_and_bias
from ..model.parts import MoEPart
from ..ranks.process_group import Ranks
from ..ranks.rank_calls import SHARD_KEY, Shard, shard_of, style_of
from ..sources.described import model_part
from .local_models import LocalModel, copied, has_local, rebuilt

#: styles of a mixture's experts
EXPERT_STYLES = (ShardStyle.EXPERTS, ShardStyle.SOME_EXPERTS, ShardStyle.PICKED_EXPERTS)
#: style of the last projection of attention or of an MLP -> style of those in front
_IN_FRONT = {ShardStyle.ROWS: ShardStyle.COLUMNS, ShardStyle.SPLIT_ROWS: ShardStyle.GATHERED}


def local_model(model: nn.Module, ranks: Ranks) -> nn.Module:
    """Return a model of this rank's shards: its tensors are those of ``model``.

    Modules of which the rank has all are those of ``model`` itself.
    """
    of_transformers: Any = model
    dtype = of_transformers.get_input_embeddings().weight.dtype

    def local(module: nn.Module, children: dict[str, Any]) -> nn.Module:
        parallel = compat.parallel_forward(module)
        shard = None if parallel is None else _shard(module, parallel.style, ranks, dtype)
        if parallel is None and not has_local(module, children):
            return module
        return _copy(module, children, parallel, shard)

    return rebuilt(model, local)


def _copy(
    module: nn.Module, children: dict[str, Any], parallel: compat.Parallel | None, shard: Shard | None
) -> nn.Module:
    """Copy a module; the copy's own forward is the one from before the model was spread, if the module had one."""
    contents: dict[str, Any] = {}
    parameters = {name: None if p is None else compat.local_tensor(p) for name, p in module._parameters.items()}
    if shard is not None:
        contents[SHARD_KEY] = shard
        if shard.style in (ShardStyle.ROWS, ShardStyle.SPLIT_ROWS) and shard.ranks.rank:
            parameters["bias"] = None  # the sum is to hold the bias once
    forward = vars(module).get("forward") if parallel is None else parallel.inner
    is_own = getattr(forward, "__func__", None) is type(module).forward and getattr(forward, "__self__", None) is module
    contents["_parameters"] = parameters
    return copied(module, children, None if is_own else forward, leave_out=compat.OF_PROCESSES, **contents)


def _shard(module: Any, style: ShardStyle | None, ranks: Ranks, dtype: torch.dtype) -> Shard | None:
    if style in (None, ShardStyle.WHOLE, ShardStyle.OWN):
        return None
    weight = module._parameters.get("weight")
    if style in EXPERT_STYLES:
        stacks = compat.expert_stacks(module)
        if stacks is None:
            return None
        down = stacks.tensors[stacks.roles["down_weight"]]
        inner = compat.sharded_dim(down) if style is ShardStyle.EXPERTS and compat.is_sharded(down) else None
        total, features = len(down), down.shape[3 - (inner or (1 if stacks.is_transposed else 2))]
    elif weight is None:  # quantized
        total = features = module.out_features
    else:
        total, features = weight.shape
    if style is ShardStyle.ROWS:
        features = total
    elif style is ShardStyle.SPLIT_ROWS:
        total, features = features, total
    elif style in (ShardStyle.COLUMNS, ShardStyle.GATHERED) and weight is not None:
        features = len(compat.local_tensor(weight))
    return Shard(ranks, style, ranks.rank * -(-total // ranks.size), total, features, dtype)


@dataclass(frozen=True)
class ShardedModel(LocalModel):
    """What this rank has of a tensor-parallel model.

    Attributes:
        group: the ranks.
    """

    group: Ranks

    @property
    def ranks(self) -> Ranks:
        return self.group

    @property
    def num_embeddings(self) -> int:
        shard = shard_of(self.embedding)
        return super().num_embeddings if shard is None else shard.total

    def reason(self) -> str | None:
        return self.other_reason() or self.spread_reason() or super().reason()

    def spread_reason(self) -> str | None:
        """Return why this way to spread the model is not covered, or None."""
        expected = {id(module): styles for module, styles in self._roles()}
        found = spread_reason(
            self.whole, lambda name, style: expected.get(id(self.module.get_submodule(name))) is style
        )
        return found or self._heads_reason()

    def _roles(self) -> Iterator[tuple[nn.Module, ShardStyle]]:
        """Yield the modules that may be spread, and how; those of attention, or of an MLP, are spread all or none."""
        yield self.embedding, ShardStyle.VOCABULARY
        yield self.head, ShardStyle.GATHERED
        for layer in self.layers:
            *qkv, out = layer.attention.projections()
            groups = [[*self._spread_of(qkv), out]]
            mlp = layer.mlp
            if isinstance(mlp, MoEPart):
                yield from self._mixture_roles(mlp)
            elif mlp.is_fused or style_of(mlp.down) is ShardStyle.ROWS:  # no other MLP's step gathers features
                groups.append(mlp.projections())
            for *inner, out in groups:
                style = style_of(out)
                if style in _IN_FRONT and all(shard_of(module) is not None for module in inner):
                    yield from ((module, _IN_FRONT[style]) for module in inner)
                    yield out, style

    def _spread_of(self, qkv: list[nn.Module]) -> list[nn.Module]:
        """Return those of an attention's projections that have to be spread: every rank may have the only KV head."""
        has_kv = all(shard_of(module) is None for module in qkv[1:])
        return qkv[:1] if has_kv and self._heads()[1] == 1 else qkv

    def _heads(self) -> tuple[int, int]:
        """Return the number of heads and of KV heads of the whole model."""
        own = self.layers[0].attention
        *qkv, out = own.projections()
        if is_packed(out) and style_of(out) is ShardStyle.ROWS:  # which knows this rank's features alone
            spread = 1 if shard_of(qkv[-1]) is None else self.group.size
            return own.num_heads * self.group.size, own.num_kv_heads * spread
        whole = model_part(self.architecture, self.whole)
        assert whole is not None, "its local model is of the architecture"
        attention = whole.layers[0].attention
        return attention.num_heads, attention.num_kv_heads

    def _mixture_roles(self, mixture: MoEPart) -> Iterator[tuple[nn.Module, ShardStyle]]:
        """Yield the experts, and the router if it is the one that leaves each rank its own choices."""
        if style_of(mixture.router) is ShardStyle.PICKING:
            yield mixture.router, ShardStyle.PICKING
            yield mixture.experts, ShardStyle.PICKED_EXPERTS
        elif (style := style_of(mixture.experts)) in (ShardStyle.EXPERTS, ShardStyle.SOME_EXPERTS):
            yield mixture.experts, style

    def _heads_reason(self) -> str | None:
        for layer in self.layers:
            *qkv, out = layer.attention.projections()
            if style_of(out) is not ShardStyle.ROWS:
                continue
            heads, kv_heads = self._heads()
            if heads % self.group.size or (shard_of(qkv[-1]) is not None and kv_heads % self.group.size):
                what = f"{heads} heads and {kv_heads} KV heads do not divide over {self.group.size} ranks"
                return Cause("sharded", what)
            weights = [weight_and_bias(norm.module)[0] for norm in layer.attention.head_norms]
            if any(len(weight) != layer.attention.head_dim for weight in weights):
                return Cause("sharded", "a norm over the heads of all ranks", layer.attention.module)
        return None


def spread_reason(whole: nn.Module, fits: Callable[[str, ShardStyle], bool]) -> Cause | None:
    """Return why the way in which a model's modules are spread is not covered, or None.

    Args:
        fits: whether the module of a name may be spread in a way.
    """
    for name, module in whole.named_modules():
        parallel = compat.parallel_forward(module)
        sharded = [p for p in module._parameters.values() if compat.is_sharded(p)]
        if parallel is None:
            if sharded:
                return Cause("sharded", f"{name} has DTensors and no forward of transformers' for them")
            continue
        if parallel.style is ShardStyle.WHOLE and not sharded:
            continue
        if parallel.style is None:
            return Cause("sharded", f"{name} is spread by {parallel.name}")
        if not fits(name, parallel.style):
            what = f"{name} is spread by {parallel.style.value}, which its place or its neighbors do not go with"
            return Cause("sharded", what)
        if (sharded or parallel.style in EXPERT_STYLES) and not _is_spread_as_said(module, parallel.style):
            return Cause("sharded", f"{name} is spread otherwise than its style {parallel.style.value} says")
    return None


def _is_spread_as_said(module: nn.Module, style: ShardStyle) -> bool:
    """Whether a module's DTensors are spread as its style says."""
    parameters = {name: each for name, each in module._parameters.items() if each is not None}
    if style in EXPERT_STYLES:
        stacks = compat.expert_stacks(module)
        if stacks is None or not all(map(compat.is_sharded, parameters.values())):
            return False
        if style is not ShardStyle.EXPERTS:
            return {*map(compat.sharded_dim, parameters.values())} == {0}
        up, down = (stacks.tensors[stacks.roles[role]] for role in ("gate_up_weight", "down_weight"))
        of_up = compat.halves_sharded_dim(up) if stacks.has_gate else compat.sharded_dim(up)
        is_inner = of_up in (1, 2) and compat.sharded_dim(down) == 3 - of_up  # 2 and 1 if they are transposed
        return len(parameters) == 2 and stacks.is_concatenated and is_inner
    if style is ShardStyle.OWN:
        return all(compat.sharded_dim(each) is not None for each in parameters.values() if compat.is_sharded(each))
    for name, parameter in parameters.items():
        dim = compat.sharded_dim(parameter) if compat.is_sharded(parameter) else None
        wanted = None if style is ShardStyle.PICKING else 0
        if style in (ShardStyle.ROWS, ShardStyle.SPLIT_ROWS):
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

    def take_reason(self) -> None:
        """Return None: nobody asks on the way."""

    def model_part(self, model: nn.Module) -> ShardedModel | None:
        """Return this rank's part of ``model`` in its roles as it is now, or None if it is not of this architecture."""
        whole = model_part(self.architecture, model)
        if whole is None:
            return None
        local = local_model(model, self.ranks)
        return ShardedModel(self.architecture, local, whole.windows, model, self.ranks)
