"""generate.py as a program: arguments, messages, exit statuses, streams, signals; what a user does and what it does.

Most tests run the program's text in this process; those of a fault of processes start real ones, from a copy of it.
"""

import concurrent.futures
import io
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, posix
from test_generate import LETTERS, VOCAB, shape

import generate
import gpt
from gpt import load_state, save_checkpoint, save_state

SOURCE = ROOT / "generate.py"
PROGRAM = compile(SOURCE.read_text(encoding="utf-8"), SOURCE, "exec")
INFO = {"step": 3000, "val_loss": 4.1}


@pytest.fixture(scope="module")
def checkpoints(tiny, tmp_path_factory):
    """A folder with a good checkpoint, poet.pt, and such as cannot be used."""
    folder = tmp_path_factory.mktemp("checkpoints")
    good = folder / "poet.pt"
    save_checkpoint(good, tiny(vocab_size=len(VOCAB), block_size=16, n_layer=1), VOCAB, INFO)
    state = load_state(good)
    (folder / "damaged.pt").write_bytes(good.read_bytes()[:3000])
    (folder / "page.pt").write_bytes(b"<!DOCTYPE html>\n" * 50)
    save_state(folder / "latin.pt", state | {"chars": "\n,." + VOCAB.chars[3:]})
    save_state(folder / "spaced.pt", state | {"chars": VOCAB.chars[:-1] + " "})
    state["weights"]["wte.weight"][5, 3] = float("nan")
    save_state(folder / "nan.pt", state)
    return folder


@pytest.fixture
def program(checkpoints, tmp_path, monkeypatch, capsys):
    """program(*arguments) -> (status, stdout, stderr) of the program, with poet.pt unless they name another file."""
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGINT)

    def run(*arguments):
        arguments = [str(argument) for argument in arguments]
        if "--checkpoint" not in arguments:
            arguments = ["--checkpoint", str(checkpoints / "poet.pt"), *arguments]
        monkeypatch.setattr(sys, "argv", ["generate.py", *arguments])
        with pytest.raises(SystemExit) as end:
            exec(PROGRAM, {"__name__": "__main__", "__file__": str(SOURCE)})
        return end.value.code, *capsys.readouterr()

    yield run
    signal.signal(signal.SIGINT, before)


def error(err):
    """The program's own last line."""
    return err.splitlines()[-1]


# ---------------------------------------------------------------------------------------------------
# Arguments

EXAMPLES = [shlex.split(line)[2:] for line in generate.EXAMPLES.splitlines() if line.startswith("  python generate.py")]


def test_examples_work(program):
    """An example of --help that its own program refuses."""
    assert len(EXAMPLES) >= 8
    for example in EXAMPLES:
        generate.parse_args(example)
        if "--form" not in example and "--exercise" not in example:  # they have tests of their own
            status, out, err = program(*example)
            assert (status, bool(out)) == (0, True), err


def test_help_lists_everything(program):
    """A flag that --help does not explain, or an example that it does not give."""
    status, out, err = program("--help")
    assert (status, err) == (0, "")
    flags = {f"--{name.replace('_', '-')}" for names in generate.FLAGS.values() for name in names}
    flags |= {"--checkpoint", "--device", "--threads"}
    for flag in flags:
        assert re.search(rf"^  (-n, |-n N, )?{flag}[ ,\n][^\n]*(\n {{20,}}[^\n]*)?[a-z]{{3}}", out, re.MULTILINE), flag
    assert all(" ".join(["python generate.py", *example]) in out for example in EXAMPLES)


def test_help_without_docstrings(monkeypatch, capsys):
    """Under python -OO, generate.py --help died of a missing docstring."""
    monkeypatch.setattr(generate, "__doc__", None)
    with pytest.raises(SystemExit) as end:
        generate.parse_args(["--help"])
    assert (end.value.code, "--acrostic" in capsys.readouterr().out) == (0, True)


