"""generate.py as a program: its flags and what each promises, messages, exit statuses, streams.

Most tests call the program in this process; those of a fault of processes start one, from a copy of it.
"""

import errno
import io
import itertools
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, posix, seeded
from small_poet import LEVEL, OBLIQUE, VERSE, keeps_the_rules, shape

import generate
from checkpoints.store import load_state, save_checkpoint, save_state
from data.poems import PINYIN
from data.prosody import scan
from data.script import run
from gpt import probabilities

pytestmark = pytest.mark.usefixtures("as_shipped")
SLOW = pytest.mark.slow
CHARS = VERSE.chars
HEADS = LEVEL[:2] + OBLIQUE[7:9]  # they may begin lines, or a line


@pytest.fixture(scope="module")
def checkpoints(verse, tiny, tmp_path_factory):
    """A folder with a good checkpoint, poet.pt, and such as cannot be used."""
    folder = tmp_path_factory.mktemp("checkpoints")
    good = folder / "poet.pt"
    save_checkpoint(good, *verse[:2], {"step": 3000, "val_loss": 4.1})
    state = load_state(good)
    (folder / "damaged.pt").write_bytes(good.read_bytes()[:3000])
    save_state(folder / "latin.pt", state | {"chars": "\n,." + CHARS[3:]})
    save_state(folder / "prose.pt", state | {"chars": " ，。" + CHARS[3:]})
    state["weights"]["wte.weight"][5, 3] = float("nan")
    save_state(folder / "nan.pt", state)
    return folder


@pytest.fixture
def program(checkpoints, tmp_path, monkeypatch, capsys):
    """program(*arguments) -> (status, stdout, stderr) of the program, with poet.pt unless they name another file."""
    monkeypatch.chdir(tmp_path)

    def program(*arguments):
        arguments = [str(argument) for argument in arguments]
        if "--checkpoint" not in arguments:
            arguments = ["--checkpoint", str(checkpoints / "poet.pt"), *arguments]
        monkeypatch.setattr(sys, "argv", ["generate.py", *arguments])
        try:
            status = run(generate.main)
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()

    return program


# The flags, alone and together. A value for each; None for a flag that takes none.

VALUES = {
    "demo": "1", "next": CHARS[3:5], "top": "3", "prompt": CHARS[3], "form": "wujue", "loose": None, "acrostic": HEADS,
    "chars": "3", "number": "2", "seed": "0", "max_chars": "9", "scan": None, "trace": None, "temperature": "1.3",
    "top_k": "50", "top_p": "0.6",
}  # fmt: skip
CHOOSING = {"temperature", "top_k", "top_p"}
POET = set(VALUES) - {"demo", "next", "top"}
APART = [
    {"prompt", "acrostic"}, {"chars", "form"}, {"max_chars", "form"}, {"max_chars", "acrostic"}, {"trace", "number"},
]  # fmt: skip


def command(names):
    """The arguments with these flags."""
    pairs = ((f"--{name.replace('_', '-')}", VALUES[name]) for name in names)
    return [word for flag, value in pairs for word in (flag, value) if word]


def goes_together(names):
    """Whether a command may have these flags."""
    if "demo" in names or "next" in names or "top" in names:
        return names == {"demo"} or "next" in names and names <= {"next", "top"} | CHOOSING
    needed = ("loose" not in names or "form" in names) and ("chars" not in names or "acrostic" in names)
    return needed and not any(pair <= names for pair in APART)


@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=SLOW)])
def test_flags_that_do_not_go_together_are_refused(capsys, size):
    """A flag that the command does not use was passed over in silence, or one that it does use was refused."""
    assert {action.dest for action in generate.make_parser()._actions} == {
        *VALUES, "help", "checkpoint", "device", "threads"
    }  # fmt: skip
    for names in map(set, itertools.combinations(VALUES, size)):
        try:
            args, status = generate.parse_args(command(names)), 0
            assert args.command == next((name for name in ("demo", "next") if name in names), "poem")
        except SystemExit as end:
            status = end.code
        assert status == (0 if goes_together(names) else 2), names
        said = capsys.readouterr().err.splitlines()
        assert not said if status == 0 else said[-1].startswith(f"{os.path.basename(sys.argv[0])}: error: --"), said


