"""Families without an architecture file that compute what a listed one computes, found by their source.

transformers generates many models from one another, so that the code of their forwards is the same but for the names
of classes. Such a model is patched like its twin, and only if everything that our code stands in for is the same:
every method of the causal LM, decoder, layer, attention, MLP and norm classes, the forward of the rotary embedding, and
every function these use. patch() then runs the self-test besides.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import logging
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from types import FunctionType
from typing import Any

from torch import nn

from .architecture import Architecture, architectures
from .errors import UnsupportedModelError

#: methods that decide on weights and attributes, which are read from the model itself
_NOT_COMPARED = ("__init__", "_init_weights")


@dataclass(frozen=True)
class Match:
    """The listed architecture that a model is most like.

    Attributes:
        like: its name.
        differences: what of it the model lacks or does otherwise; none if it is a twin.
        architecture: the model's own, or None.
    """

    like: str
    differences: tuple[str, ...]
    architecture: Architecture | None

    def __str__(self) -> str:
        return f"Most like {self.like}, but: {'; '.join(self.differences)}."


def known_for(model: nn.Module, listed: tuple[Architecture, ...]) -> tuple[Architecture, ...]:
    """``listed``; or the model's own architecture, if none of their classes is in it and its structure is theirs."""
    if any(architecture.part_of(module) for module in model.modules() for architecture in listed):
        return listed
    found = match(model)
    return listed if found is None or found.architecture is None else (found.architecture,)


def match(model: nn.Module) -> Match | None:
    """The listed architecture that ``model``, a causal LM, is most like; None if it is like none at all."""
    found = [_compare(architecture, model) for architecture in architectures()]
    known = [result for result in found if result is not None]
    return min(known, key=lambda result: len(result.differences), default=None)


def _compare(architecture: Architecture, model: nn.Module) -> Match | None:
    try:
        architecture.check_classes()
    except UnsupportedModelError:  # not in this version of transformers
        return None
    decoder = getattr(model, architecture.base, None)
    layers = getattr(decoder, architecture.layers, None)
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        return None
    known, ours = _classes(architecture), _classes_of(architecture, model)
    missing = [f"{path} is missing" for path, cls in ours.items() if cls is None]
    homes = {cls.__module__ for cls in ours.values() if cls not in (None, nn.LayerNorm)}
    if len(homes) > 1:
        missing.append(f"its classes are in several modules, {', '.join(sorted(homes))}")
    inner = architecture.layer.attention, architecture.layer.mlp
    kinds = {(type(layer), *(type(getattr(layer, name, None)) for name in inner)) for layer in layers}
    if len(kinds) > 1:
        missing.append("its layers are of several kinds")
    if missing:
        return Match(architecture.name, tuple(missing), None)
    pairs = {known[role]: cls for role, cls in ours.items()}
    comparison = _Comparison(pairs)
    for role, cls in ours.items():
        if role == _path(architecture, "rotary"):
            comparison.functions(f"{cls.__name__}.forward", known[role].forward, cls.forward)
        else:
            comparison.classes(known[role], cls)
    differences = tuple(dict.fromkeys(comparison.differences))
    return Match(architecture.name, differences, None if differences else _twin(architecture, model, pairs, known))


def _path(architecture: Architecture, role: str) -> str:
    """Where a role is inside the causal LM."""
    layer = f"{architecture.base}.{architecture.layers}.0"
    inner = {"attention": architecture.layer.attention, "mlp": architecture.layer.mlp}
    if role in inner:
        return f"{layer}.{inner[role]}"
    if role == "norm":
        return f"{layer}.{architecture.layer.attention_norm}"
    return {"causal_lm": "", "base": architecture.base, "layer": layer}.get(
        role, f"{architecture.base}.{architecture.rotary}"
    )


def _classes_of(architecture: Architecture, model: nn.Module) -> dict[str, type | None]:
    """The classes that play the roles in ``model``, by path; None where there is no module."""
    modules = dict(model.named_modules())
    paths = [_path(architecture, role) for role in _roles(architecture)]
    return {path: type(modules[path]) if path in modules else None for path in paths}


def _roles(architecture: Architecture) -> tuple[str, ...]:
    common = ("causal_lm", "base", "layer", "attention", "mlp", "norm")
    return common if architecture.rotary is None else (*common, "rotary")


