"""save_packed() and load_packed(): the same logits bit for bit, little memory, and nothing touched by bad files."""

from __future__ import annotations

import copy
import json
import shutil
import textwrap
from pathlib import Path

import fresh_process
import pytest
import torch
from models import SHORT, assert_same_instances, build, instances, prompt, require_native
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM

import hf_fastpath
from hf_fastpath.linears.packed_linear import PackedLinear
from hf_fastpath.native import huge_pages
from hf_fastpath.packed_files.file_index import INDEX, KEY, sealed, unsealed
from hf_fastpath.packed_files.files import PackedFiles
from hf_fastpath.packed_formats import FORMATS

CPU = torch.device("cpu")
#: the families have Conv1D and tied embeddings, separate projections, a mixture, scaled embeddings, head norms, biases
FAMILIES = ("gpt2", "llama", "mixtral", "gemma3_text", "opt")


@pytest.fixture(autouse=True)
def native():
    require_native(CPU)


def saved(directory: Path, family: str = "llama", weights: str = "int4", size="5GB", **options) -> nn.Module:
    """Make a patched model whose weights lie in ``directory``."""
    model = hf_fastpath.patch(build(family), weights=weights, quiet=True, **options)
    hf_fastpath.save_packed(model, directory, max_shard_size=size)
    return model


def on_meta(directory: Path) -> nn.Module:
    config = build("llama").config.__class__.from_pretrained(directory)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config).eval()


def outcome(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """Return tokens, logits, and the calls of the plan."""
    ids = prompt(CPU)
    tokens = model.generate(ids, **SHORT)
    (plan,) = vars(model)["_hf_fastpath"].plans
    with torch.no_grad():
        return tokens, model(tokens).logits, plan.program.op_names()


def assert_same(model: nn.Module, other: nn.Module) -> None:
    found, expected = outcome(model), outcome(other)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    assert found[2] == expected[2], "other projections are joined"
    assert hf_fastpath.report(model).stats["fallback_tokens"] == 0


@pytest.mark.each_value
@pytest.mark.parametrize("size", ("5GB", "70KB"))
@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_is_bit_equal(family, size, tmp_path):
    stock = build(family)
    model = saved(tmp_path, family, size=size, lm_head="int8" if size == "5GB" else "fp16")
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) == 1 if size == "5GB" else len(files) > 2
    from_directory = hf_fastpath.load_packed(tmp_path, quiet=True)
    assert type(from_directory) is type(model) and not from_directory.training
    assert_same(from_directory, model)
    filled = build(family, seed=3)
    assert hf_fastpath.load_packed(filled, tmp_path, quiet=True) is filled
    assert_same(filled, model)
    for loaded in (from_directory, filled):
        ties = loaded.get_output_embeddings(), loaded.get_input_embeddings()
        if type(ties[0]) is not PackedLinear:
            was_tied = stock.get_output_embeddings().weight is stock.get_input_embeddings().weight
            assert (ties[0].weight is ties[1].weight) == was_tied


@pytest.mark.each_value
@pytest.mark.parametrize("weights", FORMATS)
def test_every_format_in_half_precision(weights, tmp_path):
    model = hf_fastpath.patch(build("llama").bfloat16(), weights=weights, quiet=True)
    hf_fastpath.save_packed(model, tmp_path)
    loaded = on_meta(tmp_path)
    assert_same(hf_fastpath.load_packed(loaded, tmp_path, quiet=True), model)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    float32 = hf_fastpath.load_packed(build("llama", seed=1), tmp_path, quiet=True)
    assert_same(float32, model)


def test_no_original_is_saved_or_kept(tmp_path):
    model = saved(tmp_path, lm_head="int8")
    packed = {name for name, module in model.named_modules() if type(module) is PackedLinear}
    (path,) = tmp_path.glob("*.safetensors")
    with safe_open(path, framework="pt") as file:  # others can read the file, too
        assert not {f"{name}.weight" for name in packed} & set(file.keys())
        for name in file.keys():
            assert torch.equal(file.get_tensor(name), PackedFiles(tmp_path).read(name)), name
    given = build("llama", seed=1)
    weights = [linear.weight for linear in given.modules() if type(linear) is nn.Linear]
    hf_fastpath.load_packed(given, tmp_path, quiet=True)
    assert len(weights) == len(packed) and not any(weight.numel() for weight in weights)
    for loaded in (given, hf_fastpath.load_packed(tmp_path, quiet=True)):
        with pytest.raises(ValueError, match="load_packed.*alone"):
            hf_fastpath.unpatch(loaded)
        with pytest.raises(ValueError, match="save_packed"):
            loaded.save_pretrained(tmp_path / "other")


