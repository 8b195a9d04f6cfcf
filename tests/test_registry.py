"""The registry: bad definitions fail at once, errors help, importing the package changes nothing."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import conftest
import pytest
import torch

import hf_fastpath
from hf_fastpath import registry
from hf_fastpath.native import loader
from hf_fastpath.native.build import TARGETS
from hf_fastpath.registry import OpInputError, OpSpec

CPU = torch.device("cpu")
SPECS = list(registry.all_ops().values())
over_ops = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
KEYS = {"cpu": "CPU", "cuda": "CUDA"}


def first_sample(spec: OpSpec):
    return next(iter(spec.samples(CPU, torch.float32)))


# ---- definition --------------------------------------------------------------------------------------------


def test_duplicate_name_is_refused():
    with pytest.raises(ValueError, match="op 'gemv' is registered already: pick another name"):
        registry.register(dataclasses.replace(registry.get("gemv")))


@pytest.mark.parametrize("schema", ("(Tensor x -> Tensor", "(Tensr x) -> Tensor", "", "(Tensor x)"))
def test_schema_that_does_not_parse_is_refused(schema):
    spec = dataclasses.replace(registry.get("fused_gelu"), name="unparsable", schema=schema)
    with pytest.raises(RuntimeError):
        registry.register(spec)
    assert "unparsable" not in registry.all_ops()


@pytest.mark.parametrize("missing", ("backward", "setup_context"))
def test_half_a_backward_is_refused(missing):
    spec = dataclasses.replace(registry.get("fused_gelu"), name="half_a_backward", **{missing: None})
    with pytest.raises(ValueError, match="give both backward and setup_context, or neither"):
        registry.register(spec)
    assert "half_a_backward" not in registry.all_ops()


@pytest.mark.parametrize("missing", ("reference", "fake", "why_not", "bytes", "samples"))
def test_incomplete_spec_is_refused(missing):
    given = {f.name: getattr(registry.get("gemv"), f.name) for f in dataclasses.fields(OpSpec) if f.init}
    del given[missing]
    with pytest.raises(TypeError, match=missing):
        OpSpec(**given)


@pytest.mark.parametrize("name", ("fake", "why_not", "bytes"))
def test_function_of_unknown_arguments_is_refused(name):
    with pytest.raises(ValueError, match="op 'gemv': <lambda> takes wieght, the reference only x, weight, bias"):
        dataclasses.replace(registry.get("gemv"), **{name: lambda x, wieght: None})


def test_functions_get_the_arguments_they_name():
    """Arguments go by name, whatever their order, and defaults of the reference fill in what a call leaves out."""
    spec = dataclasses.replace(registry.get("gemv"), bytes=lambda transposed, norm_eps, x: (transposed, norm_eps, x))
    assert spec.bytes("x", "weight", norm_eps=1.0) == (False, 1.0, "x")
    with pytest.raises(TypeError, match=r"gemv\(\) missing 1 required positional argument: 'weight'"):
        spec.bytes("x")
    with pytest.raises(TypeError, match=r"gemv\(\) got an unexpected keyword argument 'wieght'"):
        spec.bytes("x", wieght="weight")


def test_specs_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        registry.get("gemv").name = "other"
    registry.all_ops().clear()
    assert registry.all_ops()


@over_ops
def test_spec_is_consistent(spec):
    """The functions share one signature with the schema; every sample is a legal call that moves bytes."""
    names = [argument.name for argument in spec.overload._schema.arguments]
    for function in (spec.reference, spec.fake, spec.why_not, spec.bytes):
        assert list(function.__code__.co_varnames[: function.__code__.co_argcount]) == names
    for dtype in registry.FLOAT_DTYPES:
        few = None if dtype == torch.float32 else 8  # what an argument may be does not depend on the dtype
        samples = list(itertools.islice(spec.samples(CPU, dtype), few))
        assert len(samples) >= 3
        for sample in samples:
            assert spec.why_not(*sample.args, **sample.kwargs) == []
            moved, first = spec.bytes(*sample.args, **sample.kwargs), sample.args[0]
            numel = sum(each.numel() for each in (first if isinstance(first, list) else [first]))
            assert isinstance(moved, int) and (moved > 0) == (numel > 0)


# ---- look-up and errors ------------------------------------------------------------------------------------


def test_unknown_op_names_the_known_and_the_closest():
    with pytest.raises(KeyError) as error:
        registry.get("gemv_swigul")
    message = str(error.value)
    assert "unknown op 'gemv_swigul'" in message and "Did you mean 'gemv_swiglu'?" in message
    assert all(name in message for name in registry.all_ops())
    with pytest.raises(KeyError) as error:
        registry.get("zzz")
    assert "Did you mean" not in str(error.value)


def test_error_says_what_got_expected_and_remedy():
    x, weight = torch.randn(2, 8), torch.randn(4, 9)
    with pytest.raises(OpInputError) as error:
        hf_fastpath.ops.gemv(x, weight.half(), torch.randn(3), activation="swish")
    message = str(error.value)
    assert message.startswith("hf_fastpath.ops.gemv: ")
    for part in (
        "weight has dtype torch.float16, expected torch.float32: cast it",
        "weight has shape (4, 9), expected [out, 8]",
        "bias has shape (3,), expected (4,)",
        "activation is 'swish', expected one of none, relu, silu, gelu_tanh, gelu",
    ):
        assert part in message, "every reason is given at once"


def test_error_is_a_value_error():
    assert issubclass(OpInputError, ValueError)


def test_error_for_other_devices_and_strides():
    x = torch.randn(2, 8)
    with pytest.raises(OpInputError, match="weight is on meta, expected cpu: move it"):
        hf_fastpath.ops.gemv(x, torch.empty(4, 8, device="meta"))
    with pytest.raises(OpInputError, match=r"weight has strides \(1, 4\): make its rows contiguous"):
        hf_fastpath.ops.gemv(x, torch.randn(8, 4).t())


@over_ops
def test_grad_is_refused_where_there_is_no_backward(spec):
    sample = first_sample(spec).map_tensors(lambda t: t.clone().requires_grad_(t.is_floating_point()))
    if spec.backward is not None:
        assert spec(*sample.args, **sample.kwargs).requires_grad
    else:
        with pytest.raises(OpInputError, match=r"it has no backward .*: call it under torch.no_grad\(\)"):
            spec(*sample.args, **sample.kwargs)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = spec(*sample.args, **sample.kwargs)
            outputs = out if isinstance(out, list) else [out]
            assert not any(tensor.requires_grad for tensor in outputs if tensor is not None)


def test_grad_in_a_list_is_refused():
    sample = first_sample(registry.get("decode_layers"))
    sample.args[1][0].requires_grad_()
    with pytest.raises(OpInputError, match="it has no backward"):
        hf_fastpath.ops.decode_layers(*sample.args, **sample.kwargs)


# ---- native libraries --------------------------------------------------------------------------------------


@pytest.mark.parametrize("required, said", [("cpu", "kernels that are not there: cpu: "), ("gpu", r"names \['gpu'\]")])
def test_a_run_that_requires_a_library_does_not_begin_without_it(required, said, monkeypatch):
    """A run that is meant for kernels must not test the references."""
    monkeypatch.setenv("HF_FASTPATH_REQUIRE_NATIVE", required)
    monkeypatch.setattr(loader, "status", lambda: {target: SimpleNamespace(native=frozenset()) for target in TARGETS})
    config = SimpleNamespace(getoption=lambda *_: None)
    with pytest.raises(pytest.UsageError, match=said):
        conftest.pytest_configure(config)


@pytest.mark.parametrize("target", TARGETS)
def test_the_library_implements_what_its_status_says(target):
    status = loader.status()
    if not status[target].native:
        pytest.skip(f"no {target} library")
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    wrong = [s.name for s in SPECS if has_kernel(f"hf_fastpath::{s.name}", KEYS[target]) != (target in s.native)]
    assert not wrong, f"what the {target} library implements is not what `native` says: {', '.join(wrong)}"


# ---- import ------------------------------------------------------------------------------------------------

PREAMBLE = """
import os, random, signal, sys, warnings
import numpy, torch

