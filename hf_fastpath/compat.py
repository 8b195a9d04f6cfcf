"""The only file that touches private or version-dependent names of transformers, accelerate, torch and Python."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import transformers
from torch import nn
from torch.amp import autocast_mode
from torch.nn.modules import module as torch_module
from transformers import activations
from transformers.cache_utils import Cache, DynamicCache
from transformers.dynamic_module_utils import custom_object_save
from transformers.generation import GenerationConfig, GenerationMixin, GenerationMode
from transformers.generation import candidate_generator as candidates
from transformers.generation import utils as generation_utils
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D
from transformers.utils import output_capturing

from .choices import Activation

if torch.distributed.is_available():
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor
else:  # nothing is an instance of these
    DTensor = FullyShardedDataParallel = ()

__all__ = [
    "Conv1D",
    "DynamicCache",
    "EosTokenCriteria",
    "GenerateDecoderOnlyOutput",
    "GenerationConfig",
    "GenerationMixin",
    "MaxLengthCriteria",
]

#: versions of transformers whose replaced forwards were compared with ours; others are self-tested by patch()
TESTED_TRANSFORMERS = ("5.17", "5.23", "5.24")


def transformers_version() -> str:
    """Major and minor version, e.g. ``"5.17"``."""
    return ".".join(transformers.__version__.split(".")[:2])


# ---- caches ---------------------------------------------------------------------------------------------------

_OLD_CACHE = "past_key_values"
#: name of the KV cache among the arguments of ``generate()`` and of forwards, and in their outputs: ``"cache"`` from
#: 5.24 on, where the old name is still taken, with a warning
CACHE = (
    "cache" if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters else _OLD_CACHE
)


def cache_of(arguments: Mapping[str, Any], own_name: str | None) -> Any:
    """The KV cache among a forward's arguments, by the name that the module alone gives it, or None: the usual one."""
    if own_name is not None:
        return arguments.get(own_name)
    return arguments.get(CACHE, arguments.get(_OLD_CACHE))


def is_continuous_batch(arguments: Mapping[str, Any]) -> bool:
    """Whether a forward's named arguments are of ``generate_batch()``: several prompts and tokens in one row."""
    return isinstance(arguments.get("cache"), PagedAttentionCache)


def record_past_of(layer: Any) -> bool:
    """Whether a transformers cache layer records its past (full layers have no such state)."""
    return getattr(layer, "record_past", False)


#: below this transformers' cache keeps all that was ever seen, and prompts and single tokens see different things
MIN_WINDOW = 2


def layer_windows(config: Any) -> list[int | None] | None:
    """Sliding window of each decoder layer (None: full attention), or None if a layer is of another kind."""
    windows = []
    for layer in DynamicCache(config=config).layers:
        if type(layer).__name__ == "DynamicSlidingWindowLayer":
            windows.append(layer.sliding_window)
        elif type(layer).__name__ == "DynamicLayer":
            windows.append(None)
        else:
            return None
    return windows or [None] * config.get_text_config(decoder=True).num_hidden_layers


def _update_waits() -> bool:
    try:
        return "prefetch_stream.wait_stream" in inspect.getsource(Cache.update)
    except OSError:  # no source: one wait too many does no harm
        return False


_PREFETCH_WAITS = _update_waits()


def prefetch_waits() -> bool:
    """Whether an offloading cache's copies back to the GPU wait for those to the host, as they do not in 5.17."""
    return _PREFETCH_WAITS


def order_offloading(cache: Any, device: torch.device) -> None:
    """Let what an offloading ``cache`` will bring back to the GPU wait for all that was started on it so far.

    Where not :func:`prefetch_waits`, a fast model reads layers that have not reached the host yet without it. Other
    caches are left alone.
    """
    if getattr(cache, "offloading", False):
        cache.prefetch_stream.wait_stream(torch.cuda.default_stream(device))


def prepare_cache_stock(model: Any, *args: Any, **kwargs: Any) -> Any:
    """The model class's own ``_prepare_cache_for_generation``."""
    return type(model)._prepare_cache_for_generation(model, *args, **kwargs)


