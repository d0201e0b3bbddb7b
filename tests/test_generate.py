"""generate.py as a module: writing, the six demos, the look inside, prompts."""

import ast
import re
import sys
import types
import unicodedata
from pathlib import Path

import pytest
import torch
from conftest import seeded
from hypothesis import given, settings
from hypothesis import strategies as st
from quality import rhymes_kept
from small_poet import LETTERS, LEVEL, OBLIQUE, SHIPPED, STOP, VERSE, VOCAB, keeps_the_rules, logits, printed, shape

import data.poems
import generate
import gpt
from data.poems import FORMS
from data.script import UserError
from data.verse import may_stand, poem_template, regulated_templates
from generate import acrostic, first_lines, prompt_ids, template_constraint, write
from gpt import GPTConfig, Vocabulary, probabilities

pytestmark = pytest.mark.usefixtures("as_shipped")


def poems(model, capsys, *flags, vocab=VOCAB):
    """(stdout, stderr) of the poet with these flags."""
    capsys.readouterr()
    generate.write_poems(model, vocab, generate.parse_args([str(flag) for flag in flags]))
    return capsys.readouterr()


@pytest.fixture
def versify(verse, capsys):
    """versify(*flags) -> (poems, stderr) of the poet that knows regulated verse."""

    def versify(*flags):
        out, err = poems(verse[0], capsys, *flags, vocab=VERSE)
        return out.splitlines(), err

    return versify


def noted(model, monkeypatch):
    """A list that notes (ids, characters, options) of each call of model.generate from now on."""
    calls, whole = [], model.generate
    monkeypatch.setattr(model, "generate", lambda ids, n, **k: calls.append((ids, n, k)) or whole(ids, n, **k))
    return calls


def set_all(monkeypatch, **constants):
    for name, value in constants.items():
        monkeypatch.setattr(generate, name, value)


# Writing


@settings(max_examples=20)
@given(st.text(LETTERS, min_size=1, max_size=5), st.integers(1, 9), st.integers(0, 99), st.sampled_from([0, 1.0, 50.0]))
def test_an_acrostic_has_its_heads_lines_and_marks(poet, heads, n_char, seed, temperature):
    """Heads lost, lines of another length, or marks out of turn, also when the model would rather end the poem."""
    text, ended = acrostic(poet, VOCAB, heads, n_char, temperature=temperature, generator=seeded(seed))
    assert ended
    assert shape(n_char, len(heads)).fullmatch(text)
    assert text[:: n_char + 1] == heads


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("ends", [1e9, -1e9], ids=["ends at once", "never ends"])
def test_a_model_that_ends_at_once_or_never(stub, ends, use_cache):
    """Endless wait for the end of a line, or lines left empty because the model had ended the poem."""
    model = stub(logits(line_break=ends, comma=-1e9, full_stop=-1e9))
    start, template = prompt_ids(model, VOCAB, "春", 3), poem_template(5, 4)
    free = write(model, VOCAB, start, 30, use_cache=use_cache, generator=seeded())
    assert [(len(text), ended) for text, ended in free] == [(1, True) if ends > 0 else (31, False)] * 3
    assert shape(5, 4).fullmatch(acrostic(model, VOCAB, "春眠不觉", 5, use_cache=use_cache)[0])
    rule = template_constraint([template], VOCAB)
    whole = write(model, VOCAB, start, len(template), constraint=rule, use_cache=use_cache)
    assert all(shape(5, 4).fullmatch(text) and text[0] == "春" and ended for text, ended in whole)


