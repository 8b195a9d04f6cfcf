"""Folders that anybody may have made: explain() and load_packed() end soon, with a ValueError that says what to do."""

from __future__ import annotations

import json
import os
import random
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
from causal_lm_types import small_config
from models import CPU, build, require_native

import hf_fastpath
from hf_fastpath import compat
from hf_fastpath.check.explain import explain
from hf_fastpath.cli import main as cli
from hf_fastpath.packed_files.file_index import INDEX, digest, sealed

SECONDS = 20
VALUES = (0, -1, 1, 3, 10**7, 10**12, 2**63, 0.0, -0.5, 1e308, float("nan"), None, True, "", "abc", "float16")
VALUES += ([], [0], [1, 2], ["a"], [[["global", "local"], 10**9]], {}, {"a": 1}, {"rope_type": "yarn", "factor": 0})


@contextmanager
def soon():
    """Fail if a ``with`` block takes for ever."""

    def late(*_):
        raise AssertionError(f"more than {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 42)


PLACED = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "loop": lambda path: path.symlink_to(path.name),
    "endless": sparse,
    "nested": lambda path: path.write_text("[" * 200_000),
    "list": lambda path: path.write_text("[1]"),
    "digits": lambda path: path.write_text('{"model_type": "llama", "vocab_size": ' + "9" * 10_000 + "}"),
    "no text": lambda path: path.write_bytes(b"\xff\xfe"),
}


@pytest.mark.parametrize("what", PLACED)
def test_explain_of_what_is_no_config(what, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    PLACED[what](tmp_path / "config.json")
    for source in (tmp_path, tmp_path / "config.json"):
        if what != "folder" or source is tmp_path:
            with soon(), pytest.raises(ValueError, match="is no folder, config.json, GGUF file or model id"):
                explain(str(source))


@pytest.mark.parametrize("what", PLACED)
def test_load_packed_of_what_is_no_index(what, tmp_path):
    PLACED[what](tmp_path / INDEX)
    with soon(), pytest.raises((ValueError, OSError) if what == "loop" else ValueError, match="packed"):
        hf_fastpath.load_packed(tmp_path)


def of_config(folder: Path, entries: dict) -> str:
    (folder / "config.json").write_text(json.dumps(entries))
    return str(folder)


@pytest.mark.parametrize(
    ("model_type", "entries", "said"),
    (
        ("llama", {"num_hidden_layers": 10**7}, "num_hidden_layers is 10000000, expected 4,096 at most"),
        ("qwen3_5_text", {"num_hidden_layers": 10**12}, "expected 4,096 at most"),
        ("mixtral", {"num_attention_heads": 0}, "ZeroDivisionError"),
        ("gpt2", {"n_positions": 2**40}, "n_positions is"),
        (
            "gpt_neo",
            {"attention_types": [[["global", "local"], 10**9]]},
            "is 1000000000, expected 1,048,576 at most",
        ),
        ("llama", {"hidden_size": "wide"}, "hidden_size|makes no model"),
    ),
)
def test_explain_of_absurd_numbers(model_type, entries, said, tmp_path, capsys):
    source = of_config(tmp_path, json.loads(small_config(model_type).to_json_string()) | entries)
    with soon(), pytest.raises(ValueError, match=said):
        explain(source)
    with pytest.raises(SystemExit) as caught:
        cli.main(["explain", source, "--device", "cpu"])
    assert caught.value.code == 2 and "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(("model_type", "every"), (("llama", 1), ("gpt2", 1), ("mixtral", 1), ("qwen3_5_text", 9)))
def test_any_value_of_any_entry(model_type, every, tmp_path):
    """A config's entries are taken one by one; a model comes of each, or a ValueError."""
    entries = json.loads(small_config(model_type).to_json_string())
    chosen, refused = random.Random(0), 0
    for name in list(entries)[::every]:
        source = of_config(tmp_path, entries | {name: chosen.choice(VALUES)})
        with soon():
            try:
                explain(source, bandwidth=1e9)
            except ValueError as error:
                refused += 1
                assert source in str(error) and len(str(error)) < 1000
    assert 0 < refused < len(entries)


def test_configs_of_transformers_are_small_enough():
    """The largest that there are: layers, positions, experts, tokens."""
    known = {"num_hidden_layers": 1000, "max_position_embeddings": 10_485_760, "num_experts": 512}
    compat.check_sizes(known | {"vocab_size": 1_000_000, "rope_theta": 1e12, "block_size": 65_536})
    with pytest.raises(ValueError, match="text.n_layer is 1e"):
        compat.check_sizes({"text": {"n_layer": 10**25}})


def test_modules_are_counted(monkeypatch):
    monkeypatch.setattr(compat.config_sizes, "_MOST_MODULES", 20)
    with compat.few_modules(), pytest.raises(ValueError, match="has more than 20 modules"):
        build("llama", num_hidden_layers=4)
    build("llama", num_hidden_layers=4)


def test_load_packed_makes_no_model_of_absurd_numbers(tmp_path):
    """Checksums cover what a save says, but anybody can compute them."""
    require_native(CPU)
    hf_fastpath.save_packed(hf_fastpath.patch(build("llama"), weights="int8", quiet=True), tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    index.pop("sha256")
    files = index["hf_fastpath"]["files"]
    (name,) = (each for each in files if each.endswith("-config.json"))
    text = json.dumps(json.loads((tmp_path / name).read_text()) | {"num_hidden_layers": 10**7}).encode()
    (tmp_path / name).write_bytes(text)
    files[name] = [len(text), digest([memoryview(text)])]
    (tmp_path / INDEX).write_text(sealed(index))
    with soon(), pytest.raises(ValueError, match="makes no model .num_hidden_layers is 10000000, expected 4,096"):
        hf_fastpath.load_packed(tmp_path)
