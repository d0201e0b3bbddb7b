"""generate.py as a module: rules on the text, the six demos, the look inside, the exercises, prompts."""

import random
import re
import unicodedata

import pytest
import torch
from conftest import seeded

import generate
import gpt
from data.poems import FORMS
from data.verse import Place, poem_template
from generate import acrostic, first_difference, template_constraint, write
from gpt import GPT, GPTConfig, UserError, Vocabulary

VOCAB = Vocabulary("\n，。白日依山尽黄河入海床前明月光疑是地上春风大漠孤烟直人工智能好眠不觉学无止境乾干云水花雪")
LETTERS = VOCAB.chars[3:]
SEED = generate.SEED
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
    """A pattern of a whole poem, written without poem_template."""
    lines = [f"[{LETTERS}]{{{n_char}}}{'。' if i % 2 else '，'}" for i in range(n_lines)]
    return re.compile("".join(lines))


def write_form(model, form, prompt="", n=1, **knobs):
    """The texts of n poems of a form's shape, (characters a line, lines)."""
    template = poem_template(*form)
    poems = write(model, VOCAB, prompt, n, rule=template_constraint([template], VOCAB), length=len(template), **knobs)
    assert all(ended for _, ended in poems)
    return [text for text, _ in poems]


# ---------------------------------------------------------------------------------------------------
# Rules on the text


def test_poem_template():
    """A form of the wrong lines, marks or places of the heads."""
    any_ = Place.ANY
    assert poem_template(2, 3) == [any_, any_, "，", any_, any_, "。", any_, any_, "。"]
    assert poem_template(2, 2, "春风") == ["春", any_, "，", "风", any_, "。"]
    assert poem_template(1, 2, "春风") == ["春", "，", "风", "。"]
    assert poem_template(1, 1, "春") == ["春", "。"]  # a poem does not end in a comma
    assert FORMS == {"五绝": (5, 4), "七绝": (7, 4), "五律": (5, 8), "七律": (7, 8)}
    assert {name: len(poem_template(*FORMS[name])) for name in FORMS} == {
        "五绝": 24,
        "七绝": 32,
        "五律": 48,
        "七律": 64,
    }


def test_a_constraint_allows_what_the_template_says():
    """A place that lets a mark or the line break through, or that counts from the wrong start."""
    rule = template_constraint([[Place.ANY, "，。", "春"]], VOCAB)
    allowed = [{VOCAB.chars[i] for i in rule(torch.zeros(2, n)).nonzero()[:, 0]} for n in (1, 2, 3)]
    assert allowed == [set(LETTERS), {"，", "。"}, {"春"}]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 50.0])
@pytest.mark.parametrize("name", FORMS)
def test_forms_have_their_shape(poet, name, temperature):
    """A mark or a line break inside a line, at a high temperature too, or a poem that does not end."""
    poems = write_form(poet, FORMS[name], n=50, temperature=temperature, generator=seeded())
    assert len(set(poems)) == 50
    assert all(shape(*FORMS[name]).fullmatch(poem) for poem in poems)


@pytest.mark.parametrize("prompt", ["", "春", "春眠不觉学", "春眠不觉学，", "春眠不觉学，云水花明月。雪", "whole"])
def test_prompt_begins_a_form(poet, prompt):
    """A prompt that is counted twice, dropped, or shifts the marks."""
    prompt = "春眠不觉学，云水花明月。春眠不觉学，云水花明月。" if prompt == "whole" else prompt
    generate.check_fits(poem_template(5, 4), prompt, "五绝")
    for poem in write_form(poet, (5, 4), prompt, 9, temperature=1.0, generator=seeded()):
        assert poem.startswith(prompt)
        assert shape(5, 4).fullmatch(poem)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("春，", "its character 2 is ，, there stands a character that is no mark"),
        ("春眠不觉学云", "its character 6 is 云, there stands 「，」"),
        ("春眠不觉学。", "its character 6 is 。, there stands 「，」"),
        ("春眠不觉学，云水花明月，", "its character 12 is ，, there stands 「。」"),
        ("春" * 25, "25 characters, 五绝 has 24"),
    ],
)
def test_prompt_that_cannot_fit(prompt, said):
    """A prompt that a form cannot begin with was bent or cut; it is refused with the reason, status 2."""
    with pytest.raises(UserError, match=re.escape(said)) as stop:
        generate.check_fits(poem_template(5, 4), prompt, "五绝")
    assert stop.value.status == 2


