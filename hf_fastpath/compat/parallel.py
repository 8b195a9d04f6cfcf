"""transformers' tensor parallelism: which modules of a model hold only a shard of their weights, and how their outputs
are put together.

``from_pretrained(tp_plan=...)`` makes a sharded module's parameters DTensors, and gives the module a forward of its own
on the instance: a function in ``transformers.distributed`` that closes over the style, the mesh and the forward that
was there before. A ``distributed_config`` with expert parallelism does the same to experts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import nn

if torch.distributed.is_available():
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor, Replicate, Shard

    #: fills a tensor with those of all ranks; its name was ``all_gather_into_tensor`` until torch 2.12.
    #: Remove the old name when 2.12 is not supported.
    all_gather = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor
else:  # no object is an instance of these
    all_gather = None
    DTensor = FSDPModule = Replicate = Shard = ()

#: what brings tokens to experts that ranks have whole, and adds up what these make of them; up to transformers 5.22 it
#: was the style itself. Remove its name, the last, when 5.22 is not supported.
_SUMS_OF_EXPERTS = ("AutoEP", "AllReduceEP", "AllToAllEP", "EpDispatchExpertsParallel")
#: attributes of a spread model that hold its processes
OF_PROCESSES = ("_device_mesh", "_mesh_manager")


class ShardStyle(Enum):
    """How a module is spread over ranks; the values are transformers' names in a plan."""

    COLUMNS = "colwise"  # output features; each rank keeps its own
    GATHERED = "colwise_gather_output"  # output features; each rank gets all
    ROWS = "rowwise"  # input features, of which each rank has its own; the ranks' outputs are summed
    SPLIT_ROWS = "rowwise_split_input"  # the same, but each rank gets all input features, and takes its own
    VOCABULARY = "embedding_rowwise"  # rows of an embedding; the ranks' outputs are summed
    EXPERTS = "moe_tp_experts"  # inner features of every expert; the ranks' outputs are summed
    SOME_EXPERTS = "ep_dispatch_experts"  # experts, of which each rank has its own; the ranks' outputs are summed
    PICKED_EXPERTS = "grouped_gemm"  # the same behind a router that is PICKING
    PICKING = "ep_router"  # not at all; each rank is left with the choices among its own experts
    OWN = "local_params"  # parameters of the module's own, such as attention sinks; each rank uses its part
    WHOLE = "replicated_with_grad_allreduce"  # not at all; gradients may be summed


#: class of a style that changes nothing but gradients, or which parameters a forward sees -> the style
_OTHER_STYLES = {
    "TensorParallelLayer": ShardStyle.WHOLE,
    "MlaKvAProjParallel": ShardStyle.WHOLE,
    "LocalParamsParallel": ShardStyle.OWN,
}


class Parallel(NamedTuple):
    """A forward that tensor or expert parallelism has put onto a module.

    Attributes:
        style: how the module is spread, or None if in no way that :class:`ShardStyle` has.
        name: name of the style's class, or of what brings experts their tokens.
        inner: the forward that was there before.
    """

    style: ShardStyle | None
    name: str
    inner: Any


def planned_styles(model: nn.Module) -> dict[str, str]:
    """Return the name of each module and parameter that ``tp_plan="auto"`` would spread -> transformers' style."""
    plan = dict(getattr(model, "tp_plan", None) or {})
    found = {}
    for name, _ in (*model.named_modules(), *model.named_parameters()):
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style is not None:
            found[name] = style
    return found


def is_tensor_parallel(model: nn.Module) -> bool:
    """Whether transformers has spread a model over ranks by a ``tp_plan``, and in no other way."""
    mesh = getattr(model, "_device_mesh", None)
    ranks = getattr(model, "_tp_size", None) or 1
    return mesh is not None and ranks > 1 and mesh.size() == ranks and not isinstance(model, FSDPModule)


