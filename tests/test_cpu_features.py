"""HF_FASTPATH_CPU: its words, its errors, and that fewer features change kernels and no results."""

from __future__ import annotations

import itertools
import json
import shlex
import shutil
import subprocess
from pathlib import Path

import fresh_process
import pytest

from hf_fastpath import logs
from hf_fastpath.native import build, cpu, loader, toolchain

ROOT = Path(__file__).resolve().parents[1]

#: feature -> features that it needs, itself included
NEEDS = {
    "f16c": {"f16c"},
    "avx2": {"f16c", "avx2"},
    "avx512": {"f16c", "avx2", "avx512"},
    "vnni": {"f16c", "avx2", "avx512", "vnni"},
    "bf16_dot": {"f16c", "avx2", "avx512", "bf16_dot"},
    "amx_int8": {"f16c", "avx2", "avx512", "amx_int8"},
    "amx_bf16": {"f16c", "avx2", "avx512", "amx_bf16"},
    "amx_fp16": {"f16c", "avx2", "avx512", "amx_bf16", "amx_fp16"},
    "neon": {"neon"},
    "dotprod": {"neon", "dotprod"},
    "i8mm": {"neon", "i8mm"},
}
TUNINGS = ("generic", "intel", "zen4")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> Path:
    """The choice by itself as a library, which is compiled in a second."""
    try:
        cxx = toolchain.find_toolchain("cpu").cxx
    except build.BuildError as error:
        pytest.skip(str(error))
    path = tmp_path_factory.mktemp("cpu_features") / "cpu_features.so"
    source = build.source_dir() / "common" / "cpu_features_cpu.cpp"
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", f"-I{build.source_dir()}"]
    subprocess.run([*shlex.split(cxx), *flags, str(source), "-o", str(path)], check=True)
    return path


@pytest.fixture
def chosen(compiled, monkeypatch, tmp_path):
    """Return what is chosen with a value of the variable; each copy of the library decides anew."""
    monkeypatch.delenv(cpu.FORMER_VARIABLE, raising=False)
    count = itertools.count()

    def choose(value: str | None, variable: str = cpu.VARIABLE) -> cpu.CpuChoice:
        monkeypatch.delenv(cpu.VARIABLE, raising=False)
        if value is not None:
            monkeypatch.setenv(variable, value)
        return cpu.choice(Path(shutil.copy(compiled, tmp_path / f"{next(count)}.so")))

    return choose