WRONG = [
    *(["--temperature", value] for value in ("-1", "-1e-9", "nan", "inf", "-inf", "1e7", "x", "")),
    *(["--top-k", value] for value in ("0", "-1", "1.5", "1e3", "nan")),
    *(["--top-p", value] for value in ("0", "-0.1", "1.0001", "nan", "inf")),
    *(["--number", value] for value in ("0", "-3", "1_0", "1000001", "9" * 5000)),
    *(["--max-chars", value] for value in ("0", "100001")),
    *(["--seed", value] for value in ("-1", "9223372036854775808", "1.0")),
    *(["--threads", value] for value in ("0", "x")),
    *(["--demo", value] for value in ("0", "7", "-1", "x", "1.0")),
    *(["--exercise", value] for value in ("0", "4")),
    ["--demo", "1", "7"],
    ["--top", "0"],
    ["--form", "五言"],
    ["--chars", "0"],
    ["--prompt"],
    ["--demo"],
    ["--nonsense"],
    ["--temp", "1"],
]


@pytest.mark.parametrize("arguments", WRONG, ids=lambda arguments: " ".join(arguments)[:30])
def test_wrong_values_are_refused_before_a_model_is_loaded(program, arguments):
    """A value out of range was found late or never; status 2, by its flag, though there is no model."""
    status, out, err = program("--checkpoint", "nowhere.pt", *arguments)
    assert (status, out) == (2, "")
    assert arguments[0] in error(err)
    assert error(err).startswith("generate.py: error: ")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--demo", 1, "--seed", 3],
        ["--exercise", 1, "--prompt", "春"],
        ["--next", "春", "-n", 2],
        ["--demo", 1, "--exercise", 1],
        ["--top", 3, "--prompt", "春"],
        ["--acrostic", "春风", "--prompt", "春"],
        ["--chars", 5, "--prompt", "春"],
        ["--chars", 5, "--acrostic", "春风云水", "--form", "五绝"],
        ["--trace", "-n", 2],
        ["--loose", "--prompt", "春"],
        ["--form", "七律", "--max-chars", 10],
        ["--acrostic", "春风", "--max-chars", 10],
        ["--temperature", 1, 2, "--prompt", "春"],
        ["--temperature", 1, "--demo", 1],
        ["春风"],
    ],
)
def test_what_does_not_go_together(program, arguments):
    """A flag that the command does not use was passed over in silence."""
    status, out, err = program("--checkpoint", "nowhere.pt", *arguments)
    assert (status, out) == (2, "")
    assert error(err).startswith("generate.py: error: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["--temperature", "0"],
        ["--temperature", "1e-320"],
        ["--temperature", "1000000"],
        ["--top-k", "1000000000"],
        ["--top-p", "1e-320"],
        ["--top-p", "1"],
        ["--seed", "9223372036854775807"],
        ["--seed", "0", "--max-chars", "1"],
        ["--chars", "100", "--acrostic", "春风"],
        ["--next", "春", "--top", "1000000"],
        ["--prompt", "春" * 500],
    ],
)
def test_extreme_values_work(program, arguments):
    """A value at the end of its range ended in a traceback or in nothing."""
    status, out, err = program(*arguments)
    assert (status, bool(out)) == (0, True), err


@pytest.mark.parametrize("device", ["nonsense", "", "cuda:99", "cpu:-1", "mps:7", "hpu", "meta"])
def test_devices_that_are_not_there(program, device):
    """A device that is not there, or that computes nothing, ended in a traceback."""
    if device == "cuda:99" and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    status, out, err = program("--prompt", "春", "--device", device)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert error(err).startswith(f"generate.py: --device {device}: not there")


# ---------------------------------------------------------------------------------------------------
# What it writes, and where


