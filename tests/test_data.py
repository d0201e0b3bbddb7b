"""data/prepare.py and data/poems.py: every source gives the corpus or nothing; what a poem is, typed or read."""

import contextlib
import importlib.metadata
import io
import json
import os
import re
import socketserver
import sys
import tarfile
import threading
import time
import types
from collections import Counter
from hashlib import sha256
from itertools import product

import pytest
from conftest import posix
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import data.poems as poems_module
import data.prepare as prepare
from data.poems import FORMS, in_known_characters
from data.script import UserError

TANG = os.fsdecode("全唐诗".encode())  # as a file name, in a locale without Chinese too
FROM_GITHUB = prepare.from_github
DIGITS = "零一二三四五六七八九"


def verse(n):
    """The poem of file n, in traditional and in simplified characters."""
    number = DIGITS[n // 10] + DIGITS[n % 10]
    return (
        f"東風{number}開，白雲{number}盡。萬里{number}來，黃河{number}見。",
        f"东风{number}开，白云{number}尽。万里{number}来，黄河{number}见。",
    )


# What else the 58 files hold, all in the last: the text and why it is dropped.
OTHERS = [
    (verse(0)[0], "a text that is there already"),  # the first is kept
    ("", "no text"),
    ("東風□□開，白雲山日盡。萬里江山來，黃河日夜見。", "a lost character (□)"),
    ("東風{鼓/甬}開來，白雲山日盡。萬里江山來，黃河日夜見。", "a character written as its parts ({...})"),
    ("東風山日開（一作來），白雲山日盡。萬里江山來，黃河日夜見。", "a note in brackets"),
    ("東風𠀀日開，白雲山日盡。萬里江山來，黃河日夜見。", "another sign, or a rare character beyond U+9FFF"),
    ("東風山\u2028開，白雲山日盡。萬里江山來，黃河日夜見。", "another sign, or a rare character beyond U+9FFF"),
    ("東風山日開，白雲山日盡。萬里江山來，黃河日夜流見。", "another form"),
    ("東風山日開，白雲山日盡。", "another form"),
]
CORPUS = "".join(verse(n)[1] + "\n" for n in range(58)).encode()


def poem_file(*texts):
    """The bytes of a file of the source: each text in two paragraphs, under a title of its own."""
    poems = [{"title": f"{i}", "paragraphs": [text[:12], text[12:]]} for i, text in enumerate(texts)]
    return json.dumps(poems, ensure_ascii=False).encode()


SOURCE = {name: poem_file(verse(n)[0]) for n, name in enumerate(prepare.FILES)}
SOURCE[prepare.FILES[-1]] = poem_file(*(text for text, _ in OTHERS), verse(57)[0])


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    """Nothing here may reach for npm or GitHub, and the small corpus counts as the right one."""
    monkeypatch.setattr(prepare.shutil, "which", lambda name: None)
    monkeypatch.setattr(prepare, "from_github", None)
    monkeypatch.setattr(prepare, "SHA256", sha256(CORPUS).hexdigest())


@pytest.fixture
def folder(tmp_path):
    """A clone: the 58 files, and the other files of those names that stand beside them."""
    clone = tmp_path / "clone"
    for place, files in [(TANG, SOURCE), (f"{TANG}/error", dict.fromkeys(SOURCE, b"junk")), ("a/json", {})]:
        (clone / place).mkdir(parents=True)
        for name, data in files.items():
            (clone / place / name).write_bytes(data)
    return clone


def add(archive, name, data=b"", **fields):
    member = tarfile.TarInfo(name)
    member.size = len(data)
    for field, value in fields.items():
        setattr(member, field, value)
    archive.addfile(member, io.BytesIO(data))


def write_archive(path, files=SOURCE, extra=()):
    """The .tgz of the npm package, its members out of order; extra: more of add's arguments, put in the middle."""
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        for i, (name, data) in enumerate(sorted(files.items())):
            add(archive, f"package/dist/strains/json/{name}", b"junk")
            add(archive, f"package/dist/quantangshi/{name}", data)
            add(archive, f"package/dist/quantangshi/error/{name}", b"junk")
            for other, content, fields in extra if i == 30 else ():
                add(archive, other, content, **fields)
    return path


@pytest.fixture
def archive(tmp_path):
    return write_archive(tmp_path / "package.tgz")


@pytest.fixture
def target(tmp_path):
    """Where the corpus goes, in a folder of its own."""
    (tmp_path / "made").mkdir()
    return tmp_path / "made" / "tang.txt"


def names(target):
    return [path.name for path in target.parent.iterdir()]


# ---------------------------------------------------------------------------------------------------
# The sources


@pytest.mark.parametrize("source", ["clone", "clone/mine", "package.tgz"])
def test_a_source_gives_the_corpus(source, folder, archive, target, tmp_path, capsys):
    """Files out of order, others of their name or a second of two equal poems go in; a dropped one is not counted."""
    if source == "clone/mine":
        (folder / TANG).rename(tmp_path / source)
    assert prepare.prepare(target, tmp_path / source) == target.read_bytes() == CORPUS
    assert names(target) == ["tang.txt"]
    printed = capsys.readouterr().out
    dropped = {reason: int(count) for count, reason in re.findall(r"(\d+) dropped: (.+)", printed)}
    assert dropped == Counter(reason for _, reason in OTHERS)
    read, kept = map(int, re.findall(r"(\d+) poems", printed))
    assert (read, kept) == (58 + len(OTHERS), 58)
    assert f"{len(CORPUS.decode()) - 1:,} characters, {len(set(CORPUS.decode()))} different ones" in printed
    assert sha256(CORPUS).hexdigest() in printed


def test_what_is_kept():
    """Another number or length of lines, a mark or a character out of place is let in, or a good poem is not."""

    def poem(n, lines, char="山"):
        return "".join(char * n + "，。"[i % 2] for i in range(lines))

    def kept(text):
        return prepare.select([text])[0] == [text]

    for n, lines in product(range(4, 10), range(17)):
        assert kept(poem(n, lines)) == ((n, lines) in FORMS.values())
    assert kept(poem(5, 4, "\u4e00"))
    assert kept(poem(7, 8, "\u9fff"))
    assert not kept(poem(5, 2) + poem(7, 2))
    for good in (poem(*form) for form in FORMS.values()):
        for i, new in product(range(len(good)), ["", "山", "山山", "，", "。", "。\n", "\u4dff", "\ua000", "A", "〇"]):
            text = good[:i] + new + good[i + 1 :]
            assert kept(text) == (text == good)


@pytest.mark.parametrize(
    "data", [b"", b"<!DOCTYPE html>", b"\xff", b"7", b'{"a": 1}', b"[{}]", b'[{"paragraphs": [1]}]']
)
def test_a_file_without_poems(data):
    """A file of the source that is damaged, or holds something else, is a traceback."""
    name = prepare.FILES[7]
    with pytest.raises(UserError, match=r"^poet\.tang\.7000\.json is not a file of poems: it begins b'") as caught:
        prepare.read_texts((SOURCE | {name: data}).items())
    assert caught.value.status == 1


def test_a_source_that_is_none(folder, archive, target):
    """A source that is not there, or has 57 of the 58 files, makes a corpus, a traceback or a leftover."""
    (folder / TANG / prepare.FILES[-1]).unlink()
    write_archive(archive, {name: SOURCE[name] for name in prepare.FILES if name != prepare.FILES[3]})
    for source, message, status in [
        (folder, r"holds poet\.tang\.0\.json \.\. poet\.tang\.57000\.json", 2),
        (archive, r"no whole \.tgz archive \(1 of 58 files are missing\)", 2),
        (folder / "nowhere", "nowhere is no folder and no whole .tgz archive", 2),
    ]:
        with pytest.raises(UserError, match=message) as caught:
            prepare.prepare(target, source)
        assert caught.value.status == status
    assert names(target) == []


def test_archive_writes_nothing(tmp_path, target):
    """../, absolute names and links in the archive write a file, or read one outside of it."""
    secret = tmp_path / "secret.json"
    secret.write_bytes(poem_file("outside"))
    extra = [
        ("../../evil.json", b"[]", {}),
        (f"{tmp_path.as_posix()}/evil.json", b"[]", {}),
        (f"package/quantangshi/{prepare.FILES[3]}", b"", {"type": tarfile.SYMTYPE, "linkname": secret.as_posix()}),
        (f"package/quantangshi/{prepare.FILES[4]}", b"", {"type": tarfile.LNKTYPE, "linkname": secret.as_posix()}),
        (f"package/quantangshi/{prepare.FILES[5]}", b"", {"type": tarfile.DIRTYPE}),
    ]
    source = write_archive(tmp_path / "package.tgz", SOURCE, extra)
    assert prepare.prepare(target, source) == CORPUS
    assert sorted(tmp_path.iterdir()) == [target.parent, source, secret]


@given(st.floats(0, 0.9999), st.integers(0, 7), st.booleans())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_archive(archive, place, bit, cut):
    """An archive that was cut short, or in which a bit flipped, is a traceback, or loses a poem unnoticed."""
    whole = archive.read_bytes()
    place = int(place * len(whole))
    archive.write_bytes(whole[:place] + (b"" if cut else bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :]))
    with contextlib.suppress(UserError):  # it may say so
        assert len(prepare.read_texts(prepare.from_archive(archive))) == 58 + len(OTHERS)
    archive.write_bytes(whole)


