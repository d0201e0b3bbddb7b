"""The model against an implementation of the same network that shares nothing with it."""

import numpy as np
import pytest
import reference
import torch
from benchmark import as_gpt2
from conftest import ROOT

from gpt import GPT, GPTConfig, KVCache, load_checkpoint

PRETRAINED = ROOT / "checkpoints" / "pretrained.pt"


def loud_model(n_kv_head=None):
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


@pytest.fixture(params=[4, 2, 1, "pretrained"])
def model(request):
    """Random models with so many heads of keys and values, and the shipped one."""
    return load_checkpoint(PRETRAINED)[0] if request.param == "pretrained" else loud_model(request.param)


def texts(model):
    """Ids (T,) of one character, of a few, and of a full window."""
    rng = np.random.default_rng(1)
    return [rng.integers(model.config.vocab_size, size=T) for T in (1, 7, model.config.block_size)]


def numpy_weights(model):
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


@torch.no_grad()
def test_logits_equal_the_reference(model):
    """Any slip in mask, position, head layout, scale, norm, GELU or tied head changes the logits."""
    for ids in texts(model):
        ours = model(torch.tensor(ids)[None])[0][0].numpy()
        theirs = reference.logits(numpy_weights(model), model.config.n_head, ids)
        assert ours.shape == theirs.shape == (len(ids), model.config.vocab_size)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


@torch.no_grad()
def test_cached_steps_equal_the_reference_step_by_step(model):
    """Several characters on a filled cache, then one by one; mask or positions restart, jump or misalign."""
    weights, n_head = numpy_weights(model), model.config.n_head
    ids = texts(model)[-1]
    whole = reference.logits(weights, n_head, ids)
    ours, theirs = [KVCache(model.config, 1, len(ids)) for _ in model.h], reference.new_cache(weights, n_head)
    for start, end in [(0, 3), (3, 8), *((t, t + 1) for t in range(8, len(ids)))]:
        logits = model(torch.tensor(ids[start:end])[None], caches=ours, start=start)[0][0].numpy()
        step = reference.logits(weights, n_head, ids[start:end], theirs, start)
        np.testing.assert_allclose(logits, step, rtol=0, atol=1e-4, err_msg=f"positions {start} to {end}")
        np.testing.assert_allclose(step, whole[start:end], rtol=0, atol=1e-4, err_msg=f"positions {start} to {end}")


@torch.no_grad()
def test_generated_ids_are_the_likeliest_by_the_reference(model):
    """Greedy ids from the cached run that are not those of the reference, character by character."""
    prompt = torch.tensor(texts(model)[1])[None]  # (1, 7)
    ids = model.generate(prompt, model.config.block_size - 7, temperature=0)[0].numpy()
    logits = reference.logits(numpy_weights(model), model.config.n_head, ids)[6:-1]
    chosen = np.take_along_axis(logits, ids[7:, None], axis=1)[:, 0]
    np.testing.assert_allclose(chosen, logits.max(axis=1), rtol=0, atol=1e-4)


@torch.no_grad()
def test_the_weights_are_gpt2s(model):
    """The weights map one to one onto GPT-2's layout, and transformers computes the same from them."""
    pytest.importorskip("transformers")
    if model.config.n_kv_head < model.config.n_head:
        pytest.skip("GPT-2 shares no keys and values")
    other = as_gpt2(model)
    for ids in texts(model):
        idx = torch.tensor(ids)[None]
        torch.testing.assert_close(model(idx)[0], other(idx).logits, rtol=0, atol=1e-4)


def test_the_shipped_model_shares_no_heads():
    """A new option changed what the shipped checkpoint is."""
    config = load_checkpoint(PRETRAINED)[0].config
    assert (config.n_head, config.n_kv_head, config.block_size) == (4, 4, 128)


def test_initialisation():
    """The projections that add to the residual began as large as the rest, whatever the depth."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(60, n_layer=8, n_embd=64))
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            std = 0.02 / (2 * 8) ** 0.5 if "c_proj" in name else 0.02
            assert weight.std().item() == pytest.approx(std, rel=0.1), name


def test_a_target_of_minus_100_does_not_count():
    """Targets that are to be left out, -100, counted in the loss."""
    model = loud_model()
    x, y = torch.randint(60, (2, 2, 9), generator=torch.Generator().manual_seed(0))
    alone = model(x[:, :5], y[:, :5])[1]
    y[:, 5:] = -100
    torch.testing.assert_close(model(x, y)[1], alone)
