"""The checks that every op goes through, written once over :class:`hf_fastpath.registry.OpSpec`.

``globals().update(common_tests(SPEC))`` gives a test file its ``test_<op>_...`` functions, which compare three
computations of one call: *ours* (the op through ``torch.ops``), *stock* (its reference in the working dtype)
and *ref* (its reference in float64), by the numerics rule ``|ours - ref| <= 2 |stock - ref| + eps |ref|``,
with maxima over the tensor. Nothing here has a tolerance of its own.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from memory import LAYOUTS, compact, duplicate, intact, poisoned, same_bits, same_storage, upcast

from hf_fastpath.registry import FLOAT_DTYPES, OpInputError, OpSpec, Sample

DTYPES = FLOAT_DTYPES
over_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
Samples = Callable[[torch.device, torch.dtype], Iterable[Sample]]


# ---- one call, three ways ----------------------------------------------------------------------------------


def arguments(spec: OpSpec, sample: Sample) -> dict[str, object]:
    """Return the sample's arguments by name, in schema order."""
    names = [argument.name for argument in spec.overload._schema.arguments]
    return dict(zip(names, sample.args, strict=False)) | sample.kwargs


def tensors(spec: OpSpec, sample: Sample) -> dict[str, torch.Tensor]:
    """Return the sample's tensor arguments by name.

    Tensors in lists are called ``name[index]``; empty ones, which stand for absent ones there, are left out.
    """
    found = {}
    for name, value in arguments(spec, sample).items():
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif isinstance(value, list):
            items = enumerate(value)
            found |= {f"{name}[{i}]": t for i, t in items if isinstance(t, torch.Tensor) and t.numel()}
    return found


@functools.cache
def written(spec: OpSpec) -> frozenset[str]:
    """Return the names of the arguments that the op writes to, by its schema."""
    arguments = spec.overload._schema.arguments
    return frozenset(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)


def is_written(spec: OpSpec, name: str) -> bool:
    """Whether the op writes to this one of its ``tensors()``."""
    return name.partition("[")[0] in written(spec)


def replaced(spec: OpSpec, sample: Sample, **values: object) -> Sample:
    """Return the sample with some arguments exchanged, by name; ``name[index]`` is one tensor of a list."""
    given = arguments(spec, sample)
    for key, value in values.items():
        name, _, index = key.partition("[")
        if index:
            given[name] = list(given[name])
            given[name][int(index[:-1])] = value
        else:
            given[name] = value
    return spec.numbered(Sample(**given))


def concatenated(result: torch.Tensor | list[torch.Tensor]) -> torch.Tensor:
    """Return what an op returned as one tensor: of several, all their elements in a row."""
    if isinstance(result, torch.Tensor):
        return result
    with torch.autocast(result[0].device.type, enabled=False):
        return torch.cat([tensor.flatten() for tensor in result])


def run(spec: OpSpec, function: Callable[..., Any], sample: Sample) -> dict[str, torch.Tensor]:
    """Call ``function`` on ``sample``; return its result and the floating or quantized arguments it wrote, by name."""
    call = spec.numbered(sample)
    result = {"result": concatenated(function(*call.args, **call.kwargs))}
    for name, tensor in tensors(spec, sample).items():
        if is_written(spec, name) and (tensor.is_floating_point() or tensor.dtype == torch.int8):
            result[name] = tensor
    return result


def ours(spec: OpSpec, sample: Sample) -> dict[str, torch.Tensor]:
    """Run the op on a copy of ``sample`` in the same layout, and check that it writes only where it may."""
    call = sample.map_tensors(duplicate)
    result = run(spec, spec.overload, call)
    after = tensors(spec, call)
    for name, before in tensors(spec, sample).items():
        if not is_written(spec, name):
            assert same_storage(before, after[name]), f"{spec.name} changed its argument {name}"
    return result


def describe(spec: OpSpec, sample: Sample) -> str:
    """Describe the call in one line: shapes of tensors (and unusual strides), values of the rest."""

    def text(value: object) -> str:
        if isinstance(value, list):
            return f"[{', '.join(map(text, value))}]"
        if not isinstance(value, torch.Tensor):
            return repr(value)
        strides = "" if value.is_contiguous() else f" strides {list(value.stride())}"
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{strides}"

    given = ", ".join(f"{name}={text(value)}" for name, value in arguments(spec, sample).items())
    return f"{spec.name}({given})"


