"""train.py: the schedule, the steps, what is on the disk at any moment, and how a run ends."""

import builtins
import functools
import io
import math
import multiprocessing
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from conftest import ROOT, posix

import gpt
import train
from data.poems import is_validation, read_poems, split
from gpt import UserError, load_checkpoint, load_state

TINY = ["--n-embd", "16", "--n-layer", "1", "--n-head", "2", "--block-size", "16", "--batch-size", "4"]


def some_poems(seed=1, count=120):
    """Poems of four lines of five characters out of 24; some of them are validation poems."""
    chance = random.Random(seed)
    chars = "风月山水云花雪雨天地人心春秋日夜东西南北江海上下"
    return ["".join("".join(chance.choices(chars, k=5)) + mark for mark in "，。，。") for _ in range(count)]


POEMS = some_poems()


def parameters(*flags):
    return train.parse_args([*TINY, *(str(flag) for flag in flags)])[0]


def train_run(p, poems, out, resume=False, stopping=lambda: False):
    """Whether a run, new or resumed, comes to its last step."""
    run = train.Run(p, poems, out)
    if resume:
        run.resume()
    return run.train(stopping)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "made" / "gpt.pt"


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "poems.txt"
    path.write_bytes("".join(poem + "\n" for poem in POEMS).encode())
    return path


def stop_after(checks):
    """A function for train's stopping: False so many times, then True."""
    left = iter([False] * checks)
    return lambda: next(left, True)


