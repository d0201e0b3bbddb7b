"""The KV cache, positions and the window: with the cache and without it the same characters, at every length."""

import math

import pytest
import torch

import gpt
from gpt import CausalSelfAttention, DecodingError, GPTConfig, KVCache, causal_mask, sample


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def prompt(length, rows=1, seed=0):
    return torch.randint(20, (rows, length), generator=seeded(seed))


def both(model, idx, new, seed=0, **knobs):
    """The ids with the cache, after checking that the ids without it are the same."""
    cached = model.generate(idx, new, use_cache=True, generator=seeded(seed), **knobs)
    uncached = model.generate(idx, new, use_cache=False, generator=seeded(seed), **knobs)
    assert cached.shape == uncached.shape
    differing = (cached != uncached).nonzero().tolist()
    assert not differing, f"row and place of the first difference: {differing[0]}, seed {seed}, {knobs}"
    return cached


def watch(model):
    """Note the (start, length) of everything that is fed to the model from now on."""
    fed, hidden = [], model.hidden

    def watched(idx, caches=None, start=0):
        fed.append((start, idx.size(1)))
        return hidden(idx, caches, start)

    model.hidden = watched
    return fed


# ---------------------------------------------------------------------------------------------------
# Attention and positions


def test_causal_mask():
    """C2: the mask of fewer queries than keys was aligned to the wrong corner."""
    assert causal_mask(2, 4).tolist() == [[True, True, True, False], [True, True, True, True]]
    assert causal_mask(3, 3).tolist() == [[True, False, False], [True, True, False], [True, True, True]]


@pytest.mark.parametrize("queries", [1, 2, 3, 6])
def test_few_queries_on_many_keys(queries):
    """C2: attention of the last 1, 2, 3 of 6 positions equals the last rows of all 6 at once."""
    torch.manual_seed(0)
    config = GPTConfig(20, 8, n_head=2, n_embd=16)
    attention = CausalSelfAttention(config)
    torch.nn.init.normal_(attention.c_attn.weight, std=0.5)
    x = torch.randn(2, 6, 16)
    cache = KVCache(config, 2, 6)
    with torch.no_grad():
        if queries < 6:
            attention(x[:, : 6 - queries], cache, 0)
        part = attention(x[:, 6 - queries :], cache, 6 - queries)
        torch.testing.assert_close(part, attention(x)[:, 6 - queries :], rtol=0, atol=1e-5)
        changed = x + torch.tensor([0.0, 0, 0, 0, 0, 1])[:, None]  # what comes last changes nothing before it
        torch.testing.assert_close(attention(changed)[:, :5], attention(x)[:, :5], rtol=0, atol=0)


@torch.no_grad()
def test_every_split_of_a_prompt(tiny):
    """C3: several characters on a cache saw the future or too little; all 64 splits of 7 characters equal one pass."""
    model, idx = tiny(), prompt(7, rows=2)
    whole = model(idx)[0]
    for cuts in range(2**6):
        edges = [0, *(i + 1 for i in range(6) if cuts >> i & 1), 7]
        caches = [KVCache(model.config, 2, 7) for _ in model.h]
        parts = [model(idx[:, a:b], caches=caches, start=a)[0] for a, b in zip(edges, edges[1:], strict=False)]
        torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=1e-5)


@torch.no_grad()
def test_positions_go_on_in_cached_steps(tiny):
    """C4: positions restarted or jumped in cached steps; with a position table times 100 that cannot hide."""
    model, idx = tiny(), prompt(8)
    model.wpe.weight.mul_(100)
    caches = [KVCache(model.config, 1, 8) for _ in model.h]
    whole = model(idx)[0]
    assert not torch.allclose(whole[:, 3], model(idx[:, 3:4])[0][:, 0], atol=0.1)  # the position does matter
    for t in range(8):
        step = model(idx[:, t : t + 1], caches=caches, start=t)[0]
        torch.testing.assert_close(step[:, 0], whole[:, t], rtol=0, atol=1e-4)
    both(model, idx[:, :3], 40)


def test_past_the_window_and_the_cache_is_an_error(tiny):
    """C1: writes past the end of the window or the cache crashed inside, or wrapped; the error has both numbers."""
    model = tiny()
    with pytest.raises(ValueError, match="position 9 is past block_size 8"):
        model(prompt(9))
    with pytest.raises(ValueError, match="room for 3 positions, not for 4"):
        model(prompt(4), caches=[KVCache(model.config, 1, 3) for _ in model.h])


# ---------------------------------------------------------------------------------------------------
# Runs


