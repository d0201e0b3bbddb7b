"""data/: every source gives the corpus or nothing; what a poem is, typed or read from a file."""

import functools
import http.server
import importlib.metadata
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
import types
import zlib
from collections import Counter
from hashlib import sha256
from pathlib import Path

import pytest
from conftest import ROOT, posix, real_corpus

import data.poems as poems_module
import data.prepare as prepare
from data.poems import CORPUS as TANG_POEMS
from data.poems import is_validation, normalise, read_poems, split
from data.prepare import CorpusError, SourceError

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


def test_the_first_of_equal_texts_is_kept():
    """Of equal texts the last was kept, so that the poems stood in another order."""
    texts = [verse(n)[1] for n in (3, 1, 3, 2, 1)]
    assert prepare.select(texts)[0] == texts[:2] + texts[3:4]


@pytest.mark.parametrize("char", ["\u3400", "\u4dff", "\ua000", "A", "〇"])
def test_rare_characters_are_dropped(char):
    """A character before U+4E00 or after U+9FFF came into the corpus."""
    for place in "风云":  # in the first line of a couplet and in the second
        assert prepare.select([verse(1)[1].replace(place, char)])[0] == []
        assert prepare.select([verse(1)[1].replace(place, "\u4e00")])[0]


@pytest.mark.slow
@pytest.mark.parametrize("data", [b"", b"[", b"\xff", b"7", b'{"a": 1}', b"[{}]", b'[{"paragraphs": [1]}]'])
def test_a_file_without_poems(data, folder, target):
    """A file of the source that is damaged, or holds something else, was a traceback."""
    (folder / TANG / prepare.FILES[7]).write_bytes(data)
    with pytest.raises(CorpusError, match=r"poet\.tang\.7000\.json is not a file of poems: it begins b'"):
        prepare.prepare(target, folder)
    assert not target.parent.exists()


def test_folder_itself(folder, target):
    """Only a clone's root was taken as --source, not the folder with the files, whatever its name."""
    assert prepare.prepare(target, folder / TANG) == CORPUS
    (folder / TANG).rename(folder / "mine")
    assert prepare.prepare(target.with_name("other.txt"), folder / "mine") == CORPUS


def test_folder_that_lacks_a_file(folder, target):
    """A source with 57 of the 58 files makes a corpus."""
    (folder / TANG / prepare.FILES[-1]).unlink()
    with pytest.raises(SourceError, match=r"holds poet\.tang\.0\.json \.\. poet\.tang\.57000\.json"):
        prepare.prepare(target, folder)
    with pytest.raises(SourceError, match="nowhere: there is no such folder or file"):
        prepare.prepare(target, folder / "nowhere")


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
    with pytest.raises(CorpusError, match=r"lacks 1 of 58 files, poet\.tang\.3000\.json first"):
        prepare.prepare(target.with_name("other.txt"), write_archive(source, files, extra))


@pytest.mark.parametrize("end", [0, 1, 3, 9, 20, 100, 3000, -1000])
def test_archive_cut_short(end, archive, target):
    """Part of an archive is taken for all of it, or ends in a traceback."""
    archive.write_bytes(archive.read_bytes()[:end])
    with pytest.raises(CorpusError, match="not a whole .tgz|lacks"):
        prepare.prepare(target, archive)
    assert not target.parent.exists()


# ---------------------------------------------------------------------------------------------------
# What stands at the final name


@pytest.mark.slow
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
    assert f"{target} is up to date" in capsys.readouterr().out


@pytest.mark.slow
def test_another_corpus_is_refused(folder, target, monkeypatch):
    """A corpus with another SHA-256 is written, over the older file."""
    target.parent.mkdir()
    target.write_bytes(b"older")
    monkeypatch.setattr(prepare, "SHA256", sha256(CORPUS + b"\n").hexdigest())
    with pytest.raises(CorpusError, match="this is not the corpus"):
        prepare.prepare(target, folder)
    assert target.read_bytes() == b"older"


