"""What all tests share: devices, a fixed seed, a header that says which native libraries are under test."""

from __future__ import annotations

import pytest
import torch

import hf_fastpath  # noqa: F401  (defines the ops)

pytest.register_assert_rewrite("checks", "memory", "parity", "models", "architecture_checks")

TARGETS = ("cpu", "cuda")


def library_status() -> dict[str, object]:
    """What the loader says of each library; every entry prints as one line and has ``native: bool``."""
    try:
        from hf_fastpath import loader
    except ImportError:
        return {}
    return loader.status()


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Without a native library an op *is* its reference, and then the comparisons below hold trivially."""
    status = library_status()
    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    lines = [f"torch {torch.__version__}, {torch.get_num_threads()} threads, {cuda}"]
    return lines + [f"hf_fastpath {target} library: {status.get(target, 'no loader')}" for target in TARGETS]


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
def repeatable():
    """The same random numbers whatever ran before, and no trace of a test in the next one's globals."""
    threads = torch.get_num_threads()
    torch.manual_seed(1729)
    yield
    torch.set_num_threads(threads)
