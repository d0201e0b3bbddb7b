"""Checkpoints: one file of tensors and plain Python values, written whole and read without running code; devices."""

import contextlib
import io
import zipfile
from dataclasses import asdict
from pathlib import Path

import torch

from data.script import UserError, out_of_memory, write_file
from gpt import GPT, GPTConfig, Vocabulary

CHECKPOINTS = Path(__file__).resolve().parent


class CheckpointError(UserError):
    """A file that is no checkpoint of ours, or whose parts do not fit."""


def save_state(path, state):
    """Write a dict of tensors and plain Python values. Raises OSError, which names path."""
    buffer = io.BytesIO()  # torch's own writer raises RuntimeError for a full disk
    torch.save(state, buffer)
    write_file(path, buffer.getvalue())


def load_state(path):
    """Read what `save_state` wrote, onto the CPU. Raises OSError, and CheckpointError for a damaged or other file."""
    path = Path(path)
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is not a checkpoint: it is no file")  # a device would never end
    with open(path, "rb") as file:
        try:
            damaged = zipfile.ZipFile(file).testzip()  # torch.load does not notice a flipped bit
            file.seek(0)
            state = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises many kinds, with long texts
            if out_of_memory(error):
                raise
            damaged = type(error).__name__
    if damaged:
        shipped = path.resolve() == CHECKPOINTS / "pretrained.pt"
        way = f"git checkout {path} brings it back" if shipped else "train it again, or fetch it if it was fetched"
        raise CheckpointError(f"{path} is damaged or not a checkpoint ({damaged}); {way}")
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} is not a checkpoint: it holds a {type(state).__name__}")
    return state


def build(config, copies=1):
    """A GPT of that config with random weights. Raises ValueError, before any memory is taken, if there is too little.

    copies: of the weights, that are to be held: training has gradients, an average, and two of the optimizer.
    """
    C, kv = config.n_embd, config.n_embd // config.n_head * config.n_kv_head
    layer = C * (C + 2 * kv) + 9 * C * C + 2 * C  # c_attn, the other three matrices, the norms
    numbers = (config.vocab_size + config.block_size + 1) * C + config.n_layer * layer
    try:
        torch.empty(copies * numbers, dtype=torch.float32)
    except (RuntimeError, TypeError):  # TypeError: the number itself is too large
        raise ValueError(
            f"a model of {numbers:,} numbers takes {4 * numbers / 1e9:,.0f} GB, more than there is"
        ) from None
    return GPT(config)


def save_checkpoint(path, model, vocab, info):
    """Save a trained model: sizes, characters, weights, and info, a dict of plain values."""
    parts = {"config": asdict(model.config), "chars": vocab.chars, "info": info}
    save_state(path, parts | {"weights": dict(model.state_dict())})


def load_checkpoint(path, device="cpu"):
    """-> (model in eval mode on device, vocab, info). Raises OSError, CheckpointError."""
    state = load_state(path)
    if "optimizers" in state:
        raise CheckpointError(f"{path} is for train.py --resume; name the file without .resume")
    try:
        model = build(GPTConfig(**state["config"]))
        weights = {name.removeprefix("_orig_mod."): tensor for name, tensor in state["weights"].items()}  # compiled
        model.load_state_dict(weights)  # names every missing, unknown or misshapen tensor
        vocab, info = Vocabulary(state["chars"]), dict(state["info"])
        if len(vocab) != model.config.vocab_size:
            raise ValueError(f"{len(vocab)} characters, vocab_size {model.config.vocab_size}")
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        if out_of_memory(error):
            raise
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path} is not a checkpoint of this project: {reason}") from None
    return model.to(device).eval(), vocab, info


def pick_device(name):
    """The torch.device of a name; auto is a GPU if there is one, else the CPU."""
    if name == "auto":
        name = str(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    try:
        torch.zeros(1, device=name).item()
    except Exception as error:  # each kind of device has its own way to be missing
        reason = str(error).splitlines()[0][:80]
        raise UserError(f"--device {name}: not there ({reason}); cpu always is", 2) from None
    return torch.device(name)


@contextlib.contextmanager
def threads(number):
    """Let torch take so many threads of the CPU, and afterwards as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