@pytest.mark.parametrize("call", ["write_bytes", "replace"])
def test_failed_write_leaves_the_older_file(call, folder, target, monkeypatch):
    """A disk that fails in the middle of the write left half a corpus, or its temporary file."""

    def fail(*args):
        raise OSError(28, "No space left on device")

    target.parent.mkdir()
    target.write_bytes(b"older")
    monkeypatch.setattr(*((os, call) if call == "replace" else (Path, call)), fail)
    with pytest.raises(CorpusError, match="cannot write .*tang.txt: No space left on device"):
        prepare.prepare(target, folder)
    monkeypatch.undo()
    assert target.read_bytes() == b"older"
    assert only(target)


@pytest.mark.slow
@pytest.mark.parametrize("refusals", [1, 4, 5])
def test_a_held_file_is_tried_again(refusals, folder, target, monkeypatch):
    """A virus scanner that held the file for a moment ended the build, or one that never lets go was waited for."""
    replace, waits, refused = os.replace, [], []

    def held(*paths):
        if len(refused) < refusals:
            refused.append(paths)
            raise PermissionError(13, "The process cannot access the file")
        replace(*paths)

    monkeypatch.setattr(os, "replace", held)
    monkeypatch.setattr(time, "sleep", waits.append)
    if refusals < 5:
        assert prepare.prepare(target, folder) == CORPUS
        assert only(target)
    else:
        with pytest.raises(CorpusError, match="cannot write .*tang.txt: The process cannot access the file"):
            prepare.prepare(target, folder)
        assert list(target.parent.iterdir()) == []
        assert 1 <= sum(waits) <= 2


class Unread(io.StringIO):
    """A stream whose reader has gone, or whose disk is full."""

    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_output_that_fails_costs_no_corpus(name, folder, target, monkeypatch):
    """The corpus was not written when nobody read the figures, as in `prepare.py | head -1`."""
    target.parent.mkdir()
    target.write_bytes(b"wrong, so that stderr has something to say")
    monkeypatch.setattr(sys, name, Unread())
    assert prepare.prepare(target, folder) == CORPUS
    assert target.read_bytes() == CORPUS


@posix
def test_killed_build_leaves_no_corpus(folder, target):
    """Kill -9 in the middle of the write left half a corpus, or a temporary file for ever."""
    code = """
import os, signal, sys
import data.prepare as prepare
prepare.SHA256 = sys.argv[3]
os.replace = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
prepare.prepare(sys.argv[1], sys.argv[2])
"""
    command = [sys.executable, "-c", code, target, folder, prepare.SHA256]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == -signal.SIGKILL
    assert not target.exists()
    assert prepare.prepare(target, folder) == CORPUS
    assert only(target)


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


@pytest.mark.slow
@pytest.mark.parametrize("trouble", TROUBLES)
def test_broken_download(trouble, github, target):
    """A server that stops half way, closes, answers 404, a page or no HTTP gives a corpus, or a traceback."""
    github.trouble, message = TROUBLES[trouble]
    with pytest.raises(CorpusError, match=message) as caught:
        prepare.prepare(target)
    assert prepare.FILES[30] in str(caught.value)
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


@pytest.mark.slow
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


@posix
def test_an_npm_that_speaks_another_encoding(github, tmp_path, target, monkeypatch, capsys):
    """The message of a failing npm, in GBK, was a traceback."""
    client = tmp_path / "npm"
    client.write_bytes("#!/bin/sh\necho 错误 >&2\nexit 1\n".encode("gbk"))
    client.chmod(0o755)
    monkeypatch.setattr(prepare.shutil, "which", lambda name: str(client))
    assert prepare.prepare(target) == CORPUS
    assert capsys.readouterr().err.endswith("; trying GitHub\n")


# ---------------------------------------------------------------------------------------------------
# opencc


