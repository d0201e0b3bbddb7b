"""How the next character is chosen: temperature, top-k, top-p, constraint, and the draw itself."""

import itertools
import math
import random

import pytest
import torch
from conftest import ROOT, prompt, seeded

from gpt import DecodingError, draw, exponential_noise, group_sizes, load_checkpoint, probabilities, sample

PRETRAINED = ROOT / "checkpoints" / "pretrained.pt"
SMALLEST_E, LARGEST_E = -math.log(1 - 2**-24), -math.log(2**-25)  # of the largest u below 1, and of u = 0


def log(*probs):
    return torch.tensor([probs]).log()  # (1, V)


def survivors(logits, **knobs):
    return int((probabilities(logits, **knobs) > 0).sum())


@pytest.mark.parametrize("temperature", [0, 5e-324, 1e-300, 1e-40, 1e-12, 1e-5, 1e-4])
def test_no_temperature_is_the_likeliest(tiny, temperature):
    """Temperature 0 or nearly 0 divided into NaN or junk; it takes the largest logit, whatever the seed."""
    model, ids = tiny(), torch.tensor([[3, 1, 4]])
    expected = ids
    for _ in range(5):
        expected = torch.cat([expected, model(expected)[0][:, -1].argmax(dim=-1, keepdim=True)], dim=1)
    for seed in range(3):
        assert model.generate(ids, 5, temperature=temperature, generator=seeded(seed)).equal(expected)


@pytest.mark.parametrize("V", [4, 20])
@pytest.mark.parametrize("tied", ["all", "the last two", "first and last"])
def test_temperature_0_is_top_1_in_ties_too(V, tied):
    """Temperature 0 and top-k 1 took different ids among equal logits: two rules for one thing."""
    logits = torch.zeros(50, V)
    if tied != "all":
        logits[:, [-2, -1] if tied == "the last two" else [0, -1]] = 1.0
    greedy = sample(logits, temperature=0, generator=seeded(1))
    assert greedy.equal(sample(logits, top_k=1, generator=seeded(2)))
    assert greedy.eq(greedy[0]).all()  # nor does chance decide between equal ones
    assert logits[0, greedy[0]] == logits.max()


@pytest.mark.parametrize("temperature", [1e-45, 1e-12, 1e-5, 0.3, 1, 1.5, 1e6])
def test_any_temperature_gives_probabilities(temperature):
    """Large logits over a small temperature overflowed."""
    probs = probabilities(torch.tensor([[3e4, 3e4 - 1, -3e4, 0.0]]), temperature=temperature)
    assert probs.sum().item() == pytest.approx(1)
    assert probs.argmax() == 0
    if temperature == 1e6:
        assert probs.tolist()[0] == pytest.approx([0.25] * 4, rel=0.05)


WRONG_KNOBS = (
    [{"temperature": t} for t in (-1, -1e-9, math.nan, math.inf, -math.inf, 1000001.0)]
    + [{"top_k": k} for k in (0, -1)]
    + [{"top_p": p} for p in (0, -0.1, 1.0001, math.nan, math.inf)]
)


@pytest.mark.parametrize("knobs", WRONG_KNOBS)
@pytest.mark.parametrize("others", [{}, {"temperature": 0}])
def test_wrong_knobs_are_refused(stub, knobs, others):
    """Knobs outside their range masked everything or nothing; they are refused by name, at temperature 0 too."""
    (name, value), knobs = *knobs.items(), others | knobs
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        sample(torch.zeros(1, 5), **knobs)
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        stub([0.0] * 5).generate(torch.zeros(1, 1), 0, **knobs)


@pytest.mark.parametrize("top_k", [1, 2, 7, 19, 20, 21, 100000])
def test_top_k_keeps_exactly_k(top_k):
    """A k above the vocabulary crashed, and a threshold kept every tie; the k likeliest are kept."""
    different, ties = torch.randn(1, 20, generator=seeded()), torch.zeros(1, 20)
    ties[0, 3] = 1
    for logits in (different, ties, torch.cat([different, ties])):
        probs = probabilities(logits, top_k=top_k)
        assert ((probs > 0).sum(dim=1) == min(top_k, 20)).all()
        likeliest = logits.topk(min(top_k, 20)).values
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

    with pytest.raises(DecodingError, match=r"^step 3: .*allows no character"):
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
    logits = torch.randn(2, 20, generator=seeded())
    allowed = torch.rand(2, 20, generator=seeded()) < 0.8
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
def test_non_finite_logits_are_named(bad):
    """NaN logits ended in an error of the sampler's inside, or in text; every setting of the knobs names them."""
    logits = torch.zeros(3, 5)
    logits[1] = torch.tensor(BAD_LOGITS[bad])  # one bad row among good ones
    for temperature, filters in itertools.product([0, 1e-12, 0.5, 1, 1e6], [{}, {"top_k": 2}, {"top_p": 0.5}]):
        with pytest.raises(DecodingError, match="non-finite logits"):
            sample(logits, temperature=temperature, **filters)


