"""How fast the model writes and learns, beside other ways to do the same with the same weights.

    python tests/benchmark.py decode          # the lesson's loop, ours with and without the cache, NumPy, the floor
    python tests/benchmark.py train           # a training step in both forms of the loss
    python tests/benchmark.py decode --json   # the same figures for a program

Contenders take turns, round by round, so that whatever else the machine does falls on all of them alike. Each
is warmed up first; the median of the rounds is quoted, with the shortest and the longest.
"""

import argparse
import importlib.util
import json
import math
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import reference
import torch
from torch import nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run as a script, Python looks beside this file only
from gpt import GPT, GPTConfig, load_checkpoint, pick_device, run  # noqa: E402
from train import PARAMETERS, make_optimizers  # noqa: E402

PRETRAINED = ROOT / "checkpoints" / "pretrained.pt"
VOCAB_SIZE = 6289  # of random weights, where there is no checkpoint
ROUNDS, LONG_ROUNDS, TRAIN_ROUNDS = 5, 3, 8
LENGTHS = (32, 64, 120)  # characters of a single text
BATCHES, BATCH_LENGTH = (1, 3, 16, 64), 64
LONG_BLOCK, LONG, SHORT = 512, 500, 100
MEMORY = 256 * 2**20  # bytes, more than a CPU's cache holds


# ---------------------------------------------------------------------------------------------------
# The contenders


class LessonBlock(nn.Module):
    """A layer as the lesson writes it, with the weights of one of ours."""

    def __init__(self, ours):
        super().__init__()
        self.ours, self.n_head = ours, ours.attn.n_head

    def attention(self, x, cache):
        B, T, C = x.shape
        q, k, v = (
            t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
            for t in self.ours.attn.c_attn(x).split(C, dim=2)
        )  # (B, H, T, C/H) each
        if "k" in cache:
            k = torch.cat([cache["k"], k], dim=2)
            v = torch.cat([cache["v"], v], dim=2)
        cache["k"], cache["v"] = k, v
        total = k.size(2)
        mask = torch.ones(T, total, dtype=torch.bool, device=x.device).tril(diagonal=total - T)
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(C // self.n_head)  # (B, H, T, total)
        y = F.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1) @ v  # (B, H, T, C/H)
        return self.ours.attn.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))

    def forward(self, x, cache):
        x = x + self.attention(self.ours.ln_1(x), cache)
        return x + self.ours.mlp(self.ours.ln_2(x))


class Lesson(nn.Module):
    """The lesson's model and loop: a dict a layer, grown with torch.cat; softmax; torch.multinomial."""

    def __init__(self, ours):
        super().__init__()
        self.ours, self.blocks = ours, nn.ModuleList(LessonBlock(block) for block in ours.h)

    def forward(self, idx, caches, start):
        pos = torch.arange(start, start + idx.size(1), device=idx.device)
        x = self.ours.wte(idx) + self.ours.wpe(pos)
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, cache)
        return F.linear(self.ours.ln_f(x), self.ours.wte.weight)  # (B, T, V)

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0):
        caches, start = [{} for _ in self.blocks], 0
        for _ in range(max_new_tokens):
            logits = self(idx[:, start:], caches, start)
            start = idx.size(1)
            logits = logits[:, -1, :] / temperature
            next_id = torch.multinomial(F.softmax(logits, dim=-1), num_samples=1)
            idx = torch.cat([idx, next_id], dim=1)
        return idx


def as_gpt2(model):
    """Our model as a transformers GPT2LMHeadModel, its biases 0."""
    import transformers

    c = model.config
    config = transformers.GPT2Config(
        vocab_size=c.vocab_size,
        n_positions=c.block_size,
        n_embd=c.n_embd,
        n_layer=c.n_layer,
        n_head=c.n_head,
        bos_token_id=None,
        eos_token_id=None,
    )
    other = transformers.GPT2LMHeadModel(config)
    # GPT-2 stores its matrices (in, out); embeddings, and so the head, are the same way round in both.
    weights = {
        f"transformer.{name}": weight.T if name.startswith("h.") and weight.ndim == 2 else weight
        for name, weight in model.state_dict().items()
    }
    weights["lm_head.weight"] = model.wte.weight
    biases = {name: torch.zeros_like(bias) for name, bias in other.named_parameters() if name.endswith(".bias")}
    other.load_state_dict(weights | biases)
    return other.to(model.wte.weight.device).eval()


def decoders(model, first):
    """{name: a function of n that writes n characters after the one character first}, all with the same weights."""
    device = model.wte.weight.device
    idx = torch.tensor([[first]], device=device)
    lesson = Lesson(model).eval()
    weights = {name: tensor.cpu().numpy() for name, tensor in model.state_dict().items()}

    def in_numpy(n):
        ids = reference.generate(weights, model.config.n_head, [first], np.random.default_rng(0))
        return [next(ids) for _ in range(n)]

    contenders = {
        "(a) the lesson's loop": lambda n: lesson.generate(idx, n),
        "(b) ours": lambda n: model.generate(idx, n),
        "(c) ours, no cache": lambda n: model.generate(idx, n, use_cache=False),
        "(d) NumPy": in_numpy,
    }
    if importlib.util.find_spec("transformers"):
        other = as_gpt2(model)
        kwargs = {"do_sample": True, "top_k": 0, "use_cache": True, "pad_token_id": 0}
        mask = torch.ones_like(idx)
        contenders["(e) transformers"] = lambda n: other.generate(idx, max_new_tokens=n, attention_mask=mask, **kwargs)
    else:
        print("transformers is not installed: its row is left out", file=sys.stderr)
    return contenders


