"""What a poem is: its forms and marks, typed text brought to the corpus's characters, a corpus, its split.

No torch and no numpy here; opencc is loaded only for a text that needs it.
"""

import functools
import unicodedata
import zlib
from collections import Counter
from pathlib import Path

CORPUS = Path(__file__).resolve().with_name("tang.txt")
FORMS = {"五绝": (5, 4), "七绝": (7, 4), "五律": (5, 8), "七律": (7, 8)}  # characters a line, lines
PINYIN = {"wujue": "五绝", "qijue": "七绝", "wulv": "五律", "qilv": "七律"}  # as they are typed in Latin letters
# Marks that no Tang poem here has, and the two that stand for them.
MARKS = {**dict.fromkeys(",;:、；：﹐､", "，"), **dict.fromkeys(".!?！？…．｡", "。")}

# Fillers and joiners, which show nothing though Unicode counts them among letters, marks and signs.
FILLERS = "\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0"


def is_invisible(char):
    """Whether char shows nothing and is no white space: control and format characters, variation selectors, FILLERS."""
    if unicodedata.category(char) in ("Cc", "Cf"):
        return not char.isspace()
    return char in FILLERS or "VARIATION SELECTOR" in unicodedata.name(char, "")


def tidy(text):
    """(text, a Counter of the invisible characters left out), so that what looks the same is the same text.

    Characters are composed (NFC), and white space between them is a single space; only a newline ends a line.
    """
    gone = Counter(char for char in text if is_invisible(char))
    text = unicodedata.normalize("NFC", text.translate(dict.fromkeys(map(ord, gone))))
    return "\n".join(" ".join(line.split()) for line in text.split("\n")), gone


@functools.cache
def converter():
    """(the function from traditional to simplified characters, ""); without opencc (one that changes nothing, why)."""
    try:
        from opencc import OpenCC

        convert = OpenCC("t2s").convert
        convert("漢")  # so that it fails here, if it does
        return convert, ""
    except Exception as error:  # opencc raises several kinds
        return str, f"; traditional characters stay, opencc is missing or fails: {str(error) or type(error).__name__}"


def substitutes(char):
    """Yield what may stand for a typed character that a model does not know, the best first."""
    if char in MARKS:
        yield MARKS[char]
    if char.isspace():
        yield ""
    plain = unicodedata.normalize("NFKC", char)  # the letter itself for one from a PDF, such as U+2F08 for 人
    yield from (plain, MARKS.get(plain, plain))
    if plain.isprintable():  # a surrogate, which stands for a byte that is not UTF-8, is not
        yield converter()[0](plain)  # last, because this loads opencc


def in_known_characters(text, known):
    """(text, changes) in known characters: only what is not known is replaced; changes: {old: new}.

    A character without a known substitute stays as it is.
    """
    changes = {}
    for char in dict.fromkeys(text):
        if char not in known:
            new = next((new for new in substitutes(char) if all(c in known for c in new)), char)
            if new != char:
                changes[char] = new
    return "".join(changes.get(char, char) for char in text), changes


def read_file(path):
    """The bytes of a file. Raises OSError, which names path, as Python's does not for a disk that fails."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def read_poems(path):
    """(poems, remarks) of a corpus file, a poem a line, as `tidy` has it; remarks: a line a kind of thing left out.

    Raises OSError, and ValueError for a file that is not UTF-8.
    """
    try:
        text = read_file(path).decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from None
    text, gone = tidy(text)
    lines = [line for line in text.split("\n") if line]
    poems, remarks = list(dict.fromkeys(lines)), []
    if len(lines) > len(poems):
        remarks.append(f"{len(lines) - len(poems):,} poems that were there already are left out")
    if gone:
        names = "  ".join(f"U+{ord(char):04X} {n:,}" for char, n in gone.most_common())
        remarks.append(f"{gone.total():,} invisible characters are left out: {names}")
    return poems, remarks


def is_validation(poem):
    """A rule on the poem alone, so that no order, seed or filter can leak a validation poem into training."""
    return zlib.crc32(poem.encode("utf-8")) % 20 == 0


def split(poems):
    """(training poems, validation poems), in the order they come in."""
    return [poem for poem in poems if not is_validation(poem)], [poem for poem in poems if is_validation(poem)]