def test_transformers_does_not_take_it_for_a_checkpoint(tmp_path):
    saved(tmp_path)
    with pytest.raises(OSError, match="model.safetensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_generation_config_and_copies(tmp_path):
    model = build("llama")
    model.generation_config.repetition_penalty = 1.25
    hf_fastpath.save_packed(hf_fastpath.patch(model, weights="int8", quiet=True), tmp_path)
    loaded = hf_fastpath.load_packed(tmp_path, quiet=True)
    assert loaded.generation_config.repetition_penalty == 1.25
    twin = copy.deepcopy(loaded)
    assert_same(twin, loaded)
    with pytest.raises(ValueError, match="load_packed"):
        hf_fastpath.unpatch(twin)
    (before,) = tmp_path.glob("*.safetensors")
    hf_fastpath.save_packed(twin, tmp_path, max_shard_size=100_000)  # replaces the files that the model came from
    assert not before.exists() and len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same(hf_fastpath.load_packed(tmp_path, quiet=True), loaded)


def test_options_are_those_of_patch(tmp_path):
    saved(tmp_path)
    model = hf_fastpath.load_packed(tmp_path, kv_dtype=torch.float16, max_batch_size=2, quiet=True)
    options = vars(model)["_hf_fastpath"].options
    assert (options.kv_dtype, options.max_batch_size, options.weights) == (torch.float16, 2, "int4")
    with pytest.raises(ValueError, match="ops names 'nrom'"):
        hf_fastpath.load_packed(tmp_path, ops="nrom")


def test_tensors_go_where_they_are_asked_to(device, tmp_path):
    model = saved(tmp_path)
    loaded = hf_fastpath.load_packed(tmp_path, device=device, quiet=True)
    held = dict(loaded.named_buffers()) | dict(loaded.named_parameters())
    assert {tensor.device.type for tensor in held.values()} == {device.type}
    expected = dict(model.named_buffers()) | dict(model.named_parameters())
    assert held.keys() == expected.keys()
    assert all(torch.equal(tensor.cpu(), expected[name]) for name, tensor in held.items())


# ---- files that cannot be loaded ---------------------------------------------------------------------------


def reseal(directory: Path, change) -> None:
    """Change the index, and give it the checksum of its new contents."""
    content = unsealed((directory / INDEX).read_bytes())
    change(content)
    (directory / INDEX).write_text(sealed(content))


def one(directory: Path) -> Path:
    return sorted(directory.glob("packed-*-00002-of-*.safetensors"))[0]


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


def no_files(directory):
    for path in directory.glob("packed*"):
        path.unlink()


def missing_shard(directory):
    one(directory).unlink()


def cut_off(directory):
    path = one(directory)
    path.write_bytes(path.read_bytes()[:-100])


def emptied(directory):
    one(directory).write_bytes(b"")


def flipped_bit(directory):
    flip(one(directory), -40)


def flipped_bit_in_header(directory):
    flip(one(directory), 30)


def flipped_bit_in_config(directory):
    flip(next(directory.glob("packed-*-config.json")), 30)


def foreign_file(directory):
    save_file({"x": torch.ones(2)}, one(directory))


def folder_in_its_place(directory):
    one(directory).unlink()
    one_name = json.loads((directory / INDEX).read_text())["weight_map"]
    (directory / sorted(set(one_name.values()))[1]).mkdir()


def other_version(directory):
    reseal(directory, lambda content: content[KEY].update(version=99))


def other_layout(directory):
    reseal(directory, lambda content: content[KEY].update(layout="rows"))


def no_tensors(directory):
    reseal(directory, lambda content: content[KEY].pop("tensors"))


def of_layer(directory, **values):
    reseal(directory, lambda content: next(iter(content[KEY]["model"]["weights"].values())).update(values))


def unknown_format(directory):
    of_layer(directory, format="int3")


def other_format(directory):
    def change(content):
        for weight in content[KEY]["model"]["weights"].values():
            weight["format"] = "int8"

    reseal(directory, change)


def multiplier_of_no_power(directory):
    of_layer(directory, multiplier=0.75)


def infinite_multiplier(directory):
    of_layer(directory, multiplier=float("inf"))


def no_whole_number(directory):
    of_layer(directory, in_features=True)


def joined_of_two_sizes(directory):
    def change(content):
        joined = content[KEY]["model"]["joined"]
        content[KEY]["model"]["joined"] = [sum(joined, [])]

    reseal(directory, change)


def extra_named_tensor(directory):
    def change(content):
        beside = content[KEY]["tensors"]["lm_head.weight"]
        content[KEY]["tensors"]["extra"] = ["uint8", [0], beside[2]]
        content["weight_map"]["extra"] = content["weight_map"]["lm_head.weight"]

    reseal(directory, change)


def tensor_beyond_its_file(directory):
    reseal(directory, lambda content: content[KEY]["tensors"]["lm_head.weight"].__setitem__(2, 1 << 30))


def overlapping_tensors(directory):
    def change(content):
        of_one = [name for name, file in content["weight_map"].items() if file == one(directory).name]
        tensors = content[KEY]["tensors"]
        first, second = sorted(of_one, key=lambda name: tensors[name][2])[:2]
        tensors[second][2] = tensors[first][2]

    reseal(directory, change)


def index_of_another(directory):
    def change(content):
        content["weight_map"]["renamed"] = content["weight_map"].pop("lm_head.weight")

    reseal(directory, change)


def edited_index(directory):
    content = json.loads((directory / INDEX).read_text())
    next(iter(content[KEY]["model"]["weights"].values()))["multiplier"] *= 2
    (directory / INDEX).write_text(json.dumps(content))


def garbled_index(directory):
    (directory / INDEX).write_text("{")


def deep_index(directory):
    (directory / INDEX).write_text("[" * 100_000)


def foreign_index(directory):
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {}}))


