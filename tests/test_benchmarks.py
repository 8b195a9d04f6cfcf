"""The benchmarks' comparisons, as far as they could be wrong without being noticed."""

from __future__ import annotations

import csv
import dataclasses
import io
import re
import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gguf_models import TYPES, write_file
from models import CPU, build, pair, prompt

from hf_fastpath import ops
from hf_fastpath.bench import engines, formats, measure, published
from hf_fastpath.cli import main as cli
from hf_fastpath.compat import CACHE
from hf_fastpath.decode.loops import prompt as prompts
from hf_fastpath.quantization import FORMATS
from hf_fastpath.quantization.ggml_blocks import BLOCK_TYPES

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import bench_append  # noqa: E402
import bench_checkouts  # noqa: E402
import bench_gguf  # noqa: E402
import bench_multimodal  # noqa: E402
import bench_packed_gemm  # noqa: E402
import bench_pages  # noqa: E402
import write_gguf  # noqa: E402


class Reader:
    """A reader of the GGUF format, by its specification, that can read enough of a file."""

    def __init__(self, data: bytes):
        self.data, self.at = data, 0
        magic, version, tensors, pairs = self.take("<4sIQQ")
        assert (magic, version) == (b"GGUF", 3)
        self.metadata = dict(self.pair() for _ in range(pairs))
        self.tensors = {}
        for _ in range(tensors):
            name, (rank,) = self.text(), self.take("<I")
            shape = self.take(f"<{rank}Q")[::-1]
            self.tensors[name] = (shape, *self.take("<IQ"))
        self.start = -(-self.at // 32) * 32

    def take(self, layout: str) -> tuple:
        values = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        return values

    def text(self) -> str:
        (length,) = self.take("<Q")
        return self.take(f"<{length}s")[0].decode()

    def pair(self) -> tuple:
        key, (kind,) = self.text(), self.take("<I")
        return key, self.text() if kind == 8 else self.take({4: "<I", 6: "<f"}[kind])[0]

    def tensor(self, name: str) -> torch.Tensor:
        shape, kind, offset = self.tensors[name]
        assert offset % 32 == 0
        dtype = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}[kind]
        count, begin = torch.Size(shape).numel(), self.start + offset
        return torch.frombuffer(bytearray(self.data[begin : begin + count * dtype.itemsize]), dtype=dtype).view(shape)


@pytest.mark.parametrize("kind", measure.DTYPES)
@pytest.mark.parametrize("tied", (True, False), ids=("tied", "untied"))
def test_gguf_file_has_the_models_sizes(tied, kind):
    dtype = measure.DTYPES[kind]
    model = build("llama", tie_word_embeddings=tied).to(dtype)
    file = io.BytesIO()
    write_gguf.write(file, model.config, kind)
    read = Reader(file.getvalue())
    config = model.config
    assert read.metadata["llama.block_count"] == config.num_hidden_layers
    assert read.metadata["llama.attention.head_count_kv"] == config.num_key_value_heads
    assert read.metadata["llama.vocab_size"] == config.vocab_size
    matrices = [name for name, (shape, *_) in read.tensors.items() if len(shape) == 2]
    assert all(read.tensor(name).dtype == dtype for name in matrices)
    weights = {p.data_ptr(): p for p in model.parameters()}.values()
    shapes = sorted(shape for shape, *_ in read.tensors.values())
    assert shapes == sorted(tuple(p.shape) for p in weights if p.numel())
    for name in read.tensors:
        values = read.tensor(name).float()
        assert values.isfinite().all() and (values.std() > 0 if name in matrices else (values == 1).all())