def test_first_lines_are_drawn_as_the_models_own_that_keep_the_rule(stub):
    """First lines came from the rule alone or were the likeliest: their shares are those of free lines that keep it."""
    # Free text of ids 0 to 3, in which 1 comes after 1 six times in ten; a line is two characters and the mark, 3.
    table = torch.tensor([[0.0, 0.5, 0.5, 0.0], [0.0, 0.6, 0.2, 0.2], [0.0, 0.1, 0.3, 0.6], [1.0, 0.0, 0.0, 0.0]])
    model, n = stub(table.log()), 4000

    def rule(ids):
        letters = torch.tensor([False, True, True, False])
        return letters if ids.size(1) < 3 else ~letters & (torch.arange(4) == 3)

    lines = first_lines(model, torch.zeros(n, 1, dtype=torch.long), rule, 3, generator=seeded(), temperature=1.0)
    weight = {(a, b): table[0, a] * table[a, b] * table[b, 3] for a in (1, 2) for b in (1, 2)}
    for pair, w in weight.items():
        share = (lines[:, 1:3] == torch.tensor(pair)).all(dim=1).sum().item() / n
        assert abs(share - w / sum(weight.values())) < 0.03
    assert {(first, last) for first, _, _, last in lines.tolist()} == {(0, 3)}


@pytest.mark.parametrize("rows", [1, 20])
def test_first_lines_end(stub, monkeypatch, rows):
    """A model whose free lines never keep the rule was asked for ever; after TRIES the rule writes, still by chance."""
    model = stub(torch.tensor([0.0, 5.0, 0.0, 0.0, -9.0]))
    calls = noted(model, monkeypatch)

    def rule(ids):
        return torch.tensor([[False, False, True, True, False], [False] * 4 + [True]][ids.size(1) == 3])

    start = torch.zeros(rows, 1, dtype=torch.long)
    lines = first_lines(model, start, rule, 3, temperature=0.0)
    calls = [(ids.size(0), "constraint" in options) for ids, _, options in calls]
    assert calls == [(max(rows, 16), False)] * generate.TRIES + [(rows, True)]
    assert lines.tolist() == [[0, 2, 2, 4]] * rows
    drawn = first_lines(model, torch.zeros(20, 1, dtype=torch.long), rule, 3, temperature=1.0, generator=seeded())
    assert len({tuple(line) for line in drawn.tolist()}) > 2  # a draw, and of each row for itself


@pytest.mark.parametrize(
    ("form", "knobs", "different"),
    [
        ("五绝", ["--temperature", 1], 3),
        ("七绝", ["--temperature", 0], 1),
        ("五律", ["--top-k", 1], 1),
        ("七律", ["--top-p", 0.9], 3),
    ],
)
def test_regulated_verse_keeps_its_form(versify, verse, form, knobs, different):
    """A wrong tone, rhyme or line, a character twice, or no end, also where all first lines are the same."""
    made, _ = versify("--form", form, "-n", 3, "--seed", 0, *knobs)
    assert all(shape(*FORMS[form]).fullmatch(poem) and keeps_the_rules(poem, verse[2]) for poem in made)
    assert (len(made), len(set(made))) == (3, different)


@pytest.mark.parametrize("tones", ["仄仄仄平", "仄平仄仄", "平仄仄平", "平仄平仄"])
def test_the_heads_of_a_regulated_acrostic(versify, verse, monkeypatch, tones):
    """Heads stood in one template alone, were not asked for their tones, or were put over a first line drawn before."""
    heads = "".join((LEVEL if tone == "平" else OBLIQUE)[i] for i, tone in enumerate(tones))
    fit = [t for t in regulated_templates(5, 4) if all(map(may_stand, heads, t[::6], [verse[2]] * 4))]
    assert bool(fit) == (tones != "平仄平仄")
    calls = noted(verse[0], monkeypatch)
    made, err = versify("--acrostic", heads, "--form", "五绝", "-n", 3, "--seed", 1)
    assert (VERSE.decode(calls[0][0][0]), "constraint" in calls[0][2]) == ("\n" + heads[0], False)
    assert ("does not keep the tones of 五绝" in err) == (not fit)
    for poem in made:
        assert shape(5, 4).fullmatch(poem)
        assert poem[::6] == heads
        assert not fit or keeps_the_rules(poem, verse[2])


