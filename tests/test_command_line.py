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
import threading

import pytest
import torch
from conftest import ROOT, posix, seeded
from test_generate import VOCAB, as_shipped, keeps_the_rules, shape, verse, verse_vocabulary  # noqa: F401

import generate
from checkpoints.store import load_state, save_checkpoint, save_state
from data.poems import FORMS, PINYIN
from data.prosody import scan
from data.script import run
from gpt import probabilities

# ruff: noqa: F811
SLOW = pytest.mark.slow
CHARS = verse_vocabulary().chars
HEADS = CHARS[3:5] + CHARS[130:132]  # two level tones and two oblique ones: they may begin lines, or a line


@pytest.fixture(scope="module")
def checkpoints(verse, tiny, tmp_path_factory):
    """A folder with a good checkpoint, poet.pt, and such as cannot be used."""
    folder = tmp_path_factory.mktemp("checkpoints")
    good = folder / "poet.pt"
    save_checkpoint(good, *verse[:2], {"step": 3000, "val_loss": 4.1})
    state = load_state(good)
    (folder / "damaged.pt").write_bytes(good.read_bytes()[:3000])
    (folder / "page.pt").write_bytes(b"<!DOCTYPE html>\n" * 50)
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


# ---------------------------------------------------------------------------------------------------
# The flags, alone and together. A value for each; None for a flag that takes none.

VALUES = {
    "demo": "1", "next": CHARS[3:5], "top": "3", "prompt": CHARS[3], "form": "wujue", "loose": None, "acrostic": HEADS,
    "chars": "3", "number": "2", "seed": "0", "max_chars": "9", "scan": None, "trace": None, "temperature": "1.3",
    "top_k": "50", "top_p": "0.6",
}  # fmt: skip


def command(names):
    """The arguments with these flags."""
    pairs = ((f"--{name.replace('_', '-')}", VALUES[name]) for name in names)
    return [word for flag, value in pairs for word in (flag, value) if word]


def goes_together(names):
    """Whether a command has these flags, by the tables of generate.py."""
    taken = any(names <= takes and (name == "poem" or name in names) for name, takes in generate.TAKES.items())
    apart = any(set(pair.split()) <= names for pair in generate.APART)
    return taken and not apart and all(other in names for name, other in generate.NEEDS.items() if name in names)


def test_the_tables_know_every_flag():
    """A flag of the parser that no command takes, so that nothing below looks at it."""
    flags = {action.dest for action in generate.make_parser()._actions}
    assert flags - {"help", "checkpoint", "device", "threads"} == set().union(*generate.TAKES.values()) == set(VALUES)


@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=SLOW)])
def test_flags_that_do_not_go_together_are_refused(monkeypatch, capsys, size):
    """A flag that the command does not use was passed over in silence, or one that it does use was refused."""
    for names in map(set, itertools.combinations(VALUES, size)):
        try:
            args, status = generate.parse_args(command(names)), 0
        except SystemExit as end:
            status = end.code
        assert status == (0 if goes_together(names) else 2), names
        said = capsys.readouterr().err.splitlines()
        assert not said if status == 0 else said[-1].startswith(f"{os.path.basename(sys.argv[0])}: error: --"), said
        if status == 0:
            assert args.command == next((name for name in ("demo", "next") if name in names), "poem")


def test_a_default_that_is_typed_is_a_flag(program):
    """-n 1 alone ran the six demos, and --chars 7 was passed over in silence."""
    status, out, _ = program("-n", "1")
    assert (status, out.count("\n")) == (0, 1)
    assert program("--chars", "7")[0] == 2
    assert program("--next", CHARS[3], "--max-chars", "100")[0] == 2
    assert program("--trace", "-n", "1")[0] == 0


def poem_commands(sizes, n=None):
    """Sets of the poet's flags that go together; a random n of them if n is given."""
    all_sets = itertools.chain(*(itertools.combinations(sorted(generate.TAKES["poem"]), size) for size in sizes))
    right = [names for names in all_sets if goes_together(set(names))]
    return right if n is None else random.Random(1).sample(right, n)


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


@pytest.mark.parametrize(
    ("sizes", "n"),
    [((1,), None), ((2,), 12), pytest.param((2,), None, marks=SLOW), pytest.param((3, 4, 5, 6), 60, marks=SLOW)],
)
def test_each_flag_keeps_its_promise_beside_others(program, verse, sizes, n):
    """A flag was dropped, or did something else, alone or beside others."""
    for names in [*poem_commands(sizes, n), ("form", "loose", "scan")]:  # the last is easily mistaken
        check_promises(program, verse, names)