# ---- the numerics rule -------------------------------------------------------------------------------------


def assert_rule(ours: torch.Tensor, stock: torch.Tensor, ref: torch.Tensor, what: str) -> None:
    """Assert that ``ours`` is as near to ``ref`` as the rule demands; integers are those of ``stock``.

    Elements that are NaN or infinite have no error to measure: there ``ours`` has to be what ``ref`` or
    ``stock`` is (PyTorch's own functions disagree with their float64 selves on gelu(inf), for one).
    """
    assert ours.shape == ref.shape, f"{what}: shape {list(ours.shape)}, expected {list(ref.shape)}"
    assert ours.dtype == stock.dtype, f"{what}: dtype {ours.dtype}, expected {stock.dtype}"
    if not ours.dtype.is_floating_point:
        assert torch.equal(ours, stock), f"{what}: {ours.tolist()}, expected {stock.tolist()}"
        return
    wrong = ~(_same_kind(ours, ref) | _same_kind(ours, stock))
    if wrong.any():
        first = tuple(wrong.nonzero()[0].tolist())
        values = f"{ours[first].item()} where the reference has {ref[first].item()}"
        raise AssertionError(f"{what}: {int(wrong.sum())} of {ref.numel()} elements wrong, first at {first}: {values}")
    finite = ours.isfinite() & stock.isfinite() & ref.isfinite()
    if not finite.any():
        return
    error, stock_error = ((t.double() - ref)[finite].abs().max().item() for t in (ours, stock))
    scale = ref[finite].abs().max().item()
    bound = 2 * stock_error + torch.finfo(ours.dtype).eps * scale
    assert error <= bound, f"{what}: error {error:.3e}, bound {bound:.3e} (stock {stock_error:.3e}, scale {scale:.3e})"