def test_a_default_that_is_typed_is_a_flag():
    """-n 1 alone ran the six demos, --chars 7 was passed over in silence; or --trace -n 1 was refused."""
    assert generate.parse_args([]).command == "demo"
    for right in (["-n", "1"], ["--trace", "-n", "1"], ["--temperature", "0.8"]):
        assert generate.parse_args(right).command == "poem"
    for wrong in (["--chars", "7"], ["--next", "春", "--max-chars", "100"], ["--top", "20"]):
        with pytest.raises(SystemExit):
            generate.parse_args(wrong)


def test_forms_by_their_latin_names():
    """Without a Chinese keyboard no form could be asked for, or another one came."""
    asked = [(latin, generate.parse_args(["--form", latin]).form) for latin in PINYIN]
    assert asked == [("wujue", "五绝"), ("qijue", "七绝"), ("wulv", "五律"), ("qilv", "七律")]


def poem_commands(sizes):
    """The sets of so many of the poet's flags that go together."""
    sets = (set(names) for size in sizes for names in itertools.combinations(sorted(POET), size))
    return [names for names in sets if goes_together(names)]


def pairs(names):
    return set(itertools.combinations(sorted(names), 2))


def every_pair():
    """A few commands in which each flag stands beside each other that goes with it."""
    commands = [(names, pairs(names)) for names in poem_commands(range(2, 8))]
    missing, chosen = set().union(*(its for _, its in commands)), []
    while missing:
        names, its = max(commands, key=lambda command: len(missing & command[1]))
        chosen.append(names)
        missing -= its
    return chosen


def check_promises(program, verse, names):
    """Run the poet with these flags, and look whether it does what each of them alone promises."""
    (model, vocab, prosody), arguments = verse, command(names)
    status, out, err = program(*arguments)
    assert status == 0, err
    poems = out.splitlines()
    assert len(poems) == (2 if "number" in names else 1)
    found = re.findall(r"^seed (\d+): --seed \1 with the same -n writes this again$", err, re.MULTILINE)
    assert len(found) == (0 if "seed" in names else 1)
    seed = found[0] if found else "0"
    if found:
        assert program(*arguments, "--seed", seed)[:2] == (0, out)
    args = generate.parse_args(arguments)
    knobs = {"temperature": 1.3 if "temperature" in names else 0.8, "top_k": args.top_k, "top_p": args.top_p}
    prompt = VALUES["prompt"] if "prompt" in names else ""
    n_char = 5 if "form" in names else 3 if "chars" in names else 7
    regulated = "form" in names and "loose" not in names
    for poem in poems:
        assert poem.startswith(prompt)
        if "form" in names or "acrostic" in names:
            assert shape(n_char, 4).fullmatch(poem)
        if "acrostic" in names:
            assert poem[:: n_char + 1] == HEADS
        if regulated:
            assert keeps_the_rules(poem, prosody)
        assert (scan(poem, prosody) in err) == ("scan" in names)
        length = len(prompt) + (9 if "max_chars" in names else 100)
        assert "form" in names or "acrostic" in names or len(poem) <= length
    rows = [line for line in err.splitlines() if re.match(r" +[0-9]+ \S", line)]
    written = [row.split()[1].replace("↵", "") for row in rows]
    assert "".join(written) == (out.strip()[len(prompt) : 64] if "trace" in names else "")
    _, options, _ = generate.poem_options(args, model, vocab, prosody if regulated else None)
    if not regulated:  # nothing is drawn but by the model's loop
        start = generate.prompt_ids(model, vocab, prompt, len(poems))
        made = generate.write(model, vocab, start, generator=seeded(int(seed)), **options, **knobs)
        assert poems == [text for text, _ in made]
        cut = sum(not ended for _, ended in made)
        assert f"{cut} of {len(poems)} had not ended after {options['length']} characters" in err or not cut
    else:
        ids = vocab.encode("\n" + poems[0])
        for t in range(1 + len(prompt), ids.size(1)):
            own, allowed = model(ids[:, :t])[0][:, -1], options["constraint"](ids[:, :t])
            free, ruled = (probabilities(own, allowed=mask, **knobs)[0, ids[0, t]] for mask in (None, allowed))
            assert ruled > 0 or (t <= 6 and free > 0)


