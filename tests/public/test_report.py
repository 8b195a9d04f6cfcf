"""strict, report(), reason codes, and the names of the package."""

from __future__ import annotations

import json
import re
from pathlib import Path

import fresh_process
import pytest
from models import CPU, SHORT, build, counting, fresh, prompt, require_native

import hf_fastpath
from hf_fastpath import FallbackError
from hf_fastpath.reasons import REASONS, check

ROOT = Path(__file__).resolve().parents[2]
STOCK_CALLS = {
    "no_cache": dict(use_cache=False),
    "generation_mode": dict(assistant_early_exit=1),
    "attention_outputs": dict(output_hidden_states=True, return_dict_in_generate=True),
    "other_cache": dict(cache_implementation="static", disable_compile=True),
}


@pytest.mark.parametrize(("reason", "options"), STOCK_CALLS.items(), ids=STOCK_CALLS)
def test_strict_raises_where_stock_would_run(reason, options, device):
    require_native(device)
    ours = hf_fastpath.patch(build("llama").to(device), strict=True, quiet=True)
    ours.generate(prompt(device), **SHORT)
    with pytest.raises(FallbackError, match=f"{reason}.*strict=True.*What helps: {re.escape(REASONS[reason].remedy)}"):
        ours.generate(prompt(device), **(SHORT | options))
    ours.generate(prompt(device), **SHORT)  # the model is as good as before
    with pytest.raises(FallbackError, match="batch_size"):
        ours.generate(prompt(device, 65), **SHORT)


def test_report_contents(device, capsys):
    require_native(device)
    ours = hf_fastpath.patch(build("mistral").to(device))
    printed = capsys.readouterr().err
    assert "hf_fastpath on mistral" in printed and "decode loop: fast" in printed
    assert len(printed.splitlines()) <= 4, "one short report"
    ours.generate(prompt(device, 2), **SHORT)
    ours.generate(prompt(device, 1), assistant_early_exit=1, **SHORT)
    ours.generate(prompt(device, 65), **SHORT)
    report = hf_fastpath.report(ours)
    found = json.loads(json.dumps(report.to_dict()))
    drafted = (
        found["stats"]["fallback_tokens"] - 65 * 12
    )  # those of drafts that stock's loop accepts come several at once
    assert found["stats"]["fast_tokens"] == 24 and 0 < drafted <= 12
    assert found["stats"]["reasons"]["generation_mode"] == 1 and found["stats"]["reasons"]["batch_size"] >= 1
    assert found["stats"]["last_tokens_per_second"] > 0
    text = str(report)
    for part in ("2 layer", "24 fast", f"{780 + drafted} stock", "batch_size", str(REASONS["batch_size"])):
        assert part in text


STOCK_LOOPS = """
import warnings
import torch
torch.set_num_threads(1)
import hf_fastpath
from models import build, prompt
warnings.simplefilter("ignore")
model, partly = build("llama"), build("gpt2")
model.model.register_forward_hook(lambda *given: None)
partly.transformer.h[1].mlp.forward = lambda x: 0.5 * x
for each in (model, partly):
    hf_fastpath.patch(each, quiet=True)
    for _ in range(2):
        each.generate(prompt(torch.device("cpu"), 2), max_new_tokens=4, do_sample=False)
    stats = hf_fastpath.report(each).stats
    print(stats["fast_tokens"], stats["fallback_tokens"], stats["reasons"])
"""


def test_stock_loop_is_counted(tmp_path):
    """In a separate process, where no other model has brought the wrapper, stock's tokens count, and our layers and
    cache serve them."""
    require_native(CPU)
    result = fresh_process.run(STOCK_LOOPS, cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.splitlines() == ["0 16 {'hooks': 2}", "0 16 {'partial_patch': 2}"]


def test_a_call_gives_its_own_reasons_only(device):
    """A fallback of the loop does not bring other reasons along."""
    _, ours = fresh("llama", device)
    with counting(ours) as counts:
        ours.generate(prompt(device, 65), **SHORT)
    assert set(counts.reasons) == {"batch_size"} and counts.fallback == 65 * 12


def test_quiet_prints_nothing(capsys):
    require_native(CPU)
    hf_fastpath.patch(build("llama"), quiet=True)
    assert capsys.readouterr() == ("", "")


def test_every_reason_has_a_remedy():
    for code, reason in REASONS.items():
        for text in reason:
            assert text and text == text.strip(" .;") and "|" not in text, f"{code}: {text!r}"
        assert len(reason.remedy) <= 100, f"{code}: the remedy is too long for an error message"


def test_reason_codes_in_the_code_are_known():
    """Every entry of the table is in use, and an unknown code is refused."""
    text = "\n".join(p.read_text() for p in (ROOT / "hf_fastpath").rglob("*.py") if p.name != "reasons.py")
    unused = [code for code in REASONS if f'"{code}"' not in text]
    assert not unused, f"reason codes that nothing gives: {unused}"
    with pytest.raises(KeyError, match="no_such"):
        check("no_such")


def test_import_and_names():
    assert set(hf_fastpath.__all__) >= {
        "patch",
        "unpatch",
        "patched",
        "report",
        "verify",
        "FastpathCache",
        "ops",
    }
    for name in hf_fastpath.__all__:
        assert getattr(hf_fastpath, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'pach'"):
        hf_fastpath.pach  # noqa: B018