@pytest.mark.parametrize("length", [1, 7, 8, 9, 30])
@pytest.mark.parametrize("new", [0, 1, 7, 8, 9, 40])
def test_edge_of_the_window(tiny, length, new):
    """C1: crashes and differences at the edge of the window."""
    idx = prompt(length)
    ids = both(tiny(), idx, new)
    assert ids.shape == (1, length + new)
    assert ids[:, :length].equal(idx)


@pytest.mark.parametrize(
    ("block_size", "length", "seen"),
    [
        (8, 1, [1, 2, 3, 4, 5, 6, 7, 8, 5, 6, 7, 8, 5]),
        (8, 8, [8, 5, 6, 7, 8, 5]),
        (8, 30, [8, 5, 6, 7, 8, 5]),
        (7, 6, [6, 7, 4, 5, 6, 7, 4]),
        (2, 1, [1, 2, 2, 2, 2]),
        (1, 3, [1, 1, 1]),
    ],
)
def test_the_window_moves_in_strides(tiny, block_size, length, seen):
    """C1: a full window drops its oldest half; the cached run feeds what is left once, then one at a time."""
    model = tiny(block_size=block_size)
    fed = watch(model)
    uncached = model.generate(prompt(length), len(seen), use_cache=False, generator=seeded())
    assert fed == [(0, n) for n in seen]
    fed.clear()
    cached = model.generate(prompt(length), len(seen), generator=seeded())
    assert cached.equal(uncached)
    # One pass a character and none after the last; a window that did not grow has moved.
    expected = [(0, seen[0])]
    for before, now in zip(seen, seen[1:], strict=False):
        expected.append((now - 1, 1) if now > before else (0, now))
    assert fed == expected


@pytest.mark.parametrize("use_cache", [True, False])
def test_what_the_window_shows(tiny, use_cache):
    """C1: of a long prompt only the last block_size characters count."""
    model, idx = tiny(), prompt(30)
    long = model.generate(idx, 20, use_cache=use_cache, generator=seeded())
    short = model.generate(idx[:, -8:], 20, use_cache=use_cache, generator=seeded())
    assert long[:, 30:].equal(short[:, 8:])
    shorter = model.generate(idx[:, -7:], 20, use_cache=use_cache, generator=seeded())
    assert not long[:, 30:].equal(shorter[:, 7:])


def test_the_cache_is_made_once_and_fits(tiny, monkeypatch):
    """C1: caches grown at each step, or too large; there is one a layer, for what the run will feed."""
    made = []
    init = KVCache.__init__
    monkeypatch.setattr(KVCache, "__init__", lambda self, *args: (made.append(args[1:3]), init(self, *args))[1])
    for length, new, room in [(1, 1, 1), (3, 4, 6), (3, 40, 8), (30, 1, 8), (8, 0, 7)]:
        made.clear()
        tiny().generate(prompt(length, rows=2), new)
        assert made == [(2, room)] * 2


KNOBS = [
    {"temperature": 0},
    {"temperature": 0.3},
    {"temperature": 1.0},
    {"temperature": 1.5},
    {"top_k": 1},
    {"top_k": 5, "temperature": 1.5},
    {"top_p": 0.9},
    {"top_k": 9, "top_p": 0.6, "temperature": 2.0},
    {"constraint": lambda ids: torch.arange(20) % 3 != ids.size(1) % 3},
    {"constraint": lambda ids: torch.arange(20) != ids[:, -1:], "top_k": 5},
    {"stop": 3},
]


@pytest.mark.parametrize("knobs", KNOBS)
@pytest.mark.parametrize("rows", [1, 3])
def test_cached_is_uncached(tiny, knobs, rows):
    """C6: the cached run wrote other characters under some knob, batch, prompt or length."""
    model = tiny(block_size=16)
    for length, new in [(1, 60), (17, 5), (40, 20)]:
        both(model, prompt(length, rows), new, seed=length, **knobs)


@pytest.mark.parametrize("seed", range(20))
def test_long_runs(tiny, monkeypatch, seed):
    """C6: rounding made 200 characters differ between the two paths, greedy or sampled, in one of 20 seeds."""
    model, logits = tiny(seed, block_size=32), []
    monkeypatch.setattr(gpt, "sample", lambda x, **knobs: logits.append(x) or sample(x, **knobs))
    both(model, prompt(3, seed=seed), 200, seed=seed)
    both(model, prompt(3, seed=seed), 60, temperature=0)
    # The ids alone would forgive a cache in half precision: most draws are not close.
    sampled, greedy = torch.cat(logits).split([400, 120])
    for run in (sampled, greedy):
        torch.testing.assert_close(*run.chunk(2), rtol=0, atol=1e-5)


