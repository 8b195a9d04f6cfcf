"""``transformers serve`` with models that are patched when they are loaded; the arguments are those of the command.

    pip install ".[serve]"  # in the clone
    python examples/transformers_serve.py FOLDER-OR-MODEL-ID --port 8000  # in the place of: transformers serve ...
    python examples/transformers_serve.py --port 8000  # SmolLM2 if it is installed: default_model.py

Leave ``--continuous-batching`` and ``--compile`` out: both run code of their own instead of ``generate()``.
"""

from __future__ import annotations

import inspect
import sys
import threading
import weakref

from default_model import TINY, source_of
from transformers.cli import transformers as command
from transformers.cli.serving import model_manager

import hf_fastpath

#: the chat template of models without one, which continue text: messages are put behind each other
PLAIN = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
)


class PatchingModelManager(model_manager.ModelManager):
    """Loads a model as transformers' manager does, and patches it; if it cannot be patched, it is served as it is."""

    seen: weakref.WeakSet = weakref.WeakSet()
    turn = threading.Lock()  # requests come in several threads

    def load_model_and_processor(self, *args, **kwargs):
        model, processor = super().load_model_and_processor(*args, **kwargs)
        if getattr(processor, "chat_template", None) is None:  # else every chat ends in an error
            processor.chat_template = PLAIN
        with self.turn:
            if model not in self.seen:
                self.seen.add(model)
                try:
                    hf_fastpath.patch(model, share_steps=True)
                except hf_fastpath.UnsupportedModelError as error:
                    print(f"served by stock code: {error}", file=sys.stderr)
        return model, processor


def main() -> None:
    # The command makes its manager by this name, and only in this process.
    model_manager.ModelManager = PatchingModelManager
    given = sys.argv[1:]
    if not given or given[0].startswith("-"):
        source, more = source_of(None)
        takes = inspect.signature(model_manager.ModelManager.load_model_and_processor).parameters
        if more and "gguf_file" not in takes:
            source, more = str(TINY), {}  # this transformers serves no GGUF file
        given = [":".join((source, *more.values())), *given]
    command.app(["serve", *given], prog_name="transformers")


if __name__ == "__main__":
    main()
