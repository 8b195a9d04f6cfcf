"""record(model): run a model's own forward for one step over tensors without data, and write down what it calls."""

from __future__ import annotations

import copy
import logging
import operator
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .. import compat
from ..choices import NormKind
from ..decode.modules import is_packed, weight_and_bias
from ..decode.named_calls import Call, Norm, Register, by_name
from ..decode.patched import STATE_KEY
from ..ops.decode_attention import MAX_QUERY_LEN
from ..ops.fused_experts import EXPERT_GATES
from ..quantization.linear import PackedLinear
from . import marks
from .recording import Recording, Span, Unrecordable

_aten = torch.ops.aten

#: tokens that the recorded step's cache says it holds, unless the model knows fewer positions
_PAST = 4099
#: entries of a config that may say how many positions there are
_LONGEST = ("max_position_embeddings", "max_target_positions", "n_positions", "n_ctx", "max_seq_len")
#: positions up to which a mask is compared with windows
_MASK_POSITIONS = 4096
#: calls that compute nothing
_NOTHING = frozenset(
    {_aten.detach.default, _aten.alias.default, _aten.lift_fresh.default, torch.ops.prim.device.default}
)
#: calls that draw random numbers
_RANDOM = ("dropout", "bernoulli", "rand", "normal_", "multinomial", "uniform_")

_recorder: ContextVar[Recorder] = ContextVar("recorder")


class Skeleton:
    """A copy of a model whose tensors hold no data: recording runs it, and leaves the model alone.

    Args:
        model: the model.

    Raises:
        Unrecordable: the model cannot be copied so.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.real: dict[int, torch.Tensor] = {}  # id of a tensor without data -> the model's own
        memo: dict[int, Any] = {}
        with torch.inference_mode(False):
            for tensor in (*model.parameters(), *model.buffers()):
                if id(tensor) not in memo:
                    memo[id(tensor)] = self._without_data(tensor)
        try:
            self.copy = _stock_copy(model, memo)
        except Exception as error:
            raise Unrecordable(f"{type(model).__name__} cannot be copied: {type(error).__name__}: {error}") from error
        compat.ask_for_seams(self.copy)
        self.device = next((each.device for each in model.parameters()), torch.device("cpu"))

    def _without_data(self, tensor: torch.Tensor) -> torch.Tensor:
        made = self.mode.from_tensor(tensor.detach(), static_shapes=True)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=False)
        self.real[id(made)] = tensor
        return made


def _stock_copy(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy of a model without what ``patch()`` has bound to its modules."""
    modules = list(model.modules())
    for module in modules:
        memo[id(module)] = type(module).__new__(type(module))
    for module in modules:
        contents = {name: value for name, value in vars(module).items() if not _is_ours(name, value)}
        vars(memo[id(module)]).update(copy.deepcopy(contents, memo))
    return memo[id(model)]


def _is_ours(name: str, value: Any) -> bool:
    return name.startswith(STATE_KEY) or compat.is_ours(getattr(value, "__func__", None))


