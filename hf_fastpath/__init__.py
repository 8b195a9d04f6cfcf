"""hf_fastpath: Hugging Face transformers models decode at the speed of the memory bus.

>>> import hf_fastpath
>>> hf_fastpath.patch(model)                      # in place; the generate() script stays as it is
>>> model.generate(**inputs, max_new_tokens=200)
"""

from __future__ import annotations

import importlib
from typing import Any

from . import ops
from ._version import __version__
from .native import loader

#: public name -> module that defines it; a name is imported when it is first used, so `import hf_fastpath` is cheap
_PUBLIC = {
    "patch": "patching.api",
    "unpatch": "patching.api",
    "patched": "patching.api",
    "report": "patching.api",
    "verify": "check.verification",
    "compare_formats": "check.quality",
    "save_packed": "quantization.saving",
    "load_packed": "quantization.loading",
    "FastpathCache": "cache.fastpath_cache",
    "UnsupportedModelError": "errors",
    "FallbackError": "errors",
    "RankError": "errors",
}

__all__ = ["__version__", "ops", *_PUBLIC]

loader.load_existing()


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
