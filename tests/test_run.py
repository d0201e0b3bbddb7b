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
)  # fmt: skip

import train
from checkpoints import store
from checkpoints.store import load_checkpoint, load_state
from data.script import UserError


@pytest.fixture(autouse=True)
def process(monkeypatch):
    """No waiting for a disk or a poem, and signals that are heard, though the tests may run under nohup."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr(train, "sample_poem", lambda *args: "")
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
FULL = OSError(errno.ENOSPC, "No space left")


def held(out):
    return load_state(out.with_suffix(".resume.pt"))


# Steps and evaluations


@pytest.mark.parametrize(("steps", "interval", "evaluated"), [(0, 2, [0]), (1, 0, [1]), (3, 2, [2, 3]), (4, 2, [2, 4])])
def test_exactly_so_many_steps(steps, interval, evaluated, out, monkeypatch):
    """N steps train N - 1 or N + 1, the last is not evaluated and saved, or a model does not say how it was trained."""
    p, rates, losses = parameters(steps=steps, warmup=2, eval_interval=interval), [], []
    learn, texts, begun = train.learn, train.Training(p, POEMS, out).texts, 0
    monkeypatch.setattr(
        torch.optim.AdamW, "step", lambda self: rates.append([group["lr"] for group in self.param_groups])
    )
    monkeypatch.setattr(train, "learn", lambda *args: losses.append(learn(*args)) or losses[-1])
    assert train_run(out, **vars(p))
    assert rates == [[p.adam_lr * train.lr_factor(n, p)] * 2 for n in range(steps)]
    state, info = held(out)["state"], load_checkpoint(out)[2]
    assert state["characters"] == sum(len(text) - 1 for n in range(steps) for text in train.step_texts(texts, p, n))
    assert state["step"] == info["step"] == steps
    assert info["parameters"] == vars(p)
    rows = log_rows(out)
    assert rows[0] == ["step", "training_loss", "validation_loss", "learning_rate"]
    for row, end in zip(rows[1:], evaluated, strict=True):
        assert row[:2] == [str(end), f"{sum(losses[begun:end]) / (end - begun):.4f}" if steps else ""]
        assert not steps or float(row[3]) == pytest.approx(p.muon_lr * train.lr_factor(end - 1, p))
        begun = end


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


@pytest.mark.parametrize(("first", "full"), [(3.0, False), (1.0, True)])
def test_worse_is_not_best(first, full, out, monkeypatch, capsys):
    """A worse model replaces the best, or the first after --resume does, or one that a full disk lost is the best."""
    losses = iter([first, 2.0, 2.0, 2.5])
    monkeypatch.setattr(train, "validation_loss", lambda *args: next(losses))
    if full:
        at_call(monkeypatch, os, "replace", 2, mock.Mock(side_effect=FULL))
    train_run(out, stop_after(5), steps=8)
    assert train_run(out, resume=True, steps=8)
    info = load_checkpoint(out)[2]
    assert (info["step"], info["val_loss"]) == (4, 2.0)
    assert [row[2] for row in log_rows(out)[1:]] == [f"{first:.4f}", "2.0000", "2.0000", "2.5000"]
    said = capsys.readouterr()
    assert said.out.count("not the best") == 2
    assert said.err == (f"cannot write {out}: No space left; going on, the next evaluation saves again\n" * full)


@pytest.mark.parametrize(("name", "function", "call"), [("training", "learn", 4), ("validation", "validation_loss", 2)])
def test_a_loss_of_nan_stops(name, function, call, out, monkeypatch):
    """A NaN is trained on or saved over the last good model, or the step is not named."""
    losses = iter([2.0] * (call - 1) + [math.nan])
    monkeypatch.setattr(train, function, lambda *args: next(losses))
    for optimizer in (torch.optim.AdamW, train.Muon):
        monkeypatch.setattr(optimizer, "step", lambda self: None)  # learn has made no gradients
    with pytest.raises(UserError, match=f"step 4: the {name} loss is nan.* {out} is the last good model") as error:
        train_run(out)
    assert error.value.status == 1
    assert load_checkpoint(out)[2]["step"] == 2


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
    assert train_run(out, resume=True)  # nothing is left to do
    assert same(everything(out), whole)
    out.unlink()
    assert train_run(out, resume=True)  # what somebody deleted is written again
    assert load_checkpoint(out)[2]["step"] == 5


ENDS = [(train, "validation_loss", KeyboardInterrupt(), [2, 3]), (os, "replace", FULL, [9])]
LONGER = [(os, "replace", KeyboardInterrupt(), range(1, 13)), (os, "replace", FULL, range(1, 13))]


@pytest.mark.parametrize(
    ("owner", "name", "error", "calls"), ENDS + [pytest.param(*end, marks=pytest.mark.slow) for end in LONGER]
)
def test_ended_in_every_evaluation_and_every_save(owner, name, error, calls, tmp_path, whole, monkeypatch):
    """A run that ends in an evaluation or a save loses steps or goes on otherwise, or a full disk ends it at once."""
    for number in calls:
        out = tmp_path / str(number) / "gpt.pt"
        ends = error is not FULL or number > 8  # at the last step, so that nobody takes it for saved
        with monkeypatch.context() as patch, pytest.raises(type(error)) if ends else contextlib.nullcontext():
            at_call(patch, owner, name, number, mock.Mock(side_effect=error))
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


@pytest.mark.parametrize("name", [*train.PARAMETERS, "corpus"])
def test_resume_with_another_parameter(name, stopped):
    """A run goes on with a parameter or its corpus changed, or may not have more steps or other evaluations."""
    if name == "corpus":
        changes, poems, shown = {}, POEMS[::-1], "a text of checksum .*"
    else:
        shown = SMALL[name] + (1 if type(SMALL[name]) is int else 0.1)
        changes, poems = {name: shown}, POEMS
    training = train.Training(parameters(**changes), poems, stopped / "gpt.pt")
    if name in ("steps", "eval_interval"):
        training.resume()
        assert training.step == 3
    else:
        with pytest.raises(UserError, match=f"--{train.flag(name)} is {shown}, but .* began with ") as error:
            training.resume()
        assert error.value.status == 2


def test_more_steps_and_fewer(stopped, tmp_path, monkeypatch, capsys):
    """More steps raise the learning rate without a word, or fewer than are done end as if all were well."""
    out = shutil.copytree(stopped, tmp_path / "made") / "gpt.pt"
    with pytest.raises(UserError, match="--steps is 2, but the run in .* has done 3"):
        train_run(out, resume=True, steps=2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert train_run(out, resume=True, steps=9)
    said = capsys.readouterr().out
    assert "the run had --threads 1" in said
    assert "--steps was 5, now it is 9: the learning rate goes from 70% to 74% of its peak" in said


def test_resume_with_a_wrong_file(arguments, stopped, out, capsys):
    """A missing, damaged or foreign .resume.pt ends in a traceback, starts a new run, or is written over."""
    path = out.with_suffix(".resume.pt")
    assert command(*arguments, "--resume") == 2
    assert f"{path} is not there" in capsys.readouterr().err
    assert not out.parent.exists()
    shutil.copytree(stopped, out.parent)
    for data in (path.read_bytes()[:5000], out.read_bytes()):
        path.write_bytes(data)
        assert command(*arguments, "--resume") == 1
        assert capsys.readouterr().err.startswith(f"train.py: {path} ")
        assert path.read_bytes() == data


def test_an_interrupted_run_is_not_written_over(arguments, stopped, out, monkeypatch, capsys):
    """The same command without --resume, and the run that was interrupted is lost; or a finished run bars the way."""
    shutil.copytree(stopped, out.parent)
    before, path = contents(out.parent), out.with_suffix(".resume.pt")
    assert command(*arguments) == 2
    assert f"{path} holds a run interrupted after step 3 of 5; go on with --resume" in capsys.readouterr().err
    assert contents(out.parent) == before
    with monkeypatch.context() as patch:  # it cannot be read just now
        patch.setattr(store, "load_state", mock.Mock(side_effect=PermissionError(13, "Permission denied")))
        assert command(*arguments) == 1
    for state in (b"no run", {}, {"state": None}, {"state": {"step": 1}, "parameters": [1]}):
        path.write_bytes(state) if isinstance(state, bytes) else store.save_state(path, state)
        train.check_not_interrupted(path)
    path.unlink()
    for _ in range(2):  # a finished run is in nobody's way
        capsys.readouterr()
        assert command(*arguments) == 0
        assert f"{out} will be replaced" in capsys.readouterr().err


# Where the files go


REFUSED = [
    "--out .", "--out m.resume.pt", "--out m.txt", "--out folder.pt", "--out taken.pt", "--out poems.txt/m.pt",
    f"--out {'x' * 245}.pt",  # short enough, but not with what is put to it
    "--out text.pt --corpus folder.pt/../text.pt", "--out text.pt --corpus text.log.csv",
    "--out text.pt --corpus text.resume.pt", shlex.join(["--out", str(ROOT / "checkpoints" / "pretrained.pt")]),
    "--device nonsense", "--corpus missing.txt", "--corpus folder.pt", "--corpus /dev/zero",
]  # fmt: skip
NO_MODEL = ["--n-head 3", "--dropout 1", "--n-layer 1000000000"]


@pytest.mark.parametrize("given", REFUSED + NO_MODEL)
def test_refused_before_any_work(given, arguments, corpus, monkeypatch, capsys):
    """A file that cannot be written or read, or sizes that make no model, are found late, or a file is written over."""
    folder = corpus.parent
    monkeypatch.chdir(folder)
    (folder / "folder.pt").mkdir()
    (folder / "taken.log.csv").mkdir()
    for name in ("text.pt", "text.log.csv", "text.resume.pt"):
        shutil.copy(corpus, folder / name)
    before = sorted(folder.rglob("*"))
    if given not in NO_MODEL:
        monkeypatch.delattr(train, "read_poems")
    assert command(*arguments, *shlex.split(given)) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert sorted(folder.rglob("*")) == before


def test_a_second_run_on_one_out(arguments, out, whole, monkeypatch, capsys):
    """Two runs write to one file, or the second ends the first, waits for it, or takes its lock or folder away."""

    def second():
        for more in ([], ["--resume"]):
            assert command(*arguments, *more) == 2
            assert f"--out {out}: another run is training it" in capsys.readouterr().err

    at_call(monkeypatch, train, "learn", 1, second)  # before the first save
    at_call(monkeypatch, train, "learn", 4, second)
    assert command(*arguments) == 0
    assert same(everything(out), whole)
    assert contents(out.parent).keys() == {"gpt.log.csv", "gpt.pt", "gpt.resume.pt"}  # and no lock


# Signals


STOPS = [("SIGINT", train, "learn", 1, 1), ("SIGINT", train, "learn", 3, 3)]
STOPS += [("SIGTERM", train, "validation_loss", 2, 4), ("SIGHUP", os, "fsync", 5, 4)]


@posix
@pytest.mark.parametrize(("number", "owner", "name", "call", "step"), STOPS)
def test_a_signal_stops_and_saves(number, owner, name, call, step, arguments, out, whole, monkeypatch, capsys):
    """A signal in a step, an evaluation or a save loses work, or the printed command does not go on from it."""
    again = arguments
    while again:
        with monkeypatch.context() as patch:
            at_call(patch, owner, name, call, lambda: send(getattr(signal, number)))
            status = command(*again)
        said = capsys.readouterr()
        again = shlex.split(said.err.partition("to go on: python train.py")[2])
        assert status == (130 if again else 0)
        if again:
            assert f"saved after step {step}" in said.err
            assert held(out)["state"]["step"] == step
            assert again.count("--resume") == 1
            assert (f"there is no {out} before" in said.err) == (not out.exists())
            step += call
    assert f"python generate.py --checkpoint {out}\n" in said.out
    assert same(everything(out), whole)


@posix
@pytest.mark.parametrize(("owner", "name"), [(train, "learn"), (train, "validation_loss"), (os, "fsync")])
def test_a_second_signal_leaves_at_once(owner, name, arguments, stopped, out, monkeypatch):
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


@posix
def test_signals_that_are_not_heard(arguments, monkeypatch):
    """A run ends with the terminal though it was started by nohup, or a notebook that calls main in a thread fails."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    at_call(monkeypatch, train, "learn", 2, lambda: send(signal.SIGHUP))
    ends = [command(*arguments)]
    thread = threading.Thread(target=lambda: ends.append(command(*arguments)))
    thread.start()
    thread.join()
    assert ends == [0, 0]


