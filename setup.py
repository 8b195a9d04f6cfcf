"""Adds the native libraries to the build where a compiler and torch are at hand; all else is in pyproject.toml."""

import importlib.util
import os
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

ROOT = Path(__file__).resolve().parent
_spec = importlib.util.spec_from_file_location("hf_fastpath_build", ROOT / "hf_fastpath" / "build.py")
recipe = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = recipe
_spec.loader.exec_module(recipe)


class BuildWithKernels(build_py):
    """Copies the Python files, then compiles what can be compiled here; the rest is built at patch()."""

    def run(self):
        super().run()
        output = recipe.LIBRARY_DIR if self.editable_mode else Path(self.build_lib, "hf_fastpath", "lib")
        for target in recipe.TARGETS:
            self._library(target, output)

    def _library(self, target, output):
        present = recipe.LIBRARY_DIR / recipe.library_name(target)
        info = recipe.description(present)
        if info is not None and info["sources"] == recipe.sources_hash(target):
            if output != recipe.LIBRARY_DIR:
                output.mkdir(parents=True, exist_ok=True)
                for path in (present, Path(f"{present}.json")):
                    self.copy_file(str(path), str(output / path.name))
            return
        if os.environ.get("HF_FASTPATH_BUILD") == "never":
            return
        archs = os.environ.get("HF_FASTPATH_CUDA_ARCHS", " ".join(recipe.WHEEL_CUDA_ARCHS)).split()
        try:
            recipe.build(target, output, archs)
        except recipe.BuildError as error:
            print(f"hf_fastpath: no {target} kernels in this install: {error}")


class PlatformDistribution(Distribution):
    def has_ext_modules(self):
        return True


class StableWheel(bdist_wheel):
    """The libraries use neither Python's nor an unstable torch ABI: one wheel a platform."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": StableWheel}, distclass=PlatformDistribution)