@pytest.mark.parametrize(
    ("chars", "lines", "lost", "kept"),
    [(LEVEL, 1, "tones", "shape and rhyme"), (OBLIQUE, 2, "tones and rhyme", "shape")],
    ids=["tones", "rhyme"],
)
def test_a_prompt_that_breaks_the_rules_is_said_to(versify, verse, chars, lines, lost, kept):
    """A prompt that no template allows was bent, refused, or kept without a word of what is lost."""
    prompt = f"{chars[:5]}，{chars[:5]}。"[: 6 * lines]
    [poem], err = versify("--prompt", prompt, "--form", "五绝", "--seed", 1)
    assert f"{prompt} does not keep the {lost} of 五绝; the rest keeps {kept}\n" in err
    assert poem.startswith(prompt)
    assert shape(5, 4).fullmatch(poem)
    assert len(set(rhymes_kept(poem, verse[2]))) == lines  # (1, 1), or (0, 1)


@pytest.mark.parametrize("loose", [[], ["--loose"]], ids=["regulated", "loose"])
def test_a_prompt_begins_a_form(versify, verse, loose):
    """A prompt counted twice, dropped, or shifting the marks; one that is the whole first line, or the whole poem."""
    [whole], _ = versify("--form", "五绝", "--seed", 5)
    for length in (1, 5, 6, 11, 24):
        made, _ = versify("--form", "五绝", *loose, "--prompt", whole[:length], "-n", 2, "--seed", 2)
        for poem in made:
            assert poem.startswith(whole[:length])
            assert shape(5, 4).fullmatch(poem)
            assert loose or keeps_the_rules(poem, verse[2])


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("春，", "its character 2 is ，, there stands a character that is no mark"),
        ("春眠不觉学云", "its character 6 is 云, there stands 「，」"),
        ("春眠不觉学，云水花明月，", "its character 12 is ，, there stands 「。」"),
        ("春" * 25, "25 characters, 五绝 has 24"),
    ],
)
def test_a_prompt_that_cannot_begin_the_form(prompt, said):
    """A prompt that a form cannot begin with was bent or cut; it is refused with the place, status 2."""
    with pytest.raises(UserError, match=re.escape(said)) as stop:
        generate.check_fits(poem_template(5, 4), prompt, "五绝")
    assert stop.value.status == 2


def test_a_vocabulary_too_small_for_a_form(tiny, capsys):
    """Rhymes were counted in all the language, so that a model of few characters ended in the middle of its poems."""
    few = Vocabulary(VERSE.chars[:60])
    with pytest.raises(ValueError, match="too few characters for 七律"):
        poems(tiny(vocab_size=60), capsys, "--form", "七律", vocab=few)


# The demos


def test_demo_1(poet, capsys, monkeypatch, tmp_path):
    """Demo 1 in another layout, with other numbers than the model's, or with a corpus that is not there."""
    monkeypatch.setattr(generate, "CORPUS", tmp_path / "tang.txt")
    generate.demo_next(poet, VOCAB)
    heading, *lines = without_corpus = printed(capsys)
    assert heading == "== 1. 读完一段文字，模型给下一个字的概率（前 8 名）"
    for line, text in zip(lines, SHIPPED["NEXT_PROMPTS"], strict=True):
        probs = poet(VOCAB.encode(text))[0][0, -1].softmax(dim=-1).tolist()
        best = sorted(range(len(VOCAB)), key=probs.__getitem__, reverse=True)[:8]
        shown = "  ".join(f"{VOCAB.chars[i]} {100 * probs[i]:.1f}%".replace("\n", "↵") for i in best)
        assert line == f"  「{text}」→ {shown}"
    generate.CORPUS.write_bytes(b"\xff\n" + "春风。春风吹，春\n风，春风。\n春风\n".encode())
    generate.demo_next(poet, VOCAB)
    *same, last = printed(capsys)
    assert same == without_corpus
    of_model = f"模型给的概率：{100 * probs[STOP]:.1f}%"
    assert last == f"  语料里「春风」出现 4 次，其中 2 次后面紧跟「。」：50.0%；{of_model}"
    for prompts, shown in ((("hello", "春风"), 3), (("hello",), 1), ((" ",), 1), (("风春",), 2)):
        monkeypatch.setattr(generate, "NEXT_PROMPTS", prompts)
        generate.demo_next(poet, VOCAB)
        assert len(printed(capsys)) == shown


