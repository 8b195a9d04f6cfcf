"""The passes that recognize what calls compute, and put marks in their place; in their order.

Why a pass comes behind another one was found by moving it in front: small models of all types then kept more calls.
"""

from __future__ import annotations

from ...decode.calls.pass_table import Pass
from . import (
    adapters,
    axes,
    experts,
    filled_memory,
    gated_norms,
    late_sums,
    lengths,
    masked_writes,
    model_values,
    modules,
    own_attention,
    position_bias,
    products,
    products_of_heads,
    scaled_experts,
    states,
    views,
)

NO_CHANGE = Pass(
    "no_change",
    views.no_change,
    "It finds views of views, of which it makes one view, and calls that change nothing, which it leaves out.",
    {
        "module_formulas": "a module is compared as it was recorded, with calls that change nothing",
        "inverse_transposes": "two transposes that undo each other may leave views of views",
    },
)
_BEFORE_STATES = {
    "constant_views": "weights are told from inputs",
    "inverse_transposes": "what surrounds a state begins and ends at products, transposes or not",
    "no_change": "what surrounds a state begins and ends at products, copied or not",
}
_BEHIND_CONVOLUTIONS = {"short_convolutions": "a step reads what the convolution gives, which is a state's result, too"}
UNFLATTENED = Pass(
    "unflattened",
    products.unflattened,
    "It finds calls on rows that were flattened before, and gives them the rows as they were.",
    {
        "no_change": "rows may be flattened by several views, and only one is looked at",
        "matrix_products": "only marks and sums are known to work row by row",
        "stacked_experts": "experts are given flattened rows",
        "scaled_experts": "it is looked for with rows as they were flattened",
    },
)

ADAPTERS = Pass(
    "adapters",
    adapters.adapters,
    "It finds LoRA beside a product, and makes one product of both, with a weight that has adapters.",
    {
        "matrix_products": "a base product may be one with a transposed matrix",
        "unflattened": "the base product may take flattened rows, and an adapter the rows as they were",
        "no_change": "a dropout that does nothing lies between an adapter and its input",
    },
)

