"""hf_fastpath's ops as a kernel of Hugging Face's ``kernels``.

>>> kernel = kernels.get_kernel("hf-fastpath/hf-fastpath")
>>> kernel.rms_norm(x, weight, 1e-6)          # every op, with its checks
>>> kernel.layers.RMSNorm                     # what from_pretrained(use_kernels=...) puts in place of a layer
>>> kernel.hf_fastpath.patch(model)           # the whole package

The package beside this file is imported by its own name, since its ops have one name in a process: where hf_fastpath
is installed, that one serves, and ``import hf_fastpath`` finds this one otherwise.
"""

import importlib
import importlib.util
import logging
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def _package():
    """Import hf_fastpath: what is loaded or installed, else what lies beside this file."""
    if "hf_fastpath" not in sys.modules and importlib.util.find_spec("hf_fastpath") is None:
        folder = _HERE / "hf_fastpath"
        spec = importlib.util.spec_from_file_location(
            "hf_fastpath", folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[spec.name]
            raise
    package = importlib.import_module("hf_fastpath")
    here = (_HERE / "VERSION").read_text().strip()
    if package.__version__ != here:
        logging.getLogger("hf_fastpath").warning(
            "hf_fastpath %s serves in place of the kernel's %s: %s", package.__version__, here, package.__file__
        )
    return package


hf_fastpath = _package()
ops = hf_fastpath.ops
globals().update({name: getattr(ops, name) for name in ops.__all__})

from . import layers as layers  # noqa: E402

__all__ = ["hf_fastpath", "layers", *ops.__all__]
