"""What the tests of generate.py and of the exercises share: vocabularies, models to write with, looks at a poem."""

import re

import pytest
import torch
from quality import rhymes_kept, tones_kept

import generate
from data.prosody import read_prosody
from gpt import Vocabulary

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


def verse_vocabulary():
    """Characters enough for regulated verse, the commonest of data/prosody.txt."""
    prosody = read_prosody()
    level = [char for char, tone in prosody.tones.items() if tone == "平" and prosody.rhymes.get(char) in (1, 2, 4)]
    oblique = [char for char, tone in prosody.tones.items() if tone == "仄"]
    return Vocabulary("\n，。" + "".join(level[:120] + oblique[:120]))


VERSE = verse_vocabulary()
LEVEL, OBLIQUE = VERSE.chars[3:123], VERSE.chars[123:]


@pytest.fixture
def as_shipped(monkeypatch):
    """The constants of generate.py as the lesson has them, whatever a learner has made of them."""
    for name, value in SHIPPED.items():
        monkeypatch.setattr(generate, name, value)


@pytest.fixture(scope="session")
def poet(tiny):
    """A random model of VOCAB that sees 16 characters, so that most poems run past its window."""
    return tiny(vocab_size=len(VOCAB), block_size=16)


@pytest.fixture(scope="session")
def verse(tiny):
    """(model, vocab, prosody): a random model that can write regulated verse."""
    return tiny(vocab_size=len(VERSE), block_size=64, n_layer=1), VERSE, read_prosody()


def logits(**likely):
    """Logits (V,): 0 for all characters but those named."""
    row = torch.zeros(len(VOCAB))
    for name, value in likely.items():
        row[{"line_break": BREAK, "comma": COMMA, "full_stop": STOP}.get(name, VOCAB.ids.get(name))] = value
    return row


def printed(capsys):
    return capsys.readouterr().out.splitlines()


def shape(n_char, n_lines):
    """A pattern of a whole poem, written without poem_template."""
    marks = "，。" * n_lines
    return re.compile("".join(f"[^，。\\s]{{{n_char}}}{mark}" for mark in marks[: n_lines - 1] + "。"))


def keeps_the_rules(poem, prosody):
    """Whether all tones and rhymes of a poem are right, and no character comes again but one doubled on the spot."""
    (right, pairs), (rhyming, ends) = tones_kept(poem, prosody), rhymes_kept(poem, prosody)
    once = re.sub(r"(.)\1", r"\1", re.sub("[，。]", "", poem))
    return right == pairs > 0 and rhyming == ends > 0 and len(set(once)) == len(once)
