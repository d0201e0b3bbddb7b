"""A training run as a whole: its steps, what is on the disk at any moment, and how it stops and goes on."""

import contextlib
import errno
import io
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from unittest import mock

import pytest
import torch
from conftest import ROOT, posix
from small_run import (
    POEMS,
    SIGNALS,
    SMALL,
    at_call,
    command,
    contents,
    everything,
    flags,
    log_rows,
    parameters,
    same,
    send,
    stop_after,
    train_run,
)

import train
from checkpoints import store
from checkpoints.store import load_checkpoint, load_state
from data.script import UserError


@pytest.fixture(autouse=True)
def process(monkeypatch):
    """A disk that is never waited for, and signals that are heard, though the tests may run under nohup."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
    handlers = {number: signal.signal(number, signal.default_int_handler) for number in SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "made" / "gpt.pt"


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "poems.txt"
    path.write_bytes("".join(poem + "\n" for poem in POEMS).encode())
    return path


@pytest.fixture
def arguments(corpus, out):
    """The command line of a small run of 5 steps that is evaluated after 2, 4 and 5."""
    return [*flags(), "--corpus", corpus, "--out", out]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """All that the unbroken small run leaves."""
    out = tmp_path_factory.mktemp("whole") / "gpt.pt"
    assert train_run(out)
    return everything(out)


TRAINED = ("model", "average", "optimizers")


def held(out):
    return load_state(out.with_suffix(".resume.pt"))


# ---------------------------------------------------------------------------------------------------
# Steps and evaluations


@pytest.mark.parametrize(("steps", "interval", "evaluated"), [(0, 2, [0]), (1, 0, [1]), (3, 2, [2, 3]), (4, 2, [2, 4])])
def test_exactly_so_many_steps(steps, interval, evaluated, out, monkeypatch, capsys):
    """N steps train N - 1 or N + 1, the last is not evaluated and saved, or no step at all has a training loss."""
    p, rates, losses = parameters(steps=steps, warmup=2), [], []
    learn, texts, begun = train.learn, train.Training(p, POEMS, out).texts, 0

    def spy(self):
        rates.append([group["lr"] for group in self.param_groups])

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    monkeypatch.setattr(train, "learn", lambda *args: losses.append(learn(*args)) or losses[-1])
    assert train_run(out, steps=steps, eval_interval=interval, warmup=2)
    assert rates == [[p.adam_lr * train.lr_factor(n, p)] * 2 for n in range(steps)]
    state = held(out)["state"]
    assert state["step"] == load_checkpoint(out)[2]["step"] == steps
    assert state["characters"] == sum(len(text) - 1 for n in range(steps) for text in train.step_texts(texts, p, n))
    rows = log_rows(out)
    assert rows[0] == ["step", "training_loss", "validation_loss", "learning_rate"]
    for row, end in zip(rows[1:], evaluated, strict=True):
        assert row[:2] == [str(end), f"{sum(losses[begun:end]) / (end - begun):.4f}" if steps else ""]
        assert not steps or float(row[3]) == pytest.approx(p.muon_lr * train.lr_factor(end - 1, p))
        begun = end
    said = capsys.readouterr().out
    assert ("nothing was trained" in said) == (steps == 0)
    assert "nan" not in said + out.with_suffix(".log.csv").read_text(encoding="utf-8")


def test_evaluations_change_nothing(tmp_path, whole, monkeypatch):
    """Evaluating more often or never trains other weights, each step has the same dropout, or the seed does nothing."""
    states, learn = set(), train.learn
    monkeypatch.setattr(train, "learn", lambda *args: states.add(bytes(torch.get_rng_state())) or learn(*args))
    for interval in (0, 1):
        torch.rand(3)
        assert train_run(tmp_path / f"{interval}.pt", eval_interval=interval)
        assert len(states) == 5
        assert all(same(held(tmp_path / f"{interval}.pt")[part], whole["run"][part]) for part in TRAINED)
    models = [train.Training(parameters(seed=seed), POEMS, tmp_path / "m.pt").model for seed in (1, 2)]
    assert not torch.equal(models[0].wte.weight, models[1].wte.weight)


def test_worse_is_not_best(out, monkeypatch, capsys):
    """A worse model replaces the best one, or after --resume the first evaluation counts as the best."""
    losses = iter([3.0, 2.0, 2.0, 2.5])
    monkeypatch.setattr(train, "validation_loss", lambda *args: next(losses))
    train_run(out, stop_after(5), steps=8)
    assert train_run(out, resume=True, steps=8)
    info = load_checkpoint(out)[2]
    assert (info["step"], info["val_loss"]) == (4, 2.0)
    assert [row[2] for row in log_rows(out)[1:]] == ["3.0000", "2.0000", "2.0000", "2.5000"]
    assert capsys.readouterr().out.count("not the best") == 2


def test_what_a_model_says_of_itself(out):
    """A model does not say how it was trained, or holds a value of a kind that only some systems can read."""
    assert train_run(out)
    info = load_checkpoint(out)[2]
    assert info["parameters"] == SMALL
    assert info.keys() == {"step", "val_loss", "seconds", "parameters", "torch"}
    assert {type(value) for value in [*info.values(), *info["parameters"].values()]} == {int, float, str, dict}


@pytest.mark.parametrize(("name", "call"), [("training", 4), ("validation", 2)])
def test_a_loss_of_nan_stops(name, call, out, monkeypatch):
    """A NaN is trained on or saved over the last good model, or the step, or the way to begin anew, is not named."""
    function = {"training": "learn", "validation": "validation_loss"}[name]
    losses = iter([2.0] * (call - 1) + [math.nan, math.inf])
    monkeypatch.setattr(train, function, lambda *args: next(losses))
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: None)  # learn has made no gradients
    monkeypatch.setattr(train.Muon, "step", lambda self: None)
    with pytest.raises(UserError, match=f"step 4: the {name} loss is nan; delete .*resume.pt .*lower.*last good") as e:
        train_run(out)
    assert e.value.status == 1
    assert load_checkpoint(out)[2]["step"] == 2
    with pytest.raises(UserError, match="loss is inf; .* with lower learning rates$"):
        train_run(out.with_name("new.pt"))
    assert not out.with_name("new.pt").exists()


# ---------------------------------------------------------------------------------------------------
# Going on


def test_stopped_at_every_step(out, whole):
    """A run stopped before each step, the first and the last among them, ends otherwise than the unbroken one."""
    finished = train_run(out, stop_after(0))
    stops = [held(out)["state"]["step"]]
    while not finished:
        torch.rand(len(stops))  # another process has another past
        finished = train_run(out, stop_after(1), resume=True)
        stops.append(held(out)["state"]["step"])
    assert stops == [0, 1, 2, 3, 4, 5]
    assert same(everything(out), whole)
    before = contents(out.parent)
    assert train_run(out, resume=True)  # nothing is left to do
    assert same(everything(out), whole)
    out.unlink()
    assert train_run(out, resume=True)  # what somebody deleted is written again
    assert load_checkpoint(out)[2]["step"] == 5
    assert contents(out.parent).keys() == before.keys()


@pytest.mark.parametrize(
    ("owner", "name", "calls"),
    [(train, "validation_loss", 3), pytest.param(os, "replace", 12, marks=pytest.mark.slow)],
)
def test_ended_in_every_evaluation_and_every_save(owner, name, calls, tmp_path, whole, monkeypatch):
    """A run that ends in the middle of an evaluation or of a save loses steps, or goes on otherwise."""
    for number in range(1, calls + 1):
        out = tmp_path / str(number) / "gpt.pt"
        with monkeypatch.context() as patch:
            at_call(patch, owner, name, number, mock.Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                train_run(out)
        started = out.with_suffix(".resume.pt").exists()
        assert started or name == "replace" and number == 1
        assert name == "replace" or held(out)["state"]["step"] == (2, 4, 5)[number - 1]
        assert not list(out.parent.glob("*.tmp"))
        assert train_run(out, resume=started)
        assert same(everything(out), whole)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The folder of a run that was stopped after step 3."""
    out = tmp_path_factory.mktemp("stopped") / "gpt.pt"
    assert not train_run(out, stop_after(3))
    return out.parent


