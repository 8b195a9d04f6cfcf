"""What all tests share: devices, a fixed seed, a header that says which native libraries are under test."""

from __future__ import annotations

import pytest
import torch

from hf_fastpath import build, loader

pytest.register_assert_rewrite("checks", "memory", "parity", "models", "architecture_checks")


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Without a native library an op *is* its reference, and then the comparisons below hold trivially."""
    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    lines = [f"torch {torch.__version__}, {torch.get_num_threads()} threads, {cuda}"]
    return lines + [f"hf_fastpath library for {loader.status()[target]}" for target in build.TARGETS]


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=needs_cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device an op runs on."""
    return torch.device(request.param)


@pytest.fixture
def cuda() -> torch.device:
    """The GPU, for what only exists there."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda")


@pytest.fixture(autouse=True)
def repeatable(request: pytest.FixtureRequest):
    """The same random numbers whatever ran before, and no trace of a test in the next one's globals."""
    threads = torch.get_num_threads()
    torch.manual_seed(1729)
    if request.path.parent.name in ("ecosystem", "generation", "patches", "public"):
        torch.set_num_threads(1)  # tiny models: handing a microsecond of work to a pool takes longer than doing it
    yield
    torch.set_num_threads(threads)
