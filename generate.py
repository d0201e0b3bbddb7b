"""The lesson "Generating text and the KV cache", run: six demos, a poet to play with, three exercises.

    python generate.py                          # the six demos
    python generate.py --demo 1 6               # some of them
    python generate.py --prompt 大漠孤烟直      # a poem; python generate.py --help shows all commands

Every demo is a function, and its settings stand together here at the top: change one and run it again.
"""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while torch loads; main takes it back

import argparse
import dataclasses
import itertools
import os
import statistics
import sys
import time
import unicodedata
from pathlib import Path

import torch

from data.poems import CORPUS, FORMS, normalise
from data.prosody import read_prosody, scan
from data.verse import Place, TemplateConstraint, choose_templates, may_stand, poem_template
from gpt import (
    GPT,
    DecodingError,
    UserError,
    check_sampling,
    load_checkpoint,
    pick_device,
    probabilities,
    run,
    sample,
)

CHECKPOINTS = Path(__file__).resolve().parent / "checkpoints"  # gpt.pt, if there is one, else pretrained.pt

THREADS = 1  # a second one gains a seventh on an idle machine, and takes two to four times as long on a busy one
SEED = 1  # of the demos: same seed, same poems
MAX_CHARS = 100  # a poem that has not ended after so many is cut; the longest form has 64

NEXT_PROMPTS = ("白日依山尽，黄河入海", "床前明月光，疑是地上", "春风")  # demo 1
NEXT_TOP = 8

TEMPERATURES = (0.3, 1.0, 1.5)  # demo 2; 0 is always the likeliest character
POEMS = 3  # at each temperature

HOT = 1.5  # demo 3: the temperature, and
TOP_K = 20  # how many of the likeliest characters remain

OPENINGS = ("床前明月光，", "大漠孤烟直，", "人工智能好，")  # demo 4
OPENING_TEMPERATURE = 0.8

ACROSTICS = (("春眠不觉", 7), ("学无止境", 5))  # demo 5: the heads and the characters a line
ACROSTIC_TEMPERATURE = 0.8

SAME_CHARS = 120  # demo 6: characters written both ways to compare,
LONG_CHARS = 300  # once more past the window,
TIMED_CHARS = (32, 64, 120)  # and timed, at most block_size
TIMED_RUNS = 5  # the median of so many

TEMPERATURE = 0.8  # of the poet, unless --temperature says otherwise
BATCH = 64  # poems written at once
CANDIDATES = 4  # first lines written for one that is taken, of poems in a form

EX1_TOP_P = 0.9  # exercise 1: beside TOP_K, both at temperature HOT
EX1_POEMS = 3

EX2_POEMS = 100  # exercise 2: free ones and constrained ones

EX3_BLOCK_SIZE = 512  # exercise 3
EX3_CHARS = (100, 200, 300, 400, 500)

# What an edited constant must be like: an example, the least and the most of the numbers in it.
LIKE = {
    "SEED": (1, 0, 2**62),
    "THREADS": (1, 1, 1024),
    "POEMS EX1_POEMS CANDIDATES TIMED_RUNS": (3, 1, 100),
    "MAX_CHARS NEXT_TOP TOP_K SAME_CHARS LONG_CHARS BATCH EX2_POEMS EX3_BLOCK_SIZE": (64, 1, 10**4),
    "TIMED_CHARS EX3_CHARS": ((120,), 1, 10**4),
    "HOT OPENING_TEMPERATURE ACROSTIC_TEMPERATURE TEMPERATURE": (0.8, 0, 10**6),
    "TEMPERATURES": ((0.8,), 0, 10**6),
    "EX1_TOP_P": (0.9, 0.001, 1),
    "NEXT_PROMPTS OPENINGS": (("春风",), 0, 0),
    "ACROSTICS": ((("春风", 7),), 1, 100),
}


def is_like(value, example, least, most):
    """Whether value is of the kind of example: a text, a number from least to most, or a tuple of such."""
    if isinstance(example, tuple):
        same_length = isinstance(value, tuple) and (len(value) == len(example) or len(example) == 1)
        pairs = zip(value, itertools.cycle(example), strict=False) if same_length else ()
        return same_length and len(value) > 0 and all(is_like(*pair, least, most) for pair in pairs)
    if isinstance(example, str):
        return isinstance(value, str) and bool(value)
    kinds = (int, float) if isinstance(example, float) else int
    return isinstance(value, kinds) and not isinstance(value, bool) and least <= value <= most


def check_settings():
    """Raise UserError, which names the constant, for one that was edited into something else."""
    for names, (example, least, most) in LIKE.items():
        for name in names.split():
            value = globals()[name]
            if not is_like(value, example, least, most):
                kind = "numbers" if "." in repr(example) else "whole numbers"
                limits = f", with {kind} from {least:,} to {most:,}" if most else ""
                raise UserError(f"{name} in generate.py is {value!r}; it must be like {example!r}{limits}", 2)


# ---------------------------------------------------------------------------------------------------
# Writing poems


