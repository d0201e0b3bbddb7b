"""generate.py as a module: rules on the text, the six demos, the look inside, the exercises, prompts."""

import os
import random
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
import torch

import generate
import gpt
from generate import ANY, FORMS, acrostic, compare, form, seeded, write
from gpt import GPT, GPTConfig, Stop, UnknownCharacters, Vocabulary

VOCAB = Vocabulary("\n，。白日依山尽黄河入海床前明月光疑是地上春风大漠孤烟直人工智能好眠不觉学无止境乾干云水花雪")
LETTERS = VOCAB.chars[3:]
BREAK, COMMA, STOP = range(3)


@pytest.fixture(scope="module")
def poet(tiny):
    """A random model of these characters that sees 16 of them, so that most poems run past its window."""
    return tiny(vocab_size=len(VOCAB), block_size=16)


def logits(**likely):
    """Logits (V,): 0 for all characters but those named."""
    row = torch.zeros(len(VOCAB))
    for name, value in likely.items():
        row[{"line_break": BREAK, "comma": COMMA, "full_stop": STOP}.get(name, VOCAB.ids.get(name))] = value
    return row


def shape(n_char, n_lines):
    """A pattern of a whole poem, written without generate.form."""
    lines = [f"[{LETTERS}]{{{n_char}}}{'。' if i % 2 else '，'}" for i in range(n_lines)]
    return re.compile("".join(lines) + "\n")


# ---------------------------------------------------------------------------------------------------
# Rules on the text


def test_form_is_a_template():
    """A form of the wrong lines, marks or places of the heads."""
    assert form(2, 3) == [ANY, ANY, "，", ANY, ANY, "。", ANY, ANY, "，"]
    assert form(2, 2, "春风") == ["春", ANY, "，", "风", ANY, "。"]
    assert form(1, 2, "春风") == ["春", "，", "风", "。"]
    assert FORMS == {"五绝": (5, 4), "七绝": (7, 4), "五律": (5, 8), "七律": (7, 8)}
    assert {name: len(form(*FORMS[name])) for name in FORMS} == {"五绝": 24, "七绝": 32, "五律": 48, "七律": 64}


def test_follow_allows_what_the_template_says():
    """A place that lets a mark or the line break through, or that counts from the wrong start."""
    rule = generate.follow([ANY, "，。", "春"], VOCAB, start=4)
    allowed = [{VOCAB.chars[i] for i in rule(torch.zeros(2, n)).nonzero()[:, 0]} for n in (4, 5, 6)]
    assert allowed == [set(LETTERS), {"，", "。"}, {"春"}]


@pytest.mark.parametrize("temperature", [1.0, 50.0])
@pytest.mark.parametrize("name", FORMS)
def test_forms_have_their_shape(poet, name, temperature):
    """A mark or a line break inside a line, at a high temperature too, or a poem that does not end."""
    poems = write(poet, VOCAB, n=50, template=form(*FORMS[name]), temperature=temperature, generator=seeded())
    assert len(set(poems)) == 50
    assert all(shape(*FORMS[name]).fullmatch(poem) for poem in poems)


@pytest.mark.parametrize("prompt", ["", "春", "春眠不觉学", "春眠不觉学，", "春眠不觉学，云水花明月。雪", "，"])
def test_prompt_begins_a_form(poet, prompt):
    """A prompt that is counted twice, dropped, or shifts the marks."""
    if prompt == "，":  # one that is whole already
        prompt = "春眠不觉学，云水花明月。春眠不觉学，云水花明月。"
    generate.fit(form(5, 4), prompt, "五绝")
    for poem in write(poet, VOCAB, prompt, 9, template=form(5, 4), temperature=1.0, generator=seeded()):
        assert poem.startswith(prompt)
        assert shape(5, 4).fullmatch(poem)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("春，", "， is its character 2, where a character that is no mark stands"),
        ("春眠不觉学云", "云 is its character 6, where 「，」 stands"),
        ("春眠不觉学。", "。 is its character 6, where 「，」 stands"),
        ("春眠不觉学，云水花明月，", "， is its character 12, where 「。」 stands"),
        ("春\n", "↵ is its character 2, where a character that is no mark stands"),
        ("春" * 25, "25 characters, 五绝 has 24"),
    ],
)
def test_prompt_that_cannot_fit(prompt, said):
    """A prompt that a form cannot begin with was bent or cut; it is refused with the reason, status 2."""
    with pytest.raises(Stop, match=re.escape(said)) as stop:
        generate.fit(form(5, 4), prompt, "五绝")
    assert stop.value.status == 2


