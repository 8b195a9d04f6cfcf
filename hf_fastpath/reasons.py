"""Reason codes: why a call, a module or a token ran stock code, and what helps. ``docs/make_pages.py`` makes
``docs/reason-codes.md`` from this table."""

from __future__ import annotations

from typing import Any, NamedTuple


class Reason(NamedTuple):
    """What a reason code means and what the user can do about it.

    Attributes:
        meaning: why stock code runs.
        remedy: what makes it fast, or that nothing has to be done.
    """

    meaning: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.meaning}; {self.remedy}"


REASONS: dict[str, Reason] = {
    # a module keeps its stock forward (decided at patch())
    "class_not_supported": Reason(
        "no architecture file covers this class",
        "use a family that `python -m hf_fastpath info` lists, or write its architecture file",
    ),
    "module_disabled": Reason("left out by patch(ops=...)", "name it in ops, or leave ops out"),
    "no_native_library": Reason(
        "no compiled kernels for this device", "`python -m hf_fastpath info` says what the build lacks"
    ),
    "unsupported_platform": Reason(
        "no kernels are written for this operating system or processor",
        "use Linux on x86-64, or an NVIDIA GPU under Linux",
    ),
    "unsupported_device": Reason(
        "no kernels are written for this kind of device (Apple's MPS, Intel's XPU, AMD's ROCm, ...)",
        "move the model to an NVIDIA GPU or to a CPU of x86-64",
    ),
    "unsupported_activation": Reason(
        "the kernels do not have the activation", "nothing to set: it belongs to the model"
    ),
    "unsupported_head_dim": Reason("head_dim is odd or above 512", "nothing to set: it belongs to the model"),
    "not_recorded": Reason(
        "no architecture file covers the model, and its own forward could not be written down as a list of calls",
        "nothing to set: it belongs to the model's code, at the line that is named if there is one",
    ),
    "changing_values": Reason(
        "a Python value that the model's forward reads is another one in every call: a step is recorded of each, and "
        "eight are kept",
        "set the value that is named to one of a few, or make it a tensor that is edited in place",
    ),
    "text_length": Reason(
        "a step of the model differs with the length of the text in a way that could not be written down",
        "nothing to set: it belongs to the model's code, at the line that is named; shorter texts may be fast",
    ),
    "not_proven": Reason(
        "the step that was recorded from the model's own forward, as the model was then, gave other logits than the "
        "model on its first tokens",
        "nothing to set: it is tried anew when a value changes that the forward reads; else report it",
    ),
    "unsupported_projection": Reason(
        "a projection or a table of embeddings is not exactly torch's or transformers' own, experts are not of their "
        "family's class, or a weight is not a plain tensor",
        "leave out the code that puts the named class there",
    ),
    "adapter": Reason(
        "layers of an adapter (LoRA, DoRA, IA3, ...) stand around a model's own, and the kernels of its family read "
        "plain weights",
        "merge it for good, model = model.merge_and_unload(): merge_adapter() leaves its layers in place",
    ),
    "adapter_names": Reason(
        "the call names an adapter for each of its rows (adapter_names=), and PEFT's layers sort the rows by these",
        "call generate() for the rows of one adapter at a time, behind model.set_adapter(name)",
    ),
    "quantized_format": Reason(
        "another package has quantized the weights, and patch() does not repack them: they have no exact counterpart "
        "among our formats (3 bits, groups of 16 weights, layers that are no linear ones, ...)",
        "load unquantized weights and patch(model, weights=...)",
    ),
    "compressed_tensors": Reason(
        "compressed-tensors keeps weights in a layout of its own, and adds forwards and hooks to the modules",
        "load it with quantization_config=CompressedTensorsConfig(run_compressed=False): it dequantizes",
    ),
    "quantized_order": Reason(
        "the checkpoint's groups of weights, by its g_idx, do not have group_size inputs each",
        "quantize it anew (its g_idx is damaged), or use unquantized weights with patch(model, weights=...)",
    ),
    "quantized_blocks": Reason(
        "the checkpoint's rows are no whole number of blocks of weights that share a scale, so that a block goes on in "
        "the next row, or its blocks are shorter than 64 weights",
        "use a blocksize from 64 on that divides rows, or unquantized weights with patch(model, weights=...)",
    ),
    "quantized_axis": Reason(
        "HQQ has grouped weights of different rows (axis=0), so that no two neighbors of a row share a scale",
        "quantize with axis=1, or use unquantized weights with patch(model, weights=...)",
    ),
    "quantized_float32": Reason(
        "scales, zero points or minimums of the checkpoint's weights of four bits or fewer are float32 numbers that "
        "float16 does not hold",
        "load it, or quantize it, with dtype=torch.bfloat16 or torch.float16",
    ),
    "quantized_activations": Reason(
        "the checkpoint's products round their inputs in a way that ours do not: by scales that are fixed beforehand, "
        "with zero points, all rows by one scale, or to four bits",
        "load a checkpoint in 16 bits, or with dynamic activations; then patch(model, weights='int8')",
    ),
    "quantized_fp8": Reason(
        "the checkpoint keeps weights in FP8 that patch() does not repack: experts of a mixture, blocks that are not "
        "of 128 inputs, or FP4 beside them",
        "load it with FineGrainedFP8Config(dequantize=True), then patch(model, weights='fp8')",
    ),
    "quantized_kernel": Reason(
        "gptqmodel or optimum-quanto has put the weights into the order of a kernel of its own (Marlin, ExLlama, AWQ, "
        "...) as it loaded them",
        "GPTQConfig(bits=4, backend='gptq_torch'), AwqConfig(backend='torch_awq'), quanto in bfloat16",
    ),
    "quantized_in_use": Reason(
        "a call has turned the checkpoint's quantized weights into another layout",
        "patch(model) right after loading it, before its first call",
    ),
    "unsupported_config": Reason(
        "the model asks for arithmetic or a structure that is not covered (a soft-cap of 0, a factor that is no "
        "number, a layer that comes twice, ...)",
        "nothing to set: it belongs to the model",
    ),
    "instance_forward": Reason(
        "a module inside the fused span has a forward of its own on the instance",
        "leave out what sets it, or `del module.forward` if it is yours",
    ),
    "model_forward": Reason(
        "the model itself has a forward of its own on the instance, which does more for generate() than pass its "
        "arguments on to the forward of the class",
        "end it in `return inner(*args, **kwargs)` for calls without labels, or generate() before it is set",
    ),
    "offloaded": Reason(
        "accelerate brings weights for every call that our steps do not bring: from disk, tables of embeddings, or to "
        "another GPU than that of the embeddings",
        "load the model where it fits: a smaller dtype, or a device_map of layers on GPUs and the CPU",
    ),
    "sharded": Reason(
        "the weights are spread over several processes in a way that is not covered (FSDP, DeepSpeed ZeRO-3, ranks "
        "that do not divide heads or KV heads, or styles of a plan that docs/design/several_gpus.md does not list)",
        "load the model with its own tp_plan over ranks that divide its heads, or whole on one device",
    ),
    "class_forward": Reason(
        "other code has replaced the forward of a class, or a function that it calls",
        "leave out the package that replaces it",
    ),
    "attention_function": Reason(
        "attention runs through a function that is not transformers' own",
        "load the model with attn_implementation='sdpa' or 'eager'",
    ),
    "experts_function": Reason(
        "experts run through a function that is not transformers' own",
        "load the model with experts_implementation='grouped_mm' or 'eager'",
    ),
    "dynamic_rope": Reason(
        "the rotary embedding changes with the sequence length",
        "set rope_type to default, linear, llama3 or yarn if the model allows it",
    ),
    # a call runs stock code (decided at each call)
    "autocast": Reason(
        "autocast is active, and would change the types that the kernels see",
        "load the model in half precision, without autocast (in a trainer's arguments: bf16=False)",
    ),
    "torch_mode": Reason(
        "a TorchFunctionMode or TorchDispatchMode is active, which sees or changes PyTorch's calls one by one",
        "call generate() outside of the `with` block of the mode that is named",
    ),
    "replaced_function": Reason(
        "other code has replaced a function of PyTorch's that the model or generate() calls",
        "put PyTorch's function back, or leave out what replaces it",
    ),
    "compiling": Reason("torch.compile is tracing: it gets the stock code", "do not compile a patched model"),
    "device": Reason(
        "tensors are on devices without kernels, or on different ones in another way than by layers on GPUs",
        "move the whole model and the inputs to one CPU or CUDA device, or each layer onto one GPU",
    ),
    "dtype": Reason(
        "dtype is not float32, float16 or bfloat16, or the types are mixed",
        "bring all of it to one of these: model.to(torch.bfloat16)",
    ),
    "gradient": Reason(
        "gradients are needed and the fused op has no backward", "use torch.no_grad() unless this is training"
    ),
    "dropout": Reason("dropout is active inside the fused span", "call model.eval()"),
    "checkpointing": Reason(
        "activation checkpointing is active (train mode): stock runs without a KV cache", "call model.eval()"
    ),
    "hooks": Reason("a module inside the fused span has forward hooks", "remove the hooks"),
    "attention_mask": Reason(
        "the attention mask is not plain left padding, zeros in front of ones in every row; or it came with a single "
        "token outside of greedy search and sampling, where the kernels take none; or the mask over what an encoder "
        "has read is not one run of ones in every row; or there is padding, and the model's routers read the mask, "
        "or its attention does not",
        "pad on the left (tokenizer.padding_side = 'left'), for an encoder on one side; use greedy search",
    ),
    "attention_outputs": Reason(
        "attentions, hidden states or router logits were requested",
        "leave out output_attentions, output_hidden_states and output_router_logits",
    ),
    "batch_size": Reason(
        "more sequences than max_batch_size (64), 16 of most mixtures on a GPU, or 16 rows outside of the loop",
        "generate in smaller batches",
    ),
    "no_cache": Reason("no KV cache is in use (use_cache=False)", "leave use_cache on"),
    "other_cache": Reason(
        "the KV cache is not a FastpathCache of this model and these sequences",
        "pass none, or hf_fastpath.FastpathCache(model.config)",
    ),
    "edited_cache": Reason(
        "the layers of the KV cache differ in the number of positions or sequences or in dtype, or a layer with a "
        "window does not hold its newest positions: keys and values were assigned, or layers cropped, one by one",
        "edit all layers alike; in layers with a sliding window, set cumulative_length as well",
    ),
    "continuous_batching": Reason(
        "generate_batch() was asked for something, or is of a model, that hf_fastpath.batch() does not do as it does: "
        "stock's attention runs over a paged cache of transformers' own, of many requests in one row",
        "leave out what is named, or call hf_fastpath.batch(model, prompts)",
    ),
    "position_ids": Reason(
        "position_ids are not int64 or int32 with a row for every sequence, beside input_ids; or max_length is greater "
        "than the table of positions that a model has computed, which its own code may make longer; or a forward in a "
        "loop of your own is given none, and the model's code does not count on from what the cache holds",
        "leave them out: generate() makes them; in such a loop, give them; ask for fewer tokens",
    ),
    "unsupported_input": Reason(
        "generate() or a module got an argument that our loops do not take (token_type_ids, encoder states, ...), or "
        "that new tokens of a model with images or sound read, or one that is not what they take",
        "pass int64 or int32 input_ids and an attention_mask, and leave out the argument that is named",
    ),
    # the decode loop steps aside (decided at each generate())
    "paused": Reason("the patch is switched off for this call (verify)", "nothing to do: it comes back by itself"),
    "generation_mode": Reason(
        "beam search of a model spread over processes, drafts for a model that has an encoder or reads images or "
        "sound, or drafts by an early exit, with another tokenizer or an ensemble weight",
        "use num_beams=1, and an assistant of the model's vocabulary: other loops run over patched modules",
    ),
    "other_rank": Reason(
        "the model is spread over several processes, and another of them has a reason for stock code: all have to run "
        "the same code",
        "see report(model) on the rank that is named",
    ),
    "generation_method": Reason(
        "a method that generate() calls for every token is overridden by code that nobody has looked at, which gave a "
        "token more than itself and its position, or cannot be asked in this loop (a class of the user's, prompts that "
        "PEFT has learned, ...); or by code that drops the cache in this call",
        "leave out what overrides the method; where it drops the cache, ask for fewer tokens",
    ),
    "synced_gpus": Reason("generation is synchronized over several processes", "pass synced_gpus=False"),
    "custom_sample": Reason("the model class has a decode loop of its own", "nothing to set: it belongs to the model"),
    "compile_config": Reason("a compile_config was given", "leave it out"),
    "partial_patch": Reason(
        "some layer of the model could not be patched", "see the reasons of its modules in report(model)"
    ),
    "busy": Reason(
        "as many calls of generate() run on this model at once as the decode loop takes (4, with those of other "
        "threads and those that a callback makes)",
        "let calls wait for each other, or put their prompts into one batch",
    ),
    "not_shared": Reason(
        "the rows of this model or call cannot be slots that texts take and leave (recurrent states, an encoder, "
        "a cache in pages, steps that differ with the length, ...): it shares no steps",
        "nothing to set: it runs as it does alone; patch() without page_size= if pages are named",
    ),
    # the fast loop runs, but cannot run ahead of the device, or not over pages
    "custom_stopping_criteria": Reason(
        "a stopping criterion of the user's own: the host waits for every token",
        "use one of transformers' own criteria if it does the same",
    ),
    "grammar_mask": Reason(
        "a processor holds the text to a grammar: the host needs every token before the next one, and fills the mask "
        "while the step runs on a GPU",
        "nothing to do",
    ),
    "autocast_left_out": Reason(
        "a trainer has put the model's forward under autocast; new tokens are computed in float32, as the weights are, "
        "which is more exact",
        "nothing to do",
    ),
    "over_the_bus": Reason(
        "weights that the device_map leaves in host memory are copied to the GPU for every step, ahead of the calls "
        "that read them: the bus bounds the speed",
        "put more layers on the GPU: a smaller dtype, or more GPU memory",
    ),
    "not_page_locked": Reason(
        "CUDA has not page-locked the weights in host memory: copies wait for the host, and steps are not captured",
        "leave more memory free for the process, or make room for locked pages in its container",
    ),
    "window_not_paged": Reason(
        "page_size was given, and layers with a sliding window keep a ring of window + 16 positions each instead",
        "nothing to do: these rings do not grow, but sequences and copies do not share them",
    ),
    "custom_streamer": Reason(
        "a streamer of the user's own: the host waits for every token",
        "use one of transformers' own (TextIteratorStreamer), and do the work in the thread that reads it",
    ),
    "nonfinite_logits": Reason(
        "the model's logits hold NaN or infinity: every token from there on is arbitrary, here and in stock code, and "
        "the two may differ",
        "look for NaN in the weights and inputs; with float16, load the model in bfloat16 or float32",
    ),
    "custom_logits_processor": Reason(
        "a logits processor of the user's own: the host waits for every token",
        "use one of transformers' own processors if it does the same",
    ),
}


