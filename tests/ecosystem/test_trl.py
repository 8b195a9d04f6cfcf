"""TRL: training loops that generate with the model they train, and models that were fine-tuned."""

from __future__ import annotations

import copy
from contextlib import contextmanager

import pytest
import torch
from models import SHORT, counting, tokenizer, trained
from parity import assert_same_tokens

import hf_fastpath
from hf_fastpath.recording import whole_step

trl = pytest.importorskip("trl", reason="TRL is not installed")
datasets = pytest.importorskip("datasets", reason="TRL's data sets need the package datasets")

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore::FutureWarning")]
TEXTS = ["import os\n\n\ndef main():", "class Table:\n", "for line in lines:\n", "def add(a, b):\n    return"]
COMMON = dict(per_device_train_batch_size=4, max_steps=2, report_to=[], use_cpu=True, save_strategy="no")


@pytest.fixture
def models():
    """Return (stock, patched): the trained model, to be trained further."""
    stock, _ = trained(torch.device("cpu"))
    return copy.deepcopy(stock), hf_fastpath.patch(copy.deepcopy(stock), quiet=True)


def words():
    made = copy.deepcopy(tokenizer())
    made.pad_token = made.pad_token or made.eos_token
    return made


def different_letters(completions, **_):
    return [float(len(set(text))) for text in completions]


def policy_trainer(model, folder, reward=different_letters, steps=2, peft_config=None, **options):
    common = COMMON | {"max_steps": steps}
    args = trl.GRPOConfig(str(folder), num_generations=2, max_completion_length=16, **common, **options)
    return trl.GRPOTrainer(
        model,
        reward_funcs=reward,
        args=args,
        train_dataset=datasets.Dataset.from_dict({"prompt": TEXTS}),
        processing_class=words(),
        peft_config=peft_config,
    )


def text_trainer(model, folder, peft_config=None, **options):
    args = trl.SFTConfig(str(folder), max_length=32, **COMMON, **options)
    data = datasets.Dataset.from_dict({"text": [text * 4 for text in TEXTS]})
    return trl.SFTTrainer(model, args=args, train_dataset=data, processing_class=words(), peft_config=peft_config)


@pytest.mark.parametrize("bf16", (False, True))
@pytest.mark.parametrize("patched", ("before", "after"))
def test_policy_optimization_generates_fast(patched, bf16, models, tmp_path):
    """Our loop makes nearly every token of GRPO's own generate(), in the default precision and in float32."""
    ours = models[patched == "before"]
    trainer = policy_trainer(ours, tmp_path, bf16=bf16)
    assert "forward" in vars(ours), "the trainer puts no forward on the model, so the test shows nothing"
    hf_fastpath.patch(ours, quiet=True)
    before = [parameter.clone() for parameter in ours.parameters()]
    with counting(ours) as counts:
        trainer.train()
    assert counts.fast >= 0.95 * (counts.fast + counts.fallback) and counts.fast >= 4 * 2 * 2, counts.reasons
    assert bool(counts.reasons["autocast_left_out"]) == bf16
    assert any(not torch.equal(one, other) for one, other in zip(before, ours.parameters())), "nothing was learned"


@pytest.mark.parametrize("bf16", (False, True))
def test_fine_tuned_model_generates_fast(bf16, models, tmp_path):
    """SFT's losses are stock's, and what SFT leaves on the model costs generate() nothing."""
    losses = []
    for model in models:
        trainer = text_trainer(model, tmp_path, bf16=bf16, learning_rate=1e-3, seed=1)
        losses.append(trainer.train().training_loss)
    stock, ours = models
    assert bf16 or losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert "forward" in vars(ours), "the trainer leaves no forward on the model, so the test shows nothing"
    ours.eval(), stock.eval()
    ids = tokenizer()(TEXTS[0], return_tensors="pt")["input_ids"]
    with counting(ours) as counts:
        found = ours.generate(ids, **SHORT)
    assert counts.fast == found[:, ids.shape[1] :].numel() and not counts.fallback, counts.reasons
    if not bf16:
        stock.load_state_dict(ours.state_dict())
        assert_same_tokens(found, stock.generate(ids, **SHORT), stock)


@contextmanager
def recordings(monkeypatch):
    """Count the steps that are recorded in a ``with`` block."""
    made, record = [], whole_step.record
    with monkeypatch.context() as patched:
        patched.setattr(whole_step, "record", lambda *given, **named: made.append(given) or record(*given, **named))
        yield made


def adapter(**options):
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM", **options)


