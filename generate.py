"""The lesson "Generating text and the KV cache", run: six demos, three exercises, and a poet to play with.

    python generate.py                          # the six demos
    python generate.py --demo 1 6               # some of them
    python generate.py --prompt 大漠孤烟直      # a poem; python generate.py --help shows all commands

Every demo is a function, and its settings stand together here at the top: change one and run it again.
torch is imported where it is used, for it takes a second, and --help need not wait for it.
"""

import argparse
import math
import os
import signal
import statistics
import sys
import time
import unicodedata
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
CHECKPOINTS = (HERE / "checkpoints" / "gpt.pt", HERE / "checkpoints" / "pretrained.pt")  # the first that is there
CORPUS = HERE / "data" / "tang.txt"

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

SAME_CHARS = 120  # demo 6: characters written both ways to compare,
TIMED_CHARS = (32, 64, 120)  # and timed, at most block_size
TIMED_RUNS = 5  # the median of so many

EX1_TOP_P = 0.9  # exercise 1: beside TOP_K, both at temperature HOT
EX1_POEMS = 3

EX2_LENGTH, EX2_MARKS = 32, {8: "，。", 16: "，。", 24: "，。", 32: "。"}  # exercise 2: position -> marks allowed there
EX2_POEMS = 200  # free ones and constrained ones

EX3_BLOCK_SIZE = 512  # exercise 3
EX3_CHARS = (100, 200, 300, 400, 500)

FORMS = {"五绝": (5, 4), "七绝": (7, 4), "五律": (5, 8), "七律": (7, 8)}  # characters a line, lines
TEMPERATURE = 0.8  # of the poet, unless --temperature says otherwise
BATCH = 64  # poems written at once

# ---------------------------------------------------------------------------------------------------
# Rules on the text: a template is a list with an entry for each character to come, either a string of
# the characters allowed there or ANY, which allows all but marks and the line break.

ANY = None


def form(n_char, n_lines, heads=()):
    """The template of n_lines lines of n_char characters, ，and 。 after them in turn; heads begin the lines."""
    template = []
    for i in range(n_lines):
        template += [*heads[i : i + 1], *[ANY] * (n_char - len(heads[i : i + 1])), "，。"[i % 2]]
    return template


def follow(template, vocab, start, device="cpu"):
    """The constraint, for model.generate, that the ids after the first `start` follow the template."""
    import torch

    masks = {ANY: torch.tensor([char.isalpha() for char in vocab.chars], device=device)}  # all but the lesson's BANNED
    for chars in set(template) - {ANY}:
        masks[chars] = torch.zeros(len(vocab), dtype=torch.bool, device=device)
        masks[chars][vocab.encode(chars)[0].to(device)] = True
    return lambda ids: masks[template[ids.size(1) - start]]  # (V,), made once: a step only looks it up


def write(model, vocab, prompt="", n=1, *, template=None, max_chars=MAX_CHARS, generator=None, **knobs):
    """n poems, a list of texts that begin with prompt, each ending in a line break unless it was cut after max_chars.

    template: the whole poem's, of which prompt is the beginning; such a poem has just its length.
    knobs: temperature, top_k, top_p, use_cache of model.generate.
    """
    device = model.wte.weight.device
    start = vocab.encode("\n" + prompt).to(device).expand(n, -1)  # (n, T): a poem begins after a line break
    if template is None:
        ids = model.generate(start, max_chars, stop=vocab.ids["\n"], generator=generator, **knobs)
    else:
        rest = template[len(prompt) :]
        rule = follow(rest, vocab, start.size(1), device)
        ids = model.generate(start, len(rest), constraint=rule, generator=generator, **knobs)
    poems = []
    for row in ids[:, 1:].tolist():
        text = vocab.decode(row)
        poem, end, _ = text[len(prompt) :].partition("\n")
        poems.append(prompt + poem + (end or "\n" * (template is not None)))
    return poems