PREPARE_CACHE = "_prepare_cache_for_generation"


def is_sample_mode(generation_mode: Any) -> bool:
    """Whether ``generate()`` will run greedy search or sampling."""
    return generation_mode in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


def is_assisted_mode(generation_mode: Any) -> bool:
    """Whether ``generate()`` will verify drafts."""
    return generation_mode is GenerationMode.ASSISTED_GENERATION


# ---- modules --------------------------------------------------------------------------------------------------

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
    """What kernels have for an activation module, or None if they do not have it."""
    if type(module) is nn.GELU and module.approximate == "tanh":
        return Activation.GELU_TANH
    return _ACTIVATIONS.get(type(module))


#: packages whose functions are what our ops were compared with; ``kernels`` wraps functions of transformers
_LIBRARIES = ("transformers", "torch", "kernels")
#: (id of a function, where else it may be defined) -> the function, if it is known: every module is asked at every call
_known_code: dict[tuple[int, str], Callable[..., Any]] = {}


def is_known_code(function: Callable[..., Any] | None, home: str = "") -> bool:
    """Whether a function, and all that its decorators wrap, is defined in transformers or torch; or in ``home``, the
    module of the model's architecture, whose code ``patch()`` may have compared with a listed one's."""
    key, outermost = (id(function), home), function
    if function is None or _known_code.get(key) is function:
        return True
    while function is not None:
        if isinstance(function, nn.Module):  # a function that ``kernels`` may replace by one of the hub's
            function = vars(function).get("forward", type(function).forward)
        function = getattr(function, "func", function)  # functools.partial
        defined_in = getattr(function, "__globals__", {}).get("__name__", "")
        if defined_in != home and defined_in.partition(".")[0] not in _LIBRARIES:
            return False
        function = getattr(function, "__wrapped__", None)
    if not isinstance(outermost, nn.Module):  # whose forward may change
        _known_code[key] = outermost
    return True


def is_wrapped_by(function: Callable[..., Any] | None, outer: Callable[..., Any] | None) -> bool:
    """Whether ``function`` is ``outer``, or what a decorator of it wraps."""
    while outer is not None and outer is not function:
        outer = getattr(outer, "__wrapped__", None)
    return outer is not None


def attention_function(module: nn.Module) -> Callable[..., Any] | None:
    """What the attention of ``module`` runs through, as its config says."""
    name = module.config._attn_implementation
    if name not in (None, "eager"):
        return ALL_ATTENTION_FUNCTIONS.get(name)
    return _global_of(module, "eager_attention_forward")


def experts_function(module: nn.Module) -> Callable[..., Any] | None:
    """What a module with the weights of experts runs through, as its config says; None if that is its own code."""
    name = module.config._experts_implementation
    return None if name in (None, "eager") else ALL_EXPERTS_FUNCTIONS.get(name)


@contextmanager
def eager_experts(model: nn.Module) -> Iterator[None]:
    """Run experts by the model's own code, which alone takes every dtype, for the length of a ``with`` block."""
    name = "_experts_implementation_internal"  # without its setter, which writes the configs of submodels too
    configs = {id(m.config): m.config for m in model.modules() if hasattr(getattr(m, "config", None), name)}
    kept = {key: getattr(config, name) for key, config in configs.items()}
    try:
        for config in configs.values():
            setattr(config, name, "eager")
        yield
    finally:
        for key, config in configs.items():
            setattr(config, name, kept[key])


def functions_of_configs(configs: Iterable[Any]) -> list[Any]:
    """What attention and experts run through in modules with these configurations, and the hooks of all modules."""
    found = [*torch_module._global_forward_hooks.values(), *torch_module._global_forward_pre_hooks.values()]
    for config in configs:
        found.append(ALL_ATTENTION_FUNCTIONS.get(getattr(config, "_attn_implementation", None)))
        found.append(ALL_EXPERTS_FUNCTIONS.get(getattr(config, "_experts_implementation", None)))
    return found