def command(monkeypatch, *arguments):
    """The exit status of python train.py arguments, run here."""
    monkeypatch.setattr(sys, "argv", ["train.py", *(str(argument) for argument in arguments)])
    names = [name for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = [signal.getsignal(getattr(signal, name)) for name in names]
    try:
        return gpt.run(train.main)
    except SystemExit as end:  # argparse
        return end.code
    finally:
        for name, handler in zip(names, before, strict=True):
            signal.signal(getattr(signal, name), handler)
        torch.set_num_threads(1)


def same(a, b):
    """Whether two trees of dicts, lists, tensors and plain values are equal to the last bit."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def everything(out):
    """All that a run leaves in its two files, but for the clock."""
    run, model = load_state(out.with_suffix(".resume.pt")), load_state(out)
    del run["state"]["seconds"], model["info"]["seconds"]
    run["state"]["log"] = [[step, *rest] for step, _, *rest, _ in run["state"]["log"]]
    return {"run": run, "model": model}


def log_rows(out):
    """The lines of log.csv, but for the clock."""
    rows = [line.split(",") for line in out.with_suffix(".log.csv").read_text(encoding="utf-8").splitlines()]
    return [[step, *rest] for step, _, *rest, _ in rows]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ---------------------------------------------------------------------------------------------------
# The schedule


@pytest.mark.parametrize(
    ("steps", "warmup"),
    [(1, 0), (2, 0), (10, 0), (10, 1), (10, 4), (10, 9), (10, 10), (10, 11), (3, 100), (1, 100), (4000, 100)],
)
def test_learning_rates(steps, warmup):
    """A first learning rate of 0, a second peak, a jump where the parts join, a division by zero."""
    p = parameters("--steps", steps, "--warmup", warmup)
    rates = [train.lr_factor(step, p) for step in range(steps)]
    assert all(0 < rate <= 1 for rate in rates)
    peak = rates.index(max(rates))
    assert peak == min(warmup, steps - 1)
    assert all(a < b for a, b in zip(rates[:peak], rates[1:], strict=False))
    assert all(a > b for a, b in zip(rates[peak:], rates[peak + 1 :], strict=False))
    climb = 1 / (warmup + 1)
    assert rates[0] == pytest.approx(climb if warmup else 1)
    if warmup < steps:
        assert rates[warmup] == 1
    if warmup < steps - 1:
        assert rates[-1] == pytest.approx(p.final_lr)
    jumps = [abs(a - b) for a, b in zip(rates, rates[1:], strict=False)]
    assert max(jumps, default=0) <= max(climb, 1.6 / max(1, steps - 1 - warmup)) + 1e-9


def test_learning_rate_reaches_the_optimizers(out, monkeypatch):
    """The schedule is computed and not used, or resume begins a new one."""
    seen = []
    step = torch.optim.AdamW.step

    def spy(self):
        seen.append([group["lr"] for group in self.param_groups])
        return step(self)

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    p = parameters("--steps", 6, "--warmup", 2)
    train_run(p, POEMS, out, stopping=stop_after(3))
    train_run(p, POEMS, out, resume=True)
    assert seen == [[p.adam_lr * train.lr_factor(step, p)] * 2 for step in range(6)]


# ---------------------------------------------------------------------------------------------------
# Steps and evaluations


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_exactly_so_many_steps(steps, out, monkeypatch, capsys):
    """N steps train N - 1 or N + 1, the last state is not evaluated and saved, or no step has a training loss."""
    taken = []
    batch = train.training_batch
    monkeypatch.setattr(train, "training_batch", lambda *args: taken.append(1) or batch(*args))
    assert train_run(parameters("--steps", steps, "--eval-interval", 0), POEMS, out)
    assert len(taken) == steps
    assert load_checkpoint(out)[2]["step"] == steps
    saved = load_state(out.with_suffix(".resume.pt"))
    assert saved["state"]["step"] == steps
    assert all(its["step"] == steps for its in saved["optimizers"][1]["state"].values())
    assert [row[0] for row in log_rows(out)[1:]] == [str(steps)]
    assert (steps > 0) == ("training loss" in capsys.readouterr().out)


@pytest.mark.slow
def test_evaluations_change_nothing(tmp_path):
    """Evaluating every 2, every 5 steps or never gives other weights, or an evaluation is left out."""
    runs = {}
    for interval in (2, 5, 0):
        out = tmp_path / str(interval) / "gpt.pt"
        train_run(parameters("--steps", 11, "--eval-interval", interval), POEMS, out)
        runs[interval] = load_state(out.with_suffix(".resume.pt"))
        expected = [*range(interval, 11, interval), 11] if interval else [11]
        assert [row[0] for row in log_rows(out)[1:]] == [str(step) for step in expected]
    for interval in (2, 5):
        assert same(runs[interval]["model"], runs[0]["model"])
        assert same(runs[interval]["optimizers"], runs[0]["optimizers"])


def test_dropout_is_off_in_evaluation():
    """Dropout on in the evaluation, or still off after it."""
    p = parameters("--dropout", 0.5)
    _, held_out = split(POEMS)
    vocab = gpt.Vocabulary("".join(sorted({"\n", *"".join(POEMS)})))
    torch.manual_seed(1)
    model = gpt.GPT(gpt.GPTConfig(len(vocab), p.block_size, p.n_layer, p.n_head, p.n_embd, dropout=p.dropout))
    for weight in model.parameters():  # large enough that half of it missing is seen
        weight.data *= 10
    batches = train.validation_batches(held_out, vocab)
    for training in (True, False):
        model.train(training)
        losses = [train.validation_loss(model, batches) for _ in range(2)]
        assert losses[0] == losses[1]
        assert model.training is training
    assert len({train.sample_poem(model, vocab) for _ in range(3)}) == 1
    assert model.training  # it is asked for in the middle of a run
    x = batches[0][:, :16]
    model.train()
    assert not torch.equal(model.hidden(x), model.hidden(x))


def test_dropout_is_on_in_training():
    """The embedding, or what a layer adds, was never left out; or each step left out the same."""
    torch.manual_seed(1)
    model = gpt.GPT(gpt.GPTConfig(24, 16, 2, 2, 16, dropout=0.5)).train()
    ids = torch.zeros(4, 16, dtype=torch.long)
    assert not torch.equal(model.hidden(ids), model.hidden(ids))
    dropped, dropout = [], gpt.F.dropout
    gpt.F.dropout = lambda x, p: dropped.append(p) or dropout(x, p)
    try:
        model.hidden(ids)
    finally:
        gpt.F.dropout = dropout
    assert dropped == [0.5] * 5  # of the embedding, and of two parts of two layers


def test_each_step_has_a_dropout_of_its_own(out):
    """The same dropout mask at every step."""
    run = train.Run(parameters("--steps", 4, "--dropout", 0.3), POEMS, out)
    states, forward = [], run.model.forward

    def spy(idx, targets=None):
        if run.model.training:
            states.append(torch.get_rng_state().tolist())
        return forward(idx, targets)

    run.model.forward = spy
    assert run.train()
    assert len(states) == 4
    assert len({tuple(state) for state in states}) == 4


def test_optimizers():
    """Weight decay on the norms, none on embeddings or in Muon, another momentum or another second beta."""
    p = parameters("--muon-decay", 0.3, "--adam-decay", 0.2)
    model = gpt.GPT(gpt.GPTConfig(24, 16, 1, 2, 16))
    muon, adam = train.make_optimizers(model, p)
    names = {id(weight): name for name, weight in model.named_parameters()}
    found = {names[id(w)]: g for optimizer in (muon, adam) for g in optimizer.param_groups for w in g["params"]}
    assert found.keys() == {name for name, _ in model.named_parameters()}
    for name, group in found.items():
        norm, embedding = "ln" in name, name in ("wte.weight", "wpe.weight")
        assert group["weight_decay"] == (0 if norm else 0.2 if embedding else 0.3), name
        if norm or embedding:
            assert group["betas"] == (0.9, 0.99)
        else:
            assert group["momentum"] == 0.95


def test_log(out):
    """Losses were averaged from the beginning instead of the last evaluation, or the learning rate was a step late."""
    p = parameters("--steps", 6, "--eval-interval", 2, "--warmup", 3)
    run = train.Run(p, POEMS, out)
    losses, forward = [], run.model.forward

    def spy(idx, targets=None):
        loss = forward(idx, targets)[1]
        if run.model.training:
            losses.append(loss.item())
        return None, loss

    run.model.forward = spy
    run.train()
    for row, end in zip(run.log, (2, 4, 6), strict=True):
        assert row[0] == end
        assert row[2] == pytest.approx(sum(losses[end - 2 : end]) / 2, abs=1e-4)
        assert row[4] == pytest.approx(p.muon_lr * train.lr_factor(end - 1, p))


def test_validation_loss_is_the_mean_over_characters(monkeypatch):
    """Poems of several lengths, longer than block_size too, are averaged by poem or batch, or lose characters."""
    vocab = gpt.Vocabulary("".join(sorted({"\n", *"".join(POEMS)})))
    poems = [POEMS[0], POEMS[1] * 3, POEMS[2][:6], *POEMS[3:80]]
    torch.manual_seed(1)
    model = gpt.GPT(gpt.GPTConfig(len(vocab), 16, 1, 2, 16, dropout=0.0)).eval()
    total = count = 0
    for poem in poems:
        ids = vocab.encode(f"\n{poem}\n")
        for begin in range(0, ids.size(1) - 1, 16):
            piece = ids[:, begin : begin + 17]
            logs = model(piece[:, :-1])[0].double().log_softmax(dim=-1)
            total -= logs.gather(2, piece[:, 1:, None]).sum().item()
            count += piece.size(1) - 1
    assert count == sum(len(poem) + 1 for poem in poems)
    loss = train.validation_loss(model, train.validation_batches(poems, vocab))
    assert loss == pytest.approx(total / count, abs=1e-5)


def test_windows():
    """A target is not the next character, no window begins with a poem, or none elsewhere."""
    poems, _ = split(POEMS)
    vocab = gpt.Vocabulary("".join(sorted({"\n", *"".join(poems)})))
    stream, starts = train.read_pass(poems, vocab, parameters(), 0)
    text = vocab.decode(stream.tolist())
    assert all(text[i] == "\n" and i + 16 < len(text) for i in starts.tolist())  # a window and its last target fit
    assert len(starts) == sum(char == "\n" for char in text[:-16])
    for share, least, most in ((1.0, 32, 32), (0.5, 16, 28), (0.0, 0, 10)):
        p = parameters("--batch-size", 32, "--poem-share", share)
        x, y = train.training_batch(stream, starts, p, 3, 6)
        assert x.shape == y.shape == (32, 16)
        assert torch.equal(x[:, 1:], y[:, :-1])
        assert least <= (x[:, 0] == vocab.ids["\n"]).sum() <= most
        assert all(vocab.decode([*row.tolist(), last]) in text for row, last in zip(x, y[:, -1].tolist(), strict=True))


@pytest.mark.parametrize("length", [17, 18, 63, 64, 65, 1000])
@pytest.mark.parametrize("share", [0, 0.5, 1])
def test_a_pass_reads_the_whole_text(length, share):
    """A part of the text is left out of a pass or comes twice, or a window reaches past the end."""
    p = parameters("--poem-share", share)  # 4 windows of 16 a step
    steps = math.ceil(length / 64)
    starts = torch.arange(0, length - 16, 5)
    batches = [train.training_batch(torch.arange(length), starts, p, number, steps) for number in range(steps)]
    begins = torch.cat([x[:, 0] for x, _ in batches])
    assert all(torch.equal(y, x + 1) and y.max() < length for x, y in batches)
    assert share == 0 or set(begins.view(steps, 4)[:, : round(4 * share)].flatten().tolist()) <= set(starts.tolist())
    read = torch.cat([x.flatten() for x, _ in batches]).bincount(minlength=length)
    if share == 0:
        assert read[: length - 16].min() > 0  # what is left at the end is too short for a window
    if length == 1000:
        assert len(begins.unique()) >= len(begins) - 2
        assert read.max() <= 3


def test_each_pass_has_its_order():
    """The passes share an order, a poem is lost or doubled in one, or the order is another one on resume."""
    poems, _ = split(POEMS)
    vocab = gpt.Vocabulary("".join(sorted({"\n", *"".join(poems)})))

    def read(seed, number):
        return vocab.decode(train.read_pass(poems, vocab, parameters("--seed", seed), number)[0].tolist())

    passes = [read(seed, number) for seed in (1, 2) for number in range(3)]
    assert len(set(passes)) == 6
    assert all(text[0] == text[-1] == "\n" and sorted(text[1:-1].split("\n")) == sorted(poems) for text in passes)
    assert read(2, 2) == passes[-1]


def test_passes_follow_each_other(out, monkeypatch):
    """A step is left out of a pass or comes twice, or a pass reads the text of the one before."""
    taken = []
    batch = train.training_batch
    monkeypatch.setattr(
        train,
        "training_batch",
        lambda stream, starts, p, number, steps: (
            taken.append((stream.tolist(), number, steps)) or batch(stream, starts, p, number, steps)
        ),
    )
    p = parameters("--steps", 14, "--batch-size", 32)
    assert not train_run(p, POEMS, out, stopping=stop_after(8))
    assert train_run(p, POEMS, out, resume=True)
    streams, numbers, steps = zip(*taken, strict=True)
    assert set(steps) == {6}
    assert numbers == (0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 0, 1)
    orders = [streams.index(stream) for stream in streams]
    assert orders == [0] * 6 + [6] * 6 + [12] * 2


# ---------------------------------------------------------------------------------------------------
# Going on


@pytest.mark.slow
def test_an_interrupted_run_is_not_written_over(out, corpus, monkeypatch, capsys):
    """The same command without --resume, and the run that was interrupted is lost."""
    arguments = [*TINY, "--steps", 6, "--corpus", corpus, "--out", out]
    assert not train_run(parameters("--steps", 6), POEMS, out, stopping=stop_after(3))
    held = out.with_suffix(".resume.pt")
    before = held.read_bytes()
    assert command(monkeypatch, *arguments) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in (str(held), "after step 3 of 6", "--resume", "delete"))
    assert held.read_bytes() == before
    assert command(monkeypatch, *arguments, "--resume") == 0
    for content in (None, b"", b"no run"):  # a run that is done, or none, is in nobody's way
        if content is not None:
            held.write_bytes(content)
        assert command(monkeypatch, *arguments) == 0


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), MemoryError()])
def test_a_run_that_cannot_be_read_is_not_written_over(error, out, monkeypatch):
    """A .resume.pt that could not be read just then was taken for none, and a new run began over it."""

    def fail(path):
        raise error

    monkeypatch.setattr(gpt, "load_state", fail)
    with pytest.raises(type(error)):
        train.check_not_interrupted(out)


@pytest.mark.parametrize("state", [{}, {"state": {}}, {"state": None}, {"state": {"step": 1}, "parameters": [1]}])
def test_a_file_that_holds_no_run_is_in_nobodys_way(state, out):
    """A file of that name without the parts of a run ended the next one in a traceback."""
    gpt.save_state(out, state)
    train.check_not_interrupted(out)


def test_fewer_steps_than_done(out):
    """A run resumed with fewer steps than it has done ends as if all were well."""
    train_run(parameters("--steps", 4), POEMS, out)
    with pytest.raises(UserError, match="--steps is 2, but .* has done 4; give it more"):
        train_run(parameters("--steps", 2), POEMS, out, resume=True)
    assert train_run(parameters("--steps", 4), POEMS, out, resume=True)


def test_interrupted_is_uninterrupted(tmp_path):
    """10 steps against 5 + resume 5 differ by a bit: batches, dropout, optimizers, losses, log, best."""
    p = parameters("--steps", 10, "--eval-interval", 4, "--dropout", 0.3, "--warmup", 3, "--batch-size", 32)
    whole, parts = tmp_path / "whole" / "gpt.pt", tmp_path / "parts" / "gpt.pt"
    assert train_run(p, POEMS, whole)
    assert not train_run(p, POEMS, parts, stopping=stop_after(5))
    assert load_state(parts.with_suffix(".resume.pt"))["state"]["step"] == 5
    torch.rand(7)  # another process has another past
    assert not train_run(p, POEMS, parts, resume=True, stopping=stop_after(0))
    assert not train_run(p, POEMS, parts, resume=True, stopping=stop_after(2))
    assert train_run(p, POEMS, parts, resume=True)
    assert same(everything(whole), everything(parts))
    assert log_rows(whole) == log_rows(parts)
    assert [row[0] for row in log_rows(whole)] == ["step", "4", "8", "10"]


def test_optimizer_state_follows_its_parameters(out, monkeypatch):
    """After resume the optimizers begin anew, or their state lies elsewhere or with another parameter."""
    p = parameters("--steps", 4)
    train_run(p, POEMS, out)
    kept = []
    make = train.make_optimizers
    monkeypatch.setattr(train, "make_optimizers", lambda *args: kept.extend(make(*args)) or kept)
    train_run(p, POEMS, out, resume=True)
    assert same([its.state_dict() for its in kept], load_state(out.with_suffix(".resume.pt"))["optimizers"])
    for optimizer in kept:
        for group in optimizer.param_groups:
            for weight in group["params"]:
                tensors = [its for its in optimizer.state[weight].values() if its.ndim]
                assert tensors
                assert all(its.shape == weight.shape and its.device == weight.device for its in tensors)


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        (["--block-size", 8], ["--block-size", " 8,", " 16"]),
        (["--n-embd", 32], ["--n-embd", " 32,", " 16"]),
        (["--adam-lr", 0.5], ["--adam-lr", " 0.5,", f" {train.PARAMETERS['adam_lr'][0]}\n"]),
        (["--seed", 9], ["--seed", " 9,", " 1"]),
    ],
)
def test_resume_with_other_parameters(flags, shown, out, corpus, monkeypatch, capsys):
    """A run goes on with another block_size or rate, or is refused without both values, or after it wrote."""
    arguments = [*TINY, "--steps", 4, "--corpus", corpus, "--out", out, "--device", "cpu"]
    train_run(parameters("--steps", 4), POEMS, out, stopping=stop_after(2))
    before = contents(out.parent)
    assert command(monkeypatch, *arguments, *flags, "--resume") == 2
    error = capsys.readouterr().err
    assert all(word in error for word in shown), error
    assert error.count("\n") == 1
    assert contents(out.parent) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("风", "鼠", 1),
        lambda text: text.replace("风", "鼠"),
        lambda text: text[22:],
    ],
)
def test_resume_with_another_corpus(change, out, corpus, monkeypatch, capsys):
    """A run goes on with another vocabulary, another in the same size, or the same characters in another text."""
    train_run(parameters("--steps", 4), POEMS, out, stopping=stop_after(2))
    before = contents(out.parent)
    corpus.write_bytes(change(corpus.read_text(encoding="utf-8")).encode())
    arguments = [*TINY, "--steps", 4, "--corpus", corpus, "--out", out, "--device", "cpu", "--resume"]
    assert command(monkeypatch, *arguments) == 2
    assert "--corpus is a text of checksum" in capsys.readouterr().err
    assert contents(out.parent) == before


def test_resume_with_a_wrong_file(out, corpus, monkeypatch, capsys):
    """A missing, damaged or foreign .resume.pt ends in a traceback, or starts a new run."""
    resume_path = out.with_suffix(".resume.pt")
    arguments = [*TINY, "--steps", 4, "--corpus", corpus, "--out", out, "--device", "cpu", "--resume"]
    assert command(monkeypatch, *arguments) == 2
    assert f"{resume_path} is not there: no run was interrupted; start one without --resume" in capsys.readouterr().err
    train_run(parameters("--steps", 4), POEMS, out)
    whole = resume_path.read_bytes()
    place = whole.index(load_state(resume_path)["model"]["wte.weight"].numpy().tobytes())
    flipped = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
    for data in (b"", whole[: len(whole) // 2], b"<!DOCTYPE html>", out.read_bytes(), flipped):
        resume_path.write_bytes(data)
        before = contents(out.parent)
        capsys.readouterr()
        assert command(monkeypatch, *arguments) == 1
        assert str(resume_path) in capsys.readouterr().err
        assert contents(out.parent) == before


# ---------------------------------------------------------------------------------------------------
# The corpus


@pytest.mark.slow
def test_line_ends_and_bom(tmp_path, corpus):
    """CRLF or a BOM gives other ids, another split or other weights."""
    text = corpus.read_bytes()
    made = []
    for i, data in enumerate(
        [
            text,
            text.replace(b"\n", b"\r\n"),
            b"\xef\xbb\xbf" + text.replace(b"\n", b"\r\n"),
            text.removesuffix(b"\n"),
            text.replace(b"\n", b"\n\n"),
        ]
    ):
        corpus.write_bytes(data)
        out = tmp_path / str(i) / "gpt.pt"
        train_run(parameters("--steps", 2), read_poems(corpus)[0], out)
        made.append(everything(out))
    assert all(same(one, made[0]) for one in made[1:])
    assert made[0]["model"]["chars"] == "".join(sorted(set("".join(POEMS)) | {"\n"}))


@pytest.mark.parametrize(
    ("poems", "shown"),
    [
        ([], ["block-size 16: 1 characters"]),
        (["山"], ["block-size 16: 3 characters"]),
        (["山" * 14], ["block-size 16: 16 characters"]),
        ([poem for poem in POEMS if not is_validation(poem)], ["0 poems (one in 20, by checksum) to validate"]),
        ([poem for poem in POEMS if is_validation(poem)], ["block-size 16: 1 characters"]),
    ],
)
def test_corpus_too_short(poems, shown, out):
    """A corpus of 0, 1 or block_size characters, or without a validation poem, is an error deep inside."""
    with pytest.raises(UserError) as stop:
        train_run(parameters("--steps", 1), poems, out)
    assert all(word in str(stop.value) for word in shown)
    assert stop.value.status == 2
    assert not out.parent.exists()


def test_corpus_just_long_enough(out):
    """One character more than block_size is refused, or crashes."""
    assert train_run(parameters("--steps", 2), ["山" * 15, next(filter(is_validation, POEMS))], out)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [["--block-size", 1], ["--batch-size", 1], ["--block-size", 200], ["--n-head", 16]])
def test_extreme_sizes(sizes, out):
    """A window of one character or longer than every poem, a batch of one, heads of one dimension crash."""
    assert train_run(parameters("--steps", 2, *sizes), POEMS, out)
    load_checkpoint(out)


# ---------------------------------------------------------------------------------------------------
# The command line


def test_flags_are_the_parameters():
    """A parameter of the table has no flag, a flag has another default, or its value goes nowhere."""
    p, rest = train.parse_args([])
    assert vars(p) == {name: value for name, (value, *_) in train.PARAMETERS.items()}
    assert vars(rest).keys() == {"resume", "corpus", "out", "device", "threads"}
    for name, (value, least, _) in train.PARAMETERS.items():
        p, _ = train.parse_args([f"--{name.replace('_', '-')}", str(least)])
        assert vars(p) == vars(train.parse_args([])[0]) | {name: least}
        assert type(getattr(p, name)) is type(value)


def test_shipped_model_is_a_default_run():
    """The shipped model was trained with other values than python train.py takes."""
    _, _, info = load_checkpoint(ROOT / "checkpoints" / "pretrained.pt")
    newer = {"n_kv_head": 0}  # an option that there was not when it was trained
    assert newer | info["parameters"] == vars(train.parse_args([])[0])


BAD = [
    (f"--{name.replace('_', '-')}", word)
    for name, (value, least, _) in train.PARAMETERS.items()
    for word in ("x", "", "nan", "inf", str(least - 1), *(["1.5"] if type(value) is int else []))
]
BAD += [
    ("--poem-share", "1.1"),
    ("--final-lr", "2"),
    ("--seed", str(10**20)),
    ("--threads", "0"),
    ("--threads", "9999"),
]


def test_bad_values(capsys):
    """A value that is no number, not finite or out of bounds is taken, or ends in a traceback."""
    for name, word in [*BAD, ("--nonsense", "1"), ("--out", None), ("3", None)]:
        with pytest.raises(SystemExit) as end:
            train.parse_args([name] if word is None else [name, word])
        assert end.value.code == 2, (name, word)
        error = capsys.readouterr().err.splitlines()[-1]
        assert name in error, (name, word, error)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--n-embd", 10, "--n-head", 4],
        ["--device", "nonsense"],
        ["--block-size", 10000],
        ["--corpus", "nowhere.txt"],
        ["--corpus", "folder.pt"],
        ["--dropout", 1],
        ["--out", "."],
        ["--out", "m.resume.pt"],
        ["--out", "m.txt"],
        ["--out", "poems.pt", "--corpus", "poems.pt"],
        ["--out", "poems.pt", "--corpus", "folder.pt/../poems.pt"],
        ["--out", "x" * 252 + ".pt"],
        ["--out", "x" * 243 + ".pt"],  # short enough, but not with what is put to it
        ["--out", "poems.txt/m.pt"],
        ["--n-kv-head", 3],
        ["--out", ""],
        ["--out", "folder.pt"],
        ["--out", "taken.pt"],
        ["--out", "poems.pt", "--corpus", "poems.log.csv"],
        ["--out", "poems.pt", "--corpus", "poems.resume.pt"],
    ],
)
def test_bad_arguments(arguments, out, corpus, monkeypatch, capsys):
    """Arguments that fit no model, device, corpus or folder end in a traceback, or after the training."""
    monkeypatch.chdir(corpus.parent)
    (corpus.parent / "folder.pt").mkdir()
    (corpus.parent / "taken.log.csv").mkdir()
    for name in ("poems.pt", "poems.log.csv", "poems.resume.pt"):
        (corpus.parent / name).write_bytes(corpus.read_bytes())
    before = sorted(path for path in corpus.parent.rglob("*") if path.is_file())
    given = ["--steps", 1, *TINY, "--corpus", corpus, "--out", out, "--device", "cpu", *arguments]
    assert command(monkeypatch, *given) == 2
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith("train.py: ")
    assert "Traceback" not in error
    assert sorted(path for path in corpus.parent.rglob("*") if path.is_file()) == before


@posix
def test_a_folder_that_cannot_be_written_to(tmp_path, corpus):
    """A read-only folder was found at the first save, minutes later."""
    folders = [Path("/proc/self")] if Path("/proc/self").exists() else []
    if os.geteuid():  # root writes everywhere else
        folders.append(tmp_path / "of another user")
        folders[-1].mkdir(mode=0o500)
    for folder in folders:
        with pytest.raises(UserError, match="cannot write .*m.pt: .*; choose another name") as error:
            train.check_files(folder / "m.pt", corpus)
        assert error.value.status == 2


def test_the_shipped_model_is_not_written_over(monkeypatch, corpus):
    """--out checkpoints/pretrained.pt replaced the model that the lesson shows."""
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match="the shipped model"):
        train.check_files(Path("checkpoints/pretrained.pt"), corpus)


def test_a_device_is_no_corpus():
    """--corpus /dev/zero was read until the memory was full."""
    with pytest.raises(UserError, match="there is no such file") as error:
        train.load_corpus(Path(os.devnull))
    assert error.value.status == 2


def test_corpus_that_is_not_utf8(corpus, out, monkeypatch, capsys):
    """A corpus in GBK ends in a traceback."""
    corpus.write_bytes("\n".join(POEMS).encode("gbk"))
    assert command(monkeypatch, *TINY, "--corpus", corpus, "--out", out, "--device", "cpu") == 2
    assert "not UTF-8" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------
# Numbers that run away


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bad_step", "named"), [(5, "step 7: the training loss is nan"), (7, "step 8: the validation loss is nan")]
)
def test_nan_loss_stops(bad_step, named, out, monkeypatch):
    """A NaN loss is trained on, or saved over the last good checkpoint; or the step is not named."""
    p = parameters("--steps", 20, "--eval-interval", 4)
    factor = train.lr_factor
    train_run(p, POEMS, out, stopping=stop_after(4))
    before = everything(out)
    monkeypatch.setattr(train, "lr_factor", lambda step, p: math.inf if step == bad_step else factor(step, p))
    with pytest.raises(UserError, match=named) as stop:
        train_run(p, POEMS, out)
    assert stop.value.status == 1
    assert str(out) in str(stop.value)
    assert same(everything(out), before)
    monkeypatch.setattr(train, "lr_factor", factor)
    assert train_run(p, POEMS, out, resume=True)


def test_huge_learning_rates(out):
    """Learning rates that destroy the weights end in a traceback, or with advice about files that are not there."""
    p = parameters("--steps", 50, "--warmup", 0, "--eval-interval", 0)
    p.muon_lr = p.adam_lr = 1e30
    with pytest.raises(UserError, match=r"step \d+: the training loss is nan; lower the learning rates$"):
        train_run(p, POEMS, out)


def test_advice_after_a_nan_before_an_evaluation(out, monkeypatch):
    """A run that was interrupted, resumed and diverged before its first evaluation did not name the file in the way."""
    p = parameters("--steps", 8, "--eval-interval", 0)
    train_run(p, POEMS, out, stopping=stop_after(2))
    run = train.Run(p, POEMS, out)
    run.resume()
    with pytest.raises(
        UserError, match=r"lower the learning rates, and delete .*gpt\.resume\.pt or name another --out$"
    ):
        run.check_finite("training", 3, math.nan)


@pytest.mark.slow
def test_advice_after_a_nan_can_be_followed(out, corpus, monkeypatch, capsys):
    """After "lower the learning rates" the rerun was refused, because of the run that had diverged."""
    arguments = [*TINY, "--steps", 8, "--eval-interval", 2, "--corpus", corpus, "--device", "cpu"]
    finite = math.isfinite
    monkeypatch.setattr(
        train.math, "isfinite", lambda loss: finite(loss) and not out.with_suffix(".resume.pt").exists()
    )
    assert command(monkeypatch, *arguments, "--out", out) == 1
    error = capsys.readouterr().err
    assert f"and delete {out.with_suffix('.resume.pt')} or name another --out; {out} is the last good model" in error
    monkeypatch.setattr(train.math, "isfinite", finite)
    lower = ["--muon-lr", 0.001, "--adam-lr", 0.001]
    assert command(monkeypatch, *arguments, *lower, "--out", out.with_name("other.pt")) == 0
    out.with_suffix(".resume.pt").unlink()
    assert command(monkeypatch, *arguments, *lower, "--out", out) == 0


def test_worse_is_not_best(out, monkeypatch):
    """A worse model replaces the best one, or after resume the first evaluation counts as the best."""
    losses = iter([3.0, 2.0, 2.5, 2.4])
    monkeypatch.setattr(train, "validation_loss", lambda *args: next(losses))
    p = parameters("--steps", 8, "--eval-interval", 2)
    train_run(p, POEMS, out, stopping=stop_after(5))
    train_run(p, POEMS, out, resume=True)
    assert next(losses, None) is None
    info = load_checkpoint(out)[2]
    assert (info["step"], info["val_loss"]) == (4, 2.0)
    assert [row[2] for row in log_rows(out)[1:]] == ["3.0", "2.0", "2.5", "2.4"]


# ---------------------------------------------------------------------------------------------------
# Processes: each child is a fork of a server that has torch loaded, so that starting one costs little


def redirect(file):
    """Make an open file descriptor the standard output and error of this process, as in a cp1252 locale."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(file, number)
        setattr(sys, name, open(number, "w", encoding="cp1252", closefd=False))  # noqa: SIM115


def child(hook, output, arguments):
    """In a process of its own: python train.py arguments > output 2>&1, after hook()."""
    redirect(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    torch.set_num_threads(1)
    train.tqdm.set_lock(threading.RLock())  # its own would leave a semaphore behind when the process is killed
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    sys.argv = ["train.py", *arguments]
    hook()
    sys.exit(gpt.run(train.main))


def start(hook, output, *arguments):
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["torch._dynamo"])  # with all that making an optimizer loads
    process = server.Process(target=child, args=(hook, output, [str(argument) for argument in arguments]))
    process.start()
    return process


def status_of(hook, output, *arguments):
    """The exit status of such a child; minus the signal, if one ended it."""
    process = start(hook, output, *arguments)
    process.join(60)
    if process.exitcode is None:
        process.kill()
    return process.exitcode


def before_call(owner, name, number, action):
    """Have action() done before the call of that number (from 1) of owner's function of that name."""
    calls = []
    function = getattr(owner, name)

    def spy(*args, **options):
        calls.append(1)
        if len(calls) == number:
            action()
        return function(*args, **options)

    setattr(owner, name, spy)


def send(number):
    os.kill(os.getpid(), number)


def press(*places):
    """Ctrl-C at each of these calls: (owner, name, number)."""
    for place in places:
        before_call(*place, functools.partial(send, signal.SIGINT))


STEP, EVALUATION, SAVE = (train, "training_batch", 3), (train, "validation_loss", 2), (os, "fsync", 5)


def press_in(moment):
    press({"step": STEP, "evaluation": EVALUATION, "save": SAVE}[moment])


@pytest.mark.slow
@posix
@pytest.mark.parametrize(("moment", "step"), [("step", 3), ("evaluation", 4), ("save", 4)])
def test_interrupt(moment, step, tmp_path, out, corpus, monkeypatch):
    """Ctrl-C in a step, an evaluation or a save loses work, or the printed command does not go on from it."""
    flags = [*TINY, "--steps", 6, "--eval-interval", 2, "--corpus", corpus, "--out", out, "--device", "cpu"]
    log = tmp_path / "log"
    assert status_of(functools.partial(press_in, moment), log, *flags) == 130
    text = log.read_text(encoding="utf-8")
    assert "Traceback" not in text
    assert text.count("saved; to go on: ") == 1
    assert load_state(out.with_suffix(".resume.pt"))["state"]["step"] == step
    python, script, *arguments = shlex.split(text.partition("to go on: ")[2])
    assert (python, script, arguments[-1]) == ("python", "train.py", "--resume")
    assert command(monkeypatch, *arguments) == 0
    whole = tmp_path / "whole" / "gpt.pt"
    train_run(parameters("--steps", 6, "--eval-interval", 2), POEMS, whole)
    assert same(everything(out), everything(whole))


def press_twice(moment):
    press(STEP, {"step": STEP, "evaluation": (train, "validation_loss", 1), "save": (os, "replace", 1)}[moment])


@pytest.mark.slow
@posix
@pytest.mark.parametrize("moment", ["step", "evaluation", "save"])
def test_second_interrupt(moment, tmp_path, out, corpus):
    """A second Ctrl-C is waited out, ends in a traceback, or leaves half a file in place of the old one."""
    interval = 7 if moment == "evaluation" else 4  # the third step of the child is step 7
    flags = ["--steps", 20, "--eval-interval", interval]
    train_run(parameters(*flags), POEMS, out, stopping=stop_after(4))
    before = contents(out.parent)
    log = tmp_path / "log"
    arguments = [*TINY, *flags, "--corpus", corpus, "--out", out, "--device", "cpu", "--resume"]
    assert status_of(functools.partial(press_twice, moment), log, *arguments) == 130
    text = log.read_text(encoding="utf-8")
    assert "Traceback" not in text
    assert "saved; to go on" not in text
    assert contents(out.parent) == before


def press_and_close():
    """Ctrl-C in a step, and with it ends who reads the output."""
    reader, writer = os.pipe()
    redirect(writer)
    before_call(*STEP, lambda: (os.close(reader), send(signal.SIGINT)))


@pytest.mark.slow
@posix
def test_interrupt_of_a_pipe(tmp_path, out, corpus):
    """Ctrl-C in python train.py 2>&1 | tee log, which ends tee as well, loses the work."""
    flags = [*TINY, "--steps", 50, "--corpus", corpus, "--out", out, "--device", "cpu"]
    status_of(press_and_close, tmp_path / "log", *flags)
    assert load_state(out.with_suffix(".resume.pt"))["state"]["step"] == 3


class TornFile(io.FileIO):
    """A file whose write has a middle."""

    def write(self, data):
        half = len(data) // 2
        super().write(data[:half])
        moment()
        return half + super().write(data[half:])


def moment():
    """A moment at which a save can be killed."""


def killed_at(number):
    """kill -9 at that moment of the saving: half written, written, flushed or replaced, file after file."""

    def opened(path, mode="r", *args, open=open, **options):
        return TornFile(path, "w") if mode == "wb" else open(path, mode, *args, **options)

    def torn(function):
        def call(*args):
            moment()
            function(*args)

        return call

    builtins.open = io.open = opened
    os.fsync, os.replace, os.unlink = torn(os.fsync), torn(os.replace), torn(os.unlink)
    before_call(sys.modules[__name__], "moment", number, functools.partial(send, signal.SIGKILL))


@pytest.mark.slow
@posix
def test_killed_saves(tmp_path, out, corpus, monkeypatch):
    """Kill -9 in a loop, at each moment of a save, leaves half a file, or a run that cannot go on."""
    flags = [*TINY, "--steps", 12, "--eval-interval", 1, "--corpus", corpus, "--out", out, "--device", "cpu"]
    resume_path = out.with_suffix(".resume.pt")
    for number in range(1, 16):  # the look at 3 files before the run, then 4 moments of each
        resume = ["--resume"] if resume_path.exists() else []
        hook = functools.partial(killed_at, number)
        assert status_of(hook, tmp_path / "log", *flags, *resume) == -signal.SIGKILL
        for path in out.parent.iterdir():
            if path == out:
                load_checkpoint(path)
            elif path == resume_path:
                assert load_state(path).keys() >= {"model", "optimizers", "state", "parameters", "threads"}
            elif path.name == "gpt.log.csv":
                assert {line.count(",") for line in path.read_text(encoding="utf-8").splitlines()} == {5}
                assert path.read_bytes().endswith(b"\n")
            else:
                assert path.match(".*.tmp") or path.match(".*.try")
    assert 0 < load_state(resume_path)["state"]["step"] < 12
    assert command(monkeypatch, *flags, "--resume") == 0
    assert sorted(path.name for path in out.parent.iterdir()) == ["gpt.log.csv", "gpt.pt", "gpt.resume.pt"]
    whole = tmp_path / "whole" / "gpt.pt"
    train_run(parameters("--steps", 12, "--eval-interval", 1), POEMS, whole)
    assert same(everything(out), everything(whole))
    assert log_rows(out) == log_rows(whole)


def small_disk():
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))


