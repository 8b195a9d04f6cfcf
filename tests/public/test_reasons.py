"""Every reason code, with something that a user may do to get it.

The tests of each feature show that tokens are stock's then.
"""

from __future__ import annotations

import copy
import functools
import platform
import types
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress

import pytest
import torch
import torch.distributed
from accelerate import disk_offload
from accelerate.hooks import attach_align_device_hook
from causal_lm_types import small_model
from eight_bits import block_fp8
from habits import habit_model
from models import CPU, SHORT, build, counting, prompt, require_native
from quantized import Linear4bit
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.overrides import TorchFunctionMode
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
from with_minimums import hqq

import hf_fastpath
from hf_fastpath import FallbackError
from hf_fastpath.compat import CACHE, grammars
from hf_fastpath.decode.loops.patched import paused
from hf_fastpath.decode.model.structure import ModelInRoles
from hf_fastpath.decode.placed import fetch, page_lock
from hf_fastpath.decode.placed.offloaded import Waiting
from hf_fastpath.decode.plans import plan_cache
from hf_fastpath.decode.ranks.process_group import Ranks
from hf_fastpath.native import loader
from hf_fastpath.patching.module_patch import KEY
from hf_fastpath.patching.reporting import Report
from hf_fastpath.patching.state import PatchState
from hf_fastpath.reasons import REASONS
from hf_fastpath.recording import proof
from hf_fastpath.stats import MOST_DETAILS, Stats

IDS = prompt(CPU)


def patched(architecture: str = "llama", **changes) -> nn.Module:
    return hf_fastpath.patch(build(architecture, **changes), quiet=True)


def declined(model: nn.Module, **options) -> set[str]:
    """Return the codes in the report of ``patch()``."""
    report = hf_fastpath.report(hf_fastpath.patch(model, quiet=True, **options))
    return {report.loop} | {what.split(": ")[1] for what in report.declined}


def now(change: Callable[[nn.Module], object], **changes) -> set[str]:
    """Return what the report says about the loop after a change of a patched model."""
    model = patched(**changes)
    change(model)
    return {hf_fastpath.report(model).loop}


def generating(model: nn.Module | None = None, **options) -> Iterable[str]:
    """Return the codes that a call of generate() is counted with; stock's own errors do not matter here."""
    model = patched() if model is None else model
    with counting(model) as counts, suppress(ValueError, RuntimeError, IndexError):
        model.generate(**dict(input_ids=IDS) | SHORT | options)
    return set(counts.reasons)


def cropped_unevenly() -> hf_fastpath.FastpathCache:
    model = patched()
    cache = model.generate(IDS, return_dict_in_generate=True, **SHORT)[CACHE]
    cache.crop(IDS.shape[1] - 1 - cache.get_seq_length())
    cache.layers[1].crop(-1)
    return cache


def after(change: Callable[[nn.Module], object], **options) -> Iterable[str]:
    """Return the codes of :func:`generating` after a change of the patched model."""
    model = patched()
    change(model)
    return generating(model, **options)


def of_mlp(**gradient) -> set[str | None]:
    """Return what an MLP says about a call; the reason is not counted, because stock code is meant for such calls."""
    patch, x = vars(patched().model.layers[0].mlp)[KEY], torch.zeros(1, 3, 112, **gradient)
    return {patch.reason_now(x) or patch.parameters_reason(x)}


def mlp_of(model: nn.Module) -> nn.Module:
    return model.model.layers[0].mlp


# ---- one function a code, where more than an expression is needed ------------------------------------------------


def asking(self, x):
    """A forward that cannot be recorded: numbers decide what is called."""
    return nn.Linear.forward(self, x) if bool((x == x).all()) else x


def of_a_checkpoint(**attributes) -> set[str]:
    """Make a projection of a class that GPTQ's checkpoints are loaded into."""
    cls = type("TorchLinear", (nn.Linear,), {"__module__": "gptqmodel.somewhere", "forward": asking})
    model = build("llama")
    made = cls(204, 112, bias=False)
    vars(made).update(dict(bits=4, group_size=102, g_idx=torch.zeros(204)) | attributes)
    model.model.layers[0].mlp.down_proj = made
    return declined(model)


