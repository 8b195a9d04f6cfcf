"""What the package has in one place: the counts that ARCHITECTURE.md tells of, as its commands give them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def found(command: str) -> list[str]:
    """Return the lines that a command of ARCHITECTURE.md prints."""
    assert f"`{command}`" in (ROOT / "ARCHITECTURE.md").read_text(), "ARCHITECTURE.md tells of another command"
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
