"""The model against an implementation of the same network that shares nothing with it."""

import math

import numpy as np
import pytest
import reference
import torch
from conftest import ROOT

from checkpoints.store import load_checkpoint
from gpt import GPT, GPTConfig

PRETRAINED = ROOT / "checkpoints" / "pretrained.pt"


def loud_model(n_kv_head):
    """Random weights so large that every part matters, but a small embedding, so that LayerNorm's eps matters too."""
    torch.manual_seed(5)
    model = GPT(GPTConfig(60, block_size=24, n_layer=3, n_head=4, n_embd=32, n_kv_head=n_kv_head)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.uniform_(0.5, 2)
            elif name.startswith("h."):
                weight.normal_(std=0.5)
        model.ln_f.weight *= 30  # the logits' standard deviation is about 4
    return model


@pytest.fixture(params=["4 kv heads", "2 kv heads", "1 kv head", pytest.param("pretrained", marks=pytest.mark.slow)])
def model(request):
    if request.param != "pretrained":
        return loud_model(n_kv_head=int(request.param[0]))
    if not PRETRAINED.exists():
        pytest.skip("checkpoints/pretrained.pt is not there; git checkout brings it back")
    return load_checkpoint(PRETRAINED)[0]


def texts(model):
    """Ids (T,) of one character, of a few, and of a full window."""
    rng = np.random.default_rng(1)
    return [rng.integers(model.config.vocab_size, size=T) for T in (1, 7, model.config.block_size)]


def numpy_weights(model):
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


@torch.no_grad()
def test_logits_equal_the_reference(model):
    """A slip in mask, position, head layout, scale, norm, GELU or tied head changed the logits."""
    for ids in texts(model):
        ours = model(torch.tensor(ids)[None])[0][0].numpy()
        theirs = reference.logits(numpy_weights(model), model.config.n_head, ids)
        assert ours.shape == theirs.shape == (len(ids), model.config.vocab_size)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


@torch.no_grad()
def test_the_loss_equals_the_reference():
    """Targets were shifted, a target of -100 counted, or each chunk weighed by its own mean."""
    model, rng = loud_model(n_kv_head=2), np.random.default_rng(2)
    idx, targets = rng.integers(60, size=(2, 30, 24))  # (B, T) each
    targets[rng.random(targets.shape) < 0.3] = -100
    targets[:22] = np.where(targets[:22] == -100, -100, 0)  # chunks that differ in how many count, and how much
    targets[0] = -100
    weights, counted = numpy_weights(model), (targets != -100).sum(axis=1)
    losses = [reference.loss(weights, 4, *row) * n for *row, n in zip(idx, targets, counted, strict=True) if n]
    logits, loss = model(torch.tensor(idx), torch.tensor(targets))
    assert logits is None
    assert loss.item() == pytest.approx(sum(losses) / counted.sum(), rel=1e-4)


@torch.no_grad()
@pytest.mark.slow
def test_the_weights_are_gpt2s():
    """A weight's name, layout or use was another than GPT-2's, so that transformers computed other logits from it."""
    pytest.importorskip("transformers")
    from benchmark import as_gpt2

    for model in (loud_model(n_kv_head=4), load_checkpoint(PRETRAINED)[0]):
        other = as_gpt2(model)
        for ids in texts(model):
            idx = torch.tensor(ids)[None]
            torch.testing.assert_close(model(idx)[0], other(idx).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("n_layer", [1, 8])
def test_the_start_of_the_weights(n_layer):
    """The weights that add to the residual did not start smaller, so that the sum of many layers began too large."""
    torch.manual_seed(0)
    for name, weight in GPT(GPTConfig(500, n_layer=n_layer)).named_parameters():
        if weight.ndim == 1:
            assert weight.eq(1).all(), name
        else:
            expected = 0.02 / math.sqrt(2 * n_layer) if name.endswith("c_proj.weight") else 0.02
            assert weight.std().item() == pytest.approx(expected, rel=0.05), name
            assert abs(weight.mean().item()) < 0.001, name
