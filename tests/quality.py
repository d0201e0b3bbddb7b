"""How good the poems of a trained model are, free and in the forms: one table.

    python tests/quality.py                                     # checkpoints/pretrained.pt
    python tests/quality.py --checkpoint FILE --poems 2000

Tones and rhymes are those of data/prosody.txt, learned from the training poems. The measure is measured too: it
counts only if validation poems rhyme by it and characters paired by chance do not.
"""

import argparse
import random
import re
import sys
from collections import Counter
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run as a script, Python looks beside this file only
from data.poems import CORPUS, FORMS, read_poems, split
from data.prosody import line_ends, lines_of, read_prosody, rhymes_kept, tones_kept
from data.verse import choose_templates
from generate import template_constraint, write
from gpt import UserError, load_checkpoint, run
from train import validation_batches, validation_loss

TEMPERATURES = (0.5, 0.8, 1.0)  # of free poems; those in a form have the second
BATCH = 64
SEED = 1
LEAST_REAL, MOST_RANDOM = 0.94, 0.08  # the rhyme rates between which the measure counts
FORM = re.compile("|".join(f"(?:[^，。]{{{n}}}，[^，。]{{{n}}}。){{{lines // 2}}}" for n, lines in FORMS.values()))


def write_poems(model, vocab, n, form=None, temperature=0.8, prosody=None):
    """The texts of n poems, free or in a form, the same ones every time."""
    options = {}
    if form:
        templates, _ = choose_templates(form, {}, prosody)
        options = {"rule": template_constraint(templates, vocab, prosody), "length": len(templates[0])}
        options["first_line"] = FORMS[form][0]
    generator, poems = torch.Generator().manual_seed(SEED), []
    while len(poems) < n:
        batch = min(BATCH, n - len(poems))
        poems += write(model, vocab, n=batch, temperature=temperature, generator=generator, **options)
    return [text for text, _ in poems]


def nats(model, vocab, poems):
    """Mean cross-entropy in nats a character of poems, each between two line breaks."""
    return validation_loss(model, validation_batches(poems, vocab))


def measure(poems, prosody, known, model, vocab):
    """The figures of some poems; all but the first are of those that have an exact form."""
    formed = [poem for poem in poems if FORM.fullmatch(poem)]
    tones, rhymes = ([kept(poem, prosody) for poem in formed] for kept in (tones_kept, rhymes_kept))
    ends = [Counter(line_ends(poem)) for poem in formed]
    letters = [Counter(re.sub(r"(.)\1", r"\1", re.sub("[，。]", "", poem))) for poem in formed]  # 悠悠 counts once
    lines = [line for poem in formed for line in lines_of(poem)]

    def share(flags):
        return f"{sum(flags) / max(1, len(flags)):.3f}"

    def ratio(pairs):
        right, total = (sum(column) for column in zip(*pairs, strict=True))
        return f"{right / max(1, total):.3f}"

    return {
        "exact form": f"{len(formed) / len(poems):.3f}",
        "tone pairs right": ratio(tones),
        "poems regulated throughout": share([right == total for right, total in tones]),
        "line ends that rhyme": ratio(rhymes),
        "poems with a rhyme word twice": share([max(count.values()) > 1 for count in ends]),
        "poems with some character twice": share([max(count.values()) > 1 for count in letters]),
        "different characters": f"{len(set(''.join(formed))):,}",
        "lines that are in the training poems": f"{sum(line in known for line in lines) / max(1, len(lines)):.4f}",
        "nats a character": f"{nats(model, vocab, formed):.3f}",
    }


def after_spring_wind(model, vocab):
    """(probability, rank) of 。 after 春风 alone."""
    with torch.no_grad():
        probs = model(vocab.encode("春风"))[0][0, -1].softmax(dim=-1)
    p = probs[vocab.ids["。"]]
    return p.item(), int((probs > p).sum()) + 1


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


def main():
    parser = argparse.ArgumentParser(description="How good the poems of a trained model are.")
    shipped = ROOT / "checkpoints" / "pretrained.pt"
    parser.add_argument("--checkpoint", type=Path, default=shipped, metavar="FILE", help="the model (default: shipped)")
    parser.add_argument("--poems", type=int, default=500, metavar="N", help="of each kind (default: 500)")
    args = parser.parse_args()
    model, vocab, _ = load_checkpoint(args.checkpoint)
    prosody = read_prosody()
    training, held_out = split(read_poems(CORPUS)[0])
    known = {line for poem in training for line in lines_of(poem)}
    chance = check_measure(prosody, held_out)
    kinds = {"held out": held_out}
    kinds |= {f"T = {t}": write_poems(model, vocab, args.poems, temperature=t) for t in TEMPERATURES}
    kinds |= {form: write_poems(model, vocab, args.poems, form, prosody=prosody) for form in FORMS}
    columns = {name: measure(poems, prosody, known, model, vocab) for name, poems in kinds.items()}
    rows = {"": columns, **{name: [c[name] for c in columns.values()] for name in columns["held out"]}}
    p, rank = after_spring_wind(model, vocab)
    rows["rhyme of random pairs"] = [f"{chance:.3f}"]
    rows["probability of 。 after 春风, its rank"] = [f"{p:.3f}", rank]
    rows["validation loss"] = [f"{nats(model, vocab, held_out):.4f}"]
    for name, cells in rows.items():
        width = 40 - sum(char > "\u2e80" for char in name)  # these take two places on a screen
        print(name.ljust(width) + "".join(str(cell).rjust(10 - sum(c > "\u2e80" for c in str(cell))) for cell in cells))


if __name__ == "__main__":
    sys.exit(run(main))
