"""Speed of decoding of an encoder-decoder with random weights, stock and ours in one run:
``python benchmarks/bench_encoder_decoder.py whisper-small t5-large --csv``.

Sizes are those of the checkpoints that their names tell. Text is random tokens; sound is random features, 30 seconds of
it for Whisper. The time of a call that makes a few tokens is taken off that of one that makes many, so that the encoder
does not count; ``call_times_stock`` compares whole calls. ``first_s`` is the first call after ``patch()``, with all
that it records and captures.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from transformers import BartConfig, T5Config, WhisperConfig

import hf_fastpath
from hf_fastpath.bench import measure
from hf_fastpath.compat import model_of_config

_TURBO = dict(d_model=1280, encoder_layers=32, decoder_layers=4, encoder_attention_heads=20, decoder_attention_heads=20)
_SMALL = dict(d_model=768, encoder_layers=12, decoder_layers=12, encoder_attention_heads=12, decoder_attention_heads=12)
_BART = dict(d_model=1024, encoder_layers=12, decoder_layers=12, encoder_attention_heads=16, decoder_attention_heads=16)
_TINY = dict(d_model=64, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2)
#: name -> config class and its entries
SIZES: dict[str, tuple[Any, dict[str, Any]]] = {
    "whisper-small": (WhisperConfig, _SMALL | dict(encoder_ffn_dim=3072, decoder_ffn_dim=3072)),
    "whisper-large-v3-turbo": (
        WhisperConfig,
        _TURBO | dict(encoder_ffn_dim=5120, decoder_ffn_dim=5120, vocab_size=51866, num_mel_bins=128),
    ),
    "t5-large": (T5Config, dict(d_model=1024, d_ff=4096, d_kv=64, num_heads=16, num_layers=24, vocab_size=32128)),
    "bart-large": (BartConfig, _BART | dict(encoder_ffn_dim=4096, decoder_ffn_dim=4096, vocab_size=50265)),
    "whisper-of-test": (
        WhisperConfig,
        _TINY | dict(encoder_ffn_dim=96, decoder_ffn_dim=96, max_source_positions=50),
    ),
    "t5-of-test": (T5Config, dict(d_model=64, d_ff=96, d_kv=32, num_heads=2, num_layers=2)),
    "bart-of-test": (BartConfig, _TINY | dict(encoder_ffn_dim=96, decoder_ffn_dim=96)),
}


def build(size: str, device: str, dtype: torch.dtype) -> nn.Module:
    """Make a model of a size with random weights."""
    cls, entries = SIZES[size]
    torch.manual_seed(0)
    with torch.device(device):
        model = model_of_config(cls(**entries), dtype=dtype).eval()
    config = model.generation_config
    config.eos_token_id = config.forced_eos_token_id = config.max_length = None
    config.decoder_start_token_id = 2
    return model


def inputs_of(model: nn.Module, batch: int, length: int) -> dict[str, torch.Tensor]:
    """Return random inputs of an encoder: 30 seconds of sound, or ``length`` tokens."""
    config, device = model.config, model.device
    if isinstance(config, WhisperConfig):
        shape = batch, config.num_mel_bins, 2 * config.max_source_positions
        return {"input_features": torch.randn(shape, device=device, dtype=model.dtype)}
    ids = torch.randint(3, 1000, (batch, length), device=device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def generate(model: nn.Module, inputs: dict[str, torch.Tensor], beams: int, tokens: int) -> None:
    """Make ``tokens`` behind what the encoder reads."""
    model.generate(
        **inputs, min_new_tokens=tokens, max_new_tokens=tokens, do_sample=False, num_beams=beams, pad_token_id=0
    )


def measured(size: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return a row of the table."""
    device, tokens, batch = torch.device(arguments.device), arguments.tokens, arguments.batch
    model = build(size, arguments.device, getattr(torch, arguments.dtype))
    call = partial(generate, model, inputs_of(model, batch, arguments.length), arguments.beams)

    def timed() -> tuple[float, float]:
        """Return tokens a second of all sequences together, without the encoder, and the seconds of a whole call."""
        call(measure.SHORT)
        found = [measure.seconds_per_token(call, tokens, device) for _ in range(arguments.runs)]
        return batch / statistics.median(found), measure.seconds(lambda: call(measure.SHORT + tokens), device)

    stock, whole = timed()
    patched = measure.seconds(lambda: hf_fastpath.patch(model, quiet=True), device)
    first = measure.seconds(lambda: call(2), device)
    measure.wait_for_pages(model)
    ours, our_whole = timed()
    return measure.environment(device) | dict(
        size=size,
        dtype=arguments.dtype,
        batch=batch,
        beams=arguments.beams,
        tokens=tokens,
        stock_tok_s=round(stock, 1),
        ours_tok_s=round(ours, 1),
        times_stock=round(ours / stock, 2),
        call_times_stock=round(whole / our_whole, 2),
        patch_s=round(patched, 2),
        first_s=round(first, 2),
        fallback_tokens=hf_fastpath.report(model).stats["fallback_tokens"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="+", choices=SIZES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--beams", type=int, default=1)
    parser.add_argument("--length", type=int, default=256, help="tokens that the encoder reads")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=3)
    measure.add_csv_argument(parser)
    arguments = parser.parse_args()
    path = measure.chosen_csv(arguments.csv, "encoder_decoders", torch.device(arguments.device))
    transformers.logging.set_verbosity_error()
    for size in arguments.sizes:
        row = measured(size, arguments)
        print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        if path is not None:
            measure.append_csv(path, [row])


if __name__ == "__main__":
    main()
