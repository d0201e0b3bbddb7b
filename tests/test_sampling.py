"""How the next character is chosen: temperature, top-k, top-p, constraint, and the draw itself."""

import itertools
import math
import random

import pytest
import torch
from conftest import ROOT, prompt, seeded

import gpt
from gpt import DecodingError, draw, exponential_noise, group_sizes, load_checkpoint, probabilities, sample

LARGEST_U = 1 - 2**-24  # torch.rand gives 0, 2**-24, ... up to this


def noise(u):
    """What `draw` takes, from uniform numbers."""
    return -u.clamp(min=2**-25).log()


def log(*probs):
    return torch.tensor([probs]).log()  # (1, V)


def survivors(logits, **knobs):
    return int((probabilities(logits, **knobs) > 0).sum())


@pytest.mark.parametrize("temperature", [0, 5e-324, 1e-300, 1e-40, 1e-12, 1e-5, 1e-4])
def test_no_temperature_is_the_likeliest(tiny, temperature):
    """Temperature 0 or nearly 0 divided into NaN or junk; it is the argmax, whatever the seed."""
    model, ids = tiny(), torch.tensor([[3, 1, 4]])
    expected = ids
    for _ in range(5):
        expected = torch.cat([expected, model(expected)[0][:, -1].argmax(dim=-1, keepdim=True)], dim=1)
    for seed in range(3):
        assert model.generate(ids, 5, temperature=temperature, generator=seeded(seed)).equal(expected)


@pytest.mark.parametrize("temperature", [1e-45, 1e-12, 1e-5, 0.3, 1, 1.5, 1e3, 1e6])
def test_any_temperature_gives_probabilities(temperature):
    """Large logits over a small temperature overflowed."""
    probs = probabilities(torch.tensor([[3e4, 3e4 - 1, -3e4, 0.0]]), temperature=temperature)
    assert probs.sum().item() == pytest.approx(1)
    assert probs.argmax() == 0
    if temperature == 1e6:
        assert probs.tolist()[0] == pytest.approx([0.25] * 4, abs=0.02)


@pytest.mark.parametrize(
    "knobs",
    [{"temperature": t} for t in (-1, -1e-9, math.nan, math.inf, -math.inf, 1000001)]
    + [{"top_k": k} for k in (0, -1)]
    + [{"top_p": p} for p in (0, -0.1, 1.0001, math.nan, math.inf)],
)
@pytest.mark.parametrize("greedy", [True, False])
def test_wrong_knobs_are_refused(stub, knobs, greedy):
    """Knobs outside their range masked everything or nothing; they are refused by name, also at 0."""
    name, value = next(iter(knobs.items()))
    if greedy:
        knobs = {"temperature": 0} | knobs
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        sample(torch.zeros(1, 5), **knobs)
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        stub([0.0] * 5).generate(torch.zeros(1, 1), 0, **knobs)


@pytest.mark.parametrize("top_k", [1, 2, 7, 19, 20, 21, 100000])
def test_top_k_keeps_exactly_k(top_k):
    """K above the vocabulary crashed, and a threshold kept every tie; k are kept, the likeliest."""
    torch.manual_seed(0)
    different, ties = torch.randn(1, 20), torch.zeros(1, 20)
    ties[0, 3] = 1
    for logits in (different, ties, torch.cat([different, ties])):
        probs = probabilities(logits, top_k=top_k)
        assert ((probs > 0).sum(dim=1) == min(top_k, 20)).all()
        likeliest = logits.topk(min(top_k, 20)).values
        assert (probs[probs > 0].log().sum(dim=-1).isfinite()).all()
        for row, kept, values in zip(logits, probs > 0, likeliest, strict=True):
            assert row[kept].sort(descending=True).values.equal(values)
    if top_k >= 20:
        assert probabilities(different, top_k=top_k).equal(different.softmax(dim=-1))