def test_stdout_carries_the_poems_alone(program):
    """Notices, the seed, the model's name or the trace among the poems, or fewer poems than asked for."""
    for n, more in ((1, ["--trace"]), (3, []), (130, [])):
        status, out, err = program("--prompt", "春 风", "--form", "五绝", "--loose", "-n", n, *more)
        lines = out.splitlines()
        assert (status, len(lines), out[-1]) == (0, n, "\n")
        assert all(shape(5, 4).fullmatch(line) and line.startswith("春风") for line in lines)
    status, out, err = program("--acrostic", "春，")
    assert (status, out) == (2, "")


@pytest.mark.slow
def test_130_poems(program):
    """Poems lost, doubled or joined at the end of a batch of 64."""
    status, out, _ = program("--form", "七绝", "--loose", "-n", 130, "--seed", 3, "--temperature", 1)
    lines = out.splitlines()
    assert (status, len(lines), len(set(lines))) == (0, 130, 130)
    assert all(map(shape(7, 4).fullmatch, lines))
    status, out, _ = program("-n", 130, "--seed", 3, "--prompt", "春")
    lines = out.splitlines()
    assert (status, len(lines)) == (0, 130)
    assert all(re.fullmatch(f"春[{LETTERS}，。]*", line) for line in lines)


def test_notices_are_on_stderr(program):
    """What was changed, how far the model sees and what was cut is said, and not among the poems."""
    status, out, err = program("--prompt", "春, 风" + "云" * 14, "--max-chars", 3, "--temperature", 0, "--seed", 1)
    assert (status, len(out)) == (0, 21)
    model, *notices = err.splitlines()
    assert model.startswith("model: ")
    assert model.endswith("poet.pt, validation loss 4.100")
    assert notices[0] == "--prompt: , → ，  space → nothing"
    assert notices[1] == "--prompt has 17 characters; the model sees the last 16"
    assert notices[2:] in ([], ["1 of 1 had not ended after 3 characters (--max-chars)"])


def test_seed_is_printed_and_works_again(program):
    """A poem without --seed could not be had again, or every run drew the same."""
    seeds, poems = [], []
    for _ in range(2):
        status, out, err = program("-n", 2, "--temperature", 1)
        seeds.append(re.search(r"^seed (\d+): --seed \1 with the same -n ", err, re.MULTILINE)[1])
        poems.append(out)
        status, again, err = program("-n", 2, "--temperature", 1, "--seed", seeds[-1])
        assert (status, again) == (0, out)
        assert "seed" not in err
    assert seeds[0] != seeds[1]
    assert poems[0] != poems[1]


def test_next_after_a_space_that_the_model_knows(program, checkpoints):
    """A model that knows the space was asked for what comes after the text without its spaces."""
    made = {}
    for text in ("春风", "春 风", "春风 ", " 春风"):
        status, made[text], err = program("--checkpoint", checkpoints / "spaced.pt", "--next", text)
        assert (status, err.count("\n")) == (0, 1)  # the model's name, and no notice of a change
    assert len(set(made.values())) == 4


def test_next_after_a_line_break(program):
    """A line break in --next was taken away, so that what comes at a poem's beginning could not be asked."""
    made = {}
    for text in ("春风", "\n春风", "春风\n"):
        status, made[text], err = program("--next", text)
        assert (status, err.count("\n")) == (0, 1)
    assert len(set(made.values())) == 3


def test_a_prompt_with_a_line_break_is_one_poem(program):
    """A line break inside a prompt made two lines of a poem; one poem is one line, or it is refused."""
    status, out, err = program("--prompt", "春风\n云", "-n", 3, "--seed", 1)
    assert status == 2 or out.count("\n") == 3, out


def test_unknown_characters(program):
    """An unknown character in a prompt, heads or --next: all of them named, status 2, nothing written."""
    for flag in ("--prompt", "--acrostic", "--next"):
        status, out, err = program(flag, "春A😀A")
        assert (status, out) == (2, "")
        assert error(err).startswith(f"generate.py: {flag}: not in the vocabulary")
        assert error(err).endswith(": A U+0041  😀 U+1F600")


# ---------------------------------------------------------------------------------------------------
# Checkpoints


