"""The KV cache, positions and the window; what a run keeps, and what a stop and a constraint do to it.

That both paths write the same under any settings together stands in `test_properties.py`.
"""

import copy
import math

import numpy as np
import pytest
import torch
from conftest import cached_and_not, prompt, record_passes, seeded
from torch import nn

import gpt
from gpt import GPT, GPTConfig, KVCache, causal_mask

# ---------------------------------------------------------------------------------------------------
# Attention, positions, sizes


@pytest.mark.parametrize("T", range(1, 6))
def test_causal_mask(T):
    """The mask of fewer queries than keys was aligned to the wrong corner, or made on another device."""
    for total in range(T, 7):
        expected = [[j <= i + total - T for j in range(total)] for i in range(T)]
        assert causal_mask(T, total).tolist() == expected
    assert causal_mask(T, 7, torch.device("meta")).is_meta


def caches(model, rows, length):
    return [KVCache(model.config, rows, length, model.wte.weight) for _ in model.h]


@torch.no_grad()
@pytest.mark.parametrize("n_kv_head", [2, 1])
def test_every_split_of_a_prompt(tiny, n_kv_head):
    """Several characters on a cache saw the future or too little, or positions restarted, in one of all 64 splits."""
    model, idx = tiny(n_kv_head=n_kv_head), prompt(7, rows=2)
    model.wpe.weight.mul_(100)  # nor could positions restart or jump in cached steps
    whole = model(idx)[0]
    assert not torch.allclose(whole[:, 3], model(idx[:, 3:4])[0][:, 0], atol=0.1)  # the position does matter
    for cuts in range(2**6):
        edges, filled = [0, *(i + 1 for i in range(6) if cuts >> i & 1), 7], caches(model, 2, 7)
        parts = [model(idx[:, a:b], caches=filled, start=a)[0] for a, b in zip(edges, edges[1:], strict=False)]
        torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=1e-3)


def test_past_the_window_and_the_cache_is_an_error(tiny):
    """Writes past the end of the window or the cache crashed inside, or wrapped."""
    model, idx = tiny(), prompt(9)
    model(idx[:, :8])
    with pytest.raises(ValueError, match="position 9 is past block_size 8"):
        model(idx)
    filled = caches(model, 1, 3)
    model(idx[:, :3], caches=filled)
    for fed, start in [(1, 3), (2, 2), (4, 0)]:
        with pytest.raises(ValueError, match=f"room for 3 positions: {fed} more do not fit after position {start}"):
            model(idx[:, :fed], caches=filled, start=start)


