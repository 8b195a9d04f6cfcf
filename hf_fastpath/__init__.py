"""hf_fastpath: Hugging Face transformers models decode at the speed of the memory bus.

>>> import hf_fastpath
>>> hf_fastpath.patch(model)                      # in place; the generate() script stays as it is
>>> model.generate(**inputs, max_new_tokens=200)
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from . import logs as logs  # the logger is there from now on

try:
    from ._version import __version__
except ModuleNotFoundError:  # setup.py writes the file
    __version__ = "0+clone"

#: public name -> module that defines it; a name is imported when it is first used, so `import hf_fastpath` is cheap
_PUBLIC = {
    "patch": "patching.api",
    "unpatch": "patching.api",
    "patched": "patching.api",
    "report": "patching.api",
    "batch": "batching.engine",
    "logprobs": "batching.logprobs",
    "verify": "check.verification",
    "compare_formats": "check.quality",
    "profile": "profiling.profiler",
    "save_plan": "patching.saved_plan",
    "save_packed": "packed_files.saving",
    "load_packed": "packed_files.loading",
    "from_gguf": "packed_files.gguf_files",
    "FastpathCache": "cache.fastpath_cache",
    "UnsupportedModelError": "errors",
    "FallbackError": "errors",
    "RankError": "errors",
}

#: the same of modules. The ops load the native libraries that came with the package
_MODULES = {"ops": "ops", "loader": "native.loader"}

__all__ = ["__version__", "ops", *_PUBLIC]


def _find_patches_of_a_clone() -> None:
    """Make ``hf_fastpath.patches`` of the folder beside this package, which is where a clone has it.

    Python that is started at the root of a clone finds this package there, whatever is installed.
    """
    name, folder = f"{__name__}.patches", Path(__file__).resolve().parents[1] / "patches"
    if Path(__file__).with_name("patches").is_dir() or not (folder / "__init__.py").is_file():
        return
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    globals()["patches"] = sys.modules[name] = module


def _is_program() -> bool:
    """Whether Python runs this package's own program: its commands load what they need, and `explain CODE` no torch."""
    program = Path(sys.argv[0]).name if sys.argv else ""
    return program == "hf-fastpath" or (program == "-m" and __name__ in sys.orig_argv)


_find_patches_of_a_clone()
if not _is_program():
    from . import ops as ops  # torch.ops.hf_fastpath is there from now on


def _import(name: str) -> Any:
    """Import a module of this package.

    Raises:
        UnsupportedModelError: the installed transformers has moved what the package uses.
    """
    try:
        return importlib.import_module(f".{name}", __name__)
    except (ImportError, AttributeError) as error:
        if not _is_raised_in_compat(error):
            raise
        from .errors import lacking

        raise lacking(str(error)) from error


def _is_raised_in_compat(error: BaseException) -> bool:
    """Whether an error was raised while ``compat`` was imported, and not because torch lacks a name."""
    folder, frames = str(Path(__file__).with_name("compat")), error.__traceback__
    while frames is not None and not frames.tb_frame.f_code.co_filename.startswith(folder):
        frames = frames.tb_next
    return frames is not None and not (getattr(error, "name", None) or "").startswith("torch")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value = _import(_MODULES[name])
    elif name in _PUBLIC:
        value = getattr(_import(_PUBLIC[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC, *_MODULES})