@pytest.mark.parametrize("use_cache", [True, False])
def test_nothing_is_kept_between_runs(tiny, use_cache):
    """C5: the state of a run, or of one that died in the middle, leaked into the next."""
    model = tiny()
    before = set(vars(model)), {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def run(length, rows, seed):
        return model.generate(prompt(length, rows), 20, temperature=1.2, use_cache=use_cache, generator=seeded(seed))

    def breaks(ids):
        if ids.size(1) == 12:
            raise RuntimeError("in the middle")
        return torch.ones(20, dtype=torch.bool)

    first = run(3, 1, seed=1)
    run(5, 2, seed=2)
    assert run(3, 1, seed=1).equal(first)
    model.train()
    with pytest.raises(RuntimeError, match="in the middle"):
        model.generate(prompt(3), 20, constraint=breaks, use_cache=use_cache)
    assert model.training  # as it was before, after an exception too
    assert all(module.training for module in model.modules())
    assert run(3, 1, seed=1).equal(first)
    assert set(vars(model)) == before[0]
    assert all(tensor.equal(before[1][name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("use_cache", [True, False])
def test_no_dropout_while_writing(tiny, use_cache):
    """T3: dropout was on while sampling from a model in training."""
    model = tiny(dropout=0.5)
    expected = model.generate(prompt(3), 20, temperature=0, use_cache=use_cache)
    model.train()
    assert model.generate(prompt(3), 20, temperature=0, use_cache=use_cache).equal(expected)
    assert model.training


# ---------------------------------------------------------------------------------------------------
# Batches, stop, constraint


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_stopped_row_is_padded(stub, use_cache):
    """S8: a row went on after its stop, or ended the others; a stop in the prompt is none; all stopped ends the run."""
    counts_down = torch.full((6, 6), -math.inf)
    for i in range(6):
        counts_down[i, (i - 1) % 6] = 0
    idx = torch.tensor([[0, 3], [2, 5], [4, 2]])
    ids = stub(counts_down).generate(idx, 50, stop=2, use_cache=use_cache)
    assert ids.tolist() == [[0, 3, 2, 2, 2, 2, 2, 2], [2, 5, 4, 3, 2, 2, 2, 2], [4, 2, 1, 0, 5, 4, 3, 2]]
    assert stub(counts_down).generate(idx, 3, stop=2, use_cache=use_cache).tolist() == ids[:, :5].tolist()


def test_nothing_to_write_or_to_read(tiny):
    """C1: max_new_tokens 0 gives the prompt back and computes nothing; below 0, or without a prompt, is an error."""
    model = tiny()
    fed = watch(model)
    for length in (1, 8, 30):
        assert model.generate(prompt(length, rows=2), 0, stop=1).equal(prompt(length, rows=2))
    assert not fed
    with pytest.raises(ValueError, match="max_new_tokens is -1"):
        model.generate(prompt(3), -1)
    with pytest.raises(ValueError, match="prompt is empty"):
        model.generate(prompt(0), 5)


def test_the_prompt_is_not_written_to(tiny):
    """C5: a run wrote into the ids it was given."""
    idx = prompt(3)
    before = idx.clone()
    tiny().generate(idx, 9)[:] = 0
    assert idx.equal(before)


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("shape", ["(V,)", "(B, V)"])
@pytest.mark.parametrize("temperature", [0, 1.5])
def test_the_constraint_is_asked_at_every_step(tiny, use_cache, shape, temperature):
    """S5: a constraint was asked for the first row or the first step only; each row and step gets its own."""
    asked = []

    def constraint(ids):
        asked.append(ids.clone())
        step = ids.size(1)
        return ids_of(step) if shape == "(V,)" else torch.stack([ids_of(step + row) for row in range(3)])

    def ids_of(n):  # three neighbouring ids may come
        return (torch.arange(20) - 3 * n) % 20 < 3

    ids = tiny().generate(
        prompt(2, rows=3), 20, temperature=temperature, constraint=constraint, use_cache=use_cache, generator=seeded()
    )
    assert [seen.size(1) for seen in asked] == list(range(2, 22))
    assert all(seen.equal(ids[:, : seen.size(1)]) for seen in asked)
    for row in range(3):
        for t in range(2, 22):
            assert ids_of(t if shape == "(V,)" else t + row)[ids[row, t]]


def test_an_empty_row_is_named_at_its_step(tiny):
    """S5: one row without a choice among others that have one."""
    with pytest.raises(DecodingError, match="^step 1: the constraint allows no"):
        tiny().generate(prompt(2, rows=2), 5, constraint=lambda ids: torch.tensor([[True] * 20, [False] * 20]))
