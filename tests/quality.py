"""How good the poems of a trained model are, free and in the forms: one table.

    python tests/quality.py                                     # checkpoints/pretrained.pt
    python tests/quality.py --checkpoint FILE [FILE ...] --poems 2000

Tones and rhymes are those of data/prosody.txt, learned from the training poems. The measure is measured too: it
counts only if validation poems rhyme by it and characters paired by chance do not. The stream is the validation
poems joined by line breaks: its windows begin anywhere and are longer than any poem.
"""

import argparse
import random
import re
import sys
from collections import Counter
from itertools import combinations
from pathlib import Path

import torch
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run as a script, Python looks beside this file only
from checkpoints.store import CHECKPOINTS, load_checkpoint
from data.poems import CORPUS, FORMS, read_poems, split
from data.prosody import line_ends, lines_of, read_prosody, tone_pairs
from data.script import UserError, parse, progress, run
from data.verse import choose_templates
from generate import bounded, first_lines, next_logits, pad, prompt_ids, template_constraint, write
from gpt import probabilities
from train import texts_of, validation_loss

TEMPERATURES = (0.5, 0.8, 1.0)  # of free poems; those in a form have the second
BATCH = 64
MOST_CHARS = 100  # of a free poem
WINDOWS, WINDOW, PLACES = 300, 128, 32  # windows of the stream, their characters, and those of one cell
SEED = 1
LEAST_REAL, MOST_RANDOM = 0.94, 0.08  # the rhyme rates between which the measure counts
FORM = re.compile("|".join(f"(?:[^，。]{{{n}}}，[^，。]{{{n}}}。){{{lines // 2}}}" for n, lines in FORMS.values()))


def write_poems(model, vocab, n, form=None, temperature=0.8, prosody=None):
    """The texts of n poems, free or in a form, the same ones every time."""
    knobs = {"temperature": temperature, "generator": torch.Generator().manual_seed(SEED)}
    rule, length, poems = None, MOST_CHARS, []
    if form:
        templates, _ = choose_templates(form, {}, prosody, vocab.chars)
        rule, length = template_constraint(templates, vocab, prosody), len(templates[0])
    for done in progress(range(0, n, BATCH), desc=form or f"T = {temperature}", leave=False):
        start = prompt_ids(model, vocab, n=min(BATCH, n - done))
        if form:
            start = first_lines(model, start, rule, FORMS[form][0] + 1, **knobs)
        poems += write(model, vocab, start, length, constraint=rule, **knobs)
    return [text for text, _ in poems]


def nats(model, vocab, poems):
    """Mean cross-entropy in nats a character of poems, each between two line breaks."""
    return validation_loss(model, texts_of(poems, vocab, model.config.block_size))


