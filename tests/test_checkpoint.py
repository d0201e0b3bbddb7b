"""checkpoints/store.py: what is saved comes back, what is damaged or foreign is named, a failing save harms nothing."""

import contextlib
import os
import pickle
import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoints import store
from checkpoints.store import CheckpointError, load_checkpoint, load_state, save_checkpoint, save_state
from data.script import UserError
from gpt import GPT, GPTConfig, Vocabulary

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


def check_whole(path, model):
    """Check that the checkpoint at path is the one that `saved` wrote."""
    loaded, vocab, info = load_checkpoint(path)
    assert (vocab.chars, info, loaded.config) == (VOCAB.chars, INFO, model.config)
    assert all(tensor.equal(loaded.state_dict()[name]) for name, tensor in model.state_dict().items())
    return loaded


def test_what_is_saved_is_loaded(saved):
    """Other weights, characters or figures come back, or the model is in train mode."""
    assert not check_whole(*saved).training
    rewrite(saved[0], lambda s: s.update(weights={f"_orig_mod.{name}": w for name, w in s["weights"].items()}))
    check_whole(*saved)  # as torch.compile names them


class RunsCode:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("how", ["torch.save", "old torch.save", "pickle"])
def test_code_in_a_file_is_not_run(saved, tmp_path, how):
    """A checkpoint runs code when it is read."""
    path, ran = saved[0], tmp_path / "ran"
    bad = load_state(path) | {"info": RunsCode(ran)}
    if how == "pickle":
        path.write_bytes(pickle.dumps(RunsCode(ran), protocol=2))
    else:
        torch.save(bad, path, _use_new_zipfile_serialization=how == "torch.save")
    with pytest.raises(CheckpointError, match=r"gpt\.pt is damaged or not a checkpoint"):
        load_checkpoint(path)
    assert not ran.exists()


def test_values_in_a_file_are_plain(saved):
    """Paths, numpy numbers or classes in a file break on another system."""

    def walk(value):
        assert type(value) in (torch.Tensor, str, int, float, bool, list, dict), type(value)
        for item in [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ():
            walk(item)

    state = torch.load(saved[0], weights_only=True)
    assert set(state) == {"config", "chars", "info", "weights"}
    walk(state)


WRONG = {  # what is done to the state, or to its weights, and what is named
    "renamed": (lambda s, w: w.update(position=w.pop("wpe.weight")), ["Missing", "wpe", "Unexpected", "position"]),
    "window": (lambda s, w: w.update({"wpe.weight": torch.ones(16, 16)}), ["wpe.weight", "[16, 16]", "[8, 16]"]),
    "two missing": (lambda s, w: [w.pop(f"h.1.ln_{n}.weight") for n in (1, 2)], ["h.1.ln_1", "h.1.ln_2"]),
    "no tensor": (lambda s, w: w.update({"ln_f.weight": 1.0}), ["ln_f.weight"]),
    "no names": (lambda s, w: s.update(weights=[1]), ["list"]),
    "fewer characters": (lambda s, w: s.update(chars=VOCAB.chars[:-1]), ["19 characters, vocab_size 20"]),
    "character twice": (lambda s, w: s.update(chars=VOCAB.chars[:-1] + "春"), ["of 20 characters only 19"]),
    **{part: (lambda s, w, part=part: s.pop(part), [part]) for part in ("chars", "config", "weights", "info")},
    "another project": (lambda s, w: s.update(config={"d_model": 16}), ["d_model"]),
    "heads": (lambda s, w: s["config"].update(n_head=3), ["n_embd 16", "n_head 3"]),
    "size in words": (lambda s, w: s["config"].update(block_size="8"), ["block_size is '8'"]),
    "too large": (lambda s, w: s["config"].update(vocab_size=10**12), ["64,000 GB"]),
    "a run to resume": (lambda s, w: s.update(optimizers=[]), ["is for train.py --resume"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_parts_that_do_not_fit_are_named(saved, name):
    """A file whose parts do not fit gives wrong text or an error of Python's, or does not say which part."""
    change, wanted = WRONG[name]
    rewrite(saved[0], lambda s: change(s, s["weights"]))
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(saved[0])
    for part in (str(saved[0]), *wanted):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.one_of(st.floats(0, 0.999), st.binary(max_size=40), st.tuples(st.floats(0, 0.999), st.integers(0, 7))))
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_file(saved, damage):
    """A file cut short, junk or one with a flipped bit is used, or ends in an error without its name or advice."""
    path, model = saved
    whole = path.read_bytes()
    flipped = isinstance(damage, tuple)
    if flipped:
        place = int(damage[0] * len(whole))
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << damage[1]]) + whole[place + 1 :])
    else:
        path.write_bytes(damage if isinstance(damage, bytes) else whole[: int(len(whole) * damage)])
    said = pytest.raises(
        CheckpointError, match=r"gpt\.pt is damaged or not a checkpoint \(.+\); train it again, or fetch"
    )
    with contextlib.suppress(CheckpointError) if flipped else said:  # a bit may have no meaning, as in a date
        check_whole(path, model)
    path.write_bytes(whole)