@pytest.mark.parametrize(("name", "code"), [("missing.pt", 2), (".", 2), ("damaged.pt", 1), ("page.pt", 1)])
def test_checkpoints_that_cannot_be_used(program, checkpoints, name, code):
    """A missing, damaged or foreign checkpoint ended in a traceback, or a missing one with status 1."""
    for arguments in ([], ["--prompt", "春"], ["--next", "春"]):
        status, out, err = program("--checkpoint", checkpoints / name, *arguments)
        assert (status, out) == (code, "")
        assert str(checkpoints / name) in error(err)
        assert error(err).startswith("generate.py: ")
        assert len(err.splitlines()) <= 1 + err.startswith("model: ")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--prompt", "春"],
        ["--prompt", "春", "--temperature", 0],
        ["--prompt", "春", "--temperature", 1e-9, "--trace"],
        ["--form", "五绝", "--loose", "--top-k", 1],
        ["--acrostic", "春风", "--temperature", 0],
        ["--next", "春风"],
        ["--demo", 1],
        ["--demo", 2],
        ["--demo", 6],
    ],
    ids=str,
)
def test_a_nan_weight(program, checkpoints, arguments):
    """A NaN weight ended in the sampler's own error, in junk or in shares of nan%; greedy too."""
    status, out, err = program("--checkpoint", checkpoints / "nan.pt", *arguments)
    assert status == 1
    assert "non-finite logits" in error(err)
    assert str(checkpoints / "nan.pt") in error(err)
    assert "nan%" not in out


def test_a_model_without_the_marks(program, checkpoints):
    """A model whose corpus has no ， and 。 could do nothing at all, or a form ended in a traceback."""
    model = ["--checkpoint", checkpoints / "latin.pt"]
    for arguments in (["--next", "春"], ["--prompt", "春", "--seed", 1], ["--demo", 1], ["--demo", 4, 5]):
        status, out, err = program(*model, *arguments)
        assert (status, "Traceback" in err) == (0, False), err
    status, out, err = program(*model, "--acrostic", "春风")
    assert (status, out) == (2, "")
    assert "， U+FF0C" in error(err)


