"""Reason codes: why a call, a module or a token ran stock code. ``docs/reason-codes.md`` says the same."""

from __future__ import annotations

#: code -> what it means and what the user can do about it
REASONS: dict[str, str] = {
    # a module keeps its stock forward (decided at patch())
    "class_not_supported": "no architecture file covers this class",
    "module_disabled": "left out by patch(ops=...)",
    "no_native_library": "no compiled kernels for this device: see `python -m hf_fastpath info`",
    "unsupported_activation": "the activation is not one the kernels have",
    "unsupported_head_dim": "head_dim is not 32 to 256 in steps of 8",
    "unsupported_projection": "a projection is not exactly nn.Linear or Conv1D (LoRA, quantized, sharded, ...)",
    "unsupported_config": "the config asks for attention arithmetic that the kernels do not do",
    "instance_forward": "a module inside the fused span has a forward of its own on the instance",
    "class_forward": "other code has replaced the forward of a class, or a function that it calls",
    "attention_function": "attention runs through a function that is not transformers' own",
    "dynamic_rope": "the rotary embedding changes with the sequence length",
    # a call runs stock code (decided at each call)
    "autocast": "autocast is active: it would change the types the kernels see",
    "compiling": "torch.compile is tracing: it gets the stock code",
    "device": "tensors are on devices without kernels, or on different ones",
    "dtype": "dtype is not float32, float16 or bfloat16, or the types are mixed",
    "gradient": "gradients are needed and the fused op has no backward",
    "dropout": "dropout is active inside the fused span",
    "checkpointing": "activation checkpointing is active (train mode): stock runs without a KV cache",
    "hooks": "a module inside the fused span has forward hooks",
    "attention_mask": "this attention mask is not plain left padding",
    "attention_outputs": "attentions or hidden states were requested",
    "batch_size": "more than 16 rows at once, or more than max_batch_size",
    "no_cache": "no KV cache is in use (use_cache=False)",
    "other_cache": "the KV cache is not a FastpathCache",
    "position_ids": "position ids are not one row a sequence",
    "unsupported_input": "inputs_embeds, token_type_ids or encoder states were passed",
    # the decode loop steps aside (decided at each generate())
    "paused": "the patch is switched off for this call (verify)",
    "assistant": "the model is the assistant of assisted decoding",
    "generation_mode": "beam search, assisted or another loop than greedy search and sampling",
    "generation_method": "a method that generate() calls for every token is overridden (prompt tuning, ...)",
    "synced_gpus": "generation is synchronized over several processes",
    "custom_sample": "the model class has a decode loop of its own",
    "compile_config": "a compile_config was given",
    "partial_patch": "some layer of the model could not be patched",
    "reentrant": "generate() was called from inside this model's own decode loop",
    # the fast loop runs, but cannot run ahead of the device
    "custom_stopping_criteria": "a stopping criterion of the user's own: the host waits for every token",
    "custom_logits_processor": "a logits processor of the user's own: the host waits for every token",
}


def check(code: str) -> str:
    """``code`` itself.

    Raises:
        KeyError: it is not a known reason code.
    """
    if code not in REASONS:
        raise KeyError(f"unknown reason code {code!r}: add it to hf_fastpath/reasons.py")
    return code
