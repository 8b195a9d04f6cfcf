"""Adds the native libraries to the build, for what this machine can run; all else is in pyproject.toml."""

import importlib
import re
import shutil
import sys
import types
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

ROOT = Path(__file__).resolve().parent
# the recipe's modules, by another name: importing the package itself would import torch
_package = types.ModuleType("hf_fastpath_recipe")
_package.__path__ = [str(ROOT / "hf_fastpath")]
sys.modules[_package.__name__] = _package
recipe = importlib.import_module("hf_fastpath_recipe.native.build")
toolchain = importlib.import_module("hf_fastpath_recipe.native.toolchain")


def variables():
    """What the environment asks for: targets and CUDA architectures (None: it does not say), and whether to build."""
    try:
        return toolchain.wanted_targets(), toolchain.wanted_cuda_archs(), toolchain.build_mode()
    except ValueError as error:
        raise SystemExit(f"hf_fastpath: {error}") from None


class BuildWithKernels(build_py):
    """Copies the Python files, then compiles what can be compiled and run here; the rest is built at patch()."""

    def run(self):
        package = Path(self.build_lib, "hf_fastpath")
        if not self.editable_mode:
            shutil.rmtree(package, ignore_errors=True)  # else files that are gone from the tree stay in the next wheel
        super().run()
        output = recipe.LIBRARY_DIR if self.editable_mode else package / "lib"
        targets, archs, mode = variables()
        for target in recipe.TARGETS if targets is None else targets:
            self._library(target, output, archs, mode, asked_for=targets is not None)
        if not self.editable_mode:
            for report in output.glob("*.ptxas"):
                report.unlink()

    def _library(self, target, output, archs, mode, asked_for):
        """Put the library of ``target`` into ``output``; where that cannot be, say why, or stop if it was asked for."""
        if self._is_current(target, archs or ()):
            if output != recipe.LIBRARY_DIR:
                output.mkdir(parents=True, exist_ok=True)
                present = recipe.LIBRARY_DIR / recipe.library_name(target)
                for path in (present, Path(f"{present}.json")):
                    self.copy_file(str(path), str(output / path.name))
            return
        if mode == "never":
            return
        try:
            # HF_FASTPATH_TARGETS may name what this machine cannot run: a wheel for others is made so
            reason = None if asked_for else toolchain.why_not(target)
            if target == "cuda" and reason is None:
                archs = archs or toolchain.cuda_archs_of(toolchain.gpu_capabilities())
                reason = None if archs else "no GPU at hand: HF_FASTPATH_CUDA_ARCHS names what to build for"
            if reason is None:
                recipe.build(target, output, archs)
        except recipe.BuildError as error:
            reason = str(error)
        if reason is not None:
            line = f"hf_fastpath: no {target} kernels in this install: {reason}"
            if asked_for:
                raise SystemExit(f"{line} (HF_FASTPATH_TARGETS asks for them)")
            print(line)

    def _is_current(self, target, archs):
        """Whether the tree holds a library made from these sources and, if asked for, for these architectures."""
        library = recipe.LIBRARY_DIR / recipe.library_name(target)
        info = recipe.description(library)
        if info is None or info["sources"] != recipe.sources_hash(target) or recipe.why_damaged(library):
            return False
        return target == "cpu" or set(archs) <= set(info["cuda_archs"])


class PlatformDistribution(Distribution):
    def has_ext_modules(self):
        return True


class StableWheel(bdist_wheel):
    """The libraries use neither Python's nor an unstable torch ABI: one wheel a platform, without them one for all."""

    def get_tag(self):
        native = any(Path(self.bdist_dir, "hf_fastpath", "lib").glob("*.so"))
        return "py3", "none", super().get_tag()[2] if native else "any"


def long_description():
    """README.md with links that lead somewhere from other places than the project's own."""
    base = "https://github.com/hf-fastpath/hf_fastpath"

    def absolute(match):
        kind = "raw" if re.search(r"\.(png|svg|gif|jpe?g)$", match[2]) else "blob"
        return f"{match[1]}{base}/{kind}/main/{match[2]}"

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.sub(r"""(\]\(|src="|href=")(?!\w+:|#|/)([^)"\s]+)""", absolute, text)


setup(
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": StableWheel},
    distclass=PlatformDistribution,
    long_description=long_description(),
    long_description_content_type="text/markdown",
)
