"""Passes over a recorded list, each of which recognizes one thing; in their order.

A pass takes a :class:`..recording.Recording` and changes its calls; what it does not recognize it leaves alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import nn

from ..recording import Recording
from ..stand_ins import StandIns
from . import (
    adapters,
    attention,
    axes,
    experts,
    gated_norms,
    head_norms,
    joined_products,
    late_sums,
    latent_rotation,
    lengths,
    masked_writes,
    modules,
    norms,
    output_gates,
    own_attention,
    position_bias,
    products,
    products_of_heads,
    routers,
    scaled_experts,
    shared_experts,
    states,
    views,
)

Pass = Callable[[Recording, nn.Module], None]

PASSES: tuple[Pass, ...] = (
    position_bias.position_biases,
    lengths.positions_in_text,
    masked_writes.masked_writes,
    modules.module_formulas,
    experts.experts_without_weights,
    experts.stacked_experts,
    gated_norms.gated_norms,
    modules.functions,
    views.constants,
    views.constant_views,
    axes.writes_of_like_axes,
    views.turned_back,
    views.no_change,
    products.products_from_the_left,
    products.matrix_products,
    products_of_heads.products_of_heads,
    late_sums.late_sums,
    scaled_experts.scaled_experts,
    products.unflattened,
    views.no_change,
    adapters.adapters,
    states.short_convolutions,
    states.gated_delta_steps,
    states.selective_state_steps,
    products_of_heads.convolutions,
    products.split_products,
    own_attention.own_attention,
    attention.rotations,
    head_norms.head_norms,
    latent_rotation.latent_rotations,
    attention.projections,
    attention.flat_attention,
    views.no_change,
    products.unflattened,
    views.no_change,
    routers.router_logits,
    routers.routers,
    products.gates,
    output_gates.activated_gates,
    products.activations,
    norms.wide_residuals,
    output_gates.output_gates,
    output_gates.gates_in_front,
    products.residuals,
    norms.norm_factors,
    products.norms_in_front,
    shared_experts.shared_experts,
    joined_products.joined_products,
    joined_products.joined_gathers,
)


def passed(recording: Recording, model: nn.Module, without: Collection[Pass] = ()) -> Recording:
    """``recording`` behind all passes.

    Args:
        model: whose tensors the calls hold.
        without: passes that are left out.

    Raises:
        StandInRead: a call reads a stand-in, which it cannot.
        Unrecordable: a call depends on how long the text was when it was recorded.
    """
    recording.drop_unread()
    for each in PASSES:
        if each in without:
            continue
        each(recording, model)
        recording.drop_unread()
    lengths.check_lengths(recording)
    stand_ins = StandIns(recording)
    for call in recording.calls:
        stand_ins.check(call)
    return recording
