"""The lesson's exercises: write your solution below, then have it checked.

    python tests/exercises.py 1 2 3

Each prints what there is to see, then whether the solution is right. Exit status: 0 right, 1 wrong or not tried.
"""

import argparse
import dataclasses
import math
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import generate
from checkpoints.store import threads
from data.script import UserError, notice, parse, progress, run
from data.verse import Place
from generate import bar, faster, first_difference, pad, prompt_ids, seeded, show, time_both, write
from gpt import GPT, GPTConfig, probabilities, sample

# Its settings; SEED, HOT, TOP_K, NEXT_PROMPTS and MAX_CHARS stand in generate.py.
EX1_TOP_P = 0.9  # exercise 1: beside TOP_K, both at temperature HOT
EX1_POEMS = 3

EX2_POEMS = 100  # exercise 2: free ones and constrained ones

EX3_CHARS = (100, 200, 300, 400, 500)  # exercise 3; the lesson asks for 500

# ---------------------------------------------------------------------------------------------------
# Your solutions


def my_top_p(probs, p):
    """Exercise 1: which of the probabilities (V,) stay, as a bool tensor (V,). Write it here."""
    raise NotImplementedError


def my_marks(place):
    """Exercise 2: the marks allowed at this place, 1 to 32, of a quatrain of seven characters a line, such
    as "，。"; None where no mark may stand. Write it here."""
    raise NotImplementedError


# ---------------------------------------------------------------------------------------------------
# Their checks


def ask(function, *arguments):
    """What a learner's function answers. Raises UserError if it is not written yet, or fails."""
    try:
        return function(*arguments)
    except NotImplementedError:
        raise UserError(f"not tried yet: write {function.__name__} in tests/exercises.py") from None
    except (Exception, SystemExit) as error:  # whatever a first attempt may do
        inside = error.__traceback__.tb_next
        where = f"in line {inside.tb_lineno}" if inside else "when it is called"
        raise UserError(f"wrong: {function.__name__} fails {where}: {error!r}") from None


def check_top_p(keep, examples):
    """None, or what is wrong with keep(probs, p): it must keep the fewest, likeliest, that together reach p."""
    for probs, p in examples:
        kept = ask(keep, probs.clone(), p)
        shown = f"of {[round(x, 3) for x in probs.tolist()]}" if len(probs) < 9 else f"of {len(probs):,} characters"
        if getattr(kept, "dtype", None) != torch.bool or kept.shape != probs.shape:
            form = f"{kept.dtype} {tuple(kept.shape)}" if isinstance(kept, torch.Tensor) else repr(kept)
            hint = "; are its () missing?" if callable(kept) else ""
            return f"for p = {p} {shown} it returns {form[:60]}, not a bool tensor of shape {tuple(probs.shape)}{hint}"
        mass = probs[kept].double().sum().item()
        answer = f"for p = {p} it keeps {int(kept.sum())} {shown}, {mass:.3f} of the mass"
        if not kept.all() and kept.any() and probs[~kept].max() > probs[kept].min():
            return (
                f"{answer}, but leaves out a likelier one: sort from high to low, then put the answer in probs' order"
            )
        if mass < p - 1e-6:
            return f"{answer}: too few, the one that crosses p stays too"
        if mass - probs[kept].min().item() > p + 1e-6:  # so one more is let pass where p is reached exactly
            return f"{answer}: one less would do"
    return None


def keep_top_k(probs, k):
    """Which of the probabilities (V,) are the k largest, as a bool tensor (V,)."""
    return torch.zeros_like(probs, dtype=torch.bool).index_fill(0, probs.topk(min(k, len(probs))).indices, True)


def write_keeping(model, vocab, keep, value):
    """(poems, the number of candidates at each step): the lesson's own loop, with keep(probs, value) in it."""
    ids, counts, generator = prompt_ids(model, vocab, n=EX1_POEMS), [], seeded()
    for _ in range(min(generate.MAX_CHARS, model.config.block_size - 1)):
        running = (ids[:, 1:] != vocab.ids["\n"]).all(dim=1)  # (EX1_POEMS,): whose poem has not ended
        if not running.any():
            break
        probs = probabilities(model(ids)[0][:, -1], temperature=generate.HOT)  # (EX1_POEMS, V)
        kept = torch.stack([ask(keep, row.clone(), value) for row in probs])
        counts += kept[running].sum(dim=1).tolist()
        ids = torch.cat([ids, sample(probs.log(), generator, allowed=kept)[:, None]], dim=1)
    texts = [vocab.decode(row).partition("\n") for row in ids[:, 1:].tolist()]
    return [(text, bool(end)) for text, end, _ in texts], counts


