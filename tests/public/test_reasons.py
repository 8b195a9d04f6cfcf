"""Every reason code: something a user may do that gives it.

That tokens are stock's then is shown where the feature itself is tested.
"""

from __future__ import annotations

import copy
import functools
import types
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress

import pytest
import torch
import torch.distributed
from accelerate import cpu_offload
from models import CPU, SHORT, build, counting, prompt, require_native
from torch import nn
from transformers import (
    CompileConfig,
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    StoppingCriteriaList,
)
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

import hf_fastpath
from hf_fastpath import loader
from hf_fastpath.compat import CACHE
from hf_fastpath.forwards import KEY
from hf_fastpath.patching import paused
from hf_fastpath.reasons import REASONS

IDS = prompt(CPU)


def patched(architecture: str = "llama", **changes) -> nn.Module:
    return hf_fastpath.patch(build(architecture, **changes), quiet=True)


def declined(model: nn.Module, **options) -> set[str]:
    """Codes in the report of ``patch()``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = hf_fastpath.report(hf_fastpath.patch(model, quiet=True, **options))
    return {report.loop} | {what.split(": ")[1] for what in report.declined}


def now(change: Callable[[nn.Module], object], **changes) -> set[str]:
    """What the report says of the loop after a change of a patched model."""
    model = patched(**changes)
    change(model)
    return {hf_fastpath.report(model).loop}


def generating(model: nn.Module | None = None, **options) -> Iterable[str]:
    """Codes that a call of generate() is counted with; stock's own errors do not matter here."""
    model = patched() if model is None else model
    with counting(model) as counts, suppress(ValueError, RuntimeError, IndexError):
        model.generate(**({} if "inputs_embeds" in options else dict(input_ids=IDS)) | SHORT | options)
    return set(counts.reasons)


def cropped_unevenly() -> hf_fastpath.FastpathCache:
    model = patched()
    cache = model.generate(IDS, return_dict_in_generate=True, **SHORT)[CACHE]
    cache.crop(IDS.shape[1] - 1 - cache.get_seq_length())
    cache.layers[1].crop(-1)
    return cache


def after(change: Callable[[nn.Module], object], **options) -> Iterable[str]:
    """:func:`generating`, after a change of the patched model."""
    model = patched()
    change(model)
    return generating(model, **options)


def of_mlp(**gradient) -> set[str | None]:
    """What an MLP says of a call; it is not counted, being what stock is there for."""
    patch, x = vars(patched().model.layers[0].mlp)[KEY], torch.zeros(1, 3, 112, **gradient)
    return {patch.reason_now(x) or patch.parameters_reason(x)}


def mlp_of(model: nn.Module) -> nn.Module:
    return model.model.layers[0].mlp


# ---- one function a code, where more than an expression is needed ------------------------------------------------


def of_a_checkpoint(**attributes) -> set[str]:
    """A projection is of a class that GPTQ's checkpoints are loaded into."""
    cls = type("TorchLinear", (nn.Linear,), {"__module__": "gptqmodel.somewhere"})
    model = build("llama")
    made = cls(204, 112, bias=False)
    vars(made).update(dict(bits=4, group_size=102, g_idx=torch.zeros(204)) | attributes)
    model.model.layers[0].mlp.down_proj = made
    return declined(model)


def no_native_library(monkeypatch):
    monkeypatch.setattr(loader, "is_native", lambda device: False)
    return declined(build("llama"))


def unsupported_activation(monkeypatch):
    model = build("llama")
    mlp_of(model).act_fn = nn.Tanh()
    return declined(model)


def unsupported_projection(monkeypatch):
    def replace(model):
        mlp_of(model).up_proj.__class__ = type("Adapted", (nn.Linear,), {})

    return after(replace)


def instance_forward(monkeypatch):
    return after(lambda model: setattr(mlp_of(model), "forward", lambda x: x))


def class_forward(monkeypatch):
    model, real = patched(), modeling_llama.LlamaMLP.forward
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: real(self, x))
    return generating(model)


def attention_function(monkeypatch):
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", lambda *args, **kwargs: None)
    return now(lambda model: None)


def experts_function(monkeypatch):
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "mine", lambda *args, **kwargs: None)
    return now(lambda model: setattr(model.config, "_experts_implementation", "mine"), architecture="mixtral")


def dynamic_rope(monkeypatch):
    rope = dict(rope_type="dynamic", factor=2.0, rope_theta=1e4, original_max_position_embeddings=16)
    return now(lambda model: None, rope_parameters=rope, max_position_embeddings=16)


def autocast(monkeypatch):
    with torch.autocast("cpu"):
        return generating()