@torch.inference_mode()
def stream_losses(model, vocab, poems):
    """{places of a window of the stream: mean loss in nats a character}."""
    size = min(WINDOW, model.config.block_size)
    windows = vocab.encode("\n".join(poems))[0].unfold(0, size + 1, size)[:WINDOWS]  # (windows, size + 1)
    losses = [F.cross_entropy(model(x[:, :-1])[0].mT, x[:, 1:], reduction="none") for x in windows.split(16)]
    places = torch.cat(losses).mean(dim=0)  # (size,)
    cells = [(i, i + PLACES) for i in range(0, size, PLACES)] + [(size // 2, size)]
    return {f"{first} to {end - 1}": f"{places[first:end].mean():.3f}" for first, end in cells}


def tones_kept(poem, prosody):
    """(right, all) tone pairs of a poem, of characters that have a tone."""
    known = [(a, b, sign) for a, b, sign in tone_pairs(poem) if a in prosody.tones and b in prosody.tones]
    return sum((prosody.tones[a] == prosody.tones[b]) == (sign > 0) for a, b, sign in known), len(known)


def rhymes_kept(poem, prosody):
    """(rhyming, all) pairs of the poem's line ends; a character of no group rhymes with none."""
    pairs = list(combinations(line_ends(poem), 2))
    return sum(a in prosody.rhymes and prosody.rhymes[a] == prosody.rhymes.get(b) for a, b in pairs), len(pairs)


def measure(poems, prosody, known, model, vocab):
    """The figures of some poems; all but the first are of those that have an exact form."""
    formed = [poem for poem in poems if FORM.fullmatch(poem)]
    if not formed:
        return {"exact form": "0.000"}
    tones, rhymes = ([kept(poem, prosody) for poem in formed] for kept in (tones_kept, rhymes_kept))
    ends = [Counter(line_ends(poem)) for poem in formed]
    letters = [Counter(re.sub(r"(.)\1", r"\1", re.sub("[，。]", "", poem))) for poem in formed]  # 悠悠 counts once
    lines = [line for poem in formed for line in lines_of(poem)]

    def share(right, total=None):
        return f"{right / (total or len(formed)):.3f}"

    return {
        "exact form": share(len(formed), len(poems)),
        "tone pairs right": share(*map(sum, zip(*tones, strict=True))),
        "poems regulated throughout": share(sum(right == total for right, total in tones)),
        "line ends that rhyme": share(*map(sum, zip(*rhymes, strict=True))),
        "poems with a rhyme word twice": share(sum(max(count.values()) > 1 for count in ends)),
        "poems with some character twice": share(sum(max(count.values()) > 1 for count in letters)),
        "different characters": f"{len(set(''.join(formed))):,}",
        "lines that are in the training poems": f"{sum(line in known for line in lines) / len(lines):.4f}",
        "nats a character": f"{nats(model, vocab, formed):.3f}",
    }


def check_measure(prosody, held_out):
    """Raise UserError unless held-out poems rhyme by prosody and characters paired by chance do not."""
    right, total = (sum(column) for column in zip(*(rhymes_kept(poem, prosody) for poem in held_out), strict=True))
    ends = [char for poem in held_out for char in line_ends(poem)]
    random.Random(SEED).shuffle(ends)
    groups = [prosody.rhymes.get(char) for char in ends]
    by_chance = [a is not None and a == b for a, b in zip(groups[::2], groups[1::2], strict=False)]
    real, chance = right / total, sum(by_chance) / len(by_chance)
    if real < LEAST_REAL or chance > MOST_RANDOM:
        raise UserError(f"the rhyme measure does not count: held-out poems {real:.3f}, random pairs {chance:.3f}")
    return chance


def table(model, vocab, n, prosody, known, held_out):
    """{name of a row: its cells}."""
    kinds = {"held out": held_out}
    kinds |= {f"T = {t}": write_poems(model, vocab, n, temperature=t) for t in TEMPERATURES}
    kinds |= {form: write_poems(model, vocab, n, form, prosody=prosody) for form in FORMS}
    columns = {name: measure(poems, prosody, known, model, vocab) for name, poems in kinds.items()}
    rows = {"": columns} | {name: [c.get(name, "-") for c in columns.values()] for name in columns["held out"]}
    probs = probabilities(next_logits(model, vocab, "春风"))[0]  # (V,)
    p = probs[vocab.ids["。"]]
    places = stream_losses(model, vocab, held_out)
    return rows | {
        "probability of 。 after 春风, its rank": [f"{p:.3f}", f"{(probs > p).sum() + 1}"],
        "validation loss, nats a character": [f"{nats(model, vocab, held_out):.4f}"],
        "places in a window of the stream": places.keys(),
        "loss there": places.values(),
    }


def main():
    parser = argparse.ArgumentParser(description="How good the poems of a trained model are.")
    add, shipped = parser.add_argument, [CHECKPOINTS / "pretrained.pt"]
    add("--checkpoint", type=Path, nargs="+", default=shipped, metavar="FILE", help="the models (default: shipped)")
    add("--poems", type=bounded(1), default=500, metavar="N", help="of each kind (default: 500)")
    args = parse(parser)
    prosody = read_prosody()
    training, held_out = split(read_poems(CORPUS)[0])
    known = {line for poem in training for line in lines_of(poem)}
    chance = check_measure(prosody, held_out)
    for path in args.checkpoint:
        model, vocab, _ = load_checkpoint(path)
        print(f"{path}: {args.poems:,} poems of each kind, {len(held_out):,} held out; random pairs rhyme {chance:.3f}")
        for name, cells in table(model, vocab, args.poems, prosody, known, held_out).items():
            texts = (str(cell).rjust(10 - sum(c > "\u2e80" for c in str(cell))) for cell in cells)  # two columns each
            print(pad(name, 40) + "".join(texts), flush=True)


if __name__ == "__main__":
    sys.exit(run(main))