class Cause(str):
    """A reason code that also says what it is about; it compares and is used like the plain code.

    Args:
        code: a code of :data:`REASONS`.
        what: the argument, setting, function or class, and its value.
        module: the module, or None.

    Raises:
        KeyError: the code is not a known reason code.
    """

    what: str
    module: Any

    def __new__(cls, code: str, what: str = "", module: Any = None) -> Cause:
        made = super().__new__(cls, check(code))
        made.what, made.module = what, module
        return made


#: where the classes are that torch and transformers show to users
_SHOWN = (
    *("torch.nn.modules.", "torch.nn.parameter", "transformers.models.", "transformers.activations"),
    *("transformers.pytorch_utils", "transformers.cache_utils", "hf_fastpath."),
)


def class_name(thing: Any) -> str:
    """Return the name of an object's class: of a class that torch or transformers shows to users, its bare name; of any
    other, also where it is defined, as classes of many packages are called Linear."""
    cls = type(thing)
    home = cls.__module__
    is_shown = home in ("builtins", "torch") or home.startswith(_SHOWN)
    return cls.__qualname__ if is_shown else f"{home}.{cls.__qualname__}"


def named(reason: str, model: Any) -> Cause:
    """Return ``reason`` with the module replaced by the module's name inside ``model`` and its class."""
    what, module = getattr(reason, "what", ""), getattr(reason, "module", None)
    if module is None:
        return Cause(reason, what)
    names = () if model is None else model.named_modules()
    name = next((name for name, found in names if found is module), "")
    where = f"{name}: {class_name(module)}" if name else class_name(module)
    return Cause(reason, f"{where}, {what}" if what else where)


def explained(code: str, what: str = "") -> str:
    """Return ``code`` with what it is about, what it means and what helps."""
    what = what or getattr(code, "what", "")
    return f"{code} ({what}): {REASONS[code]}" if what else f"{code}: {REASONS[code]}"


def check(code: str) -> str:
    """Return the plain ``code``.

    Raises:
        KeyError: the code is not a known reason code.
    """
    if code not in REASONS:
        raise KeyError(f"unknown reason code {code!r}: add it to hf_fastpath/reasons.py")
    return str.__str__(code)