@pytest.mark.parametrize(
    ("probs", "top_p", "kept"),
    [
        ((0.5, 0.41, 0.09), 0.9, 2),
        ((0.09, 0.41, 0.5), 0.9, 2),
        ((0.5, 0.41, 0.09), 0.92, 3),
        ((0.5, 0.41, 0.09), 0.3, 1),
        ((0.5, 0.25, 0.25), 0.5, 1),
        ((0.5, 0.25, 0.25), 0.75, 2),
        ((0.5, 0.41, 0.09), 1e-300, 1),
        ((0.25, 0.25, 0.25, 0.25), 0.01, 1),
        ((0.5, 0.41, 0.09), 1, 3),
        ((0.5, 0.5 - 1e-7, 1e-7), 1, 3),
    ],
)
def test_top_p_keeps_the_fewest_that_reach_it(probs, top_p, kept):
    """The candidate that reaches p was dropped; it stays, at least one does, and p = 1 filters nothing."""
    result = probabilities(log(*probs), top_p=top_p)[0]
    assert int((result > 0).sum()) == kept
    likeliest = sorted(probs, reverse=True)[:kept]
    assert sorted(result[result > 0].tolist(), reverse=True) == pytest.approx([p / sum(likeliest) for p in likeliest])


def test_order_of_the_filters():
    """Top-p before temperature, or before top-k, or on masses that top-k left short of 1, kept another set."""
    assert survivors(torch.tensor([[3.0, 2, 1]]), top_p=0.8, temperature=0.5) == 1
    assert survivors(torch.tensor([[3.0, 2, 1]]), top_p=0.8, temperature=1) == 2
    assert survivors(log(0.4, 0.3, 0.2, 0.1), top_k=2, top_p=0.5) == 1
    allowed = torch.tensor([False, True, True, True])  # top-k and top-p choose among the allowed ones only
    assert survivors(log(0.7, 0.1, 0.1, 0.1), top_k=2, allowed=allowed) == 2
    assert survivors(log(0.7, 0.1, 0.1, 0.1), top_p=0.6, allowed=allowed) == 2


@pytest.mark.parametrize("knobs", [{}, {"temperature": 0}, {"temperature": 0.5, "top_k": 3}, {"top_p": 0.5}])
@pytest.mark.parametrize("shape", [(6,), (2, 6)])
def test_nothing_allowed_is_an_error(tiny, knobs, shape):
    """An empty allowed set crashed in the sampler, or the constraint was dropped; the error names the step."""

    def constraint(ids):
        allowed = torch.ones(shape, dtype=torch.bool)
        if ids.size(1) == 4:
            allowed[-1] = False  # the last id, or all ids of the last row
            if len(shape) == 1:
                allowed[:] = False
        return allowed

    with pytest.raises(DecodingError, match="^step 3: .*allows no character"):
        tiny(vocab_size=6).generate(torch.zeros(2, 2, dtype=torch.long), 9, constraint=constraint, **knobs)


@pytest.mark.parametrize("temperature", [0, 1e-12, 1, 100, 1e6])
def test_banned_ids_are_never_drawn(temperature):
    """Bans as a finite number leaked at a high temperature; a banned id has probability 0 at any."""
    allowed = torch.ones(20, dtype=torch.bool)
    allowed[[0, 7, 19]] = False
    logits = torch.zeros(5000, 20)
    logits[:, 7] = 1e30  # a banned favourite
    ids = sample(logits, temperature=temperature, allowed=allowed, generator=seeded())
    assert allowed[ids].all()
    if temperature >= 1:
        assert len(ids.unique()) == 17


@pytest.mark.parametrize("temperature", [0, 0.5, 1, 1.5])
def test_the_logits_are_not_written_to(temperature):
    """Filters edited the scores in place; a table of probabilities is the same before and after a draw."""
    torch.manual_seed(0)
    logits, allowed = torch.randn(2, 20), torch.rand(2, 20) < 0.8
    before, allowed_before, table = logits.clone(), allowed.clone(), probabilities(logits)
    alone = [{}, {"top_k": 9}, {"top_p": 0.7}, {"allowed": allowed}]
    for filters in [*alone, {"top_k": 9, "top_p": 0.7, "allowed": allowed}]:
        sample(logits, temperature=temperature, generator=seeded(), **filters)
        assert logits.equal(before)
    assert allowed.equal(allowed_before)
    assert probabilities(logits).equal(table)
    assert table.sum(dim=1).tolist() == pytest.approx([1, 1])


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_run_always_ends(stub, use_cache):
    """Waiting for a line end that never comes looped for ever; max_new_tokens bounds the run, stop ends it."""
    never, at_once = [0.0, -math.inf], [-math.inf, 0.0]
    start = torch.zeros(1, 1, dtype=torch.long)
    assert stub(never).generate(start, 50, stop=1, use_cache=use_cache).tolist() == [[0] * 51]
    assert stub(at_once).generate(start, 50, stop=1, use_cache=use_cache).tolist() == [[0, 1]]