@pytest.mark.parametrize("with_adapter", (False, True))
def test_rollouts_are_stocks(with_adapter, models, tmp_path, monkeypatch):
    """The same seed gives the same rollouts, rewards and weights as without a patch, all by our loop; the trainer's
    steps between rollouts record nothing anew."""
    seen, made = [], []

    def reward(completions, completion_ids, **_):
        seen[-1].append([list(map(int, each)) for each in completion_ids])
        made.append(len(recorded))
        return [sum(map(str.isspace, text)) / max(1, len(text)) for text in completions]

    curves, trained_models = [], []
    for model in models:
        seen.append([])
        options = dict(bf16=False, learning_rate=1e-3, logging_steps=1, seed=3, disable_tqdm=True)
        config = adapter() if with_adapter else None
        trainer = policy_trainer(model, tmp_path, reward, steps=5, peft_config=config, **options)
        with counting(models[1]) as counts, recordings(monkeypatch) as recorded:
            made.clear()
            trainer.train()
        curves.append([(each["reward"], each["loss"]) for each in trainer.state.log_history if "reward" in each])
        trained_models.append(trainer.model)
    assert seen[0] == seen[1] and len(seen[0]) == 5
    assert curves[0] == curves[1] and len({reward for reward, _ in curves[0]}) > 1
    assert counts.fast and not counts.fallback and not counts.reasons, counts.reasons
    assert made[1] == made[-1], "recordings behind the second rollout"
    pairs = list(zip(trained_models[0].parameters(), trained_models[1].parameters(), strict=True))
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("with_adapter", (False, True))
def test_rollouts_of_continuous_batching(with_adapter, models, tmp_path):
    """Where TRL asks for transformers' continuous batching, rollouts share the steps of our batch."""
    config = adapter() if with_adapter else None
    options = dict(bf16=False, use_transformers_continuous_batching=True, disable_tqdm=True)
    trainer = policy_trainer(models[1], tmp_path, peft_config=config, **options)
    with counting(models[1]) as counts:
        trainer.train()
    assert counts.fast and not counts.fallback and not counts.reasons, counts.reasons
    assert max(hf_fastpath.report(models[1]).stats["shared_steps"]) > 1


@pytest.mark.parametrize("kind", ("SFT", "DPO"))
def test_a_training_step_of_an_adapter_is_stocks(kind, models, tmp_path):
    """SFT and DPO over LoRA compute the losses, and end with the weights, that they have without a patch; then our loop
    decodes with the adapter."""
    losses, ended = [], []
    for model in models:
        options = dict(bf16=False, learning_rate=1e-3, seed=1, logging_steps=1, disable_tqdm=True)
        if kind == "SFT":
            trainer = text_trainer(model, tmp_path, peft_config=adapter(), **options)
        else:
            data = {"prompt": TEXTS, "chosen": [text[::-1] for text in TEXTS], "rejected": [text[1:] for text in TEXTS]}
            trainer = trl.DPOTrainer(
                model,
                args=trl.DPOConfig(str(tmp_path), max_length=48, **COMMON, **options),
                train_dataset=datasets.Dataset.from_dict(data),
                processing_class=words(),
                peft_config=adapter(),
            )
        trainer.train()
        losses.append([each["loss"] for each in trainer.state.log_history if "loss" in each])
        ended.append(trainer.model.eval())
    assert losses[0] == losses[1] and len(losses[0]) == 2
    assert all(torch.equal(one, other) for one, other in zip(ended[0].parameters(), ended[1].parameters(), strict=True))
    ids = tokenizer()(TEXTS[0], return_tensors="pt")["input_ids"]
    with counting(models[1]) as counts:
        found = ended[1].generate(input_ids=ids, **SHORT)
    assert_same_tokens(found, ended[0].generate(input_ids=ids, **SHORT), models[0])
    assert counts.fast and not counts.fallback and not counts.reasons, counts.reasons


def test_report_of_a_trained_adapter(models, tmp_path):
    """report() of the wrapper, the model inside and the merged model answer; merged for good, the model is fast."""
    stock, ours = models
    trainer = policy_trainer(ours, tmp_path, bf16=False, learning_rate=1e-2, peft_config=adapter())
    wrapper = trainer.model
    trainer.train()
    assert hf_fastpath.report(wrapper).to_dict() == hf_fastpath.report(ours).to_dict()
    assert hf_fastpath.patch(wrapper, quiet=True) is wrapper
    merged = wrapper.merge_and_unload().eval()
    assert merged is ours and hf_fastpath.report(merged).loop == "fast"
    stock.load_state_dict(merged.state_dict())
    ids = tokenizer()(TEXTS[1], return_tensors="pt")["input_ids"]
    with counting(merged) as counts:
        assert_same_tokens(merged.generate(ids, **SHORT), stock.generate(ids, **SHORT), stock)
    assert counts.fast and not counts.fallback, counts.reasons
    assert hf_fastpath.unpatch(merged) is merged
