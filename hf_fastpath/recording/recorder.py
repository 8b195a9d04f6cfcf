"""The recorder, which notes the calls of one step, and the seams of transformers that the calls pass through."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

from .. import compat
from ..decode.calls.named_calls import Call, Register
from ..decode.ranks.rank_calls import shard_of, style_of
from . import marks
from .latent import Expansion
from .notes import Notes
from .overloads import COPIES
from .probing import evaluate
from .recorded_step import Misspread, OwnPadding, Unrecordable, behind

_aten = torch.ops.aten

#: ways to spread experts so that a rank has some as a whole
_WHOLE_EXPERTS = (compat.ShardStyle.SOME_EXPERTS, compat.ShardStyle.PICKED_EXPERTS)
#: tokens for which keys and values are made of a latent, to see how that is done
_EXPANDED = 3
#: the recorder that runs in this context
recorder: ContextVar[Recorder] = ContextVar("recorder")


class Recorder(Notes):
    """What notes the calls of one step, and stands in for what transformers lets others provide."""

    def new_cache(self) -> compat.RecordingCache:
        """Return an empty cache for the model."""
        return compat.RecordingCache(self.skeleton.copy.config, self.append, self.refuse)

    def append(self, k: torch.Tensor, v: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.is_rehearsing:
            return k, v
        with self.quiet():
            length = self.lengths.size + k.shape[2]
            sizes = [(*each.shape[:2], length, each.shape[3]) for each in (k, v)]
            all_k, all_v = (self.skeleton.empty(size, each.dtype) for size, each in zip(sizes, (k, v)))
        call = self.emit(marks.append, {"k": k, "v": v, "layer": layer}, [all_k, all_v])
        self._states[self._indices((all_k, all_v))] = call.out, layer
        return all_k, all_v

    def attend(
        self,
        module,
        query,
        key,
        value,
        attention_mask,
        scaling=None,
        sliding_window=None,
        softcap=None,
        s_aux=None,
        dropout=0.0,
        **others,
    ):
        """Note attention; the signature is that of transformers' attention functions."""
        if self.is_rehearsing:
            return query.new_empty(*query.shape[:1], query.shape[2], query.shape[1], value.shape[-1]), None
        layer = self._encoded.get(self._indices((key, value)))
        if layer is not None:
            self._check_encoded(attention_mask, others, s_aux)
            return self._attend_encoded(query, key, value, layer, scaling, softcap), None
        self._check_pairs(module, query, key)
        found = self._states.get(self._indices((key, value)))
        expansion = encoded = window = None
        if found is None and (parts := self._put_together(key, value, attention_mask)) is not None:
            found, encoded, window = parts
        elif found is None:
            expansion = self.expansions.get((id(key), id(value)))
            if expansion is None:
                raise Unrecordable("attention over other keys and values than the cache gave")
            found = expansion.states, expansion.layer
        states, layer = found
        window = self.mask_of(attention_mask) if encoded is None else window
        if not getattr(module, "is_causal", True) and query.shape[2] > 1:  # one token sees all in any case
            raise Unrecordable("attention that is not causal")
        bias = others.pop(POSITION_BIAS, None)
        streams = {name: others.pop(name) for name in _STREAMS if name in others}
        self._refuse_tensors(others)
        with self.quiet():
            batch, heads, query_len, head_dim = query.shape
            out = query.new_empty(batch, query_len, heads, value.shape[-1])
        arguments = dict(
            q=query,
            states=states,
            layer=layer,
            scale=self.skeleton.scale(scaling, head_dim),
            window=window,
            softcap=self.skeleton.cap(softcap),
            sinks=s_aux,
        )
        arguments |= {name: each for name, each in (("bias", bias), ("encoded", encoded)) if each is not None}
        arguments |= streams
        if expansion is None:
            self.emit(marks.attend, arguments, out)
        elif arguments.pop("softcap") or arguments.pop("sinks") is not None:
            raise Unrecordable("attention over a latent with a soft cap or sinks")
        else:
            self.emit(marks.latent_attend, arguments | {"weight": expansion.weight}, out)
        return out, None

    def _check_pairs(self, module: Any, query: torch.Tensor, key: torch.Tensor) -> None:
        """Refuse a rank's part of the queries beside several KV heads of all ranks: attention would pair others than
        the whole model does."""
        heads, kv_heads = query.shape[1], key.shape[1]
        group = getattr(module, "num_key_value_groups", max(1, heads // kv_heads))
        if self._is_spread and kv_heads > 1 and heads != kv_heads * group:
            raise Misspread(f"{heads} heads of a rank beside {kv_heads} KV heads of all ranks")

    def _put_together(self, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> tuple | None:
        """Return the text's keys and values with their layer, the layer whose keys and values of what an encoder has
        read are put beside these, and the text's mask; None if ``key`` and ``value`` are put together otherwise."""
        parts = [self._parts(*each) for each in ((key, 2), (value, 2), (mask, 3))]
        for (k, v, seen), (other_k, other_v, seen_of_other) in itertools.permutations(zip(*parts, strict=True), 2):
            found, layer = self._states.get((k, v)), self._encoded.get((other_k, other_v))
            if found is not None and layer is not None and {seen, seen_of_other} <= self.masks.keys():
                self.masks_over_encoded.add(seen_of_other)
                return found, layer, Register(seen)
        return None

    def _parts(self, tensor: torch.Tensor | None, dim: int) -> list[int]:
        """Return the numbers of two registers that a tensor holds one behind the other; twice -1 for another tensor."""
        register = self._registers.get(id(tensor))
        call = next((each for each in reversed(self.calls) if each.out is register), None)
        if call is None or call.op is not _aten.cat.default or call.arguments.get("dim", 0) % 4 != dim:
            return [-1, -1]
        found = [getattr(each, "index", -1) for each in call.arguments["tensors"]]
        return found if len(found) == 2 else [-1, -1]

    def _refuse_tensors(self, others: dict[str, Any]) -> None:
        strange = [name for name, value in others.items() if isinstance(value, torch.Tensor) and name not in _HARMLESS]
        if strange:
            raise Unrecordable(f"attention with {strange[0]}")

    def _check_encoded(self, mask: torch.Tensor | None, others: dict[str, Any], sinks: torch.Tensor | None) -> None:
        """Refuse attention to what an encoder has read that is more than softmax."""
        if (register := self.mask_of(mask)) is not None:
            self.masks_over_encoded.add(register.index)
        bias = others.get(POSITION_BIAS)
        if bias is not None and not self._holds(bias, 0):
            raise Unrecordable(f"attention with {POSITION_BIAS} to what the encoder has read")
        self._refuse_tensors({name: value for name, value in others.items() if name != POSITION_BIAS})
        if sinks is not None:
            raise Unrecordable("attention with sinks to what the encoder has read")

    def _attend_encoded(self, query, key, value, layer: int, scaling: float | None, softcap: float | None):
        turned = query.transpose(1, 2)
        with self.quiet():
            out = query.new_empty(*turned.shape[:3], value.shape[-1])
        scale = self.skeleton.scale(scaling, query.shape[-1])
        arguments = dict(q=turned, k=key, v=value, layer=layer, scale=scale, softcap=self.skeleton.cap(softcap))
        self.emit(marks.attend_encoded, arguments, out)
        return out

    def expand(self, original: Callable[..., Any], latent: torch.Tensor, turned: torch.Tensor) -> Any:
        """Note how ``original``, a method of attention, makes keys and values of a latent and of turned keys."""
        found = self._states.get(self._indices((latent, turned)))
        if self.is_rehearsing or found is None:
            return original(latent, turned)
        first = len(self.calls)
        with self.quiet():
            few = [each.new_empty(*each.shape[:2], _EXPANDED, each.shape[3]) for each in (latent, turned)]
        given = [self.given(each) for each in few]
        made = original(*few)
        calls, registers = self.calls[first:], [self.value(each) for each in made]
        del self.calls[first:]
        with self.quiet():
            all_ = tuple(each.new_empty(*each.shape[:2], latent.shape[2], each.shape[3]) for each in made)
        expansion = Expansion(*found, calls, given, registers, [*few, *made])
        self.expansions[id(all_[0]), id(all_[1])] = expansion
        self._kept += all_
        return all_

    def _indices(self, tensors: tuple[torch.Tensor, ...]) -> tuple[int, ...]:
        return tuple(self._registers[id(each)].index if id(each) in self._registers else -1 for each in tensors)

    def mask_of(self, mask: torch.Tensor | None) -> Register | None:
        """Return the register of a mask that :meth:`mask` made."""
        if mask is None:
            return None
        register = self._registers.get(id(mask))
        if register is None or register.index not in self.masks:
            raise Unrecordable("a mask that the model has changed")
        return register

    def held(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what a tensor holds that calls have made of numbers alone.

        Raises:
            Unrecordable: it is made of something else.
        """
        register = self._registers.get(id(tensor))
        if register is None:
            return tensor
        try:
            return evaluate(behind(self.calls, register), {})[register.index]
        except KeyError:
            raise Unrecordable("a mask that depends on more than positions") from None

    def mask(
        self,
        batch_size,
        q_length,
        kv_length,
        q_offset=0,
        kv_offset=0,
        mask_function=None,
        attention_mask=None,
        dtype=torch.float32,
        **others,
    ):
        """Return a tensor that stands for a mask; the signature is that of transformers' mask functions."""
        if self.is_rehearsing:
            return torch.empty(batch_size, 1, q_length, kv_length, dtype=dtype, device=self.skeleton.device)
        if attention_mask is not None and not self._is_of_text(attention_mask):
            raise OwnPadding("a mask with padding of the model's own")
        with self.quiet():
            length = self.lengths.as_size(kv_length)
            made = torch.empty(batch_size, 1, q_length, length, dtype=dtype, device=self.skeleton.device)
        register = self.given(made)
        self.masks[register.index] = mask_function
        return made

    def _is_of_text(self, mask: torch.Tensor) -> bool:
        """Whether a mask of tokens is the one that the forward was given, or one without padding."""
        register, _ = self._origin(mask)
        return (register is not None and register == self.text_mask) or self._holds(mask, 1)

    def _origin(self, tensor: torch.Tensor) -> tuple[Register | None, Call | None]:
        """Return what a tensor is a copy or a view of, in whatever dtype but all of it, and the call that gave it."""
        producers = {call.out.index: call for call in self.calls}
        register = self._registers.get(id(tensor))
        call = None if register is None else producers.get(register.index)
        while call is not None and call.op in COPIES and isinstance(call.arguments["self"], Register):
            if self.facts[call.arguments["self"].index].shape != tensor.shape:
                break
            register = call.arguments["self"]
            call = producers.get(register.index)
        return register, call

    def _holds(self, tensor: torch.Tensor, number: int) -> bool:
        """Whether a tensor is one that the model has filled with ``number``, 0 or 1."""
        _, call = self._origin(tensor)
        if call is not None and call.op is _aten.full.default:
            return call.arguments["fill_value"] == number
        return call is not None and call.op is (_aten.zeros.default, _aten.ones.default)[number]

    def experts(self, module, hidden_states, top_k_index, top_k_weights):
        """Note experts; the signature is that of transformers' experts functions."""
        if self.is_rehearsing:
            return torch.empty_like(hidden_states)
        real = self.skeleton.model.get_submodule(self.path_of(module))
        with self.quiet():
            out = torch.empty_like(hidden_states)
        given = dict(x=hidden_states, ids=top_k_index, weights=top_k_weights)
        if style_of(real) in _WHOLE_EXPERTS:
            given["first_expert"] = shard_of(real).first
        self.emit(marks.other_experts, given | {"module": real}, out)
        return out


#: argument of attention functions that is added to scores
POSITION_BIAS = "position_bias"
#: arguments of :func:`marks.attend` that attention of several streams has
_STREAMS = "row_biases", "other", "other_lse"
#: further arguments of attention functions, which the kernels take from elsewhere or never read
_HARMLESS = frozenset({"position_ids", "cache_position", "cu_seq_lens_q", "cu_seq_lens_k", "input_ids"})


def _seam(name: str) -> Callable[..., Any]:
    """Make a function that calls a method of the recorder that runs."""

    def seam(*args, **kwargs):
        noting = recorder.get()
        try:
            return getattr(noting, name)(*args, **kwargs)
        except Exception as error:
            noting.note_refusal(error)
            raise

    return seam


compat.install_seams(_seam("attend"), _seam("mask"), _seam("experts"))
