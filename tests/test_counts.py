"""What the package has in one place: the counts that ARCHITECTURE.md tells of, as its commands give them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def found(command: str) -> list[str]:
    """Return the lines that a command of ARCHITECTURE.md prints."""
    told = (ROOT / "ARCHITECTURE.md").read_text().replace(r"\|", "|")  # as a table has it
    assert f"`{command}`" in told, "ARCHITECTURE.md tells of another command"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert not done.stderr, done.stderr
    return done.stdout.splitlines()


def test_one_file_chooses_the_op_of_a_product():
    command = r'grep -rlE "emit\([^)]*ops\.(packed_)?gem[vm]" hf_fastpath --include=*.py'
    assert found(command) == ["hf_fastpath/decode/lower/which_op.py"]
    names = r"ops\.(gemv|gemm|gemv_swiglu|qkv_rope_append|packed_\w+|joined_gemv|lora_\w+)\.(overload|native)"
    files = (each for folder in ("decode", "recording") for each in (ROOT / "hf_fastpath" / folder).rglob("*.py"))
    where = {each.name for each in files if re.search(names, each.read_text())}
    assert where == {"which_op.py", "one_call.py", "passes.py"}, "the last two look for calls that were made"


def test_nobody_asks_after_the_kind_of_a_source():
    assert not found("grep -rnw is_recorded hf_fastpath --include=*.py")


def test_a_quantized_weight_is_one_value():
    """From ``patch()`` to a kernel it is a ``PackedWeight``, a ``PackedLinear``, arguments of an op, and C++'s."""
    lines = found('grep -rnE "def .*quants, scales" hf_fastpath --include=*.py')
    others = [line for line in lines if not re.match(r"hf_fastpath/(ops|quantization)/", line)]
    assert [line.partition(":")[0] for line in others] == ["hf_fastpath/decode/lower/many_rows.py"], others


def test_few_files_know_what_quants_are():
    """All others ask for facts that follow from a format's description."""
    native = found('grep -rlE "Packed(Values|Zeros|Scales)::k" csrc --include=*.h --include=*.c*')
    assert len(native) == 8 and {Path(each).parent.as_posix() for each in native} == {"csrc/weights"}, native
    python = found(r'grep -rlE "QuantValues|ZeroPoints|\.is_(table|float)\b" hf_fastpath --include=*.py')
    expected = ("native/generated.py", "packed_formats.py", "quantization/quantizer.py", "replacing/schemes.py")
    assert sorted(python) == [f"hf_fastpath/{name}" for name in expected]


def test_a_product_of_a_feature_is_declared_and_has_a_row():
    where = found("grep -rlw linear_avx512_bf16 csrc --include=*.h --include=*.cpp")
    kernel = "csrc/gemv/gemv_avx512_bf16.cpp"
    assert sorted(where) == [kernel, "csrc/gemv/gemv_cpu.h", "csrc/products/select_cpu.cpp"]
    endings = [path for path in (ROOT / "hf_fastpath").rglob("*.py") if '"_avx512_bf16.cpp"' in path.read_text()]
    assert [path.name for path in endings] == ["toolchain.py"]


def test_three_files_write_a_layer_down():
    """Families of any form are one function over parts; kernels for all layers at once have their reference."""
    command = r'grep -rlE "def decoder_layer\(|kAttentionNormWeight,|attention_norm_weight.,$" hf_fastpath csrc'
    where = found(f"{command} --include=*.py --include=*.cpp")
    layers = ("decode/sources/steps.py", "ops/decode_layers.py")
    assert sorted(where) == ["csrc/decode_layers/decode_layers_cuda.cpp", *(f"hf_fastpath/{each}" for each in layers)]


def test_two_tables_choose_products():
    tables = found(r'grep -rlE " kRoutes\[\]" csrc')
    assert sorted(tables) == ["csrc/products/select_cpu.cpp", "csrc/products/select_cuda.cu"]


def test_comments_begin_with_what_they_speak_of():
    assert not found(r'grep -rnE "^\s*// Of " csrc --include=*.h --include=*.c*')