def write(model, vocab, prompt="", n=1, *, rule=None, length=MAX_CHARS, first_line=0, generator=None, **knobs):
    """n poems that begin with prompt, a list of (text, whether it has ended).

    rule: a constraint for poems of length characters, the prompt included. Without one a poem ends when
    the model ends it, or is cut after length more characters. first_line: the characters of the first
    line, to draw it as `first_lines` does; 0: as any other. knobs: temperature, top_k, top_p, use_cache.
    """
    start = begin(model, vocab, prompt, n)
    if rule is None:
        ids = model.generate(start, length, stop=vocab.ids["\n"], generator=generator, **knobs)
    else:
        if first_line > len(prompt):
            start = first_lines(model, vocab, start, rule, first_line, generator, **knobs)
        ids = model.generate(start, length + 1 - start.size(1), constraint=rule, generator=generator, **knobs)
    parts = [vocab.decode(row).partition("\n") for row in ids[:, 1:].tolist()]
    return [(text, bool(end) or rule is not None) for text, end, _ in parts]


def begin(model, vocab, prompt, n=1):
    """The ids (n, T) of prompt after the line break that every poem begins with."""
    return vocab.encode("\n" + prompt).to(model.wte.weight.device).expand(n, -1)


def first_lines(model, vocab, start, rule, end, generator=None, temperature=1.0, **knobs):
    """Go on from start (n, T), equal rows, to the end of a first line of `end` characters -> ids (n, 1 + end).

    The lines are drawn as from the poems that keep the rule. The rule alone does not do that: it pads or
    cuts a line that the model began for another form. Here CANDIDATES lines are written for each poem,
    and n of them all are drawn by their weight, the product of the probability that the rule left at
    each character and at the mark (importance resampling).
    """
    rows = start[:1].expand(max(len(start), 16), -1)  # a single poem needs some more candidates
    marks = template_constraint([["，。"]], vocab)(start[:1, :1])  # (V,)
    weights = torch.zeros(CANDIDATES, len(rows), device=start.device)

    def open_end(ids):  # two marks to choose from: so the mark is not put in, but drawn, and weighed
        return marks if ids.size(1) == 1 + end else rule(ids)

    lines = []
    for weight in weights:  # a batch at a time: what it needs fits a CPU's cache

        def weigh(logits, allowed, weight=weight):
            probs = (logits / max(temperature, 0.01)).softmax(dim=-1)
            weight += torch.where(allowed, probs, 0.0).sum(dim=-1).clamp(min=1e-30).log()

        options = {"temperature": temperature, "generator": generator, "constraint": open_end, "watch": weigh}
        lines.append(model.generate(rows, end + 2 - start.size(1), **options, **knobs)[:, :-1])
    noise = torch.rand(weights.shape, generator=generator).clamp(min=2**-25).to(weights.device)
    scores = weights - noise.log().neg().log()  # Gumbel-max: the n largest are n draws without repeats
    return torch.cat(lines)[scores.flatten().topk(len(start)).indices]


def template_constraint(templates, vocab, prosody=None):
    """A TemplateConstraint for model.generate: ids (B, t) -> bool (V,) or (B, V), as tensors."""
    vocab.encode("".join(entry for entry in templates[0] if isinstance(entry, str)))  # raises if it lacks one
    rule = TemplateConstraint(templates, vocab.chars, prosody)
    return lambda ids: torch.from_numpy(rule(ids.cpu().numpy())).to(ids.device)


def acrostic(model, vocab, heads, n_char=7, temperature=ACROSTIC_TEMPERATURE, n=1, generator=None, **knobs):
    """n poems whose lines, each of n_char characters and a mark, begin with the heads."""
    # lesson: acrostic poems; the heads and the marks are put in, the rest is written
    template = poem_template(n_char, len(heads), heads)
    rule = template_constraint([template], vocab)
    knobs |= {"temperature": temperature, "generator": generator}
    return write(model, vocab, n=n, rule=rule, length=len(template), **knobs)


# ---------------------------------------------------------------------------------------------------
# The six demos, in the lesson's words


def seeded(seed=SEED):
    """A generator on the CPU: the same seed gives the same poems on every device."""
    return torch.Generator().manual_seed(seed)


def show(poems):
    """Print poems, indented; …… where one was cut."""
    for text, ended in poems:
        print(f"    {text}" + ("" if ended else "……"))


def notice(text):
    """Print text to stderr. If nobody can read it there, the poems go on all the same."""
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError):  # ValueError: it is closed
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def known(texts, vocab, name):
    """Yield those of texts that can be written in the model's characters, traditional ones converted."""
    for text in texts:
        try:
            if normal := normalised(text, vocab, name):
                yield normal
        except UserError as error:
            notice(f"{error}; 「{text}」 is left out")


def next_logits(model, vocab, text):
    """The model's scores (1, V) for the character after text."""
    with torch.inference_mode():
        ids = vocab.encode(text)[:, -model.config.block_size :].to(model.wte.weight.device)
        return model(ids)[0][:, -1].cpu()


