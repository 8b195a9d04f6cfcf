"""The vocabulary in which ``patches/`` describes decoder architectures: data, no logic per model.

An architecture file holds one :class:`Architecture` literal named ``ARCHITECTURE``. Names are attribute paths
inside transformers' modules; what they lead to is checked when a model is patched, and by the tests.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from functools import lru_cache

from .errors import UnsupportedModelError


@dataclass(frozen=True)
class Norm:
    """A norm module.

    Attributes:
        class_name: transformers or ``torch.nn`` class.
        kind: ``"rms"`` or ``"layer"``.
        eps: attribute that holds epsilon.
    """

    class_name: str
    kind: str
    eps: str


@dataclass(frozen=True)
class Attention:
    """An attention module.

    Attributes:
        class_name: transformers class.
        qkv: names of the query, key and value projections, or of one fused projection (query | key | value).
        out: name of the output projection.
        scaling: attribute that holds the factor on the scores.
        attention_dropout: name of the dropout probability attribute, or of an ``nn.Dropout``.
        refuse: config attributes that must be falsy for the kernels' arithmetic to be the model's.
        residual_dropout: the same after the output projection, or None.
        head_norms: names of norms over every head's query and key, between projection and rotation; or None.
    """

    class_name: str
    qkv: tuple[str, ...]
    out: str
    scaling: str = "scaling"
    attention_dropout: str = "attention_dropout"
    refuse: tuple[str, ...] = ()
    residual_dropout: str | None = None
    head_norms: tuple[str, str] | None = None


@dataclass(frozen=True)
class MLP:
    """A feed-forward module.

    Attributes:
        class_name: transformers class.
        activation: name of the activation module.
        up, down: names of the projections.
        gate: name of the gate projection; that of ``up`` if one projection holds gate | up; None for a plain MLP.
        dropout: name of the dropout probability attribute after ``down``, or of an ``nn.Dropout``; or None.
    """

    class_name: str
    activation: str
    up: str
    down: str
    gate: str | None = None
    dropout: str | None = None


@dataclass(frozen=True)
class Layer:
    """A decoder layer: ``x += attention(norm(x)); x += mlp(norm(x))``.

    Attributes:
        class_name: transformers class.
        attention_norm, attention, mlp_norm, mlp: names of its parts.
        refuse: names of parts or switches whose presence means another structure (cross-attention).
        dropouts: names of dropout probability attributes after attention and MLP, or of ``nn.Dropout``s.
    """

    class_name: str
    attention_norm: str
    attention: str
    mlp_norm: str
    mlp: str
    refuse: tuple[str, ...] = ()
    dropouts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Architecture:
    """A decoder-only family.

    Attributes:
        name: name of the file, and transformers' ``model_type``.
        module: transformers module that defines the classes.
        causal_lm: class with ``generate()``.
        base: name of the decoder inside it.
        embedding, layers, final_norm: names inside the decoder.
        head: name of the output projection inside the causal LM.
        rotary: name of the rotary embedding module inside the decoder, or None.
        position_embedding: name of a learned position embedding inside the decoder, or None.
        embedding_dropout: name of the dropout probability attribute after the embeddings, or of an ``nn.Dropout``; or
            None.
        like: name of the architecture file that this one was derived from by structure; None for one with a file.
    """

    name: str
    module: str
    causal_lm: str
    base: str
    embedding: str
    layers: str
    final_norm: str
    norm: Norm
    attention: Attention
    mlp: MLP
    layer: Layer
    head: str = "lm_head"
    rotary: str | None = None
    position_embedding: str | None = None
    embedding_dropout: str | None = None
    like: str | None = None

    def __post_init__(self) -> None:
        if self.norm.kind not in ("rms", "layer"):
            raise ValueError(f"architecture {self.name!r}: norm kind {self.norm.kind!r}, expected 'rms' or 'layer'")
        if len(self.attention.qkv) not in (1, 3):
            raise ValueError(f"architecture {self.name!r}: qkv names one fused or three separate projections")
        if self.attention.head_norms and (len(self.attention.qkv) != 3 or self.norm.kind != "rms"):
            raise ValueError(f"architecture {self.name!r}: head_norms need separate projections and an RMS norm")
        if (self.rotary is None) == (self.position_embedding is None):
            raise ValueError(f"architecture {self.name!r}: give either rotary or position_embedding")

    def check_classes(self) -> None:
        """Fail if the installed transformers lacks a class. ``patch()`` calls it once it knows the architecture.

        Raises:
            UnsupportedModelError: names the architecture, the class and the module it was looked for in.
        """
        names = (self.causal_lm, self.layer.class_name, self.attention.class_name, self.mlp.class_name)
        places = [(self.module, name) for name in names]
        places.append(("torch.nn" if self.norm.kind == "layer" else self.module, self.norm.class_name))
        for place, name in places:
            try:
                found = hasattr(importlib.import_module(place), name)
            except ModuleNotFoundError as error:
                raise UnsupportedModelError(f"architecture {self.name!r}: there is no module {place!r}") from error
            if not found:
                raise UnsupportedModelError(f"architecture {self.name!r}: {place} has no class {name!r}")

    def part_of(self, module) -> str | None:
        """``"layer"``, ``"attention"``, ``"mlp"`` or ``"norm"`` if ``module`` is exactly that part, else None."""
        cls = type(module)
        if cls.__module__ == self.module:
            parts = {
                self.layer.class_name: "layer",
                self.attention.class_name: "attention",
                self.mlp.class_name: "mlp",
                self.norm.class_name: "norm",
            }
            return parts.get(cls.__name__)
        return None


@lru_cache(maxsize=1)
def architectures() -> tuple[Architecture, ...]:
    """Every architecture in ``hf_fastpath.patches``, by name.

    Raises:
        ValueError: two files describe the same name, or a file's name is not its architecture's.
    """
    from . import patches

    found: dict[str, Architecture] = {}
    for info in pkgutil.iter_modules(patches.__path__):
        architecture = importlib.import_module(f"{patches.__name__}.{info.name}").ARCHITECTURE
        if architecture.name != info.name or architecture.name in found:
            raise ValueError(f"patches/{info.name}.py: the architecture is named {architecture.name!r}")
        found[architecture.name] = architecture
    return tuple(found[name] for name in sorted(found))
