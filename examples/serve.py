"""A server with OpenAI's /v1/chat/completions over a patched model, in one page of FastAPI.

    pip install "hf-fastpath[serve]"
    python examples/serve.py                             # the small model of this repository
    python examples/serve.py FOLDER-OR-MODEL-ID --dtype bfloat16 --port 8000
    curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\
        -d '{"messages": [{"role": "user", "content": "import os"}], "max_tokens": 40, "stream": true}'

Requests take turns, because one sequence alone keeps the memory bus busy. ``transformers serve`` has more endpoints;
see ``transformers_serve.py``.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import torch
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria, TextIteratorStreamer

import hf_fastpath

TINY = Path(__file__).parent / "tiny-python"


class Message(BaseModel):
    role: str
    content: str


class Request(BaseModel):
    messages: list[Message] = Field(min_length=1)
    model: str = ""
    max_tokens: int = Field(default=128, ge=1)
    temperature: float = Field(default=0.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    stream: bool = False


class Stopped(StoppingCriteria):
    """Ends a generation whose reader has gone."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs) -> torch.Tensor:
        return torch.full((len(input_ids),), self.event.is_set(), device=input_ids.device)


def make_app(model, tokenizer, name: str) -> FastAPI:
    """Make the server of a patched model; ``name`` is the model's name in answers."""
    app, turn = FastAPI(title=f"{name}, patched"), threading.Lock()

    def prompt(request: Request) -> dict[str, torch.Tensor]:
        messages = [message.model_dump() for message in request.messages]
        if tokenizer.chat_template is None:
            inputs = tokenizer("".join(message["content"] for message in messages), return_tensors="pt")
        else:
            options = dict(add_generation_prompt=True, return_tensors="pt", return_dict=True)
            inputs = tokenizer.apply_chat_template(messages, **options)
        return inputs.to(model.device)

    def pieces(request: Request) -> Iterator[str]:
        """Yield the answer's text as it is generated."""
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        sampling = dict(do_sample=True, temperature=request.temperature, top_p=request.top_p)
        options = sampling if request.temperature > 0 else dict(do_sample=False)
        stopped, errors = Stopped(), []

        def work() -> None:
            try:
                with turn:
                    given = dict(streamer=streamer, stopping_criteria=[stopped], max_new_tokens=request.max_tokens)
                    model.generate(**prompt(request), **given, **options)
            except Exception as error:  # raised again below, in the thread that reads
                errors.append(error)
                streamer.end()

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield from streamer
        finally:
            stopped.event.set()
            thread.join()
        if errors:
            raise errors[0]

    def reply(kind: str, **choice) -> dict:
        known = {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": name}
        return known | {"choices": [{"index": 0, "finish_reason": None, **choice}]}

    @app.get("/v1/models")
    def models() -> dict:
        return {"object": "list", "data": [{"id": name, "object": "model", "owned_by": "you"}]}

    @app.get("/report")
    def report() -> dict:
        return hf_fastpath.report(model).to_dict()

    @app.post("/v1/chat/completions", response_model=None)
    def complete(request: Request) -> dict | StreamingResponse:
        if not request.stream:
            message = {"role": "assistant", "content": "".join(pieces(request))}
            return reply("chat.completion", message=message, finish_reason="stop")

        def events() -> Iterator[str]:
            for piece in pieces(request):
                yield f"data: {json.dumps(reply('chat.completion.chunk', delta={'content': piece}))}\n\n"
            yield f"data: {json.dumps(reply('chat.completion.chunk', delta={}, finish_reason='stop'))}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    return app


def load(source: str, dtype: str = "auto"):
    """Load a model and its tokenizer, and patch the model."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).to(device).eval()
    return hf_fastpath.patch(model), AutoTokenizer.from_pretrained(source)


def main() -> None:
    import uvicorn

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(TINY))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--host", default="localhost")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    uvicorn.run(make_app(*load(given.model, given.dtype), Path(given.model).name), host=given.host, port=given.port)


if __name__ == "__main__":
    main()
