"""Arguments and their contents are changed at random: there is an error or a result, and never the end of the process.

The calls run in a separate process, which says what it is about to call, so that a crash names its call.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable
from pathlib import Path

import fresh_process
import pytest
import torch

CALLS = 150
#: samples of each op to start from
SAMPLES = 6
DTYPES = (*(torch.float32, torch.float16, torch.bfloat16, torch.float64), *(torch.int64, torch.int32, torch.bool))
INTEGERS = (-(2**63), -1, 0, 1, 2, 3, 7, 64, 2**31, 2**63 - 1)
FLOATS = (float("nan"), float("inf"), -1.0, 0.0, 1e300)
WORDS = ("", "none", "rms", "layer", "silu", "gelu_new")


@pytest.mark.parametrize(
    "checked", (pytest.param(True, id="checked"), pytest.param(False, id="native", marks=pytest.mark.full))
)
def test_fuzzed_arguments_crash_nothing(checked, device):
    """Ops are called as users call them, and as a decode plan does, where only the library's own checks are left."""
    script = f"import runpy; runpy.run_path({__file__!r}, run_name='__main__')"
    result = fresh_process.run(script, device.type, str(int(checked)), timeout=580)
    last = (result.stdout.splitlines() or ["nothing"])[-1]
    assert result.returncode == 0, f"exit status {result.returncode} in {last}\n{result.stderr[-2000:]}"
    took, refused = map(int, last.split())
    assert took > 100 and refused > 1000, last


# ---- in the other process ------------------------------------------------------------------------------------


def _shorter(draw: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    dim = draw.randrange(tensor.dim())
    return tensor.narrow(dim, 0, draw.randrange(tensor.shape[dim] + 1))


def _longer(draw: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor], draw.randrange(tensor.dim()))


def _turned(draw: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(draw.randrange(tensor.dim()), draw.randrange(tensor.dim()))


TENSOR_CHANGES: tuple[Callable[[random.Random, torch.Tensor], torch.Tensor | None], ...] = (
    lambda draw, tensor: tensor.to(draw.choice(DTYPES)),
    _shorter,
    _longer,
    _turned,
    lambda draw, tensor: tensor[..., ::2],
    lambda draw, tensor: tensor[None],
    lambda draw, tensor: tensor[0],
    lambda draw, tensor: tensor.flatten(),
    lambda draw, tensor: tensor[:1].expand(3, *tensor.shape[1:]),
    lambda draw, tensor: tensor.new_empty(0),
    lambda draw, tensor: tensor.to("meta"),
    lambda draw, tensor: None,
)


def _other_values(draw: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    """Change lengths, pages, tokens, ids and places to wrong ones, one or all of them."""
    limits = torch.iinfo(tensor.dtype)
    value = min(max(draw.choice((*INTEGERS, tensor.shape[-1])), limits.min), limits.max)
    if draw.random() < 0.5:
        return torch.full_like(tensor, value)
    flat = tensor.flatten().clone()
    flat[draw.randrange(len(flat))] = value
    return flat.view(tensor.shape)


def changed(draw: random.Random, value: object) -> object:
    """Return something else of about the same kind."""
    if isinstance(value, torch.Tensor) and value.numel():
        holds_numbers = not (value.is_floating_point() or value.dtype == torch.bool)
        change = _other_values if holds_numbers and draw.random() < 0.5 else draw.choice(TENSOR_CHANGES)
        return change(draw, value)
    if isinstance(value, torch.Tensor):
        return None
    if isinstance(value, list):
        place = draw.randrange(len(value) + 1)
        return value[:-1] if place == len(value) else [*value[:place], changed(draw, value[place]), *value[place + 1 :]]
    if isinstance(value, bool):
        return not value
    choices = {int: INTEGERS, float: FLOATS, str: WORDS}.get(type(value), (*INTEGERS, *FLOATS, *WORDS))
    return draw.choice(choices)


def said(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype)[6:]}{list(value.shape)}/{list(value.stride())}"
    return f"[{', '.join(map(said, value))}]" if isinstance(value, list) else repr(value)


def fuzz(device: torch.device, is_checked: bool) -> None:
    from checks import arguments, replaced

    from hf_fastpath import registry
    from hf_fastpath.native import loader

    loader.ensure(device.type)
    counts = [0, 0]
    for name, spec in registry.all_ops().items():
        if device.type == "cuda" and name in ("step_inputs", "sum_ranks", "gather_ranks"):
            # An id outside of its table stops the device, as in torch.nn.functional.embedding. What other ranks have
            # not sent is waited for.
            continue
        draw = random.Random(name)
        samples = list(itertools.islice(spec.samples(device, torch.float32), SAMPLES))
        for number in range(CALLS):
            sample = replaced(spec, samples[number % len(samples)])
            # Addresses of other tensors cannot be checked.
            given = {key: value for key, value in arguments(spec, sample).items() if key != "kv_table"}
            for key in draw.sample(sorted(given), min(len(given), draw.choice((1, 1, 2)))):
                try:
                    given[key] = changed(draw, given[key])
                except (IndexError, ValueError, RuntimeError):  # this change does not apply to this tensor
                    continue
            print(f"{name}({', '.join(f'{key}={said(value)}' for key, value in given.items())})", flush=True)
            try:
                (spec if is_checked else spec.overload)(**given)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                counts[0] += 1
            except torch.AcceleratorError:  # the device has failed, and so would every later call
                raise
            except Exception:
                counts[1] += 1
    print(*counts)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    with torch.no_grad():
        fuzz(torch.device(sys.argv[1]), sys.argv[2] == "1")
