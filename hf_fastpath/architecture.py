"""The vocabulary in which ``patches/`` describes decoder architectures: data, with no logic for a single model.

An architecture file holds one :class:`Architecture` literal named ``ARCHITECTURE``. Names are attribute paths inside
transformers' modules. What they lead to is checked when a model is patched, and by the tests.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from functools import cached_property, lru_cache

from torch import nn

from .errors import UnsupportedModelError

#: parts of an architecture whose modules get our forwards
PARTS = ("norm", "mlp", "attention", "layer")


@dataclass(frozen=True)
class NormSpec:
    """A norm module.

    Attributes:
        class_name: transformers class, or ``LayerNorm`` for torch.nn's class, whose modules get no forward of ours.
        kind: ``"rms"`` or ``"layer"``.
        eps: attribute that holds epsilon.
        unit_offset: the factor is ``1 + weight``.
    """

    class_name: str
    kind: str
    eps: str
    unit_offset: bool = False

    @property
    def is_torchs(self) -> bool:
        """Whether the class is ``torch.nn.LayerNorm``."""
        return self.class_name == "LayerNorm"


@dataclass(frozen=True)
class AttentionSpec:
    """An attention module.

    Attributes:
        class_name: transformers class.
        qkv: names of the query, key and value projections, or of one fused projection (query | key | value).
        out: name of the output projection.
        by_kv_head: the rows of a fused projection are ordered by KV head: the head's queries, its key, its value.
        head_dim: attribute that holds the size of a head.
        scaling: attribute that holds the factor on the scores; None if that is ``1 / sqrt(head_dim)``.
        attention_dropout: name of the attribute that holds the dropout probability, or of an ``nn.Dropout``.
        repeats_kv: switch that is on if the cache holds keys and values for every query head; None if it never does.
        refuse, require: paths of attributes that must be falsy, or truthy, if the kernels are to compute what the model
            computes.
        residual_dropout: the same as ``attention_dropout``, after the output projection; or None.
        head_norms: names of norms over query and key, of every head or of all heads, between projection and rotation;
            or None.
        rotates: switch that is off in layers without rotation; None if all layers rotate, or none does.
        layer_types: entry of the config with the kind of each layer, if the rotary embedding has angles for each kind;
            or None.
        softcap: attribute that holds ``cap``, if scores become ``cap * tanh(scores / cap)``, which needs ops of its
            own; or None.
        sinks: name of a parameter with one more score for each head, which takes part in the softmax and adds nothing
            to the output; or None.
        pairs: which elements are rotated together: i and i + half (``"halves"``), or 2i and 2i + 1 (``"neighbors"``).
        cache: name of the argument in which the forwards of the module and of its layer take the KV cache, if it is not
            that of ``generate()``.
    """

    class_name: str
    qkv: tuple[str, ...]
    out: str
    by_kv_head: bool = False
    head_dim: str = "head_dim"
    repeats_kv: str | None = None
    scaling: str | None = "scaling"
    attention_dropout: str = "attention_dropout"
    refuse: tuple[str, ...] = ()
    require: tuple[str, ...] = ()
    residual_dropout: str | None = None
    head_norms: tuple[str, str] | None = None
    rotates: str | None = None
    layer_types: str | None = None
    softcap: str | None = None
    sinks: str | None = None
    pairs: str = "halves"
    cache: str | None = None


@dataclass(frozen=True)
class MLPSpec:
    """A feed-forward module.

    Attributes:
        class_name: transformers class; None if its parts lie in the layer itself.
        activation: name of the activation module.
        up, down: names of the projections.
        gate: name of the gate projection; the name in ``up`` if one projection holds gate | up; None for a plain MLP.
        dropout: name of the attribute that holds the dropout probability after ``down``, or of an ``nn.Dropout``; or
            None.
    """

    class_name: str | None
    activation: str
    up: str
    down: str
    gate: str | None = None
    dropout: str | None = None


@dataclass(frozen=True)
class MoESpec:
    """A mixture of experts: for each token a router chooses the gated MLPs that the token goes through.

    Attributes:
        class_name: transformers class.
        router, router_class: name and class of the module that scores the experts: it has a ``weight``, then a softmax.
        experts, experts_class: name and class of the module that holds the weights of all experts.
        activation: name of the activation module inside the experts; None if ``clamped`` is given.
        clamped: names of the experts' method that applies the gate ``clamped_swiglu`` of ``ops.fused_experts``, and of
            the attributes that hold its alpha and its limit; or None.
        gate_up, down: names of the experts' parameters [num_experts, features, in_features]; gate and up are in one.
        gate_up_bias, down_bias: names of the experts' parameters [num_experts, features], or None.
        transposed: the weights are [num_experts, in_features, features], and gate and up features alternate.
        top_k: attribute of the router with the number of experts that a token goes through.
        normalized: whether the experts' weights are made to sum to one: True, or the router's switch that says so.
        rounded: whether the experts' weights are rounded to the model's dtype.
        jitter: attribute that holds the strength of noise in training, or None.
        returns_weights: the module's forward gives its output and the weights of the chosen experts.
        dense: the MLP of layers that are no mixture, which may stand in the same place; or None.
    """

    class_name: str
    router: str
    router_class: str
    experts: str
    experts_class: str
    activation: str | None = None
    clamped: tuple[str, str, str] | None = None
    gate_up: str = "gate_up_proj"
    down: str = "down_proj"
    gate_up_bias: str | None = None
    down_bias: str | None = None
    transposed: bool = False
    top_k: str = "top_k"
    normalized: bool | str = True
    rounded: bool = False
    jitter: str | None = None
    returns_weights: bool = False
    dense: MLPSpec | None = None


@dataclass(frozen=True)
class LayerSpec:
    """A decoder layer: ``x += attention(norm(x)); x += mlp(norm(x))``, or a variation that the last fields declare.

    Attributes:
        class_name: transformers class.
        attention_norm: name of the norm in front of attention, or None; of several names, the first that the layer has.
        attention: name of the attention module.
        mlp_norm: the same in front of the MLP; a parallel layer without one uses attention_norm.
        mlp: name of the MLP or mixture, or None if its parts lie in the layer itself.
        refuse: names of parts or switches whose presence means another structure (cross-attention).
        require: names of switches that are on in this structure.
        dropouts: names of attributes with dropout probabilities after attention and MLP, or of ``nn.Dropout``s.
        attention_post_norm, mlp_post_norm: names of norms over what is added to x, or None.
        residual_multiplier: attribute that holds a factor on what is added to x, or None.
        parallel: whether attention and MLP take the same x: True, False, or the switch that says so.
        returns_weights: the layer's forward gives a pair, of which the second is the attention weights or None.
    """

    class_name: str
    attention_norm: str | tuple[str, ...] | None
    attention: str
    mlp_norm: str | tuple[str, ...] | None
    mlp: str | None
    refuse: tuple[str, ...] = ()
    require: tuple[str, ...] = ()
    dropouts: tuple[str, ...] = ()
    attention_post_norm: str | None = None
    mlp_post_norm: str | None = None
    residual_multiplier: str | None = None
    parallel: bool | str = False
    returns_weights: bool = False

    @property
    def norms(self) -> tuple[str | tuple[str, ...], ...]:
        """Names of the layer's own norms, as they are declared."""
        names = (self.attention_norm, self.attention_post_norm, self.mlp_norm, self.mlp_post_norm)
        return tuple(name for name in names if name is not None)