@pytest.mark.slow
@posix
def test_full_disk(tmp_path, out, corpus):
    """A full disk destroys the older checkpoint, leaves half a file, or does not name the path."""
    flags = ["--steps", 8, "--eval-interval", 2]
    train_run(parameters(*flags), POEMS, out, stopping=stop_after(2))
    before = contents(out.parent)
    log = tmp_path / "log"
    arguments = [*TINY, *flags, "--corpus", corpus, "--out", out, "--device", "cpu", "--resume"]
    assert status_of(small_disk, log, *arguments) == 1
    last = log.read_text(encoding="utf-8").splitlines()[-1]
    assert last.startswith(f"train.py: cannot write {out.parent}")
    assert "File too large" in last
    assert "Traceback" not in log.read_text(encoding="utf-8")
    assert contents(out.parent) == before


def lines_then_kill():
    train.LOG_SECONDS = -1
    before_call(train, "training_batch", 7, functools.partial(send, signal.SIGKILL))


@pytest.mark.slow
@posix
def test_log_is_flushed(tmp_path, out, corpus):
    """The lines of a redirected run wait in a buffer, so that a killed run shows none of them."""
    log = tmp_path / "log"
    flags = [*TINY, "--steps", 9, "--eval-interval", 3, "--corpus", corpus, "--out", out, "--device", "cpu"]
    assert status_of(lines_then_kill, log, *flags) == -signal.SIGKILL
    text = log.read_text(encoding="utf-8")
    for step in range(1, 7):
        assert f"\nstep {step}/9  loss " in text
    evaluation, poem = text.splitlines()[-2:]
    assert evaluation.startswith("step 6/9  training loss ")
    assert set(poem.strip()) <= set("".join(POEMS))


