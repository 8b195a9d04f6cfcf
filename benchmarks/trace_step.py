"""Time the CUDA graph of a decode step, and show when the blocks of each of its kernels begin, have input and end.

    python benchmarks/trace_step.py --model mistral-7b --dtype fp16 --context 128
    python hf_fastpath/native/build.py cuda --cuda-arch 90a --flags=-DHF_FASTPATH_TRACE
    python benchmarks/trace_step.py --model mistral-7b --dtype fp16 --context 128 --csv

Method. The graph is replayed without the host in between, which gives the time of a step if the host does nothing else.
A library that was built with ``HF_FASTPATH_TRACE`` stamps the device's clock into a record for each block; any other
library gives only the first line. One replay, after some others, gives a row for every kernel: microseconds from the
end of the kernel in front (its last block) until the kernel's first and last block begin, have their input, are ready
and end; a number is negative if the kernels overlap. ``adds`` is the time from one end to the next: these add up to the
step. Rows of layers are averaged. The stamps themselves cost time; a step without them shows how much
(bench_generate.py).
"""

from __future__ import annotations

import argparse
import ctypes
from collections import defaultdict

import numpy as np
import torch

import hf_fastpath
from hf_fastpath import traffic
from hf_fastpath.bandwidth import measure_read_bandwidth
from hf_fastpath.bench import measure, shapes
from hf_fastpath.bench.measure import DTYPE_NAMES, DTYPES
from hf_fastpath.compat import CACHE
from hf_fastpath.decode.plans.decode_plan import DecodePlan
from hf_fastpath.native import loader
from hf_fastpath.quantization import FORMATS

POINTS = ("begin", "input", "ready", "sums", "merged", "end")
RECORD = np.dtype(
    [
        ("grid", "<u8"),
        ("block", "<u4"),
        ("blocks", "<u4"),
        ("sm", "<u4"),
        ("threads", "<u4"),
        ("times", "<u8", len(POINTS)),
    ]
)  # the columns are as in csrc/common/trace.cuh
RECORDS = 1 << 16


REPLAYS, ROUNDS = 40, 5


def take_trace() -> np.ndarray | None:
    """Return the records of all kernels since the last call, or None if the library keeps none."""
    library = ctypes.CDLL(str(loader.status()["cuda"].detail))
    if not hasattr(library, "hf_fastpath_take_trace"):
        return None
    found, file = [], 0
    buffer = np.empty(8 + RECORDS * RECORD.itemsize, np.uint8)
    while library.hf_fastpath_take_trace(file, ctypes.c_void_p(buffer.ctypes.data)):
        count = min(int(buffer[:4].view("<u4")[0]), RECORDS)
        found.append(buffer[8 : 8 + count * RECORD.itemsize].view(RECORD).copy())
        file += 1
    return np.concatenate(found)