BAD_LOGITS = {
    "all NaN": [math.nan] * 5,
    "NaN first": [math.nan, 0, 0, 0, 0],
    "NaN last": [0, 0, 0, 0, math.nan],
    "inf": [0, math.inf, 0, 0, 0],
    "inf twice": [0, math.inf, 0, 0, math.inf],
    "all -inf": [-math.inf] * 5,
}


@pytest.mark.parametrize("bad", BAD_LOGITS)
@pytest.mark.parametrize(
    "knobs",
    [{"temperature": t} | filters for t in (0, 1e-12, 0.5, 1, 1e6) for filters in ({}, {"top_k": 2}, {"top_p": 0.5})],
)
def test_non_finite_logits_are_named(bad, knobs):
    """NaN logits ended in an error of the sampler's inside, or in text; greedy and sampled name them."""
    logits = torch.zeros(3, 5)
    logits[1] = torch.tensor(BAD_LOGITS[bad])  # one bad row among good ones
    with pytest.raises(DecodingError, match="non-finite logits"):
        sample(logits, **knobs)


def test_one_minus_infinity_is_no_damage():
    """A single -inf is a ban, not damage."""
    assert sample(torch.tensor([[-math.inf, 0.0]] * 99), generator=seeded()).eq(1).all()
    assert sample(torch.tensor([[-math.inf, 0.0]]), temperature=0) == 1