def test_the_likeliest_poem(program):
    """temperature 0, top-k 1 or the smallest top-p drew by chance, or poems that are the same were not said to be."""
    made = set()
    for flags in (["--temperature", 0, "--top-k", 9], ["--top-k", 1], ["--top-p", "1e-9"], ["--temperature", "1e-320"]):
        status, out, err = program("--prompt", CHARS[3], "-n", 2, *flags)
        made |= set(out.splitlines())
        assert ("the 2 poems are the same" in err) == (flags[1] == 0)
    assert len(made) == 1
    assert "the same\n" not in program("--prompt", CHARS[3], "--temperature", 0)[2]


def test_forms_by_their_latin_names(program):
    """Without a Chinese keyboard no form could be asked for, or another one came."""
    for latin, form in PINYIN.items():
        flags = ["--loose", "--seed", 1]
        assert program("--form", latin, *flags)[:2] == program("--form", form, *flags)[:2]
        assert shape(*FORMS[form]).fullmatch(program("--form", latin, *flags)[1].strip())
        assert f"{form} or {latin}" in " ".join(generate.make_parser().format_help().split())


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
    """A value at the end of its range ended in a traceback or in nothing."""
    for flags in (
        ["--temperature", "1000000"], ["--top-k", "1000000000"], ["--top-p", "1"], ["--seed", 2**63 - 1],
        ["--chars", 100, "--acrostic", HEADS[0]], ["--next", HEADS, "--top", 10**6], ["--prompt", HEADS * 99],
        ["--next", ""], ["--max-chars", 1],
    ):  # fmt: skip
        status, out, err = program(*flags)
        assert (status, bool(out)) == (0, True), err
    assert program("--next", HEADS)[1].count("\n") == 21  # 20 characters and the others


def test_help_and_its_examples():
    """A flag that --help does not explain, or an example that its own program refuses."""
    text = generate.make_parser().format_help()
    for name in [*VALUES, "checkpoint", "device", "threads"]:
        assert re.search(
            rf"^  (-n.*)?--{name.replace('_', '-')}[ ,\n][^\n]*(\n {{20,}}[^\n]*)?[a-z]{{3}}", text, re.MULTILINE
        ), name
    examples = re.findall(r"^  python generate.py (.*)$", text, re.MULTILINE)
    assert len(examples) >= 7
    for example in examples:
        generate.parse_args(shlex.split(example))


# ---------------------------------------------------------------------------------------------------
# What is said, and with which status


def test_unknown_characters_are_answered_with_what_is_known(program):
    """A prompt in Latin letters was refused without a word of what the model knows, or only its first letter named."""
    for flag in ("--prompt", "--acrostic", "--next"):
        status, out, err = program(flag, "spring 😀s")
        assert (status, out) == (2, "")
        known = re.search(r"generate.py: .*s U\+0073  p U\+0070 .*😀 U\+1F600.*; it knows such as (--\w+) (\w+)\n", err)
        assert known[1] == flag
        assert set(known[2]) <= set(CHARS)


def test_the_window_and_what_was_cut_are_said(program):
    """A prompt longer than the window, or a poem that had not ended, went without a word."""
    _, out, err = program("--prompt", CHARS[3] * 65, "--max-chars", 3, "--seed", 1)
    assert "--prompt has 65 characters; the model sees the last 64" in err
    assert ("1 of 1 had not ended after 3 characters (--max-chars)" in err) == (len(out) == 69)
    assert "of 65 characters the model sees the last 64" in program("--next", CHARS[3] * 65)[2]
    assert "sees" not in program("--next", CHARS[3] * 64)[2] + program("--prompt", CHARS[3] * 64, "--seed", 1)[2]


@pytest.mark.parametrize("heads", ["", " ", "\n", "\u3000", HEADS[0] + "，", "。", HEADS[:2]])
def test_heads_that_are_none_or_too_few(program, heads):
    """An acrostic without heads or with marks for heads was a poem of no lines, one of two a form of four lines."""
    status, out, err = program("--acrostic", heads, *(["--form", "五绝"] if heads == HEADS[:2] else []))
    assert (status, out) == (2, "")
    reason = "2 characters, but 五绝 has 4 lines" if heads == HEADS[:2] else "give the characters that begin the lines"
    assert reason in err.splitlines()[-1]


@pytest.mark.parametrize("name", ["missing.pt", ".", "damaged.pt", "page.pt", "prose.pt"])
def test_checkpoints_that_cannot_be_used(program, checkpoints, name):
    """A missing, damaged or foreign checkpoint ended in a traceback, or was not named."""
    for arguments in ([], ["--prompt", CHARS[3]], ["--next", CHARS[3]]):
        status, out, err = program("--checkpoint", checkpoints / name, *arguments)
        assert (status, out) == (2 if name in ("missing.pt", ".") else 1, "")
        assert re.fullmatch(f"generate.py: .*{re.escape(str(checkpoints / name))}.*\n", err)


