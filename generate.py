"""The lesson "Generating text and the KV cache", run: six demos, and a poet to play with.

    python generate.py                          # the six demos
    python generate.py --demo 1 6               # some of them
    python generate.py --prompt 大漠孤烟直      # a poem; python generate.py --help shows all commands

Every demo is a function, and its settings stand together here at the top: change one and run it again.
"""

import argparse
import itertools
import os
import statistics
import sys
import time
import unicodedata
from pathlib import Path

import torch
from tqdm import tqdm

from checkpoints.store import CHECKPOINTS, load_checkpoint, pick_device, threads
from data.poems import CORPUS, FORMS, PINYIN, converter, in_known_characters, read_file, tidy
from data.prosody import read_prosody, scan
from data.script import UserError, notice, parse, progress, run
from data.verse import TemplateConstraint, choose_templates, may_stand, poem_template
from gpt import DecodingError, check_sampling, probabilities

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
TRIES = 8  # batches of first lines, of poems in a form, until the rule alone writes the rest


# Writing poems


def prompt_ids(model, vocab, prompt="", n=1):
    """The ids (n, T) of prompt after the line break that every poem begins with."""
    return vocab.encode("\n" + prompt).to(model.wte.weight.device).expand(n, -1)


def write(model, vocab, start, length=None, **options):
    """Poems that go on from start (n, T), a list of (text, whether it has ended). options: as in model.generate.

    A constraint fills `length` characters, those of start included. Without one a poem ends when the model
    ends it, or is cut after `length` more, MAX_CHARS unless it is given.
    """
    # lesson: continuation
    free = options.get("constraint") is None
    more = length or MAX_CHARS if free else length + 1 - start.size(1)
    ids = model.generate(start, more, stop=vocab.ids["\n"] if free else None, **options)
    parts = [vocab.decode(row).partition("\n") for row in ids[:, 1:].tolist()]
    return [(text, bool(end) or not free) for text, end, _ in parts]


def acrostic(model, vocab, heads, n_char=7, **options):
    """A poem whose lines, each of n_char characters and a mark, begin with the heads: (text, True)."""
    rule = acrostic_rule(vocab, heads, n_char)
    return write(model, vocab, prompt_ids(model, vocab), len(heads) * (n_char + 1), constraint=rule, **options)[0]


def acrostic_rule(vocab, heads, n_char):
    """The constraint of an acrostic: ids (B, t) -> which characters may come next, bool (V,)."""
    # lesson: acrostic poems, constrained decoding
    banned = torch.tensor([not char.isalpha() for char in vocab.chars])  # marks and the line break
    marks = [*("，。"[i % 2] for i in range(len(heads) - 1)), "。"]
    forced = {char: torch.arange(len(vocab)) == vocab.encode(char)[0] for char in (*heads, *marks)}

    def allowed(ids):
        line, place = divmod(ids.size(1) - 1, n_char + 1)  # after the line break that every poem begins with
        if place == 0:
            mask = forced[heads[line]]  # the head is put in first
        elif place < n_char:
            mask = ~banned  # then the model writes the rest of the line, a character at a time
        else:
            mask = forced[marks[line]]  # and the mark is put in by us
        return mask.to(ids.device)

    return allowed


# The six demos, in the lesson's words


def seeded(seed=None):
    """A generator on the CPU, of SEED if none is given: the same seed gives the same poems on every device."""
    return torch.Generator().manual_seed(SEED if seed is None else seed)


def show(poems):
    """Print poems, indented; …… where one was cut."""
    for text, ended in poems:
        print(f"    {text}" + ("" if ended else "……"))


def writable(texts, vocab, name):
    """Yield those of texts that can be written in the model's characters, traditional ones converted."""
    for text in texts:
        try:
            if normal := normalise_prompt(text, vocab, name):
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
    texts = list(writable(NEXT_PROMPTS, vocab, "NEXT_PROMPTS"))
    for text in texts:
        probs = probabilities(next_logits(model, vocab, text))[0]  # (V,)
        best, ids = probs.topk(min(NEXT_TOP, len(vocab)))
        shown = zip(vocab.decode(ids), best.tolist(), strict=True)
        print(f"  「{text}」→ " + "  ".join(f"{show_char(char)} {100 * p:.1f}%" for char, p in shown))
    corpus = read_file(CORPUS).decode("utf-8", "replace") if CORPUS.exists() else ""
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
        show(write(model, vocab, prompt_ids(model, vocab, n=POEMS), temperature=temperature, generator=seeded()))