def rotation_function(module: nn.Module) -> Callable[..., Any] | None:
    """What an attention module turns queries and keys with; None if that is its own code."""
    return _global_of(module, "apply_rotary_pos_emb")


def _global_of(module: nn.Module, name: str) -> Any:
    return vars(sys.modules[type(module).__module__]).get(name)


def has_static_rope(rotary: nn.Module) -> bool:
    """Whether a rotary embedding's frequencies are the same at every length."""
    kinds = getattr(rotary, "rope_type", None)
    kinds = set(kinds.values()) if isinstance(kinds, dict) else {kinds}  # one a kind of layer, or one for all
    return kinds <= {"default", "linear", "llama3", "yarn"}


def caps_scores(config: Any) -> bool:
    """Whether the chosen implementation of attention applies a soft-cap: sdpa passes over it."""
    return config._attn_implementation != "sdpa"


def _does_nothing(hook: Callable[..., Any]) -> bool:
    """Whether a hook is one of transformers' that leaves a forward without gradients as it is."""
    # Those that the first output_hidden_states=True leaves on the modules; alone they do nothing.
    if getattr(hook, "__module__", None) == output_capturing.__name__:
        return True
    # That of enable_input_require_grads(), which comes with activation checkpointing.
    name = getattr(hook, "__qualname__", "")
    return is_known_code(hook) and name.endswith("enable_input_require_grads.<locals>.make_inputs_require_grads")


def hook_of(module: nn.Module) -> Callable[..., Any] | None:
    """A hook that matters and that calling ``module`` without gradients would run, or None."""
    contents = module.__dict__
    after, before = contents["_forward_hooks"], contents["_forward_pre_hooks"]
    of_all = torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks
    if not after and not before and not any(of_all):
        return None
    found = (hook for hook in (*after.values(), *before.values()) if not _does_nothing(hook))
    return next(chain(found, *(hooks.values() for hooks in of_all)), None)


def name_of(function: Any) -> str:
    """Where a function, method or callable is defined, as a user may look for it."""
    function = getattr(function, "func", function)  # functools.partial
    function = getattr(function, "__func__", function)
    if hasattr(function, "__wrapped__") and hasattr(function, "__code__"):  # whose name it has taken on
        code = function.__code__
        return f"{function.__globals__.get('__name__', 'somewhere')}.{getattr(code, 'co_qualname', code.co_name)}"
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def outputs_are_captured() -> bool:
    """Whether the running forward was asked for attentions or hidden states."""
    return bool(output_capturing._active_collector.get())  # an empty collector asks for nothing


def generating_model(model: nn.Module) -> nn.Module:
    """``model``; or the one inside it that has ``generate()``, where it has none and wraps exactly one: PEFT, DDP,
    ``torch.compile``, DeepSpeed, a value head."""
    found, waiting = {}, [model]
    while waiting:
        module = waiting.pop()
        if isinstance(module, GenerationMixin):
            found[id(module)] = module
        else:
            waiting.extend(module.children())
    return next(iter(found.values())) if len(found) == 1 else model


def can_generate(model: nn.Module) -> bool:
    """Whether a model has transformers' ``generate()``."""
    return isinstance(model, GenerationMixin)


def model_of_config(config: Any, **arguments: Any) -> Any:
    """A model of the class that is made for ``config``: a causal LM, else one of images or sound and text, an
    encoder-decoder, or whatever there is.

    Raises:
        ValueError: transformers has no model for it.
    """
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM

    for factory in (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM, AutoModel):
        try:
            return factory.from_config(config, **arguments)
        except ValueError as error:
            if "Unrecognized configuration class" not in str(error):
                raise
    raise ValueError(f"transformers has no model for {type(config).__name__}")


def sharding(model: nn.Module) -> str | None:
    """How a model's weights are spread over processes, in words; None if this process has them whole."""
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


def is_sharded(tensor: torch.Tensor | None) -> bool:
    """Whether this process may have a part of a tensor only."""
    return isinstance(tensor, DTensor)