def test_which_checkpoint(tmp_path, checkpoints, monkeypatch, capsys):
    """Without --checkpoint the learner's own model comes before the shipped one, and its name is said."""
    own, shipped = tmp_path / "gpt.pt", tmp_path / "pretrained.pt"
    monkeypatch.setattr(generate, "CHECKPOINTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["generate.py", "--next", "春"])
    assert gpt.run(generate.main) == 2
    said = capsys.readouterr().err
    assert f"no file {own} and no {shipped}: git checkout {shipped} brings it back, python train.py makes one" in said
    for path in (shipped, own):
        shutil.copy(checkpoints / "poet.pt", path)
        assert gpt.run(generate.main) == 0
        assert capsys.readouterr().err == f"model: {path.name}, validation loss 4.100\n".replace(
            path.name, str(path.relative_to(tmp_path.parent))
        )


def test_a_flag_of_another_command_is_shown_its_own(program):
    """A lone --top was told that it does not go with a flag that is none."""
    assert error(program("--top", 5)[2]) == "generate.py: error: --top goes with --next"
    assert error(program("--demo", 1, "--seed", 3)[2]) == "generate.py: error: --seed goes with poems"
    assert error(program("--demo", 1, "--top-k", 3)[2]) == "generate.py: error: --top-k goes with --next or poems"


def test_notices_that_nobody_reads_cost_no_poem(checkpoints, monkeypatch, capsys):
    """The reader of stderr went away, or its disk was full, and the poems ended there, with status 0."""

    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    closed = io.StringIO()
    closed.close()
    for stream in (Gone(), closed):
        monkeypatch.setattr(sys, "stderr", stream)
        arguments = ["--checkpoint", str(checkpoints / "poet.pt"), "-n", "3", "--prompt", "春", "--scan"]
        monkeypatch.setattr(sys, "argv", ["generate.py", *arguments])
        assert gpt.run(generate.main) == 0
        assert capsys.readouterr().out.count("\n") == 3


def test_notices_about_what_was_asked(program):
    """The same poem came several times without a word, or a word alone was refused without a hint."""
    status, out, err = program("--temperature", 0, "-n", 2, "--seed", 1)
    assert (status, len(set(out.splitlines()))) == (0, 1)
    assert "the 2 poems are the same" in err
    assert program("春风")[2].splitlines()[-1].endswith("--prompt 春风 begins a poem with it")
    status, out, err = program("--top-k", "0")
    assert error(err) == "generate.py: error: --top-k is 0; it must be at least 1"
    status, out, err = program("--number", "0")
    assert error(err).endswith("0 is not a whole number from 1 to 1000000")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SEED", "1"),
        ("TEMPERATURES", 0.5),
        ("TEMPERATURES", (0.3, -1)),
        ("OPENINGS", "床前明月光，"),
        ("ACROSTICS", (("春", "7"),)),
        ("POEMS", 0),
        ("TOP_K", 2.5),
        ("HOT", float("nan")),
        ("TIMED_CHARS", ()),
        ("NEXT_PROMPTS", ("",)),
        ("ACROSTICS", (("春", 10**6),)),
        ("THREADS", 10**5),
        ("CANDIDATES", 10**5),
        ("ACROSTICS", (("春", 10**5),)),
        ("TEMPERATURES", (1e9,)),
        ("TEMPERATURE", None),
        ("TOP_K", 20.0),
        ("EX1_TOP_P", 0.0),
        ("EX1_TOP_P", 1.5),
    ],
)
def test_an_edited_constant_is_named(name, value, checkpoints, monkeypatch, capsys):
    """A constant edited into something else ended in a traceback, or the checkpoint was blamed."""
    monkeypatch.setattr(generate, name, value)
    monkeypatch.setattr(sys, "argv", ["generate.py", "--checkpoint", str(checkpoints / "poet.pt")])
    assert gpt.run(generate.main) == 2
    assert f"generate.py: {name} in generate.py is {value!r}" in capsys.readouterr().err


def test_heads_and_lines(program):
    """An acrostic of two heads was taken for a form of four lines."""
    status, out, err = program("--acrostic", "春风", "--form", "五绝")
    assert (status, out) == (2, "")
    assert error(err) == "generate.py: --acrostic has 2 characters, but 五绝 has 4 lines"


def test_without_the_tones(program, monkeypatch, tmp_path):
    """Without data/prosody.txt, or with half of it, a form ended in a traceback."""
    for content in (None, b"", b"\xff\xfe", "平 春\n".encode()):
        path = tmp_path / "prosody.txt"
        if content is not None:
            path.write_bytes(content)
        monkeypatch.setattr("data.prosody.PROSODY", path)
        status, out, err = program("--form", "五绝")
        assert (status, out) == (1, "")
        assert str(path) in error(err)
        assert "python -m data.prosody" in error(err)
        path.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------------
# 500 lists of arguments