def test_one_minus_infinity_is_no_damage():
    """A single -inf is a ban, not damage."""
    assert sample(torch.tensor([[-math.inf, 0.0]] * 99), generator=seeded()).eq(1).all()
    assert sample(torch.tensor([[-math.inf, 0.0]]), temperature=0) == 1


# ---------------------------------------------------------------------------------------------------
# The draw


def test_the_noise_is_finite_and_above_0(monkeypatch):
    """At u = 0 the noise was infinite, and p / E of a likely id as small as that of a banned one."""
    for u, E in [(0.0, LARGEST_E), (1 - 2**-24, SMALLEST_E), (0.5, math.log(2))]:  # 0 to 1 - 2**-24 are torch.rand's
        monkeypatch.setattr(torch, "rand", lambda *shape, generator, u=u: torch.full(shape, u))
        noise = next(exponential_noise(None, 2, 20))
        assert noise.shape == (2, sum(group_sizes(20)))
        assert noise.unique().tolist() == pytest.approx([E])


@pytest.mark.parametrize("V", [1, 2, 3, 4, 5, 7, 20, 23, 100, 6288, 6289, 6320, 6321])
def test_groups_hold_every_id(V):
    """A vocabulary whose size is no square lost its last ids, or had a group of padding alone."""
    G, W = group_sizes(V)
    assert G * W >= V > (G - 1) * W
    assert abs(G - math.sqrt(V)) < 2 > abs(W - math.sqrt(V))
    last = torch.zeros(1, V)
    last[0, -1] = 1.0
    assert draw(last, next(exponential_noise(seeded(), 1, V))) == V - 1


