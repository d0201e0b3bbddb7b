"""data/prepare.py: from every source, past every broken one, to the corpus or to nothing."""

import functools
import http.server
import importlib.metadata
import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tarfile
import threading
from collections import Counter
from hashlib import sha256
from pathlib import Path

import pytest

import data.prepare as prepare
import train
from gpt import Stop, run

TANG = os.fsdecode("全唐诗".encode())  # as a file name, in a locale without Chinese too

from_github = prepare.from_github

DIGITS = "零一二三四五六七八九"


def verse(n):
    """The poem of file n, in traditional and in simplified characters."""
    number = DIGITS[n // 10] + DIGITS[n % 10]
    return (
        f"東風{number}開，白雲{number}盡。萬里{number}來，黃河{number}見。",
        f"东风{number}开，白云{number}尽。万里{number}来，黄河{number}见。",
    )


# What else the 58 files hold, all in the first: the text and why it is dropped.
OTHERS = [
    (verse(0)[0], "a text that is there already"),
    ("", "no text"),
    ("東風□□開，白雲山日盡。萬里江山來，黃河日夜見。", "a lost character (□)"),
    ("東風{鼓/甬}開來，白雲山日盡。萬里江山來，黃河日夜見。", "a character written as its parts ({...})"),
    ("東風山日開（一作來），白雲山日盡。萬里江山來，黃河日夜見。", "a note in brackets"),
    ("東風𠀀日開，白雲山日盡。萬里江山來，黃河日夜見。", "another sign, or a rare character beyond U+9FFF"),
    ("東風山\u2028開，白雲山日盡。萬里江山來，黃河日夜見。", "another sign, or a rare character beyond U+9FFF"),
    ("東風山日開，白雲山日盡。萬里江山來，黃河日夜流見。", "another form"),
    ("東風山日開，白雲山日盡。", "another form"),
]
CORPUS = "".join(verse(n)[1] + "\n" for n in range(58)).encode("utf-8")
DROPPED = Counter(reason for _, reason in OTHERS)


def poem_file(*texts):
    """The bytes of a file of the source: each text in two paragraphs, under a title of its own."""
    poems = [{"title": f"{i}", "paragraphs": [text[:12], text[12:]]} for i, text in enumerate(texts)]
    return json.dumps(poems, ensure_ascii=False).encode("utf-8")


def source_files():
    files = {name: poem_file(verse(n)[0]) for n, name in enumerate(prepare.FILES)}
    files[prepare.FILES[0]] = poem_file(verse(0)[0], *(text for text, _ in OTHERS))
    return files


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
    for name, data in source_files().items():
        for place, content in [(TANG, data), (f"{TANG}/error", b"junk"), ("strains/json", b"junk")]:
            (clone / place).mkdir(parents=True, exist_ok=True)
            (clone / place / name).write_bytes(content)
    return clone


def add(archive, name, data=b"", **fields):
    member = tarfile.TarInfo(name)
    member.size = len(data)
    for field, value in fields.items():
        setattr(member, field, value)
    archive.addfile(member, io.BytesIO(data))


def write_archive(path, files, extra=()):
    """The .tgz of the npm package, its members out of order; extra: more of add's arguments, put in the middle."""
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        for i, (name, data) in enumerate(sorted(files.items())):
            add(archive, f"package/dist/strains/json/{name}", b"junk")
            add(archive, f"package/dist/quantangshi/{name}", data)
            add(archive, f"package/dist/quantangshi/error/{name}", b"junk")
            if i == 30:
                for name, data, fields in extra:
                    add(archive, name, data, **fields)
    return path


@pytest.fixture
def archive(tmp_path):
    return write_archive(tmp_path / "package.tgz", source_files())


@pytest.fixture
def target(tmp_path):
    return tmp_path / "made" / "tang.txt"


def only(target):
    """Whether the folder of target holds target and nothing else."""
    return [path.name for path in target.parent.iterdir()] == [target.name]


# ---------------------------------------------------------------------------------------------------
# The sources


@pytest.mark.parametrize("source", ["folder", "archive"])
def test_a_source_gives_the_corpus(source, target, request, capsys):
    """Files in the wrong order, files of the same name elsewhere, a dropped poem without its reason."""
    assert prepare.prepare(target, request.getfixturevalue(source)) == CORPUS
    assert target.read_bytes() == CORPUS
    assert only(target)
    printed = capsys.readouterr().out
    for reason, count in DROPPED.items():
        assert f"{count:>9,} dropped: {reason}\n" in printed
    assert printed.count("dropped") == len(DROPPED)
    assert f"{58 + len(OTHERS):>9,} poems read" in printed
    assert "       58 poems" in printed


def test_reasons():
    """A poem with □, {鼓/甬}, a note or a foreign sign kept, or dropped under another's reason."""
    convert = prepare.converter()
    for text, reason in OTHERS:
        poems, dropped = prepare.select([verse(0)[1], convert(text)])
        assert (poems, dropped) == ([verse(0)[1]], {reason: 1})


def test_forms():
    """A form other than 2 or 4 couplets of five or seven, one length throughout, is let in; or one of those not."""
    couplet = {n: "山" * n + "，" + "水" * n + "。" for n in (4, 5, 6, 7)}
    kept = [couplet[n] * k for n in (5, 7) for k in (2, 4)]
    others = [couplet[n] * k for n in (5, 7) for k in (1, 3, 5, 6)] + [couplet[4] * 2, couplet[6] * 4]
    mixed = [couplet[5] + couplet[7], couplet[5] * 2 + couplet[7] * 2, "\n" + kept[0], kept[0] + "\n", kept[0][:-1]]
    assert prepare.select(kept + others + mixed)[0] == kept


@pytest.mark.parametrize("sign", ["\u2028", "\u0085", "\u000b", "\u000c", "\u001c"])
def test_only_a_newline_ends_a_line(sign, tmp_path):
    """U+2028 and its kind split a poem, in the corpus or when it is read."""
    poem = verse(1)[1].replace("风", sign)
    assert prepare.select([poem])[0] == []
    (tmp_path / "poems.txt").write_bytes(f"{poem}\n{verse(2)[1]}\n".encode())
    assert train.read_poems(tmp_path / "poems.txt") == [poem, verse(2)[1]]


def test_folder_itself(folder, target):
    """Only a clone's root is taken as --source, not the folder with the files."""
    assert prepare.prepare(target, folder / TANG) == CORPUS


def test_folder_that_lacks_a_file(folder, target):
    """A source with 57 of the 58 files makes a corpus."""
    (folder / TANG / prepare.FILES[-1]).unlink()
    with pytest.raises(Stop, match=r"holds poet\.tang\.0\.json \.\. poet\.tang\.57000\.json") as stop:
        prepare.prepare(target, folder)
    assert stop.value.status == 2
    with pytest.raises(Stop, match="nowhere: there is no such folder or file") as stop:
        prepare.prepare(target, folder / "nowhere")
    assert stop.value.status == 2


def test_archive_writes_nothing(tmp_path, target):
    """../, absolute names and links in the archive write a file or read one outside of it."""
    secret = tmp_path / "secret.json"
    secret.write_bytes(poem_file("outside"))
    files = source_files()
    extra = [
        ("../../evil.json", b"[]", {}),
        (f"{tmp_path.as_posix()}/evil.json", b"[]", {}),
        (f"package/quantangshi/{prepare.FILES[3]}", b"", {"type": tarfile.SYMTYPE, "linkname": secret.as_posix()}),
        (f"package/quantangshi/{prepare.FILES[4]}", b"", {"type": tarfile.LNKTYPE, "linkname": secret.as_posix()}),
        (f"package/quantangshi/{prepare.FILES[5]}", b"", {"type": tarfile.DIRTYPE}),
    ]
    source = write_archive(tmp_path / "package.tgz", files, extra)
    assert prepare.prepare(target, source) == CORPUS
    assert sorted(tmp_path.iterdir()) == [target.parent, source, secret]
    assert only(target)
    del files[prepare.FILES[3]]
    with pytest.raises(Stop, match=r"lacks 1 of 58 files, poet\.tang\.3000\.json first"):
        prepare.prepare(target.with_name("other.txt"), write_archive(source, files, extra))


@pytest.mark.parametrize("end", [0, 1, 3, 9, 20, 100, 3000, -1000])
def test_archive_cut_short(end, archive, target):
    """Part of an archive is taken for all of it, or ends in a traceback."""
    archive.write_bytes(archive.read_bytes()[:end])
    with pytest.raises(Stop, match="not a whole .tgz|lacks"):
        prepare.prepare(target, archive)
    assert not target.parent.exists()


# ---------------------------------------------------------------------------------------------------
# What stands at the final name


@pytest.mark.parametrize(
    "found",
    [b"", b"\x00\xff junk", b"<!DOCTYPE html><title>Sign in</title>", CORPUS[:-1], CORPUS.replace(b"\n", b"\r\n")],
)
def test_wrong_file_is_made_again(found, folder, target, capsys):
    """0 bytes, junk, a page or half a corpus at the final name is trusted, or replaced without a word."""
    target.parent.mkdir()
    target.write_bytes(found)
    assert prepare.prepare(target, folder) == CORPUS
    assert target.read_bytes() == CORPUS
    assert only(target)
    notice = capsys.readouterr().err.splitlines()[0]
    assert notice == f"{target} is not the corpus ({len(found):,} bytes, wrong SHA-256); building it anew"


def test_right_file_is_left_alone(target, monkeypatch, capsys):
    """A corpus that is whole and right is built again, or needs opencc."""
    target.parent.mkdir()
    target.write_bytes(CORPUS)
    before = target.stat().st_mtime_ns
    monkeypatch.setitem(sys.modules, "opencc", None)
    assert prepare.prepare(target) == CORPUS
    assert target.stat().st_mtime_ns == before
    assert f"{target} is there and right" in capsys.readouterr().out


def test_another_corpus_is_refused(folder, target, monkeypatch):
    """A corpus with another SHA-256 is written, over the older file."""
    target.parent.mkdir()
    target.write_bytes(b"older")
    monkeypatch.setattr(prepare, "SHA256", sha256(CORPUS + b"\n").hexdigest())
    with pytest.raises(Stop, match="this is not the corpus"):
        prepare.prepare(target, folder)
    assert target.read_bytes() == b"older"


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_failed_write_leaves_the_older_file(call, folder, target, monkeypatch):
    """A disk that fails in the middle of the write leaves half a corpus, or its temporary file."""

    def fail(*args):
        raise OSError(28, "No space left on device")

    target.parent.mkdir()
    target.write_bytes(b"older")
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="cannot write .*tang.txt: No space left on device"):
        prepare.prepare(target, folder)
    assert target.read_bytes() == b"older"
    assert only(target)


