"""A twin of a multimodal model for the self-test: its class around a small decoder. What reads images and sound has no
weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from .. import compat

#: standard deviation of the head's weights, that of transformers' default
_SPREAD = 0.02


def multimodal_twin(model: nn.Module, small: Callable[[Any], Any], readers: Iterable[str]) -> nn.Module:
    """Make a twin on the CPU. Modules that a step of the decoder does not call have empty weights.

    Args:
        model: a multimodal model.
        small: makes a small config of the decoder's.
        readers: names of modules of which a step reads a tensor.
    """
    config = copy.deepcopy(model.config)
    text = config.get_text_config(decoder=True)
    made = small(text)
    _cut_sections(model, text, made)
    config = made if text is config else _put(config, text, made)
    # encoders with the decoder's vocabulary share its embeddings
    cut_inside(config, small, lambda each: compat.entry_of(each, "vocab_size") == text.vocab_size)
    for each in (made, config):
        for name, token in (("bos_token_id", None), ("eos_token_id", None), ("pad_token_id", 0)):
            if hasattr(each, name):  # forwards put the token of padding in the place of an image's
                compat.set_entry(each, name, token)
    with torch.device("meta"):
        twin = type(model)(config)
        decoder = compat.text_decoder(twin)
    kept = {id(decoder): type(decoder)(decoder.config)}
    inside = set(map(id, decoder.modules()))
    known = dict(twin.named_modules())
    outside = (known[path] for path in readers if path in known)  # layers that the twin has not are the decoder's
    for module in (twin.get_input_embeddings(), twin.get_output_embeddings(), *outside):
        if module is not None and module is not twin and inside.isdisjoint(map(id, module.modules())):
            kept[id(module)] = _filled(module)
    _graft(twin, kept)
    twin.tie_weights()
    return twin


def cut_inside(config: Any, small: Callable[[Any], Any], is_wanted: Callable[[Any], bool] = lambda each: True) -> None:
    """Put a small config in the place of each that is wanted, of the parts of a model and of parts of these."""
    for name, inside in compat.configs_inside(config).items():
        if is_wanted(inside):
            inside = small(inside)
            setattr(config, name, inside)
        cut_inside(inside, small, is_wanted)


def _cut_sections(model: nn.Module, old: Any, new: Any) -> None:
    """Give each axis of positions (time, height, width) the share of a smaller head that it has of the old one. Where
    the config says nothing, modules have what their class takes for it."""
    parameters = getattr(new, "rope_parameters", None) or {}
    known = [getattr(each, "mrope_section", None) for each in model.modules()]
    sections = parameters.get("mrope_section") or next(
        (each for each in known if isinstance(each, (list, tuple))), None
    )
    if sections:
        size, was = compat.head_dim(new), compat.head_dim(old)
        cut = [section * size // was for section in sections]
        other = next((place for place, each in enumerate(sections) if sections.count(each) == 1), 0)
        cut[other] += sum(sections) * size // was - sum(cut)  # height and width stay equal
        new.rope_parameters = parameters | {"mrope_section": cut}


def _put(config: Any, old: Any, new: Any) -> Any:
    """Put ``new`` in the place of the config ``old`` inside ``config``, and return that."""
    for name, value in vars(config).items():
        if value is old:
            setattr(config, name, new)
        elif hasattr(value, "get_text_config"):
            _put(value, old, new)
    return config


def _filled(module: nn.Module) -> nn.Module:
    """Return ``module`` on the CPU, with random weights, and zeros in its buffers."""
    made = module.to_empty(device="cpu")
    for tensor in made.parameters():
        nn.init.normal_(tensor, std=_SPREAD)
    for buffer in made.buffers():
        buffer.zero_()
    return made


def _graft(parent: nn.Module, kept: dict[int, nn.Module]) -> None:
    """Put modules in the place of those with the ids that they are under, and empty the weights of all others."""
    for name, child in parent.named_children():
        if id(child) in kept:
            setattr(parent, name, kept[id(child)])
        elif any(id(module) in kept for module in child.modules()):
            _graft(child, kept)
        else:
            for module in child.modules():
                _on_cpu(module, is_empty=True)
    _on_cpu(parent)


def _on_cpu(module: nn.Module, is_empty: bool = False) -> None:
    """Put zeros, or nothing, in the place of a module's own tensors that are on the meta device."""
    for held in (module._parameters, module._buffers):
        for name, tensor in held.items():
            if tensor is not None and tensor.is_meta:
                made = torch.zeros(0 if is_empty else tensor.shape, dtype=tensor.dtype, device="cpu")
                held[name] = nn.Parameter(made, requires_grad=False) if held is module._parameters else made
