"""The registries in which transformers takes other people's attention, masks and experts, as a recorder uses them."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from transformers.cache_utils import Cache
from transformers.integrations.moe import (
    ALL_EXPERTS_FUNCTIONS,
    _default_apply_gate,
    batched_mm_experts_forward,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .caches import CACHE
from .encoders import encoder_output, has_encoder, text_cache, text_name
from .generation import LOGITS_TO_KEEP, GenerationMixin, inputs_behind
from .models import is_multimodal
from .token_methods import inputs_method

__all__ = ["without_modes"]

#: the name by which configs of recorded copies ask for our functions
RECORDED = "hf_fastpath_recorded"
#: function of ProphetNet's that numbers relative positions
_BUCKETS = "compute_relative_buckets"
#: method of modules that converts their tensors
CONVERT = "_apply"
#: argument of routers that are given attention's mask
_PADDING = "padding_mask"
#: attribute of modules of a layer that tells which of the cache's layers is theirs
LAYER_INDEX = "layer_idx"
#: attributes of a config that name its implementations of attention and of experts
_CHOICES = ("_attn_implementation_internal", "_experts_implementation_internal")


def install_seams(attention: Callable[..., Any], mask: Callable[..., Any], experts: Callable[..., Any]) -> None:
    """Let configs that ask for :data:`RECORDED` run through these functions."""
    ALL_ATTENTION_FUNCTIONS.register(RECORDED, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(RECORDED, mask)
    ALL_EXPERTS_FUNCTIONS.register(RECORDED, experts)


def ask_for_seams(model: nn.Module) -> None:
    """Set the configs of ``model`` to :data:`RECORDED`; no other model may share these configs."""
    for config in {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values():
        for name in _CHOICES:
            if hasattr(config, name):
                setattr(config, name, RECORDED)


def ask_for_plain_functions(model: nn.Module) -> None:
    """Let modules of ``model`` call transformers' own functions where installed packages (fla, causal_conv1d,
    mamba_ssm) would take their place: calls of PyTorch can be recorded, kernels of others cannot."""
    for module in model.modules():
        forward = inspect.unwrap(type(module).forward)
        known = getattr(forward, "__globals__", {})
        found = {name: _plain(known.get(name)) for name in getattr(getattr(forward, "__code__", None), "co_names", ())}
        plain = {name: function for name, function in found.items() if function is not None}
        if plain:
            made = types.FunctionType(
                forward.__code__, known | plain, forward.__name__, forward.__defaults__, forward.__closure__
            )
            made.__kwdefaults__ = forward.__kwdefaults__
            vars(module)["forward"] = types.MethodType(made, module)


def _plain(function: Any) -> Callable[..., Any] | None:
    """Return transformers' own function that a package's takes the place of; None if ``function`` is no package's."""
    code = getattr(function, "__code__", None)
    if code is None or not code.co_filename.endswith("hub_kernels.py"):
        return None
    held = {name: cell.cell_contents for name, cell in zip(code.co_freevars, function.__closure__ or ())}
    if not held.get("is_new_implementation") or "torch_function" not in held:
        return None
    own = held["torch_function"]
    taken = inspect.signature(own).parameters
    return lambda *args, **kwargs: own(*args, **{name: value for name, value in kwargs.items() if name in taken})


#: method of an attention over latents that makes keys and values of what the cache gives
EXPAND = "expand_kv"