def killed_build(call, target, folder, digest):
    """In a process of its own: a build that is killed as it comes to call, a function of os."""
    prepare.SHA256 = digest
    setattr(os, call, lambda *args: os.kill(os.getpid(), signal.SIGKILL))
    run(lambda: prepare.prepare(target, folder))


@pytest.mark.skipif(os.name == "nt", reason="Windows has no fork server and no SIGKILL")
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_killed_build_leaves_no_corpus(call, folder, target):
    """Kill -9 in the middle of the write leaves half a corpus at its final name."""
    spawn = multiprocessing.get_context("forkserver")
    spawn.set_forkserver_preload(["torch._dynamo"])
    process = spawn.Process(target=killed_build, args=(call, target, folder, prepare.SHA256))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not target.exists()
    assert prepare.prepare(target, folder) == CORPUS


# ---------------------------------------------------------------------------------------------------
# The network


@pytest.fixture
def server():
    """A server on loopback with the 58 files; server.trouble, a function, answers for the 30th."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.rpartition("/")[2]
            self.server.trouble(self) if name == prepare.FILES[30] else self.answer(source_files()[name])

        def answer(self, data, length=None, status=200):
            self.send_response(status)
            if length is not None:
                self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.trouble = lambda handler: handler.answer(source_files()[prepare.FILES[30]])
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def github(server, monkeypatch):
    """The server in GitHub's place."""
    monkeypatch.setattr(
        prepare, "from_github", functools.partial(from_github, f"http://127.0.0.1:{server.server_port}/")
    )
    return server


