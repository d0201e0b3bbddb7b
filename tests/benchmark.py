"""How fast the model writes and learns, beside other ways to do the same with the same weights.

    python tests/benchmark.py decode          # the lesson's loop, ours with and without the cache, NumPy, others
    python tests/benchmark.py train           # a training step in both forms of the loss
    python tests/benchmark.py decode --json   # the same figures for a program

Where transformers, or llama-cpp-python and gguf, are installed, they write with the same weights in float32.
Contenders take turns, round by round, so that whatever else the machine does falls on all of them alike. Each
is warmed up first; the median of the rounds is quoted, with the shortest and the longest.
"""

import argparse
import ctypes
import importlib.util
import json
import math
import statistics
import sys
import tempfile
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
from gpt import GPT, GPTConfig, load_checkpoint, pick_device, run
from train import make_optimizers, parse_args

PRETRAINED = ROOT / "checkpoints" / "pretrained.pt"
VOCAB_SIZE = 6289  # of random weights, where there is no checkpoint
ROUNDS, LONG_ROUNDS, TRAIN_ROUNDS = 5, 3, 8
LENGTHS = (32, 64, 120)  # characters of a single text
BATCHES, BATCH_LENGTH = (1, 3, 16, 64), 64
LONG_BLOCK, LONG, SHORT = 512, 500, 100
PREFIX = 100  # characters of a prompt that 64 poems share
MEMORY = 256 * 2**20  # bytes, more than a CPU's cache holds


# ---------------------------------------------------------------------------------------------------
# The contenders


class LessonBlock(nn.Module):
    """A layer as the lesson writes it, with the weights of one of ours."""

    def __init__(self, ours, n_head):
        super().__init__()
        self.ours, self.n_head = ours, n_head

    def attention(self, x, cache):
        B, T, C = x.shape
        q, k, v = (
            t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
            for t in self.ours.attn["c_attn"](x).split(C, dim=2)
        )  # (B, H, T, C/H) each
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


