"""data/script.py: how every script speaks, reads its command line, writes a file and ends."""

import argparse
import errno
import functools
import io
import os
import re
import subprocess
import sys
from contextlib import nullcontext as nothing
from pathlib import Path

import pytest
from conftest import ROOT, posix

from checkpoints.store import CheckpointError
from data import script
from data.script import UserError, check_writable, parse, run, say, write_file


def raising(error):
    def main():
        print("a poem")
        raise error

    return main


# ---------------------------------------------------------------------------------------------------
# How a script ends

ENDS = {
    "wrong usage": (UserError("--seed: not a number", 2), 2, "--seed: not a number"),
    "checkpoint": (CheckpointError("gpt.pt is damaged"), 1, "gpt.pt is damaged"),
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


@pytest.mark.parametrize("error", [RuntimeError("cannot be multiplied"), RuntimeError("memory format"), KeyError("x")])
def test_a_fault_of_ours_shows_where(error):
    """A fault of the program is swallowed as one line that nobody can act on, or called too little memory."""
    with pytest.raises(type(error)) as caught:
        run(raising(error))
    assert caught.value is error


def test_the_other_ends(capsys):
    """The status of main gets lost, or Ctrl-C prints a traceback."""
    assert [run(lambda s=s: s) for s in (None, 0, 1, 2)] == [0, 0, 1, 2]
    assert run(raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == ""
    with pytest.raises(SystemExit):
        run(lambda: sys.exit(2))


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
    with io.TextIOWrapper(io.BytesIO()) as buffered:
        monkeypatch.setattr(sys, stream, buffered)
        say("春风", stream)
        assert buffered.buffer.getvalue() == "春风\n".encode(buffered.encoding)


@pytest.mark.parametrize("closed", ["stderr", "stdout"])
def test_a_closed_stream_swallows_what_it_gets(monkeypatch, closed):
    """Without a stderr notices stand among the poems on stdout; without a stdout nothing is told."""
    streams = {name: io.TextIOWrapper(io.BytesIO()) for name in ("stdout", "stderr")}
    for name, stream in (streams | {closed: None}).items():
        monkeypatch.setattr(sys, name, stream)
    assert run(lambda: print("春风") or print("a notice", file=sys.stderr)) == 0
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


def test_a_file_is_written_as_it_is(tmp_path):
    """Bytes change on the way, a missing folder is an error, or a temporary file stays."""
    name = os.fsdecode("诗.txt".encode())  # in a locale without Chinese too
    path = tmp_path / "new" / "folder" / name
    for data in (b"one\r\ntwo\n\x00\xff", b"", "春风".encode()):
        write_file(str(path), data)
        assert path.read_bytes() == data
    assert os.listdir(path.parent) == [name]


FULL, HELD = OSError(errno.ENOSPC, "No space left"), PermissionError(errno.EACCES, "Permission denied")
WRITES = [  # what fails, how, how often, and what is then there
    *((call, error, 9, b"old") for call in ("fsync", "replace") for error in (FULL, HELD, KeyboardInterrupt())),
    *(("replace", HELD, times, b"new") for times in (1, 2, 4)),
    (None, None, 0, b"new"),
]


@pytest.mark.parametrize(("call", "error", "times", "left"), WRITES)
def test_a_write_that_fails(tmp_path, monkeypatch, call, error, times, left):
    """A full disk, Ctrl-C, a file that is held for a moment or for good, or a crash leaves no whole file or waits."""
    slept, calls, path = [], [], tmp_path / "gpt.pt"
    path.write_bytes(b"old")
    path.with_name(".gpt.pt.tmp").write_bytes(b"what a killed run left, longer")

    def called(*args, name, original):
        calls.append((name, path.with_name(".gpt.pt.tmp").read_bytes()))
        if name == call and len([c for c in calls if c[0] == name]) <= times:
            raise error
        return original(*args)

    monkeypatch.setattr(script.time, "sleep", slept.append)
    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, functools.partial(called, name=name, original=getattr(os, name)))
    said = rf"^cannot write .*gpt\.pt: {error.strerror}$" if isinstance(error, OSError) else None
    with pytest.raises((OSError, KeyboardInterrupt), match=said) if left == b"old" else nothing():
        write_file(path, b"new")
    assert (path.read_bytes(), os.listdir(tmp_path)) == (left, ["gpt.pt"])
    assert calls[:2] == [("fsync", b"new"), ("replace", b"new")][: len(calls)]  # on disk before it replaces the old
    assert slept == ([0.1, 0.2, 0.4, 0.8][:times] if (call, error) == ("replace", HELD) else [])


def test_what_cannot_be_written_is_named_before(tmp_path):
    """A folder or a device in the way of a file, or of its temporary one, is found out only after long work."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / ".tang.txt.tmp").mkdir()
    with pytest.raises(UserError, match=f"cannot write {os.devnull}: it is a folder or a device"):
        check_writable(Path(os.devnull))
    for path in (tmp_path / "folder", tmp_path / "file" / "gpt.pt", tmp_path / "tang.txt"):
        with pytest.raises(UserError, match=f"cannot write {path}: ") as caught:
            check_writable(path)
        assert caught.value.status == 2
        with pytest.raises(OSError, match=f"cannot write {path}: "):
            write_file(path, b"new")
    check_writable(tmp_path / "file")
    check_writable(tmp_path / "new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert sorted(os.listdir(tmp_path)) == [".tang.txt.tmp", "file", "folder"]


def test_what_the_modules_load():
    """The help of a script waits for torch, or for what only verse needs."""
    seen = "print([name for name in ('torch', 'numpy', 'opencc') if name in sys.modules])"
    code = f"import sys, data.poems, data.prepare; {seen}; import data.verse, data.prosody; {seen}"
    done = subprocess.run([sys.executable, "-OO", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n['numpy']\n", done.stderr


ENDINGS = {  # what the shell does with the streams, and the status
    "{} | head -1; exit ${{PIPESTATUS[0]}}": 0,
    "{} >&-": 0,
    "{} 2>&-": 0,
    "{} --halp 2>/dev/full": 2,
    "LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 PYTHONWARNDEFAULTENCODING=1 {} >/dev/null": 0,
    "{} --halp": 2,
}


@pytest.mark.slow
@posix
@pytest.mark.parametrize("ending", ENDINGS)
def test_how_a_script_ends(ending, tmp_path):
    """A script dies, hangs or speaks when its output is closed, unread, full or of another encoding."""
    (tmp_path / "tang.txt").write_text("春风。\n" * 10000, encoding="utf-8")
    program = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
import data.prepare as p; p.CORPUS, p.is_corpus = 'tang.txt', lambda data: True
sys.exit(p.run(p.main))"""
    (tmp_path / "code.py").write_text(program, encoding="utf-8")
    command = ending.format(f"{sys.executable} code.py")
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == ENDINGS[ending], done.stderr
    err = [line for line in done.stderr.splitlines() if not line.startswith("usage:")]
    assert len(err) == ("--halp" in ending) - ("full" in ending)
    assert all(line.startswith("code.py: ") for line in err)
