"""Blocks of GGUF files at random, models whose layers hold them, and files of them."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.integrations.gguf import utils
from transformers.integrations.gguf.dequant import GGML_BLOCK, dequantize
from transformers.integrations.gguf.utils import GgufEmbedding, GgufLinear

from hf_fastpath.quantization.ggml_blocks import BLOCK_TYPES, BlockType

#: None in a transformers that has no experts in blocks
GgufExperts = getattr(utils, "GgufExperts", None)
TYPES = {each.name: each for each in BLOCK_TYPES.values()}
#: where float16 factors lie in a block, and how large one unit of a quant is about
_FACTORS = {
    "Q6_K": ((208, 64 * 16),),
    "Q4_1": ((0, 8), (2, -1)),
    "Q4_K": ((0, 8 * 32), (2, 32)),
    "Q5_K": ((0, 16 * 32), (2, 32)),
    "Q2_K": ((80, 3 * 16), (82, 16)),
}
_UNITS = {"Q4_0": 4, "Q8_0": 64, "IQ4_NL": 64}


def random_blocks(kind: BlockType, rows: int, columns: int, size: float = 1.0) -> torch.Tensor:
    """Return blocks whose weights are about as large as ``size``, of all bits that a block may have."""
    blocks = torch.randint(0, 256, (rows, columns // kind.weights, kind.nbytes), dtype=torch.uint8)
    for at, unit in _FACTORS.get(kind.name, ((0, _UNITS.get(kind.name, 1)),)):
        factor = (torch.rand(blocks.shape[:2]) + 0.5) * size / unit
        blocks[..., at : at + 2] = factor.half()[..., None].view(torch.uint8)
    return blocks.view(rows, -1)


def values_of(kind: BlockType, blocks: torch.Tensor, columns: int) -> torch.Tensor:
    """Return what transformers, or of types that it does not know the package gguf, dequantizes blocks to.

    Returns:
        float32 [rows, columns].
    """
    if kind.number in GGML_BLOCK:
        return dequantize(blocks.flatten(), kind.number).view(len(blocks), columns)
    gguf = pytest.importorskip("gguf", reason=f"this transformers does not know {kind.name}, and gguf is not installed")
    values = gguf.dequantize(blocks.numpy(), gguf.GGMLQuantizationType(kind.number))
    return torch.from_numpy(values.copy())


def empty_layer(columns: int, rows: int, kind: BlockType, bias: bool = False) -> GgufLinear:
    """Return transformers' layer for blocks of a type, which it need not know."""
    made = GgufLinear(columns, rows, 8, bias)
    made.ggml_type = kind.number
    return made


def gguf_linear(kind: BlockType, linear: nn.Linear, permuted: bool = False) -> GgufLinear:
    """Return transformers' layer of random blocks, of the sizes and the bias of a linear layer."""
    rows, columns = linear.weight.shape
    made = empty_layer(columns, rows, kind, linear.bias is not None)
    blocks = random_blocks(kind, rows, columns, 2 * columns**-0.5)
    made.weight = nn.Parameter(blocks, requires_grad=False)
    if linear.bias is not None:
        made.bias = nn.Parameter(linear.bias.detach().clone(), requires_grad=False)
    if permuted:
        made.input_permutation = torch.randperm(columns)
    return made


def plain_linear(layer: GgufLinear, dtype: torch.dtype) -> nn.Linear:
    """Return the linear layer that such a layer stands for."""
    weight = values_of(BLOCK_TYPES[layer.ggml_type], layer.weight.detach(), layer.in_features)
    if layer.input_permutation is not None:  # column i of the blocks is for input_permutation[i]
        weight = weight[:, layer.input_permutation.argsort()]
    made = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, dtype=dtype)
    made.weight = nn.Parameter(weight.to(dtype))
    if layer.bias is not None:
        made.bias = nn.Parameter(layer.bias.detach().to(dtype))
    return made


def with_blocks(model: nn.Module, kinds: list[BlockType], tied: bool = False) -> tuple[nn.Module, nn.Module]:
    """Return copies of a model whose projections hold random blocks, each of the next type, and whose projections are
    plain ones of the same values.

    Args:
        tied: whether the table of embeddings and the head hold the same blocks, of the first type.
    """
    ours, dtype = copy.deepcopy(model), model.dtype
    names = [name for name, each in model.named_modules() if type(each) is nn.Linear and name != "lm_head"]
    for number, name in enumerate(names):
        layer = gguf_linear(kinds[number % len(kinds)], model.get_submodule(name), permuted=name.endswith("down_proj"))
        ours.set_submodule(name, layer)
    stock = copy.deepcopy(ours)
    for name in names:
        stock.set_submodule(name, plain_linear(ours.get_submodule(name), dtype))
    if tied:
        rows, columns = model.lm_head.weight.shape
        blocks = nn.Parameter(random_blocks(kinds[0], rows, columns, 1.0), requires_grad=False)
        head, table = empty_layer(columns, rows, kinds[0]), GgufEmbedding(rows, columns, kinds[0].number, dtype)
        head.weight = table.weight = blocks
        ours.lm_head, ours.model.embed_tokens = head, table
        values = nn.Parameter(values_of(kinds[0], blocks.detach(), columns).to(dtype))
        stock.lm_head.weight = stock.model.embed_tokens.weight = values
    return ours.eval(), stock.eval()