class Recorder:
    """Notes the calls of one step."""

    def __init__(self, skeleton: Skeleton):
        self.skeleton = skeleton
        self.calls: list[Call] = []
        self.facts: dict[int, torch.Tensor] = {}
        self.spans: list[Span] = []
        self.masks: dict[int, Callable[..., Any]] = {}  # register of a mask -> its function
        self.mutated: set[int] = set()
        self.silent = 0
        self.past = past_tokens(skeleton.model.config)
        self._registers: dict[int, Register] = {}  # id of a tensor -> what stands for it
        self._kept: list[Any] = []  # no other tensor gets an id of these
        self._storages: dict[int, list[int]] = {}
        self._states: dict[int, int] = {}  # register of what append() gave -> layer
        self._paths = {id(module): path for path, module in skeleton.copy.named_modules()}

    # ---- values -----------------------------------------------------------------------------------------------

    def given(self, tensor: torch.Tensor) -> Register:
        """A register for a tensor that no call makes."""
        register = Register(len(self.facts))
        self.facts[register.index] = tensor
        self.name(tensor, register)
        return register

    def name(self, tensor: torch.Tensor, register: Register) -> None:
        """From here on, ``tensor`` is what ``register`` holds."""
        self._registers[id(tensor)] = register
        self._kept.append(tensor)
        self._storages.setdefault(tensor.untyped_storage()._cdata, []).append(register.index)

    def value(self, thing: Any) -> Any:
        """An argument as calls hold it: registers and the model's own tensors instead of tensors without data."""
        if isinstance(thing, torch.Tensor):
            if (register := self._registers.get(id(thing))) is not None:
                return register
            if (real := self.skeleton.real.get(id(thing))) is not None:
                return real
            if isinstance(thing, FakeTensor):
                raise Unrecordable("a tensor that was made before this step")
            return thing
        if isinstance(thing, (list, tuple)) and any(isinstance(each, torch.Tensor) for each in thing):
            return [self.value(each) for each in thing]
        return thing

    def emit(self, op: Callable[..., Any], arguments: dict[str, Any], out: Any) -> Call:
        """Note a call that gave ``out``."""
        found = {name: self.value(value) for name, value in arguments.items()}
        register = Register(len(self.facts))
        call = Call(op, found, register)
        self.calls.append(call)
        if isinstance(out, torch.Tensor):
            self.facts[register.index] = out
            self.name(out, register)
        elif isinstance(out, (list, tuple)):
            self.facts[register.index] = out
            for place, each in enumerate(out):
                if isinstance(each, torch.Tensor):
                    self._take(register, place, each)
        else:
            self.facts[register.index] = out
        return call

    def _take(self, whole: Register, place: int, out: torch.Tensor) -> None:
        register = Register(len(self.facts))
        self.calls.append(Call(operator.getitem, {"a": whole, "b": place}, register))
        self.facts[register.index] = out
        self.name(out, register)

    def write(self, func: Any, arguments: dict[str, Any], target: torch.Tensor, out: Any) -> None:
        """Note a call that writes into ``target``: as one that gives a new tensor if nothing else shares the memory."""
        storage = target.untyped_storage()._cdata
        if id(target) not in self._registers:
            raise Unrecordable(f"{func} writes into a tensor of the model")
        aliases = self._storages[storage]
        functional = _functional(func)
        if len(aliases) == 1 and functional is not None and tuple(out.shape) == tuple(target.shape):
            call = self.emit(functional, arguments, target.clone())
            made = call.out
            self.facts[made.index] = target
            self._registers[id(target)] = made
            self._storages[storage] = [made.index]
            return
        self.emit(func, arguments, out)
        self.mutated.update(self._storages[storage])

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Note nothing for the length of a ``with`` block."""
        self.silent += 1
        try:
            yield
        finally:
            self.silent -= 1

    # ---- seams ------------------------------------------------------------------------------------------------

    def append(self, k: torch.Tensor, v: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        with self.quiet():
            all_ = tuple(each.new_empty(*each.shape[:2], self.past + each.shape[2], each.shape[3]) for each in (k, v))
        call = self.emit(marks.append, {"k": k, "v": v, "layer": layer}, list(all_))
        self._states[call.out.index] = layer
        return all_

    def attend(self, module, query, key, value, attention_mask, scaling=None, sliding_window=None, softcap=None,
               s_aux=None, dropout=0.0, **others):  # fmt: skip
        """As transformers' attention functions."""
        states = self._states_of(key, value)
        window = self.mask_of(attention_mask)
        if not getattr(module, "is_causal", True):
            raise Unrecordable("attention that is not causal")
        strange = [name for name, value in others.items() if isinstance(value, torch.Tensor) and name not in _HARMLESS]
        if strange:
            raise Unrecordable(f"attention with {strange[0]}")
        with self.quiet():
            batch, heads, query_len, head_dim = query.shape
            out = query.new_empty(batch, query_len, heads, value.shape[-1])
        arguments = dict(
            q=query, states=states, layer=self._states[states.index],
            scale=float(head_dim**-0.5 if scaling is None else scaling), window=window,
            softcap=float(softcap or 0.0), sinks=s_aux,
        )  # fmt: skip
        self.emit(marks.attend, arguments, out)
        return out, None

    def _states_of(self, key: torch.Tensor, value: torch.Tensor) -> Register:
        """The register of what ``append`` gave, of which these are keys and values."""
        found = [self._registers.get(id(each)) for each in (key, value)]
        calls = {call.out.index: call for call in self.calls if call.op is operator.getitem}
        pairs = [calls.get(each.index) if each is not None else None for each in found]
        if None in pairs or pairs[0].arguments["a"].index != pairs[1].arguments["a"].index:
            raise Unrecordable("attention over other keys and values than the cache gave")
        if (pairs[0].arguments["b"], pairs[1].arguments["b"]) != (0, 1):
            raise Unrecordable("attention over other keys and values than the cache gave")
        return pairs[0].arguments["a"]

    def mask_of(self, mask: torch.Tensor | None) -> Register | None:
        """The register of a mask that :meth:`mask` made."""
        if mask is None:
            return None
        register = self._registers.get(id(mask))
        if register is None or register.index not in self.masks:
            raise Unrecordable("a mask that the model has changed")
        return register

    def mask(self, batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=None, attention_mask=None,
             dtype=torch.float32, **others):  # fmt: skip
        """As transformers' mask functions: a tensor that stands for a mask."""
        if attention_mask is not None and not self._is_all_ones(attention_mask):
            raise Unrecordable("a mask with padding of the model's own")
        with self.quiet():
            made = torch.empty(batch_size, 1, q_length, kv_length, dtype=dtype, device=self.skeleton.device)
        register = self.given(made)
        self.masks[register.index] = mask_function
        return made

    def _is_all_ones(self, mask: torch.Tensor) -> bool:
        """Whether a mask is one that the model made for want of another."""
        producers = {call.out.index: call for call in self.calls}
        register = self._registers.get(id(mask))
        call = None if register is None else producers.get(register.index)
        while call is not None and call.op is _aten._to_copy.default:
            call = producers.get(getattr(call.arguments["self"], "index", -1))
        if call is not None and call.op is _aten.full.default:
            return call.arguments["fill_value"] == 1
        return call is not None and call.op is _aten.ones.default

    def experts(self, module, hidden_states, top_k_index, top_k_weights):
        """As transformers' experts functions."""
        real = self.skeleton.model.get_submodule(self._paths[id(module)])
        with self.quiet():
            out = torch.empty_like(hidden_states)
        given = dict(x=hidden_states, ids=top_k_index, weights=top_k_weights)
        arguments = experts_arguments(real)
        if arguments is None:
            self.emit(marks.other_experts, given | {"module": real}, out)
        else:
            self.emit(marks.experts, given | arguments, out)
        return out