def demo_next(model, vocab):
    # lesson: all the model gives is probabilities
    print(f"== 1. 读完一段文字，模型给下一个字的概率（前 {NEXT_TOP} 名）")
    texts = list(known(NEXT_PROMPTS, vocab, "NEXT_PROMPTS"))
    for text in texts:
        probs = probabilities(next_logits(model, vocab, text))[0]  # (V,)
        best, ids = probs.topk(min(NEXT_TOP, len(vocab)))
        shown = zip(vocab.decode(ids), best.tolist(), strict=True)
        print(f"  「{text}」→ " + "  ".join(f"{show_char(char)} {100 * p:.1f}%" for char, p in shown))
    corpus = CORPUS.read_text(encoding="utf-8", errors="replace") if CORPUS.exists() else ""
    if texts and text in corpus and "。" in vocab.ids:  # what the model's last probability can be held against
        n, followed = corpus.count(text), corpus.count(text + "。")
        print(
            f"  语料里「{text}」出现 {n} 次，其中 {followed} 次后面紧跟「。」："
            f"{100 * followed / n:.1f}%；模型给的概率：{100 * probs[vocab.ids['。']]:.1f}%"
        )


def demo_temperature(model, vocab):
    print(f"== 2. 温度：同样的随机种子，每个温度写 {POEMS} 首")
    for temperature in TEMPERATURES:
        print(f"  温度 {temperature}：")
        show(write(model, vocab, n=POEMS, temperature=temperature, generator=seeded()))


def demo_top_k(model, vocab):
    print(f"== 3. 温度 {HOT}，但只从概率最高的 {TOP_K} 个字里选（top-k={TOP_K}）")
    show(write(model, vocab, n=POEMS, temperature=HOT, top_k=TOP_K, generator=seeded()))


def demo_continue(model, vocab):
    # lesson: continuation
    print("== 4. 给出开头，让它续写")
    generator = seeded()
    for opening in known(OPENINGS, vocab, "OPENINGS"):
        show(write(model, vocab, opening, temperature=OPENING_TEMPERATURE, generator=generator))


def demo_acrostic(model, vocab):
    print("== 5. 藏头诗：每句开头的字由我们指定，其余由模型写")
    if not {"，", "。"} <= vocab.ids.keys():
        notice("demo 5 needs ， and 。, which the model does not know")
        return
    generator = seeded()
    for given, n_char in ACROSTICS:
        for heads in known([given], vocab, "ACROSTICS"):
            if heads.isalpha():
                show(acrostic(model, vocab, heads, n_char, generator=generator))
            else:
                notice(f"ACROSTICS has {heads!r}: give the characters that begin the lines, without marks")


def timed(model, start, n, use_cache):
    """Seconds that n characters after start (1, T) take."""
    if start.device.type != "cpu":
        torch.accelerator.synchronize()
    before = time.perf_counter()
    model.generate(start, n, use_cache=use_cache, generator=seeded())
    if start.device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - before


def time_both(model, start, n, runs=TIMED_RUNS):
    """(without, with cache): the median seconds for n characters, the two in turn, each warmed up once."""
    without, cached = [], []
    for _ in range(runs + 1):
        without.append(timed(model, start, n, use_cache=False))
        cached.append(timed(model, start, n, use_cache=True))
    return statistics.median(without[1:]), statistics.median(cached[1:])


def first_difference(model, start, n, seed=SEED):
    """The number of the first of n characters, from 1, that differs without the cache; None if none does."""
    cached, without = (model.generate(start, n, use_cache=c, generator=seeded(seed))[0] for c in (True, False))
    different = (cached != without).nonzero()
    return different[0].item() - start.size(1) + 1 if len(different) else None


def positions_computed(model, start, n, use_cache):
    """How many positions the model computes to write n characters after start (1, T)."""
    fed, hidden = [], model.hidden
    model.hidden = lambda idx, *rest, **options: fed.append(idx.numel()) or hidden(idx, *rest, **options)
    try:
        model.generate(start, n, use_cache=use_cache, generator=seeded())
    finally:
        del model.hidden  # the class's own again
    return sum(fed)


