"""Speed of decoding behind an image, with random weights: stock and ours, and ours of the text model's own class behind
as many tokens: ``python benchmarks/bench_multimodal.py qwen2.5-vl-7b qwen3-vl-4b gemma-3-4b --csv``.

``qwen3-vl-4b:2`` has the first two layers of the decoder and of the tower alone. A prompt is random tokens around a
random image, one for each sequence. The time of a call that makes a few tokens is taken off that of one that makes
many, so that the prompt does not count. ``of_text`` is our speed as a share of that of the text model. ``first_s`` is
the first call after ``patch()``, with all that it records and captures.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedConfig

import hf_fastpath
from hf_fastpath.bench import measure, shapes

#: tokens around an image
TEXT = 128
#: rows and columns of tokens that stand for an image of 672 x 896 pixels (Qwen2.5-VL) or 768 x 1024 (Qwen3-VL)
GRID = 24, 32

Inputs = dict[str, torch.Tensor]


def _text(start: int, image: int, end: int, places: int, batch: int) -> torch.Tensor:
    """Return int64 [batch, TEXT + places] tokens: random ones, and in their middle ``image`` for each of the places."""
    ids, first = torch.randint(3, 1000, (batch, TEXT + places)), TEXT // 2
    ids[:, first - 1], ids[:, first : first + places], ids[:, first + places] = start, image, end
    return ids


def qwen_prompt(config: PreTrainedConfig, batch: int) -> Inputs:
    """Return a prompt of Qwen2.5-VL or Qwen3-VL, whose towers read the patches of all images in one row."""
    vision, (rows, columns) = config.vision_config, GRID
    grid = torch.tensor([[1, rows * vision.spatial_merge_size, columns * vision.spatial_merge_size]] * batch)
    pixels = torch.randn(
        int(grid.prod(1).sum()), vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    )
    marks = config.vision_start_token_id, config.image_token_id, config.vision_end_token_id
    ids = _text(*marks, rows * columns, batch)
    kinds = (ids == config.image_token_id).long()
    return {"input_ids": ids, "mm_token_type_ids": kinds, "pixel_values": pixels, "image_grid_thw": grid}


def gemma_prompt(config: PreTrainedConfig, batch: int) -> Inputs:
    """Return a prompt of Gemma 3, whose tower reads square images."""
    pixels = torch.randn(batch, 3, config.vision_config.image_size, config.vision_config.image_size)
    marks = config.boi_token_index, config.image_token_index, config.eoi_token_index
    ids = _text(*marks, config.mm_tokens_per_image, batch)
    return {"input_ids": ids, "token_type_ids": (ids == config.image_token_index).long(), "pixel_values": pixels}


@dataclass(frozen=True)
class Size:
    """A published model that reads images.

    Attributes:
        label: name in tables.
        model_type: transformers' name of the outer class.
        text: shape of the text model, see :mod:`hf_fastpath.bench.published`.
        rope: entries of the text model's ``rope_parameters`` that the outer class has besides.
        vision: entries of the tower's config.
        prompt: makes the inputs of ``generate()`` for a batch.
    """

    label: str
    model_type: str
    text: str
    rope: dict[str, Any]
    vision: dict[str, Any]
    prompt: Callable[[PreTrainedConfig, int], Inputs]

    def config(self, layers: int | None) -> PreTrainedConfig:
        """Return the outer config; with ``layers``, decoder and tower have no more of them."""
        shape, vision = shapes.MODELS[self.text], dict(self.vision)
        if layers is not None:
            depth = "depth" if "depth" in vision else "num_hidden_layers"
            shape, vision[depth] = shape.with_layers(layers), min(layers, vision[depth])
        text = dict(shape.config)
        if self.rope:
            text["rope_parameters"] = text["rope_parameters"] | self.rope
        tied = shape.build_config().tie_word_embeddings
        return AutoConfig.for_model(self.model_type, text_config=text, vision_config=vision, tie_word_embeddings=tied)


SIZES = {
    "qwen2.5-vl-7b": Size(
        "Qwen2.5-VL-7B",
        "qwen2_5_vl",
        "qwen2.5-7b",
        {"mrope_section": [16, 24, 24]},
        {"hidden_size": 1280, "out_hidden_size": 3584, "depth": 32},
        qwen_prompt,
    ),
    "qwen3-vl-4b": Size(
        "Qwen3-VL-4B",
        "qwen3_vl",
        "qwen3-4b",
        {"mrope_section": [24, 20, 20], "mrope_interleaved": True},
        {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "out_hidden_size": 2560,
            "depth": 24,
            "deepstack_visual_indexes": [5, 11, 17],
        },
        qwen_prompt,
    ),
    "gemma-3-4b": Size(
        "Gemma-3-4B",
        "gemma3",
        "gemma-3-4b",
        {},
        {
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "image_size": 896,
            "patch_size": 14,
            "vision_use_head": False,
        },
        gemma_prompt,
    ),
}


def size_of(name: str) -> tuple[Size, int | None]:
    """Return the size that ``name`` or ``name:layers`` means, and the layers."""
    whole, colon, layers = name.partition(":")
    if whole not in SIZES or colon and not layers.isdecimal():
        raise argparse.ArgumentTypeError(f"unknown size {name!r}, expected one of {', '.join(SIZES)}, or name:layers")
    return SIZES[whole], int(layers) if colon else None


def generate(model: nn.Module, inputs: Inputs, tokens: int) -> None:
    """Make ``tokens`` behind a prompt."""
    made = model.generate(**inputs, min_new_tokens=tokens, max_new_tokens=tokens, do_sample=False)
    assert made.shape[1] == inputs["input_ids"].shape[1] + tokens


def measured(size: Size, layers: int | None, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return a row of the table."""
    device, dtype, tokens = torch.device(arguments.device), measure.DTYPES[arguments.dtype], arguments.tokens
    model = shapes.build_of_config(size.config(layers), device, dtype, factory=AutoModelForImageTextToText)
    inputs = {name: each.to(device) for name, each in size.prompt(model.config, arguments.batch).items()}
    inputs |= {"pixel_values": inputs["pixel_values"].to(dtype), "attention_mask": torch.ones_like(inputs["input_ids"])}

    def timed(engines: dict[str, Callable[[int], None]]) -> dict[str, float]:
        for call in engines.values():
            call(measure.SHORT)
        timers = {name: partial(measure.seconds_per_token, call, tokens, device) for name, call in engines.items()}
        return {name: spread.p50 for name, spread in measure.alternate(timers, arguments.runs).items()}

    stock = timed({"stock": partial(generate, model, inputs)})["stock"]
    patched = measure.seconds(lambda: hf_fastpath.patch(model, quiet=True), device)
    first = measure.seconds(lambda: generate(model, inputs, 2), device)
    text_model = shapes.build_model(size.text + (f":{layers}" if layers else ""), device, dtype)
    hf_fastpath.patch(text_model, quiet=True)
    for each in (model, text_model):
        measure.wait_for_pages(each)
    batch, context = inputs["input_ids"].shape
    ids = shapes.prompt(text_model, batch, context)
    text = partial(generate, text_model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    found = timed({"ours": partial(generate, model, inputs), "text": text})
    return measure.environment(device) | dict(
        model=size.label + (f", {layers} layers" if layers else ""),
        dtype=arguments.dtype,
        context=context,
        batch=batch,
        tokens=tokens,
        stock_tok_s=round(batch / stock, 1),
        ours_tok_s=round(batch / found["ours"], 1),
        text_tok_s=round(batch / found["text"], 1),
        times_stock=round(stock / found["ours"], 2),
        of_text=round(found["text"] / found["ours"], 3),
        patch_s=round(patched, 2),
        first_s=round(first, 2),
        fallback_tokens=hf_fastpath.report(model).stats["fallback_tokens"],
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = ", ".join(SIZES) + "; qwen3-vl-4b:2 has the first 2 layers alone"
    parser.add_argument("sizes", nargs="+", type=size_of, metavar="SIZE", help=known)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bf16", choices=list(measure.DTYPES))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=3)
    measure.add_csv_argument(parser)
    arguments = parser.parse_args(argv)
    path = measure.chosen_csv(arguments.csv, "multimodal", torch.device(arguments.device))
    transformers.logging.set_verbosity_error()
    for size, layers in arguments.sizes:
        row = measured(size, layers, arguments)
        gc.collect()  # a patched model is in cycles
        print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        if path is not None:
            measure.append_csv(path, [row])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