@pytest.mark.parametrize("n_char", [1, 2, 5, 7, 12])
def test_acrostics(poet, stub, n_char):
    """Heads lost, lines of another length, marks out of turn; with random heads, and a model that avoids them."""
    chance = random.Random(n_char)
    for trial in range(16):
        heads = "".join(chance.choices(LETTERS, k=chance.randint(1, 9)))
        model = stub(logits(**dict.fromkeys(heads, -1e9))) if trial % 8 == 0 else poet
        temperature = 50.0 if trial % 5 == 0 else 1.0
        (poem,) = acrostic(model, VOCAB, heads, n_char, temperature, generator=seeded(trial))
        lines = re.findall(r"([^，。\n]*)([，。])", poem)
        assert "".join(line + mark for line, mark in lines) + "\n" == poem
        assert "".join(line[:1] for line, _ in lines) == heads
        assert [len(line) for line, _ in lines] == [n_char] * len(heads)
        assert "".join(mark for _, mark in lines) == ("，。" * 5)[: len(heads)]


def test_acrostic_as_in_the_lesson(poet):
    """Acrostic(heads) alone is seven characters a line at temperature 0.8."""
    short = acrostic(poet, VOCAB, "春眠不觉", generator=seeded())
    assert short == acrostic(poet, VOCAB, "春眠不觉", n_char=7, temperature=0.8, n=1, generator=seeded())
    assert shape(7, 4).fullmatch(short[0])
    with pytest.raises(UnknownCharacters, match="U\\+9F8D"):
        acrostic(poet, VOCAB, "春龍")


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_model_that_never_ends_a_line(stub, use_cache):
    """Endless loop in wait of an end; a free poem is cut, a form and an acrostic have all their lines."""
    model = stub(logits(line_break=-1e9, comma=-1e9, full_stop=-1e9))
    free = write(model, VOCAB, "春", 3, max_chars=30, use_cache=use_cache, generator=seeded())
    assert [len(poem) for poem in free] == [31] * 3
    assert "\n" not in "".join(free)
    (poem,) = acrostic(model, VOCAB, "春眠不觉", 5, use_cache=use_cache)
    assert shape(5, 4).fullmatch(poem)
    assert all(map(shape(7, 8).fullmatch, write(model, VOCAB, n=3, template=form(7, 8), use_cache=use_cache)))


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_model_that_ends_at_once(stub, use_cache):
    """An acrostic of one line, or of empty lines, because the model had ended the poem."""
    model = stub(logits(line_break=1e9))
    assert write(model, VOCAB, "春", 3, use_cache=use_cache) == ["春\n"] * 3
    (poem,) = acrostic(model, VOCAB, "春眠不觉", 5, use_cache=use_cache)
    assert shape(5, 4).fullmatch(poem)
    assert poem[::6] == "春眠不觉\n"
    assert all(map(shape(5, 4).fullmatch, write(model, VOCAB, n=3, template=form(5, 4), use_cache=use_cache)))


GOOD = "春眠不觉学无止，云水花明月光雪。春眠不觉学无止，云水花明月光雪。"


@pytest.mark.parametrize(
    ("poem", "right"),
    [
        (GOOD, True),
        (GOOD.translate({ord("，"): "。"}), True),
        (GOOD[:-1] + "，", False),
        (GOOD[:-1], False),
        (GOOD + "春", False),
        (GOOD[:7] + "春" + GOOD[8:], False),
        (GOOD[:3] + "，" + GOOD[4:], False),
        (GOOD[:3] + "\n" + GOOD[4:], False),
        ("，" + GOOD[1:], False),
        ("", False),
    ],
)
def test_has_marks(poem, right):
    """Exercise 2's measure passed a poem with a mark too many, too few or at another place, or failed a right one."""
    assert generate.has_marks(poem) is right


@pytest.mark.parametrize("template", [None, form(5, 4), form(7, 3, "春眠不")])
def test_cache_does_not_change_a_poem(poet, template):
    """The same seed wrote another poem without the cache, past the window of 16 too."""
    for seed in range(4):
        both = [
            write(poet, VOCAB, n=3, template=template, temperature=1.0, use_cache=use_cache, generator=seeded(seed))
            for use_cache in (True, False)
        ]
        assert both[0] == both[1]


# ---------------------------------------------------------------------------------------------------
# The demos


def printed(capsys):
    return capsys.readouterr().out.splitlines()


POEM = f"    [{VOCAB.chars[1:]}]*(……)?"


def test_demo_1(poet, capsys, monkeypatch, tmp_path):
    """Demo 1 in the lesson's heading and layout, with the corpus counted when it is there and unmentioned when not."""
    monkeypatch.setattr(generate, "CORPUS", tmp_path / "tang.txt")
    generate.demo_next(poet, VOCAB)
    heading, *lines = without_corpus = printed(capsys)
    assert heading == "== 1. 读完一段文字，模型给下一个字的概率（前 8 名）"
    for line, text in zip(lines, ("白日依山尽，黄河入海", "床前明月光，疑是地上", "春风"), strict=True):
        probs = poet(VOCAB.encode(text))[0][0, -1].softmax(dim=-1).tolist()
        best = sorted(range(len(VOCAB)), key=probs.__getitem__, reverse=True)[:8]
        shown = "  ".join(f"{VOCAB.chars[i]} {100 * probs[i]:.1f}%".replace("\n", "↵") for i in best)
        assert line == f"  「{text}」→ {shown}"
    generate.CORPUS.write_bytes("春风。春风吹，春\n风，春风。\n春风\n".encode())
    generate.demo_next(poet, VOCAB)
    *same, last = printed(capsys)
    assert same == without_corpus
    expected = f"{100 * probs[STOP]:.1f}%"
    assert last == f"  语料里「春风」出现 4 次，其中 2 次后面紧跟「。」：50.0%；模型给的概率：{expected}"