#: what attention functions are given besides, and what the kernels take from elsewhere or never read
_HARMLESS = frozenset({"position_ids", "cache_position", "cu_seq_lens_q", "cu_seq_lens_k", "input_ids"})


def past_tokens(config: Any) -> int:
    """Tokens that a recorded step's cache says it holds."""
    entries = vars(config.get_text_config(decoder=True))
    known = [entries[name] for name in _LONGEST if isinstance(entries.get(name), int)]
    longest = min((each for each in known if each > 2 * MAX_QUERY_LEN), default=_PAST)
    return min(_PAST, longest - MAX_QUERY_LEN - 1)


def _window(mask_function: Callable[..., Any]) -> int | None:
    """The window of a causal mask function, None for none.

    Raises:
        Unrecordable: it is anything else.
    """
    keys = torch.arange(_MASK_POSITIONS + 1)
    seen = compat.mask_sees(mask_function, keys[-1:], keys)[0]
    count = int(seen.sum())
    early = torch.arange(8)
    expected = (early[:, None] >= early) & (early[:, None] - early < count)
    if not bool(seen[len(seen) - count :].all()):
        raise Unrecordable("a mask that is neither causal nor a window")
    if not torch.equal(compat.mask_sees(mask_function, early, early), expected):
        raise Unrecordable("a mask that is neither causal nor a window")
    return None if count == len(keys) else count


def experts_arguments(module: nn.Module) -> dict[str, Any] | None:
    """Arguments of ``ops.fused_experts`` that a module with the weights of experts decides; None if the op does not
    take them."""
    weights = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    if not all(isinstance(each, nn.Parameter) and each.dim() == 3 for each in weights):
        return None
    plain = getattr(module, "has_gate", True) and getattr(module, "is_concatenated", True)
    plain = plain and not getattr(module, "has_bias", False) and not getattr(module, "is_transposed", False)
    activation = compat.activation_of(getattr(module, "act_fn", None))
    if not plain or activation not in EXPERT_GATES or not compat.has_default_gate(module):
        return None
    return {"gate_up_weight": weights[0], "down_weight": weights[1], "activation": activation}


def _functional(func: Any) -> Any | None:
    """The overload that gives what an in-place one writes, or None."""
    namespace, _, name = func._schema.name.partition("::")
    if namespace != "aten" or not name.endswith("_"):
        return None
    packet = getattr(_aten, name[:-1], None)
    return None if packet is None else getattr(packet, func._overloadname, None)


