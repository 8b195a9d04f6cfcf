"""The command line."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from models import ARCHITECTURES, CPU, TINY_PYTHON, require_native

from hf_fastpath import cli
from hf_fastpath.architecture import architectures
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


@pytest.mark.parametrize("arguments", (["info", "--nonsense"], ["verify"], ["speed"], []))
def test_cli_refuses_unknown_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2 and "usage: hf-fastpath" in capsys.readouterr().err


def test_cli_runs_as_a_module():
    command = [sys.executable, "-m", "hf_fastpath", "explain", "autocast"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0 and result.stdout.startswith("autocast: ")
