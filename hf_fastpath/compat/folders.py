"""Where packages' code lies: as its frames name it, and behind links, such as those of an environment's folder."""

from __future__ import annotations

import importlib.util
import os
import sysconfig
from pathlib import Path


def folders_of(package: str) -> tuple[str, ...]:
    """Return the folders of a package that is installed, each with a separator at its end; none if it is not."""
    found = importlib.util.find_spec(package)
    if found is None or not found.origin:
        return ()
    return _both(Path(found.origin).parent)


def _both(folder: Path) -> tuple[str, ...]:
    return tuple({f"{each}{os.sep}" for each in (folder, folder.resolve())})


#: of Python's own modules
PYTHON = tuple(
    {each for name in ("stdlib", "platstdlib") for each in _both(Path(sysconfig.get_path(name)))}
    | set(_both(Path(os.__file__).parent))
)
#: of this package
OWN = _both(Path(__file__).parents[1])


def is_pythons(file: str) -> bool:
    """Whether a file is one of Python's own."""
    return file.startswith(PYTHON) and "site-packages" not in file
