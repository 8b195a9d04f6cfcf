"""How fast a model would decode over several GPUs of one host, on paper.

A step takes ``bytes of a GPU / R + sums * t_sum(N) + E``: every rank reads its shards and its heads' part of the cache
at the bandwidth R and waits for every sum over ranks; E stands for all that reading does not hide.
``docs/design/several_gpus.md`` says where the constants come from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from .. import compat

#: seconds of one sum of up to 16 KB inside a captured step, by number of GPUs on NVLink; for other numbers the next one
SUM_SECONDS = {2: 3.5e-6, 4: 4.0e-6, 8: 5.0e-6}
#: seconds of a step that reading does not hide, for each layer
LAYER_SECONDS = 2.0e-6
#: styles of a ``tp_plan`` whose outputs are put together by a sum or a gather, and those that need nothing
_JOINED = ("rowwise", "rowwise_split_input", "embedding_rowwise", "colwise_gather_output", "moe_tp_experts")
_APART = ("colwise", "packed_colwise", "packed_rowwise")
#: styles that leave weights whole
_WHOLE = ("replicated_with_grad_allreduce", "replicate", "mla_kv_a_proj", "local_params")
#: projections that make keys, of all kinds
_KEYS = ("k_proj", "qkv_proj", "query_key_value")


@dataclass(frozen=True)
class TensorParallel:
    """A model over several GPUs by its own ``tp_plan``.

    Attributes:
        gpus: number of GPUs.
        weight_share: fraction of the weights that a step reads which is divided over the GPUs.
        sums: sums and gathers over GPUs in a step.
        divides_heads: whether a GPU has only its own heads, and their part of the cache.
    """

    gpus: int
    weight_share: float
    sums: int
    divides_heads: bool = True

    def weight_bytes(self, count: int) -> int:
        """Return the bytes of weights that a GPU reads if one GPU alone would read ``count``."""
        return int(count * (self.weight_share / self.gpus + 1 - self.weight_share))

    def kv_bytes(self, count: int) -> int:
        """Return the bytes of the cache that a GPU reads if one GPU alone would read ``count``."""
        return count // self.gpus if self.divides_heads else count

    def seconds(self, bytes_of_a_gpu: float, bandwidth: float, layers: int) -> float:
        """Return the predicted time of a step."""
        known = next((each for each in SUM_SECONDS if each >= self.gpus), max(SUM_SECONDS))
        return bytes_of_a_gpu / bandwidth + self.sums * SUM_SECONDS[known] + layers * LAYER_SECONDS


def why_not_spread(model: Any, gpus: int) -> str | None:
    """Return why our loop does not cover a model over so many GPUs, or None. The model may be on the meta device."""
    styles = compat.planned_styles(model)
    if not compat.is_decoder_alone(model):
        return f"{type(model).__name__} has an encoder, or reads images or sound, beside its decoder"
    if not styles:
        return f"transformers has no tp_plan for {type(model).__name__}"
    odd = [name for name, style in styles.items() if style not in (*_JOINED, *_APART, *_WHOLE)]
    if odd:
        return f"{odd[0]} would be spread by {styles[odd[0]]}, which is not covered"
    config = model.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if _divides_heads(styles) and (heads % gpus or kv_heads % gpus):
        return f"{heads} heads and {kv_heads} KV heads do not divide over {gpus} GPUs"
    return None


def _divides_heads(styles: dict[str, str]) -> bool:
    return any(style == "colwise" and name.rpartition(".")[2] in _KEYS for name, style in styles.items())


def spread(model: Any, gpus: int) -> TensorParallel:
    """Return how ``tp_plan="auto"`` would spread a model, which may be on the meta device."""
    styles = compat.planned_styles(model)
    modules = dict(model.named_modules())
    parameters = set(dict(model.named_parameters()))
    shared = whole = 0
    for name, parameter in model.named_parameters():
        owner = name.rpartition(".")[0]
        if isinstance(modules[owner], nn.Embedding):
            continue
        style = styles.get(name) or styles.get(owner)
        is_shared = style is not None and style not in _WHOLE
        shared, whole = shared + is_shared * parameter.nbytes, whole + parameter.nbytes
    joined = [name for name, style in styles.items() if style in _JOINED and name not in parameters]
    return TensorParallel(gpus, shared / max(1, whole), len(joined), _divides_heads(styles))
