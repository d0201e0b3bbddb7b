"""How the next character is chosen: known cases of the knobs, what is an error, the draw, and the seed."""

import itertools
import math
import random

import pytest
import torch
from conftest import prompt, seeded

from gpt import DecodingError, draw, group_sizes, probabilities, sample

# ---------------------------------------------------------------------------------------------------
# The knobs (over random settings together: `test_properties.py`)


def log(*probs):
    return torch.tensor([probs]).log()  # (1, V)


@pytest.mark.parametrize("temperature", [0, 5e-324, 1e-300, 1e-40, 1e-12, 1e-5, 1e-4])
def test_no_temperature_is_the_likeliest(tiny, temperature):
    """Temperature 0 or nearly 0 divided into NaN or junk, or chance still decided."""
    model, ids = tiny(), torch.tensor([[3, 1, 4]])
    expected = ids
    for _ in range(5):
        expected = torch.cat([expected, model(expected)[0][:, -1].argmax(dim=-1, keepdim=True)], dim=1)
    for seed in range(3):
        assert model.generate(ids, 5, temperature=temperature, generator=seeded(seed)).equal(expected)


@pytest.mark.parametrize("knobs", [{}, {"top_k": 7}, {"top_p": 0.9}, {"top_k": 20, "top_p": 1}])
@pytest.mark.parametrize("tied", [range(20), (18, 19), (0, 19)])
def test_temperature_0_is_top_1_beside_other_knobs(tied, knobs):
    """Temperature 0 drew among equal logits, or among the top_k, or took another id than top-k 1."""
    logits = torch.zeros(50, 20)
    logits[:, list(tied)] = 1.0
    greedy = sample(logits, temperature=0, generator=seeded(1), **knobs)
    assert greedy.equal(sample(logits, top_k=1, generator=seeded(2)))
    assert greedy.unique().tolist() == [greedy[0].item()]
    assert greedy[0] in tied


