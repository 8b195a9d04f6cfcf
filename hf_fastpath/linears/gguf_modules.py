"""Modules of transformers that hold blocks of a GGUF file: which they are, and what they hold."""

from __future__ import annotations

import torch
from torch import nn

from ..errors import NoCounterpart
from ..quantization.formats import PackedWeight
from ..quantization.ggml_blocks import BLOCK_TYPES, BlockType, blocks_of
from .checkpoint_weights import BlockWeight

_HOME = "transformers.integrations.gguf.utils"
#: class names of layers, tables of embeddings and experts
LINEAR, EMBEDDING, EXPERTS = "GgufLinear", "GgufEmbedding", "GgufExperts"


def is_gguf(module: nn.Module, name: str) -> bool:
    """Whether a module is of transformers' class of this name."""
    cls = type(module)
    return (cls.__module__, cls.__name__) == (_HOME, name)


def block_type(number: int) -> BlockType:
    """Return the type of blocks of this number.

    Raises:
        NoCounterpart: none of our formats holds their values.
    """
    if number not in BLOCK_TYPES:
        raise NoCounterpart("quantized_format")
    return BLOCK_TYPES[number]


def read(module: nn.Module) -> BlockWeight:
    """Read weight uint8 [out, bytes of a row] and input_permutation [in] or None.

    Raises:
        NoCounterpart: with the reason code.
    """
    kind, blocks = block_type(int(module.ggml_type)), module.weight.detach()
    if blocks.dtype != torch.uint8 or blocks.shape != (module.out_features, kind.row_bytes(module.in_features)):
        raise NoCounterpart("quantized_format")
    order = module.input_permutation
    return BlockWeight(kind, blocks, None if order is None else order.to(blocks.device))


def release(module: nn.Module) -> None:
    """Free the blocks."""
    module.weight.data = module.weight.data.new_empty(0)


def restore(module: nn.Module, weight: PackedWeight) -> None:
    """Give a layer its blocks again, on the device of ``weight``."""
    module.weight.data = blocks_of(block_type(int(module.ggml_type)), weight)
    if getattr(module, "input_permutation", None) is not None:
        module.input_permutation = module.input_permutation.to(weight.device)
