"""Which library serves a device, and why: prebuilt, cached, built now, or none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from hf_fastpath import build, loader

SCRIPT = """
import copy, json, sys, warnings
import torch
sys.path.insert(0, sys.argv[1])
import hf_fastpath
from models import build, prompt
from parity import assert_same_tokens
from hf_fastpath import loader, ops

torch.set_num_threads(1)
cpu = torch.device("cpu")
seen = []
for architecture in ("gpt2", "mistral"):
    stock = build(architecture)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = hf_fastpath.patch(copy.deepcopy(stock), quiet=True)
    seen += [str(w.message) for w in caught if "hf_fastpath" in str(w.message)]
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
    """HF_FASTPATH_NATIVE=0: patch() warns, tokens are stock's, the report says why, strict raises."""
    tests = str(Path(__file__).resolve().parent)
    environment = {**os.environ, "HF_FASTPATH_NATIVE": "0"}
    command = [sys.executable, "-c", SCRIPT, tests]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout.splitlines()[-1])
    assert len(found["warnings"]) == 2 and "no_native_library" in found["warnings"][0]
    assert found["loop"] == "no_native_library" and "no_native_library" in found["report"]
    assert "HF_FASTPATH_NATIVE=0" in found["status"]
    assert "no_native_library" in found["strict"]
    assert found["op"] == pytest.approx(16)


# ---- the order in which the loader looks, without compiling anything ---------------------------------------


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A loader that has found nothing yet, over an empty package folder and an empty cache, with fakes."""
    monkeypatch.delenv("HF_FASTPATH_BUILD", raising=False)
    monkeypatch.delenv("HF_FASTPATH_NATIVE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "LIBRARY_DIR", tmp_path / "lib")
    status = {device: loader.Status(device, "reference", "not looked for yet") for device in build.TARGETS}
    monkeypatch.setattr(loader, "_status", status)
    monkeypatch.setattr(build, "cache_dir", lambda target, archs=(): tmp_path / "cache" / "key")
    made = Fakes()
    monkeypatch.setattr(loader.torch.ops, "load_library", made.load)
    monkeypatch.setattr(build, "build", made.build)
    return made


class Fakes:
    """Stand-ins for the compiler and for dlopen, which write down what they were asked."""

    def __init__(self):
        self.built, self.loaded, self.broken = [], [], False

    def load(self, path):
        self.loaded.append(path)
        if self.broken:
            raise OSError("undefined symbol: nonsense")

    def build(self, target, output_dir, archs=(), progress=print, flags=()):
        self.built.append(output_dir)
        progress(f"hf_fastpath: building the {target} kernels")
        return put_library(output_dir, build.sources_hash(target))


def put_library(folder: Path, sources: str, target: str = "cpu", archs: Sequence[str] = ()) -> Path:
    """A library of a kind: two files as build() leaves them."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / build.library_name(target)
    path.write_bytes(b"not really")
    Path(f"{path}.json").write_text(json.dumps({"target": target, "sources": sources, "cuda_archs": list(archs)}))
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
    """Made from other sources than those at hand: not loaded, built anew."""
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
    """Also over the prebuilt library that the import would have taken."""
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
        raise build.BuildError("building the CPU kernels failed:\nerror: expected ';'")

    monkeypatch.setattr(build, "build", fails)
    status = loader.ensure("cpu", lambda line: None)
    assert not status.native and "expected ';'" in status.detail


def test_unknown_device_stays_on_the_reference(fresh):
    status = loader.ensure("xpu")
    assert not status.native and "xpu" in str(status)


def test_two_threads_build_once(fresh, monkeypatch):
    """The second waits for the lock, then takes what the first has built."""
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
    """Makes torch believe in one GPU of a compute capability."""

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
    """It is loaded at import, which does not look at the GPU; patch() does, says why and how to get another."""
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