# ---- modes ------------------------------------------------------------------------------------------------------


class _Functions(TorchFunctionMode):
    """Notes functions that are to be one call, whatever they are made of."""

    def __init__(self, recorder: Recorder):
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        recorder = self._recorder
        if handler is None or recorder.silent:
            return func(*args, **kwargs)
        found = handler(*args, **kwargs)
        if found is None:
            return func(*args, **kwargs)
        with recorder.quiet():
            out = func(*args, **kwargs)
        op, arguments = found
        recorder.emit(op, arguments, out)
        return out


def _linear(input, weight, bias=None):
    return marks.linear, {"x": input, "weight": weight, "bias": bias}


def _layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-5):
    if len(normalized_shape) != 1:
        return None
    return marks.normed, {"x": input, "norm": (NormKind.LAYER, weight, bias, eps)}


def _rms_norm(input, normalized_shape, weight=None, eps=None):
    if len(normalized_shape) != 1 or eps is None:
        return None
    return marks.normed, {"x": input, "norm": (NormKind.RMS, weight, None, eps)}


def _sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    given = {"q": query, "k": key, "v": value, "mask": attn_mask}
    return marks.sdpa, given | {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}


def _matmul(a, b):
    return (marks.matmul, {"a": a, "b": b}) if isinstance(b, torch.Tensor) else None


_HANDLERS: dict[Any, Callable[..., Any]] = {
    nn.functional.linear: _linear,
    nn.functional.layer_norm: _layer_norm,
    torch.layer_norm: lambda input, shape, weight=None, bias=None, eps=1e-5, *_: _layer_norm(
        input, shape, weight, bias, eps
    ),
    nn.functional.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    nn.functional.scaled_dot_product_attention: _sdpa,
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
}


class _Dispatch(TorchDispatchMode):
    """Notes every other call."""

    def __init__(self, recorder: Recorder):
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        recorder = self._recorder
        if recorder.silent:
            return out
        if func in _NOTHING:
            if isinstance(out, torch.Tensor):
                _same(recorder, args[0], out)
            return out
        if not _holds_tensor(out) and not func._schema.is_mutable:
            return out  # a number that was known
        if any(word in func._schema.name for word in _RANDOM):
            raise Unrecordable(f"{func} draws random numbers")
        arguments = by_name(func, args, kwargs or {})
        if func._schema.is_mutable:
            recorder.write(func, arguments, args[0], out)
        else:
            recorder.emit(func, arguments, out)
        return out


def _same(recorder: Recorder, given: torch.Tensor, out: torch.Tensor) -> None:
    """``out`` is another name of ``given``, which may be data of its own."""
    value = recorder.value(given)
    if isinstance(value, Register):
        recorder.name(out, value)
    else:
        recorder.skeleton.real[id(out)] = value
        recorder._kept.append(out)


def _holds_tensor(out: Any) -> bool:
    each = out if isinstance(out, (list, tuple)) else [out]
    return any(isinstance(thing, torch.Tensor) for thing in each)


# ---- the step ---------------------------------------------------------------------------------------------------


def record(skeleton: Skeleton, batch: int, query_len: int) -> Recording:
    """Write the step of ``query_len`` new tokens for each of ``batch`` sequences down.

    Raises:
        Unrecordable: it cannot be; the message says which line did it.
    """
    recorder = Recorder(skeleton)
    token = _recorder.set(recorder)
    try:
        return _record(recorder, batch, query_len)
    except Unrecordable as error:
        raise Unrecordable(f"{error}{_where(error)}") from None
    except Exception as error:
        raise Unrecordable(f"{type(error).__name__}: {error}{_where(error)}") from error
    finally:
        _recorder.reset(token)