def cache_bytes(config, n):
    """The bytes of n positions in the caches: 2 (k and v) x layers x dimensions of k x 4 (float32)."""
    return 2 * config.n_layer * (config.n_embd // config.n_head * config.n_kv_head) * 4 * n


def faster(without, cached):
    return f"快了 {without / cached:.1f} 倍" if cached <= without else f"反而慢了 {cached / without:.1f} 倍"


def demo_cache(model, vocab):
    # lesson: measuring it
    config, start = model.config, begin(model, vocab, "", 1)
    print("== 6. KV 缓存：结果一样吗？快了多少？")
    for n, note in ((SAME_CHARS, ""), (LONG_CHARS, f"（窗口 {config.block_size} 个字，已滑动）")):
        different = first_difference(model, start, n)
        verdict = "完全一样" if different is None else f"不一样：第 {different} 个字不同"
        print(f"  同样的随机种子，写 {n} 个字：用缓存和不用缓存的结果{verdict}" + note * (n > config.block_size))
    without, cached = (positions_computed(model, start, SAME_CHARS, use_cache) for use_cache in (False, True))
    print(f"  写 {SAME_CHARS} 个字要算的位置：不用缓存 {without:,} 个，用缓存 {cached:,} 个")
    for n in TIMED_CHARS:
        without, cached = time_both(model, start, n)
        times = f"不用缓存 {1000 * without:6.0f} 毫秒，用缓存 {1000 * cached:5.0f} 毫秒"
        print(f"  写 {n:>3} 个字：{times}，{faster(without, cached)}")
    # lesson: the cost of the cache
    n, kv = config.block_size, config.n_embd // config.n_head * config.n_kv_head
    print(
        f"  这个模型每个词元的缓存：2 × {config.n_layer} 层 × {kv} 维 × 4 字节 = "
        f"{cache_bytes(config, 1) / 1024:g} KB，{n} 个词元共 {cache_bytes(config, n) / 1024:g} KB"
    )


DEMOS = {1: demo_next, 2: demo_temperature, 3: demo_top_k, 4: demo_continue, 5: demo_acrostic, 6: demo_cache}

# ---------------------------------------------------------------------------------------------------
# The poet


def normalised(text, vocab, name, line_break=False):
    """text in the model's characters, on one line unless line_break; what was changed is said on stderr.

    Raises UserError for characters that the model does not know.
    """
    text, changes = normalise(text, vocab.ids.keys() - ({"\n"} if not line_break else set()))
    if changes:
        names = {char: "space" for char in changes if char.isspace()} | {"\n": "line break", "": "nothing"}
        said = "  ".join(f"{names.get(old, old)} → {names.get(new, new)}" for old, new in changes.items())
        notice(f"{name}: {said}")
    try:
        vocab.encode(text)
    except ValueError as error:
        raise UserError(f"{name}: {error}", 2) from None
    return text


def check_fits(template, prompt, form):
    """Raise UserError unless prompt can begin a poem of that template."""
    if len(prompt) > len(template):
        raise UserError(f"--prompt has {len(prompt)} characters, {form} has {len(template)}", 2)
    for i, (char, entry) in enumerate(zip(prompt, template, strict=False), 1):
        if not may_stand(char, entry):
            wanted = f"「{entry}」" if isinstance(entry, str) else "a character that is no mark"
            raise UserError(f"--prompt cannot begin {form}: its character {i} is {char}, there stands {wanted}", 2)


def plan(args, model, vocab, prosody):
    """(prompt, options of `write`) for what a user asked for; prosody: None for the shape of a form alone."""
    prompt = normalised(args.prompt or "", vocab, "--prompt")
    if len(prompt) > model.config.block_size:
        seen = model.config.block_size
        notice(f"--prompt has {len(prompt)} characters; the model sees the last {seen}")
    heads = "" if args.acrostic is None else normalised(args.acrostic, vocab, "--acrostic")
    if args.acrostic is not None and not heads.isalpha():
        raise UserError(f"--acrostic {heads!r}: give the characters that begin the lines, without marks", 2)
    if not args.form and not heads:
        return prompt, {"length": args.max_chars or MAX_CHARS}
    n_char, n_lines = FORMS.get(args.form, (args.chars or 7, len(heads)))
    if heads and n_lines != len(heads):
        raise UserError(f"--acrostic has {len(heads)} characters, but {args.form} has {n_lines} lines", 2)
    shape = poem_template(n_char, n_lines, heads)
    check_fits(shape, prompt, args.form)
    if not prosody:
        return prompt, {"rule": template_constraint([shape], vocab), "length": len(shape)}
    given = dict(enumerate(prompt)) | {i * (n_char + 1): head for i, head in enumerate(heads)}
    templates, lost = choose_templates(args.form, given, prosody)
    if lost:
        kept = "shape and rhyme" if lost == "tones" else "shape"
        notice(f"{prompt or heads} does not keep the {lost} of {args.form}; the rest keeps {kept}")
    for template in templates if heads else ():
        template[:: n_char + 1] = heads
    return prompt, {"rule": template_constraint(templates, vocab, prosody), "length": len(shape), "first_line": n_char}


def write_poems(model, vocab, args):
    """The poet: print args.number poems to stdout, one a line, all else to stderr."""
    regulated = args.form and not args.loose
    try:
        prosody = read_prosody() if regulated or args.scan else None
    except ValueError as error:
        raise UserError(str(error)) from None
    prompt, options = plan(args, model, vocab, prosody if regulated else None)
    seed, n = args.seed, args.number or 1
    if seed is None:
        seed = int.from_bytes(os.urandom(4), "little")
        notice(f"seed {seed}: --seed {seed} with the same -n writes this again")
    knobs = {"temperature": args.temperature[0], "top_k": args.top_k, "top_p": args.top_p}
    if n > 1 and knobs["temperature"] == 0:
        notice(f"temperature 0 always takes the likeliest character: the {n} poems are the same")
    generator, cut = seeded(seed), 0
    for done in range(0, n, BATCH):
        poems = write(model, vocab, prompt, min(BATCH, n - done), generator=generator, **options, **knobs)
        for text, ended in poems:
            print(text, flush=args.scan)
            if args.scan:
                notice(scan(text, prosody))
            cut += not ended
        sys.stdout.flush()
    if cut:
        notice(f"{cut} of {n} had not ended after {options['length']} characters (--max-chars)")
    if args.trace:
        [(text, ended)], rule = poems, options.get("rule")
        print_trace(model, vocab, prompt, text + "\n" * (ended and rule is None), rule, **knobs)


# ---------------------------------------------------------------------------------------------------
# Looking inside


def pad(text, width):
    """text with spaces up to a width in terminal columns, of which a Chinese character takes two."""
    return text + " " * (width - sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text))