@pytest.mark.parametrize("name", train.PARAMETERS)
def test_resume_with_another_parameter(name, stopped):
    """A run goes on with one of its parameters changed, or may not have more steps or other evaluations."""
    value = SMALL[name] + (1 if type(SMALL[name]) is int else 0.1)
    training = train.Training(parameters(**{name: value}), POEMS, stopped / "gpt.pt")
    if name in ("steps", "eval_interval"):
        training.resume()
        assert training.step == 3
    else:
        with pytest.raises(UserError, match=f"--{train.flag(name)} is {value}, but .* began with {SMALL[name]}$") as e:
            training.resume()
        assert e.value.status == 2


def test_resume_with_another_corpus(stopped):
    """A run goes on with other poems, be it with the same ones in another order."""
    for poems in (POEMS[::-1], POEMS[1:], [POEMS[0].replace("，", "！"), *POEMS[1:]]):
        with pytest.raises(UserError, match="--corpus is a text of checksum .* began with a text of checksum"):
            train_run(stopped / "gpt.pt", resume=True, poems=poems)


def test_more_steps_and_fewer(stopped, tmp_path, monkeypatch, capsys):
    """More steps raise the learning rate without a word, or fewer than are done end as if all were well."""
    out = shutil.copytree(stopped, tmp_path / "made") / "gpt.pt"
    with pytest.raises(UserError, match="--steps is 2, but the run in .* has done 3; give it more"):
        train_run(out, resume=True, steps=2)
    capsys.readouterr()
    train_run(out, stop_after(0), resume=True)
    assert capsys.readouterr().out == "resuming after step 3 of 5\n"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert train_run(out, resume=True, steps=9)
    said = capsys.readouterr().out
    assert "the run had --threads 1: with another number" in said
    assert "--steps was 5, now it is 9: the learning rate goes from 70% to 74% of its peak" in said


