"""All knobs at once: hypothesis looks for the combination nobody thought of."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpt import DecodingError, probabilities, sample

settings.register_profile(
    "gpt", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("gpt")

TEMPERATURES = st.one_of(
    st.sampled_from([0, 5e-324, 1e-40, 1e-12, 0.3, 1, 1.5, 1e6]), st.floats(0.01, 100, allow_subnormal=False)
)
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
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([sample(logits, generator, **knobs, top_k=top_k, top_p=top_p) for _ in range(5)])
    assert logits.equal(before)
    assert ids.shape == (5, B)
    for b in range(B):
        free = [allowed is None or bool(allowed.expand(B, V)[b, i]) for i in range(V)]
        row = [float(x) if ok else -math.inf for x, ok in zip(logits[b], free, strict=True)]

        # plain: a softmax of the allowed ones, in float64
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
    """Cached equals uncached, bounded, the prompt kept, stopped rows padded, nothing banned."""
    B, T, new = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 12)), data.draw(st.integers(0, 20))
    model = tiny(data.draw(st.integers(0, 3)), block_size=data.draw(st.integers(1, 9)))
    idx = torch.randint(20, (B, T), generator=torch.Generator().manual_seed(seed))
    stop = data.draw(st.one_of(st.none(), st.integers(0, 19)))
    banned = data.draw(st.one_of(st.none(), st.lists(st.integers(0, 19), max_size=8), st.just(range(20))))

    def constraint(ids):  # moves with the step and the row
        mask = torch.ones(B, 20, dtype=torch.bool)
        for row in range(B):
            mask[row, [(i + row * ids.size(1)) % 20 for i in banned]] = False
        return mask

    def run(use_cache):
        generator = torch.Generator().manual_seed(seed)
        try:
            return model.generate(
                idx,
                new,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                stop=stop,
                constraint=None if banned is None else constraint,
                use_cache=use_cache,
                generator=generator,
            )
        except DecodingError as error:
            return str(error)

    ids, uncached = run(True), run(False)
    if isinstance(ids, str):
        assert ids == uncached == "step 1: the constraint allows no character at all"
        assert len(banned) == 20
        return
    assert ids.equal(uncached)
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
        for t, i in enumerate(written[:end], start=T):
            assert not banned or i not in [(j + row * t) % 20 for j in banned]
    assert still == ids.size(1) - T