def acrostic(model, vocab, heads, n_char=7, temperature=TEMPERATURE, n=1, generator=None, **knobs):
    """n poems whose lines, each of n_char characters and a mark, begin with the heads."""
    template = form(n_char, len(heads), heads)
    return write(model, vocab, n=n, template=template, generator=generator, temperature=temperature, **knobs)


def seeded(seed=SEED):
    """A generator on the CPU: the same seed gives the same poems on every device."""
    import torch

    return torch.Generator().manual_seed(seed)


# ---------------------------------------------------------------------------------------------------
# The six demos, in the lesson's words


def show(poems):
    """Print poems, indented; …… where one was cut."""
    for poem in poems:
        print("    " + (poem.strip() if poem.endswith("\n") else poem.strip() + "……"))


def next_probabilities(model, vocab, text):
    """The probabilities (V,) of the character after text, as the model gives them; after "" they begin a poem."""
    import torch

    from gpt import probabilities

    with torch.inference_mode():
        ids = vocab.encode(text or "\n")[:, -model.config.block_size :].to(model.wte.weight.device)
        return probabilities(model(ids)[0][:, -1])[0].cpu()


def visible(char):
    return {"\n": "↵"}.get(char, char)


def demo_next(model, vocab):
    print(f"== 1. 读完一段文字，模型给下一个字的概率（前 {NEXT_TOP} 名）")
    for text in NEXT_PROMPTS:
        probs, ids = next_probabilities(model, vocab, text).topk(min(NEXT_TOP, len(vocab)))
        shown = zip(vocab.decode(ids), probs.tolist(), strict=True)
        print(f"  「{text}」→ " + "  ".join(f"{visible(char)} {100 * p:.1f}%" for char, p in shown))
    text, mark = NEXT_PROMPTS[-1], "。"
    if CORPUS.exists():  # what the model's probability can be held against
        corpus = CORPUS.read_text(encoding="utf-8")
        n, followed = corpus.count(text), corpus.count(text + mark)
        p = next_probabilities(model, vocab, text)[vocab.ids[mark]].item()
        print(
            f"  语料里「{text}」出现 {n} 次，其中 {followed} 次后面紧跟「{mark}」："
            f"{100 * followed / max(1, n):.1f}%；模型给的概率：{100 * p:.1f}%"
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
    print("== 4. 给出开头，让它续写")
    generator = seeded()
    for opening in OPENINGS:
        show(write(model, vocab, opening, temperature=OPENING_TEMPERATURE, generator=generator))


def demo_acrostic(model, vocab):
    print("== 5. 藏头诗：每句开头的字由我们指定，其余由模型写")
    generator = seeded()
    for heads, n_char in ACROSTICS:
        show(acrostic(model, vocab, heads, n_char, generator=generator))


def timed(model, start, n, use_cache):
    """Seconds that n characters after start (1, T) take."""
    import torch

    if start.device.type != "cpu":
        torch.accelerator.synchronize()
    before = time.perf_counter()
    model.generate(start, n, use_cache=use_cache, generator=seeded())
    if start.device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - before


def medians(model, start, n, runs=TIMED_RUNS):
    """(without, with cache): the median seconds for n characters, the two run in turn, one of each to warm up."""
    times = {False: [], True: []}
    for _ in range(runs + 1):
        for use_cache, seconds in times.items():
            seconds.append(timed(model, start, n, use_cache))
    return tuple(statistics.median(seconds[1:]) for seconds in times.values())


def compare(model, start, n, seed=SEED):
    """The place of the first character (from 1) that n characters with and without the cache differ in, or None."""
    with_cache, without = (model.generate(start, n, use_cache=c, generator=seeded(seed))[0] for c in (True, False))
    different = (with_cache != without).nonzero()
    return different[0].item() - start.size(1) + 1 if len(different) else None


def cache_bytes(config, n):
    """The bytes that n characters take in the caches: 2 (k and v) x layers x dimensions x 4 (float32)."""
    return 2 * config.n_layer * config.n_embd * 4 * n


def faster(without, cached):
    return f"快了 {without / cached:.1f} 倍" if cached <= without else f"反而慢了 {cached / without:.1f} 倍"


def demo_cache(model, vocab):
    config = model.config
    print("== 6. KV 缓存：结果一样吗？快了多少？")
    start = vocab.encode("\n").to(model.wte.weight.device)
    different = compare(model, start, SAME_CHARS)
    verdict = "完全一样" if different is None else f"不一样：第 {different} 个字不同"
    print(f"  同样的随机种子，写 {SAME_CHARS} 个字：用缓存和不用缓存的结果{verdict}")
    for n in TIMED_CHARS:
        without, cached = medians(model, start, n)
        times = f"不用缓存 {1000 * without:6.0f} 毫秒，用缓存 {1000 * cached:5.0f} 毫秒"
        print(f"  写 {n:>3} 个字：{times}，{faster(without, cached)}")
    n = config.block_size
    print(
        f"  这个模型每个词元的缓存：2 × {config.n_layer} 层 × {config.n_embd} 维 × 4 字节 = "
        f"{cache_bytes(config, 1) / 1024:g} KB，{n} 个词元共 {cache_bytes(config, n) / 1024:g} KB"
    )


DEMOS = {1: demo_next, 2: demo_temperature, 3: demo_top_k, 4: demo_continue, 5: demo_acrostic, 6: demo_cache}


# ---------------------------------------------------------------------------------------------------
# Looking inside a run


def replay(model, ids, start, **knobs):
    """Yield what model.generate saw when it wrote ids (B, T) after the first `start`: at each step the step's
    logits (B, V), then the probabilities after temperature, after top-k and after top-p, (B, V) each."""
    import torch

    import gpt

    rule = knobs.pop("constraint", None)
    window = max(0, start - model.config.block_size)
    with torch.inference_mode():
        for t in range(start, ids.size(1)):
            window = gpt.slide(window, t, model.config.block_size)
            logits = model(ids[:, window:t])[0][:, -1]  # (B, V)
            applied, found = {"allowed": rule(ids[:, :t]) if rule else None}, []
            for name in ("temperature", "top_k", "top_p"):
                applied |= {name: knobs[name]} if name in knobs else {}
                found.append(gpt.probabilities(logits, **applied))
            yield logits, *found


def pad(text, width):
    """text with spaces up to a width in terminal columns, of which a Chinese character takes two."""
    return text + " " * (width - sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text))