def state():
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "random state": torch.get_rng_state().tolist(),
        "Python's random state": random.getstate(),
        "numpy's random state": str(numpy.random.get_state()),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "grad mode": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "cuda initialized": torch.cuda.is_initialized(),
        "environment": dict(os.environ),
        "sys.path": list(sys.path),
        "folder": os.getcwd(),
        "signal handlers": [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)],
        "warning filters": list(warnings.filters),
        "excepthook": sys.excepthook,
    }
"""

IMPORT_ALONE = (
    PREAMBLE
    + """
torch.manual_seed(7)
before = state()
import hf_fastpath
after = state()
changed = [name for name in before if before[name] != after[name]]
assert not changed, f"import hf_fastpath changed: {changed}"
for name in ("transformers", "accelerate", "triton"):
    assert name not in sys.modules, f"import hf_fastpath imported {name}"
"""
)

IMPORT_BESIDE_TRANSFORMERS = """
import torch, transformers
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.mistral import modeling_mistral
from transformers import cache_utils

holders = [modeling_gpt2, modeling_mistral, cache_utils, torch.nn.functional, torch.nn.Linear, torch.Tensor]
holders += [transformers.GenerationMixin, transformers.PreTrainedModel, torch.nn.Module]
holders += [c for m in holders[:3] for c in vars(m).values() if isinstance(c, type)]
before = [dict(vars(holder)) for holder in holders]
import hf_fastpath
for holder, old in zip(holders, before):
    new = vars(holder)
    changed = [name for name in old.keys() | new.keys() if old.get(name) is not new.get(name)]
    assert not changed, f"import hf_fastpath changed {holder}: {changed}"
"""


@pytest.mark.parametrize("script", (IMPORT_ALONE, IMPORT_BESIDE_TRANSFORMERS), ids=("alone", "beside_transformers"))
def test_import_changes_nothing(script, tmp_path):
    root = str(Path(hf_fastpath.__file__).parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "", "import hf_fastpath printed something"
    assert not list(tmp_path.iterdir()), "import hf_fastpath left files"
