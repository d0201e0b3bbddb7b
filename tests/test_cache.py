"""The KV cache, positions and the window: with the cache and without it the same characters, at every length."""

import math

import pytest
import torch
from conftest import cached_and_not, prompt, seeded

import gpt
from gpt import DecodingError, GPTConfig, KVCache, causal_mask


def watch(model):
    """Note the (start, length) of everything that is fed to the model from now on."""
    fed, hidden = [], model.hidden

    def watched(idx, caches=None, start=0, layers=None):
        fed.append((start, idx.size(1)))
        return hidden(idx, caches, start, layers)

    model.hidden = watched
    return fed


# ---------------------------------------------------------------------------------------------------
# Attention and positions


def test_causal_mask():
    """The mask of fewer queries than keys was aligned to the wrong corner."""
    assert causal_mask(2, 4).tolist() == [[True, True, True, False], [True, True, True, True]]
    assert causal_mask(3, 3).tolist() == [[True, False, False], [True, True, False], [True, True, True]]


@pytest.mark.parametrize("n_kv_head", [1, 2])
@pytest.mark.parametrize("queries", [1, 2, 3, 6])
def test_few_queries_on_many_keys(queries, n_kv_head):
    """Attention of the last 1, 2, 3 of 6 positions differed from the last rows of all 6 at once."""
    torch.manual_seed(0)
    config = GPTConfig(20, 8, n_head=2, n_embd=16, n_kv_head=n_kv_head)
    c_attn, c_proj = torch.randn(16, 16 + 16 * n_kv_head), torch.randn(16, 16)
    x = torch.randn(2, 6, 16)

    def attention(x, cache=None, start=0):
        return gpt.attention(x, c_attn, c_proj, config, cache, start)

    cache = KVCache(config, 2, 6)
    if queries < 6:
        attention(x[:, : 6 - queries], cache, 0)
    part = attention(x[:, 6 - queries :], cache, 6 - queries)
    torch.testing.assert_close(part, attention(x)[:, 6 - queries :], rtol=0, atol=1e-4)
    changed = x + torch.tensor([0.0, 0, 0, 0, 0, 1])[:, None]  # what comes last changes nothing before it
    torch.testing.assert_close(attention(changed)[:, :5], attention(x)[:, :5], rtol=0, atol=0)


@torch.no_grad()
def test_every_split_of_a_prompt(tiny):
    """Several characters on a cache saw the future or too little; all 64 splits of 7 characters equal one pass."""
    model, idx = tiny(), prompt(7, rows=2)
    whole = model(idx)[0]
    for cuts in range(2**6):
        edges = [0, *(i + 1 for i in range(6) if cuts >> i & 1), 7]
        caches = [KVCache(model.config, 2, 7) for _ in model.h]
        parts = [model(idx[:, a:b], caches=caches, start=a)[0] for a, b in zip(edges, edges[1:], strict=False)]
        torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=1e-5)


@torch.no_grad()
def test_positions_go_on_in_cached_steps(tiny):
    """Positions restarted or jumped in cached steps; with a position table times 100 that cannot hide."""
    model, idx = tiny(), prompt(8)
    model.wpe.weight.mul_(100)
    caches = [KVCache(model.config, 1, 8) for _ in model.h]
    whole = model(idx)[0]
    assert not torch.allclose(whole[:, 3], model(idx[:, 3:4])[0][:, 0], atol=0.1)  # the position does matter
    for t in range(8):
        step = model(idx[:, t : t + 1], caches=caches, start=t)[0]
        torch.testing.assert_close(step[:, 0], whole[:, t], rtol=0, atol=1e-4)
    cached_and_not(model, idx[:, :3], 40)


def test_past_the_window_and_the_cache_is_an_error(tiny):
    """Writes past the end of the window or the cache crashed inside, or wrapped; the error has both numbers."""
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
    """Crashes and differences at the edge of the window."""
    idx = prompt(length)
    ids = cached_and_not(tiny(), idx, new)
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
    """A full window drops its oldest half; the cached run feeds what is left once, then one at a time."""
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
    """Of a long prompt only the last block_size characters count."""
    model, idx = tiny(), prompt(30)
    long = model.generate(idx, 20, use_cache=use_cache, generator=seeded())
    short = model.generate(idx[:, -8:], 20, use_cache=use_cache, generator=seeded())
    assert long[:, 30:].equal(short[:, 8:])
    shorter = model.generate(idx[:, -7:], 20, use_cache=use_cache, generator=seeded())
    assert not long[:, 30:].equal(shorter[:, 7:])


def test_the_cache_is_made_once_and_fits(tiny, monkeypatch):
    """Caches grown at each step, or too large; there is one a layer, for what the run will feed."""
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
    """The cached run wrote other characters under some knob, batch, prompt or length."""
    model = tiny(block_size=16)
    for length, new in [(1, 60), (17, 5), (40, 20)]:
        cached_and_not(model, prompt(length, rows), new, seed=length, **knobs)


