"""Blocks of GGUF files: every value, every bit back, modules of transformers that hold them, and files."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gguf_models import (
    TYPES,
    GgufExperts,
    random_blocks,
    values_of,
    with_blocks,
    with_expert_blocks,
    write_file,
    write_lfm2,
)
from models import CPU, SHORT, build, counting, require_native
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.integrations.gguf.utils import GgufEmbedding

import hf_fastpath
from hf_fastpath.compat import gguf_files
from hf_fastpath.linears import gguf_modules
from hf_fastpath.linears.packed_embedding import PackedEmbedding
from hf_fastpath.linears.packed_experts import PackedExperts
from hf_fastpath.quantization.ggml_blocks import blocks_of, packed_blocks

#: whole blocks of 256 weights
SIZES = dict(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
IDS = torch.arange(1, 19).view(2, 9)
over_types = pytest.mark.parametrize("kind", TYPES.values(), ids=TYPES)
MIXED = {"": TYPES["Q4_K"], "attn_v": TYPES["Q6_K"], "ffn_down": TYPES["Q6_K"], "token_embd": TYPES["Q6_K"]}
FILES = {
    "Q4_K_M": (MIXED, False),
    "Q4_K_M tied": (MIXED, True),
    "Q5_K": ({"": TYPES["Q5_K"], "token_embd": TYPES["Q8_0"]}, True),
    "Q8_0": ({"": TYPES["Q8_0"]}, False),
    "Q4_0": ({"": TYPES["Q4_0"], "attn_v": TYPES["Q4_1"]}, True),
    "IQ4_NL": ({"": TYPES["IQ4_NL"]}, True),
}


@over_types
@pytest.mark.parametrize("shape", ((1, 1), (7, 3), (5, 9)))
def test_every_value_is_that_of_the_file_and_every_bit_comes_back(kind, shape, monkeypatch):
    monkeypatch.setattr("hf_fastpath.quantization.ggml_blocks._PIECE", 3 * shape[1] * kind.weights)
    rows, columns = shape[0], shape[1] * kind.weights
    blocks = random_blocks(kind, rows, columns)
    (packed,) = packed_blocks([(kind, blocks)])
    assert packed.format.name == kind.format and packed.in_features == columns
    found = packed.dequantize()
    assert torch.equal(found, values_of(kind, blocks, columns)) and found.std() > 0
    assert torch.equal(blocks_of(kind, packed), blocks)


@over_types
def test_values_are_those_of_the_package_gguf(kind):
    gguf = pytest.importorskip("gguf")
    from gguf.quants import dequantize

    number = gguf.GGMLQuantizationType(kind.number)
    assert gguf.GGML_QUANT_SIZES[number] == (kind.weights, kind.nbytes) and number.name == kind.name
    for size in (1e-4, 1.0, 100.0):
        blocks = random_blocks(kind, 9, 3 * kind.weights, size)
        expected = torch.from_numpy(dequantize(blocks.numpy(), number).copy())
        assert torch.equal(packed_blocks([(kind, blocks)])[0].dequantize(), expected)


@pytest.mark.parametrize(
    ("kind", "most"), (("Q4_0", 4.5), ("Q4_1", 5), ("Q8_0", 8.5), ("Q4_K", 4.75), ("Q5_K", 8.75), ("Q6_K", 8.75))
)
def test_bits_of_a_weight_are_near_the_files(kind, most):
    (packed,) = packed_blocks([(TYPES[kind], random_blocks(TYPES[kind], 4, 4096))])
    assert sum(each.nbytes for each in packed.tensors) * 8 == most * 4 * 4096


@over_types
def test_patch_takes_layers_and_gives_their_bytes_back(kind, device):
    require_native(device)
    ours, stock = with_blocks(build("llama", **SIZES), [kind])
    ours, stock = ours.to(device), stock.to(device)
    before = {name: each.clone() for name, each in ours.state_dict().items()}
    permutation = ours.model.layers[0].mlp.down_proj.input_permutation.clone()
    inputs = dict(input_ids=torch.randint(1, 90, (2, 9), device=device), attention_mask=torch.ones(2, 9, device=device))
    expected = stock.generate(**inputs, **SHORT)
    hf_fastpath.patch(ours, quiet=True)
    with counting(ours) as counts:
        found = ours.generate(**inputs, **SHORT)
    assert torch.equal(found, expected)
    assert counts.fast and not counts.fallback, counts.reasons
    hf_fastpath.unpatch(ours)
    after = ours.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], each) for name, each in before.items())
    assert torch.equal(ours.model.layers[0].mlp.down_proj.input_permutation, permutation)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_a_table_of_embeddings_shares_the_heads_blocks(dtype, device):
    require_native(device)
    model = build("llama", **SIZES, tie_word_embeddings=True).to(dtype)
    ours, stock = (each.to(device) for each in with_blocks(model, [TYPES["Q6_K"], TYPES["Q4_K"]], tied=True))
    before = ours.lm_head.weight.clone()
    hf_fastpath.patch(ours, quiet=True)
    table = ours.model.embed_tokens
    assert type(table) is PackedEmbedding and table.quants.data_ptr() == ours.lm_head.quants.data_ptr()
    ids = torch.arange(90, device=device).view(2, -1)
    assert torch.equal(table(ids), stock.model.embed_tokens(ids)) and table(ids).dtype == dtype
    with counting(ours) as counts:
        found = ours.generate(ids[:, :20], **SHORT)
    assert counts.fast and not counts.fallback, counts.reasons
    if dtype == torch.float32:
        assert torch.equal(found, stock.generate(ids[:, :20], **SHORT))
    hf_fastpath.unpatch(ours)
    assert ours.lm_head.weight is ours.model.embed_tokens.weight and torch.equal(ours.lm_head.weight, before)
    assert type(ours.model.embed_tokens) is GgufEmbedding


def test_a_table_alone_is_packed_and_comes_back(device):
    require_native(device)
    model = build("llama", **SIZES)
    ours, stock = with_blocks(model, [TYPES["Q8_0"]])
    blocks = random_blocks(TYPES["Q5_K"], *model.model.embed_tokens.weight.shape)
    table = GgufEmbedding(*model.model.embed_tokens.weight.shape, TYPES["Q5_K"].number, torch.float32)
    table.weight = nn.Parameter(blocks, requires_grad=False)
    ours.model.embed_tokens = table
    stock.model.embed_tokens.weight = nn.Parameter(values_of(TYPES["Q5_K"], blocks, 256))
    ours, stock = ours.to(device), stock.to(device)
    ids = torch.randint(1, 90, (1, 7), device=device)
    with hf_fastpath.patched(ours, quiet=True):
        assert torch.equal(ours.generate(ids, **SHORT), stock.generate(ids, **SHORT))
    assert ours.model.embed_tokens is table and torch.equal(table.weight.cpu(), blocks)


def test_a_type_that_no_format_holds_is_a_reason():
    require_native(CPU)
    ours, _ = with_blocks(build("llama", **SIZES), [TYPES["Q8_0"]])
    layer = ours.model.layers[0].mlp.up_proj
    layer.ggml_type = 10  # Q2_K
    before = {name: each.clone() for name, each in ours.state_dict().items()}
    hf_fastpath.patch(ours, quiet=True)
    assert "quantized_format" in str(hf_fastpath.report(ours))
    assert all(torch.equal(ours.state_dict()[name], each) for name, each in before.items())


@pytest.mark.skipif(GgufExperts is None, reason="this transformers has no experts in blocks of GGUF files")
@pytest.mark.parametrize("kinds", (("Q4_K", "Q6_K"), ("Q8_0", "Q4_1"), ("Q5_K", "Q4_0")))
def test_patch_takes_experts_and_gives_their_bytes_back(kinds, device):
    require_native(device)
    model = build("qwen3_moe", hidden_size=256, moe_intermediate_size=256)
    ours, stock = (each.to(device) for each in with_expert_blocks(model, tuple(TYPES[name] for name in kinds)))
    before = {name: each.clone() for name, each in ours.state_dict().items()}
    ids = torch.randint(1, 90, (2, 9), device=device)
    expected = stock.generate(ids, **SHORT)
    hf_fastpath.patch(ours, quiet=True)
    with counting(ours) as counts:
        found = ours.generate(ids, **SHORT)
    assert torch.equal(found, expected)
    assert counts.fast and not counts.fallback, counts.reasons
    hf_fastpath.unpatch(ours)
    assert all(torch.equal(ours.state_dict()[name], each) for name, each in before.items())


def test_layers_are_saved_and_a_table_of_embeddings_is_not(tmp_path):
    require_native(CPU)
    kinds = [TYPES[name] for name in ("Q4_K", "Q6_K", "Q4_1", "Q8_0")]
    ours, _ = with_blocks(build("llama", **SIZES), kinds)
    hf_fastpath.patch(ours, quiet=True)
    expected = ours.generate(IDS, **SHORT)
    hf_fastpath.save_packed(ours, tmp_path / "saved")
    assert torch.equal(hf_fastpath.load_packed(tmp_path / "saved", quiet=True).generate(IDS, **SHORT), expected)
    tied, _ = with_blocks(build("llama", **SIZES, tie_word_embeddings=True), kinds, tied=True)
    with pytest.raises(ValueError, match="quantized table of embeddings"):
        hf_fastpath.save_packed(hf_fastpath.patch(tied, quiet=True), tmp_path / "other")


# ---- files ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=FILES)
def file(request, tmp_path_factory):
    pytest.importorskip("gguf")
    kinds, tied = FILES[request.param]
    return write_file(tmp_path_factory.mktemp("gguf") / "model.gguf", kinds, tied)


def test_tokens_are_those_of_the_dequantized_file(file, device):
    """transformers dequantizes the file; ours keeps its blocks. Queries and keys come in llama.cpp's order of rows."""
    require_native(device)
    ours = hf_fastpath.from_gguf(file, device=device, quiet=True)
    stock = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    stock = stock.to(device).eval()
    layer = ours.model.layers[1].self_attn.k_proj
    assert torch.equal(layer.packed.dequantize(), stock.model.layers[1].self_attn.k_proj.weight)
    ids = torch.randint(1, 150, (2, 21), device=device)
    with counting(ours) as counts:
        found = ours.generate(ids, **SHORT)
    assert torch.equal(found, stock.generate(ids, **SHORT))
    assert counts.fast and not counts.fallback, counts.reasons
    assert not any(type(each) in (nn.Linear, nn.Embedding) for each in ours.modules())