def test_demo_2(poet, capsys, monkeypatch):
    """Demo 2 with its three temperatures of three poems, all from the same seed."""
    generate.demo_temperature(poet, VOCAB)
    lines = printed(capsys)
    assert lines[0].startswith("== 2. ")
    assert [line for line in lines[1:] if "温度" in line] == ["  温度 0.3：", "  温度 1.0：", "  温度 1.5："]
    assert [bool(re.fullmatch(POEM, line)) for line in lines[1:]] == [False, True, True, True] * 3
    monkeypatch.setattr(generate, "TEMPERATURES", (1.0, 1.0))
    generate.demo_temperature(poet, VOCAB)
    again = printed(capsys)
    assert again[2:5] == again[6:9] == lines[6:9]


def test_demo_3(poet, capsys, monkeypatch):
    """Demo 3 in the lesson's heading; its top-k is the one it names."""
    generate.demo_top_k(poet, VOCAB)
    heading, *poems = printed(capsys)
    assert heading == "== 3. 温度 1.5，但只从概率最高的 20 个字里选（top-k=20）"
    assert len(poems) == len(set(poems)) == 3
    assert all(re.fullmatch(POEM, poem) for poem in poems)
    monkeypatch.setattr(generate, "TOP_K", 1)
    generate.demo_top_k(poet, VOCAB)
    heading, *poems = printed(capsys)
    assert heading == "== 3. 温度 1.5，但只从概率最高的 1 个字里选（top-k=1）"
    assert len(set(poems)) == 1


def test_demo_4(poet, stub, capsys):
    """Demo 4 in the lesson's heading; the openings are carried on, …… stands where one was cut and nowhere else."""
    generate.demo_continue(poet, VOCAB)
    heading, *poems = printed(capsys)
    assert heading == "== 4. 给出开头，让它续写"
    openings = ("床前明月光，", "大漠孤烟直，", "人工智能好，")
    assert all(poem.startswith("    " + opening) for poem, opening in zip(poems, openings, strict=True))
    assert all(re.fullmatch(POEM, poem) for poem in poems)
    generate.demo_continue(stub(logits(line_break=1e9)), VOCAB)
    assert printed(capsys)[1:] == ["    " + opening for opening in openings]
    generate.demo_continue(stub(logits(line_break=-1e9, 春=1e9)), VOCAB)
    assert printed(capsys)[1:] == ["    " + opening + "春" * 100 + "……" for opening in openings]


def test_demo_5(poet, capsys):
    """Demo 5 in the lesson's heading, the two acrostics with their characters a line."""
    generate.demo_acrostic(poet, VOCAB)
    heading, first, second = printed(capsys)
    assert heading == "== 5. 藏头诗：每句开头的字由我们指定，其余由模型写"
    assert shape(7, 4).fullmatch(first[4:] + "\n")
    assert shape(5, 4).fullmatch(second[4:] + "\n")
    assert (first[:4], second[:4]) == (" " * 4, " " * 4)
    assert (first[4::8], second[4::6]) == ("春眠不觉", "学无止境")


LESSON_6 = """\
== 6. KV 缓存：结果一样吗？快了多少？
  同样的随机种子，写 120 个字：用缓存和不用缓存的结果完全一样
  写  32 个字：不用缓存     23 毫秒，用缓存    12 毫秒，快了 1.8 倍
  写  64 个字：不用缓存     52 毫秒，用缓存    26 毫秒，快了 2.0 倍
  写 120 个字：不用缓存    130 毫秒，用缓存    49 毫秒，快了 2.6 倍
  这个模型每个词元的缓存：2 × 4 层 × 128 维 × 4 字节 = 4 KB，128 个词元共 512 KB
"""