RIGHT_TEXTS = [
    "",
    "春",
    "春风",
    "春眠不觉学，",
    "云水花,風.",
    " 春 ",
    "\u3000",
    "床前明月光，疑是地上雪。",
    "春" * 300,
]
WRONG_TEXTS = ["春A", "😀", "龘", "，。", "-", "--", "\x1b[31m", "%s%d", "春" * 99 + "Ω"]
TEXTS = RIGHT_TEXTS, WRONG_TEXTS
VALUES = {  # flag -> (values that can be right, values that are wrong)
    "--prompt": TEXTS,
    "--acrostic": (["春眠不觉", "学无止境", "春", "春風", "云水花雪春风地上"], WRONG_TEXTS),
    "--next": TEXTS,
    "--form": (["五绝", "七绝", "五律", "七律"], ["五", ""]),
    "--loose": ([None], ["5"]),
    "--scan": ([None], ["5"]),
    "--chars": (["1", "5", "7"], ["0", "101", "五", "-5"]),
    "--top": (["1", "7", "1000000"], ["0", "x"]),
    "-n": (["1", "2", "5"], ["0", "-1", "1000001", "1e3", ""]),
    "--temperature": (["0", "-0.0", "0.8", "1e-320", "1.5", "1e6"], ["-1", "nan", "inf", "", "0x1", "１e999"]),
    "--top-k": (["1", "20", "1000000000"], ["0", "-1", "2.5", "9" * 400]),
    "--top-p": (["0.9", "1", "1e-320"], ["0", "1.1", "nan", "-inf"]),
    "--seed": (["0", "7", "9223372036854775807"], ["-1", "9223372036854775808", "seven", "٣"]),
    "--max-chars": (["1", "9", "60"], ["0", "100001", "-1"]),
    "--trace": ([None], ["5"]),
    "--device": (["cpu", "auto"], ["cuda:99", "", "nonsense", "显卡"]),
    "--checkpoint": (["poet.pt"], ["missing.pt", "damaged.pt", "page.pt", "nan.pt", "", "春.pt"]),
    "--demo": (["1", "3", "4", "5"], ["0", "7", "一", "1.0"]),
    "--exercise": ([], ["0", "4", "-1"]),
    "--help": ([None], ["x"]),
    "--nonsense": ([], ["1"]),
}


def argument_lists(folder):
    chance = random.Random(7)
    commands = ["--prompt", "--prompt", "--acrostic", "--form", "--next", "--demo", "-n"]
    flags = [*VALUES, *["--prompt", "--form", "-n", "--temperature", "--top-k", "--top-p", "--checkpoint"] * 3]
    for _ in range(500):
        wrong = chance.random() < 0.5  # half the lists are of right values alone
        arguments = ["--checkpoint", folder / "poet.pt"]
        for flag in dict.fromkeys([chance.choice(commands), *chance.choices(flags, k=chance.randint(0, 4))]):
            right, bad = VALUES[flag]
            value = chance.choice(bad if not right or (wrong and chance.random() < 0.5) else right)
            if flag == "--checkpoint":
                value = folder / chance.choice(right + bad)
            arguments += [flag] if value is None or (wrong and chance.random() < 0.1) else [flag, str(value)]
        yield [str(argument) for argument in arguments]


@pytest.mark.slow
def test_500_argument_lists(program, checkpoints, tmp_path):
    """Some list of arguments ended in a traceback, another status, or files nobody asked for."""
    before = {path.name: path.read_bytes() for path in checkpoints.iterdir()}
    statuses = []
    for arguments in argument_lists(checkpoints):
        status, out, err = program(*arguments)
        assert status in (0, 1, 2), arguments
        assert "Traceback" not in out + err, arguments
        if status:
            assert error(err).startswith("generate.py: "), arguments
        if status == 2:
            assert out == "", arguments
        if status == 1:  # not for what was typed, but for a file
            files = [value for flag, value in zip(arguments, arguments[1:], strict=False) if flag == "--checkpoint"]
            assert Path(files[-1]).name != "poet.pt" or "allows no character" in err, arguments  # so few characters
        statuses.append(status)
    assert {path.name: path.read_bytes() for path in checkpoints.iterdir()} == before
    assert list(tmp_path.iterdir()) == []
    assert min(statuses.count(0), statuses.count(2)) > 100
    assert statuses.count(1) > 20


# ---------------------------------------------------------------------------------------------------
# Real processes. They are started together, from a copy of the program with its own checkpoint and corpus.


