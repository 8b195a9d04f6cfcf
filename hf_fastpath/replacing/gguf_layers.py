"""Tables of embeddings and experts in blocks of a GGUF file: the same values in the order of our formats."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..choices import Activation
from ..compat import activation_of, hook_of
from ..linears import gguf_modules
from ..linears.checkpoints import note
from ..linears.gguf_modules import EMBEDDING, EXPERTS, is_gguf
from ..linears.packed_embedding import PackedEmbedding
from ..linears.packed_experts import DOWN, GATE_UP, GateHow, PackedExperts, PackedStacks
from ..linears.packed_linear import PackedLinear
from ..native import heap
from ..progress import counted
from ..quantization.formats import PackedWeight
from ..quantization.ggml_blocks import BLOCK_TYPES, BlockType, blocks_of, packed_blocks
from .quantizing import Replaced, places_of


def repack_embeddings(model: nn.Module, replaced: list[Replaced]) -> None:
    """Replace tables of embeddings in a GGUF file's blocks by ours.

    A table that is the head's weight, too, becomes the weight that the head has become.

    Args:
        replaced: gets what was done, so that a caller can undo it.
    """
    places = places_of(model)
    heads = {id(each.original.weight): each.packed for each in replaced if is_gguf(each.original, gguf_modules.LINEAR)}
    for module in [each for each in model.modules() if is_gguf(each, EMBEDDING) and hook_of(each) is None]:
        kind, head = BLOCK_TYPES.get(int(module.ggml_type)), heads.get(id(module.weight))
        if kind is None:
            continue
        with torch.inference_mode(False), torch.no_grad():
            weight = (
                head.in_order if isinstance(head, PackedLinear) else packed_blocks([(kind, module.weight.detach())])[0]
            )
            packed = PackedEmbedding(weight, module.compute_dtype).train(module.training)
            done = Replaced(module, packed, places[id(module)])
            done.put(replaced)
            if head is None:
                gguf_modules.release(module)
            done.restore = gguf_modules.restore if head is None else _restored_with_the_head


def _restored_with_the_head(module: nn.Module, weight: Any) -> None:
    """Do nothing: the table and the head have one parameter, which the head's layer gets back."""


def repack_stacks(model: nn.Module, replaced: list[Replaced], quiet: bool) -> None:
    """Replace experts in a GGUF file's blocks by ours, one module after the other.

    Args:
        replaced: gets what was done, so that a caller can undo it.
        quiet: show no progress on a terminal.
    """
    places = places_of(model)
    found = [module for module in model.modules() if is_gguf(module, EXPERTS) and hook_of(module) is None]
    with counted(len(found), "hf_fastpath: repacking experts", quiet) as bar, heap.repacking():
        for module in found:
            bar.update()
            kinds = [BLOCK_TYPES.get(int(number)) for number in (module.gate_up_type, module.down_type)]
            activation = activation_of(module.act_fn)
            if None in kinds or activation not in (Activation.SILU, Activation.GELU, Activation.GELU_TANH):
                note(module, "quantized_format")
                continue
            with torch.inference_mode(False), torch.no_grad():
                stacks = PackedStacks(*map(_packed_stack, kinds, (module.gate_up_proj, module.down_proj)))
                packed = PackedExperts(stacks, GateHow(activation), dtype=model.dtype).train(module.training)
                for stack in (module.gate_up_proj, module.down_proj):
                    stack.data = stack.data.new_empty(0)
            Replaced(module, packed, places[id(module)], _restore_stacks).put(replaced)
            if packed.quants.device.type == "cpu":
                heap.give_back()


def _packed_stack(kind: BlockType, stack: torch.Tensor) -> PackedWeight:
    """Repack blocks [experts, rows, bytes of a row] as one weight."""
    return packed_blocks([(kind, stack.detach().flatten(0, 1))])[0]


def _restore_stacks(module: nn.Module, stacks: PackedStacks) -> None:
    """Give experts their blocks again, bit for bit."""
    numbers = {GATE_UP: module.gate_up_type, DOWN: module.down_type}
    for (name, number), weight in zip(numbers.items(), (stacks.gate_up, stacks.down)):
        blocks = blocks_of(BLOCK_TYPES[int(number)], weight)
        getattr(module, name).data = blocks.unflatten(0, (module.num_experts, -1))