@pytest.mark.parametrize("found", [b"", b"\x00\xff junk", b"<!DOCTYPE html>", CORPUS[:-1], CORPUS + b"\r\n"])
def test_a_wrong_file_is_made_again(found, folder, target, capsys):
    """Nothing, junk, a page or half a corpus at the final name is trusted, or replaced without a word."""
    target.write_bytes(found)
    assert prepare.prepare(target, folder) == target.read_bytes() == CORPUS
    notice = capsys.readouterr().err.splitlines()[0]
    assert notice == f"{target} is not the corpus ({len(found):,} bytes, wrong SHA-256); building it anew"


@pytest.mark.parametrize("source", [None, "clone"])
def test_a_right_file_is_left_alone(source, target, monkeypatch, capsys):
    """A corpus that is right is built again or needs opencc; a --source that is not read is passed over silently."""
    target.write_bytes(CORPUS)
    before = target.stat().st_mtime_ns
    monkeypatch.setattr(prepare, "converter", None)
    assert prepare.prepare(target, source) == CORPUS
    assert target.stat().st_mtime_ns == before
    out, err = capsys.readouterr()
    assert f"{target} is up to date" in out
    assert err == (f"--source clone was not read; delete {target} to build it anew\n" if source else "")


@pytest.mark.parametrize(
    ("packages", "found"), [(["opencc", "o2"], r"opencc 1\.1\.9, o2 1\.1\.9"), ([], "one of no package")]
)
def test_another_corpus_is_refused(packages, found, folder, target, monkeypatch):
    """A corpus that another release or package of opencc makes is written, or nothing says why it is wrong."""
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: {"opencc": packages} if packages else {})
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.1.9")
    monkeypatch.setattr(prepare, "converter", lambda: (str, ""))
    target.write_bytes(b"older")
    with pytest.raises(UserError, match=rf"this is not the corpus.*opencc \(found {found}, needed 1\.4\.2\)"):
        prepare.prepare(target, folder)
    assert target.read_bytes() == b"older"
    assert names(target) == ["tang.txt"]


