"""Run every op's samples under sanitizers: ASan, UBSan and TSan for the CPU, compute-sanitizer for CUDA.

    python tests/sanitize.py [cpu] [cuda]        # default: what this machine has
    python tests/sanitize.py cuda --ops packed_gemv gemv --tools racecheck

This is no pytest file: the sanitizers have to be in the process from its start.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CUDA_TOOLS = ("memcheck", "racecheck", "synccheck")
#: number of samples of each op and dtype under the slow tools, taken from all over the list
SLOW_TOOLS_SAMPLES = 6
#: TSan cannot know that libgomp passes our closure from thread to thread
TSAN_SUPPRESSIONS = "race_top:torch::stable::parallel_for\nrace_top:_ZZN5torch6stable12parallel_for\n"


def run_samples(device: str, library: str | None, most: int | None, only: list[str] | None) -> None:
    """Call every op, or the named ones, on its samples; ``library`` is loaded instead of the installed one."""
    import torch

    from hf_fastpath import registry
    from hf_fastpath.native import loader

    if library is not None:
        torch.ops.load_library(library)
    elif not loader.status()[device].native:
        raise SystemExit(f"no native library for {device}: {loader.status()[device]}")
    calls = 0
    for name, spec in registry.all_ops().items():
        if device not in spec.native or (only is not None and name not in only):
            continue
        for dtype in registry.FLOAT_DTYPES:
            torch.manual_seed(0)
            samples = list(spec.samples(torch.device(device), dtype))
            for sample in samples[:: -(-len(samples) // most) if most else 1]:
                spec.overload(*sample.args, **sample.kwargs)
                calls += 1
        print(f"  {name}: done", flush=True)
    if device == "cuda":
        torch.cuda.synchronize()
    print(f"{calls} calls on {device}")


def child(device: str, *options: str) -> list[str]:
    return [sys.executable, __file__, "--samples", device, *options]


def _preloaded(*names: str) -> str:
    found = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in names
    ]
    return ":".join(found)


def sanitize_cpu() -> int:
    """Build the CPU library with sanitizers and run the samples, on one and on two threads."""
    return sanitize_memory() | sanitize_threads()


def sanitize_threads() -> int:
    """TSan finds data races between threads of an op, sees only our code, and needs addresses that are not random."""
    from hf_fastpath.native import build

    with tempfile.TemporaryDirectory() as folder:
        library = build.build("cpu", Path(folder), flags=["-fsanitize=thread", "-fno-omit-frame-pointer"])
        env = dict(os.environ, LD_PRELOAD=_preloaded("libtsan.so"), HF_FASTPATH_NATIVE="0", OMP_NUM_THREADS="2")
        suppressions = Path(folder, "suppressions")
        suppressions.write_text(TSAN_SUPPRESSIONS)
        env["TSAN_OPTIONS"] = f"ignore_noninstrumented_modules=1 exitcode=9 suppressions={suppressions}"
        print("TSan, 2 threads")
        samples = child("cpu", "--library", str(library), "--most", str(SLOW_TOOLS_SAMPLES))
        command = ["setarch", "--addr-no-randomize", *samples]
        return subprocess.run(command, env=env).returncode


def sanitize_memory() -> int:
    """ASan and UBSan find accesses outside of memory, and behavior that C++ does not define."""
    from hf_fastpath.native import build

    with tempfile.TemporaryDirectory() as folder:
        flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"]
        library = build.build("cpu", Path(folder), flags=flags)
        env = dict(os.environ, LD_PRELOAD=_preloaded("libasan.so", "libubsan.so"), HF_FASTPATH_NATIVE="0")
        env["ASAN_OPTIONS"] = "detect_leaks=0"  # Python itself keeps memory until the end
        status = 0
        for threads in ("1", "2"):
            print(f"ASan and UBSan, {threads} threads")
            command = child("cpu", "--library", str(library))
            status |= subprocess.run(command, env=dict(env, OMP_NUM_THREADS=threads)).returncode
        return status


def sanitize_cuda(only: list[str] | None, tools: list[str]) -> int:
    """Run the smallest samples under each tool of compute-sanitizer."""
    status = 0
    chosen = [] if only is None else ["--ops", *only]
    for tool in tools:
        print(f"compute-sanitizer {tool}")
        # Only our kernels are checked: thousands of PyTorch's kernels quantize samples, and would take minutes.
        command = ["compute-sanitizer", "--tool", tool, "--kernel-name", "kernel_substring=hf_fastpath"]
        command += ["--error-exitcode", "9"]
        status |= subprocess.run([*command, *child("cuda", "--most", str(SLOW_TOOLS_SAMPLES), *chosen)]).returncode
    return status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("devices", nargs="*", choices=("cpu", "cuda", []))
    parser.add_argument("--ops", nargs="+", help="of CUDA's: these alone")
    parser.add_argument("--tools", nargs="+", choices=CUDA_TOOLS, default=list(CUDA_TOOLS))
    parser.add_argument("--samples", choices=("cpu", "cuda"), help=argparse.SUPPRESS)
    parser.add_argument("--library", help=argparse.SUPPRESS)
    parser.add_argument("--most", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.samples:
        run_samples(arguments.samples, arguments.library, arguments.most, arguments.ops)
        return 0
    devices = arguments.devices or ["cpu", *(["cuda"] if shutil.which("compute-sanitizer") else [])]
    results = {
        device: sanitize_cpu() if device == "cpu" else sanitize_cuda(arguments.ops, arguments.tools)
        for device in devices
    }
    print(", ".join(f"{device}: {'clean' if code == 0 else 'ERRORS'}" for device, code in results.items()))
    return max(results.values())


if __name__ == "__main__":
    sys.exit(main())
