"""generate.py as a module: writing, the six demos, the look inside, prompts."""

import ast
import random
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

import data.poems
import generate
import gpt
from data.poems import FORMS
from data.prosody import read_prosody, rhymes_kept, tones_kept
from data.script import UserError
from data.verse import may_stand, poem_template, regulated_templates
from generate import acrostic, first_lines, prompt_ids, template_constraint, write
from gpt import GPTConfig, Vocabulary, probabilities

VOCAB = Vocabulary("\n，。白日依山尽黄河入海床前明月光疑是地上春风大漠孤烟直人工智能好眠不觉学无止境乾干云水花雪")
LETTERS = VOCAB.chars[3:]
BREAK, COMMA, STOP = range(3)

SHIPPED = {
    "THREADS": 1, "SEED": 1, "MAX_CHARS": 100, "NEXT_TOP": 8, "POEMS": 3, "HOT": 1.5, "TOP_K": 20,
    "NEXT_PROMPTS": ("白日依山尽，黄河入海", "床前明月光，疑是地上", "春风"), "TEMPERATURES": (0.3, 1.0, 1.5),
    "OPENINGS": ("床前明月光，", "大漠孤烟直，", "人工智能好，"), "OPENING_TEMPERATURE": 0.8,
    "ACROSTICS": (("春眠不觉", 7), ("学无止境", 5)), "ACROSTIC_TEMPERATURE": 0.8,
    "SAME_CHARS": 120, "LONG_CHARS": 300, "TIMED_CHARS": (32, 64, 120), "TIMED_RUNS": 5,
    "TEMPERATURE": 0.8, "BATCH": 64, "TRIES": 8,
}  # fmt: skip


@pytest.fixture(autouse=True)
def as_shipped(monkeypatch):
    """The constants of generate.py as the lesson has them, whatever a learner has made of them."""
    for name, value in SHIPPED.items():
        monkeypatch.setattr(generate, name, value)


@pytest.fixture(scope="module")
def poet(tiny):
    """A random model of VOCAB that sees 16 characters, so that most poems run past its window."""
    return tiny(vocab_size=len(VOCAB), block_size=16)


def verse_vocabulary():
    """Characters enough for regulated verse, the commonest of data/prosody.txt."""
    prosody = read_prosody()
    level = [char for char, tone in prosody.tones.items() if tone == "平" and prosody.rhymes.get(char) in (1, 2, 4)]
    oblique = [char for char, tone in prosody.tones.items() if tone == "仄"]
    return Vocabulary("\n，。" + "".join(level[:120] + oblique[:120]))


@pytest.fixture(scope="module")
def verse(tiny):
    """(model, vocab, prosody): a random model that can write regulated verse."""
    vocab = verse_vocabulary()
    return tiny(vocab_size=len(vocab), block_size=64, n_layer=1), vocab, read_prosody()


def logits(**likely):
    """Logits (V,): 0 for all characters but those named."""
    row = torch.zeros(len(VOCAB))
    for name, value in likely.items():
        row[{"line_break": BREAK, "comma": COMMA, "full_stop": STOP}.get(name, VOCAB.ids.get(name))] = value
    return row


def shape(n_char, n_lines, letters=r"[^，。\s]"):
    """A pattern of a whole poem, written without poem_template."""
    marks = "，。" * n_lines
    return re.compile("".join(f"{letters}{{{n_char}}}{mark}" for mark in marks[: n_lines - 1] + "。"))


def printed(capsys):
    return capsys.readouterr().out.splitlines()


def poems(model, capsys, *flags, vocab=VOCAB):
    """(stdout, stderr) of the poet with these flags."""
    capsys.readouterr()
    generate.write_poems(model, vocab, generate.parse_args([str(flag) for flag in flags]))
    return capsys.readouterr()


def shown(poems):
    return ["    " + text + ("" if ended else "……") for text, ended in poems]


