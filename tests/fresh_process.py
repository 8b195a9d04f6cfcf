"""Scripts in processes that have not imported this package: ``run(script)`` is ``python -c script`` without the seconds
in which torch and transformers are imported.

Each process that runs tests has another one, which has imported these and nothing else, and forks for each script.
Where there is a GPU, whose driver outlives no fork, Python is started. What a script sets up before transformers or
torch is imported comes too late here: such a test starts Python itself.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch

_TESTS = Path(__file__).resolve().parent
_PATH = str(_TESTS.parent), str(_TESTS)
_lock = threading.Lock()


def run(
    script: str, *arguments: str, cwd: Path | None = None, timeout: float = 300, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script with ``sys.argv[1:]`` in a process of its own, which finds the package and ``tests``.

    Args:
        timeout: seconds until the process is ended.
        environment: variables that differ from those of this process.

    Raises:
        subprocess.TimeoutExpired: it has not ended.
    """
    cwd, environment = cwd or Path.cwd(), os.environ | environment
    if not hasattr(os, "fork") or torch.cuda.is_available():
        environment["PYTHONPATH"] = os.pathsep.join((*_PATH, environment.get("PYTHONPATH", "")))
        command, how = [sys.executable, "-c", script, *arguments], dict(cwd=cwd, env=environment, timeout=timeout)
        return subprocess.run(command, capture_output=True, text=True, **how)
    with _lock, tempfile.TemporaryDirectory() as folder:
        outputs = [str(Path(folder, name)) for name in ("out", "err")]
        asked = dict(script=script, arguments=arguments, outputs=outputs, timeout=timeout)
        asked |= dict(environment=environment, cwd=str(cwd))
        server = _server()
        server.stdin.write(json.dumps(asked) + "\n")
        server.stdin.flush()
        status = json.loads(server.stdout.readline())
        said = [Path(path).read_text(errors="replace") for path in outputs]
    if status is None:
        raise subprocess.TimeoutExpired(script, timeout, *said)
    return subprocess.CompletedProcess(script, status, *said)


@functools.cache
def _server() -> subprocess.Popen[str]:
    pipes: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    server = subprocess.Popen([sys.executable, __file__], **pipes)
    atexit.register(lambda: (server.stdin.close(), server.wait()))
    return server


# ---- in the process that forks ---------------------------------------------------------------------------------------


def _serve() -> str | None:
    """Fork for each script that is asked for; in the forked process, return the script."""
    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import transformers.generation
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.llama.modeling_llama  # noqa: F401

    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        asked = json.loads(line)
        pid = os.fork()
        if not pid:
            _become(asked)
            return asked["script"]
        print(json.dumps(_status(pid, asked["timeout"])), flush=True)
    return None


def _status(pid: int, seconds: float) -> int | None:
    """Return how a process has ended, or None if it had to be ended."""
    alarm = threading.Timer(seconds, os.kill, (pid, signal.SIGKILL))
    alarm.start()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    is_over = alarm.finished.is_set()
    alarm.cancel()
    return None if is_over else code


def _become(asked: dict[str, Any]) -> None:
    for number, path in enumerate(asked["outputs"], start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["cwd"])
    sys.argv[:] = ["-c", *asked["arguments"]]
    sys.path[0:1] = ["", *_PATH]


if __name__ == "__main__" and (_script := _serve()) is not None:
    exec(compile(_script, "<string>", "exec"), {"__name__": "__main__"})
