"""The rules of a poem's form, character by character: templates, regulated verse, and their constraint.

A template has an entry for each character of a poem, marks included: a string of the characters that
may stand there, or a Place. NumPy alone; generate.py puts the constraint before the model.
"""

from collections import Counter
from enum import Enum

import numpy as np

from data.poems import FORMS


class Place(Enum):
    ANY = "中"  # any character but a mark or a line break
    LEVEL = "平"
    OBLIQUE = "仄"
    RHYME = "韵"  # level, and of one rhyme group in the whole poem


# The four types of a line of regulated verse, as textbooks print them (王力, 诗词格律), for five characters
# a line. With seven, two more stand in front, the second of the opposite tone of the line's second.
LINES = ("中仄平平仄", "平平仄仄韵", "中平平仄仄", "中仄仄平韵")
IN_FRONT = ("中平", "中仄", "中仄", "中平")
# The types of the first four lines; the next four are those of the first pattern or the second again.
# Lines 2 and 3, 4 and 5, 6 and 7 so agree in their even places. In the last two, line 1 rhymes as well.
PATTERNS = ((0, 1, 2, 3), (2, 3, 0, 1), (3, 1, 2, 3), (1, 3, 0, 1))
RICH = 24  # five rhyme words, and more of the group than a poem can have before the first of them


def poem_template(n_char, n_lines, heads=""):
    """n_lines lines of n_char characters, ，and 。 after them in turn, 。 after the last; heads begin them, one a line.

    poem_template(2, 2, "春风") == ["春", Place.ANY, "，", "风", Place.ANY, "。"]
    """
    line = [Place.ANY] * n_char
    marks = [*("，。"[i % 2] for i in range(n_lines - 1)), "。"]
    template = [entry for mark in marks for entry in (*line, mark)]
    if heads:
        template[:: n_char + 1] = heads
    return template


def regulated_templates(n_char, n_lines):
    """The four templates of regulated verse, lines of 5 or 7 characters, 4 or 8 of them."""
    templates = []
    for first in PATTERNS:
        types = first + PATTERNS[0 if first[2] == 2 else 1]  # eight lines
        lines = [IN_FRONT[i][: n_char - 5] + LINES[i] for i in types[:n_lines]]
        templates.append([entry for i, line in enumerate(lines) for entry in (*map(Place, line), "，。"[i % 2])])
    return templates


def rich_rhymes(prosody, chars):
    """The rhyme groups that a poem may begin: of RICH level characters among chars, which it cannot run out of."""
    level = Counter(prosody.rhymes.get(char) for char in chars if prosody.tones.get(char) == "平")
    return {group for group, count in level.items() if group is not None and count >= RICH}


def may_stand(char, entry, prosody=None, rhymes=()):
    """Whether char may stand where a template has entry; rhymes: the groups that the poem may rhyme on."""
    if isinstance(entry, str):
        return char in entry
    if entry is Place.ANY:
        return char.isalpha()
    if entry is Place.RHYME:
        return prosody.tones.get(char) == "平" and prosody.rhymes.get(char) in rhymes
    return prosody.tones.get(char) == entry.value


def choose_templates(form, given, prosody, chars):
    """(templates, what they do not keep) for the name of a form and characters that are given, {place: character}.

    The templates of regulated verse that can have these characters; if there are none, the form with
    its rhyme alone, and if the characters do not rhyme either, its shape alone. chars: all that can be written.
    Raises ValueError when no poem of that form can be written with them.
    """
    shape, rhymes = poem_template(*FORMS[form]), rich_rhymes(prosody, chars)
    tones = Counter(prosody.tones.get(char) for char in chars)
    if not rhymes or min(tones["平"], tones["仄"]) < len(shape):  # no character comes twice
        found = f"{tones['平']} level and {tones['仄']} oblique characters, {len(rhymes)} rhymes of {RICH} characters"
        raise ValueError(f"the model knows too few characters for {form}: {found}; --loose keeps its shape alone")
    rhymed = [Place.RHYME if after == "。" else entry for entry, after in zip(shape, [*shape[1:], ""], strict=True)]

    def takes(template):
        words = {prosody.rhymes.get(char) for i, char in given.items() if template[i] is Place.RHYME}
        return len(words) < 2 and all(may_stand(char, template[i], prosody, rhymes) for i, char in given.items())

    for templates, lost in ((regulated_templates(*FORMS[form]), ""), ([rhymed], "tones"), ([shape], "tones and rhyme")):
        if fitting := list(filter(takes, templates)):
            return fitting, lost
    raise ValueError(f"no poem of the form {form} has {given}")


