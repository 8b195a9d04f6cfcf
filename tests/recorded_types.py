"""What ``patch()`` does to every causal-LM type, every multimodal type and every encoder-decoder type of the installed
transformers: the rows of ``docs/data/recorded_types.csv``, ``multimodal_types.csv`` and ``encoder_decoder_types.csv``,
which ``python docs/make_types.py`` writes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import causal_lm_types
import encoder_decoder_types
import multimodal_types
import pytest
import torch
from causal_lm_types import kind, small_model
from models import CPU
from transformers import PreTrainedModel

import hf_fastpath
from hf_fastpath.compat import token_shape
from hf_fastpath.decode.calls.named_calls import Call, Register
from hf_fastpath.decode.lower import many_rows
from hf_fastpath.errors import UnsupportedModelError
from hf_fastpath.ops.latent_attention import MAX_RANK
from hf_fastpath.options import Options
from hf_fastpath.patching.analyse import analyse
from hf_fastpath.patching.state import patched_model, state_of
from hf_fastpath.recording import lowering, marks
from hf_fastpath.recording.passes.attention import positional
from hf_fastpath.recording.recorded_model import RecordedModel
from hf_fastpath.recording.recorded_step import Recording, read_by

_aten = torch.ops.aten

#: recorded calls that PyTorch runs: products, which may be of weights or of attention, and experts
_PRODUCTS = {
    marks.matmul: "matmul",
    marks.sdpa: "scaled_dot_product_attention",
    marks.other_experts: "experts",
    **{each: each._schema.name.partition("::")[2] for each in (
        *(_aten.mm.default, _aten.bmm.default, _aten.addmm.default, _aten.baddbmm.default),
        *(_aten.convolution.default, _aten.dot.default, _aten.mv.default),
    )},
}  # fmt: skip
#: calls of a plan that PyTorch runs though a file describes the model
_COMPOSED = {
    many_rows.linear: "linear",
}


@dataclass(frozen=True)
class Row:
    """What came of a type.

    Attributes:
        model_type: the type.
        kind: what its cache is, see ``causal_lm_types.kind``; of a multimodal type, what of its prompts is compared
            besides text: "media" (images or sound) or ""; of an encoder-decoder, what its encoder reads in the
            comparison: "text", or "" if a random output stands in its place.
        how: "file", "recorded" or "stock".
        tokens: "equal" if greedy tokens of a prompt and of a padded batch are stock's; "" if the type runs stock code;
            otherwise what is wrong.
        left: products with weights, attention and experts that PyTorch runs, "; " between them.
        reason: why it runs stock code, or padded prompts do; "" if none does.
    """

    model_type: str
    kind: str
    how: str
    tokens: str = ""
    left: str = ""
    reason: str = ""

    @property
    def is_fast(self) -> bool:
        """Whether it decodes by a plan, with stock's tokens."""
        return self.how != "stock" and self.tokens == "equal"

    @property
    def is_ours(self) -> bool:
        """Whether every product with a weight, every attention and all experts of its step are ops of ours besides."""
        return self.is_fast and not self.left


