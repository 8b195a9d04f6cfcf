"""The passes that make one call of marks and of what is around them; in their order, behind those of ``recognized``."""

from __future__ import annotations

from ...decode.calls.pass_table import Pass
from . import (
    attention,
    head_norms,
    joined_products,
    latent_rotation,
    norms,
    output_gates,
    products,
    routers,
    shared_experts,
)
from .recognized import ADAPTERS, NO_CHANGE, UNFLATTENED

FUSED: tuple[Pass, ...] = (
    Pass(
        "rotations",
        attention.rotations,
        "It finds rotary embeddings between projections and attention, and makes `rope_append` of them.",
        {
            "own_attention": "they are looked for in front of attention",
            "matrix_products": "projections end what is compared",
            "split_products": "queries, keys and values of one product are projections of their own then",
            "module_formulas": "norms end what is compared",
            "unflattened": "a projection of flattened rows gives heads by a further view",
            "no_change": "a copy of angles that changes nothing hides which table they are of",
        },
    ),
    Pass(
        "head_norms",
        head_norms.head_norms,
        "It finds norms of queries and keys in front of rotation, and lets the rotation do them.",
        {"rotations": "they are looked for in front of it"},
    ),
    Pass(
        "latent_rotations",
        latent_rotation.latent_rotations,
        "It finds rotary embeddings in front of attention over a latent, and lets that attention do them.",
        {"split_products": "queries and latents are projections of their own then"},
    ),
    Pass(
        "projections",
        attention.projections,
        "It finds projections in front of rotation and attention, and makes one call of all.",
        {
            "rotations": "they are looked for in front of it",
            "head_norms": "a norm lies between a projection and the rotation",
        },
    ),
    Pass(
        "flat_attention",
        attention.flat_attention,
        "It finds attention, and lets it give features side by side, as its op does.",
        {
            "own_attention": "it makes attention of a model's own",
            "rotations": "it takes attention as it was recorded",
            "projections": "it takes attention as it was recorded",
        },
    ),
    NO_CHANGE.once_more(
        "`flat_attention` has put a view behind attention, in front of the model's own.",
        {"flat_attention": "it makes these views"},
    ),
    UNFLATTENED.once_more(
        "The product behind attention may take its rows as attention gives them.",
        {"no_change#3": "attention's rows may be flattened by several views"},
    ),
    NO_CHANGE.once_more(
        "`unflattened` has put views behind calls, in front of other views.",
        {"unflattened#2": "it makes these views"},
    ),
    ADAPTERS.once_more(
        "Behind attention, a base product and its adapter may have taken rows of different views.",
        {"unflattened#2": "it lets both take attention's own rows"},
    ),
    Pass(
        "router_logits",
        routers.router_logits,
        "It finds products in float32 of rows that are cast for it, and makes `router_logits` of them.",
        {
            "matrix_products": "they are looked for as marks",
            "adapters": "an adapter in float32 of 16-bit rows looks like a router",
        },
    ),
    Pass(
        "routers",
        routers.routers,
        "It finds a choice of experts that `choose_experts` makes, too, and lets the experts' call choose.",
        {
            "stacked_experts": "it is looked for in front of experts",
            "unflattened": "it begins behind a mark, the product of a router",
        },
    ),
    Pass(
        "gates",
        products.gates,
        "It finds `activation(x @ gate) * (x @ up)`, and makes one call of it.",
        {
            "module_formulas": "the activation is looked for as a mark",
            "activation_functions": "the activation is looked for as a mark",
            "split_products": "gate and up of one product are products of their own then",
            "no_change": "calls that change nothing may lie between a product and its activation",
            "unflattened": "gate and up may be flattened rows each, of one input",
        },
    ),
    Pass(
        "activated_gates",
        output_gates.activated_gates,
        "It finds `activation(gate) * up` of one product, and makes `fused_swiglu` of it.",
        {"gates": "its op does the products, too"},
    ),
    Pass(
        "activations",
        products.activations,
        "It finds activations behind a product, and lets the product do them.",
        {
            "matrix_products": "the product is looked for as a mark",
            "no_change#2": "views that change nothing may lie between a product and an activation",
            "module_formulas": "the activation is looked for as a mark",
            "activation_functions": "the activation is looked for as a mark",
            "gates": "its op does the activation and the product with up",
            "activated_gates": "its op does the activation and the product with up",
        },
    ),
    Pass(
        "float32_residuals",
        norms.float32_residuals,
        "It finds sums in float32 in front of a norm, and makes `add_rms_norm` of both.",
        {"module_formulas": "the norm is looked for as a mark"},
    ),
    Pass(
        "output_gates",
        output_gates.output_gates,
        "It finds `x * sigmoid(gate)`, and makes one call of it.",
        {
            "no_change": "calls that change nothing may lie between a gate and its sigmoid",
            "unflattened": "the gate and what it shuts may be flattened rows",
        },
    ),
    Pass(
        "gates_in_front",
        output_gates.gates_in_front,
        "It finds gates of whole rows behind a product, and puts them in front of it.",
        {"output_gates": "gates are looked for as its marks"},
    ),
    Pass(
        "residuals",
        products.residuals,
        "It finds sums with a product, experts or a norm, and makes them a part of these.",
        {
            "module_formulas": "norms are looked for as marks",
            "unflattened": "what is added may be flattened rows",
            "matrix_products": "products are looked for as marks",
            "no_change#4": "views that change nothing may lie between a product and a sum",
            "activations": "an activation is applied to a product before a sum",
            "float32_residuals": "a sum in float32 is the norm's",
            "gates_in_front": "a gate lies between a product and a sum otherwise",
        },
    ),
    Pass(
        "norm_factors",
        norms.norm_factors,
        "It finds norms, with what is added to them, times a number of the model, and lets the norm multiply.",
        {"residuals": "the number multiplies what the norm adds, too"},
    ),
    Pass(
        "norms_in_front",
        products.norms_in_front,
        "It finds norms in front of products, and lets the products do them.",
        {
            "module_formulas": "norms are looked for as marks",
            "head_norms": "rotation does these norms",
            "gates": "its op takes a norm, too",
            "activations": "a product with a norm takes no activation behind it any more",
            "no_change#3": "views that change nothing may lie between a norm and a product",
            "projections": "its op takes a norm, too",
            "routers": "its op takes a norm, too",
            "residuals": "a norm with a residual stays a call",
            "norm_factors": "a norm with a factor stays a call",
        },
    ),
    Pass(
        "shared_experts",
        shared_experts.shared_experts,
        "It finds an expert of every row beside those that are chosen, and lets the experts' op run it.",
        {
            "routers": "the chosen experts are looked for as its marks",
            "gates": "the expert is looked for as its mark",
            "residuals": "the sum of both is a part of a call then",
            "norms_in_front": "both have to apply the same norm",
        },
    ),
    Pass(
        "joined_products",
        joined_products.joined_products,
        "It finds products that read the same row, and makes one call of them.",
        {
            "split_products": "slices of one product are products of their own then",
            "norms_in_front": "products of one row apply the same norm then",
            "projections": "its products are parts of one op",
            "gates": "its products are parts of one op",
            "shared_experts": "its products are parts of the experts' op",
        },
    ),
    Pass(
        "joined_gathers",
        joined_products.joined_gathers,
        "It finds gathers over ranks of what one product gives, and makes one gather of them.",
        {"joined_products": "it makes these products"},
    ),
)
