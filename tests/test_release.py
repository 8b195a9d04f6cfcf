"""What makes a release: workflows, the table of tested versions, notes, the folder for Hugging Face's `kernels`."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import tested
import yaml
from models import CPU, require_native

from hf_fastpath.native import build

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").glob("*.yml")}
MATRIX = WORKFLOWS["ci"]["jobs"]["test"]["strategy"]["matrix"]["include"]
PROJECT = (ROOT / "pyproject.toml").read_text()


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "release" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def steps(workflow: str) -> list[dict]:
    return [step for job in WORKFLOWS[workflow]["jobs"].values() for step in job.get("steps", [])]


# ---- workflows; `make workflows` has linters look at them ----------------------------------------------------


def test_the_matrix_holds_what_the_package_claims():
    """Each Python of the classifiers is tested, and so are the oldest torch and transformers that are admitted."""
    claimed = set(re.findall(r"Programming Language :: Python :: (3\.\d+)", PROJECT))
    assert claimed == {row["python"] for row in MATRIX}
    oldest_torch, oldest_transformers = (
        re.search(rf'"{name}>=([\d.]+)"', PROJECT)[1] for name in ("torch", "transformers")
    )
    assert any(row["torch"].startswith(f"{oldest_torch}.") for row in MATRIX)
    assert oldest_transformers in {row["transformers"] for row in MATRIX}
    newest = re.search(r'"transformers<5\.(\d+)"', PROJECT)[1]
    whole = [row for row in MATRIX if row["target"] == "test"]
    assert [row["transformers"] for row in whole] == [f"5.{int(newest) - 1}"]
    pinned = re.search(r"^TORCH \?= torch==(\S+)$", (ROOT / "Makefile").read_text(), flags=re.M)[1]
    assert [row["torch"] for row in whole] == [pinned]


@pytest.mark.parametrize("workflow", sorted(WORKFLOWS))
def test_workflows_run_what_there_is(workflow):
    known = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), flags=re.M))
    commands = "\n".join(step["run"] for step in steps(workflow) if "run" in step)
    targets = set(re.findall(r"\bmake ([a-z-]+)", commands)) | {row["target"] for row in MATRIX}
    assert targets and targets <= known
    scripts = re.findall(r"\b(?:tests|release)/\w+\.py\b", commands)
    assert scripts and all((ROOT / script).is_file() for script in scripts)
    local = [step["uses"] for step in steps(workflow) if step.get("uses", "").startswith("./")]
    assert local and all((ROOT / path / "action.yml").is_file() for path in local)


def test_a_release_is_published_without_a_password():
    jobs = WORKFLOWS["release"]["jobs"]
    publish = jobs["publish"]
    assert publish["permissions"]["id-token"] == "write" and publish["environment"] == "release"
    assert set(publish["needs"]) >= {"tests", "wheel"} and "tags" in publish["if"]
    assert [name for name, job in jobs.items() if "id-token" in job.get("permissions", {})] == ["publish"]
    assert "secrets." not in "".join(path.read_text() for path in (ROOT / ".github").rglob("*.yml"))


# ---- the table of tested versions ----------------------------------------------------------------------------


def report(path: Path, **counts: int) -> Path:
    given = {"tests": 5, "failures": 0, "errors": 0, "skipped": 2} | counts
    words = " ".join(f'{name}="{count}"' for name, count in given.items())
    path.write_text(f'<testsuites><testsuite {words} timestamp="2026-01-02T03:04:05"/></testsuites>')
    return path


def test_a_row_says_what_passed_and_takes_the_place_of_an_older_one(tmp_path):
    path = tmp_path / "tested.csv"
    for passed in (5, 9):
        told = [str(report(tmp_path / "r.xml", tests=passed)), "--target", "test", "--csv", str(path)]
        assert tested.main(told) == 0
    (row,) = tested.rows_of(path)
    assert (row["date"], row["passed"], row["skipped"]) == ("2026-01-02", "7", "2")
    other = tmp_path / "other.csv"
    tested.write(other, [row | {"python": "3.9"}, row | {"passed": "8"}])
    assert tested.main(["--merge", str(other), "--csv", str(path)]) == 0
    assert [(row["python"], row["passed"]) for row in tested.rows_of(path)] == [("3.9", "7"), (row["python"], "8")]


@pytest.mark.parametrize("counts", ({"failures": 1}, {"errors": 1}, {"tests": 2}), ids=str)
def test_a_run_that_fails_or_tests_nothing_has_no_row(counts, tmp_path, capsys):
    path = tmp_path / "tested.csv"
    told = [str(report(tmp_path / "r.xml", **counts)), "--target", "test", "--csv", str(path)]
    assert tested.main(told) == 1 and not path.exists() and "only what passes is kept" in capsys.readouterr().err


def test_rows_are_of_versions_that_the_package_takes():
    rows = tested.rows_of(ROOT / "docs" / "data" / "tested.csv")
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), flags=re.M))
    assert rows and {row["target"] for row in rows} <= targets and all(int(row["passed"]) > 0 for row in rows)
    for name in ("torch", "transformers", "requires-python"):
        least = re.search(rf'"?{name}(?: = ")?>=([\d.]+)', PROJECT)[1]
        for row in rows:
            found = row["python" if name == "requires-python" else name]
            assert tuple(map(int, found.split(".")))[:2] >= tuple(map(int, least.split("."))), row


# ---- notes ---------------------------------------------------------------------------------------------------


def test_notes_of_a_release_are_its_section():
    notes = load("notes").notes
    text = "# Changelog\n\n## [0.2.0] - 2026-03-04\n\n### Added\n- this\n\n## [0.1.0] - unreleased\n- that\n"
    assert notes("0.2.0", text) == "### Added\n- this"
    for missing in ("0.1.0", "0.3.0"):
        wanted = rf"needs a line '## \[{missing}\] - YYYY-MM-DD'; it has 0.2.0 \(2026-03-04\), 0.1.0 \(unreleased\)"
        with pytest.raises(ValueError, match=wanted):
            notes(missing, text)
    with pytest.raises(ValueError, match="it has .*0.1.0"):
        notes("99.0", (ROOT / "CHANGELOG.md").read_text())


# ---- the folder for Hugging Face's kernels -------------------------------------------------------------------


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Make the folder from a wheel with the library of this clone."""
    require_native(CPU)
    folder = tmp_path_factory.mktemp("hub")
    files = {"hf_fastpath": "hf_fastpath", "hf_fastpath/patches": "patches", "hf_fastpath/csrc": "csrc"}
    for name, source in files.items():
        leave = shutil.ignore_patterns("__pycache__", "*cuda.so*")
        shutil.copytree(ROOT / source, folder / "wheel" / name, ignore=leave)
    (folder / "wheel" / "hf_fastpath" / "_version.py").write_text('__version__ = "7.8.9"\n')
    wheel = folder / "hf_fastpath-7.8.9-py3-none-manylinux_2_27_x86_64.manylinux_2_28_x86_64"
    shutil.make_archive(str(wheel), "zip", folder / "wheel")
    wheel = Path(f"{wheel}.zip").rename(f"{wheel}.whl")
    made = load("make_hub").make(wheel, folder / "hub")
    assert [path.name for path in made] == ["torch-stable-abi210-cpu-x86_64-linux"]
    return folder / "hub"