def test_a_folder_in_the_way_is_seen_first(target, monkeypatch):
    """That the corpus cannot be written is found out after all files were fetched."""
    monkeypatch.setattr(prepare, "from_anywhere", None)
    target.with_name(".tang.txt.tmp").mkdir()
    with pytest.raises(UserError, match=r"cannot write .*tang\.txt: .*\.tang\.txt\.tmp"):
        prepare.prepare(target)


@pytest.mark.parametrize("name", ["tang.txt", prepare.FILES[0]])
def test_a_disk_that_cannot_be_read(name, folder, target, monkeypatch):
    """An error without the file's name, as Python's is when a disk fails, is taken for a reader who left: status 0."""
    read = poems_module.Path.read_bytes

    def read_or_fail(path):
        if path.name == name:
            raise OSError(5, "Input/output error")
        return read(path)

    target.write_bytes(b"older")
    monkeypatch.setattr(poems_module.Path, "read_bytes", read_or_fail)
    with pytest.raises(OSError, match="Input/output error") as caught:
        prepare.prepare(target, folder)
    assert caught.value.filename.endswith(name)


# ---------------------------------------------------------------------------------------------------
# The network


@pytest.fixture
def github(monkeypatch):
    """A server on loopback in GitHub's place; its `trouble`, a function, answers for the 30th file."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            name = self.rfile.readline().split()[1].decode().rpartition("/")[2]
            while self.rfile.readline().strip():
                pass
            trouble = self.server.trouble if name == prepare.FILES[30] else None
            self.wfile.write(SOURCE_HEAD + SOURCE[name] if trouble is None else trouble())

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.trouble = None
        monkeypatch.setattr(
            prepare, "from_github", lambda: FROM_GITHUB(f"http://127.0.0.1:{server.server_address[1]}/")
        )
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


SOURCE_HEAD = b"HTTP/1.0 200 OK\r\n\r\n"
TROUBLES = {
    "half": (lambda: b"HTTP/1.0 200 OK\r\nContent-Length: 1000\r\n\r\n" + b"[{" * 10, "IncompleteRead|20 bytes"),
    "404": (lambda: b"HTTP/1.0 404 Not Found\r\n\r\n", "404"),
    "silence": (lambda: time.sleep(0.4) or b"", "timed out"),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_network_that_fails(trouble, github, target, monkeypatch):
    """Half a file, no answer or an error is taken for a file, or is a traceback."""
    monkeypatch.setattr(prepare, "TIMEOUT", 0.2)
    github.trouble, message = TROUBLES[trouble]
    with pytest.raises(UserError, match=rf"poet\.tang\.30000\.json.*({message})"):
        prepare.prepare(target)
    assert names(target) == []


NPM = {  # what a client's script does in its folder, and what is said of it before GitHub is asked
    "works": ("cp {archive} chinese-poetry-2.0.1.tgz; seq 30000", None),
    "fails": ("echo 'error code E404'; echo 'npm: 404 Not Found' >&2; exit 1", "failed: npm: 404 Not Found"),
    "brings nothing": ("exit 0", "failed: no archive came"),
    "brings half": ("head -c 3000 {archive} > chinese-poetry-2.0.1.tgz", "no whole .tgz archive"),
    "speaks GBK": (r"printf '\264\355\316\363'; exit 1", "failed: "),
    "is not there": (None, "No such file"),
}  # fmt: skip


@posix
@pytest.mark.parametrize("client", NPM)
def test_npm_comes_first(client, github, archive, tmp_path, target, monkeypatch, capfd):
    """The npm client is not asked, waits for someone to read it, or its failure ends the build or is not said."""
    action, said = NPM[client]
    script = tmp_path / "npm"
    words = "pack chinese-poetry@2.0.1 --silent"
    if action:
        action = action.format(archive=archive)
        script.write_text(f'#!/bin/sh\n[ "$*" = "{words}" ] || exit 9\npwd > {tmp_path}/where\n{action}\n')
        script.chmod(0o755)
    monkeypatch.setattr(prepare.shutil, "which", lambda name: str(script) if name == "npm" else None)
    monkeypatch.setattr(prepare, "time", types.SimpleNamespace(sleep=lambda seconds: threading.Event().wait(0.002)))
    if not said:
        monkeypatch.setattr(prepare, "from_github", None)
    assert prepare.prepare(target) == CORPUS
    assert not action or not os.path.exists((tmp_path / "where").read_text().strip())
    err = capfd.readouterr().err.splitlines()
    assert len(err) == (2 if said else 1)
    assert not said or (said in err[-1] and err[-1].endswith("; trying GitHub"))


def fails(text):
    raise RuntimeError


BROKEN = types.SimpleNamespace(OpenCC=lambda name: types.SimpleNamespace(convert=fails))


@pytest.mark.parametrize(("module", "reason"), [(None, "halted"), (BROKEN, "RuntimeError")])
def test_an_opencc_that_is_missing_or_fails(module, reason, folder, target, monkeypatch):
    """Without opencc the corpus stays unconverted; typed text ends the command, or nothing says what is missing."""
    for place in (prepare, poems_module):
        monkeypatch.setattr(place, "converter", poems_module.converter.__wrapped__)  # which keeps what it found
    monkeypatch.setitem(sys.modules, "opencc", module)
    assert in_known_characters("風,", set("风，")) == ("風，", {",": "，"})
    assert re.search(f"opencc is missing or fails: .*{reason}", poems_module.converter()[1])
    with pytest.raises(UserError, match=rf"needs opencc 1\.4\.2: pip install .*{reason}"):
        prepare.prepare(target, folder)
    assert names(target) == []