def show_char(char):
    return "↵" if char == "\n" else char


def bar(share, width=40):
    return "█" * round(width * share)


def print_next(model, vocab, text, args):
    """What may come after text: a row a character, a column a temperature, - for what top-k or top-p cuts."""
    if len(text) > model.config.block_size:
        notice(f"of {len(text)} characters the model sees the last {model.config.block_size}")
    logits, knobs = next_logits(model, vocab, text), {"top_k": args.top_k, "top_p": args.top_p}
    columns = [probabilities(logits, temperature=t, **knobs)[0] for t in args.temperature]  # (V,) each
    ids = logits[0].topk(min(args.top or 20, len(vocab))).indices
    if len(columns) > 1:
        print(" " * 7 + "".join(f"{f'T={t:g}':>8}" for t in args.temperature))
    for i, char in enumerate(vocab.decode(ids)):
        shares = [probs[ids[i]].item() for probs in columns]
        shown = "".join(f"{100 * p:7.1f}%" if p else f"{'-':>8}" for p in shares)
        bars = "" if len(columns) > 1 else " " + bar(shares[0] / columns[0].max().item())
        print(f"{i + 1:>4} {pad(show_char(char), 2)}{shown}{bars}".rstrip())
    rest = [max(0.0, 1 - probs[ids].sum().item()) for probs in columns]
    print(f"{'others':<7}" + "".join(f"{100 * p:7.1f}%" for p in rest))
    if any(knobs.values()):
        print(f"{'left':<7}" + "".join(f"{(probs > 0).sum():8,}" for probs in columns))


def replay(model, ids, start):
    """Yield the logits (1, V) of each character of ids (1, T) after the first `start`, from the window it was
    written from."""
    window, block_size = max(0, start - model.config.block_size), model.config.block_size
    with torch.inference_mode():
        for t in range(start, ids.size(1)):
            if t - window > block_size:
                window += (block_size + 1) // 2
            yield model(ids[:, window:t])[0][:, -1]


def print_trace(model, vocab, prompt, text, rule=None, **knobs):
    """On stderr, a line for each character of text after the prompt: what was left, and what was drawn."""
    ids, start = begin(model, vocab, text), 1 + len(prompt)
    head = f"{'likeliest that were left, in %':<31} {'rule left':>9} {'top-k cut':>9} {'top-p cut':>9}"
    notice(f"{'#':>3}       % {'rank':>5} {head}")
    for i, logits in enumerate(replay(model, ids, start)):
        drawn = ids[0, start + i].item()
        allowed = rule(ids[:, : start + i]).expand(1, -1) if rule else None  # (1, V)
        free = probabilities(logits, temperature=knobs["temperature"])  # (1, V)
        cuts = ["   -    -" if rule is None else f"{allowed.sum():>4} {free[allowed].sum():>4.0%}"]
        steps, options = [], {"allowed": allowed}
        for name in ("temperature", "top_k", "top_p"):
            options[name] = knobs[name]
            steps.append(probabilities(logits, **options))  # (1, V)
        for before, after in itertools.pairwise(steps):
            gone = (before > 0) & (after == 0)
            cuts.append(f"{gone.sum():>4} {before[gone].sum():>4.0%}" if gone.any() else "   -    -")
        best, likeliest = steps[-1][0].topk(min(4, len(vocab)))
        chars = [pad(show_char(char), 2) for char in vocab.decode(likeliest)]
        left = " ".join(f"{char}{100 * p:5.1f}" for char, p in zip(chars, best.tolist(), strict=True) if p > 0)
        rank = (logits[0] > logits[0, drawn]).sum().item() + 1
        choice = f"{pad(show_char(vocab.chars[drawn]), 2)} {100 * steps[-1][0, drawn].item():5.1f} {rank:>5}"
        notice(f"{i + 1:>3} {choice} {pad(left, 31)} {' '.join(cuts)}")


# ---------------------------------------------------------------------------------------------------
# lesson: the exercises. Each prints what there is to see, then whether the solution is right.


def my_top_p(probs, p):
    """Exercise 1: which of the probabilities (V,) stay, as a bool tensor (V,). Write it here."""
    raise NotImplementedError


def my_marks(place):
    """Exercise 2: the marks allowed at this place, 1 to 32, of a quatrain of seven characters a line, such
    as "，。"; None where no mark may stand. Write it here."""
    raise NotImplementedError


def ask(function, *arguments):
    """What a learner's function answers. Raises UserError if it is not written yet, or fails."""
    try:
        return function(*arguments)
    except NotImplementedError:
        raise UserError(f"not tried yet: write {function.__name__} in generate.py") from None
    except (Exception, SystemExit) as error:  # whatever a first attempt may do
        line = error.__traceback__.tb_next.tb_lineno if error.__traceback__.tb_next else 0
        raise UserError(f"wrong: {function.__name__} fails in line {line}: {error!r}") from None