def print_trace(model, vocab, ids, start, file, **knobs):
    """A line for each character of ids (1, T) after the first `start`: what was left, and what was drawn."""
    head = f"{'the likeliest five that were left, in %':<39} {'top-k cut':>9} {'top-p cut':>9}"
    print(f"{'#':>3}       % {'rank':>5} {head}", file=file)
    for i, (logits, warm, by_k, by_p) in enumerate(replay(model, ids, start, **knobs)):
        drawn = ids[0, start + i].item()
        rank = (logits[0] > logits[0, drawn]).sum().item() + 1
        best, likeliest = by_p[0].topk(min(5, len(vocab)))
        chars = [pad(visible(char), 2) for char in vocab.decode(likeliest)]
        left = " ".join(f"{char}{100 * p:5.1f}" for char, p in zip(chars, best.tolist(), strict=True) if p > 0)
        cuts = []
        for before, after in ((warm, by_k), (by_k, by_p)):
            gone = (before > 0) & (after == 0)
            cuts.append(f"{gone.sum():>4} {before[gone].sum():>4.0%}" if gone.any() else "   -    -")
        choice = f"{pad(visible(vocab.chars[drawn]), 2)} {100 * by_p[0, drawn].item():5.1f} {rank:>5}"
        print(f"{i + 1:>3} {choice} {pad(left, 39)} {cuts[0]} {cuts[1]}", file=file)


def bar(share, width=40):
    return "█" * round(width * share)