@pytest.mark.parametrize("V", [2, 3, 4, 7, 10])
def test_probability_zero_is_never_drawn(V):
    """Noise at its ends drew ids of probability 0, or padding; tried is every mixture of the two ends."""
    G, W = group_sizes(V)
    u = torch.tensor(list(itertools.product((0.0, LARGEST_U), repeat=G + W)))  # (B, G + W)
    for possible in ([V // 2], [V - 1], [0], range(1, V - 1), range(1, V, 2)):
        probs = torch.zeros(1, V)
        probs[0, list(possible)] = 1 / max(1, len(possible))
        if len(possible):
            assert set(draw(probs.expand(len(u), V), noise(u)).tolist()) <= set(possible)


@pytest.mark.parametrize("V", [1, 2, 3, 4, 5, 8, 9, 20, 23, 48])
def test_the_draw_is_the_rule(V):
    """The two rounds pick what a plain reading of the rule picks: the largest p / E, of the groups, then of the ids."""
    chance = random.Random(V)
    G, W = group_sizes(V)

    def by_the_rule(p, u):
        E = [-math.log(max(x, 2**-25)) for x in u]
        groups = [range(g * W, min(V, (g + 1) * W)) for g in range(G)]
        group = max(range(G), key=lambda g: sum(p[j] for j in groups[g]) / E[g])
        return max(groups[group], key=lambda j: p[j] / E[G + j - group * W])

    rows = [[chance.random() ** 4 * (chance.random() < 0.8) for _ in range(V - 1)] + [0.1] for _ in range(300)]
    rows = torch.tensor([[p / sum(row) for p in row] for row in rows])
    u = torch.rand(300, G + W, generator=seeded(V))
    u[::9, 0], u[::7, -1] = 0.0, LARGEST_U
    assert draw(rows, noise(u)).tolist() == [by_the_rule(*pair) for pair in zip(rows.tolist(), u.tolist(), strict=True)]


def chi_square(counts, expected):
    """The mean of it is the number of cells, its deviation sqrt(2 cells)."""
    return ((counts - expected) ** 2 / expected).sum().item()


@pytest.mark.parametrize("V", [2, 7, 23, 100])
def test_draws_by_the_probabilities(V):
    """A draw off the probabilities, or one id tied to another: chi-square of 200,000 draws, single and in pairs."""
    logits = torch.randn(1, V, generator=seeded(V)) * 1.5
    ids = sample(logits.expand(200_000, V), generator=seeded(1))
    probs = torch.softmax(logits[0].double(), dim=-1)
    assert abs(chi_square(ids.bincount(minlength=V), probs * 200_000) - V) < 5 * math.sqrt(2 * V)
    first, second = (ids.view(-1, 2) % 5).unbind(dim=1)  # rows next to each other, five classes of ids
    classes = torch.stack([probs[i::5].sum() for i in range(5)])
    classes = classes[classes > 0]
    pairs = (first * len(classes) + second).bincount(minlength=len(classes) ** 2)
    cells = len(classes) ** 2
    expected = 100_000 * torch.outer(classes, classes).flatten()
    assert chi_square(pairs, expected) < cells + 5 * math.sqrt(2 * cells)


@pytest.mark.slow
def test_draws_of_the_real_vocabulary():
    """The 6,289 characters were drawn off their probabilities: chi-square of 200,000 draws of the shipped model."""
    model, vocab, _ = load_checkpoint(ROOT / "checkpoints" / "pretrained.pt")
    with torch.no_grad():
        probs = probabilities(model(vocab.encode("春风"))[0][:, -1])  # (1, V)
    E = exponential_noise(seeded(2), 2000, len(vocab))
    ids = torch.cat([draw(probs.expand(2000, -1), next(E)) for _ in range(100)])
    expected = probs[0].double() * 200_000
    often = expected >= 5  # a cell for each of these, and one for all others
    counts = ids.bincount(minlength=len(vocab)).double()
    counts, expected = (torch.cat([x[often], x[~often].sum()[None]]) for x in (counts, expected))
    assert len(expected) > 500
    assert abs(chi_square(counts, expected) - len(expected)) < 5 * math.sqrt(2 * len(expected))


def test_only_the_generator_feeds_the_draw(tiny):
    """A draw that also read a global generator could not be had again, and disturbed what the caller draws."""
    model, ids = tiny(), torch.zeros(2, 1, dtype=torch.long)
    results = []
    for seed in range(3):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        results.append(model.generate(ids, 20, temperature=1.5, top_k=15, top_p=0.9, generator=seeded(5)))
        assert torch.get_rng_state().equal(state)
    assert results[0].equal(results[1])
    assert results[0].equal(results[2])
    assert not model.generate(ids, 20, generator=seeded(6)).equal(model.generate(ids, 20, generator=seeded(7)))


@pytest.mark.parametrize("knobs", [{}, {"temperature": 0}, {"temperature": 0.3}, {"top_k": 7}, {"top_p": 0.2}])
def test_every_knob_draws_the_same_noise(tiny, knobs):
    """Knobs that change how much is drawn would change the seed's meaning from that step on."""
    states = []
    for options in ({}, knobs):
        generator = seeded(3)
        tiny().generate(torch.zeros(1, 1, dtype=torch.long), 9, generator=generator, **options)
        states.append(generator.get_state())
    assert states[0].equal(states[1])


@pytest.mark.parametrize("V", [4, 20])
def test_ties_have_one_rule(V):
    """Of equal logits, temperature 0 and top-k 1 took different ids."""
    logits = torch.zeros(3, V)
    assert sample(logits, seeded(1), temperature=0).equal(sample(logits, seeded(2), top_k=1))


def test_watch_sees_what_each_draw_is_made_from(tiny):
    """The logits that `watch` is given are those of another step or row."""
    model, seen = tiny(), []
    rule = lambda ids: torch.arange(20) != ids[:, -1:]  # noqa: E731
    ids = model.generate(
        prompt(3, rows=2), 4, constraint=rule, generator=seeded(), watch=lambda *both: seen.append(both)
    )
    for t, (logits, allowed) in enumerate(seen, 3):
        torch.testing.assert_close(logits, model(ids[:, :t])[0][:, -1], rtol=0, atol=1e-5)
        assert allowed.equal(rule(ids[:, :t]))
    assert len(seen) == 4


def test_an_unknown_knob_is_refused(tiny):
    """A misspelled knob was passed over in silence."""
    with pytest.raises(TypeError, match="topk"):
        tiny().generate(prompt(1), 3, topk=5)
    assert gpt.check_sampling() is None