def two_saves(directory):
    other = directory / "other"
    hf_fastpath.save_packed(hf_fastpath.patch(build("llama", seed=2), weights="int4", quiet=True), other, "70KB")
    shutil.copy(one(other), one(directory))


DAMAGES = {
    no_files: "holds no packed.safetensors.index.json",
    missing_shard: "lacks packed-[0-9a-f]*-00002-of",
    cut_off: "cut off or damaged",
    emptied: "has 0 bytes",
    flipped_bit: "00002-of.* is damaged.*checksum",
    flipped_bit_in_header: "00002-of.* is damaged.*checksum",
    flipped_bit_in_config: "-config.json is damaged.*checksum",
    foreign_file: "bytes instead of",
    folder_in_its_place: "is no file",
    other_version: "version 99.*expected 2",
    other_layout: "layout 'rows'",
    no_tensors: "no 'tensors'",
    unknown_format: "format is 'int3', expected one of int8, fp8",
    other_format: "expected uint8 .* of int8",
    multiplier_of_no_power: "multiplier is 0.75, expected a power of two",
    infinite_multiplier: "multiplier is inf, expected a power of two",
    no_whole_number: "in_features is True, expected a whole number",
    joined_of_two_sizes: "layers of one format and one size",
    extra_named_tensor: "extra is in the files, but not in the model",
    tensor_beyond_its_file: "offset is 1073741824, expected that of .* bytes in a file of",
    overlapping_tensors: "offset is [0-9]+, expected [0-9]+ in packed-",
    index_of_another: r"weight_map\['lm_head.weight'\] is None",
    edited_index: "checksum does not fit",
    garbled_index: "is not what save_packed",
    deep_index: "nested too deeply",
    foreign_index: "is no index of save_packed",
    two_saves: "00002-of.* is damaged.*checksum",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_bad_files_leave_the_model_alone(damage, tmp_path):
    saved(tmp_path, size="70KB")
    model = build("llama", seed=1)
    before, values = instances(model), copy.deepcopy(model.state_dict())
    damage(tmp_path)
    with pytest.raises(ValueError, match=DAMAGES[damage]):
        hf_fastpath.load_packed(model, tmp_path, quiet=True)
    assert_same_instances(instances(model), before)
    assert all(torch.equal(tensor, values[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("other", "message"),
    (
        (lambda: build("mistral"), r"of a LlamaForCausalLM \(llama\), this model is a MistralForCausalLM"),
        (lambda: build("llama", intermediate_size=208), "saved as 112 -> 204, in the model it is 112 -> 208"),
        (lambda: build("llama", vocab_size=310), r"shape \[307, 112\], in the model it has \[310, 112\]"),
        (lambda: build("llama", num_hidden_layers=3), "layers.2.* is in the model, but not in the files"),
        (lambda: build("llama", num_hidden_layers=1), "in the model it is no linear layer"),
        (lambda: build("llama", attention_bias=True), "bias is in the model, but not in the files"),
        (lambda: build("llama", tie_word_embeddings=True), "tied to .* in the model, but not in the files"),
        (lambda: hf_fastpath.patch(build("llama"), quiet=True), "got a patched model"),
    ),
    ids=("class", "sizes", "vocabulary", "more_layers", "fewer_layers", "biases", "tied", "patched"),
)
def test_another_model_is_refused(other, message, tmp_path):
    saved(tmp_path)
    model = other()
    before = instances(model)
    with pytest.raises(ValueError, match=message):
        hf_fastpath.load_packed(model, tmp_path, quiet=True)
    assert_same_instances(instances(model), before)


def test_tied_files_need_a_tied_model(tmp_path):
    saved(tmp_path, "gpt2")
    untied = build("gpt2", tie_word_embeddings=False)
    with pytest.raises(ValueError, match="lm_head.weight is tied to transformer.wte.weight in the files"):
        hf_fastpath.load_packed(untied, tmp_path, quiet=True)


@pytest.mark.parametrize("meta", (False, True))
def test_a_late_fault_leaves_the_model_as_it_was(meta, tmp_path, monkeypatch):
    saved(tmp_path)

    def stop(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(huge_pages, "Move", stop)
    model = on_meta(tmp_path) if meta else build("llama", seed=1)
    before = {name: (dict(m._parameters), dict(m._modules), dict(m._buffers)) for name, m in model.named_modules()}
    with pytest.raises(KeyboardInterrupt):
        hf_fastpath.load_packed(model, tmp_path, quiet=True)
    after = {name: (dict(m._parameters), dict(m._modules), dict(m._buffers)) for name, m in model.named_modules()}
    assert after.keys() == before.keys() and "_hf_fastpath" not in vars(model)
    for name, kinds in after.items():
        for now, then in zip(kinds, before[name]):
            assert now.keys() == then.keys() and all(now[key] is then[key] for key in now), name
    monkeypatch.undo()
    assert hf_fastpath.load_packed(model, tmp_path, quiet=True).generate(prompt(CPU), **SHORT).shape[1] > 11


def test_arguments_are_checked(tmp_path):
    with pytest.raises(ValueError, match=r"without packed weights: patch\(model, weights="):
        hf_fastpath.save_packed(build("llama"), tmp_path)
    model = hf_fastpath.patch(build("llama"), weights="int8", quiet=True)
    for size in ("five", "-1", 0, "1PB"):
        with pytest.raises(ValueError, match="max_shard_size"):
            hf_fastpath.save_packed(model, tmp_path, max_shard_size=size)
    assert not list(tmp_path.iterdir())
    with pytest.raises(TypeError, match="no directory"):
        hf_fastpath.load_packed(build("llama"))
    with pytest.raises(ValueError, match="nowhere holds no"):
        hf_fastpath.load_packed(tmp_path / "nowhere")


def test_memory_never_holds_the_unquantized_weights(tmp_path):
    """The peak of a separate process, above what it has before loading, is compared with the bytes of the files."""
    script = """
        import pathlib, sys, torch, hf_fastpath
        from transformers import LlamaConfig, LlamaForCausalLM

        def kilobytes(key):
            lines = pathlib.Path("/proc/self/status").read_text().splitlines()
            return int(next(line for line in lines if line.startswith(key)).split()[1])

        def added(work):
            pathlib.Path("/proc/self/clear_refs").write_text("5")
            before = kilobytes("VmRSS")
            work()
            return 1024 * (kilobytes("VmHWM") - before)

        sizes = dict(hidden_size=1024, num_attention_heads=16, intermediate_size=4096, num_hidden_layers=4)
        small = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes | dict(num_hidden_layers=1))).eval()
        hf_fastpath.patch(small, weights="int4", quiet=True)
        small.generate(torch.ones(1, 3, dtype=torch.int64), max_new_tokens=2)  # what loads once
        hf_fastpath.save_packed(small, sys.argv[1] + "/small")
        hf_fastpath.load_packed(sys.argv[1] + "/small", quiet=True)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).eval()
        total = sum(parameter.nbytes for parameter in model.parameters())
        hf_fastpath.patch(model, weights="int4", keep_original=False, quiet=True)
        print(total, added(lambda: hf_fastpath.save_packed(model, sys.argv[1])))
        del model
        kept = []
        print(added(lambda: kept.append(hf_fastpath.load_packed(sys.argv[1], quiet=True))))
    """
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("no /proc: the peak cannot be seen")
    done = fresh_process.run(textwrap.dedent(script), str(tmp_path))
    assert done.returncode == 0, done.stderr
    full, saving, loading = map(int, done.stdout.split())
    packed = sum(path.stat().st_size for path in tmp_path.glob("packed*"))
    assert packed < full / 7
    assert saving < packed  # nothing is copied; the file's pages may count
    assert loading < 2.2 * packed < full / 3  # the tensors, and the file's pages while they are read