#: what ``generate()`` passes to the model's forward where our loops stand in for it
FORWARD_ARGUMENTS = frozenset(
    {"input_ids", "attention_mask", "position_ids", "use_cache", "logits_to_keep", "return_dict", CACHE, _OLD_CACHE}
)


def is_ours(function: Any) -> bool:
    """Whether a function is one that ``patch()`` binds."""
    return getattr(function, "__module__", "").startswith("hf_fastpath.")


def converted_to_float32(function: Any) -> Any:
    """What accelerate's wrapper around a forward calls, to make its results float32; None for any other function."""
    known = type(function).__module__ == "accelerate.utils.operations"
    return function.model_forward if known and type(function).__name__ == "ConvertOutputsToFp32" else None


def run_under_autocast(function: Any) -> Any:
    """What a function that was decorated with ``torch.autocast`` wraps; None for any other function."""
    code = getattr(function, "__code__", None)
    if code is None or code not in (found for found in _AUTOCAST_CODE.co_consts if hasattr(found, "co_code")):
        return None
    return function.__closure__[code.co_freevars.index("func")].cell_contents


_AUTOCAST_CODE = autocast_mode.autocast_decorator.__code__

#: where a module may keep the forward that computes
FORWARD_ATTRIBUTES = ("forward", "_old_forward")


def forward_attribute(module: nn.Module) -> str:
    """Where a module keeps the forward that computes: under an accelerate hook it is ``_old_forward``."""
    return "_old_forward" if hasattr(module, "_hf_hook") and "_old_forward" in vars(module) else "forward"


def placement(module: nn.Module) -> str | None:
    """What the accelerate hook in the place of the instance's ``forward`` is there for.

    Returns:
        ``"placed"``: it moves tensors to where the module's weights are, and changes no call whose tensors are there;
        ``"offloaded"``: weights are brought for every call; None: anything else, or there is no hook.
    """
    contents = vars(module)
    hook, outer = contents.get("_hf_hook"), contents.get("forward")
    if (type(hook).__module__, type(hook).__qualname__) != ("accelerate.hooks", "AlignDevicesHook"):
        return None
    if not isinstance(outer, functools.partial) or outer.args != (module,):
        return None
    if outer.func.__module__ != "accelerate.hooks" or hook.no_grad:
        return None
    here = next((tensor.device for tensor in chain(module.parameters(), module.buffers())), None)
    if hook.offload or (here is not None and here.type == "meta"):
        return "offloaded"
    if here is None or hook.execution_device is None:  # values are the same wherever they are
        return "placed"
    there = torch.device(hook.execution_device)
    return "placed" if there.type == here.type and there.index in (None, here.index) else None


def save_config(model: Any, config: Any, directory: str) -> None:
    """Write a model's config as ``save_pretrained()`` does, and the code of classes that came with a checkpoint."""
    if getattr(model, "_auto_class", None) is not None:
        custom_object_save(model, directory, config=config)
    config.save_pretrained(directory)


# ---- the decode loop --------------------------------------------------------------------------------------------


#: methods that ``GenerationMixin._sample`` calls for every token and our loop does not
_TOKEN_METHODS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")


def overridden_method(model: Any, home: str) -> str | None:
    """The method by which other code than that of ``home`` has put itself between ``generate()`` and the model's
    forward, and where it is defined; or None."""
    for name in _TOKEN_METHODS:
        of_class, of_instance = getattr(type(model), name), vars(model).get(name)
        if not is_known_code(of_class, home):
            return f"{name} is {name_of(of_class)}"
        # the class's own, bound: left behind by PEFT
        if of_instance is not None and getattr(of_instance, "__func__", None) is not of_class:
            return f"{name} is {name_of(of_instance)}"
    return None


#: keyword arguments of ``generate()`` that change no logits and nothing in the cache: ``prepare_inputs_for_generation``
#: drops labels, and without labels a forward computes no loss
WITHOUT_EFFECT = frozenset({"labels", "num_items_in_batch"})