@pytest.mark.parametrize(("kind", "bits"), (("q4_0", 4), ("q8_0", 8)))
def test_gguf_blocks_hold_the_weights(kind, bits):
    """A block has 32 weights behind their scale; of four bits the first sixteen are low, the others high."""
    values = torch.randn(4, 64)
    blocks = write_gguf.TENSOR_TYPES[kind].encode(values)
    assert blocks.nbytes == write_gguf.TENSOR_TYPES[kind].nbytes(values.numel()) == 8 * (2 + 32 * bits // 8)
    scale, quants = blocks[:, :2].contiguous().view(torch.float16).float(), blocks[:, 2:]
    steps = torch.cat((quants & 15, quants >> 4), dim=1).float() - 8 if bits == 4 else quants.view(torch.int8).float()
    assert ((steps * scale).view(4, 64) - values).abs().max() <= scale.abs().max() * 1.01


def test_quantized_gguf_file_keeps_norms_and_head():
    model, file = build("llama", hidden_size=64, intermediate_size=128, tie_word_embeddings=False), io.BytesIO()
    write_gguf.write(file, model.config, "q4_0")
    kinds = {name: kind for name, (_, kind, _) in Reader(file.getvalue()).tensors.items()}
    assert kinds["output.weight"] == kinds["token_embd.weight"] == 1 and kinds["output_norm.weight"] == 0
    assert kinds["blk.1.ffn_down.weight"] == 2


def test_filled_caches_are_alike():
    stock, ours = pair("llama", CPU)
    cache = engines.random_cache(stock, 2, 30)
    text = torch.cat((prompt(CPU, 2, 30), prompt(CPU, 2, 1, seed=1)), dim=1)
    found = []
    for name, model in (("stock", stock), ("ours", ours)):
        mine = engines.copied_cache(name, cache)
        assert mine.get_seq_length() == 30 and mine is not cache
        options = dict(attention_mask=torch.ones_like(text), max_new_tokens=8, do_sample=False)
        found.append(model.generate(text, **{CACHE: mine}, **options))
    assert torch.equal(*found)


def test_llama_bench_is_asked_for_decode_alone(tmp_path, monkeypatch):
    program, file = tmp_path / "llama-bench", tmp_path / "model.gguf"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\necho \'[{{"avg_ns": 3000000000}}]\'\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="no file .*write_gguf.py writes one"):
        engines.LlamaBench(file)
    file.touch()
    assert engines.LlamaBench(file).seconds_per_token(context=177, new_tokens=6) == pytest.approx(0.5)
    asked = (tmp_path / "asked").read_text().split()
    options = dict(zip(asked[::2], asked[1::2]))
    assert (options["-m"], options["-p"], options["-n"], options["-d"]) == (str(file), "0", "6", "177")
    assert engines.LlamaBench(file).seconds_of_prompt(context=40, tokens=5) == pytest.approx(3)
    asked = (tmp_path / "asked").read_text().split()
    options = dict(zip(asked[::2], asked[1::2]))
    assert (options["-p"], options["-n"], options["-d"]) == ("5", "0", "40")
    program.unlink()
    with pytest.raises(FileNotFoundError, match="not on PATH"):
        engines.LlamaBench(file)


def test_every_way_to_append_is_timed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_append.shapes, "build_model", lambda *_: build("llama"))
    monkeypatch.setattr(bench_append, "measure_read_bandwidth", lambda *_, **__: 50e9)
    monkeypatch.setattr(bench_append, "read_buffer", lambda _: None)
    path = tmp_path / "append.csv"
    sizes = ["--dtype", "fp32", "--context", "20", "--tokens", "3", "17", "--rounds", "2"]
    assert bench_append.main([*sizes, "--csv", str(path)]) == 0
    rows = list(csv.DictReader(path.open()))
    ways = {(row["engine"], row["way"], int(row["new_tokens"])) for row in rows}
    calls = {("stock", "turn"), ("stock", "forward"), ("ours", "turn"), ("ours", "forward"), ("ours", "drafts")}
    assert len(rows) == len(ways) == 10 and ways == {(*call, count) for call in calls for count in (3, 17)}
    for row in rows:
        assert float(row["tok_s"]) == pytest.approx(1e3 * int(row["new_tokens"]) / float(row["ms"]), rel=0.01)
        assert row["timings"] == "2" and row["context"] == "20"
    assert capsys.readouterr().out.count("% of R") == 10


# ---- formats of quantized weights --------------------------------------------------------------------------

TINY_STUDY = "--layers 2 --hidden 64 --inner 96 --rounds 2 --device cpu"


