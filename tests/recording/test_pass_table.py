"""The tables of passes: order, names, and what happens when a pass is switched off or runs once more."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from causal_lm_types import small_model
from models import CPU, counting, require_native

import hf_fastpath
from hf_fastpath import logs
from hf_fastpath.compat import CACHE
from hf_fastpath.decode.calls import pass_dump, pass_table
from hf_fastpath.decode.calls.call_text import texts
from hf_fastpath.decode.calls.named_calls import Call, Register
from hf_fastpath.decode.calls.pass_dump import DUMP
from hf_fastpath.decode.calls.pass_table import Pass, PassTable, declare, switched_off
from hf_fastpath.decode.ranks.rank_arguments import state_of_run
from hf_fastpath.decode.run import passes as of_steps
from hf_fastpath.patching import passed_twins
from hf_fastpath.patching.state import state_of
from hf_fastpath.recording.passes import PASSES
from hf_fastpath.recording.recorded_step import Recording
from hf_fastpath.recording.skeleton import Skeleton
from hf_fastpath.recording.step import record

VARIABLE = pass_table.PASSES
TABLES = (of_steps.PASSES, PASSES)
ALL = {row.name: row for table in TABLES for row in reversed(table.rows)}
SWITCHABLE = [name for name, row in ALL.items() if not row.needed]
#: small models in which many passes find something
MODELS = ("glm4", "granitemoe", "qwen3_next")
FEW = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False)


# ---- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.what)
def test_rows_are_in_an_order_that_has_reasons(table):
    assert len(set(table.keys)) == len(table) > 2
    for place, row in enumerate(table):
        assert row.name == row.run.__name__, "the name of a pass is its function's"
        assert row.finds.startswith("It finds ") and row.finds.endswith(".") and row.finds.count(". ") == 0
        for name, why in row.after.items():
            assert why and name in table.keys[:place]
    assert ALL.keys() == {name.partition("#")[0] for table in TABLES for name in table.keys}


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.what)
def test_a_row_in_front_of_one_that_it_comes_behind_is_refused(table):
    for row in table:
        for name in row.after:
            others = [each for each in table if each is not row]
            others.insert(table.keys.index(name), row)
            with pytest.raises(ValueError, match=f"passes over {table.what}, .*{row.name}"):
                PassTable(table.what, others)


def nothing(listing, given):
    pass


ROW = Pass("one", nothing, "It finds nothing.")


@pytest.mark.parametrize(
    ("rows", "message"),
    (
        ([ROW, Pass("one", print, "It finds nothing.")], "two passes have this name"),
        ([ROW, ROW], "again is '', expected a reason in every row but a pass's first"),
        ([ROW.once_more("It was not enough.", {})], "again is 'It was not enough.'"),
        ([Pass("One", nothing, "It finds nothing.")], "the name is 'One', expected a word in small letters"),
        ([Pass("one", nothing, "")], "finds is '', expected a sentence"),
        (
            [Pass("one", nothing, "It finds nothing.", {"other": "why"})],
            r"one comes after other \(why\), which is not in",
        ),
        ([ROW, Pass("other", nothing, "It finds nothing.", {"one": ""})], "no reason why it comes after one"),
        ([ROW, Pass("other", nothing, "It finds nothing.", {"one#2": "why"})], "comes after one#2"),
    ),
)
def test_a_table_fails_where_it_is_defined(rows, message):
    with pytest.raises(ValueError, match=f"passes over tests, .*{message}"):
        PassTable("tests", rows)


def test_a_name_is_of_one_table():
    with pytest.raises(ValueError, match="passes over tests: residuals are names in another table"):
        declare(PassTable("tests", [Pass("residuals", nothing, "It finds nothing.")]))


# ---- switches -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "off"),
    (("", set()), ("-residuals", {"residuals"}), (" -Residuals , -one_call,", {"residuals", "one_call"})),
)
def test_switched_off(value, off, monkeypatch):
    monkeypatch.setenv(VARIABLE, value)
    assert switched_off() == off


@pytest.mark.parametrize(
    ("value", "message"),
    (
        ("-residual", r"has '-residual', expected -name of .* residuals, .* \(did you mean -residuals\?\)"),
        ("residuals", r"has 'residuals', expected -name of passes to switch off, out of .*one_call, .*residuals"),
        ("-one_call,0", "has '0', expected -name"),
        (
            "-stacked_experts",
            "has '-stacked_experts', but this pass cannot be switched off: it refuses loops .* leave it",
        ),
    ),
)
def test_what_is_no_switch_is_refused_by_patch(value, message, monkeypatch):
    monkeypatch.setenv(VARIABLE, value)
    model = small_model("glm4")
    with pytest.raises(ValueError, match=f"HF_FASTPATH_PASSES {message}"):
        hf_fastpath.patch(model, quiet=True)
    assert state_of(model) is None


def test_a_needed_pass_says_why():
    needed = {name: row.needed for name, row in ALL.items() if row.needed}
    assert {"position_biases", "positions_in_text", "stacked_experts"} <= needed.keys()
    assert all(len(why.split()) > 3 for why in needed.values())


def test_notes_of_twins_and_ranks_know_what_is_switched_off(monkeypatch):
    model = small_model("glm4")
    found = []
    for value in ("", "-residuals", "-gates, -residuals", "-residuals,-gates"):
        monkeypatch.setenv(VARIABLE, value)
        key = passed_twins.key_of(model, torch.device("cpu"), torch.float32)
        found.append((key, str(state_of_run(model)["passes that are switched off"])))
    assert len(set(found)) == 3 and found[2] == found[3]


@functools.cache
def expected(model_type: str) -> torch.Tensor:
    """Stock's tokens of a small model, and the number of calls of its step with all passes."""
    return small_model(model_type).generate(torch.arange(4, 10)[None], **FEW)