#: what a process that has no hf_fastpath of its own does with a kernel
USES = """
    import torch
    x, weight = torch.randn(3, 64), torch.randn(64)
    wanted = weight * x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(kernel.rms_norm(x, weight, 1e-6), wanted)
    assert kernel.hf_fastpath.loader.status()["cpu"].source == "prebuilt"
    import hf_fastpath
    assert hf_fastpath is kernel.hf_fastpath and hf_fastpath.__version__ == "7.8.9"
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm
    for name, stock in (("RMSNorm", LlamaRMSNorm), ("RMSNormZeroCentered", Qwen3NextRMSNorm)):
        norm = stock(64, 1e-5)
        norm.weight.data.normal_()
        replaced = getattr(kernel.layers, name).forward.__get__(norm)
        torch.testing.assert_close(replaced(x), norm(x))
"""
#: what kernels does once it has found the variant of this machine
BY_HAND = """
    import importlib.util, sys
    spec = importlib.util.spec_from_file_location("hf_fastpath_abc", VARIANT + "/__init__.py")
    kernel = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernel)
"""
BY_KERNELS = """
    from pathlib import Path
    from kernels import LocalLayerRepository, Mode, get_local_kernel, kernelize, use_kernel_mapping
    from kernels import replace_kernel_forward_from_hub
    kernel = get_local_kernel(Path(HUB))
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    replace_kernel_forward_from_hub(LlamaRMSNorm, "RMSNorm")
    torch.manual_seed(0)
    sizes = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2)
    model, ids = LlamaForCausalLM(LlamaConfig(**sizes)).eval(), torch.randint(0, 97, (2, 9))
    stock = model(ids).logits
    repository = LocalLayerRepository(Path(HUB), layer_name="RMSNorm")
    with use_kernel_mapping({"RMSNorm": {"cpu": repository}}, inherit_mapping=False):
        kernelize(model, mode=Mode.INFERENCE, device="cpu")
    calls = []
    kernel.layers._rms_norm, op = lambda *given: calls.append(1) or op(*given), kernel.layers._rms_norm
    torch.testing.assert_close(model(ids).logits, stock)
    assert len(calls) == 5, "each norm of the model runs our op"
"""


