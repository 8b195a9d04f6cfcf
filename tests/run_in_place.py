"""Runs snippets and commands of the pages in the folder where Python was started; ``test_places.py`` starts it.

    python -c "exec(open('.../run_in_place.py').read())" jobs.json results.json

A job is a list: ["code", blocks] runs blocks of code one after the other, ["command", words] the command line,
["file", path] a script's definitions. Its result has what was printed, the names of the code as text, and the traceback
of what failed.
"""

import contextlib
import io
import json
import os
import runpy
import sys
import traceback

#: what snippets of pages take as given
GIVEN = """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
import hf_fastpath
from hf_fastpath import FastpathCache
name = source = "examples/tiny-python"
tokenizer = AutoTokenizer.from_pretrained(source)
inputs = tokenizer("import os\\n\\n\\ndef", return_tensors="pt")
"""
MODEL = "model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()"


def code(blocks, given):
    """Run blocks with the same names; where names are given, a block that patches takes a new model."""
    names = {}
    if given:
        exec(GIVEN, names)
    for block in blocks:
        if given and ("model" not in names or "hf_fastpath.patch(" in block):
            exec(MODEL, names)
        exec(compile(block, "page", "exec"), names)
    return {name: str(value) for name, value in names.items() if name in ("result", "found")}


def run(kind, what):
    if kind == "command":
        from hf_fastpath import bandwidth
        from hf_fastpath.cli.main import main

        bandwidth.CPU_BYTES = 1 << 26  # figures are not compared
        return {"status": main(what)}
    if kind == "file":
        sys.path.insert(0, os.path.dirname(what))  # as Python does with the folder of a script
        try:
            runpy.run_path(what, run_name="example")
        finally:
            sys.path.pop(0)
        return {}
    return code(what, given=kind == "snippet")


def results(jobs):
    for kind, what in jobs:
        out, err, failed, found = io.StringIO(), io.StringIO(), "", {}
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                found = run(kind, what)
            except BaseException:
                failed = traceback.format_exc()
        yield {"out": out.getvalue(), "err": err.getvalue(), "failed": failed, **found}


if __name__ == "__main__":
    _, jobs_file, results_file = sys.argv
    with open(jobs_file) as file:
        made = list(results(json.load(file)))
    import hf_fastpath

    with open(results_file, "w") as file:
        json.dump({"package": hf_fastpath.__file__, "results": made}, file)