def replay_ms(plan: DecodePlan, seq_lens: torch.Tensor) -> float:
    """Return the median time of a step's graph, beginning where the cache stood at ``seq_lens``."""
    times = []
    for _ in range(ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        plan.seq_lens.copy_(seq_lens)
        start.record()
        for _ in range(REPLAYS):
            plan.graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / REPLAYS)
    return sorted(times)[ROUNDS // 2]


def kernels(records: np.ndarray) -> list[dict[str, float]]:
    """Return a row for each launch, in order of their ends, in microseconds."""
    launches = [records[records["grid"] == grid] for grid in np.unique(records["grid"])]
    launches.sort(key=lambda launch: launch["times"][:, -1].max())
    rows, before = [], None
    for launch in launches:
        times = launch["times"].astype(np.float64)
        times[times == 0] = np.nan
        end = np.nanmax(times[:, -1])
        before = np.nanmin(times) if before is None else before
        row = {"blocks": len(launch), "threads": int(launch["threads"][0]), "adds": (end - before) / 1e3}
        for point, name in enumerate(POINTS):
            some = not np.isnan(times[:, point]).all()
            row[f"first {name}"] = (np.nanmin(times[:, point]) - before) / 1e3 if some else np.nan
            row[f"last {name}"] = (np.nanmax(times[:, point]) - before) / 1e3 if some else np.nan
        rows.append(row)
        before = end
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mistral-7b", choices=list(shapes.MODELS))
    parser.add_argument("--dtype", default="fp16", choices=list(DTYPES))
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--weights", choices=list(FORMATS), help="quantize the model's weights")
    measure.add_csv_argument(parser)
    arguments = parser.parse_args()
    device, dtype = torch.device("cuda"), DTYPES[arguments.dtype]
    label = DTYPE_NAMES[dtype] + (f" {arguments.weights}" if arguments.weights else "")
    options = {"weights": arguments.weights, "keep_original": False} if arguments.weights else {}
    model = hf_fastpath.patch(shapes.build_model(arguments.model, "cuda", dtype), quiet=True, **options)
    part = vars(model)["_hf_fastpath"].plans.part_of(model)
    prompt = torch.randint(0, model.config.vocab_size, (arguments.batch, arguments.context), device="cuda")
    out = model.generate(prompt, max_new_tokens=2, do_sample=False, pad_token_id=0, return_dict_in_generate=True)
    cache = out[CACHE]
    with torch.inference_mode():
        plan = DecodePlan(part, arguments.batch, cache.layers[0].k_buffer.dtype)
        cache.reserve(REPLAYS + 16)
        plan.begin(cache, torch.full((arguments.batch,), cache.get_seq_length(), device="cuda"), None)
        for _ in range(2):  # the first step runs eagerly, the second is captured
            plan.step(torch.zeros(arguments.batch, dtype=torch.long, device="cuda"))
        torch.cuda.synchronize()
        bandwidth = measure_read_bandwidth("cuda")
        step_bytes = traffic.weight_bytes(model, arguments.batch)
        step_bytes += traffic.kv_bytes(model.config, arguments.context, dtype, arguments.batch)
        ms = replay_ms(plan, plan.seq_lens.clone())
        share = step_bytes / ms * 1e3 / bandwidth
        print(
            f"{arguments.model} {label} context {arguments.context} batch {arguments.batch}: {ms:.4f} ms, "
            f"{arguments.batch / ms * 1e3:.0f} tok/s, {share:.1%} of R = {bandwidth / 1e9:.0f} GB/s, "
            f"{len(plan.program)} calls"
        )
        take_trace()
        plan.step(None)
        torch.cuda.synchronize()
        records = take_trace()
        plan.end()
    if records is None:
        return
    rows = kernels(records)
    # Average over the same place of all layers but the first and last, whose neighbors differ.
    layers, each = len(part.layers), (len(rows) - 2) // len(part.layers)
    places: dict[str, list[dict[str, float]]] = defaultdict(list)
    for index, row in enumerate(rows):
        layer, place = divmod(index - 1, each)
        inside = 0 < layer < layers - 1
        places[f"layer.{place}" if inside else f"once.{index}"].append(row)
    means = {
        name: {key: float(np.nanmean([row[key] for row in found])) for key in found[0]} | {"times": len(found)}
        for name, found in places.items()
    }
    step = sum(row["adds"] for row in rows)
    columns = [
        "times",
        "blocks",
        "threads",
        "adds",
        *(f"{edge} {name}" for name in POINTS for edge in ("first", "last")),
    ]
    print(f"with stamps: {step:.1f} us")
    print(f"{'kernel':10}" + "".join(f"{column:>12}" for column in columns))
    for name, row in means.items():
        print(f"{name:10}" + "".join(f"{row[column]:12.2f}" for column in columns))
    path = measure.chosen_csv(arguments.csv, "trace_step", device)
    if path:
        same = measure.environment(device) | {"model": arguments.model, "dtype": label}
        same |= {"context": arguments.context, "batch": arguments.batch, "r_gb_s": round(bandwidth / 1e9)}
        measure.append_csv(
            path,
            [
                same | {"kernel": name} | {key.replace(" ", "_"): round(value, 3) for key, value in row.items()}
                for name, row in means.items()
            ],
        )


if __name__ == "__main__":
    main()
