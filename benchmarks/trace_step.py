"""Where a token's time goes: when the blocks of every kernel of a decode step begin, have their input and end.

    python hf_fastpath/build.py cuda --cuda-arch 90a --flags=-DHF_FASTPATH_TRACE
    python benchmarks/trace_step.py --model mistral-7b --dtype fp16 --context 128 --csv

Method. A library built with ``HF_FASTPATH_TRACE`` stamps the device's clock into a record a block. Of one replay of
the step's graph, after some others, every kernel gets a row: microseconds from the end of the kernel in front (its
last block) until its first and last block begin, have their input, are ready and end; negative where it overlaps.
``adds`` is from the one end to the other: these add up to the step. Rows of layers are averaged. The stamps themselves
cost time, which the difference to a step without them shows (bench_generate.py).
"""

from __future__ import annotations

import argparse
import ctypes
from collections import defaultdict
from pathlib import Path

import measure
import numpy as np
import shapes
import torch
from measure import DTYPE_NAMES, DTYPES

import hf_fastpath
from hf_fastpath import loader
from hf_fastpath.decode.plan import DecodePlan

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
)  # as in csrc/common/trace.cuh
RECORDS = 1 << 16


def take_trace() -> np.ndarray:
    """The records since the last call, of all kernels."""
    library = ctypes.CDLL(str(loader.status()["cuda"].detail))
    if not hasattr(library, "hf_fastpath_take_trace"):
        raise SystemExit(f"{loader.status('cuda').path} was built without -DHF_FASTPATH_TRACE, see --help")
    found, file = [], 0
    buffer = np.empty(8 + RECORDS * RECORD.itemsize, np.uint8)
    while library.hf_fastpath_take_trace(file, ctypes.c_void_p(buffer.ctypes.data)):
        count = int(buffer[:4].view("<u4")[0])
        count = min(count, RECORDS)
        found.append(buffer[8 : 8 + count * RECORD.itemsize].view(RECORD).copy())
        file += 1
    return np.concatenate(found)


def kernels(records: np.ndarray) -> list[dict[str, float]]:
    """A row a launch, in order of their ends; microseconds."""
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
    parser.add_argument("--csv", nargs="?", type=Path, const=measure.DATA_DIR / "trace_step_h200.csv")
    arguments = parser.parse_args()
    dtype = DTYPES[arguments.dtype]
    model = hf_fastpath.patch(shapes.build_model(arguments.model, "cuda", dtype), quiet=True)
    part = vars(model)["_hf_fastpath"].part_of(model)
    prompt = torch.randint(0, model.config.vocab_size, (arguments.batch, arguments.context), device="cuda")
    out = model.generate(prompt, max_new_tokens=2, do_sample=False, pad_token_id=0, return_dict_in_generate=True)
    cache = out.past_key_values
    with torch.inference_mode():
        plan = DecodePlan(part, arguments.batch, cache.layers[0].k_buffer.dtype)
        cache.reserve(16)
        plan.begin(cache, torch.full((arguments.batch,), cache.get_seq_length(), device="cuda"), None)
        plan.step(torch.zeros(arguments.batch, dtype=torch.long, device="cuda"))
        for _ in range(8):
            plan.step(None)
        torch.cuda.synchronize()
        take_trace()
        plan.step(None)
        torch.cuda.synchronize()
        rows = kernels(take_trace())
        plan.end()
    # The same place of every layer but the first and last, whose neighbors differ.
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
    print(f"{arguments.model} {DTYPE_NAMES[dtype]} context {arguments.context}: {step:.1f} us, {len(rows)} kernels")
    print(f"{'kernel':10}" + "".join(f"{column:>12}" for column in columns))
    for name, row in means.items():
        print(f"{name:10}" + "".join(f"{row[column]:12.2f}" for column in columns))
    if arguments.csv:
        measure.append_csv(
            arguments.csv,
            [
                {"model": arguments.model, "dtype": DTYPE_NAMES[dtype], "context": arguments.context}
                | {"batch": arguments.batch, "kernel": name}
                | {key.replace(" ", "_"): round(value, 3) for key, value in row.items()}
                for name, row in means.items()
            ],
        )


if __name__ == "__main__":
    main()
