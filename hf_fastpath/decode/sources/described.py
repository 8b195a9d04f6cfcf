"""A causal LM that an architecture file describes, as a source of steps: its roles are written down as calls."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from ...architecture import Architecture
from ...compat import LayerKind, layer_windows
from ...reasons import Cause
from ..lower.many_experts import most_sequences
from ..lower.which_op import Lower
from ..model.modules import found_at
from ..model.parts import HeadPart, MoEPart
from ..model.structure import ModelInRoles
from ..run.program import Program
from . import steps
from .described_prompts import DescribedPrompts
from .fingerprint import fingerprint
from .step_source import AnyLength, StepInputs


@dataclass(frozen=True)
class DescribedModel(ModelInRoles):
    """A model in its roles, from which its steps are written down whenever a plan asks for one."""

    takes_positions: ClassVar[bool] = True
    token_shape: ClassVar[tuple[int, ...]] = ()
    is_multimodal: ClassVar[bool] = False
    has_encoder: ClassVar[bool] = False
    rows: ClassVar[int] = 1
    code: ClassVar[Any] = None
    recorded: ClassVar[dict[str, Any]] = {}
    held: ClassVar[Any] = None
    takes_long: ClassVar[bool] = False
    modules_use_cache: ClassVar[bool] = True
    counts_alike: ClassVar[bool] = False
    computed_positions: ClassVar[int | None] = None  # angles are computed for any position

    # ---- the cache ------------------------------------------------------------------------------------------------

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        return tuple(LayerKind(window=window) for window in self.windows)

    @property
    def config_kinds(self) -> tuple[LayerKind, ...]:
        return self.kinds

    @property
    def query_heads(self) -> set[tuple[int, int]]:
        return {(attention.num_heads, attention.head_dim) for attention in self.attentions}

    def states(self, batch: int) -> list[list[torch.Tensor]]:
        """Return nothing: layers hold keys and values alone."""
        return []

    def values_of_model(self, batch: int, query_len: int) -> list[Any]:
        """Return nothing: calls read the model's tensors."""
        return []

    @property
    def max_batch(self) -> int:
        mixtures = (layer.mlp for layer in self.layers if isinstance(layer.mlp, MoEPart))
        return most_sequences(dict(zip(("gate_up_weight", "down_weight"), each.stacks())) for each in mixtures)

    @property
    def learned_positions(self) -> tuple[int, int] | None:
        learned, offset = self.position_embedding, self.position_offset
        return None if learned is None else (learned.weight.shape[0] - offset, offset)

    def fingerprint(self) -> tuple:
        return fingerprint(self)

    def adopt(self, kept: Any, differs: Any) -> bool:
        """Take nothing: whatever is known of a model is written down anew in no time."""
        return False

    # ---- steps ----------------------------------------------------------------------------------------------------

    def record(self, program: Program, to: Lower, given: StepInputs) -> Any:
        tables = [table for pair in given.tables.values() for table in pair]
        hidden, rows = steps.step_inputs(to, self, given.tokens, given.positions, tables)
        angles = dict(zip(given.tables, zip(rows[::2], rows[1::2])))
        at = {device: replace(each, angles=angles) for device, each in given.at.items()}
        for index, (layer, device) in enumerate(zip(self.layers, self.layer_devices)):
            program.move_to(device)
            there = replace(to, device=device)
            hidden = steps.decoder_layer(there, layer, hidden, given.caches[index], at[device], index)
        return steps.placed_logits(program, to, self, hidden)

    @property
    def by_length(self) -> AnyLength:
        return AnyLength(self)

    def length_bounds(self, end: int) -> list[int]:
        """Return none: the step is that of any length."""
        return []

    def drafts_reason(self, first: int, end: int) -> str | None:
        """Return None: a step of several tokens is that of any length."""
        return None

    def proof_reason(self, plans: Any, batch: int) -> str | None:
        """Return None: nothing about a described step has to be proven."""
        return None

    @property
    def prompts(self) -> DescribedPrompts:
        return DescribedPrompts(self)

    # ---- reasons --------------------------------------------------------------------------------------------------

    def padding_reason(self, mask: torch.Tensor) -> Cause | None:
        """Return None: padding is hidden from attention, and nothing else would see it."""
        return None

    def arguments_reason(self, arguments: dict[str, Any], batch: int) -> Cause | None:
        """Return a reason: the file knows of no other arguments."""
        return Cause("unsupported_input", ", ".join(arguments), self.module)

    def mask_over_encoded(self, arguments: dict[str, Any]) -> torch.Tensor | None:
        """Return None: there is no encoder."""
        return None

    # ---- weights --------------------------------------------------------------------------------------------------

    def projections(self) -> list[nn.Module]:
        return [linear for layer in self.layers for linear in layer.projections()]

    def projection_groups(self) -> list[list[list[nn.Module]]]:
        return [layer.projection_groups() for layer in self.layers]

    @property
    def head_part(self) -> HeadPart | None:
        return HeadPart(self.architecture, self.owner(self.head))


def model_part(architecture: Architecture, model: nn.Module) -> DescribedModel | None:
    """Return a causal LM of ``architecture``, or None if ``model`` is not exactly one."""
    cls = type(model)
    if (cls.__module__, cls.__name__) != (architecture.module, architecture.causal_lm):
        return None
    if (windows := layer_windows(model.config)) is None:
        return None
    # a config that was edited since the model was made may tell of more layers, which the model's own code leaves out
    found = getattr(found_at(model, architecture.base), architecture.layers, windows)
    return DescribedModel(architecture, model, tuple(windows[: len(found)]))