def noted(model, monkeypatch):
    """A list that notes (ids, characters, options) of each call of model.generate from now on."""
    calls, whole = [], model.generate
    monkeypatch.setattr(model, "generate", lambda ids, n, **k: calls.append((ids, n, k)) or whole(ids, n, **k))
    return calls


def keeps_the_rules(poem, prosody):
    """Whether all tones and rhymes of a poem are right, and no character comes again but one doubled on the spot."""
    (right, pairs), (rhyming, ends) = tones_kept(poem, prosody), rhymes_kept(poem, prosody)
    once = re.sub(r"(.)\1", r"\1", re.sub("[，。]", "", poem))
    return right == pairs > 0 and rhyming == ends > 0 and len(set(once)) == len(once)


# ---------------------------------------------------------------------------------------------------
# Writing


@settings(max_examples=30)
@given(
    st.text(LETTERS, min_size=1, max_size=9), st.integers(1, 12), st.integers(0, 99), st.sampled_from([0, 1.0, 50.0])
)
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
    assert (lines[:, 0] == 0).all()
    assert (lines[:, 3] == 3).all()


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


def test_what_is_forced_stands_before_the_first_line_is_drawn(verse, monkeypatch, capsys):
    """The first line of a regulated acrostic was drawn from a bare line break, its head put over what had come."""
    model, vocab, prosody = verse
    calls = noted(model, monkeypatch)
    heads = vocab.chars[3:5] + vocab.chars[130:132]
    out, _ = poems(model, capsys, "--acrostic", heads, "--form", "五绝", "--seed", 1, vocab=vocab)
    assert vocab.decode(calls[0][0][0]) == "\n" + heads[0]
    assert "constraint" not in calls[0][2]
    assert out[::6][:4] == heads


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "knobs", [["--temperature", 1], ["--temperature", 0], ["--top-k", 1], ["--top-p", 0.9]], ids=str
)
def test_regulated_verse_keeps_its_form(verse, capsys, form, knobs):
    """A wrong tone, rhyme or line, a character twice, or no end, also where all first lines are the same."""
    model, vocab, prosody = verse
    out = poems(model, capsys, "--form", form, "-n", 3, "--seed", 0, *knobs, vocab=vocab).out.splitlines()
    assert len(out) == 3
    assert all(shape(*FORMS[form]).fullmatch(poem) and keeps_the_rules(poem, prosody) for poem in out)
    assert len(set(out)) == (1 if knobs[1] in (0, 1) and knobs[0] != "--temperature" or knobs[1] == 0 else 3)


@pytest.mark.parametrize("seed", range(2))
def test_the_heads_of_a_regulated_acrostic_fit_every_template(verse, capsys, seed):
    """Heads stood in the first template alone, or were not asked for their tones, so that others were broken."""
    model, vocab, prosody = verse
    chance = random.Random(seed)
    for _ in range(4):
        heads = "".join(chance.sample(vocab.chars[3:], 8))
        out, err = poems(model, capsys, "--acrostic", heads, "--form", "五律", "-n", 4, "--seed", seed, vocab=vocab)
        fit = [t for t in regulated_templates(5, 8) if all(map(may_stand, heads, t[::6], [prosody] * 8))]
        assert ("does not keep the tones of 五律" in err) == (not fit)
        for poem in out.splitlines():
            assert shape(5, 8).fullmatch(poem)
            assert poem[::6] == heads
            assert not fit or keeps_the_rules(poem, prosody)


@pytest.mark.parametrize(
    ("place", "lines", "lost", "kept"), [(3, 1, "tones", "shape and rhyme"), (130, 2, "tones and rhyme", "shape")]
)
def test_a_prompt_that_breaks_the_rules_is_said_to(verse, capsys, place, lines, lost, kept):
    """A prompt that no template allows was bent, refused, or kept without a word of what is lost."""
    model, vocab, prosody = verse
    line = vocab.chars[place : place + 5]  # five level tones, or five oblique ones, which do not rhyme
    prompt = f"{line}，{line}。"[: 6 * lines]
    out, err = poems(model, capsys, "--prompt", prompt, "--form", "五绝", "--seed", 1, vocab=vocab)
    assert f"{prompt} does not keep the {lost} of 五绝; the rest keeps {kept}\n" in err
    assert out.startswith(prompt)
    assert shape(5, 4).fullmatch(out.strip())
    assert len(set(rhymes_kept(out.strip(), prosody))) == lines  # (1, 1), or (0, 1)