def clean_environment(**more):
    """This one without what decides on encodings."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LC_", "LANG"))}
    return inherited | {"OMP_NUM_THREADS": "1"} | more


@pytest.fixture(scope="module")
def home(checkpoints, tmp_path_factory):
    folder = tmp_path_factory.mktemp("poet")
    for name in ("generate.py", "gpt.py"):
        shutil.copy(SOURCE.with_name(name), folder)
    shutil.copytree(ROOT / "data", folder / "data", ignore=shutil.ignore_patterns("tang.txt", "__pycache__"))
    (folder / "checkpoints").mkdir()
    shutil.copy(checkpoints / "poet.pt", folder / "checkpoints" / "pretrained.pt")
    (folder / "data" / "tang.txt").write_bytes("春风。\n".encode())
    return folder


NO_LOCALE = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
DEMO = ["--demo", "1", "5"]
PROMPT = ["--prompt", "春风", "--seed", "7", "--trace"]

# name -> (arguments, environment, options of Python)
RUNS = {
    "demo": (DEMO, {}, []),
    "prompt": (PROMPT, {}, []),
    "demo, default encodings warned of": (DEMO, {"PYTHONWARNDEFAULTENCODING": "1", "LC_ALL": "C"}, ["-X", "utf8=0"]),
    "demo, ascii, pipe": (DEMO, {"PYTHONIOENCODING": "ascii:strict"}, []),
    "prompt, gbk, file": (PROMPT, {"PYTHONIOENCODING": "gbk"}, []),
    "help": (["--help"], {}, []),
    "help, no locale, file": (["--help"], NO_LOCALE, []),
    "wrong form, ascii": (["--form", "绝"], {"PYTHONIOENCODING": "ascii"}, []),
}


@pytest.fixture(scope="module")
def finished(home, checkpoints, tmp_path_factory):
    """name -> (status, stdout, stderr) of all RUNS, and of 4 of the 500 lists of arguments by their number."""
    folder = tmp_path_factory.mktemp("working")
    runs = dict(RUNS)
    lists = list(argument_lists(checkpoints))
    for number in range(20, 500, 120):
        runs[number] = (lists[number], {}, [])

    def run(name):
        arguments, environment, options = runs[name]
        command = [sys.executable, *options, home / "generate.py", *map(as_argument, arguments)]
        common = {"cwd": folder, "env": clean_environment(**environment), "stderr": subprocess.PIPE, "timeout": 300}
        if "file" in str(name):
            with open(folder.with_name(f"{name}.out"), "wb+") as file:
                result = subprocess.run(command, stdout=file, check=False, **common)
                file.seek(0)
                out = file.read()
        else:
            result = subprocess.run(command, stdout=subprocess.PIPE, check=False, **common)
            out = result.stdout
        return name, (
            result.returncode,
            *("\n".join(b.decode("utf-8", "replace").splitlines()) for b in (out, result.stderr)),
        )

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        results = dict(pool.map(run, runs))
    assert list(folder.iterdir()) == []  # nothing is written where it was started
    return results


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RUNS if name.startswith(("demo", "prompt", "help"))])
def test_the_same_everywhere(finished, name):
    """In a legacy code page, without a locale, to a file or a pipe: status 0, the whole output in UTF-8."""
    status, out, err = finished[name]
    assert (status, out) == (0, finished[name.split(",")[0]][1])
    if "warned" in name:  # torch has warnings of its own, and test_default_encodings looks at ours
        return
    assert err == finished[name.split(",")[0]][2]
    if name.startswith("demo"):  # the model's name comes last, so that the first line is the lesson's
        assert "春" in out
        assert out.splitlines()[-1].startswith("model: ")
        assert err == ""
    if name.startswith("prompt"):
        assert "春" in out
        assert err.startswith("model: ")


@pytest.mark.slow
def test_default_encodings(finished, home):
    """A file of ours was opened in the system's encoding."""
    status, out, err = finished["demo, default encodings warned of"]
    assert "「春风」出现 1 次" in out  # so the corpus was read
    assert not [line for line in err.splitlines() if str(home) in line]


