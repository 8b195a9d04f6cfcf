"""explain(what): what patch() would make of a model, and how fast it could decode, from its config alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from . import loader, selftest, traffic
from .errors import UnsupportedModelError
from .patching import examine
from .reasons import REASONS
from .reporting import Report
from .tables import table

BATCHES = (1, 8)
#: positions that each sequence holds, as far as the model knows them
CONTEXTS = (1024, 8192, 32768, 131072)


@dataclass(frozen=True)
class Step:
    """What one decode step reads, and how fast that can be.

    Attributes:
        batch, context: sequences, and positions that each of them holds.
        weight_bytes, kv_bytes: read by one step.
        tokens_per_second: of all sequences together if the step takes no longer than reading; None: no bandwidth.
    """

    batch: int
    context: int
    weight_bytes: int
    kv_bytes: int
    tokens_per_second: float | None


@dataclass(frozen=True)
class Explanation:
    """What is known of a model from its config; printable, and plain data through ``to_dict()``.

    Attributes:
        source: what was explained: a folder, file or model id.
        model: class that the config asks for.
        parameters, weight_bytes: of the whole model.
        dtype: type of the weights.
        report: what ``patch()`` would report, or None.
        unsupported: why nothing would be fast, or None.
        kernels: what serves the device here.
        self_tested: whether ``patch()`` would try a small twin first: an untested version of transformers, or a family
            known by its structure only.
        bandwidth: bytes a second, or None.
        steps: what decode steps read; empty where nothing would be fast.
    """

    source: str
    model: str
    parameters: int
    weight_bytes: int
    dtype: str
    report: Report | None
    unsupported: str | None
    kernels: str
    self_tested: bool
    bandwidth: float | None
    steps: tuple[Step, ...]

    @property
    def fast(self) -> bool:
        """Whether the decode loop would be ours."""
        return self.report is not None and self.report.loop == "fast"

    def to_dict(self) -> dict:
        """Plain data, ready for JSON."""
        return asdict(self) | {"fast": self.fast}

    def __str__(self) -> str:
        size = f"{self.parameters / 1e9:.3g} B parameters, {self.weight_bytes / 1e9:.3g} GB in {self.dtype}"
        lines = [f"{self.source}: {self.model}, {size}"]
        if self.report is None:
            return "\n".join([*lines, f"  nothing would be fast: {self.unsupported}"])
        lines += [
            f"  architecture file: patches/{self.report.like or self.report.architecture}.py",
            *(f"  {line}" for line in self.report.parts()),
        ]
        lines.append(f"  kernels here: {self.kernels}")
        if self.self_tested:
            lines.append("  patch() tries a small random twin first, and declines if it does not decode as stock does")
        if self.steps:
            lines += ["", self._table()]
        return "\n".join(lines)

    def _table(self) -> str:
        columns = ["batch", "context", "weights read", "KV read"]
        if self.bandwidth is not None:
            columns.append(f"tok/s at {self.bandwidth / 1e9:.4g} GB/s")
        rows = []
        for step in self.steps:
            sizes = _gigabytes(step.weight_bytes), _gigabytes(step.kv_bytes)
            speed = () if step.tokens_per_second is None else (f"{step.tokens_per_second:.1f}",)
            rows.append((str(step.batch), str(step.context), *sizes, *speed))
        return table(columns, rows)


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:,.4f} GB"


def config_of(source: str, trust_remote_code: bool = False) -> Any:
    """The config in a folder, a config.json, or of a model id.

    Raises:
        ValueError: there is none that transformers can read.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{source!r} is no folder, config.json or model id that transformers can read: {first}"
        ) from None


def explain(
    source: str,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    bandwidth: float | None = None,
    trust_remote_code: bool = False,
) -> Explanation:
    """Build the model without weights and say what ``patch()`` would make of it.

    Args:
        source: a folder, a config.json, or a model id.
        dtype: of weights and KV cache; None: what the config names, or float32.
        device: whose kernels to name.
        bandwidth: bytes a second that the device reads; None leaves the speeds out.
        trust_remote_code: run model code that comes with the config.

    Raises:
        ValueError: there is no such config, or no causal LM for it.
    """
    from transformers import AutoModelForCausalLM

    config = config_of(source, trust_remote_code)
    dtype = dtype or getattr(config, "dtype", None) or torch.float32
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code).eval()
    except ValueError as error:
        raise ValueError(f"{source!r} is no causal LM: {str(error).strip().splitlines()[0]}") from None
    report, unsupported = None, None
    if getattr(config, "quantization_config", None) is not None:
        unsupported = (
            f"as far as a config tells: the weights are quantized (quantized_format: {REASONS['quantized_format']}). "
            "patch() repacks some checkpoints: load it, patch it, and see report(model)"
        )
    else:
        try:
            report = examine(model)
        except UnsupportedModelError as error:
            unsupported = str(error)
    return Explanation(
        source=source,
        model=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        weight_bytes=sum(parameter.nbytes for parameter in model.parameters()),
        dtype=str(dtype).removeprefix("torch."),
        report=report,
        unsupported=unsupported,
        kernels=str(loader.status().get(device, loader.Status(device, "reference", "no kernels for this device"))),
        self_tested=report is not None and (selftest.is_due() or report.like is not None),
        bandwidth=bandwidth,
        steps=() if report is None else _steps(model, dtype, bandwidth),
    )


def _steps(model: Any, dtype: torch.dtype, bandwidth: float | None) -> tuple[Step, ...]:
    longest = model.config.max_position_embeddings
    steps = []
    for batch in BATCHES:
        weights = traffic.weight_bytes(model, batch)
        for context in sorted({min(context, longest) for context in CONTEXTS}):
            kv = traffic.kv_bytes(model.config, context, dtype, batch)
            speed = None if bandwidth is None else batch * bandwidth / (weights + kv)
            steps.append(Step(batch, context, weights, kv, speed))
    return tuple(steps)
