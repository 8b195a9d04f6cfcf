"""Newer releases of transformers: a model is patched and right, or it is refused with advice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from models import CPU, build, prompt, require_native

import hf_fastpath
from hf_fastpath import compat

TESTS = Path(__file__).resolve().parents[1]
ADVICE = "install a newer hf_fastpath, or an older transformers"


def test_a_name_that_moved_or_an_argument_in_the_middle():
    require_native(CPU)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(TESTS.parent), str(TESTS)))}
    ran = subprocess.run(
        [sys.executable, str(TESTS / "moved_names.py")], env=environment, capture_output=True, text=True, timeout=500
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = json.loads(ran.stdout)
    wrong = {name: said for name, said in found.items() if said != "right" and ADVICE not in said}
    assert not wrong, "\n".join(f"{name}: {said}" for name, said in wrong.items())
    kinds = Counter((name.partition(" ")[0], said == "right") for name, said in found.items())
    assert kinds["import", False] > 20 and kinds["attribute", False] > 20 and kinds["argument", True] > 5


def test_arguments_of_the_method_that_makes_a_cache_go_by_name(monkeypatch):
    """transformers gives them by their places, of which a release may have more."""
    require_native(CPU)
    real = compat.GenerationMixin._prepare_cache_for_generation

    def other(self, generation_config, grown, model_kwargs, generation_mode, batch_size, max_cache_length):
        return real(self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)

    monkeypatch.setattr(compat.GenerationMixin, "_prepare_cache_for_generation", other)
    model = hf_fastpath.patch(build("llama"), quiet=True)
    prepare, given = model._prepare_cache_for_generation, {}

    def by_place(config, model_kwargs, *rest):
        given.update(model_kwargs)
        result = prepare(config, "grown", model_kwargs, *rest)
        given.update(model_kwargs)
        return result

    monkeypatch.setitem(vars(model), "_prepare_cache_for_generation", by_place)
    model.generate(prompt(CPU), max_new_tokens=2)
    assert isinstance(given[compat.CACHE], hf_fastpath.FastpathCache)


def test_what_is_missing_is_said(monkeypatch):
    for table, entry in ((compat.required._NAMES, {"transformers.generation": ("GenerationMixin._gone",)}),
                         (compat.required._ARGUMENTS, {"GenerationMixin._sample": ("gone",)})):  # fmt: skip
        compat.what_is_missing.cache_clear()
        with monkeypatch.context() as patch:
            for name, value in entry.items():
                patch.setitem(table, name, value)
            with pytest.raises(hf_fastpath.UnsupportedModelError, match=f"gone.*{ADVICE}"):
                hf_fastpath.patch(build("llama"), quiet=True)
    compat.what_is_missing.cache_clear()
    assert compat.what_is_missing() is None


def test_packed_weights_are_not_put_into_a_model_either(monkeypatch, tmp_path):
    """load_packed() patches a model, too."""
    require_native(CPU)
    model = hf_fastpath.patch(build("llama"), weights="int4", quiet=True)
    hf_fastpath.save_packed(model, tmp_path)
    monkeypatch.setattr(compat, "what_is_missing", lambda: "transformers.somewhere has no name")
    with pytest.raises(hf_fastpath.UnsupportedModelError, match="transformers.somewhere has no name"):
        hf_fastpath.load_packed(tmp_path, quiet=True)