def check_top_p(keep, examples):
    """None, or what is wrong with keep(probs, p): it must keep the fewest, likeliest, that together reach p."""
    for probs, p in examples:
        kept = ask(keep, probs.clone(), p)
        shown = f"of {[round(x, 3) for x in probs.tolist()]}" if len(probs) < 9 else f"of {len(probs):,} characters"
        if getattr(kept, "dtype", None) != torch.bool or kept.shape != probs.shape:
            form = f"{kept.dtype} {tuple(kept.shape)}" if isinstance(kept, torch.Tensor) else repr(kept)
            return f"for p = {p} {shown} it returns {form[:60]}, not a bool tensor of shape {tuple(probs.shape)}"
        mass = probs[kept].double().sum().item()
        answer = f"for p = {p} it keeps {int(kept.sum())} {shown}, {mass:.3f} of the mass"
        if mass < p - 1e-6:
            return f"{answer}: too few"
        if mass - probs[kept].min().item() > p + 1e-6:  # so one more is let pass where p is reached exactly
            return f"{answer}: one less would do"
        if not kept.all() and probs[~kept].max() > probs[kept].min():
            return f"{answer}, but leaves out a likelier one"
    return None


def keep_top_k(probs, k):
    """Which of the probabilities (V,) are the k largest, as a bool tensor (V,)."""
    return torch.zeros_like(probs, dtype=torch.bool).index_fill(0, probs.topk(min(k, len(probs))).indices, True)


def write_keeping(model, vocab, keep, value):
    """(poems, the number of candidates at each step): the lesson's own loop, with keep(probs, value) in it."""
    ids, counts, generator = begin(model, vocab, "", EX1_POEMS), [], seeded()
    for _ in range(min(MAX_CHARS, model.config.block_size - 1)):
        running = (ids[:, 1:] != vocab.ids["\n"]).all(dim=1)  # (EX1_POEMS,): whose poem has not ended
        if not running.any():
            break
        probs = probabilities(model(ids)[0][:, -1], temperature=HOT)  # (EX1_POEMS, V)
        kept = torch.stack([ask(keep, row, value) for row in probs])
        counts += kept[running].sum(dim=1).tolist()
        ids = torch.cat([ids, sample(probs.log(), generator, allowed=kept)[:, None]], dim=1)
    texts = [vocab.decode(row).partition("\n") for row in ids[:, 1:].tolist()]
    return [(text, bool(end)) for text, end, _ in texts], counts


def exercise_top_p(model, vocab):
    print(f"== 练习 1. 温度 {HOT}：top-k={TOP_K} 和 top-p={EX1_TOP_P}")
    small = [torch.tensor(probs) for probs in ([0.09, 0.5, 0.41], [0.25, 0.25, 0.25, 0.25], [1.0, 0.0])]
    texts = ["\n", *known(NEXT_PROMPTS, vocab, "NEXT_PROMPTS")]
    real = [probabilities(next_logits(model, vocab, text), temperature=HOT)[0] for text in texts]
    wrong = check_top_p(my_top_p, [(probs, p) for probs in small + real for p in (0.3, EX1_TOP_P, 1.0)])
    if wrong:
        return wrong
    with torch.no_grad():
        for name, keep, value in (("top-k", keep_top_k, TOP_K), ("top-p", my_top_p, EX1_TOP_P)):
            poems, kept = write_keeping(model, vocab, keep, value)
            middle = statistics.median(kept)
            print(f"  {name}={value}：每一步留下的字：最少 {min(kept)}，中位数 {middle:g}，最多 {max(kept)}")
            show(poems)
    return None


def misplaced(text):
    """None, or what breaks exercise 2's rule, as the lesson has it: 32 characters, ，or 。 at 8, 16, 24, 。 at 32."""
    for place, char in enumerate(text, 1):
        wanted = "。" if place == 32 else "，。" if place % 8 == 0 else None
        if not (char in wanted if wanted else char.isalpha()):
            must = f"「{wanted}」" if wanted else "a character that is no mark"
            return f"「{text}」: at place {place} stands {char}, there must be {must}"
    return None if len(text) == 32 else f"「{text}」 has {len(text)} characters, it must have 32"


def exercise_form(model, vocab):
    print("== 练习 2. 固定格式：七言绝句，标点只在第 8、16、24、32 个字")
    answers = [ask(my_marks, place) for place in range(1, 33)]
    for place, marks in enumerate(answers, 1):
        if marks is not None and (not isinstance(marks, str) or not marks or not set(marks) <= {"，", "。"}):
            return f"for place {place} it returns {marks!r}, not None or a string of ， and 。"
    template = [Place.ANY if marks is None else marks for marks in answers]
    rule = template_constraint([template], vocab)
    for name, options in (("不加约束", {}), ("加约束", {"rule": rule, "length": 32})):
        poems = write(model, vocab, n=EX2_POEMS, temperature=1.0, generator=seeded(), **options)
        wrong = [problem for problem in (misplaced(text) for text, _ in poems) if problem]
        print(f"  {name}：{EX2_POEMS} 首里 {1 - len(wrong) / len(poems):.0%} 合格")
        show(poems[:3])
    if not wrong and "，" in (answers[31] or ""):
        return f"for place 32 it returns {answers[31]!r}: a poem must end with 。"
    return wrong[0] if wrong else None


