"""What transformers knows of GGUF files: names, configs, and modules that keep a file's blocks.

Remove when: ``from_pretrained(gguf_file=)`` keeps blocks packed for every architecture and without a kernel of the hub.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

#: packages that transformers needs to read a GGUF file
PACKAGES = ("gguf", "accelerate")


def missing_packages() -> list[str]:
    """Return the names of packages that are needed to read GGUF files and are not installed."""
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]


def keeps_blocks(architecture: str) -> bool:
    """Whether transformers itself keeps the blocks of files of an architecture, given a kernel."""
    from transformers.integrations.gguf.utils import is_gguf_arch_supported

    return is_gguf_arch_supported(architecture)


class _StandIn:
    """What transformers asks of the hub's kernel while it loads a file; the modules are replaced before they run."""

    def __init__(self, types: Collection[int]):
        self.gemv_types = types

    def supports(self, ggml_type: int) -> bool:
        return ggml_type in self.gemv_types

    def dequantize(self, blocks: torch.Tensor, ggml_type: int, rows: int, cols: int, dtype: torch.dtype) -> Any:
        from transformers.integrations.gguf.dequant import dequantize

        return dequantize(blocks, ggml_type, dtype).reshape(rows, cols)


@contextlib.contextmanager
def blocks_kept(types: Collection[int]) -> Iterator[None]:
    """Have transformers keep blocks of these types, as if the hub's kernel were there, for a ``with`` block."""
    from transformers.integrations.gguf import kernels

    before = kernels._gguf_kernel
    kernels._gguf_kernel = _StandIn(types)
    try:
        yield
    finally:
        kernels._gguf_kernel = before


def load_kept(path: Path, types: Collection[int], dtype: torch.dtype) -> Any:
    """Return the model of a file whose blocks :func:`keeps_blocks`, with blocks of these types in it."""
    from transformers import AutoModelForCausalLM

    with blocks_kept(types):
        return AutoModelForCausalLM.from_pretrained(
            str(path.parent), gguf_file=path.name, dtype=dtype, attn_implementation="sdpa"
        )


def model_without_weights(path: Path, dtype: torch.dtype) -> Any:
    """Return a model of a file's config, whose parameters are on the meta device.

    Raises:
        Exception: whatever transformers raises where it does not know the architecture.
    """
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
    with init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


class _Childless:
    """A model as transformers' map of names asks for it, but for its children, each of which takes seconds."""

    def __init__(self, model: nn.Module):
        self.config, self.state_dict = model.config, model.state_dict

    def named_children(self) -> tuple[()]:
        return ()


class Conversion:
    """What transformers does to a file's tensors on their way into a model.

    Args:
        path: the file.
        architecture: the name that the file has for it.
        model: of :func:`model_without_weights`.
    """

    def __init__(self, path: Path, architecture: str, model: nn.Module):
        from transformers import modeling_gguf_pytorch_utils as legacy

        self._parsed: dict[str, Any] = legacy.load_gguf_checkpoint(str(path), return_tensors=False)
        self._parsed["tensors"] = {}
        make = legacy.TENSOR_PROCESSORS.get(architecture, legacy.TensorProcessor)
        self._processor = make(config=self._parsed["config"])
        #: name in the file -> name in the model
        self.names: dict[str, str] = legacy.get_gguf_hf_weights_map(_Childless(model), self._processor)
        if not set(model.state_dict()) <= {*self.names.values(), "lm_head.weight"}:
            self.names = legacy.get_gguf_hf_weights_map(model, self._processor)

    def converted(self, name: str, values: np.ndarray) -> dict[str, torch.Tensor]:
        """Return what tensors of the model become of a tensor of the file; none if the model has no place for it."""
        tensors = self._parsed["tensors"]
        before = set(tensors)
        made = self._processor.process(
            weights=values, name=name, tensor_key_mapping=self.names, parsed_parameters=self._parsed
        )
        if made.name in self.names:
            return {self.names[made.name]: torch.from_numpy(np.ascontiguousarray(made.weights))}
        if "gate_exps" not in name and "up_exps" not in name:
            return {each: tensors.pop(each) for each in set(tensors) - before}
        # gates and ups become halves of one tensor, one after the other
        whole = set(tensors) & before & {self.names.get(name.removesuffix(".weight"), ""), self.names.get(name, "")}
        return {each: tensors.pop(each) for each in whole}

    def row_order(self, name: str, rows: int, columns: int) -> torch.Tensor | None:
        """Return in which order rows of a matrix come into the model; None if more than that happens to the matrix."""
        numbers = np.arange(rows, dtype=np.float32)[:, None]
        moved = self._moved(name, np.broadcast_to(numbers, (rows, columns)))
        across = np.broadcast_to(np.arange(columns, dtype=np.float32), (rows, columns))
        same = self._moved(name, across)
        if moved is None or same is None or moved.shape != across.shape or not np.array_equal(same, across):
            return None
        order = moved[:, 0]
        is_order = np.array_equal(np.sort(order), numbers[:, 0]) and (moved == order[:, None]).all()
        return torch.from_numpy(order.astype(np.int64)) if is_order else None

    def _moved(self, name: str, values: np.ndarray) -> np.ndarray | None:
        parsed = self._parsed | {"tensors": {}}
        made = self._processor.process(
            weights=values, name=name, tensor_key_mapping=self.names, parsed_parameters=parsed
        )
        return made.weights if made.name == name and not parsed["tensors"] else None

    @property
    def keeps_experts(self) -> bool:
        """Whether experts' matrices [experts, rows, columns] come into the model as they are, those of up behind those
        of gate."""
        return type(self._processor).__name__ == "Qwen2MoeTensorProcessor"


#: number of Q8_0, which every transformers makes modules of; these then get the number that they are for
_KNOWN = 8


def gguf_linear(linear: nn.Linear, number: int, blocks: nn.Parameter) -> nn.Module:
    """Return transformers' layer with blocks in the place of a linear layer, with its bias."""
    from transformers.integrations.gguf.utils import GgufLinear

    with torch.device("meta"):
        made = GgufLinear(linear.in_features, linear.out_features, _KNOWN, bias=False)
    made.ggml_type, made.weight, made.bias = number, blocks, linear.bias
    return made.train(linear.training)


def gguf_experts(experts: Any, numbers: tuple[int, int], stacks: tuple[nn.Parameter, nn.Parameter]) -> nn.Module:
    """Return transformers' experts with blocks in the place of a mixture's, whose gates and ups, and whose downs, have
    types of these numbers.

    Raises:
        ImportError: this transformers has no such experts: those before 5.20 have none.
    """
    from transformers.integrations.gguf.utils import GgufExperts

    (count, _, _), (_, hidden, inner) = (each.shape for each in (experts.gate_up_proj, experts.down_proj))
    with torch.device("meta"):
        made = GgufExperts(count, hidden, inner, _KNOWN, _KNOWN, experts.act_fn)
    made.gate_up_type, made.down_type = numbers
    made.gate_up_proj, made.down_proj = stacks
    return made.train(experts.training)


def gguf_embedding(table: nn.Embedding, number: int, blocks: nn.Parameter, dtype: torch.dtype) -> nn.Module:
    """Return transformers' table of embeddings with blocks in the place of one."""
    from transformers.integrations.gguf.utils import GgufEmbedding

    with torch.device("meta"):
        made = GgufEmbedding(table.num_embeddings, table.embedding_dim, _KNOWN, dtype)
    made.ggml_type, made.weight = number, blocks
    return made.train(table.training)