def compiling(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    return of_mlp()


def checkpointing(monkeypatch):
    return now(lambda model: (model.gradient_checkpointing_enable(), model.train()))


def being_paused(monkeypatch):
    model = patched()
    with paused(model):
        return {vars(mlp_of(model))[KEY].reason_now(torch.zeros(1, 1, 112))}


def generation_method(monkeypatch):
    def override(model):
        method = type(model).prepare_inputs_for_generation
        own = functools.wraps(method)(lambda *args, **kwargs: method(*args, **kwargs))
        model.prepare_inputs_for_generation = types.MethodType(own, model)

    return after(override)


def custom_sample(monkeypatch):
    real = GenerationMixin._sample

    @functools.wraps(real)
    def own(self, *args, **kwargs):
        return real(self, *args, **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaForCausalLM, "_sample", own, raising=False)
    return now(lambda model: None)


def reentrant(monkeypatch):
    class Nosy:
        def put(self, value):
            if value.dim() == 1 and not inside:
                inside.append(model.generate(IDS, **SHORT))

        def end(self):
            pass

    model, inside = patched(), []
    return generating(model, streamer=Nosy())


def synced_gpus(monkeypatch, tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        return generating(synced_gpus=True)
    finally:
        torch.distributed.destroy_process_group()


def stop(ids, scores, **kwargs):
    """A stopping criterion of the user's own."""
    return torch.zeros(len(ids), dtype=torch.bool)


def continuous_batching(monkeypatch):
    model = patched()
    small = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
    config = GenerationConfig(do_sample=False, pad_token_id=0, max_new_tokens=2)
    with counting(model) as counts:
        model.generate_batch(IDS.tolist(), generation_config=config, continuous_batching_config=small, warmup=False)
    return counts.reasons


PADDED = torch.tensor([[1] * 9 + [0] * 2])
#: code -> what gives it: a function that takes fixtures, or one without arguments
PROVOKED: dict[str, Callable[..., Iterable[str | None]]] = {
    "class_not_supported": lambda: declined(copy.deepcopy(build("llama").model)),
    "module_disabled": lambda: declined(build("llama"), ops="norm"),
    "no_native_library": no_native_library,
    "unsupported_activation": unsupported_activation,
    "unsupported_head_dim": lambda: declined(build("llama", head_dim=36)),
    "quantized_format": lambda: of_a_checkpoint(bits=3),
    "quantized_in_use": lambda: of_a_checkpoint(linear_mode="inference"),
    "quantized_order": lambda: of_a_checkpoint(qweight=torch.zeros(1)),
    "unsupported_projection": unsupported_projection,
    "unsupported_config": lambda: declined(build("mistral", sliding_window=1)),
    "instance_forward": instance_forward,
    "offloaded": lambda: after(lambda model: cpu_offload(model, CPU)),
    "class_forward": class_forward,
    "attention_function": attention_function,
    "experts_function": experts_function,
    "dynamic_rope": dynamic_rope,
    "autocast": autocast,
    "compiling": compiling,
    "device": lambda: now(lambda model: model.lm_head.to("meta")),
    "dtype": lambda: now(lambda model: model.lm_head.half()),
    "gradient": lambda: of_mlp(requires_grad=True),
    "dropout": lambda: now(lambda model: model.train(), architecture="gpt2"),
    "checkpointing": checkpointing,
    "hooks": lambda: after(lambda model: mlp_of(model).register_forward_hook(lambda *_: None)),
    "attention_mask": lambda: generating(attention_mask=PADDED),
    "attention_outputs": lambda: generating(output_hidden_states=True, return_dict_in_generate=True),
    "batch_size": lambda: generating(input_ids=IDS.repeat(65, 1)),
    "no_cache": lambda: generating(use_cache=False),
    "other_cache": lambda: generating(**{CACHE: DynamicCache()}),
    "edited_cache": lambda: generating(**{CACHE: cropped_unevenly()}),
    "continuous_batching": continuous_batching,
    "window_not_paged": lambda: generating(hf_fastpath.patch(build("mistral"), page_size=16, quiet=True)),
    "position_ids": lambda: generating(position_ids=torch.zeros(1, 1, 11, dtype=torch.long)),
    "unsupported_input": lambda: generating(inputs_embeds=torch.zeros(1, 5, 112)),
    "paused": being_paused,
    "generation_mode": lambda: generating(num_beams=2),
    "generation_method": generation_method,
    "synced_gpus": synced_gpus,
    "custom_sample": custom_sample,
    "compile_config": lambda: generating(compile_config=CompileConfig()),
    "partial_patch": unsupported_activation,
    "reentrant": reentrant,
    "custom_stopping_criteria": lambda: generating(stopping_criteria=StoppingCriteriaList([stop])),
    "custom_logits_processor": lambda: generating(logits_processor=LogitsProcessorList([lambda ids, scores: scores])),
}


@pytest.mark.parametrize("code", REASONS)
@pytest.mark.filterwarnings("ignore")
def test_reason_is_given(code, monkeypatch, tmp_path):
    require_native(CPU)
    assert code in PROVOKED, f"reason code {code}: show in PROVOKED what gives it"
    provoke = PROVOKED[code]
    fixtures = {"monkeypatch": monkeypatch, "tmp_path": tmp_path}
    names = provoke.__code__.co_varnames[: provoke.__code__.co_argcount]
    found = provoke(**{name: fixtures[name] for name in names})
    assert code in found, found