TROUBLES = {
    "half": (lambda handler: handler.answer(b"[{" * 10, length=1000), "IncompleteRead|20 of 1000 bytes|20 bytes"),
    "nothing": (lambda handler: handler.connection.close(), "closed connection|reset|aborted"),
    "404": (lambda handler: handler.answer(b"no", status=404), "404"),
    "page": (lambda handler: handler.answer(b"<!DOCTYPE html><title>Sign in"), "it begins b'<!DOCTYPE html>"),
    "no HTTP": (lambda handler: handler.wfile.write(b"SSH-2.0-OpenSSH\r\n"), "SSH-2.0"),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_broken_download(trouble, github, target):
    """A server that stops half way, closes, answers 404, a page or no HTTP gives a corpus, or a traceback."""
    github.trouble, message = TROUBLES[trouble]
    with pytest.raises(Stop, match=message) as stop:
        prepare.prepare(target)
    assert prepare.FILES[30] in str(stop.value)
    assert stop.value.status == 1
    assert not target.parent.exists()


def test_github_without_npm(github, target):
    """Without npm the corpus cannot be had."""
    assert prepare.prepare(target) == CORPUS


def npm(action):
    """An npm client: action(folder it runs in) gives its (exit status, stderr)."""

    def run(command, cwd, **options):
        assert command == ["/bin/npm", "pack", "chinese-poetry@2.0.1", "--silent"]
        status, stderr = action(Path(cwd))
        return subprocess.CompletedProcess(command, status, "", stderr)

    return run


def test_npm_comes_first(tmp_path, target, monkeypatch):
    """The npm client is there and is not asked, or its archive is left lying about."""
    folders = []

    def pack(folder):
        folders.append(folder)
        write_archive(folder / "chinese-poetry-2.0.1.tgz", source_files())
        return 0, ""

    monkeypatch.setattr(prepare.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(subprocess, "run", npm(pack))
    assert prepare.prepare(target) == CORPUS
    assert not folders[0].exists()


def cut_archive(folder):
    whole = write_archive(folder / "chinese-poetry-2.0.1.tgz", source_files()).read_bytes()
    (folder / "chinese-poetry-2.0.1.tgz").write_bytes(whole[: len(whole) // 2])
    return 0, ""


def not_runnable(folder):
    raise OSError(8, "Exec format error")


NPM_FAILURES = {
    "error": (lambda folder: (1, "npm error code E404\nnpm error 404 Not Found\n"), "npm error 404 Not Found"),
    "silent": (lambda folder: (1, ""), "no archive came"),
    "nothing": (lambda folder: (0, ""), "no archive came"),
    "cut": (cut_archive, "not a whole .tgz archive"),
    "not runnable": (not_runnable, "Exec format error"),
}


@pytest.mark.parametrize("failure", NPM_FAILURES)
def test_github_when_npm_fails(failure, github, target, monkeypatch, capsys):
    """An npm that fails, brings nothing, half an archive or does not start ends it, or is passed over silently."""
    action, message = NPM_FAILURES[failure]
    monkeypatch.setattr(prepare.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(subprocess, "run", npm(action))
    assert prepare.prepare(target) == CORPUS
    notice = capsys.readouterr().err.splitlines()[-1]
    assert message in notice
    assert notice.endswith("; trying GitHub")


# ---------------------------------------------------------------------------------------------------
# opencc


def no_such_package(name):
    raise importlib.metadata.PackageNotFoundError(name)


@pytest.mark.parametrize(
    ("package", "version", "found"),
    [
        ("opencc", lambda name: "1.1.9", "opencc 1.1.9"),
        ("opencc-python-reimplemented", lambda name: "0.1.7", "opencc-python-reimplemented 0.1.7"),
        ("opencc-python-reimplemented", lambda name: "1.4.2", "opencc-python-reimplemented 1.4.2"),
        (None, no_such_package, "opencc"),
    ],
)
def test_another_opencc(package, version, found, folder, target, monkeypatch):
    """Another release, another package or a stray file of the name opencc converts the corpus its own way."""
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: {"opencc": [package]} if package else {})
    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(Stop, match=r"needs opencc 1\.4\.2: pip install") as stop:
        prepare.prepare(target, folder)
    assert found in str(stop.value).partition("requirements.txt")[2]
    assert not target.parent.exists()


def test_no_opencc(folder, target, monkeypatch):
    """Without opencc the corpus is made of unconverted text, or the import error is a traceback."""
    monkeypatch.setitem(sys.modules, "opencc", None)
    with pytest.raises(Stop, match=r"needs opencc 1\.4\.2: pip install"):
        prepare.prepare(target, folder)
    assert not target.parent.exists()


# ---------------------------------------------------------------------------------------------------
# The real one


@pytest.mark.skipif(not prepare.CORPUS.exists(), reason="data/tang.txt is not made; python data/prepare.py makes it")
def test_the_real_corpus(monkeypatch, capsys):
    """The corpus is not the lesson's, holds a poem twice, or shares one between training and validation."""
    monkeypatch.undo()
    data = prepare.CORPUS.read_bytes()
    assert prepare.check(data)
    prepare.report(data)
    printed = capsys.readouterr().out.split()
    assert {"35,135", "6,289", "797", "111"} <= set(printed)
    poems = train.read_poems(prepare.CORPUS)
    assert len(poems) == len(set(poems)) == 35135
    text = "\n".join(poems)
    assert (len(set(text)), text.count("春风"), text.count("春风。")) == (6289, 797, 111)
    training, validation = train.split(poems)
    assert set(training).isdisjoint(validation)
    assert len(training) + len(validation) == len(poems)
    assert 0.04 < len(validation) / len(poems) < 0.06
