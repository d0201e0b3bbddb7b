"""A training run so small that it takes a fraction of a second, and ways to stop it: for test_train.py, test_run.py."""

import argparse
import os
import random
import signal
import sys
from unittest import mock

import torch

import train
from checkpoints.store import load_state
from data.poems import is_validation
from data.script import run

# Every parameter that matters has a value here, so that no default of train.py decides over a test.
SMALL = {name: value for name, (value, *_) in train.PARAMETERS.items()} | {
    "steps": 5, "batch_size": 2, "short_windows": 1, "long_windows": 1, "block_size": 16, "n_layer": 1, "n_head": 1,
    "n_kv_head": 0, "n_embd": 16, "dropout": 0.2, "muon_lr": 0.02, "muon_decay": 0.1, "adam_lr": 0.01,
    "adam_decay": 0.1, "warmup": 1, "final_lr": 0.1, "eval_interval": 2, "seed": 1,
}  # fmt: skip
SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


def some_poems(learned=9, held_out=2, seed=1):
    """Couplets of five out of 24 characters, so many to learn from and so many to validate with."""
    chance, found = random.Random(seed), {False: [], True: []}
    while len(found[False]) < learned or len(found[True]) < held_out:
        lines = ["".join(chance.choices("风月山水云花雪雨天地人心春秋日夜东西南北江海上下", k=5)) for _ in range(2)]
        poem = f"{lines[0]}，{lines[1]}。"
        found[is_validation(poem)].append(poem)
    return found[False][:learned] + found[True][:held_out]


POEMS = some_poems()


def parameters(**changes):
    return argparse.Namespace(**SMALL | changes)


def flags(**changes):
    """The words of a command line for these parameters."""
    return [word for name, value in (SMALL | changes).items() for word in (f"--{train.flag(name)}", str(value))]


def stop_after(checks):
    """A function for train's stopping: False so many times, then True."""
    left = iter([False] * checks)
    return lambda: next(left, True)


def train_run(out, stopping=lambda: False, resume=False, poems=POEMS, **changes):
    """Whether a run, new or resumed, comes to its last step."""
    training = train.Training(parameters(**changes), poems, out)
    if resume:
        training.resume()
    return training.train(stopping)


def process_state():
    """What belongs to the process and not to a run."""
    handlers = [signal.getsignal(number) for number in SIGNALS]
    return handlers, torch.get_num_threads(), torch.get_rng_state().tolist()


def command(*arguments):
    """The exit status of python train.py arguments, run here; handlers, threads and chance must be as before it."""
    words = ["train.py", "--device", "cpu", "--threads", "1", *map(str, arguments)]
    before = process_state()
    with mock.patch.object(sys, "argv", words):
        try:
            status = run(train.main)
        except SystemExit as end:  # argparse
            status = end.code
    assert process_state() == before
    return status


def at_call(monkeypatch, owner, name, number, action):
    """Have action() done before the call of that number (from 1) of owner's function of that name."""
    calls, function = [], getattr(owner, name)

    def spy(*args, **options):
        calls.append(1)
        if len(calls) == number:
            action()
        return function(*args, **options)

    monkeypatch.setattr(owner, name, spy)


def send(*numbers):
    for number in numbers:
        os.kill(os.getpid(), number)


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
    """All that a run leaves in its three files, but for the clock."""
    held, model = load_state(out.with_suffix(".resume.pt")), load_state(out)
    del held["state"]["seconds"], model["info"]["seconds"]
    held["state"]["log"] = [[step, *rest] for step, _, *rest, _ in held["state"]["log"]]
    return {"run": held, "model": model, "log": log_rows(out)}


def log_rows(out):
    """The lines of .log.csv, but for the clock."""
    rows = [line.split(",") for line in out.with_suffix(".log.csv").read_text(encoding="utf-8").splitlines()]
    return [[step, *rest] for step, _, *rest, _ in rows]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}