@pytest.mark.parametrize(
    "arguments",
    [["--temperature", 0], ["--trace", "--top-k", 1], ["--form", "五绝"],
     ["--acrostic", HEADS], ["--next", HEADS], ["--demo", 2], ["--demo", 6]],
    ids=str,
)  # fmt: skip
def test_a_nan_weight(program, checkpoints, arguments):
    """A NaN weight ended in the sampler's own error, in junk or in shares of nan%."""
    status, out, err = program("--checkpoint", checkpoints / "nan.pt", *arguments)
    assert status == 1
    assert f"generate.py: {checkpoints / 'nan.pt'}: " in err
    assert "non-finite logits" in err
    assert "nan%" not in out


def test_a_model_without_the_marks(program, checkpoints):
    """A model whose corpus has no ， and 。 could do nothing at all, or a form ended in a traceback."""
    model = ["--checkpoint", checkpoints / "latin.pt"]
    for arguments in (["--next", HEADS], ["--prompt", HEADS, "--seed", 1], ["--demo", 1, 4, 5]):
        status, out, err = program(*model, *arguments)
        assert (status, bool(out)) == (0, True), err
    for arguments in (["--acrostic", HEADS], ["--form", "五绝"], ["--form", "五绝", "--loose"]):
        status, out, err = program(*model, *arguments)
        assert (status, out) == (2, "")
        assert "， U+FF0C" in err


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


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe", "平 春\n".encode()])
def test_without_the_tones(program, monkeypatch, tmp_path, content):
    """Without data/prosody.txt, or with half of it, a form ended in a traceback; --loose needs none."""
    if content is not None:
        (tmp_path / "prosody.txt").write_bytes(content)
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
    for device in ("nonsense", "", "cpu:-1", "meta"):
        status, out, err = program("--next", HEADS, "--device", device)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert f"generate.py: --device {device}: not there" in err
    monkeypatch.setattr(generate, "pick_device", lambda name: torch.device("meta"))
    monkeypatch.setattr(generate, "print_next", lambda model, *a: seen.append(model.wte.weight.device.type))
    assert program("--next", HEADS)[0] == 0
    assert seen[-1] == "meta"


def test_main_in_a_thread(program):
    """Outside of the main thread the program ended in an error about signals."""
    results = []
    thread = threading.Thread(target=lambda: results.append(program("--prompt", HEADS, "--seed", 1)))
    thread.start()
    thread.join()
    assert results[0][0] == 0
    assert results[0][1].startswith(HEADS)


# ---------------------------------------------------------------------------------------------------
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


@pytest.mark.parametrize("number", [errno.EPIPE, errno.EINVAL, errno.EIO, errno.ENOSPC], ids=errno.errorcode.get)
def test_an_output_that_takes_no_more(program, monkeypatch, capsys, number):
    """A reader that has enough, as each system says it, ended in an error; or a full disk went without one."""
    out = Stream(number, after=1)
    monkeypatch.setattr(sys, "stdout", out)
    status, _, err = program("-n", 3, "--seed", 1, "--max-chars", 3)
    full = number == errno.ENOSPC
    assert (status, out.getvalue().count("\n")) == (int(full), 1)
    assert err.splitlines()[1:] == (["generate.py: the output: No space left on device"] if full else [])


def test_notices_that_nobody_reads_cost_no_poem(program, monkeypatch):
    """The reader of stderr went away, or its disk was full, and the poems ended there."""
    for error in (errno.EPIPE, errno.ENOSPC):
        monkeypatch.setattr(sys, "stderr", Stream(error))
        status, out, _ = program("-n", 3, "--seed", 1, "--scan", "--max-chars", 3)
        assert (status, out.count("\n")) == (0, 3)


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


# ---------------------------------------------------------------------------------------------------
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
@pytest.mark.parametrize("way", ["closed pipe", "Ctrl-C", "full disk", "no stdout", "undecodable"])
def test_ends_of_a_process(home, way):
    """A closed pipe, Ctrl-C, a full disk or bytes of another encoding ended in a traceback or another status."""
    many = ["-n", "1000000", "--seed", "1", "--max-chars", "20"]
    if way == "full disk":
        with open("/dev/full", "wb") as full:
            process = start(home, *many, stdout=full)
            _, err = process.communicate(timeout=300)
        assert (process.returncode, err.decode().splitlines()[1:]) == (
            1,
            ["generate.py: the output: No space left on device"],
        )
    elif way == "no stdout":
        command = shlex.join([sys.executable, str(home / "generate.py"), "--prompt", "x", "--device", "cpu"])
        result = subprocess.run(["sh", "-c", command + " >&-"], stderr=subprocess.PIPE, timeout=300, check=False)
        assert (result.returncode, result.stderr.count(b"\n")) == (2, 2)
    elif way == "undecodable":
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
