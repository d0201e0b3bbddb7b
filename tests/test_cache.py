"""The KV cache, positions and the window: with the cache and without it the same characters, at every length."""

import math

import pytest
import torch
from conftest import cached_and_not, prompt, record_passes, seeded

import gpt
from gpt import DecodingError, GPTConfig, KVCache, attention, causal_mask

# ---------------------------------------------------------------------------------------------------
# Attention and positions


def test_causal_mask():
    """The mask of fewer queries than keys was aligned to the wrong corner."""
    assert causal_mask(2, 4).tolist() == [[True, True, True, False], [True, True, True, True]]
    assert causal_mask(3, 3).tolist() == [[True, False, False], [True, True, False], [True, True, True]]


@pytest.mark.parametrize("n_kv_head", [4, 2, 1])
@pytest.mark.parametrize("queries", [1, 2, 3, 6])
def test_few_queries_on_many_keys(queries, n_kv_head):
    """Attention of the last 1, 2, 3 of 6 positions equals the last rows of all 6 at once."""
    config = GPTConfig(20, 8, n_head=4, n_embd=16, n_kv_head=n_kv_head)
    c_attn, c_proj = torch.randn(16, 16 + 8 * n_kv_head, generator=seeded(1)), torch.randn(16, 16, generator=seeded(2))
    x = torch.randn(2, 6, 16, generator=seeded(3))
    cache = KVCache(config, 2, 6)
    whole, before = attention(x, c_attn, c_proj, config), 6 - queries
    if before:
        attention(x[:, :before], c_attn, c_proj, config, cache, 0)
    part = attention(x[:, before:], c_attn, c_proj, config, cache, before)
    torch.testing.assert_close(part, whole[:, before:], rtol=0, atol=1e-4)
    changed = x + torch.tensor([0.0, 0, 0, 0, 0, 1])[:, None]  # what comes last changes nothing before it
    assert attention(changed, c_attn, c_proj, config)[:, :5].equal(whole[:, :5])


@torch.no_grad()
@pytest.mark.parametrize("n_kv_head", [2, 1])
def test_every_split_of_a_prompt(tiny, n_kv_head):
    """Several characters on a cache saw the future or too little; all 64 splits of 7 characters equal one pass."""
    model, idx = tiny(n_kv_head=n_kv_head), prompt(7, rows=2)
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


def test_a_single_row_is_stored_for_all(tiny):
    """A prefix that rows share reached only the first of them, or was handed back for all of them."""
    cache = KVCache(tiny().config, batch_size=3, length=5)
    k, v = torch.randn(2, 1, 2, 4, 8, generator=seeded())  # (B, G, T, C/H) each, of one row
    assert [x.shape for x in cache.append(k, v, 0)] == [k.shape, v.shape]
    newest = torch.randn(3, 2, 1, 8, generator=seeded(1))
    all_k, all_v = cache.append(newest, -newest, 4)
    assert all_k.equal(torch.cat([k.expand(3, -1, -1, -1), newest], dim=2))
    assert all_v.equal(torch.cat([v.expand(3, -1, -1, -1), -newest], dim=2))


@pytest.mark.parametrize(("n_kv_head", "heads"), [(None, 4), (4, 4), (2, 2), (1, 1)])
def test_shared_heads_shrink_the_cache(tiny, n_kv_head, heads):
    """The cache held a copy of k and v for every head of q, though they share them."""
    model = tiny(n_head=4, n_kv_head=n_kv_head)
    cache = KVCache(model.config, batch_size=3, length=5)
    assert cache.k.shape == cache.v.shape == (3, heads, 5, 4)
    assert model.h[0].attn["c_attn"].weight.shape == (16 + 2 * 4 * heads, 16)
    assert model.config.n_kv_head == heads  # a number even where None was given: it goes into the file