def test_optimizer_state_lies_with_its_weights(stopped):
    """After --resume an optimizer begins anew, or its state lies on another device or with another weight."""
    training = train.Training(parameters(), POEMS, stopped / "gpt.pt")
    training.resume()
    assert same([optimizer.state_dict() for optimizer in training.optimizers], held(stopped / "gpt.pt")["optimizers"])
    for weight, state in [pair for optimizer in training.optimizers for pair in optimizer.state.items()]:
        assert {(its.shape, its.device) for its in state.values() if its.ndim} == {(weight.shape, weight.device)}


def test_resume_with_a_wrong_file(arguments, out, capsys):
    """A missing, damaged or foreign .resume.pt ends in a traceback, starts a new run, or is written over."""
    assert command(*arguments, "--resume") == 2
    assert f"{out.with_suffix('.resume.pt')} is not there: no run was interrupted" in capsys.readouterr().err
    assert not out.parent.exists()
    train_run(out, stop_after(3))
    path, good = out.with_suffix(".resume.pt"), out.with_suffix(".resume.pt").read_bytes()
    for data in (b"", good[: len(good) // 2], out.read_bytes()):
        path.write_bytes(data)
        assert command(*arguments, "--resume") == 1
        assert capsys.readouterr().err.startswith(f"train.py: {path} ")
        assert path.read_bytes() == data


def test_an_interrupted_run_is_not_written_over(arguments, stopped, out, monkeypatch, capsys):
    """The same command without --resume, and the run that was interrupted is lost; or a finished run bars the way."""
    shutil.copytree(stopped, out.parent)
    before, path = contents(out.parent), out.with_suffix(".resume.pt")
    assert command(*arguments) == 2
    said = capsys.readouterr().err
    assert f"{path} holds a run interrupted after step 3 of 5; go on with --resume, or delete {path}" in said
    assert contents(out.parent) == before
    for state in (b"no run", {}, {"state": None}, {"state": {"step": 1}, "parameters": [1]}):
        path.write_bytes(state) if isinstance(state, bytes) else store.save_state(path, state)
        train.check_not_interrupted(path)
    for error in (PermissionError(13, "Permission denied"), MemoryError()):  # it cannot be read just now
        with monkeypatch.context() as patch:
            patch.setattr(store, "load_state", mock.Mock(side_effect=error))
            with pytest.raises(type(error)):
                train.check_not_interrupted(path)
    path.unlink()
    for _ in range(2):  # a finished run is in nobody's way
        assert command(*arguments) == 0
        assert f"{out} will be replaced at the first evaluation" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------
# Where the files go


REFUSED = [
    "--out .", "--out m.resume.pt", "--out m.txt", "--out ''", "--out folder.pt", "--out taken.pt",
    "--out poems.txt/m.pt", "--out /proc/self/m.pt", f"--out new/{'x' * 300}.pt", "--device nonsense", "--n-head 3",
    f"--out {'x' * 245}.pt",  # short enough, but not with what is put to it
    "--out text.pt --corpus text.pt", "--out text.pt --corpus folder.pt/../text.pt",
    "--out text.pt --corpus text.log.csv", "--out text.pt --corpus text.resume.pt",
    shlex.join(["--out", str(ROOT / "checkpoints" / "pretrained.pt")]),
]  # fmt: skip


@pytest.mark.parametrize("given", REFUSED)
def test_refused_before_any_work(given, arguments, corpus, monkeypatch, capsys):
    """A place that cannot be written is found at the first save, the corpus or the shipped model is written over."""
    folder = corpus.parent
    monkeypatch.chdir(folder)
    (folder / "folder.pt").mkdir()
    (folder / "taken.log.csv").mkdir()
    for name in ("text.pt", "text.log.csv", "text.resume.pt"):
        shutil.copy(corpus, folder / name)
    before = sorted(folder.rglob("*"))
    if "--n-head" not in given:
        monkeypatch.delattr(train, "read_poems")
    assert command(*arguments, *shlex.split(given)) == 2
    error = capsys.readouterr().err
    assert error.startswith("train.py: ")
    assert error.count("\n") == 1
    assert sorted(folder.rglob("*")) == before


def test_a_second_run_on_one_out(arguments, out, whole, monkeypatch, capsys):
    """Two runs write to one file, or the second ends the first, waits for it, or takes its lock or folder away."""
    ends, read = [], train.load_corpus

    def second():
        monkeypatch.setattr(train, "load_corpus", None)
        for more in ([], ["--resume"]):
            ends.append(command(*arguments, *more))
            ends.append(capsys.readouterr().err)
        monkeypatch.setattr(train, "load_corpus", read)

    at_call(monkeypatch, train, "learn", 1, second)  # before the first save
    at_call(monkeypatch, train, "learn", 4, second)
    assert command(*arguments) == 0
    assert ends[::2] == [2] * 4
    assert set(ends[1::2]) == {f"train.py: --out {out}: another run is training it; choose another name\n"}
    assert same(everything(out), whole)
    assert command(*arguments) == 0  # the lock is free again


def test_the_time_of_a_file_means_nothing(arguments, out, monkeypatch, whole):
    """A file's time or inode is taken for its identity: a touch, or a copy put back, ends a run."""

    def touch():
        path = out.with_suffix(".resume.pt")
        shutil.copy(path, path.with_name("copy"))
        os.replace(path.with_name("copy"), path)
        os.utime(path, (0, 0))
        os.utime(out)

    at_call(monkeypatch, train, "learn", 4, touch)
    assert command(*arguments) == 0
    assert same(everything(out), whole)


# ---------------------------------------------------------------------------------------------------
# Signals


@posix
@pytest.mark.parametrize(
    ("number", "owner", "name", "call", "step"),
    [("SIGINT", train, "learn", 3, 3), ("SIGTERM", train, "validation_loss", 2, 4), ("SIGHUP", os, "fsync", 5, 4)],
)
def test_a_signal_stops_and_saves(number, owner, name, call, step, arguments, out, whole, monkeypatch, capsys):
    """A signal in a step, an evaluation or a save loses work, or the printed command does not go on from it."""
    with monkeypatch.context() as patch:
        at_call(patch, owner, name, call, lambda: send(getattr(signal, number)))
        assert command(*arguments) == 130
    said = capsys.readouterr().err
    assert f"saved after step {step}; to go on: python train.py" in said
    assert held(out)["state"]["step"] == step
    _, _, *again = shlex.split(said.partition("to go on: ")[2])
    assert command(*again) == 0
    assert same(everything(out), whole)


def test_a_stop_before_the_first_evaluation(arguments, out, monkeypatch, capsys):
    """A run that is stopped early names a model that is not there, or its line to go on has --resume twice."""
    for resume in ([], ["--resume"]):
        with monkeypatch.context() as patch:
            at_call(patch, train, "learn", 1, lambda: send(signal.SIGINT))
            assert command(*arguments, "--eval-interval", 0, *resume) == 130
        said = capsys.readouterr().err
        assert f"there is no {out} before the first evaluation" in said
        assert said.split().count("--resume") == 1
        assert said.endswith("--resume\n")
    assert command(*arguments, "--resume") == 0
    said = capsys.readouterr().out
    assert f"{out} holds the best model; see it: python generate.py --checkpoint {out}\n" in said


@posix
@pytest.mark.parametrize(("owner", "name"), [(train, "learn"), (train, "validation_loss"), (os, "fsync")])
def test_a_second_signal_leaves_at_once(owner, name, arguments, stopped, out, monkeypatch, capsys):
    """A second Ctrl-C is waited out, ends in a traceback, or leaves half a file in place of the old one."""
    shutil.copytree(stopped, out.parent)
    before = contents(out.parent)
    at_call(monkeypatch, owner, name, 1, lambda: send(signal.SIGINT, signal.SIGINT))
    assert command(*arguments, "--resume") == 130
    after = contents(out.parent)
    if name == "validation_loss":  # what was due is saved before it
        assert held(out)["state"]["step"] == 4
        del before["gpt.resume.pt"], after["gpt.resume.pt"]
    assert after == before
    assert "saved after" not in capsys.readouterr().err


def test_ctrl_c_while_the_corpus_is_read(arguments, out, monkeypatch, capsys):
    """Ctrl-C before the first step is a traceback, or leaves a folder behind."""
    monkeypatch.setattr(train, "read_poems", mock.Mock(side_effect=KeyboardInterrupt))
    assert command(*arguments) == 130
    assert capsys.readouterr().err == ""
    assert not out.parent.exists()


@posix
def test_nohup(arguments, monkeypatch):
    """The run ends with the terminal though it was started by nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    at_call(monkeypatch, train, "learn", 2, lambda: send(signal.SIGHUP))
    assert command(*arguments) == 0


def test_main_in_a_thread(arguments, out, whole):
    """A notebook or a server that calls main in a thread is told that signals work in the main thread only."""
    ends = []
    thread = threading.Thread(target=lambda: ends.append(command(*arguments)))
    thread.start()
    thread.join()
    assert ends == [0]
    assert same(everything(out), whole)


def in_child(arguments):
    """The exit status of the command in a process of its own; minus the signal, if one ended it."""
    child = os.fork()
    if not child:
        try:
            os._exit(command(*arguments))
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@posix
@pytest.mark.slow
def test_killed_at_any_moment(arguments, out, whole, monkeypatch):
    """Kill -9 in a save or an evaluation leaves half a file, a lock, or a run that cannot go on and loses steps."""
    moments = [(os, "replace", n) for n in (1, 2, 3, 4)] + [(os, "fsync", n) for n in (1, 2, 3, 4)]
    for owner, name, number in moments + [(train, "learn", 1), (train, "validation_loss", 1)]:
        resume = ["--resume"] if out.with_suffix(".resume.pt").exists() else []
        with monkeypatch.context() as patch:
            at_call(patch, owner, name, number, lambda: send(signal.SIGTERM, signal.SIGKILL))
            assert in_child([*arguments, *resume]) == -signal.SIGKILL
        for path in out.parent.glob("[!.]*.pt"):
            load_state(path)
    assert held(out)["state"]["step"] == 4
    assert command(*arguments, "--resume") == 0
    assert same(everything(out), whole)
    assert contents(out.parent).keys() == {"gpt.log.csv", "gpt.pt", "gpt.resume.pt"}


# ---------------------------------------------------------------------------------------------------
# Disks and terminals


@pytest.mark.parametrize("name", ["gpt.pt", "gpt.resume.pt", "gpt.log.csv"])
def test_a_disk_that_is_full_for_a_while(name, out, monkeypatch, capsys):
    """A save that fails once ends half an hour of training, or what was not saved counts as the best."""
    replace, refused = os.replace, [1]

    def sometimes(source, target):
        if refused and target.name == name:
            raise OSError(errno.ENOSPC, f"No space left {refused.pop()}")
        replace(source, target)

    losses = iter([1.0, 2.0, 3.0])
    monkeypatch.setattr(train, "validation_loss", lambda *args: next(losses))
    monkeypatch.setattr(os, "replace", sometimes)
    assert train_run(out)
    notices = capsys.readouterr().err.splitlines()
    assert notices == [
        f"cannot write {out.with_name(name)}: No space left 1; going on, the next evaluation saves again"
    ]
    info, saved = load_checkpoint(out)[2], held(out)["state"]
    assert (info["val_loss"], saved["best"]) == ((2.0, 2.0) if name == "gpt.pt" else (1.0, 1.0))
    assert [row[0] for row in log_rows(out)[1:]] == ["2", "4", "5"]


@pytest.fixture
def terminal():
    """(a stream, a function that gives what it was sent): a terminal of 40 columns in a legacy code page."""
    import termios

    reader, writer = os.openpty()
    os.set_blocking(reader, False)
    termios.tcsetwinsize(writer, (24, 40))

    def sent():
        parts = []
        with contextlib.suppress(BlockingIOError):  # there is no more
            while True:
                parts.append(os.read(reader, 4096))
        return b"".join(parts).decode("utf-8")

    with open(writer, "w", encoding="cp1252") as stream:
        yield stream, sent
    os.close(reader)


@posix
@pytest.mark.parametrize("stop", [False, True])
def test_a_full_disk_at_the_last_save(stop, arguments, stopped, out, terminal, monkeypatch):
    """A full disk at the end is a traceback or a line in the middle of the bar, or destroys the old file."""
    shutil.copytree(stopped, out.parent)
    before, (stream, sent) = contents(out.parent), terminal
    monkeypatch.setattr(sys, "stderr", stream)
    if stop:
        at_call(monkeypatch, train, "learn", 1, lambda: send(signal.SIGINT))
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        assert command(*arguments, "--resume", *([] if stop else ["--eval-interval", 0])) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = sent()
    last = said.splitlines()[-1].rpartition("\r")[2]
    assert last == f"train.py: cannot write {out.with_suffix('.resume.pt')}: File too large"
    assert "saved after" not in said
    assert contents(out.parent) == before


@posix
def test_the_bar(arguments, stopped, out, terminal, monkeypatch, capsys):
    """A bar has signs that a code page lacks, is wider than the terminal, or begins a resumed run at 0."""
    shutil.copytree(stopped, out.parent)
    monkeypatch.setattr(sys, "stderr", terminal[0])
    monkeypatch.setattr(train, "LOG_SECONDS", -1)
    assert command(*arguments, "--resume") == 0
    bars = [part for part in terminal[1]().replace("\n", "\r").split("\r") if "%|" in part]
    assert bars[0].startswith(" 60%|")
    assert "3/5 [" in bars[0]
    assert bars[-1].startswith("100%|")
    assert all(bar.isascii() and len(bar) <= 40 for bar in bars), bars
    assert "left" not in capsys.readouterr().out  # lines of progress are for a file


def test_progress_in_a_file(out, monkeypatch):
    """A log in a file has a bar in it, is silent for half an hour, or keeps its lines in a buffer."""
    log, written = io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), []
    monkeypatch.setattr(sys, "stdout", log)
    monkeypatch.setattr(train, "LOG_SECONDS", -1)

    def stopping():
        written.append(log.buffer.getvalue().decode())
        return False

    assert train_run(out, stopping)
    lines = [text.splitlines()[-1].split("  ") for text in written[1:] if text.splitlines()[-1].endswith("left")]
    assert [line[0] for line in lines] == ["step 1/5", "step 3/5"]  # after 2 and 4 comes an evaluation
    assert all(line[1].startswith("loss 3.") and line[2].endswith(" characters/s") for line in lines)
    assert "\nstep 2/5  training loss 3." in written[2]
    assert not any(sign in written[-1] for sign in "\r%")
    monkeypatch.setattr(train, "LOG_SECONDS", 999)
    log.truncate(0)
    assert train_run(out)
    assert "left" not in log.buffer.getvalue().decode()


@pytest.mark.parametrize("name", ["update", "set_postfix_str"])
def test_a_terminal_that_is_gone(name, out, monkeypatch):
    """The bar or the log of a terminal that was closed, or of a reader that left, ends the training."""
    gone = mock.Mock(side_effect=OSError(errno.EIO, "Input/output error"))
    monkeypatch.setattr(train.tqdm, name, gone)
    monkeypatch.setattr(sys, "stdout", mock.Mock(write=gone))
    assert train_run(out)


@pytest.mark.slow
def test_the_command_itself(tmp_path, corpus):
    """Python train.py > log 2>&1 draws a bar, or dies of a poem in a legacy code page, or of its folder."""
    given = [*flags(), "--corpus", "poems.txt", "--out", "new/m.pt", "--device", "cpu", "--threads", "1"]
    environment = os.environ | {"PYTHONIOENCODING": "cp1252", "LC_ALL": "C", "PYTHONUTF8": "0", "OMP_NUM_THREADS": "1"}
    with open(tmp_path / "log", "wb") as log:
        words = [sys.executable, ROOT / "train.py", *given]
        done = subprocess.run(words, stdout=log, stderr=log, env=environment, cwd=tmp_path)
    assert done.returncode == 0
    lines = (tmp_path / "log").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "training on cpu with 1 threads, 11 poems"
    assert [line.split()[1] for line in lines[1:7:2]] == ["2/5", "4/5", "5/5"]
    assert all(set(line.strip()) <= set("".join(POEMS)) and line.strip() for line in lines[2:7:2])
    assert len(lines) == 8
