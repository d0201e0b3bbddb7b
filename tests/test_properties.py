"""What must hold of the choice and of a whole run, over random settings together: hypothesis looks for the odd ones."""

import ast
import math
import string
from functools import partial

import numpy as np
import pytest
import torch
from conftest import ROOT, prompt, seeded
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gpt import DecodingError, Vocabulary, draw, group_sizes, probabilities

# ---------------------------------------------------------------------------------------------------
# The probabilities of a choice

TEMPERATURES = st.one_of(st.sampled_from([0, 5e-324, 1e-12, 0.3, 1, 1.0, 1.5]), st.floats(0.01, 100))
TOP_K = st.one_of(st.none(), st.integers(1, 12), st.just(10**6))
TOP_P = st.one_of(st.none(), st.sampled_from([1e-300, 0.9, 1]), st.floats(0, 1, exclude_min=True))


def by_the_order(logits, chosen, allowed, temperature, top_k, top_p):
    """The probabilities of one row in NumPy: constraint, temperature, top-k, top-p. Of equal ids the chosen stay.

    (V,) each -> ((V,), how far the nearest sum was from top_p)
    """
    logits = np.where(allowed, logits.astype(float), -np.inf)
    order = np.lexsort((~chosen, -logits))  # the likeliest first
    if temperature == 0:
        top_k = 1
    else:
        logits = (logits - logits.max()) / max(temperature, 1e-30)
    probs = np.exp(logits - logits.max())
    probs[order[top_k:] if top_k else []] = 0
    probs /= probs.sum()
    if top_p is None or top_p == 1:
        return probs, math.inf
    mass = np.cumsum(probs[order])
    probs[order[1:][mass[:-1] >= top_p]] = 0
    return probs / probs.sum(), np.abs(mass - top_p).min()


@st.composite
def choices(draw):
    """(logits (B, V), allowed (B, V) or (V,) or None): ties, huge numbers, -inf; a row has at least one candidate."""
    B, V = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    quarters = st.integers(-40, 40).map(lambda n: n / 4)
    number = st.one_of(quarters, st.integers(-3, 3).map(float), st.sampled_from([-math.inf, 1e30]))
    logits = torch.tensor(draw(st.lists(st.lists(number, min_size=V, max_size=V), min_size=B, max_size=B)))
    sure = draw(st.integers(0, V - 1))
    logits[:, sure] = logits[:, sure].clamp(min=-10)
    shape = draw(st.sampled_from([None, (V,), (B, V)]))
    if shape is None:
        return logits, None
    bits = draw(st.lists(st.booleans(), min_size=math.prod(shape), max_size=math.prod(shape)))
    allowed = torch.tensor(bits).view(shape)
    allowed[..., sure] = True
    return logits, allowed


@settings(max_examples=120)
@given(choices(), TEMPERATURES, TOP_K, TOP_P)
def test_probabilities_are_those_of_the_order(choice, temperature, top_k, top_p):
    """Filters in another order, one row's cut used for all rows, a knob passed over, a leaking ban, edited logits."""
    logits, allowed = choice
    before, mask_before = logits.clone(), None if allowed is None else allowed.clone()
    probs = probabilities(logits, temperature=temperature, top_k=top_k, top_p=top_p, allowed=allowed)
    assert logits.equal(before)
    assert allowed is None or allowed.equal(mask_before)
    masks = torch.ones_like(logits, dtype=torch.bool) if allowed is None else allowed.expand_as(logits)
    for row, ours, mask in zip(logits.numpy(), probs.numpy(), masks.numpy(), strict=True):
        expected, distance = by_the_order(row, ours > 0, mask, temperature, top_k, top_p)
        assume(distance > 1e-5)  # nearer, rounding decides; `test_sampling.py` has the exact cases
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-7)
        assert not ours[expected == 0].any()
        assert ours[expected > 1e-30].all()


# ---------------------------------------------------------------------------------------------------
# A run


def by_hand(model, idx, new, stop=None, constraint=None, generator=None, **knobs):
    """What `generate` must write: each step a pass over the whole window, each row with its own rules."""
    (B, T), V, size = idx.shape, model.config.vocab_size, model.config.block_size
    begin, ended = max(0, T - size), [False] * B
    for step in range(1, new + 1):
        if idx.size(1) - begin > size:
            begin += size - size // 2
        allowed = constraint(idx).expand(B, V).clone() if constraint else torch.ones(B, V, dtype=torch.bool)
        allowed[ended] = torch.arange(V) == stop
        choices = [mask.nonzero().flatten().tolist() for mask in allowed]
        ids = [ids[0] for ids in choices if len(ids) == 1]
        if len(ids) < B:
            with torch.no_grad():
                logits = model(idx[:, begin:])[0][:, -1]
            try:
                probs = probabilities(logits, allowed=allowed, **knobs)
            except DecodingError as error:
                raise DecodingError(f"step {step}: {error}") from None
            noise = torch.rand(B, sum(group_sizes(V)), generator=generator).clamp(min=2**-25)
            ids = draw(probs, -noise.log()).tolist()
        ids = [stop if end else i for i, end in zip(ids, ended, strict=True)]
        ended = [end or i == stop for i, end in zip(ids, ended, strict=True)]
        idx = torch.cat([idx, torch.tensor(ids)[:, None]], dim=1)
        if all(ended):
            break
    return idx