def test_formats_are_measured_on_the_bytes_that_files_have(tmp_path, capsys, monkeypatch):
    """A type of blocks of GGUF files is measured as the format that holds it; Q4_0 has 18 bytes for 32 weights."""
    monkeypatch.setattr(formats, "measure_read_bandwidth", lambda device: 50e9)
    path, names = tmp_path / "formats.csv", {"q4_0": "int4_g32", "q8_0": "int8_g32", "int8": "int8"}
    sizes = f"{TINY_STUDY} --hidden 128 --inner 256"
    assert cli.main(["bench", "gemv", *f"{sizes} --format {' '.join(names)} --csv {path}".split()]) == 0
    rows = list(csv.DictReader(path.open()))
    assert {row["format"]: row["packed_format"] for row in rows} == names and len(rows) == 3
    weights = 2 * 3 * 128 * 256
    assert [int(row["weight_bytes"]) for row in rows] == [weights * 18 // 32, weights * 34 // 32, weights * 130 // 128]
    for row in rows:
        rate = int(row["weight_bytes"]) / (float(row["ms_per_token"]) * 1e-3) / 1e9
        assert float(row["gb_s"]) == pytest.approx(rate, abs=0.06, rel=0.01) and row["r_gb_s"] == "50.0"
        assert float(row["percent_of_r"]) == pytest.approx(2 * rate, abs=0.06, rel=0.01)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["format", "packed", "as", "GB", "ms/token", "GB/s", "%", "of", "R", "R,", "GB/s"]
    for line, row in zip(lines[2:], rows, strict=True):
        assert line.split()[:2] == [row["format"], row["packed_format"]]
        assert line.split()[-2:] == [row["percent_of_r"], "50.0"]


def test_every_format_is_measured(capsys, monkeypatch):
    monkeypatch.setattr(formats, "measure_read_bandwidth", lambda device: 50e9)
    assert formats.main(f"{TINY_STUDY} --dtype fp32 --format".split() + list(formats.CHOICES)) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]] == list(formats.CHOICES)
    assert {kind.name.lower() for kind in BLOCK_TYPES.values()} | set(FORMATS) == set(formats.CHOICES)
    for wrong in ("--format q3", "--hidden 0", "--layers 0", "--device cuda:77"):
        with pytest.raises(SystemExit):
            formats.main(wrong.split())
    assert "choose from" in capsys.readouterr().err


def test_weights_of_every_format_give_numbers():
    for format in FORMATS.values():
        for rows, columns in formats.Study(format.name, 1, 64, 96).shapes():
            out = ops.packed_gemv(torch.ones(1, columns), *formats.weight(format, rows, columns, CPU))
            assert out.shape == (1, rows) and bool(out.isfinite().all()) and bool(out.any())


def test_products_of_prompts_add_up(monkeypatch, tmp_path, capsys):
    config = build("llama").config
    monkeypatch.setattr(bench_packed_gemm.shapes, "shape", lambda _: SimpleNamespace(build_config=lambda: config))
    path = tmp_path / "products.csv"
    options = "--device cpu --dtype fp32 --formats int8 int4_g32 --rows 17 33 --rounds 2"
    bench_packed_gemm.main([*options.split(), "--csv", str(path)])
    rows = list(csv.DictReader(path.open()))
    hidden, inner = config.hidden_size, config.intermediate_size
    width = config.head_dim * (config.num_attention_heads + 2 * config.num_key_value_heads)
    assert {(int(row["in_features"]), int(row["out_features"])) for row in rows} >= {
        *((hidden, width), (hidden, 2 * inner), (inner, hidden))
    }
    assert len(rows) == 2 * 4 * 3
    lines = [line for line in capsys.readouterr().out.splitlines() if " rows, us: " in line]
    for line, count in zip(lines, ("17", "33"), strict=True):
        for way in ("linear", "int8", "int4_g32"):
            us = sum(float(row["us"]) for row in rows if (row["way"], row["rows"]) == (way, count))
            assert float(re.search(rf"{way} (\d+) ", line)[1]) == pytest.approx(us, abs=1)


