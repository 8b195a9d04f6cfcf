"""transformers' models and their modules."""

from __future__ import annotations

import dis
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import PreTrainedConfig, activations
from transformers.dynamic_module_utils import custom_object_save
from transformers.generation import GenerationMixin
from transformers.initialization import no_init_weights
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D
from transformers.utils import output_capturing

from ..choices import Activation

if torch.distributed.is_available():
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor
else:  # no object is an instance of these
    DTensor = FullyShardedDataParallel = ()

__all__ = ["Conv1D", "no_init_weights"]


_ACTIVATIONS: dict[type, Activation] = {
    activations.NewGELUActivation: Activation.GELU_TANH,
    activations.GELUTanh: Activation.GELU_TANH,
    activations.GELUActivation: Activation.GELU,
    activations.SiLUActivation: Activation.SILU,
    nn.GELU: Activation.GELU,
    nn.SiLU: Activation.SILU,
    nn.ReLU: Activation.RELU,
}


def activation_of(module: nn.Module) -> Activation | None:
    """Return the activation that kernels have for a module, or None if they have none."""
    if type(module) is nn.GELU and module.approximate == "tanh":
        return Activation.GELU_TANH
    return _ACTIVATIONS.get(type(module))


def attention_function(module: nn.Module) -> Callable[..., Any] | None:
    """Return the function that computes the attention of ``module``, as its config says."""
    name = module.config._attn_implementation
    if name not in (None, "eager"):
        return ALL_ATTENTION_FUNCTIONS.get(name)
    return _global_of(module, "eager_attention_forward")


def is_flash_attention(module: nn.Module) -> bool:
    """Whether the attention of ``module`` is computed by a flash attention of a package or of the hub."""
    name = module.config._attn_implementation or ""
    return "flash" in name.rpartition("|")[2]


def experts_function(module: nn.Module) -> Callable[..., Any] | None:
    """Return the function that computes experts in a module, as its config says; None for the module's own code."""
    name = module.config._experts_implementation
    return None if name in (None, "eager") else ALL_EXPERTS_FUNCTIONS.get(name)


@contextmanager
def eager_experts(model: nn.Module) -> Iterator[None]:
    """Run experts with the model's own code for the length of a ``with`` block: only that code takes every dtype."""
    # The attribute is set without its setter, because the setter also writes the configs of submodels.
    name = "_experts_implementation_internal"
    configs = {id(m.config): m.config for m in model.modules() if hasattr(getattr(m, "config", None), name)}
    kept = {key: getattr(config, name) for key, config in configs.items()}
    try:
        for config in configs.values():
            setattr(config, name, "eager")
        yield
    finally:
        for key, config in configs.items():
            setattr(config, name, kept[key])


def rotation_function(module: nn.Module) -> Callable[..., Any] | None:
    """Return the function with which an attention module rotates queries and keys; None for the module's own code."""
    return _global_of(module, "apply_rotary_pos_emb")


def _global_of(module: nn.Module, name: str) -> Any:
    return vars(sys.modules[type(module).__module__]).get(name)


#: kinds of rotary embeddings whose frequencies do not change with the text
_STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})


