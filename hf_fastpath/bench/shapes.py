"""Models of published sizes with random weights, and bytes of a token."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from .. import compat
from ..traffic import weight_bytes
from .published import MODELS, ModelShape

#: standard deviation of random weights; most models are initialized with it, so that nothing overflows
WEIGHT_STD = 0.02


def shape(name: str) -> ModelShape:
    """Return the shape called ``name``; ``name:8`` is the one with its first 8 layers alone.

    Raises:
        ValueError: there is no such shape, or it has fewer layers; the message names the known ones.
    """
    whole, _, layers = name.partition(":")
    if whole not in MODELS or not (layers.isdecimal() or name == whole):
        raise ValueError(f"unknown model shape {name!r}, expected one of {', '.join(MODELS)}, or name:layers")
    return MODELS[whole].with_layers(int(layers)) if layers else MODELS[whole]


# ---- models -----------------------------------------------------------------------------------------------


def build_model(name: str, device: torch.device | str, dtype: torch.dtype, seed: int = 0) -> PreTrainedModel:
    """Build the model of shape ``name`` as :func:`build_of_config` does."""
    return build_of_config(shape(name).build_config(), device, dtype, seed)


def build_of_config(
    config: PreTrainedConfig,
    device: torch.device | str,
    dtype: torch.dtype,
    seed: int = 0,
    factory: Any = AutoModelForCausalLM,
) -> PreTrainedModel:
    """Build the model that one of transformers' factories makes of a config, with random weights, in eval mode.

    Matrices, embeddings and biases are normal with ``WEIGHT_STD``, norm weights are 1. None are zeros, which some
    hardware multiplies faster.
    """
    with torch.device(device), compat.no_init_weights():
        model = factory.from_config(config, dtype=dtype)
    model.tie_weights()  # which is a part of what is left out
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1 and parameter_name.endswith("weight"):
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, WEIGHT_STD, generator=generator)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0  # never used, but keeps generate() from warning
    return model.eval().requires_grad_(False)


def build_spread_model(
    config: PreTrainedConfig,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    has_whole_experts: bool = False,
) -> PreTrainedModel:
    """Build the causal LM of a config with random weights over all processes, as a ``tp_plan`` spreads it.

    Args:
        has_whole_experts: each rank has some experts as a whole instead of a part of each.
    """
    with no_model():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = compat.spread_over_ranks(model, has_whole_experts)
    generator, seeds = torch.Generator(device), itertools.count(seed, torch.distributed.get_world_size())
    for module in model.modules():
        missing = {name: each for name, each in module._buffers.items() if each is not None and each.is_meta}
        if missing:
            module._buffers.update({name: torch.empty_like(each, device=device) for name, each in missing.items()})
            for parameter in (each for each in module._parameters.values() if each is not None):
                parameter._is_hf_initialized = True  # they are filled below
            with torch.no_grad():
                model._init_weights(module)
        for parameter_name, parameter in module._parameters.items():
            if parameter is None:
                continue
            local = torch.empty(compat.local_tensor(parameter).shape, dtype=dtype, device=device)
            if local.dim() == 1 and parameter_name == "weight":
                local.fill_(1.0)
            else:  # what every rank has whole is equal on all
                rank = torch.distributed.get_rank() if compat.is_sharded(parameter) else 0
                local.normal_(0.0, WEIGHT_STD, generator=generator.manual_seed(next(seeds) + rank))
            made = compat.with_local_tensor(parameter, local) if compat.is_sharded(parameter) else local
            module._parameters[parameter_name] = torch.nn.Parameter(made, requires_grad=False)
    model.tie_weights()  # which is a part of what is left out
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def prompt(model: PreTrainedModel, batch: int, length: int, seed: int = 1) -> torch.Tensor:
    """Return int64 [batch, length] random tokens on the model's device."""
    generator = torch.Generator().manual_seed(seed)
    vocab_size = model.config.get_text_config().vocab_size
    return torch.randint(1, vocab_size, (batch, length), generator=generator).to(model.device)


@contextlib.contextmanager
def no_model() -> Iterator[None]:
    """Allocate no memory inside the block, to count the bytes of a model that need not exist."""
    with torch.device("meta"), compat.no_init_weights():
        yield


# ---- bytes a token ----------------------------------------------------------------------------------------


def shape_weight_bytes(name: str, dtype: torch.dtype, batch: int = 1) -> int:
    """Return :func:`hf_fastpath.traffic.weight_bytes` of a shape, without building the model."""
    with no_model():
        return weight_bytes(AutoModelForCausalLM.from_config(shape(name).build_config(), dtype=dtype), batch)
