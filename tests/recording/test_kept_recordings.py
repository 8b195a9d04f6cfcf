"""Recordings that files in the cache folder hold: who finds them, who does not, and that nothing in a file is run."""

from __future__ import annotations

import copy
import decimal
import functools
import json
import logging
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import sympy
import torch
from causal_lm_types import small_model
from models import CPU, require_native
from own_decoders import edit, own_model
from own_helpers import Reading
from transformers import AutoModelForCausalLM

import hf_fastpath
from hf_fastpath import compat
from hf_fastpath.native import build_cache
from hf_fastpath.patching import selftest
from hf_fastpath.patching.state import state_of
from hf_fastpath.recording import formulas_as_data, kept_recordings, prompts, proof, recorded_model
from hf_fastpath.recording.errors import NotData
from hf_fastpath.recording.recording_as_data import to_data
from hf_fastpath.recording.recording_from_data import from_data

#: type -> what there is of it in a recording
TYPES = {
    "glm4": "rotations, joined products",
    "apertus": "another activation",
    "bloom": "a tensor of the recording's own",
    "deepseek_v3": "latents, experts, views of weights",
    "gemma3n_text": "values that are made of the model alone",
    "lfm2": "states, and formulas of prompts",
    "qwen3_5_text": "a prompt as rows",
    "zamba2": "matrices without data",
}
GREEDY = dict(max_new_tokens=5, do_sample=False)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty cache folder; every prompt but the first is recorded."""
    require_native(CPU)
    monkeypatch.setenv("HF_FASTPATH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(prompts, "FIRST_RECORDED", 2)
    monkeypatch.setattr(selftest, "run", lambda model, recorded=None: (None, 0.0))  # a twin is recorded in any case
    return tmp_path / "cache" / build_cache.RECORDINGS


@pytest.fixture
def made(monkeypatch):
    """Return the names of what is recorded, in order."""
    names: list[str] = []
    for module, name in (
        (recorded_model, "whole_step"),
        (prompts, "whole_prompt"),
        (prompts, "whole_rows"),
    ):
        make = getattr(module, name)

        @functools.wraps(make)
        def counted(*given, name=name, make=make):
            names.append(name)
            return make(*given)

        monkeypatch.setattr(module, name, counted)
    return names


def twice(model_type: str):
    """Return two models with the same weights."""
    one = small_model(model_type)
    other = AutoModelForCausalLM.from_config(one.config).eval()
    other.load_state_dict(one.state_dict())
    return one, other


class OfFile(torch.nn.Module):
    """Multiplies by a number that a file holds."""

    def __init__(self, inside, path):
        super().__init__()
        self.inside, self.path = inside, path

    def forward(self, x):
        return self.inside(x) * float(self.path.read_text())


def texts(model) -> list[torch.Tensor]:
    vocab = model.config.get_text_config().vocab_size
    return [model.generate(torch.arange(3, 3 + count)[None] % vocab, **GREEDY) for count in (11, 29, 40)]


def patched_texts(model) -> list[torch.Tensor]:
    hf_fastpath.patch(model)
    return texts(model)


def same(one, other) -> bool:
    return all(map(torch.equal, one, other))


@pytest.mark.every(3)
@pytest.mark.parametrize("model_type", TYPES)
def test_a_second_model_is_not_recorded(model_type, folder, made):
    """It decodes as stock does, and what its recording is as data is what the first one's was."""
    one, other = twice(model_type)
    stock = texts(one)
    assert same(patched_texts(one), stock) and made
    count = len(list(folder.glob("*")))
    assert count == len(made)
    made.clear()
    assert same(patched_texts(other), stock) and not made and len(list(folder.glob("*"))) == count
    parts = [state_of(each).plans.part_of(each) for each in (one, other)]
    datas = [json.dumps(to_data(part.recording(1, 1), part.module)) for part in parts]
    assert datas[0] == datas[1]


@pytest.mark.parametrize(("model_type", "at_once"), [("glm4", True), ("deepseek_v3", True), ("lfm2", False)])
def test_a_step_of_a_file_is_proven_by_one_forward(model_type, at_once, monkeypatch):
    """Which tells of each token; states cannot give tokens back, so that each takes a forward."""
    asked: list[int] = []
    forward_over = compat.forward_over
    monkeypatch.setattr(compat, "forward_over", lambda *given: asked.append(given[1].shape[1]) or forward_over(*given))
    one, other = twice(model_type)
    patched_texts(one)
    token_by_token, asked[:] = list(asked), []
    expected = texts(copy.deepcopy(other))
    assert same(patched_texts(other), expected)
    prompt, *steps = token_by_token[:4]
    assert steps == [1, 1, 1] and asked[0] == (prompt + 3 if at_once else prompt)
    assert len(asked) == len(token_by_token) - (3 if at_once else 0)