def with_expert_blocks(model: nn.Module, kinds: tuple[BlockType, BlockType]) -> tuple[nn.Module, nn.Module]:
    """Do as :func:`with_blocks` for the experts of a mixture: gates and ups of the first type, downs of the second."""
    ours, stock = copy.deepcopy(model), copy.deepcopy(model)
    for name, experts in list(model.named_modules()):
        if not name.endswith(".experts"):
            continue
        (count, both, hidden), (_, _, inner) = experts.gate_up_proj.shape, experts.down_proj.shape
        made = GgufExperts(count, hidden, inner, kinds[0].number, kinds[1].number, experts.act_fn)
        plain = stock.get_submodule(name)
        for part, kind, rows, columns in (
            ("gate_up_proj", kinds[0], both, hidden),
            ("down_proj", kinds[1], hidden, inner),
        ):
            blocks = random_blocks(kind, count * rows, columns, 2 * columns**-0.5)
            stack = values_of(kind, blocks, columns).view(count, rows, columns)
            setattr(made, part, nn.Parameter(blocks.view(count, rows, -1), requires_grad=False))
            setattr(plain, part, nn.Parameter(stack.to(model.dtype)))
        ours.set_submodule(name, made)
    return ours.eval(), stock.eval()


def write_file(path: Path, kinds: dict[str, BlockType], tied: bool, experts: int = 0, hidden: int = 256) -> Path:
    """Write a file of a small Llama with random blocks.

    Args:
        kinds: the types of tensors whose names hold a text, and of "" for all others.
        tied: whether the file has no head.
        hidden: features of a token; of more than 256 the file has ten layers instead of two.
        experts: how many experts of a Qwen3 MoE it has instead of Llama's gated MLP; 0 for none.
    """
    import gguf

    torch.manual_seed(0)
    architecture = "qwen3moe" if experts else "llama"
    inner, heads, kv_heads, vocab, layers = 2 * hidden, 8, 4, 160, 2 if hidden == 256 else 10
    wide = 768  # of an expert: transformers does not read it from a file, and takes its config's default
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(layers)
    writer.add_context_length(512)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_vocab_size(vocab)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(wide)
        writer.add_key_length(hidden // heads)
        writer.add_value_length(hidden // heads)

    def add(name: str, rows: int, columns: int, size: float, count: int = 0) -> None:
        found = next((kind for part, kind in kinds.items() if part and part in name), kinds[""])
        blocks = random_blocks(found, max(count, 1) * rows, columns, size)
        blocks = blocks.view(count, rows, -1) if count else blocks
        writer.add_tensor(f"{name}.weight", blocks.numpy(), raw_dtype=gguf.GGMLQuantizationType(found.number))

    def norm(name: str, size: int = hidden) -> None:
        writer.add_tensor(f"{name}.weight", (torch.rand(size) + 0.5).numpy())

    add("token_embd", vocab, hidden, 1.0)
    norm("output_norm")
    if not tied:
        add("output", vocab, hidden, 0.1)
    for layer in range(layers):
        at, kv = f"blk.{layer}", hidden // heads * kv_heads
        for name in ("attn_norm", "ffn_norm"):
            norm(f"{at}.{name}")
        sizes = {"attn_q": (hidden, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden)}
        sizes |= {"attn_output": (hidden, hidden)}
        if experts:
            for name in ("attn_q_norm", "attn_k_norm"):
                norm(f"{at}.{name}", hidden // heads)
            writer.add_tensor(f"{at}.ffn_gate_inp.weight", torch.randn(experts, hidden).numpy())
            for name, shape in (("gate", (wide, hidden)), ("up", (wide, hidden)), ("down", (hidden, wide))):
                add(f"{at}.ffn_{name}_exps", *shape, 2 * shape[1] ** -0.5, experts)
        else:
            sizes |= {"ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}
        for name, (rows, columns) in sizes.items():
            add(f"{at}.{name}", rows, columns, 2 * columns**-0.5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_lfm2(path: Path, kinds: list[BlockType]) -> Path:
    """Write a file of a small LFM2, whose blocks transformers can keep; matrices are of the next type each."""
    import gguf

    torch.manual_seed(0)
    hidden, heads, kv_heads, vocab, written = 256, 4, (0, 2, 0), 96, 0
    writer = gguf.GGUFWriter(str(path), "lfm2")
    writer.add_block_count(len(kv_heads))
    writer.add_context_length(512)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(2 * hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv(list(kv_heads))
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_uint32("lfm2.shortconv.l_cache", 3)
    writer.add_token_list([f"t{number}" for number in range(vocab)])

    def add(name: str, rows: int, columns: int, size: float | None = None) -> None:
        nonlocal written
        kind, written = kinds[written % len(kinds)], written + 1
        blocks = random_blocks(kind, rows, columns, size or 2 * columns**-0.5)
        writer.add_tensor(f"{name}.weight", blocks.numpy(), raw_dtype=gguf.GGMLQuantizationType(kind.number))

    def norm(name: str, size: int = hidden) -> None:
        writer.add_tensor(f"{name}.weight", (torch.rand(size) + 0.5).numpy())

    add("token_embd", vocab, hidden, 1.0)
    norm("token_embd_norm")
    for layer, count in enumerate(kv_heads):
        at, kv = f"blk.{layer}", hidden // heads * count
        norm(f"{at}.attn_norm")
        norm(f"{at}.ffn_norm")
        if count:
            for name, rows in (("attn_q", hidden), ("attn_k", kv), ("attn_v", kv), ("attn_output", hidden)):
                add(f"{at}.{name}", rows, hidden)
            for name in ("attn_q_norm", "attn_k_norm"):
                norm(f"{at}.{name}", hidden // heads)
        else:
            add(f"{at}.shortconv.in_proj", 3 * hidden, hidden)
            add(f"{at}.shortconv.out_proj", hidden, hidden)
            writer.add_tensor(f"{at}.shortconv.conv.weight", torch.randn(hidden, 3).numpy())
        add(f"{at}.ffn_gate", 2 * hidden, hidden)
        add(f"{at}.ffn_up", 2 * hidden, hidden)
        add(f"{at}.ffn_down", hidden, 2 * hidden)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