@posix
def test_killed(arguments, stopped, out, whole, monkeypatch):
    """After a kill -9 in the middle of a save, files are half written, locked or left, or the run cannot go on."""
    shutil.copytree(stopped, out.parent)
    for owner, name, number in [(os, "replace", 1), (os, "fsync", 3)]:
        child = os.fork()
        if not child:
            at_call(monkeypatch, owner, name, number, lambda: send(signal.SIGTERM, signal.SIGKILL))
            command(*arguments, "--resume")
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert held(out)["state"]["step"] == 4
    assert command(*arguments, "--resume") == 0
    assert same(everything(out), whole)
    assert contents(out.parent).keys() == {"gpt.log.csv", "gpt.pt", "gpt.resume.pt"}


# Terminals


class Terminal(io.TextIOWrapper):
    def isatty(self):
        return True


def test_the_bar(arguments, stopped, out, monkeypatch):
    """A bar has signs that a code page lacks, or begins a resumed run at 0."""
    shutil.copytree(stopped, out.parent)
    monkeypatch.setattr(sys, "stderr", Terminal(io.BytesIO(), encoding="cp1252"))
    assert command(*arguments, "--resume") == 0
    sent = sys.stderr.buffer.getvalue().decode("ascii")
    bars = [part for part in sent.replace("\n", "\r").split("\r") if "%|" in part]
    assert bars[0].startswith(" 60%|")
    assert "3/5 [" in bars[0]
    assert bars[-1].startswith("100%|")