def test_a_step_of_a_file_that_differs_is_compared_token_by_token(monkeypatch):
    one, other = twice("glm4")
    patched_texts(one)
    monkeypatch.setattr(proof, "_difference_at_once", lambda *_: float("nan"))
    compared: list[float] = []
    difference = proof.difference
    monkeypatch.setattr(proof, "difference", lambda *given: compared.append(difference(*given)) or compared[-1])
    assert same(patched_texts(other), texts(twice("glm4")[0])) and len(compared) == 1


def test_another_process_finds_them(folder, tmp_path):
    """Also one that orders sets otherwise, and that has imported other modules before."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        "if sys.argv[2] == 'finds': import transformers.models.bamba.modeling_bamba\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "import hf_fastpath.patching.api, logging\n"
        "logging.getLogger('hf_fastpath').setLevel(10)\n"
        "from hf_fastpath.patching import selftest\n"
        "from hf_fastpath.recording import recorded_model\n"
        "from causal_lm_types import small_config\n"
        "from transformers import AutoModelForCausalLM\n"
        "def whole_step(*given): sys.exit('recorded')\n"
        "selftest.run = lambda *given: (None, 0.0)\n"
        "if sys.argv[2] == 'finds': recorded_model.whole_step = whole_step\n"
        "model = AutoModelForCausalLM.from_config(small_config('glm4')).eval()\n"
        "hf_fastpath.patch(model)\n"
    )
    for seed, what in (("3", "makes"), ("7", "finds")):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        command = [sys.executable, str(program), str(Path(__file__).parent.parent), what]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert len(list(folder.glob("*"))) == 1


def scaled_attention(model):
    model.model.layers[1].self_attn.scaling *= 2


def other_eps(model):
    model.model.layers[0].input_layernorm.variance_epsilon = 0.5


def other_module(model):
    model.model.layers[0].mlp.down_proj = torch.nn.Sequential(model.model.layers[0].mlp.down_proj, torch.nn.Identity())


def tied(model):
    model.model.layers[1].mlp.down_proj.weight = model.model.layers[0].mlp.down_proj.weight


def another_type(model):
    model.to(torch.bfloat16)


EDITS = (scaled_attention, other_eps, other_module, tied, another_type)


@pytest.mark.every(2)
@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_a_model_that_was_edited_is_another_one(edit, made):
    one, other = twice("glm4")
    patched_texts(one)
    made.clear()
    edit(other)
    stock = texts(other)
    hf_fastpath.patch(other)
    ours = texts(other)
    assert made and (edit is another_type or same(ours, stock))


def test_a_global_that_the_code_reads_is_another_one(made, monkeypatch):
    """Of a module whose code is as it was; ``rotate_half`` is one of glm4's."""
    from transformers.models.glm4 import modeling_glm4

    one, other = twice("glm4")
    patched_texts(one)
    made.clear()
    monkeypatch.setattr(modeling_glm4, "rotate_half", torch.neg)
    stock = texts(other)
    assert same(patched_texts(other), stock) and "whole_step" in made


#: where a value may be that no attribute holds
PLACES = (
    *("SubclassOfNumber", "MemberOfEnum", "ImportedInside", "FoundByName", "OfEnvironment"),
    *("OfPythonsModule", "OfContext", "OfThread", "BehindReferences"),
)


@pytest.mark.every(3)
@pytest.mark.parametrize("place", PLACES)
def test_a_value_that_no_attribute_holds_is_another_one(place, made):
    """A model whose factor is what it was is not recorded; another factor is."""
    one, same_one, other = (own_model(place) for _ in range(3))
    edit(one, 1.0)
    patched_texts(one)
    assert made
    made.clear()
    patched_texts(same_one)
    assert not made
    edit(other, 1.5)
    try:
        stock = texts(other)
        assert same(patched_texts(other), stock) and "whole_step" in made
    finally:
        edit(other, 1.0)


def test_code_that_may_read_files_is_not_kept(folder, made, tmp_path):
    model = small_model("glm4")
    (tmp_path / "number").write_text("2.0")
    model.model.layers[0].mlp = OfFile(model.model.layers[0].mlp, tmp_path / "number")
    stock = texts(model)
    assert same(patched_texts(model), stock) and made and not folder.exists()


def test_values_of_names_are_compared(folder, made):
    """A file that says that other values were found is not used."""
    one, other = twice("glm4")
    patched_texts(one)
    for path in folder.glob("*"):
        data = json.loads(path.read_text())
        path.write_text(json.dumps(data | {"values": "0" * 64}))
    made.clear()
    stock = texts(other)
    assert same(patched_texts(other), stock) and "whole_step" in made


def cut(path):
    path.write_text(path.read_text()[:100])