def rank_group(model: nn.Module) -> Any:
    """Return the process group of the ranks over which a tensor-parallel model is spread."""
    mesh = model._device_mesh
    return mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")


def store_of(group: Any) -> Any:
    """Return the store of a process group, through which its ranks found each other; None if the group is gone."""
    known = torch.distributed.distributed_c10d._world.pg_map.get(group)
    return None if known is None else known[1]


@contextmanager
def bounded_waits(group: Any, seconds: float) -> Iterator[None]:
    """Let each collective of a group on the CPU wait so long at most, for the length of a ``with`` block.

    NCCL's are left alone: behind its limit the watchdog ends the process.
    """
    backends = [group._get_backend(torch.device(kind)) for kind in map(str, group._device_types) if kind == "cpu"]
    before = [(each, each.options._timeout) for each in backends if hasattr(each, "_set_default_timeout")]
    for backend, _ in before:
        backend._set_default_timeout(timedelta(seconds=seconds))
    try:
        yield
    finally:
        for backend, limit in before:
            backend._set_default_timeout(limit)


def is_lost_connection(error: BaseException) -> bool:
    """Whether an error is a collective's whose other ranks have not come, or are gone."""
    if isinstance(error, torch.distributed.DistError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("/gloo/" in text or "timeout caused pair closure" in text)


def parallel_forward(module: nn.Module) -> Parallel | None:
    """Return the forward that tensor or expert parallelism has put onto ``module``, or None if there is none."""
    forward = vars(module).get("forward")
    code = getattr(forward, "__code__", None)
    if code is None or not getattr(forward, "__module__", "").startswith("transformers.distributed."):
        return None
    owner, _, rest = forward.__qualname__.partition(".")
    if rest not in ("install_forward.<locals>.tp_forward", "install_forward.<locals>.ep_forward"):
        return None
    closed = {name: cell.cell_contents for name, cell in zip(code.co_freevars, forward.__closure__)}
    if closed["module"] is not module:  # a copy has the forward of the module that was copied
        return None
    if owner == "ReplicatedWithGradAllReduce":
        return Parallel(ShardStyle.WHOLE, owner, closed["original_forward"])
    style = closed["self"]
    if owner == "EpDispatchExpertsParallel":
        implementation = closed.get("implementation")
        inner = closed["experts_forward"] if implementation is None else implementation.experts_forward
        used = style if implementation is None else implementation
        is_known = type(used).__name__ in _SUMS_OF_EXPERTS and type(used).__module__ == forward.__module__
        return Parallel(ShardStyle.SOME_EXPERTS if is_known else None, type(used).__name__, inner)
    return Parallel(_style_of(style, module), type(style).__name__, closed["original_forward"])


def _style_of(style: Any, module: nn.Module) -> ShardStyle | None:
    name = type(style).__name__
    inputs, outputs = getattr(style, "input_layouts", None), getattr(style, "output_layouts", None)
    if isinstance(module, nn.Embedding):
        if name == "EmbeddingParallel":
            return ShardStyle.VOCABULARY if style.shard_dim == 0 else None
        return ShardStyle.VOCABULARY if name == "RowwiseParallel" and outputs == Replicate() else None
    if name == "ColwiseParallel" and inputs == Replicate():
        return {Shard(-1): ShardStyle.COLUMNS, Replicate(): ShardStyle.GATHERED}.get(outputs)
    if name == "MoeExpertsParallel":
        sharded = [parameter for parameter in module.parameters() if is_sharded(parameter)]
        return ShardStyle.PICKED_EXPERTS if {*map(sharded_dim, sharded)} == {0} else ShardStyle.EXPERTS
    if name == "EpRouterParallel":
        return ShardStyle.PICKING
    if name == "RowwiseParallel" and outputs == Replicate():
        return {Shard(-1): ShardStyle.ROWS, Replicate(): ShardStyle.SPLIT_ROWS}.get(inputs)
    return _OTHER_STYLES.get(name)


def spread_like(original: nn.Module, made: nn.Module) -> None:
    """Spread a layer of this rank's quantized shards as tensor parallelism has spread ``original``."""
    forward = vars(original)["forward"]
    closed = {name: cell.cell_contents for name, cell in zip(forward.__code__.co_freevars, forward.__closure__)}
    made._hf_quantized_needs_local_tp = True  # the forward takes and gives plain tensors
    closed["self"].install_forward(made, closed["mesh"])


def move(parameter: torch.Tensor, device: torch.device | str) -> None:
    """Move a parameter's data, or this rank's shard of a DTensor's; the device that a DTensor names stays."""
    if isinstance(parameter, DTensor):
        parameter._local_tensor = parameter._local_tensor.to(device)
    else:
        parameter.data = parameter.data.to(device)


def whole_experts(ranks: int, **options: Any) -> Any:
    """Return a ``distributed_config`` that gives each rank some experts as a whole; what else is spread is up to the
    release.

    Args:
        options: others of the config's.
    """
    from transformers.distributed import DistributedConfig

    # Remove the other way when no supported release lacks ``ep_size``: 5.17 does.
    is_sized = "ep_size" in DistributedConfig.__dataclass_fields__
    size = {"ep_size": ranks} if is_sized else {"enable_expert_parallel": True}
    return DistributedConfig(tp_size=ranks, tp_plan="auto", **size, **options)


def spread_over_ranks(model: nn.Module, has_whole_experts: bool = False) -> nn.Module:
    """Spread a model on the meta device as ``from_pretrained(tp_plan="auto")`` does, over all processes.

    Args:
        has_whole_experts: experts are spread by :func:`whole_experts` instead.
    """
    from transformers.distributed import DistributedConfig

    ranks = torch.distributed.get_world_size()
    config = whole_experts(ranks) if has_whole_experts else DistributedConfig(tp_size=ranks, tp_plan="auto")
    config, _, mesh = type(model).prepare_distribute_model(config, device_map=None)
    return type(model).maybe_distribute_model(model, config, mesh)


def with_local_tensor(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a DTensor like ``parameter`` with ``local`` as this rank's shard."""
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def shared_memory(group: Any, num_bytes: int, device: torch.device) -> Callable[..., torch.Tensor]:
    """Allocate memory of a GPU that the other ranks of a process group on the same host read and write.

    Every rank has to call this. NVLink multicast is left alone.

    Returns:
        A function of a rank, sizes and a dtype, which gives that rank's memory as a tensor.

    Raises:
        RuntimeError: the GPUs cannot see each other's memory.
    """
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    from torch.distributed import _symmetric_memory

    own = _symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
    handle = _symmetric_memory.rendezvous(own, group.group_name)

    def of_rank(rank: int, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        made = handle.get_buffer(rank, sizes, dtype)
        made.hf_fastpath_memory = own, handle  # the memory lives as long as its tensors
        return made

    return of_rank


def is_sharded(tensor: torch.Tensor | None) -> bool:
    """Whether this process may have only a part of a tensor."""
    return isinstance(tensor, DTensor)


def sharded_dim(tensor: torch.Tensor) -> int | None:
    """Return the dimension along which a DTensor is spread over the ranks of one mesh dimension.

    Returns:
        None if every rank has all of the tensor, or the tensor is spread in another way.
    """
    (placement, *others) = tensor.placements
    if others or type(placement) is not Shard:
        return None
    return placement.dim % tensor.dim()


def halves_sharded_dim(tensor: torch.Tensor) -> int | None:
    """Return the dimension of which a rank has a part of the first half and the same part of the second; or None."""
    (placement, *others) = tensor.placements
    if others or type(placement).__name__ != "_StridedShard" or placement.split_factor != 2:
        return None
    return placement.dim % tensor.dim()


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, which lies where the DTensor keeps it; another tensor as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
