"""Tones and rhymes of the characters, learned from the poems themselves; no dictionary is read.

    python -m data.prosody          # builds data/prosody.txt from data/tang.txt, and prints what it found

In regulated verse the even places of a line differ in tone from one to the next; they differ between the
two lines of a couplet, and agree between line 2 and 3, 4 and 5, 6 and 7. The last characters of the even
lines rhyme, and so agree; those of the other lines, but for the first, differ from them. Every poem so
links characters that agree or differ in tone, and characters that rhyme. Few poems break these rules.
"""

import argparse
import re
import sys
from collections import Counter
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np

from data.poems import CORPUS, read_poems, split
from data.script import UserError, check_writable, parse, progress, run, write_file

PROSODY = Path(__file__).resolve().with_name("prosody.txt")
LEAST_LINKS, LEAST_AGREEMENT = 3, 0.3  # of a character with a tone: its links, and (for - against) / all of them
LEAST_MEMBERS = 3


@dataclass
class Prosody:
    """What is known of the characters, of each tone and rhyme group the commonest first."""

    tones: dict  # character: 平 (level) or 仄 (oblique); one whose evidence is thin or divided has none
    rhymes: dict  # character: the number of its rhyme group, 0 the commonest

    def groups(self):
        """The rhyme groups, each a string; its first character names it."""
        groups = {}
        for char, number in self.rhymes.items():
            groups[number] = groups.get(number, "") + char
        return [groups[number] for number in sorted(groups)]


def lines_of(poem):
    """The lines of a poem, without marks."""
    return [line for line in re.split("[，。]", poem) if line]


def line_ends(poem):
    """The last characters of the even lines, which rhyme."""
    return [line[-1] for line in lines_of(poem)[1::2]]


def tone_pairs(poem):
    """Yield (character, character, sign) at the even places: the tones of a regulated poem agree (1) or differ (-1)."""
    lines = lines_of(poem)
    for number, line in enumerate(lines):
        places = range(1, len(line) - 1, 2)
        yield from ((line[i], line[i + 2], -1) for i in places[:-1])
        if number:  # after an odd line its couplet's second, after an even one the next couplet
            yield from ((lines[number - 1][i], line[i], -1 if number % 2 else 1) for i in places)


def end_pairs(poem):
    """Yield (character, character, sign) for the tones at the ends of the lines, from the second line on."""
    ends = [line[-1] for line in lines_of(poem)]
    yield from ((a, b, 1) for a, b in combinations(ends[1::2], 2))
    yield from ((a, b, -1) for a, b in zip(ends[2::2], ends[3::2], strict=False))


def learn_tones(poems):
    """{character: 平 or 仄}: the division of the characters in two that breaks the fewest links.

    The links are a matrix with 1 or -1 for each; of all numberings of the characters by reals, its
    leading eigenvector fits the links best (normalised by degree, found by power iteration), and its
    signs divide them nearly right. Then each character goes where most of its partners send it.
    """
    pairs = Counter()
    for poem in progress(poems, desc="tones", leave=False):
        pairs.update((*tone_pairs(poem), *end_pairs(poem)))
    if not pairs:
        return {}
    chars = sorted({char for a, b, _ in pairs for char in (a, b)})
    index = {char: i for i, char in enumerate(chars)}
    a, b, weight = np.array([(index[a], index[b], sign * n) for (a, b, sign), n in pairs.items()]).T

    def partners(values):
        """The sum over the links of each character of its partner's value, negative where they differ."""
        return np.bincount(a, weight * values[b], len(chars)) + np.bincount(b, weight * values[a], len(chars))

    links = np.bincount(a, abs(weight), len(chars)) + np.bincount(b, abs(weight), len(chars))
    rhymes = Counter(char for poem in poems for char in line_ends(poem))
    tone = np.array([float(rhymes[char]) for char in chars])  # begin with the rhyme words, which are level
    for _ in range(60):  # the power iteration; the sum with tone itself keeps it from swinging
        tone = tone + partners(tone / np.sqrt(links)) / np.sqrt(links)
        tone /= max(np.linalg.norm(tone), 1e-9)
    for _ in range(30):  # the vote
        votes = partners(np.sign(tone))
        tone = np.sign(votes)
    sure = (links >= LEAST_LINKS) & (abs(votes) >= LEAST_AGREEMENT * links)
    order = np.argsort(-links, kind="stable")  # the commonest first
    return {chars[i]: "平" if votes[i] > 0 else "仄" for i in order if sure[i]}