def test_demo_6(capsys, monkeypatch):
    """Demo 6 word for word the lesson's, given its times; it says so when the cache is the slower one."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(len(VOCAB))).eval()  # of the lesson's sizes
    times = {32: (0.0226, 0.0124), 64: (0.052, 0.026), 120: (0.1296, 0.0494)}
    monkeypatch.setattr(generate, "medians", lambda model, start, n: times[n])
    generate.demo_cache(model, VOCAB)
    assert capsys.readouterr().out == LESSON_6
    times[32] = (0.010, 0.025)
    generate.demo_cache(model, VOCAB)
    assert printed(capsys)[2] == "  写  32 个字：不用缓存     10 毫秒，用缓存    25 毫秒，反而慢了 2.5 倍"


def break_the_cache(monkeypatch, position, factor):
    """From now on caches hold wrong keys and values after that position."""
    append = gpt.KVCache.append

    def wrong(self, kv, start):
        return append(self, kv * factor if start > position else kv, start)

    monkeypatch.setattr(gpt.KVCache, "append", wrong)


def test_demo_6_is_honest(poet, tiny, capsys, monkeypatch):
    """Demo 6 says 完全一样 of 20 seeds, and names the first character that differs when the cache is broken."""
    start = torch.tensor([[BREAK]])
    assert [compare(poet, start, 120, seed) for seed in range(20)] == [None] * 20
    whole = tiny(vocab_size=len(VOCAB), block_size=128)
    break_the_cache(monkeypatch, position=40, factor=9)
    with_cache, without = (whole.generate(start, 120, use_cache=c, generator=seeded())[0] for c in (True, False))
    first = next(i for i in range(121) if with_cache[i] != without[i])  # the start is number 0
    assert 41 < first < 121
    assert compare(whole, start, 120) == first
    monkeypatch.setattr(generate, "medians", lambda model, start, n: (0.02, 0.01))
    generate.demo_cache(whole, VOCAB)
    verdict = f"不一样：第 {first} 个字不同"
    assert printed(capsys)[1] == "  同样的随机种子，写 120 个字：用缓存和不用缓存的结果" + verdict


@pytest.mark.parametrize("slow", [True, False])
def test_medians(monkeypatch, slow):
    """Cold first runs counted, one path run before the other, or the two swapped."""
    calls = []

    def timed(model, start, n, use_cache):
        calls.append(use_cache)
        return 100 if len(calls) <= 2 else len(calls) * (1 if use_cache is slow else 1000)

    monkeypatch.setattr(generate, "timed", timed)
    without, cached = generate.medians(None, None, 9, runs=3)
    assert calls == [False, True] * 4
    assert (without, cached) == ((5000, 6) if slow else (5, 6000))


def test_timed_runs_the_path_it_is_asked_for(poet, monkeypatch):
    """The path without the cache was timed with it."""
    asked = []
    monkeypatch.setattr(poet, "generate", lambda start, n, use_cache, generator: asked.append((n, use_cache)))
    assert all(generate.timed(poet, torch.tensor([[BREAK]]), 9, use_cache) > 0 for use_cache in (True, False))
    assert asked == [(9, True), (9, False)]


def test_cache_bytes():
    """The lesson's figures: 4 KB a character, 512 KB for 128 of them."""
    config = GPTConfig(6289)
    assert generate.cache_bytes(config, 1) == 4 * 1024
    assert generate.cache_bytes(config, 128) == 512 * 1024
    cache = gpt.KVCache(config, 1, 128)
    assert generate.cache_bytes(config, 128) == config.n_layer * cache.kv.numel() * cache.kv.element_size()


# ---------------------------------------------------------------------------------------------------
# Looking inside a run

KNOBS = [
    {},
    {"temperature": 0},
    {"temperature": 1.5},
    {"temperature": 0.5, "top_k": 4},
    {"top_p": 0.6},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.9},
    {"temperature": 0, "top_k": 3, "top_p": 0.5},
]


@pytest.mark.parametrize("knobs", KNOBS)
@pytest.mark.parametrize("constrained", [True, False])
def test_replay_is_what_generate_saw(tiny, monkeypatch, knobs, constrained):
    """The trace shows other logits or candidates than the choice was made from, past the window of 8."""
    model, sample = tiny(vocab_size=len(VOCAB)), gpt.sample
    for length in (1, 8, 9, 30):
        start, seen = torch.randint(3, len(VOCAB), (1, length), generator=seeded(length)), []
        rule = generate.follow(form(7, 5, "春眠不觉学"), VOCAB, length) if constrained else None

        def spy(logits, seen=seen, **given):
            seen.append(logits)
            return sample(logits, **given)

        monkeypatch.setattr(gpt, "sample", spy)
        ids = model.generate(start, 40, constraint=rule, generator=seeded(3), **knobs)
        steps = list(generate.replay(model, ids, length, constraint=rule, **knobs))
        assert len(steps) == len(seen) == 40
        noise = seeded(3)
        for t, (its, (logits, warm, by_k, by_p)) in enumerate(zip(seen, steps, strict=True), length):
            torch.testing.assert_close(logits, its, rtol=0, atol=1e-4)
            for probs in (warm, by_k, by_p):
                assert probs.sum().item() == pytest.approx(1, abs=1e-5)
                assert probs[0, ids[0, t]] > 0
            assert set(by_p.nonzero()[:, 1].tolist()) <= set(by_k.nonzero()[:, 1].tolist())
            assert set(by_k.nonzero()[:, 1].tolist()) <= set(warm.nonzero()[:, 1].tolist())
            assert (by_k > 0).sum() <= knobs.get("top_k", len(VOCAB))
            if knobs.get("temperature") != 0:  # the same noise on these probabilities makes the same choice
                u = torch.rand(1, sum(gpt.heats(len(VOCAB))), generator=noise)
                assert gpt.race(by_p, u) == ids[0, t]


