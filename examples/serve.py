"""A server with OpenAI's /v1/chat/completions over a patched model, in one page of FastAPI.

    pip install ".[serve]"                               # in the clone
    python examples/serve.py                             # SmolLM2 if it is installed: default_model.py
    python examples/serve.py FOLDER-OR-MODEL-ID --dtype bfloat16 --port 8000
    curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\
        -d '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 40, "stream": true}'

OpenAI's own client takes it as ``OpenAI(base_url="http://localhost:8000/v1", api_key="none")``.

Requests that come while others run share the steps of the model, ``patch(share_steps=True)``: each is a call of
``generate()`` in a thread of its own. ``transformers serve`` has more endpoints; see ``transformers_serve.py``.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from default_model import source_of
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria, TextIteratorStreamer

import hf_fastpath

try:
    from fastapi import FastAPI
    from fastapi.responses import StreamingResponse
    from pydantic import AliasChoices, BaseModel, Field
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: pip install '.[serve]' in the clone") from None


class Part(BaseModel):
    type: Literal["text"]
    text: str


class Message(BaseModel):
    role: str
    content: str | list[Part]

    def plain(self) -> dict[str, str]:
        """Return the message as a chat template takes it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": text}


class StreamOptions(BaseModel):
    include_usage: bool = False


class Request(BaseModel):
    messages: list[Message] = Field(min_length=1)
    model: str = ""
    max_tokens: int = Field(default=128, ge=1, validation_alias=AliasChoices("max_completion_tokens", "max_tokens"))
    temperature: float = Field(default=0.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    stream: bool = False
    stream_options: StreamOptions | None = None


class Stopped(StoppingCriteria):
    """Ends a generation whose reader has gone."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs) -> torch.Tensor:
        return torch.full((len(input_ids),), self.event.is_set(), device=input_ids.device)


class Answer:
    """An answer that is being generated: iterate over its text; ``finish_reason`` and ``usage`` are there at the end.

    Args:
        turn: what requests take turns by to use the tokenizer, which is not made for threads.
    """

    def __init__(self, model, tokenizer, request: Request, turn: threading.Lock):
        self.model, self.tokenizer, self.request, self.turn = model, tokenizer, request, turn
        self.finish_reason = "stop"
        self.usage: dict[str, int] = {}

    def _prompt(self) -> dict[str, torch.Tensor]:
        messages = [message.plain() for message in self.request.messages]
        if self.tokenizer.chat_template is None:
            inputs = self.tokenizer("".join(message["content"] for message in messages), return_tensors="pt")
        else:
            options = dict(add_generation_prompt=True, return_tensors="pt", return_dict=True)
            inputs = self.tokenizer.apply_chat_template(messages, **options)
        return inputs.to(self.model.device)

    def _generate(self, streamer: TextIteratorStreamer, stopped: Stopped) -> None:
        request = self.request
        sampling = dict(do_sample=True, temperature=request.temperature, top_p=request.top_p)
        options = sampling if request.temperature > 0 else dict(do_sample=False)
        with self.turn:
            inputs = self._prompt()
        given = dict(streamer=streamer, stopping_criteria=[stopped], max_new_tokens=request.max_tokens)
        ids = self.model.generate(**inputs, **given, **options)[0].tolist()
        read = inputs["input_ids"].shape[1]
        made = len(ids) - read
        self.usage = dict(prompt_tokens=read, completion_tokens=made, total_tokens=len(ids))
        ends = self.model.generation_config.eos_token_id
        is_end = made > 0 and ids[-1] in (ends if isinstance(ends, list) else [ends])
        self.finish_reason = "length" if made == request.max_tokens and not is_end else "stop"

    def __iter__(self) -> Iterator[str]:
        streamer = TextIteratorStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        stopped, errors = Stopped(), []

        def work() -> None:
            try:
                self._generate(streamer, stopped)
            except Exception as error:  # raised again below, in the thread that reads
                errors.append(error)
                streamer.end()

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield from filter(None, streamer)
        finally:
            stopped.event.set()
            thread.join()
        if errors:
            raise errors[0]


def make_app(model, tokenizer, name: str) -> FastAPI:
    """Make the server of a patched model; ``name`` is the model's name in answers."""
    app, turn, started = FastAPI(title=f"{name}, patched"), threading.Lock(), int(time.time())

    @app.get("/v1/models")
    def models() -> dict:
        listed = {"id": name, "object": "model", "created": started, "owned_by": "you"}
        return {"object": "list", "data": [listed]}

    @app.get("/report")
    def report() -> dict:
        return hf_fastpath.report(model).to_dict()

    @app.post("/v1/chat/completions", response_model=None)
    def complete(request: Request) -> dict | StreamingResponse:
        answer = Answer(model, tokenizer, request, turn)
        known = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": name}
        if not request.stream:
            message = {"role": "assistant", "content": "".join(answer)}
            choice = {"index": 0, "message": message, "finish_reason": answer.finish_reason}
            return known | {"object": "chat.completion", "choices": [choice], "usage": answer.usage}
        tells_usage = request.stream_options is not None and request.stream_options.include_usage

        def chunk(delta: dict | None, finish_reason: str | None = None, usage: dict | None = None) -> str:
            choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
            made = known | {"object": "chat.completion.chunk", "choices": [] if delta is None else [choice]}
            return f"data: {json.dumps(made | ({'usage': usage} if tells_usage else {}))}\n\n"

        def events() -> Iterator[str]:
            yield chunk({"role": "assistant", "content": ""})
            try:
                yield from (chunk({"content": piece}) for piece in answer)
            except Exception as error:  # the status has been sent; clients raise what they read here
                message = f"{type(error).__name__}: {error}"
                yield f"data: {json.dumps({'error': {'message': message, 'type': 'server_error'}})}\n\n"
                raise
            yield chunk({}, answer.finish_reason)
            if tells_usage:
                yield chunk(None, usage=answer.usage)
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    return app


def load(model: str | None, dtype: str = "auto"):
    """Load a model and its tokenizer, and patch the model; return both, and a name."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source, more = source_of(model)
    loaded = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **more).to(device).eval()
    return hf_fastpath.patch(loaded, share_steps=True), AutoTokenizer.from_pretrained(source, **more), Path(source).name


def main() -> None:
    import uvicorn

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--host", default="localhost")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    uvicorn.run(make_app(*load(given.model, given.dtype)), host=given.host, port=given.port)


if __name__ == "__main__":
    main()