@pytest.mark.parametrize("seed", range(20))
def test_long_runs(tiny, seed):
    """Rounding made 200 characters differ between the two paths, greedy or sampled, in one of 20 seeds."""
    model, idx = tiny(seed, block_size=32), prompt(3, seed=seed)
    cached_and_not(model, idx, 60, temperature=0)
    # The ids alone would forgive a cache in half precision: most draws are not close.
    runs = []
    for use_cache in (True, False):
        runs.append([])
        knobs = {"use_cache": use_cache, "generator": seeded(seed), "watch": lambda logits, _: runs[-1].append(logits)}
        runs[-1].insert(0, model.generate(idx, 200, **knobs))
    (ids, *cached), (same, *uncached) = runs
    assert ids.equal(same)
    torch.testing.assert_close(torch.cat(cached), torch.cat(uncached), rtol=0, atol=1e-5)


@pytest.mark.parametrize("n_kv_head", [4, 2, 1])
def test_shared_keys_and_values(tiny, n_kv_head):
    """Grouped-query attention wrote other characters with the cache, or its cache was no smaller."""
    model = tiny(n_head=4, n_kv_head=n_kv_head, block_size=16)
    cached_and_not(model, prompt(3, rows=2), 60)
    cache = KVCache(model.config, 2, 10)
    assert cache.k.shape == cache.v.shape == (2, n_kv_head, 10, 4)
    with pytest.raises(ValueError, match="n_head 4 does not divide by n_kv_head 3"):
        tiny(n_head=4, n_kv_head=3)


@pytest.mark.parametrize("use_cache", [True, False])
def test_nothing_is_kept_between_runs(tiny, use_cache):
    """The state of a run, or of one that died in the middle, leaked into the next."""
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
    with pytest.raises(RuntimeError, match="in the middle"):
        model.generate(prompt(3), 20, constraint=breaks, use_cache=use_cache)
    assert run(3, 1, seed=1).equal(first)
    assert set(vars(model)) == before[0]
    assert all(tensor.equal(before[1][name]) for name, tensor in model.state_dict().items())


def test_a_common_prefix_is_computed_once(tiny):
    """Rows that begin alike prefilled the same prompt once each; or rows that differ shared one."""
    model = tiny(block_size=16)
    sizes, hidden = [], model.hidden
    model.hidden = lambda idx, *rest: sizes.append(tuple(idx.shape)) or hidden(idx, *rest)
    alike, other = prompt(9).expand(4, -1), prompt(9, rows=4)
    together = model.generate(alike, 6, generator=seeded(1))
    assert sizes == [(1, 9), *[(4, 1)] * 5]
    assert len({tuple(row) for row in together.tolist()}) > 1  # from there on each goes its own way
    sizes.clear()
    model.generate(other, 6, generator=seeded(1))
    assert sizes == [(4, 9), *[(4, 1)] * 5]
    del model.hidden
    assert cached_and_not(model, alike, 40, seed=1)[:, :15].equal(together)


# ---------------------------------------------------------------------------------------------------
# Batches, stop, constraint


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_stopped_row_is_padded(stub, use_cache):
    """A row went on after its stop, or ended the others; a stop in the prompt is none; all stopped ends the run."""
    counts_down = torch.full((6, 6), -math.inf)
    for i in range(6):
        counts_down[i, (i - 1) % 6] = 0
    idx = torch.tensor([[0, 3], [2, 5], [4, 2]])
    ids = stub(counts_down).generate(idx, 50, stop=2, use_cache=use_cache)
    assert ids.tolist() == [[0, 3, 2, 2, 2, 2, 2, 2], [2, 5, 4, 3, 2, 2, 2, 2], [4, 2, 1, 0, 5, 4, 3, 2]]
    assert stub(counts_down).generate(idx, 3, stop=2, use_cache=use_cache).tolist() == ids[:, :5].tolist()


def test_nothing_to_write_or_to_read(tiny):
    """Writing 0 characters gives the prompt back and computes nothing; below 0, or without a prompt, is an error."""
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
    """A run wrote into the ids it was given."""
    idx = prompt(3)
    before = idx.clone()
    tiny().generate(idx, 9)[:] = 0
    assert idx.equal(before)


def test_what_is_written_can_be_trained_on(tiny):
    """The ids of a run were inference tensors, which no loss can be taken of."""
    model = tiny()
    ids = model.generate(prompt(3), 5)
    model(ids[:, :-1], ids[:, 1:])[1].backward()
    assert model.wte.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("shape", ["(V,)", "(B, V)"])
@pytest.mark.parametrize("temperature", [0, 1.5])
def test_the_constraint_is_asked_at_every_step(tiny, use_cache, shape, temperature):
    """A constraint was asked for the first row or the first step only; each row and step gets its own."""
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
    """One row without a choice among others that have one."""
    with pytest.raises(DecodingError, match="^step 1: the constraint allows no"):
        tiny().generate(prompt(2, rows=2), 5, constraint=lambda ids: torch.tensor([[True] * 20, [False] * 20]))