def columns(text):
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def poems(model, capsys, *flags):
    """(stdout, stderr) of the poet with these flags."""
    capsys.readouterr()
    generate.poems(model, VOCAB, generate.parse_args([str(flag) for flag in flags]))
    return capsys.readouterr()


FLAGS = [
    ["--prompt", "春风", "--seed", 1],
    ["--prompt", "春风", "--seed", 4, "--temperature", 1.5, "--top-k", 20, "--top-p", 0.9],
    ["--prompt", "春" * 20, "--seed", 1, "--max-chars", 9],
    ["--prompt", "春风", "--seed", 1, "--temperature", 0, "--max-chars", 30],
    ["--prompt", "春风", "--form", "五绝", "--seed", 1, "--top-p", 0.5],
    ["--acrostic", "学无止境", "--seed", 1, "--top-k", 3],
]


@pytest.mark.parametrize("flags", FLAGS)
def test_trace(poet, capsys, flags):
    """--trace changed the poem; its lines miss a character, pass 80 columns, or show wrong shares or ranks."""
    out, err = poems(poet, capsys, *flags, "--trace")
    assert out == poems(poet, capsys, *flags).out
    prompt = flags[1] if flags[0] == "--prompt" else ""
    lines = err.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.lstrip().startswith("#"))
    assert max(columns(line) for line in lines[begin:]) <= 80
    rows = lines[begin + 1 :]
    cut = "had not ended" in err or "--form" in flags or "--acrostic" in flags
    written = (out.removesuffix("\n") if cut else out).removeprefix(prompt)
    assert len(written) > 3
    assert [row.split()[1] for row in rows] == [char.replace("\n", "↵") for char in written]
    for i, row in enumerate(rows):
        drawn, p, rank, rest = re.fullmatch(r" *\d+ (.) +([\d.]+) +(\d+) +(.*)", row).groups()
        left = {char: float(share) for char, share in re.findall(r"(\S) *(\d+\.\d)(?= |$)", rest)}
        assert 1 <= len(left) <= 5
        assert list(left.values()) == sorted(left.values(), reverse=True)
        assert sum(left.values()) <= 100.3
        assert left.get(drawn, float(p)) == float(p)
        assert float(p) <= max(left.values())
        text = "\n" + prompt + written[:i]
        if len(text) <= 16:  # before the window moves
            own = poet(VOCAB.encode(text))[0][0, -1]
            assert int(rank) == (own > own[VOCAB.ids[drawn.replace("↵", "\n")]]).sum() + 1


def test_trace_says_what_was_cut(stub, capsys):
    """The trace's shares of what top-k and top-p cut away, by hand: 8, 4, 2 and 2 sixteenths."""
    probs = torch.full((len(VOCAB),), 1e-30)
    for char, share in zip("春风云雪", (8, 4, 2, 2), strict=True):
        probs[VOCAB.ids[char]] = share / 16
    flags = ["--prompt", "春", "--seed", 1, "--max-chars", 6, "--temperature", 1, "--trace"]
    rows = poems(stub(probs.log()), capsys, *flags, "--top-k", 2, "--top-p", 0.5).err.splitlines()[-6:]
    for row in rows:  # top-k leaves 春 and 风 with 2 and 1 thirds, and of these top-p 春 alone
        assert re.fullmatch(rf" *\d+ 春 +100\.0 +1 +春 *100\.0 +{len(VOCAB) - 2} +25% +1 +33%", row)
    rows = poems(stub(probs.log()), capsys, *flags, "--top-p", 0.75).err.splitlines()[-6:]
    for row in rows:
        assert re.fullmatch(
            rf" *\d+ (春 +66\.7 +1|风 +33\.3 +2) +春 *66\.7 风 *33\.3 +- +- +{len(VOCAB) - 2} +25%", row
        )


def test_trace_of_a_tie_at_temperature_0(stub, capsys):
    """Of equal logits the likeliest that was drawn was another than the one that was left."""
    flags = ["--form", "五绝", "--seed", 1, "--temperature", 0, "--trace"]
    for row in poems(stub(logits()), capsys, *flags).err.splitlines()[-24:]:
        _, drawn, p, _, left, *_ = row.split()
        assert (p, left[0]) == ("100.0", drawn)


