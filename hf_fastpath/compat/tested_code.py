"""Which code of transformers ours was compared with: digests of files, for each tested version.

A version's number alone does not tell: it stays while a checkout from git changes. ``patch()`` tries a twin first if a
file whose code ours replaces is none of these.
"""

from __future__ import annotations

from collections.abc import Iterable

import transformers

from .imported import imported_file_digest
from .versions import TESTED_TRANSFORMERS, is_development, transformers_version

#: file in the folder of transformers -> digests of the tested versions, the oldest first. A line can go when its
#: architecture does; a digest, when its version is no longer supported.
_TESTED: dict[str, tuple[str, ...]] = {
    "activations.py": ("5b20c0a3625edc00",),
    "cache_utils.py": ("702144bb44553f63", "bf5e6269ba573a54", "29651e0d89cc34d1"),
    "generation/candidate_generator.py": ("4f63f751244f4394", "795905569c6c91a2", "ad3b5de0d62b19d2"),
    "generation/logits_process.py": ("c5b5d5666576b19e", "5f8cbea6219b5be3", "25e1faaed94a0fff"),
    "generation/stopping_criteria.py": ("7e4ce5eeee83eab4", "467ee7d1a9a82429", "0416e115d5bf8b3b"),
    "generation/utils.py": ("bb558d8676be9545", "01f7d1d68c9fd501", "d8f22301fc9ba6ff"),
    "integrations/moe.py": ("6f40b9a4220c6d54", "fc7d77350019528f"),
    "integrations/sdpa_attention.py": ("53c7229daca9ade4", "1825eff3e45a8d88", "6772b459a0599556"),
    "masking_utils.py": ("50a737f63d8c778a", "fc05cdaf4cc8c93a", "4f113a02658b85e3"),
    "modeling_layers.py": ("81469b99e3f933ad", "734486d5d6c5d142", "0d8daee7cbc98590"),
    "modeling_rope_utils.py": ("fd7407b2dc3e16de", "2563c5391dd01aee"),
    "pytorch_utils.py": ("a86710d076690999", "f1908bb1b85714fe"),
    "models/cohere/modeling_cohere.py": ("11c5e86f6079a37d", "fb6deb188c2b484b", "34864b8dc73b8371"),
    "models/cohere2/modeling_cohere2.py": ("38dc95f498f87a4a", "3d6c52bec2ca0d2b", "fb07421e1f85e69f"),
    "models/falcon/modeling_falcon.py": ("6c28cee1c022660e", "a2864630f1d1793a", "1e7aeef62460a851"),
    "models/gemma/modeling_gemma.py": ("4c01ed05636dc4b3", "22bfa317dfea29d9", "ea7a003450485792"),
    "models/gemma2/modeling_gemma2.py": ("a6bd0abe78897d94", "9d3ac67224d6f19e", "4fa43309bff79ffb"),
    "models/gemma3/modeling_gemma3.py": ("db8fa09902358b1c", "068e5bc6886be997", "d86d2520cb69e99b"),
    "models/gpt2/modeling_gpt2.py": ("2d77d6a0260f1ee3", "e283c187560eee84", "7b7ad00ce7f7be42"),
    "models/gpt_neox/modeling_gpt_neox.py": ("c8684ddf23ca40c8", "e6457689e85ec001", "9368cb5bdcbc5703"),
    "models/gpt_oss/modeling_gpt_oss.py": ("4df395a89785235a", "eb6e2d66fd2a34d3", "5ab213bfd382d778"),
    "models/granite/modeling_granite.py": ("73f366a742f2b038", "f2d51e7e9ce6ad7f", "a3a2cf9347e9e73b"),
    "models/llama/modeling_llama.py": ("13e65b752a9c9d8a", "97296b66ed591429", "372c7cbc56a0d265"),
    "models/ministral/modeling_ministral.py": ("b9b064fff8063651", "22c63e545252496a", "f3c0f43d1c66a58c"),
    "models/mistral/modeling_mistral.py": ("1788d06fe8af9f66", "9f31fd39f15631f4", "28da84fbf15a182e"),
    "models/mixtral/modeling_mixtral.py": ("253f21b155dc250c", "8632c185d14973af", "fd6f8d14ccbf4913"),
    "models/olmo2/modeling_olmo2.py": ("80b2afd8461d2854", "b116578f5da7dede", "b679f8de01ac1e64"),
    "models/olmo3/modeling_olmo3.py": ("13be0868bbd4586d", "999a24f9f06a16bf", "e18a135bf35637a8"),
    "models/olmoe/modeling_olmoe.py": ("892a5de379cf6cce", "5a2b8972118b655f", "ccceae6769499e7b"),
    "models/opt/modeling_opt.py": ("ca56a455ea7bece1", "ca061a8b3b4ab973", "4c09ca3c95317a29"),
    "models/phi/modeling_phi.py": ("86c8c2923948ebb8", "6e6ccf71d21e4f36", "cca6ec34172cdd67"),
    "models/phi3/modeling_phi3.py": ("7145b7f3815c7a0d", "7252d4134270170c", "807f95645bb21cc4"),
    "models/qwen2/modeling_qwen2.py": ("34390fea7648b444", "3ff580592df12e3d", "58048bfa2fa4687e"),
    "models/qwen3/modeling_qwen3.py": ("cbb7f2dc274c2f55", "eba96e3720325b4e", "49acd3901cf143ef"),
    "models/qwen3_moe/modeling_qwen3_moe.py": ("b2666af64b7b31a0", "41f7d2f050499c80", "dc3c5db0fef900d7"),
    "models/seed_oss/modeling_seed_oss.py": ("84266ed9ab08a417", "2611e82dfcea3d4a", "ed84b1377162f471"),
    "models/smollm3/modeling_smollm3.py": ("24a18ddf1ce3c9ef", "384f11604bcbf0d7", "89c9e3de48924e01"),
    "models/stablelm/modeling_stablelm.py": ("ccc105340e5c5376", "7af60092573ce81d", "804b7e02e00ac948"),
    "models/starcoder2/modeling_starcoder2.py": ("fde03b5d7c42a625", "b99d77f746875727", "5ffc4244a732035b"),
}
#: of the hexadecimal digits of a digest, as many as the table has
_DIGITS = 16
#: modules whose code our loops, caches and steps replace, whatever the model
CORE_MODULES = tuple(
    "transformers." + file.removesuffix(".py").replace("/", ".") for file in _TESTED if not file.startswith("models/")
)
_MODELS = "transformers.models."


def why_untested(modules: Iterable[str]) -> str | None:
    """Return in words why ours was not compared with the code of transformers that is installed; None if it was.

    Args:
        modules: names of the modules with the classes of a model that an architecture file covers.
    """
    if transformers_version() not in TESTED_TRANSFORMERS:
        tested = ", ".join(TESTED_TRANSFORMERS)
        return f"transformers {transformers_version()} is not among the tested versions ({tested})"
    if is_development(transformers.__version__):
        return f"transformers {transformers.__version__} is a version under development"
    for name in (*CORE_MODULES, *sorted(name for name in modules if name.startswith(_MODELS))):
        file = name.removeprefix("transformers.").replace(".", "/") + ".py"
        found = imported_file_digest(name)
        if found is None or found[:_DIGITS] not in _TESTED.get(file, ()):
            return f"{file} of transformers {transformers.__version__} is another one than in the tested versions"
    return None
