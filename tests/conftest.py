"""What the test files share: the project's folder on the path, one thread, and two kinds of small model."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pytest
import torch
from torch import nn

from gpt import GPT, GPTConfig

torch.set_num_threads(1)

TINY = {"vocab_size": 20, "block_size": 8, "n_layer": 2, "n_head": 2, "n_embd": 16, "dropout": 0.0}


@pytest.fixture(scope="session")
def tiny():
    """tiny(seed=0, **sizes) -> a random model; its weights are large, so that a small fault changes what it writes."""

    def make(seed=0, **sizes):
        model = GPT(GPTConfig(**TINY | sizes)).eval()
        generator = torch.Generator().manual_seed(seed)
        for weight in model.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.3, generator=generator)
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