def test_prompts_are_read_by_every_model(monkeypatch, capsys):
    monkeypatch.setattr(bench_packed_gemm.shapes, "build_model", lambda *_: build("llama"))
    read, real = [], prompts.read
    monkeypatch.setattr(prompts, "read", lambda *a: read.append(a[2].tokens.shape[1]) or real(*a))
    bench_packed_gemm.main("--whole --device cpu --dtype fp32 --formats int8 --rows 17 20 --rounds 3".split())
    assert sorted(read) == [17] * 10 + [20] * 10  # there are two models, two untimed rounds and three others
    assert capsys.readouterr().out.count(" rows, us: linear ") == 2


def test_every_way_over_pages_is_timed(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench_pages.shapes, "build_model", lambda *_: build("llama"))
    sizes = ["--context", "40", "--new-tokens", "4", "--page-size", "16", "--repeats", "1", "--device", "cpu"]
    assert bench_pages.main([*sizes, "--csv", str(tmp_path / "pages.csv")]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.endswith("pages")]
    assert len(lines) == 10 and sum("pages of 16" in line for line in lines) == 5
    (shared,) = [line for line in lines if line.startswith("8 sequences") and "pages of" in line]
    assert shared.split()[-4:] == ["10", "of", "24", "pages"]  # 40 positions, and the last page of each of 8 sequences
    assert len((tmp_path / "pages.csv").read_text().splitlines()) == 11


def test_a_gguf_file_is_timed_in_three_ways(tmp_path, capsys):
    pytest.importorskip("gguf")
    file = write_file(tmp_path / "model.gguf", {"": TYPES["Q4_K"]}, True)
    sizes = ["--context", "8", "--tokens", "4", "--rounds", "1", "--device", "cpu", "--dtype", "fp32"]
    assert bench_gguf.main([str(file), *sizes, "--csv", str(tmp_path / "gguf.csv")]) == 0
    assert capsys.readouterr().out.count(" tok/s, ") == 3
    with (tmp_path / "gguf.csv").open(newline="") as rows:
        found = {row["way"]: int(row["bytes"]) for row in csv.DictReader(rows)}
    assert found["packed"] < 0.3 * found["stock"] == 0.3 * found["dequantized"]


@pytest.mark.every(4)
@pytest.mark.parametrize("name", bench_multimodal.SIZES)
def test_ours_decodes_behind_an_image(name, monkeypatch, tmp_path):
    """Each size with tiny layers: the image is read, and no token is of stock code's."""
    size = bench_multimodal.SIZES[name]
    few = dict(hidden_size=256, intermediate_size=96, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1)
    text = published.MODELS[size.text]
    monkeypatch.setitem(published.MODELS, size.text, dataclasses.replace(text, config=text.config | few))
    vision = size.vision | dict(hidden_size=64, intermediate_size=64)
    vision |= dict(out_hidden_size=256) if "depth" in vision else dict(num_attention_heads=2)
    monkeypatch.setitem(bench_multimodal.SIZES, name, dataclasses.replace(size, vision=vision))
    monkeypatch.setattr(bench_multimodal, "GRID", (2, 4))
    path = tmp_path / "rows.csv"
    options = "--device cpu --dtype fp32 --batch 2 --tokens 2 --runs 1 --csv"
    assert bench_multimodal.main([f"{name}:1", *options.split(), str(path)]) == 0
    with path.open(newline="") as file:
        (row,) = csv.DictReader(file)
    places = 256 if name == "gemma-3-4b" else 8
    assert (row["context"], row["batch"], row["fallback_tokens"]) == (str(bench_multimodal.TEXT + places), "2", "0")
    assert row["model"] == f"{size.label}, 1 layers"


def test_two_checkouts_take_turns(capsys):
    """Each process imports the package of its own checkout, and none another one's."""
    given = ["--size", "2x128", "--rounds", "3", "--tokens", "2", "--weights", "none"]
    assert bench_checkouts.main([str(bench_checkouts.HERE), *given]) == 0
    assert re.fullmatch(
        r"2x128 fp16 none +\d+\.\d\d ms, this checkout .* ms: .* \(.* to .*\)\n", capsys.readouterr().out
    )


def test_a_process_over_another_checkout_is_refused(monkeypatch, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho ready /elsewhere\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(RuntimeError, match=f"hf_fastpath of {tmp_path}, and says 'ready /elsewhere'"):
        bench_checkouts.Served(tmp_path).wait()
