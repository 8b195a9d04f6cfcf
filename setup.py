"""Adds the native libraries to the build where a compiler and torch are at hand; all else is in pyproject.toml."""

import importlib.util
import os
import re
import shutil
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
        package = Path(self.build_lib, "hf_fastpath")
        if not self.editable_mode:
            shutil.rmtree(package, ignore_errors=True)  # else files that are gone from the tree stay in the next wheel
        super().run()
        output = recipe.LIBRARY_DIR if self.editable_mode else package / "lib"
        for target in recipe.TARGETS:
            self._library(target, output)
        if not self.editable_mode:
            for report in output.glob("*.ptxas"):
                report.unlink()

    def _library(self, target, output):
        wanted = os.environ.get("HF_FASTPATH_CUDA_ARCHS", "").split()
        if not all(re.fullmatch(r"\d+[af]?", arch) for arch in wanted):
            raise SystemExit(f"HF_FASTPATH_CUDA_ARCHS is {' '.join(wanted)!r}, expected a list such as '80 90a'")
        if self._is_current(target, wanted):
            if output != recipe.LIBRARY_DIR:
                output.mkdir(parents=True, exist_ok=True)
                present = recipe.LIBRARY_DIR / recipe.library_name(target)
                for path in (present, Path(f"{present}.json")):
                    self.copy_file(str(path), str(output / path.name))
            return
        if os.environ.get("HF_FASTPATH_BUILD") == "never":
            return
        try:
            recipe.build(target, output, wanted or recipe.WHEEL_CUDA_ARCHS)
        except recipe.BuildError as error:
            print(f"hf_fastpath: no {target} kernels in this install: {error}")

    def _is_current(self, target, wanted):
        """Whether the tree holds a library made from these sources and, if asked for, for these architectures."""
        info = recipe.description(recipe.LIBRARY_DIR / recipe.library_name(target))
        if info is None or info["sources"] != recipe.sources_hash(target):
            return False
        return target == "cpu" or set(wanted) <= set(info["cuda_archs"])


class PlatformDistribution(Distribution):
    def has_ext_modules(self):
        return True


class StableWheel(bdist_wheel):
    """The libraries use neither Python's nor an unstable torch ABI: one wheel a platform, without them one for all."""

    def get_tag(self):
        native = any(Path(self.bdist_dir, "hf_fastpath", "lib").glob("*.so"))
        return "py3", "none", super().get_tag()[2] if native else "any"


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": StableWheel}, distclass=PlatformDistribution)
