"""All knobs at once: hypothesis looks for the combination nobody thought of."""

import math

import pytest
import torch
from conftest import cached_and_not, prompt, seeded
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpt import DecodingError, probabilities, sample

settings.register_profile(
    "gpt", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("gpt")

TEMPERATURES = st.one_of(st.sampled_from([0, 5e-324, 1e-40, 1e-12, 0.3, 1, 1.5, 1e6]), st.floats(0.01, 100))
TOP_K = st.one_of(st.none(), st.integers(1, 12), st.just(10**6))
TOP_P = st.one_of(st.none(), st.sampled_from([1e-300, 0.5, 0.9, 1]), st.floats(0, 1, exclude_min=True))


@st.composite
def choices(draw):
    """(logits (B, V), allowed (B, V) or (V,) or None): ties, huge numbers, -inf; a row has at least one candidate."""
    B, V = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    number = st.one_of(
        st.integers(-3, 3).map(float),
        st.integers(-60_000, 60_000).map(lambda n: n / 1000),
        st.sampled_from([-math.inf, 1e30]),
    )
    logits = torch.tensor(draw(st.lists(st.lists(number, min_size=V, max_size=V), min_size=B, max_size=B)))
    sure = draw(st.integers(0, V - 1))
    logits[:, sure] = logits[:, sure].clamp(min=-60)
    shape = draw(st.sampled_from([None, (V,), (B, V)]))
    if shape is None:
        return logits, None
    bits = draw(st.lists(st.booleans(), min_size=math.prod(shape), max_size=math.prod(shape)))
    allowed = torch.tensor(bits).view(shape)
    allowed[..., sure] = True
    return logits, allowed


@pytest.mark.slow
@settings(max_examples=400)
@given(choices(), TEMPERATURES, TOP_K, TOP_P, st.integers(0, 2**32))
def test_sample(choice, temperature, top_k, top_p, seed):
    """Ids in range, probability 0 never drawn, exact top-k, smallest top-p set, logits untouched."""
    logits, allowed = choice
    before = logits.clone()
    B, V = logits.shape
    knobs = {"temperature": temperature, "allowed": allowed}
    plain = probabilities(logits, **knobs)
    after_k = probabilities(logits, **knobs, top_k=top_k)
    probs = probabilities(logits, **knobs, top_k=top_k, top_p=top_p)
    generator = seeded(seed)
    ids = torch.stack([sample(logits, **knobs, top_k=top_k, top_p=top_p, generator=generator) for _ in range(5)])
    assert logits.equal(before)
    assert ids.shape == (5, B)
    for b in range(B):
        free = [allowed is None or bool(allowed.expand(B, V)[b, i]) for i in range(V)]
        row = [float(x) if ok else -math.inf for x, ok in zip(logits[b], free, strict=True)]

        # the temperature: a softmax of the allowed ids, in float64; 0 is top-1
        if temperature:
            weights = [math.exp(max((x - max(row)) / temperature, -800)) for x in row]
            expected = [w * ok * (x > -math.inf) / sum(weights) for w, ok, x in zip(weights, free, row, strict=True)]
            assert all(math.isclose(a, p, rel_tol=1e-4, abs_tol=1e-6) for a, p in zip(plain[b], expected, strict=True))
        else:
            assert plain[b].max() == 1
            assert row[plain[b].argmax()] == max(row)

        # top-k: exactly k, the likeliest
        kept = [i for i in range(V) if after_k[b, i] > 0]
        cut = [i for i in range(V) if plain[b, i] > 0 and i not in kept]
        k = V if top_k is None else min(top_k, V)
        assert min(k, int((plain[b] > 0).sum())) <= len(kept) <= k
        assert min(row[i] for i in kept) >= max((row[i] for i in cut), default=-math.inf)

        # top-p: the fewest that reach p, the likeliest
        nucleus = [i for i in range(V) if probs[b, i] > 0]
        mass = [float(after_k[b, i]) for i in range(V)]
        p = 1 if top_p is None else top_p
        assert set(nucleus) <= set(kept)
        assert sum(mass[i] for i in nucleus) >= p - 1e-6
        assert sum(mass[i] for i in nucleus) - min(mass[i] for i in nucleus) < p + 1e-6
        assert min(mass[i] for i in nucleus) >= max((mass[i] for i in range(V) if i not in nucleus), default=0)
        assert math.isclose(sum(probs[b].tolist()), 1, abs_tol=1e-5)

        # the draw
        drawn = ids[:, b].tolist()
        assert all(0 <= i < V and probs[b, i] > 0 and free[i] for i in drawn)
        if temperature == 0:
            assert all(row[i] == max(row) for i in drawn)


@pytest.mark.slow
@settings(max_examples=150)
@given(st.data(), TEMPERATURES, TOP_K, TOP_P, st.integers(0, 2**32))
def test_generate(tiny, data, temperature, top_k, top_p, seed):
    """Cached equals uncached, bounded, the prompt kept, stopped rows padded, nothing banned, the forced put in."""
    B, T, new = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 12)), data.draw(st.integers(0, 20))
    sizes = {"block_size": data.draw(st.integers(1, 9)), "n_kv_head": data.draw(st.integers(1, 2))}
    model = tiny(data.draw(st.integers(0, 3)), **sizes)
    idx = prompt(T, rows=1 if data.draw(st.booleans()) else B, seed=seed).expand(B, -1)
    stop = data.draw(st.one_of(st.none(), st.integers(0, 19)))
    banned = data.draw(st.one_of(st.none(), st.lists(st.integers(0, 19), max_size=8), st.just(range(20))))
    forced = data.draw(st.sets(st.integers(T, T + 19)))  # places that leave a single id
    turn = data.draw(st.integers(0, 1))  # whether the rows have different masks

    def is_allowed(i, row, t):
        i = (i - turn * row * t) % 20
        return i not in banned and (i == min(set(range(20)) - set(banned)) or t not in forced)

    def constraint(ids):
        return torch.tensor([[is_allowed(i, row, ids.size(1)) for i in range(20)] for row in range(B)])

    knobs = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "stop": stop}
    if banned is not None:
        knobs["constraint"] = constraint
        if len(banned) == 20 and new:
            with pytest.raises(DecodingError, match="^step 1: the constraint allows no character at all"):
                model.generate(idx, new, **knobs)
            return
    ids = cached_and_not(model, idx, new, seed=seed, **knobs)
    assert ids[:, :T].equal(idx)
    assert T <= ids.size(1) <= T + new
    assert stop is not None or ids.size(1) == T + new
    assert 0 <= ids.min() <= ids.max() < 20
    still = 0  # the last place at which a row was still writing
    for row in range(B):
        written = ids[row, T:].tolist()
        end = written.index(stop) + 1 if stop in written else len(written)
        assert all(i == stop for i in written[end:])
        still = max(still, end)
        assert banned is None or all(is_allowed(i, row, t) for t, i in enumerate(written[:end], start=T))
    assert still == ids.size(1) - T