@pytest.mark.slow
def test_redirected_output(tmp_path, corpus):
    """Python train.py > log 2>&1 draws a bar, or dies of a poem in a legacy code page."""
    flags = [*TINY, "--steps", "4", "--eval-interval", "2", "--corpus", corpus, "--out", tmp_path / "gpt.pt"]
    environment = os.environ | {"PYTHONIOENCODING": "cp1252", "LC_ALL": "C", "OMP_NUM_THREADS": "1", "PYTHONUTF8": "0"}
    environment.pop("PYTHONWARNDEFAULTENCODING", None)  # torch's own warnings are none of our lines
    with open(tmp_path / "log", "wb") as log:
        done = subprocess.run(
            [sys.executable, ROOT / "train.py", *flags], stdout=log, stderr=log, env=environment, cwd=tmp_path
        )
    assert done.returncode == 0
    data = (tmp_path / "log").read_bytes()
    if os.name != "nt":
        assert b"\r" not in data
    lines = data.decode("utf-8").splitlines()
    assert len(lines) == 6
    assert not any("%" in line for line in lines)
    assert [line.split()[1] for line in lines[1:5:2]] == ["2/4", "4/4"]
    assert all(set(line.strip()) <= set("".join(POEMS)) and 0 < len(line.strip()) <= 100 for line in lines[2:5:2])


