"""Train the small Mistral-architecture model in ``examples/tiny-python`` on the Python standard library.

The script needs nothing but an installed Python, ``torch``, ``transformers`` and ``tokenizers``: it reads
the ``*.py`` files of a standard library, trains a byte-level BPE tokenizer on them, trains the model and
writes both, with the held-out text, to ``--output-dir``::

    python examples/train_tiny_python.py --output-dir tiny-python

Without a GPU the defaults shrink to a model that trains in a few minutes. To measure a saved model again::

    python examples/train_tiny_python.py --evaluate examples/tiny-python
"""

from __future__ import annotations

import argparse
import math
import random
import re
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)

BOS, EOS, PAD = "<|startoftext|>", "<|endoftext|>", "<|pad|>"
HEAD_DIM = 32
MAX_POSITIONS = 16384

#: Modules kept out of training: the first group is only measured at the end and ships as ``heldout.txt``,
#: the second decides which weights are kept.
HELDOUT_MODULES = ("bisect.py", "fnmatch.py", "sched.py")
VALIDATION_MODULES = ("heapq.py", "textwrap.py", "graphlib.py")

#: Directories of a standard library that hold tests, tables or code that is not part of it.
EXCLUDED_DIRS = {
    "__pycache__", "dist-packages", "encodings", "idle_test", "pydoc_data", "site-packages", "test", "tests",
}  # fmt: skip
#: A line of a table: it starts with a literal or a bracket and ends with a comma or a closing bracket.
DATA_LINE = re.compile(r"""^\s*[bru]*['"\d\[({+-].*[,\])}]\s*(#.*)?$""")

#: Without a space at the end: the tokenizer attaches a single space to the word that follows it.
PROMPTS = ("import os\n\n\ndef", "import re\n\n\nclass", "    def __init__(self,")


# ---------------------------------------------------------------------------------------------- corpus


def is_mostly_data(text: str) -> bool:
    """Tell whether more than half of the non-blank lines of a file look like entries of a table."""
    lines = [line for line in text.splitlines() if line.strip()]
    return not lines or sum(bool(DATA_LINE.match(line)) for line in lines) > len(lines) / 2


def read_corpus(stdlib: Path) -> tuple[list[str], list[str], list[str]]:
    """Return the texts of the training, validation and held-out files of a standard library."""
    train = []
    for path in sorted(stdlib.rglob("*.py"), key=lambda path: path.relative_to(stdlib).as_posix()):
        name = path.relative_to(stdlib).as_posix()
        if EXCLUDED_DIRS.intersection(name.split("/")[:-1]) or name in HELDOUT_MODULES + VALIDATION_MODULES:
            continue
        if name.startswith(("_sysconfigdata", "config-")):  # describes one build, with its paths
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if not is_mostly_data(text):
            train.append(text)
    if not train:
        raise SystemExit(f"no Python files found under {stdlib}")
    validation = [(stdlib / name).read_text(encoding="utf-8") for name in VALIDATION_MODULES]
    heldout = [(stdlib / name).read_text(encoding="utf-8") for name in HELDOUT_MODULES]
    return train, validation, heldout


# ------------------------------------------------------------------------------------------- tokenizer


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer that adds no token by itself and round-trips any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
        model_input_names=["input_ids", "attention_mask"],
    )


def encode_documents(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """Concatenate the documents as one sequence of ids, each between a bos and an eos token."""
    ids = []
    for encoding in tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False):
        ids += [tokenizer.bos_token_id, *encoding.ids, tokenizer.eos_token_id]
    return torch.tensor(ids, dtype=torch.long)


# ----------------------------------------------------------------------------------------------- model


def build_model(
    tokenizer: PreTrainedTokenizerFast, hidden_size: int, num_layers: int, sliding_window: int
) -> MistralForCausalLM:
    """Create the randomly initialised model: GQA, sliding-window attention and tied embeddings."""
    num_heads = hidden_size // HEAD_DIM
    config = MistralConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 11 // 4,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=max(1, num_heads // 4),
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        sliding_window=sliding_window,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return MistralForCausalLM(config)