@pytest.mark.parametrize("n_char", [1, 2, 5, 7, 12])
def test_acrostics(poet, stub, n_char):
    """Heads lost, lines of another length, marks out of turn; with random heads, and a model that avoids them."""
    chance = random.Random(n_char)
    for trial in range(6):
        heads = "".join(chance.choices(LETTERS, k=chance.randint(1, 9)))
        model = stub(logits(**dict.fromkeys(heads, -1e9))) if trial == 0 else poet
        temperature = 50.0 if trial == 1 else 1.0
        [(poem, _)] = acrostic(model, VOCAB, heads, n_char, temperature, generator=seeded(trial))
        lines = re.findall(r"([^，。\n]*)([，。])", poem)
        assert "".join(line + mark for line, mark in lines) == poem
        assert "".join(line[:1] for line, _ in lines) == heads
        assert [len(line) for line, _ in lines] == [n_char] * len(heads)
        assert "".join(mark for _, mark in lines) == ("，。" * 5)[: len(heads) - 1] + "。"


def test_acrostic_as_in_the_lesson(poet):
    """Acrostic(heads) alone is seven characters a line at temperature 0.8."""
    short = acrostic(poet, VOCAB, "春眠不觉", generator=seeded())
    assert short == acrostic(poet, VOCAB, "春眠不觉", n_char=7, temperature=0.8, n=1, generator=seeded())
    assert shape(7, 4).fullmatch(short[0][0])
    with pytest.raises(ValueError, match="U\\+9F8D"):
        acrostic(poet, VOCAB, "春龍")


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_model_that_never_ends_a_line(stub, use_cache):
    """Endless loop in wait of an end; a free poem is cut, a form and an acrostic have all their lines."""
    model = stub(logits(line_break=-1e9, comma=-1e9, full_stop=-1e9))
    free = write(model, VOCAB, "春", 3, length=30, use_cache=use_cache, generator=seeded())
    assert [(len(text), ended) for text, ended in free] == [(31, False)] * 3
    [(poem, _)] = acrostic(model, VOCAB, "春眠不觉", 5, use_cache=use_cache)
    assert shape(5, 4).fullmatch(poem)
    assert all(map(shape(7, 8).fullmatch, write_form(model, (7, 8), n=3, use_cache=use_cache)))


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_model_that_ends_at_once(stub, use_cache):
    """An acrostic of one line, or of empty lines, because the model had ended the poem."""
    model = stub(logits(line_break=1e9))
    assert write(model, VOCAB, "春", 3, use_cache=use_cache) == [("春", True)] * 3
    [(poem, _)] = acrostic(model, VOCAB, "春眠不觉", 5, use_cache=use_cache)
    assert shape(5, 4).fullmatch(poem)
    assert poem[::6] == "春眠不觉"
    assert all(map(shape(5, 4).fullmatch, write_form(model, (5, 4), n=3, use_cache=use_cache)))


GOOD = "春眠不觉学无止，云水花明月光雪。春眠不觉学无止，云水花明月光雪。"


@pytest.mark.parametrize(
    ("poem", "problem"),
    [
        (GOOD, None),
        (GOOD.translate({ord("，"): "。"}), None),
        (GOOD[:-1] + "，", "at place 32 stands ，, there must be 「。」"),
        (GOOD[:-1], "has 31 characters, it must have 32"),
        (GOOD + "春", "has 33 characters"),
        (GOOD[:7] + "春" + GOOD[8:], "at place 8 stands 春, there must be 「，。」"),
        (GOOD[:3] + "，" + GOOD[4:], "at place 4 stands ，, there must be a character that is no mark"),
        ("，" + GOOD[1:], "at place 1 stands ，"),
        ("", "has 0 characters"),
    ],
)
def test_the_rule_of_exercise_2(poem, problem):
    """Exercise 2 passed a poem with a mark too many, too few or at another place, or failed a right one."""
    found = generate.misplaced(poem)
    assert found is problem if problem is None else problem in found