def expanding_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of ``model`` whose cache holds a latent, of which the modules make keys and values."""
    return [module for module in model.modules() if callable(getattr(type(module), EXPAND, None))]


def modules_with_experts(model: nn.Module) -> list[nn.Module]:
    """Return the modules of ``model`` that keep experts as modules by their names, and choose among these."""
    found = (each for each in model.modules() if isinstance(each, nn.ModuleDict))
    return [each for each in found if type(each).forward is not nn.Module.forward]


def experts_in(module: nn.Module) -> list[nn.Module]:
    """Return the experts in one of :func:`modules_with_experts`, by their numbers."""
    inside = list(module.children())
    return [each for each in inside if type(each) is type(inside[0])]


def with_experts(module: nn.Module, experts: list[nn.Module]) -> nn.Module:
    """Put ``experts`` into a copy of one of :func:`modules_with_experts`, which then is not training."""
    others = iter(experts)
    inside = module._modules.items()
    kind = type(next(iter(module._modules.values())))
    vars(module)["_modules"] = {name: next(others) if type(each) is kind else each for name, each in inside}
    module.training = False
    return module


def linears_beside_experts(model: nn.Module) -> list[nn.Linear]:
    """Return the linear layers of mixtures whose experts are modules; routers convert theirs with every forward."""
    experts = {id(each) for each in modules_with_experts(model)}
    around = [each for each in model.modules() if any(id(child) in experts for child in each.children())]
    return [each for parent in around for each in parent.modules() if isinstance(each, nn.Linear)]


def attentions_of_streams(model: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """Return attention to the text, and to what an encoder has read, of the layers that have several streams."""
    found = [(getattr(each, "self_attn", None), getattr(each, "cross_attn", None)) for each in model.modules()]
    return [(text, encoded) for text, encoded in found if hasattr(text, "ngram") and encoded is not None]


def buckets_of(module: nn.Module, distances: torch.Tensor) -> torch.Tensor:
    """Return which of its relative positions attention to the text has for keys so far behind."""
    function = vars(sys.modules[type(module).__module__])[_BUCKETS]
    return function(module.num_buckets, module.relative_max_distance, -distances, False)


def modules_with_padding(model: nn.Module) -> list[nn.Module]:
    """Return the modules of ``model`` that route tokens, and are given attention's mask besides these."""
    return [each for each in model.modules() if _takes_padding(type(each))]


@functools.cache
def _takes_padding(kind: type[nn.Module]) -> bool:
    return list(inspect.signature(kind.forward).parameters)[2:] == [_PADDING]


def mask_sees(
    mask_function: Callable[..., Any], queries: torch.Tensor, keys: torch.Tensor, index: Any = None
) -> torch.Tensor:
    """Return bool [queries, keys]: whether a mask function of transformers lets a query see a key, both by position.

    Args:
        index: of the sequence and of the head; 0 by default.
    """
    index = torch.zeros((), dtype=torch.long) if index is None else index
    seen = mask_function(index, index, queries[:, None], keys[None, :])
    return torch.as_tensor(seen).expand(len(queries), len(keys))


def is_mask_function(function: Any) -> bool:
    """Whether a function is of transformers' masks, whatever functions it calls."""
    return getattr(function, "__module__", None) == create_causal_mask.__module__


