"""data/script.py: how every script speaks, reads its command line, writes a file and ends."""

import argparse
import errno
import io
import os
import random
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from conftest import ROOT, posix
from test_verse import regulated_poem

from checkpoints.store import CheckpointError
from data import script
from data.script import UserError, check_writable, notice, parse, run, say, write_file


def raising(error):
    def main():
        print("a poem")
        raise error

    return main


# ---------------------------------------------------------------------------------------------------
# How a script ends

ENDS = {
    "wrong usage": (UserError("--seed: not a number", 2), 2, "--seed: not a number"),
    "failure": (UserError("no poem"), 1, "no poem"),
    "checkpoint": (CheckpointError("gpt.pt is damaged"), 1, "gpt.pt is damaged"),
    "file": (FileNotFoundError(2, "No such file", "gpt.pt"), 1, "gpt.pt: No such file"),
    "a disk that fails": (OSError(errno.EIO, "Input/output error", "tang.txt"), 1, "tang.txt: Input/output error"),
    "write": (OSError("cannot write gpt.pt: No space left"), 1, "cannot write gpt.pt: No space left"),
    "output": (OSError(errno.ENOSPC, "No space left"), 1, "the output: No space left"),
    "memory": (MemoryError(), 1, "out of memory; choose smaller sizes, or less at once"),
    "torch's": (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 1, "less at once"),
    "Windows'": (RuntimeError("DefaultCPUAllocator: not enough memory"), 1, "less at once"),
    "a GPU's": (RuntimeError("CUDA error: out of memory"), 1, "less at once"),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_failure_is_one_line(monkeypatch, capsys, name):
    """What a user can cause ends in a traceback, in silence or with status 0."""
    error, status, message = ENDS[name]
    monkeypatch.setattr(sys, "argv", ["folder/generate.py"])
    assert run(raising(error)) == status
    out, err = capsys.readouterr()
    assert out == "a poem\n"
    assert re.fullmatch(f"generate.py: .*{re.escape(message)}\n", err)


FAULTS = [RuntimeError("mat1 and mat2 cannot be multiplied"), RuntimeError("unsupported memory format"), KeyError("x")]


@pytest.mark.parametrize("error", FAULTS)
def test_a_fault_of_ours_shows_where(error):
    """A fault of the program is swallowed as one line that nobody can act on, or called too little memory."""
    with pytest.raises(type(error)) as caught:
        run(raising(error))
    assert caught.value is error


def test_the_other_ends(capsys):
    """The status of main gets lost, or Ctrl-C prints a traceback."""
    assert [run(lambda status=status: status) for status in (None, 0, 1, 2)] == [0, 0, 1, 2]
    assert run(raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == ""
    with pytest.raises(SystemExit):
        run(lambda: sys.exit(2))


def test_a_script_runs_in_a_thread():
    """A script called in a thread of another program ends in an error."""
    statuses = []
    thread = threading.Thread(target=lambda: statuses.append(run(lambda: print("春"))))
    thread.start()
    thread.join()
    assert statuses == [0]


# ---------------------------------------------------------------------------------------------------
# Streams


class Failing(io.StringIO):
    """A stream whose second write, and each after it, fails."""

    def __init__(self, number):
        super().__init__()
        self.error, self.calls = OSError(number, os.strerror(number)), 0

    def write(self, text):
        self.calls += 1
        if self.calls > 1:
            raise self.error
        return super().write(text)


@pytest.mark.parametrize("number", [errno.EPIPE, errno.EINVAL, errno.EIO, errno.ENOSPC])
def test_an_output_that_fails(number, monkeypatch, capsys):
    """A reader who has enough, whatever the system calls it, is an error; or a full disk is none."""
    monkeypatch.setattr(sys, "stdout", Failing(number))
    monkeypatch.setattr(sys, "argv", ["generate.py"])
    status = run(lambda: [print("春风", end="") for _ in range(3)] and None)
    full = number == errno.ENOSPC
    assert status == (1 if full else 0)
    assert capsys.readouterr().err == (f"generate.py: the output: {os.strerror(number)}\n" if full else "")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_failing_stream_does_not_stop_the_work(stream, monkeypatch):
    """A figure or a notice that nobody reads ends the work, as does a stream that is closed."""
    for failing in (Failing(errno.EPIPE), io.StringIO()):
        monkeypatch.setattr(sys, stream, failing)
        for text in ("one", "two", "three"):
            say(text, stream)
        failing.close()
        say("four", stream)


def test_who_speaks_where(capsys):
    """A notice stands among the results, or a result among the notices."""
    say("春风")
    notice("a notice")
    assert capsys.readouterr() == ("春风\n", "a notice\n")


def speak():
    print("春风")
    print("a notice", file=sys.stderr)


@pytest.mark.parametrize("closed", ["stderr", "stdout"])
def test_a_closed_stream_swallows_what_it_gets(monkeypatch, closed):
    """Without a stderr notices stand among the poems on stdout; without a stdout nothing is told."""
    streams = {name: io.TextIOWrapper(io.BytesIO()) for name in ("stdout", "stderr")}
    for name, stream in (streams | {closed: None}).items():
        monkeypatch.setattr(sys, name, stream)
    assert run(speak) == 0
    assert run(raising(UserError("no poem"))) == 1
    kept = {"stderr": "春风\na poem\n", "stdout": f"a notice\n{Path(sys.argv[0]).name}: no poem\n"}[closed]
    other = streams["stdout" if closed == "stderr" else "stderr"]
    assert other.buffer.getvalue().decode("utf-8") == kept


@pytest.mark.parametrize("encoding", ["cp1252", "ascii", "gbk"])
def test_streams_speak_utf8(monkeypatch, encoding):
    """A terminal of another encoding makes Chinese an error, or half a character does."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    assert run(lambda: print("春风\udc80")) == 0
    assert stream.buffer.getvalue() == "春风\\udc80\n".encode()


def test_streams_that_cannot_be_reconfigured(monkeypatch):
    """A notebook's or an editor's own stream, which has no reconfigure, ends the script at its start."""
    streams = {name: io.StringIO() for name in ("stdout", "stderr")}
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)
    assert run(speak) == 0
    assert [stream.getvalue() for stream in streams.values()] == ["春风\n", "a notice\n"]


# ---------------------------------------------------------------------------------------------------
# The command line


def test_the_command_line(capsys):
    """A flag that nobody knows is passed over, or a known one is lost."""
    parser = argparse.ArgumentParser("generate.py")
    parser.add_argument("--prompt")
    assert parse(parser, ["--prompt", "春风"]).prompt == "春风"
    for words, dash in [("–prompt 春风", "U+2013"), ("—prompt", "U+2014"), ("−n 3", "U+2212"), ("--promt x", "")]:
        with pytest.raises(SystemExit) as caught:
            parse(parser, words.split())
        assert caught.value.code == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert words in said
        assert re.findall(r"U\+[0-9A-F]{4}", said) == ([dash] if dash else [])


# ---------------------------------------------------------------------------------------------------
# Files


def test_a_file_is_written_as_it_is(tmp_path):
    """Bytes change on the way, a missing folder is an error, or a temporary file stays."""
    name = os.fsdecode("诗.txt".encode())  # in a locale without Chinese too
    path = tmp_path / "new" / "folder" / name
    for data in (b"one\r\ntwo\n\x00\xff", b"", "春风".encode()):
        write_file(str(path), data)
        assert path.read_bytes() == data
    assert os.listdir(path.parent) == [name]


def test_what_is_on_disk_replaces_the_old_file(tmp_path, monkeypatch):
    """A crash of the system after the replacement leaves an empty file: the bytes were not on disk before."""
    calls, path = [], tmp_path / "gpt.pt"

    def note(name):
        original = getattr(os, name)

        def call(*args):
            calls.append((name, (tmp_path / ".gpt.pt.tmp").read_bytes()))
            return original(*args)

        monkeypatch.setattr(script.os, name, call)

    note("fsync")
    note("replace")
    write_file(path, b"new")
    assert calls == [("fsync", b"new"), ("replace", b"new")]


@pytest.fixture
def old(tmp_path, monkeypatch):
    """(path of a file with old content, seconds that the code wanted to sleep, and did not)."""
    seconds, path = [], tmp_path / "gpt.pt"
    path.write_bytes(b"old")
    monkeypatch.setattr(script.time, "sleep", seconds.append)
    return path, seconds


def failing(error, times=10**9):
    """A function for os.replace or os.fsync that raises error, the first `times` times that it is called."""
    calls, replace = [], os.replace

    def call(*args):
        calls.append(args)
        if len(calls) <= times:
            raise error
        return replace(*args)

    return call


WRITES = [
    OSError(errno.ENOSPC, "No space left"),
    PermissionError(errno.EACCES, "Permission denied"),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("error", WRITES, ids=repr)
def test_a_write_that_fails(old, monkeypatch, call, error):
    """A full disk, a file held for good or Ctrl-C loses the old file, leaves half of a new one or waits without end."""
    path, slept = old
    with monkeypatch.context() as patch:
        patch.setattr(script.os, call, failing(error))
        said = "" if isinstance(error, KeyboardInterrupt) else rf"^cannot write .*gpt\.pt: {error.strerror}$"
        with pytest.raises(OSError if said else KeyboardInterrupt, match=said or None):
            write_file(path, b"new")
    assert (path.read_bytes(), os.listdir(path.parent)) == (b"old", ["gpt.pt"])
    held = isinstance(error, PermissionError) and call == "replace"
    assert 1 < sum(slept) < 2 if held else slept == []


@pytest.mark.parametrize("times", [1, 2, 4])
def test_a_file_that_is_held_for_a_moment(old, monkeypatch, times):
    """On Windows a virus scanner that holds the file for a moment ends a training run."""
    path, slept = old
    monkeypatch.setattr(script.os, "replace", failing(PermissionError(errno.EACCES, "Permission denied"), times))
    path.with_name(".gpt.pt.tmp").write_bytes(b"what a killed run left, longer")
    write_file(path, b"new")
    assert (path.read_bytes(), os.listdir(path.parent)) == (b"new", ["gpt.pt"])
    assert slept == [0.1, 0.2, 0.4, 0.8][:times]


def obstacles(folder):
    """Names that cannot be written in folder."""
    (folder / "folder").mkdir()
    (folder / "file").write_bytes(b"old")
    (folder / ".tang.txt.tmp").mkdir()
    return [folder / "folder", folder / "file" / "gpt.pt", folder / "tang.txt"]


def test_what_cannot_be_written_is_named_before(tmp_path):
    """A folder in the way, of the file or of its temporary one, is found out only after long work, or without a name."""
    for path in obstacles(tmp_path):
        with pytest.raises(UserError, match=f"cannot write {path}: ") as caught:
            check_writable(path)
        assert caught.value.status == 2
        with pytest.raises(OSError, match=f"cannot write {path}: "):
            write_file(path, b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert sorted(os.listdir(tmp_path)) == [".tang.txt.tmp", "file", "folder"]
    check_writable(tmp_path / "file")
    check_writable(tmp_path / "new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert sorted(os.listdir(tmp_path)) == [".tang.txt.tmp", "file", "folder"]


@posix
def test_a_device_is_not_replaced():
    """What should be written to a device replaces it by a file."""
    with pytest.raises(UserError, match="cannot write /dev/null: it is a folder or a device"):
        check_writable(Path("/dev/null"))


# ---------------------------------------------------------------------------------------------------
# As programs


def test_what_the_modules_load():
    """The help of a script waits for torch, or for what only verse needs."""
    code = "import sys; import {}; print([m for m in ('torch', 'numpy', 'opencc') if m in sys.modules])"
    for modules, loaded in [("data.poems, data.prepare", []), ("data.verse, data.prosody", ["numpy"])]:
        command = [sys.executable, "-c", code.format(modules)]
        assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout == f"{loaded}\n"


PROGRAMS = {
    "prosody": "import data.prosody as p; p.CORPUS, p.PROSODY = map(p.Path, (corpus, made)); ",
    "prepare": "import data.prepare as p; p.CORPUS = corpus; p.is_corpus = lambda data: True; ",
}
ENDINGS = {  # what the shell does with the streams, and the status
    "{} | head -1; exit ${{PIPESTATUS[0]}}": 0,
    "{} --help | true; exit ${{PIPESTATUS[0]}}": 0,
    "{} >&-": 0,
    "{} 2>&-": 0,
    "{} >/dev/null 2>/dev/full": 0,
    "PYTHONIOENCODING=cp1252 {} | cat; exit ${{PIPESTATUS[0]}}": 0,
    "LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 PYTHONWARNDEFAULTENCODING=1 {} >/dev/null": 0,
    "{} --halp": 2,
}


@pytest.mark.slow
@posix
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_scripts_end_alike(program, ending, tmp_path):
    """One of the scripts ends in its own way when its output is closed, unread, full or of another encoding."""
    corpus, made, code = tmp_path / "tang.txt", tmp_path / "prosody.txt", tmp_path / "code.py"
    chance = random.Random(1)
    corpus.write_text("".join(regulated_poem(chance) + "\n" for _ in range(600)), encoding="utf-8")
    paths = f"sys.path.insert(0, {str(ROOT)!r}); corpus, made = {str(corpus)!r}, {str(made)!r}; "
    code.write_text(f"import sys; {paths}{PROGRAMS[program]}sys.exit(p.run(p.main))\n", encoding="utf-8")
    command = ending.format(f"{sys.executable} {code}")
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, timeout=60)
    assert done.returncode == ENDINGS[ending], done.stderr.decode()
    err = [line for line in done.stderr.decode().splitlines() if not line.startswith(("usage:", "code.py: error:"))]
    assert err == []
    if program == "prosody" and "--h" not in ending:
        assert made.exists()


@pytest.mark.slow
def test_the_help_of_the_real_scripts():
    """`python data/prepare.py` or `python -m data.prosody` does not find its modules, or dies under -OO."""
    for words in (["data/prepare.py"], ["-m", "data.prosody"]):
        command = [sys.executable, "-OO", *words, "--help"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", env=os.environ)
        assert (done.returncode, done.stderr) == (0, "")
        assert "usage: pro" in done.stdout or "usage: prepare.py" in done.stdout