def print_next(model, vocab, text, top):
    """Demo 1's table for any text, with bars."""
    probs, ids = next_probabilities(model, vocab, text).topk(min(top, len(vocab)))
    for i, (p, char) in enumerate(zip(probs.tolist(), vocab.decode(ids), strict=True)):
        print(f"{i + 1:>4} {pad(visible(char), 2)} {100 * p:5.1f}% {bar(p / probs[0].item())}")


# ---------------------------------------------------------------------------------------------------
# The three exercises. Each prints what there is to see, then whether the solution is right.


def my_top_p(probs, p):
    """Exercise 1: which of the probabilities (V,) stay, as a bool (V,). Replace the body by your own."""
    from gpt import probabilities

    return probabilities(probs.log()[None], top_p=p)[0] > 0


def check_top_p(keep, examples):
    """None, or what is wrong with keep(probs, p): it must keep the fewest, likeliest, that together reach p."""
    import torch

    for probs, p in examples:
        kept = keep(probs.clone(), p)
        if getattr(kept, "dtype", None) != torch.bool or kept.shape != probs.shape:
            return f"for probabilities of shape {tuple(probs.shape)} it must return a bool tensor of that shape"
        mass = probs[kept].double().sum().item()
        shown = f"of {[round(x, 3) for x in probs.tolist()]}" if len(probs) < 9 else f"of {len(probs):,} characters"
        said = f"for p = {p} it keeps {int(kept.sum())} {shown}"
        if mass < p - 1e-6:
            return f"{said}, {mass:.3f} of the mass: too few"
        if mass - probs[kept].min().item() > p + 1e-6:
            return f"{said}, {mass:.3f} of the mass: one less would do"
        if not kept.all() and probs[~kept].max() > probs[kept].min():
            return f"{said}, but leaves out a likelier one"
    return None


def keep_top_k(probs, k):
    """Which of the probabilities (V,) are the k largest, as a bool (V,)."""
    import torch

    return torch.zeros_like(probs, dtype=torch.bool).index_fill(0, probs.topk(min(k, len(probs))).indices, True)


def write_keeping(model, vocab, keep, value):
    """(poems, the number of candidates at each step): the lesson's own loop, with keep(probs, value) in it."""
    import torch

    from gpt import probabilities, sample

    ids, counts, generator = vocab.encode("\n").to(model.wte.weight.device).expand(EX1_POEMS, -1), [], seeded()
    for _ in range(min(MAX_CHARS, model.config.block_size - 1)):
        running = (ids[:, 1:] != vocab.ids["\n"]).all(dim=1)  # (EX1_POEMS,): whose poem has not ended
        probs = probabilities(model(ids)[0][:, -1], temperature=HOT)  # (EX1_POEMS, V)
        kept = torch.stack([keep(row, value) for row in probs])
        counts += kept[running].sum(dim=1).tolist()
        ids = torch.cat([ids, sample(probs.log(), allowed=kept, generator=generator)[:, None]], dim=1)
        if not (ids[:, 1:] != vocab.ids["\n"]).all(dim=1).any():
            break
    texts = [vocab.decode(row).partition("\n") for row in ids[:, 1:].tolist()]
    return [text + end for text, end, _ in texts], counts


def exercise_top_p(model, vocab):
    import torch

    print(f"== 练习 1. 温度 {HOT}：top-k={TOP_K} 和 top-p={EX1_TOP_P}")
    with torch.no_grad():
        small = [torch.tensor(probs) for probs in ([0.09, 0.5, 0.41], [0.25, 0.25, 0.25, 0.25], [1.0, 0.0])]
        real = [(next_probabilities(model, vocab, text).log() / HOT).softmax(dim=0) for text in ("", *NEXT_PROMPTS)]
        wrong = check_top_p(my_top_p, [(probs, p) for probs in small + real for p in (0.3, EX1_TOP_P, 1.0)])
        if wrong:
            return wrong
        for name, keep, value in (("top-k", keep_top_k, TOP_K), ("top-p", my_top_p, EX1_TOP_P)):
            poems, kept = write_keeping(model, vocab, keep, value)
            median = statistics.median(kept)
            print(f"  {name}={value}：每一步留下的字：最少 {min(kept)}，中位数 {median:g}，最多 {max(kept)}")
            show(poems)
    return None