def link(path):
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


def of_others(path):
    path.chmod(0o666)


def nothing(path):
    path.write_text("{}")


def other_ops(path):
    path.write_text(path.read_text().replace('"aten.', '"os.'))


def other_marks(path):
    path.write_text(path.read_text().replace('"mark projected_attention"', '"mark torch"'))


def other_registers(path):
    path.write_text(path.read_text().replace('{"register": 3}', '{"register": 30000}'))


def other_tensors(path):
    path.write_text(path.read_text().replace("down_proj.weight", "up_proj.bias"))


def other_numbers(path):
    """What a forward with another factor on scores gives: nothing but the proof sees that."""
    text = path.read_text()
    assert "0.25" in text
    path.write_text(text.replace("0.25", "0.5"))


SPOILED = (cut, link, of_others, nothing, other_ops, other_marks, other_registers, other_tensors, other_numbers)


@pytest.mark.every(2)
@pytest.mark.parametrize("spoil", SPOILED, ids=lambda spoil: spoil.__name__)
def test_a_spoiled_file_is_none(spoil, folder, made):
    one, other = twice("glm4")
    patched_texts(one)
    for path in list(folder.glob("*")):
        spoil(path)
    made.clear()
    stock = texts(other)
    assert same(patched_texts(other), stock) and "whole_step" in made
    assert hf_fastpath.report(other).stats["fast_tokens"] and not hf_fastpath.report(other).stats["reasons"]
    made.clear()
    assert same(patched_texts(small_model("glm4")), stock) and not made, "the file that was made anew serves"


#: values of which an attribute or a type alone says too little
UNTOLD = (decimal.Context(), logging.Formatter("%(name)s"), type("Own", (decimal.Decimal,), {})(2), ValueError(2))


@pytest.mark.every(2)
@pytest.mark.parametrize("value", UNTOLD, ids=lambda value: type(value).__mro__[-2].__name__)
def test_what_no_other_process_could_tell_is_not_kept(value, folder, made, caplog):
    """A model that holds such a value decodes all the same; a line for developers says why."""
    model = small_model("glm4")
    model.model.layers[0].mlp.mine = value
    stock = texts(model)
    with caplog.at_level(logging.DEBUG, "hf_fastpath"):
        assert same(patched_texts(model), stock) and made
    assert not folder.exists() and f"a value of {type(value).__module__}.{type(value).__qualname__}" in caplog.text


def test_a_tensor_of_the_models_that_is_no_buffer_is_read_where_it_is(folder, made):
    """Its numbers may be edited in place, so that a file with its numbers would be one of another model."""
    model = own_model("PlainTensor")
    hf_fastpath.patch(model)
    assert made and not list(folder.glob("*"))


def test_a_folder_that_cannot_be_written_is_no_error(folder, made):
    folder.parent.mkdir()
    folder.write_text("")
    one, _ = twice("glm4")
    stock = texts(one)
    assert same(patched_texts(one), stock) and made


def test_passes_that_are_dumped_run(made, monkeypatch, tmp_path):
    one, other = twice("glm4")
    patched_texts(one)
    made.clear()
    monkeypatch.setenv("HF_FASTPATH_DUMP", str(tmp_path / "dump"))
    patched_texts(other)
    assert "whole_step" in made and list((tmp_path / "dump").rglob("*.txt"))


def test_an_attribute_that_only_the_recorded_code_reads_still_counts(made):
    """Of a recording from a file, too: the names that its code reads came with it."""
    one, other = twice("glm4")
    patched_texts(one)
    made.clear()
    patched_texts(other)
    assert not made
    other_eps(other)
    ours = texts(other)
    hf_fastpath.unpatch(other)
    assert same(ours, texts(other)) and "whole_step" in made


def test_a_name_that_is_replaced_behind_the_file_is_noticed(made, monkeypatch):
    from transformers.models.glm4 import modeling_glm4

    one, other = twice("glm4")
    patched_texts(one)
    made.clear()
    patched_texts(other)
    assert not made
    monkeypatch.setattr(modeling_glm4, "rotate_half", torch.neg)
    ours = texts(other)
    hf_fastpath.unpatch(other)
    assert same(ours, texts(other)) and "whole_step" in made


def test_a_model_that_could_not_be_recorded_is_not_tried_again(made):
    """The reason is the same; another value of the model's is another model."""

    def tried(reads):
        model = small_model("glm4")
        model.model.layers[0].mlp = Reading(model.model.layers[0].mlp, reads)
        with pytest.raises(hf_fastpath.UnsupportedModelError) if reads else nullcontext() as refused:
            hf_fastpath.patch(model)
        return None if refused is None else str(refused.value)

    first = tried(True)
    assert "float(x.sum())" in first and made == ["whole_step"]
    assert tried(True) == first and made == ["whole_step"]
    assert tried(False) is None and made == 2 * ["whole_step"]