def learn_rhymes(poems):
    """{character: number of its rhyme group}, of characters that rhyme with each other more than by chance.

    One level of modularity (Blondel et al. 2008): the characters, the commonest first, join in turn the
    group of their partners that gains most over what their frequencies alone would bring about.
    """
    counts = Counter(char for poem in poems for char in dict.fromkeys(line_ends(poem)))
    partners = {char: Counter() for char, _ in counts.most_common()}
    for poem in poems:
        for a, b in combinations(sorted(set(line_ends(poem))), 2):
            partners[a][b] += 1
            partners[b][a] += 1
    degree = {char: sum(others.values()) for char, others in partners.items()}
    group, size = dict(zip(partners, partners, strict=True)), Counter(degree)  # each begins alone
    total = max(1, sum(degree.values()))
    for _ in progress(range(10), desc="rhymes", leave=False):
        for char, others in partners.items():
            size[group[char]] -= degree[char]
            links = Counter()
            for other, n in others.items():
                links[group[other]] += n
            gain = {name: links[name] - degree[char] * size[name] / total for name in [group[char], *sorted(links)]}
            group[char] = max(gain, key=gain.get)
            size[group[char]] += degree[char]
    members, weight = Counter(group.values()), Counter()
    for char, name in group.items():
        weight[name] += counts[char]
    numbers = {name: i for i, name in enumerate(n for n, _ in weight.most_common() if members[n] >= LEAST_MEMBERS)}
    return {char: numbers[name] for char, name in group.items() if name in numbers}


def learn(poems):
    """The Prosody of poems, each of equal lines with ，and 。 after them in turn."""
    return Prosody(learn_tones(poems), learn_rhymes(poems))


# The file: a line of level characters, one of oblique ones, then one for each rhyme group

HEADER = "# Tones (平 level, 仄 oblique) and rhyme groups (韵), commonest first: python -m data.prosody wrote {} lines"


def write_prosody(prosody, path):
    """Write prosody as a text that a person can read, UTF-8."""
    lines = [f"{tone} " + "".join(char for char, its in prosody.tones.items() if its == tone) for tone in "平仄"]
    lines += [f"韵 {group}" for group in prosody.groups()]
    write_file(path, ("\n".join([HEADER.format(len(lines)), *lines]) + "\n").encode("utf-8"))


def read_prosody(path=None):
    """Read what `write_prosody` wrote. Raises UserError if it is not there or damaged."""
    path = path or PROSODY
    remedy = f"{path} is missing or damaged: python -m data.prosody builds it anew"
    try:
        header, *lines, rest = path.read_text(encoding="utf-8").split("\n")  # rest: of a line that was cut off
        kinds, chars = zip(*(line.split(" ") for line in lines), strict=True)
    except (OSError, ValueError):  # UnicodeDecodeError too
        raise UserError(remedy) from None
    whole = header == HEADER.format(len(lines)) and kinds[:3] == ("平", "仄", "韵") and not rest
    if not whole or any(len(set(text)) < len(text) for text in ("".join(chars[:2]), "".join(chars[2:]))):
        raise UserError(remedy)
    tones = {char: kind for kind, text in zip("平仄", chars[:2], strict=True) for char in text}
    rhymes = {char: i for i, text in enumerate(chars[2:]) for char in text}
    return Prosody(tones, rhymes)


def scan(poem, prosody):
    """The tones of a poem, ○ for a character without one, and the groups of its rhyme words."""
    tones = "".join(char if char in "，。" else prosody.tones.get(char, "○") for char in poem)
    groups = prosody.groups()
    names = {char: f"{char}（{groups[number][0]}）" for char, number in prosody.rhymes.items()}
    return f"{tones}  韵：{' '.join(names.get(char, char) for char in line_ends(poem))}"


def report(prosody, poems):
    """Print what was found, as a reader of the poems likes it."""
    count = Counter(char for poem in poems for char in poem if char.isalpha())
    for tone in "平仄":
        chars = [char for char, its in prosody.tones.items() if its == tone]
        share = sum(count[char] for char in chars) / count.total()
        print(f"{tone} {len(chars):>5,} characters, {share:.1%} of the text: {''.join(chars[:20])} ...")
    for group in prosody.groups()[:30]:
        print(f"韵 {len(group):>5,} characters: {group[:20]}")


def main():
    parse(argparse.ArgumentParser(description="Learn tones and rhymes from data/tang.txt into data/prosody.txt."))
    if not CORPUS.exists():
        raise UserError(f"no {CORPUS}: python data/prepare.py makes it")
    check_writable(PROSODY)
    try:
        poems, _ = split(read_poems(CORPUS)[0])  # what is held out stays for measuring
    except ValueError as error:
        raise UserError(str(error)) from None
    prosody = learn(poems)
    if not prosody.tones or not prosody.rhymes:
        raise UserError(f"{CORPUS} has no regulated verse to learn from")
    write_prosody(prosody, PROSODY)
    report(prosody, poems)


if __name__ == "__main__":
    sys.exit(run(main))
