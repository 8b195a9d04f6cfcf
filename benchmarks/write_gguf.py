"""Write a GGUF file of a model shape with random weights, for ``bench_generate.py --gguf``.

    python benchmarks/write_gguf.py --model tinyllama-1.1b --dtype fp16 tinyllama-f16.gguf

llama.cpp then computes with the same sizes and bytes as the random model beside it. The file's vocabulary is empty, so
that only programs that need no text, such as ``llama-bench``, can use the file. Llama and Mistral shapes are supported.
"""

from __future__ import annotations

import argparse
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from transformers import PreTrainedConfig

from hf_fastpath.bench import shapes
from hf_fastpath.traffic import layer_widths

ALIGNMENT = 32
#: types of metadata values: their numbers in the format
_UINT32, _FLOAT32, _STRING = 4, 6, 8


def _plain(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda values: values.to(dtype)


def _q8_0(values: torch.Tensor) -> torch.Tensor:
    blocks = values.view(-1, _BLOCK)
    scale = (blocks.abs().amax(-1, keepdim=True) / 127).half()
    quants = (blocks / scale.float()).round().to(torch.int8)
    return torch.cat((scale.view(torch.uint8), quants.view(torch.uint8)), dim=1)


def _q4_0(values: torch.Tensor) -> torch.Tensor:
    blocks = values.view(-1, _BLOCK)
    extreme = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scale = (extreme / -8).half()
    quants = ((blocks / scale.float()).round() + 8).clamp(0, 15).to(torch.uint8)
    return torch.cat((scale.view(torch.uint8), quants[:, :16] | quants[:, 16:] << 4), dim=1)


@dataclass(frozen=True)
class TensorType:
    """How the elements of a tensor are stored.

    Attributes:
        number: number of the type in the format.
        file_number: llama.cpp's number of a file of this type.
        encode: converts float32 values to the bytes of the file.
    """

    number: int
    file_number: int
    encode: Callable[[torch.Tensor], torch.Tensor]

    def nbytes(self, count: int) -> int:
        return self.encode(torch.ones(_BLOCK)).nbytes * count // _BLOCK


#: number of weights that share a scale
_BLOCK = 32
TENSOR_TYPES = {
    "fp32": TensorType(0, 0, _plain(torch.float32)),
    "fp16": TensorType(1, 1, _plain(torch.float16)),
    "bf16": TensorType(30, 32, _plain(torch.bfloat16)),
    "q4_0": TensorType(2, 2, _q4_0),
    "q8_0": TensorType(8, 7, _q8_0),
}

Tensors = dict[str, tuple[int, ...]]


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def _entry(key: str, value: int | float | str) -> bytes:
    """Encode one pair of the metadata."""
    if isinstance(value, str):
        return _text(key) + struct.pack("<I", _STRING) + _text(value)
    if isinstance(value, float):
        return _text(key) + struct.pack("<If", _FLOAT32, value)
    return _text(key) + struct.pack("<II", _UINT32, value)


def _metadata(config: PreTrainedConfig, kind: str) -> dict[str, int | float | str]:
    features, _, inner = layer_widths(config)
    head_dim = features // config.num_attention_heads
    sizes = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": inner,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": 10000.0,
    }
    general = {"general.architecture": "llama", "general.file_type": TENSOR_TYPES[kind].file_number}
    return {**general, "tokenizer.ggml.model": "no_vocab", **{f"llama.{key}": value for key, value in sizes.items()}}


def _tensors(config: PreTrainedConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes as PyTorch has them."""
    hidden, vocab = config.hidden_size, config.vocab_size
    features, kv_features, inner = layer_widths(config)
    yield "token_embd", (vocab, hidden)
    for layer in range(config.num_hidden_layers):
        yield f"blk.{layer}.attn_norm", (hidden,)
        yield f"blk.{layer}.attn_q", (features, hidden)
        yield f"blk.{layer}.attn_k", (kv_features, hidden)
        yield f"blk.{layer}.attn_v", (kv_features, hidden)
        yield f"blk.{layer}.attn_output", (hidden, features)
        yield f"blk.{layer}.ffn_norm", (hidden,)
        yield f"blk.{layer}.ffn_gate", (inner, hidden)
        yield f"blk.{layer}.ffn_up", (inner, hidden)
        yield f"blk.{layer}.ffn_down", (hidden, inner)
    yield "output_norm", (hidden,)
    if not config.tie_word_embeddings:
        yield "output", (vocab, hidden)


def _padding(written: int) -> bytes:
    return bytes(-written % ALIGNMENT)


def _type_of(name: str, size: tuple[int, ...], kind: str) -> TensorType:
    """Return the type: norms are float32, as in llama.cpp; beside quants, embeddings and head are float16, as ours."""
    is_outer = kind.startswith("q") and not name.startswith("blk")
    return TENSOR_TYPES["fp32" if len(size) == 1 else "fp16" if is_outer else kind]


def write(file: BinaryIO, config: PreTrainedConfig, kind: str) -> None:
    """Write a Llama of ``config`` with random weights of a type in ``TENSOR_TYPES``."""
    tensors = [(f"{name}.weight", size, _type_of(name, size, kind)) for name, size in _tensors(config)]
    metadata = _metadata(config, kind)
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))
    head += b"".join(_entry(key, value) for key, value in metadata.items())
    offset = 0
    for name, size, stored in tensors:
        dimensions = size[::-1]  # the innermost dimension comes first
        head += _text(name) + struct.pack(f"<I{len(size)}QIQ", len(size), *dimensions, stored.number, offset)
        count = stored.nbytes(torch.Size(size).numel())
        offset += count + len(_padding(count))
    file.write(head + _padding(len(head)))
    generator = torch.Generator().manual_seed(0)
    for _, size, stored in tensors:
        values = torch.ones(size) if len(size) == 1 else torch.randn(size, generator=generator) * shapes.WEIGHT_STD
        data = stored.encode(values).contiguous().view(torch.uint8).numpy().tobytes()
        file.write(data + _padding(len(data)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [name for name, model in shapes.MODELS.items() if model.model_type in ("llama", "mistral")]
    parser.add_argument("--model", default="tinyllama-1.1b", choices=known)
    parser.add_argument("--dtype", default="fp16", choices=list(TENSOR_TYPES))
    parser.add_argument("path", type=Path)
    arguments = parser.parse_args()
    with arguments.path.open("wb") as file:
        write(file, shapes.shape(arguments.model).build_config(), arguments.dtype)


if __name__ == "__main__":
    main()