@pytest.mark.skipif(GgufExperts is None, reason="this transformers has no experts in blocks of GGUF files")
@pytest.mark.parametrize("gate", ("Q4_K", "Q8_0"))
def test_a_files_experts_stay_packed_unless_gate_and_up_differ(gate, device, tmp_path):
    pytest.importorskip("gguf")
    require_native(device)
    kinds = {"": TYPES["Q4_K"], "down_exps": TYPES["Q6_K"], "gate_exps": TYPES[gate]}
    file = write_file(tmp_path / "model.gguf", kinds, True, experts=6)
    ours = hf_fastpath.from_gguf(file, device=device, quiet=True)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32).to(device).eval()
    assert (type(ours.model.layers[0].mlp.experts) is PackedExperts) == (gate == "Q4_K")
    ids = torch.randint(1, 150, (1, 9), device=device)
    assert torch.equal(ours.generate(ids, **SHORT), stock.generate(ids, **SHORT))


def test_a_file_whose_blocks_transformers_can_keep(device, tmp_path):
    """The model is recorded, with a quantized table of embeddings in it."""
    pytest.importorskip("gguf")
    require_native(device)
    if not gguf_files.keeps_blocks("lfm2"):
        pytest.skip("this transformers keeps no blocks of LFM2")
    file = write_lfm2(tmp_path / "model.gguf", [TYPES[name] for name in ("Q6_K", "Q4_K", "Q8_0", "Q4_1")])
    ours = hf_fastpath.from_gguf(file, device=device, quiet=True)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32).to(device).eval()
    assert type(stock.model.layers[0].conv.in_proj) is nn.Linear, "there is no kernel of the hub"
    ids = torch.randint(1, 90, (2, 9), device=device)
    with counting(ours) as counts:
        found = ours.generate(ids, **SHORT)
    assert torch.equal(found, stock.generate(ids, **SHORT))
    assert counts.fast and not counts.fallback, counts.reasons
    assert not any(type(each) in (nn.Linear, nn.Embedding) for each in ours.modules())


