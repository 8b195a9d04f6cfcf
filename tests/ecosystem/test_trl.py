"""TRL: training loops that generate with the model they train, and models that were fine-tuned."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from models import SHORT, counting, tokenizer, trained
from parity import assert_same_tokens

import hf_fastpath

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


def policy_trainer(model, folder, **options):
    args = trl.GRPOConfig(str(folder), num_generations=2, max_completion_length=16, **COMMON, **options)
    return trl.GRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
        args=args,
        train_dataset=datasets.Dataset.from_dict({"prompt": TEXTS}),
        processing_class=words(),
    )


def text_trainer(model, folder, **options):
    args = trl.SFTConfig(str(folder), max_length=32, **COMMON, **options)
    data = datasets.Dataset.from_dict({"text": [text * 4 for text in TEXTS]})
    return trl.SFTTrainer(model, args=args, train_dataset=data, processing_class=words())


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


def test_policy_optimization_of_an_adapter(models, tmp_path):
    """Over LoRA stock runs, and says so; report() of the wrapper, the model inside and the merged model answer."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    stock, ours = models
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapper = peft.get_peft_model(ours, config)
        trainer = policy_trainer(wrapper, tmp_path, bf16=False, learning_rate=1e-2)
        trainer.train()
    assert hf_fastpath.report(wrapper).stats["reasons"]["adapter"]
    assert hf_fastpath.report(wrapper).to_dict() == hf_fastpath.report(ours).to_dict()
    assert hf_fastpath.patch(wrapper, quiet=True) is wrapper
    merged = trainer.model.merge_and_unload().eval()
    assert merged is ours and hf_fastpath.report(merged).loop == "fast"
    stock.load_state_dict(merged.state_dict())
    ids = tokenizer()(TEXTS[1], return_tensors="pt")["input_ids"]
    with counting(merged) as counts:
        assert_same_tokens(merged.generate(ids, **SHORT), stock.generate(ids, **SHORT), stock)
    assert counts.fast and not counts.fallback, counts.reasons
    assert hf_fastpath.unpatch(merged) is merged
