"""Mixtures whose experts lie on two processes: each reads its own experts among the chosen ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import assert_same_instances, build, instances
from processes import (
    COUNT,
    SIZES,
    assert_fast,
    assert_half_types,
    assert_tokens,
    device,
    needs_processes,
    run,
    save,
    some_prompt,
    spread,
    tokens_of,
)
from transformers.distributed import DistributedConfig

import hf_fastpath
from hf_fastpath import UnsupportedModelError
from hf_fastpath.compat import whole_experts

pytestmark = needs_processes
#: experts that two processes can share; with one chosen expert a process may have nothing to do
FAMILIES = {
    "qwen3_moe": dict(num_experts=4, num_experts_per_tok=2),
    "mixtral": dict(num_local_experts=6, num_experts_per_tok=1),
    "gpt_oss": dict(num_local_experts=4, num_experts_per_tok=3),
}
#: all experts of a token are chosen, so that roundings of their scores change no choice
ALL = dict(num_local_experts=4, num_experts_per_tok=4)
#: whether an object of transformers brings experts their tokens; before, routers picked each rank's own
IS_DISPATCHED = "ep_implementation" in DistributedConfig.__dataclass_fields__


def _equal_tokens(rank: int, folder: Path) -> None:
    for family, sizes in FAMILIES.items():
        whole = build(family, **SIZES | sizes)
        assert_tokens(rank, spread(folder / family, distributed_config=whole_experts(COUNT)), whole)


def test_tokens_are_those_of_stock_and_of_one_process(tmp_path):
    for family, sizes in FAMILIES.items():
        save(tmp_path / family, family, **sizes)
    run(_equal_tokens, tmp_path)


def _half_types(rank: int, folder: Path) -> None:
    assert_half_types(rank, folder, build("mixtral", **SIZES | ALL), distributed_config=whole_experts(COUNT))


def test_half_types(tmp_path):
    save(tmp_path, "mixtral", **ALL)
    run(_half_types, tmp_path)


def _other_ways(rank: int, folder: Path) -> None:
    """Every way of transformers' own to bring tokens to experts; and quantized projections beside experts."""
    inputs = {"input_ids": some_prompt(device(rank), 2)}
    for name in ("all_reduce", "all_to_all") if IS_DISPATCHED else ():
        model = spread(folder / "mixtral", distributed_config=whole_experts(COUNT, ep_implementation=name))
        expected = tokens_of(model, inputs)
        hf_fastpath.patch(model, quiet=True)
        assert torch.equal(tokens_of(model, inputs), expected), name
        assert_fast(model)
    model = spread(folder / "mixtral", distributed_config=whole_experts(COUNT))
    whole = build("mixtral", **SIZES | FAMILIES["mixtral"]).to(device(rank))
    for each in (model, whole):
        hf_fastpath.patch(each, weights="int8", quiet=True)
    assert torch.equal(tokens_of(model, inputs), tokens_of(whole, inputs))
    assert_fast(model)


def test_other_ways(tmp_path):
    save(tmp_path / "mixtral", "mixtral", **FAMILIES["mixtral"])
    run(_other_ways, tmp_path)


def _config_of_a_way_that_is_unknown() -> tuple[DistributedConfig, str]:
    """Return a config, and what the reason names."""
    if not IS_DISPATCHED:  # experts without a router that picks
        experts = "model.layers.*.mlp.experts"
        plan = {f"{experts}.gate_up_proj": "grouped_gemm", f"{experts}.down_proj": "grouped_gemm"}
        return DistributedConfig(tp_size=2, tp_plan=plan | {experts: "moe_tp_experts"}), "grouped_gemm"
    from transformers.distributed.expert_parallel import AllReduceEP, EPImplementationInterface

    class Own(AllReduceEP):
        pass

    EPImplementationInterface.register("own", Own)
    return whole_experts(COUNT, ep_implementation="own"), "Own"


def _refused(rank: int, folder: Path) -> None:
    config, named = _config_of_a_way_that_is_unknown()
    model = spread(folder / "mixtral", distributed_config=config)
    before = instances(model)
    with pytest.raises(UnsupportedModelError, match=f"layers.0.mlp.experts is spread by {named}"):
        hf_fastpath.patch(model, quiet=True)
    assert_same_instances(instances(model), before)


def test_unknown_ways_are_refused(tmp_path):
    save(tmp_path / "mixtral", "mixtral", **FAMILIES["mixtral"])
    run(_refused, tmp_path)