class LlamaCpp:
    """Our model in llama.cpp, float32 throughout. Raises RuntimeError if its logits differ from ours by 0.01."""

    def __init__(self, model, folder, threads):
        import llama_cpp

        self.lib, self.threads, self.V = llama_cpp, threads, model.config.vocab_size
        path = str(Path(folder) / "model.gguf")
        write_gguf(model, path)
        llama_cpp.llama_backend_init()
        self.silent = llama_cpp.llama_log_callback(lambda *_: None)  # must live as long as the library
        llama_cpp.llama_log_set(self.silent, ctypes.c_void_p(0))
        options = llama_cpp.llama_model_default_params()
        options.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), options)
        chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_temp(1.0))
        llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_dist(1))
        self.sampler = chain
        self.one, self.many = self.context(1, LENGTHS[-1] + 8), self.context(BATCHES[-1], BATCH_LENGTH + 16)
        self.compare(model)

    def context(self, rows, length):
        """(context, memory) with float32 keys and values for so many rows of so many characters."""
        options = self.lib.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_seq_max = rows * length, 512, rows
        options.n_threads = options.n_threads_batch = self.threads
        options.type_k = options.type_v = 0  # float32
        context = self.lib.llama_init_from_model(self.model, options)
        return context, self.lib.llama_get_memory(context)

    def compare(self, model):
        context, memory = self.one
        ids = torch.randint(self.V, (1, 20), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            ours = model(ids)[0][0].numpy()
        self.lib.llama_memory_clear(memory, True)
        for row, i in zip(ours, ids[0].tolist(), strict=True):
            self.feed(context, [i], [0])
            theirs = np.ctypeslib.as_array(self.lib.llama_get_logits_ith(context, -1), (self.V,))
            if abs(row - theirs).max() > 0.01:
                raise RuntimeError(f"llama.cpp computes other logits: they differ by {abs(row - theirs).max()}")

    def feed(self, context, ids, rows, place=None):
        """Give each row its next id; place: the position of all, or None to go on."""
        if len(ids) == 1:
            batch = self.lib.llama_batch_get_one((self.lib.llama_token * 1)(ids[0]), 1)
        else:
            batch = self.batch
            batch.n_tokens = len(ids)
            for j, i in enumerate(ids):
                batch.token[j], batch.pos[j], batch.n_seq_id[j], batch.logits[j] = i, place, 1, 1
                batch.seq_id[j][0] = rows[j]
        if self.lib.llama_decode(context, batch):
            raise RuntimeError("llama.cpp could not go on")

    def write(self, first, n):
        context, memory = self.one
        self.lib.llama_memory_clear(memory, True)
        i = first
        for _ in range(n):
            self.feed(context, [i], [0])
            i = self.lib.llama_sampler_sample(self.sampler, context, -1)

    def write_many(self, first, rows, n):
        context, memory = self.many
        self.batch = self.lib.llama_batch_init(rows, 0, 1)
        self.lib.llama_memory_clear(memory, True)
        ids = [first] * rows
        for place in range(n):
            self.feed(context, ids, range(rows), place)
            ids = [self.lib.llama_sampler_sample(self.sampler, context, j) for j in range(rows)]
        self.lib.llama_batch_free(self.batch)


def write_gguf(model, path):
    """Write our model as a GGUF file of the gpt2 architecture, float32, its biases 0."""
    import gguf

    config, C = model.config, model.config.n_embd
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_context_length(config.block_size)
    writer.add_embedding_length(C)
    writer.add_feed_forward_length(4 * C)
    writer.add_block_count(config.n_layer)
    writer.add_head_count(config.n_head)
    writer.add_layer_norm_eps(1e-5)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    weights = {"token_embd": model.wte.weight, "position_embd": model.wpe.weight, "output": model.wte.weight}
    biased = {"output_norm": model.ln_f.weight}
    for i, block in enumerate(model.h):
        parts = {"attn_norm": block.ln_1, "attn_qkv": block.attn["c_attn"], "attn_output": block.attn["c_proj"]}
        parts |= {"ffn_norm": block.ln_2, "ffn_up": block.mlp["c_fc"], "ffn_down": block.mlp["c_proj"]}
        biased |= {f"blk.{i}.{name}": part.weight for name, part in parts.items()}
    for name, weight in (weights | biased).items():
        writer.add_tensor(f"{name}.weight", weight.detach().numpy())
    for name, weight in biased.items():
        writer.add_tensor(f"{name}.bias", np.zeros(len(weight), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def decoders(model, first, llama):
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
    if llama:
        contenders["(f) llama.cpp"] = partial(llama.write, first)
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


def decode(device, folder):
    threads = torch.get_num_threads()
    model, first, which = load(device)
    prompt = torch.tensor([[first]], device=device)
    most = LENGTHS[-1]

    llama = None
    if importlib.util.find_spec("llama_cpp") and importlib.util.find_spec("gguf"):
        llama = LlamaCpp(model, folder, threads)
    else:
        print("llama-cpp-python or gguf is not installed: the row of llama.cpp is left out", file=sys.stderr)
    contenders = decoders(model, first, llama)
    single = take_turns(
        {(name, n): partial(write, n) for n in LENGTHS for name, write in contenders.items()}, ROUNDS, device
    )
    groups = {B: partial(model.generate, prompt.expand(B, 1), BATCH_LENGTH) for B in BATCHES}
    if llama:
        groups["llama.cpp"] = partial(llama.write_many, first, BATCHES[-1], BATCH_LENGTH)
    batches = take_turns(groups, ROUNDS, device)

    text = torch.randint(model.config.vocab_size, (1, PREFIX), generator=torch.Generator().manual_seed(0))
    shared = text.expand(BATCHES[-1], -1).to(device)
    other = shared.clone()
    other[0, 0] = (other[0, 0] + 1) % model.config.vocab_size  # one row that differs: nothing is shared
    rows = {"shared": shared, "not shared": other}
    prefix = take_turns({name: partial(model.generate, ids, 1) for name, ids in rows.items()}, ROUNDS, device)

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
    first_character = {name: statistics.median(seconds) for name, seconds in prefix.items()}
    ratios = {
        f"lesson's loop / ours, {most} characters": (
            middle["(a) the lesson's loop", most] / middle["(b) ours", most],
            "at least 2.3",
        ),
        "ours on one thread / the floor": (statistics.median(steps[1]) / statistics.median(memory[1]), "at most 3.3"),
        f"{BATCHES[-1]} at once / one": (rate[BATCHES[-1]] / rate[1], "at least 9"),
        f"no cache / cache, block_size {LONG_BLOCK}, {LONG} characters": (
            middle["ours, no cache", LONG] / middle["ours", LONG],
            "at least 7",
        ),
        f"{LONG} / {SHORT} characters, block_size {LONG_BLOCK}": (
            middle["ours", LONG] / middle["ours", SHORT],
            "at most 5.5",
        ),
        f"first character of {BATCHES[-1]}, prompt of {PREFIX}: not shared / shared": (
            first_character["not shared"] / first_character["shared"],
            "at least 4",
        ),
    }
    if "(e) transformers" in contenders:
        ratios[f"transformers / ours, {most} characters"] = (
            middle["(e) transformers", most] / middle["(b) ours", most],
            "at least 3.0",
        )
    if llama:
        ratios |= {
            f"ours / llama.cpp, {most} characters": (
                middle["(b) ours", most] / middle["(f) llama.cpp", most],
                "at most 1.5",
            ),
            f"{BATCHES[-1]} at once: characters a second, ours / llama.cpp": (
                statistics.median(batches["llama.cpp"]) / statistics.median(batches[BATCHES[-1]]),
                "at least 1",
            ),
        }
    return which, tables, ratios


def train(device, folder):
    p = parse_args([])[0]
    config = GPTConfig(VOCAB_SIZE)
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
        default=1,
        metavar="N",
        help="of torch and llama.cpp; NumPy has its own (OMP_NUM_THREADS) (default: 1, as generate.py)",
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda, mps or auto; NumPy stays on the CPU (default: cpu)")
    args = parser.parse_args()
    if args.threads < 1:
        parser.error(f"--threads {args.threads}: at least 1")
    torch.set_num_threads(args.threads)
    device = pick_device(args.device)
    with tempfile.TemporaryDirectory() as folder:
        which, tables, ratios = {"decode": decode, "train": train}[args.what](device, folder)
    heading = f"{args.what}: {which}; {device}, threads: {args.threads}, torch {torch.__version__}"
    if args.json:
        print(json.dumps({"heading": heading, "tables": tables, "ratios": ratios}, ensure_ascii=False))
    else:
        show(heading, tables, ratios)


if __name__ == "__main__":
    sys.exit(run(main))