def with_held(mask_function: Callable[..., Any], held: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """Return a mask function that uses ``held(tensor)`` for each tensor that is bound in it, or in functions in it."""

    def changed(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return held(value)
        if isinstance(value, (list, tuple)):
            return type(value)(map(changed, value))
        return with_held(value, held) if isinstance(value, types.FunctionType) else value

    if not isinstance(mask_function, types.FunctionType) or not mask_function.__closure__:
        return mask_function
    cells = tuple(types.CellType(changed(cell.cell_contents)) for cell in mask_function.__closure__)
    code, known = mask_function.__code__, mask_function.__globals__
    return types.FunctionType(code, known, mask_function.__name__, mask_function.__defaults__, cells)


@dataclass(frozen=True)
class ExpertStacks:
    """How a module keeps the weights of its experts.

    Attributes:
        tensors: name of a parameter -> [num_experts, ...]: what makes gate and up, or up alone; down; their biases.
        roles: argument of ``ops.fused_experts`` -> name of the parameter.
        has_gate: whether there is a gate.
        is_transposed: whether matrices are [in_features, out_features].
        is_concatenated: whether gate features come first, then up features; otherwise they alternate.
    """

    tensors: dict[str, torch.Tensor]
    roles: dict[str, str]
    has_gate: bool
    is_transposed: bool
    is_concatenated: bool


def expert_stacks(module: nn.Module) -> ExpertStacks | None:
    """Return how a module keeps the weights of its experts, None if it keeps them otherwise than as stacks alone."""
    has_gate = getattr(module, "has_gate", True)
    first = "gate_up_proj" if has_gate else "up_proj"
    roles = {"gate_up_weight": first, "down_weight": "down_proj"}
    if getattr(module, "has_bias", False):
        roles |= {"gate_up_bias": f"{first}_bias", "down_bias": "down_proj_bias"}
    held = dict(module.named_parameters())
    if held.keys() != set(roles.values()):
        return None
    how = (getattr(module, name, default) for name, default in (("is_transposed", False), ("is_concatenated", True)))
    return ExpertStacks(held, roles, has_gate, *how)


def with_stacks(module: nn.Module, tensors: dict[str, torch.Tensor]) -> nn.Module:
    """Return a module that is as ``module`` but for the weights of its experts, by the names of its parameters."""
    made = copy.copy(module)
    vars(made)["_parameters"] = dict(tensors)
    if hasattr(module, "num_experts"):  # by which transformers tells experts of other ranks
        vars(made)["num_experts"] = len(next(iter(tensors.values())))
    return made


#: arguments of the forward of a module that runs experts which others have chosen
_EXPERTS_ARGUMENTS = ("self", "hidden_states", "top_k_index", "top_k_weights")
#: what transformers' functions for experts ask of a module
_EXPERTS_SETTINGS = {"has_gate": True, "has_bias": False, "has_post_expert_norm": False, "is_transposed": False}
_EXPERTS_SETTINGS |= {"is_concatenated": True, "_is_expert_parallel": False}


def loops_over_experts(module: nn.Module) -> bool:
    """Whether a module runs experts in a loop of its own instead of a function that ``ExpertsInterface`` has."""
    if hasattr(module, "has_gate"):  # which the decorator for ``ExpertsInterface`` sets
        return False
    return tuple(inspect.signature(type(module).forward).parameters) == _EXPERTS_ARGUMENTS


def gathered_experts(module: nn.Module, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Run the experts of a module as products of gathered weights, so that no step waits for the device."""
    if loops_over_experts(module):
        settings = _EXPERTS_SETTINGS | {"num_experts": len(module.down_proj)}
        module = copy.copy(module)
        vars(module).update({name: value for name, value in settings.items() if not hasattr(module, name)})
        if not hasattr(module, "_apply_gate"):
            vars(module)["_apply_gate"] = functools.partial(_default_apply_gate, module)
    return batched_mm_experts_forward(module, hidden_states=x, top_k_index=ids, top_k_weights=weights)


def own_experts(module: nn.Module, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Run the experts of a module by the loop of its class."""
    return inspect.unwrap(type(module).forward)(module, x, ids, weights)


def forward_over(
    model: nn.Module, tokens: torch.Tensor, cache: Cache, encoded: torch.Tensor | None = None, bare: bool = False
) -> torch.Tensor:
    """Run tokens of one sequence behind those that ``cache`` holds; return the model's logits.

    No mask is passed: Mamba's class would apply one of the whole text to the new tokens.

    Args:
        bare: whether the class's forward runs in place of one that the instance has.
        encoded: [1, length, encoder_width], of an encoder-decoder what the encoder has given; else None.
    """
    past, count = text_cache(cache).get_seq_length(), tokens.shape[1]
    given: dict[str, Any] = {
        text_name(model, "input_ids"): tokens,
        CACHE: cache,
        "use_cache": True,
        "return_dict": True,
    }
    if takes_positions(model):
        positions = torch.arange(past, past + count, device=tokens.device)[None]
        given[text_name(model, "position_ids")] = positions
    if encoded is not None:
        given["encoder_outputs"] = encoder_output(encoded)
    return (functools.partial(type(model).forward, model) if bare else model)(**given).logits


def takes_logits_to_keep(model: nn.Module) -> bool:
    """Whether a model's forward can make logits of the last token alone."""
    return LOGITS_TO_KEEP in inspect.signature(type(model).forward).parameters


def takes_positions(model: nn.Module) -> bool:
    """Whether a model's forward takes position ids, and ``generate()`` gives some with every token."""
    if text_name(model, "position_ids") not in inspect.signature(type(model).forward).parameters:
        return False
    stocks = GenerationMixin.prepare_inputs_for_generation
    is_stocks = getattr(inputs_method(model), "__func__", stocks) is stocks
    if is_stocks or (has_encoder(model) and not is_multimodal(model)):
        return True
    two = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    return inputs_behind(model, two, {"position_ids": two, "use_cache": True}).get("position_ids") is not None
