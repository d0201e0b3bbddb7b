"""How good the poems of a trained model are: loss, form, rhyme, variety, and how much is recited. One table.

    python tests/quality.py                                     # checkpoints/pretrained.pt
    python tests/quality.py --checkpoint FILE --corpus FILE

Rhyme needs no dictionary. Characters that end the even lines of one training poem rhyme with each other, as a
rule: joined in a graph, as strongly as they do so often, they fall into the groups of the medieval rhyme books.
The measure is measured too: it counts only if validation poems rhyme by it and characters paired by chance do not.
"""

import argparse
import contextlib
import random
import re
import sys
from collections import Counter
from itertools import combinations
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run as a script, Python looks beside this file only
from data.prepare import CORPUS, FORM  # noqa: E402
from gpt import Stop, load_checkpoint, run  # noqa: E402
from train import is_validation, read_poems, validation_batches, validation_loss  # noqa: E402

TEMPERATURES = (0.5, 0.8, 1.0)
POEMS, BATCH, LENGTH = 500, 100, 100  # poems a temperature, at once, and their characters at most
SEED = 0
LEAST_REAL, MOST_RANDOM = 0.94, 0.08  # the rhyme rates between which the measure counts


def line_ends(poem):
    """The characters before 。, where a poem rhymes."""
    return [line[-1] for line in poem.split("。")[:-1] if line]


def rhyme_groups(poems):
    """{character: number of its group}, found in the poems."""
    try:
        import networkx
    except ImportError:
        raise Stop("networkx is missing: pip install -r tests/requirements.txt", 2) from None
    pairs = Counter(pair for poem in poems for pair in combinations(sorted(set(line_ends(poem))), 2))
    graph = networkx.Graph()
    graph.add_weighted_edges_from((a, b, count) for (a, b), count in pairs.items())
    groups = networkx.community.louvain_communities(graph, seed=0)
    return {char: number for number, group in enumerate(groups) for char in group}


def rhyme_rate(pairs, groups):
    """The share of pairs of characters in one group; a character of no group rhymes with none."""
    pairs = list(pairs)
    return sum(a in groups and groups[a] == groups.get(b) for a, b in pairs) / max(1, len(pairs))


def pairs_within(poems):
    return (pair for poem in poems for pair in combinations(line_ends(poem), 2))


def lines(poems):
    return [line for poem in poems for line in re.split("[，。]", poem) if line]


def measure(poems, groups, known):
    """The figures of some poems: exact form, rhyme in those that have it, variety, lines that are in known."""
    formed = [poem for poem in poems if FORM.fullmatch(poem)]
    found = lines(poems)
    return {
        "exact form": f"{len(formed) / len(poems):.3f}",
        "rhyme, of their line ends": f"{rhyme_rate(pairs_within(formed), groups):.3f}",
        "distinct characters": f"{len(set(''.join(poems))):,}",
        "lines that are in the training poems": f"{sum(line in known for line in found) / max(1, len(found)):.4f}",
    }


def write(model, vocab, temperature):
    """POEMS poems, the same ones every time."""
    start = torch.full((BATCH, 1), vocab.ids["\n"])
    generator = torch.Generator().manual_seed(SEED)
    batches = [
        model.generate(start, LENGTH, temperature=temperature, stop=vocab.ids["\n"], generator=generator)
        for _ in range(POEMS // BATCH)
    ]
    return [vocab.decode(ids).strip("\n") for batch in batches for ids in batch.tolist()]


def after_spring_wind(model, vocab):
    """(probability, rank) of 。 after 春风 alone."""
    with torch.no_grad():
        probs = model(vocab.encode("春风"))[0][0, -1].softmax(dim=-1)
    p = probs[vocab.ids["。"]]
    return p.item(), int((probs > p).sum()) + 1


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--checkpoint",
        type=Path,
        default=ROOT / "checkpoints" / "pretrained.pt",
        metavar="FILE",
        help="the model (default: checkpoints/pretrained.pt)",
    )
    parser.add_argument(
        "--corpus", type=Path, default=CORPUS, metavar="FILE", help="a poem a line (default: data/tang.txt)"
    )
    args = parser.parse_args()
    model, vocab, _ = load_checkpoint(args.checkpoint)
    with contextlib.redirect_stdout(sys.stderr):  # what preparing the corpus has to say
        poems = read_poems(args.corpus)
    training = [poem for poem in poems if not is_validation(poem)]
    held_out = [poem for poem in poems if is_validation(poem)]
    unknown = set("".join(poems)) - set(vocab.chars)
    if unknown or not held_out:
        raise Stop(
            f"{args.corpus} is not what the model was trained on: {len(unknown)} of its characters are unknown "
            f"to {args.checkpoint}, {len(held_out)} of its poems are for validation",
            2,
        )

    groups, known = rhyme_groups(training), set(lines(training))
    ends = [char for poem in held_out for char in line_ends(poem)]
    random.Random(SEED).shuffle(ends)
    by_chance = rhyme_rate(zip(ends[::2], ends[1::2], strict=False), groups)
    real = rhyme_rate(pairs_within(held_out), groups)
    if real < LEAST_REAL or by_chance > MOST_RANDOM:
        raise Stop(
            f"the rhyme measure does not count: validation poems {real:.3f} (at least {LEAST_REAL}), "
            f"random pairs {by_chance:.3f} (at most {MOST_RANDOM})"
        )

    p, rank = after_spring_wind(model, vocab)
    some = random.Random(SEED).sample(held_out, min(POEMS, len(held_out)))
    columns = {
        f"T = {temperature}": measure(write(model, vocab, temperature), groups, known) for temperature in TEMPERATURES
    }
    columns |= {f"held out, {len(part):,}": measure(part, groups, known) for part in (some, held_out)}
    rows = {"": columns}
    for name in columns[f"T = {TEMPERATURES[0]}"]:
        rows[name] = [figures[name] for figures in columns.values()]
    rows["rhyme groups, rhyme of random pairs"] = [len(set(groups.values())), f"{by_chance:.3f}"]
    rows["probability of 。 after 春风, its rank"] = [f"{p:.3f}", rank]
    rows["validation loss"] = [f"{validation_loss(model, validation_batches(held_out, vocab)):.4f}"]
    for name, cells in rows.items():
        wide = sum(char > "\u2e80" for char in name)  # these take two places on a screen
        print(name.ljust(40 - wide) + "".join(f"{cell:>16}" for cell in cells))


if __name__ == "__main__":
    sys.exit(run(main))
