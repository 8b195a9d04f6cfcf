"""A decode plan: the step of one token for a whole model, recorded once as a flat list of op calls.

On the CPU the list is executed for every token; on CUDA it is captured into a graph and replayed. The list holds the
model's own parameters, so changed values take effect; if a parameter was moved or replaced, a new plan is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ... import ops
from ...cache.fastpath_cache import FastpathCache
from ...compat import below_autograd
from ...ops.kv_cache import KVCache, is_quantized
from ..calls.named_calls import Register, Step
from ..lower.composed import READING_BUFFERS
from ..lower.positions import Positions
from ..lower.which_op import Lower
from ..placed.fetch import program_of
from ..placed.stages import Stages
from ..ranks.rank_calls import COLLECTIVES
from ..run.graph import capture, random_numbers_in_turn
from ..run.program import Program
from ..sources.step_source import StepInputs, StepSource
from .angles import AngleTables, has_angles
from .encoded import Encoded, EncodedMemory
from .plan_memory import PlanMemory, like

_aten = torch.ops.aten

#: end tokens that a plan compares with; if there are more, the host compares
MAX_EOS_TOKENS = 16
#: steps whose tokens the host may leave unread before they are overwritten
RECORD_SLOTS = 32
#: longer than any cache
_ANY_LENGTH = 2**63


class DecodePlan:
    """A step that reads one new token of each of ``batch`` sequences and chooses the next.

    Every step ends in the choice of a token, so that greedy search and sampling do not need the host. A caller that
    chooses another token gives it to the next :meth:`step`.

    Args:
        part: the model.
        batch: number of sequences.
        kv_dtype: storage type of the caches that the plan will serve, None if they hold no keys and values.
        sampled: tokens are sampled, drawn with the default generator as ``torch.multinomial`` draws them; else a step
            chooses the most likely token.
        page_sizes: page size of each layer's cache, None for a layer without pages; empty if no layer has pages.

    Attributes:
        logits: [batch, vocab_size] in the model's dtype, overwritten by the next step.
        cache: given to :meth:`begin`; there is none before that and after :meth:`end`.
        on_end: called once with the plan when :meth:`end` has let go of its cache; or None.
    """

    #: tokens of a sequence that a step reads
    query_len = 1
    owners: Any = None  # of adapters: rows, see :mod:`.adapter_rows_plan`
    cache: FastpathCache

    def __init__(
        self,
        part: StepSource,
        batch: int,
        kv_dtype: torch.dtype | None,
        sampled: bool = False,
        page_sizes: tuple[int | None, ...] = (),
    ):
        self.batch, self.kv_dtype, self.sampled = batch, kv_dtype, sampled
        self.page_sizes = page_sizes or (None,) * len(part.layers)
        self.fingerprint = part.fingerprint()
        weight = part.embedding.weight
        self.device, self.dtype = weight.device, weight.dtype
        self.on_end: Callable[[DecodePlan], None] | None = None
        self.graph: Any = None  # what replays the captured program
        self._ahead = [0] * batch  # of each sequence: the next token's position, less the length of the cache
        self._shifts = [0] * batch  # added to positions on the device, to make them row numbers of the angle tables
        self._covered = range(0)  # lengths of the cache for whose positions the model has angles or embeddings
        self.warm = False  # the first step runs eagerly, because it loads kernels, which a capture must not do
        with torch.inference_mode(False):  # these buffers outlive the mode that generate() was called in
            self.tokens = torch.zeros(batch, self.query_len, dtype=torch.long, device=self.device)
            self.positions = torch.zeros(batch, self.query_len, dtype=torch.long, device=self.device)
            #: what a step reads: the tokens that the step before has chosen, or all tokens of a position
            shape = *self.tokens.shape, *part.token_shape
            self.inputs = self.tokens.new_zeros(shape) if part.token_shape else self.tokens
            self.seq_lens = torch.zeros(batch, dtype=torch.int32, device=self.device)
            self.starts = torch.zeros(batch, dtype=torch.int32, device=self.device)
            self.unfinished = torch.ones(batch, dtype=torch.long, device=self.device)
            self.eos_tokens = torch.full((MAX_EOS_TOKENS,), -1, device=self.device)
            self.pad_token = torch.zeros(1, dtype=torch.long, device=self.device)
            self.record = torch.zeros(RECORD_SLOTS, 2, batch, dtype=torch.long, device="cpu")
            if self.device.type == "cuda":
                self.record = self.record.pin_memory()
            if sampled:
                self.noise = torch.empty(batch, part.vocab_size, dtype=torch.float32, device=self.device)
                self.settings = torch.zeros(4, dtype=torch.float64, device=self.device)
            sizes = batch, self.query_len, kv_dtype, self.page_sizes
            self.memory = {device: PlanMemory.of(part, device, *sizes) for device in part.devices}
            self.program: Program = Stages(part, self.device) if len(self.memory) > 1 else program_of(part, self.device)
            #: of each layer, memory for its states; the cache holds its states there while the plan runs
            self.states = [list(map(like, found)) for found in part.states(batch)]
            #: values that are made of the model alone, each with the memory where the program reads it
            self._values = [(each, each.memory(self.device)) for each in part.values_of_model(batch, self.query_len)]
            self._caches = [self._cache_registers(size is not None) for size in self.page_sizes]
            layers = len(part.layers) if part.has_encoder else 0
            self._encoded = EncodedMemory(self.program, layers, batch, part.devices) if layers else None
            self._angles = AngleTables(part, self.program, self.dtype, self.device) if has_angles(part) else None
            #: positions that the model has learned, or None: it turns queries and keys by any
            self._learned: int | None = None
            self._position_offset = 0
            if (learned := part.learned_positions) is not None:
                self._learned, self._position_offset = learned
            self._logits = self._record(part)
            #: whether a call reads the cache where it is bound, instead of through a ``kv_table``
            self._reads_buffers = any(call.op in READING_BUFFERS for call in self.program.calls)

    def _record(self, part: StepSource) -> Register:
        """Record the token step; return the register of the logits [batch, vocab_size]."""
        emit = self.program.emit
        if self.sampled:  # the noise comes first, so that the kernels after the layers stay side by side and overlap
            emit(_aten.exponential_.default, self.noise)
        logits, step = self._record_forward(part)
        self.program.move_to(self.device)
        last = preferred = self.program.keep(emit(_aten.select.int, logits, 1, 0))
        if part.token_shape:  # the host chooses, and the call below counts positions
            preferred = emit(_aten.narrow.default, last, 0, 0, self.batch)
        if self.sampled:
            race = dict(noise=self.noise, settings=self.settings, programmatic_launch=step.programmatic_launch)
            preferred = emit(ops.exponential_race.overload, logits=last, **race)
        emit(
            ops.greedy_token.overload,
            logits=preferred,
            unfinished=self.unfinished,
            tokens=self.tokens,
            positions=self.positions,
            seq_lens=self.seq_lens,
            record=self.record,
            eos_tokens=self.eos_tokens,
            pad_token=self.pad_token,
            programmatic_launch=step.programmatic_launch,
        )
        self.program.optimize(step)
        return last

    def _cache_registers(self, paged: bool) -> KVCache:
        """Make the registers that stand for a layer's cache."""
        register = self.program.register
        k, v = register(), register()
        if paged:
            return KVCache(k, v, block_table=register())
        return KVCache(k, v, register(), register()) if is_quantized(self.kv_dtype) else KVCache(k, v)

    def _record_forward(self, part: StepSource) -> tuple[Register, Step]:
        """Record the model's forward.

        Returns:
            The register of the logits [batch, query_len, vocab_size], and what passes are told of the step.
        """
        step = self._made_for(part.rows)
        how: dict[str, Any] = dict(beside=True, early=step.programmatic_launch, device=self.device, owners=self.owners)
        to = Lower(self.program.emit, step.rows, **how)
        lens, starts = self.program.shared(self.seq_lens), self.program.shared(self.starts, is_constant=True)
        at = {}
        for device, own in self.memory.items():
            fixed = own.kv_tables, own.workspace, own.staging, self.kv_dtype
            encoded = None if self._encoded is None else self._encoded.on(device)
            at[device] = Positions({}, lens, starts, *fixed, encoded)
        tables = {} if self._angles is None else self._angles.registers
        values = [memory for _, memory in self._values]
        given = StepInputs(self.inputs, self.positions, tables, self._caches, self.states, values, at)
        return part.record(self.program, to, given), step

    def _made_for(self, of_sequence: int) -> Step:
        """Return the circumstances of the plan's calls, which decide what passes make of the calls."""
        # The op for all layers takes one token, and a cache of the model's type; it has kernels for GPUs alone.
        at_once = self.batch == 1 and self.query_len == 1 and self.device.type == "cuda"
        at_once = at_once and self.kv_dtype in (None, self.dtype)
        # Kernels may overlap: no call of the step writes a parameter or the KV table, and lengths change only before
        # the step or in its last kernel.
        is_early = self.device.type == "cuda"
        return Step(self.batch * self.query_len * of_sequence, one_call=at_once, programmatic_launch=is_early)

    def begin(
        self,
        cache: FastpathCache,
        positions: torch.Tensor,
        starts: torch.Tensor | None,
        unfinished: torch.Tensor | None = None,
        eos_tokens: torch.Tensor | None = None,
        pad_token: torch.Tensor | None = None,
        settings: Sequence[float] | None = None,
        encoded: Encoded | None = None,
    ) -> None:
        """Start or continue generating over ``cache``.

        Args:
            cache: holds the prompt, with every layer initialized.
            positions: int64 or int32 [batch], position ids of the next tokens; any numbers, also negative ones.
            starts: [batch] left padding of each row, or None for none.
            unfinished: int64 [batch], 1 for rows that go on; None if all do.
            eos_tokens: at most MAX_EOS_TOKENS end tokens that the plan compares with, or None.
            pad_token: the token for a row that has ended; needed with ``eos_tokens``.
            settings: for a plan that samples: temperature, top_k, top_p and min_p, as ``exponential_race`` takes them.
            encoded: of a model with an encoder, what that has read; else None.
        """
        if self.sampled:
            self.settings.copy_(torch.tensor(settings, dtype=torch.float64, device="cpu"))
        self.seq_lens.fill_(cache.get_seq_length() + 1)
        self.unfinished.fill_(1) if unfinished is None else self.unfinished.copy_(unfinished)
        self.eos_tokens.fill_(-1)
        if eos_tokens is not None:
            assert pad_token is not None
            self.eos_tokens[: eos_tokens.numel()] = eos_tokens
            self.pad_token.copy_(pad_token.reshape(1))
        self.positions.copy_(positions[:, None])
        self.starts.zero_() if starts is None else self.starts.copy_(starts)
        if self._encoded is not None:
            assert encoded is not None
            self._encoded.bind(encoded)
        self._fill_values()
        self.cache, self._held = cache, cache.get_seq_length()
        self._ahead = [position - self._held for position in positions.tolist()]
        self._shifts, self._covered = [0] * self.batch, range(0)
        self.program.renew()
        self.bind()

    def _fill_values(self) -> None:
        for value, memory in self._values:
            value.fill(memory)

    def bind(self) -> None:
        """Tell the program where the cache's buffers are, if other code than its steps may have moved them."""
        layers, kinds = self.cache.layers, self.cache.kinds
        self._hold_states()
        if self._reads_buffers:
            self.graph = None  # the graph holds the old addresses
        for own in self.memory.values():
            own.bind(layers, kinds, self.page_sizes)
        for registers, layer, kind in zip(self._caches, layers, kinds):
            if kind.keys:
                self.program.put(registers, layer.kv_cache())

    def _hold_states(self) -> None:
        """Let the cache hold its states where the program reads them."""
        for layer, buffers in zip(self.cache.layers, self.states):
            if buffers:
                layer.hold(buffers)

    def _cover(self, count: int) -> None:
        """Make sure that the model knows the next ``count`` positions of every sequence.

        Raises:
            IndexError: the model has learned no such positions.
        """
        length = self.cache.get_seq_length()
        if length not in self._covered or length + count not in self._covered:
            self._covered = self._cover_anew(length, count)

    def _cover_anew(self, length: int, count: int) -> range:
        """Do as :meth:`_cover`, whatever was covered before; return the lengths of the cache that are covered now."""
        positions = [length + ahead for ahead in self._ahead]
        if self._learned is not None:
            low, high = min(positions), max(positions)
            first, last = -self._position_offset, self._learned - count
            if low < first or high > last:
                raise IndexError(
                    f"position_ids come to {low if low < first else high + count - 1}, and the model has learned "
                    f"{self._learned} positions: generate fewer tokens (max_length), or give smaller position_ids"
                )
            return range(length + first - low, length + self._learned - high + 1)
        if self._angles is None:
            return range(_ANY_LENGTH)
        found = [self._angles.find(position, count) for position in positions]
        if None in found:
            if self._angles.cover(positions, count, length, self.cache.expected_length):
                self.graph = None  # the graph reads the old tables
            found = [self._angles.find(position, count) for position in positions]
        runs = [run for run in found if run is not None]  # all of them
        shifts = [run.row - run.first for run in runs]
        if shifts != self._shifts:
            moved = [[now - before] for now, before in zip(shifts, self._shifts)]
            self.positions.add_(torch.tensor(moved, device=self.device))
            self._shifts = shifts
        first = max(run.first - position for run, position in zip(runs, positions))
        last = min(run.first + run.size - position for run, position in zip(runs, positions))
        return range(length + first, length + last + 1)

    def next_positions(self) -> torch.Tensor:
        """Return int64 [batch], position ids of the next tokens."""
        return torch.tensor(self._ahead, device=self.device) + self.cache.get_seq_length()

    def has_positions(self) -> bool:
        """Whether the model knows the positions of the next step."""
        learned = _ANY_LENGTH if self._learned is None else self._learned
        return self.cache.get_seq_length() + max(self._ahead) < learned

    @property
    def logits(self) -> torch.Tensor:
        return self.program.values[self._logits.index]

    def choice(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what was chosen by the step that made a cache of ``length`` tokens.

        Returns:
            Tokens and unfinished rows, views of [batch] each in host memory, which are valid once the device has passed
            that step and until RECORD_SLOTS steps later.
        """
        slot = self.record[(length + 1) % RECORD_SLOTS]
        return slot[0], slot[1]

    def step(self, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Read one token of each sequence.

        Args:
            tokens: int64 [batch], or None for the tokens that the step before has chosen; of several tokens at a
                position [batch, channels].

        Returns:
            [batch, vocab_size] logits of the next token, valid until the next step; of several [batch * channels,
            vocab_size].

        Raises:
            IndexError: the model has not learned a position; on the CPU also: it does not know a token.
        """
        if self.cache.reserve(1):
            self.bind()
        self._cover(1)
        if tokens is not None:
            self.inputs.copy_(tokens[:, None])
        self._run()
        self.cache.advance(1)
        self._held += 1
        return self.logits

    def follow_edits(self) -> None:
        """Before a :meth:`step`: take on weights that a callback of ``generate()`` has changed, and a cache that it has
        shortened or lengthened.

        Positions go on as before.
        """
        if self.cache.reserve(1):
            self.bind()
        self._hold_states()
        self._fill_values()
        self.program.renew()
        if all(layer.cumulative_length == self._held for layer in self.cache.counting_layers):
            return
        if not self.cache.take() or bool(self.starts.any()):
            raise RuntimeError(
                "a callback of generate() has changed how many positions the FastpathCache holds, of some layers or "
                "beside padded sequences, expected all layers to hold as many and no padding: change all layers alike, "
                "between two calls of generate(), or pass a transformers DynamicCache"
            )
        length = self.cache.get_seq_length()
        self.seq_lens.fill_(length + 1)
        self._ahead = [ahead + self._held - length for ahead in self._ahead]
        self._held, self._covered = length, range(0)

    def rewind(self) -> None:
        """Take on a cache that was cropped or extended by other steps; the next :meth:`step` has to get its token."""
        length = self._held = self.cache.get_seq_length()
        self.seq_lens.fill_(length + 1)
        self.positions.fill_(length + self._ahead[0] + self._shifts[0])

    def _run(self) -> None:
        """Make the calls of a step; once they have run by themselves, as a graph."""
        with random_numbers_in_turn(self.device):
            if self.device.type == "cuda" and self.warm and self.graph is None:
                self.graph = self.program.captured(capture, self.device)
            if self.graph is not None:
                self.graph.replay()
            else:
                with below_autograd():
                    self.program.run()
        self.warm = True

    def end(self) -> None:
        """Let go of the cache."""
        cache: FastpathCache | None = vars(self).pop("cache", None)
        for layer in () if cache is None else cache.state_layers:
            layer.leave()
        for registers in self._caches:
            # A captured graph finds the buffers through the kv_tables; keeping them here would only hold memory.
            self.program.put(registers, None)
        if self._encoded is not None:
            self._encoded.release()
        self.program.release()
        if any(call.op in COLLECTIVES for call in self.program.calls):
            self.graph = None  # NCCL destroys no process group while a graph holds calls of it
        done, self.on_end = self.on_end, None
        if done is not None:
            done(self)

    go_back = end  # to what goes on with the cache
