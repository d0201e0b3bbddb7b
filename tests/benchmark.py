"""How fast the model writes and learns, beside other ways to do the same with the same weights, on the CPU.

    python tests/benchmark.py decode     # the lesson's loop, ours with and without the cache, and other programs
    python tests/benchmark.py train      # a training step in both forms of the loss

transformers, and llama.cpp (packages llama-cpp-python and gguf), take part where they are installed. Contenders take
turns, round by round, so that whatever else the machine does falls on all of them alike. Each is warmed up first;
quoted are the median of the rounds, the shortest and the longest, and for a ratio the median of the rounds' ratios.
"""

import argparse
import ctypes
import importlib.util
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
from gpt import GPT, GPTConfig, UserError, load_checkpoint, run
from train import make_optimizers, parse_args

PRETRAINED = ROOT / "checkpoints" / "pretrained.pt"
VOCAB_SIZE = 6289  # of random weights, where there is no checkpoint
ROUNDS, FEW_ROUNDS = 11, 5  # of short measurements, and of those that take seconds
LENGTHS = (32, 64, 120)  # characters of a single text
BATCHES, BATCH_LENGTH = (1, 3, 16, 64), 64
LONG_BLOCK, LONG, SHORT = 512, 500, 100
BATCH_SIZE = 32  # texts in a training step
PREFIX = 100  # characters of a prompt that 64 poems share
LARGEST_DIFFERENCE = 1e-2  # between our logits and llama.cpp's, before their speeds are compared


# ---------------------------------------------------------------------------------------------------
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
    return other.eval()