@pytest.mark.parametrize("n_kv_head", [3, 8, 0])
def test_heads_that_cannot_be_shared_evenly(n_kv_head):
    """A number of shared heads that does not fit crashed in the middle of attention."""
    with pytest.raises(ValueError, match=f"n_kv_head {n_kv_head}|n_kv_head is {n_kv_head}"):
        GPTConfig(20, n_head=4, n_kv_head=n_kv_head)


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
    """A full window drops its oldest half; the cached run feeds what is left once, then one character at a time."""
    model = tiny(block_size=block_size)
    passes = record_passes(model)
    uncached = model.generate(prompt(length), len(seen), use_cache=False, generator=seeded())
    assert passes == [(1, 0, n) for n in seen]
    passes.clear()
    cached = model.generate(prompt(length), len(seen), generator=seeded())
    assert cached.equal(uncached)
    # One pass a character and none after the last; a window that did not grow has moved.
    expected = [(1, 0, seen[0])]
    for before, now in zip(seen, seen[1:], strict=False):
        expected.append((1, now - 1, 1) if now > before else (1, 0, now))
    assert passes == expected


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
    """Caches grew at each step, or were too large; there is one a layer, for what the run will feed."""
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
@pytest.mark.parametrize(
    ("rows", "n_kv_head"),
    [(3, 2), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in [(1, 4), (3, 4), (2, 1)])],
)
def test_cached_is_uncached(tiny, knobs, rows, n_kv_head):
    """The cached run wrote other characters under some knob, batch, prompt, length or sharing of heads."""
    model = tiny(block_size=16, n_head=4, n_kv_head=n_kv_head)
    for length, new in [(1, 40), (17, 5), (40, 12)]:
        cached_and_not(model, prompt(length, rows), new, seed=length, **knobs)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_long_runs(tiny, seed):
    """Rounding made 200 characters differ between the two paths, greedy or drawn, in one of 20 seeds."""
    model = tiny(seed, block_size=32)
    for new, knobs in [(200, {}), (60, {"temperature": 0})]:
        logits = []
        cached_and_not(
            model, prompt(3, seed=seed), new, seed=seed, watch=lambda x, _, seen=logits: seen.append(x), **knobs
        )
        # The ids alone would forgive a cache in half precision: most draws are not close.
        assert len(logits) == 2 * new
        torch.testing.assert_close(*torch.cat(logits).chunk(2), rtol=0, atol=1e-5)


@pytest.mark.parametrize("use_cache", [True, False])
def test_nothing_is_kept_between_runs(tiny, use_cache):
    """The state of a run, or of a run that died in the middle, leaked into the next."""
    model = tiny()
    before = set(vars(model)), {name: tensor.clone() for name, tensor in model.state_dict().items()}

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
    assert set(vars(model)) == before[0]
    assert all(tensor.equal(before[1][name]) for name, tensor in model.state_dict().items())


def test_the_weights_are_read_anew_in_every_run(tiny):
    """Weights fetched once and kept would be the old ones after a training step, or after a file is loaded."""
    model = tiny(seed=1)
    cached_and_not(model, prompt(3), 5)
    model.load_state_dict(tiny(seed=2).state_dict())
    assert cached_and_not(model, prompt(3), 20).equal(cached_and_not(tiny(seed=2), prompt(3), 20))


# ---------------------------------------------------------------------------------------------------
# Forced characters


def template(*places, rows=None, after=0):
    """A constraint for places written after `after` characters: an id is forced, None leaves a choice of ids 1 to 19.

    rows: None for a mask (V,), a number for masks (B, V), in which row r is forced to the id + r.
    """

    def constraint(ids):
        place = places[ids.size(1) - after]
        free = torch.arange(20) > 0
        masks = [free if place is None else torch.arange(20) == (place + row) % 20 for row in range(rows or 1)]
        return torch.stack(masks) if rows else masks[0]

    return constraint