def is_stock_streamer(streamer: Any) -> bool:
    """Whether a streamer is exactly one of transformers', none of whose methods was replaced on the instance."""
    methods = ("put", "end", "on_finalized_text")
    return type(streamer).__module__.startswith("transformers.") and not any(name in vars(streamer) for name in methods)


def is_stock(thing: LogitsProcessor | StoppingCriteria) -> bool:
    """Whether a processor or criterion is one of transformers' own classes, and calls no function of the user's."""
    return type(thing).__module__.startswith("transformers.") and type(thing) is not PrefixConstrainedLogitsProcessor


#: warpers in the order in which generate() applies them: attribute with the setting, value that changes nothing
_WARPERS: dict[type[LogitsProcessor], tuple[str, float]] = {
    TemperatureLogitsWarper: ("temperature", 1.0),
    TopKLogitsWarper: ("top_k", 0.0),
    TopPLogitsWarper: ("top_p", 1.0),
    MinPLogitsWarper: ("min_p", 0.0),
}


def sampling_settings(processors: Sequence[LogitsProcessor]) -> list[float] | None:
    """temperature, top_k, top_p and min_p of ``processors``, or None if they are anything but these warpers, each at
    most once and in this order, that keep at least one token and give the others no chance; or if float32 cannot hold
    the temperature and its inverse."""
    settings, kinds = [neutral for _, neutral in _WARPERS.values()], list(_WARPERS)
    last = -1
    for processor in processors:
        place = kinds.index(type(processor)) if type(processor) in kinds else -1
        keeps, filtered = (getattr(processor, name, None) for name in ("min_tokens_to_keep", "filter_value"))
        if place <= last or keeps not in (None, 1) or filtered not in (None, -float("inf")):
            return None
        settings[place], last = float(getattr(processor, _WARPERS[kinds[place]][0])), place
    limits = torch.finfo(torch.float32)
    return settings if limits.tiny <= settings[0] <= 1 / limits.tiny else None


def new_tokens(input_ids: torch.Tensor, generation_config: Any, model_kwargs: dict) -> torch.Tensor:
    """Those of ``input_ids`` that the cache does not hold, told by the mask's length as ``GenerationMixin._prefill``
    tells it: the caller gives the whole text or only what is new."""
    mask = model_kwargs.get("attention_mask")
    # a mask of ones may have been dropped, its length noted
    covered = getattr(generation_config, "_mask_length", -1) if mask is None else mask.shape[1]
    past_len = model_kwargs[CACHE].get_seq_length()
    return input_ids[:, past_len:] if covered == input_ids.shape[1] else input_ids


def prefill(model: Any, input_ids: torch.Tensor, generation_config: Any, model_kwargs: dict) -> Any:
    """Run the prompt as ``GenerationMixin._sample`` does."""
    return model._prefill(input_ids, generation_config, model_kwargs, is_first_iteration=True)


def following_logits(model: Any, input_ids: torch.Tensor, count: int, prompt_len: int, model_kwargs: dict) -> Any:
    """Run the last ``count`` tokens of a text as ``GenerationMixin._sample`` runs the one that it has chosen.

    Args:
        input_ids: [batch, seq_len], the text, as the caller of ``generate()`` has begun it.
        count: how many of its tokens the cache does not hold.
        prompt_len: how many of them were there when ``generate()`` began.
        model_kwargs: of the prompt.

    Returns:
        [batch, count, vocab_size] logits of the tokens that follow each.
    """
    known = model._update_model_kwargs_for_generation(
        {}, dict(model_kwargs), num_new_tokens=input_ids.shape[1] - prompt_len
    )
    with model._optimize_model_for_decode():
        inputs = model.prepare_inputs_for_generation(input_ids, next_sequence_length=count, **known)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = count
        return model(**inputs, return_dict=True).logits[:, -count:]


#: whether ``GenerationMixin._assisted_decoding`` asks the stopping criteria about every draft, too, and takes no token
#: behind one that they end the text behind, as in 5.17
CRITERIA_SEE_DRAFTS = "is_done_candidate" in inspect.signature(generation_utils._speculative_sampling).parameters


