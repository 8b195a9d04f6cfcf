"""Families without an architecture file that compute what a listed family computes, found by comparing their source.

transformers generates many models from one another, so that the code of their forwards differs only in the names of
classes. Such a model is patched like its twin, but only if everything that our code replaces is the same: every method
of the causal LM, decoder, layer, attention, MLP and norm classes, the forward of the rotary embedding, and every
function that these use. patch() then also runs the self-test.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import importlib
import inspect
import itertools
import json
import logging
import re
import textwrap
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from types import FunctionType
from typing import Any

from torch import nn

from . import compat
from .architecture import Architecture, architectures
from .errors import UnsupportedModelError
from .known_code import classes_of, code_of, read_note, versions, write_note
from .native import build_cache
from .native.toolchain import BuildError

#: methods that decide on weights and attributes; these are read from the model itself
_NOT_COMPARED = ("__init__", "_init_weights")


#: number of differences that an error names
_SHOWN = 6
#: what a note in the cache folder says of a model that is no twin, and its most bytes
_NONE, _MOST_BYTES = "-", 256


@dataclass(frozen=True)
class Match:
    """The listed architecture that a model is most like.

    Attributes:
        like: name of the listed architecture.
        differences: what the model lacks of it or does in another way; empty if the model is a twin.
        architecture: the model's own architecture, or None.
    """

    like: str
    differences: tuple[str, ...]
    architecture: Architecture | None

    def __str__(self) -> str:
        shown = "; ".join(self.differences[:_SHOWN])
        more = len(self.differences) - _SHOWN
        return f"Most like {self.like}, but: {shown}{f'; and {more} more' if more > 0 else ''}."


def known_for(model: nn.Module, listed: tuple[Architecture, ...]) -> tuple[Architecture, ...]:
    """Return ``listed``; or the model's own architecture if it has none of their classes and is a twin of one."""
    if any(architecture.part_of(module) for module in model.modules() for architecture in listed):
        return listed
    path, like = None, None
    if (code := code_of(model)) is not None:
        names = [f"{each.__module__}.{each.__qualname__}" for each in classes_of(model)]
        key = hashlib.sha256(json.dumps([versions(), names, code]).encode()).hexdigest()[:32]
        with suppress(BuildError):
            path = build_cache.root() / build_cache.FAMILIES / key
    if path is not None:
        with suppress(OSError, ValueError):
            like = read_note(path, _MOST_BYTES)
            build_cache.used(path)
    if like == _NONE:
        return listed
    found = next((each for each in _compared(model, 1, like) if each.architecture is not None), None)
    if path is not None and like is None:
        with suppress(OSError, BuildError):
            write_note(path, _NONE if found is None else found.like)
    return listed if found is None or found.architecture is None else (found.architecture,)


def match(model: nn.Module) -> Match | None:
    """Return the listed architecture that ``model``, a causal LM, is most like; None if it is like none at all."""
    return min(_compared(model), key=lambda result: len(result.differences), default=None)


def _compared(model: nn.Module, most: int | None = None, like: str | None = None) -> Iterator[Match]:
    """Compare ``model`` with each listed architecture whose layers are where the model's are.

    Args:
        most: number of differences after which a comparison ends, since sources take long to read; None for all.
        like: name of the only one to compare with, or None.
    """
    modules = dict(model.named_modules())
    for architecture in architectures():
        if like not in (None, architecture.name):
            continue
        layers = modules.get(f"{architecture.base}.{architecture.layers}")
        if not isinstance(layers, nn.ModuleList) or not len(layers):
            continue
        if most is not None and not _has_parts_of(layers[0], architecture):
            continue  # and the family's code, which takes long to import, is not needed to tell
        classes = {path: type(modules[path]) for path in _paths(architecture).values() if path in modules}
        try:
            found = _differences(architecture, classes, layers)
            differences = tuple(itertools.islice(dict.fromkeys(found) if most is None else found, most))
        except UnsupportedModelError:  # this version of transformers lacks the family
            continue
        yield Match(architecture.name, differences, None if differences else _twin(architecture, model, classes))


def _has_parts_of(layer: nn.Module, architecture: Architecture) -> bool:
    """Whether the modules in a layer and its attention are those that the architecture has, by their names."""
    declared, attention = architecture.layer, architecture.attention
    norms = declared.attention_norm, declared.mlp_norm, declared.attention_post_norm, declared.mlp_post_norm
    blocks = {declared.attention, declared.mlp} - {None}
    others = {name for names in norms if names for name in ((names,) if isinstance(names, str) else names)}
    inside = {name for name, _ in layer.named_children()}
    # a layer without a module for its MLP has the MLP's modules, which have any names
    if not blocks <= inside or (declared.mlp is not None and not inside <= blocks | others | set(declared.dropouts)):
        return False
    inner = {name for name, _ in getattr(layer, declared.attention).named_children()}
    return {*attention.qkv, attention.out, *(attention.head_norms or ())} <= inner


