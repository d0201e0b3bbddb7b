"""Checkpoints: what is refused and how it is named, and that a failing save harms nothing. How a script ends."""

import errno
import io
import os
import pickle
import subprocess
import sys
from pathlib import Path

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
    run,
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
    "fewer characters": (lambda s: s.update(chars=VOCAB.chars[:-1]), "19 characters, vocab_size 20"),
    "a character twice": (lambda s: s.update(chars=VOCAB.chars[:-1] + "春"), "of 20 characters only 19 are different"),
    "no characters": (lambda s: s.pop("chars"), "chars"),
    "no config": (lambda s: s.pop("config"), "config"),
    "no weights": (lambda s: s.pop("weights"), "weights"),
    "no info": (lambda s: s.pop("info"), "info"),
    "config of another project": (lambda s: s.update(config={"d_model": 16}), "d_model"),
    "config that is none": (lambda s: s.update(config=3), "config|mapping"),
    "heads": (lambda s: s["config"].update(n_head=3), "n_embd 16 is not a multiple of n_head 3"),
    "size": (lambda s: s["config"].update(n_layer=0), "n_layer is 0"),
    "size in words": (lambda s: s["config"].update(block_size="8"), "block_size is '8'; it must be a whole number"),
    "shared heads": (lambda s: s["config"].update(n_kv_head=3), "n_head 2 is not a multiple of n_kv_head 3"),
    "other shared heads": (lambda s: s["config"].update(n_kv_head=1), r"c_attn.weight.*\[48, 16\].*\[32, 16\]"),
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
        with pytest.raises(CheckpointError, match=r"gpt\.pt is damaged or not a checkpoint \(.+\); fetch it again$"):
            load_checkpoint(path)
    torch.save([1, 2], path)
    with pytest.raises(CheckpointError, match=r"gpt\.pt is not a checkpoint: it holds a list"):
        load_checkpoint(path)
    for missing in (path.with_name("none.pt"), path.parent):
        with pytest.raises(OSError, match=missing.name):
            load_checkpoint(missing)


def flip(path, whole, place, bit=0):
    """Write the bytes of whole to path, one bit changed."""
    changed = bytearray(whole)
    changed[place] ^= 1 << bit
    path.write_bytes(changed)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_too_little_memory_is_no_damage(saved, monkeypatch, error):
    """A sound file was called damaged when there was too little memory to load it."""

    def fail(*args, **options):
        raise error

    for place in (gpt.torch, gpt.GPT):
        with monkeypatch.context() as patch:
            patch.setattr(place, "load" if place is gpt.torch else "load_state_dict", fail)
            with pytest.raises(type(error)):
                load_checkpoint(saved[0])