def nothing():
    pass


@pytest.mark.slow
@posix
def test_narrow_terminal(tmp_path, out, corpus):
    """A terminal of 40 columns in cp1252 gets bar glyphs it does not have, or lines that wrap."""
    import termios

    terminal, its_end = os.openpty()
    termios.tcsetwinsize(its_end, (24, 40))
    got = []

    def read():
        try:
            while data := os.read(terminal, 4096):
                got.append(data)
        except OSError:  # on Linux, the end
            pass

    reader = threading.Thread(target=read)
    reader.start()
    flags = [*TINY, "--steps", 30, "--eval-interval", 10, "--corpus", corpus, "--out", out, "--device", "cpu"]
    status = status_of(nothing, os.ttyname(its_end), *flags)
    os.close(its_end)
    reader.join()
    os.close(terminal)
    text = b"".join(got).decode("utf-8")
    assert status == 0, text
    bars = [part for part in text.replace("\n", "\r").split("\r") if "%|" in part]
    assert bars
    assert all(bar.isascii() and len(bar) <= 40 for bar in bars)


# ---------------------------------------------------------------------------------------------------
# What happens to the files meanwhile


def test_the_log_is_named_after_its_run(out):
    """Two runs in one folder wrote one log.csv."""
    train_run(parameters("--steps", 2), POEMS, out)
    train_run(parameters("--steps", 2), POEMS, out.with_name("other.pt"))
    names = sorted(path.name for path in out.parent.iterdir())
    assert names == ["gpt.log.csv", "gpt.pt", "gpt.resume.pt", "other.log.csv", "other.pt", "other.resume.pt"]