# ---------------------------------------------------------------------------------------------------
# Timing


def take_turns(contenders, rounds, device, warmups=1):
    """{name: function} -> {name: the seconds of each round}."""
    seconds = {name: [] for name in contenders}
    for turn in range(warmups + rounds):
        for name, function in contenders.items():
            synchronize(device)
            begin = time.perf_counter()
            function()
            synchronize(device)
            if turn >= warmups:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def synchronize(device):
    if device.type != "cpu":
        torch.accelerator.synchronize()


def summary(values):
    """(median, least, most)."""
    return statistics.median(values), min(values), max(values)


def reader(size, device, repeats=1):
    """A function that reads so many bytes as fast as can be, by adding them up."""
    numbers = torch.ones(size // 4, device=device)
    return lambda: [numbers.sum() for _ in range(repeats)]


def matmul_rate(device, n=1024, repeats=5):
    """Float32 operations a second in products of two n x n matrices."""
    a, b = torch.randn(2, n, n, device=device)
    seconds = take_turns({"product": lambda: [a @ b for _ in range(repeats)]}, ROUNDS, device)["product"]
    return repeats * 2 * n**3 / statistics.median(seconds)


# ---------------------------------------------------------------------------------------------------
# What is measured: (what it was measured on, tables, ratios).
# tables: (title, columns, {name: a cell a column}), a cell being a number, (median, least, most) or None
# ratios: {name: (value, what it should be)}


def decode(device):
    threads = torch.get_num_threads()
    model, first, which = load(device)
    prompt = torch.tensor([[first]], device=device)
    most = LENGTHS[-1]

    contenders = decoders(model, first)
    single = take_turns(
        {(name, n): partial(write, n) for n in LENGTHS for name, write in contenders.items()}, ROUNDS, device
    )
    batches = take_turns(
        {B: partial(model.generate, prompt.expand(B, 1), BATCH_LENGTH) for B in BATCHES}, ROUNDS, device
    )

    torch.manual_seed(0)
    large = GPT(GPTConfig(model.config.vocab_size, block_size=LONG_BLOCK)).to(device).eval()
    long = take_turns(
        {
            ("ours", SHORT): partial(large.generate, prompt, SHORT),
            ("ours", LONG): partial(large.generate, prompt, LONG),
            ("ours, no cache", LONG): partial(large.generate, prompt, LONG, use_cache=False),
        },
        LONG_ROUNDS,
        device,
    )

    # A step reads every weight but most of the position table. It cannot be faster than that.
    step_bytes = sum(weight.nbytes for name, weight in model.named_parameters() if name != "wpe.weight")
    steps, memory, again = {}, {}, {}
    for n in sorted({1, threads}):
        torch.set_num_threads(n)
        seconds = take_turns(
            {
                "ours": partial(model.generate, prompt, most),
                "memory": reader(MEMORY, device),
                "again": reader(step_bytes, device, repeats=40),
            },
            ROUNDS,
            device,
        )
        steps[n] = [1e6 * s / most for s in seconds["ours"]]
        memory[n] = [1e6 * s * step_bytes / MEMORY for s in seconds["memory"]]
        again[n] = [1e6 * s / 40 for s in seconds["again"]]
    torch.set_num_threads(threads)

    tables = [
        (
            "milliseconds for",
            [f"{n} characters" for n in LENGTHS],
            {name: [summary([1e3 * s for s in single[name, n]]) for n in LENGTHS] for name in contenders},
        ),
        (
            f"characters a second, {BATCH_LENGTH} each",
            [f"{B} at once" for B in BATCHES],
            {"(b) ours": [summary([B * BATCH_LENGTH / s for s in batches[B]]) for B in BATCHES]},
        ),
        (
            f"milliseconds, block_size {LONG_BLOCK}",
            [f"{n} characters" for n in (SHORT, LONG)],
            {
                "(b) ours": [summary([1e3 * s for s in long["ours", n]]) for n in (SHORT, LONG)],
                "(c) ours, no cache": [None, summary([1e3 * s for s in long["ours, no cache", LONG]])],
            },
        ),
        (
            "microseconds a step",
            [f"{n} thread{'s' * (n > 1)}" for n in steps],
            {
                "(b) ours": [summary(steps[n]) for n in steps],
                f"the floor: {step_bytes / 1e6:.2f} MB from memory": [summary(memory[n]) for n in steps],
                "the same bytes, in the CPU's cache": [summary(again[n]) for n in steps],
            },
        ),
    ]
    middle = {key: statistics.median(seconds) for key, seconds in (single | long).items()}
    rate = {B: B / statistics.median(batches[B]) for B in BATCHES}
    ratios = {
        f"lesson's loop / ours, {most} characters": (
            middle["(a) the lesson's loop", most] / middle["(b) ours", most],
            "at least 1.6",
        ),
        "ours on one thread / the floor": (statistics.median(steps[1]) / statistics.median(memory[1]), "at most 3.3"),
        f"{BATCHES[-1]} at once / one": (rate[BATCHES[-1]] / rate[1], "at least 9"),
        f"no cache / cache, block_size {LONG_BLOCK}, {LONG} characters": (
            middle["ours, no cache", LONG] / middle["ours", LONG],
            "at least 6",
        ),
        f"{LONG} / {SHORT} characters, block_size {LONG_BLOCK}": (
            middle["ours", LONG] / middle["ours", SHORT],
            "at most 5.5",
        ),
    }
    if "(e) transformers" in contenders:
        ratios[f"transformers / ours, {most} characters"] = (
            middle["(e) transformers", most] / middle["(b) ours", most],
            "at least 2.3",
        )
    return which, tables, ratios


def train(device):
    p = argparse.Namespace(**{name: value for name, (value, *_) in PARAMETERS.items()})
    config = GPTConfig(VOCAB_SIZE, p.block_size, p.n_layer, p.n_head, p.n_embd, p.dropout)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randint(VOCAB_SIZE, (2, p.batch_size, p.block_size), generator=generator).to(device)
    losses = {
        "logits, then F.cross_entropy": lambda model: F.cross_entropy(model(x)[0].flatten(0, 1), y.flatten()),
        "ours, F.linear_cross_entropy": lambda model: model(x, y)[1],
    }

    def stepper(loss):
        torch.manual_seed(0)
        model = GPT(config).to(device).train()
        optimizers = make_optimizers(model, p)

        def step():
            loss(model).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

        return step

    seconds = take_turns({name: stepper(loss) for name, loss in losses.items()}, TRAIN_ROUNDS, device, warmups=2)
    rates = {name: [x.numel() / s for s in its] for name, its in seconds.items()}
    # A weight takes 2 operations a character forward and 4 backward, the attention 6 a position seen and dimension.
    weights = VOCAB_SIZE * p.n_embd + p.n_layer * 12 * p.n_embd**2
    operations = 6 * weights + 6 * p.n_layer * p.block_size * p.n_embd
    peak = matmul_rate(device)
    tables = [
        (
            f"a training step of {p.batch_size} x {p.block_size}",
            ["characters a second", "share of matmul rate"],
            {name: [summary(its), statistics.median(its) * operations / peak] for name, its in rates.items()},
        ),
        ("the machine", ["GFLOP/s"], {"float32 matmul, 1024 x 1024": [peak / 1e9]}),
    ]
    plain, ours = (statistics.median(its) for its in rates.values())
    return "random weights and characters", tables, {"F.linear_cross_entropy / plain": (ours / plain, "at least 1.3")}


def load(device):
    """(model in eval mode, the id of a line break, which model it is): the shipped one, else random weights."""
    if PRETRAINED.exists():
        model, vocab, _ = load_checkpoint(PRETRAINED, device)
        return model, vocab.ids["\n"], "checkpoints/pretrained.pt"
    torch.manual_seed(0)
    return GPT(GPTConfig(VOCAB_SIZE)).to(device).eval(), 0, "random weights, as there is no checkpoints/pretrained.pt"


# ---------------------------------------------------------------------------------------------------
# Showing it


def cell(value):
    if value is None:
        return "-"
    middle, *ends = (number(v) for v in (value if isinstance(value, tuple) else [value]))
    return f"{middle} ({' to '.join(ends)})" if ends else middle


def number(value):
    return f"{value:,.{0 if value >= 1000 else 1 if value >= 10 else 2}f}"


def show(heading, tables, ratios):
    print(f"{heading}; median (shortest to longest)")
    for title, columns, rows in tables:
        print()
        for name, cells in [(title, columns), *((name, map(cell, cells)) for name, cells in rows.items())]:
            print(f"{name:<40}" + "".join(f"  {text:>24}" for text in cells))
    print()
    for name, (value, target) in ratios.items():
        print(f"{name:<56}{value:>10.2f}   {target}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["decode", "train"], help="writing, or a training step")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "--threads",
        type=int,
        default=torch.get_num_threads(),
        metavar="N",
        help="of torch; NumPy has its own (OMP_NUM_THREADS) (default: %(default)s)",
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda, mps or auto; NumPy stays on the CPU (default: cpu)")
    args = parser.parse_args()
    if args.threads < 1:
        parser.error(f"--threads {args.threads}: at least 1")
    torch.set_num_threads(args.threads)
    device = pick_device(args.device)
    which, tables, ratios = {"decode": decode, "train": train}[args.what](device)
    heading = f"{args.what}: {which}; {device}, threads: {args.threads}, torch {torch.__version__}"
    if args.json:
        print(json.dumps({"heading": heading, "tables": tables, "ratios": ratios}, ensure_ascii=False))
    else:
        show(heading, tables, ratios)


if __name__ == "__main__":
    sys.exit(run(main))