def test_unpatch_gives_the_files_blocks_back(file):
    require_native(CPU)
    ours = hf_fastpath.from_gguf(file, quiet=True)
    import gguf

    tensors = {each.name: each for each in gguf.GGUFReader(str(file)).tensors}
    hf_fastpath.unpatch(ours)
    layer = ours.model.layers[0].mlp.down_proj
    assert gguf_modules.is_gguf(layer, gguf_modules.LINEAR)
    assert torch.equal(layer.weight, torch.from_numpy(tensors["blk.0.ffn_down.weight"].data.copy()))
    assert torch.equal(ours.model.embed_tokens.weight, torch.from_numpy(tensors["token_embd.weight"].data.copy()))


def test_types_without_a_format_are_dequantized_and_said(tmp_path, capsys):
    pytest.importorskip("gguf")
    require_native(CPU)
    q2_k = dataclasses.replace(TYPES["Q4_K"], name="Q2_K", number=10, nbytes=84)
    file = write_file(tmp_path / "model.gguf", {"": TYPES["Q8_0"], "ffn_up": q2_k}, True)
    ours = hf_fastpath.from_gguf(file)
    assert "dequantized, as no format of ours or no linear layer holds them: 2 of Q2_K" in capsys.readouterr().err
    assert type(ours.model.layers[0].mlp.up_proj) is nn.Linear
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32).eval()
    assert torch.equal(ours.generate(IDS, **SHORT), stock.generate(IDS, **SHORT))


