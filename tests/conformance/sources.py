"""transformers' own tests at the installed version: its packages leave the tests out, its repository has them.

``python tests/conformance/sources.py`` fetches the tests into a cache outside of this repository. If GitHub is out of
reach, ``TRANSFORMERS_CHECKOUT`` names a checkout of transformers to take instead.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import transformers

REPOSITORY = "https://github.com/huggingface/transformers"
#: folders that the tests need, besides the files at the repository's root
FOLDERS = ("src", "tests", "utils/test_module")
TIMEOUT = 600


def checkout() -> Path:
    """Return where the tests are, or will be once they are fetched."""
    given = os.environ.get("TRANSFORMERS_CHECKOUT")
    if given:
        return Path(given)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "hf_fastpath" / f"transformers-{transformers.__version__}"


def missing() -> str | None:
    """Return why the tests cannot run, or None if they are there."""
    place = checkout()
    if (place / "tests" / "generation" / "test_utils.py").is_file():
        return None
    return f"transformers' tests are not in {place}: `make test-conformance` fetches them from {REPOSITORY}"


def fetch() -> None:
    """Fetch the tests, unless they are there.

    Raises:
        OSError, subprocess.SubprocessError: git could not fetch them.
    """
    place = checkout()
    if missing() is None:
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as folder:
        made = Path(folder) / "transformers"
        tag = f"v{transformers.__version__}"
        how = ("--quiet", "--depth=1", "--filter=blob:none", "--sparse", f"--branch={tag}")
        _git("clone", *how, REPOSITORY, str(made))
        _git("-C", str(made), "sparse-checkout", "set", *FOLDERS)
        shutil.move(made, place)


def _git(*arguments: str) -> None:
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    subprocess.run(("git", "-c", "advice.detachedHead=false", *arguments), check=True, timeout=TIMEOUT, env=environment)


if __name__ == "__main__":
    try:
        fetch()
    except (OSError, subprocess.SubprocessError) as error:
        sys.exit(f"transformers' own tests are out of reach and will be skipped: {error}")
    print(f"transformers' own tests: {checkout()}")
