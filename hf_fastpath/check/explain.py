"""explain(what): what patch() would do to a model, and how fast the model could decode, from its config alone."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import arguments, compat, traffic
from ..errors import NoCounterpart, UnsupportedModelError
from ..linears.packed_linear import PackedLinear
from ..native import loader
from ..options import Options
from ..packed_files.plain_files import read_plain
from ..patching import selftest
from ..patching.analyse import analyse
from ..patching.coverage import check_anything
from ..patching.plan import PatchPlan
from ..patching.reporting import Report
from ..reasons import REASONS
from ..recording.family import RECORDED
from ..replacing.schemes import repack_empty, schemes_of
from ..stats import Stats
from ..tables import table
from . import several_gpus

BATCHES = (1, 8)
#: positions that each sequence holds, if the model knows so many
CONTEXTS = (1024, 8192, 32768, 131072)


#: errors that come of what a config says; a RuntimeError may be one of ours, which has to be seen
_OF_A_CONFIG = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, NotImplementedError, RecursionError),
    *(TypeError, ValueError),
)


@dataclass(frozen=True)
class StepCost:
    """What one decode step reads, and how fast that can be.

    Attributes:
        batch, context: number of sequences, and positions that each of them holds.
        weight_bytes, kv_bytes: bytes that one step reads, of each GPU.
        sums: sums and gathers over GPUs.
        tokens_per_second: of all sequences together, if the step takes no longer than reading; over several GPUs as
            :mod:`.several_gpus` predicts it. None without bandwidth.
    """

    batch: int
    context: int
    weight_bytes: int
    kv_bytes: int
    sums: int
    tokens_per_second: float | None


@dataclass(frozen=True)
class Explanation:
    """What a model's config tells; printable, and plain data through ``to_dict()``.

    Attributes:
        source: the folder, file or model id that was explained.
        model: class that the config asks for.
        parameters, weight_bytes: of the whole model.
        dtype: type of the weights.
        report: what ``patch()`` would report, or None.
        unsupported: why nothing would be fast, or None.
        checkpoint: what becomes of weights that the checkpoint has quantized; None if it has not.
        kernels: the kernels that serve the device here.
        self_tested: whether ``patch()`` would try a small twin first: on an untested version of transformers, or for a
            family that is known only by its structure.
        gpus: number of GPUs of one host over which the model would be spread by its ``tp_plan``; 1 for none.
        bandwidth: bytes a second of a GPU, or None.
        steps: what decode steps read; empty if nothing would be fast, or not the steps of a quantized checkpoint.
    """

    source: str
    model: str
    parameters: int
    weight_bytes: int
    dtype: str
    report: Report | None
    unsupported: str | None
    checkpoint: str | None
    kernels: str
    self_tested: bool
    gpus: int
    bandwidth: float | None
    steps: tuple[StepCost, ...]

    @property
    def fast(self) -> bool:
        """Whether the decode loop would be ours."""
        return self.report is not None and self.report.loop == "fast"

    def to_dict(self) -> dict:
        """Return plain data, ready for JSON."""
        return asdict(self) | {"fast": self.fast}

    def __str__(self) -> str:
        size = f"{self.parameters / 1e9:.3g} B parameters, {self.weight_bytes / 1e9:.3g} GB in {self.dtype}"
        lines = [f"{self.source}: {self.model}, {size}"]
        if self.checkpoint is not None:
            lines.append(f"  checkpoint: {self.checkpoint}")
        if self.report is None:
            why = f"nothing would be fast: {self.unsupported}".splitlines()
            return "\n".join([*lines, *(f"  {line}" for line in why)])
        known = f"patches/{self.report.like or self.report.architecture}.py"
        if self.report.architecture == RECORDED:
            known = "none: the step is recorded from the model's own forward"
        lines += [f"  architecture file: {known}", *(f"  {line}" for line in self.report.parts())]
        lines.append(f"  kernels here: {self.kernels}")
        if self.self_tested:
            lines.append("  patch() tries a small random twin first, and declines if it does not decode as stock does")
        if self.steps:
            lines += ["", self._table()]
        return "\n".join(lines)

    def _table(self) -> str:
        columns = ["batch", "context", "weights read", "KV read"]
        if self.gpus > 1:
            columns = ["batch", "context", "weights a GPU", "KV a GPU", "sums"]
        if self.bandwidth is not None:
            limit = f"at {self.bandwidth / 1e9:.4g} GB/s"
            columns.append(f"tok/s {limit}" if self.gpus == 1 else f"predicted tok/s {limit} a GPU")
        rows = []
        for step in self.steps:
            sizes = _gigabytes(step.weight_bytes), _gigabytes(step.kv_bytes)
            speed = () if step.tokens_per_second is None else (f"{step.tokens_per_second:.1f}",)
            sums = (str(step.sums),) if self.gpus > 1 else ()
            rows.append((str(step.batch), str(step.context), *sizes, *sums, *speed))
        return table(columns, rows)


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:,.4f} GB"


def config_of(source: str, trust_remote_code: bool = False) -> Any:
    """Return the config in a folder, of a config.json, of a GGUF file, or of a model id.

    Raises:
        ValueError: there is none that transformers can read.
    """
    from transformers import AutoConfig, PreTrainedConfig

    try:
        folder, more = arguments.checkpoint(source)
        if more:
            return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, **more)
        path = Path(source)
        file = path / "config.json" if path.is_dir() else path
        entries = json.loads(read_plain(file)) if file.exists() else PreTrainedConfig.get_config_dict(source)[0]
        if not isinstance(entries, dict):
            raise ValueError(f"it holds {type(entries).__name__}, expected an object")
        compat.check_sizes(entries)
        return AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except Exception as error:  # of the file, the hub, transformers, or a class that came with the config
        raise ValueError(
            f"{str(source)!r} is no folder, config.json, GGUF file or model id that transformers can read: "
            f"{_said(error).removeprefix('OSError: ').removeprefix('ValueError: ')}"
        ) from error


def _said(error: Exception) -> str:
    """Return what an error says, in one line of bounded length."""
    first = next(iter(str(error).strip().splitlines()), "")
    text = f"{type(error).__name__}: {first}".rstrip(": ")
    return text if len(text) <= 300 else text[:297] + "..."


def examine(model: nn.Module) -> tuple[PatchPlan, Report]:
    """Return what ``patch(model)`` would make fast if kernels served the model's device, what not, and why.

    The model may be on the meta device; it is only looked at.

    Raises:
        UnsupportedModelError: nothing in the model can be patched.
    """
    plan = analyse(model, Options.parse())
    check_anything(plan)
    part = None if plan.family is None else plan.family.model_part(model)
    return plan, Report.of(plan, part, Stats())


def explain(
    source: str,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    bandwidth: float | None = None,
    trust_remote_code: bool = False,
    gpus: int = 1,
) -> Explanation:
    """Build the model without weights and say what ``patch()`` would do to it.

    Args:
        source: a folder, a config.json, or a model id.
        dtype: of weights and KV cache; None means what the config names, or float32.
        device: the device whose kernels are named.
        bandwidth: bytes a second that the device reads; None leaves the speeds out.
        trust_remote_code: run model code that comes with the config.
        gpus: number of GPUs of one host over which the model is spread by its ``tp_plan``.

    Raises:
        ValueError: there is no such config, or transformers makes no model of it.
    """
    config = config_of(source, trust_remote_code)
    return explain_config(config, source, dtype, device, bandwidth, trust_remote_code, gpus)


def explain_config(
    config: Any,
    source: str,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    bandwidth: float | None = None,
    trust_remote_code: bool = False,
    gpus: int = 1,
) -> Explanation:
    """Do as :func:`explain` for a config that is already loaded; ``source`` is its name."""
    try:
        own = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
        dtype = dtype or own or torch.float32
        with torch.device("meta"), compat.few_modules():
            model = compat.model_of_config(config, dtype=dtype, trust_remote_code=trust_remote_code).eval()
    except Exception as error:  # the model's code is not ours and may raise anything
        raise ValueError(
            f"transformers makes no model of {str(source)!r} ({type(config).__name__}): {_said(error)}"
        ) from error
    try:
        return _explained(config, model, source, dtype, device, bandwidth, gpus)
    except _OF_A_CONFIG as error:
        raise ValueError(
            f"the model that transformers makes of {str(source)!r} ({type(config).__name__}) cannot be looked at "
            f"({_said(error)}): look for an entry of its config that no such model has"
        ) from error


def _explained(
    config: Any, model: nn.Module, source: str, dtype: torch.dtype, device: str, bandwidth: float | None, gpus: int
) -> Explanation:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    plan, report, unsupported, checkpoint = None, None, None, None
    quantized = compat.quantization_config(config)
    if quantized is not None:
        model, checkpoint, unsupported = _of_checkpoint(model, quantized)
    inside = compat.generating_model(model)
    if unsupported is None:
        try:
            plan, report = examine(inside)
            if gpus > 1:
                why = several_gpus.why_not_spread(model, gpus)
                unsupported = None if why is None else f"over {gpus} GPUs: {why}"
                report = None if why else replace(report, patched={}, ranks=f"{gpus} ranks, modules stay stock's")
        except UnsupportedModelError as error:
            unsupported = str(error)
    has_steps = report is not None and compat.can_generate(inside) and (quantized is None or report.loop == "fast")
    return Explanation(
        source=source,
        model=type(model).__name__,
        parameters=parameters,
        weight_bytes=sum(each.nbytes for each in model.parameters()) + _packed_bytes(model),
        dtype=str(dtype).removeprefix("torch."),
        report=report,
        unsupported=unsupported,
        checkpoint=checkpoint,
        kernels=str(loader.status().get(device, loader.Status(device, "reference", "no kernels for this device"))),
        self_tested=plan is not None and selftest.is_due(plan),
        gpus=gpus,
        bandwidth=bandwidth,
        steps=_steps(inside, dtype, bandwidth, gpus) if has_steps else (),
    )


def _packed_bytes(model: nn.Module) -> int:
    packed = (each for each in model.modules() if type(each) is PackedLinear)
    return sum(buffer.nbytes for each in packed for buffer in each.buffers())


def _of_checkpoint(model: nn.Module, quantized: dict[str, Any]) -> tuple[nn.Module, str, str | None]:
    """Return what ``patch()`` would find of a model whose checkpoint is quantized, or repack it to.

    Args:
        model: with unquantized layers, on the meta device.
        quantized: the ``quantization_config``.

    Returns:
        The model with the layers that ``patch()`` decides about; what becomes of the weights; and why nothing would be
        fast, or None if the layers tell.
    """
    method, error = compat.quantization_method(quantized), ""
    loaded, kind = copy.deepcopy(model), None
    try:
        kind = compat.give_quantized_layers(loaded, quantized)
        if kind is compat.Loaded.PLAIN:
            return model, f"{method} weights, which transformers dequantizes when it loads them on this machine", None
    except Exception as caught:  # of transformers or the method's package, which is missing here, or needs a GPU
        error = f"{type(caught).__name__}: " + next(iter(str(caught).strip().splitlines()), "")
    try:
        packed = copy.deepcopy(model)
        formats = repack_empty(compat.generating_model(packed), schemes_of(quantized))
        if formats:
            here = f"; transformers does not load it on this machine ({error})" if error else ""
            return packed, f"{method} weights, which patch() repacks as {' and '.join(sorted(formats))}{here}", None
        return model, f"{method} weights outside of the layers that patch() repacks", None
    except NoCounterpart as found:
        reason = str(found)
    option = compat.dequantizing_option(method)
    helps = f"; or load the checkpoint with {option}, which leaves plain weights" if option else ""
    if kind is not compat.Loaded.LAYERS:
        about = f"{method}; {error}" if error else method
        why = f"{reason} ({about}): {REASONS[reason]}{helps}"
        return model, f"{method} weights, which patch() does not repack", why
    return loaded, f"{method} weights, which patch() does not repack: {REASONS[reason]}{helps}", None


def _steps(model: Any, dtype: torch.dtype, bandwidth: float | None, gpus: int) -> tuple[StepCost, ...]:
    text = model.config.get_text_config(decoder=True)
    if compat.layer_kinds(text) is None or not hasattr(text, "num_attention_heads"):
        return ()
    known = (getattr(text, name, None) for name in ("max_position_embeddings", "max_target_positions"))
    longest = next(filter(None, known), CONTEXTS[-1])
    steps = []
    over = several_gpus.spread(model, gpus) if gpus > 1 else None
    for batch in BATCHES:
        weights = traffic.weight_bytes(model, batch)
        weights = weights if over is None else over.weight_bytes(weights)
        for context in sorted({min(context, longest) for context in CONTEXTS}):
            kv = traffic.kv_bytes(text, context, dtype, batch)
            kv = kv if over is None else over.kv_bytes(kv)
            speed = None if bandwidth is None else batch * bandwidth / (weights + kv)
            if over is not None and bandwidth is not None:
                speed = batch / over.seconds(weights + kv, bandwidth, text.num_hidden_layers)
            steps.append(StepCost(batch, context, weights, kv, 0 if over is None else over.sums, speed))
    return tuple(steps)