def test_demos_2_to_5(poet, capsys, monkeypatch):
    """A demo in another layout, or at another temperature, top-k, seed or order of draws than it says."""
    monkeypatch.setattr(generate, "MAX_CHARS", 20)

    def shown(poems):
        return ["    " + text + ("" if ended else "……") for text, ended in poems]

    for demo in (generate.demo_temperature, generate.demo_top_k, generate.demo_continue, generate.demo_acrostic):
        demo(poet, VOCAB)
    three, expected = prompt_ids(poet, VOCAB, n=3), ["== 2. 温度：同样的随机种子，每个温度写 3 首"]
    for temperature in (0.3, 1.0, 1.5):
        made = write(poet, VOCAB, three, temperature=temperature, generator=seeded(1))
        expected += [f"  温度 {temperature}：", *shown(made)]
    expected += ["== 3. 温度 1.5，但只从概率最高的 20 个字里选（top-k=20）"]
    expected += shown(write(poet, VOCAB, three, temperature=1.5, top_k=20, generator=seeded(1)))
    expected += ["== 4. 给出开头，让它续写"]
    generator = seeded(1)
    for opening in SHIPPED["OPENINGS"]:
        start = prompt_ids(poet, VOCAB, opening)
        expected += shown(write(poet, VOCAB, start, temperature=0.8, generator=generator))
    expected += ["== 5. 藏头诗：每句开头的字由我们指定，其余由模型写"]
    generator = seeded(1)
    for heads, n in SHIPPED["ACROSTICS"]:
        expected += shown([acrostic(poet, VOCAB, heads, n, temperature=0.8, generator=generator)])
    assert printed(capsys) == expected
    assert 0 < sum(line.endswith("……") for line in expected) < 15  # some were cut, some had ended


DEMO_6 = """\
== 6. KV 缓存：结果一样吗？快了多少？
  同样的随机种子，写 32 个字：用缓存和不用缓存的结果完全一样{}
  同样的随机种子，写 41 个字：用缓存和不用缓存的结果完全一样{}
  同样的随机种子，写 16 个字：用缓存和不用缓存的结果完全一样（藏头诗：标点和句首的字一起送进缓存）
  写 32 个字要算的位置：不用缓存 {} 个，用缓存 {} 个
  写  32 个字：不用缓存     23 毫秒，用缓存    12 毫秒，快了 1.8 倍
  写 120 个字：不用缓存     10 毫秒，用缓存    25 毫秒，反而慢了 2.5 倍
  这个模型每个词元的缓存：2 × 2 层 × 16 维 × 4 字节 = 0.25 KB，{} 个词元共 {} KB
"""
TIMES = {32: (0.0226, 0.0124), 120: (0.010, 0.025)}


@pytest.fixture
def timeless(monkeypatch):
    """Demo 6 with times that are given, and fewer characters."""
    set_all(monkeypatch, SAME_CHARS=32, LONG_CHARS=41, ACROSTICS=(("春眠", 7), ("学", 5)), TIMED_CHARS=(32, 120))
    monkeypatch.setattr(generate, "time_both", lambda model, start, n: TIMES[n])


@pytest.mark.parametrize(
    ("block_size", "slid", "numbers"),
    [
        (31, [True, True], ("512", "47", 31, "7.75")),
        (40, [False, True], ("528", "32", 40, "10")),
        (41, [False, False], ("528", "32", 41, "10.25")),
    ],
)
def test_demo_6(tiny, capsys, timeless, block_size, slid, numbers):
    """Demo 6 in other words than the lesson's, given its times; 已滑动 where the window held, or not where it moved."""
    generate.demo_cache(tiny(vocab_size=len(VOCAB), block_size=block_size), VOCAB)
    notes = [f"（窗口 {block_size} 个字，已滑动）" if it_did else "" for it_did in slid]
    assert capsys.readouterr().out == DEMO_6.format(*notes, *numbers)


