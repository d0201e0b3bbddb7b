"""data/poems.py: typed text in a model's characters, a corpus as it is read, the split."""

import re
import unicodedata
import zlib
from collections import Counter

import pytest
from conftest import real_corpus
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data.poems import CORPUS, in_known_characters, is_invisible, read_poems, split, tidy
from data.prepare import is_corpus

KNOWN = set("春风云水人，。\n")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("春,风.云:水!", "春，风。云，水。"),
        ("春、风；云…水．人｡", "春，风，云。水。人。"),
        ("春﹐风︐云︒水﹔？", "春，风，云。水，。"),  # small marks, those of vertical text, full width
        (" 春 风\t云\u3000水", "春风云水"),
        ("⼈雲\u2fb5", "人云风"),  # radicals, as from a PDF; a traditional one
        ("龍龘A〾㈬\udcb4", "龍龘A〾㈬\udcb4"),  # 龙, ( and ) are not known either; a sign; a byte that is not UTF-8
        ("春\n风", "春\n风"),
    ],
)
def test_typed_text(text, expected):
    """A foreign mark, a space or a traditional character is refused, becomes the wrong one, or is not told of."""
    made, changes = in_known_characters(text, KNOWN)
    assert made == expected == "".join(changes.get(char, char) for char in text)
    assert list(changes) == [char for char in dict.fromkeys(text) if char not in expected]


def test_the_best_known_substitute_wins(monkeypatch):
    """A mark that stands for another is taken though the model does not know it, or a worse one is."""
    assert in_known_characters("春，風,", set("春风,")) == ("春,风,", {"，": ",", "風": "风"})
    assert in_known_characters("︐", set("，,")) == (",", {"︐": ","})
    assert in_known_characters("乾", set("乾干"))[0] == "乾"
    monkeypatch.setattr("data.poems.converter", None)  # opencc, which not everyone has, is the last to be asked
    assert in_known_characters("春, ⼈!", KNOWN)[0] == "春，人。"


ODD = "\u200b\u200d\ufeff\x00\ufe0f\U000e0100\u3164\u2800\u00ad"  # shown as nothing
BLANK = " \t\r\x0b\x0c\x1c\x85\xa0\u2028\u3000"


@given(st.text(f"春e\u0301\u00e9\uf914〾\n{ODD}{BLANK}"))
@example(f"春{ODD}风{BLANK}。")
@settings(max_examples=50)
def test_tidy_text(text):
    """What looks the same is not the same text, a blank ends a line, or a removed character is not counted."""
    made, gone = tidy(text)
    assert tidy(made) == (made, {})
    assert made.count("\n") == text.count("\n")
    assert gone == Counter(char for char in text if char in ODD) == Counter(filter(is_invisible, text))
    assert tidy(unicodedata.normalize("NFD", text))[0] == made
    visible = "".join(char for char in text if char not in ODD)
    expected = [" ".join(re.split(f"[{BLANK}]+", line.strip(BLANK))) for line in visible.split("\n")]
    assert made == unicodedata.normalize("NFC", "\n".join(expected))


def read(tmp_path, text):
    path = tmp_path / "poems.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_poems(path)


@pytest.mark.parametrize("end", ["\n", "\r\n", " \n\n\u3000\n", "\u2028\n"])
@pytest.mark.parametrize("bom", ["", "\ufeff"])
def test_line_ends_and_a_bom_change_nothing(tmp_path, end, bom):
    """CRLF, a BOM, empty lines, blanks or a last line without its end change the poems."""
    poems = ["春风。", "云\u2028。", "水  人。"]
    for text in (end.join(poems), end.join(poems) + end):
        assert read(tmp_path, bom + text) == (["春风。", "云 。", "水 人。"], [])


def test_what_is_left_out_is_said(tmp_path):
    """Poems that come twice or invisible characters are removed without a word of how many and which."""
    poems, remarks = read(tmp_path, "春\n风\ufe0f \n" + "春\u200c\n" * 1200 + "云\n风\u200c")
    assert poems == ["春", "风", "云"]
    assert remarks == [
        "1,201 poems that were there already are left out",
        "1,202 invisible characters are left out: U+200C 1,201  U+FE0F 1",
    ]


def test_a_corpus_that_is_not_utf8(tmp_path):
    """A corpus in GBK is read as junk, or its name is not said."""
    with pytest.raises(ValueError, match=r"poems\.txt is not UTF-8"):
        read(tmp_path, "春风。".encode("gbk"))


def test_the_split():
    """The rule that holds poems out changes: a model is validated on what it was trained on."""
    poems = [f"春风{chr(0x4E00 + n)}。" for n in range(2000)]
    training, held_out = split(poems)
    assert held_out == [poem for poem in poems if zlib.crc32(poem.encode()) % 20 == 0]
    assert training == [poem for poem in poems if poem not in held_out]
    assert held_out[:3] == ["春风丐。", "春风丳。", "春风丹。"]


@pytest.mark.slow
@real_corpus
def test_the_real_corpus():
    """The corpus is not the lesson's, holds a poem twice, or reading it changes it."""
    data = CORPUS.read_bytes()
    assert is_corpus(data)
    poems, remarks = read_poems(CORPUS)
    assert ("".join(poem + "\n" for poem in poems).encode(), remarks) == (data, [])
    assert [len(part) for part in split(poems)] == [33364, 1771]
