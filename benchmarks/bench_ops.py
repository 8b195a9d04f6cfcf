"""Op benchmark: every op of the registry at real sizes, beside what PyTorch offers for the same work.

    python benchmarks/bench_ops.py --device cuda --ops gemv gemv_swiglu --dtype fp16 --csv

Method. Each call has several sets of arguments, used in turn, that together are larger than any cache. (If there are
only ``MAX_SETS`` of them, ``sets`` says that the data stays in the cache, as small activations do in a model.) On a GPU
all calls of a round are in one CUDA graph, one after the other, and events time its replay; outputs stay alive, so that
they rotate too. On a CPU a plain loop is timed. Implementations alternate, every second round in reverse order; rows
give the median with the 20th and 80th percentile. Ops are called through ``torch.ops``, without the argument checks of
``hf_fastpath.ops``, as the decode plan calls them. ``% of R`` is the bytes that the call has to move, over the time,
over the read bandwidth measured in the same run.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from op_calls import Call
from op_shapes import SHAPES
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

import hf_fastpath.ops.read_stream  # noqa: F401  (an op of the registry even where hf_fastpath.ops does not list it)
from hf_fastpath import arguments, registry
from hf_fastpath.bandwidth import measure_read_bandwidth
from hf_fastpath.bench import measure
from hf_fastpath.bench.measure import DTYPE_NAMES, DTYPES, Spread
from hf_fastpath.choices import Approximation
from hf_fastpath.native import loader
from hf_fastpath.ops.kv_cache import dequantized, gathered
from hf_fastpath.registry import OpInputError, OpSpec, Sample, nbytes

#: bytes that the argument sets of a call exceed together: more than a GPU's L2 (60 MB on an H200), a server CPU's L3
ROTATION_BYTES = {"cuda": 200e6, "cpu": 300e6}
MAX_SETS = 64
#: a round lasts at least this long, in bytes read at full speed (about 1 ms on an H200, 30 ms on two CPU
#: cores)
ROUND_BYTES = {"cuda": 4e9, "cpu": 1e9}


# ---- what PyTorch offers ----------------------------------------------------------------------------------


def _copy_bytes(sample: Sample) -> torch.Tensor:
    return sample.args[0].clone()


def _flash_at_the_end(sample: Sample) -> torch.Tensor:
    """Compute flash attention of queries at the last positions."""
    q, k, v, _, _, scale, _ = sample.args
    mask = causal_lower_right(q.shape[1], k.shape[2])
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return functional.scaled_dot_product_attention(q.transpose(1, 2), k, v, mask, scale=scale, enable_gqa=True)


def _sdpa(sample: Sample) -> torch.Tensor:
    q, k, v, _, _, scale, _ = sample.args
    if "k_scales" in sample.kwargs:
        k, v = (dequantized(each, sample.kwargs[f"{name}_scales"], q.dtype) for name, each in (("k", k), ("v", v)))
    if "block_table" in sample.kwargs:
        k, v = (gathered(each, sample.kwargs["block_table"]) for each in (k, v))
    options = {}
    if q.shape[1] > 1:
        steps = torch.arange(k.shape[2], device=q.device)
        options["attn_mask"] = steps <= steps[-q.shape[1] :, None]
    q = q.transpose(1, 2)
    return functional.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True, **options)


def _repeat_kv(sample: Sample) -> torch.Tensor:
    """Copy keys and values for every query head, as transformers does if there is a mask."""
    q, k, v, *rest = sample.args
    groups = q.shape[2] // k.shape[1]
    scales = {name: t.repeat_interleave(groups, dim=1) for name, t in sample.kwargs.items() if name.endswith("_scales")}
    if "block_table" in sample.kwargs:
        k, v = (gathered(each, sample.kwargs["block_table"]) for each in (k, v))
    repeated = (t.repeat_interleave(groups, dim=1) for t in (k, v))
    return _sdpa(Sample(q, *repeated, *rest, **scales))


def _fused_gelu(sample: Sample) -> torch.Tensor:
    x, approximate = (*sample.args, Approximation.TANH)[:2]
    return functional.gelu(x, approximate=approximate.label)


#: op -> name of its reference in tables: the calls that a stock model makes
REFERENCE_NAMES = {
    "fused_gelu": "stock formula",
    "fused_swiglu": "F.silu, mul",
    "gemm": "F.linear",
    "gemv": "F.linear",
    "packed_gemv": "dequantize, F.linear",
    "packed_gemv_swiglu": "dequantize, F.linear, gate",
    "packed_qkv_rope_append": "norm, dequantize, F.linear, rope",
    "qkv_rope_append": "norm, 3 F.linear, rope",
    "gemv_swiglu": "2 F.linear, gate",
    "joined_gemv": "norm, F.linear of each, cat",
    "fused_experts": "batched_mm",
    "routed_experts": "norm, topk, batched_mm",
    "choose_experts": "softmax, topk, division",
    "decode_layers": "layer by layer",
    "greedy_token": "argmax, copies",
    "step_inputs": "F.embedding",
    "exponential_race": "warpers, softmax, division",
    "rms_norm": "MistralRMSNorm",
    "layer_norm": "F.layer_norm",
    "rope_append": "rope, index_put",
    "short_convolution": "cat, copy, conv1d, silu",
    "gated_delta_step": "recurrent rule",
    "selective_state_step": "state update",
    "gated_rms_norm": "RMSNormGated",
    "head_products": "matmul",
    "router_logits": "casts, F.linear",
    "lora_down": "norm, casts, F.linear of each, cat",
    "lora_up": "casts, F.linear and add of each, gate",
    "latent_attention": "rope, products, softmax",
}
#: op -> {name of an alternative: function of a Sample}
ALTERNATIVES: dict[str, dict[str, Callable[[Sample], torch.Tensor]]] = {
    "fused_gelu": {"F.gelu": _fused_gelu, "copy": _copy_bytes},
    "append_attention": {"SDPA flash": _flash_at_the_end},
    "decode_attention": {"SDPA enable_gqa": _sdpa, "SDPA repeat_kv": _repeat_kv},
    "rms_norm": {
        "F.rms_norm": lambda s: functional.rms_norm(s.args[0], s.args[1].shape, s.args[1], s.args[2]),
        "copy": _copy_bytes,
    },
    "layer_norm": {"copy": _copy_bytes},
    "bytes_sum": {"sums": lambda s: [each.view(torch.int64).view(-1, 512).sum(1) for each in s.args[0]]},
    "read_stream": {"copy": _copy_bytes},
}
#: bytes that an alternative moves, if the op moves another number
ALTERNATIVE_BYTES = {"copy": lambda sample: 2 * nbytes(sample.args[0])}
#: ops whose reference is not what a stock model runs; the alternatives above stand for stock
WITHOUT_REFERENCE = ("append_attention", "bytes_sum", "decode_attention", "read_stream")


def implementations(spec: OpSpec) -> dict[str, Callable[[Sample], torch.Tensor]]:
    """Return name -> function of a Sample: ours first, then the alternatives."""
    found = {"hf_fastpath": lambda sample: spec.overload(*sample.args, **sample.kwargs)}
    if spec.name not in WITHOUT_REFERENCE:
        found[REFERENCE_NAMES.get(spec.name, "reference")] = lambda sample: spec.reference(
            *sample.args, **sample.kwargs
        )
    return found | ALTERNATIVES.get(spec.name, {})


# ---- timing -----------------------------------------------------------------------------------------------


def _argument_bytes(sample: Sample) -> int:
    return nbytes(*sample.tensors())


def argument_sets(first: Sample, device: torch.device, most: int = MAX_SETS) -> list[Sample]:
    """Return ``first`` and copies of it that together are larger than any cache, or ``most`` of them."""
    wanted = math.ceil(ROTATION_BYTES[device.type] / _argument_bytes(first))
    # The copies have the same values, because drawing values would take longer than the benchmark.
    return [first] + [first.map_tensors(torch.clone) for _ in range(min(most, wanted) - 1)]


def timer(function: Callable[[Sample], object], sets: list[Sample], calls: int) -> Callable[[], float]:
    """Return a function that gives the seconds of a call over one round."""
    device = next(sets[0].tensors()).device
    turns = list(itertools.islice(itertools.cycle(sets), calls))
    if device.type == "cuda":
        outputs: list[object] = [None] * len(sets)

        def step() -> list[object]:
            for number, sample in enumerate(turns):
                outputs[number % len(sets)] = function(sample)
            return outputs

        return measure.graph_timer(step, device, calls)

    def loop() -> float:
        start = time.perf_counter()
        for sample in turns:
            function(sample)
        return (time.perf_counter() - start) / calls

    loop()
    return loop


def bench_call(
    spec: OpSpec, call: Call, device: torch.device, dtype: torch.dtype, bandwidth: float, rounds: int
) -> list[dict[str, object]]:
    """Return the rows of one call: ours, then each alternative.

    Raises:
        OpInputError: the op does not take these arguments.
    """
    first = spec.numbered(call.arguments(device, dtype))
    if reasons := spec.why_not(*first.args, **first.kwargs):
        raise OpInputError("; ".join(reasons))
    wanted = ROTATION_BYTES[device.type] / _argument_bytes(first)
    sets = argument_sets(first, device, min(MAX_SETS, call.most))
    moved = spec.bytes(*first.args, **first.kwargs)
    calls = max(len(sets), min(call.most, int(ROUND_BYTES[device.type] / max(moved, _argument_bytes(first)))))
    timers = {name: timer(function, sets, calls) for name, function in implementations(spec).items()}
    spreads = measure.alternate(timers, rounds)
    ours = spreads["hf_fastpath"].p50
    return [
        _row(spec, call, dtype, name, spread, ALTERNATIVE_BYTES.get(name, lambda _: moved)(first), bandwidth)
        | {"times_ours": round(spread.p50 / ours, 3), "sets": len(sets), "cached": wanted > len(sets)}
        for name, spread in spreads.items()
    ]


def _row(
    spec: OpSpec, call: Call, dtype: torch.dtype, name: str, spread: Spread, moved: int, bandwidth: float
) -> dict[str, object]:
    speed = moved / spread.p50
    return {
        "op": spec.name,
        "call": call.name,
        "dtype": DTYPE_NAMES[dtype],
        "implementation": name,
        "us": round(spread.p50 * 1e6, 3),
        "us_p20": None if spread.p20 is None else round(spread.p20 * 1e6, 3),
        "us_p80": None if spread.p80 is None else round(spread.p80 * 1e6, 3),
        "bytes": moved,
        "gb_s": round(speed / 1e9, 1),
        "percent_of_r": round(100 * speed / bandwidth, 1),
        "r_gb_s": round(bandwidth / 1e9, 1),
    }


HEADER = (
    f"{'op':17}{'call':36}{'dtype':6}{'implementation':17}{'us':>10} {'±%':>4}{'GB/s':>8}{'% of R':>8}{'x ours':>8}"
)


def _line(row: dict[str, object]) -> str:
    percent = Spread(row["us"], row["us_p20"], row["us_p80"]).percent
    spread = "" if percent is None else f"{percent:.0f}"
    return (
        f"{row['op']:17}{row['call']:36}{row['dtype']:6}{row['implementation']:17}{row['us']:>10.2f} "
        f"{spread:>4}{row['gb_s']:>8.1f}{row['percent_of_r']:>8.1f}{row['times_ours']:>8.2f}"
        + ("  in cache" if row["cached"] else "")
    )


def missing_shapes() -> list[str]:
    """Return the ops of the registry that have no calls here."""
    return sorted(set(registry.all_ops()) - set(SHAPES))


def bench(
    device: torch.device | str,
    ops: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    rounds: int = 9,
    csv: Path | None = None,
    echo: Callable[[str], None] = print,
    shapes: dict[str, list[Call]] | None = None,
) -> list[dict[str, object]]:
    """Run the benchmark, and print its table line by line while it runs.

    Args:
        device: ``"cpu"`` or a CUDA device.
        ops: names; if empty, all of the registry.
        dtypes: "fp32", "fp16", "bf16"; if empty, each call's own.
        rounds: timed rounds.
        csv: file that the rows are appended to.
        echo: receives every line.
        shapes: calls of each op; with None, :data:`SHAPES`.

    Raises:
        ValueError: an op of the registry has no entry in :data:`SHAPES`.
    """
    device = torch.device(device)
    if missing := missing_shapes():
        raise ValueError(f"no shapes for {', '.join(missing)}: add them to SHAPES in benchmarks/op_shapes.py")
    status = loader.ensure(device.type)
    bandwidth = measure_read_bandwidth(device)
    known = measure.environment(device)
    echo(f"{known['device']}: R = {bandwidth / 1e9:.1f} GB/s; torch {torch.__version__}; kernels {status}")
    echo(HEADER)
    rows = []
    for name in ops or registry.all_ops():
        spec = registry.get(name)
        for call in (shapes or SHAPES)[name]:
            if device.type not in call.devices:
                continue
            for dtype in dtypes or call.dtypes:
                try:
                    with torch.no_grad():
                        found = bench_call(spec, call, device, DTYPES[dtype], bandwidth, rounds)
                except OpInputError as error:
                    echo(f"{name}, {call.name}, {dtype}: left out: {error}")
                    continue
                found = [known | row for row in found]
                rows += found
                for row in found:
                    echo(_line(row))
                if csv is not None:
                    measure.append_csv(csv, found)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument(
        "--device", default=default, type=arguments.device, help="cuda, cuda:1 or cpu (here: %(default)s)"
    )
    parser.add_argument("--ops", nargs="+", default=[], choices=sorted(registry.all_ops()), metavar="OP")
    parser.add_argument("--dtype", nargs="+", default=[], choices=list(DTYPES), help="instead of each call's own")
    parser.add_argument("--rounds", type=arguments.count, default=9)
    measure.add_csv_argument(parser)
    given = parser.parse_args(argv)
    path = measure.chosen_csv(given.csv, "ops", torch.device(given.device))
    bench(given.device, given.ops, given.dtype, given.rounds, path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