@pytest.mark.parametrize(("n_kv_head", "heads"), [(None, 4), (4, 4), (2, 2), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_cache_holds_what_the_layer_shares(tiny, n_kv_head, heads, dtype):
    """The cache held k and v for every head of q, or in the global default's dtype, or not on the weights' device."""
    model = tiny(n_head=4, n_kv_head=n_kv_head)
    cache = KVCache(model.config, 3, 5, torch.empty(1, dtype=dtype, device="meta"))
    for tensor in (cache.k, cache.v):
        assert (tensor.shape, tensor.dtype, tensor.is_meta) == ((3, heads, 5, 4), dtype, True)
    assert model.h[0].attn["c_attn"].weight.shape == (16 + 2 * 4 * heads, 16)
    assert model.config.n_kv_head == heads  # a number even where None was given: it goes into the file


SIZES = ("vocab_size", "block_size", "n_layer", "n_head", "n_embd", "n_kv_head")


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [0, -4, True, 4.0, "4", np.int64(4), torch.tensor(4)], ids=repr)
def test_a_size_is_a_whole_number(name, value):
    """A size that is no int of Python's passed, and crashed later or could not be saved."""
    GPTConfig(**dict.fromkeys(SIZES, 1))
    with pytest.raises(ValueError, match=f"{name} is .*at least 1"):
        GPTConfig(**dict.fromkeys(SIZES, 4) | {name: value})


UNFIT = [{"n_head": 3, "n_embd": 16}, {"n_head": 4, "n_embd": 2}, {"n_head": 4, "n_kv_head": 3}, {"n_kv_head": 8}]


@pytest.mark.parametrize("sizes", UNFIT + [{"dropout": rate} for rate in (-0.1, 1, math.nan)], ids=str)
def test_sizes_that_do_not_fit(sizes):
    """Sizes that do not fit each other crashed in the middle of attention, or a default was not the lesson's."""
    with pytest.raises(ValueError, match=next(iter(sizes))):
        GPTConfig(20, **sizes)
    sizes = vars(GPTConfig(20))
    assert [sizes[name] for name in SIZES if name != "block_size"] == [20, 4, 4, 128, 4]


# ---------------------------------------------------------------------------------------------------
# Runs


@pytest.mark.parametrize("length", [1, 7, 8, 9, 30])
def test_edge_of_the_window(tiny, length):
    """Crashes and differences at the edge of the window; a prompt or a length of just its size."""
    idx = prompt(length)
    for new in (0, 1, 7, 8, 9, 40):
        ids = cached_and_not(tiny(), idx, new)
        assert ids.shape == (1, length + new)
        assert ids[:, :length].equal(idx)


@pytest.mark.parametrize(
    ("block_size", "length", "seen"),
    [
        (8, 1, [1, 2, 3, 4, 5, 6, 7, 8, 5, 6, 7, 8, 5]),
        (8, 30, [8, 5, 6, 7, 8, 5]),
        (7, 6, [6, 7, 4, 5, 6, 7, 4]),
        (1, 3, [1, 1, 1]),
    ],
)
def test_the_window_moves_in_strides(tiny, block_size, length, seen):
    """A full window kept other than its newest half, or a cached run fed more than what is new to it."""
    model = tiny(block_size=block_size)
    passes = record_passes(model)
    cached_and_not(model, prompt(length), len(seen))
    # One pass a character and none after the last; a window that did not grow has moved.
    steps = [(1, now - 1, 1) if now > before else (1, 0, now) for before, now in zip(seen, seen[1:], strict=False)]
    assert passes == [(1, 0, seen[0]), *steps, *((1, 0, n) for n in seen)]


def test_the_cache_is_made_once_and_fits(tiny, monkeypatch):
    """Caches grew at each step, or were larger than what the run feeds, or made without being used."""
    made, init = [], KVCache.__init__
    monkeypatch.setattr(KVCache, "__init__", lambda self, *args: (made.append(args[1:3]), init(self, *args))[1])
    for length, new, room in [(1, 1, 1), (3, 4, 6), (3, 40, 8), (30, 1, 8), (8, 0, 7)]:
        tiny().generate(prompt(length, rows=2), new, use_cache=False)
        assert not made
        tiny().generate(prompt(length, rows=2), new)
        assert made == [(2, room)] * 2
        made.clear()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
@pytest.mark.parametrize("temperature", [0, 1])
def test_long_runs(tiny, monkeypatch, seed, temperature):
    """Rounding made 200 characters differ between the two paths, greedy or drawn, in one of 20 seeds."""
    logits, sample = [], gpt.sample
    monkeypatch.setattr(gpt, "sample", lambda x, *args, **knobs: (logits.append(x), sample(x, *args, **knobs))[1])
    cached_and_not(tiny(seed, block_size=32), prompt(3, seed=seed), 200, seed=seed, temperature=temperature)
    # The ids alone would forgive a cache in half precision: most draws are not close.
    assert len(logits) == 400
    torch.testing.assert_close(*torch.cat(logits).chunk(2), rtol=0, atol=1e-4)


KNOBS = [{}, {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "stop": 3}, {"temperature": 0}]


@pytest.mark.parametrize("knobs", KNOBS)
def test_torchs_global_defaults_do_not_matter(tiny, knobs):
    """Tensors by torch's default dtype or device broke a float32 model's run on the CPU, or changed its noise."""
    model, idx, generator = tiny(), prompt(3, rows=2), seeded()
    expected = cached_and_not(model, idx, 30, **knobs)
    with torch.device("meta"):
        assert model.generate(idx, 30, generator=generator, **knobs).equal(expected)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert cached_and_not(model, idx, 30, **knobs).equal(expected)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("knobs", KNOBS)
def test_weights_of_another_dtype(tiny, dtype, knobs):
    """The cached run broke for weights in double or half precision, or the noise changed with them."""
    model, idx = tiny(), prompt(3, rows=2)
    expected = model.generate(idx, 30, generator=seeded(), **knobs)
    model.to(dtype)
    if dtype == torch.float64:
        assert cached_and_not(model, idx, 30, **knobs).equal(expected)
    else:  # rounding may change an id
        runs = [model.generate(idx, 30, use_cache=cache, generator=seeded(), **knobs) for cache in (True, False)]
        assert all(run[:, 3].equal(expected[:, 3]) for run in runs)


@pytest.mark.parametrize("use_cache", [True, False])
def test_nothing_is_kept_between_runs(tiny, use_cache):
    """The state of a run, or of a run that died in the middle, leaked into the next or into the model."""
    model = tiny()
    before = set(vars(model))

    def generate(length, rows, seed):
        return model.generate(prompt(length, rows), 20, temperature=1.2, use_cache=use_cache, generator=seeded(seed))

    def breaks(ids):
        if ids.size(1) == 12:
            raise RuntimeError("in the middle")
        return torch.ones(20, dtype=torch.bool)

    first = generate(3, 1, seed=1)
    generate(5, 2, seed=2)
    assert generate(3, 1, seed=1).equal(first)
    with pytest.raises(RuntimeError, match="in the middle"):
        model.generate(prompt(3), 20, constraint=breaks, use_cache=use_cache)
    assert generate(3, 1, seed=1).equal(first)
    assert set(vars(model)) == before


def test_a_layer_computes_with_its_weights_of_now(tiny):
    """The weights that a layer gathered were old ones after a file was loaded, or its copy shared them."""
    model, idx = tiny(seed=1), prompt(3)
    first, other = model(idx)[0], tiny(seed=2)
    model.load_state_dict(other.state_dict())
    copied = copy.deepcopy(model)
    nn.init.zeros_(model.h[0].attn["c_attn"].weight)
    assert copied(idx)[0].equal(other(idx)[0])
    assert not model(idx)[0].equal(other(idx)[0])
    copied.load_state_dict(tiny(seed=1).state_dict())
    assert copied.double().float()(idx)[0].equal(first)


def test_dropout_is_on_in_training_alone(tiny, monkeypatch):
    """Dropout stayed on in a run in eval mode, or was missing on the embedding or a part of a layer in train mode."""
    model, idx, rates, dropout = tiny(dropout=0.25), prompt(3), [], gpt.F.dropout
    runs = [model.train().generate(idx, 40, generator=seeded()) for _ in range(2)]
    assert not runs[0].equal(runs[1])
    assert model.training
    cached_and_not(model.eval(), idx, 40)
    monkeypatch.setattr(gpt.F, "dropout", lambda x, p=0.5, on=True: (rates.extend([p] * on), dropout(x, p, on))[1])
    model(idx)
    assert not rates
    model.train()(idx)
    assert rates == [0.25] * 5  # the embedding, and two parts of each of two layers


# ---------------------------------------------------------------------------------------------------
# Forced characters


def template(*places, after=0):
    """A constraint for places written after `after` characters: an id is forced, None leaves ids 1 to 19."""

    def constraint(ids):
        place = places[ids.size(1) - after]
        return torch.arange(20) > 0 if place is None else torch.arange(20) == place

    return constraint


@pytest.mark.parametrize("use_cache", [True, False])
def test_an_acrostic_takes_a_pass_for_each_free_character(tiny, use_cache):
    """The model was asked for what is forced: an acrostic of 4 lines of 7 takes 24 passes, not 32."""
    model = tiny(block_size=40)
    passes = record_passes(model)
    places = [place for i in range(4) for place in [i + 1, *[None] * 6, 10 + i]]
    ids = model.generate(prompt(1), 32, constraint=template(*places, after=1), use_cache=use_cache)
    assert [i for i, place in zip(ids[0, 1:].tolist(), places, strict=True) if place] == [i for i in places if i]
    fed = [1 + 8 * line + i for line in range(4) for i in range(1, 7)]  # how long the text is at each draw
    if use_cache:  # the prompt and a head; then a character, a mark and a head at once
        assert passes == [(1, a, b - a) for a, b in zip([0, *fed], fed, strict=False)]
    else:
        assert passes == [(1, 0, total) for total in fed]


def masks(wrong):
    """A causal mask with the diagonal of wrong(T, total)."""
    return lambda T, total, device=None: torch.ones(T, total, dtype=torch.bool).tril(diagonal=wrong(T, total))


def positions_from_0(self, idx, caches=None, start=0, hidden=GPT.hidden):
    with torch.no_grad():
        self.wpe.weight[:] = self.wpe.weight.roll(start, 0)  # so that start finds position 0
        x = hidden(self, idx, caches, start)
        self.wpe.weight[:] = self.wpe.weight.roll(-start, 0)
    return x


def newest_alone(self, idx, caches=None, start=0, hidden=GPT.hidden):
    x = hidden(self, idx, caches, start)
    for cache in caches or ():
        cache.k[:, :, start : start + idx.size(1) - 1] = 0  # as if only the last of idx had been fed
    return x


def one_place_early(self, k, v, start, append=KVCache.append):
    return append(self, k, v, max(0, start - 1))


BREAKS = {
    "mask of the upper corner": (gpt, "causal_mask", masks(lambda T, total: 0)),
    "mask a place too narrow": (gpt, "causal_mask", masks(lambda T, total: total - T - (total > T))),
    "mask a place too wide": (gpt, "causal_mask", masks(lambda T, total: total - T + 1)),
    "positions from 0": (GPT, "hidden", positions_from_0),
    "only the newest character fed": (GPT, "hidden", newest_alone),
    "keys a place early": (KVCache, "append", one_place_early),
}


@pytest.mark.parametrize("name", BREAKS)
def test_what_a_learner_breaks_is_seen(tiny, monkeypatch, name):
    """A broken mask, position, prefill or cache wrote the same with and without the cache, so that nobody saw it."""
    model, constraint = tiny(block_size=64), template(*[5, None, 6, 7, None, None, 8] * 8, after=3)
    with torch.no_grad():
        for block in model.h:  # or what a query sees one place further would hardly change a draw
            block.attn["c_attn"].weight *= 4
    cached_and_not(model, prompt(3, rows=8), 56, constraint=constraint)
    monkeypatch.setattr(*BREAKS[name])
    with pytest.raises(AssertionError, match="first difference"):
        cached_and_not(model, prompt(3, rows=8), 56, constraint=constraint)


# ---------------------------------------------------------------------------------------------------
# Batches, stop, constraint


COUNTS_DOWN = torch.full((9, 9), -math.inf)  # a stub that writes the id before the last one
for i in range(9):
    COUNTS_DOWN[i, (i - 1) % 9] = 0


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("shape", ["(V,)", "(B, V)"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_finished_row_is_asked_nothing(stub, use_cache, shape, bad):
    """A constraint that allows nothing after the end, or damaged logits there, ended the rows still being written."""
    table = COUNTS_DOWN.clone()
    table[0] = bad

    def constraint(ids):
        rows = (ids[:, -1:] > 0).expand(-1, 9)
        return rows if shape == "(B, V)" else rows.any(dim=0)

    idx = torch.arange(1, 9)[:, None]
    ids = stub(table).generate(idx, 50, stop=0, constraint=constraint, use_cache=use_cache)
    assert ids.tolist() == [[max(0, first - t) for t in range(9)] for first in range(1, 9)]
    assert stub(table).generate(idx, 50, stop=0, use_cache=use_cache).equal(ids)


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_run_always_ends(stub, use_cache):
    """Waiting for a line end that never comes looped for ever, or one that comes at once was passed over."""
    start = torch.zeros(1, 1, dtype=torch.long)
    assert stub([0.0, -math.inf]).generate(start, 50, stop=1, use_cache=use_cache).tolist() == [[0] * 51]
    assert stub([-math.inf, 0.0]).generate(start, 50, stop=1, use_cache=use_cache).tolist() == [[0, 1]]


@pytest.mark.parametrize("length", [1, 8, 30])
def test_nothing_to_write(tiny, length):
    """A run of no characters computed a pass, or gave back other than the prompt, or the prompt itself to write in."""
    model, idx = tiny(), prompt(length, rows=2)
    passes, before = record_passes(model), idx.clone()
    ids = model.generate(idx, 0, stop=1)
    assert ids.equal(idx)
    assert not passes
    for written in (ids, model.generate(idx, 9)):
        written[:] = 0
    assert idx.equal(before)


def test_what_is_written_can_be_trained_on(tiny):
    """The ids of a run were inference tensors, which no loss can be taken of, or a weight took no part in the loss."""
    model = tiny()
    ids = model.generate(prompt(3), 5)
    model(ids[:, :-1], ids[:, 1:])[1].backward()
    assert all(weight.grad.abs().sum() > 0 for weight in model.parameters())