@cache
def _classes(architecture: Architecture) -> dict[str, type]:
    """The listed family's classes, by the same paths."""
    module = importlib.import_module(architecture.module)
    causal_lm = getattr(module, architecture.causal_lm)
    base = _assigned_class(causal_lm, architecture.base)
    roles = {
        "causal_lm": causal_lm,
        "base": base,
        "layer": getattr(module, architecture.layer.class_name),
        "attention": getattr(module, architecture.attention.class_name),
        "mlp": getattr(module, architecture.mlp.class_name),
        "norm": nn.LayerNorm if architecture.norm.kind == "layer" else getattr(module, architecture.norm.class_name),
    }
    if architecture.rotary is not None:
        roles["rotary"] = _assigned_class(base, architecture.rotary)
    return {_path(architecture, role): cls for role, cls in roles.items()}


def _assigned_class(cls: type, attribute: str) -> type:
    """The class that ``cls.__init__`` makes ``self.<attribute>`` of."""
    for node in ast.walk(_tree(cls.__init__)):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name):
            target = node.targets[0]
            if isinstance(target, ast.Attribute) and target.attr == attribute:
                return cls.__init__.__globals__[node.value.func.id]
    raise UnsupportedModelError(f"{cls.__name__}.__init__ makes no {attribute!r}")


def _twin(
    architecture: Architecture, model: nn.Module, pairs: dict[type, type], known: dict[str, type]
) -> Architecture:
    """``architecture`` with the names of ``model``'s classes."""

    def name(role: str) -> str:
        return pairs[known[_path(architecture, role)]].__name__

    return replace(
        architecture,
        name=getattr(model.config, "model_type", type(model).__name__),
        like=architecture.name,
        module=type(model).__module__,
        causal_lm=type(model).__name__,
        layer=replace(architecture.layer, class_name=name("layer")),
        attention=replace(architecture.attention, class_name=name("attention")),
        mlp=replace(architecture.mlp, class_name=name("mlp")),
        norm=replace(architecture.norm, class_name=name("norm")),
    )


# ---- sources ----------------------------------------------------------------------------------------------------


class _Comparison:
    """Compares functions and classes of two models; notes what differs.

    Args:
        pairs: class of the listed model -> the class that plays its role in the other.
    """

    def __init__(self, pairs: dict[type, type]):
        self.pairs = pairs
        self.differences: list[str] = []
        self._seen: set[tuple] = set()

    def classes(self, known: type, found: type) -> None:
        """Every method, those of base classes included."""
        if len(known.__mro__) != len(found.__mro__):
            self.differences.append(f"{found.__name__} has other base classes than {known.__name__}")
            return
        for one, other in zip(known.__mro__, found.__mro__):
            if one is other:
                continue
            methods = dict(_methods(one)), dict(_methods(other))
            for name in dict.fromkeys((*methods[0], *methods[1])):
                if name not in methods[0] or name not in methods[1]:
                    where = other if name in methods[1] else one
                    self.differences.append(f"only {where.__name__} has {name}()")
                else:
                    self.functions(f"{other.__name__}.{name}", methods[0][name], methods[1][name])

    def functions(self, what: str, known: Callable, found: Callable) -> None:
        """The source of both, and all that it refers to."""
        known, found = inspect.unwrap(known), inspect.unwrap(found)
        if known is found or (known, found) in self._seen:
            return
        self._seen.add((known, found))
        one, other = _normal_source(known), _normal_source(found)
        if one is None or one != other:
            self.differences.append(f"{what} is not as {known.__qualname__}")
            return
        for name in sorted(_names(known)):
            self._globals(what, name, known.__globals__.get(name), found.__globals__.get(name))

    def _globals(self, what: str, name: str, known: Any, found: Any) -> None:
        if known is found or (isinstance(known, type) and self.pairs.get(known) is found):
            return
        if isinstance(known, logging.Logger) and isinstance(found, logging.Logger):
            return
        if isinstance(known, FunctionType) and isinstance(found, FunctionType):
            self.functions(f"{name}() of {found.__module__}", known, found)
        elif type(known) is not type(found) or known != found:
            self.differences.append(f"{what} uses another {name}")


def _methods(cls: type) -> Iterator[tuple[str, Callable]]:
    for name, value in vars(cls).items():
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if isinstance(inspect.unwrap(function) if callable(function) else None, FunctionType):
            if name not in _NOT_COMPARED:
                yield name, function


@cache
def _tree(function: Callable) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))


@cache
def _normal_source(function: Callable) -> str | None:
    """The function as a string without docstring, annotations and comments; None if there is no source."""
    try:
        tree = ast.parse(ast.unparse(_tree(function)))
    except (OSError, TypeError, SyntaxError):
        return None
    return ast.dump(_Normalize().visit(tree))


class _Normalize(ast.NodeTransformer):
    """Takes out what does not compute."""

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
    """Global names that the function refers to."""
    tree = _Normalize().visit(ast.parse(ast.unparse(_tree(function))))
    loaded = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return frozenset(name for name in loaded if name in function.__globals__ and not hasattr(builtins, name))
