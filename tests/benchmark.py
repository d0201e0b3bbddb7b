"""How fast the model writes and learns, beside other ways to do the same with the same weights, on the CPU.

    python tests/benchmark.py decode             # the lesson's loop, ours with and without the cache, other programs
    python tests/benchmark.py decode --chart     # also the time by length as a mermaid chart
    python tests/benchmark.py train              # where the time of a training step goes

transformers takes part where it is installed. Contenders take turns, round by round, so that whatever else the
machine does falls on all of them alike. Each is warmed up first; quoted are the median of the rounds, the shortest
and the longest, and for a ratio the median of the rounds' ratios.
"""

import argparse
import importlib.util
import itertools
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
from checkpoints.store import CHECKPOINTS, load_checkpoint, threads
from data.poems import CORPUS, read_poems, split
from data.script import notice, parse, progress, run
from generate import bounded
from gpt import GPT, GPTConfig, Vocabulary
from train import batches, learn, make_optimizers, parse_args, step_texts, texts_of

PRETRAINED = CHECKPOINTS / "pretrained.pt"
VOCAB_SIZE = 6289  # of random weights and texts, where there is no checkpoint or no corpus
ROUNDS, FEW_ROUNDS = 11, 5  # of short measurements, and of those that take seconds
LENGTHS = (32, 64, 120)  # characters of a single text
BATCHES, BATCH_LENGTH = (1, 3, 16, 64), 64
LONG_BLOCK, LONG_LENGTHS = 512, (100, 200, 300, 400, 500)
MATRIX = 2048  # rows and columns of the product that a training step is held against


# The contenders


class LessonBlock(nn.Module):
    """A layer as the lesson writes it, with the weights of one of ours."""

    def __init__(self, ours, n_head):
        super().__init__()
        self.ours, self.n_head = ours, n_head

    def attention(self, x, cache):
        B, T, C = x.shape
        qkv = self.ours.attn["c_attn"](x).split(C, dim=2)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in qkv)  # (B, H, T, C/H) each
        if "k" in cache:
            k = torch.cat([cache["k"], k], dim=2)
            v = torch.cat([cache["v"], v], dim=2)
        cache["k"], cache["v"] = k, v
        total = k.size(2)
        mask = torch.ones(T, total, dtype=torch.bool, device=x.device).tril(diagonal=total - T)
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(C // self.n_head)  # (B, H, T, total)
        y = F.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1) @ v  # (B, H, T, C/H)
        return self.ours.attn["c_proj"](y.transpose(1, 2).contiguous().view(B, T, C))

    def forward(self, x, cache):
        x = x + self.attention(self.ours.ln_1(x), cache)
        hidden = F.gelu(self.ours.mlp["c_fc"](self.ours.ln_2(x)), approximate="tanh")
        return x + self.ours.mlp["c_proj"](hidden)


class Lesson(nn.Module):
    """The lesson's model and loop: a dict a layer, grown with torch.cat; softmax; torch.multinomial."""

    def __init__(self, ours):
        super().__init__()
        self.ours, self.blocks = ours, nn.ModuleList(LessonBlock(block, ours.config.n_head) for block in ours.h)

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
    sizes = {name: getattr(c, name) for name in ("vocab_size", "n_embd", "n_layer", "n_head")}
    config = transformers.GPT2Config(**sizes, n_positions=c.block_size, bos_token_id=None, eos_token_id=None)
    other = transformers.GPT2LMHeadModel(config)
    # GPT-2 stores its matrices (in, out); embeddings, and so the head, are the same way round in both.
    weights = {
        f"transformer.{name}": weight.T if name.startswith("h.") and weight.ndim == 2 else weight
        for name, weight in model.state_dict().items()
    }
    weights["lm_head.weight"] = model.wte.weight
    biases = {name: torch.zeros_like(bias) for name, bias in other.named_parameters() if name.endswith(".bias")}
    other.load_state_dict(weights | biases)
    return other.eval()


def installed(*packages):
    missing = [name for name in packages if not importlib.util.find_spec(name)]
    if missing:
        notice(f"not installed, so left out: {', '.join(missing)}")
    return not missing


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def decoders(model, first):
    """{name: a function of n that writes n characters after the one character first}, all with the same weights."""
    idx = torch.tensor([[first]])
    lesson = Lesson(model).eval()
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}

    def in_numpy(n):
        ids = reference.generate(weights, model.config.n_head, [first], np.random.default_rng(0))
        return [next(ids) for _ in range(n)]

    contenders = {
        "the lesson's loop": lambda n: lesson.generate(idx, n),
        "ours": lambda n: model.generate(idx, n),
        "ours, no cache": lambda n: model.generate(idx, n, use_cache=False),
        "NumPy": in_numpy,
    }
    if installed("transformers"):
        other = as_gpt2(model)
        kwargs = {"do_sample": True, "top_k": 0, "use_cache": True, "pad_token_id": 0}
        mask = torch.ones_like(idx)
        contenders["transformers"] = lambda n: other.generate(idx, max_new_tokens=n, attention_mask=mask, **kwargs)
    return contenders


