"""A causal LM whose step is recorded, in the roles that a decode plan asks for."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from .. import compat
from ..decode.lower.many_experts import most_sequences
from ..decode.lower.which_op import Lower
from ..decode.model.modules import model_code_reason, odd_module
from ..decode.model.parts import HeadPart
from ..decode.model.whole_model import WholeModel
from ..decode.plans.plan_cache import PlanCache
from ..decode.run.program import Program
from ..decode.sources.step_source import StepInputs
from ..linears.packed_embedding import PackedEmbedding
from ..ops.decode_attention import MAX_QUERY_LEN
from ..ops.gemv import MAX_ROWS
from ..reasons import Cause, class_name
from . import marks, row_adapters
from .arguments import described, hides_other_places, why_it_matters
from .by_length import ByLength
from .dry_run import dry_run
from .family import Recorded
from .layers import RecordedAttention, RecordedLayer, attention_of, without_narrow
from .looked_at import LookedAt
from .lowering import Lowering
from .position_tables import PositionTable, position_tables
from .prompts import RecordedPrompts
from .proof import reason_against
from .recorded_step import Recording, Unrecordable
from .step import why_other_in_training
from .swapped import adopt
from .tensors import modules_reason, sizes_reason, tensors_reason
from .whole_step import whole_step


class RecordedModel(WholeModel):
    """A causal LM whose step is recorded from its own forward, as it is now.

    Attributes:
        architecture: see :class:`.family.Recorded`.
        module: the model.
        is_multimodal: whether the model reads images or sound as well.
        has_encoder: whether the model's decoder attends to what an encoder has read.
        token_shape: () or, of several tokens at a position of the text, their number.
        verdict: what the model's own first steps have shown, a reason or None, in a tuple; None until these ran.
        code: what ran of the model's code when steps of it were recorded.
        lengths: of the text and of what an encoder has read, for which steps are recorded; None for any.
        by_length: gives the parts for texts of other lengths.
        files_reason: :attr:`reason_of_file` if its advice helps where the step cannot be recorded either, else None.
    """

    rotary: nn.Module | None = None
    takes_long = True
    modules_use_cache = False
    is_placed = False  # see .placed_model
    lowering: Any = Lowering
    files_reason: Cause | None = None
    head_part: HeadPart | None = None

    def __init__(self, architecture: Recorded, module: nn.Module):
        self.architecture, self.module = architecture, module
        self.is_multimodal = compat.is_multimodal(module)
        self.has_encoder = compat.has_encoder(module)
        self.token_shape = compat.token_shape(module)
        self._passes_mask_on = False  # True once the decoder was seen to be given the mask that the model is given
        self._looked_at = LookedAt(module)
        self.lengths: tuple[int | None, int | None] = None, None
        self.by_length = ByLength(self)
        self.forget_recordings()

    def forget_recordings(self, moment: Any = None) -> None:
        """Forget what was recorded."""
        self._recordings: dict[tuple[int, int], Recording | Exception] = {}
        self.verdict: tuple[str | None] | None = None
        self._arguments: dict[tuple, Cause | None] = {}  # arguments of a step -> why they matter, or None
        self._moment = moment or object()  # of no other part, as an id may be once this one is gone
        self.prompts = RecordedPrompts(self, self._looked_at)

    # ---- recordings -------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Note the Python values that the model holds now, of which its recordings are."""
        self._looked_at.look(self)

    def look_again(self) -> None:
        """Note that time has gone by."""
        self._looked_at.age()

    adopt = adopt
    row_adapters_reason = row_adapters.reason_against
    held = property(lambda self: self._looked_at.held)  # a walk through Python values when the part was made
    code = property(lambda self: self._looked_at.code)
    recorded = property(lambda self: self._looked_at.recordings)

    def recording(self, batch: int, query_len: int) -> Recording:
        """Return the step of ``query_len`` new tokens for each of ``batch`` sequences, after all passes.

        Raises:
            Unrecordable: the model cannot be recorded.
        """
        found = self._recordings.get((batch, query_len))
        if found is None:
            found = self._looked_at.tried(self._recordings, whole_step, (batch, query_len), self.lengths)
        if isinstance(found, Exception):
            raise found.with_traceback(None)
        return found

    @functools.cached_property
    def kinds(self) -> tuple[compat.LayerKind, ...]:
        """Return what each layer of the cache holds; nothing if a layer holds something that plans know nothing of."""
        kinds = self.config_kinds
        # a config may tell of more layers than the decoder has
        return kinds[: len(self.recording(1, 1).windows)] if kinds and self.shape_reason(1, 1) is None else kinds

    @functools.cached_property
    def config_kinds(self) -> tuple[compat.LayerKind, ...]:
        return tuple(compat.layer_kinds(self.module.config) or ())

    @functools.cached_property
    def layers(self) -> list[RecordedLayer]:
        recording = self.recording(1, 1)
        producers = recording.producers()
        found: dict[int, RecordedAttention] = {}
        for call in recording.calls:
            if (attention := attention_of(recording, producers, call)) is not None:
                found.setdefault(call.arguments["layer"], attention)
        wanted = {index for index, kind in enumerate(self.kinds) if kind.keys}
        if wanted and not any(call.op is marks.append for call in producers.values()) and not found:
            raise Unrecordable("no keys and values that it keeps in a cache")
        if set(found) != wanted:
            unread = ", ".join(map(str, sorted(wanted - set(found))))
            raise Unrecordable(f"layers of the cache ({unread}) that are read otherwise than by softmax attention")
        return [RecordedLayer(found.get(index), kind.window) for index, kind in enumerate(self.kinds)]

    def states(self, batch: int) -> list[list[torch.Tensor]]:
        """Return tensors without data like the states that each layer of the cache holds of ``batch`` sequences."""
        recording = self.recording(batch, 1)
        return [[recording.fact(each) for each in states] for states in recording.states]

    def values_of_model(self, batch: int, query_len: int) -> list[Any]:
        """Return what such steps make of the model alone, which a plan fills when it begins."""
        return self.recording(batch, query_len).values

    def record(self, program: Program, to: Lower, given: StepInputs) -> Any:
        """Emit a step; return the register of the logits.

        Raises:
            Unrecordable: something in it has no place in a plan.
        """
        recording, encoded = self.recording(*given.positions.shape), given.at[self.devices[0]].encoded
        tables = zip(recording.values, given.values, strict=True)
        held = {each.register.index: program.shared(table, True) for each, table in tables}
        held[recording.tokens.index] = program.shared(given.tokens)
        held[recording.positions.index] = program.shared(given.positions)
        for registers, tensors in zip(recording.states, given.states):
            held |= {register.index: tensor for register, tensor in zip(registers, tensors, strict=True)}
        if encoded is not None and len(encoded.caches) != len(recording.encoded):
            raise Unrecordable("layers that keep nothing of what the encoder has read")
        return self.lowering(self, program, to, recording, held, given.caches, given.at).run()

    # ---- roles ------------------------------------------------------------------------------------------------

    @property
    def has_experts(self) -> bool:
        return any(call.op in marks.EXPERTS for call in self.recording(1, 1).calls)

    @property
    def gathers_experts(self) -> bool:
        """Whether there is a copy of an expert's weights for each row that has chosen it."""
        return any(call.op is marks.other_experts for call in self.recording(1, 1).calls)

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(kind.window for kind in self.kinds)

    @property
    def attentions(self) -> list[RecordedAttention]:
        return [layer.attention for layer in self.layers if layer.attention is not None]

    @property
    def query_heads(self) -> set[tuple[int, int]]:
        """Return the number of query heads and the elements of a head, of every attention."""
        recording = self.recording(1, 1)
        queries = [each.arguments["q"] for each in recording.calls if each.op is marks.attend_encoded]
        found = {(heads, dim) for *_, heads, dim in (recording.fact(each).shape for each in queries)}
        return found | {(attention.num_heads, attention.head_dim) for attention in self.attentions}

    @property
    def max_batch(self) -> int:
        mixtures = (call.arguments for call in self.recording(1, 1).calls if call.op in marks.EXPERTS)
        return MAX_ROWS if self.gathers_experts else most_sequences(mixtures)

    @functools.cached_property
    def rows(self) -> int:
        """Return how many rows of a sequence products of a step are given at most, [batch, rows, features]."""
        recording = self.recording(1, 1)
        given = [recording.fact(each.arguments["x"]) for each in recording.calls if each.op is marks.linear]
        return max((each.shape[1] for each in given if each.dim() == 3 and len(each) == 1), default=1)

    @property
    def num_embeddings(self) -> int:
        return len(self.embedding.weight)

    @functools.cached_property
    def devices(self) -> tuple[torch.device, ...]:
        """Return where a step runs, the embeddings' device first."""
        return (self.embedding.weight.device,)

    @property
    def layer_devices(self) -> list[torch.device]:
        return [*self.devices] * len(self.layers)

    @property
    def embedding(self) -> Any:
        return compat.text_embedding(self.module)

    @property
    def head(self) -> Any:
        return compat.text_head(self.module)

    @functools.cached_property
    def vocab_size(self) -> int:
        return (made := self.recording(1, 1)).fact(made.logits).shape[-1]

    @functools.cached_property
    def takes_positions(self) -> bool:
        return compat.takes_positions(self.module)

    @functools.cached_property
    def _position_tables(self) -> list[PositionTable]:
        return sorted(position_tables(self.recording(1, 1)))

    @property
    def learned_positions(self) -> tuple[int, int] | None:
        return next(((each.count, each.first) for each in self._position_tables if each.is_learned), None)

    @property
    def counts_alike(self) -> bool:
        return any(call.op is marks.text_positions for call in self.recording(1, 1).calls)

    @property
    def computed_positions(self) -> int | None:
        return next((each.count for each in self._position_tables if not each.is_learned), None)

    def fingerprint(self) -> tuple:
        """Return what a decode plan bakes in of the model: all that the recordings hold, as a part is of one moment."""
        tensors = (*self.module.parameters(), *self.module.buffers(), *self._looked_at.tensors())
        return (self._moment, *((id(each), each.data_ptr(), each.dtype) for each in tensors))

    # ---- reasons ----------------------------------------------------------------------------------------------

    def other_reason(self) -> str | None:
        """Return why nothing is known of what is inside, or None."""
        if not self.config_kinds:
            return Cause("not_recorded", "its cache holds more than keys, values and states", self.module)
        if self.embedding is None or self.head is None:
            return Cause("not_recorded", "it has no embedding or no head", self.module)
        table = getattr(self.embedding, "weight", None)
        if not isinstance(table, torch.Tensor) and type(self.embedding) is not PackedEmbedding:
            return odd_module(self.embedding, f"a table of embeddings whose weight is a {class_name(table)}")
        return None

    def shape_reason(self, batch: int, query_len: int) -> str | None:
        """Return why there is no step of so many sequences and new tokens, or None."""
        try:
            self.recording(batch, query_len)
        except Exception as error:  # nobody has tried this code: anything may be raised
            return self._not_recorded(error, f"{batch} sequences, {query_len} new tokens: ")
        return None

    def length_bounds(self, end: int) -> list[int]:
        served = self.recording(1, 1).served
        assert served is not None, "a recorded step has them"
        return served.bounds(end)

    def drafts_reason(self, first: int, end: int) -> str | None:
        """Return why drafts cannot be verified behind ``first`` to ``end - 1`` tokens in the cache, or None."""
        return self.shape_reason(1, MAX_QUERY_LEN) or self.by_length.drafts_reason(first, end)

    def _not_recorded(self, error: Exception, where: str = "") -> Cause:
        self.is_passing = self.is_passing or isinstance(error, compat.OUT_OF_MEMORY)
        code = error.code if isinstance(error, Unrecordable) else Unrecordable.code
        what = str(error) if isinstance(error, Unrecordable) else f"{type(error).__name__}: {error}"
        if self.files_reason is not None:
            return self.files_reason
        if (layer := compat.foreign_layer(self.module)) is not None:  # such kernels take no tensors without data
            return odd_module(layer, f"{where}{what}")
        return Cause(code, f"{where}{what}", self.module)

    def proof_reason(self, plans: PlanCache, batch: int) -> str | None:
        """Return why the recorded step is not used, or None: so many sequences cannot be recorded, or it is wrong."""
        reason = self.shape_reason(batch, 1) or reason_against(self, plans, self._looked_at.have_served)
        if reason == "not_proven" and self._looked_at.leave_files():  # which may hold what another model does
            self.forget_recordings(self._moment)  # the model is what it was
            for name in ("kinds", "layers"):
                vars(self).pop(name, None)
            plans.drop_plans()
            reason = self.shape_reason(batch, 1) or reason_against(self, plans)
        return None if reason is None else self.files_reason or reason

    def arguments_reason(self, arguments: dict[str, Any], batch: int) -> Cause | None:
        """Return why a step is not the recorded one if the forward is also given ``arguments``, or None.

        Args:
            arguments: by name, without those that every step is given.
            batch: number of sequences.
        """
        key = batch, *((name, described(value)) for name, value in sorted(arguments.items()))
        if key not in self._arguments:
            try:
                reason = why_it_matters(self._looked_at.skeleton_as_now, batch, arguments)
            except Exception as error:  # nobody has tried this code: anything may be raised
                reason = f"{type(error).__name__}: {error}"
            what = f"{', '.join(arguments)}: {reason}"
            self._arguments[key] = None if reason is None else Cause("unsupported_input", what, self.module)
        return self._arguments[key]

    def making_reason(self) -> Cause | None:
        """Return a function of PyTorch's that somebody has replaced: the recording, and the twin, would be of that."""
        return None if (found := compat.replaced_function(self.source)) is None else Cause("replaced_function", found)

    def padding_reason(self, mask: torch.Tensor) -> Cause | None:
        if bool(mask.all()):
            return None
        if self._seen_padding is None and self.recording(1, 1).is_unpadded:
            return Cause("attention_mask", "padding, which matters to more than attention, or not to it")
        return self._seen_padding

    @functools.cached_property
    def _seen_padding(self) -> Cause | None:
        """Why a plan would not hide what padding hides in stock code, or None."""
        what = hides_other_places(self._looked_at.skeleton)
        return None if what is None else Cause("attention_mask", what, self.module)

    def mask_over_encoded(self, arguments: dict[str, Any]) -> torch.Tensor | None:
        """Return the mask over the encoder's output, [batch, length], that the decoder is given in the model's forward;
        None for none.

        Raises:
            ValueError: the decoder's arguments do not tell.
        """
        given = arguments.get("attention_mask")
        if not self._passes_mask_on:
            with self._looked_at.skeleton.lock:
                found = compat.seen_by_decoder(self._looked_at.skeleton.copy, arguments)
            self._passes_mask_on = found is given
            return found
        return given

    def outer_reason(self) -> str | None:
        """Return why calling the model is more than its class's forward, or None."""
        return None if self.is_cast_down else model_code_reason(self.module, self.architecture.module)

    def reason(self) -> str | None:
        """Return why a decode plan of the model would not be right now, or None."""
        if (reason := self.lasting_reason()) is not None or (found := self._other_in_training) is None:
            return reason
        return Cause("dropout", found, self.module)

    @functools.cached_property
    def _other_in_training(self) -> str | None:
        return why_other_in_training(self.module, self.code)

    def lasting_reason(self) -> str | None:
        """Do as :meth:`reason`, as if ``model.eval()`` had been called."""
        reason = self.other_reason() or self.outer_reason() or modules_reason(self.module)
        if reason in ("class_forward", "instance_forward"):
            reason = self.files_reason or reason
        return reason or tensors_reason(self.module, self.device_of, self.is_placed) or self._recording_reason

    def projections(self) -> list[nn.Module]:
        return [each for linears in self._linears() for each in linears]

    def projection_groups(self) -> list[list[list[nn.Module]]]:
        return [[wide] for wide in map(without_narrow, self._linears()) if wide]

    def _linears(self) -> list[list[nn.Module]]:
        """Return the linear layers of a step, those of one input together; no adapters, head or mixtures."""
        others = compat.adapter_modules(self.module)
        found = ([self.module.get_submodule(path) for path in names] for names in self.recording(1, 1).linears)
        of_head = getattr(self.head, "weight", None)  # FSMT's is a table that a linear layer shares
        return [
            [each for each in linears if each.weight is not of_head and id(each) not in others] for linears in found
        ]

    @functools.cached_property
    def _recording_reason(self) -> str | None:
        try:
            attentions = self.attentions
            dry_run(self)
        except Exception as error:  # nobody has tried this code, nor the passes over it: anything may be raised
            return self._not_recorded(error)
        encoded = {self.recording(1, 1).fact(each.k).shape[3] for each in self.recording(1, 1).encoded}
        return sizes_reason(self.module, attentions, encoded, self.windows)