@pytest.mark.parametrize("length", [0, 1, 5, 6, 11, 23, 24])
@pytest.mark.parametrize("loose", [[], ["--loose"]], ids=["regulated", "loose"])
def test_a_prompt_begins_a_form(verse, capsys, length, loose):
    """A prompt counted twice, dropped, or shifting the marks; one that is the whole first line, or the whole poem."""
    model, vocab, prosody = verse
    whole = poems(model, capsys, "--form", "五绝", "--seed", 5, vocab=vocab).out.strip()
    flags = ["--form", "五绝", *loose, "--prompt", whole[:length], "-n", 2, "--seed", 2]
    for poem in poems(model, capsys, *flags, vocab=vocab).out.splitlines():
        assert poem.startswith(whole[:length])
        assert shape(5, 4).fullmatch(poem)
        assert loose or keeps_the_rules(poem, prosody)


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


def test_poems_of_a_small_vocabulary_never_run_out(tiny, capsys):
    """Rhymes were counted in all the language, and a model of few characters ended in the middle of its poems."""
    vocab, prosody = verse_vocabulary(), read_prosody()
    rhymes = [char for char in vocab.chars if prosody.rhymes.get(char) == 1][:24]
    rest = [char for char in vocab.chars[3:] if char not in rhymes]
    few = Vocabulary("\n，。" + "".join(rhymes + rest[:60] + rest[-75:]))
    model = tiny(vocab_size=len(few), block_size=64)
    out = poems(model, capsys, "--form", "七律", "-n", 70, "--seed", 1, vocab=few).out
    assert all(keeps_the_rules(poem, prosody) for poem in out.splitlines())
    assert out.count("\n") == 70
    with pytest.raises(ValueError, match="too few characters for 七律"):
        poems(tiny(vocab_size=60), capsys, "--form", "七律", "-n", 70, vocab=Vocabulary(few.chars[:60]))


def test_other_defaults_of_torch_change_nothing(verse, capsys, monkeypatch):
    """Noise, rules and caches took torch's default type, and another program's setting wrote another poem."""
    model, vocab, _ = verse
    flags = ["--form", "五绝", "-n", 2, "--seed", 3]
    expected = poems(model, capsys, *flags, vocab=vocab).out
    torch.set_default_dtype(torch.float64)
    try:
        assert poems(model, capsys, *flags, vocab=vocab).out == expected
    finally:
        torch.set_default_dtype(torch.float32)


# ---------------------------------------------------------------------------------------------------
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
    monkeypatch.setattr(generate, "MAX_CHARS", 30)
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


def test_openings_the_model_does_not_know(poet, capsys, monkeypatch):
    """An opening in traditional characters, or with an unknown one, ended the demos; it is converted, or left out."""
    monkeypatch.setattr(generate, "OPENINGS", ("春風", "龘", "云"))
    generate.demo_continue(poet, VOCAB)
    out, err = capsys.readouterr()
    heading, first, second = out.splitlines()
    assert (first[:6], second[:5]) == ("    春风", "    云")
    assert "OPENINGS: 風 → 风" in err
    assert re.search("龘 U\\+9F98.*「龘」 is left out", err)