@pytest.mark.slow
@pytest.mark.parametrize(
    ("packages", "found"),
    [
        (["opencc"], "opencc 1.1.9"),
        (["opencc-python-reimplemented"], "opencc-python-reimplemented 1.1.9"),
        ([], "one of no package"),
    ],
)
def test_another_opencc(packages, found, folder, target, monkeypatch):
    """Another release or package converted the corpus its own way, and nothing, or a traceback, said why."""
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: {"opencc": packages} if packages else {})
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.1.9")
    monkeypatch.setattr(prepare, "converter", lambda: str)
    with pytest.raises(CorpusError, match="this is not the corpus: its SHA-256 should be") as caught:
        prepare.prepare(target, folder)
    assert f"opencc (found {found}, needed 1.4.2)" in str(caught.value)
    assert not target.parent.exists()


@pytest.mark.parametrize("module", [None, types.ModuleType("opencc")])
def test_no_opencc(module, folder, target, monkeypatch):
    """Without opencc, or with a stray file of its name, the text stayed unconverted, or a traceback came."""
    monkeypatch.setitem(sys.modules, "opencc", module)
    with pytest.raises(CorpusError, match=r"needs opencc 1\.4\.2: pip install"):
        prepare.prepare(target, folder)
    assert not target.parent.exists()


# ---------------------------------------------------------------------------------------------------
# As a program


MAIN = """
import sys
from pathlib import Path
import data.prepare as prepare
prepare.SHA256, path = sys.argv.pop(), Path(sys.argv.pop())
prepare.prepare.__defaults__ = (path, None)
sys.exit(prepare.main())
"""


