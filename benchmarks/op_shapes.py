"""The calls that ``bench_ops.py`` times, by op."""

from __future__ import annotations

import torch
from op_calls import (
    Call,
    alone_call,
    append_call,
    attention_call,
    conv1d_call,
    convolution_call,
    delta_call,
    drawn,
    experts_call,
    gemm_call,
    gemv_call,
    greedy_call,
    head_products_call,
    inputs_call,
    joined_call,
    latent_call,
    layers_call,
    lora_down_call,
    lora_up_call,
    packed_call,
    packed_experts_call,
    packed_qkv_call,
    qkv_call,
    quantizing_call,
    race_call,
    rope_call,
    router_call,
    router_logits_call,
    sample_of,
    state_space_call,
    stream,
    swiglu_call,
)

from hf_fastpath.choices import InputQuants
from hf_fastpath.quantization import FORMATS
from hf_fastpath.registry import Sample

_GPU = ("cuda",)
_GELU_DTYPES = ("fp32", "fp16")

#: op -> its calls; an op of the registry without an entry here is an error
SHAPES: dict[str, list[Call]] = {
    "fused_gelu": [
        Call("gpt2 prefill 1000x3072", sample_of(drawn(1000, 3072)), _GELU_DTYPES),
        Call("gpt2 prefill 16000x3072", sample_of(drawn(16000, 3072)), _GELU_DTYPES, _GPU),
        Call("gpt2 decode 1x3072", sample_of(drawn(1, 3072)), _GELU_DTYPES),
        Call("erf 1000x3072", sample_of(drawn(1000, 3072), "none"), _GELU_DTYPES),
        Call("erf 1x3072", sample_of(drawn(1, 3072), "none"), _GELU_DTYPES),
    ],
    "fused_swiglu": [
        Call("mistral prefill 512x14336", sample_of(*[drawn(512, 14336)] * 2)),
        Call("mistral prefill 4096x14336", sample_of(*[drawn(4096, 14336)] * 2), devices=_GPU),
        Call("tinyllama prefill 512x5632", sample_of(*[drawn(512, 5632)] * 2)),
        Call("qwen3.5 attention decode 1x4096, sigmoid", sample_of(*[drawn(1, 4096)] * 2, "sigmoid")),
    ],
    "gemv": [
        gemv_call("mistral o 4096x4096", 4096, 4096),
        gemv_call("mistral o 4096x4096 + residual", 4096, 4096, residual=drawn(1, 1, 4096)),
        gemv_call("mistral down 14336->4096", 14336, 4096),
        gemv_call("mistral head 4096->32000", 4096, 32000),
        gemv_call("mistral o 4096x4096, 8 rows", 4096, 4096, rows=8),
        gemv_call("mistral down 14336->4096, 16 rows", 14336, 4096, rows=16),
        gemv_call("tinyllama o 2048x2048", 2048, 2048),
        gemv_call("tinyllama down 5632->2048", 5632, 2048),
        gemv_call("tinyllama head 2048->32000", 2048, 32000),
        gemv_call("llama-3.2 head 2048->128256", 2048, 128256),
        conv1d_call("gpt2 qkv 768->2304, Conv1D", 768, 2304),
        conv1d_call("gpt2 o 768x768, Conv1D", 768, 768),
        conv1d_call("gpt2 fc 768->3072 + gelu, Conv1D", 768, 3072, activation="gelu_tanh"),
        conv1d_call("gpt2 proj 3072->768, Conv1D", 3072, 768),
        gemv_call("gpt2 head 768->50257", 768, 50257),
    ],
    "gemm": [
        *(gemm_call(f"tinyllama o 2048x2048, {rows} rows", 2048, 2048, rows) for rows in (32, 128, 512, 2048)),
        *(gemm_call(f"tinyllama k 2048->256, {rows} rows", 2048, 256, rows) for rows in (32, 128, 512, 2048)),
        *(gemm_call(f"tinyllama up 2048->5632, {rows} rows", 2048, 5632, rows) for rows in (32, 128, 512, 2048)),
        *(gemm_call(f"tinyllama down 5632->2048, {rows} rows", 5632, 2048, rows) for rows in (32, 128, 512, 2048)),
    ],
    "packed_gemv": [
        *(
            packed_call(f"tinyllama {name}, {format}, {rows} rows", format, k, n, rows)
            for name, k, n in (("o 2048x2048", 2048, 2048), ("gate, up 2048->11264", 2048, 11264))
            for format in FORMATS
            for rows in (1, 4)
        ),
        *(
            packed_call(f"mistral {name}, {format}", format, k, n, devices=_GPU)
            for name, k, n in (
                ("o 4096x4096", 4096, 4096),
                ("gate, up 4096->28672", 4096, 28672),
                ("down 14336->4096", 14336, 4096),
            )
            for format in FORMATS
        ),
        *(
            packed_call(f"mistral gate, up 4096->28672, {format}, {rows} rows", format, 4096, 28672, rows, _GPU)
            for format in FORMATS
            for rows in (2, 4, 8, 16)
        ),
    ],
    "packed_gemm": [
        packed_call(f"mistral {name}, {format}, {rows} rows", format, k, n, rows, _GPU)
        for name, k, n in (
            ("qkv 4096->6144", 4096, 6144),
            ("o 4096x4096", 4096, 4096),
            ("gate, up 4096->28672", 4096, 28672),
            ("down 14336->4096", 14336, 4096),
        )
        for format in FORMATS
        for rows in (17, 64, 256, 1024, 4096)
    ],
    "qkv_rope_append": [
        qkv_call("mistral 4096->4096+2x1024", 4096, 32, 8, 128),
        qkv_call("mistral 4096->4096+2x1024, 8 queries", 4096, 32, 8, 128, query_len=8),
        qkv_call("tinyllama 2048->2048+2x256", 2048, 32, 4, 64),
        qkv_call("llama-3.2 2048->2048+2x512", 2048, 32, 8, 64),
    ],
    "joined_gemv": [
        joined_call("qwen3.5-4b delta 2560->8192+4096+32", 2560, (8192, 4096, 32)),
        joined_call("qwen3.5-4b attention 2560->8192+2x1024", 2560, (8192, 1024, 1024)),
    ],
    "gemv_swiglu": [
        swiglu_call("mistral 4096->2x14336", 4096, 14336),
        swiglu_call("mistral 4096->2x14336, 8 rows", 4096, 14336, rows=8),
        swiglu_call("tinyllama 2048->2x5632", 2048, 5632),
        swiglu_call("llama-3.2 2048->2x8192", 2048, 8192),
    ],
    "fused_experts": [
        experts_call("mixtral 2 of 8, 4096->2x14336", 4096, 14336, 8, 2, dtypes=("bf16",), devices=_GPU),
        experts_call("mixtral 2 of 8, 8 rows", 4096, 14336, 8, 2, rows=8, dtypes=("bf16",), devices=_GPU),
        experts_call("qwen3-30b 8 of 128, 2048->2x768", 2048, 768, 128, 8, dtypes=("bf16",)),
        experts_call("qwen3-30b 8 of 128, 8 rows", 2048, 768, 128, 8, rows=8, dtypes=("bf16",)),
        experts_call("gpt-oss-20b 4 of 32, 2880->2x2880", 2880, 2880, 32, 4, transposed=True, dtypes=("bf16",)),
        experts_call("gpt-oss-20b 4 of 32, 8 rows", 2880, 2880, 32, 4, rows=8, transposed=True, dtypes=("bf16",)),
        experts_call("aria 6 of 64, 2560->2x1664", 2560, 1664, 64, 6, concatenated=True, dtypes=("bf16",)),
        experts_call("nemotron-3-nano 6 of 128, 2688->1856", 2688, 1856, 128, 6, has_gate=False, dtypes=("bf16",)),
    ],
    "routed_experts": [
        experts_call("qwen3-30b 8 of 128, 2048->2x768", 2048, 768, 128, 8, routed=True, dtypes=("bf16",)),
        experts_call("qwen3-30b 8 of 128, 8 rows", 2048, 768, 128, 8, rows=8, routed=True, dtypes=("bf16",)),
        experts_call("gpt-oss-20b 4 of 32", 2880, 2880, 32, 4, transposed=True, routed=True, dtypes=("bf16",)),
    ],
    "packed_experts": [
        *(
            packed_experts_call(f"qwen3-30b 8 of 128, {format}, {rows} rows", format, 2048, 768, 128, 8, rows=rows)
            for format in ("int4_g32", "int8")
            for rows in (1, 8)
        ),
        *(
            packed_experts_call(
                f"gpt-oss-20b 4 of 32, mxfp4, {rows} rows", "mxfp4", 2880, 2880, 32, 4, rows=rows, is_gpt_oss=True
            )
            for rows in (1, 8)
        ),
        packed_experts_call("mixtral 2 of 8, int4_g32", "int4_g32", 4096, 14336, 8, 2, devices=_GPU),
    ],
    "choose_experts": [router_call("mixtral 2 of 8", 8, 2), router_call("qwen3-30b 8 of 128", 128, 8)],
    "append_attention": [
        append_call("mistral 16k, 8 new", 32, 8, 128, 16384, 8),
        append_call("mistral 16k, 64 new", 32, 8, 128, 16384, 64),
        append_call("mistral 16k, 512 new", 32, 8, 128, 16384, 512, most=8),
        append_call("gemma-2b 16k, 64 new", 8, 1, 256, 16384, 64),
        append_call("phi-2 16k, 64 new", 32, 32, 80, 16384, 64),
    ],
    "quantizing_attention": [
        quantizing_call(f"mistral {name}, {kv_name} KV", 32, 8, 128, length, kv)
        for kv_name, kv in (("int8", torch.int8), ("fp8", torch.float8_e4m3fn))
        for name, length in (("1k", 1024), ("4k", 4096), ("32k", 32768), ("128k", 131072))
    ],
    "decode_attention": [
        attention_call("mistral 1k", 32, 8, 128, 1024),
        attention_call("mistral 4k", 32, 8, 128, 4096),
        attention_call("mistral 32k", 32, 8, 128, 32768),
        attention_call("mistral 128k", 32, 8, 128, 131072, devices=_GPU),
        attention_call("mistral 1k, batch 8", 32, 8, 128, 1024, batch=8),
        attention_call("mistral 16k, 8 queries", 32, 8, 128, 16384, query_len=8),
        attention_call("mistral 16k, 16 queries", 32, 8, 128, 16384, query_len=16),
        attention_call("tinyllama 2k", 32, 4, 64, 2048),
        attention_call("llama-3.2 4k", 32, 8, 64, 4096),
        attention_call("gpt2 1k", 12, 12, 64, 1024),
        attention_call("gemma-2b 16k", 8, 1, 256, 16384),
        attention_call("whisper-large, 30 s of sound", 20, 20, 64, 1500),
        attention_call("whisper-large, 30 s of sound, batch 16", 20, 20, 64, 1500, batch=16),
        *(
            attention_call(f"{name}, {kv_name} KV", *sizes, kv=kv)
            for kv_name, kv in (("int8", torch.int8), ("fp8", torch.float8_e4m3fn))
            for name, sizes in (
                ("mistral 4k", (32, 8, 128, 4096)),
                ("mistral 32k", (32, 8, 128, 32768)),
                ("tinyllama 8k", (32, 4, 64, 8192)),
                ("gpt2 1k", (12, 12, 64, 1024)),
            )
        ),
        attention_call("tinyllama 8k", 32, 4, 64, 8192),
    ],
    "decode_layers": [
        layers_call("gpt2, 12 layers, 1k", 12, 768, 12, 64, dtypes=("fp16", "fp32"), devices=_GPU),
    ],
    "packed_gemv_swiglu": [
        *(packed_call(f"mistral 4096->2x14336, {format}", format, 4096, 28672, devices=_GPU) for format in FORMATS),
        packed_call("tinyllama 2048->2x5632, int4_g32", "int4_g32", 2048, 11264),
    ],
    "packed_qkv_rope_append": [
        *(packed_qkv_call(f"mistral 4096->4096+2x1024, {format}", format, 4096, 32, 8, 128) for format in FORMATS),
        packed_qkv_call("tinyllama 2048->2048+2x256, int4_g32", "int4_g32", 2048, 32, 4, 64),
    ],
    "greedy_token": [
        greedy_call("mistral 32000", 32000),
        greedy_call("gpt2 50257", 50257),
        greedy_call("llama-3.2 128256, batch 8", 128256, batch=8),
    ],
    "step_inputs": [
        inputs_call("mistral", 32000, 4096, 4096, head_dim=128),
        inputs_call("gpt2", 50257, 768, 1024),
    ],
    "sum_ranks": [alone_call("mistral 4096 + residual, one rank", 4096, added=True)],
    "gather_ranks": [alone_call("llama-3 128256 logits, one rank", 128256)],
    "exponential_race": [
        race_call("mistral 32000, temperature", 32000, 0.8, 0, 1.0, 0.0),
        race_call("mistral 32000, top-k 50, top-p", 32000, 0.8, 50, 0.95, 0.0),
        race_call("mistral 32000, top-p", 32000, 0.8, 0, 0.95, 0.0),
        race_call("gpt2 50257, top-k 50, top-p", 50257, 0.8, 50, 0.95, 0.0),
        race_call("llama-3.2 128256, top-k 50, top-p, batch 8", 128256, 0.8, 50, 0.95, 0.0, batch=8),
        race_call("llama-3.2 128256, top-p, batch 8", 128256, 0.8, 0, 0.95, 0.0, batch=8),
    ],
    "add_rms_norm": [
        Call("mamba2-2.7b 2560", sample_of(drawn(1, 1, 2560), stream(1, 1, 2560), drawn(2560), 1e-5)),
        Call("mamba2-2.7b 512x2560", sample_of(drawn(512, 2560), stream(512, 2560), drawn(2560), 1e-5)),
    ],
    "rms_norm": [
        Call("mistral 1x4096", sample_of(drawn(1, 1, 4096), drawn(4096), 1e-5)),
        Call("mistral 512x4096", sample_of(drawn(512, 4096), drawn(4096), 1e-5)),
        Call("mistral 4096x4096", sample_of(drawn(4096, 4096), drawn(4096), 1e-5), devices=_GPU),
    ],
    "fake_quantize": [
        Call("mistral 1x4096, blocks", sample_of(drawn(1, 1, 4096), InputQuants.FP8_BLOCK)),
        Call("mistral 1x14336, blocks", sample_of(drawn(1, 1, 14336), InputQuants.FP8_BLOCK)),
        Call("mistral 1x14336, outliers", sample_of(drawn(1, 1, 14336), InputQuants.INT8_OUTLIERS, 6.0)),
        Call("mistral 512x4096, outliers", sample_of(drawn(512, 4096), InputQuants.INT8_OUTLIERS, 6.0)),
    ],
    "layer_norm": [
        Call("gpt2 1x768", sample_of(drawn(1, 1, 768), drawn(768), drawn(768), 1e-5)),
        Call("gpt2 1000x768", sample_of(drawn(1000, 768), drawn(768), drawn(768), 1e-5)),
        Call("gpt2 16000x768", sample_of(drawn(16000, 768), drawn(768), drawn(768), 1e-5), devices=_GPU),
    ],
    "rope_append": [
        rope_call("mistral", 32, 8, 128, 128, False),
        rope_call("mistral, batch 8", 32, 8, 128, 128, False, batch=8),
        rope_call("tinyllama", 32, 4, 64, 64, False),
        rope_call("qwen3-4b, norms of heads", 32, 8, 128, 128, False, norms=True),
        rope_call("gpt2, no rotation", 12, 12, 64, 0, True),
    ],
    "bytes_sum": [
        Call(
            "64 x 33.6 MB",
            lambda device, dtype: Sample([torch.randn(1 << 24, device=device, dtype=dtype) for _ in range(64)]),
            ("fp16",),
            _GPU,
        ),
        Call(
            "8 x 33.6 MB",
            lambda device, dtype: Sample([torch.randn(1 << 24, device=device, dtype=dtype) for _ in range(8)]),
            ("fp16",),
        ),
    ],
    "read_stream": [
        Call("33.6 MB, variant 0", sample_of(drawn(1 << 24), 0), ("fp16",)),
        Call("235 MB, variant 0", sample_of(drawn(28672 * 4096), 0), ("fp16",)),
        Call("235 MB, variant 1", sample_of(drawn(28672 * 4096), 1), ("fp16",)),
        Call("235 MB, variant 2", sample_of(drawn(28672 * 4096), 2), ("fp16",), _GPU),
    ],
    "short_convolution": [
        convolution_call("qwen3.5-4b 8192, width 4", 8192, 4, activation="silu"),
        convolution_call("mamba2-2.7b 5376, width 4", 5376, 4, activation="silu"),
        convolution_call("lfm2-1.2b 2048, width 3, gates", 2048, 3, gates=True),
    ],
    "gated_delta_step": [
        delta_call("qwen3.5-4b 32 heads 128x128", 16, 32, 128, 128),
        delta_call("qwen3.5-4b, batch 8", 16, 32, 128, 128, batch=8),
        delta_call("olmo-hybrid 30 heads 96x192", 30, 30, 96, 192),
    ],
    "selective_state_step": [
        state_space_call("mamba2-2.7b 80 heads 64x128", 80, 64, 128),
        state_space_call("mamba2-2.7b, batch 8", 80, 64, 128, batch=8),
        state_space_call("granite-4-h 64 heads 64x128", 64, 64, 128),
        state_space_call("mamba-2.8b 5120x16", 1, 5120, 16, per_channel=True),
    ],
    "gated_rms_norm": [
        Call("qwen3.5-4b 32x128", sample_of(*[drawn(1, 32, 128)] * 2, drawn(128), 1e-6)),
        Call("mamba2-2.7b 5120", sample_of(*[drawn(1, 1, 5120)] * 2, drawn(5120), 1e-5, 1, True)),
        Call("granite-4-h 4096", sample_of(*[drawn(1, 1, 4096)] * 2, drawn(4096), 1e-5, 1, True)),
    ],
    "latent_attention": [
        *(latent_call(f"deepseek-v2-lite {n}", 16, 512, 64, n) for n in (128, 1024, 4096)),
        latent_call("deepseek-v3 128 heads, 4096", 128, 512, 64, 4096),
        latent_call("minicpm3 4096", 40, 256, 32, 4096),
    ],
    "router_logits": [
        router_logits_call("deepseek-v2-lite 64 experts", 64, 2048),
        router_logits_call("deepseek-v3 256 experts", 256, 7168),
    ],
    "lora_down": [
        lora_down_call("llama-3.1-8b q, k, v of rank 16", 4096, (16,) * 3),
        lora_down_call("llama-3.1-8b down of rank 16", 14336, (16,)),
        lora_down_call("llama-3.1-70b down of rank 64", 28672, (64,)),
    ],
    "lora_up": [
        lora_up_call("llama-3.1-8b q, k, v of rank 16", 16, (4096, 1024, 1024)),
        lora_up_call("llama-3.1-8b o of rank 16", 16, (4096,)),
        lora_up_call("llama-3.1-8b gate, up of rank 16", 16, (14336, 14336), gated=True),
        lora_up_call("llama-3.1-70b gate, up of rank 64", 64, (28672, 28672), gated=True),
    ],
    "head_products": [
        head_products_call("deepseek-v2-lite queries", 16, 128, 128, 512, True),
        head_products_call("deepseek-v2-lite values", 16, 128, 128, 512, False),
        head_products_call("minicpm3 queries", 40, 64, 64, 256, True),
    ],
}
