"""lm-eval's ``hf`` model over a patched model gives the same answers and scores."""

from __future__ import annotations

import json

import pytest
import torch
from models import CPU, TINY_PYTHON, counting, tokenizer, trained
from parity import LogitRule, float64_copy

#: the imports alone take longer than most tests
pytestmark = pytest.mark.full
lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed: `make test-full` installs it")

#: lines of the held-out text in each task, and tokens to write after each
LINES, NEW_TOKENS = 96, 16
METRICS = {"choose": ["acc"], "write": ["exact_match"], "read": ["byte_perplexity"]}


@pytest.fixture
def tasks(tmp_path) -> list[dict]:
    """Make a task of each kind of request, over lines of held-out code: which line is next, write it, read it."""
    lines = [line for line in (TINY_PYTHON / "heldout.txt").read_text().splitlines() if len(line) > 16]
    rows = []
    for index, (line, following) in enumerate(zip(lines[:LINES], lines[1:])):
        choices = [following, lines[-index - 1]]
        rows.append({"line": line, "next": following, "choices": choices[:: 1 - 2 * (index % 2)], "label": index % 2})
    file = tmp_path / "lines.json"
    file.write_text("\n".join(map(json.dumps, rows)))
    data = {"dataset_path": "json", "test_split": "test", "target_delimiter": "\n", "doc_to_text": "{{line}}"}
    data |= {"dataset_kwargs": {"data_files": {"test": str(file)}, "cache_dir": str(tmp_path)}}
    generation = {"max_gen_toks": NEW_TOKENS, "until": ["\n\n"], "do_sample": False}
    kinds = {
        "choose": {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "label"},
        "write": {"output_type": "generate_until", "doc_to_target": "next", "generation_kwargs": generation},
        "read": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{line}}"},
    }
    return [
        {**data, **kind, "task": name, "metric_list": [{"metric": metric} for metric in METRICS[name]]}
        for name, kind in kinds.items()
    ]


def evaluated(model, tasks: list[dict]) -> dict:
    """Return the results of ``simple_evaluate``."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    wrapped = HFLM(pretrained=model, tokenizer=tokenizer(), batch_size=4, softmax_dtype=torch.float64)
    manager = TaskManager(include_defaults=False)
    return lm_eval.simple_evaluate(wrapped, tasks=tasks, task_manager=manager, bootstrap_iters=0, num_fewshot=0)


def answers(results: dict, task: str) -> list:
    """Return what the model answered to each request of a task, in their order."""
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    return [answer for sample in samples for (answer,) in sample["resps"]]


def log_likelihoods(results: dict) -> torch.Tensor:
    """Return [requests, 1] log likelihoods of all that were read."""
    chosen = [likelihood for likelihood, _ in answers(results, "choose")]
    return torch.tensor([*chosen, *answers(results, "read")], dtype=torch.float64)[:, None]


def test_same_results(tasks):
    stock, ours = trained(CPU)
    with counting(ours) as counts:
        found = evaluated(ours, tasks)
    assert counts.fast and not counts.fallback, counts.reasons
    expected, reference = evaluated(stock, tasks), evaluated(float64_copy(stock), tasks)
    assert answers(found, "write") == answers(expected, "write")
    assert len(set(answers(found, "write"))) > LINES // 2, "the same answer to most lines"
    assert [greedy for _, greedy in answers(found, "choose")] == [greedy for _, greedy in answers(expected, "choose")]
    for task, metric in (("choose", "acc"), ("write", "exact_match")):
        assert found["results"][task][f"{metric},none"] == expected["results"][task][f"{metric},none"]
    perplexities = [results["results"]["read"]["byte_perplexity,none"] for results in (found, expected)]
    assert abs(perplexities[0] - perplexities[1]) < 0.001, perplexities
    rule = LogitRule()
    rule.add(*map(log_likelihoods, (found, expected, reference)))
    rule.check("log-likelihoods")