DEMO_6 = """\
== 6. KV 缓存：结果一样吗？快了多少？
  同样的随机种子，写 120 个字：用缓存和不用缓存的结果完全一样
  同样的随机种子，写 300 个字：用缓存和不用缓存的结果完全一样（窗口 128 个字，已滑动）
  同样的随机种子，写 32 个字：用缓存和不用缓存的结果完全一样（藏头诗：标点和句首的字一起送进缓存）
  写 120 个字要算的位置：不用缓存 7,260 个，用缓存 120 个
  写  32 个字：不用缓存     23 毫秒，用缓存    12 毫秒，快了 1.8 倍
  写  64 个字：不用缓存     52 毫秒，用缓存    26 毫秒，快了 2.0 倍
  写 120 个字：不用缓存     10 毫秒，用缓存    25 毫秒，反而慢了 2.5 倍
  这个模型每个词元的缓存：2 × 2 层 × 16 维 × 4 字节 = 0.25 KB，128 个词元共 32 KB
"""
TIMES = {32: (0.0226, 0.0124), 64: (0.052, 0.026), 120: (0.010, 0.025)}


@pytest.fixture
def timeless(monkeypatch):
    monkeypatch.setattr(generate, "time_both", lambda model, start, n: TIMES[n])


@pytest.mark.slow
def test_demo_6(tiny, capsys, timeless):
    """Demo 6 in other words than the lesson's, given its times; or silent when the cache is the slower one."""
    generate.demo_cache(tiny(vocab_size=len(VOCAB), block_size=128), VOCAB)
    assert capsys.readouterr().out == DEMO_6