def test_other_things_that_are_no_checkpoint(saved, tmp_path, monkeypatch):
    """A list, a folder or a device is read without end, or advice for the shipped model is that for one's own."""
    path = saved[0]
    torch.save([1, 2], path)
    devices = ["/dev/full", "/dev/zero"] if os.path.exists("/dev/full") else []
    for name, message in [(path, "it holds a list"), *((name, "it is no file") for name in (tmp_path, *devices))]:
        with pytest.raises(CheckpointError, match=rf"{name} is not a checkpoint: {message}"):
            load_checkpoint(name)
    with pytest.raises(FileNotFoundError, match=r"none\.pt"):
        load_checkpoint(tmp_path / "none.pt")
    monkeypatch.setattr(store, "CHECKPOINTS", tmp_path)
    shipped = tmp_path / "x" / ".." / "pretrained.pt"
    (tmp_path / "x").mkdir()
    shipped.write_bytes(b"junk")
    with pytest.raises(CheckpointError, match=rf"; git checkout {re.escape(str(shipped))} brings it back$"):
        load_checkpoint(shipped)


@pytest.mark.parametrize("error", [MemoryError("no room"), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
@pytest.mark.parametrize(("place", "name"), [(torch, "load"), (GPT, "load_state_dict")])
def test_too_little_memory_is_no_damage(saved, monkeypatch, error, place, name):
    """A sound file is called damaged when there is too little memory to load it."""

    def fail(*args, **options):
        raise error

    monkeypatch.setattr(place, name, fail)
    with pytest.raises(type(error), match=re.escape(str(error))):
        load_checkpoint(saved[0])


@pytest.mark.parametrize(
    ("sizes", "gigabytes"),
    [({"n_layer": 10**6}, "787 GB"), ({"n_embd": 10**6}, "192,0"), ({"block_size": 10**10}, "5,120 GB"),
     ({"n_embd": 10**20}, "GB")],
)  # fmt: skip
def test_a_size_that_memory_cannot_hold(sizes, gigabytes):
    """A model that is too large takes all memory without a word, or the limit is an arbitrary one."""
    with pytest.raises(ValueError, match=f"{gigabytes}.*more than there is"):
        store.build(GPTConfig(**{"vocab_size": 20} | sizes))


def test_a_file_from_a_gpu_opens_on_the_cpu(saved, monkeypatch):
    """Tensors saved on a GPU ask for one where they are read."""
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
    save_checkpoint(saved[0], saved[1], VOCAB, INFO)
    assert b"cuda:0" in saved[0].read_bytes()
    check_whole(*saved)


def test_a_save_that_fails(saved, monkeypatch):
    """A save that ends in the middle destroys the good file; test_script.py has all its ways to end."""

    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        save_state(saved[0], {"new": torch.zeros(1000)})
    check_whole(*saved)
    assert os.listdir(saved[0].parent) == ["gpt.pt"]


def test_devices(monkeypatch):
    """A device that is not there is a traceback, auto takes none or passes over one that is there."""
    assert store.pick_device("cpu") == torch.device("cpu")
    with pytest.raises(UserError, match=r"--device mos: not there \(.+\); cpu always is") as caught:
        store.pick_device("mos")
    assert caught.value.status == 2
    for found, name in [(None, "cpu"), (torch.device("meta"), "meta")]:
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available, found=found: found)
        monkeypatch.setattr(torch, "zeros", lambda n, device, name=name: torch.ones(1) if device == name else None)
        assert store.pick_device("auto") == torch.device(name)