SETS = {
    "alone": lambda: poem_commands([1]),
    "each beside each": every_pair,
    "pairs": lambda: poem_commands([2]),
    "some": lambda: random.Random(1).sample(poem_commands(range(3, 7)), 60),
}


@pytest.mark.parametrize(
    "sets", ["alone", "each beside each", *(pytest.param(name, marks=SLOW) for name in ("pairs", "some"))]
)
def test_each_flag_keeps_its_promise_beside_others(program, verse, sets):
    """A flag was dropped, or did something else, alone or beside others."""
    for names in [*SETS[sets](), {"form", "loose", "scan"}]:  # the last is easily mistaken
        check_promises(program, verse, names)


def test_the_likeliest_poem(program):
    """temperature 0, top-k 1 or the smallest top-p drew by chance, or poems that are the same were not said to be."""
    made = set()
    for flags in (["--temperature", 0, "--top-k", 9], ["--top-k", 1], ["--top-p", "1e-9"]):
        _, out, err = program("--prompt", CHARS[3], "-n", 2, "--max-chars", 20, *flags)
        made |= set(out.splitlines())
        assert ("the 2 poems are the same" in err) == (flags[1] == 0)
    assert len(made) == 1
    assert "the same\n" not in program("--prompt", CHARS[3], "--max-chars", 3, "--temperature", 0)[2]


WRONG = [
    *(["--temperature", value] for value in ("-1", "nan", "inf", "1e7", "x", "")),
    *(["--top-k", value] for value in ("0", "-1", "1.5")),
    *(["--top-p", value] for value in ("0", "1.0001", "nan")),
    *(["--number", value] for value in ("0", "-3", "1_0", "1000001", "9" * 5000, "٣")),
    *(["--seed", value] for value in ("-1", "9223372036854775808")),
    *(["--demo", value] for value in ("0", "7", "x")),
    ["--max-chars", "0"], ["--threads", "0"], ["--top", "0"], ["--form", "五言"], ["--chars", "101"], ["--prompt"],
    ["--nonsense"], ["--temp", "1"], ["春风"], ["–prompt", "春"], ["—form", "五绝"], ["--temperature", "1", "2"],
]  # fmt: skip


@pytest.mark.parametrize("arguments", WRONG, ids=lambda arguments: " ".join(arguments)[:30])
def test_wrong_values_are_refused_before_a_model_is_loaded(program, arguments):
    """A value out of range was found late or never; it is named in one line, status 2, though there is no model."""
    status, out, err = program("--checkpoint", "nowhere.pt", *arguments)
    assert (status, out) == (2, "")
    assert err.splitlines()[-1].startswith("generate.py: error: ")
    assert arguments[0] in err.splitlines()[-1]
    if arguments[0][0] in "–—":  # an editor's dash is named
        assert f"it begins with {arguments[0][0]} (U+20" in err


def test_values_at_the_ends_of_their_ranges(program):
    """A value at the end of its range, or a default, ended in a traceback or in nothing."""
    for flags in (
        ["--temperature", "1000000", "--top-k", "1000000000", "--top-p", "1", "--seed", 2**63 - 1, "--max-chars", 1],
        ["--next", HEADS, "--top", 10**6], ["--prompt", HEADS * 99, "--max-chars", 1], ["--next", ""],
    ):  # fmt: skip
        status, out, err = program(*flags)
        assert (status, bool(out)) == (0, True), err
    assert program("--next", HEADS)[1].count("\n") == 21  # 20 characters and the others
    assert shape(7, 1).fullmatch(program("--acrostic", HEADS[0])[1].strip())
    assert shape(100, 1).fullmatch(program("--acrostic", HEADS[0], "--chars", 100)[1].strip())


