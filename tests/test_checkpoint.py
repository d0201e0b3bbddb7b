"""Checkpoints: what is refused and how it is named, what a file may hold, and that a failing save harms nothing."""

import errno
import io
import os
import pickle
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, posix

import gpt
from gpt import (
    CheckpointError,
    DecodingError,
    GPTConfig,
    UserError,
    Vocabulary,
    load_checkpoint,
    load_state,
    save_checkpoint,
    save_state,
    write_file,
)

VOCAB = Vocabulary("\n，。春眠不觉晓处闻啼鸟夜来风雨声花落知")  # 20 characters
INFO = {"step": 7, "val_loss": 4.5, "parameters": {"steps": 7, "dropout": 0.1}, "torch": "2.13.0"}


@pytest.fixture
def saved(tiny, tmp_path):
    """(path of a good checkpoint, its model)."""
    model = tiny()
    save_checkpoint(tmp_path / "gpt.pt", model, VOCAB, INFO)
    return tmp_path / "gpt.pt", model


def rewrite(path, change):
    """Save the checkpoint at path again after change(state)."""
    state = load_state(path)
    change(state)
    save_state(path, state)


def test_what_is_saved_is_loaded(saved):
    """The same weights, characters and info come back, in eval mode, and write the same."""
    path, model = saved
    loaded, vocab, info = load_checkpoint(path)
    assert (vocab.chars, info, loaded.config) == (VOCAB.chars, INFO, model.config)
    assert not loaded.training
    assert all(tensor.equal(loaded.state_dict()[name]) for name, tensor in model.state_dict().items())
    idx = vocab.encode("春眠不觉晓，")
    assert loaded.generate(idx, 20, temperature=0).equal(model.generate(idx, 20, temperature=0))


class RunsCode:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize("how", ["torch.save", "pickle", "old torch.save", "inside info"])
def test_code_in_a_file_is_not_run(saved, tmp_path, how):
    """A checkpoint that runs code when it is read; it is refused, by name, and the code does not run."""
    path, ran = saved[0], tmp_path / "ran"
    bad = RunsCode(ran)
    if how == "torch.save":
        torch.save(bad, path)
    elif how == "old torch.save":
        torch.save({"weights": bad}, path, _use_new_zipfile_serialization=False)
    elif how == "pickle":
        path.write_bytes(pickle.dumps(bad, protocol=2))
    else:
        torch.save(load_state(path) | {"info": {"step": bad}}, path)
    with pytest.raises(CheckpointError, match=r"gpt\.pt is damaged or not a checkpoint"):
        load_checkpoint(path)
    assert not ran.exists()


def test_values_in_a_file_are_plain(saved):
    """Paths, numpy numbers or classes in a file break on another system; all values are walked."""

    def walk(value):
        assert type(value) in (torch.Tensor, str, int, float, bool, list, dict), type(value)
        if type(value) is dict:
            assert all(type(key) is str for key in value)
            walk(list(value.values()))
        elif type(value) is list:
            for item in value:
                walk(item)

    state = torch.load(saved[0], weights_only=True)  # refuses classes; a tuple, a set or None it would let pass
    assert set(state) == {"config", "chars", "info", "weights"}
    walk(state)


WRONG_WEIGHTS = {
    "missing": (lambda w: w.pop("wpe.weight"), ["Missing", "wpe.weight"]),
    "unknown": (lambda w: w.update({"lm_head.bias": torch.zeros(20)}), ["Unexpected", "lm_head.bias"]),
    "renamed": (lambda w: w.update({"pos.weight": w.pop("wpe.weight")}), ["pos.weight", "wpe.weight"]),
    "shape": (lambda w: w.update({"ln_f.weight": torch.ones(17)}), ["ln_f.weight", "17", "16"]),
    "window": (lambda w: w.update({"wpe.weight": torch.ones(16, 16)}), ["wpe.weight", r"\[16, 16\]", r"\[8, 16\]"]),
    "two missing": (lambda w: [w.pop(f"h.1.{n}.weight") for n in ("ln_1", "ln_2")], ["h.1.ln_1", "h.1.ln_2"]),
    "no tensor": (lambda w: w.update({"ln_f.weight": 1.0}), ["ln_f.weight"]),
}