def test_two_runs_on_one_file(out):
    """Two runs wrote to one file, and both said at their end that it held their best model."""
    p = parameters("--steps", 6, "--eval-interval", 2)
    first, second = train.Run(p, POEMS, out), train.Run(p, POEMS, out)
    first.train(stop_after(3))
    with pytest.raises(UserError, match="another run has written .*gpt.pt; this one ends at step 2: use another --out"):
        second.train()
    assert train_run(p, POEMS, out, resume=True)


def test_a_second_run_leaves_the_first_alone(out, corpus, monkeypatch):
    """The look at the files before a run deleted what a live run of the same name was just writing."""
    out.parent.mkdir()
    temporary = out.with_name(".gpt.pt.tmp")
    temporary.write_bytes(b"half a model")
    train.check_files(out, corpus)
    assert contents(out.parent) == {".gpt.pt.tmp": b"half a model"}


def test_files_of_one_size_are_told_apart(tmp_path):
    """The model of another run has the same size: it was taken for this run's own, and written over."""
    path, other = tmp_path / "gpt.pt", tmp_path / "other.pt"
    assert train.signature(path) is None
    path.write_bytes(b"this run's")
    other.write_bytes(b"another's.")
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    before = train.signature(path)
    assert train.signature(path) == before
    os.replace(other, path)
    replaced = train.signature(path)
    assert replaced != before
    path.write_bytes(b"another's!")
    os.utime(path, ns=(0, 0))
    assert train.signature(path) != replaced


def test_two_runs_of_which_one_was_there_first(out):
    """A run wrote over what another one had written since it began, because there had been a file before."""
    p = parameters("--steps", 6, "--eval-interval", 2)
    first = train.Run(p, POEMS, out)
    first.train(stop_after(3))
    second = train.Run(p, POEMS, out)
    assert first.train()
    before = contents(out.parent)
    with pytest.raises(UserError, match="another run has written .*gpt.pt; this one ends at step 2"):
        second.train()
    assert contents(out.parent) == before