@pytest.mark.slow
@pytest.mark.parametrize("template", [None, poem_template(5, 4), poem_template(7, 3, "春眠不")])
def test_cache_does_not_change_a_poem(poet, template):
    """The same seed wrote another poem without the cache, past the window of 16 too."""
    options = {"rule": template_constraint([template], VOCAB), "length": len(template)} if template else {}
    for seed in range(4):
        both = [
            write(poet, VOCAB, n=3, temperature=1.0, use_cache=use_cache, generator=seeded(seed), **options)
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
    monkeypatch.setattr(generate, "NEXT_PROMPTS", ("hello", "春风"))
    generate.demo_next(poet, VOCAB)
    assert printed(capsys) == [heading, lines[2], last]
    for prompt, shown in (("hello", 1), (" ", 1), ("风春", 2)):  # nothing to count
        monkeypatch.setattr(generate, "NEXT_PROMPTS", (prompt,))
        generate.demo_next(poet, VOCAB)
        assert len(printed(capsys)) == shown
    expected = f"{100 * probs[STOP]:.1f}%"
    assert last == f"  语料里「春风」出现 4 次，其中 2 次后面紧跟「。」：50.0%；模型给的概率：{expected}"


def lines_of(poems):
    return ["    " + text + ("" if ended else "……") for text, ended in poems]


def test_demo_2(poet, capsys):
    """Demo 2 without its three temperatures of three poems, or not all from the same seed."""
    generate.demo_temperature(poet, VOCAB)
    heading, *lines = printed(capsys)
    assert heading == "== 2. 温度：同样的随机种子，每个温度写 3 首"
    for i, temperature in enumerate((0.3, 1.0, 1.5)):
        expected = lines_of(write(poet, VOCAB, n=3, temperature=temperature, generator=seeded(1)))
        assert lines[4 * i : 4 * i + 4] == [f"  温度 {temperature}：", *expected]
    assert len(lines) == 12


def test_demo_3(poet, capsys):
    """Demo 3 at another temperature or top-k than it names, or from another seed."""
    generate.demo_top_k(poet, VOCAB)
    heading, *lines = printed(capsys)
    assert heading == "== 3. 温度 1.5，但只从概率最高的 20 个字里选（top-k=20）"
    assert lines == lines_of(write(poet, VOCAB, n=3, temperature=1.5, top_k=20, generator=seeded(1)))


def test_demo_4(poet, stub, capsys):
    """Demo 4 in another heading, temperature or order; or …… where no poem was cut."""
    generate.demo_continue(poet, VOCAB)
    heading, *poems = printed(capsys)
    assert heading == "== 4. 给出开头，让它续写"
    openings, generator = ("床前明月光，", "大漠孤烟直，", "人工智能好，"), seeded(1)
    for poem, opening in zip(poems, openings, strict=True):
        assert [poem] == lines_of(write(poet, VOCAB, opening, temperature=0.8, generator=generator))
    generate.demo_continue(stub(logits(line_break=1e9)), VOCAB)
    assert printed(capsys)[1:] == ["    " + opening for opening in openings]
    generate.demo_continue(stub(logits(line_break=-1e9, 春=1e9)), VOCAB)
    assert printed(capsys)[1:] == ["    " + opening + "春" * 100 + "……" for opening in openings]


def test_openings_the_model_does_not_know(poet, capsys, monkeypatch):
    """An opening in traditional characters, or with one that the model does not know, ended the demos."""
    monkeypatch.setattr(generate, "OPENINGS", ("春風", "龘", "云"))
    generate.demo_continue(poet, VOCAB)
    out, err = capsys.readouterr()
    assert [line[:6].strip() for line in out.splitlines()[1:]] == ["春风", "云" + out.splitlines()[2][5]]
    assert "OPENINGS: 風 → 风" in err
    assert "龘 U+9F98" in err
    assert "「龘」 is left out" in err


def test_demo_5(poet, capsys):
    """Demo 5 in the lesson's heading, the two acrostics with their characters a line."""
    generate.demo_acrostic(poet, VOCAB)
    heading, first, second = printed(capsys)
    assert heading == "== 5. 藏头诗：每句开头的字由我们指定，其余由模型写"
    assert shape(7, 4).fullmatch(first[4:])
    assert shape(5, 4).fullmatch(second[4:])
    assert (first[:4], second[:4]) == (" " * 4, " " * 4)
    assert (first[4::8], second[4::6]) == ("春眠不觉", "学无止境")


# The lesson's lines, and two of ours: past the window, and the positions counted.
DEMO_6 = """\
== 6. KV 缓存：结果一样吗？快了多少？
  同样的随机种子，写 120 个字：用缓存和不用缓存的结果完全一样
  同样的随机种子，写 300 个字：用缓存和不用缓存的结果完全一样（窗口 128 个字，已滑动）
  写 120 个字要算的位置：不用缓存 7,260 个，用缓存 120 个
  写  32 个字：不用缓存     23 毫秒，用缓存    12 毫秒，快了 1.8 倍
  写  64 个字：不用缓存     52 毫秒，用缓存    26 毫秒，快了 2.0 倍
  写 120 个字：不用缓存    130 毫秒，用缓存    49 毫秒，快了 2.6 倍
  这个模型每个词元的缓存：2 × 4 层 × 128 维 × 4 字节 = 4 KB，128 个词元共 512 KB
"""


@pytest.mark.slow
def test_demo_6(capsys, monkeypatch):
    """Demo 6 other than in the lesson's words, given its times; or silent when the cache is the slower one."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(len(VOCAB))).eval()  # of the lesson's sizes
    times = {32: (0.0226, 0.0124), 64: (0.052, 0.026), 120: (0.1296, 0.0494)}
    monkeypatch.setattr(generate, "time_both", lambda model, start, n: times[n])
    generate.demo_cache(model, VOCAB)
    assert capsys.readouterr().out == DEMO_6
    times[32] = (0.010, 0.025)
    monkeypatch.setattr(generate, "LONG_CHARS", 1)
    generate.demo_cache(model, VOCAB)
    assert printed(capsys)[4] == "  写  32 个字：不用缓存     10 毫秒，用缓存    25 毫秒，反而慢了 2.5 倍"


def break_the_cache(monkeypatch, position, factor):
    """From now on caches hold wrong keys and values after that position."""
    append = gpt.KVCache.append

    def wrong(self, k, v, start):
        return append(self, k * factor, v * factor, start) if start > position else append(self, k, v, start)

    monkeypatch.setattr(gpt.KVCache, "append", wrong)


@pytest.mark.slow
def test_demo_6_is_honest(poet, tiny, capsys, monkeypatch):
    """Demo 6 says 完全一样 of 20 seeds, and names the first character that differs when the cache is broken."""
    start = torch.tensor([[BREAK]])
    assert [first_difference(poet, start, 120, seed) for seed in range(20)] == [None] * 20
    whole = tiny(vocab_size=len(VOCAB), block_size=128)
    break_the_cache(monkeypatch, position=40, factor=9)
    with_cache, without = (whole.generate(start, 120, use_cache=c, generator=seeded(1))[0] for c in (True, False))
    first = next(i for i in range(121) if with_cache[i] != without[i])  # the start is number 0
    assert 41 < first < 121
    assert first_difference(whole, start, 120) == first
    monkeypatch.setattr(generate, "time_both", lambda model, start, n: (0.02, 0.01))
    generate.demo_cache(whole, VOCAB)
    verdict = f"不一样：第 {first} 个字不同"
    assert printed(capsys)[1] == "  同样的随机种子，写 120 个字：用缓存和不用缓存的结果" + verdict


@pytest.mark.parametrize("slow", [True, False])
def test_time_both(monkeypatch, slow):
    """Cold first runs were counted, one path run before the other, the two swapped, or a mean taken for the median."""
    calls = []

    def timed(model, start, n, use_cache):
        calls.append(use_cache)
        cold_or_odd = len(calls) in (1, 2, 7, 8)
        return 1e6 if cold_or_odd else len(calls) * (1 if use_cache is slow else 1000)

    monkeypatch.setattr(generate, "timed", timed)
    without, cached = generate.time_both(None, None, 9, runs=3)
    assert calls == [False, True] * 4
    assert (without, cached) == ((5000, 6) if slow else (5, 6000))


def test_timed_runs_the_path_it_is_asked_for(poet, monkeypatch):
    """The path without the cache was timed with it."""
    asked = []
    monkeypatch.setattr(poet, "generate", lambda start, n, use_cache, generator: asked.append((n, use_cache)))
    assert all(generate.timed(poet, torch.tensor([[BREAK]]), 9, use_cache) > 0 for use_cache in (True, False))
    assert asked == [(9, True), (9, False)]


def test_positions_are_counted(poet):
    """Demo 6 counted positions that the model did not compute, or left the model changed."""
    before = set(vars(poet))
    start = torch.tensor([[BREAK]])
    assert [generate.positions_computed(poet, start, 12, use_cache) for use_cache in (False, True)] == [78, 12]
    assert set(vars(poet)) == before


def test_cache_bytes():
    """The lesson's figures: 4 KB a character, 512 KB for 128 of them."""
    config = GPTConfig(6289)
    assert generate.cache_bytes(config, 1) == 4 * 1024
    assert generate.cache_bytes(config, 128) == 512 * 1024
    cache = gpt.KVCache(config, 1, 128)
    assert generate.cache_bytes(config, 128) == config.n_layer * (cache.k.nbytes + cache.v.nbytes)
    assert [generate.cache_bytes(GPTConfig(6289, n_kv_head=n), 1) for n in (4, 2, 1)] == [4096, 2048, 1024]


# ---------------------------------------------------------------------------------------------------
# Looking inside a run


def columns(text):
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def poems(model, capsys, *flags):
    """(stdout, stderr) of the poet with these flags."""
    capsys.readouterr()
    generate.write_poems(model, VOCAB, generate.parse_args([str(flag) for flag in flags]))
    return capsys.readouterr()


@pytest.mark.parametrize("length", [1, 8, 9, 30])
def test_replay_is_what_generate_saw(tiny, length):
    """The trace shows other logits than the choice was made from, past the window of 8 too."""
    model, seen = tiny(vocab_size=len(VOCAB)), []
    start = torch.randint(3, len(VOCAB), (1, length), generator=seeded(length))
    ids = model.generate(start, 40, generator=seeded(3), watch=lambda logits, _: seen.append(logits))
    for ours, theirs in zip(generate.replay(model, ids, length), seen, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


FLAGS = [
    ["--prompt", "春风", "--seed", 1],
    ["--prompt", "春风", "--seed", 4, "--temperature", 1.5, "--top-k", 20, "--top-p", 0.9],
    ["--prompt", "春" * 20, "--seed", 1, "--max-chars", 9],
    ["--prompt", "春风", "--seed", 1, "--temperature", 0, "--max-chars", 30],
    ["--prompt", "春风", "--form", "五绝", "--loose", "--seed", 1, "--top-p", 0.5],
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
        assert 1 <= len(left) <= 4
        assert list(left.values()) == sorted(left.values(), reverse=True)
        assert left.get(drawn, float(p)) == float(p)
        text = "\n" + prompt + written[:i]
        if len(text) <= 16:  # before the window moves
            own = poet(VOCAB.encode(text))[0][0, -1]
            assert int(rank) == (own > own[VOCAB.ids[drawn.replace("↵", "\n")]]).sum() + 1


def test_trace_says_what_was_cut(stub, capsys):
    """The trace's shares of what the rule left and top-k and top-p cut, by hand: 8, 4, 2 and 2 sixteenths."""
    probs = torch.full((len(VOCAB),), 1e-30)
    for char, share in zip("春风云雪", (8, 4, 2, 2), strict=True):
        probs[VOCAB.ids[char]] = share / 16
    model, V = stub(probs.log()), len(VOCAB)
    flags = ["--prompt", "春", "--seed", 1, "--max-chars", 6, "--temperature", 1, "--trace"]
    for row in poems(model, capsys, *flags, "--top-k", 2, "--top-p", 0.5).err.splitlines()[-6:]:
        # top-k leaves 春 and 风 with 2 and 1 thirds, and of these top-p 春 alone
        assert re.fullmatch(rf" *\d+ 春 +100\.0 +1 +春 *100\.0 +- +- +{V - 2} +25% +1 +33%", row)
    for row in poems(model, capsys, *flags, "--top-p", 0.75).err.splitlines()[-6:]:
        choice = r"(春 +66\.7 +1|风 +33\.3 +2) +春 *66\.7 风 *33\.3"
        assert re.fullmatch(rf" *\d+ {choice} +- +- +- +- +{V - 2} +25%", row)
    flags = ["--acrostic", "云春", "--chars", 2, "--seed", 1, "--temperature", 1, "--trace"]
    head, any_, mark, *_ = poems(model, capsys, *flags).err.splitlines()[-6:]
    assert re.fullmatch(r" +1 云 +100\.0 +3 +云 *100\.0 +1 +12% +- +- +- +-", head)
    assert re.search(rf"{len(LETTERS)} +100%", any_)


@pytest.mark.slow
def test_the_same_seed_is_the_same_poem(poet, capsys):
    """A poem depended on the commands before it, or on a global generator."""
    flags = ["--prompt", "春风", "-n", 3, "--temperature", 1, "--seed", 5]
    torch.manual_seed(1)
    alone = poems(poet, capsys, *flags).out
    for others in FLAGS:
        poems(poet, capsys, *others, "--trace")
    generate.demo_temperature(poet, VOCAB)
    torch.manual_seed(2)
    assert poems(poet, capsys, *flags).out == alone
    assert poems(poet, capsys, *flags[:-1], 6).out != alone


def next_rows(model, capsys, text, *flags):
    """The rows that --next prints, each split in words."""
    capsys.readouterr()
    generate.print_next(model, VOCAB, text, generate.parse_args(["--next", text, *map(str, flags)]))
    out = capsys.readouterr().out
    assert max(map(columns, out.splitlines())) <= 80
    return [line.split() for line in out.splitlines()]


@pytest.mark.parametrize("text", ["春风", "\n春风", "云水花" * 9])
def test_next_is_demo_1_for_any_text(poet, capsys, text):
    """--next shows other characters, shares or bars than the model gives, also past the window."""
    rows = next_rows(poet, capsys, text, "--top", 7)
    probs = poet(VOCAB.encode(text)[:, -16:])[0][0, -1].softmax(dim=-1)
    best = probs.topk(7)
    for i, (number, char, share, *bar) in enumerate(rows[:-1]):
        p = best.values[i].item()
        assert (int(number), char) == (i + 1, VOCAB.chars[best.indices[i]].replace("\n", "↵"))
        assert share == f"{100 * p:.1f}%"
        assert bar == ["█" * round(40 * p / best.values[0].item())]
    assert rows[-1] == ["others", f"{100 * (1 - best.values.sum().item()):.1f}%"]


def test_next_in_columns(poet, capsys):
    """A column shows another temperature than its head, a filter is passed over, or the rest is not all."""
    heads, *rows, others, left = next_rows(poet, capsys, "春", "--temperature", 0.5, 1, 2, "--top-k", 5, "--top", 8)
    assert heads == ["T=0.5", "T=1", "T=2"]
    assert left == ["left", "5", "5", "5"]
    assert others == ["others", "0.0%", "0.0%", "0.0%"]
    logits = poet(VOCAB.encode("春"))[0][:, -1]
    for column, temperature in enumerate((0.5, 1.0, 2.0)):
        probs = gpt.probabilities(logits, temperature=temperature, top_k=5)[0].topk(8).values.tolist()
        assert [row[2 + column] for row in rows] == [f"{100 * p:.1f}%" if p else "-" for p in probs]


@pytest.mark.slow
def test_next_and_trace_agree(poet, capsys):
    """--next on a poem's text, its line break first, said otherwise than the trace's first row."""
    row = poems(poet, capsys, "--prompt", "春风", "--seed", 1, "--temperature", 1, "--trace").err.splitlines()[-1]
    first = next(line for line in poems(poet, capsys, "--prompt", "春风", "--seed", 1, "--temperature", 1, "--trace")
                 .err.splitlines() if line.startswith("  1 "))  # fmt: skip
    likeliest = re.search(r"\d +(\S) *(\d+\.\d)", first[14:])
    top = next_rows(poet, capsys, "\n春风")[0]
    assert (likeliest[1], likeliest[2] + "%") == (top[1], top[2])
    assert row


# ---------------------------------------------------------------------------------------------------
# The exercises


def ranked(rule):
    """A rule for exercise 1 from one on the sorted probabilities and the mass before each, likeliest first."""

    def keep(probs, p):
        values, ids = probs.sort(descending=True)
        return torch.zeros(len(probs), dtype=torch.bool).scatter(0, ids, rule(values, values.cumsum(0) - values, p))

    return keep


def one_by_one(probs, p):
    kept, mass = torch.zeros(len(probs), dtype=torch.bool), 0.0
    for i in probs.argsort(descending=True).tolist():
        if mass >= p - 1e-7:
            break
        kept[i] = True
        mass += probs[i].item()
    return kept


RIGHT = {
    "mine": ranked(lambda values, before, p: before < p),
    "the usual one": ranked(lambda values, before, p: ~torch.cat([torch.tensor([False]), (before + values > p)[:-1]])),
    "the program's": lambda probs, p: gpt.probabilities(probs.log()[None], top_p=p)[0] > 0,
    "one by one": one_by_one,
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
    "a tenth too little": lambda probs, p: RIGHT["mine"](probs, p - 0.1),
    "in the order of the ids": lambda probs, p: probs.cumsum(0) - probs < p,
    "whatever p": lambda probs, p: RIGHT["mine"](probs, 0.9),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RIGHT, *WRONG])
def test_exercise_1_tells_right_from_wrong(poet, capsys, monkeypatch, name):
    """A wrong top-p passed for right, or a right one written another way for wrong."""
    monkeypatch.setattr(generate, "my_top_p", {**RIGHT, **WRONG}[name])
    assert generate.check_exercises([1], poet, VOCAB) == (name not in RIGHT)
    verdict = printed(capsys)[-1]
    assert verdict.startswith("  exercise 1: right" if name in RIGHT else "  exercise 1: wrong: for p = ")


def test_exercises_as_they_ship(poet, capsys):
    """A fresh clone said that the exercises were right, or ended in a traceback."""
    assert generate.check_exercises([1, 2], poet, VOCAB) == 1
    said = [line for line in printed(capsys) if "exercise" in line]
    assert said == [
        "  exercise 1: not tried yet: write my_top_p in generate.py",
        "  exercise 2: not tried yet: write my_marks in generate.py",
    ]


def test_exercise_1_writes_with_the_learners_own_function(poet, monkeypatch):
    """The poems of exercise 1 came from the shipped top-p, whatever the learner had written."""
    monkeypatch.setattr(generate, "MAX_CHARS", 12)
    only = VOCAB.ids["春"]
    made, _ = generate.write_keeping(poet, VOCAB, lambda probs, p: torch.arange(len(probs)) == only, 0.9)
    assert made == [("春" * 12, False)] * generate.EX1_POEMS


@pytest.mark.parametrize(
    ("answer", "named"),
    [(None, "None"), ([0], "[0]"), (torch.ones(3), "float32 (3,)"), (torch.ones(1, 3, dtype=torch.bool), "(1, 3)")],
)
def test_exercise_1_names_an_answer_of_another_kind(answer, named):
    """A my_top_p that returned nothing, ids, floats or (1, V) ended in a traceback."""
    said = generate.check_top_p(lambda probs, p: answer, [(torch.tensor([0.5, 0.3, 0.2]), 0.9)])
    assert said.startswith("for p = 0.9 of [0.5, 0.3, 0.2] it returns ")
    assert named in said
    assert said.endswith("not a bool tensor of shape (3,)")


def test_a_solution_that_fails(poet, capsys, monkeypatch):
    """An error in a learner's function was a traceback through ours."""
    failing = {"AttributeError": lambda probs, p: probs.no_such_thing, "SystemExit": lambda probs, p: exit(3)}
    for named, fails in failing.items():
        monkeypatch.setattr(generate, "my_top_p", fails)
        assert generate.check_exercises([1], poet, VOCAB) == 1
        assert re.search(rf"exercise 1: wrong: .* fails in line \d+: {named}", printed(capsys)[-1])


def test_exercise_1_counts_what_each_step_kept(poet, monkeypatch):
    """The counts took in the padding of poems that had ended, or another step's candidates."""
    monkeypatch.setattr(generate, "MAX_CHARS", 15)
    for keep, value in ((generate.keep_top_k, 20), (RIGHT["mine"], 0.9)):
        made, counts = generate.write_keeping(poet, VOCAB, keep, value)
        kept = []
        for text, ended in made:
            ids = VOCAB.encode("\n" + text + "\n" * ended)
            for t in range(1, ids.size(1)):
                kept.append(keep((poet(ids[:, :t])[0][0, -1] / generate.HOT).softmax(dim=-1), value).sum().item())
        assert sorted(kept) == sorted(counts)


MARKS = {8: "，。", 16: "，。", 24: "，。", 32: "。"}


def by_the_place(place):
    if place % 8:
        return None
    return "。" if place == 32 else "，。"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("marks", "right"),
    [
        (MARKS.get, True),
        (by_the_place, True),
        ({8: "，", 16: "。", 24: "，", 32: "。"}.get, True),
        (lambda place: {8: "，", 16: "。", 24: "。", 0: "。"}.get(place % 32) if place % 8 == 0 else None, True),
        ({}.get, False),
        ({8: "，。", 16: "，。", 24: "，。"}.get, False),
        ({8: "，。", 16: "，。", 24: "，。", 32: "，。"}.get, False),
        ({7: "，。", 16: "，。", 24: "，。", 32: "。"}.get, False),
        ({8: "，。", 12: "，。", 16: "，。", 24: "，。", 32: "。"}.get, False),
        ({6: "，。", 12: "，。", 18: "，。", 24: "。"}.get, False),
        ({8: "，。\n", 16: "，。", 24: "，。", 32: "。"}.get, False),
        (lambda place: True, False),
        (lambda place: "", False),
        (lambda place: "!", False),
    ],
)
def test_exercise_2_tells_right_from_wrong(poet, capsys, monkeypatch, marks, right):
    """Exercise 2 called wrong marks right, right ones wrong, or did not name the place."""
    monkeypatch.setattr(generate, "my_marks", marks)
    assert generate.check_exercises([2], poet, VOCAB) == (not right)
    verdict = printed(capsys)[-1]
    assert verdict == "  exercise 2: right" if right else re.search("wrong: .*place", verdict)


def test_exercise_2_looks_at_the_answers_too(stub, capsys, monkeypatch):
    """， allowed at the end passed for right, because the model does not write it there."""
    monkeypatch.setattr(generate, "my_marks", lambda place: "，。" if place % 8 == 0 else None)
    monkeypatch.setattr(generate, "EX2_POEMS", 2)
    assert generate.check_exercises([2], stub(logits(comma=-1e9), block_size=64), VOCAB) == 1
    assert printed(capsys)[-1].startswith("  exercise 2: wrong: for place 32 it returns '，。'")


@pytest.mark.slow
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
    monkeypatch.setattr(generate, "first_difference", lambda model, start, n: None)
    monkeypatch.setattr(generate, "time_both", lambda model, start, n, runs: (n / 1000 * n / 10, n / 1000))
    assert generate.check_exercises([3], poet, VOCAB) == (said != "right")
    heading, *lines, verdict = printed(capsys)
    assert f"block_size={block_size}" in heading
    assert verdict.startswith(f"  exercise 3: {said}")
    n = max(chars)  # of 2 layers and 16 dimensions
    held = 2 * 2 * 16 * 4 * min(n, block_size)
    assert f"  写 {n:>4} 个字，缓存 {held / 1024:,.0f} KB，快了 {n / 10:.1f} 倍" in lines
    assert [line.count("█") for line in lines[1::3]] == [round(40 * (n / max(chars)) ** 2) for n in chars]


@pytest.mark.slow
@pytest.mark.parametrize("times", [{100: (2, 1), 500: (1, 0.5)}, {100: (1, 2), 500: (3, 4)}])
def test_exercise_3_does_not_believe_a_busy_machine(poet, capsys, monkeypatch, times):
    """Bars that cannot be, of a machine that was busy with something else, were called right."""
    monkeypatch.setattr(generate, "EX3_CHARS", (100, 500))
    monkeypatch.setattr(generate, "first_difference", lambda model, start, n: None)
    monkeypatch.setattr(generate, "time_both", lambda model, start, n, runs: times[n])
    assert generate.check_exercises([3], poet, VOCAB) == 1
    assert "these times cannot be" in printed(capsys)[-1]


@pytest.mark.slow
def test_exercise_3_compares(poet, capsys, monkeypatch):
    """Exercise 3 called a cache that changes the characters right."""
    monkeypatch.setattr(generate, "time_both", lambda model, start, n, runs: (2, 1))
    break_the_cache(monkeypatch, position=300, factor=1e5)
    assert generate.check_exercises([3], poet, VOCAB) == 1
    number = re.search(r"wrong: with and without the cache character (\d+) differs", printed(capsys)[-1])[1]
    assert int(number) > 301


# ---------------------------------------------------------------------------------------------------
# Prompts


def test_a_prompt_is_normalised_with_a_notice(capsys):
    """A prompt was changed in silence, or the notice went to stdout."""
    assert generate.normalised("春, 風\n", VOCAB, "--prompt") == "春，风"
    out, err = capsys.readouterr()
    assert (out, err) == ("", "--prompt: , → ，  space → nothing  風 → 风  line break → nothing\n")
    assert generate.normalised("春风", VOCAB, "--prompt") == "春风"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("春A风A", ["A U+0041"]),
        ("😀春😀龘a", ["😀 U+1F600", "龘 U+9F98", "a U+0061"]),
        ("（春）", ["（ U+FF08", "） U+FF09"]),
        ("春,龘", ["龘 U+9F98"]),
    ],
)
def test_unknown_characters_are_all_listed(text, named):
    """An unknown character crashed, or only the first was named; all are, once, with code points, status 2."""
    with pytest.raises(UserError) as stop:
        generate.normalised(text, VOCAB, "--acrostic")
    message = f"--acrostic: not in the vocabulary of {len(VOCAB)} characters: "
    assert (str(stop.value), stop.value.status) == (message + "  ".join(named), 2)


@pytest.mark.parametrize("text", ["", " ", "\n", "\u3000", " \t\n\u3000\u2028"])
def test_empty_prompts(text, poet, capsys):
    """An empty prompt crashed; it starts a poem as none does."""
    flags = ["--form", "五绝", "--loose", "--seed", 1]
    assert poems(poet, capsys, *flags, "--prompt", text).out == poems(poet, capsys, *flags).out


@pytest.mark.parametrize("heads", ["", " ", "\n", "\u3000", "春，", "。"])
def test_heads_that_are_none(heads, poet):
    """An acrostic without heads, or with marks for heads."""
    with pytest.raises(UserError, match="give the characters that begin the lines") as stop:
        generate.write_poems(poet, VOCAB, generate.parse_args(["--acrostic", heads]))
    assert stop.value.status == 2