def test_the_same_seed_is_the_same_poem(poet, capsys):
    """A poem depended on the commands before it, or on a global generator."""
    flags = ["--prompt", "春风", "-n", 3, "--temperature", 1, "--seed", 5]
    torch.manual_seed(1)
    alone = poems(poet, capsys, *flags).out
    for others in FLAGS:
        poems(poet, capsys, *others, "--trace")
    generate.print_next(poet, VOCAB, "春", 20)
    generate.demo_temperature(poet, VOCAB)
    torch.manual_seed(2)
    assert poems(poet, capsys, *flags).out == alone
    assert poems(poet, capsys, *flags[:-1], 6).out != alone


def test_next_is_demo_1_for_any_text(poet, capsys):
    """--next shows other characters, shares or bars than the model gives, also past the window."""
    for text in ("春风", "", "云水花" * 9):
        generate.print_next(poet, VOCAB, text, 7)
        probs = poet(VOCAB.encode(text or "\n")[:, -16:])[0][0, -1].softmax(dim=-1)
        best = probs.topk(7)
        for i, line in enumerate(printed(capsys)):
            number, char, share, *bar = line.split()
            p = best.values[i].item()
            assert (int(number), char) == (i + 1, VOCAB.chars[best.indices[i]].replace("\n", "↵"))
            assert share == f"{100 * p:.1f}%"
            assert bar == ["█" * round(40 * p / best.values[0].item())]
            assert columns(line) <= 80
    generate.print_next(poet, VOCAB, "春", 10**6)
    assert len(printed(capsys)) == len(VOCAB)


# ---------------------------------------------------------------------------------------------------
# The exercises


def ranked(rule):
    """A rule for exercise 1 from one on the sorted probabilities and the mass before each, likeliest first."""

    def keep(probs, p):
        values, ids = probs.sort(descending=True)
        return torch.zeros(len(probs), dtype=torch.bool).scatter(0, ids, rule(values, values.cumsum(0) - values, p))

    return keep


RIGHT = {
    "mine": ranked(lambda values, before, p: before < p),
    "the usual one": ranked(lambda values, before, p: ~torch.cat([torch.tensor([False]), (before + values > p)[:-1]])),
    "the program's": generate.my_top_p,
}
WRONG = {
    "drops the one that reaches p": ranked(lambda values, before, p: before + values <= p),
    "never less than one, else the same": ranked(lambda values, before, p: (before + values <= p) | (before == 0)),
    "all": lambda probs, p: torch.ones(len(probs), dtype=torch.bool),
    "none": lambda probs, p: torch.zeros(len(probs), dtype=torch.bool),
    "the likeliest alone": ranked(lambda values, before, p: before == 0),
    "one more": ranked(lambda values, before, p: before - values < p),
    "the unlikeliest": lambda probs, p: RIGHT["mine"](1 - probs, p * (len(probs) - 1)),
    "the second when it is enough": ranked(
        lambda values, before, p: torch.arange(len(values)) == 1 if values[1] >= p else before < p
    ),
    "all that tie": ranked(lambda values, before, p: values >= values[before < p].min()),
    "top-k": ranked(lambda values, before, p: torch.arange(len(values)) < 20),
    "a floor": lambda probs, p: probs > (1 - p) / 10,
    "in the order of the ids": lambda probs, p: probs.cumsum(0) - probs < p,
    "whatever p": lambda probs, p: RIGHT["mine"](probs, 0.9),
}


@pytest.mark.parametrize("name", [*RIGHT, *WRONG])
def test_exercise_1_tells_right_from_wrong(poet, capsys, monkeypatch, name):
    """A wrong top-p passed for right, or a right one written another way for wrong."""
    monkeypatch.setattr(generate, "my_top_p", {**RIGHT, **WRONG}[name])
    assert generate.check_exercise(1, poet, VOCAB) is (name in RIGHT)
    verdict = printed(capsys)[-1]
    assert verdict.startswith("  exercise 1: right" if name in RIGHT else "  exercise 1: wrong: for p = ")


def test_exercise_1_writes_with_the_learners_own_function(poet, monkeypatch):
    """The poems of exercise 1 came from the shipped top-p, whatever the learner had written."""
    monkeypatch.setattr(generate, "MAX_CHARS", 12)
    only = VOCAB.ids["春"]
    made, _ = generate.write_keeping(poet, VOCAB, lambda probs, p: torch.arange(len(probs)) == only, 0.9)
    assert made == ["春" * 12] * generate.EX1_POEMS


@pytest.mark.parametrize("answer", [None, [0], torch.ones(3), torch.ones(1, 3, dtype=torch.bool)])
def test_exercise_1_names_an_answer_of_another_kind(answer):
    """A my_top_p that returned nothing, ids, floats or (1, V) ended in a traceback."""
    said = generate.check_top_p(lambda probs, p: answer, [(torch.tensor([0.5, 0.3, 0.2]), 0.9)])
    assert said == "for probabilities of shape (3,) it must return a bool tensor of that shape"