def has_marks(poem, length=32, marks=((8, "，。"), (16, "，。"), (24, "，。"), (32, "。"))):
    """Exercise 2's rule, read off the lesson: those marks at those places, counted from 1, and no other mark."""
    places = dict(marks)
    return len(poem) == length and all(
        char in places[i] if i in places else char.isalpha() for i, char in enumerate(poem, 1)
    )


def exercise_form(model, vocab):
    print(f"== 练习 2. 固定格式：{EX2_LENGTH} 个字，标点只在第 {'、'.join(map(str, EX2_MARKS))} 个")
    template = [EX2_MARKS.get(i, ANY) for i in range(1, EX2_LENGTH + 1)]
    shares = []
    for name, rule in (("不加约束", None), ("加约束", template)):
        poems = write(model, vocab, n=EX2_POEMS, temperature=1.0, template=rule, generator=seeded())
        shares.append(sum(has_marks(poem.strip()) for poem in poems) / max(1, len(poems)))
        print(f"  {name}：{EX2_POEMS} 首里 {shares[-1]:.0%} 合格")
        show(poems[:3])
    if not set(EX2_MARKS) <= set(range(1, EX2_LENGTH + 1)):
        return f"EX2_MARKS names places beyond the {EX2_LENGTH} characters"
    return None if shares[1] == 1 else f"{1 - shares[1]:.0%} of the constrained poems break the rule of the lesson"


def exercise_cache(model, vocab):
    import dataclasses

    import torch

    import gpt

    print(f"== 练习 3. block_size={EX3_BLOCK_SIZE}，随机权重：写得越长，缓存省得越多")
    torch.manual_seed(SEED)
    device = model.wte.weight.device
    model = gpt.GPT(dataclasses.replace(model.config, block_size=EX3_BLOCK_SIZE)).to(device).eval()
    start = vocab.encode("\n").to(device)
    rows = [(n, *medians(model, start, n, runs=1)) for n in EX3_CHARS]
    slowest = max(max(times) for _, *times in rows)
    for n, without, cached in rows:
        print(f"  写 {n:>4} 个字，缓存 {cache_bytes(model.config, n) / 1024:,.0f} KB，{faster(without, cached)}")
        for name, seconds in (("不用缓存", without), ("用缓存", cached)):
            print(f"    {pad(name, 8)} {1000 * seconds:6.0f} 毫秒 {bar(seconds / slowest)}")
    different = compare(model, start, max(EX3_CHARS))
    if different:
        return f"with and without the cache character {different} differs"
    if max(EX3_CHARS) > EX3_BLOCK_SIZE:
        return f"a block_size of {EX3_BLOCK_SIZE} does not hold {max(EX3_CHARS)} characters: the window slid"
    return None if max(EX3_CHARS) >= 500 else f"the lesson asks for 500 characters, here are {max(EX3_CHARS)}"


EXERCISES = {1: exercise_top_p, 2: exercise_form, 3: exercise_cache}


def check_exercise(number, model, vocab):
    """Run an exercise and say whether its solution is right; return whether it is."""
    wrong = EXERCISES[number](model, vocab)
    print(f"  exercise {number}: " + (f"wrong: {wrong}" if wrong else "right"))
    return not wrong


# ---------------------------------------------------------------------------------------------------
# What a user types

# Marks that no Tang poem here has, and the two that stand for them.
MARKS = {**dict.fromkeys(",;:、；：﹐､", "，"), **dict.fromkeys(".!?！？…．｡", "。")}