def test_an_architecture_that_transformers_does_not_know_is_refused(tmp_path):
    gguf = pytest.importorskip("gguf")
    require_native(CPU)
    writer = gguf.GGUFWriter(str(tmp_path / "model.gguf"), "nonesuch")
    writer.add_tensor("token_embd.weight", torch.zeros(4, 32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="makes no model of .*'nonesuch'.*convert it to safetensors"):
        hf_fastpath.from_gguf(tmp_path / "model.gguf")


LOADING = """
import json, pathlib, sys
import hf_fastpath
small, large = sys.argv[1:]

def kilobytes(name):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))

hf_fastpath.from_gguf(small, quiet=True)  # with all that is imported, and caches of its size
pathlib.Path("/proc/self/clear_refs").write_text("5")
before = kilobytes("VmRSS")
model = hf_fastpath.from_gguf(large, quiet=True)
peak = 1024 * (kilobytes("VmHWM") - before)
tensors = {each.data_ptr(): each.nbytes for each in (*model.parameters(), *model.buffers())}
layer = sum(each.nbytes for each in model.model.layers[0].buffers())
print(json.dumps([peak, sum(tensors.values()), layer]))
"""


@pytest.mark.full
def test_memory_while_a_file_is_loaded_is_the_packed_model_and_a_layer(tmp_path):
    pytest.importorskip("gguf")
    require_native(CPU)
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("no /proc: the peak cannot be seen")
    files = [write_file(tmp_path / f"{hidden}.gguf", MIXED, True, hidden=hidden) for hidden in (256, 2048)]
    done = subprocess.run([sys.executable, "-c", LOADING, *map(str, files)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    peak, model, layer = json.loads(done.stdout)
    assert 200e6 < model <= peak <= model + layer


def test_files_that_are_none_are_refused(tmp_path):
    pytest.importorskip("gguf")
    require_native(CPU)
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match="expected b'GGUF'"):
        hf_fastpath.from_gguf(wrong)
    with pytest.raises(OSError):
        hf_fastpath.from_gguf(tmp_path / "none.gguf")
    whole = write_file(tmp_path / "whole.gguf", {"": TYPES["Q8_0"]}, True)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole.read_bytes()[:3000])
    with pytest.raises(ValueError, match="cut off"):
        hf_fastpath.from_gguf(cut)
    with pytest.raises(ValueError, match=r"dtype=torch\.int8"):
        hf_fastpath.from_gguf(whole, dtype=torch.int8)
