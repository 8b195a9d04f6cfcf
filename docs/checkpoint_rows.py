"""Checkpoints of other packages: the list that docs/quantized-weights.md has as a table, each with its tests.

``tests/quantization/test_checkpoint_table.py`` runs on every row, and looks for every test that a row names.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from measured_tables import DATA, markdown_table, rows_of

TESTS = Path(__file__).resolve().parent.parent / "tests"
#: the tests that run on every row
TABLE = "quantization/test_checkpoint_table.py"
TOKENS, LORA, MIXTURE = (f"{TABLE}::test_{name}" for name in ("tokens_and_prompts", "lora", "mixtures"))


@dataclass(frozen=True)
class Checkpoint:
    """A row.

    Attributes:
        name: what quantized the weights, and how.
        becomes: the formats of ours that hold them; none: their weights are dequantized as the package does it.
        weights: the test that compares every element with the format's description.
        package: the test that compares with the package itself, or "".
        experts: the test of quantized experts; or the reason code with which these keep running stock code; or "" where
            the package leaves experts as they are.
        tokens, lora: the tests of tokens and prompts, and of adapters; "" where there is none.
    """

    name: str
    becomes: tuple[str, ...]
    weights: str
    package: str = ""
    experts: str = ""
    tokens: str = TOKENS
    lora: str = LORA


_CHECKPOINTS = "quantization/test_checkpoints.py::test_the_same_weights_come_out"
_BYTES = "quantization/test_eight_bits.py::test_every_weight_is_the_packages"
_CLASSES = "quantization/test_weight_classes.py::test_every_weight_of_torchao_is_the_packages"
_LOADED = "ecosystem/test_quantized_checkpoints.py"
_GPTQ = "quantization/test_checkpoints.py::test_every_weight_of_gptq_is_that_of_the_package"
_AWQ = "quantization/test_checkpoints.py::test_every_weight_of_awq_is_that_of_the_package"
_TABLES = "quantization/test_bitsandbytes.py::test_every_weight_is_the_same"
_FLOATS = "quantization/test_four_bit_floats.py::test_every_weight_of"
_MINIMUMS = "quantization/test_with_minimums.py::test_every_weight_of"
_OF_FLOATS, _OF_INTEGERS = (
    f"{_LOADED}::test_compressed_tensors_of_four_bit_floats",
    f"{_LOADED}::test_compressed_tensors",
)
_FREED = "quantization/test_weight_classes.py::test_bytes_are_freed_and_come_back"
_INTX = "quantization/test_weight_classes.py::test_integers_of_any_number_of_bits"

ROWS = (
    Checkpoint("bitsandbytes NF4", ("nf4",), _TABLES, f"{_LOADED}::test_bitsandbytes_of_four_bits"),
    Checkpoint("bitsandbytes FP4", ("fp4",), _TABLES, f"{_LOADED}::test_bitsandbytes_of_four_bits"),
    Checkpoint("bitsandbytes LLM.int8", ("int8_row",), _BYTES, f"{_LOADED}::test_llm_int8"),
    Checkpoint("GPTQ, 4 bits of 128", ("int4",), _CHECKPOINTS, _GPTQ),
    Checkpoint("GPTQ, 4 bits of 32", ("int4_g32_zeros",), _CHECKPOINTS, _GPTQ),
    Checkpoint("GPTQ, 4 bits of 32, symmetric", ("int4_g32",), _CHECKPOINTS, _GPTQ),
    Checkpoint("GPTQ, 8 bits of 128, symmetric", ("int8",), _CHECKPOINTS, _GPTQ),
    Checkpoint("GPTQ, 8 bits of 32", ("int8_g32_zeros",), _CHECKPOINTS, _GPTQ),
    Checkpoint("AWQ, 4 bits of 128", ("int4",), _CHECKPOINTS, _AWQ),
    Checkpoint("AWQ, 4 bits of 64", ("int4_g32_zeros",), _CHECKPOINTS, _AWQ),
    Checkpoint("compressed-tensors, 4 bits of 128", ("int4",), _CHECKPOINTS, _OF_INTEGERS),
    Checkpoint(
        "compressed-tensors, 8 bits of 64", ("int8_g32_zeros",), _CHECKPOINTS, f"{_LOADED}::test_compressed_tensors"
    ),
    Checkpoint("compressed-tensors FP8", ("fp8", "fp8_g128"), _BYTES, f"{_LOADED}::test_compressed_tensors_of_bytes"),
    Checkpoint("compressed-tensors W8A8", ("int8_row",), _BYTES, f"{_LOADED}::test_compressed_tensors_of_bytes"),
    Checkpoint(
        "compressed-tensors MXFP4",
        ("mxfp4",),
        "quantization/test_four_bit_floats.py::test_every_weight_of_mxfp4",
        f"{_LOADED}::test_compressed_tensors_of_four_bit_floats",
    ),
    Checkpoint(
        "compressed-tensors NVFP4",
        (),
        "quantization/test_four_bit_floats.py::test_every_weight_of_nvfp4",
        f"{_LOADED}::test_compressed_tensors_of_four_bit_floats",
    ),
    Checkpoint("FP8 in blocks", ("fp8_g128",), _BYTES, "", "quantized_fp8"),
    Checkpoint("FBGEMM FP8", ("fp8_g128",), _BYTES),
    Checkpoint("torchao Int8WeightOnly", ("int8_row",), _CLASSES, f"{_LOADED}::test_torchao"),
    Checkpoint("torchao Int8DynamicActivationInt8Weight", ("int8_row",), _CLASSES, f"{_LOADED}::test_torchao"),
    Checkpoint("torchao IntxWeightOnly, 4 bits of 32", ("int4_g32",), _INTX, f"{_LOADED}::test_torchao"),
    Checkpoint("torchao Float8WeightOnly", ("fp8", "fp8_g128"), _CLASSES, f"{_LOADED}::test_torchao"),
    Checkpoint(
        "torchao Int4WeightOnly",
        ("int4_g32_middles",),
        f"{_MINIMUMS}_torchao_in_pairs",
    ),
    Checkpoint("quanto int8", ("int8_row",), _FREED, f"{_LOADED}::test_quanto_of_bytes"),
    Checkpoint("quanto float8", ("fp8", "fp8_g128"), _FREED, f"{_LOADED}::test_quanto_of_bytes"),
    Checkpoint(
        "quanto int4 and int2",
        ("int4_g32_min", "int4_g32_middles"),
        f"{_MINIMUMS}_quanto",
        f"{_LOADED}::test_quanto_of_few_bits",
    ),
    Checkpoint(
        "HQQ of 4, 3, 2 and 1 bits, axis=1",
        ("int4_g32_float_zeros",),
        f"{_MINIMUMS}_hqq",
        f"{_LOADED}::test_hqq",
    ),
)
_GGUF = "quantization/test_gguf.py"
_OF_GGUF = {
    "weights": f"{_GGUF}::test_every_value_is_that_of_the_file_and_every_bit_comes_back",
    "package": f"{_GGUF}::test_values_are_those_of_the_package_gguf",
    "experts": f"{_GGUF}::test_patch_takes_experts_and_gives_their_bytes_back",
    "tokens": f"{_GGUF}::test_tokens_are_those_of_the_dequantized_file",
    "lora": "",
}
#: rows that have tests of their own
FURTHER = (
    *(
        Checkpoint(f"GGUF {name}", (format,), **_OF_GGUF)
        for name, format in (
            *(("Q4_0", "int4_g32"), ("Q4_1", "int4_g32_min"), ("Q8_0", "int8_g32"), ("IQ4_NL", "int8_g32")),
            *(("Q4_K", "int4_g32_k"), ("Q5_K", "int8_g32_k"), ("Q6_K", "int8_g16_k")),
        )
    ),
    Checkpoint(
        "MXFP4 of gpt-oss",
        ("mxfp4",),
        "quantization/test_quantized_experts.py::test_mxfp4_has_the_values_of_transformers",
        experts="quantization/test_quantized_experts.py::test_mxfp4_is_taken_over_and_given_back",
        tokens="quantization/test_quantized_experts.py::test_mxfp4_in_bfloat16_decodes_fast",
        lora="",
    ),
)

#: device -> its file of measurements, the model there, and what the table calls both
_MEASURED = {
    "CUDA": ("generate_h200.csv", "Mistral-7B", "fp16", "128", "512"),
    "CPU": ("generate_epyc.csv", "TinyLlama-1.1B", "fp16", "32", "512"),
}


def _speed(device: str, formats: tuple[str, ...], column: str) -> str:
    """Return the newest speed that was measured of a format, as text; "" if there is none."""
    file, model, dtype, context, prompt = _MEASURED[device]
    context = prompt if column == "prefill_tok_s" else context
    names = [f"{model} {format}" for format in formats]
    rows = [row for row in rows_of(DATA / file) if row["model"] in names and row["engine"] == "ours"]
    rows = [row for row in rows if (row["dtype"], row["context"], row["batch"]) == (dtype, context, "1")]
    found = [row[column] for row in sorted(rows, key=lambda row: row["date"]) if row[column]]
    return f"{float(found[-1]):,.0f} tok/s" if found else ""


def _named(test: str, speed: str = "") -> str:
    """Return a test in a cell, without its file."""
    if not test:
        return "not tried"
    shown = f"`{test.partition('::')[2].removeprefix('test_')}`" if "::" in test else f"stock: `{test}`"
    return f"{shown}, {speed}" if speed else shown


def table() -> str:
    """Return the table: a checkpoint a line for each device."""
    lines = []
    for row in (*ROWS, *FURTHER):
        becomes = ", ".join(f"`{name}`" for name in row.becomes) or "plain weights"
        for device in _MEASURED:
            decode, prompt = (_speed(device, row.becomes, f"{name}_tok_s") for name in ("decode", "prefill"))
            experts = _named(row.experts or MIXTURE)
            lines.append(
                (
                    row.name,
                    becomes,
                    device,
                    _named(row.tokens, decode),
                    _named(row.tokens, prompt),
                    experts,
                    _named(row.lora),
                )
            )
    heads = ("checkpoint", "becomes", "device", "decode", "prompt", "experts", "LoRA")
    return markdown_table(heads, lines)


def tests_of_weights() -> str:
    """Return a table of the tests that compare every element of a row's weights."""
    lines = []
    for row in (*ROWS, *FURTHER):
        named = [f"`{each.partition('::')[0]}`: {_named(each)}" if each else "" for each in (row.weights, row.package)]
        lines.append((row.name, *named))
    return markdown_table(("checkpoint", "every element, by its description", "beside the package itself"), lines)