def exercise_top_p(model, vocab):
    print(f"== 练习 1. 温度 {generate.HOT}：top-k={generate.TOP_K} 和 top-p={EX1_TOP_P}")
    small = [torch.tensor(probs) for probs in ([0.09, 0.5, 0.41], [0.25, 0.25, 0.25, 0.25], [1.0, 0.0])]
    texts = ["\n", *generate.writable(generate.NEXT_PROMPTS, vocab, "NEXT_PROMPTS")]
    logits = [generate.next_logits(model, vocab, text) for text in texts]
    real = [probabilities(scores, temperature=generate.HOT)[0] for scores in logits]
    wrong = check_top_p(my_top_p, [(probs, p) for probs in small + real for p in (0.3, EX1_TOP_P, 1.0)])
    if wrong:
        return wrong
    with torch.no_grad():
        for name, keep, value in (("top-k", keep_top_k, generate.TOP_K), ("top-p", my_top_p, EX1_TOP_P)):
            poems, kept = write_keeping(model, vocab, keep, value)
            middle = statistics.median(kept)
            print(f"  {name}={value}：每一步留下的字：最少 {min(kept)}，中位数 {middle:g}，最多 {max(kept)}")
            show(poems)
    return None


def wanted_marks(place):
    """The lesson's rule: ，or 。 at 8, 16 and 24, 。 at the end, 32, and no mark elsewhere."""
    return "。" if place == 32 else "，。" if place % 8 == 0 else None


def check_marks(answers):
    """None, or what is wrong with the 32 answers of my_marks."""
    for place, marks in enumerate(answers, 1):
        wanted = wanted_marks(place)
        answer = f"for place {place} it returns {marks!r}"
        if marks is not None and (not isinstance(marks, str) or not marks or not set(marks) <= {"，", "。"}):
            return f"{answer}, not None or a string of ， and 。"
        if wanted is None and marks:
            return f"{answer}: no mark may stand there; places are counted from 1, marks are the 8th, 16th, 24th, 32nd"
        if wanted and not marks:
            return f"{answer}: a mark must stand there"
        if wanted and not set(marks) <= set(wanted):
            return f"{answer}: a poem must end with 。"
    return None


def is_quatrain(text):
    """Whether the text has 32 characters and its marks stand where they must."""
    rule = [wanted_marks(place) for place in range(1, 33)]
    fits = (char in marks if marks else char.isalpha() for char, marks in zip(text, rule, strict=False))
    return len(text) == 32 and all(fits)


def exercise_form(model, vocab):
    print("== 练习 2. 固定格式：七言绝句，标点只在第 8、16、24、32 个字")
    answers = [ask(my_marks, place) for place in range(1, 33)]
    if wrong := check_marks(answers):
        return wrong
    template = [Place.ANY if marks is None else marks for marks in answers]
    rule = generate.template_constraint([template], vocab)
    start = prompt_ids(model, vocab, n=EX2_POEMS)
    for name, options in (("不加约束", {}), ("加约束", {"constraint": rule, "length": 32})):
        poems = write(model, vocab, start, temperature=1.0, generator=seeded(), **options)
        print(f"  {name}：{EX2_POEMS} 首里 {sum(is_quatrain(text) for text, _ in poems) / len(poems):.0%} 合格")
        show(poems[:3])
    return None


def exercise_cache(model, vocab):
    config, most = dataclasses.replace(model.config, block_size=GPTConfig.block_size), max(EX3_CHARS)
    print(f"== 练习 3. block_size={config.block_size}，随机权重：写得越长，缓存省得越多")
    if config.block_size < most:
        way = (
            f"write {2 ** math.ceil(math.log2(most))} for {config.block_size} in `block_size: int =`, in gpt.py itself"
        )
        return f"{most} characters do not fit a block_size of {config.block_size}: {way}"
    torch.manual_seed(generate.SEED)
    start = prompt_ids(model, vocab)
    model = GPT(config).to(start.device).eval()
    rows = [(n, *time_both(model, start, n, runs=1)) for n in progress(EX3_CHARS, leave=False)]
    slowest = max(max(times) for _, *times in rows)
    for n, without, cached in rows:
        print(f"  写 {n:>4} 个字，缓存 {generate.cache_bytes(config, n) / 1024:,.0f} KB，{faster(without, cached)}")
        for name, seconds in (("不用缓存", without), ("用缓存", cached)):
            print(f"    {pad(name, 8)} {1000 * seconds:6.0f} 毫秒 {bar(seconds / slowest)}")
    different = first_difference(model, start, most)
    return f"with and without the cache character {different} differs" if different else None


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


def main():
    parser = argparse.ArgumentParser(description="Check the solutions of the lesson's exercises.")
    parser.add_argument("numbers", nargs="+", type=int, choices=EXERCISES, metavar="N", help="exercises, 1 to 3")
    generate.add_model_flags(parser)
    args = parse(parser)
    with threads(args.threads):
        model, vocab, name = generate.load_model(args)
        notice(name)
        return check_exercises(args.numbers, model, vocab)


if __name__ == "__main__":
    sys.exit(run(main))