def _record(recorder: Recorder, batch: int, query_len: int) -> Recording:
    skeleton = recorder.skeleton
    cache = compat.RecordingCache(skeleton.copy.config, recorder.past, recorder.append)
    with torch.inference_mode(False), torch.no_grad(), _without_logs(), skeleton.mode:
        tokens, positions = (torch.zeros(batch, query_len, dtype=torch.long, device=skeleton.device) for _ in range(2))
        given = recorder.given(tokens), recorder.given(positions)
        with _spans(recorder), _Dispatch(recorder), _Functions(recorder):
            arguments = {"input_ids": tokens, "use_cache": True, "return_dict": True, compat.CACHE: cache}
            if compat.takes_positions(skeleton.copy):
                arguments["position_ids"] = positions
            logits = skeleton.copy(**arguments).logits
    if tuple(logits.shape[:2]) != (batch, query_len):
        raise Unrecordable(f"logits of shape {tuple(logits.shape)}")
    for call in recorder.calls:
        for name, value in call.arguments.items():
            if name == "norm" and isinstance(value, (tuple, list)):
                call.arguments[name] = Norm(*value)
    windows: dict[int, int | None] = {}  # of masks that the kernels have
    for index, function in recorder.masks.items():
        with suppress(Unrecordable):
            windows[index] = _window(function)
    for call in recorder.calls:
        if call.op is marks.attend:
            mask = call.arguments["window"]
            if mask is not None and mask.index not in windows:
                raise Unrecordable("a mask that is neither causal nor a window")
            of_mask = None if mask is None else windows[mask.index]
            of_cache = cache.layers[call.arguments["layer"]].sliding_window  # which holds no more
            call.arguments["window"] = min((w for w in (of_mask, of_cache) if w is not None), default=0)
    return Recording(
        batch,
        query_len,
        recorder.calls,
        recorder.facts,
        *given,
        logits=recorder.value(logits),
        spans=recorder.spans,
        masks=windows,
        mutated=recorder.mutated,
        past=recorder.past,
        windows=tuple(layer.sliding_window for layer in cache.layers),
    )


@contextmanager
def _without_logs() -> Iterator[None]:
    """What cannot be recorded is told by an exception; torch writes the same to its log."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    refuse = lambda record: False  # noqa: E731
    logger.addFilter(refuse)
    try:
        yield
    finally:
        logger.removeFilter(refuse)


@contextmanager
def _spans(recorder: Recorder) -> Iterator[None]:
    """Note which calls modules without children make, for the length of a ``with`` block."""
    bound = []
    try:
        for path, module in recorder.skeleton.copy.named_modules():
            if is_packed(module):
                vars(module)["forward"] = _packed_forward(recorder, module, path)
            elif not any(True for _ in module.children()) and type(module) not in (nn.Linear, nn.Embedding):
                vars(module)["forward"] = _noting(recorder, module, path)
            else:
                continue
            bound.append(module)
        yield
    finally:
        for module in bound:
            vars(module).pop("forward", None)


def _noting(recorder: Recorder, module: nn.Module, path: str) -> Callable[..., Any]:
    forward = module.forward

    def noted(*args: Any, **kwargs: Any) -> Any:
        first = len(recorder.calls)
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        inputs = [recorder.value(each) for each in given]
        out = forward(*args, **kwargs)
        made = [each for each in (out if isinstance(out, (list, tuple)) else [out]) if isinstance(each, torch.Tensor)]
        outputs = [recorder.value(each) for each in made]
        if all(isinstance(each, Register) for each in (*inputs, *outputs)):
            recorder.spans.append(Span(path, inputs, outputs, recorder.calls[first:]))
        return out

    return noted


def _packed_forward(recorder: Recorder, module: PackedLinear, path: str) -> Callable[..., Any]:
    real = recorder.skeleton.model.get_submodule(path)

    def forward(x: torch.Tensor) -> torch.Tensor:
        with recorder.quiet():
            out = x.new_empty(*x.shape[:-1], real.out_features)
        names = ("quants", "scales", "zeros", "multiplier", "format")
        weight = dict(zip(names, real.op_weight()))
        recorder.emit(marks.packed_linear, {"x": x, **weight, "bias": weight_and_bias(real)[1]}, out)
        return out

    return forward


def _where(error: BaseException) -> str:
    """Which line of the model an exception came through."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if "/torch/" not in frame.filename and "/hf_fastpath/" not in frame.filename]
    if not theirs:
        return ""
    last = theirs[-1]
    return f", at {last.filename.rpartition('/')[2]}:{last.lineno}: {last.line}"


def _attention(module, *args, **kwargs):
    return _recorder.get().attend(module, *args, **kwargs)


def _mask(*args, **kwargs):
    return _recorder.get().mask(*args, **kwargs)


def _experts(module, *args, **kwargs):
    return _recorder.get().experts(module, *args, **kwargs)


compat.install_seams(_attention, _mask, _experts)