RECOGNIZED: tuple[Pass, ...] = (
    Pass(
        "position_biases",
        position_bias.position_biases,
        "It finds a bias of scores that follows from distances, and makes a table of it that a plan fills.",
        needed="a bias of scores is as long as the recorded text",
    ),
    Pass(
        "positions_in_text",
        lengths.positions_in_text,
        "It finds positions that a model counts from the length of its cache, and counts them in every step.",
        needed="positions would stay those of the recorded text",
    ),
    Pass(
        "masked_writes",
        masked_writes.masked_writes,
        "It finds `x[mask] = value`, and makes a choice between two tensors of it.",
        needed="PyTorch finds the places of a mask on the host, which a CUDA graph cannot hold",
    ),
    Pass(
        "filled_memory",
        filled_memory.filled_memory,
        "It finds a write that fills new memory, and makes a view of what is written.",
    ),
    Pass(
        "module_formulas",
        modules.module_formulas,
        "It finds modules that compute a norm or an activation, and makes one call of each.",
    ),
    Pass(
        "identity_experts",
        experts.identity_experts,
        "It finds experts of which the last ones give what they are given, and makes a sum of these.",
        needed="the op for experts and transformers' functions expect weights of every expert",
    ),
    Pass(
        "stacked_experts",
        experts.stacked_experts,
        "It finds experts that compute what `fused_experts` does, and makes one call of each mixture.",
        {"identity_experts": "the op takes weights of every expert"},
        needed="it refuses loops over experts that compute what no call here does",
    ),
    Pass(
        "gated_norms",
        gated_norms.gated_norms,
        "It finds modules that compute `gated_rms_norm` of two inputs, and makes one call of each.",
    ),
    Pass(
        "activation_functions",
        modules.activation_functions,
        "It finds PyTorch's activations that kernels have, and makes calls of one mark of them.",
        {
            "module_formulas": "a module is compared as a whole, and then holds no other mark",
            "gated_norms": "a module is compared as a whole, and then holds no other mark",
        },
    ),
    Pass(
        "constants",
        views.constants,
        "It finds calls on numbers alone, computes them once, and puts the host's numbers on the device.",
        {"positions_in_text": "positions that are counted from the length look like numbers"},
        needed="a CUDA graph copies nothing from the host's memory",
    ),
    Pass(
        "constant_views",
        views.constant_views,
        "It finds views of the model's tensors, and makes tensors of them that share the memory.",
        {"constants": "tables that were computed once are viewed, too"},
        needed="a part of a table is as long as the recorded text, unless attention is found to read it",
    ),
    Pass(
        "writes_of_like_axes",
        axes.writes_of_like_axes,
        "It finds writes from one axis of positions to another that is alike, and leaves them out.",
    ),
    Pass(
        "inverse_transposes",
        views.inverse_transposes,
        "It finds pairs of transposes that undo each other, and leaves them out.",
    ),
    NO_CHANGE,
    Pass(
        "products_from_the_left",
        products.products_from_the_left,
        "It finds products of a matrix with columns, and makes products of rows of them.",
        {
            "constant_views": "a transposed weight is a view of the model's tensor",
            "inverse_transposes": "the transposes that it makes are there for what reads columns",
        },
    ),
    Pass(
        "matrix_products",
        products.matrix_products,
        "It finds products of an activation with a matrix of the model, and makes `linear` of them.",
        {"constant_views": "a transposed weight is a view of the model's tensor"},
    ),
    Pass(
        "products_of_heads",
        products_of_heads.products_of_heads,
        "It finds products with a matrix for each head, and makes `head_products` of them.",
        {"constant_views": "the matrices may be a view of the model's tensor"},
    ),
    Pass(
        "late_sums",
        late_sums.late_sums,
        "It finds sums over ranks in front of views and sums of features, and sums behind these, once.",
    ),
    Pass(
        "scaled_experts",
        scaled_experts.scaled_experts,
        "It finds experts that are all given rows times shares, and runs the chosen experts alone.",
        {
            "activation_functions": "the activation between the products is looked for as a mark",
            "matrix_products": "the router's logits are looked for as what a mark gives",
        },
    ),
    UNFLATTENED,
    NO_CHANGE.once_more(
        "`unflattened` has put views behind calls, in front of other views.",
        {"unflattened": "it makes these views"},
    ),
    ADAPTERS,
    Pass(
        "short_convolutions",
        states.short_convolutions,
        "It finds convolutions over the last tokens, and makes `short_convolution` of them.",
        _BEFORE_STATES,
    ),
    Pass(
        "gated_delta_steps",
        states.gated_delta_steps,
        "It finds the step of a gated delta net, and makes `gated_delta_step` of it.",
        _BEHIND_CONVOLUTIONS,
    ),
    Pass(
        "selective_state_steps",
        states.selective_state_steps,
        "It finds the step of a state space, and makes `selective_state_step` of it.",
        _BEHIND_CONVOLUTIONS,
    ),
    Pass(
        "convolutions",
        products_of_heads.convolutions,
        "It finds other convolutions over tokens, and makes `head_products` of them.",
        {
            "constant_views": "weights are told from inputs",
            "short_convolutions": "its op does the whole of a convolution over the last tokens",
        },
    ),
    Pass(
        "split_products",
        products.split_products,
        "It finds products that are only read in slices, and makes a product of each slice.",
        {
            "matrix_products": "they are looked for as marks",
            "gated_norms": "its op takes slices as they lie",
            "short_convolutions": "its op takes slices as they lie",
            "gated_delta_steps": "its op takes slices as they lie",
            "selective_state_steps": "its op takes slices as they lie",
        },
    ),
    Pass(
        "own_attention",
        own_attention.own_attention,
        "It finds products, scale, mask and softmax over a cache, and makes attention of them.",
        {
            "matrix_products": "a projection is told from a product of scores",
            "constant_views": "parts of a mask of the model are looked at as tensors",
        },
        needed="keys and values in a cache are read by attention alone",
    ),
    Pass(
        "model_values",
        model_values.model_values,
        "It finds what calls make of parameters alone, and makes a tensor of it that is filled when a plan begins.",
        {
            "constant_views": "a view of a parameter is the parameter, and no value of its own",
            "module_formulas": "a norm may add to its weight",
            "gated_delta_steps": "rates of a state's decay are made of parameters, and the op does that",
            "selective_state_steps": "rates of a state's decay are made of parameters, and the op does that",
            "position_biases": "a table over distances is a value of the model, too",
        },
    ),
)