def demo_top_k(model, vocab):
    print(f"== 3. 温度 {HOT}，但只从概率最高的 {TOP_K} 个字里选（top-k={TOP_K}）")
    show(write(model, vocab, prompt_ids(model, vocab, n=POEMS), temperature=HOT, top_k=TOP_K, generator=seeded()))


def demo_continue(model, vocab):
    print("== 4. 给出开头，让它续写")
    generator = seeded()
    for opening in writable(OPENINGS, vocab, "OPENINGS"):
        start = prompt_ids(model, vocab, opening)
        show(write(model, vocab, start, temperature=OPENING_TEMPERATURE, generator=generator))


def acrostics(vocab):
    """Yield those of ACROSTICS that can be written in the model's characters."""
    if not {"，", "。"} <= vocab.ids.keys():
        notice("ACROSTICS need ， and 。, which the model does not know: they are left out")
        return
    for given, n_char in ACROSTICS:
        yield from ((heads, n_char) for heads in writable([given], vocab, "ACROSTICS"))


def demo_acrostic(model, vocab):
    print("== 5. 藏头诗：每句开头的字由我们指定，其余由模型写")
    generator = seeded()
    for heads, n_char in acrostics(vocab):
        show([acrostic(model, vocab, heads, n_char, temperature=ACROSTIC_TEMPERATURE, generator=generator)])


def timed(model, start, n, use_cache):
    """Seconds that n characters after start (1, T) take."""
    before = time.perf_counter()
    model.generate(start, n, use_cache=use_cache, generator=seeded()).tolist()  # waits for a GPU too
    return time.perf_counter() - before


def time_both(model, start, n, runs=None):
    """(without, with cache): the median seconds for n characters, the two in turn, each warmed up once."""
    without, cached = [], []
    for _ in range((runs or TIMED_RUNS) + 1):
        without.append(timed(model, start, n, use_cache=False))
        cached.append(timed(model, start, n, use_cache=True))
    return statistics.median(without[1:]), statistics.median(cached[1:])


def first_difference(model, start, n, constraint=None):
    """The number of the first of n characters, from 1, that differs without the cache; None if none does."""

    def ids(use_cache):
        return model.generate(start, n, constraint=constraint, use_cache=use_cache, generator=seeded())[0]

    different = (ids(True) != ids(False)).nonzero()
    return different[0].item() - start.size(1) + 1 if len(different) else None


def positions_computed(model, start, n, use_cache):
    """How many positions the model computes to write n characters after start (1, T)."""
    counts = []
    with model.h[0].register_forward_pre_hook(lambda block, inputs: counts.append(inputs[0].size(1))):
        model.generate(start, n, use_cache=use_cache, generator=seeded())
    return sum(counts)