def clean(text, vocab, name, block_size):
    """A prompt in characters of the vocabulary. Raises Stop for those that cannot be brought there.

    What had to be changed is said on stderr, and what of the prompt the model cannot see.
    """
    from gpt import Stop, UnknownCharacters

    text, changes = text.strip(), {}
    for char in dict.fromkeys(text):
        if char not in vocab.ids or char.isspace():
            new = MARKS.get(char, "" if char.isspace() else simplified(char))
            if new != char and all(c in vocab.ids for c in new):
                changes[char] = new
    if changes:
        said = "  ".join(f"{old.strip() or 'space'} → {new or 'nothing'}" for old, new in changes.items())
        print(f"{name}: {said}", file=sys.stderr)
        text = "".join(changes.get(char, char) for char in text)
    try:
        vocab.encode(text)
    except UnknownCharacters as error:
        hint = "" if find_spec("opencc") else " (traditional ones are converted when opencc is installed)"
        raise Stop(f"{name}: {error}{hint}", 2) from None
    if len(text) > block_size:
        print(f"{name} has {len(text)} characters; the model sees the last {block_size}", file=sys.stderr)
    return text


def simplified(char):
    """A traditional character's simplified one; any other as it is, and all when opencc is not installed."""
    if find_spec("opencc") is None:
        return char
    import opencc

    return opencc.OpenCC("t2s").convert(char)


def fit(template, prompt, what):
    """Raise Stop unless prompt can begin a poem of that template."""
    from gpt import Stop

    if len(prompt) > len(template):
        raise Stop(f"--prompt has {len(prompt)} characters, {what} has {len(template)}", 2)
    for i, (char, chars) in enumerate(zip(prompt, template, strict=False), 1):
        if not (char.isalpha() if chars is ANY else char in chars):
            wanted = "a character that is no mark" if chars is ANY else f"「{chars}」"
            raise Stop(f"--prompt cannot begin {what}: {visible(char)} is its character {i}, where {wanted} stands", 2)


def poems(model, vocab, args):
    """The poet: print args.number poems to stdout, one a line, all else to stderr."""
    from gpt import Stop

    window = model.config.block_size
    prompt = clean(args.prompt or "", vocab, "--prompt", window)
    template = form(*FORMS[args.form]) if args.form else None
    if args.acrostic is not None:
        heads = clean(args.acrostic, vocab, "--acrostic", math.inf)
        if not heads or not all(char.isalpha() for char in heads):
            raise Stop(f"--acrostic {heads!r}: give the characters that begin the lines, without marks", 2)
        n_char, n_lines = FORMS.get(args.form, (args.chars or 7, len(heads)))
        if n_lines != len(heads):
            raise Stop(f"--acrostic has {len(heads)} characters, but {args.form} has {n_lines} lines", 2)
        template = form(n_char, n_lines, heads)
    elif template:
        fit(template, prompt, args.form)
    seed = int.from_bytes(os.urandom(4), "little") if args.seed is None else args.seed
    if args.seed is None:
        print(f"seed {seed}: --seed {seed} writes this again", file=sys.stderr)
    knobs = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
    options, cut = {"template": template, "max_chars": args.max_chars, "generator": seeded(seed)}, 0
    for done in range(0, args.number, BATCH):
        n = min(BATCH, args.number - done)
        written = write(model, vocab, prompt, n, **options, **knobs)
        print("\n".join(poem.removesuffix("\n") for poem in written), flush=True)
        cut += sum(not poem.endswith("\n") for poem in written)
    if cut:
        print(f"{cut} of {args.number} had not ended after {args.max_chars} characters (--max-chars)", file=sys.stderr)
    if args.trace:
        start = vocab.encode("\n" + prompt)
        whole = written[0] if template is None else written[0].removesuffix("\n")
        ids = vocab.encode("\n" + whole).to(model.wte.weight.device)
        if template:
            knobs["constraint"] = follow(template[len(prompt) :], vocab, start.size(1), ids.device)
        print_trace(model, vocab, ids, start.size(1), sys.stderr, **knobs)


