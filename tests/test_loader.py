"""Which library serves a device, and why: prebuilt, cached, built now, or none."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import fresh_process
import pytest

import hf_fastpath
from hf_fastpath.native import build, build_cache, cpu, loader, toolchain

SCRIPT = """
import copy, json
import torch
import hf_fastpath
from models import build, prompt
from parity import assert_same_tokens
from said import lines
from hf_fastpath import loader, ops

torch.set_num_threads(1)
cpu = torch.device("cpu")
seen = []
for architecture in ("gpt2", "mistral"):
    stock = build(architecture)
    with lines() as said:
        ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    seen += said
    options = dict(max_new_tokens=12, do_sample=False)
    ids = prompt(cpu, 2)
    assert_same_tokens(ours.generate(ids, **options), stock.generate(ids, **options), stock)
    hf_fastpath.unpatch(ours)
    assert "_hf_fastpath" not in vars(ours)
    hf_fastpath.patch(ours, quiet=True)
try:
    hf_fastpath.patch(copy.deepcopy(stock), strict=True, quiet=True)
    strict = "nothing raised"
except hf_fastpath.UnsupportedModelError as error:
    strict = str(error)
out = ops.rms_norm(torch.ones(2, 8), torch.ones(8), 1e-6)
print(json.dumps({"warnings": seen, "strict": strict, "op": out.sum().item(),
                  "report": str(hf_fastpath.report(ours)), "loop": hf_fastpath.report(ours).loop,
                  "status": str(loader.status()["cpu"])}))
"""


def test_without_native_library_everything_is_right(tmp_path):
    """With HF_FASTPATH_NATIVE=0 patch() warns, tokens are stock's, the report says why, and strict raises."""
    result = fresh_process.run(SCRIPT, cwd=tmp_path, HF_FASTPATH_NATIVE="0")
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout.splitlines()[-1])
    first = "hf_fastpath: no compiled kernels for cpu: HF_FASTPATH_NATIVE=0"
    assert [text.splitlines()[0] for text in found["warnings"]] == [first, first]
    assert found["loop"] == "no_native_library" and "no_native_library" in found["report"]
    assert "HF_FASTPATH_NATIVE=0" in found["status"]
    assert found["strict"].splitlines()[0] == "no compiled kernels for cpu: HF_FASTPATH_NATIVE=0"
    assert found["op"] == pytest.approx(16)