@pytest.mark.every(14)
@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("name", SWITCHABLE)
def test_without_a_pass_tokens_are_stocks(name, model_type, monkeypatch):
    """The step is ours with any of the passes switched off, and computes the same."""
    require_native(CPU)
    monkeypatch.setenv(VARIABLE, f"-{name}")
    ours = hf_fastpath.patch(small_model(model_type), quiet=True)
    with counting(ours) as counts:
        found = ours.generate(torch.arange(4, 10)[None], **FEW)
    assert torch.equal(found, expected(model_type)) and counts.fallback == 0, counts.reasons


def test_a_pass_that_is_switched_off_leaves_its_calls(monkeypatch):
    require_native(CPU)
    names = {}
    for value in ("", "-residuals"):
        monkeypatch.setenv(VARIABLE, value)
        ours = hf_fastpath.patch(small_model("glm4"), quiet=True)
        ours.generate(torch.arange(4, 10)[None], **FEW)
        (plan,) = state_of(ours).plans
        names[value] = plan.program.op_names()
    assert "add.Tensor" in names["-residuals"] and "add.Tensor" not in names[""]
    assert len(names["-residuals"]) > len(names[""])


# ---- a pass that has found everything -------------------------------------------------------------------------------


def described(recording: Recording) -> tuple:
    last = texts(recording.calls), len(recording.values), sorted(recording.mutated)
    return *last, [call.out.index for call in recording.calls].index(recording.logits.index)


@pytest.mark.every(2)
@pytest.mark.parametrize("model_type", (*MODELS, "mamba2", "deepseek_v2", "gpt_neo", "llama4_text"))
def test_a_pass_finds_nothing_in_what_it_has_made(model_type):
    """A pass that runs twice changes nothing the second time, so that its result is no accident of its walk."""
    if model_type == "mamba2" and CACHE != "cache":
        pytest.skip("not recorded with this transformers: mamba2 takes its cache by another name")
    model = small_model(model_type)
    recording = record(Skeleton(model), 1, 1)
    recording.drop_unread()
    found = set()
    for row in PASSES:
        before = described(recording)
        row.run(recording, model)
        recording.drop_unread()
        once = described(recording)
        found |= {row.name} if once != before else set()
        row.run(recording, model)
        recording.drop_unread()
        assert described(recording) == once, f"{row.name} finds something in what it has made"
    assert len(found) > 5


