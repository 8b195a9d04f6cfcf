"""A source of steps: what plans, prompts, loops, caches, reports and quantization ask of a model.

There are two kinds: a model that an architecture file describes (:class:`.described.DescribedModel`), whose step is
written down from its modules' roles, and one whose step is recorded from its own forward
(``recording.recorded_model.RecordedModel``). Each is a model as it was at one time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from ...compat import LayerKind
from ...ops.kv_cache import KVCache
from ...reasons import Cause
from ..lower.positions import Positions
from ..lower.which_op import Lower
from ..model.parts import HeadPart
from ..ranks.process_group import Ranks
from ..run.program import Program
from .prompts import CachedAttention, Prompts


@dataclass(frozen=True)
class StepInputs:
    """What a plan has for a step.

    Attributes:
        tokens: int64 [batch, query_len], or [batch, query_len, *token_shape].
        positions: int64 [batch, query_len].
        tables: kind of layer -> registers of the tables of cos and sin; empty without rotary embedding.
        caches: registers of each layer's keys and values.
        states: of each layer, memory for its states.
        values: of the model, see :class:`ValueOfModel`; the memory of each.
        at: device -> the places of the new tokens for calls there, as yet without angles.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    tables: Mapping[str | None, tuple[Any, Any]]
    caches: Sequence[KVCache]
    states: Sequence[Sequence[torch.Tensor]]
    values: Sequence[torch.Tensor]
    at: Mapping[torch.device, Positions]


class Origin(Protocol):
    """Where a model's classes come from: an architecture, or the family of recorded models."""

    @property
    def module(self) -> str:
        """Name of the transformers module that defines the model's class."""


class ValueOfModel(Protocol):
    """What a step makes of the model's tensors alone, and a plan has in memory of its own: a table of what is added to
    scores, a norm of a weight."""

    def memory(self, device: torch.device) -> torch.Tensor:
        """Return memory for the value."""

    def fill(self, memory: torch.Tensor) -> None:
        """Write the value there, as the model's tensors are now."""


class ServedLengths(Protocol):
    """For which lengths of the text a source's steps are the model's, and the sources for other lengths."""

    def is_bounded(self, batch: int) -> bool:
        """Return whether the steps of so many sequences are not those of any text."""

    def fingerprints(self) -> list[tuple]:
        """Return what decode plans bake in, of the sources for other lengths."""

    def part_for(self, past: int, encoded: int | None, batch: int) -> StepSource:
        """Return the source whose step is the model's behind ``past`` tokens in the cache and ``encoded`` places that
        an encoder has read (None without one)."""

    def reason(self, plans: Any, batch: int, first: int, end: int, encoded: int | None) -> Cause | None:
        """Return why there are no steps behind ``first`` to ``end - 1`` tokens in the cache, or None."""