def test_exercise_2_refuses_places_beyond_the_poem(poet, monkeypatch, capsys):
    """A mark at place 33 of a poem of 32 characters was called right."""
    monkeypatch.setattr(generate, "EX2_POEMS", 2)
    monkeypatch.setattr(generate, "EX2_MARKS", generate.EX2_MARKS | {33: "。"})
    assert not generate.check_exercise(2, poet, VOCAB)
    assert "beyond the 32 characters" in capsys.readouterr().out


def test_exercise_1_counts_what_each_step_kept(poet, monkeypatch):
    """The counts took in the padding of poems that had ended, or another step's candidates."""
    monkeypatch.setattr(generate, "MAX_CHARS", 15)
    for keep, value in ((generate.keep_top_k, 20), (RIGHT["mine"], 0.9)):
        made, counts = generate.write_keeping(poet, VOCAB, keep, value)
        kept = []
        for text in made:
            ids = VOCAB.encode("\n" + text)
            for t in range(1, ids.size(1)):
                kept.append(keep((poet(ids[:, :t])[0][0, -1] / generate.HOT).softmax(dim=-1), value).sum().item())
        assert sorted(kept) == sorted(counts)


@pytest.mark.parametrize(
    ("marks", "right"),
    [
        (generate.EX2_MARKS, True),
        ({8: "，", 16: "。", 24: "，", 32: "。"}, True),
        ({}, False),
        ({8: "，。", 16: "，。", 24: "，。"}, False),
        ({8: "，。", 16: "，。", 24: "，。", 32: "，。"}, False),
        ({7: "，。", 16: "，。", 24: "，。", 32: "。"}, False),
        ({8: "，。", 12: "，。", 16: "，。", 24: "，。", 32: "。"}, False),
        ({6: "，。", 12: "，。", 18: "，。", 24: "。"}, False),
        ({8: "，。\n", 16: "，。", 24: "，。", 32: "。"}, False),
    ],
)
def test_exercise_2_tells_right_from_wrong(poet, capsys, monkeypatch, marks, right):
    """Exercise 2 called wrong marks right: it was measured with the learner's own."""
    monkeypatch.setattr(generate, "EX2_MARKS", marks)
    monkeypatch.setattr(generate, "EX2_POEMS", 50)
    assert generate.check_exercise(2, poet, VOCAB) is right
    lines = printed(capsys)
    assert lines[-1].startswith("  exercise 2: right" if right else "  exercise 2: wrong: ")
    shares = [int(re.search(r"50 首里 (\d+)% 合格", line)[1]) for line in lines if "合格" in line]
    assert shares[0] < 5
    assert (shares[1] == 100) is right


@pytest.mark.parametrize("length", [24, 31, 33])
def test_exercise_2_wants_the_length(poet, monkeypatch, length):
    """Exercise 2 called a poem of another length right."""
    monkeypatch.setattr(generate, "EX2_LENGTH", length)
    monkeypatch.setattr(generate, "EX2_POEMS", 20)
    assert not generate.check_exercise(2, poet, VOCAB)


@pytest.mark.parametrize(
    ("block_size", "chars", "said"),
    [
        (512, (100, 200, 300, 400, 500), "right"),
        (500, (500,), "right"),
        (128, (100, 500), "wrong: a block_size of 128 does not hold 500 characters"),
        (499, (500,), "wrong: a block_size of 499 does not hold 500 characters"),
        (512, (20, 100), "wrong: the lesson asks for 500 characters, here are 100"),
    ],
)
def test_exercise_3_tells_right_from_wrong(poet, capsys, monkeypatch, block_size, chars, said):
    """Exercise 3 called a window that does not hold the 500 characters right, or one that does wrong."""
    monkeypatch.setattr(generate, "EX3_BLOCK_SIZE", block_size)
    monkeypatch.setattr(generate, "EX3_CHARS", chars)
    monkeypatch.setattr(generate, "medians", lambda model, start, n, runs: (n / 1000 * n / 100, n / 1000))
    assert generate.check_exercise(3, poet, VOCAB) is (said == "right")
    heading, *lines, verdict = printed(capsys)
    assert f"block_size={block_size}" in heading
    assert verdict.startswith(f"  exercise 3: {said}")
    n = max(chars)  # of 2 layers and 16 dimensions
    assert f"  写 {n:>4} 个字，缓存 {2 * 2 * 16 * 4 * n / 1024:,.0f} KB，快了 {n / 100:.1f} 倍" in lines
    bars = [line.count("█") for line in lines[1::3]]
    assert bars == [round(40 * (n / max(chars)) ** 2) for n in chars]


def test_exercise_3_compares(poet, capsys, monkeypatch):
    """Exercise 3 called a cache that changes the characters right."""
    monkeypatch.setattr(generate, "medians", lambda model, start, n, runs: (2, 1))
    break_the_cache(monkeypatch, position=300, factor=1e5)
    assert not generate.check_exercise(3, poet, VOCAB)
    number = re.search(r"wrong: with and without the cache character (\d+) differs", printed(capsys)[-1])[1]
    assert int(number) > 301