def over_types(usual: tuple[str, ...]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that gives a test every causal-LM type as ``model_type``; all but ``usual`` with --full."""
    types = dict.fromkeys((*usual, *causal_lm_types.types()))
    marks = {each: () if each in usual else pytest.mark.full for each in types}
    return pytest.mark.parametrize("model_type", [pytest.param(each, marks=marks[each]) for each in types])


def pair_or_skip(model_type: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return a small model of a type, stock and patched; skip the test if there is none."""
    try:
        stock = small_model(model_type)
    except Exception as error:  # a type of a new release may fail in any way
        pytest.skip(f"{model_type} has no small model: {error}")
    try:
        return stock, hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    except UnsupportedModelError as error:
        pytest.skip(f"{model_type} is not patched: {error}")


def row(model_type: str, device: torch.device = CPU) -> Row:
    """Build a small model of a type, patch it on a device, and compare it with stock."""
    try:
        stock = small_model(model_type)
    except Exception as error:  # a type of a new release may fail in any way, and the row says how
        return Row(model_type, "broken", "stock", reason=f"no small model: {causal_lm_types.said(error)}")
    of_kind, _, why = kind(stock).partition(": ")
    if why:
        return Row(model_type, of_kind, "stock", reason=why)
    return _patched_row(model_type, of_kind, stock, _prompts(), device)


def multimodal_row(model_type: str, device: torch.device = CPU) -> Row:
    """Do as :func:`row` for a multimodal type, whose prompts also have images or sound if it is one of ``MEDIA``."""
    try:
        stock = multimodal_types.small_model(model_type)
        medium = multimodal_types.MEDIA.get(model_type)
        is_needed = medium is not None and medium.is_needed
        stock.generate(**multimodal_types.prompt(model_type, (int(is_needed),)), max_new_tokens=2)
    except Exception as error:
        return Row(model_type, "", "stock", reason=f"no small model generates from text: {causal_lm_types.said(error)}")
    media = {} if is_needed else {"one text": (0,), "a padded batch": (0, 0)}
    media |= {} if medium is None else {"one medium": (1,), "a padded batch of media": (1, 1)}
    media |= {} if medium is None or is_needed else {"two": (2,)}
    prompts = {
        name: multimodal_types.prompt(model_type, counts, padding=2 * (len(counts) > 1))
        for name, counts in media.items()
    }
    return _patched_row(model_type, "" if medium is None else "media", stock, prompts, device)


def encoder_decoder_row(model_type: str, device: torch.device = CPU) -> Row:
    """Do as :func:`row` for an encoder-decoder type: behind random outputs of its encoder, and behind texts."""
    of_kind = "text" if encoder_decoder_types.reads_text(model_type) else ""
    try:
        stock = encoder_decoder_types.small_model(model_type)
        prompts = {"an output": {}, "a padded batch of outputs": {"padding": 4}}
        prompts = {
            name: encoder_decoder_types.output(stock, 1 + len(padding), 9, **padding)
            | {"decoder_input_ids": encoder_decoder_types.start(1 + len(padding), channels=token_shape(stock))}
            for name, padding in prompts.items()
        }
        if of_kind:
            prompts |= {
                "a text": encoder_decoder_types.text(1, 9),
                "a padded batch of texts": encoder_decoder_types.text(2, 9, 4),
            }
        for prompt in prompts.values():
            encoder_decoder_types.generate(stock, prompt, max_new_tokens=2)
    except Exception as error:
        return Row(model_type, of_kind, "stock", reason=f"no small model generates: {causal_lm_types.said(error)}")
    return _patched_row(model_type, of_kind, stock, prompts, device, encoder_decoder_types.generate)


#: how names of prompts begin that have padding
_PADDED = "a padded batch"
_Generate = Callable[..., torch.Tensor]


def _generated(model: PreTrainedModel, inputs: dict, **options: Any) -> torch.Tensor:
    """Return the tokens that ``generate()`` adds."""
    return model.generate(**inputs, **options)[:, -options["max_new_tokens"] :]


def _on(device: torch.device, value: Any) -> Any:
    """Return a prompt, or a part of one, with its tensors on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return type(value)({name: _on(device, each) for name, each in value.items()}) if isinstance(value, dict) else value


def _patched_row(
    model_type: str,
    of_kind: str,
    stock: PreTrainedModel,
    prompts: dict[str, dict],
    device: torch.device,
    generate: _Generate = _generated,
) -> Row:
    prompts = _on(device, prompts)
    ours = copy.deepcopy(stock.to(device))
    try:
        hf_fastpath.patch(ours, quiet=True)
    except UnsupportedModelError as error:
        return Row(model_type, of_kind, "stock", reason=_reason(ours, error))
    report = hf_fastpath.report(ours)
    if report.loop != "fast":
        details = "; ".join(report.details.get(f"loop: {report.loop}", []))
        return Row(model_type, of_kind, "stock", reason=f"{report.loop}: {details}".rstrip(": "))
    decided = state_of(patched_model(ours)).decided
    how = "recorded" if decided.recorded is not None else "file"
    by_stock = ()
    try:
        tokens, by_stock = _compared(ours, stock, prompts, generate)
    except Exception as error:
        tokens = causal_lm_types.said(error)
    stats = hf_fastpath.report(ours).stats
    details = sorted({what for each in stats["details"].values() for what in each})
    reason = f"{', '.join(stats['reasons'])}: {'; '.join(details)}" if by_stock else ""
    if not all(name.startswith(_PADDED) for name in by_stock):
        return Row(model_type, of_kind, "stock", reason=reason)
    return Row(model_type, of_kind, how, tokens, "; ".join(dict.fromkeys(left(ours))), reason)


def _reason(model: PreTrainedModel, error: UnsupportedModelError) -> str:
    """Return what a plan or an error says of the model, in one line and without the remedy."""
    found = getattr(analyse(patched_model(model), Options.parse()).loop_reason, "what", "")
    first = str(error).partition("\n")[0].removeprefix("patch() can do nothing: ")
    return " ".join((found or first).split())


def _prompts() -> dict[str, dict[str, torch.Tensor]]:
    """Return the inputs of a prompt and of a padded batch."""
    long, short = causal_lm_types.prompt(1, 9, seed=1), causal_lm_types.prompt(1, 5, seed=2)
    batch = torch.cat([long, torch.nn.functional.pad(short, (4, 0))])
    mask = torch.ones_like(batch)
    mask[-1, :4] = 0
    one = dict(input_ids=long, attention_mask=torch.ones_like(long))
    return {"one prompt": one, _PADDED: dict(input_ids=batch * mask, attention_mask=mask)}


def _compared(
    ours: PreTrainedModel, stock: PreTrainedModel, prompts: dict[str, dict], generate: _Generate
) -> tuple[str, list[str]]:
    """Return "equal", or what is wrong; and the prompts behind which stock's loop ran."""
    by_stock = []
    for name, inputs in prompts.items():
        before = hf_fastpath.report(ours).stats
        found, expected = (generate(model, inputs, max_new_tokens=12, do_sample=False) for model in (ours, stock))
        after = hf_fastpath.report(ours).stats
        if not torch.equal(found, expected):
            return f"others for {name}", by_stock
        if after["fast_tokens"] - before["fast_tokens"] != found.numel():
            by_stock.append(name)
    return "equal", by_stock


def left(model: PreTrainedModel) -> Iterator[str]:
    """Yield the names of products with weights, of attention and of experts in a step of a patched model that PyTorch
    runs."""
    model = patched_model(model)
    plans = state_of(model).plans
    part = plans.part_of(model)
    if isinstance(part, RecordedModel):
        recording = part.recording(1, 1)
        mixed = _mixed(recording)
        for call in recording.calls:
            yield from _left_of(recording, call, mixed)
        return
    for plan in plans:
        for call in plan.program.calls:
            if call.op in _COMPOSED:
                yield _COMPOSED[call.op]


def _mixed(recording: Recording) -> set[int]:
    """Return the registers of products of positions alone (angles), and of activations with each other: no factor is
    made of weights alone, and none is of keys, values or states."""
    states = {register.index for found in recording.states for register in found}
    moving, held, mixed = {recording.tokens.index, *states}, set(states), positional(recording)
    for call in recording.calls:
        read = {register.index for register in read_by(call)}
        factors = [each for each in call.arguments.values() if isinstance(each, (Register, torch.Tensor))]
        if call.op in _PRODUCTS and not read & held and all(getattr(each, "index", -1) in moving for each in factors):
            mixed.add(call.out.index)
        if read & moving:
            moving.add(call.out.index)
        if call.op is marks.append or (read & held and (call.op in _PRODUCTS or not marks.is_mark(call.op))):
            held.add(call.out.index)
    return mixed


def _left_of(recording: Recording, call: Call, mixed: set[int]) -> Iterator[str]:
    if call.op in _PRODUCTS:
        if call.op is marks.other_experts or call.out.index not in mixed:
            yield _PRODUCTS[call.op]
    elif call.op is marks.linear and not lowering.takes_product(recording, call):
        yield "linear"
    elif call.op is marks.latent_attend and call.arguments["weight"].shape[1] > MAX_RANK:
        yield "latent attention"


#: table in ``docs/data`` -> its types, and what makes the row of one
TABLES: dict[str, tuple[tuple[str, ...], Callable[..., Row]]] = {
    "recorded_types.csv": (causal_lm_types.types(), row),
    "multimodal_types.csv": (multimodal_types.types(), multimodal_row),
    "encoder_decoder_types.csv": (encoder_decoder_types.types(), encoder_decoder_row),
}
