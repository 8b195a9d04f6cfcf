"""A chat on the terminal that streams its answers and reads no token twice.

    python examples/chat.py                                # SmolLM2 if it is installed: default_model.py
    python examples/chat.py FOLDER-OR-MODEL-ID --dtype bfloat16

The KV cache is kept between turns: of a long conversation, only the new message is read. An empty line, Ctrl-D or
Ctrl-C ends the chat.
"""

from __future__ import annotations

import argparse

import torch
from default_model import source_of
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

import hf_fastpath
from hf_fastpath.compat import CACHE  # "cache", or "past_key_values" before transformers 5.24


class Chat:
    """A conversation with a patched model.

    Args:
        model, tokenizer: if the tokenizer has no chat template, turns are put behind each other.
    """

    def __init__(self, model, tokenizer):
        self.model, self.tokenizer = model, tokenizer
        self.messages: list[dict[str, str]] = []
        self.cache, self.ids = hf_fastpath.FastpathCache(model.config), None

    def _prompt(self) -> torch.Tensor:
        if self.tokenizer.chat_template is None:
            text = "".join(message["content"] for message in self.messages)
            ids = self.tokenizer(text, return_tensors="pt")["input_ids"]
        else:
            options = dict(add_generation_prompt=True, return_tensors="pt", return_dict=True)
            ids = self.tokenizer.apply_chat_template(self.messages, **options)["input_ids"]
        return ids.to(self.model.device)

    def say(self, text: str, streamer=None, **options) -> str:
        """Return the answer to ``text``; ``options`` go to ``generate()``."""
        self.messages.append({"role": "user", "content": text})
        prompt = self._prompt()
        kept = self.cache.get_seq_length()
        if self.ids is not None and not torch.equal(prompt[:, :kept], self.ids[:, :kept]):
            # A template may write a past turn in another way, for example without its thoughts.
            self.cache = hf_fastpath.FastpathCache(self.model.config)
        mask = torch.ones_like(prompt)
        given = {CACHE: self.cache, "attention_mask": mask, "streamer": streamer, **options}
        self.ids = self.model.generate(prompt, **given)
        answer = self.tokenizer.decode(self.ids[0, prompt.shape[1] :], skip_special_tokens=True)
        self.messages.append({"role": "assistant", "content": answer})
        return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source, more = source_of(given.model)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=given.dtype, **more).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(source, **more)
    chat = Chat(hf_fastpath.patch(model), tokenizer)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    try:
        while text := input("> "):
            chat.say(text, streamer, max_new_tokens=given.max_new_tokens)
    except (EOFError, KeyboardInterrupt):  # Ctrl-D, Ctrl-C
        print()
    print(hf_fastpath.report(model))


if __name__ == "__main__":
    main()