# ---- files ----------------------------------------------------------------------------------------------------------


def generated(monkeypatch, folder) -> torch.Tensor:
    """Return the tokens of a small model that decodes with lists of calls in a folder."""
    require_native(CPU)
    monkeypatch.setenv(DUMP, str(folder))
    ours = hf_fastpath.patch(small_model("glm4"), quiet=True)
    return ours.generate(torch.arange(4, 10)[None], **FEW)


def test_lists_behind_passes_are_files(monkeypatch, tmp_path):
    assert torch.equal(generated(monkeypatch, tmp_path / "new" / "folder"), expected("glm4"))
    folders = sorted((tmp_path / "new" / "folder").iterdir())
    of_recordings = [each for each in folders if "recording-of-Glm4ForCausalLM-1-sequences-1-tokens" in each.name]
    assert of_recordings and any("step-of-1-rows" in each.name for each in folders)
    assert len({each.name.partition("-")[0] for each in folders}) == len(folders)
    files = sorted(of_recordings[0].iterdir())
    numbers, names = zip(*(each.stem.split("-") for each in files))
    assert names[0] == "no_pass" and {"module_formulas", "rotations", "residuals"} <= {*names}
    assert all(number == "00" or PASSES.rows[int(number) - 1].name == name for number, name in zip(numbers, names))
    contents = [each.read_text() for each in files]
    assert all(one != other for one, other in zip(contents, contents[1:])), "a pass that changes nothing has no file"
    assert all(line.startswith(f"%{place} = ") for place, line in enumerate(contents[-1].splitlines()))
    assert "rotated_attention(" not in contents[0] and "projected_attention(" in contents[-1]


def test_a_folder_that_cannot_be_written_is_a_warning_once(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(logs, "given", set())
    (tmp_path / "file").touch()
    with caplog.at_level("WARNING", "hf_fastpath"):
        logs.logger.addHandler(caplog.handler)
        try:
            assert torch.equal(generated(monkeypatch, tmp_path / "file"), expected("glm4"))
        finally:
            logs.logger.removeHandler(caplog.handler)
    said = [each.getMessage() for each in caplog.records if DUMP in each.getMessage()]
    assert len(said) == 1 and said[0].startswith(f"{DUMP}: lists of calls are not written to ")


def test_files_are_bounded(monkeypatch, tmp_path):
    monkeypatch.setenv(DUMP, str(tmp_path))
    monkeypatch.setattr(pass_dump, "_lists", itertools.count(pass_dump.MOST_LISTS))
    monkeypatch.setattr(pass_dump, "_MOST_OF_CALL", 20)
    monkeypatch.setattr(pass_dump, "_MOST_OF_FILE", 50)
    calls = [Call(torch.ops.aten.cat.default, {"tensors": [Register(1)] * 20}, Register(place)) for place in range(5)]
    assert pass_dump.dump_of("a title/with ../signs", calls) is not None
    assert pass_dump.dump_of("one more", calls) is None
    (folder,) = tmp_path.iterdir()
    assert folder.name.endswith("-a_title_with_.._signs")
    lines = (folder / "00-no_pass.txt").read_text().splitlines()
    assert lines[0] == "%0 = cat.default(tensors= ..." and lines[-1] == "... and 3 calls more" and len(lines) == 3


def test_no_files_without_the_variable(monkeypatch, tmp_path):
    monkeypatch.delenv(DUMP, raising=False)
    assert pass_dump.dump_of("title", [Call(torch.sin, {}, Register(0))]) is None