@pytest.mark.parametrize("V", [2, 3, 5, 7, 16, 20])
def test_probability_zero_is_never_drawn(V):
    """Noise at its ends drew ids of probability 0, or cells of the padding; every mixture of both ends is tried."""
    E = torch.tensor(list(itertools.product((SMALLEST_E, LARGEST_E), repeat=sum(group_sizes(V)))))  # (B, G + W)
    for possible in ([V // 2], [V - 1], [0], range(1, V - 1), range(1, V, 2), range(V)):
        if not possible:
            continue
        probs = torch.zeros(1, V)
        probs[0, list(possible)] = 1 / len(possible)
        drawn = draw(probs.expand(len(E), V), E)
        assert set(drawn.tolist()) <= set(possible)


@pytest.mark.parametrize("V", [1, 2, 3, 4, 5, 8, 9, 20, 23, 48])
def test_draw_is_the_rule(V):
    """The two rounds pick what a plain reading of the rule picks: largest p / E of the groups, then in the group."""
    chance = random.Random(V)
    G, W = group_sizes(V)

    def by_the_rule(p, E):
        groups = [range(g * W, min(g * W + W, V)) for g in range(G)]
        group = max(range(G), key=lambda g: sum(p[j] for j in groups[g]) / E[g])
        return max(groups[group], key=lambda j: p[j] / E[G + j - group * W])

    rows = [[chance.random() ** 4 * (chance.random() < 0.8) for _ in range(V - 1)] + [0.1] for _ in range(300)]
    rows = torch.tensor([[p / sum(row) for p in row] for row in rows])
    E = next(exponential_noise(seeded(V), 300, V))
    E[::9, 0], E[::7, -1] = LARGEST_E, SMALLEST_E
    before = E.clone(), rows.clone()
    assert draw(rows, E).tolist() == [by_the_rule(*pair) for pair in zip(rows.tolist(), E.tolist(), strict=True)]
    assert E.equal(before[0])
    assert rows.equal(before[1])


def chi_square(counts, probs):
    """How far counts are from probs, in standard deviations; ids of which fewer than 5 are expected count together."""
    expected = probs.double() * counts.sum()
    order = expected.argsort(descending=True)
    expected, counts = expected[order], counts[order].double()
    often = int((expected >= 5).sum())
    expected, counts = (torch.cat([x[:often], x[often:].sum()[None]]) for x in (expected, counts))
    expected, counts = expected[expected > 0], counts[expected > 0]
    freedom = len(expected) - 1
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    return (statistic - freedom) / math.sqrt(2 * freedom) if freedom else 0.0


DRAWS = 200_000


@pytest.mark.parametrize("V", [1, 2, 3, 7, 23, pytest.param(100, marks=pytest.mark.slow)])
def test_draws_follow_the_probabilities(V):
    """A draw off the probabilities, or one row tied to the next: 200,000 draws, single and in pairs."""
    logits = torch.randn(1, V, generator=seeded(V)) * 1.5
    ids = sample(logits.expand(DRAWS, V), generator=seeded(1))
    probs = logits[0].double().softmax(dim=-1)
    assert abs(chi_square(ids.bincount(minlength=V), probs)) < 5
    first, second = (ids.view(-1, 2) % 5).unbind(dim=1)  # rows next to each other, five classes of ids
    classes = torch.stack([probs[i::5].sum() for i in range(5)])
    assert abs(chi_square((first * 5 + second).bincount(minlength=25), torch.outer(classes, classes).flatten())) < 5


@pytest.mark.slow
def test_draws_of_the_shipped_model_follow_its_probabilities():
    """The same for a real vocabulary of 6,289 ids, after a line break: no id that is ruled out is among the draws."""
    if PRETRAINED.exists():
        model, vocab, _ = load_checkpoint(PRETRAINED)
        with torch.inference_mode():
            logits = model(vocab.encode("\n"))[0][0]  # (1, V)
    else:
        logits = torch.randn(1, 6289, generator=seeded()) * 3
    probs, V = probabilities(logits, temperature=1.2, top_k=3000), logits.size(1)
    noise = exponential_noise(seeded(2), 2000, V)
    counts = sum(draw(probs.expand(2000, V), next(noise)).bincount(minlength=V) for _ in range(DRAWS // 2000))
    assert counts[probs[0] == 0].sum() == 0
    assert abs(chi_square(counts, probs[0])) < 5


# ---------------------------------------------------------------------------------------------------
# Seeds


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


def test_noise_of_many_steps_at_once():
    """Noise drawn ahead gave a seed another meaning than noise drawn step by step, or came twice."""
    one, many = exponential_noise(seeded(), 3, 20), exponential_noise(seeded(), 3, 20, steps=32)
    steps = [(next(one), next(many)) for _ in range(70)]
    assert all(a.equal(b) for a, b in steps)
    assert len({a[0, 0].item() for a, _ in steps}) > 60
    logits, generator = torch.zeros(3, 20), seeded()
    for E, _ in steps[:3]:  # and `sample` takes one step's noise at a time
        assert sample(logits, generator).equal(draw(probabilities(logits), E))


KNOBS = [{}, {"temperature": 0.3}, {"temperature": 0}, {"top_k": 1}, {"top_k": 7}, {"top_p": 0.2}]


@pytest.mark.parametrize("knobs", KNOBS)
def test_every_knob_draws_the_same_noise(stub, knobs):
    """Knobs that change how much is drawn would change the seed's meaning from that step on; 0 draws as all others."""
    model, idx = stub([0.0] * 20), torch.zeros(2, 1, dtype=torch.long)
    plain, knobbed = seeded(3), seeded(3)
    for _ in range(5):
        sample(torch.zeros(2, 20), generator=plain)
        sample(torch.zeros(2, 20), generator=knobbed, **knobs)
        assert plain.get_state().equal(knobbed.get_state())
    model.generate(idx, 40, generator=plain)
    model.generate(idx, 40, generator=knobbed, **knobs)
    assert plain.get_state().equal(knobbed.get_state())


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_watcher_sees_what_the_draw_is_made_from(tiny, use_cache):
    """A watcher was shown other logits than those of the draw, or ids that were forced."""
    model, idx, seen = tiny(), torch.tensor([[1, 2], [3, 4]]), []
    forced = (3, 4, 7, 17)  # after so many characters

    def constraint(ids):
        if ids.size(1) in forced:
            return torch.arange(20) == 5
        return torch.arange(20) % 4 != ids.size(1) % 4

    def watch(logits, allowed):
        seen.append((logits.clone(), allowed.clone()))

    knobs = {"temperature": 1.3, "top_k": 9}
    ids = model.generate(idx, 20, constraint=constraint, use_cache=use_cache, generator=seeded(), watch=watch, **knobs)
    assert len(seen) == 20 - len(forced)
    noise = exponential_noise(seeded(), 2, 20)
    places = [t for t in range(2, 22) if t not in forced]
    for t, (logits, allowed) in zip(places, seen, strict=True):
        assert allowed.equal(constraint(ids[:, :t]))
        assert ids[:, t].equal(draw(probabilities(logits, allowed=allowed, **knobs), next(noise)))
    torch.testing.assert_close(seen[0][0], model(idx)[0][:, -1].detach(), rtol=0, atol=1e-5)


def test_a_watcher_of_a_free_run_gets_no_mask(tiny):
    """Without a constraint there is no mask to show; with a shared prefix each row still gets its logits."""
    seen = []
    tiny().generate(torch.zeros(3, 4, dtype=torch.long), 5, watch=lambda *args: seen.append(args))
    assert [(logits.shape, allowed) for logits, allowed in seen] == [((3, 20), None)] * 5


def test_an_unknown_knob_is_refused(tiny):
    """A misspelled knob was passed over in silence."""
    with pytest.raises(TypeError, match="topk"):
        tiny().generate(prompt(1), 3, topk=5)