def test_help_and_its_examples():
    """A flag that --help does not explain, or an example that its own program refuses."""
    parser = generate.make_parser()
    assert all(action.help for action in parser._actions)
    examples = re.findall(r"^  python generate.py (.*)$", parser.format_help(), re.MULTILINE)
    assert len(examples) >= 5
    for example in examples:
        generate.parse_args(shlex.split(example))


# What is said, and with which status

UNUSABLE = [  # (arguments, what the last line says)
    *(([flag, "spring 😀s"], rf"{flag}: .*s U\+0073  p U\+0070 .*😀 U\+1F600; it knows such as {flag} [{CHARS}]+")
      for flag in ("--prompt", "--acrostic", "--next")),
    *((["--acrostic", heads], "give the characters that begin the lines") for heads in ("", " ", HEADS[0] + "，")),
    (["--acrostic", HEADS[:2], "--form", "五绝"], "2 characters, but 五绝 has 4 lines"),
    (["--prompt", "，", "--form", "五绝"], "--prompt cannot begin 五绝"),
    (["--next", HEADS, "--device", "nonsense"], "--device nonsense: not there"),
    *((["--checkpoint", "latin.pt", *flags], "， U\\+FF0C")
      for flags in (["--acrostic", HEADS], ["--form", "五绝"], ["--form", "五绝", "--loose"])),
    *((["--checkpoint", name, "--next", HEADS], name) for name in ("missing.pt", ".", "damaged.pt", "prose.pt")),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "said"), UNUSABLE, ids=lambda value: str(value)[:40])
def test_input_that_cannot_be_used(program, checkpoints, monkeypatch, arguments, said):
    """A prompt, heads or a file that cannot be used ended in a traceback, in a poem of no lines, or was not named."""
    monkeypatch.chdir(checkpoints)
    status, out, err = program(*arguments)
    assert (status, out) == (1 if said in ("damaged.pt", "prose.pt") else 2, "")
    assert re.search("^generate.py: .*" + said, err.splitlines()[-1])


def test_a_nan_weight(program, checkpoints):
    """A NaN weight ended in the sampler's own error, in junk or in shares of nan%."""
    for arguments in (["--trace", "--top-k", 1], ["--form", "五绝"], ["--next", HEADS], ["--demo", 6]):
        status, out, err = program("--checkpoint", checkpoints / "nan.pt", *arguments)
        assert (status, "nan%" in out) == (1, False)
        assert re.search(f"generate.py: {re.escape(str(checkpoints / 'nan.pt'))}: .*non-finite logits", err)


def test_the_window_and_what_was_cut_are_said(program):
    """A prompt longer than the window, or a poem that had not ended, went without a word."""
    flags = ["--max-chars", 3, "--seed", 1]
    _, out, err = program("--prompt", CHARS[3] * 65, *flags)
    assert "--prompt has 65 characters; the model sees the last 64" in err
    assert ("1 of 1 had not ended after 3 characters (--max-chars)" in err) == (len(out) == 69)
    assert "of 65 characters the model sees the last 64" in program("--next", CHARS[3] * 65)[2]
    assert "sees" not in program("--next", CHARS[3] * 64)[2] + program("--prompt", CHARS[3] * 64, *flags)[2]


