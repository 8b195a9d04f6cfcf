"""What a call of ``generate()`` was given and finds, as text that ranks compare before any of them begins."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ... import compat
from ..calls.pass_table import switched_off

#: arguments that may differ between ranks: who listens to the tokens, and what makes text of them
_OWN = frozenset({"streamer", "tokenizer", "assistant_tokenizer"})
#: arguments that are lists of objects: those of the user's own may differ, and what they come to is compared
_LISTS = frozenset({"logits_processor", "stopping_criteria"})


def arguments_of(method: Callable[..., Any], model: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> dict:
    """Return name -> text of what decides on the tokens that ``method``, a model's ``generate()``, gives.

    Entries of generation configs stand beside the arguments, by which they may be given as well.
    """
    given = dict(inspect.signature(method).bind_partial(model, *args).arguments)
    given.pop(next(iter(given)))  # the model
    given |= kwargs
    facts = {}
    for config in (getattr(model, "generation_config", None), given.pop("generation_config", None)):
        for name, value in ({} if config is None else vars(config)).items():
            if not name.startswith("_") and name != "transformers_version" and value is not None:
                facts[name] = described(value)
    for name, value in given.items():
        if name not in _OWN | _LISTS and (value is not None or name in facts):
            facts[name] = described(value)
    for name in _LISTS:
        facts[name] = [repr(compat.numbers_of(each)) for each in given.get(name) or () if compat.is_stock(each)]
    return facts | state_of_run(model)


def state_of_run(model: nn.Module) -> dict[str, Any]:
    """Return name -> text of what decides on types and ways of computation, and so on what ranks send each other."""
    parameters = list(model.parameters())
    kinds = sorted({each.device.type for each in parameters})
    casts = [str(torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)]
    return {
        "model": type(model).__name__,
        "dtypes of the model": sorted({str(each.dtype) for each in parameters}),
        "autocast": casts,
        "model.training": model.training,
        "passes that are switched off": sorted(switched_off()),
    }


def described(value: Any) -> Any:
    """Return an argument as text: tensors by shape, type and a checksum, plain values as they are, objects by class."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)} with checksum {checksum(value):08x}"
    if isinstance(value, Mapping):
        return {str(name): described(each) for name, each in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, map(described, value)))
    if isinstance(value, (list, tuple)):
        return [described(each) for each in value]
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    if isinstance(value, compat.Cache):
        return f"{type(value).__name__} of {value.get_seq_length()} positions"
    if callable(value) and not isinstance(value, nn.Module):
        return compat.name_of(value)
    return type(value).__name__


def checksum(tensor: torch.Tensor) -> int:
    """Return a checksum of a tensor's values."""
    own = compat.local_tensor(tensor).detach().contiguous().cpu()
    return zlib.crc32(own.reshape(-1).view(torch.uint8).numpy().data)
