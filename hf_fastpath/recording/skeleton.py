"""A copy of a model whose tensors hold no data: recording runs it, and leaves the model alone."""

from __future__ import annotations

import copy
import functools
import math
import threading
from collections import Counter
from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from .. import compat
from ..decode.loops.patched import STATE_KEY
from ..decode.model import pass_through
from ..decode.model.modules import is_packed
from ..decode.state.python_state import Walk
from ..decode.state.snapshot import differences
from ..decode.state.watch import Watch
from ..ops.decode_attention import MAX_QUERY_LEN
from .fake_mode import FakeMode
from .first_uses import FirstUses
from .noted_code import NotedCode
from .recorded_step import Unrecordable
from .text_lengths import new_env

#: tokens that the recorded step's cache says it holds, unless the model knows fewer positions
_PAST = 4099


class Skeleton:
    """A copy of a model whose tensors hold no data: recording runs it, and leaves the model alone.

    Args:
        model: the model, a ``PreTrainedModel``.
        evaluates: whether the copy is as ``model.eval()`` makes a model; if not, as the model is.
        code: notes what runs of the model's code.
        quantized: what another copy has under this name.
        walk: through the model as it is, if there is one already.

    Attributes:
        plain: tensors that modules hold and that are no parameters or buffers of the model's, which calls read where
            they are.

    Raises:
        Unrecordable: the model cannot be copied so.
    """

    def __init__(
        self,
        model: Any,
        evaluates: bool = True,
        code: NotedCode | None = None,
        quantized: dict[str, torch.Tensor] | None = None,
        walk: Walk | None = None,
    ):
        self.model, self.code = model, NotedCode() if code is None else code
        self.env = new_env()
        self.mode = FakeMode(allow_non_fake_inputs=True, shape_env=self.env)
        self.device = home(model)  # where all tensors of the copy claim to be
        self.real: dict[int, torch.Tensor] = {}  # id of a tensor without data -> the model's own
        #: name of a quantized layer -> a matrix without data that stands for its weight
        self.quantized = quantized or {
            path: torch.empty(module.out_features, module.in_features, dtype=model.dtype, device="meta")
            for path, module in model.named_modules()
            if is_packed(module)
        }
        memo: dict[int, Any] = {}
        walk = self._walk_of_model() if walk is None else walk
        self._copied = walk
        with torch.inference_mode(False):
            own = {id(each): each for each in (*model.parameters(), *model.buffers())}
            self._alone = _with_own_memory([*own.values(), *walk.tensors.values()])
            memo |= {name: self._without_data(each) for name, each in own.items()}
            self.plain = [each for each in walk.tensors.values() if id(each) not in memo]
            elsewhere = next((each for each in self.plain if each.device.type != self.device.type), None)
            if elsewhere is not None:
                what = f"a tensor of {elsewhere.nbytes >> 10} KB on {elsewhere.device}"
                raise Unrecordable(f"{what} that is no buffer, of a model on {self.device}")
            memo |= {id(each): self._without_data(each) for each in self.plain}
        try:
            self.copy = _stock_copy(model, memo)
        except Exception as error:
            raise Unrecordable(f"{type(model).__name__} cannot be copied: {type(error).__name__}: {error}") from error
        if evaluates:
            self.copy.eval()
        compat.ask_for_seams(self.copy)
        compat.ask_for_plain_functions(self.copy)
        self.takes_positions = compat.takes_positions(model)
        self.token_shape = compat.token_shape(model)
        if self.code.first_uses is None:
            self.code.first_uses = FirstUses(model.modules())
        self.lock = threading.RLock()  # of threads that run the copy, or compute with its tensors
        self._held: Walk | None = None
        self._watch: Watch | None = None

    def _walk_of_model(self) -> Walk:
        walk = Walk(host_numbers=self.device.type != "cpu")
        walk.enter(self.model)
        return walk

    def is_as_model(self) -> bool:
        """Whether a copy of the model as it is now would be as this one."""
        if self._held is None or self.what_differs():  # a forward has left something in the copy
            return False
        return self._copied.entered_alike(self._walk_of_model())

    def look(self) -> None:
        """Note the Python values that the copy holds now."""
        if self._watch is None or not self._watch.holds():
            self._held = self._walk()
            self._watch = Watch(self._held)

    def what_differs(self) -> list[str]:
        """Return where the copy holds other Python values than when :meth:`look` was called."""
        assert self._held is not None and self._watch is not None
        return [] if self._watch.holds() else differences(self._held.values, self._walk().values)

    def _walk(self) -> Walk:
        walk = Walk()
        walk.enter(self.copy)
        return walk

    def encoder_output(self, batch: int, length: Any) -> torch.Tensor:
        """Return a tensor without data like what the model's encoder gives for ``length`` places."""
        dtype = self.model.dtype
        return torch.empty(batch, length, compat.encoder_width(self.model), dtype=dtype, device=self.device)

    def cap(self, softcap: float | None) -> float:
        """Return the soft-cap of scores that the model's attention applies of the one that it is given; 0 for none.

        Raises:
            Unrecordable: the cap is no positive number; with 0, for which the kernels do not cap, a model caps to 0.
        """
        if softcap is None or not compat.caps_scores(self.model.config.get_text_config()):
            return 0.0
        if type(softcap) not in (int, float) or not 0 < softcap < math.inf:
            raise Unrecordable(f"a soft cap of {softcap!r} on the scores of attention")
        return float(softcap)

    def scale(self, scaling: float | None, head_dim: int) -> float:
        """Return the factor on scores that the model's attention applies, of the one that it is given.

        Raises:
            Unrecordable: the factor is no positive number; PyTorch's attention multiplies its mask by it.
        """
        if scaling is None:
            return head_dim**-0.5
        if type(scaling) not in (int, float) or not 0 < scaling < math.inf:
            raise Unrecordable(f"a factor of {scaling!r} on the scores of attention")
        return float(scaling)

    def run(
        self, tokens: torch.Tensor, positions: torch.Tensor | None, cache: Any, others: dict[str, Any]
    ) -> torch.Tensor:
        """Return the logits of the copy's forward over tensors without data.

        Args:
            others: further arguments of the forward, by name.
        """
        name = functools.partial(compat.text_name, self.copy)
        arguments = {name("input_ids"): tokens, "use_cache": True, "return_dict": True, compat.CACHE: cache, **others}
        if positions is not None and self.takes_positions:
            arguments[name("position_ids")] = positions
        return self.copy(**arguments).logits

    def empty(self, shape: Sequence[Any], dtype: torch.dtype, strides: Sequence[int] | None = None) -> torch.Tensor:
        """Return a tensor without data. PyTorch's functions would take as long for it as for ten others: they find out
        what their result is like, anew for each size that is a symbol."""
        with _disable_current_modes():
            how: dict[str, Any] = dict(dtype=dtype, device="meta")
            made = torch.empty(shape, **how) if strides is None else torch.empty_strided(shape, strides, **how)
            return self.mode.claimed(made, self.device)

    def _without_data(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in self._alone:
            made = self.empty(tensor.shape, tensor.dtype, tensor.stride())
        else:
            made = self.mode.from_tensor(tensor.detach(), static_shapes=True)
        if made.device != self.device:
            with self.mode:
                made = torch.empty_strided(made.shape, made.stride(), dtype=made.dtype, device=self.device)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=False)
        self.real[id(made)] = tensor
        return made