@dataclass(frozen=True)
class Architecture:
    """A decoder-only family.

    Attributes:
        name: name of the file, and transformers' ``model_type``.
        module: transformers module that defines the classes.
        causal_lm: class with ``generate()``.
        base: name of the decoder inside the causal LM; a path with dots if the decoder lies deeper.
        embedding, layers, final_norm: names inside the decoder.
        head: name of the output projection inside the causal LM.
        rotary: name of the rotary embedding module inside the decoder, or None.
        half_angles: the rotary embedding gives each angle once, not for both elements of a rotated pair.
        position_embedding: name of a learned position embedding inside the decoder, or None.
        position_offset: attribute of that embedding that holds what is added to positions; the embedding's class is
            then one of ``module``. With None, it is an ``nn.Embedding`` and nothing is added.
        embedding_dropout: name of the attribute that holds the dropout probability after the embeddings, or of an
            ``nn.Dropout``; or None.
        embedding_multiplier: attribute of the decoder that holds a factor on the embeddings, or None.
        embedding_scale: buffer of the embedding that holds a factor on its output; the embedding's class is then one of
            ``module``. With None, it is an ``nn.Embedding`` without a factor.
        logits_multiplier, logits_divisor: paths inside the causal LM to what the logits are multiplied or divided by,
            or None.
        logits_softcap: path inside the causal LM to ``cap``, if logits become ``cap * tanh(logits / cap)``; or None.
        linear: class of ``module`` that the layers' projections have and that computes what ``nn.Linear`` does; or
            None.
        refuse: names inside the decoder whose presence means another structure.
        like: name of the architecture file that this one was derived from by structure; None if it has a file.
    """

    name: str
    module: str
    causal_lm: str
    base: str
    embedding: str
    layers: str
    final_norm: str
    norm: NormSpec
    attention: AttentionSpec
    mlp: MLPSpec | MoESpec
    layer: LayerSpec
    head: str = "lm_head"
    rotary: str | None = None
    half_angles: bool = False
    position_embedding: str | None = None
    position_offset: str | None = None
    embedding_dropout: str | None = None
    embedding_multiplier: str | None = None
    embedding_scale: str | None = None
    logits_multiplier: str | None = None
    logits_divisor: str | None = None
    logits_softcap: str | None = None
    linear: str | None = None
    refuse: tuple[str, ...] = ()
    like: str | None = None

    def __post_init__(self) -> None:
        if self.norm.kind not in ("rms", "layer"):
            raise ValueError(f"architecture {self.name!r}: norm kind {self.norm.kind!r}, expected 'rms' or 'layer'")
        if self.norm.unit_offset and self.norm.kind != "rms":
            raise ValueError(f"architecture {self.name!r}: unit_offset is for norms of kind 'rms'")
        if len(self.attention.qkv) not in (1, 3):
            raise ValueError(f"architecture {self.name!r}: qkv names one fused or three separate projections")
        if self.attention.head_norms and (len(self.attention.qkv) != 3 or self.norm.kind != "rms"):
            raise ValueError(f"architecture {self.name!r}: head_norms need separate projections and an RMS norm")
        if self.attention.by_kv_head and len(self.attention.qkv) != 1:
            raise ValueError(f"architecture {self.name!r}: by_kv_head describes a fused projection")
        if self.attention.pairs not in ("halves", "neighbors"):
            raise ValueError(
                f"architecture {self.name!r}: pairs {self.attention.pairs!r}, expected 'halves' or 'neighbors'"
            )
        if self.half_angles and self.attention.pairs != "halves":
            raise ValueError(f"architecture {self.name!r}: half_angles go with pairs 'halves'")
        if self.attention.sinks and self.attention.softcap:
            raise ValueError(f"architecture {self.name!r}: there is no attention with both sinks and a softcap")
        if self.moe is not None and (self.moe.activation is None) == (self.moe.clamped is None):
            raise ValueError(f"architecture {self.name!r}: give either activation or clamped of the experts")
        if self.moe is not None and not self.moe.transposed and (self.moe.clamped or self.moe.gate_up_bias):
            raise ValueError(f"architecture {self.name!r}: clamped gates and biases go with transposed experts")
        if (self.rotary is None) == (self.position_embedding is None):
            raise ValueError(f"architecture {self.name!r}: give either rotary or position_embedding")

    @property
    def moe(self) -> MoESpec | None:
        """The mixture of experts, or None if the architecture has none."""
        return self.mlp if isinstance(self.mlp, MoESpec) else None

    @property
    def dense_mlp(self) -> MLPSpec | None:
        """The MLP that is no mixture of experts, or None if the architecture has none."""
        return self.mlp if isinstance(self.mlp, MLPSpec) else self.mlp.dense

    def check_classes(self) -> None:
        """Raise if the installed transformers lacks a class. ``patch()`` calls it once the architecture is known.

        Raises:
            UnsupportedModelError: the message names the architecture, the class, and the module that lacks the class.
        """
        names = [self.causal_lm, self.layer.class_name, self.attention.class_name, self.mlp.class_name, self.linear]
        if self.moe is not None:
            dense = None if self.moe.dense is None else self.moe.dense.class_name
            names += [self.moe.router_class, self.moe.experts_class, dense]
        places = [(self.module, name) for name in names if name is not None]
        places.append(("torch.nn" if self.norm.is_torchs else self.module, self.norm.class_name))
        for place, name in places:
            try:
                found = hasattr(importlib.import_module(place), name)
            except ModuleNotFoundError as error:
                raise UnsupportedModelError(f"architecture {self.name!r}: there is no module {place!r}") from error
            if not found:
                raise UnsupportedModelError(f"architecture {self.name!r}: {place} has no class {name!r}")

    def part_of(self, module) -> str | None:
        """Return which part ``module`` is exactly (``"layer"``, ``"attention"``, ``"mlp"``, ``"norm"``), or None."""
        cls = type(module)
        return self._kinds.get(cls.__name__) if cls.__module__ == self.module else None

    def holds_layers(self, module) -> bool:
        """Whether ``module`` runs the layers of this architecture."""
        layers = getattr(module, self.layers, None)
        return isinstance(layers, nn.ModuleList) and len(layers) > 0 and self.part_of(layers[0]) == "layer"

    @cached_property
    def _kinds(self) -> dict[str | None, str]:
        """Class names -> parts; cached because every call of a patched layer asks several times."""
        return {
            self.layer.class_name: "layer",
            self.attention.class_name: "attention",
            **{part.class_name: "mlp" for part in (self.mlp, self.dense_mlp) if part is not None},
            self.norm.class_name: "norm",
        }


@lru_cache(maxsize=1)
def architectures() -> tuple[Architecture, ...]:
    """Return every architecture in ``hf_fastpath.patches``, sorted by name.

    Raises:
        ValueError: two files describe the same name, or a file's name is not its architecture's.
    """
    # the files are data that is looked up by name: they import this module, which imports none of them
    patches = importlib.import_module(f"{__package__}.patches")
    found: dict[str, Architecture] = {}
    for info in pkgutil.iter_modules(patches.__path__):
        architecture = importlib.import_module(f"{patches.__name__}.{info.name}").ARCHITECTURE
        if architecture.name != info.name or architecture.name in found:
            raise ValueError(f"patches/{info.name}.py: the architecture is named {architecture.name!r}")
        found[architecture.name] = architecture
    return tuple(found[name] for name in sorted(found))