def test_progress_in_a_file(out, monkeypatch):
    """A log in a file has a bar in it, is silent for half an hour, or keeps its lines in a buffer."""
    log, written = io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), []
    monkeypatch.setattr(sys, "stdout", log)
    monkeypatch.setattr(train, "LOG_SECONDS", -1)
    assert train_run(out, lambda: written.append(log.buffer.getvalue().decode()))
    lines = [text.splitlines()[-1] for text in written[1:]]
    assert [line.split("  ")[0] for line in lines if line.endswith(" left")] == ["step 1/5", "step 3/5"]
    assert "\nstep 2/5  training loss 3." in written[2]  # after 2 and 4 comes an evaluation
    assert not any(sign in written[-1] for sign in "\r%")


def test_a_terminal_that_is_gone(out, monkeypatch):
    """The bar or the log of a terminal that was closed, or of a reader that left, ends the training."""
    gone = mock.Mock(side_effect=OSError(errno.EIO, "Input/output error"))
    monkeypatch.setattr(train.tqdm, "update", gone)
    monkeypatch.setattr(sys, "stdout", mock.Mock(write=gone))
    assert train_run(out)
    assert gone.call_count > 5


@pytest.mark.slow
def test_the_command_itself(tmp_path, corpus):
    """Python train.py > log 2>&1 draws a bar, or dies of a poem in a legacy code page, or of its folder."""
    words = [sys.executable, ROOT / "train.py", *flags(), "--corpus", corpus.name, "--out", "new/m.pt"]
    environment = os.environ | {"PYTHONIOENCODING": "cp1252", "LC_ALL": "C", "PYTHONUTF8": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, cwd=tmp_path)
    assert done.returncode == 0
    lines = done.stdout.decode("utf-8").splitlines()
    assert [line.split()[1] for line in lines[1:7:2]] == ["2/5", "4/5", "5/5"]
    assert len(lines) == 8
