"""Methods that ``generate()`` calls for every token and our loops do not call: whose they are, and what they do.

A class may override them: it may edit the tokens, the mask or the positions of a step, or drop the cache. No recorded
forward shows that. Overrides that were read are taken, which a digest of their source tells. Of all others, those that
give the inputs of a token are asked for every token (``decode.loops.stand_in``), and the rest leave the call to stock
code.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import sys
import textwrap
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from transformers.generation import GenerationMixin

from .code import is_known_code, name_of

_INPUTS, _ARGUMENTS = "prepare_inputs_for_generation", "_update_model_kwargs_for_generation"
#: what ``GenerationMixin._sample`` calls of the model; our loop calls none of it for a token
_TOKEN_METHODS = (_INPUTS, _ARGUMENTS, "_prefill", "_optimize_model_for_decode", "_has_unfinished_sequences")

#: where decorators are that pass arguments on under newer names, or look at them
_DECORATORS = ("transformers.utils.deprecation", "transformers.utils.generic")

#: overrides of ``prepare_inputs_for_generation`` that give a token behind the prompt what transformers' own gives it,
#: or what the first such token was given (which ``decode.loops.multimodal`` asks): class -> digests, oldest version
#: first. Remove a digest when the last version with that source is not supported.
_SAME_INPUTS: dict[str, tuple[str, ...]] = {
    "BambaForCausalLM": ("dcbb5e7989623417",),
    "BlipTextLMHeadModel": ("9a2037e8fbf24604", "c7f2f32045cd135c"),
    "BloomForCausalLM": ("d087fbaba7997f99",),
    "CTRLLMHeadModel": ("9d9391fdc4ec4832", "e48fd6d9471f8a36"),
    "CanaryForConditionalGeneration": ("b0f3c354ca65c32f",),
    "CohereAsrForConditionalGeneration": ("b0f3c354ca65c32f",),
    "DiaGenerationMixin": ("c4c30c2f7efbce6f",),
    "Ernie4_5_VLMoeForConditionalGeneration": ("6d059e57b637d864",),
    "Exaone4_5_ForConditionalGeneration": ("3e1a13c49a9d45d6",),
    "FalconH1ForCausalLM": ("dcbb5e7989623417",),
    "FalconMambaForCausalLM": ("3b14fd9b24bcda46", "ecd4b55e24f9ff50"),
    "Gemma3ForConditionalGeneration": ("d9d24290979ed622", "3cabc8383abe2b79"),
    "Gemma4ForConditionalGeneration": ("99c20f99166bee67", "65fe147ec7825653"),
    "Gemma4UnifiedForConditionalGeneration": ("1fc05ad2ad013b68", "775617307581401c"),
    "GlmImageForConditionalGeneration": ("3e1a13c49a9d45d6",),
    "HunYuanVLForConditionalGeneration": ("f177ce762334194f",),
    "HyperCLOVAXVisionV2ForConditionalGeneration": ("3e1a13c49a9d45d6",),
    "InklingForConditionalGeneration": ("f6d2350f90b5fa4e", "8fab4d263a5254b3"),
    "Kosmos2TextForCausalLM": ("b91bde903d6bdd47", "0f12e91aa82de559", "06081b401788677d"),
    "Kosmos2_5ForConditionalGeneration": ("2d399a55bc7ce0f6", "46a3e6c3618acee1"),
    "Kosmos2_5TextForCausalLM": ("7475409713082153", "b6baf1d50657ffb3"),
    "Mamba2ForCausalLM": ("3b14fd9b24bcda46", "ecd4b55e24f9ff50"),
    "MambaForCausalLM": ("3b14fd9b24bcda46", "ecd4b55e24f9ff50"),
    "MiniCPMOcrForConditionalGeneration": ("a69d7fbe47d2080f", "08badea30e339a28"),
    "MiniCPMV4_6ForConditionalGeneration": ("a69d7fbe47d2080f", "08badea30e339a28"),
    "MiniCPMV4_7ForConditionalGeneration": ("a69d7fbe47d2080f", "08badea30e339a28"),
    "MllamaForConditionalGeneration": ("096ad86f7361a623", "1c166188360b94aa", "da8f0dfa2cece73e"),
    "Molmo2ForConditionalGeneration": ("887af8da5f8af54c",),
    "NemotronHForCausalLM": ("dcbb5e7989623417",),
    "PaliGemmaForConditionalGeneration": ("64393087399633c3",),
    "RoCBertForCausalLM": ("77a7895677d0e019", "01ef9360ef22339b"),
    "VibeVoiceAsrForConditionalGeneration": ("3507c9f6957939ab", "33dafb44198a422f", "68d5f992341b48d2"),
    "WhisperForConditionalGeneration": ("cba7c83a6bb0997e", "79e84c9bfd87e858"),
    "Zamba2ForCausalLM": ("dcbb5e7989623417",),
    "ZambaForCausalLM": ("dcbb5e7989623417",),
}
#: overrides of ``_update_model_kwargs_for_generation`` that change no argument which a token of text is given
_SAME_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "MllamaForConditionalGeneration": ("b338a8b68e912fe0",),
    "PaliGemmaForConditionalGeneration": ("baa96666fc993af6",),
}
#: overrides that drop the cache once the text is longer than ``original_max_position_embeddings``, if the cache does
#: not hold as many positions yet, and then give the forward the newest token alone
_FORGETTING: dict[str, tuple[str, ...]] = {
    "Phi3ForCausalLM": ("f219e92cf205fd0a",),
    "Phi4MultimodalForCausalLM": ("148f8014814f3441", "d81cd1e78cbeb15b"),
    "PhimoeForCausalLM": ("f219e92cf205fd0a",),
}
#: overrides that drop the cache in the same way, and then give the forward all tokens again
_READING_AGAIN: dict[str, tuple[str, ...]] = {
    "Phi3ForCausalLM": ("3a4ead37b70764a3", "84b94a5866b92c92"),
    "PhimoeForCausalLM": ("3a4ead37b70764a3", "84b94a5866b92c92"),
}


def overridden_method(model: Any, home: str) -> str | None:
    """Return a method that code which was not looked at has put between ``generate()`` and the forward, and which
    cannot be asked for every token; or None.

    Args:
        home: module of the model's architecture.

    Returns:
        The method's name, and where it is defined.
    """
    names = (name for name in _TOKEN_METHODS if name != _INPUTS)
    return next(filter(None, (_not_looked_at(model, home, name) for name in names)), None)


def overridden_inputs(model: Any, home: str) -> str | None:
    """Do as :func:`overridden_method` for the method that gives the inputs of a token, which can be asked."""
    return _not_looked_at(model, home, _INPUTS)


def inputs_method(model: Any) -> Any:
    """Return a model's ``prepare_inputs_for_generation``, or where code that was not looked at overrides it the one
    that is behind: such code may count its calls, so that only ``generate()`` calls it. None if there is none."""
    for base in type(model).__mro__:
        function = vars(base).get(_INPUTS)
        if function is not None and (base is GenerationMixin or _is_looked_at(function, _INPUTS)):
            return function.__get__(model)
    return getattr(model, _INPUTS, None)


def set_known_inputs(twin: Any) -> None:
    """Let a twin's :func:`inputs_method` take the place of an override that nobody has looked at."""
    if getattr(found := inputs_method(twin), "__func__", None) is not getattr(type(twin), _INPUTS, None):
        setattr(twin, _INPUTS, found)