def test_two_runs_that_go_on_from_one_file(out, monkeypatch):
    """The second of two runs, no longer the better, wrote its log over that of the first before it was refused."""
    p = parameters("--steps", 8, "--eval-interval", 2)
    losses = iter([3.0, 2.0, 1.0, 1.0, 4.0])
    monkeypatch.setattr(train, "validation_loss", lambda *args: next(losses))
    train_run(p, POEMS, out, stopping=stop_after(2))
    runs = [train.Run(p, POEMS, out) for _ in range(2)]
    for run in runs:
        run.resume()
    assert runs[0].train()
    before = contents(out.parent)
    with pytest.raises(UserError, match="another run has written"):
        runs[1].train()
    assert contents(out.parent) == before


def test_two_runs_that_are_interrupted(out):
    """A run that was interrupted before its first evaluation wrote over the other run's .resume.pt."""
    p = parameters("--steps", 6, "--eval-interval", 0)
    first, second = train.Run(p, POEMS, out), train.Run(p, POEMS, out)
    first.train(stop_after(2))
    before = contents(out.parent)
    with pytest.raises(UserError, match="another run has written .*gpt.resume.pt; this one ends at step 1"):
        second.train(stop_after(1))
    assert contents(out.parent) == before


def test_the_claim_is_made_after_a_look(out, corpus, monkeypatch, capsys):
    """A run said that its file holds the best model when somebody had deleted it."""
    arguments = [*TINY, "--steps", 4, "--corpus", corpus, "--out", out, "--device", "cpu"]
    assert command(monkeypatch, *arguments) == 0
    assert f"{out} holds the best model" in capsys.readouterr().out
    finish = train.Run.train
    monkeypatch.setattr(train.Run, "train", lambda *args, **kwargs: finish(*args, **kwargs) and not out.unlink())
    assert command(monkeypatch, *arguments) == 1
    ends = capsys.readouterr()
    assert "was deleted or changed" in ends.err
    assert "holds the best model" not in ends.out


def test_a_model_that_will_be_replaced_is_named(out, corpus, monkeypatch, capsys):
    """A new run replaced the model of an older one without a word before it."""
    arguments = [*TINY, "--steps", 1, "--corpus", corpus, "--out", out, "--device", "cpu"]
    notice = f"{out} will be replaced at the first evaluation"
    for there in (False, True):
        assert command(monkeypatch, *arguments) == 0
        assert (notice in capsys.readouterr().err) == there


def test_a_model_of_another_program_is_not_claimed(out, corpus, monkeypatch, capsys):
    """A run said that its file holds the best model when another program had replaced it."""
    finish = train.Run.train

    def train_and_replace(self, stopping):
        finish(self, stopping)
        gpt.write_file(out, out.read_bytes()[::-1])
        return True

    monkeypatch.setattr(train.Run, "train", train_and_replace)
    assert command(monkeypatch, *TINY, "--steps", 2, "--corpus", corpus, "--out", out, "--device", "cpu") == 1
    ends = capsys.readouterr()
    assert "was deleted or changed" in ends.err
    assert "holds the best model" not in ends.out


def test_a_model_that_was_deleted_is_written_again(out):
    """A run whose model was deleted ended with the claim that it was there."""
    run = train.Run(parameters("--steps", 8, "--eval-interval", 2), POEMS, out)
    checks = iter(range(99))

    def stopping():
        if next(checks) == 5:
            out.unlink()
            run.best = -1.0  # so that no later model is better
        return False

    assert run.train(stopping)
    assert load_checkpoint(out)[2]["step"] == 8
    assert train.signature(out) == run.files[out]


def test_a_save_that_fails_does_not_end_the_run(out, monkeypatch, capsys):
    """A file that could not be replaced for a moment ended a run of half an hour; at the end it must be said."""
    replace, refused = os.replace, [2]

    def sometimes(source, target):
        if refused[0] and str(target).endswith("gpt.pt"):
            refused[0] -= 1
            raise OSError(5, "Input/output error")
        replace(source, target)

    monkeypatch.setattr(gpt.os, "replace", sometimes)
    p = parameters("--steps", 6, "--eval-interval", 2)
    assert train_run(p, POEMS, out)
    assert load_checkpoint(out)[2]["step"] == 6
    assert capsys.readouterr().err.count("going on, the next evaluation saves again") == 2
    refused[0] = 99
    with pytest.raises(OSError, match="cannot write .*gpt.pt"):
        train_run(parameters("--steps", 2), POEMS, out)


def test_a_stopped_run_that_cannot_be_saved_says_so(out, corpus, monkeypatch, capsys):
    """After Ctrl-C a save that had failed was passed over, and the run said that it was saved."""

    def fail(*args):
        raise OSError("cannot write it")

    monkeypatch.setattr(train, "catch_signals", lambda: stop_after(2))
    monkeypatch.setattr(gpt, "save_state", fail)
    arguments = [*TINY, "--steps", 4, "--corpus", corpus, "--out", out, "--device", "cpu"]
    assert command(monkeypatch, *arguments) == 1
    assert capsys.readouterr().err == "train.py: cannot write it\n"


def test_what_could_not_be_saved_is_not_the_best(out, monkeypatch):
    """A model that could not be saved counted as the best, so that the next one, better than the file's, was not."""
    losses, written = iter([3.0, 1.0, 2.0]), []
    monkeypatch.setattr(train, "validation_loss", lambda *args: next(losses))
    save = gpt.save_checkpoint

    def sometimes(path, *args):
        written.append(path)
        if len(written) == 2:
            raise OSError("cannot write it")
        save(path, *args)

    monkeypatch.setattr(gpt, "save_checkpoint", sometimes)
    assert train_run(parameters("--steps", 6, "--eval-interval", 2), POEMS, out)
    assert load_checkpoint(out)[2]["val_loss"] == 2.0


def test_nothing_blocks_where_nothing_is_lost(out, corpus, monkeypatch, capsys):
    """Ctrl-C before the first step left a run that blocked the next one; so did a run that had diverged."""
    arguments = [*TINY, "--steps", 4, "--corpus", corpus, "--out", out, "--device", "cpu"]
    assert not train_run(parameters("--steps", 4), POEMS, out, stopping=stop_after(0))
    assert not out.with_suffix(".resume.pt").exists()
    assert command(monkeypatch, *arguments) == 0
    assert "interrupted" not in capsys.readouterr().err


def test_interrupt_before_step_1(out, corpus, monkeypatch, capsys):
    """Ctrl-C before the first step was told "saved", with a command to go on that was then refused."""
    monkeypatch.setattr(train, "catch_signals", lambda: lambda: True)
    arguments = [*TINY, "--steps", 4, "--corpus", corpus, "--out", out, "--device", "cpu"]
    assert command(monkeypatch, *arguments) == 130
    assert capsys.readouterr().err == "ended before step 1: nothing to save\n"
    assert contents(out.parent) == {}


def test_another_number_of_threads(out, capsys):
    """A run resumed with other threads was promised to be the same bit for bit."""
    p = parameters("--steps", 4)
    train_run(p, POEMS, out, stopping=stop_after(2))
    torch.set_num_threads(2)
    try:
        assert train_run(p, POEMS, out, resume=True)
    finally:
        torch.set_num_threads(1)
    assert "the run had --threads 1" in capsys.readouterr().out


def test_threads(out, corpus, monkeypatch):
    """--threads went nowhere."""
    arguments = [*TINY, "--steps", 1, "--corpus", corpus, "--out", out, "--device", "cpu", "--threads", 2]
    assert command(monkeypatch, *arguments) == 0
    assert load_state(out.with_suffix(".resume.pt"))["threads"] == 2


def test_more_steps_than_before(out, capsys):
    """More steps for a run that was finished raised the learning rate without a word."""
    train_run(parameters("--steps", 8, "--warmup", 2), POEMS, out)
    assert train_run(parameters("--steps", 20, "--warmup", 2), POEMS, out, resume=True)
    assert "the learning rate goes from 1% to 65% of its peak" in capsys.readouterr().out