@pytest.mark.parametrize("name", WRONG_WEIGHTS)
def test_weights_that_do_not_match_are_named(saved, name):
    """Missing, unknown, renamed or misshapen weights were ignored; every one is named, in one line."""
    change, names = WRONG_WEIGHTS[name]
    rewrite(saved[0], lambda s: change(s["weights"]))
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(saved[0])
    for part in (r"gpt\.pt", *names):
        caught.match(part)
    assert "\n" not in str(caught.value)


WRONG_PARTS = {
    "fewer characters": (lambda s: s.update(chars=VOCAB.chars[:-1]), "19 characters, but a vocab_size of 20"),
    "a character twice": (lambda s: s.update(chars=VOCAB.chars[:-1] + "春"), "of 20 characters only 19"),
    "no characters": (lambda s: s.pop("chars"), "chars"),
    "no config": (lambda s: s.pop("config"), "config"),
    "no weights": (lambda s: s.pop("weights"), "weights"),
    "no info": (lambda s: s.pop("info"), "info"),
    "config of another project": (lambda s: s.update(config={"d_model": 16}), "d_model"),
    "config that is none": (lambda s: s.update(config=3), "config|mapping"),
    "heads": (lambda s: s["config"].update(n_head=3), "n_embd 16 does not divide by n_head 3"),
    "size": (lambda s: s["config"].update(n_layer=0), "n_layer is 0"),
    "size in words": (lambda s: s["config"].update(block_size="8"), "not supported between"),
    "dropout": (lambda s: s["config"].update(dropout=1.0), "dropout is 1.0"),
}


@pytest.mark.parametrize("name", WRONG_PARTS)
def test_parts_that_do_not_fit_are_named(saved, name):
    """A file whose parts do not fit gave wrong text or an error of Python's; both values are named."""
    change, message = WRONG_PARTS[name]
    rewrite(saved[0], change)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(saved[0])
    assert str(saved[0]) in str(caught.value)