def exercise_cache(model, vocab):
    print(f"== 练习 3. block_size={EX3_BLOCK_SIZE}，随机权重：写得越长，缓存省得越多")
    torch.manual_seed(SEED)
    start = begin(model, vocab, "")
    model = GPT(dataclasses.replace(model.config, block_size=EX3_BLOCK_SIZE)).to(start.device).eval()
    rows = [(n, *time_both(model, start, n, runs=1)) for n in EX3_CHARS]
    slowest = max(max(times) for _, *times in rows)
    for n, without, cached in rows:
        held = cache_bytes(model.config, min(n, EX3_BLOCK_SIZE))
        print(f"  写 {n:>4} 个字，缓存 {held / 1024:,.0f} KB，{faster(without, cached)}")
        for name, seconds in (("不用缓存", without), ("用缓存", cached)):
            print(f"    {pad(name, 8)} {1000 * seconds:6.0f} 毫秒 {bar(seconds / slowest)}")
    different = first_difference(model, start, max(EX3_CHARS))
    if different:
        return f"with and without the cache character {different} differs"
    if max(EX3_CHARS) > EX3_BLOCK_SIZE:
        return f"a block_size of {EX3_BLOCK_SIZE} does not hold {max(EX3_CHARS)} characters: the window slid"
    if max(EX3_CHARS) < 500:
        return f"the lesson asks for 500 characters, here are {max(EX3_CHARS)}"
    times = [without for _, without, _ in sorted(rows)]
    if times != sorted(times) or any(cached > without for _, without, cached in rows):
        return "these times cannot be: more characters took less time; another program is running, try again"
    return None


EXERCISES = {1: exercise_top_p, 2: exercise_form, 3: exercise_cache}


def check_exercises(numbers, model, vocab):
    """Run exercises and say whether their solutions are right; return the exit status."""
    status = 0
    for number in numbers:
        try:
            wrong = EXERCISES[number](model, vocab)
            verdict = f"wrong: {wrong}" if wrong else "right"
        except UserError as error:
            verdict = str(error)
        print(f"  exercise {number}: {verdict}", flush=True)
        status |= verdict != "right"
    return int(status)


# ---------------------------------------------------------------------------------------------------
# The command line


def whole(least, most=10**9):
    """An argparse type: a whole number from least to most."""

    def parse(text):
        if not (text.isascii() and text.isdecimal()) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text} is not a whole number from {least} to {most}")
        return int(text)

    parse.__name__ = "whole number"  # as argparse calls it in "invalid ... value"
    return parse


EXAMPLES = """examples:
  python generate.py --prompt 大漠孤烟直 -n 5 --temperature 0.8 --top-k 50 --top-p 0.9 --seed 7
  python generate.py --form 七律 -n 3 --scan
  python generate.py --prompt 白日依山尽， --form 五绝
  python generate.py --acrostic 春眠不觉 --chars 5
  python generate.py --acrostic 学无止境 --form 七绝
  python generate.py --next 春风 --top 10 --temperature 0.3 1 1.5 --top-k 20
  python generate.py --prompt 春风 --trace
  python generate.py --exercise 1 2 3

Poems go to stdout, one a line, everything else to stderr.
Exit status: 0 done, 1 a failure while running or a wrong exercise, 2 wrong usage or input, 130 Ctrl-C."""

# The flags that go with each command, beside --checkpoint, --device and --threads.
KNOBS = {"temperature", "top_k", "top_p"}
POET = {"prompt", "form", "loose", "acrostic", "chars", "number", "seed", "max_chars", "scan", "trace", *KNOBS}
FLAGS = {"demo": {"demo"}, "exercise": {"exercise"}, "next": {"next", "top", *KNOBS}, "poem": POET}
# A flag, those it does not go with, and those of which it needs one.
PAIRS = [
    ("chars", {"form"}, {"acrostic"}),
    ("loose", set(), {"form"}),
    ("max_chars", {"form", "acrostic"}, set()),
]


def make_parser():
    parser = argparse.ArgumentParser(
        description="The lesson's six demos; with arguments, poems of your own.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="python generate.py [options]   (--help shows them)",
    )
    add = parser.add_argument_group("the lesson").add_argument
    add("--demo", nargs="+", type=int, choices=range(1, 7), metavar="N", help="only these demos, 1 to 6")
    add("--exercise", nargs="+", type=int, choices=range(1, 4), metavar="N", help="exercises, 1 to 3")
    add("--next", metavar="TEXT", help="what may come after this text, taken as it is: no line break before it")
    add("--top", type=whole(1), metavar="N", help="with --next: how many characters (default: 20)")
    add = parser.add_argument_group("poems").add_argument
    add("--prompt", metavar="TEXT", help="how the poem begins; it stands after a line break, as in training")
    add("--form", choices=FORMS, help="regulated verse, its tones and rhymes kept: 4 or 8 lines of 5 or 7 characters")
    add("--loose", action="store_true", default=None, help="with --form: keep its shape alone")
    add("--acrostic", metavar="HEADS", help="the first characters of its lines")
    add("--chars", type=whole(1, 100), metavar="N", help="characters a line of an acrostic (default: 7)")
    add("-n", "--number", type=whole(1, 10**6), metavar="N", help="how many poems (default: 1)")
    add("--seed", type=whole(0, 2**63 - 1), metavar="N", help="the same seed and number give the same poems")
    add("--max-chars", type=whole(1, 10**5), metavar="N", help=f"cut after so many (default: {MAX_CHARS})")
    add("--scan", action="store_true", default=None, help="show the tones and the rhyme under each poem")
    add("--trace", action="store_true", default=None, help="show what each character was chosen from (one poem)")
    add = parser.add_argument_group("choosing (with poems and --next)").add_argument
    several = f"0 takes the likeliest character (default: {TEMPERATURE}, with --next 1); --next takes several"
    add("--temperature", nargs="+", type=float, metavar="T", help=several)
    add("--top-k", type=int, metavar="K", help="draw among the K likeliest only")
    add("--top-p", type=float, metavar="P", help="draw among the fewest that together have probability P")
    add = parser.add_argument_group("the model").add_argument
    add("--checkpoint", type=Path, metavar="FILE", help="default: gpt.pt or pretrained.pt in checkpoints/")
    add("--device", default="cpu", help="cpu (default), cuda, mps or auto")
    add("--threads", type=whole(1, 1024), default=THREADS, metavar="N", help=f"of the CPU (default: {THREADS})")
    return parser