# ---------------------------------------------------------------------------------------------------
# Prompts


@pytest.mark.parametrize(
    ("text", "cleaned", "notice"),
    [
        ("春风", "春风", ""),
        ("春,风.", "春，风。", ", → ，  . → 。"),
        ("春、风；云：水!", "春，风，云，水。", "、 → ，  ； → ，  ： → ，  ! → 。"),
        ("春?风！云:水;花？", "春。风。云，水，花。", "? → 。  ！ → 。  : → ，  ; → ，  ？ → 。"),
        ("春…风．云｡水﹐花､", "春。风。云。水，花，", "… → 。  ． → 。  ｡ → 。  ﹐ → ，  ､ → ，"),
        (" 春 风\t云\u3000", "春风云", "space → nothing  space → nothing"),
        ("春,,春,", "春，，春，", ", → ，"),
    ],
)
def test_marks_and_spaces(text, cleaned, notice, capsys):
    """A half-width comma was a KeyError; marks and spaces are mapped, each kind is said once, on stderr."""
    assert generate.clean(text, VOCAB, "--prompt", 16) == cleaned
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (f"--prompt: {notice}\n" if notice else "")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("春A风A", ["A U+0041"]),
        ("😀春😀龘a", ["😀 U+1F600", "龘 U+9F98", "a U+0061"]),
        ("～（春）", ["～ U+FF5E", "（ U+FF08", "） U+FF09"]),
        ("春\x1b[0m", ["U+001B", "[ U+005B", "0 U+0030", "m U+006D"]),
        ("\ufeff春\u200b", ["U+FEFF", "U+200B"]),
        ("春,龘", ["龘 U+9F98"]),
    ],
)
def test_unknown_characters_are_all_listed(text, named):
    """An unknown character crashed, or only the first was named; all are, once, with code points, status 2."""
    with pytest.raises(Stop) as stop:
        generate.clean(text, VOCAB, "--acrostic", 16)
    message = f"--acrostic: not in the vocabulary of {len(VOCAB)} characters: "
    assert (str(stop.value), stop.value.status) == (message + "  ".join(named), 2)


@pytest.mark.parametrize("text", ["", " ", "\n", "\u3000", " \t\n\u3000\u2028"])
def test_empty_prompts(text, poet, capsys):
    """An empty prompt crashed; it starts a poem as none does."""
    assert generate.clean(text, VOCAB, "--prompt", 16) == ""
    flags = ["--form", "五绝", "--seed", 1]
    assert poems(poet, capsys, *flags, "--prompt", text) == poems(poet, capsys, *flags)


@pytest.mark.parametrize("heads", ["", " ", "\n", "\u3000", "春，", "。"])
def test_heads_that_are_none(heads, poet):
    """An acrostic without heads, or with marks for heads."""
    with pytest.raises(Stop, match="give the characters that begin the lines") as stop:
        generate.poems(poet, VOCAB, generate.parse_args(["--acrostic", heads]))
    assert stop.value.status == 2


def test_traditional_characters(capsys):
    """Traditional characters were unknown; they are converted, but not those the vocabulary has."""
    pytest.importorskip("opencc")
    assert generate.clean("風雲乾", VOCAB, "--prompt", 16) == "风云乾"
    assert capsys.readouterr().err == "--prompt: 風 → 风  雲 → 云\n"
    with pytest.raises(Stop, match="characters: 龍 U\\+9F8D$"):  # 龙, which is not in the vocabulary either
        generate.clean("風龍", VOCAB, "--prompt", 16)


def test_no_opencc(capsys, monkeypatch):
    """Without opencc nothing ran; simplified text needs none, traditional is refused, never taken as it is."""
    monkeypatch.setitem(sys.modules, "opencc", None)
    assert generate.clean("春风, 云", VOCAB, "--prompt", 16) == "春风，云"
    with pytest.raises(Stop, match="characters: 風 U\\+98A8  雲 U\\+96F2 .*when opencc is installed") as stop:
        generate.clean("春風,雲", VOCAB, "--prompt", 16)
    assert stop.value.status == 2


def test_import_runs_nothing():
    """Importing generate.py ran it, or loaded torch; --help need not wait for that."""
    code = """
import sys
sys.modules.update(dict.fromkeys(("torch", "numpy", "gpt", "opencc")))  # None: an import of it raises
import generate
try:
    generate.parse_args(["--help"])
except SystemExit as end:
    print("status", end.code)
"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(generate.__file__).parent,
        env=os.environ | {"PYTHONUTF8": "1"},
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=False,
    )
    assert result.stderr == ""
    assert result.stdout.startswith("usage: ")
    assert result.stdout.endswith("status 0\n")