def _not_looked_at(model: Any, home: str, name: str) -> str | None:
    of_class, of_instance = getattr(type(model), name, None), vars(model).get(name)
    if not is_known_code(_inside_contextmanager(of_class), home):
        return f"{name} is {name_of(of_class)}"
    # PEFT leaves the class's own method behind, bound to the instance; that is no other code
    if of_instance is not None and getattr(of_instance, "__func__", None) is not of_class:
        return f"{name} is {name_of(of_instance)}"
    for function in _overrides(type(model), name):
        if not _is_looked_at(function, name):
            return f"{name} is {name_of(_bare(function))}, which may give a token other inputs"
    return None


def _inside_contextmanager(function: Any) -> Any:
    """Return the generator that ``contextlib.contextmanager`` decorates, or ``function`` itself."""
    is_decorated = getattr(function, "__globals__", {}).get("__name__") == "contextlib"
    return getattr(function, "__wrapped__", function) if is_decorated else function


class CacheDrop(NamedTuple):
    """Where a method drops the cache.

    Attributes:
        length: the cache is dropped for a text that is longer, if the cache does not.
        is_read_again: whether the forward is then given all tokens instead of the newest one.
        method: the method and where it is defined.
    """

    length: int
    is_read_again: bool
    method: str


def cache_drop(model: Any) -> CacheDrop | None:
    """Return where a model's ``prepare_inputs_for_generation`` drops the cache; None if it never does."""
    length = getattr(model.config, "original_max_position_embeddings", None)
    if not isinstance(length, int):
        return None
    for function in _overrides(type(model), _INPUTS):
        for is_read_again, table in ((False, _FORGETTING), (True, _READING_AGAIN)):
            if _is_in(function, table):
                return CacheDrop(length, is_read_again, f"{_INPUTS} is {name_of(_bare(function))}")
    return None