# ---------------------------------------------------------------------------------------------------
# The command line


def number(kind, least, most, above=False):
    """An argparse type: a number from least (or above it) to most."""

    def parse(text):
        value = kind(text)
        if not (least < value if above else least <= value) or not value <= most:
            bound = "above" if above else "at least"
            raise argparse.ArgumentTypeError(f"{text} is not {bound} {least} and at most {most:g}")
        return value

    parse.__name__ = {int: "whole number", float: "number"}[kind]  # as argparse calls it in "invalid ... value"
    return parse


EXAMPLES = """examples:
  python generate.py --prompt 大漠孤烟直 -n 5 --temperature 0.8 --top-k 50 --top-p 0.9 --seed 7
  python generate.py --form 七绝 -n 3
  python generate.py --prompt 白日依山尽， --form 五绝
  python generate.py --acrostic 春眠不觉 --chars 5
  python generate.py --acrostic 学无止境 --form 七绝
  python generate.py --next 春风 --top 20
  python generate.py --prompt 春风 --trace
  python generate.py --exercise 1 2 3

Poems go to stdout, one a line, everything else to stderr.
Exit status: 0 done, 1 a failure while running or a wrong exercise, 2 wrong usage or input, 130 Ctrl-C."""

# mode -> the flags that go with it, beside --checkpoint and --device
POET = {"prompt", "form", "acrostic", "chars", "number", "temperature", "top_k", "top_p", "seed", "max_chars", "trace"}
MODES = {"demo": {"demo"}, "exercise": {"exercise"}, "next": {"next", "top"}, "poems": POET}
DEFAULTS = {"number": 1, "temperature": TEMPERATURE, "max_chars": MAX_CHARS, "top": 20}