@pytest.mark.parametrize("way", ("by hand", "by kernels"))
def test_kernels_loads_the_folder(way, hub):
    if way == "by kernels":
        pytest.importorskip("kernels", reason="kernels is not installed")
    (variant,) = (hub / "build").iterdir()
    code = textwrap.dedent(f"HUB, VARIANT = {str(hub)!r}, {str(variant)!r}")
    code += textwrap.dedent(BY_HAND if way == "by hand" else BY_KERNELS) + textwrap.dedent(USES)
    packages = [path for path in sys.path if path.endswith(("-packages", "-site"))]
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    environment |= {"PYTHONPATH": os.pathsep.join(packages), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-S", "-c", code]  # without -S an editable install would serve
    done = subprocess.run(command, cwd=hub, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_metadata_says_what_the_libraries_serve(hub, monkeypatch, tmp_path):
    (variant,) = (hub / "build").iterdir()
    facts = json.loads((variant / "metadata.json").read_text())
    assert facts["backend"] == {"type": "cpu"} and facts["name"] == "hf-fastpath" and facts["version"] == 7
    make_hub = load("make_hub")
    notes = {"cpu": {"cuda_archs": []}, "cuda": {"cuda_archs": ["80", "90a", "120"]}}
    monkeypatch.setattr(make_hub.recipe, "description", lambda path: notes[path.stem.rpartition("_")[2]])
    monkeypatch.setattr(make_hub.toolchain, "find_nvcc", lambda: "nvcc")
    monkeypatch.setattr(make_hub.toolchain, "version", lambda command: "nvcc: release 13.0, V13.0.88")
    found = make_hub.variants(tmp_path, "x86_64-linux")
    assert found["torch-stable-abi210-cu130-x86_64-linux"] == {"type": "cuda", "archs": ["8.0", "9.0a", "12.0"]}
    assert len(found) == 2
    monkeypatch.setattr(make_hub.toolchain, "find_nvcc", lambda: None)
    with pytest.raises(ValueError, match="no nvcc says which CUDA .* or set CUDA_HOME"):
        make_hub.variants(tmp_path, "x86_64-linux")


def test_a_wheel_without_kernels_is_refused(tmp_path):
    make_hub = load("make_hub")
    with pytest.raises(ValueError, match="is for any, expected a wheel for Linux"):
        make_hub.make(tmp_path / "hf_fastpath-1.0-py3-none-any.whl", tmp_path / "hub")
    with pytest.raises(ValueError, match="no compiled kernels: make one with `make wheel`"):
        make_hub.variants(tmp_path, "x86_64-linux")
    assert make_hub.stable_abi() == "210" and build.TORCH_TARGET_VERSION == "0x020a000000000000"
