"""Self-test on an untested version of transformers, and of a family that is known only by its structure: a tiny random
twin of the model is patched and compared with stock."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from .. import compat
from ..errors import UnsupportedModelError
from ..options import Options
from ..parity.comparison import compare, different_tokens
from ..parity.draws import different_draws
from ..reasons import REASONS
from ..recording import proof
from ..recording.family import Recorded
from ..recording.kept_recordings import of_patch
from . import passed_twins
from .analyse import analyse
from .apply import apply, claim, keep_recording, undo
from .coverage import check_coverage, unsupported
from .multimodal_twin import cut_inside, multimodal_twin
from .plan import PatchPlan
from .state import PatchState
from .twin_config import VOCAB_SIZE, twin_config

#: places of a random output of an encoder
_ENCODED = 24
_PROMPT_TOKENS, _NEW_TOKENS = 12, 16


def is_due(plan: PatchPlan) -> bool:
    """Whether a twin is tried before the plan is applied.

    If the code of transformers is none that was tested, a twin is tried if our loop is to run; of a family that is
    known only by its structure, a twin is tried if anything is to be patched; of a recorded model, one is always tried.
    """
    if plan.recorded is not None or (plan.by_structure is not None and plan.patched):
        return True
    return plan.loop_reason is None and _why_untested(plan) is not None


def _why_untested(plan: PatchPlan) -> str | None:
    return compat.why_untested(() if plan.architecture is None else (plan.architecture.module,))


def check(plan: PatchPlan) -> None:
    """Try a twin of the model.

    Raises:
        UnsupportedModelError: the twin does not decode as stock does.
    """
    model, saved = plan.model, of_patch()
    if plan.recorded is not None and saved is not None and saved.is_taken:  # its twin has passed
        plan.recorded.twins_difference = saved.difference
        return
    difference, of_logits = run(model, plan.recorded)
    if plan.ranks is not None:
        difference = plan.ranks.agreed(difference)
    if difference is None:
        if plan.recorded is not None:
            plan.recorded.twins_difference = of_logits
        return
    if plan.recorded is not None:
        cause = f"the recorded step of a small {type(model).__name__} does not decode as stock does"
        raise unsupported(cause, REASONS["not_recorded"].remedy, why=difference)
    found = plan.by_structure
    if found is not None:
        why = f"{found.name} has no architecture file and was taken for a {found.like}"
    else:
        why = _why_untested(plan)
    raise UnsupportedModelError(
        f"{why}, and a small {type(model).__name__} does not decode as stock does: {difference}"
    )


def _inside(model: nn.Module) -> list[Any]:
    """Return the configs of the parts of an encoder-decoder, if it has some of their own."""
    return list(compat.configs_inside(model.config).values()) if compat.has_encoder(model) else []


def _twin(model: nn.Module, recorded: Recorded | None) -> nn.Module:
    has_decoder = compat.is_multimodal(model) and compat.text_decoder(model) is not model
    if has_decoder or any(compat.entry_of(each, "num_hidden_layers") is None for each in _inside(model)):
        first = None if recorded is None else recorded.first
        return multimodal_twin(model, twin_config, () if first is None else first.recording(1, 1).readers)
    config = twin_config(model.config)
    if compat.has_encoder(model):
        cut_inside(config, twin_config)
        if compat.token_shape(model):  # a processor of logits asks for an end
            compat.set_entry(config.get_text_config(decoder=True), "eos_token_id", VOCAB_SIZE - 1)
    return type(model)(config)


def run(model: nn.Module, recorded: Recorded | None = None) -> tuple[str | None, float]:
    """Patch a twin of ``model`` and compare it with itself.

    Args:
        recorded: what takes the place of the model's family if its step is recorded.

    Returns:
        What differed, or None if the twin decodes as stock does; and by how much logits of a recorded step differ in
        the model's dtype, see :mod:`..recording.proof`. A twin that has passed is not tried again.
    """
    device = _device(model)
    dtype = next((each.dtype for each in model.parameters() if each.is_floating_point()), torch.float32)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), _on_cpu():
        torch.manual_seed(0)
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        shape = 1, _PROMPT_TOKENS, *compat.token_shape(model)
        prompt = torch.randint(3, VOCAB_SIZE, shape).to(device)
        twin = None
        try:
            twin = _twin(model, recorded).eval()
            compat.set_known_inputs(twin)
            key = passed_twins.key_of(twin, device, dtype)
            if (known := passed_twins.find(key)) is not None:
                return None, known
            torch.set_default_dtype(default)
            difference, of_logits = _difference(twin.to(device), prompt, dtype, recorded)
        except Exception as error:  # nobody has tried this code: anything may be raised
            difference, of_logits = f"{type(error).__name__}: {error}", 0.0
        finally:
            torch.set_default_dtype(default)
        if difference is not None and recorded is not None and twin is not None and not _runs(twin, prompt):
            return None, 0.0  # the config tells of another model than this is; its own first tokens will prove it
    if difference is None:
        passed_twins.keep(key, of_logits, twin)
    else:
        passed_twins.forget()
    return difference, of_logits


def _runs(twin: nn.Module, prompt: torch.Tensor) -> bool:
    """Whether stock code runs a twin that is not patched. A config that was edited since its model was made may be one
    that no model could be made of."""
    try:
        if not compat.has_encoder(twin):
            twin.generate(prompt, max_new_tokens=2)
    except Exception:
        return False
    return True


def _on_cpu() -> AbstractContextManager[Any]:
    """Make new tensors on the CPU for the length of a ``with`` block. If they are made there anyway, nothing is done:
    PyTorch's own context takes a part in each of the twin's 50,000 calls."""
    cpu = torch.device("cpu")
    return nullcontext() if torch.get_default_device() == cpu else cpu


def _device(model: nn.Module) -> torch.device:
    # the weights of a model on the meta device come later, with load_packed()
    return next((each.device for each in model.parameters() if not each.is_meta), torch.device("cpu"))


@passed_twins.hearing()
def _difference(
    twin: nn.Module, prompt: torch.Tensor, dtype: torch.dtype, recorded: Recorded | None
) -> tuple[str | None, float]:
    """Return how a twin decodes otherwise than stock code, or None; and of a recorded one, by how much its logits
    differ in ``dtype``. A twin of a recorded model has to be recorded, too."""
    plan = analyse(twin, Options.parse())
    if recorded is not None and plan.recorded is None:
        known = plan.loop_reason or "a model of its config has other modules than it has"
        return f"{known} ({known.what})" if getattr(known, "what", "") else str(known), 0.0
    check_coverage(plan)
    state = PatchState(plan.options)
    claim(twin, state)
    apply(plan, state)
    keep_recording(plan, state)
    try:
        if plan.recorded is not None:  # its experts and routers may not run in float64, which compare() needs
            encoded, part = None, state.plans.part_of(twin)
            if part is not None:
                part.prompts.leave()  # recording them takes long, and each model's own are proven
            if compat.has_encoder(twin):
                encoded = torch.randn(1, _ENCODED, compat.encoder_width(twin)).to(prompt.device)
            tokens = different_tokens(twin, prompt, _NEW_TOKENS, encoded) or _different_draws(twin, prompt, encoded)
            part = state.plans.part_of(twin.to(dtype)) if tokens is None else None
            return tokens, 0.0 if part is None else proof.difference(part, state.plans)
        result = compare(twin, prompt, _NEW_TOKENS)
        return _different_draws(twin, prompt) if result.ok else str(result), 0.0
    finally:
        undo(state)


def _different_draws(twin: nn.Module, prompt: torch.Tensor, encoded: torch.Tensor | None = None) -> str | None:
    """Return how stock code draws other tokens than ours, or None. Of the tested code that is known."""
    if compat.why_untested(()) is None or compat.token_shape(twin):
        return None
    return different_draws(twin, prompt, encoded)