def test_a_flipped_bit_is_noticed(saved):
    """A bit that changed on the way made other weights, and the model wrote on with them."""
    path, model = saved
    whole = path.read_bytes()
    for weight in model.state_dict().values():
        data = weight.numpy().tobytes()
        begin = whole.index(data)
        for place in (begin, begin + len(data) // 2, begin + len(data) - 1):
            flip(path, whole, place, bit=place % 8)
            with pytest.raises(CheckpointError, match=r"gpt\.pt is damaged .*; fetch it again"):
                load_checkpoint(path)
    path.write_bytes(whole)
    assert load_checkpoint(path)[0].wte.weight.equal(model.wte.weight)


def test_a_bit_flipped_anywhere_changes_nothing_unnoticed(saved):
    """Between the parts of a file there are bytes without a meaning, such as dates; all others are checked."""
    path, model = saved
    whole = path.read_bytes()
    noticed = 0
    for place in range(0, len(whole), len(whole) // 120):
        flip(path, whole, place, bit=place % 8)
        try:
            loaded, vocab, info = load_checkpoint(path)
        except CheckpointError:
            noticed += 1
            continue
        assert (vocab.chars, info, loaded.config) == (VOCAB.chars, INFO, model.config)
        assert all(tensor.equal(loaded.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert noticed > 60


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


def test_a_resume_file_is_no_model(saved):
    """The file that --resume needs, taken for the model, was refused without a word about the right one."""
    rewrite(saved[0], lambda state: state.update(optimizers=[]))
    with pytest.raises(CheckpointError, match="is for train.py --resume"):
        load_checkpoint(saved[0])


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


def failing(error, times=10**9):
    """A function that raises error, the first `times` times that it is called."""
    calls, replace = [], os.replace

    def call(*args):
        calls.append(args)
        if len(calls) <= times:
            raise error
        return replace(*args)

    return call


@pytest.fixture
def slept(monkeypatch):
    """The seconds that the code wanted to sleep, and did not."""
    seconds = []
    monkeypatch.setattr(gpt.time, "sleep", seconds.append)
    return seconds


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file(saved, monkeypatch, slept, call):
    """An error in a write lost the old file, left half of a new one, or did not say which file."""
    path, before = saved[0], saved[0].read_bytes()
    monkeypatch.setattr(gpt.os, call, failing(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(OSError, match=r"^cannot write .*gpt\.pt: No space left on device$"):
        save_checkpoint(path, saved[1], VOCAB, {})
    assert path.read_bytes() == before
    assert listing(path.parent) == ["gpt.pt"]
    assert slept == []  # a full disk does not get better in a second


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_ctrl_c_in_a_write_leaves_the_old_file(saved, monkeypatch, call):
    """Ctrl-C in a write lost the old file; what it leaves beside it is written over by the next write."""
    path, before = saved[0], saved[0].read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(gpt.os, call, failing(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(path, saved[1], VOCAB, {})
    assert path.read_bytes() == before
    path.with_name(".gpt.pt.tmp").write_bytes(before * 2)  # longer than what comes
    save_checkpoint(path, saved[1], VOCAB, {})
    assert load_checkpoint(path)[2] == {}
    assert listing(path.parent) == ["gpt.pt"]


@pytest.mark.parametrize("times", [1, 2, 4])
def test_a_file_that_is_held_for_a_moment(saved, monkeypatch, slept, times):
    """On Windows a virus scanner that holds the file for a moment ended a training run."""
    path = saved[0]
    monkeypatch.setattr(gpt.os, "replace", failing(PermissionError(errno.EACCES, "Permission denied"), times))
    save_checkpoint(path, saved[1], VOCAB, {})
    assert load_checkpoint(path)[2] == {}
    assert slept == [0.1, 0.2, 0.4, 0.8][:times]
    assert listing(path.parent) == ["gpt.pt"]


def test_a_file_that_is_held_for_good(saved, monkeypatch, slept):
    """A file that another program keeps open was waited for without end, or lost; the error names it."""
    path, before = saved[0], saved[0].read_bytes()
    monkeypatch.setattr(gpt.os, "replace", failing(PermissionError(errno.EACCES, "Permission denied")))
    with pytest.raises(OSError, match=r"^cannot write .*gpt\.pt: Permission denied$"):
        save_checkpoint(path, saved[1], VOCAB, {})
    assert path.read_bytes() == before
    assert listing(path.parent) == ["gpt.pt"]
    assert sum(slept) < 2


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
    assert listing(tmp_path) == [".gpt.pt.tmp", "gpt.pt"]  # or the kill came too late
    save_state(path, {"new": 1})
    assert load_state(path) == {"new": 1}
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
    with pytest.raises(ValueError, match="of 3 characters only 2 are different"):
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


def raising(error):
    def main():
        print("a poem")
        raise error

    return main


ENDS = {
    "wrong usage": (UserError("--seed: not a number", 2), 2, "--seed: not a number"),
    "failure": (UserError("no poem"), 1, "no poem"),
    "checkpoint": (CheckpointError("gpt.pt is damaged"), 1, "gpt.pt is damaged"),
    "decoding": (DecodingError("step 3: no character"), 1, "step 3: no character"),
    "file": (FileNotFoundError(2, "No such file", "gpt.pt"), 1, "gpt.pt: No such file"),
    "output": (OSError(errno.ENOSPC, "No space left"), 1, "the output: No space left"),
    "memory": (MemoryError(), 1, "out of memory; choose smaller sizes, or less at once"),
    "torch's memory": (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 1, "less at once"),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_failure_is_one_line(monkeypatch, capsys, name):
    """What a user can cause ended in a traceback, or with status 0; it is one line on stderr that names the script."""
    error, status, message = ENDS[name]
    monkeypatch.setattr(sys, "argv", ["folder/generate.py"])
    assert run(raising(error)) == status
    out, err = capsys.readouterr()
    assert out == "a poem\n"
    assert err.startswith("generate.py: ")
    assert err.endswith(f"{message}\n")
    assert err.count("\n") == 1


@pytest.mark.parametrize("error", [RuntimeError("mat1 and mat2 cannot be multiplied"), ValueError("x"), KeyError("x")])
def test_a_fault_of_ours_shows_where(error):
    """A fault of the program was swallowed as one line that nobody can act on; it stays a traceback."""
    with pytest.raises(type(error)) as caught:
        run(raising(error))
    assert caught.value is error


def test_the_other_ends(capsys):
    """The status of main got lost, and Ctrl-C printed a traceback."""
    assert [run(lambda status=status: status) for status in (None, 0, 1, 2)] == [0, 0, 1, 2]
    assert run(raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == ""


def speak():
    print("春风")
    print("a notice", file=sys.stderr)


@pytest.mark.parametrize("closed", ["stderr", "stdout"])
def test_a_closed_stream_swallows_what_it_gets(monkeypatch, closed):
    """Without a stderr print(file=None) put notices among the poems on stdout; without a stdout nothing was told."""
    streams = {name: io.TextIOWrapper(io.BytesIO()) for name in ("stdout", "stderr")}
    for name, stream in (streams | {closed: None}).items():
        monkeypatch.setattr(sys, name, stream)
    assert run(speak) == 0
    assert run(raising(UserError("no poem"))) == 1
    kept = {"stderr": "春风\na poem\n", "stdout": f"a notice\n{Path(sys.argv[0]).name}: no poem\n"}[closed]
    other = streams["stdout" if closed == "stderr" else "stderr"]
    other.flush()
    assert other.buffer.getvalue().decode("utf-8") == kept


def test_streams_speak_utf8(monkeypatch):
    """A terminal of another encoding made Chinese an error; half a character shows as its code."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert run(lambda: print("春风\udc80")) == 0
    assert stream.buffer.getvalue() == "春风\\udc80\n".encode()


def test_streams_that_cannot_be_reconfigured(monkeypatch):
    """A notebook's or an editor's own stream, which has no reconfigure, ended the script at its start."""
    streams = {name: io.StringIO() for name in ("stdout", "stderr")}
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)
    assert run(speak) == 0
    assert [stream.getvalue() for stream in streams.values()] == ["春风\n", "a notice\n"]