def of_class(name: str, package: str) -> set[str]:
    """Make a projection of another package's class before patch() looks at the model."""
    model = build("llama")
    cls = type(name, (nn.Linear,), {"__module__": f"{package}.somewhere", "forward": asking})
    model.model.layers[0].mlp.down_proj = cls(204, 112, bias=False)
    return declined(model)


def of_short_blocks() -> set[str]:
    """Make a projection as bitsandbytes makes it, with a scale for each 32 weights."""
    model, layer = build("llama"), Linear4bit(torch.randn(112, 204), "nf4", 32)
    model.model.layers[0].mlp.down_proj = layer
    return declined(model)


def of_fixed_scales() -> set[str]:
    """Make a projection in FP8 whose input is rounded by a scale that the checkpoint holds."""
    model, (layer, _) = build("llama"), block_fp8(torch.randn(112, 204))
    layer.activation_scheme = "static"
    model.model.layers[0].mlp.down_proj = layer
    return declined(model)


def of_hqq(dtype: torch.dtype, **meta) -> set[str]:
    """Make a projection as HQQ makes it."""
    model, (layer, _) = build("llama", hidden_size=128, intermediate_size=256), hqq(128, 256, 4, 64, dtype, **meta)
    model.model.layers[0].mlp.down_proj = layer
    return declined(model)


def of_package(package: str, role: str = "up_proj", **attributes) -> set[str]:
    """Make a projection of another package's class, or of torch's with attributes that this package gives it."""

    def replace(model):
        projection = getattr(mlp_of(model), role)
        entries = {"__module__": package, "forward": asking}
        projection.__class__ = type("Linear", (nn.Linear,), entries) if package else nn.Linear
        vars(projection).update(attributes)

    return after(replace)


def _adapter_names_pre_forward_hook(module, args):
    """The name of PEFT's hook for a call with an adapter for each row."""


def adapter_names() -> set[str]:
    return after(lambda model: mlp_of(model).up_proj.register_forward_pre_hook(_adapter_names_pre_forward_hook))


def no_native_library(monkeypatch):
    """The user asks for the references."""
    monkeypatch.setenv("HF_FASTPATH_NATIVE", "0")
    monkeypatch.setattr(loader, "_status", {"cpu": loader.Status("cpu", "reference", "")})
    return declined(build("llama"))


def unsupported_platform(monkeypatch):
    """A patched model came here from another machine."""
    model = patched()
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    monkeypatch.setattr(loader, "_status", {"cpu": loader.Status("cpu", "reference", "")})
    loader.ensure("cpu")
    return {hf_fastpath.report(model).loop}


def unsupported_activation(monkeypatch):
    model = build("llama").model  # which generates nothing, and is therefore not recorded
    model.layers[0].mlp.act_fn = nn.Tanh()
    return declined(model)


def unsupported_projection(monkeypatch):
    def replace(model):
        mlp_of(model).up_proj.__class__ = type("Adapted", (nn.Linear,), {"forward": asking})

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


class Grammar:
    """A stand-in for a processor that holds a text to a grammar."""

    def __call__(self, input_ids, scores):
        return scores


def grammar_mask(monkeypatch):
    monkeypatch.setattr(grammars, "_GRAMMARS", {(Grammar.__module__, Grammar.__qualname__)})
    return generating(logits_processor=LogitsProcessorList([Grammar()]))


def being_paused(monkeypatch):
    model = patched()
    with paused(model):
        return {vars(mlp_of(model))[KEY].reason_now(torch.zeros(1, 1, 112))}


def generation_method(monkeypatch):
    def override(model):
        method = type(model)._update_model_kwargs_for_generation
        own = functools.wraps(method)(lambda *args, **kwargs: method(*args, **kwargs))
        model._update_model_kwargs_for_generation = types.MethodType(own, model)

    return after(override)