class TemplateConstraint:
    """Which characters may come next, so that what follows the first line break fits a template.

    templates: one or more, of one length; a row may go on as any of them allows that it fits so far.
    prosody: the tones and rhymes that the templates speak of. With it, no character comes twice in a
    poem, except doubled on the spot, as in 悠悠. Maps ids (B, t) to a bool mask (V,) or (B, V).
    """

    def __init__(self, templates, chars, prosody=None):
        entries = list(dict.fromkeys(entry for template in templates for entry in template))
        free = [char if char not in entries or not prosody else "" for char in chars]  # a head stands nowhere else
        rhymes = rich_rhymes(prosody, free) if prosody else ()
        kinds = [(chars if isinstance(entry, str) else free, entry) for entry in entries]
        self.masks = np.array([[may_stand(char, entry, prosody, rhymes) for char in some] for some, entry in kinds])
        rhyming = [bool(prosody) and may_stand(char, Place.RHYME, prosody, rhymes) for char in free]
        self.groups = np.array([prosody.rhymes[char] if has else -1 for char, has in zip(free, rhyming, strict=True)])
        self.places = np.array([[entries.index(entry) for entry in template] for template in templates])  # (P, length)
        self.is_rhyme = np.array([entry is Place.RHYME for entry in entries])[self.places]  # (P, length)
        self.is_fixed = np.array([isinstance(entry, str) for entry in entries])[self.places].all(axis=0)  # (length,)
        self.prosody = prosody

    def __call__(self, ids):
        written, t = ids[:, 1:], ids.shape[1] - 1  # (B, t)
        now = self.places[:, t]  # (P,) for P templates: the entries at this place
        if self.prosody is None or self.is_fixed[t]:
            return self.masks[now].any(axis=0)  # (V,)
        fits = self.masks[self.places[:, :t], written[:, None]].all(axis=-1)  # (B, P)
        kinds, row_kinds = np.unique(fits, axis=0, return_inverse=True)  # rows that fit the same templates
        allowed = np.array([self.masks[now[kind]].any(axis=0) for kind in kinds])[row_kinds.ravel()]  # (B, V)
        words = self.is_rhyme[fits.argmax(axis=1), :t]  # (B, t), of a template that the row fits
        group = np.where(words, self.groups[written], -1).max(axis=1, initial=-1)[:, None]  # (B, 1), -1: none yet
        rhyming = (group >= 0) & (self.groups == group)  # (B, V)
        if self.is_rhyme[:, t].any():
            allowed &= rhyming | (group < 0)
        else:  # the last words of the group are kept for the rhymes to come
            np.put_along_axis(rhyming, written, False, axis=1)
            allowed &= ~rhyming | (rhyming.sum(axis=1, keepdims=True) > self.is_rhyme[0, t:].sum())
        return self.without_repeats(allowed, written)

    def without_repeats(self, allowed, written):
        """allowed (B, V) less the characters of written (B, t), but for the last one if it stands alone."""
        last, before = written[:, -1:], written[:, -2:-1]  # (B, 1), or (B, 0) at the beginning
        double = np.take_along_axis(allowed, last, axis=1)
        if before.size:
            double &= last != before
        np.put_along_axis(allowed, written, False, axis=1)
        np.put_along_axis(allowed, last, double, axis=1)
        return allowed