def cache_bytes(config, n):
    """The bytes of n positions in the caches: 2 (k and v) x layers x dimensions of k x 4 (float32)."""
    return 2 * config.n_layer * (config.n_embd // config.n_head * config.n_kv_head) * 4 * n


def faster(without, cached):
    return f"快了 {without / cached:.1f} 倍" if cached <= without else f"反而慢了 {cached / without:.1f} 倍"


def demo_cache(model, vocab):
    # lesson: measuring it
    config, start = model.config, prompt_ids(model, vocab)
    print("== 6. KV 缓存：结果一样吗？快了多少？")
    texts = [(SAME_CHARS, None, ""), (LONG_CHARS, None, "")]
    for heads, n_char in itertools.islice(acrostics(vocab), 1):  # here several characters are fed onto a filled cache
        length = len(heads) * (n_char + 1)
        texts.append((length, acrostic_rule(vocab, heads, n_char), "（藏头诗：标点和句首的字一起送进缓存）"))
    for n, rule, note in texts:
        different = first_difference(model, start, n, rule)
        verdict = "完全一样" if different is None else f"不一样：第 {different} 个字不同"
        note += f"（窗口 {config.block_size} 个字，已滑动）" if n > config.block_size else ""
        print(f"  同样的随机种子，写 {n} 个字：用缓存和不用缓存的结果{verdict}{note}")
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

# The poet


def normalise_prompt(text, vocab, name, line_break=False):
    """text as a corpus is read, in the model's characters, on one line unless line_break; what changed is said.

    Raises UserError for characters that the model does not know.
    """
    text, changes = in_known_characters(tidy(text)[0], vocab.ids.keys() - ({"\n"} if not line_break else set()))
    if changes:
        names = {char: "space" for char in changes if char.isspace()} | {"\n": "line break", "": "nothing"}
        said = "  ".join(f"{names.get(old, old)} → {names.get(new, new)}" for old, new in changes.items())
        notice(f"{name}: {said}")
    try:
        vocab.encode(text)
    except ValueError as error:
        letters = [char for char in vocab.chars if char.isalpha()]
        known = "春风" if {"春", "风"} <= vocab.ids.keys() else "".join(letters[:: len(letters) // 4 + 1])
        raise UserError(f"{name}: {error}; it knows such as {name} {known}{converter()[1]}", 2) from None
    return text


def first_lines(model, start, rule, end, **options):
    """Go on from start (n, T), equal rows, to the mark that ends the first line, character `end` -> (n, 1 + end).

    Lines are written freely, and those that keep the rule stay (rejection sampling): they are drawn as from
    the model's own poems of that form. The rule alone would pad or cut a line begun for another form; it
    writes only what is missing after TRIES batches.
    """
    while (mask := rule(start[:1]).flatten()).sum() == 1:  # the head of an acrostic
        start = torch.cat([start, mask.nonzero().expand(len(start), 1)], dim=1)
    rows, kept = start[:1].expand(max(len(start), 16), -1), start.new_empty(0, 1 + end)
    for _ in range(TRIES):
        ids = model.generate(rows, 1 + end - rows.size(1), **options)
        fits = torch.ones_like(ids[:, 0], dtype=torch.bool)  # (rows,)
        for t in range(rows.size(1), 1 + end):
            fits &= rule(ids[:, :t]).expand(len(ids), -1).gather(1, ids[:, t : t + 1])[:, 0]
        kept = torch.cat([kept, ids[fits]])[: len(start)]
        if len(kept) == len(start):
            return kept
    rest = start[len(kept) :]
    return torch.cat([kept, model.generate(rest, 1 + end - rest.size(1), constraint=rule, **options)])


def template_constraint(templates, vocab, prosody=None):
    """A TemplateConstraint for model.generate: ids (B, t) -> bool (V,) or (B, V), as tensors."""
    vocab.encode("".join(entry for entry in templates[0] if isinstance(entry, str)))  # a ValueError if one is lacking
    rule = TemplateConstraint(templates, vocab.chars, prosody)
    return lambda ids: torch.from_numpy(rule(ids.cpu().numpy())).to(ids.device)


def check_fits(template, prompt, form):
    """Raise UserError unless prompt can begin a poem of that template."""
    if len(prompt) > len(template):
        raise UserError(f"--prompt has {len(prompt)} characters, {form} has {len(template)}", 2)
    for i, (char, entry) in enumerate(zip(prompt, template, strict=False), 1):
        if not may_stand(char, entry):
            wanted = f"「{entry}」" if isinstance(entry, str) else "a character that is no mark"
            raise UserError(f"--prompt cannot begin {form}: its character {i} is {char}, there stands {wanted}", 2)


def poem_options(args, model, vocab, prosody):
    """(prompt, options of `write`, where the first line of regulated verse ends, or 0) for what a user asked for.

    prosody: None for the shape of a form alone.
    """
    prompt = normalise_prompt(args.prompt or "", vocab, "--prompt")
    if len(prompt) > model.config.block_size:
        seen = model.config.block_size
        notice(f"--prompt has {len(prompt)} characters; the model sees the last {seen}")
    heads = "" if args.acrostic is None else normalise_prompt(args.acrostic, vocab, "--acrostic")
    if args.acrostic is not None and not heads.isalpha():
        raise UserError(f"--acrostic {heads!r}: give the characters that begin the lines, without marks", 2)
    if not args.form:
        rule = acrostic_rule(vocab, heads, args.chars) if heads else None
        return prompt, {"constraint": rule, "length": len(heads) * (args.chars + 1) if heads else args.max_chars}, 0
    n_char, n_lines = FORMS[args.form]
    if heads and n_lines != len(heads):
        raise UserError(f"--acrostic has {len(heads)} characters, but {args.form} has {n_lines} lines", 2)
    shape = poem_template(n_char, n_lines, heads)
    check_fits(shape, prompt, args.form)
    if not prosody:
        return prompt, {"constraint": template_constraint([shape], vocab), "length": len(shape)}, 0
    given = dict(enumerate(prompt)) | {i * (n_char + 1): head for i, head in enumerate(heads)}
    templates, lost = choose_templates(args.form, given, prosody, vocab.chars)
    if lost:
        kept = "shape and rhyme" if lost == "tones" else "shape"
        notice(f"{prompt or heads} does not keep the {lost} of {args.form}; the rest keeps {kept}")
    for template in templates if heads else ():
        template[:: n_char + 1] = heads
    return prompt, {"constraint": template_constraint(templates, vocab, prosody), "length": len(shape)}, n_char + 1


def write_poems(model, vocab, args):
    """The poet: print args.number poems to stdout, one a line, all else to stderr."""
    regulated = args.form and not args.loose
    prosody = read_prosody() if regulated or args.scan else None
    prompt, options, first_end = poem_options(args, model, vocab, prosody if regulated else None)
    seed, n = args.seed, args.number
    if seed is None:
        seed = int.from_bytes(os.urandom(4), "little")
        notice(f"seed {seed}: --seed {seed} with the same -n writes this again")
    knobs = {"temperature": args.temperature[0], "top_k": args.top_k, "top_p": args.top_p, "generator": seeded(seed)}
    if n > 1 and knobs["temperature"] == 0:
        notice(f"temperature 0 always takes the likeliest character: the {n} poems are the same")
    cut = 0
    for done in progress(range(0, n, BATCH), unit="batch", leave=False) if n > BATCH else [0]:
        start = prompt_ids(model, vocab, prompt, min(BATCH, n - done))
        if first_end > len(prompt):
            start = first_lines(model, start, options["constraint"], first_end, **knobs)
        poems = write(model, vocab, start, **options, **knobs)
        for text, ended in poems:
            tqdm.write(text)  # clear of the bar
            sys.stdout.flush()
            if args.scan:
                notice(scan(text, prosody))
            cut += not ended
    if cut:
        notice(f"{cut} of {n} had not ended after {options['length']} characters (--max-chars)")
    if args.trace:
        [(text, ended)], rule = poems, options.get("constraint")
        print_trace(model, vocab, prompt, text + "\n" * (ended and rule is None), rule, **knobs)


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
    ids = logits[0].topk(min(args.top, len(vocab))).indices
    heads = [f"T={t:g}" for t in args.temperature]
    width = max(8, 1 + max(map(len, heads)))
    if len(columns) > 1:
        print(" " * 7 + "".join(f"{head:>{width}}" for head in heads))
    for i, char in enumerate(vocab.decode(ids)):
        shares = [probs[ids[i]].item() for probs in columns]
        shown = "".join(f"{f'{100 * p:.1f}%' if p else '-':>{width}}" for p in shares)
        bars = "" if len(columns) > 1 else " " + bar(shares[0] / columns[0].max().item())
        print(f"{i + 1:>4} {pad(show_char(char), 2)}{shown}{bars}".rstrip())
    rest = [max(0.0, 1 - probs[ids].sum().item()) for probs in columns]
    print(f"{'others':<7}" + "".join(f"{100 * p:{width - 1}.1f}%" for p in rest))
    if any(knobs.values()):
        print(f"{'left':<7}" + "".join(f"{(probs > 0).sum():{width},}" for probs in columns))


def print_trace(model, vocab, prompt, text, rule=None, **knobs):
    """On stderr, a line for each character of text after the prompt: what was left, and what was drawn."""
    ids, start = prompt_ids(model, vocab, text)[:, : model.config.block_size + 1], 1 + len(prompt)
    with torch.inference_mode():  # one pass gives the logits at every place
        every = model(ids[:, :-1])[0][0, start - 1 :, None]  # (characters after the prompt, 1, V)
    head = f"{'likeliest left, in %':<26} {'rule left':>9} {'top-k cut':>9} {'top-p cut':>9}"
    notice(f"{'#':>3}         % {'rank':>5} {head}")
    for i, logits in enumerate(every):
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
        best, likeliest = steps[-1][0].topk(min(3, len(vocab)))
        chars = [pad(show_char(char), 2) for char in vocab.decode(likeliest)]
        left = " ".join(f"{char}{100 * p:6.1f}" for char, p in zip(chars, best.tolist(), strict=True) if p > 0)
        rank = (logits[0] > logits[0, drawn]).sum().item() + 1
        choice = f"{pad(show_char(vocab.chars[drawn]), 2)} {100 * steps[-1][0, drawn].item():6.1f} {rank:>5}"
        notice(f"{i + 1:>3} {choice} {pad(left, 26)} {' '.join(cuts)}")


# The command line


def bounded(least, most=10**9):
    """An argparse type: a whole number from least to most."""

    def number(text):
        if not (text.isascii() and text.isdecimal() and len(text) < 20 and least <= int(text) <= most):
            raise argparse.ArgumentTypeError(f"{text} is not a whole number from {least} to {most}")
        return int(text)

    return number


EXAMPLES = """examples:
  python generate.py --prompt 大漠孤烟直 -n 5 --temperature 0.8 --top-k 50 --top-p 0.9 --seed 7
  python generate.py --form 七律 -n 3 --scan
  python generate.py --acrostic 学无止境 --form 七绝
  python generate.py --next 春风 --top 10 --temperature 0.3 1 1.5 --top-k 20
  python generate.py --prompt 春风 --trace

Poems go to stdout, one a line, everything else to stderr.
Exit status: 0 done, 1 a failure while running, 2 wrong usage or input, 130 Ctrl-C."""

CHOOSING = {"temperature", "top_k", "top_p"}
TAKES = {  # the flags that go with each command, beside those of the model
    "demo": {"demo"},
    "next": {"next", "top", *CHOOSING},
    "poem": {"prompt", "form", "loose", "acrostic", "chars", "number", "seed", "max_chars", "scan", "trace", *CHOOSING},
}
APART = ["demo next", "prompt acrostic", "chars form", "max_chars form", "max_chars acrostic", "trace number"]
NEEDS = {"chars": "acrostic", "loose": "form"}


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
    add("--next", metavar="TEXT", help="what may come after this text, taken as it is: no line break before it")
    add("--top", type=bounded(1), default=20, metavar="N", help="with --next: how many characters (%(default)s)")
    add = parser.add_argument_group("poems").add_argument
    add("--prompt", metavar="TEXT", help="how the poem begins; it stands after a line break, as in training")
    forms = "  ".join(f"{form} or {latin}" for latin, form in PINYIN.items())
    add("--form", choices=[*FORMS, *PINYIN], type=lambda text: PINYIN.get(text, text), metavar="FORM",
        help=f"regulated verse, 4 or 8 lines of 5 or 7 characters with tones and rhymes: {forms}")  # fmt: skip
    add("--loose", action="store_true", help="with --form: keep its shape alone")
    add("--acrostic", metavar="HEADS", help="the first characters of its lines")
    add("--chars", type=bounded(1, 100), default=7, metavar="N", help="characters a line of an acrostic (%(default)s)")
    add("-n", "--number", type=bounded(1, 10**6), default=1, metavar="N", help="how many poems (%(default)s)")
    add("--seed", type=bounded(0, 2**63 - 1), metavar="N", help="the same seed and number give the same poems")
    add("--max-chars", type=bounded(1, 10**5), default=MAX_CHARS, metavar="N", help="cut after so many (%(default)s)")
    add("--scan", action="store_true", help="show the tones and the rhyme under each poem")
    add("--trace", action="store_true", help="show what each character was chosen from (one poem)")
    add = parser.add_argument_group("choosing (with poems and --next)").add_argument
    several = f"0 takes the likeliest character (default: {TEMPERATURE}, with --next 1); --next takes several"
    add("--temperature", nargs="+", type=float, metavar="T", help=several)
    add("--top-k", type=int, metavar="K", help="draw among the K likeliest only")
    add("--top-p", type=float, metavar="P", help="draw among the fewest that together have probability P")
    add_model_flags(parser)
    return parser


def add_model_flags(parser):
    add = parser.add_argument_group("the model").add_argument
    add("--checkpoint", type=Path, metavar="FILE", help="default: gpt.pt or pretrained.pt in checkpoints/")
    add("--device", default="cpu", help="cpu (default), cuda, mps or auto")
    add("--threads", type=bounded(1, 1024), default=THREADS, metavar="N", help="of the CPU (%(default)s)")


def parse_args(argv=None):
    """The arguments, with args.command one of TAKES; a wrong one ends the program with status 2."""
    parser = make_parser()
    args = parse(parser, argv)
    unset = argparse.Namespace(**dict.fromkeys(vars(args)))  # so that a default that is typed counts as well
    given = {name for name, value in vars(parser.parse_args(argv, unset)).items() if value is not None}
    given -= {"checkpoint", "device", "threads"}
    flags = {name: f"--{name.replace('_', '-')}" for name in vars(args)} | {"poem": "poems"}
    changed = {name for name in given if vars(args)[name] != parser.get_default(name)}
    for one, other in map(str.split, APART):
        if {one, other} <= changed:
            parser.error(f"{flags[one]} does not go with {flags[other]}")
    for name in NEEDS.keys() & given:
        if NEEDS[name] not in given:
            parser.error(f"{flags[name]} goes with {flags[NEEDS[name]]}")
    args.command = next((name for name in ("demo", "next") if name in given), "poem" if given else "demo")
    for name in sorted(given - TAKES[args.command]):
        takers = " or ".join(flags[command] for command in TAKES if name in TAKES[command])
        parser.error(f"{flags[name]} goes with {takers}")
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
    args.checkpoint = next((path for path in paths if path.is_file()), None)
    if not args.checkpoint:
        raise UserError(f"there is no file {' and no '.join(map(str, paths))}: python train.py makes one", 2)
    model, vocab, info = load_checkpoint(args.checkpoint, pick_device(args.device))
    if "\n" not in vocab.ids:
        raise UserError(f"{args.checkpoint} was not trained on poems: its vocabulary lacks the line break")
    loss = info.get("val_loss")
    return (
        model,
        vocab,
        f"model: {'/'.join(args.checkpoint.parts[-2:])}"
        + (f", validation loss {loss:.3f}" if isinstance(loss, float) else ""),
    )


def main():
    args = parse_args()
    with threads(args.threads):
        model, vocab, name = load_model(args)
        try:
            if args.command == "demo":
                for number in args.demo or DEMOS:
                    DEMOS[number](model, vocab)
                    sys.stdout.flush()
                print(name)  # last, so that `| head -1` gives the lesson's first line
            elif args.command == "next":
                notice(name)
                print_next(model, vocab, normalise_prompt(args.next, vocab, "--next", line_break=True) or "\n", args)
            else:
                notice(name)
                write_poems(model, vocab, args)
        except DecodingError as error:
            raise UserError(f"{args.checkpoint}: {error}") from None
        except ValueError as error:  # a character that the model lacks, in a form's marks or a corpus
            raise UserError(str(error), 2) from None


if __name__ == "__main__":
    sys.exit(run(main))
