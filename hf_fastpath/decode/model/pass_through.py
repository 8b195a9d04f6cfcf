"""Whether a forward that other code has put on a model only calls the class's forward when ``generate()`` calls it.

Trainers put such a forward there for their loss: called with labels, it computes the loss in its own way; called
without labels, it passes everything on. The forward's source is read for the arguments that ``generate()`` passes:
branches that these arguments decide are followed, and the only statement left has to be
``return inner(*args, **kwargs)``. Source that is not understood counts as doing something else. Nothing is called, so
that the reading has no effect on what a forward notes or counts.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from ... import compat

#: what a name stands for if its value is not known: an argument that generate() passes, and the module
_GIVEN, _SELF = object(), object()


class _Unknown(Exception):
    """The source does something that is not understood."""


def reason_of(forward: Any, module: nn.Module) -> str | None:
    """Decide whether ``generate()`` has to call ``forward``, the attribute of the instance ``module``.

    Returns:
        None if the forward does what the class's forward does; ``"autocast"`` if it does so under autocast;
        ``"model_forward"`` if it does anything else.
    """
    try:
        return "autocast" if _casts(forward, module, False) else None
    except _Unknown:
        return "model_forward"


def _casts(function: Any, module: nn.Module, has_self: bool) -> bool:
    """Whether there is an autocast between ``function`` and the forward of the class.

    Args:
        has_self: the function gets the module as its first argument.

    Raises:
        _Unknown: there may be more than an autocast between them.
    """
    if isinstance(function, MethodType):
        if function.__self__ is not module or has_self:
            raise _Unknown
        return _casts(function.__func__, module, True)
    if has_self and (compat.is_ours(function) or compat.is_wrapped_by(function, type(module).forward)):
        return False
    inner = compat.converted_to_float32(function)
    if inner is not None:
        return _casts(inner, module, has_self)
    inner = compat.run_under_autocast(function)
    if inner is not None:
        _casts(inner, module, has_self)
        return True
    if not isinstance(function, FunctionType):
        raise _Unknown
    inner, has_self = _Reading(function, has_self).returned_call()
    return _casts(inner, module, has_self)


class _Reading:
    """The source of a function, read for a call with the arguments that ``generate()`` passes.

    Args:
        function: a plain function.
        has_self: its first argument is the module.
    """

    def __init__(self, function: FunctionType, has_self: bool):
        self.function = function
        self.tree = _tree(function.__code__)
        self.names: dict[str, Any] = {}
        self.rest: tuple = (_SELF,) if has_self else ()  # the values of *args
        arguments = self.tree.args
        self.positional = None if arguments.vararg is None else arguments.vararg.arg
        self.named = None if arguments.kwarg is None else arguments.kwarg.arg
        for name, is_positional, default in _arguments(function):
            if self.rest and is_positional:
                self.names[name], self.rest = _SELF, ()
            elif name in compat.FORWARD_ARGUMENTS:
                self.names[name] = _GIVEN
            elif default is not inspect.Parameter.empty:
                self.names[name] = default
            else:  # a call without this argument fails
                raise _Unknown

    def returned_call(self) -> tuple[Any, bool]:
        """Return what the function calls in the end with all that was given, and whether it passes the module first.

        Raises:
            _Unknown: the function does anything else.
        """
        call = self._returned(self.tree.body)
        if not isinstance(call, ast.Call):
            raise _Unknown
        passed = tuple(value for argument in call.args for value in self._passed(argument))
        values = [keyword.value for keyword in call.keywords if self._hands_on(keyword)]
        names = [value.id for value in values if isinstance(value, ast.Name)]
        if len(names) != len(call.keywords) or len(set(names)) != len(names) or self.rest and not call.args:
            raise _Unknown
        due = {name for name, value in self.names.items() if value is _GIVEN} | {self.named} - {None}
        if not due <= set(names) or passed not in ((), (_SELF,)):
            raise _Unknown
        return self._outer(call.func), passed == (_SELF,)

    def _passed(self, argument: ast.expr) -> tuple:
        if isinstance(argument, ast.Starred) and isinstance(argument.value, ast.Name):
            if argument.value.id == self.positional:
                return self.rest
        elif isinstance(argument, ast.Name) and self.names.get(argument.id) is _SELF:
            return (_SELF,)
        raise _Unknown

    def _hands_on(self, keyword: ast.keyword) -> bool:
        """Whether the keyword is ``**kwargs``, or ``name=name`` for an argument that ``generate()`` passes."""
        if not isinstance(keyword.value, ast.Name):
            return False
        name = keyword.value.id
        return name == self.named if keyword.arg is None else name == keyword.arg and self.names.get(name) is _GIVEN

    def _returned(self, statements: list[ast.stmt]) -> ast.expr | None:
        """Return the value that the statements return, or None if no statement returns one."""
        for statement in statements:
            if isinstance(statement, ast.Return) and statement.value is not None:
                return statement.value
            if isinstance(statement, ast.If):
                found = self._returned(statement.body if self._holds(statement.test) else statement.orelse)
                if found is not None:
                    return found
            elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):  # a docstring
                continue
            elif not isinstance(statement, ast.Pass):
                raise _Unknown
        return None

    def _holds(self, test: ast.expr) -> bool:
        """Whether a condition holds: ``name``, ``name is None``, ``not``, ``and``, ``or`` of arguments not given."""
        if isinstance(test, ast.BoolOp):
            combine = all if isinstance(test.op, ast.And) else any
            return combine(self._holds(value) for value in test.values)
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return not self._holds(test.operand)
        if isinstance(test, ast.Name):
            return bool(self._value(test))
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.comparators[0], ast.Constant):
            left, right = self._value(test.left), test.comparators[0].value
            if right is None and isinstance(test.ops[0], (ast.Is, ast.IsNot)):
                return (left is None) == isinstance(test.ops[0], ast.Is)
        raise _Unknown

    def _value(self, name: ast.expr) -> Any:
        """Return the default of an argument that is not given: None, a truth value, a number or a string."""
        value = self.names.get(name.id, _GIVEN) if isinstance(name, ast.Name) else _GIVEN
        if value is None or type(value) in (bool, int, float, str):
            return value
        raise _Unknown

    def _outer(self, name: ast.expr) -> Any:
        """Return what a name means that is not local to the function."""
        function = self.function
        if not isinstance(name, ast.Name) or name.id in function.__code__.co_varnames:
            raise _Unknown
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
        try:
            return cells[name.id].cell_contents if name.id in cells else function.__globals__[name.id]
        except (KeyError, ValueError):
            raise _Unknown from None


def _arguments(function: FunctionType) -> Iterator[tuple[str, bool, Any]]:
    """Yield the name of each argument, whether it may be positional, and its default.

    ``inspect.signature`` would give the arguments of the function that this one wraps, or claims to wrap.
    """
    code, defaults = function.__code__, function.__defaults__ or ()
    names = code.co_varnames
    for place, name in enumerate(names[: code.co_argcount]):
        later = place - (code.co_argcount - len(defaults))
        yield name, True, defaults[later] if later >= 0 else inspect.Parameter.empty
    for name in names[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]:
        yield name, False, (function.__kwdefaults__ or {}).get(name, inspect.Parameter.empty)


@functools.lru_cache(maxsize=64)
def _tree(code: CodeType) -> ast.FunctionDef:
    """Return the source of a function; ``inspect.getsource(function)`` would give that of the function it wraps.

    Raises:
        _Unknown: there is no source, or it is not what runs (the file was edited since).
    """
    linecache.checkcache(code.co_filename)
    try:
        tree = ast.parse("".join(linecache.getlines(code.co_filename)))
    except SyntaxError:
        raise _Unknown from None
    if not any(made == code for made in _codes(compile(tree, code.co_filename, "exec", dont_inherit=True))):
        raise _Unknown
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            if min([node.lineno, *(line.lineno for line in node.decorator_list)]) == code.co_firstlineno:
                return node
    raise _Unknown


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield ``code`` and all code objects inside."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