@st.composite
def runs(draw):
    """Arguments of `generate`, and sizes of a model: a constraint leaves at each place one id, some, or none."""
    B, T = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    sizes = {
        "seed": draw(st.integers(0, 3)),
        "block_size": draw(st.integers(1, 9)),
        "n_kv_head": draw(st.integers(1, 2)),
    }
    seed, stop = draw(st.integers(0, 2**32)), draw(st.one_of(st.none(), st.integers(0, 19)))
    idx = prompt(T, rows=1 if draw(st.booleans()) else B, seed=seed).expand(B, -1)
    knobs = {"temperature": draw(TEMPERATURES), "top_k": draw(TOP_K), "top_p": draw(TOP_P), "stop": stop}
    forced = draw(st.sets(st.integers(T, T + 19)))
    empty = draw(st.one_of(st.none(), st.integers(T, T + 19)))  # where the last row may not go on
    kind = draw(st.sampled_from([None, "(V,)", "(B, V)"]))

    def constraint(ids):
        t = ids.size(1)
        masks = (torch.arange(20) * 7 + t * torch.arange(1, B + 1)[:, None]) % 20 < (1 if t in forced else 6)
        masks[-1] &= t != empty
        return masks if kind == "(B, V)" else masks[-1]

    return sizes, idx, draw(st.integers(0, 20)), seed, knobs | {"constraint": constraint if kind else None}


@settings(max_examples=80)
@given(runs())
def test_a_run_is_what_it_is_by_hand(tiny, run):
    """A run with or without the cache wrote other ids, moved the generator otherwise, or failed at another step."""
    sizes, idx, new, seed, knobs = run
    model, results = tiny(**sizes), []

    generate = model.generate
    for write in (partial(by_hand, model), partial(generate, use_cache=False), partial(generate, use_cache=True)):
        generator = seeded(seed)
        try:
            written = write(idx, new, generator=generator, **knobs).tolist()
        except DecodingError as error:
            written = str(error)
        results.append((written, torch.rand(1, generator=generator).item()))
    assert results[1] == results[0]
    assert results[2] == results[0]


# ---------------------------------------------------------------------------------------------------
# Characters


@settings(max_examples=40)
@given(st.lists(st.characters(), unique=True, min_size=1).map("".join), st.data())
def test_what_is_encoded_is_decoded(chars, data):
    """Characters changed on the way to ids and back, an unknown one was left out, or a known one had two ids."""
    vocab, text = Vocabulary(chars), data.draw(st.text(st.sampled_from(chars)))
    ids = vocab.encode(text)
    assert (len(vocab), ids.shape, ids.dtype) == (len(chars), (1, len(text)), torch.long)
    assert vocab.decode(ids[0]) == vocab.decode(ids[0].tolist()) == text
    assert all(chars[i] == char for i, char in zip(ids[0], text, strict=True))
    strangers = [char for char in "a鄉\u200b" + string.digits if char not in chars]
    with pytest.raises(ValueError, match="not in the vocabulary") as error:
        vocab.encode(text + "".join(strangers) * 2)
    names = str(error.value).partition(": ")[2].split("  ")
    visible = [f"{char} U+{ord(char):04X}" if char != "\u200b" else "U+200B" for char in strangers]
    assert names == visible
    with pytest.raises(ValueError, match=f"only {len(chars)} are different"):
        Vocabulary(chars + chars[-1])


# ---------------------------------------------------------------------------------------------------
# The rooms

TOP = {"gpt", "generate", "train", "checkpoints", "data", "torch"}  # what an import may name, and each room may not
ROOMS = {
    "gpt.py": TOP - {"torch"} | {"argparse", "signal", "zipfile", "os", "tempfile", "pathlib", "numpy", "tqdm"},
    "checkpoints/store.py": {"generate", "train", "argparse", "signal"},
    "generate.py": {"train", "data.prepare", "signal"},
    "train.py": {"generate"},
    **{f"data/{path.name}": TOP - {"data"} for path in (ROOT / "data").glob("*.py")},
}


@pytest.mark.parametrize("room", ROOMS)
def test_what_a_room_imports(room):
    """The model's file took up files and devices, text needed torch, or a poet the training."""
    tree = ast.parse((ROOT / room).read_text(encoding="utf-8"))
    named = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            named |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    assert room == "data/__init__.py" or named
    assert not {name for name in named if {name, name.partition(".")[0]} & ROOMS[room]}
