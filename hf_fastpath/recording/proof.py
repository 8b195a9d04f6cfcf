"""Whether a recorded step gives what the model's own forward gives: a few tokens of both, side by side."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .. import compat
from ..cache.fastpath_cache import FastpathCache
from ..decode.encoded import Encoded, Seen
from ..decode.plan_cache import PlanCache
from ..errors import RankError
from ..reasons import Cause

#: tokens of the prompt, and steps after it
_PROMPT, _STEPS = 8, 3
#: how many times the twin's difference from stock a model may show
_TIMES = 3.0
#: a larger difference is no rounding, whatever the twin showed
_MOST = 0.25
#: layers of the twin, and features of its embeddings
_TWINS_LAYERS, _TWINS_WIDTH = 2, 64
#: places of an encoder's output that is random, too
_ENCODED = 12
#: roundings of a logit's size that say nothing, however few the twin showed
_ROUNDINGS = 4


class _WideAttention(TorchFunctionMode):
    """Runs PyTorch's attention of 16 bits in float32.

    cuDNN, which has 16 bits alone, builds an engine for every new length, and the few lengths of a proof take it longer
    than all else takes. PyTorch's switches between kernels are the whole process's, but a mode is this thread's.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        query = args[0] if args else kwargs["query"]
        out = func(*map(_in_float32, args), **{name: _in_float32(each) for name, each in kwargs.items()})
        return out.to(query.dtype)


def _in_float32(value: Any) -> Any:
    is_short = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if is_short else value


def difference(part: Any, plans: PlanCache) -> float:
    """Return mean|ours - stock| of logits over mean|stock|, of random tokens and, if the model has an encoder, behind a
    random output of it; of a model with experts the smallest of a few steps, since a router may choose otherwise
    between two experts whose scores are equal but for rounding."""
    model, device = part.source, part.embedding.weight.device
    attention = _WideAttention() if device.type == "cuda" else nullcontext()
    generator = torch.Generator().manual_seed(0)
    shape = 1, _PROMPT + _STEPS, *part.token_shape
    tokens = torch.randint(part.vocab_size, shape, generator=generator, device="cpu").to(device)
    found = []
    with torch.no_grad():
        cache = FastpathCache(model.config)
        del cache.layers[len(part.kinds) :]
        whole, output, read = cache, None, None
        if part.has_encoder:
            whole = compat.over_encoder(cache)
            shape = 1, _ENCODED, compat.encoder_width(model)
            output = torch.randn(shape, generator=generator, device="cpu").to(device, part.embedding.weight.dtype)
        with attention:
            compat.forward_over(model, tokens[:, :_PROMPT], whole, output)
        stock_cache = copy.deepcopy(whole)
        plan = plans.decode_plan(part, 1, cache)
        try:
            if output is not None:
                read = Encoded.of(whole, Seen.all_of(_ENCODED, 1, device))
            plan.begin(cache, torch.tensor([_PROMPT], device=device), None, encoded=read)
            for place in range(_PROMPT, _PROMPT + _STEPS):
                ours = plan.step(tokens[:, place]).float()
                with attention:
                    stock = compat.forward_over(model, tokens[:, place : place + 1], stock_cache, output)[:, -1].float()
                found.append(float((ours - stock).abs().mean() / stock.abs().mean().clamp_min(1e-30)))
        finally:
            plan.end()
    has_experts = part.has_experts
    return min(found) if has_experts else sum(found) / len(found)


def reason_against(part: Any, plans: PlanCache) -> Cause | None:
    """Return why the recorded step of a model is not used, or None. The steps are compared once for a part.

    Args:
        part: the model, without another reason.
        plans: of the model.
    """
    if part.verdict is None:
        least = _ROUNDINGS * torch.finfo(part.embedding.weight.dtype).eps
        growth = max(1.0, len(part.layers) / _TWINS_LAYERS) ** 0.5  # so roundings of successive layers add up
        if part.embedding.weight.dtype == torch.float32:  # and those of long sums, which are rounded once in 16 bits
            growth *= max(1.0, part.embedding.weight.shape[1] / _TWINS_WIDTH) ** 0.5
        allowed = min(_MOST, _TIMES * growth * max(part.architecture.twins_difference, least))
        try:
            found = difference(part, plans)
        except RankError:  # no verdict: other ranks are lost
            raise
        except Exception as error:  # nobody has tried this model's steps: anything may be raised
            part.verdict = (Cause("not_proven", f"{type(error).__name__}: {error}", part.module),)
            return part.verdict[0]
        text = f"its logits differ from stock's by {found:.1e} of their size, {allowed:.1e} are allowed"
        part.verdict = (None if found <= allowed else Cause("not_proven", text, part.module),)
    return part.verdict[0]