# ---- the order in which the loader looks, without compiling anything ---------------------------------------


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """Make a loader that has found nothing yet, over an empty package folder and an empty cache, with fakes."""
    monkeypatch.delenv("HF_FASTPATH_BUILD", raising=False)
    monkeypatch.delenv("HF_FASTPATH_NATIVE", raising=False)
    for name in ("HF_FASTPATH_TARGETS", "HF_FASTPATH_CUDA_ARCHS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_FASTPATH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "LIBRARY_DIR", tmp_path / "lib")
    status = {device: loader.Status(device, "reference", "not looked for yet") for device in build.TARGETS}
    monkeypatch.setattr(loader, "_status", status)
    monkeypatch.setattr(loader, "_failed", {})
    monkeypatch.setattr(build, "cache_dir", lambda target, archs=(): tmp_path / "cache" / "key")
    made = Fakes()
    monkeypatch.setattr(loader.torch.ops, "load_library", made.load)
    monkeypatch.setattr(cpu, "choice", lambda library: cpu.CpuChoice((), (), (), "generic"))
    monkeypatch.setattr(build, "build", made.build)
    return made


class Fakes:
    """Stand-ins for the compiler and for dlopen, which write down their arguments."""

    def __init__(self):
        self.built, self.loaded, self.broken = [], [], False

    def load(self, path):
        self.loaded.append(path)
        if self.broken:
            raise OSError("undefined symbol: nonsense")

    def build(self, target, output_dir, archs=(), progress=print, flags=()):
        self.built.append(output_dir)
        if progress is not None:
            progress(f"hf_fastpath: building the {target} kernels")
        return put_library(output_dir, build.sources_hash(target), target, archs)


def put_library(folder: Path, sources: str, target: str = "cpu", archs: Sequence[str] = ()) -> Path:
    """Put a library in place: two files as build() leaves them."""
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    path = folder / build.library_name(target)
    path.write_bytes(b"not really")
    info = {"target": target, "sources": sources, "cuda_archs": list(archs)}
    info |= {"size": path.stat().st_size, "sha256": build_cache.sha256(path)}
    build_cache.note_file(path).write_text(json.dumps(info))
    return path


def test_builds_into_the_cache_then_takes_it_from_there(fresh, monkeypatch, tmp_path):
    lines = []
    status = loader.ensure("cpu", lines.append)
    assert status.source == "built" and status.native and len(lines) == 1
    assert fresh.built == [tmp_path / "cache" / "key"]
    loader.ensure("cpu", lines.append)
    assert len(fresh.built) == len(fresh.loaded) == 1, "found once is enough"
    loader._status["cpu"] = loader.Status("cpu", "reference", "as in a new process")
    assert loader.ensure("cpu", lines.append).source == "cache" and len(fresh.built) == 1


def test_import_takes_the_prebuilt_library_and_never_builds(fresh, tmp_path):
    loader.load_existing()
    assert not fresh.built and not loader.status()["cpu"].native
    put_library(tmp_path / "lib", build.sources_hash("cpu"))
    loader.load_existing()
    assert loader.status()["cpu"].source == "prebuilt" and not fresh.built


def test_stale_library_is_ignored(fresh, tmp_path):
    """A library made from other sources than those at hand is not loaded but built anew."""
    put_library(tmp_path / "lib", "0123456789abcdef")
    loader.load_existing()
    assert not fresh.loaded and "up-to-date" in loader.status()["cpu"].detail
    assert loader.ensure("cpu", lambda line: None).source == "built"


def test_library_without_description_is_ignored(fresh, tmp_path):
    path = put_library(tmp_path / "lib", build.sources_hash("cpu"))
    Path(f"{path}.json").unlink()
    loader.load_existing()
    assert not fresh.loaded
    Path(f"{path}.json").write_text("{ half a fi")
    loader.load_existing()
    assert not fresh.loaded


def test_library_that_does_not_load_is_no_crash(fresh, tmp_path):
    fresh.broken = True
    put_library(tmp_path / "lib", build.sources_hash("cpu"))
    loader.load_existing()
    assert "undefined symbol" in loader.status()["cpu"].detail and not loader.status()["cpu"].native


def test_never_builds_when_told_so(fresh, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_FASTPATH_BUILD", "never")
    status = loader.ensure("cpu")
    assert not status.native and "HF_FASTPATH_BUILD=never" in status.detail and not fresh.built
    put_library(tmp_path / "cache" / "key", build.sources_hash("cpu"))
    assert loader.ensure("cpu").source == "cache"


def test_force_builds_over_what_is_there(fresh, monkeypatch, tmp_path):
    """This holds for the prebuilt library that the import would have taken as well."""
    monkeypatch.setenv("HF_FASTPATH_BUILD", "force")
    put_library(tmp_path / "lib", build.sources_hash("cpu"))
    put_library(tmp_path / "cache" / "key", build.sources_hash("cpu"))
    loader.load_existing()
    assert loader.ensure("cpu", lambda line: None).source == "built"
    assert len(fresh.built) == 1


def test_force_builds_once_in_a_process(fresh, monkeypatch):
    monkeypatch.setenv("HF_FASTPATH_BUILD", "force")
    for _ in range(3):
        loader.ensure("cpu", lambda line: None)
    assert len(fresh.built) == 1


def test_invalid_mode_is_named(fresh, monkeypatch):
    monkeypatch.setenv("HF_FASTPATH_BUILD", "sometimes")
    with pytest.raises(ValueError, match="HF_FASTPATH_BUILD is 'sometimes', expected one of auto, never, force"):
        loader.ensure("cpu")


def test_failed_build_leaves_the_reference_and_says_why(fresh, monkeypatch):
    def fails(*args, **kwargs):
        raise build.BuildError("building the CPU kernels failed: a.cpp:1: expected ';'")

    monkeypatch.setattr(build, "build", fails)
    status = loader.ensure("cpu", lambda line: None)
    assert not status.native and "expected ';'" in status.detail


def test_unknown_device_stays_on_the_reference(fresh):
    status = loader.ensure("xpu")
    assert not status.native and "there are kernels for CPUs and NVIDIA GPUs, none for xpu" in str(status)


def test_two_threads_build_once(fresh, monkeypatch):
    """The second thread waits for the lock, then takes what the first has built."""
    started, go = threading.Event(), threading.Event()

    def slow(*args, **kwargs):
        started.set()
        assert go.wait(30)
        return fresh.build(*args, **kwargs)

    monkeypatch.setattr(build, "build", slow)
    threads = [threading.Thread(target=loader.ensure, args=("cpu", lambda line: None)) for _ in range(2)]
    threads[0].start()
    assert started.wait(30)
    threads[1].start()
    go.set()
    for thread in threads:
        thread.join(60)
    assert len(fresh.built) == 1 and loader.status()["cpu"].native


@pytest.fixture
def gpu(monkeypatch):
    """Make torch believe in one GPU of a compute capability."""

    def pretend(*capability: int) -> None:
        monkeypatch.setattr(loader.torch.backends.cuda, "is_built", lambda: True)
        monkeypatch.setattr(loader.torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(loader.torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(loader.torch.cuda, "get_device_capability", lambda index: capability)

    return pretend


GPUS = (
    (["90a"], (9, 0), True),
    (["90a"], (8, 0), False),
    (["90a"], (10, 0), False),
    (["80", "90a"], (8, 9), True),
    (["80", "90a"], (10, 0), False),
    (["86"], (8, 0), False),
    (["80"], (12, 0), True),
    (build.WHEEL_CUDA_ARCHS, (10, 3), True),
    (build.WHEEL_CUDA_ARCHS, (7, 5), False),
)


@pytest.mark.parametrize(("archs", "capability", "serves"), GPUS)
def test_prebuilt_library_for_another_gpu_serves_nothing(archs, capability, serves, fresh, gpu, tmp_path):
    """The import loads it without looking at the GPU; patch() looks, says why, and how to get another library."""
    gpu(*capability)
    path = put_library(tmp_path / "lib", build.sources_hash("cuda"), "cuda", archs)
    loader.load_existing()
    for _ in range(2):
        status = loader.ensure("cuda", lambda line: None)
        assert status.native == serves == loader.is_native("cuda")
        if not serves:
            assert str(path) in status.detail and "HF_FASTPATH_BUILD=force" in status.detail
    assert not fresh.built


def test_force_builds_for_the_gpu_at_hand(fresh, gpu, monkeypatch, tmp_path):
    gpu(8, 0)
    monkeypatch.setenv("HF_FASTPATH_BUILD", "force")
    put_library(tmp_path / "lib", build.sources_hash("cuda"), "cuda", ["90a"])
    loader.load_existing()
    assert loader.ensure("cuda", lambda line: None).source == "built" and len(fresh.built) == 1


# ---- libraries that must not be loaded ---------------------------------------------------------------------


@pytest.mark.parametrize("content", (b"not real", b"not reallx", b""), ids=("truncated", "changed", "empty"))
def test_a_damaged_library_of_the_cache_is_built_anew(content, fresh, tmp_path):
    """Loading a truncated library would end the process."""
    path = put_library(tmp_path / "cache" / "key", build.sources_hash("cpu"))
    path.write_bytes(content)
    status = loader.ensure("cpu", None)
    assert status.source == "built" and len(fresh.built) == len(fresh.loaded) == 1


@pytest.mark.parametrize("content", (b"not real", b"not reallx"), ids=("truncated", "changed"))
def test_a_damaged_prebuilt_library_is_named_and_replaced(content, fresh, tmp_path):
    path = put_library(tmp_path / "lib", build.sources_hash("cpu"))
    path.write_bytes(content)
    loader.load_existing()
    assert not fresh.loaded and f"{path} is damaged" in loader.status()["cpu"].detail
    assert loader.ensure("cpu", None).source == "built"


def test_a_truncated_library_is_no_crash(tmp_path):
    """A copy of the real library is cut off, and loaded in a separate process."""
    code = (
        "import sys; from pathlib import Path; from hf_fastpath.native import build, loader; "
        "print(loader._load('cpu', 'cache', Path(sys.argv[1])), loader.status()['cpu'].detail)"
    )
    if not loader.is_native("cpu"):
        pytest.skip("no native library for the CPU here")
    real = Path(loader.status()["cpu"].detail)
    path = tmp_path / real.name
    path.write_bytes(real.read_bytes())
    build_cache.note_file(path).write_bytes(build_cache.note_file(real).read_bytes())
    os.truncate(path, path.stat().st_size // 2)
    result = fresh_process.run(code, str(path), HF_FASTPATH_NATIVE="0")
    assert result.returncode == 0 and result.stdout.startswith(f"False {path} is damaged"), result.stderr


def test_a_library_that_does_not_load_is_built_anew(fresh, monkeypatch, tmp_path):
    put_library(tmp_path / "cache" / "key", build.sources_hash("cpu"))
    fresh.broken = True
    real = fresh.build

    def repaired(*args, **kwargs):
        fresh.broken = False
        return real(*args, **kwargs)

    monkeypatch.setattr(build, "build", repaired)
    assert loader.ensure("cpu", None).source == "built"


def test_a_library_that_others_may_write_is_refused(fresh, tmp_path):
    path = put_library(tmp_path / "cache" / "key", build.sources_hash("cpu"))
    path.chmod(0o666)
    status = loader.ensure("cpu", None)
    assert not status.native and not fresh.loaded and not fresh.built
    assert f"{path} may be written by other users and is not trusted: remove it" in status.detail
    path.chmod(0o644)
    assert loader.ensure("cpu", None).source == "cache"


@pytest.mark.parametrize("text", ("[]", "3", '{"sources": 3}', "\x00", ""))
def test_a_broken_description_is_no_exception(text, fresh, tmp_path):
    for folder in ("lib", "cache/key"):
        path = put_library(tmp_path / folder, build.sources_hash("cpu"))
        build_cache.note_file(path).write_text(text)
    loader.load_existing()
    assert not fresh.loaded and loader.ensure("cpu", None).source == "built"


# ---- no build, no kernels: one line that says why ------------------------------------------------------------


def test_a_cache_that_cannot_be_used_is_a_reason(fresh, monkeypatch):
    """This holds as well for a cache without a place: HOME is unset, and nobody knows the user."""
    pytest.importorskip("platformdirs", reason="platformdirs is not installed")
    monkeypatch.setenv("HF_FASTPATH_CACHE", "/proc/nowhere")
    monkeypatch.setattr(build, "cache_dir", lambda target, archs=(): build_cache.root() / "key")
    assert "build cache /proc/nowhere/key cannot be made" in loader.ensure("cpu", None).detail
    monkeypatch.delenv("HF_FASTPATH_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert "no home folder for the build cache" in loader.ensure("cpu", None).detail
    assert not fresh.built


def test_a_read_only_cache_serves_what_it_holds(fresh, monkeypatch, tmp_path):
    put_library(tmp_path / "cache" / "key", build.sources_hash("cpu"))
    monkeypatch.setattr(os, "access", lambda path, mode: False)

    def read_only(path, *times):
        raise PermissionError(30, "Read-only file system")

    monkeypatch.setattr(os, "utime", read_only)
    assert loader.ensure("cpu", None).source == "cache"


@pytest.mark.parametrize("command", ("/no/such/compiler", "false", "g++ 'x"))
def test_a_compiler_that_does_not_work_is_a_reason(command, monkeypatch, tmp_path):
    monkeypatch.delenv("HF_FASTPATH_BUILD", raising=False)
    monkeypatch.setattr(loader, "_status", {"cpu": loader.Status("cpu", "reference", "")})
    monkeypatch.setattr(build, "LIBRARY_DIR", tmp_path)
    monkeypatch.setenv("CXX", command)
    status = loader.ensure("cpu", None)
    assert not status.native and command.split()[0] in status.detail and "\n" not in status.detail


def test_a_failed_build_is_not_tried_again(fresh, monkeypatch):
    calls = []

    def fails(*args, **kwargs):
        calls.append(args)
        raise build.BuildError("building the CPU kernels failed: a.cpp:1: no\nand more")

    monkeypatch.setattr(build, "build", fails)
    for _ in range(3):
        status = loader.ensure("cpu", None)
        assert status.detail == "building the CPU kernels failed: a.cpp:1: no" and status.reason == "no_native_library"
    assert len(calls) == 1


@pytest.mark.parametrize(("value", "built"), (("none", 0), ("cuda", 0), ("cpu", 1), ("cpu cuda", 1), ("", 1)))
def test_only_targets_that_are_asked_for_are_built(value, built, fresh, monkeypatch):
    monkeypatch.setenv("HF_FASTPATH_TARGETS", value)
    status = loader.ensure("cpu", None)
    assert len(fresh.built) == built == status.native
    assert built or status.detail == f"no library found and HF_FASTPATH_TARGETS={value}"


def test_no_cuda_build_without_a_gpu(fresh, monkeypatch):
    """`info` runs on a machine with nvcc and a CUDA torch, and no GPU: nothing is compiled for six architectures."""
    monkeypatch.setattr(loader.torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(loader.torch.cuda, "is_available", lambda: False)
    status = loader.ensure("cuda", None)
    assert not fresh.built and status.detail == "no GPU of compute capability 8.0 or newer at hand to build for"


def test_the_cuda_library_is_built_for_the_gpus_at_hand(fresh, gpu, monkeypatch):
    gpu(9, 0)
    asked = []
    monkeypatch.setattr(build, "cache_dir", lambda target, archs=(): asked.append(archs) or build_cache.root() / "key")
    assert loader.ensure("cuda", None).source == "built" and asked == [("90a",)]


ELSEWHERE = (
    ("Linux", "riscv64", "no CPU kernels for riscv64"),
    ("Darwin", "arm64", "no CPU kernels for macOS"),
    ("Windows", "AMD64", "no CPU kernels for Windows"),
)


@pytest.mark.parametrize(("system", "machine", "text"), ELSEWHERE)
def test_other_platforms_compile_nothing(system, machine, text, fresh, monkeypatch):
    monkeypatch.setattr(toolchain.platform, "system", lambda: system)
    monkeypatch.setattr(toolchain.platform, "machine", lambda: machine)
    loader.load_existing()
    for _ in range(2):
        status = loader.ensure("cpu", None)
        assert text in status.detail and loader.why_not_native("cpu") == "unsupported_platform"
    assert not fresh.built and not fresh.loaded


def test_other_devices_have_their_own_reason(fresh, monkeypatch):
    for device in ("mps", "xpu", "npu"):
        assert loader.ensure(device).reason == loader.why_not_native(device) == "unsupported_device"
    monkeypatch.setattr(loader.torch.version, "hip", "6.4")
    monkeypatch.setattr(loader.torch.backends.cuda, "is_built", lambda: True)
    status = loader.ensure("cuda")
    assert "is built for ROCm" in status.detail and loader.why_not_native("cuda") == "unsupported_device"


@pytest.mark.parametrize("strict", (False, True))
def test_patch_without_kernels_raises_with_the_cause(strict, fresh, monkeypatch):
    """A model in which nothing is fast raises; the first line is the cause, and the model is as it was."""
    from models import build as make

    def fails(*args, **kwargs):
        raise build.BuildError("building the CPU kernels failed: gemv/gemv_cpu.cpp:3: no")

    monkeypatch.setattr(build, "build", fails)
    model = make("llama")
    with pytest.raises(hf_fastpath.UnsupportedModelError) as caught:
        hf_fastpath.patch(model, quiet=True, strict=strict)
    assert str(caught.value).splitlines()[0] == (
        "no compiled kernels for cpu: building the CPU kernels failed: gemv/gemv_cpu.cpp:3: no"
    )
    assert not any(name.startswith("_hf_fastpath") for module in model.modules() for name in vars(module))