def test_a_run_resumed_as_it_was_says_no_more(out, capsys):
    """Other threads or more steps were spoken of when they were the same."""
    p = parameters("--steps", 4, "--eval-interval", 0)
    train_run(p, POEMS, out, stopping=stop_after(2))
    capsys.readouterr()
    assert train_run(p, POEMS, out, resume=True, stopping=stop_after(9))
    assert [line for line in capsys.readouterr().out.splitlines() if "--" in line or "resuming" in line] == [
        "resuming after step 2 of 4"
    ]


def test_a_finished_run_resumed(out):
    """A finished run that was resumed logged an evaluation with a training loss of 0."""
    p = parameters("--steps", 4)
    train_run(p, POEMS, out)
    before = log_rows(out)
    assert train_run(p, POEMS, out, resume=True)
    assert log_rows(out) == before
    out.unlink()
    assert train_run(p, POEMS, out, resume=True)  # what is missing is written again
    assert load_checkpoint(out)[2]["step"] == 4


def ignore_hangup():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    end_by("SIGHUP")


@posix
@pytest.mark.slow
def test_nohup(tmp_path, out, corpus):
    """Nohup was overruled: the run ended with the terminal."""
    flags = [*TINY, "--steps", 5, "--corpus", corpus, "--out", out, "--device", "cpu"]
    assert status_of(ignore_hangup, tmp_path / "log", *flags) == 0


def test_what_is_odd_about_a_corpus_is_said(corpus, capsys):
    """Repeated poems were counted twice, or a corpus without marks trained half an hour before it was refused."""
    corpus.write_bytes(("\n".join(POEMS[:3] + POEMS[:2]) + " \n").encode())
    assert train.load_corpus(corpus) == POEMS[:3]
    assert "2 poems that were there already" in capsys.readouterr().err
    for text in ("to be or not to be", "春风，云水，", "春风。云水。"):
        corpus.write_bytes(text.encode())
        train.load_corpus(corpus)
        assert "no forms and no acrostics" in capsys.readouterr().err
    corpus.write_bytes("春风，\n云水。".encode())
    train.load_corpus(corpus)
    assert capsys.readouterr().err == ""


def test_a_log_that_nobody_reads(out, monkeypatch):
    """A log whose reader had gone, as in train.py | head -1, ended the training."""

    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Gone())
    assert train_run(parameters("--steps", 6, "--eval-interval", 2), POEMS, out)
    assert load_state(out.with_suffix(".resume.pt"))["state"]["step"] == 6


def test_every_stream_that_fails_fails_alone(monkeypatch, capsys):
    """A reader of stdout that had gone took the messages on stderr with it."""

    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Gone())
    for _ in range(2):
        train.say("a poem")
    train.say("saved", "stderr")
    assert capsys.readouterr().err == "saved\n"


@pytest.mark.parametrize("call", ["update", "set_postfix_str"])
def test_a_terminal_that_is_gone(call, out, monkeypatch):
    """The bar of a terminal that had been closed ended the training."""

    def fail(*args, **options):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(train.tqdm, call, fail)
    assert train_run(parameters("--steps", 2), POEMS, out)


def test_a_log_that_was_closed(monkeypatch, capsys):
    """A stream that an editor or a notebook had closed, which is no OSError but a ValueError, ended the training."""
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    for _ in range(2):
        train.say("a poem")
    train.say("saved", "stderr")
    assert capsys.readouterr().err == "saved\n"


@posix
def test_signals(monkeypatch, capfd):
    """nohup was in vain; a first Ctrl-C ended the run at once, or a second one did not."""
    for name, number in (("SIGINT", signal.SIGINT), ("SIGTERM", signal.SIGTERM), ("SIGHUP", signal.SIGHUP)):
        before = {which: signal.getsignal(which) for which in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            for which in before:  # whatever the tests run under, such as nohup, or & in a script
                ignored = which == signal.SIGHUP and name == "SIGINT"
                signal.signal(which, signal.SIG_IGN if ignored else lambda number, frame: None)
            stopping = train.catch_signals()
            assert (signal.getsignal(signal.SIGHUP) == signal.SIG_IGN) == (name == "SIGINT")
            assert not stopping()
            send(number)
            assert stopping()
            with pytest.raises(KeyboardInterrupt):
                send(number)
        finally:
            for which, handler in before.items():
                signal.signal(which, handler)
    assert capfd.readouterr().err.count("finishing this step, then saving") == 3


def test_interrupt_before_the_training(corpus, out, monkeypatch, capsys):
    """Ctrl-C while the corpus is read waited for a step, or was a traceback."""
    monkeypatch.setattr(train, "read_poems", lambda path: send(signal.SIGINT))
    before = signal.signal(signal.SIGINT, lambda number, frame: None)  # not Python's own, as while torch loads
    try:
        assert command(monkeypatch, *TINY, "--corpus", corpus, "--out", out, "--device", "cpu") == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == ""
    assert not out.parent.exists() or not contents(out.parent)


def test_the_command_to_go_on_is_quoted_for_the_shell():
    """The printed command was quoted for a POSIX shell on Windows too."""
    words = ["train.py", "--out", "my model.pt"]
    assert train.shell_line(words, windows=False) == "python train.py --out 'my model.pt'"
    assert train.shell_line(words, windows=True) == 'python train.py --out "my model.pt"'


def test_the_command_to_go_on_has_resume_once(out, corpus, monkeypatch, capsys):
    """A resumed run that was interrupted again printed a command with --resume twice."""
    train_run(parameters("--steps", 4), POEMS, out, stopping=stop_after(2))
    monkeypatch.setattr(train.Run, "train", lambda self, stopping: False)
    arguments = [*TINY, "--steps", 4, "--corpus", corpus, "--out", out, "--device", "cpu", "--resume"]
    assert command(monkeypatch, *arguments) == 130
    assert capsys.readouterr().err.split().count("--resume") == 1


def test_help_without_docstrings(monkeypatch, capsys):
    """python -OO train.py --help died of a missing docstring."""
    monkeypatch.setattr(train, "__doc__", None)
    with pytest.raises(SystemExit) as end:
        train.parse_args(["--help"])
    assert end.value.code == 0
    assert all(f"--{name.replace('_', '-')} N" in capsys.readouterr().out for name in list(train.PARAMETERS)[:1])


def end_by(name):
    before_call(*STEP, functools.partial(send, getattr(signal, name)))


@posix
@pytest.mark.slow
@pytest.mark.parametrize("number", ["SIGTERM", "SIGHUP"])
def test_other_signals_save_too(number, tmp_path, out, corpus):
    """SIGTERM and SIGHUP lost all since the last save."""
    hook = functools.partial(end_by, number)
    flags = [*TINY, "--steps", 50, "--corpus", corpus, "--out", out, "--device", "cpu"]
    assert status_of(hook, tmp_path / "log", *flags) == 130
    assert load_state(out.with_suffix(".resume.pt"))["state"]["step"] == 3


@pytest.mark.slow
def test_the_lessons_exercise_3_as_it_is_worded(tmp_path, corpus):
    """Changing gpt.py's block_size to 512 and training did nothing: train.py had sizes of its own."""
    for name in ("gpt.py", "train.py", "data"):
        (shutil.copytree if name == "data" else shutil.copy)(ROOT / name, tmp_path / name)
    source = tmp_path / "gpt.py"
    code = source.read_text(encoding="utf-8")
    assert code.count("block_size: int = 128") == 1
    source.write_text(code.replace("block_size: int = 128", "block_size: int = 512"), encoding="utf-8")
    flags = [*TINY[:6], "--steps", "1", "--batch-size", "2", "--corpus", corpus, "--out", tmp_path / "m.pt"]
    subprocess.run([sys.executable, tmp_path / "train.py", *flags], check=True, capture_output=True)
    assert load_checkpoint(tmp_path / "m.pt")[0].config.block_size == 512