def parse_args(argv=None):
    """The arguments, with args.command one of FLAGS; a wrong one ends the program with status 2."""
    parser = make_parser()
    args, extra = parser.parse_known_args(argv)
    if extra:
        hint = "" if extra[0].startswith("-") else f"; --prompt {extra[0]} begins a poem with it"
        parser.error(f"unrecognized: {' '.join(extra)}{hint}")
    given = {name for name, value in vars(args).items() if value is not None} - {"checkpoint", "device", "threads"}
    args.command = next((name for name in ("demo", "exercise", "next") if name in given), "poem" if given else "demo")
    flags = {name: f"--{name.replace('_', '-')}" for name in vars(args)}
    for name in sorted(given - FLAGS[args.command]):
        takers = ["poems" if command == "poem" else f"--{command}" for command in FLAGS if name in FLAGS[command]]
        way = f"does not go with --{args.command}" if name in FLAGS else f"goes with {' or '.join(takers)}"
        parser.error(f"{flags[name]} {way}")
    for name, without, with_one in PAIRS:
        for other in sorted(without & given) if name in given else ():
            parser.error(f"{flags[name]} does not go with {flags[other]}")
        if name in given and with_one and not with_one & given:
            parser.error(f"{flags[name]} goes with {' or '.join(flags[other] for other in sorted(with_one))}")
    if args.trace and (args.number or 1) > 1:
        parser.error("--trace shows one poem: leave out --number")
    if {"acrostic", "prompt"} <= given:
        parser.error("--acrostic does not go with --prompt: the heads begin the poem")
    args.temperature = args.temperature or [1.0 if args.command == "next" else TEMPERATURE]
    if len(args.temperature) > 1 and args.command != "next":
        parser.error("--temperature takes one number, several only with --next")
    for temperature in args.temperature:
        try:
            check_sampling(temperature, args.top_k, args.top_p)
        except ValueError as error:
            parser.error(f"--{str(error).replace('_', '-')}")
    return args


def load_model(args):
    """(model, vocab, a line that names them) of args.checkpoint, or of the first that is there."""
    paths = [args.checkpoint] if args.checkpoint else [CHECKPOINTS / "gpt.pt", CHECKPOINTS / "pretrained.pt"]
    path = next((path for path in paths if path.is_file()), None)
    if not path:
        own = "--checkpoint takes what train.py has written"
        way = own if args.checkpoint else f"git checkout {paths[-1]} brings it back, python train.py makes one"
        raise UserError(f"there is no file {' and no '.join(map(str, paths))}: {way}", 2)
    args.checkpoint = path
    model, vocab, info = load_checkpoint(path, pick_device(args.device))
    if "\n" not in vocab.ids:
        raise UserError(f"{path} was not trained on poems: its vocabulary lacks the line break")
    shown = path.relative_to(CHECKPOINTS.parent) if path.is_relative_to(CHECKPOINTS.parent) else path
    loss = info.get("val_loss")
    return model, vocab, f"model: {shown}" + (f", validation loss {loss:.3f}" if isinstance(loss, float) else "")


def main():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    check_settings()
    args = parse_args()
    torch.set_num_threads(args.threads)
    model, vocab, name = load_model(args)
    # After the demos it stands on stdout, so that `| head -1` gives the lesson's first line and nothing else.
    if args.command != "demo":
        notice(name)
    try:
        if args.command == "demo":
            for number in args.demo or DEMOS:
                DEMOS[number](model, vocab)
                sys.stdout.flush()
            print(name)
        elif args.command == "exercise":
            return check_exercises(args.exercise, model, vocab)
        elif args.command == "next":
            print_next(model, vocab, normalised(args.next, vocab, "--next", line_break=True) or "\n", args)
        else:
            write_poems(model, vocab, args)
    except DecodingError as error:
        raise UserError(f"{args.checkpoint}: {error}") from None
    except ValueError as error:  # a character that the model lacks, in a form's marks or a corpus
        raise UserError(str(error), 2) from None
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