class LlamaCpp:
    """llama.cpp with our weights, which it reads from a GGUF file; weights and KV cache are float32 as ours are."""

    def __init__(self, model, threads):
        import llama_cpp

        self.lib, self.threads, self.vocab_size = llama_cpp, threads, model.config.vocab_size
        self.silence = llama_cpp.llama_log_callback(lambda *_: None)  # kept, for llama.cpp goes on calling it
        llama_cpp.llama_log_set(self.silence, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers, params.use_mmap = 0, False
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "gpt.gguf"
            write_gguf(model, path)
            self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self.model:
            raise UserError("llama.cpp does not load the GGUF file of our weights")
        self.sampler = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        for part in (llama_cpp.llama_sampler_init_temp(1.0), llama_cpp.llama_sampler_init_dist(1)):
            llama_cpp.llama_sampler_chain_add(self.sampler, part)

    def start(self, rows, length):
        """Room for `rows` texts of `length` characters, for `step`."""
        params = self.lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.n_batch = rows * length, rows, 512
        params.n_threads = params.n_threads_batch = self.threads
        params.type_k = params.type_v = 0  # GGML_TYPE_F32
        params.flash_attn_type = self.lib.LLAMA_FLASH_ATTN_TYPE_DISABLED  # it rounds to 16 bits
        context, batch = self.lib.llama_init_from_model(self.model, params), self.lib.llama_batch_init(rows, 0, 1)
        batch.n_tokens = rows
        for row in range(rows):
            batch.n_seq_id[row], batch.seq_id[row][0], batch.logits[row] = 1, row, 1
        return context, batch

    def step(self, context, batch, ids, position):
        """Feed ids, a character for each row, all at the same position."""
        for row, i in enumerate(ids):
            batch.token[row], batch.pos[row] = i, position
        if self.lib.llama_decode(context, batch):
            raise UserError(f"llama.cpp fails at position {position}")

    def writer(self, first, rows, length):
        """A function of n that writes n <= length characters in each row, after first."""
        context, batch = self.start(rows, length)

        def write(n):
            self.lib.llama_memory_clear(self.lib.llama_get_memory(context), True)
            ids = [first] * rows
            for position in range(n):
                self.step(context, batch, ids, position)
                ids = [self.lib.llama_sampler_sample(self.sampler, context, row) for row in range(rows)]

        return write

    def logits(self, ids):
        """ids, a list -> the logits after each of them, (T, V)."""
        context, batch = self.start(1, len(ids))
        rows = []
        for position, i in enumerate(ids):
            self.step(context, batch, [i], position)
            rows.append(np.ctypeslib.as_array(self.lib.llama_get_logits(context), (self.vocab_size,)).copy())
        self.lib.llama_free(context)
        return np.stack(rows)


def write_gguf(model, path):
    """Write our model to path as a GGUF file of the gpt2 architecture, in float32, its biases 0."""
    import gguf

    c = model.config
    file = gguf.GGUFWriter(str(path), "gpt2")
    file.add_context_length(c.block_size)
    file.add_embedding_length(c.n_embd)
    file.add_feed_forward_length(4 * c.n_embd)
    file.add_block_count(c.n_layer)
    file.add_head_count(c.n_head)
    file.add_layer_norm_eps(1e-5)
    file.add_vocab_size(c.vocab_size)
    file.add_tokenizer_model("no_vocab")
    names = {"wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm"}
    parts = {
        "ln_1": "attn_norm",
        "attn.c_attn": "attn_qkv",
        "attn.c_proj": "attn_output",
        "ln_2": "ffn_norm",
        "mlp.c_fc": "ffn_up",
        "mlp.c_proj": "ffn_down",
    }
    names |= {f"h.{i}.{ours}": f"blk.{i}.{theirs}" for i in range(c.n_layer) for ours, theirs in parts.items()}
    for ours, weight in model.state_dict().items():
        name = names[ours.removesuffix(".weight")]
        file.add_tensor(f"{name}.weight", weight.numpy())
        if not name.endswith("embd"):
            file.add_tensor(f"{name}.bias", np.zeros(len(weight), np.float32))
    file.add_tensor("output.weight", model.wte.weight.detach().numpy())
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


def check_llama_cpp(llama, model, first):
    """Raise UserError unless llama.cpp has our logits, for a full window of what our model writes."""
    ids = model.generate(torch.tensor([[first]]), model.config.block_size - 1, generator=seeded())
    with torch.inference_mode():
        ours = model(ids)[0][0].numpy()  # (T, V)
    difference = np.abs(llama.logits(ids[0].tolist()) - ours).max()
    if not difference <= LARGEST_DIFFERENCE:
        raise UserError(
            f"llama.cpp's logits differ from ours by {difference:.3g}; at most {LARGEST_DIFFERENCE} is right"
        )


def installed(*packages):
    missing = [name for name in packages if not importlib.util.find_spec(name)]
    if missing:
        print(f"not installed, so left out: {', '.join(missing)}", file=sys.stderr)
    return not missing


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def decoders(model, first, llama):
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
    if llama:
        contenders["llama.cpp"] = llama.writer(first, 1, model.config.block_size)
    return contenders


# ---------------------------------------------------------------------------------------------------
# What is measured. `decode` and `train` return (which model it was measured on, tables, ratios).
# tables: (title, {(name of the row, name of the column): the numbers of all rounds})
# ratios: {name: (value, what it should be)}


def take_turns(contenders, rounds):
    """{name: function} -> {name: the seconds of each round}."""
    seconds = {name: [] for name in contenders}
    for turn in range(-1, rounds):  # turn -1 is the warm-up
        for name, function in contenders.items():
            begin = time.perf_counter()
            function()
            if turn >= 0:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def milliseconds(measured, unit):
    """The title and the rows of a table in milliseconds."""
    rows = {(name, f"{n} {unit}"): [1e3 * s for s in seconds] for (name, n), seconds in measured.items()}
    return "milliseconds", rows


def ratio(a, b):
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def decode():
    model, first, which = load()
    prompt, most, rows = torch.tensor([[first]]), LENGTHS[-1], BATCHES[-1]
    llama = LlamaCpp(model, torch.get_num_threads()) if installed("llama_cpp", "gguf") else None
    if llama:
        check_llama_cpp(llama, model, first)

    contenders = decoders(model, first, llama)
    single = take_turns({(name, n): partial(write, n) for n in LENGTHS for name, write in contenders.items()}, ROUNDS)

    batched = {("ours", B): partial(model.generate, prompt.expand(B, 1), BATCH_LENGTH) for B in BATCHES}
    if llama:
        batched["llama.cpp", rows] = partial(llama.writer(first, rows, BATCH_LENGTH), BATCH_LENGTH)
    batches = take_turns(batched, FEW_ROUNDS)

    torch.manual_seed(0)
    large = GPT(GPTConfig(model.config.vocab_size, block_size=LONG_BLOCK)).eval()
    long = take_turns(
        {
            ("ours", SHORT): partial(large.generate, prompt, SHORT),
            ("ours", LONG): partial(large.generate, prompt, LONG),
            ("ours, no cache", LONG): partial(large.generate, prompt, LONG, use_cache=False),
        },
        FEW_ROUNDS,
    )

    prompts = torch.randint(model.config.vocab_size, (rows, PREFIX), generator=seeded())
    waits = take_turns(
        {
            ("one prompt for all", PREFIX): partial(model.generate, prompts[:1].expand(rows, -1), 1),
            ("prompts that differ", PREFIX): partial(model.generate, prompts, 1),
        },
        FEW_ROUNDS,
    )

    rates = {(name, f"{B} at once"): [B * BATCH_LENGTH / s for s in its] for (name, B), its in batches.items()}
    tables = [
        milliseconds(single, "characters"),
        (f"characters a second, {BATCH_LENGTH} each", rates),
        milliseconds(long, f"of {LONG_BLOCK}"),
        milliseconds(waits, f"read, {rows} written"),
    ]
    ours, lesson = single["ours", most], single["the lesson's loop", most]
    ratios = {f"the lesson's loop / ours, {most} characters": (ratio(lesson, ours), "at least 2.3")}
    if "transformers" in contenders:
        name = f"transformers / ours, {most} characters"
        ratios[name] = ratio(single["transformers", most], ours), "at least 3.0"
    if llama:
        ratios[f"ours / llama.cpp, {most} characters"] = ratio(ours, single["llama.cpp", most]), "at most 1.5"
        both = batches["llama.cpp", rows], batches["ours", rows]
        ratios[f"llama.cpp / ours, {rows} at once"] = ratio(*both), "at least 2"
    one_by_one = [rows * seconds for seconds in batches["ours", 1]]
    ratios |= {
        f"one by one / {rows} at once": (ratio(one_by_one, batches["ours", rows]), "at least 7"),
        f"no cache / cache, block_size {LONG_BLOCK}, {LONG} characters": (
            ratio(long["ours, no cache", LONG], long["ours", LONG]),
            "at least 7",
        ),
        f"prompts that differ / one for all, first of {rows}": (
            ratio(waits["prompts that differ", PREFIX], waits["one prompt for all", PREFIX]),
            "at least 4",
        ),
    }
    return which, tables, ratios


def train():
    p = parse_args([])[0]
    config = GPTConfig(VOCAB_SIZE)
    x, y = torch.randint(VOCAB_SIZE, (2, BATCH_SIZE, config.block_size), generator=seeded())
    losses = {
        "logits, then F.cross_entropy": lambda model: F.cross_entropy(model(x)[0].flatten(0, 1), y.flatten()),
        "ours, F.linear_cross_entropy": lambda model: model(x, y)[1],
    }

    def stepper(loss):
        torch.manual_seed(0)
        model = GPT(config).train()
        optimizers = make_optimizers(model, p)

        def step():
            loss(model).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

        return step

    seconds = take_turns({name: stepper(loss) for name, loss in losses.items()}, FEW_ROUNDS)
    rates = {
        (name, f"{BATCH_SIZE} x {config.block_size}"): [x.numel() / s for s in its] for name, its in seconds.items()
    }
    ratios = {"F.cross_entropy / F.linear_cross_entropy": (ratio(*seconds.values()), "at least 1.3")}
    return "random weights and characters", [("characters a second", rates)], ratios


def load():
    """(model in eval mode, the id of a line break, which model it is): the shipped one, else random weights."""
    if PRETRAINED.exists():
        model, vocab, _ = load_checkpoint(PRETRAINED)
        return model, vocab.ids["\n"], "checkpoints/pretrained.pt"
    torch.manual_seed(0)
    return GPT(GPTConfig(VOCAB_SIZE)).eval(), 0, "random weights, as there is no checkpoints/pretrained.pt"


# ---------------------------------------------------------------------------------------------------
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


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["decode", "train"], help="writing, or a training step")
    what = "of torch and llama.cpp; NumPy has its own, OMP_NUM_THREADS (default: %(default)s)"
    parser.add_argument("--threads", type=int, default=1, metavar="N", help=what)
    args = parser.parse_args()
    if args.threads < 1:
        parser.error(f"--threads {args.threads}: at least 1")
    torch.set_num_threads(args.threads)
    which, tables, ratios = {"decode": decode, "train": train}[args.what]()
    threads = f"{args.threads} thread{'s' * (args.threads > 1)}"
    print(f"{args.what}: {which}; {threads}, torch {torch.__version__}; median (least to most)")
    for table in tables:
        show_table(*table)
    print()
    for name, (value, target) in ratios.items():
        print(f"{name:<56}{value:>10.2f}   {target}")


if __name__ == "__main__":
    sys.exit(run(main))