# ---------------------------------------------------------------------------------------------------
# What is forced is put in

LINE = [None, None, 7, 3, None, None, None, 7]  # a template: None is any id but 7, a number that id
FORCED = {
    "an acrostic": [5, None, None, 7, 6, None, None, 7],
    "the first": [5, None, None],
    "the last": [None, None, 5],
    "all": [5, 6, 5, 6, 7, 7, 1, 2, 3, 4],
    "none": [None] * 9,
    "two at the slide of the window": [None] * 4 + [7, 5, 7, 5] + [None] * 6,
    "past the window": LINE * 5,
}


def follow(template, length, rows=None):
    """A constraint that what comes after `length` ids follows the template; as (V,), or as (rows, V)."""

    def constraint(ids):
        entry = template[ids.size(1) - length]
        mask = torch.arange(20) != 7 if entry is None else torch.arange(20) == entry
        return mask if rows is None else mask.repeat(rows, 1)

    return constraint


@pytest.mark.parametrize("name", FORCED)
@pytest.mark.parametrize(("rows", "per_row"), [(1, False), (3, False), (3, True)])
def test_forced_ids(tiny, name, rows, per_row):
    """A forced id asked the model, was drawn, shifted the cache, or came out otherwise without the cache."""
    template, model = FORCED[name], tiny()
    rule = follow(template, 3, rows if per_row else None)
    ids = cached_and_not(model, prompt(3, rows), len(template), constraint=rule)
    for t, entry in enumerate(template, 3):
        assert (ids[:, t] != 7).all() if entry is None else (ids[:, t] == entry).all()
    fed = watch(model)
    seen = []
    model.generate(prompt(3, rows), len(template), constraint=rule, watch=lambda *_: seen.append(1))
    assert len(fed) == len(seen) == template.count(None)  # one pass for each character that is drawn


def test_an_acrostic_takes_a_pass_a_drawn_character(tiny):
    """The heads and marks of an acrostic of 4 x 7 cost passes: 32 instead of 24."""
    model = tiny(block_size=40)
    fed = watch(model)
    template = [5, *[None] * 6, 7] * 4
    model.generate(prompt(1), len(template), constraint=follow(template, 1))
    assert len(fed) == 24
    assert sorted({length for _, length in fed}) == [1, 2, 3]  # the prompt and a head, one, the mark and a head


@pytest.mark.parametrize("diagonal", [-1, 1])
def test_the_offset_mask_is_at_work(tiny, monkeypatch, diagonal):
    """No run ever used the offset mask: a wrong one changed nothing."""
    model, template, calls = tiny(block_size=40), [5, None, None, None, 7] * 6, []
    rule = follow(template, 1)
    right = model.generate(prompt(1, rows=30), len(template), constraint=rule, generator=seeded())

    def wrong(T, total, device=None):
        calls.append((T, total))
        mask = torch.ones(T, total, dtype=torch.bool).tril(diagonal=total - T + diagonal)
        return mask | (torch.arange(total) == 0)

    monkeypatch.setattr(gpt, "causal_mask", wrong)
    assert not model.generate(prompt(1, rows=30), len(template), constraint=rule, generator=seeded()).equal(right)
    assert any(1 < T < total for T, total in calls)


def test_putting_in_takes_no_chance(stub):
    """A forced id used up random numbers, so that the ids after it were others than without it."""
    model = stub(torch.zeros(20))
    plain, forced = [None] * 4, [None, 7, 7, None, None, 7, None]
    drawn = []
    for template in (plain, forced):
        rule = follow(template, 1)
        ids = model.generate(prompt(1), len(template), constraint=rule, generator=seeded(4))[0, 1:].tolist()
        drawn.append([i for i in ids if i != 7])
    assert drawn[0] == drawn[1]


def test_a_forced_id_that_the_model_rules_out(stub):
    """An id that is forced, though its logit is -inf, ended in an error or was another one."""
    model = stub(torch.tensor([0.0] * 7 + [-math.inf] + [0.0] * 12))
    template = [None, 7, None]
    assert model.generate(prompt(1), 3, constraint=follow(template, 1), generator=seeded())[0, 2] == 7


def test_one_row_alone_is_forced(tiny):
    """With one row forced and another not, the first got another id, or the second lost its choice."""
    model = tiny()

    def rule(ids):
        mask = torch.ones(2, 20, dtype=torch.bool)
        if ids.size(1) % 2:
            mask[0] = torch.arange(20) == 5
        return mask

    ids = cached_and_not(model, prompt(3, rows=2), 20, constraint=rule)
    assert (ids[0, 3::2] == 5).all()
    assert len(set(ids[1, 3::2].tolist())) > 1