# What is measured. `decode` and `train` return (which model it was measured on, tables, ratios).
# tables: (title, {(name of the row, name of the column): the numbers of all rounds})
# ratios: (name, seconds or rates of all rounds, the same of what they are divided by, what it should be)


def take_turns(contenders, rounds):
    """{name: function} -> {name: the seconds of each round}."""
    seconds = {name: [] for name in contenders}
    turns = list(itertools.product(range(-1, rounds), contenders.items()))  # turn -1 is the warm-up
    for turn, (name, function) in progress(turns, leave=False):
        begin = time.perf_counter()
        function()
        if turn >= 0:
            seconds[name].append(time.perf_counter() - begin)
    return seconds


def milliseconds(measured):
    """{(row, column): seconds of all rounds} -> the same in milliseconds."""
    return {names: [1e3 * s for s in seconds] for names, seconds in measured.items()}


def ratio(a, b):
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def decode():
    model, first, which = load()
    prompt, most, rows = torch.tensor([[first]]), f"{LENGTHS[-1]} characters", BATCHES[-1]
    contenders = decoders(model, first)
    alone = {(name, f"{n} characters"): partial(write, n) for n in LENGTHS for name, write in contenders.items()}
    single = take_turns(alone, ROUNDS)

    batched = {("ours", B): partial(model.generate, prompt.expand(B, 1), BATCH_LENGTH) for B in BATCHES}
    many = take_turns(batched, FEW_ROUNDS)
    rates = {(name, f"{B} at once"): [B * BATCH_LENGTH / s for s in its] for (name, B), its in many.items()}

    torch.manual_seed(0)
    large = GPT(GPTConfig(model.config.vocab_size, block_size=LONG_BLOCK)).eval()
    ways = {"without the cache (steep)": False, "with it (flat)": True}
    both = itertools.product(LONG_LENGTHS, ways.items())
    by_length = {(f"{n}", way): partial(large.generate, prompt, n, use_cache=cache) for n, (way, cache) in both}
    long = take_turns(by_length, FEW_ROUNDS)

    tables = [
        ("milliseconds", milliseconds(single)),
        (f"characters a second, {BATCH_LENGTH} each", rates),
        (f"Milliseconds, block_size {LONG_BLOCK}", milliseconds(long)),
    ]
    ours, longest, name = single["ours", most], f"{LONG_LENGTHS[-1]}", f"block_size {LONG_BLOCK}"
    ratios = [
        (f"the lesson's loop / ours, {most}", single["the lesson's loop", most], ours, "at least 1.8"),
        (f"one by one / {rows} at once", [rows * s for s in many["ours", 1]], many["ours", rows], "at least 7"),
        (f"no cache / cache, {name}, {longest} characters", *(long[longest, way] for way in ways), "at least 7"),
    ]
    if "transformers" in contenders:
        ratios.append((f"transformers / ours, {most}", single["transformers", most], ours, "at least 2.6"))
    return which, tables, ratios


def train():
    p = parse_args([])[0]
    texts, vocab_size, which = load_texts(p)
    torch.manual_seed(p.seed)
    model = GPT(GPTConfig(vocab_size)).train()
    muon, adam = make_optimizers(model, p)
    theirs = torch.optim.Muon(muon.param_groups[0]["params"], lr=0.0)  # in bfloat16; it moves nothing
    some, square = step_texts(texts, p, 0), torch.randn(MATRIX, MATRIX)
    characters = sum(len(text) - 1 for text in some)

    def last():
        adam.step()
        model.zero_grad()

    def with_all_logits():
        for x, y in batches(some):
            F.cross_entropy(model(x)[0].flatten(0, 1), y.flatten()).backward()
        model.zero_grad()

    contenders = {
        "texts": lambda: step_texts(texts, p, 0),
        "forward and backward": lambda: learn(model, some),
        "Muon": muon.step,
        "torch.optim.Muon": theirs.step,
        "AdamW": last,
        "F.cross_entropy": with_all_logits,
        "product": lambda: square @ square,
    }
    seconds = {name: np.array(its) for name, its in take_turns(contenders, ROUNDS).items()}
    parts = {name: seconds[name] for name in ("texts", "forward and backward", "Muon", "AdamW")}
    parts["a step"] = step = sum(parts.values())
    table = milliseconds({(name, "milliseconds"): its for name, its in parts.items()})
    table |= {(name, "% of a step"): 100 * its / step for name, its in parts.items()}

    # As is usual: 6 for each character and each weight of a matrix; attention and Muon, a tenth more, do not count.
    weights = sum(weight.numel() for weight in (model.wte.weight, *model.h.parameters()) if weight.ndim == 2)
    gflops, most = 6e-9 * weights * characters / step, 2e-9 * MATRIX**3 / seconds["product"]
    speed = {
        ("a step", "characters a second"): characters / step,
        ("a step", "GFLOP a second"): gflops,
        (f"{MATRIX} x {MATRIX}, float32", "GFLOP a second"): most,
    }
    in_16_bits, logits = step - parts["Muon"] + seconds["torch.optim.Muon"], seconds["F.cross_entropy"]
    ratios = [
        ("a step with torch.optim.Muon / with ours", in_16_bits, step, "about 1; more without bfloat16 instructions"),
        ("forward, backward: F.cross_entropy / ours", logits, parts["forward and backward"], "at least 1.1"),
        ("GFLOP a second: a step / the large product", gflops, most, "at least 0.5"),
    ]
    return f"{which}, {characters:,} characters a step", [("where the time goes", table), ("speed", speed)], ratios