def _overrides(cls: type, name: str) -> Iterator[Any]:
    """Yield what classes in front of ``GenerationMixin`` have under the name of a method."""
    for base in cls.__mro__:
        if base is GenerationMixin:
            return
        if name in vars(base):
            yield vars(base)[name]


def _is_looked_at(function: Any, name: str) -> bool:
    if name == _ARGUMENTS:
        return _is_in(function, _SAME_ARGUMENTS)
    return name == _INPUTS and any(_is_in(function, each) for each in (_SAME_INPUTS, _FORGETTING, _READING_AGAIN))


def _is_in(function: Any, table: dict[str, tuple[str, ...]]) -> bool:
    owner = getattr(function, "__qualname__", "").partition(".")[0]
    return owner in table and digest_of(function) in table[owner]


def _bare(function: Any) -> Any:
    """Return what the decorators of transformers that look at arguments have wrapped."""
    while getattr(function, "__globals__", {}).get("__name__") in _DECORATORS:
        function = getattr(function, "__wrapped__", None)
    return function


def digest_of(function: Any) -> str | None:
    """Return a digest of what a method does, whatever its annotations and comments are; None if that is not known, as
    there is no source, or another one than that of the code which runs."""
    function = _bare(function)
    return _digest(function, function.__code__) if isinstance(function, types.FunctionType) else None


@functools.cache
def _digest(function: types.FunctionType, code: types.CodeType) -> str | None:
    try:
        loader = sys.modules[function.__module__].__spec__.loader
        of_file = _code_named(loader.get_code(function.__module__), *function.__qualname__.split("."))
        (found,) = ast.parse(textwrap.dedent("".join(inspect.getsourcelines(code)[0]))).body
    except (AttributeError, ImportError, KeyError, OSError, SyntaxError, ValueError):
        return None
    return digest_of_source(found) if isinstance(found, ast.FunctionDef) and of_file == code else None


def digest_of_source(method: ast.FunctionDef) -> str:
    """Return what :func:`digest_of` returns of a method with this source, whose annotations are taken out."""
    given = method.args
    for each in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg):
        if each is not None:
            each.annotation = None
    method.returns, method.decorator_list = None, []
    if ast.get_docstring(method) is not None:
        method.body = method.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.unparse(method).encode()).hexdigest()[:16]


def _code_named(code: types.CodeType | None, *names: str) -> types.CodeType | None:
    """Return the code of the class or function with these names inside other code."""
    for name in names:
        inside = () if code is None else code.co_consts
        code = next((each for each in inside if isinstance(each, types.CodeType) and each.co_name == name), None)
    return code