# ---- formulas -------------------------------------------------------------------------------------------------------

NEW = formulas_as_data.symbol("new")
FORMULAS = (
    NEW * 3 + 1,
    sympy.Le(NEW, 4096),
    sympy.And(sympy.Gt(NEW, 2), sympy.Ne(NEW % 64, 0)),
    sympy.floor(NEW / 64),
    sympy.Max(NEW, 7) ** sympy.Rational(1, 2),
    sympy.Float(0.1) * NEW,
    sympy.true,
)


@pytest.mark.parametrize("formula", FORMULAS, ids=str)
def test_formulas_are_read_as_they_were(formula):
    data = json.loads(json.dumps(formulas_as_data.to_data(formula, {NEW: "new"})))
    assert formulas_as_data.from_data(data, {"new": NEW}) == formula


def test_formulas_of_others_are_refused():
    with pytest.raises(NotData):
        formulas_as_data.to_data(sympy.sin(NEW), {NEW: "new"})
    for data in (["sin", "new"], ["__import__", "new"], "other", {}, [], [3]):
        with pytest.raises(NotData):
            formulas_as_data.from_data(data, {"new": NEW})


def test_calls_of_others_are_refused():
    model = small_model("glm4")
    hf_fastpath.patch(model)
    data = to_data(state_of(model).plans.part_of(model).recording(1, 1), model)
    data["calls"][0]["call"][0] = "aten.no_such.default"
    with pytest.raises(NotData, match="no_such"):
        from_data(data, model)
    assert kept_recordings._MOST_BYTES > 1 << 20


# ---- plans that are saved -------------------------------------------------------------------------------------------


@pytest.fixture
def plan(tmp_path, folder, made):
    """Return a directory with the plan of a model, and another model with the same weights; the cache is empty."""
    one, other = twice("glm4")
    patched_texts(one)
    hf_fastpath.save_plan(one, tmp_path / "plan")
    shutil.rmtree(folder)
    made.clear()
    return tmp_path / "plan", other


def test_a_saved_plan_is_taken_and_no_twin_is_tried(plan, made, monkeypatch):
    directory, model = plan
    monkeypatch.setattr(selftest, "run", lambda *given: pytest.fail("tried a twin"))
    stock = texts(model)
    hf_fastpath.patch(model, plan=directory)
    assert same(texts(model), stock) and not made


def test_a_plan_of_another_model_says_what_differs(plan, made, caplog):
    directory, model = plan
    other_eps(model)
    stock = texts(model)
    with caplog.at_level(logging.WARNING, "hf_fastpath"):
        hf_fastpath.patch(model, plan=directory)
    assert same(texts(model), stock) and "whole_step" in made
    assert "recorded anew; other than in the plan are: values that the model holds" in caplog.text


def test_a_plan_of_other_code_says_which(plan, made, monkeypatch, caplog):
    from transformers.models.glm4 import modeling_glm4

    directory, model = plan
    monkeypatch.setattr(modeling_glm4, "rotate_half", lambda x: -x)
    with caplog.at_level(logging.WARNING, "hf_fastpath"):
        hf_fastpath.patch(model, plan=directory)
    assert made and "other than in the plan are: transformers.models.glm4.modeling_glm4" in caplog.text


def test_plans_that_are_none_are_refused(tmp_path):
    model = small_model("glm4")
    with pytest.raises(ValueError, match=r"hf_fastpath_plan.json is not there; save_plan\(\) writes it"):
        hf_fastpath.patch(model, plan=tmp_path)
    (tmp_path / "hf_fastpath_plan.json").write_text('{"version": 7}')
    with pytest.raises(ValueError, match="cannot be read: of version 7, expected 1"):
        hf_fastpath.patch(model, plan=tmp_path)
    with pytest.raises(ValueError, match=r"not patched: patch\(model\) first"):
        hf_fastpath.save_plan(model, tmp_path)


def test_a_listed_family_has_an_empty_plan(tmp_path):
    model = small_model("llama")
    stock = texts(model)
    hf_fastpath.patch(model)
    hf_fastpath.save_plan(model, tmp_path / "plan")
    hf_fastpath.unpatch(model)
    hf_fastpath.patch(model, plan=str(tmp_path / "plan"))
    assert same(texts(model), stock)


def test_a_model_that_no_other_process_could_compare_has_no_plan(tmp_path):
    model = small_model("glm4")
    model.model.layers[0].mlp.mine = decimal.Context()
    hf_fastpath.patch(model)
    with pytest.raises(ValueError, match="cannot write the steps of Glm4ForCausalLM: a value of decimal.Context"):
        hf_fastpath.save_plan(model, tmp_path)