WRONG = {
    "temperature": (-1, -1e-9, math.nan, math.inf, -math.inf, 1000001.0),
    "top_k": (0, -1),
    "top_p": (0, -0.1, 1.0001, math.nan, math.inf),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
@pytest.mark.parametrize("others", [{}, {"temperature": 0}])
def test_wrong_knobs_are_refused(stub, name, value, others):
    """Knobs outside their range masked everything or nothing, or passed because the temperature was 0."""
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        stub([0.0] * 5).generate(torch.zeros(1, 1, dtype=torch.long), 1, **others | {name: value})


def test_an_unknown_knob_is_refused(tiny):
    """A misspelled knob was passed over in silence."""
    with pytest.raises(TypeError, match="topk"):
        tiny().generate(prompt(1), 3, topk=5)


@pytest.mark.parametrize("top_k", [1, 2, 19, 20, 21, 100000])
def test_top_k_keeps_exactly_k(top_k):
    """A k above the vocabulary crashed or filtered, and a threshold kept every tie."""
    different, ties = torch.randn(1, 20, generator=seeded()), torch.zeros(1, 20)
    probs = probabilities(torch.cat([different, ties]), top_k=top_k)
    assert (probs > 0).sum(dim=1).tolist() == [min(top_k, 20)] * 2
    if top_k >= 20:
        assert probs[:1].equal(different.softmax(dim=-1))


@pytest.mark.parametrize(
    ("probs", "top_p", "kept"),
    [
        ((0.5, 0.41, 0.09), 0.9, 2),
        ((0.5, 0.41, 0.09), 0.92, 3),
        ((0.5, 0.41, 0.09), 0.3, 1),
        ((0.5, 0.25, 0.25), 0.5, 1),
        ((0.5, 0.41, 0.09), 1e-300, 1),
        ((0.25, 0.25, 0.25, 0.25), 0.01, 1),
        ((0.5, 0.41, 0.09), 1, 3),
        ((1.0, 2e-9), 1, 2),
    ],
)
def test_top_p_keeps_the_fewest_that_reach_it(probs, top_p, kept):
    """The candidate that reaches p was dropped, or nothing was left, or p = 1 cut the last ones."""
    result = probabilities(log(*probs), top_p=top_p)[0]
    assert int((result > 0).sum()) == kept
    likeliest = sorted(probs, reverse=True)[:kept]
    assert sorted(result[result > 0].tolist(), reverse=True) == pytest.approx([p / sum(likeliest) for p in likeliest])


@pytest.mark.parametrize(
    ("logits", "knobs", "left"),
    [
        (torch.tensor([[3.0, 2, 1]]), {"top_p": 0.8, "temperature": 0.5}, 1),
        (torch.tensor([[3.0, 2, 1]]), {"top_p": 0.8}, 2),
        (log(0.4, 0.3, 0.2, 0.1), {"top_k": 2, "top_p": 0.5}, 1),
    ],
)
def test_order_of_the_filters(logits, knobs, left):
    """Top-p came before the temperature, or on masses that top-k left short of 1."""
    assert int((probabilities(logits, **knobs) > 0).sum()) == left


@pytest.mark.parametrize("temperature", [0, 1e-12, 1, 100, 1e6])
def test_banned_ids_are_never_drawn(temperature):
    """Bans as a finite number leaked at a high temperature."""
    allowed = torch.ones(20, dtype=torch.bool)
    allowed[[0, 7, 19]] = False
    logits = torch.zeros(5000, 20)
    logits[:, 7] = 1e30  # a banned favourite
    ids = sample(logits, temperature=temperature, allowed=allowed, generator=seeded())
    assert allowed[ids].all()
    if temperature >= 1:
        assert len(ids.unique()) == 17


# ---------------------------------------------------------------------------------------------------
# Errors

NAN, INF = math.nan, math.inf
BAD_LOGITS = [[NAN] * 5, [NAN, 0, 0, 0, 0], [0, 0, 0, 0, NAN], [0, INF, 0, 0, 0], [0, INF, 0, 0, INF], [-INF] * 5]


@pytest.mark.parametrize("bad", BAD_LOGITS, ids=str)
def test_non_finite_logits_are_named(bad):
    """NaN logits ended in an error of the sampler's inside, or in text, under some setting of the knobs."""
    logits = torch.zeros(3, 5)
    logits[1] = torch.tensor(bad)  # one bad row among good ones
    masks, filters = [None, torch.ones(5, dtype=torch.bool)], [{}, {"top_k": 2}, {"top_p": 0.5}]
    for temperature, allowed, knobs in itertools.product([0, 1e-12, 0.5, 1, 1e6], masks, filters):
        with pytest.raises(DecodingError, match="non-finite logits"):
            sample(logits, temperature=temperature, allowed=allowed, **knobs)


@pytest.mark.parametrize("knobs", [{}, {"temperature": 0}, {"temperature": 0.5, "top_k": 3}, {"top_p": 0.5}])
@pytest.mark.parametrize("shape", [(6,), (2, 6)])
def test_nothing_allowed_is_an_error(tiny, knobs, shape):
    """An empty allowed set, of all rows or of one, crashed in the sampler, or the constraint was dropped."""

    def constraint(ids):
        allowed = torch.ones(shape, dtype=torch.bool)
        allowed.view(-1, 6)[-1] = ids.size(1) != 4
        return allowed

    with pytest.raises(DecodingError, match="^step 3: the constraint allows no character"):
        tiny(vocab_size=6).generate(torch.zeros(2, 2, dtype=torch.long), 9, constraint=constraint, **knobs)


# ---------------------------------------------------------------------------------------------------
# The draw


@pytest.mark.parametrize("V", [1, 2, 3, 4, 5, 7, 20, 23, 100, 6288, 6289, 6320, 6321])
def test_groups_hold_every_id(V):
    """A vocabulary whose size is no square lost its last ids, or other groups gave each seed another text."""
    W = math.ceil(math.sqrt(V))
    assert group_sizes(V) == (math.ceil(V / W), W)
    last = torch.full((1, V), -math.inf)
    last[0, -1] = 0
    assert sample(last, seeded()) == V - 1


@pytest.mark.parametrize("V", [2, 3, 5, 7, 16, 20])
def test_probability_zero_is_never_drawn(monkeypatch, V):
    """Noise at its ends, u = 0 or nearly 1, drew ids of probability 0 or of the padding; every mixture is tried."""
    u = torch.tensor(list(itertools.product((0.0, 1 - 2**-24), repeat=sum(group_sizes(V)))))  # (B, K + W)
    monkeypatch.setattr(torch, "rand", lambda shape, generator, device, dtype: u.clone())
    for possible in {(V // 2,), (V - 1,), (0,), tuple(range(1, V - 1)) or (1,), tuple(range(1, V, 2)), tuple(range(V))}:
        logits = torch.full((len(u), V), -math.inf)
        logits[:, list(possible)] = 0
        assert set(sample(logits).tolist()) <= set(possible)


@pytest.mark.parametrize("V", [1, 2, 3, 4, 5, 8, 9, 20, 23, 48])
def test_the_draw_is_the_rule(V):
    """The two rounds picked another id than a plain reading: the largest p / E of the groups, then in the group."""
    chance = random.Random(V)
    K, W = group_sizes(V)

    def by_the_rule(p, E):
        groups = [range(g * W, min(g * W + W, V)) for g in range(K)]
        group = max(range(K), key=lambda g: sum(p[j] for j in groups[g]) / E[g])
        return max(groups[group], key=lambda j: p[j] / E[K + j - group * W])

    rows = [[chance.random() ** 4 * (chance.random() < 0.8) for _ in range(V - 1)] + [0.1] for _ in range(300)]
    rows = torch.tensor([[p / sum(row) for p in row] for row in rows])
    E = -torch.rand(300, K + W, generator=seeded(V)).clamp(min=2**-25).log()
    expected = [by_the_rule(*pair) for pair in zip(rows.tolist(), E.tolist(), strict=True)]
    assert draw(rows, E).tolist() == expected
    assert sample(rows.log(), seeded(V)).tolist() == expected  # and this is the noise that `sample` makes


@pytest.mark.parametrize("V", [2, 7, 23, pytest.param(6289, marks=pytest.mark.slow)])
def test_draws_follow_the_probabilities(V):
    """A draw off the probabilities, or one row tied to the next: many draws, single and in pairs."""
    logits, generator = torch.randn(1, V, generator=seeded(V)) * 1.5, seeded(1)
    ids = torch.cat([sample(logits.expand(2000, V), generator) for _ in range(50)]) % 5  # five classes of ids
    probs = torch.stack([logits[0].double().softmax(dim=-1)[i::5].sum() for i in range(min(V, 5))])
    first, second = ids.view(-1, 2).unbind(dim=1)  # rows next to each other
    pairs = (first * len(probs) + second).bincount(minlength=len(probs) ** 2)
    for counts, expected in [(ids.bincount(minlength=len(probs)), probs), (pairs, torch.outer(probs, probs).flatten())]:
        expected, freedom = expected * counts.sum(), len(counts) - 1
        chi_square = ((counts - expected) ** 2 / expected).sum().item()
        assert abs(chi_square - freedom) < 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_seed_goes_on_meaning_the_same_text(tiny, use_cache):
    """A change of the draw, of its noise or of the window gave every seed another poem."""
    ids = tiny().generate(
        torch.tensor([[3, 1, 4], [1, 5, 9]]), 20, temperature=1.5, top_k=9, use_cache=use_cache, generator=seeded(7)
    )
    assert ids[:, 3:].tolist() == [
        [1, 4, 4, 15, 15, 14, 15, 14, 11, 14, 4, 18, 9, 0, 6, 15, 1, 4, 17, 4],
        [0, 17, 17, 6, 9, 0, 13, 16, 9, 8, 11, 14, 9, 13, 0, 10, 0, 1, 14, 2],
    ]


def test_only_the_generator_feeds_the_draw(tiny):
    """A draw read a global generator, and so disturbed what the caller draws, or did not read its own."""
    model, ids, state = tiny(), torch.zeros(2, 1, dtype=torch.long), torch.get_rng_state()
    model.generate(ids, 20, temperature=1.5, top_k=15, top_p=0.9, generator=seeded(5))
    assert torch.get_rng_state().equal(state)
    assert not model.generate(ids, 20, generator=seeded(6)).equal(model.generate(ids, 20, generator=seeded(7)))