def _with_own_memory(tensors: list[torch.Tensor]) -> set[int]:
    """Return ids of plain tensors whose memory no other one of these has."""
    plain = {id(each): each for each in tensors if type(each) in (torch.Tensor, nn.Parameter)}
    plain = {name: each for name, each in plain.items() if each.layout is torch.strided and not each.is_quantized}
    plain = {name: each for name, each in plain.items() if not (each.is_conj() or each.is_neg())}
    memories = Counter(compat.memory_of(each) for each in plain.values())
    return {name for name, each in plain.items() if memories[compat.memory_of(each)] == 1}


def home(model: nn.Module) -> torch.device:
    """Return the device of a model's parameters; of several, that of the embeddings."""
    found = {each.device for each in model.parameters()}
    if len(found) <= 1:
        return next(iter(found), torch.device("cpu"))
    embedding: Any = compat.text_embedding(model)
    return embedding.weight.device


def _stock_copy(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a deep copy of a model without what ``patch()`` has bound to its modules, and without a forward on the
    model that only hands on what ``generate()`` passes: such a function may enclose the model, and no copy of it would
    enclose the copy."""
    modules = list(model.modules())
    for module in modules:
        memo[id(module)] = type(module).__new__(type(module))
    for module in modules:
        contents = {name: value for name, value in vars(module).items() if not _is_ours(name, value)}
        if module is model and (forward := contents.get(compat.forward_attribute(model))) is not None:
            if pass_through.reason_of(forward, model) != "model_forward":
                del contents[compat.forward_attribute(model)]
        if compat.forward_attribute(module) not in ("forward", *contents):  # a hook calls what is there
            contents[compat.forward_attribute(module)] = MethodType(type(module).forward, module)
        vars(memo[id(module)]).update(copy.deepcopy(contents, memo))
    return memo[id(model)]


def _is_ours(name: str, value: Any) -> bool:
    return name.startswith(STATE_KEY) or compat.is_ours(getattr(value, "__func__", None))


def past_tokens(config: Any, most: int = MAX_QUERY_LEN) -> int:
    """Return how many tokens a recorded step's cache says it holds, with up to ``most`` behind them."""
    longest = min((each for each in compat.known_positions(config) if each > 2 * most), default=_PAST)
    return min(_PAST, longest - most - 1)