def is_static_rope(config: Any) -> bool:
    """Whether the rotary embeddings that a config of one kind of layers tells of are the same at every length."""
    return (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default") in _STATIC_ROPE


def has_static_rope(rotary: nn.Module) -> bool:
    """Whether a rotary embedding's frequencies are the same at every length."""
    kinds = getattr(rotary, "rope_type", None)
    kinds = set(kinds.values()) if isinstance(kinds, dict) else {kinds}  # one for each kind of layer, or one for all
    return kinds <= _STATIC_ROPE


def caps_scores(config: Any) -> bool:
    """Whether the chosen implementation of attention applies a soft-cap; sdpa ignores it."""
    return config._attn_implementation != "sdpa"


def outputs_are_captured() -> bool:
    """Whether the running forward was asked for attentions or hidden states."""
    return bool(output_capturing._active_collector.get())  # an empty collector asks for nothing


def generating_model(model: nn.Module) -> nn.Module:
    """Return ``model``, or the one model with ``generate()`` inside it, if ``model`` itself has none or leaves the work
    to that model.

    PEFT, DDP, ``torch.compile``, DeepSpeed and value heads wrap a model so; BLIP-2 reads an image and leaves the rest
    to its language model, Qwen-Omni leaves the text to its thinker.
    """
    found, waiting = {}, [model]
    while waiting:
        module = waiting.pop()
        if not isinstance(module, GenerationMixin):
            waiting.extend(module.children())
        elif (inside := _first_to_generate(module)) is not None:
            waiting.append(inside)
        else:
            found[id(module)] = module
    return next(iter(found.values())) if len(found) == 1 else model


def _first_to_generate(model: nn.Module) -> nn.Module | None:
    """Return the model inside whose ``generate()`` that of a model's class calls first; None if it calls none, or
    transformers' own for the model itself."""
    own = type(model).generate
    if own is GenerationMixin.generate or not inspect.isfunction(code := inspect.unwrap(own)):
        return None
    names = [each.argval for each in dis.get_instructions(code)]
    called = [name for name, attribute in itertools.pairwise(names) if attribute == "generate"]
    inside = {name: child for name, child in model.named_children() if isinstance(child, GenerationMixin)}
    return None if "super" in names else next((inside[name] for name in called if name in inside), None)


def can_generate(model: nn.Module) -> bool:
    """Whether a model has transformers' ``generate()``."""
    return isinstance(model, GenerationMixin)


def entry_of(config: Any, name: str) -> Any:
    """Return an entry of a config, or None if it has none or one for each layer."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers' AmbiguousGlobalPerLayerAttributeError
        return None


def head_dim(config: Any) -> int:
    """Return the features of a head of attention."""
    return entry_of(config, "head_dim") or config.hidden_size // config.num_attention_heads


def set_entry(config: Any, name: str, value: Any) -> None:
    """Set an entry of a config; if the config refuses None as its value, set it to the number of the first token."""
    try:
        setattr(config, name, value)
    except StrictDataclassError:
        setattr(config, name, 0)


def config_entries(config: Any) -> dict[str, Any]:
    """Return the entries of a config; those of a config inside it are a dict, too."""
    entries = vars(config).items()  # ``==`` of configs reads entries that may differ by layer, which raises
    return {name: config_entries(each) if isinstance(each, PreTrainedConfig) else each for name, each in entries}


def configs_inside(config: Any) -> dict[str, Any]:
    """Return the configs of parts of a model inside its config, by their names."""
    return {name: each for name, each in vars(config).items() if isinstance(each, PreTrainedConfig)}


def layer_config(config: Any, layer: int) -> Any:
    """Return the config of one decoder layer: ``config`` itself, unless layers differ in an entry."""
    return config.per_layer_config[layer] if getattr(config, "per_layer_attributes", None) else config


def take_layer_entries(config: Any) -> dict[int, dict[str, Any]]:
    """Take the entries that differ by layer out of a config; return them by layer."""
    spec = vars(config).get("_heterogeneity_spec")
    if spec is None:
        return {}
    config.per_layer_config = None
    return {layer: dict(entries) for layer, entries in spec.per_layer_overrides.items()}


def put_layer_entries(config: Any, entries: dict[int, dict[str, Any]]) -> None:
    """Put entries that differ by layer into a config."""
    if entries:
        config.per_layer_config = entries


#: arguments of forwards that take images or sound
_MEDIA = frozenset(
    {
        *("pixel_values", "image_pixel_values", "image_patches", "image_embeds"),
        *("input_features", "input_values", "audio_input_features"),
    }
)


def is_decoder_alone(model: nn.Module) -> bool:
    """Whether a model generates text and has neither an encoder nor a part for images or sound beside its decoder."""
    return _generates_from_a_cache(model) and not is_multimodal(model)


def is_multimodal(model: nn.Module) -> bool:
    """Whether a model generates text by a decoder inside it, and reads images or sound as well."""
    if not _generates_from_a_cache(model):
        return False
    has_parts = model.config.get_text_config(decoder=True) is not model.config
    return has_parts or not _MEDIA.isdisjoint(inspect.signature(type(model).forward).parameters)


def _generates_from_a_cache(model: nn.Module) -> bool:
    config = getattr(model, "config", None)
    return config is not None and can_generate(model) and not getattr(config, "is_encoder_decoder", False)


#: entries of a config that may say how many positions there are
_LONGEST = ("max_position_embeddings", "max_target_positions", "n_positions", "n_ctx", "max_seq_len")


def known_positions(config: Any) -> list[int]:
    """Return the numbers of positions that a model knows by its config; none if the config says none."""
    entries = vars(config.get_text_config(decoder=True))
    return [entries[name] for name in _LONGEST if isinstance(entries.get(name), int)]


def text_decoder(model: Any) -> nn.Module:
    """Return the decoder inside a multimodal model or an encoder-decoder, without the head."""
    found = model.get_decoder()
    return found.get_decoder() if hasattr(found, "encoder") else found  # Florence-2's is an encoder-decoder


#: attribute of Dia's head, which its class does not tell of
_HEAD = "logits_dense"


def text_head(model: Any) -> nn.Module | None:
    """Return the head of a model or, if its class does not tell, that of the decoder inside; None if there is none."""
    head = model.get_output_embeddings()
    head = getattr(model, _HEAD, None) if head is None else head
    if head is None and hasattr(decoder := text_decoder(model), "get_output_embeddings"):
        head = decoder.get_output_embeddings()
    return head


#: attributes in which forwards of transformers' classes note something: about the prompt that they have read, that
#: modules have got the hooks which collect hidden states, what routers of NLLB-MoE were given in this forward, and
#: whether Dia's ``generate()`` was asked for guidance
FORWARD_NOTES = frozenset(
    {"rope_deltas", "_output_capturing_hooks_installed", "input_dtype", "expert_capacity", "_uses_cfg"}
)
#: names of modules that stand for what was imported and made so far, and for nothing that is computed
REGISTRIES = frozenset(
    {
        ("transformers.utils.generic", "_registered_model_output_types"),
        ("transformers.utils.output_capturing", "_CAN_RECORD_REGISTRY"),
    }
)
#: attribute of a module that says that its weights were initialized or loaded
INITIALIZED = "_is_hf_initialized"
#: attribute of a model that holds the defaults of its ``generate()``
GENERATION_DEFAULTS = "generation_config"


def model_of_config(config: Any, **arguments: Any) -> Any:
    """Make a model of the class for ``config``: one that generates text, or else any other model that there is.

    The classes are tried in order: causal LM, images or sound and text, encoder-decoder, any model; for a config of an
    encoder-decoder, encoder-decoders come first.

    Raises:
        ValueError: transformers has no model for this config.
    """
    from transformers import (
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForMultimodalLM,
        AutoModelForSeq2SeqLM,
        AutoModelForSpeechSeq2Seq,
    )

    encoders = AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq
    decoders = AutoModelForCausalLM, AutoModelForMultimodalLM
    is_both = getattr(config, "is_encoder_decoder", False)
    for factory in (*(encoders + decoders if is_both else decoders + encoders), AutoModel):
        try:
            return factory.from_config(config, **arguments)
        except ValueError as error:
            if "Unrecognized configuration class" not in str(error):
                raise
    raise ValueError(f"transformers has no model for {type(config).__name__}")


def class_named(name: str, config: Any) -> type | None:
    """Return the class of transformers' models that has a name and takes configs as ``config``; None if none does."""
    found = getattr(transformers, name, None)
    is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    return found if is_model and found.config_class is type(config) else None


def sharding(model: nn.Module) -> str | None:
    """Return in words how a model's weights are spread over processes; None if this process has them whole."""
    for module in model.modules():
        if getattr(module, "_device_mesh", None) is not None:
            return "tp_plan or a device mesh"
        if isinstance(module, FullyShardedDataParallel):
            return "FullyShardedDataParallel"
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            return "parameters that are DTensors"
        if getattr(parameter, "_fsdp_flattened", False):
            return "FullyShardedDataParallel"
        if hasattr(parameter, "ds_id"):
            return "DeepSpeed ZeRO-3"
    return None


def save_config(model: Any, config: Any, directory: str) -> None:
    """Write a model's config as ``save_pretrained()`` does, and the code of classes that came with a checkpoint."""
    if getattr(model, "_auto_class", None) is not None:
        custom_object_save(model, directory, config=config)
    config.save_pretrained(directory)


def is_of_transformers(model: nn.Module) -> bool:
    """Whether a model's class is one of transformers' own."""
    return type(model).__module__.startswith("transformers.models.")