def python(*arguments, **options):
    environment = os.environ | options.pop("env", {})
    command = [sys.executable, *map(os.fspath, arguments)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.run(command, cwd=ROOT, encoding="utf-8", env=environment, check=False, **options)


def build(folder, target, **options):
    """`prepare.py --source folder`, but for the small corpus, which goes to target."""
    return python("-c", MAIN, "--source", folder, target, prepare.SHA256, **options)


def test_help_needs_no_torch():
    """The help loaded torch, half a second and more; or it died under -OO or PYTHONSAFEPATH."""
    code = "import sys; import data.poems, data.prepare; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    assert python("-c", code).stdout == "[]\n"
    result = python("-OO", "data/prepare.py", "--help", env={"PYTHONSAFEPATH": "1"})
    assert (result.returncode, result.stderr) == (0, "")
    assert "--source" in result.stdout


def status(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["prepare.py", *map(str, arguments)])
    return prepare.main()


def test_a_wrong_source_is_wrong_usage(tmp_path, monkeypatch, capsys):
    """A --source that is not there, or a folder without the files, ended with the status of a failure."""
    monkeypatch.setattr(prepare.prepare, "__defaults__", (tmp_path / "tang.txt", None))
    for source, message in [(tmp_path / "nowhere", "there is no such folder or file"), (tmp_path, "no folder at or")]:
        assert status(monkeypatch, "--source", source) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, 0),
        (CorpusError("no network"), 1),
        (SourceError("no such folder"), 2),
        (PermissionError(13, "Permission denied", "tang.txt"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_status(error, code, monkeypatch, capsys):
    """A failure or Ctrl-C ended in a traceback, in more than a line, or with the status of success."""

    def fail(**options):
        if error:
            raise error

    monkeypatch.setattr(prepare, "prepare", fail)
    assert status(monkeypatch) == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (code in (1, 2))
    assert all(line.startswith("prepare.py: ") and str(error) in line for line in lines)


@pytest.mark.slow
@posix
@pytest.mark.parametrize(("module", "code"), [("tqdm", -signal.SIGINT), ("opencc", 130)])
def test_ctrl_c(module, code, tmp_path):
    """Ctrl-C was a traceback, while the imports ran (of which tqdm is one) or later (when opencc is loaded)."""
    shutil.copy(prepare.__file__, tmp_path)
    (tmp_path / f"{module}.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    result = python(tmp_path / "prepare.py", "--source", tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (code, "", "")


@pytest.mark.slow
@posix
def test_a_chinese_folder_in_a_locale_without_chinese(folder, target):
    """In the C locale the clone's folder was not found, or the figures could not be printed."""
    result = build(folder, target, env={"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"})
    assert (result.returncode, target.read_bytes()) == (0, CORPUS)
    assert "0 times 春风" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("stream", [None, io.StringIO()])
def test_other_streams(stream, folder, target, monkeypatch):
    """A closed stream (None), or a notebook's, which cannot be put on UTF-8, was a traceback."""
    monkeypatch.setattr(prepare.prepare, "__defaults__", (target, None))
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    assert status(monkeypatch, "--source", folder) == 0
    assert target.read_bytes() == CORPUS


@pytest.mark.slow
@posix
def test_a_reader_that_has_enough(folder, target):
    """`prepare.py | head -1` ended with a complaint about the broken pipe, or with a status of its own."""
    reader, writer = os.pipe()
    os.close(reader)
    result = build(folder, target, stdout=writer, env={"PYTHONUNBUFFERED": ""})
    os.close(writer)
    assert (result.returncode, "Error" in result.stderr, target.read_bytes()) == (0, False, CORPUS)


# ---------------------------------------------------------------------------------------------------
# Typed text

KNOWN = set("春风云水人，。\n")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("春风", "春风"),
        ("春,风.", "春，风。"),
        ("春、风；云：水!", "春，风，云，水。"),
        ("春…风．云｡水﹐", "春。风。云。水，"),
        (" 春 风\t云\u3000", "春风云"),
        ("春\u200b风\ufeff\x00", "春风"),
        ("⼈云", "人云"),  # a Kangxi radical, as from a PDF
        ("春︐风︒﹔云", "春，风。，云"),  # the marks of vertical text, and small ones
        ("春\ufe00风\U000e0100", "春风"),  # variation selectors
        ("春〾风", "春〾风"),  # a sign that can be seen
        ("春\udcb4", "春\udcb4"),  # a byte of an argument that is not UTF-8
        ("春\n风", "春\n风"),
        ("龘A", "龘A"),
    ],
)
def test_typed_text(text, expected):
    """A foreign mark, a space or an invisible character of a prompt was refused, or changed into the wrong one."""
    made, changes = normalise(text, KNOWN)
    assert made == expected
    assert "".join(changes.get(char, char) for char in text) == made
    assert KNOWN.isdisjoint(changes)


def test_known_characters_stay():
    """A space that the model knows was taken away, or a comma changed that it knows."""
    assert normalise(" 春 风, ", KNOWN | set(" ,")) == (" 春 风, ", {})


def test_the_first_known_substitute_wins():
    """A mark that stands for another was taken though the model does not know it, or the other way round."""
    assert normalise("春，風,", set("春风,")) == ("春,风,", {"，": ",", "風": "风"})  # ，only in its NFKC form
    assert normalise("︐", set("，,")) == (",", {"︐": ","})
    assert list(normalise("雲,風雲", KNOWN)[1].items()) == [("雲", "云"), (",", "，"), ("風", "风")]


def test_traditional_characters_become_simplified():
    """Traditional characters were refused, also as Kangxi radicals; or known ones were converted."""
    assert normalise("風雲春乾", KNOWN | {"乾"}) == ("风云春乾", {"風": "风", "雲": "云"})
    assert normalise("\u2fb5", KNOWN) == ("风", {"\u2fb5": "风"})  # the radical of 風
    assert normalise("龍", KNOWN) == ("龍", {})  # 龙 is not known either


@pytest.mark.parametrize("module", [None, types.ModuleType("opencc")])
def test_typed_text_without_opencc(module, monkeypatch):
    """Without opencc, or with a stray file of its name, a prompt in traditional characters was a traceback."""
    monkeypatch.setitem(sys.modules, "opencc", module)
    poems_module.converter.cache_clear()
    try:
        assert normalise("風,", KNOWN) == ("風，", {",": "，"})
    finally:
        poems_module.converter.cache_clear()


def test_opencc_is_loaded_only_when_it_is_needed(monkeypatch):
    """A foreign mark, a blank or a radical loaded opencc, which not everyone has and which takes a while."""
    monkeypatch.setattr(poems_module, "converter", None)
    assert normalise("春, ⼈!", KNOWN)[0] == "春，人。"


# ---------------------------------------------------------------------------------------------------
# A corpus


def read(tmp_path, text):
    path = tmp_path / "poems.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_poems(path)


@pytest.mark.parametrize(
    "other",
    [
        "春风。 ",
        "\u3000春风。",
        "春风。\r",
        "\ufeff春风。",
        "春\u200b风。",
        "春风\ufe00。",
        "春风。\u2028",
        "春风。\x85",
        "\xa0春风。\xa0",
        "春\x00风\u2060。",
        "\u3164春风。\u2800",
    ],
)
def test_an_invisible_difference_makes_no_other_poem(tmp_path, other):
    """A poem and the same with a blank at its end were two, one of them in training and one held out."""
    assert read(tmp_path, f"春风。\n{other}\n云。\n") == (["春风。", "云。"], 1)
    assert read(tmp_path, f"{other}\n云。\n春风。") == (["春风。", "云。"], 1)


def test_only_a_newline_ends_a_poem(tmp_path):
    """U+2028 or U+0085 ended a poem, and half a validation poem got into training."""
    for sign in "\u2028\x85\x0b\x0c\r\x1c":
        assert read(tmp_path, f"春风{sign}云水\n人") == (["春风 云水", "人"], 0)


def test_a_poem_is_composed(tmp_path):
    """A letter and its accent as two characters, or a compatibility form of a character, made another poem."""
    assert read(tmp_path, "caf\u00e9 樂\ncafe\u0301 樂\ncafe\u200d\u0301 \uf914") == (["caf\u00e9 樂"], 2)


def test_the_first_of_equal_poems_is_read(tmp_path):
    """Of equal poems the last was kept, so that the training text stood in another order."""
    assert read(tmp_path, "春\n风\n春 \n云\n风") == (["春", "风", "云"], 2)


def test_line_ends_and_bom_change_nothing(tmp_path):
    """CRLF, a BOM, empty lines or a last line without its end changed the poems."""
    poems = ["春风。", "云。", "水 人。"]
    text = "\n".join(poems) + "\n"
    for variant in (text, text[:-1], text.replace("\n", "\r\n"), "\ufeff" + text, text.replace("\n", "\n \n\n")):
        assert read(tmp_path, variant) == (poems, 0)


def test_a_corpus_that_is_not_utf8(tmp_path):
    """A corpus in GBK ended in a traceback, or was read as junk."""
    with pytest.raises(ValueError, match=r"poems\.txt is not UTF-8"):
        read(tmp_path, "春风。".encode("gbk"))


def test_the_split():
    """The rule that holds poems out changed: a model would be validated on what it was trained on."""
    poems = [f"春风{chr(0x4E00 + n)}。" for n in range(2000)]
    training, held_out = split(poems)
    assert sorted(training + held_out) == sorted(poems)
    assert held_out == [poem for poem in poems if zlib.crc32(poem.encode()) % 20 == 0]
    assert is_validation(held_out[0])
    assert held_out[:3] == ["春风丐。", "春风丳。", "春风丹。"]
    assert len(held_out) == 116


@pytest.mark.slow
@real_corpus
def test_the_real_corpus(monkeypatch, capsys):
    """The corpus is not the lesson's, holds a poem twice, or shares one between training and validation."""
    monkeypatch.undo()
    data = TANG_POEMS.read_bytes()
    assert prepare.is_corpus(data)
    prepare.report(data)
    printed = capsys.readouterr().out.split()
    assert {"35,135", "6,289", "797", "111"} <= set(printed)
    poems, repeated = read_poems(TANG_POEMS)
    assert (len(poems), len(set(poems)), repeated) == (35135, 35135, 0)
    assert "".join(poem + "\n" for poem in poems).encode() == data
    assert [len(part) for part in split(poems)] == [33364, 1771]