TEMPLATES = {
    "first": [5] + [None] * 11,
    "last": [None] * 11 + [5],
    "second and last but one": [None, 5] + [None] * 8 + [5, None],
    "two in a row": [None] * 3 + [5, 6] + [None] * 7,
    "before the slide": [None] * 4 + [5] + [None] * 7,  # after 3 characters the window of 8 is full
    "at the slide": [None] * 5 + [5] + [None] * 6,
    "after the slide": [None] * 6 + [5] + [None] * 5,
    "across the slide": [None] * 3 + [5, 6, 7, 8] + [None] * 5,
    "more than a window": [None] + list(range(1, 14)) + [None] * 3,
    "all": list(range(1, 13)),
    "every third": [5, None, None] * 6,
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(("rows", "shape"), [(1, "(V,)"), (3, "(V,)"), (3, "(B, V)")])
@pytest.mark.parametrize(
    "knobs", [{}, *(pytest.param(knobs, marks=pytest.mark.slow) for knobs in ({"temperature": 0}, {"stop": 7}))]
)
def test_forced_characters_at_every_place(tiny, name, rows, shape, knobs):
    """A forced character shifted a position, a stretch or the window of the cached run."""
    model, places = tiny(), TEMPLATES[name]
    for length in (1, 3, 9):
        constraint = template(*places, rows=rows if shape == "(B, V)" else None, after=length)
        ids = cached_and_not(model, prompt(length, rows), len(places), constraint=constraint, **knobs)
        for row, written in enumerate(ids[:, length:].tolist()):
            if 7 in written and "stop" in knobs:
                written = written[: written.index(7)]
            for place, i in zip(places, written, strict=False):
                assert i > 0 if place is None else i == (place + row * (shape == "(B, V)")) % 20


@pytest.mark.parametrize("use_cache", [True, False])
def test_forced_characters_take_no_chance(stub, use_cache):
    """A forced character used up the noise of a draw, so that a template changed what its free places draw."""
    model = stub([0.0] * 20, block_size=16)
    free = model.generate(prompt(1, rows=2), 60, use_cache=use_cache, generator=seeded())[:, 1:]
    places = [5, None, None, 6, 7, None] * 10
    constraint = template(*places, after=1)

    def all_may_come(ids):  # at the free places; `template` leaves out 0
        return constraint(ids) | (constraint(ids).sum() > 1)

    ids = model.generate(
        prompt(1, rows=2), len(places), constraint=all_may_come, use_cache=use_cache, generator=seeded()
    )
    drawn = [t for t, place in enumerate(places, start=1) if place is None]
    assert ids[:, drawn].equal(free[:, : len(drawn)])


@pytest.mark.parametrize("use_cache", [True, False])
def test_an_acrostic_takes_a_pass_for_each_free_character(tiny, use_cache):
    """The model was asked for what is forced: an acrostic of 4 lines of 7 takes 24 passes, not 32."""
    model = tiny(block_size=40)
    passes = record_passes(model)
    places = [head_or_mark for i in range(4) for head_or_mark in [i + 1, *[None] * 6, 10 + i]]
    watched = []
    model.generate(
        prompt(1),
        len(places),
        constraint=template(*places, after=1),
        use_cache=use_cache,
        watch=lambda logits, allowed: watched.append(allowed.sum().item()),
    )
    if use_cache:  # the prompt and a head; then a character, a mark and a head at once
        starts = [(1, 0, 2), *[(1, 2 + i, 1) for i in range(5)]]
        for line in range(1, 4):
            begin = 8 * line - 1
            starts += [(1, begin, 3), *[(1, begin + 3 + i, 1) for i in range(5)]]
        assert passes == starts
    assert len(passes) == 24
    assert watched == [19] * 24  # a watcher sees draws only


def test_forced_characters_set_the_offset_mask_to_work(tiny, monkeypatch):
    """No run ever used the offset mask; here three queries meet a filled cache, and a wrong mask changes the text."""
    asked = set()
    model, places = tiny(block_size=64), [5, None, 6, 7, None, None, 8]
    constraint = template(*places * 8, after=3)
    with torch.no_grad():
        for block in model.h:  # or what a query sees one place further would hardly change a draw
            block.attn["c_attn"].weight *= 4

    def texts(diagonal):
        def mask(T, total, device=None):
            asked.add((T, total))
            return torch.ones(T, total, dtype=torch.bool).tril(diagonal=diagonal(T, total))

        monkeypatch.setattr(gpt, "causal_mask", mask)
        runs = [model.generate(prompt(3), 56, constraint=constraint, generator=seeded(i)) for i in range(3)]
        return torch.stack(runs)

    right = texts(lambda T, total: total - T)
    assert sorted(asked)[:4] == [(3, 7), (3, 11), (3, 14), (3, 18)]
    assert texts(lambda T, total: total - T).equal(right)
    for wrong in (lambda T, total: 0, lambda T, total: total - T - 1, lambda T, total: total - T + 1):
        assert not texts(wrong).equal(right)


def test_one_forced_row_among_others(tiny):
    """A row that is forced alone is drawn with the others, from one id; the other rows keep their noise."""
    model = tiny(block_size=16)
    passes = record_passes(model)

    def constraint(ids):
        allowed = torch.ones(3, 20, dtype=torch.bool)
        allowed[1] = torch.arange(20) == ids.size(1)  # (B, V)
        return allowed

    ids = cached_and_not(model, prompt(2, rows=3), 12, constraint=constraint)
    assert ids[1, 2:].tolist() == list(range(2, 14))
    assert len(passes) == 24
    free = cached_and_not(model, prompt(2, rows=3), 12)
    assert ids[[0, 2]].equal(free[[0, 2]])


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_forced_id_needs_no_probability(stub, use_cache):
    """What is forced is put in, even where the model gives it a logit of minus infinity."""
    model = stub(torch.ones(5, 5))
    with torch.no_grad():
        model.wte.weight[3, 0] = -math.inf  # the logit of 3 is -inf, at every place
        model.wte.weight[3, 1:] = 1
    ids = model.generate(
        torch.zeros(2, 1, dtype=torch.long), 9, constraint=lambda ids: torch.arange(5) == 3, use_cache=use_cache
    )
    assert ids[:, 1:].eq(3).all()


# ---------------------------------------------------------------------------------------------------
# A prefix that rows share


@pytest.mark.parametrize("n_kv_head", [2, 1])
@pytest.mark.parametrize("length", [1, 5, 8, 20])
def test_a_shared_prefix_is_computed_once(tiny, length, n_kv_head):
    """Equal rows were each computed, or wrote other characters than rows computed apart."""
    model = tiny(n_kv_head=n_kv_head)
    passes = record_passes(model)
    idx = prompt(length).expand(4, -1)
    ids = cached_and_not(model, idx, 20)
    assert len({tuple(row) for row in ids.tolist()}) == 4  # the rows differ from the first draw on
    cached, uncached = passes[:-20], passes[-20:]
    seen = min(length, 8)
    assert cached[:-19] == ([(1, 0, seen - 1)] if length > 1 else []) + [(4, seen - 1, 1)]
    assert [rows for rows, _, _ in uncached] == [4] * 20


def test_forced_characters_after_a_shared_prefix(tiny):
    """An acrostic's first head ended the sharing, or was not fed to the rows."""
    model = tiny()
    passes = record_passes(model)
    cached_and_not(model, prompt(3).expand(3, -1), 9, constraint=template(5, 6, *[None] * 7, after=3))
    assert passes[:2] == [(1, 0, 2), (3, 2, 3)]


@pytest.mark.parametrize("place", [0, 2, 4])
def test_rows_that_differ_are_not_shared(tiny, place):
    """Rows that differ in any character, be it the first or the last, were taken for equal."""
    model, idx = tiny(), prompt(5).repeat(3, 1)
    idx[2, place] = (idx[2, place] + 1) % 20
    passes = record_passes(model)
    cached_and_not(model, idx, 12, temperature=0)
    assert passes[0] == (3, 0, 5)
    assert model.generate(idx, 12, temperature=0)[2].equal(model.generate(idx[2:], 12, temperature=0)[0])


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


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_forced_stop_ends_a_row(stub, use_cache):
    """A stop that is put in, not drawn, ended nothing; a row that has stopped took what is forced in its place."""
    model, flat = stub([0.0] * 6), torch.tensor([[0], [0]])
    assert model.generate(flat, 50, stop=2, constraint=lambda ids: torch.arange(6) == 2).tolist() == [[0, 2], [0, 2]]

    def constraint(ids):  # row 0 stops at once, row 1 counts up
        return torch.arange(6) == torch.tensor([[2], [0]]) + (ids.size(1) - 1)

    ids = model.generate(flat, 50, stop=2, constraint=constraint, use_cache=use_cache)
    assert ids.tolist() == [[0, 2, 2, 2], [0, 0, 1, 2]]


def test_nothing_to_write_or_to_read(tiny):
    """max_new_tokens 0 gives the prompt back and computes nothing; below 0, or without a prompt, is an error."""
    model = tiny()
    passes = record_passes(model)
    for length in (1, 8, 30):
        assert model.generate(prompt(length, rows=2), 0, stop=1).equal(prompt(length, rows=2))
    assert not passes
    with pytest.raises(ValueError, match="max_new_tokens is -1"):
        model.generate(prompt(3), -1)
    with pytest.raises(ValueError, match="prompt is empty"):
        model.generate(prompt(0), 5)


def test_the_prompt_is_not_written_to(tiny):
    """A run wrote into the ids it was given."""
    idx = prompt(3)
    before = idx.clone()
    for new in (9, 0):
        tiny().generate(idx, new)[:] = 0
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