BREAKS = {
    "mask": ("tril(diagonal=total - T)", "tril(diagonal=0)"),
    "positions": ("self.wpe.weight[start:end]", "self.wpe.weight[: idx.size(1)]"),
    "one too few": ("new = idx[:, window + start :]", "new = idx[:, -1:] if start else idx[:, window:]"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_demo_6_shows_a_broken_cache(tiny, capsys, timeless, name):
    """A mask, positions or a prefill broken as the lesson's reader may break them, and demo 6 still said 完全一样."""
    source, broken = Path(gpt.__file__).read_text(encoding="utf-8"), types.ModuleType("broken")
    assert source.count(BREAKS[name][0]) == 1
    exec(source.replace(*BREAKS[name]), vars(broken))
    whole = tiny(seed=1, vocab_size=len(VOCAB), block_size=40)
    model = broken.GPT(whole.config).eval()
    model.load_state_dict(whole.state_dict())
    generate.demo_cache(model, VOCAB)
    compared = printed(capsys)[1:4]
    places = [int(place) for line in compared for place in re.findall("不一样：第 ([0-9]+) 个字不同", line)]
    assert 1 <= len(places) == sum("完全一样" not in line for line in compared)
    rule = generate.acrostic_rule(VOCAB, "春眠", 7)
    start = prompt_ids(model, VOCAB)
    both = [model.generate(start, 16, constraint=rule, use_cache=c, generator=seeded(1)) for c in (True, False)]
    assert places[-1] == (both[0] != both[1]).nonzero()[0, 1]  # the line break before the poem is number 0


@pytest.mark.parametrize("chars", ["\nabc ", "\n，。abc"])
def test_demos_of_a_model_of_another_corpus(tiny, capsys, monkeypatch, timeless, chars):
    """A model without ， 。 or the heads of ACROSTICS ended demo 6; it gets the other comparisons, and a word why."""
    set_all(monkeypatch, MAX_CHARS=9, SAME_CHARS=9, LONG_CHARS=20)
    vocab = Vocabulary(chars)
    for demo in generate.DEMOS.values():
        demo(tiny(vocab_size=len(chars), block_size=16), vocab)
    out, err = capsys.readouterr()
    assert out.count("用缓存和不用缓存的结果完全一样") == 2
    assert "藏头诗：标点" not in out
    assert "ACROSTICS" in err


def test_time_both(monkeypatch):
    """Cold first runs were counted, the paths not taken in turn, the two swapped, or a mean taken for the median."""
    calls = []

    def timed(model, start, n, use_cache):
        calls.append(use_cache)
        return 1e6 if len(calls) in (1, 2, 7, 8) else len(calls) * (1 if use_cache else 1000)

    monkeypatch.setattr(generate, "timed", timed)
    assert generate.time_both(None, None, 9, runs=3) == (5000, 6)
    assert calls == [False, True] * 4


def test_timed_runs_the_path_it_is_asked_for(poet, monkeypatch):
    """The path without the cache was timed with it, or another number of characters."""
    calls = noted(poet, monkeypatch)
    clock = iter(range(4))
    monkeypatch.setattr(generate.time, "perf_counter", lambda: next(clock))
    assert [generate.timed(poet, prompt_ids(poet, VOCAB), 9, use_cache) for use_cache in (True, False)] == [1, 1]
    assert [(n, options["use_cache"]) for _, n, options in calls] == [(9, True), (9, False)]


@pytest.mark.parametrize(("n_kv_head", "one"), [(4, 4096), (2, 2048), (1, 1024)])
def test_cache_bytes(n_kv_head, one):
    """Another figure than the lesson's 4 KB a character, or than the cache really takes."""
    config = GPTConfig(6289, block_size=128, n_kv_head=n_kv_head)
    cache = gpt.KVCache(config, 1, 128, torch.zeros(1))
    assert generate.cache_bytes(config, 1) == one
    assert generate.cache_bytes(config, 128) == config.n_layer * (cache.k.nbytes + cache.v.nbytes)


ONE = ("--prompt", "春", "--seed", "1")
FORM = ("--form", "五绝", "-n", "3", "--seed", "1")
CHANGED = {  # name -> (another value, the demo or command that it acts on)
    "THREADS": (3, ONE), "SEED": (2, 2), "MAX_CHARS": (5, ONE), "NEXT_TOP": (3, 1), "POEMS": (2, 3), "HOT": (9.0, 3),
    "TOP_K": (2, 3), "NEXT_PROMPTS": (("云",), 1), "TEMPERATURES": ((2.0,), 2), "OPENINGS": (("云",), 4),
    "OPENING_TEMPERATURE": (0.0, 4), "ACROSTICS": ((("云水", 2),), 5), "ACROSTIC_TEMPERATURE": (0.0, 5),
    "SAME_CHARS": (3, 6), "LONG_CHARS": (3, 6), "TIMED_CHARS": ((7,), 6), "TIMED_RUNS": (1, 6),
    "TEMPERATURE": (0.0, ONE), "BATCH": (2, FORM), "TRIES": (1, FORM),
}  # fmt: skip


def test_every_constant_acts_when_it_is_set(poet, verse, capsys, monkeypatch):
    """A constant at the top was bound at import: set in a session, or by a reader's program, it did nothing."""
    set_all(monkeypatch, SAME_CHARS=9, LONG_CHARS=9, MAX_CHARS=9, TIMED_CHARS=(5,), TIMED_RUNS=2)
    calls = {model: noted(model, monkeypatch) for model in (poet, verse[0])}
    monkeypatch.setattr(generate.time, "perf_counter", lambda: len(calls[poet]))

    def observe(command):
        model, vocab = verse[:2] if command is FORM else (poet, VOCAB)
        calls[model].clear()
        if isinstance(command, int):
            generate.DEMOS[command](model, vocab)
        else:
            generate.write_poems(model, vocab, generate.parse_args(command))
        asked = [(ids.size(0), n) for ids, n, _ in calls[model]]
        return capsys.readouterr().out, asked, generate.parse_args([]).threads

    before = {command: observe(command) for _, command in CHANGED.values()}
    assert all(observe(command) == before[command] for command in before)
    for name, (value, command) in CHANGED.items():
        with monkeypatch.context() as change:
            change.setattr(generate, name, value)
            assert observe(command) != before[command], name


def test_no_constant_is_forgotten():
    """A new constant at the top that the tests do not look at."""
    tree = ast.parse(Path(generate.__file__).read_text(encoding="utf-8"))
    first = next(node.lineno for node in tree.body if isinstance(node, ast.FunctionDef))
    names = {node.targets[0].id for node in tree.body if isinstance(node, ast.Assign) and node.lineno < first}
    assert names == SHIPPED.keys() == CHANGED.keys()


# Looking inside a run


def columns(text):
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def place_of(line, word):
    """The terminal column after word in line."""
    return columns(line[: line.index(word) + len(word)])


TRACED = [
    ["--prompt", "春风", "--seed", 4, "--temperature", 1.5, "--top-k", 20, "--top-p", 0.9],
    ["--prompt", "春风", "--seed", 1, "--temperature", 0],
    ["--prompt", "春风", "--form", "五绝", "--loose", "--seed", 1, "--top-p", 0.5],
    ["--acrostic", "学无止境", "--chars", 3, "--seed", 1, "--top-k", 3, "--temperature", 2],
]


@pytest.mark.parametrize("flags", TRACED, ids=str)
def test_trace_shows_the_models_own_numbers(tiny, capsys, flags):
    """--trace changed the poem, missed its end, or showed other shares, ranks or cuts than the model's own."""
    model = tiny(seed=3, vocab_size=len(VOCAB), block_size=64)
    out, err = poems(model, capsys, *flags, "--trace")
    assert out == poems(model, capsys, *flags).out
    header, *rows = err.splitlines()[next(i for i, line in enumerate(err.splitlines()) if "rank" in line) :]
    args = generate.parse_args([str(flag) for flag in flags])
    prompt, options, _ = generate.poem_options(args, model, VOCAB, None)
    rule, T = options["constraint"], args.temperature[0]
    text = out.removesuffix("\n") + "\n" * (rule is None and "had not ended" not in err)
    ids = VOCAB.encode("\n" + text)[:, :65]
    assert len(rows) == ids.size(1) - 1 - len(prompt)
    assert ("↵" in rows[-1][:6]) == (rule is None and len(text) < 64)
    for i, row in enumerate(rows):
        assert columns(row) == columns(header) <= 80
        t = 1 + len(prompt) + i
        own, drawn = model(ids[:, :t])[0][:, -1], ids[0, t].item()
        allowed = None if rule is None else rule(ids[:, :t]).expand(1, -1)
        steps = [probabilities(own, temperature=T)]
        steps += [probabilities(own, temperature=T, allowed=allowed)]
        steps += [probabilities(own, temperature=T, allowed=allowed, top_k=args.top_k)]
        steps += [probabilities(own, temperature=T, allowed=allowed, top_k=args.top_k, top_p=args.top_p)]
        name = VOCAB.chars[drawn].replace("\n", "↵")
        rank = (own[0] > own[0, drawn]).sum() + 1
        shares, best = steps[-1][0].topk(3)
        left = [f"{VOCAB.chars[j]} {100 * p:.1f}" for j, p in zip(best, shares, strict=True) if p > 0]
        cuts = ["- -"] if rule is None else [f"{allowed.sum()} {steps[0][allowed].sum():.0%}"]
        for before, after in zip(steps[1:], steps[2:], strict=False):
            gone = (before > 0) & (after == 0)
            cuts.append(f"{gone.sum()} {before[gone].sum():.0%}" if gone.any() else "- -")
        expected = f"{i + 1} {name} {100 * steps[-1][0, drawn]:.1f} {rank} {' '.join(left)} {' '.join(cuts)}"
        assert row.replace("↵", "↵ ").split() == expected.replace("\n", "↵").split()
        number = f"{100 * steps[-1][0, drawn]:.1f}"
        assert place_of(row, number) == place_of(header, "%")  # the header stands over its columns


@pytest.mark.parametrize(
    ("text", "temperatures", "knobs"),
    [
        ("春风", [1], []),
        ("\n春风", [0, 2], ["--top-k", 5]),
        ("云水花" * 9, [1, 3], ["--top-p", 0.7]),
        ("春风", [0.5], ["--top-k", 9, "--top-p", 0.8]),
        ("春", [1, 0.333333, 1e-20, 123456], []),  # T=0.333333 is wider than its column
    ],
    ids=str,
)
def test_next_shows_the_models_own_numbers(poet, capsys, text, temperatures, knobs):
    """--next showed other characters, shares, remainders or counts than the model gives, or columns out of line."""
    flags = ["--next", text, "--top", 7, *knobs, "--temperature", *temperatures]
    args = generate.parse_args([str(flag) for flag in flags])
    generate.print_next(poet, VOCAB, text, args)
    lines = printed(capsys)
    own = poet(VOCAB.encode(text)[:, -16:])[0][:, -1]
    best = own[0].topk(7).indices
    probs = [probabilities(own, temperature=t, top_k=args.top_k, top_p=args.top_p)[0] for t in temperatures]
    if len(temperatures) > 1:
        header, lines = lines[0], lines[1:]
        assert header.split() == [f"T={t:g}" for t in temperatures]
        assert len({columns(line) for line in (header, *lines[:8])}) == 1
    width = max(8, *(len(f" T={t:g}") for t in temperatures))
    for i, (line, j) in enumerate(zip(lines, best, strict=False)):
        shares = [f"{100 * p[j]:.1f}%" if p[j] else "-" for p in probs]
        bars = ["█" * round(40 * (probs[0][j] / probs[0].max()).item())] if len(probs) == 1 else []
        row = [str(i + 1), VOCAB.chars[j].replace("\n", "↵"), *shares, *bars]
        assert line.split() == [word for word in row if word]
        assert place_of(line, shares[0] if shares[0] != "-" else " -") == 7 + width
    others = [f"{100 * abs(1 - p[best].sum().item()):.1f}%" for p in probs]
    assert lines[7].split() == ["others", *others]
    left = ["left", *(str((p > 0).sum().item()) for p in probs)]
    assert [line.split() for line in lines[8:]] == ([left] if knobs else [])


# Prompts


def test_a_prompt_is_normalised_with_a_notice(capsys):
    """A prompt was changed in silence, or the notice stood among the poems."""
    assert generate.normalise_prompt("春, 風\n", VOCAB, "--prompt") == "春，风"
    assert capsys.readouterr() == ("", "--prompt: , → ，  space → nothing  風 → 风  line break → nothing\n")
    assert generate.normalise_prompt("春风", VOCAB, "--prompt") == "春风"
    assert capsys.readouterr().err == ""


@settings(max_examples=50)
@given(st.text(LETTERS + "，。,.!?:; \u3000\n風雲學～（A😀", max_size=12))
def test_what_a_prompt_becomes_is_known_or_named(text):
    """A half-width mark, a space, a traditional or an unknown character ended in an error that names none or one."""
    unknown = [f"{char} U+{ord(char):04X}" for char in dict.fromkeys(text) if char in "～（A😀"]
    if unknown:
        with pytest.raises(UserError) as stop:
            generate.normalise_prompt(text, VOCAB, "--prompt")
        assert stop.value.status == 2
        assert "  ".join(unknown) + "; it knows such as --prompt 春风" in str(stop.value)
        return
    made = generate.normalise_prompt(text, VOCAB, "--prompt")
    assert set(made) <= set(VOCAB.chars) - {"\n"}
    assert generate.normalise_prompt(made, VOCAB, "--prompt") == made
    letters = [{"風": "风", "雲": "云", "學": "学"}.get(char, char) for char in text if char.isalpha()]
    assert [char for char in made if char in LETTERS] == letters


def test_a_model_without_the_usual_example_gives_one_of_its_own():
    """An unknown character was answered with an example that the model does not know either."""
    vocab = Vocabulary("\n abcdefgh")
    with pytest.raises(UserError) as stop:
        generate.normalise_prompt("春", vocab, "--next")
    example = re.search(r"such as --next (\w+)", str(stop.value))[1]
    assert set(example) <= set("abcdefgh")


@pytest.mark.parametrize("line", ["l'été à Noël", "về quê"])
@pytest.mark.parametrize("change", [str, lambda s: unicodedata.normalize("NFD", s), lambda s: s.replace(" ", "  ")])
def test_a_prompt_goes_the_way_of_the_corpus(tmp_path, capsys, line, change):
    """The first line of a corpus in NFD, or with two spaces, was unknown to the model that had learned it."""
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(unicodedata.normalize("NFD", line.replace(" ", "  ")) + "\n", encoding="utf-8")
    [poem], _ = data.poems.read_poems(corpus)
    vocab = Vocabulary("\n" + "".join(sorted(set(poem))))
    for line_break in (False, True):
        assert generate.normalise_prompt(change(line), vocab, "--next", line_break) == poem
    assert generate.normalise_prompt("\n" + change(line), vocab, "--next", True) == "\n" + poem
    assert capsys.readouterr().err == ""


def failing(*_):
    raise FileNotFoundError("no t2s.json")


OPENCC = {"missing": None, "constructor": failing, "convert": lambda _: types.SimpleNamespace(convert=failing)}


@pytest.mark.parametrize("way", OPENCC)
def test_without_opencc_a_prompt_is_answered_all_the_same(monkeypatch, way):
    """opencc, missing or failing, ended the command in a traceback, or was not said to be the reason."""
    module = OPENCC[way] and types.SimpleNamespace(OpenCC=OPENCC[way])
    monkeypatch.setitem(sys.modules, "opencc", module)
    data.poems.converter.cache_clear()
    try:
        with pytest.raises(UserError, match=r"U\+.*opencc is missing or fails: ") as stop:
            generate.normalise_prompt("鄉愁😀", VOCAB, "--prompt")
        assert stop.value.status == 2
        assert generate.normalise_prompt("春,", VOCAB, "--prompt") == "春，"
    finally:
        data.poems.converter.cache_clear()


def test_an_empty_prompt_begins_a_poem(poet, capsys):
    """An empty prompt crashed; it starts a poem as none does."""
    expected = poems(poet, capsys, "--seed", 1).out
    for text in ("", " ", "\n", "\u3000", " \t\n\u3000\u2028"):
        assert poems(poet, capsys, "--seed", 1, "--prompt", text).out == expected