def test_a_damaged_file_is_named(saved):
    """A file cut short anywhere, junk, an HTML page: a CheckpointError with its name, nothing else."""
    path = saved[0]
    whole = path.read_bytes()
    damaged = [whole[: len(whole) * i // 40] for i in range(40)]
    damaged += [b"\x00" * 500, b"<!DOCTYPE html>\n" * 50, b"\x80\x04.", pickle.dumps([1, 2], protocol=2), whole[200:]]
    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"gpt\.pt is damaged or not a checkpoint .*; get it anew"):
            load_checkpoint(path)
    for missing in (path.with_name("none.pt"), path.parent):
        with pytest.raises(OSError, match=missing.name):
            load_checkpoint(missing)


def test_a_flipped_bit_is_noticed(saved):
    """A bit that flipped in a file, in the weights too, was believed."""
    path = saved[0]
    whole = path.read_bytes()
    for i in range(60):
        data = bytearray(whole)
        data[len(data) * i // 60 + 40] ^= 1 << i % 8
        path.write_bytes(data)
        try:
            loaded = load_state(path)
        except CheckpointError:
            continue
        path.write_bytes(whole)  # a bit between the parts of the archive changes nothing
        original = load_state(path)
        assert loaded["chars"] == original["chars"]
        assert all(tensor.equal(loaded["weights"][name]) for name, tensor in original["weights"].items())


def test_a_file_from_a_gpu_opens_on_the_cpu(saved, monkeypatch):
    """Tensors saved on a GPU asked for one where they were read; the file is made to say cuda:0."""
    path, model = saved
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
    save_checkpoint(path, model, VOCAB, INFO)
    assert b"cuda:0" in path.read_bytes()
    assert {tensor.device.type for tensor in load_state(path)["weights"].values()} == {"cpu"}
    assert load_checkpoint(path)[0].wte.weight.equal(model.wte.weight)


@pytest.mark.parametrize("weight", ["wte", "wpe", "c_attn", "ln_f"])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_nan_weight_is_an_error(saved, weight, temperature):
    """A NaN weight ended in junk; writing stops at the step that meets it, greedy too."""

    def damage(state):
        name = next(name for name in state["weights"] if weight in name)
        state["weights"][name].view(-1)[-1] = float("nan")  # of wpe: the last position of the window

    rewrite(saved[0], damage)
    model, vocab, _ = load_checkpoint(saved[0])
    with pytest.raises(DecodingError, match="^step 8: non-finite" if weight == "wpe" else "^step 1: non-finite"):
        model.generate(vocab.encode("春"), 20, temperature=temperature, constraint=lambda ids: torch.arange(20) != 0)


# ---------------------------------------------------------------------------------------------------
# Saves that fail


def listing(folder):
    return sorted(p.name for p in folder.iterdir())


class Unpicklable:
    def __reduce__(self):
        raise RuntimeError("in the middle of a save")


def test_a_save_that_raises_in_the_middle(saved):
    """An error half way through a save destroyed the good file."""
    path, before = saved[0], saved[0].read_bytes()
    with pytest.raises(RuntimeError, match="in the middle"):
        save_state(path, {"weights": torch.ones(100000), "bad": Unpicklable()})
    assert path.read_bytes() == before
    assert listing(path.parent) == ["gpt.pt"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device")])
def test_a_write_that_fails_leaves_the_old_file(saved, monkeypatch, call, error):
    """A full disk lost the old file, or left a half one; the error names the path."""
    path, before = saved[0], saved[0].read_bytes()

    def fails(*args):
        raise error

    monkeypatch.setattr(gpt.os, call, fails)
    with pytest.raises(type(error), match=r"cannot write .*gpt\.pt: No space"):
        save_checkpoint(path, saved[1], VOCAB, {})
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert listing(path.parent) == ["gpt.pt"]
    save_checkpoint(path, saved[1], VOCAB, {})  # and the next one works
    assert load_checkpoint(path)[2] == {}


@pytest.mark.parametrize("times", [1, 3, 99])
def test_a_scanner_that_holds_the_file(saved, monkeypatch, times):
    """A virus scanner on Windows that held the file for a moment ended the run; for good, it is an error."""
    path, before = saved[0], saved[0].read_bytes()
    replace, calls = os.replace, []

    def held(*args):
        calls.append(args)
        if len(calls) <= times:
            raise PermissionError(errno.EACCES, "Permission denied")
        replace(*args)

    monkeypatch.setattr(gpt.os, "replace", held)
    monkeypatch.setattr(gpt.time, "sleep", lambda seconds: None)
    if times < 9:
        write_file(path, b"new")
        assert path.read_bytes() == b"new"
    else:
        with pytest.raises(OSError, match=r"cannot write .*gpt\.pt: Permission denied"):
            write_file(path, b"new")
        assert path.read_bytes() == before
    assert listing(path.parent) == ["gpt.pt"]


def child(code, *args):
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"},
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=False,
    )


@posix
@pytest.mark.slow
def test_full_disk_and_kill(tmp_path):
    """A real full disk (a limit on file size) and a kill -9 in the middle of a save: the old file, whole."""
    path = tmp_path / "gpt.pt"
    result = child(
        """
import os, resource, signal, sys, torch, gpt
path = sys.argv[1]
gpt.save_state(path, {"old": torch.zeros(100)})
if os.fork() == 0:
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
    try:
        gpt.save_state(path, {"new": torch.zeros(100_000)})
    except OSError as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
print(sorted(os.listdir(os.path.dirname(path))), flush=True)
for name in ("fsync", "replace"):
    if os.fork() == 0:
        setattr(os, name, lambda *args: os.kill(os.getpid(), signal.SIGKILL))
        gpt.save_state(path, {"new": torch.zeros(100_000)})
        os._exit(0)
    print(os.wait()[1], list(gpt.load_state(path)), flush=True)
""",
        path,
    )
    lines = result.stdout.splitlines()
    assert len(lines) == 4, result.stderr
    assert f"cannot write {path}: " in lines[0]
    assert lines[1:] == ["['gpt.pt']", "9 ['old']", "9 ['old']"]
    assert listing(tmp_path) == [".gpt.pt.tmp", "gpt.pt"]
    save_state(path, {"next": torch.zeros(3)})  # the next save takes what the killed ones left with it
    assert listing(tmp_path) == ["gpt.pt"]


def test_write_file(tmp_path):
    """The bytes arrive as they are, missing folders are made, an old file is replaced, nothing else is left."""
    name = os.fsdecode("诗.txt".encode())  # in a locale without Chinese too
    path = tmp_path / "new" / "folder" / name
    for data in (b"one\r\ntwo\n\x00\xff", b"", "春风".encode()):
        write_file(str(path), data)
        assert path.read_bytes() == data
    assert listing(path.parent) == [name]


def test_write_file_names_what_it_cannot_write(tmp_path):
    """A folder in the way, or a file where a folder should be, is an OSError that names the path."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"old")
    for path in (tmp_path / "folder", tmp_path / "file" / "gpt.pt"):
        with pytest.raises(OSError, match="cannot write") as caught:
            write_file(path, b"new")
        assert str(path) in str(caught.value)
    assert (tmp_path / "file").read_bytes() == b"old"
    assert listing(tmp_path) == ["file", "folder"]


# ---------------------------------------------------------------------------------------------------
# The vocabulary


def test_vocabulary():
    """Encode and decode undo each other; every unknown character is named once, with its code point."""
    text = "春眠不觉晓，处处闻啼鸟。\n"
    assert VOCAB.encode(text).shape == (1, len(text))
    assert VOCAB.decode(VOCAB.encode(text)[0].tolist()) == VOCAB.decode(VOCAB.encode(text)[0]) == text
    assert VOCAB.encode("").shape == (1, 0)
    assert len(VOCAB) == 20
    with pytest.raises(ValueError, match=r"20 characters: A U\+0041  😀 U\+1F600  U\+200B$"):
        VOCAB.encode("春A眠😀A\u200b😀")
    with pytest.raises(ValueError, match="of 3 characters only 2"):
        Vocabulary("春眠春")


@pytest.mark.parametrize(
    ("name", "value"),
    [("vocab_size", 0), ("block_size", -1), ("n_layer", 0), ("n_head", 0), ("n_kv_head", 0), ("dropout", float("nan"))],
)
def test_sizes_that_make_no_model(name, value):
    """Sizes that make no model are refused with the value."""
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        GPTConfig(**{"vocab_size": 20, name: value})


# ---------------------------------------------------------------------------------------------------
# How a script ends


def fails(error):
    def main():
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (UserError("no such thing", 2), 2, "no such thing"),
        (CheckpointError("x.pt is damaged"), 1, "x.pt is damaged"),
        (OSError("cannot write x"), 1, "cannot write x"),
        (DecodingError("step 3: non-finite logits"), 1, "step 3: non-finite logits"),
        (MemoryError(), 1, "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 1, "can't allocate memory"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_that_a_user_can_cause(error, status, said, capsys):
    """An error of a user's doing ended in a traceback, with another status, or in more than a line."""
    assert gpt.run(fails(error)) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == bool(said)


def test_an_error_of_ours_is_a_traceback():
    """A fault of the program's own was swallowed as a line."""
    for error in (RuntimeError("shapes do not match"), IndexError(), ValueError("x")):
        with pytest.raises(type(error)):
            gpt.run(fails(error))


def test_without_a_stderr(monkeypatch, capsys):
    """With stderr closed, notices went to stdout, among the poems."""
    monkeypatch.setattr(sys, "stderr", None)
    assert gpt.run(lambda: print("a notice", file=sys.stderr) or print("a poem")) == 0
    assert gpt.run(fails(UserError("no", 2))) == 2
    assert capsys.readouterr().out == "a poem\n"


def test_a_stream_that_cannot_be_reconfigured(monkeypatch):
    """In a notebook, whose streams are no files, the scripts ended with an AttributeError."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    assert gpt.run(lambda: print("诗")) == 0
    assert stream.getvalue() == "诗\n"