BREAKS = {
    "mask": ("tril(diagonal=total - T)", "tril(diagonal=0)"),
    "positions": ("self.wpe.weight[start:end]", "self.wpe.weight[: idx.size(1)]"),
    "one too few": ("new = idx[:, window + start :]", "new = idx[:, -1:] if start else idx[:, window:]"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_demo_6_shows_a_broken_cache(tiny, capsys, monkeypatch, timeless, name):
    """A mask, positions or a prefill broken as the lesson's reader may break them, and demo 6 still said 完全一样."""
    source, broken = Path(gpt.__file__).read_text(encoding="utf-8"), types.ModuleType("broken")
    assert source.count(BREAKS[name][0]) == 1
    exec(source.replace(*BREAKS[name]), vars(broken))
    monkeypatch.setattr(generate, "SAME_CHARS", 40)
    monkeypatch.setattr(generate, "LONG_CHARS", 60)
    whole = tiny(seed=1, vocab_size=len(VOCAB), block_size=64)
    model = broken.GPT(whole.config).eval()
    model.load_state_dict(whole.state_dict())
    generate.demo_cache(model, VOCAB)
    compared = printed(capsys)[1:4]
    places = [int(place) for line in compared for place in re.findall("不一样：第 ([0-9]+) 个字不同", line)]
    assert 1 <= len(places) == sum("完全一样" not in line for line in compared)
    rule = generate.acrostic_rule(VOCAB, "春眠不觉", 7)
    both = [
        model.generate(prompt_ids(model, VOCAB), 32, constraint=rule, use_cache=c, generator=seeded(1)) for c in (1, 0)
    ]
    assert places[-1] == (both[0] != both[1]).nonzero()[0, 1]  # the line break before the poem is number 0


@pytest.mark.parametrize(("block_size", "slid"), [(31, [True, True]), (40, [False, True]), (41, [False, False])])
def test_demo_6_says_that_the_window_slid_only_where_it_did(tiny, capsys, monkeypatch, timeless, block_size, slid):
    """已滑动 stood beside a text that fits the window, or was missing where the window had moved on."""
    monkeypatch.setattr(generate, "SAME_CHARS", 32)
    monkeypatch.setattr(generate, "LONG_CHARS", 41)
    generate.demo_cache(tiny(vocab_size=len(VOCAB), block_size=block_size), VOCAB)
    assert ["已滑动" in line for line in printed(capsys)[1:3]] == slid


@pytest.mark.parametrize("chars", ["\nabc ", "\n，。abc"])
def test_demos_of_a_model_of_another_corpus(tiny, capsys, monkeypatch, timeless, chars):
    """A model without ， 。 or the heads of ACROSTICS ended demo 6; it gets the other comparisons, and a word why."""
    for name in ("SAME_CHARS", "LONG_CHARS", "MAX_CHARS"):
        monkeypatch.setattr(generate, name, 20)
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


def test_positions_are_counted(poet):
    """Demo 6 counted positions that the model did not compute, or left its hook on the model."""
    start = prompt_ids(poet, VOCAB)
    assert [generate.positions_computed(poet, start, 12, use_cache) for use_cache in (False, True)] == [78, 12]
    assert not poet.h[0]._forward_pre_hooks


@pytest.mark.parametrize(("n_kv_head", "one"), [(4, 4096), (2, 2048), (1, 1024)])
def test_cache_bytes(n_kv_head, one):
    """Another figure than the lesson's 4 KB a character, or than the cache really takes."""
    config = GPTConfig(6289, block_size=128, n_kv_head=n_kv_head)
    cache = gpt.KVCache(config, 1, 128, torch.zeros(1))
    assert generate.cache_bytes(config, 1) == one
    assert generate.cache_bytes(config, 128) == config.n_layer * (cache.k.nbytes + cache.v.nbytes)


ONE = ["--prompt", "春", "--seed", "1"]
POEM = ["--form", "五绝", "-n", "3", "--seed", "1"]
CHANGED = {
    "THREADS": (3, ONE), "SEED": (2, 2), "MAX_CHARS": (5, ONE), "NEXT_TOP": (3, 1), "POEMS": (2, 3), "HOT": (9.0, 3),
    "TOP_K": (2, 3), "NEXT_PROMPTS": (("云",), 1), "TEMPERATURES": ((2.0,), 2), "OPENINGS": (("云",), 4),
    "OPENING_TEMPERATURE": (0.0, 4), "ACROSTICS": ((("云水", 2),), 5), "ACROSTIC_TEMPERATURE": (0.0, 5),
    "SAME_CHARS": (9, 6), "LONG_CHARS": (9, 6), "TIMED_CHARS": ((7,), 6), "TIMED_RUNS": (1, 6),
    "TEMPERATURE": (0.0, ONE), "BATCH": (2, POEM), "TRIES": (1, POEM),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGED)
def test_every_constant_acts_when_it_is_set(poet, verse, capsys, monkeypatch, name):
    """A constant at the top was bound at import: set in a session, or by a reader's program, it did nothing."""
    value, command = CHANGED[name]
    model, vocab = (poet, VOCAB) if command is not POEM else verse[:2]
    for small, number in (
        ("SAME_CHARS", 20),
        ("LONG_CHARS", 20),
        ("MAX_CHARS", 20),
        ("TIMED_CHARS", (5,)),
        ("TIMED_RUNS", 2),
    ):
        monkeypatch.setattr(generate, small, number)
    calls = noted(model, monkeypatch)
    monkeypatch.setattr(generate.time, "perf_counter", lambda: len(calls))

    def observe():
        calls.clear()
        if isinstance(command, int):
            generate.DEMOS[command](model, vocab)
        else:
            generate.write_poems(model, vocab, generate.parse_args(command))
        threads = generate.parse_args([]).threads
        return capsys.readouterr().out, [(ids.size(0), n) for ids, n, _ in calls], threads

    before = observe()
    assert observe() == before
    monkeypatch.setattr(generate, name, value)
    assert observe() != before


def test_no_constant_is_forgotten():
    """A new constant at the top that the tests do not look at."""
    tree = ast.parse(Path(generate.__file__).read_text(encoding="utf-8"))
    first = next(node.lineno for node in tree.body if isinstance(node, ast.FunctionDef))
    names = {node.targets[0].id for node in tree.body if isinstance(node, ast.Assign) and node.lineno < first}
    assert names == SHIPPED.keys() == CHANGED.keys()


# ---------------------------------------------------------------------------------------------------
# Looking inside a run


def columns(text):
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


TRACED = [
    ["--prompt", "春风", "--seed", 1],
    ["--prompt", "春风", "--seed", 4, "--temperature", 1.5, "--top-k", 20, "--top-p", 0.9],
    ["--prompt", "春风", "--seed", 1, "--temperature", 0],
    ["--prompt", "春风", "--form", "五绝", "--loose", "--seed", 1, "--top-p", 0.5],
    ["--acrostic", "学无止境", "--chars", 3, "--seed", 1, "--top-k", 3, "--temperature", 2],
]


def place_of(line, word):
    """The terminal column after word in line."""
    return columns(line[: line.index(word) + len(word)])


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


@pytest.mark.parametrize("text", ["春风", "\n春风", "云水花" * 9])
@pytest.mark.parametrize(
    ("temperatures", "knobs"),
    [
        ([1], []),
        ([0.01, 1, 1.5], []),
        ([0, 2], ["--top-k", 5]),
        ([1, 3], ["--top-p", 0.7]),
        ([0.5], ["--top-k", 9, "--top-p", 0.8]),
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
        assert columns(header) == columns(lines[0])
    for i, (line, j) in enumerate(zip(lines, best, strict=False)):
        shares = [f"{100 * p[j]:.1f}%" if p[j] else "-" for p in probs]
        bars = ["█" * round(40 * (probs[0][j] / probs[0].max()).item())] if len(probs) == 1 else []
        row = [str(i + 1), VOCAB.chars[j].replace("\n", "↵"), *shares, *bars]
        assert line.split() == [word for word in row if word]
        assert place_of(line, shares[0] if shares[0] != "-" else " -") == 15
    others = [f"{100 * abs(1 - p[best].sum().item()):.1f}%" for p in probs]
    assert lines[7].split() == ["others", *others]
    left = ["left", *(str((p > 0).sum().item()) for p in probs)]
    assert [line.split() for line in lines[8:]] == ([left] if knobs else [])


def test_next_of_wide_temperatures_keeps_its_columns_apart(poet, capsys):
    """T=0.333333 ran into the column before it."""
    args = generate.parse_args(["--next", "春", "--temperature", "1", "0.333333", "1e-20", "123456"])
    generate.print_next(poet, VOCAB, "春", args)
    header, *rows = printed(capsys)
    assert header.split() == ["T=1", "T=0.333333", "T=1e-20", "T=123456"]
    assert len({columns(row) for row in (header, *rows[:-1])}) == 1


# ---------------------------------------------------------------------------------------------------
# Prompts


def test_a_prompt_is_normalised_with_a_notice(capsys):
    """A prompt was changed in silence, or the notice stood among the poems."""
    assert generate.normalise_prompt("春, 風\n", VOCAB, "--prompt") == "春，风"
    assert capsys.readouterr() == ("", "--prompt: , → ，  space → nothing  風 → 风  line break → nothing\n")
    assert generate.normalise_prompt("春风", VOCAB, "--prompt") == "春风"
    assert capsys.readouterr().err == ""


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
@pytest.mark.parametrize("text", ["鄉愁", "😀"])
def test_without_opencc_a_prompt_is_answered_all_the_same(monkeypatch, way, text):
    """opencc, missing or failing, ended the command in a traceback, or was not said to be the reason."""
    module = OPENCC[way] and types.SimpleNamespace(OpenCC=OPENCC[way])
    monkeypatch.setitem(sys.modules, "opencc", module)
    data.poems.converter.cache_clear()
    try:
        with pytest.raises(UserError, match=r"U\+.*opencc is missing or fails: ") as stop:
            generate.normalise_prompt(text, VOCAB, "--prompt")
        assert stop.value.status == 2
        assert generate.normalise_prompt("春,", VOCAB, "--prompt") == "春，"
    finally:
        data.poems.converter.cache_clear()


@pytest.mark.parametrize("text", ["", " ", "\n", "\u3000", " \t\n\u3000\u2028"])
def test_an_empty_prompt_begins_a_poem(poet, capsys, text):
    """An empty prompt crashed; it starts a poem as none does."""
    assert poems(poet, capsys, "--seed", 1, "--prompt", text).out == poems(poet, capsys, "--seed", 1).out
