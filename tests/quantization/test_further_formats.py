"""Formats of further kinds, for which no kernel was written: a row describes them to Python and to portable kernels."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from hf_fastpath import packed_formats
from hf_fastpath.native import build, generated, toolchain
from hf_fastpath.packed_formats import FORMATS, Format, QuantValues, ZeroPoints
from hf_fastpath.quantization import quantize
from hf_fastpath.quantization.formats import pack, unpack

CSRC = Path(__file__).resolve().parents[2] / "csrc"
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_E2M1, *(-each for each in _E2M1))
FURTHER = {
    each.name: each
    for each in (
        Format("int8_g64", 8, 64, -127, 127, has_kernels=False),
        Format("fp8_g128", 8, 128, -448, 448, QuantValues.FLOATS, scale_dtype="float32", has_kernels=False),
        Format("int4_g64", 4, 64, 0, 15, zeros=ZeroPoints.OF_GROUP, has_kernels=False),
        Format("int4_row", 4, 0, -8, 7, zeros=ZeroPoints.FIXED, zero=8, has_kernels=False),
        Format("e2m1_g32", 4, 32, -6, 6, QuantValues.TABLE, table=E2M1, has_kernels=False),
    )
}
over_further = pytest.mark.parametrize("format", FURTHER.values(), ids=FURTHER)


@over_further
def test_it_is_packed_and_quantized(format):
    quants = torch.randint(0, 1 << format.bits, (5, 384), dtype=torch.uint8)
    assert torch.equal(unpack(format, pack(format, quants)), quants)
    for size in (1e-3, 1.0, 1e3):
        weight = torch.randn(16, 300) * size
        made = quantize(weight, format)
        error = (made.dequantize() - weight).norm() / weight.norm()
        assert error < {8: 0.03, 4: 0.16}[format.bits]
        tensors = [made.quants, made.scales] + ([made.zeros] if format.has_zeros else [])
        assert format.nbytes(16, 300) == sum(each.nbytes for each in tensors)
    assert not quantize(torch.zeros(3, 100), format).dequantize().any()


PROGRAM = """
#include <cstdio>
#include <cstdlib>
#include <vector>
#include "weights/packed_dequantize_cpu.cpp"
using namespace hf_fastpath;
std::vector<char> read(const char* name) {
  std::vector<char> bytes;
  std::FILE* file = std::fopen(name, "rb");
  for (int byte; file && (byte = std::fgetc(file)) != EOF;) bytes.push_back(static_cast<char>(byte));
  return bytes;
}
int main(int, char** argv) {  // number of the format, in_features, out_features, multiplier, files
  PackedWeight weight{};
  weight.format = static_cast<PackedFormat>(std::atoi(argv[1]));
  const int64_t in_features = std::atoi(argv[2]);
  weight.out_features = std::atoi(argv[3]);
  weight.multiplier = std::strtof(argv[4], nullptr);
  weight.blocks = (in_features + kPackedBlock - 1) / kPackedBlock;
  weight.groups = groups_of(weight.format, weight.blocks);
  const auto quants = read(argv[5]), scales = read(argv[6]), zeros = read(argv[7]);
  weight.quants = reinterpret_cast<const uint8_t*>(quants.data());
  weight.scales = scales.data();
  weight.zeros = zeros.empty() ? nullptr : reinterpret_cast<const uint8_t*>(zeros.data());
  std::vector<float> rows(weight.out_features * in_features);
  dequantize_packed_portable(weight, in_features, DType::kFloat32, 0, weight.out_features, rows.data());
  std::fwrite(rows.data(), 4, rows.size(), stdout);
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """Build a program that dequantizes weights of all formats, also of the further ones."""
    try:
        cxx = toolchain.find_toolchain("cpu").cxx
    except build.BuildError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("further")
    for name in ("weights", "common"):
        shutil.copytree(CSRC / name, folder / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generated, "FORMATS", FORMATS | FURTHER)
        generated.update(folder)
        made = generated.files()
    for name in FURTHER:
        assert not [path for path in made if path.endswith(f"_{name}.cu")], "kernels of a GPU are of others"
    (folder / "main.cpp").write_text(PROGRAM)
    flags = ["-std=c++17", "-O1", f"-I{folder}", "-o", str(folder / "main")]
    done = subprocess.run([*shlex.split(cxx), *flags, str(folder / "main.cpp")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "main"


@pytest.mark.parametrize("format", (FORMATS | FURTHER).values(), ids=FORMATS | FURTHER)
@pytest.mark.parametrize("columns", (1, 96, 300))
def test_portable_kernels_read_it(program, tmp_path, format, columns):
    """Quants, scales and zeros are random bytes; what C++ makes of them is what Python does, bit for bit."""
    made = quantize(torch.randn(7, columns), format)
    quants = torch.randint(0, format.finite_bytes, made.quants.shape, dtype=torch.uint8)
    zeros = None if made.zeros is None else torch.randint(0, 16, made.zeros.shape, dtype=torch.uint8)
    made = dataclasses.replace(made, quants=quants, zeros=zeros, multiplier=0.25)
    files = {"quants": made.quants, "scales": made.scales, "zeros": made.zeros}
    for name, tensor in files.items():
        (tmp_path / name).write_bytes(b"" if tensor is None else tensor.view(torch.uint8).numpy().tobytes())
    number = list(packed_formats.FORMATS | FURTHER).index(format.name)
    arguments = [str(each) for each in (number, columns, 7, made.multiplier, *(tmp_path / name for name in files))]
    said = subprocess.run([str(program), *arguments], capture_output=True, check=True).stdout
    found = torch.from_numpy(np.frombuffer(said, np.float32).copy()).view(7, columns)
    assert torch.equal(found, made.dequantize()) and found.isfinite().all()