class StepSource(Protocol):
    """A causal LM as it is now, with all that a decode plan needs of it."""

    # ---- the model ------------------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The model whose tensors calls read: the user's, or a local model that stands for it."""

    @property
    def source(self) -> nn.Module:
        """The model that was given to ``patch()``."""

    def owner(self, module: nn.Module) -> nn.Module:
        """Return the module of :attr:`source` that a module of :attr:`module` stands for."""

    @property
    def architecture(self) -> Origin:
        """Where the model's classes come from."""

    @property
    def embedding(self) -> Any:
        """The module whose ``weight`` is the table of embeddings."""

    @property
    def head(self) -> Any:
        """The module that makes logits."""

    @property
    def rotary(self) -> nn.Module | None:
        """The module of whose angles a plan keeps tables; None if a step computes angles, or has none."""

    @property
    def vocab_size(self) -> int:
        """Number of logits of a token."""

    @property
    def num_embeddings(self) -> int:
        """Number of tokens that the model has embeddings of."""

    @property
    def max_batch(self) -> int:
        """Sequences that a decode plan takes at most."""

    @property
    def is_cast_down(self) -> bool:
        """Whether a trainer makes the forward run under autocast, and the weights are float32."""

    # ---- what a step is given -------------------------------------------------------------------------------------

    @property
    def takes_positions(self) -> bool:
        """Whether its forward takes position ids."""

    @property
    def token_shape(self) -> tuple[int, ...]:
        """What is generated at a position: one token, or so many (codebooks of sound)."""

    @property
    def is_multimodal(self) -> bool:
        """Whether it reads images or sound as well."""

    @property
    def has_encoder(self) -> bool:
        """Whether its decoder attends to what an encoder has read."""

    @property
    def learned_positions(self) -> tuple[int, int] | None:
        """How many positions the model has learned, and the row of the first of them; None if it knows any."""

    @property
    def computed_positions(self) -> int | None:
        """Of how many positions the model has computed a table, which its own code may make longer; None if of any."""

    @property
    def counts_alike(self) -> bool:
        """Whether a step counts the places of its tokens in the text by itself, of all sequences alike."""

    # ---- the cache ------------------------------------------------------------------------------------------------

    @property
    def layers(self) -> Sequence[Any]:
        """The layers of the cache, of which other code asks for the number alone."""

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """What each layer of the cache holds."""

    @property
    def config_kinds(self) -> tuple[LayerKind, ...]:
        """What each layer that the config tells of holds, which is known at once."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer, None for full attention."""

    @property
    def attentions(self) -> Sequence[CachedAttention]:
        """The attention of each layer that holds keys and values."""

    @property
    def query_heads(self) -> set[tuple[int, int]]:
        """Number of query heads and elements of a head, of every attention."""

    def states(self, batch: int) -> Sequence[Sequence[torch.Tensor]]:
        """Return tensors like the states that each layer holds of ``batch`` sequences."""

    def values_of_model(self, batch: int, query_len: int) -> Sequence[ValueOfModel]:
        """Return what steps make of the model's tensors alone, which a plan fills when it begins."""

    # ---- where its tensors are ------------------------------------------------------------------------------------

    @property
    def ranks(self) -> Ranks | None:
        """The processes over which the model is spread, or None if this one has all of it."""

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All devices of a step, that of the embeddings first."""

    @property
    def layer_devices(self) -> list[torch.device]:
        """The device of each layer of the cache."""

    @property
    def host_weights(self) -> Sequence[list[torch.Tensor]]:
        """Groups of tensors in host memory that a step has to bring to a GPU, in the order in which it reads them."""

    @property
    def sources(self) -> Sequence[tuple[int, int]]:
        """Identities and addresses of tensors that the model's parameters stand for and that are no parameters."""

    # ---- its moment -----------------------------------------------------------------------------------------------

    @property
    def recorded(self) -> Mapping[str, Any]:
        """Name -> recording, of those of the whole model that were made or found so far; no file's model has any."""

    @property
    def code(self) -> Any:
        """What ran of the model's code when its step was made (``recording.noted_code``); None if none did, so that
        all names of the module that defines its class count."""

    @property
    def held(self) -> Any:
        """A walk through the Python values that the step was made with (``python_state.Walk``); None if it was not made
        with the values of one time."""

    @property
    def takes_long(self) -> bool:
        """Whether it takes long to find out about the model, as its forward has to run: then what was found is kept
        for a time when the model is so again, and nobody asks where stock code runs in any case."""

    @property
    def is_passing(self) -> bool:
        """Whether a reason against it was a lack of memory, which is no reason to keep."""

    def look_again(self) -> None:
        """Note that time has gone by."""

    def adopt(self, kept: StepSource, differs: Sequence[str]) -> bool:
        """Take what is known of the model as it was when ``kept`` was made, which differs in the values at ``differs``,
        if that can be done without running the model; return whether it was."""

    def fingerprint(self) -> tuple:
        """Return what a decode plan bakes in of the model."""

    # ---- steps ----------------------------------------------------------------------------------------------------

    def record(self, program: Program, to: Lower, given: StepInputs) -> Any:
        """Emit a step; return the register of the logits [batch, query_len, vocab_size].

        Args:
            program: gets the calls.
            to: makes the calls, and gives them to ``program``.
        """

    @property
    def rows(self) -> int:
        """How many rows of a sequence products of a token's step are given at most."""

    @property
    def by_length(self) -> ServedLengths:
        """For which lengths of the text its steps are the model's."""

    def length_bounds(self, end: int) -> list[int]:
        """Return the lengths of the text, below ``end``, from which on the step is another one."""

    @property
    def prompts(self) -> Prompts:
        """How prompts are read."""

    @property
    def modules_use_cache(self) -> bool:
        """Whether the model's modules are fast over our cache in a call that our loop leaves to stock's; else nothing
        but our loop uses it."""

    # ---- reasons --------------------------------------------------------------------------------------------------

    def other_reason(self) -> str | None:
        """Return why nothing is known of what is inside, or None."""

    def reason(self) -> str | None:
        """Return why a decode plan of the model would not be right now, or None."""

    def lasting_reason(self) -> str | None:
        """Return why no later call can use a decode plan of the model either, or None."""

    def making_reason(self) -> Cause | None:
        """Return why a step that is made now would not be the model's later, or None."""

    def drafts_reason(self, first: int, end: int) -> str | None:
        """Return why drafts cannot be verified behind ``first`` to ``end - 1`` tokens in the cache, or None."""

    def proof_reason(self, plans: Any, batch: int) -> str | None:
        """Return what a comparison of its steps with the model's own has shown against them, or None."""

    def reason_of_ranks(self, plans: Any, batch: int) -> str | None:
        """Do as :meth:`proof_reason` for steps that are only whole with those of the other ranks. Every rank has to
        call this method, and comes to the same."""

    def padding_reason(self, mask: torch.Tensor) -> Cause | None:
        """Return why a step does not hide the padding that ``mask``, [batch, seq_len], shows in front; or None."""

    def arguments_reason(self, arguments: dict[str, Any], batch: int) -> Cause | None:
        """Return why a step is another one if the forward is also given ``arguments``, or None."""

    def row_adapters_reason(self, batch: int, numbers: Mapping[int, int]) -> str | None:
        """Return why no step of so many sequences has an adapter for each row, or None.

        Args:
            numbers: address of each adapter's first matrix in a layer -> a number.
        """

    def mask_over_encoded(self, arguments: dict[str, Any]) -> torch.Tensor | None:
        """Return the mask over the encoder's output, [batch, length], that the decoder is given; None for none."""

    @property
    def reason_of_file(self) -> Cause | None:
        """Why an architecture file that describes the model does not take it now, so that this source stands in; None
        without a file, and for what a file describes."""

    # ---- weights --------------------------------------------------------------------------------------------------

    def projections(self) -> list[nn.Module]:
        """Return the linear layers of a token's step, without the head and mixtures."""

    def projection_groups(self) -> list[list[list[nn.Module]]]:
        """Return those of the :meth:`projections` that may be quantized: of each layer, those of one input together."""

    @property
    def head_part(self) -> HeadPart | None:
        """The head in its role, if a forward of ours can take its place; else None."""


class AnyLength:
    """The lengths of a source whose steps are those of any text.

    Args:
        part: the source.
    """

    def __init__(self, part: StepSource):
        self._part = part

    def is_bounded(self, batch: int) -> bool:
        return False

    def fingerprints(self) -> list[tuple]:
        return []

    def part_for(self, past: int, encoded: int | None, batch: int) -> StepSource:
        return self._part

    def reason(self, plans: Any, batch: int, first: int, end: int, encoded: int | None) -> Cause | None:
        return None
