"""The command line."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import fresh_process
import pytest
import torch
from models import ARCHITECTURES, CPU, TINY_PYTHON, require_native, tokenizer
from transformers import AutoModelForCausalLM, RwkvConfig

from hf_fastpath.architecture import architectures
from hf_fastpath.bench import generate
from hf_fastpath.cli import main as cli
from hf_fastpath.native import loader
from hf_fastpath.native.cuda import CudaRoute
from hf_fastpath.reasons import REASONS


def test_cli_info(capsys):
    assert cli.main(["info"]) == 0
    printed = capsys.readouterr().out
    for part in ("hf_fastpath:", torch.__version__, "cpu:", "cuda:", "mistral", "decode_attention"):
        assert part in printed
    assert all(line[14] == " " for line in printed.splitlines()), "values stand in one column"


def test_cli_info_json(capsys):
    assert cli.main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["torch"] == torch.__version__ and set(found["kernels"]) == {"cpu", "cuda"}
    assert set(found["architectures"]) >= set(ARCHITECTURES)
    assert found["architectures"] == [architecture.name for architecture in architectures()]


def test_cli_info_routes(capsys):
    rows = [*loader.cpu_routes(), *loader.cuda_routes()]
    assert cli.main(["info", "--routes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert cli.main(["info", "--routes", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(lines) == len(rows) + 1 and [line.split()[0] for line in lines[1:]] == [row.name for row in rows]
    assert [row["name"] for row in found] == [row.name for row in rows] and rows
    pairs = next(row for row in found if row["name"] == "pairs" and "packed_gemm" in row["products"])
    assert pairs["rows"] == "4-512" and pairs["tuning"] == "prefers_bf16_dot"
    assert {"fp8", "int4"} <= set(pairs["weights"])


def test_cli_info_routes_of_a_gpu(monkeypatch, capsys):
    row = CudaRoute("gemv_ring", ("gemv",), ("plain",), ("float32",), (1, 1), "hopper", ("ring",), ("append",))
    monkeypatch.setattr(loader, "cuda_routes", lambda: [row])
    assert cli.main(["info", "--routes", "--json"]) == 0
    *others, found = json.loads(capsys.readouterr().out)
    assert {each["device"] for each in others} == {"cpu"} and found["device"] == "cuda"
    assert (found["rows"], found["needs"], found["lacks"]) == ("1-1", ["hopper", "ring"], ["append"])
    assert all(list(each) == list(found) for each in others), "a table has columns"
    assert cli.main(["info", "--routes"]) == 0
    printed = "gemv_ring gemv plain float32 1-1 hopper,ring append cuda"
    assert capsys.readouterr().out.splitlines()[-1].split() == printed.split()


def test_cli_explain(capsys):
    assert cli.main(["explain"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(REASONS)
    assert cli.main(["explain", "batch_size"]) == 0
    assert capsys.readouterr().out == "batch_size: {}; {}\n".format(*REASONS["batch_size"])
    assert cli.main(["explain", "batch_size", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"batch_size": REASONS["batch_size"]._asdict()}


@pytest.mark.parametrize("json_wanted", (False, True))
def test_cli_verify(json_wanted, capsys):
    require_native(CPU)
    arguments = ["verify", str(TINY_PYTHON), "--device", "cpu", "--max-new-tokens", "16"]
    assert cli.main(arguments + ["--json"] * json_wanted) == 0
    printed = capsys.readouterr().out
    if json_wanted:
        found = json.loads(printed)
        assert found["tokens_equal"] is True and found["rows"][0]["positions"] == 16
    else:
        assert "hf_fastpath.verify: ok over" in printed and "short" in printed


TINY = ["verify", str(TINY_PYTHON), "--device", "cpu"]
#: wrong arguments -> what is said about them
REFUSED = {
    "unknown option": (["info", "--nonsense"], "hf-fastpath info: error: unknown arguments: --nonsense"),
    "unknown command": (["speed"], "invalid choice: 'speed'"),
    "no command": ([], "required: command"),
    "no model": (["verify"], "required: model"),
    "no such model": (["verify", "/nowhere", "--device", "cpu"], "'/nowhere' is no folder, GGUF file or model id of"),
    "no model there": (["verify", ".", "--device", "cpu"], "'.' is no folder, GGUF file or model id of a causal LM"),
    "no tokens": ([*TINY, "--max-new-tokens", "0"], "got '0', expected a whole number above 0"),
    "no prompt": ([*TINY, "--prompt", ""], "expected [1 to 16 sequences, at least 2 tokens]"),
    "device": (["verify", "x", "--device", "gpu"], "got 'gpu', expected cpu, cuda or cuda:1"),
    "CUDA device": (["verify", "x", "--device", "cuda:99"], "CUDA device"),
    "dtype": ([*TINY, "--dtype", "f16"], "got 'f16', expected float32"),
    "bandwidth": (["explain", "x", "--bandwidth", "-1"], "got '-1', expected GB/s or 'measure'"),
    "code": (["explain", "atention_mask"], "unknown reason code 'atention_mask'. Did you mean 'attention_mask'?"),
}


@pytest.mark.parametrize(("arguments", "error"), REFUSED.values(), ids=REFUSED)
def test_cli_refuses(arguments, error, capsys):
    """The error is one line below the usage of the command, without a traceback."""
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    printed = capsys.readouterr().err
    assert caught.value.code == 2 and "usage: hf-fastpath" in printed and error in printed.splitlines()[-1]
    assert (
        not arguments or arguments[0] not in ("info", "explain", "verify") or f"hf-fastpath {arguments[0]}" in printed
    )


def test_cli_takes_short_names_of_types(capsys):
    arguments = ["explain", str(TINY_PYTHON), "--device", "cpu", "--json", "--dtype"]
    for name in ("bf16", "bfloat16"):
        assert cli.main([*arguments, name]) == 0
        assert json.loads(capsys.readouterr().out)["dtype"] == "bfloat16"


def test_cli_verify_of_what_is_not_covered(capsys, tmp_path):
    """The command says what patch() says."""
    sizes = dict(num_hidden_layers=2, hidden_size=32, vocab_size=4200, bos_token_id=1, eos_token_id=1)
    AutoModelForCausalLM.from_config(RwkvConfig(**sizes)).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    with pytest.raises(SystemExit) as caught:
        cli.main(["verify", str(tmp_path), "--device", "cpu"])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert "patch() can do nothing: RwkvForCausalLM (rwkv): not_recorded" in said and "a tensor of the model" in said


GEMV = "bench gemv --layers 1 --hidden 256 --inner 512 --device cpu"
BENCH = "bench --model tiny --device cpu --dtype fp32 --engines stock,ours --context 16 --new-tokens 4 --repeats 1"


def test_cli_bench(capsys):
    """There is a table for each workload, no wider than 100 columns; wrong arguments give the usage."""
    require_native(CPU)
    assert cli.main([*BENCH.split(), "--batch", "1", "16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    tables = [at for at, line in enumerate(lines) if line.startswith("tiny fp32, context 16, batch")]
    assert [lines[at].split()[-1] for at in tables] == ["1", "16"] and "R = " in lines[1]
    assert not any("±" in line for line in lines), "one round has no spread"
    for at in tables:
        assert lines[at + 1].split()[:3] == ["engine", "prefill", "tok/s"]
        assert [line.split()[0] for line in lines[at + 2 : at + 4]] == ["stock", "ours"]
        assert all(len(line) <= 100 for line in lines[at : at + 4])
    for wrong in ("--context 0", "--device gpu", "--model nope", "--engines nope"):
        with pytest.raises(SystemExit) as caught:
            cli.main(["bench", *wrong.split()])
        assert caught.value.code == 2 and "usage: hf-fastpath bench" in capsys.readouterr().err


def test_cli_bench_json(capsys):
    require_native(CPU)
    assert cli.main([*BENCH.split(), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["engine"], row["context"], row["batch"]) for row in rows] == [("stock", 16, 1), ("ours", 16, 1)]
    assert all(row["decode_spread_percent"] is row["prefill_spread_percent"] is None for row in rows)


@pytest.mark.parametrize(
    ("command", "shown"),
    ((BENCH.replace("--repeats 1", "--repeats 2"), True), (f"{GEMV} --rounds 2", True), (f"{GEMV} --rounds 1", False)),
)
def test_cli_bench_shows_a_spread_of_several_rounds(command, shown, capsys):
    """That one round of whole models has none is part of :func:`test_cli_bench`."""
    require_native(CPU)
    assert cli.main(command.split()) == 0
    assert ("±" in capsys.readouterr().out) == shown


def test_bench_table_has_room_for_large_models():
    """Figures are as wide as they come: a 70B model, long contexts, minutes for the first call."""
    row = dict(model="Llama-3.1-70B int4_g32, int8 head", dtype="bf16", context=131072, batch=64, note="")
    row |= dict(engine="ours-streamed", prefill_tok_s=123456.7, prefill_spread_percent=12.0, ms_per_token=1234.567)
    row |= dict(decode_tok_s=12345.6, decode_spread_percent=12.0, gb_s=4620.0, percent_of_r=100.0, first_call_s=1234.5)
    row |= dict(kv_bytes_per_token=123456789012, peak_memory_bytes=140 * 10**9)
    assert max(map(len, generate._shown([row]).splitlines())) <= 100


def test_bench_of_an_install_writes_where_it_is_called(monkeypatch, tmp_path):
    """An install has no folder for CSV files and no commit; it may lie inside another repository."""
    package = Path(cli.__file__).parent.parent
    monkeypatch.chdir(tmp_path)
    found = importlib.util.spec_from_file_location("measure_of_an_install", tmp_path / "measure.py")
    (tmp_path / "measure.py").write_text((package / "bench" / "measure.py").read_text())
    measure = importlib.util.module_from_spec(found)
    monkeypatch.setitem(sys.modules, found.name, measure)
    found.loader.exec_module(measure)
    assert measure.csv_path("generate", CPU) == Path("generate_cpu.csv")
    assert measure.environment(CPU)["commit"] == ""


def test_cli_runs_as_a_module():
    command = [sys.executable, "-m", "hf_fastpath", "explain", "autocast"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0 and result.stdout.startswith("autocast: ")


#: what needs neither a model nor a device -> the exit status
WITHOUT_TORCH = {
    "explain autocast": 0,
    "explain busy --json": 0,
    "explain": 0,
    "explain --json": 0,
    "explain atention_mask": 2,
    "--version": 0,
    "--help": 0,
    "explain --help": 0,
    "verify --help": 0,
    "verify": 2,
    "info --nonsense": 2,
}
#: the program, as the command that an installation puts there
PROGRAM = """
import sys
root, *sys.argv = sys.argv[1:]
sys.path.insert(0, root)
from hf_fastpath.cli.main import main
try:
    status = main(sys.argv[1:])
except SystemExit as ended:
    status = ended.code
print(status, *(name for name in ("torch", "transformers", "numpy") if name in sys.modules))
"""


@pytest.mark.parametrize("command", WITHOUT_TORCH)
def test_cli_answers_at_once(command):
    """Importing torch and transformers takes seconds."""
    root = str(Path(cli.__file__).parents[2])
    program = [sys.executable, "-c", PROGRAM, root, "hf-fastpath", *command.split()]
    result = subprocess.run(program, capture_output=True, text=True)
    assert result.stdout.splitlines()[-1:] == [str(WITHOUT_TORCH[command])], result.stderr


@pytest.mark.parametrize("torch_first", (False, True))
def test_importing_the_package_registers_its_ops(torch_first):
    """Whatever was imported before, ops can be called through ``torch.ops``."""
    imports = ["import torch", "import hf_fastpath"]
    code = "; ".join([*(imports if torch_first else imports[::-1]), "print(torch.ops.hf_fastpath.fused_gelu)"])
    root = str(Path(cli.__file__).parents[2])
    if torch_first:
        result = fresh_process.run(code)
    else:
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert result.stdout.strip() == "hf_fastpath.fused_gelu", result.stderr
