"""What the test files share: the project's folder on the path, one thread, small models, seeded noise.

`python -m pytest -q` runs all tests; `-m "not slow"` a core of them, in a few seconds.
"""

import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's, as torch's below; before it is imported
os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(Path(tempfile.gettempdir(), "hypothesis")))

import pytest
import torch
from hypothesis import settings
from small_poet import as_shipped, poet, verse  # noqa: F401  fixtures of all files
from torch import nn

from gpt import GPT, GPTConfig

torch.set_num_threads(1)
settings.register_profile("here", database=None, deadline=None, derandomize=True)
settings.load_profile("here")

TINY = {"vocab_size": 20, "block_size": 8, "n_layer": 2, "n_head": 2, "n_embd": 16, "dropout": 0.0}

posix = pytest.mark.skipif(os.name != "posix", reason="signals, fork and closed streams are POSIX only")
real_corpus = pytest.mark.skipif(
    not (ROOT / "data" / "tang.txt").exists(), reason="data/tang.txt is not made; python data/prepare.py makes it"
)


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes more than a second or so")


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def prompt(length, rows=1, seed=0):
    """Random ids (rows, length) of 20 characters."""
    return torch.randint(20, (rows, length), generator=seeded(seed))


def cached_and_not(model, idx, new, seed=0, **knobs):
    """The ids with the cache, after checking that the ids without it are the same."""
    cached = model.generate(idx, new, use_cache=True, generator=seeded(seed), **knobs)
    uncached = model.generate(idx, new, use_cache=False, generator=seeded(seed), **knobs)
    assert cached.shape == uncached.shape
    differing = (cached != uncached).nonzero().tolist()
    assert not differing, f"row and place of the first difference: {differing[0]}, seed {seed}, {knobs}"
    return cached


def record_passes(model):
    """A list that notes (rows, start, T) of all that is fed to the model from now on."""
    passes = []

    def note(block, args):
        x, _, start = args  # as `hidden` calls its blocks
        passes.append((x.size(0), start, x.size(1)))

    model.h[0].register_forward_pre_hook(note)
    return passes


@pytest.fixture(scope="session")
def tiny():
    """tiny(seed=0, **sizes) -> a random model; its weights are large, so that a small fault changes what it writes."""

    def make(seed=0, **sizes):
        model = GPT(GPTConfig(**TINY | sizes)).eval()
        for weight in model.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.3, generator=seeded(seed + weight.numel()))
        return model

    return make


@pytest.fixture(scope="session")
def stub():
    """stub(table) -> a model whose logits after character i are table[i], (V, V); or always the same, (V,)."""

    def make(table, block_size=8):
        table = torch.as_tensor(table, dtype=torch.float32).clamp(min=-1e30)  # in the head -inf times 0 is NaN
        V = table.size(-1)
        table = table.expand(V, V)
        model = GPT(GPTConfig(V, block_size, n_layer=1, n_head=1, n_embd=V, dropout=0.0)).eval()
        nn.init.eye_(model.wte.weight)  # the head passes on what it reads
        model.hidden = lambda idx, caches=None, start=0: table[idx]  # (B, T, V)
        return model

    return make