def _differences(architecture: Architecture, classes: dict[str, type], layers: nn.ModuleList) -> Iterator[str]:
    """Yield what a model lacks of an architecture or does in another way.

    Args:
        classes: the model's, by the paths of the architecture's roles.
        layers: the model's.

    Raises:
        UnsupportedModelError: the installed transformers lacks the architecture.
    """
    yield from (f"{path} is missing" for path in _paths(architecture).values() if path not in classes)
    homes = {cls.__module__ for cls in classes.values() if not cls.__module__.startswith("torch.")}
    if len(homes) > 1:
        yield f"its classes are in several modules, {', '.join(sorted(homes))}"
    inner = [name for name in (architecture.layer.attention, architecture.layer.mlp) if name is not None]
    if len({(type(layer), *(type(getattr(layer, name, None)) for name in inner)) for layer in layers}) > 1:
        yield "its layers are of several kinds"
    known = _classes(architecture)
    comparison = _Comparison({known[path]: cls for path, cls in classes.items()})
    for path, cls in classes.items():
        if path == _path(architecture, "rotary"):
            yield from comparison.functions(f"{cls.__name__}.forward", known[path].forward, cls.forward)
        else:
            yield from comparison.classes(known[path], cls)


def _path(architecture: Architecture, role: str) -> str | None:
    """Return where a role is inside the causal LM; None if the architecture does not have the role."""
    base, layer = architecture.base, architecture.layer
    if role == "linear" and architecture.linear is not None:
        return ".".join(filter(None, (base, architecture.layers, "0", layer.mlp, architecture.mlp.up)))
    if role in _MOE_ROLES and architecture.moe is not None:
        return f"{base}.{architecture.layers}.0.{layer.mlp}.{getattr(architecture.moe, role)}"
    if role in ("linear", *_MOE_ROLES):
        return None
    if role in ("attention", "mlp"):
        name = getattr(layer, role)
        return None if name is None else f"{base}.{architecture.layers}.0.{name}"
    if role in ("embedding", "position_embedding", "rotary"):
        name = getattr(architecture, role)
        return None if name is None else f"{base}.{name}"
    outer = {"causal_lm": "", "base": base, "layer": f"{base}.{architecture.layers}.0"}
    return outer.get(role, f"{base}.{architecture.final_norm}")


_PARTS = ("layer", "attention", "mlp", "norm")
_MOE_ROLES = ("router", "experts")
_ROLES = ("causal_lm", "base", "embedding", "position_embedding", "rotary", "linear", *_MOE_ROLES, *_PARTS)


def _paths(architecture: Architecture) -> dict[str, str]:
    """Return where the architecture's roles are inside the causal LM."""
    found = {role: _path(architecture, role) for role in _ROLES}
    return {role: path for role, path in found.items() if path is not None}


@cache
def _classes(architecture: Architecture) -> dict[str, type]:
    """Return the listed family's classes by their paths.

    Raises:
        UnsupportedModelError: the installed transformers lacks a class.
    """
    architecture.check_classes()
    module = importlib.import_module(architecture.module)
    causal_lm = base = getattr(module, architecture.causal_lm)
    for name in architecture.base.split("."):
        base = _assigned_class(base, name)
    found = {}
    for role, path in _paths(architecture).items():
        if role in ("causal_lm", "base"):
            found[path] = causal_lm if role == "causal_lm" else base
        elif role == "linear":
            found[path] = getattr(module, architecture.linear)
        elif role in _MOE_ROLES:
            found[path] = getattr(module, getattr(architecture.moe, f"{role}_class"))
        elif role in _PARTS:
            name = getattr(architecture, role).class_name
            found[path] = nn.LayerNorm if name == "LayerNorm" else getattr(module, name)
        else:
            found[path] = _assigned_class(base, getattr(architecture, role))
    return found


def _assigned_class(cls: type, attribute: str) -> type:
    """Return the class of which ``cls.__init__`` makes ``self.<attribute>``."""
    for node in ast.walk(_tree(cls.__init__)):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            target, names = node.targets[0], ast.unparse(node.value.func).split(".")
            if isinstance(target, ast.Attribute) and target.attr == attribute and names[0] in cls.__init__.__globals__:
                found = cls.__init__.__globals__[names[0]]
                for name in names[1:]:
                    found = getattr(found, name)
                return found
    raise UnsupportedModelError(f"{cls.__name__}.__init__ makes no {attribute!r}")