def test_which_checkpoint(program, tmp_path, checkpoints, monkeypatch, capsys):
    """The shipped model was taken though there is one of the learner's own, or it was not said which."""
    own, shipped = tmp_path / "gpt.pt", tmp_path / "pretrained.pt"
    monkeypatch.setattr(generate, "CHECKPOINTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["generate.py", "--next", HEADS])
    assert run(generate.main) == 2
    assert f"no file {own} and no {shipped}: python train.py makes one" in capsys.readouterr().err
    for path in (shipped, own):
        shutil.copy(checkpoints / "poet.pt", path)
        assert run(generate.main) == 0
        name = f"{tmp_path.name}/{path.name}"
        assert capsys.readouterr().err == f"model: {name}, validation loss 4.100\n"


def test_without_the_tones(program, monkeypatch, tmp_path):
    """Without data/prosody.txt a form ended in a traceback; --loose needs none."""
    monkeypatch.setattr("data.prosody.PROSODY", tmp_path / "prosody.txt")
    status, out, err = program("--form", "五绝")
    assert (status, out) == (1, "")
    assert f"{tmp_path / 'prosody.txt'} is missing or damaged: python -m data.prosody" in err
    assert program("--form", "五绝", "--loose")[0] == 0


def test_the_device_and_the_threads_are_taken(program, monkeypatch):
    """--device or --threads did nothing, or the threads were left as they were set."""
    before, seen = torch.get_num_threads(), []
    monkeypatch.setattr(generate, "print_next", lambda *a: seen.append(torch.get_num_threads()))
    for more in ([], ["--threads", "3"], ["--threads", "2", "--device", "auto"]):
        assert program("--next", HEADS, *more)[0] == 0
    assert (seen, torch.get_num_threads()) == ([1, 3, 2], before)
    monkeypatch.setattr(generate, "pick_device", lambda name: torch.device("meta"))
    monkeypatch.setattr(generate, "print_next", lambda model, *a: seen.append(model.wte.weight.device.type))
    assert program("--next", HEADS)[0] == 0
    assert seen[-1] == "meta"


# Streams


class Stream(io.StringIO):
    """A stream whose writes fail with error from a number of lines on; flushed: the lines at each flush."""

    def __init__(self, error=None, after=0):
        super().__init__()
        self.error, self.after, self.flushed = error, after, []

    def write(self, text):
        if self.error and self.getvalue().count("\n") >= self.after:
            raise OSError(self.error, os.strerror(self.error))
        return super().write(text)

    def flush(self):
        self.flushed.append(self.getvalue().count("\n"))

    def fileno(self):
        return os.open(os.devnull, os.O_WRONLY)  # instead of the tests' own


@pytest.mark.parametrize("number", [errno.EPIPE, errno.ENOSPC], ids=errno.errorcode.get)
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_stream_that_takes_no_more(program, monkeypatch, stream, number):
    """A reader that has enough ended in an error, a full disk went without one; or unread notices cost a poem."""
    failing = Stream(number, after=1)
    monkeypatch.setattr(sys, stream, failing)
    status, out, err = program("-n", 3, "--seed", 1, "--scan", "--max-chars", 3)
    lost = stream == "stdout" and number == errno.ENOSPC
    assert status == lost
    assert (failing.getvalue() if stream == "stdout" else out).count("\n") == (1 if stream == "stdout" else 3)
    assert ("generate.py: the output: No space left on device\n" in err) == lost
    assert err.count("generate.py") == lost


def test_poems_that_are_written_stay(program, monkeypatch, verse):
    """A failure in a later batch took the poems of earlier ones along, or they were held back until the end."""
    out, begun, whole = Stream(), [], generate.write
    monkeypatch.setattr(generate, "BATCH", 4)

    def write(model, vocab, start, *args, **options):
        begun.append((start.size(0), max(out.flushed, default=0)))
        if len(begun) == 3:
            raise generate.DecodingError("step 5: no more")
        return whole(model, vocab, start, *args, **options)

    monkeypatch.setattr(generate, "write", write)
    monkeypatch.setattr(sys, "stdout", out)
    status, _, err = program("-n", 9, "--seed", 1, "--max-chars", 3)
    assert (status, begun, out.getvalue().count("\n")) == (1, [(4, 0), (4, 4), (1, 8)], 8)
    assert re.search("generate.py: .*poet.pt: step 5: no more\n", err)


def test_demos_name_the_model_last(program, monkeypatch):
    """The first line of the demos was not the lesson's, a demo held back, or one came that was not asked for."""
    out = Stream()
    monkeypatch.setattr(sys, "stdout", out)
    status, _, err = program("--demo", 3, 1)
    lines = out.getvalue().splitlines()
    headings = [line[:6] for line in lines if line.startswith("==")]
    assert (status, headings, "poet.pt" in err) == (0, ["== 3. ", "== 1. "], False)
    assert lines.index(next(line for line in lines if line.startswith("== 1."))) in out.flushed
    assert re.fullmatch("model: .*poet.pt, validation loss 4.100", lines[-1])


# Real processes


@pytest.fixture(scope="module")
def home(checkpoints, tmp_path_factory):
    """A copy of the program with its own checkpoint and corpus."""
    folder = tmp_path_factory.mktemp("poet")
    for name in ("generate.py", "gpt.py"):
        shutil.copy(ROOT / name, folder)
    for name in ("data", "checkpoints"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("tang.txt", "*.pt", "__pycache__"))
    shutil.copy(checkpoints / "poet.pt", folder / "checkpoints" / "pretrained.pt")
    (folder / "data" / "tang.txt").write_bytes("春风。\n".encode())
    return folder


def start(home, *arguments, options=(), stdout=subprocess.PIPE, **environment):
    """A process of the copy; its environment says nothing about encodings but what is given."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LC_", "LANG"))}
    arguments = [argument.encode() for argument in arguments]  # UTF-8, also where the locale has no Chinese
    return subprocess.Popen(
        [sys.executable, *options, home / "generate.py", *arguments],
        cwd=home / "data",
        env=kept | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"} | environment,
        stdout=stdout,
        stderr=subprocess.PIPE,
    )


@SLOW
def test_the_output_is_the_same_everywhere(home):
    """In a legacy code page or without a locale the output was cut or in its encoding, or a file was read in it."""
    everywhere = [
        ({"PYTHONUTF8": "1"}, []),
        ({"PYTHONIOENCODING": "cp1252"}, []),
        ({"PYTHONIOENCODING": "ascii:strict"}, []),
        ({"PYTHONIOENCODING": "gbk"}, []),
        ({"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONWARNDEFAULTENCODING": "1"}, ["-X", "utf8=0"]),
    ]
    before, made = sorted(home.rglob("*")), []
    command = ["--form", "wujue", "--seed", "7", "--scan"]
    for process in [start(home, *command, options=options, **environment) for environment, options in everywhere]:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        assert str(home).encode() not in err  # a warning that a file of ours is read in the system's encoding
        made.append((out.decode(), [line for line in err.decode().splitlines() if "韵" in line or "model" in line]))
    assert shape(5, 4).fullmatch(made[0][0].strip())
    assert [len(lines) for _, lines in made] == [2] * 5
    assert all(result == made[0] for result in made)
    assert sorted(home.rglob("*")) == before  # nothing is written beside the program, or where it was started


@SLOW
@posix
@pytest.mark.parametrize("way", ["closed pipe", "Ctrl-C", "undecodable"])
def test_ends_of_a_process(home, way):
    """A closed pipe, Ctrl-C, a full disk or bytes of another encoding ended in a traceback or another status."""
    many = ["-n", "1000000", "--seed", "1", "--max-chars", "20"]
    if way == "undecodable":
        command = [sys.executable, home / "generate.py", "--prompt", "春".encode("gbk")]
        result = subprocess.run(command, capture_output=True, timeout=300, check=False)
        assert (result.returncode, result.stdout, result.stderr.count(b"\n")) == (2, b"", 2)
        assert b"U+DC" in result.stderr
    else:
        process = start(home, *many)
        first = process.stdout.readline()
        if way == "Ctrl-C":
            process.send_signal(signal.SIGINT)
        else:
            process.stdout.close()
        err = process.stderr.read()
        assert process.wait(300) == (130 if way == "Ctrl-C" else 0)
        process.stderr.close()
        process.stdout.close()
        assert first.decode().endswith("\n")
        assert re.fullmatch(r"model: .*pretrained\.pt, validation loss 4\.100\n", err.decode())