def add_dropout(model: MistralForCausalLM, p: float) -> list[torch.utils.hooks.RemovableHandle]:
    """Drop activations of the embedding and of every residual branch while the model trains."""

    def drop(module, args, output):
        return F.dropout(output, p, model.training)

    branches = [model.model.embed_tokens]
    for layer in model.model.layers:
        branches += [layer.self_attn.o_proj, layer.mlp.down_proj]
    return [module.register_forward_hook(drop) for module in branches] if p else []


@torch.no_grad()
def mean_loss(model: MistralForCausalLM, ids: torch.Tensor, max_length: int = 8192) -> float:
    """Return the mean negative log-likelihood of ``ids[1:]``, each token given those before it."""
    was_training = model.training
    model.eval()
    total = 0.0
    for begin in range(0, len(ids) - 1, max_length):
        chunk = ids[begin : begin + max_length + 1].to(model.device)
        logits = model(input_ids=chunk[None, :-1], use_cache=False).logits[0]
        total += F.cross_entropy(logits.float(), chunk[1:], reduction="sum").item()
    model.train(was_training)
    return total / (len(ids) - 1)


def report(model_dir: Path, device: torch.device, max_new_tokens: int = 100, seed: int = 0) -> None:
    """Print the held-out perplexity of a saved model, in float32, and some text it generates."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).to(device).eval()
    text = (model_dir / "heldout.txt").read_text(encoding="utf-8")
    ids = tokenizer(text, return_tensors="pt").input_ids[0]
    if tokenizer.decode(ids) != text:
        raise SystemExit("the tokenizer does not give the held-out text back")
    loss = mean_loss(model, ids)
    bits = loss * (len(ids) - 1) / len(text) / math.log(2)
    print(
        f"held-out: {len(ids)} tokens, {len(text)} characters, loss {loss:.4f}, "
        f"perplexity {math.exp(loss):.3f}, {bits:.3f} bits/character"
    )

    torch.manual_seed(seed)
    decoding = {"greedy": {}, "top-p 0.9": {"do_sample": True, "top_p": 0.9, "top_k": 0}}
    for prompt in PROMPTS:
        inputs = tokenizer(tokenizer.bos_token + prompt, return_tensors="pt").to(device)
        for name, options in decoding.items():
            output = model.generate(**inputs, max_new_tokens=max_new_tokens, **options)[0]
            print(f"--- {name}, prompt {prompt!r}\n{tokenizer.decode(output, skip_special_tokens=True)}")


# -------------------------------------------------------------------------------------------- training


def learning_rate(progress: float, warmup: float, peak: float, final_fraction: float = 0.05) -> float:
    """Return the rate at ``progress`` (0 to 1): linear warm-up, then a cosine down to a small fraction."""
    if progress < warmup:
        return peak * (progress + 1e-3) / (warmup + 1e-3)
    cosine = 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))
    return peak * (final_fraction + (1 - final_fraction) * cosine)


def train(model: MistralForCausalLM, ids: torch.Tensor, validation_ids: torch.Tensor, args) -> None:
    """Train in place and leave the weights with the lowest validation loss in the model.

    The schedule runs over ``--steps`` or ``--max-minutes``, whichever is used up first, so that a run cut
    short by the clock still ends with a small learning rate. Its last part uses longer sequences.
    """
    device = model.device
    ids = ids.to(device)
    generator = torch.Generator().manual_seed(args.seed)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=device.type == "cuda")
    hooks = add_dropout(model, args.dropout)
    model.train()

    start = time.monotonic()
    best_loss, best_state, tokens_seen, progress, step = math.inf, None, 0, 0.0, 0
    while progress < 1:
        long = progress >= 1 - args.long_fraction
        seq_len = args.long_seq_len if long else args.seq_len
        batch_size = max(1, args.batch_size * args.seq_len // seq_len)
        offsets = torch.randint(0, len(ids) - seq_len + 1, (batch_size, 1), generator=generator)
        batch = ids[(offsets + torch.arange(seq_len)).to(device)]
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rate = learning_rate(progress, args.warmup_fraction, args.lr)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

        step += 1
        tokens_seen += batch.numel()
        minutes = (time.monotonic() - start) / 60
        progress = max(step / args.steps, minutes / args.max_minutes)
        if step % args.eval_every == 0 or progress >= 1:
            validation_loss = mean_loss(model, validation_ids)
            if validation_loss < best_loss:
                best_loss = validation_loss
                best_state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
            print(
                f"step {step} ({minutes:.2f} min, {tokens_seen / len(ids):.1f} epochs, length {seq_len}): "
                f"loss {loss.item():.4f}, validation {validation_loss:.4f}, learning rate {rate:.2e}",
                flush=True,
            )
    for hook in hooks:
        hook.remove()
    model.load_state_dict(best_state)
    print(f"kept the weights with validation loss {best_loss:.4f}; {step} steps, {tokens_seen:,} tokens")


def save(model: MistralForCausalLM, tokenizer: PreTrainedTokenizerFast, heldout: list[str], output_dir: Path) -> None:
    """Write the float16 weights, the tokenizer, the generation config and the held-out text."""
    output_dir.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.eval().half().save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)
    (output_dir / "heldout.txt").write_text("".join(heldout), encoding="utf-8", newline="\n")


# ------------------------------------------------------------------------------------------------- main


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; sizes that are not given depend on the device."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--output-dir", type=Path, default=Path("tiny-python"), help="where the model is written")
    add("--evaluate", type=Path, metavar="DIR", help="only measure the saved model in DIR and sample from it")
    stdlib = Path(sysconfig.get_path("stdlib"))
    add("--stdlib", type=Path, default=stdlib, help="standard library to train on")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="device to train on")
    add("--seed", type=int, default=0, help="seed of the initial weights, dropout, batches and samples")
    add("--vocab-size", type=int, default=1024, help="tokens of the byte-level BPE vocabulary")
    add("--sliding-window", type=int, default=256, help="tokens that attention looks back, itself included")
    add("--lr", type=float, default=3e-3, help="peak learning rate")
    add("--weight-decay", type=float, default=0.1, help="AdamW weight decay of the matrices")
    add("--dropout", type=float, default=0.1, help="dropout of the embedding and the residual branches")
    add("--warmup-fraction", type=float, default=0.03, help="part of the run that warms the rate up")
    add("--long-fraction", type=float, default=0.15, help="last part of the run, on longer sequences")
    add("--max-minutes", type=float, default=60.0, help="training stops, and still saves, after this long")
    sizes = parser.add_argument_group("sizes (default: on CUDA / otherwise)")
    size_defaults = {
        "hidden-size": (256, 128, "hidden size, a multiple of 32 (the head size)"),
        "layers": (4, 2, "decoder layers"),
        "steps": (3000, 300, "optimizer steps"),
        "batch-size": (64, 4, "sequences in a batch"),
        "seq-len": (1024, 512, "tokens in a sequence"),
        "long-seq-len": (4096, 1024, "tokens in a sequence in the last part of the run"),
        "eval-every": (250, 50, "steps between two validation losses"),
    }
    for name, (on_cuda, otherwise, text) in size_defaults.items():
        text = f"{text} (default: {on_cuda} / {otherwise})"
        sizes.add_argument(f"--{name}", type=int, default=argparse.SUPPRESS, help=text)
    args = parser.parse_args(argv)
    for name, (on_cuda, otherwise, _) in size_defaults.items():
        key = name.replace("-", "_")
        setattr(args, key, getattr(args, key, on_cuda if args.device.startswith("cuda") else otherwise))
    if args.hidden_size % HEAD_DIM:
        parser.error(f"--hidden-size must be a multiple of {HEAD_DIM}")
    return args


def main() -> None:
    """Train and save a model, or measure a saved one."""
    args = parse_args()
    device = torch.device(args.device)
    if args.evaluate:
        report(args.evaluate, device, seed=args.seed)
        return

    torch.manual_seed(args.seed)
    texts, validation, heldout = read_corpus(args.stdlib)
    random.Random(args.seed).shuffle(texts)
    tokenizer = train_tokenizer(texts, args.vocab_size)
    ids = encode_documents(tokenizer, texts)
    validation_ids = encode_documents(tokenizer, validation)
    model = build_model(tokenizer, args.hidden_size, args.layers, args.sliding_window).to(device)
    print(f"corpus: {len(texts)} files, {sum(map(len, texts)):,} characters, {len(ids):,} tokens")
    print(f"model: {sum(p.numel() for p in model.parameters()):,} parameters on {device}", flush=True)
    train(model, ids, validation_ids, args)
    save(model, tokenizer, heldout, args.output_dir)
    report(args.output_dir, device, seed=args.seed)


if __name__ == "__main__":
    main()