def _same_kind(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return where both are NaN, the same infinity, or finite."""
    special = [torch.where(t.isfinite(), 0.0, t.double()) for t in (a, b)]
    return torch.isclose(*special, rtol=0, atol=0, equal_nan=True) & (a.isfinite() == b.isfinite())


def stock_and_ref(spec: OpSpec, sample: Sample) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return what the reference makes of a call in the working dtype and in float64, as :func:`run` does."""
    return tuple(run(spec, spec.reference, sample.map_tensors(each)) for each in (duplicate, upcast))


def assert_matches(spec: OpSpec, sample: Sample, label: str = "", known: tuple | None = None) -> torch.Tensor:
    """Assert the numerics rule on one call, for its result and for the arguments it writes to.

    Args:
        spec: the op.
        sample: what the op is called with; stock is called with the same layouts.
        label: how this call differs from the obvious one, for the message.
        known: the call's :func:`stock_and_ref`, if they have been computed.

    Returns:
        The op's result.
    """
    stock, ref = known or stock_and_ref(spec, sample)
    mine = ours(spec, sample)
    for name, tensor in mine.items():
        if tensor.element_size() == 1:
            continue  # quants have no error of their own: the tests of their op compare them by their scales
        assert_rule(tensor, stock[name], ref[name], f"{label} {describe(spec, sample)}: {name}".lstrip())
    assert mine["result"].is_contiguous(), f"{describe(spec, sample)}: the result is not contiguous"
    return mine["result"]


def assert_same_as_copy(spec: OpSpec, sample: Sample, label: str) -> None:
    """Assert that views give what their contiguous copies give: the same bits, or else results within the rule."""
    views, copies = ours(spec, sample), ours(spec, sample.map_tensors(compact))
    if not all(same_bits(views[name], copies[name]) for name in views):
        assert_matches(spec, sample, label)


def is_native(spec: OpSpec, device: torch.device) -> bool:
    """Whether a native library implements the op on this device; else the op is the reference."""
    # torch has no public way to ask for a kernel registered for one key alone.
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(f"hf_fastpath::{spec.name}", {"cpu": "CPU", "cuda": "CUDA"}[device.type])


def assert_exact(spec: OpSpec, sample: Sample, noise: float = 0.0) -> None:
    """Assert that the op gives, bit for bit, the float64 result rounded once.

    Args:
        spec: the op.
        sample: what the op is called with; its results have no rounding in their dtype.
        noise: what float32 may leave where products cancel, if the kernel's factors are no powers of two; much less
            than the smallest product.
    """
    ref = spec.reference(*sample.map_tensors(upcast).args, **sample.map_tensors(upcast).kwargs)
    got = ours(spec, sample)["result"]
    wrong = ((got.double() - ref).abs() > noise).sum().item()
    assert torch.equal(ref.to(got.dtype).double(), ref), "the sample itself is not exact in this dtype"
    assert wrong == 0, f"{describe(spec, sample)}: {wrong} of {ref.numel()} integer results differ"


def small_integers(
    device: torch.device, dtype: torch.dtype, x_shape: tuple[int, ...], *weight_shapes: tuple[int, ...]
) -> list[torch.Tensor]:
    """Make x and weights in {-1, 0, 1} whose products x @ weight.T are exact in ``dtype``, in any order of sums.

    At most 200 elements of a row of x are not zero, the first and the last among them: every partial sum is
    an integer below 256, bfloat16's last exact one, with room for a small bias and residual.
    """
    length = x_shape[-1]
    x = torch.randint(0, 2, x_shape, device=device) * 2 - 1
    kept = torch.rand(x_shape, device=device).argsort(-1) < 198
    kept[..., 0] = kept[..., length - 1] = True
    weights = [torch.randint(-1, 2, shape, device=device).to(dtype) for shape in weight_shapes]
    return [(x * kept).to(dtype), *weights]


# ---- gradients ---------------------------------------------------------------------------------------------


def formula(spec: OpSpec) -> type[torch.autograd.Function]:
    """Make an autograd function, in any dtype, of the op's reference and the op's backward.

    Native kernels take no float64, so ``gradcheck`` has to reach the formula without them.
    """
    methods = {"forward": spec.reference, "setup_context": spec.setup_context, "backward": spec.backward}
    return type(f"{spec.name}_formula", (torch.autograd.Function,), {k: staticmethod(f) for k, f in methods.items()})


def assert_gradients(spec: OpSpec, inputs: tuple[torch.Tensor, ...], upstream: torch.Tensor, *options: object) -> None:
    """Assert the numerics rule on the gradients of ``inputs``; ref and stock are autograd's own gradients."""

    def gradients(function: Callable[..., torch.Tensor], wide: bool) -> tuple[torch.Tensor, ...]:
        leaves = [(upcast(t) if wide else t.clone()).requires_grad_() for t in inputs]
        return torch.autograd.grad(function(*leaves, *options), leaves, upstream.double() if wide else upstream)

    ref, stock = gradients(spec.reference, True), gradients(spec.reference, False)
    for number, got in enumerate(gradients(spec.overload, False)):
        assert_rule(got, stock[number], ref[number], f"{spec.name}{options}: gradient of argument {number}")


# ---- the common tests --------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)  # of one op: each dtype's samples and odd sizes
def made(samples: Samples, device: torch.device, dtype: torch.dtype) -> list[Sample]:
    """Return the samples, which the tests of an op share: they compute over copies."""
    return list(samples(device, dtype))


def common_tests(spec: OpSpec, odd_sizes: Samples | None = None) -> dict[str, Callable[..., None]]:
    """Make the tests that every op has, by name.

    Args:
        spec: the op.
        odd_sizes: makes more calls, of sizes that no kernel is tuned for; with None, the op's own samples.
    """
    odd_sizes = odd_sizes or spec.samples

    @over_dtypes
    def matches_reference(device: torch.device, dtype: torch.dtype) -> None:
        """Every sample keeps the numerics rule, and the checked call gives what the bare op gives."""
        for sample in made(spec.samples, device, dtype):
            result = assert_matches(spec, sample)
            call = sample.map_tensors(duplicate)
            assert same_bits(result, concatenated(spec(*call.args, **call.kwargs)))

    @over_dtypes
    def handles_odd_sizes(device: torch.device, dtype: torch.dtype) -> None:
        """Sizes may be no multiple of a vector, a tile or a thread count."""
        for sample in made(odd_sizes, device, dtype):
            assert not spec.why_not(*sample.args, **sample.kwargs)
            assert_matches(spec, sample)

    @over_dtypes
    def handles_views(device: torch.device, dtype: torch.dtype, few: Any) -> None:
        """Each argument in each layout is refused with a reason, or taken as its contiguous copy is."""
        for number, sample in enumerate(few(made(spec.samples, device, dtype), 24)):
            for layout in LAYOUTS:
                taken = {}
                for name, tensor in tensors(spec, sample).items():
                    single = {name: layout(tensor)}
                    call = replaced(spec, sample, **single)
                    if spec.why_not(**call.kwargs):
                        with pytest.raises(OpInputError):
                            spec(**call.kwargs)
                        continue
                    taken |= single
                    if number == 0:
                        assert_same_as_copy(spec, call, f"{layout.__name__} {name}:")
                assert_same_as_copy(spec, replaced(spec, sample, **taken), f"{layout.__name__} {list(taken)}:")

    @over_dtypes
    def handles_broadcast_views(device: torch.device, dtype: torch.dtype) -> None:
        """Rows of an argument may be one row repeated with stride 0."""
        for sample in itertools.islice(made(spec.samples, device, dtype), 3):
            for name, tensor in tensors(spec, sample).items():
                if (
                    is_written(spec, name)
                    or not tensor.is_floating_point()
                    or tensor.isnan().any()
                    or not tensor.numel()
                ):
                    continue
                call = replaced(spec, sample, **{name: tensor[:1].expand_as(tensor)})
                if not spec.why_not(**call.kwargs):
                    assert_same_as_copy(spec, call, f"broadcast {name}:")

    @over_dtypes
    def writes_every_element(device: torch.device, dtype: torch.dtype, few: Any) -> None:
        """Output memory that held NaN ends up as the result, with the same bits each time."""
        for sample in few(made(spec.samples, device, dtype), 40):
            first = ours(spec, sample)
            for _ in range(3):
                call = sample.map_tensors(duplicate)
                with poisoned(device, first["result"].nbytes):
                    again = run(spec, spec.overload, call)
                assert intact(again["result"]), f"{describe(spec, sample)}: elements left unwritten"
                for name, tensor in again.items():
                    assert same_bits(tensor, first[name]), f"{describe(spec, sample)}: {name} differs between runs"

    def opcheck(device: torch.device, few: Any) -> None:
        """The schema tells the truth, the fake agrees with the op, autograd and AOT dispatch work."""
        quick = ("test_schema", "test_autograd_registration", "test_faketensor")
        for number, sample in enumerate(few(made(spec.samples, device, torch.float32), 12)):
            utils = (*quick, "test_aot_dispatch_dynamic") if number < 2 else quick
            if any(tensor.dtype == torch.float8_e4m3fn for tensor in sample.tensors()):
                utils = quick[1:]  # the first one compares arguments by arithmetic, which float8 does not have
            torch.library.opcheck(spec.overload, sample.args, sample.kwargs, test_utils=utils)
            if spec.backward is not None and number < 2:
                leaves = sample.map_tensors(lambda tensor: duplicate(tensor).requires_grad_())
                torch.library.opcheck(spec.overload, leaves.args, leaves.kwargs)

    def rejects_bad_input(device: torch.device) -> None:
        """A wrong dtype, shape, device or choice is an error that names the op, never a crash or a number."""
        sample = made(spec.samples, device, torch.float32)[0]
        for what, call in odd_ranks(spec, sample):
            if not spec.why_not(**call.kwargs):
                assert_matches(spec, call, f"{what}:")
        for what, call in bad_calls(spec, sample):
            with pytest.raises(OpInputError) as error:
                spec(**call.kwargs)
                pytest.fail(f"{spec.name} took {what}")
            assert str(error.value).startswith(f"hf_fastpath.ops.{spec.name}: "), what
            if is_native(spec, device) and "device" not in what:  # the library has checks of its own behind Python's
                with pytest.raises(RuntimeError):
                    spec.overload(**call.kwargs)
                    pytest.fail(f"the native {spec.name} took {what}: {describe(spec, call)}")

    def compiles(device: torch.device) -> None:
        """``torch.compile`` makes one graph, which gives the same bits as eager."""
        for sample in itertools.islice(made(spec.samples, device, torch.float32), 2):
            torch.compiler.reset()
            compiled = torch.compile(spec.overload, fullgraph=True, backend="aot_eager")
            expected = ours(spec, sample)
            for name, tensor in run(spec, compiled, sample.map_tensors(duplicate)).items():
                assert same_bits(tensor, expected[name]), f"compiled {describe(spec, sample)}: {name}"

    @over_dtypes
    def ignores_autocast(device: torch.device, dtype: torch.dtype, few: Any) -> None:
        """An autocast region changes no bit: the arguments' dtype decides, not the region's."""
        for sample in few(made(spec.samples, device, dtype), 6):
            expected = ours(spec, sample)
            for region in (torch.float16, torch.bfloat16):
                with torch.autocast(device.type, dtype=region):
                    got = ours(spec, sample)
                for name, tensor in got.items():
                    assert same_bits(tensor, expected[name]), f"autocast {region} {describe(spec, sample)}: {name}"

    def any_thread_count(few: Any) -> None:
        """The rule holds however the work is split, and each split repeats bit for bit."""
        counts = {1, 2, 3} - {torch.get_num_threads()}  # all other tests run with these
        for sample in itertools.chain.from_iterable(
            few(made(f, torch.device("cpu"), torch.float32), 40) for f in (spec.samples, odd_sizes)
        ):
            known = stock_and_ref(spec, sample)
            for threads in counts:
                torch.set_num_threads(threads)
                first = assert_matches(spec, sample, f"{threads} threads:", known)
                assert same_bits(first, ours(spec, sample)["result"])

    @over_dtypes
    def replays_in_cuda_graph(cuda: torch.device, dtype: torch.dtype) -> None:
        """A graph that was captured once and is replayed on new values gives the bits of an eager call on them."""
        for sample, fresh in zip(spec.samples(cuda, dtype), spec.samples(cuda, dtype), strict=True):
            static = sample.map_tensors(duplicate)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # lazy initialization must not land in the capture
                spec.overload(*static.args, **static.kwargs)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = run(spec, spec.overload, static)
            expected = ours(spec, fresh)
            for _ in range(2):
                values = tensors(spec, fresh)
                for name, tensor in tensors(spec, static).items():
                    tensor.copy_(values[name])
                graph.replay()
                for name, tensor in result.items():
                    assert same_bits(tensor, expected[name]), f"replayed {describe(spec, sample)}: {name}"

    tests = (
        matches_reference,
        handles_views,
        handles_broadcast_views,
        handles_odd_sizes,
        writes_every_element,
        opcheck,
        rejects_bad_input,
        compiles,
        ignores_autocast,
        any_thread_count,
        replays_in_cuda_graph,
    )
    return {f"test_{spec.name}_{test.__name__}": test for test in tests}


def bad_calls(spec: OpSpec, sample: Sample) -> Iterator[tuple[str, Sample]]:
    """Yield calls that differ from ``sample`` in one thing that the op must refuse, with a description."""
    given = tensors(spec, sample)
    doubles = {name: t.double() for name, t in given.items() if t.is_floating_point()}
    yield "float64 throughout", replaced(spec, sample, **doubles)
    for name, tensor in given.items():
        yield f"{name} of another dtype", replaced(spec, sample, **{name: tensor.to(torch.int16)})
        if len(given) > 1:  # a lone tensor may have any shape and lie on any device
            longer = torch.cat([tensor, tensor[..., :1]], -1)
            yield f"{name} with one column more", replaced(spec, sample, **{name: longer})
            yield f"{name} on another device", replaced(spec, sample, **{name: tensor.to("meta")})
    for name in spec.choices:
        for value in ("gelu_new", -1, 99):
            yield f"{value} as {name}", replaced(spec, sample, **{name: value})


def odd_ranks(spec: OpSpec, sample: Sample) -> Iterator[tuple[str, Sample]]:
    """Yield calls in which one tensor has an unusual number of dimensions; they are computed rightly, or refused."""
    for name, tensor in tensors(spec, sample).items():
        yield f"{name} with more dimensions", replaced(spec, sample, **{name: tensor[None, None, None]})
        yield f"{name} with one dimension", replaced(spec, sample, **{name: tensor.flatten()})
        yield f"{name} without dimensions", replaced(spec, sample, **{name: tensor.flatten()[0]})