def test_features_are_those_of_the_cpu(chosen):
    made = chosen(None)
    assert made.known == tuple(NEEDS) and made.used == made.found and made.tuning in TUNINGS
    try:
        (flags,) = {line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")}
    except (OSError, ValueError):
        pytest.skip("the system does not list the features of one kind of CPU")
    has = set(flags.split())
    for name, flag in (("f16c", "f16c"), ("avx2", "avx2"), ("vnni", "avx512_vnni"), ("bf16_dot", "avx512_bf16")):
        assert (name in made.found) == (flag in has), name
    assert ("avx512" in made.found) == ({"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= has)


@pytest.mark.parametrize("name", NEEDS)
def test_name_allows_no_more_than_the_feature_and_its_needs(chosen, name):
    found = set(chosen(None).found)
    assert set(chosen(name).used) == NEEDS[name] & found
    assert chosen(f"{name},f16c").used == chosen(f" F16C , {name.upper()}").used


@pytest.mark.parametrize("name", NEEDS)
def test_minus_takes_a_feature_and_what_needs_it(chosen, name):
    found = chosen(None).found
    kept = tuple(each for each in found if name not in NEEDS[each])
    assert chosen(f"-{name}").used == kept
    assert chosen(f"avx512,vnni,-{name}").used == tuple(
        each for each in kept if each in NEEDS["vnni"] and set(NEEDS[each]) <= {*kept}
    )


def test_baseline_amx_and_empty_values(chosen):
    found = chosen(None).found
    assert chosen("baseline").used == () and chosen("baseline,avx2").used == chosen("avx2").used
    assert chosen("-amx").used == tuple(name for name in found if not name.startswith("amx"))
    assert set(chosen("amx").used) == {"f16c", "avx2", "avx512", "amx_int8", "amx_bf16", "amx_fp16"} & set(found)
    assert chosen("").used == found


@pytest.mark.parametrize("name", TUNINGS)
def test_tuning(chosen, name):
    made = chosen(f"tune={name}")
    assert made.tuning == name and made.used == made.found
    assert chosen(f"avx2,tune={name}").used == chosen("avx2").used


@pytest.mark.parametrize(
    "word", ("avx521", "-avx521", "tune=zen3", "tune=", "-", "-baseline", "-tune=zen4", "avx2 f16c", "ä")
)
def test_unknown_word_lists_the_known_ones(chosen, word):
    with pytest.raises(ValueError) as caught:
        chosen(f"avx2,{word}")
    text = str(caught.value)
    assert f"{cpu.VARIABLE}=avx2," in text and "unknown word" in text and "unset it" in text
    for name in (*NEEDS, "amx", "baseline", *TUNINGS):
        assert name in text, name


def test_empty_word_is_unknown(chosen):
    for value in (",", "avx2,", "avx2,,f16c"):
        with pytest.raises(ValueError, match="unknown word ''"):
            chosen(value)


def test_former_variable_is_read_checked_and_told_of(chosen, monkeypatch):
    monkeypatch.setattr(logs, "given", set())
    assert chosen("avx2", cpu.FORMER_VARIABLE).used == chosen("avx2").used
    assert [cpu.FORMER_VARIABLE in text and cpu.VARIABLE in text for text in logs.given] == [True]
    with pytest.raises(ValueError, match=rf"{cpu.FORMER_VARIABLE}=avx has the unknown word 'avx'"):
        chosen("avx", cpu.FORMER_VARIABLE)


# ---- other processors --------------------------------------------------------------------------------------


def test_other_processors_compile_no_source_of_a_feature(monkeypatch):
    compiled = {}
    for machine in ("x86_64", "AMD64", "aarch64"):
        monkeypatch.setattr(toolchain.platform, "machine", lambda machine=machine: machine)
        compiled[machine] = {path.name for path in build.sources("cpu")}
    assert compiled["x86_64"] == compiled["AMD64"] and len(compiled["aarch64"]) > 30
    left_out = compiled["x86_64"] - compiled["aarch64"]
    assert left_out == {name for name in compiled["x86_64"] if "_avx" in name} and len(left_out) > 20


@pytest.mark.full
@pytest.mark.parametrize(
    "source",
    (
        "common/cpu_features",
        "gemm/gemm",
        "gemv/gemv",
        "packed_gemm/packed_gemm",
        "packed_gemv/packed_gemv",
        "products/select",
    ),
)
def test_other_processors_call_no_kernel_of_a_feature(tmp_path, source):
    cxx, nm = shutil.which("aarch64-linux-gnu-g++"), shutil.which("aarch64-linux-gnu-nm")
    if cxx is None or nm is None:
        pytest.skip("no compiler for aarch64")
    flags, folders = build.compile_flags("cpu", toolchain.find_toolchain("cpu"))
    path = build.source_dir() / f"{source}_cpu.cpp"
    subprocess.run([cxx, *flags, *folders, "-c", str(path), "-o", str(tmp_path / "made.o")], check=True)
    said = subprocess.run([nm, "-u", str(tmp_path / "made.o")], capture_output=True, text=True, check=True).stdout
    assert said
    assert not [line for line in said.splitlines() if "_avx" in line or "_amx" in line]


# ---- the library of all kernels ----------------------------------------------------------------------------

PRODUCTS = """
import json, torch
from hf_fastpath import ops
from hf_fastpath.native import loader
loader.ensure("cpu")
torch.manual_seed(7)
made = {}
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    x, weight = torch.randn(3, 1003, dtype=dtype), torch.randn(77, 1003, dtype=dtype)
    exact = x.double() @ weight.double().T
    got = ops.gemv(x, weight)
    made[str(dtype)] = (((got.double() - exact).norm() / exact.norm()).item(), got.float().tolist())
print(json.dumps({"used": loader.cpu_choice().used, "made": made}))
"""


def _run(value: str, script: str) -> subprocess.CompletedProcess[str]:
    return fresh_process.run(script, **{cpu.VARIABLE: value})


def _need_library() -> None:
    if not loader.ensure("cpu").native:
        pytest.skip("no library for the CPU")


def test_fewer_features_change_kernels_and_no_results():
    _need_library()
    found = {}
    for value in ("baseline", "avx2", "avx512,-vnni,tune=generic"):
        result = _run(value, PRODUCTS)
        assert result.returncode == 0, result.stderr[-2000:]
        found[value] = json.loads(result.stdout)
        # half a unit in the last place of the type, and float32's sums
        for dtype, most in (("torch.float32", 1e-6), ("torch.float16", 2.0**-11), ("torch.bfloat16", 2.0**-8)):
            assert found[value]["made"][dtype][0] < most, (value, dtype)
    assert found["baseline"]["used"] == [] and "vnni" not in found["avx512,-vnni,tune=generic"]["used"]
    float32 = [each["made"]["torch.float32"][1] for each in found.values()]
    if "avx2" in loader.cpu_choice().found:
        assert float32[0] != float32[1], "the same kernel has run: the sums are equal bit for bit"


@pytest.mark.parametrize(
    ("script", "error"),
    (
        ("import hf_fastpath; from models import build; hf_fastpath.patch(build('llama'))", "ValueError"),
        ("import torch; from hf_fastpath import ops; ops.gemv(torch.ones(1, 64), torch.ones(8, 64))", "RuntimeError"),
    ),
    ids=("patch", "op"),
)
def test_unknown_word_is_an_exception(script, error):
    _need_library()
    result = _run("avx521", script)
    last = result.stderr.strip().splitlines()[-1]
    assert result.returncode == 1 and "Traceback" in result.stderr, result.stderr[-2000:]
    assert last.startswith(error) or error in result.stderr, last
    assert "HF_FASTPATH_CPU=avx521 has the unknown word 'avx521'" in result.stderr, result.stderr[-2000:]


def test_info_says_what_is_wrong():
    _need_library()
    script = "import runpy; runpy.run_module('hf_fastpath', run_name='__main__', alter_sys=True)"
    result = fresh_process.run(script, "info", **{cpu.VARIABLE: "avx521"})
    assert result.returncode == 2 and "unknown word 'avx521'" in result.stderr and "Traceback" not in result.stderr
