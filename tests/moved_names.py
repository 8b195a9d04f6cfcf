"""Newer releases of transformers, simulated: ``python tests/moved_names.py`` prints what becomes of a model for each
name that this package takes from transformers and that has moved, and for each method that has got another argument.

Each case is a process of its own, forked from one that has imported transformers and not this package.
"""

from __future__ import annotations

import ast
import builtins
import gc
import importlib
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import transformers.generation
import transformers.masking_utils
import transformers.quantizers.auto  # noqa: F401
from transformers import BartConfig, BartForConditionalGeneration, LlamaConfig, LlamaForCausalLM
from transformers.generation import GenerationMixin

COMPAT = Path(__file__).resolve().parents[1] / "hf_fastpath" / "compat"
AT_ONCE = ("DynamicCache.update", "GenerationMixin.prepare_inputs_for_generation", "_speculative_sampling")
GREEDY = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)
WAYS = (GREEDY, GREEDY | dict(num_beams=2), GREEDY | dict(prompt_lookup_num_tokens=2))


def imported() -> Iterator[tuple[str, str]]:
    """Yield module and name of what files of ``compat`` import from transformers when they are imported."""
    found = set()
    for path in sorted(COMPAT.glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "transformers":
                found |= {(node.module, each.name) for each in node.names}
    yield from sorted(found)


def without_import(module: str, name: str) -> None:
    """Let files of this package not find a name in a module; transformers' own files find it."""
    real = builtins.__import__

    def other(wanted, space=None, local=None, names=(), level=0):
        if wanted == module and name in (names or ()) and (space or {}).get("__name__", "").startswith("hf_fastpath"):
            raise ImportError(f"cannot import name {name!r} from {module!r}")
        return real(wanted, space, local, names, level)

    builtins.__import__ = other


def without_attribute(module: str, name: str) -> None:
    """Take an attribute out of a module, or out of a class in it."""
    *parents, last = name.split(".")
    space = importlib.import_module(module)
    for parent in parents:
        space = getattr(space, parent)
    for base in getattr(space, "__mro__", [space]):
        if last in vars(base):
            try:
                delattr(base, last)
            except (AttributeError, TypeError):  # a member of an enumeration
                type.__setattr__(base, "_member_map_", {})
                type.__delattr__(base, last)


def grown(name: str, place: int) -> None:
    """Give a method of GenerationMixin another argument at a place; behind it, each has a default."""
    inner = getattr(GenerationMixin, name)
    given = list(inspect.signature(inner).parameters.values())
    kind, empty = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    behind = [
        each.replace(default=None) if each.kind is kind and each.default is empty else each for each in given[place:]
    ]
    signature = inspect.Signature([*given[:place], inspect.Parameter("grown", kind, default=None), *behind])
    names = [each.name for each in given]

    def method(self, *args, **kwargs):
        if not sys._getframe(1).f_globals["__name__"].startswith("hf_fastpath"):  # a release changes its own calls
            return inner(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs).arguments
        assert bound.pop("grown", None) is None, f"{name}() was given something in the place of another argument"
        rest = bound.pop(names[-1], {}) if given[-1].kind is inspect.Parameter.VAR_KEYWORD else {}
        del bound["self"]
        return inner(self, **bound, **rest)

    method.__signature__, method.__name__, method.__qualname__ = signature, name, inner.__qualname__
    method.__module__ = inner.__module__
    globals()["__name__"] = inner.__module__  # so that the method counts as the release's own
    setattr(GenerationMixin, name, method)


def models() -> dict[str, tuple]:
    """Return two models by name, with a prompt and what stock generates in each way."""
    torch.manual_seed(0)
    sizes = dict(d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=32, decoder_ffn_dim=32)
    sizes |= dict(encoder_attention_heads=2, decoder_attention_heads=2, vocab_size=64, max_position_embeddings=64)
    bart = BartForConditionalGeneration(BartConfig(**sizes, forced_eos_token_id=None)).eval()
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
    found = {"llama": LlamaForCausalLM(LlamaConfig(**sizes, eos_token_id=None)).eval(), "bart": bart}
    ids = torch.randint(3, 60, (1, 9)).repeat(1, 2)
    return {name: (model, ids, [tokens_of(model, ids, way) for way in WAYS]) for name, model in found.items()}


def tokens_of(model, ids: torch.Tensor, way: dict) -> list[int]:
    return model.generate(ids, **way)[0].tolist()


def outcome(model, ids: torch.Tensor, expected: list, ways: int) -> str:
    """Patch a model and let it generate; return "right", or what ``patch()`` says."""
    import hf_fastpath

    try:
        hf_fastpath.patch(model, quiet=True)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    found = [tokens_of(model, ids, way) for way in WAYS[:ways]]
    return "right" if found == expected[:ways] else f"{found} instead of {expected[:ways]}"


def in_a_fork(case: Callable[[], str]) -> str:
    """Return what a function returns, in a process of its own."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = case()
        except BaseException:
            said = traceback.format_exc()[-1500:]
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with open(read) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


def main() -> None:
    torch.set_num_threads(1)
    known = models()
    gc.collect()
    gc.freeze()  # so that no fork copies, page by page, what its collections would look at
    spec = importlib.util.spec_from_file_location("required", COMPAT / "required.py")
    required = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(required)

    def tried(change: Callable[[], None], name: str, ways: int) -> str:
        return in_a_fork(lambda: (change(), outcome(*known[name], ways))[1])

    found = {}
    for module, name in imported():
        found[f"import {module} {name}"] = tried(lambda m=module, n=name: without_import(m, n), "llama", 1)
    for name in required._ARGUMENTS:
        short = name.rpartition(".")[2]
        if short == "_prepare_cache_for_generation":  # which transformers alone calls, and by places
            continue
        arguments = list(inspect.signature(getattr(GenerationMixin, short)).parameters)
        place = arguments.index("streamer") if "streamer" in arguments else 2
        model = "bart" if short == "_assisted_decoding" else "llama"
        found[f"argument {place} {name}"] = tried(lambda s=short, p=place: grown(s, p), model, len(WAYS))
    # names that are looked up when this package is imported, then those that are looked up later
    names = [(module, name) for module, all_ in required._NAMES.items() for name in all_ if module != "transformers"]
    for module, name in sorted(names, key=lambda each: each[1] not in AT_ONCE):
        if name not in AT_ONCE:
            import hf_fastpath.patching.api  # noqa: F401
        found[f"attribute {module} {name}"] = tried(lambda m=module, n=name: without_attribute(m, n), "llama", 1)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
