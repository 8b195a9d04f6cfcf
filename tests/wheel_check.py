"""Check a wheel in an environment of its own without a compiler: which kernels serve it, and whether tokens are right.

    python tests/wheel_check.py dist/hf_fastpath-*.whl

torch, transformers and the rest come from the environment that runs this check; hf_fastpath comes only from the wheel.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

CHECK = """
import copy, torch, hf_fastpath, transformers
from transformers import LlamaConfig, LlamaForCausalLM
from hf_fastpath import loader
torch.manual_seed(0)
config = LlamaConfig(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2)
for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
    stock = LlamaForCausalLM(config).eval().to(device)
    ours = hf_fastpath.patch(copy.deepcopy(stock), strict=True, quiet=True)
    status = loader.status()[device]
    assert status.source == "prebuilt", status
    ids = torch.randint(0, 97, (2, 9), device=device)
    options = dict(max_new_tokens=32, do_sample=False, pad_token_id=0)
    assert torch.equal(ours.generate(ids, **options), stock.generate(ids, **options)), device
    counts = hf_fastpath.report(ours).stats
    assert counts["fast_tokens"] == 64 and counts["fallback_tokens"] == 0, counts
    print(status, hf_fastpath.__file__)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    wheel = parser.parse_args().wheel.resolve()
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder, "bin", "python")
        install = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
        subprocess.run(install, check=True, cwd=folder)
        packages = subprocess.run(
            [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            check=True, capture_output=True, text=True,
        ).stdout.strip()  # fmt: skip
        ours = [sysconfig.get_path("purelib"), *filter(os.path.isdir, sys.path)]
        others = [path for path in dict.fromkeys(ours) if path.endswith("-packages")]
        Path(packages, "others.pth").write_text("".join(f"{path}\n" for path in others))  # after the wheel's own files
        environment = {"PATH": str(python.parent), "HOME": folder, "HF_FASTPATH_CACHE": str(Path(folder, "cache"))}
        for name in ("LD_LIBRARY_PATH", "OMP_NUM_THREADS"):
            environment |= {name: os.environ[name]} if name in os.environ else {}
        for command in (["-m", "hf_fastpath", "--version"], ["-m", "hf_fastpath", "info"], ["-c", CHECK]):
            subprocess.run([str(python), *command], check=True, cwd=folder, env=environment)
        assert not Path(folder, "cache").exists(), "something was built"
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, installs and runs without a compiler")
    return 0


if __name__ == "__main__":
    sys.exit(main())