def _twin(architecture: Architecture, model: nn.Module, classes: dict[str, type]) -> Architecture:
    """Return ``architecture`` with the names of ``model``'s classes, which are given by their paths."""
    names_of = {role: classes[path].__name__ for role, path in _paths(architecture).items()}

    def part(role: str) -> Any:
        declared = getattr(architecture, role)
        return replace(declared, class_name=names_of[role]) if role in names_of else declared

    mlp = part("mlp")
    if architecture.moe is not None:
        names = {f"{role}_class": names_of[role] for role in _MOE_ROLES}
        is_listed = type(model).__module__ == architecture.module
        # the dense MLP of another family was not compared
        mlp = replace(mlp, **names, dense=mlp.dense if is_listed else None)
    return replace(
        architecture,
        name=getattr(model.config, "model_type", type(model).__name__),
        like=architecture.name,
        module=type(model).__module__,
        causal_lm=type(model).__name__,
        layer=part("layer"),
        attention=part("attention"),
        mlp=mlp,
        norm=part("norm"),
        linear=names_of.get("linear"),
    )


# ---- sources ----------------------------------------------------------------------------------------------------


class _Comparison:
    """Compares functions and classes of two models, and yields the differences.

    Args:
        pairs: class of the listed model -> the class in the same role of the other model.
    """

    def __init__(self, pairs: dict[type, type]):
        self.pairs = pairs
        self.names = {known.__name__: found.__name__ for known, found in pairs.items()}
        self._seen: set[tuple] = set()

    def classes(self, known: type, found: type) -> Iterator[str]:
        """Compare every method, also those of base classes."""
        if len(known.__mro__) != len(found.__mro__):
            yield f"{found.__name__} has other base classes than {known.__name__}"
            return
        for one, other in zip(known.__mro__, found.__mro__):
            if one is other:
                continue
            methods = dict(_methods(one)), dict(_methods(other))
            for name in dict.fromkeys((*methods[0], *methods[1])):
                if name not in methods[0] or name not in methods[1]:
                    where = other if name in methods[1] else one
                    yield f"only {where.__name__} has {name}()"
                else:
                    yield from self.functions(f"{other.__name__}.{name}", methods[0][name], methods[1][name])

    def functions(self, what: str, known: Callable, found: Callable) -> Iterator[str]:
        """Compare the source of two functions, and everything that the source refers to."""
        known, found = inspect.unwrap(known), inspect.unwrap(found)
        if known is found or (known, found) in self._seen:
            return
        self._seen.add((known, found))
        one, other = _normal_source(known, tuple(self.names.items())), _normal_source(found)
        if one is None or one != other:
            yield f"{what} is not as {known.__qualname__}"
            return
        for name in sorted(_names(known)):
            yield from self._globals(
                what, name, known.__globals__.get(name), found.__globals__.get(self.names.get(name, name))
            )

    def _globals(self, what: str, name: str, known: Any, found: Any) -> Iterator[str]:
        if known is found or (isinstance(known, type) and self.pairs.get(known) is found):
            return
        if isinstance(known, logging.Logger) and isinstance(found, logging.Logger):
            return
        if isinstance(known, FunctionType) and isinstance(found, FunctionType):
            yield from self.functions(f"{name}() of {found.__module__}", known, found)
        elif type(known) is not type(found) or known != found:
            yield f"{what} uses another {name}"


def _methods(cls: type) -> Iterator[tuple[str, Callable]]:
    for name, value in vars(cls).items():
        function = compat.functions_of(value)[0]
        if isinstance(inspect.unwrap(function) if callable(function) else None, FunctionType):
            if name not in _NOT_COMPARED:
                yield name, function


@cache
def _tree(function: Callable) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))


@cache
def _normal_source(function: Callable, renamed: tuple[tuple[str, str], ...] = ()) -> str | None:
    """Return the function as a string without docstring, annotations and comments; None if there is no source.

    Args:
        renamed: pairs of a word, which may also be in strings, and the word that replaces it.
    """
    try:
        text = ast.unparse(_tree(function))
        for name, other in renamed:
            text = re.sub(rf"\b{name}\b", other, text)
        tree = ast.parse(text)
    except (OSError, TypeError, SyntaxError):
        return None
    return ast.dump(_Normalize().visit(tree))


class _Normalize(ast.NodeTransformer):
    """Removes what does not compute."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.returns = None
        node.name = "function"
        node.decorator_list = [d for d in node.decorator_list if "docstring" not in ast.unparse(d)]
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            node.body = node.body[1:] or [ast.Pass()]
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        if node.value is None:
            return None
        return ast.Assign(targets=[node.target], value=self.visit(node.value), lineno=0)


@cache
def _names(function: Callable) -> frozenset[str]:
    """Return the global names that the function refers to."""
    tree = _Normalize().visit(ast.parse(ast.unparse(_tree(function))))
    loaded = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return frozenset(name for name in loaded if name in function.__globals__ and not hasattr(builtins, name))