def load_texts(p):
    """(texts to learn from, characters known, which they are): Tang poems, or random ids where there is no corpus."""
    if not CORPUS.exists():
        texts = torch.randint(VOCAB_SIZE, (1000, 50), generator=seeded())
        return list(texts), VOCAB_SIZE, "random characters, as there is no data/tang.txt"
    poems = read_poems(CORPUS)[0]
    vocab = Vocabulary("".join(sorted({"\n"}.union(*poems))))
    return texts_of(split(poems)[0], vocab, p.block_size), len(vocab), "Tang poems"


def load():
    """(model in eval mode, the id of a line break, which model it is): the shipped one, else random weights."""
    if PRETRAINED.exists():
        model, vocab, _ = load_checkpoint(PRETRAINED)
        return model, vocab.ids["\n"], "checkpoints/pretrained.pt"
    torch.manual_seed(0)
    return GPT(GPTConfig(VOCAB_SIZE)).eval(), 0, "random weights, as there is no checkpoints/pretrained.pt"


# Showing it


def show_table(title, measured):
    """A row and a column for each name; a cell is median (least to most)."""
    columns = list(dict.fromkeys(column for _, column in measured))
    print(f"\n{title:<30}" + "".join(f"  {column:>24}" for column in columns))
    for row in dict.fromkeys(row for row, _ in measured):
        cells = (cell(measured.get((row, column))) for column in columns)
        print(f"{row:<30}" + "".join(f"  {text:>24}" for text in cells))


def cell(its):
    if its is None:
        return "-"
    middle, least, most = (f"{f(its):,.{0 if its[0] >= 100 else 1}f}" for f in (statistics.median, min, max))
    return f"{middle} ({least} to {most})"


def show_chart(title, measured):
    """The medians as a chart in mermaid: a place on the x-axis for each row, a line for each column."""
    x, names = (list(dict.fromkeys(part)) for part in zip(*measured, strict=True))
    lines = [[round(statistics.median(measured[row, name])) for row in x] for name in names]
    print("\n```mermaid\nxychart-beta")
    print(f'    title "{title}: {", ".join(names)}"')
    print('    x-axis "characters" [' + ", ".join(f'"{row}"' for row in x) + "]")
    print(f'    y-axis "milliseconds" 0 --> {max(map(max, lines))}')
    for line in lines:
        print(f"    line {line}")
    print("```")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["decode", "train"], help="writing, or a training step")
    parser.add_argument("--chart", action="store_true", help="with decode: a mermaid chart of the time by length")
    what = "of torch; NumPy has its own, OMP_NUM_THREADS (default: %(default)s)"
    parser.add_argument("--threads", type=bounded(1, 1024), default=1, metavar="N", help=what)
    args = parse(parser)
    if args.chart and args.what != "decode":
        parser.error("--chart goes with decode")
    with threads(args.threads):
        which, tables, ratios = {"decode": decode, "train": train}[args.what]()
    number = f"{args.threads} thread{'s' * (args.threads > 1)}"
    print(f"{args.what}: {which}; {number}, torch {torch.__version__}; median (least to most)")
    for table in tables:
        show_table(*table)
    print()
    for name, above, below, target in ratios:
        print(f"{name:<56}{ratio(above, below):>10.2f}   {target}")
    if args.chart:
        show_chart(*tables[-1])


if __name__ == "__main__":
    sys.exit(run(main))