def custom_sample(monkeypatch):
    real = GenerationMixin._sample

    @functools.wraps(real)
    def own(self, *args, **kwargs):
        return real(self, *args, **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaForCausalLM, "_sample", own, raising=False)
    return now(lambda model: None)


class Deaf:
    """A streamer of the user's own."""

    def put(self, value):
        pass

    def end(self):
        pass


def busy(monkeypatch):
    monkeypatch.setattr(plan_cache, "MAX_CALLS", 0)
    return generating()


def synced_gpus(monkeypatch, tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        return generating(synced_gpus=True)
    finally:
        torch.distributed.destroy_process_group()


class TwoRanks(Ranks):
    """This process, and another one that has a reason for stock code."""

    transport = "nothing"

    def __init__(self):
        self.rank, self.size = 0, 2

    def call(self, what):
        return nullcontext()

    def check_arguments(self, what, facts, kind=None):
        pass

    def told(self, facts, kind):
        return [facts, [1]]


def other_rank(monkeypatch):
    for kind in (ModelInRoles, PatchState):
        monkeypatch.setattr(kind, "ranks", TwoRanks())
    return generating()


def stop(ids, scores, **kwargs):
    """Never stop: the user has a criterion of their own."""
    return torch.zeros(len(ids), dtype=torch.bool)


def continuous_batching(monkeypatch):
    model = patched()
    small = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
    config = GenerationConfig(do_sample=False, pad_token_id=0, max_new_tokens=2)
    with counting(model) as counts:
        given = dict(generation_config=config, continuous_batching_config=small, warmup=False)
        model.generate_batch(IDS.tolist(), record_timestamps=True, **given)
    return counts.reasons


def not_shared(monkeypatch):
    model = hf_fastpath.patch(build("llama"), quiet=True, share_steps=True, page_size=16)
    return generating(model, input_ids=IDS)


def model_forward(monkeypatch):
    return now(lambda model: setattr(model, "forward", lambda *args, **kwargs: None))


def autocast_left_out(monkeypatch):
    """A model's forward is under autocast, as accelerate puts it."""

    def wrap(model):
        cast = torch.autocast(device_type="cpu", dtype=torch.bfloat16)(model.forward.__func__)
        model.forward = types.MethodType(cast, model)

    return after(wrap)


def sharded(monkeypatch, tmp_path):
    """A weight is spread over processes after patch()."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))

        def spread(model):
            linear = mlp_of(model).down_proj
            linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh))

        return now(spread)
    finally:
        torch.distributed.destroy_process_group()


def on_disk(monkeypatch, tmp_path):
    return after(lambda model: disk_offload(model, tmp_path, CPU))


def in_host_memory(monkeypatch, error: str | None):
    """A layer's weights wait in host memory, which claims to be another device than the CPU."""
    monkeypatch.setattr(Waiting, "is_elsewhere", lambda waiting, tensor: True)
    monkeypatch.setattr(fetch, "KEPT_BYTES", 0)
    monkeypatch.setattr(page_lock, "lock_pages", lambda *_: error)
    monkeypatch.setattr(page_lock, "unlock_pages", lambda *_: None)
    model = patched()
    attach_align_device_hook(model.model.layers[1], CPU, offload=True)
    codes = generating(model)
    hf_fastpath.unpatch(model)  # lets go of the locks as long as they are ours
    return codes


def over_the_bus(monkeypatch):
    return in_host_memory(monkeypatch, None)


def not_page_locked(monkeypatch):
    return in_host_memory(monkeypatch, "no room")


PADDED = torch.tensor([[1] * 9 + [0] * 2])
#: code -> function that provokes it, with fixtures or without arguments
PROVOKED: dict[str, Callable[..., Iterable[str | None]]] = {
    "class_not_supported": lambda: declined(copy.deepcopy(build("llama").model)),
    "module_disabled": lambda: declined(build("llama"), ops="norm"),
    "no_native_library": no_native_library,
    "unsupported_platform": unsupported_platform,
    "unsupported_device": lambda: {
        hf_fastpath.report(hf_fastpath.patch(build("llama"), weights="int8", quiet=True).to("meta")).loop
    },
    "unsupported_activation": unsupported_activation,
    "unsupported_head_dim": lambda: declined(build("llama", head_dim=514)),
    "adapter": lambda: of_package("peft.tuners.lora.layer"),
    "adapter_names": adapter_names,
    "compressed_tensors": lambda: of_package("compressed_tensors.linear.compressed_linear"),
    "quantized_format": lambda: of_a_checkpoint(bits=3),
    "quantized_blocks": of_short_blocks,
    "quantized_axis": lambda: of_hqq(torch.float16, axis=0),
    "quantized_float32": lambda: of_hqq(torch.float32),
    "quantized_activations": of_fixed_scales,
    "quantized_fp8": lambda: of_package("transformers.integrations.finegrained_fp8", "down_proj"),
    "quantized_kernel": lambda: of_class("MarlinLinear", "gptqmodel"),
    "quantized_in_use": lambda: of_a_checkpoint(linear_mode="inference"),
    "quantized_order": lambda: of_a_checkpoint(qweight=torch.zeros(1)),
    "unsupported_projection": unsupported_projection,
    "unsupported_config": lambda: declined(build("mistral", sliding_window=1)),
    "instance_forward": instance_forward,
    "model_forward": model_forward,
    "sharded": sharded,
    "autocast_left_out": autocast_left_out,
    "offloaded": on_disk,
    "over_the_bus": over_the_bus,
    "not_page_locked": not_page_locked,
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
    "not_shared": not_shared,
    "window_not_paged": lambda: generating(hf_fastpath.patch(build("mistral"), page_size=16, quiet=True)),
    "position_ids": lambda: generating(position_ids=torch.zeros(1, 1, 11, dtype=torch.long)),
    "unsupported_input": lambda: generating(patched("gpt2"), token_type_ids=torch.zeros_like(IDS)),
    "paused": being_paused,
    "generation_mode": lambda: generating(assistant_early_exit=1),
    "generation_method": generation_method,
    "synced_gpus": synced_gpus,
    "other_rank": other_rank,
    "custom_sample": custom_sample,
    "compile_config": lambda: generating(compile_config=CompileConfig()),
    "partial_patch": lambda: declined(build("gpt2", n_embd=84, n_head=4)),
    "busy": busy,
    "custom_streamer": lambda: generating(streamer=Deaf()),
    "custom_stopping_criteria": lambda: generating(stopping_criteria=StoppingCriteriaList([stop])),
    "grammar_mask": grammar_mask,
    "custom_logits_processor": lambda: generating(logits_processor=LogitsProcessorList([lambda ids, scores: scores])),
}


def nonfinite_logits(monkeypatch):
    return after(lambda model: mlp_of(model).down_proj.weight.data.fill_(float("nan")))


class Asking(nn.Module):
    """A norm that looks at its numbers."""

    def forward(self, x):
        return x if x.sum().item() else -x


def not_recorded():
    model = hf_fastpath.patch(small_model("glm4"), quiet=True)
    model.model.norm = Asking()
    model.generate(IDS % 160, **SHORT)
    return hf_fastpath.report(model).stats["reasons"]


def not_proven(monkeypatch):
    model = hf_fastpath.patch(small_model("glm4"), quiet=True)
    for name in ("difference", "_difference_at_once"):
        monkeypatch.setattr(proof, name, lambda *_: 1.0)
    model.generate(IDS % 160, **SHORT)
    return hf_fastpath.report(model).stats["reasons"]


def changing_values():
    """A number that the forward reads is another one in every call."""
    model = hf_fastpath.patch(small_model("glm4"), quiet=True)
    for place in range(plan_cache.MAX_RECORDINGS + 2):
        model.model.layers[0].self_attn.scaling = 0.1 + 0.01 * place
        model.generate(IDS % 160, **SHORT)
    return hf_fastpath.report(model).stats["reasons"]


class Looking(TorchFunctionMode):
    """A mode that counts calls, as profilers do."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


def torch_mode():
    model = patched()
    with Looking():
        return generating(model)


def replaced_function(monkeypatch):
    model, silu = patched(), nn.functional.silu
    monkeypatch.setattr(nn.functional, "silu", lambda x, inplace=False: silu(x))
    return generating(model)


def text_length():
    """Each of the first lengths is a number that the model computes with."""
    return generating(hf_fastpath.patch(habit_model("as_float_early"), quiet=True), input_ids=IDS % 90)


PROVOKED |= {each.__name__: each for each in (text_length, changing_values, torch_mode, replaced_function)}
PROVOKED |= {"nonfinite_logits": nonfinite_logits, "not_recorded": not_recorded, "not_proven": not_proven}
#: codes that are about one thing, which their own name says
OF_NOTHING_ELSE = {
    "compiling",
    "gradient",
    "paused",
    "busy",
    "autocast_left_out",
    "synced_gpus",
    "compile_config",
}
#: code -> what it names in this case: an argument, a setting, a function, or a module and its class
NAMES = {
    "continuous_batching": "record_timestamps",
    "not_shared": "a KV cache in pages",
    "class_not_supported": "LlamaModel",
    "module_disabled": "ops=['norm']",
    "no_native_library": "model.layers.0.mlp: LlamaMLP",
    "unsupported_platform": "device cpu",
    "unsupported_device": "quantized weights on meta",
    "unsupported_activation": "layers.0.mlp.act_fn: Tanh",
    "unsupported_head_dim": "model.layers.0.self_attn: LlamaAttention, head_dim=514",
    "unsupported_projection": "model.layers.0.mlp.up_proj: test_reasons.Adapted",
    "adapter": "model.layers.0.mlp.up_proj: peft.tuners.lora.layer.Linear",
    "adapter_names": "hook test_reasons._adapter_names_pre_forward_hook",
    "compressed_tensors": "model.layers.0.mlp.up_proj: compressed_tensors.linear.compressed_linear.Linear",
    "quantized_format": "model.layers.0.mlp.down_proj: gptqmodel.somewhere.TorchLinear",
    "quantized_order": "model.layers.0.mlp.down_proj: gptqmodel.somewhere.TorchLinear",
    "quantized_blocks": "model.layers.0.mlp.down_proj: bitsandbytes.somewhere.Linear4bit",
    "quantized_axis": "model.layers.0.mlp.down_proj: hqq.core.quantize.HQQLinear",
    "quantized_float32": "model.layers.0.mlp.down_proj: hqq.core.quantize.HQQLinear",
    "quantized_activations": "model.layers.0.mlp.down_proj: transformers.integrations.finegrained_fp8.FP8Linear",
    "quantized_fp8": "model.layers.0.mlp.down_proj: transformers.integrations.finegrained_fp8.Linear",
    "quantized_kernel": "model.layers.0.mlp.down_proj: gptqmodel.somewhere.MarlinLinear",
    "quantized_in_use": "model.layers.0.mlp.down_proj: gptqmodel.somewhere.TorchLinear",
    "unsupported_config": "sliding_window=1",
    "instance_forward": "model.layers.0.mlp: LlamaMLP, forward is test_reasons.instance_forward",
    "model_forward": "LlamaForCausalLM, forward is test_reasons.model_forward",
    "sharded": "model.layers.0.mlp.down_proj: Linear, weight is torch.distributed.tensor.DTensor",
    "offloaded": "model.embed_tokens: Embedding",
    "over_the_bus": "GB a step",
    "not_page_locked": "GB of host memory: no room",
    "class_forward": "model.layers.0.mlp: LlamaMLP, forward is test_reasons.class_forward",
    "attention_function": "attn_implementation='sdpa', test_reasons.attention_function",
    "experts_function": "test_reasons.experts_function",
    "dynamic_rope": "model.rotary_emb: LlamaRotaryEmbedding, rope_type='dynamic'",
    "autocast": "torch.autocast('cpu')",
    "device": "lm_head.weight is meta",
    "dtype": "lm_head.weight is torch.float16",
    "dropout": "transformer.drop: Dropout, p=0.1",
    "checkpointing": "model.layers.0: LlamaDecoderLayer, gradient_checkpointing=True",
    "hooks": "model.layers.0.mlp: LlamaMLP, hook test_reasons",
    "attention_mask": "torch.int64 (1, 11)",
    "attention_outputs": "output_hidden_states",
    "batch_size": "65 sequences, 64 at most",
    "no_cache": "use_cache=False",
    "other_cache": "DynamicCache",
    "edited_cache": "its layers hold ",
    "window_not_paged": "page_size=16",
    "position_ids": "torch.int64 (1, 1, 11)",
    "unsupported_input": "token_type_ids",
    "generation_mode": "another way to draft",
    "generation_method": "_update_model_kwargs_for_generation is ",
    "other_rank": "rank 1",
    "custom_sample": "_sample",
    "partial_patch": "unsupported_head_dim: transformer.h.0.attn: GPT2Attention, head_dim=21",
    "custom_streamer": "test_reasons.Deaf",
    "custom_stopping_criteria": "test_reasons.stop",
    "grammar_mask": "test_reasons.Grammar",
    "custom_logits_processor": "test_reasons.<lambda>",
    "nonfinite_logits": "generate()",
    "not_recorded": "at test_reasons.py:",
    "text_length": "habits.py:",
    "changing_values": "model.layers.0.self_attn.scaling",
    "torch_mode": "test_reasons.Looking",
    "replaced_function": "torch.nn.functional.silu is test_reasons.replaced_function",
    "not_proven": "its logits differ from stock's by 1.0e+00 of their size",
}


def provoke(code: str, monkeypatch, tmp_path) -> Iterable[str | None]:
    require_native(CPU)
    assert code in PROVOKED, f"reason code {code}: show in PROVOKED what gives it"
    function = PROVOKED[code]
    fixtures = {"monkeypatch": monkeypatch, "tmp_path": tmp_path}
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return function(**{name: fixtures[name] for name in names})


@pytest.mark.parametrize("code", REASONS)
@pytest.mark.filterwarnings("ignore")
def test_reason_is_given_and_names_what_it_speaks_of(code, monkeypatch, tmp_path):
    spoken, note, report_of = [], Stats.note, Report.of

    def noting(self, reason, *model):
        note(self, reason, *model)
        spoken.extend(self.details.get(code, []))

    def reporting(*given):
        made = report_of(*given)
        known = [known for key, known in made.details.items() if key.endswith(f": {code}")]
        spoken.extend(what for each in known for what in each)
        assert all(each[0] in str(made) for each in known)
        return made

    monkeypatch.setattr(Stats, "note", noting)
    monkeypatch.setattr(Report, "of", reporting)
    found = provoke(code, monkeypatch, tmp_path)
    assert code in found, found
    if code not in OF_NOTHING_ELSE:
        assert any(NAMES[code] in what for what in spoken), spoken


def test_strict_error_names_the_argument():
    model = hf_fastpath.patch(build("gpt2"), quiet=True, strict=True)
    with pytest.raises(FallbackError, match=r"unsupported_input \(token_type_ids\)"):
        model.generate(IDS, token_type_ids=torch.zeros_like(IDS), **SHORT)
    mlp = model.transformer.h[1].mlp
    mlp.register_forward_hook(lambda *_: None)
    with pytest.raises(FallbackError, match=r"hooks \(transformer.h.1.mlp: GPT2MLP, hook test_reasons"):
        model.generate(IDS, **SHORT)


def test_details_stay_few():
    """However many modules and calls a code is about, details stay few; a code counts once for each call."""
    model = patched(num_hidden_layers=12)
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda *_: None)
    cache = hf_fastpath.FastpathCache(model.config)
    with torch.no_grad():
        model(IDS, **{CACHE: cache})
        for _ in range(2):  # in generate() the modules step aside
            model(IDS[:, :1], **{CACHE: cache})
    stats = hf_fastpath.report(model).stats
    assert set(stats["reasons"]) == {"hooks"} and len(stats["details"]["hooks"]) == MOST_DETAILS
    assert len({*stats["details"]["hooks"]}) == MOST_DETAILS and "and 7 more" in str(hf_fastpath.report(model))