def parse_args(argv):
    """The arguments, with args.mode one of MODES; a wrong one ends the program with status 2."""
    parser = argparse.ArgumentParser(
        description="The lesson's six demos; with arguments, poems of your own.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    group = parser.add_argument_group("the lesson")
    group.add_argument("--demo", nargs="+", type=int, choices=range(1, 7), metavar="N", help="only these demos, 1 to 6")
    group.add_argument("--exercise", nargs="+", type=int, choices=range(1, 4), metavar="N", help="exercises, 1 to 3")
    group.add_argument("--next", metavar="TEXT", help="what may come after this text, and how probable it is")
    group.add_argument("--top", type=number(int, 1, 10**6), metavar="N", help="with --next: how many (default: 20)")
    group = parser.add_argument_group("poems")
    group.add_argument("--prompt", metavar="TEXT", help="how the poem begins")
    group.add_argument("--form", choices=FORMS, help="its form: 4 or 8 lines of 5 or 7 characters")
    group.add_argument("--acrostic", metavar="HEADS", help="the first characters of its lines")
    group.add_argument(
        "--chars", type=number(int, 1, 100), metavar="N", help="characters a line of an acrostic (default: 7)"
    )
    group.add_argument("-n", "--number", type=number(int, 1, 10**6), metavar="N", help="how many poems (default: 1)")
    group.add_argument(
        "--temperature",
        type=number(float, 0, sys.float_info.max),
        metavar="T",
        help=f"0 always takes the likeliest character (default: {TEMPERATURE})",
    )
    group.add_argument("--top-k", type=number(int, 1, 10**9), metavar="K", help="draw among the K likeliest only")
    group.add_argument(
        "--top-p",
        type=number(float, 0, 1, above=True),
        metavar="P",
        help="draw among the fewest that together have probability P",
    )
    group.add_argument("--seed", type=number(int, 0, 2**63 - 1), metavar="N", help="the same seed gives the same poems")
    group.add_argument(
        "--max-chars", type=number(int, 1, 10**5), metavar="N", help=f"write at most these (default: {MAX_CHARS})"
    )
    group.add_argument("--trace", action="store_true", help="show what each character was chosen from (one poem)")
    group = parser.add_argument_group("the model")
    group.add_argument(
        "--checkpoint", type=file_name, metavar="FILE", help="default: gpt.pt or pretrained.pt in checkpoints/"
    )
    group.add_argument("--device", default="cpu", help="cpu (default), cuda, mps or auto")
    args = parser.parse_args(argv)
    given = set(vars(args)) - {"checkpoint", "device"}
    args.mode = next((mode for mode in ("demo", "exercise", "next") if mode in given), "poems" if given else "demo")
    for name in sorted(given - MODES[args.mode]):
        parser.error(f"--{name.replace('_', '-')} does not go with --{args.mode}")
    if args.mode == "poems":
        if "acrostic" in given and "prompt" in given:
            parser.error("--acrostic and --prompt do not go together: the heads begin the poem")
        if "chars" in given and ("form" in given or "acrostic" not in given):
            parser.error("--chars goes with --acrostic, without --form")
        if "trace" in given and vars(args).get("number", 1) > 1:
            parser.error("--trace shows one poem: leave out --number")
    for name in MODES[args.mode] | {"checkpoint"}:
        setattr(args, name, getattr(args, name, DEFAULTS.get(name)))
    return args


def file_name(text):
    """An argparse type: a path in the system's own bytes again, which `recovered` had made readable."""
    return Path(os.fsdecode(text.encode("utf-8", "surrogateescape")))


def recovered(text):
    """An argument as UTF-8 though the locale is not; Python keeps the bytes it could not read as surrogates."""
    data = text
    try:
        data = text.encode("utf-8", "surrogateescape")
        return data.decode("utf-8")
    except UnicodeError:
        print(f"generate.py: argument {data!r} is not UTF-8", file=sys.stderr)
        sys.exit(2)


def main(args):
    from gpt import DecodingError, Stop, UnknownCharacters, load_checkpoint, pick_device

    path = args.checkpoint or next((path for path in CHECKPOINTS if path.exists()), None)
    if path is None:
        raise Stop(f"no {CHECKPOINTS[0]} and no {CHECKPOINTS[1].name}: make one with python train.py")
    model, vocab, info = load_checkpoint(path, pick_device(args.device))
    if "\n" not in vocab.ids or not {"，", "。"} <= set(vocab.ids):
        raise Stop(f"{path} was not trained on poems: its vocabulary lacks the line break, ， or 。")
    loss, shown = info.get("val_loss"), path.relative_to(HERE) if path.is_relative_to(HERE) else path
    which = f"model: {shown}, validation loss {loss:.3f}" if isinstance(loss, float) else f"model: {shown}"
    # After the demos it stands on stdout, so that `| head -1` gives the lesson's first line and nothing else.
    if args.mode != "demo":
        print(which, file=sys.stderr, flush=True)
    try:
        if args.mode == "demo":
            for number in args.demo or DEMOS:
                DEMOS[number](model, vocab)
                print(end="", flush=True)
            print(which)
        elif args.mode == "exercise":
            right = [check_exercise(number, model, vocab) for number in args.exercise]
            return 0 if all(right) else 1
        elif args.mode == "next":
            print_next(model, vocab, clean(args.next, vocab, "--next", model.config.block_size), args.top)
        else:
            poems(model, vocab, args)
    except (DecodingError, UnknownCharacters) as error:  # the latter from a demo's own text
        raise Stop(f"{path}: {error}", 1 if isinstance(error, DecodingError) else 2) from None
    except ValueError as error:  # from a constant that was edited, or a corpus that is not UTF-8
        raise Stop(str(error), 2) from None
    return 0


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        if stream:  # None where it was closed before we began
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    arguments = parse_args([recovered(text) for text in sys.argv[1:]])
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # importing torch swallows a KeyboardInterrupt
    try:
        from gpt import run
    except ImportError as error:
        print(f"generate.py: {error}; pip install -r requirements.txt brings what is missing", file=sys.stderr)
        sys.exit(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(run(lambda: main(arguments)))
