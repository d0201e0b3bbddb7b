"""README.md: its snippets and commands run, and what it names is there."""

import re
import shlex
import sys

import pytest
from conftest import ROOT

import generate
import train
from data import script

README = (ROOT / "README.md").read_text(encoding="utf-8")
SOURCES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in ROOT.glob("**/*.py")}


def code(language):
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)


def commands(*starts):
    """Every command of the README, in a block or between backticks, that begins with python and one of starts."""
    lines = [line for block in code("sh") for line in block.splitlines()] + re.findall(r"`(python[^`]*)`", README)
    found = [re.split(r" && |  #", line)[-1 if line.startswith("python3") else 0].strip() for line in lines]
    return sorted({line for line in found if line.startswith(tuple(f"python {start}" for start in starts))})


def run(main, words, monkeypatch):
    monkeypatch.setattr(sys, "argv", words)
    return script.run(main)


@pytest.mark.slow
@pytest.mark.parametrize("line", commands("generate.py"))
def test_commands_of_generate(line, monkeypatch, capsys):
    """A command of the README is refused or writes nothing."""
    words = shlex.split(line)[1:]
    if "--checkpoint" in words and "pretrained" not in line:
        generate.parse_args(words[1:])  # that model is made by the command before it
        return
    for name, value in {"SAME_CHARS": 20, "LONG_CHARS": 130, "TIMED_CHARS": (8,), "TIMED_RUNS": 1, "POEMS": 1}.items():
        monkeypatch.setattr(generate, name, value)  # the same commands, sooner
    shipped = ["--checkpoint", str(ROOT / "checkpoints" / "pretrained.pt")] * ("--checkpoint" not in words)
    assert run(generate.main, words + shipped, monkeypatch) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.slow
@pytest.mark.parametrize("line", commands("tests/exercises.py"))
def test_commands_of_exercises(line, monkeypatch, capsys):
    """A command of the README checks no exercise."""
    import exercises

    monkeypatch.setattr(exercises, "EX3_CHARS", (20,))
    words = shlex.split(line)[1:]
    assert run(exercises.main, words, monkeypatch) in (0, 1)
    assert capsys.readouterr().out.count("exercise ") == len(words) - 1


def test_flags_of_the_other_commands():
    """The README names a flag that a script does not have."""
    for line in commands("train.py"):
        if "--help" not in line:
            train.parse_args(shlex.split(line)[2:])
    for line in commands("data/", "tests/benchmark.py", "tests/quality.py"):
        words = shlex.split(line)[1:]
        assert all(word in SOURCES[words[0]] for word in words[1:] if word.startswith("--")), line


@pytest.mark.parametrize("snippet", code("python"))
def test_snippets(snippet, monkeypatch, capsys):
    """A snippet of the README fails, or prints something else than its comment says."""
    monkeypatch.chdir(ROOT)
    exec(compile(snippet, "README.md", "exec"), {})
    assert capsys.readouterr().out.split() == re.findall(r"print\(.*  # (.*)", snippet)


def test_names_are_there():
    """The README names a file, a flag, a function or a constant that is gone."""
    everything = "".join(SOURCES.values())
    for name in re.findall(r"`([\w./]+\.(?:py|txt|md))`", README):
        assert (ROOT / name).exists() or name == "data/tang.txt", name
    for name in re.findall(r"`(-[-\w]+)", README):
        made = name.strip("-").replace("-", "_") in train.PARAMETERS
        assert made or name in everything + "pytest -n -p -m", name
    for name in re.findall(r"`([A-Z][A-Z0-9_]+|[a-z]+_[a-z_]+)\b", README):
        assert re.search(rf"\b{name}\b", everything + "the lesson's BANNED"), name


def test_size():
    """The README grows beyond what a newcomer reads."""
    lines = README.splitlines()
    assert len(lines) <= 300
    in_block, long = False, []
    for line in lines:
        in_block ^= line.startswith("```")
        if len(line) > 120 and not (in_block or line.startswith("|") or "](http" in line):
            long.append(line)
    assert not long