def candidate_generator(model: Any, **arguments: Any) -> Any:
    """What makes drafts for ``GenerationMixin._assisted_decoding`` with these arguments, if that is an assistant or a
    lookup in the prompt, and the model's own choice decides; else None.

    Args:
        model: that generates.
        arguments: of ``GenerationMixin._get_candidate_generator``.
    """
    config = arguments["generation_config"]
    others = ("assistant_early_exit", "use_mtp", "speculation_type", "assistant_ensemble_weight")
    if any(getattr(config, name, None) for name in others):
        return None
    made = model._get_candidate_generator(**arguments)
    if looks_up_drafts(made):
        if not made.logits_processor:  # on the host: without waiting for the device at every comparison
            made.eos_token_id = None if made.eos_token_id is None else made.eos_token_id.cpu()
            made.logits_processor = None
        return made
    return made if type(made) is candidates.AssistedCandidateGenerator else None


def lengthen_draft_inputs(generator: Any, count: int) -> None:
    """Tell an assistant's generator of ``count`` more tokens of the text in front of its next draft."""
    given = generator.assistant_kwargs
    for name, extend in (
        ("attention_mask", candidates._prepare_attention_mask),
        ("position_ids", candidates._prepare_position_ids),
    ):
        if given.get(name) is not None:
            given = extend(given, given[name].shape[-1] + count, False)
    generator.assistant_kwargs = given


def looks_up_drafts(generator: Any) -> bool:
    """Whether drafts are pieces of the text itself."""
    return type(generator) is candidates.PromptLookupCandidateGenerator


def note_confidence(generator: Any, probability: float) -> None:
    """Tell an assistant's generator how likely it held the token it drafted; it learns its threshold from that."""
    if hasattr(generator, "probs"):
        generator.probs.append(probability)


def update_drafts(generator: Any, text: torch.Tensor, drafted: int, matches: int) -> None:
    """Tell a generator how many of its ``drafted`` tokens the model agreed with."""
    generator.update_candidate_strategy(text, text.new_empty((1, drafted + 1)), matches)


def keep_draft_length(generator: Any) -> None:
    """Leave an assistant the draft length that was found for it, as ``GenerationMixin._assisted_decoding`` does."""
    if looks_up_drafts(generator):
        return
    config = generator.assistant_model.generation_config
    if config.num_assistant_tokens_schedule == "heuristic":
        config.num_assistant_tokens = generator.num_assistant_tokens


def pad_token(generation_config: Any) -> torch.Tensor | None:
    """The pad token as ``generate()`` resolved it, a tensor."""
    return generation_config._pad_token_tensor


def philox_offset(device: torch.device) -> int:
    """How far the default CUDA generator of ``device`` has advanced."""
    return _cuda_generator(device).get_offset()


def set_philox_offset(device: torch.device, offset: int) -> None:
    """Move the default CUDA generator of ``device`` (back) to ``offset``."""
    _cuda_generator(device).set_offset(offset)


def _cuda_generator(device: torch.device) -> torch.Generator:
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def below_autograd() -> Any:
    """Context in which ops skip the autograd dispatch keys; only for code that needs no gradients."""
    return torch._C._AutoDispatchBelowAutograd()


def is_run_elsewhere(model: nn.Module, waiting: Container[int] = ()) -> bool:
    """Whether another thread is inside of a ``generate()`` or a forward of ``model``.

    Args:
        waiting: threads that have begun a ``generate()`` which waits, and does not count.
    """
    codes = {inspect.unwrap(GenerationMixin.generate).__code__, nn.Module._call_impl.__code__}
    here = threading.get_ident()
    for thread, frame in sys._current_frames().items():
        counted = 0
        while frame is not None and thread != here:
            counted += frame.f_code in codes and frame.f_locals.get("self") is model
            frame = frame.f_back
        if counted > (thread in waiting):
            return True
    return False


def uses_generation_mixin_sample(model: Any) -> bool:
    """Whether the model's class has transformers' own greedy and sampling loop."""
    return getattr(type(model), "_sample", None) is GenerationMixin._sample