@pytest.mark.slow
def test_errors_in_ascii(finished):
    """An error message that holds Chinese died in a legacy code page."""
    status, out, err = finished["wrong form, ascii"]
    assert (status, out) == (2, "")
    assert "五绝" in error(err)


@pytest.mark.slow
def test_real_processes_do_as_the_program_here(finished, program, checkpoints):
    """Some of the 500 lists of arguments ended otherwise in a process of its own."""
    lists = list(argument_lists(checkpoints))
    numbers = [name for name in finished if isinstance(name, int)]
    assert len(numbers) == 4
    for number in numbers:
        status, out, err = program(*lists[number])
        assert finished[number][0] == status, (lists[number], finished[number])
        assert "Traceback" not in finished[number][2]
        if "--seed" in lists[number] or status == 2:
            assert finished[number][1] == "\n".join(out.splitlines())


def as_argument(value):
    """An argument as UTF-8 bytes, in a locale without Chinese too."""
    return os.fsdecode(value.encode("utf-8", "surrogateescape")) if isinstance(value, str) else value


def start(home, *arguments):
    return subprocess.Popen(
        [sys.executable, home / "generate.py", *map(as_argument, arguments)],
        env=clean_environment(PYTHONUTF8="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["-n", "1000000", "--seed", "1"], ["--demo", "1", "2", "3", "4", "5"]])
def test_a_reader_that_has_seen_enough(home, arguments):
    """A closed pipe ended in a traceback; the first line is there, stderr holds none of it, status 0."""
    process = start(home, *arguments)
    first = process.stdout.readline()
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(300) == 0
    if "--demo" in arguments:
        assert (first[:6], err) == ("== 1. ", "")
    else:
        assert re.fullmatch(f"[{LETTERS}，。]*\n", first)
        assert re.fullmatch(r"model: .*pretrained\.pt, validation loss 4\.100\n", err)


@pytest.mark.slow
@posix
def test_ctrl_c_while_writing(home):
    """Ctrl-C ended in a traceback; status 130, and a whole first poem."""
    process = start(home, "-n", "1000000", "--form", "五绝", "--loose", "--seed", "1")
    first = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130
    assert err.count("\n") == 1
    assert err.startswith("model: ")
    assert shape(5, 4).fullmatch(first.rstrip())


@posix
@pytest.mark.slow
@pytest.mark.parametrize("script", ["generate.py", "train.py"])
def test_ctrl_c_while_torch_is_loaded(script, tmp_path):
    """Ctrl-C in the first second was a traceback, or was swallowed inside torch's import, and the run went on."""
    shutil.copy(ROOT / script, tmp_path)
    (tmp_path / "torch.py").write_text(
        """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(9)
except KeyboardInterrupt:  # as torch does around its import of numpy
    pass
""",
        encoding="utf-8",
    )
    result = subprocess.run([sys.executable, tmp_path / script], capture_output=True, timeout=60, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (-signal.SIGINT, b"", b"")


@pytest.mark.slow
@posix
@pytest.mark.parametrize("arguments", [["--form", "绝"], ["--demo", "1"]])
def test_without_a_stdout(home, arguments):
    """A program started with its stdout closed ended in a traceback."""
    result = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, home / "generate.py", *map(as_argument, arguments)],
        env=clean_environment(PYTHONUTF8="1"),
        stderr=subprocess.PIPE,
        encoding="utf-8",
        timeout=300,
        check=False,
    )
    assert "Traceback" not in result.stderr
    assert result.returncode == (2 if "绝" in arguments else 0)


@posix
@pytest.mark.slow
def test_without_a_stderr(home):
    """With stderr closed, notices went where the poems go."""
    command = [sys.executable, str(home / "generate.py"), "--prompt", "春风", "--seed", "1"]
    command = shlex.join(command) + " 2>&-"
    result = subprocess.run(
        ["sh", "-c", command], env=clean_environment(PYTHONUTF8="1"), capture_output=True, check=False
    )
    assert (result.returncode, result.stdout.count(b"\n")) == (0, 1)
