"""train.py's recipe: texts, batches, the loss of a step, the optimizers and their rates; its flags and corpora."""

import argparse
import itertools
import math
import random
import runpy
from pathlib import Path

import numpy as np
import pytest
import reference
import torch
from conftest import ROOT, seeded
from hypothesis import given, settings
from hypothesis import strategies as st
from small_run import POEMS, command, contents, flags, parameters
from torch.nn import functional as F

import train
from checkpoints.store import load_checkpoint
from data.poems import is_validation
from data.script import UserError
from gpt import GPT, GPTConfig, Vocabulary

LETTERS = "abcdefghijklmnopqrs"
id_lists = st.lists(st.integers(0, 19), min_size=1, max_size=9)  # a text of one id among them


def tensors(lists):
    return [torch.tensor(ids) for ids in lists]


def some_texts(lengths, seed=0):
    return [torch.randint(20, (length,), generator=seeded(seed + i)) for i, length in enumerate(lengths)]


# ---------------------------------------------------------------------------------------------------
# Texts


@settings(max_examples=30)
@given(st.lists(st.text(LETTERS, min_size=1, max_size=40), min_size=1), st.integers(1, 20))
def test_texts_hold_every_character_once(poems, block_size):
    """A character of a long poem is predicted twice or never, or a text does not fit the window."""
    texts = train.texts_of(poems, Vocabulary("\n" + LETTERS), block_size)
    assert all(2 <= len(text) <= block_size + 1 for text in texts)
    rest = iter(texts)
    for poem in poems:
        ids = next(rest).tolist()
        assert ids[0] == 0
        while len(ids) < len(poem) + 2:
            more = next(rest).tolist()
            assert more[0] == ids[-1]
            ids += more[1:]
        assert ids == [0, *(LETTERS.index(char) + 1 for char in poem), 0]
    assert next(rest, None) is None
    assert len(texts) == sum(math.ceil((len(poem) + 1) / block_size) for poem in poems)


@settings(max_examples=30)
@given(st.integers(1, 30), st.integers(1, 12), st.integers(0, 99))
def test_each_pass_takes_every_text_once(count, batch_size, seed):
    """A text is left out of a pass or comes twice, or two passes or two seeds share an order."""
    texts, p = [torch.tensor([i, i]) for i in range(count)], parameters(batch_size=batch_size, short_windows=0)
    p.long_windows, p.seed, steps = 0, seed, math.ceil(count / batch_size)
    taken = [[text[0].item() for text in train.step_texts(texts, p, step)] for step in range(3 * steps)]
    assert all(len(batch) == batch_size for i, batch in enumerate(taken) if (i + 1) % steps)
    passes = [sum(taken[i : i + steps], []) for i in range(0, 3 * steps, steps)]
    assert all(sorted(order) == list(range(count)) for order in passes)
    if count >= 10:
        p.seed += 1
        other = sum(([text[0].item() for text in train.step_texts(texts, p, step)] for step in range(steps)), [])
        assert len({tuple(order) for order in [*passes, other]}) == 4


def test_texts_follow_from_the_seed_and_the_step_alone():
    """What a step learns from depends on the steps before it, or on chance that others draw as well."""
    texts, p = some_texts([5] * 20), parameters(batch_size=4, short_windows=3)
    first = [train.step_texts(texts, p, step) for step in range(12)]
    assert len({tuple(texts[-4].tolist()) for texts in first}) > 6  # each step has windows of its own
    for step in (7, 11, 0):
        random.seed(step)
        torch.rand(1)
        again = train.step_texts(texts, p, step)
        assert all(map(torch.equal, again, first[step]))
        other = train.step_texts(texts, argparse.Namespace(**vars(p) | {"seed": 2}), step)
        assert not all(map(torch.equal, other[-4:], first[step][-4:]))


def test_windows_begin_anywhere_and_run_on():
    """A window begins only where poems do, ends with its poem, skips characters, or has another length."""
    texts = [torch.tensor([0, *range(10 * i, 10 * i + n), 0]) for i, n in enumerate((1, 3, 6, 2), 1)]
    follows = {pair for text in texts for pair in itertools.pairwise(text.tolist())}
    p = parameters(batch_size=1, short_windows=2, long_windows=3)
    begins, seen = set(), set()
    for step in range(300):
        windows = [window.tolist() for window in train.step_texts(texts, p, step)[1:]]
        assert [len(window) for window in windows] == [train.SHORT + 1] * 2 + [17] * 3
        begins |= {tuple(window[:2]) for window in windows}
        seen |= {pair for window in windows for pair in itertools.pairwise(window)}
    assert begins == seen == follows
    p.block_size = train.SHORT - 1
    assert {len(window) for window in train.step_texts(texts, p, 0)[1:]} == {train.SHORT}


@settings(max_examples=30)
@given(st.lists(id_lists, max_size=12), st.integers(1, 5))
def test_batches_hold_every_target_once(lists, rows):
    """A target is lost, counted twice or not one character later, or padding counts, or lengths are mixed."""
    found = []
    for x, y in train.batches(tensors(lists), rows):
        assert x.shape == y.shape
        assert len(x) <= rows
        lengths = (y >= 0).sum(dim=1)
        assert x.size(1) == lengths.max()
        assert lengths.max() + 1 <= 1.1 * (lengths.min() + 1)
        for ids, targets, length in zip(x, y, lengths, strict=True):
            assert torch.equal(ids[1:length], targets[: length - 1])
            assert (targets[length:] == -100).all()
            found.append([*ids[:length].tolist(), targets[length - 1].item()])
    assert sorted(found) == sorted(ids for ids in lists if len(ids) > 1)


def test_texts_of_like_length_share_a_batch():
    """Every text goes through the model alone, which takes several times as long."""
    shapes = [x.shape for x, _ in train.batches(some_texts([20, 5, 22, 21, 5] + [40] * 65))]
    assert shapes == [(2, 4), (3, 21), (64, 39), (1, 39)]


# ---------------------------------------------------------------------------------------------------
# The loss of a step


def gradients(model, texts):
    model.zero_grad()
    loss = train.learn(model, texts)
    return loss, [weight.grad.clone() for weight in model.parameters()]


def test_a_step_is_the_same_in_any_division(tiny, monkeypatch):
    """Parts of a step weigh each by its own mean, or padding counts, or a part without targets divides by 0."""
    model, whole = tiny(block_size=64).train(), train.batches
    texts = some_texts([2, 61, 7, 1, 8, 30, 3, 61, 1])
    model.zero_grad()
    logits = [model(text[None, :-1])[0][0] for text in texts if len(text) > 1]
    targets = torch.cat([text[1:] for text in texts])
    mean = F.cross_entropy(torch.cat(logits), targets)
    mean.backward()
    expected = [weight.grad.clone() for weight in model.parameters()]

    def padded(texts):  # all in one batch, however much of it is padding
        pad = torch.nn.utils.rnn.pad_sequence
        yield pad(texts, True, 0)[:, :-1], pad(texts, True, -100)[:, 1:]

    def divided(texts):
        for i in (0, 2, 3, 6):
            yield from whole(texts[i : {0: 2, 2: 3, 3: 6, 6: 9}[i]], rows=2)

    for division in (whole, padded, divided, lambda texts: whole(texts, rows=1)):
        monkeypatch.setattr(train, "batches", division)
        loss, found = gradients(model, texts)
        assert loss == pytest.approx(mean.item(), abs=1e-6)
        for a, b in zip(found, expected, strict=True):
            assert (a - b).abs().max() <= 1e-6 * max(1, b.abs().max())
    monkeypatch.setattr(train, "batches", whole)
    assert train.learn(model, some_texts([1, 1])) == 0


def test_validation_loss_is_the_mean_over_characters(tiny):
    """Texts of several lengths are averaged by text or by batch, lose characters, or are not seen as the model is."""
    model, texts = tiny(n_head=2, block_size=16), some_texts([2, 17, 16, 15, 5, 1] + [9] * 70)
    weights = {name: weight.detach().numpy() for name, weight in model.named_parameters()}
    pairs = [(text[:-1].numpy(), text[1:].numpy()) for text in texts if len(text) > 1]
    total = sum(reference.loss(weights, 2, x, y) * len(y) for x, y in pairs)
    expected = total / sum(len(y) for _, y in pairs)
    assert train.validation_loss(model, texts) == pytest.approx(expected, abs=1e-5)
    assert np.isfinite(expected)


def test_an_evaluation_leaves_no_trace(tmp_path, monkeypatch):
    """Dropout is on in an evaluation or off in the steps after it, or an evaluation keeps what only gradients need."""
    training, seen, hidden = train.Training(parameters(dropout=0.5), POEMS, tmp_path / "m.pt"), [], GPT.hidden

    def spy(self, *args):
        seen.append((self.training, torch.is_grad_enabled()))
        return hidden(self, *args)

    monkeypatch.setattr(GPT, "hidden", spy)
    for _ in range(2):
        training.take_step()
        assert set(seen) == {(True, True)}
        seen.clear()
        for _ in range(2):
            training.evaluate()
        assert set(seen) == {(False, False)}
        assert training.log[-1][3] == training.log[-2][3]
        seen.clear()


def test_the_poem_shown_is_the_same_each_time(tiny):
    """The poem of an evaluation has another chance each time, draws from that of the training, or is cut at its end."""
    model, vocab = tiny(vocab_size=24), Vocabulary("\n风月山水云花雪雨天地人心春秋日夜东西南北江海上")
    state = torch.get_rng_state()
    poems = {train.sample_poem(model, vocab) for _ in range(3)}
    assert len(poems) == 1
    assert set("".join(poems)) <= set(vocab.chars[1:])
    assert "".join(poems)
    assert torch.equal(torch.get_rng_state(), state)


# ---------------------------------------------------------------------------------------------------
# Optimizers and learning rates


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(24, 8), (8, 24), (8, 8), (1, 5)])
def test_muon_is_torchs_in_the_dtype_of_the_weights(shape, dtype, monkeypatch):
    """Muon rounds to bfloat16, or differs from torch's in momentum, decay, the step of a tall matrix or a rate."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self)  # torch's own rounding
    start = torch.randn(shape, generator=seeded(), dtype=torch.float64).to(dtype)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    optimizers = train.Muon([ours], 0.03, 0.1), torch.optim.Muon([theirs], 0.03, 0.1)
    for step in range(5):
        gradient = torch.randn(shape, generator=seeded(step + 1), dtype=torch.float64).to(dtype) * step  # 0 at first
        for weight, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.param_groups[0]["lr"] = 0.03 / (step + 1)
            weight.grad = gradient.clone()
            optimizer.step()
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6 if dtype == torch.float32 else 1e-12)
        assert torch.equal(ours.grad, gradient)
    state = optimizers[0].state_dict()
    other = train.Muon([torch.nn.Parameter(ours.detach().clone())], 0.5, 0.5)
    other.load_state_dict(state)
    assert torch.equal(
        other.state_dict()["state"][0]["momentum_buffer"], optimizers[1].state[theirs]["momentum_buffer"]
    )


def test_which_weights_go_to_which_optimizer(tiny):
    """A weight is trained twice or never, norms decay, or embeddings go to Muon."""
    model = tiny()
    muon, adam = train.make_optimizers(model, parameters(muon_decay=0.3, adam_decay=0.2, muon_lr=0.5, adam_lr=0.6))
    names = {id(weight): name for name, weight in model.named_parameters()}
    groups = [(o, group) for o in (muon, adam) for group in o.param_groups]
    found = {names[id(weight)]: (o, group) for o, group in groups for weight in group["params"]}
    assert found.keys() == set(names.values())
    assert sum(len(group["params"]) for _, group in groups) == len(names)
    for name, (optimizer, group) in found.items():
        norm, embedding = "ln" in name, name in ("wte.weight", "wpe.weight")
        assert optimizer is (adam if norm or embedding else muon), name
        assert group["weight_decay"] == (0 if norm else 0.2 if embedding else 0.3), name
        assert optimizer.defaults["lr"] == (0.6 if norm or embedding else 0.5)
    assert muon.defaults["momentum"] == 0.95
    assert adam.defaults["betas"] == (0.9, 0.99)


@settings(max_examples=30)
@given(st.integers(0, 400), st.integers(0, 60), st.sampled_from([0.01, 0.3, 1.0]))
def test_learning_rates(steps, warmup, final):
    """A first rate of 0, a second peak, a jump where the parts join, a division by zero, a last rate of its own."""
    p = parameters(steps=steps, warmup=warmup, final_lr=final)
    rates = [train.lr_factor(step, p) for step in range(steps)]
    assert all(0 < rate <= 1 for rate in rates)
    assert rates[:warmup] == pytest.approx([(step + 1) / (warmup + 1) for step in range(min(steps, warmup))])
    fall = rates[warmup:]
    assert fall == pytest.approx(np.linspace(1, final, len(fall)).tolist())
    assert train.lr_factor(steps, p) > 0 or final < 0.1  # a finished run that is resumed shows it


def test_the_average_of_the_weights(tmp_path):
    """The model that is kept is the last step's, or its weights are no mean of the last steps, or trained upon."""
    training = train.Training(parameters(average=2), POEMS, tmp_path / "m.pt")
    mean = training.model.wte.weight.detach().clone()
    for step in range(1, 15):
        training.take_step()
        mean += (training.model.wte.weight.detach() - mean) / min(1 + step / 10, 2)
    torch.testing.assert_close(training.average.wte.weight.detach(), mean, rtol=0, atol=1e-6)
    assert not training.average.training
    training.evaluate()
    assert torch.equal(load_checkpoint(tmp_path / "m.pt")[0].wte.weight, training.average.wte.weight)


# ---------------------------------------------------------------------------------------------------
# Flags


def test_flags_are_the_parameters():
    """A parameter of the table has no flag, a flag has another default, or its value goes nowhere."""
    p, rest = train.parse_args([])
    assert vars(p) == {name: value for name, (value, *_) in train.PARAMETERS.items()}
    assert vars(rest).keys() == {"resume", "corpus", "out", "device", "threads"}
    assert not rest.resume
    for name, (value, least, _) in train.PARAMETERS.items():
        changed = train.parse_args([f"--{train.flag(name)}", str(least)])[0]
        assert vars(changed) == vars(p) | {name: least}
        assert type(getattr(changed, name)) is type(value)


@pytest.mark.parametrize("name", ["block_size", "n_layer", "n_head", "n_embd", "dropout", "n_kv_head"])
def test_sizes_stand_in_gpt_py(name, monkeypatch):
    """A size that the lesson has changed in gpt.py does nothing, because train.py has its own."""
    monkeypatch.setattr(GPTConfig, name, value := 0.25 if name == "dropout" else 3)
    assert runpy.run_path(str(ROOT / "train.py"))["PARAMETERS"][name][0] == value


BAD = [
    (f"--{name.replace('_', '-')}", word)
    for name, (value, least, _) in train.PARAMETERS.items()
    for word in ("x", "", "nan", "inf", str(least - 1), str(2**31 + 1), *(["1.5"] if type(value) is int else []))
] + [("--threads", "0"), ("--threads", "1025"), ("--nonsense", "1"), ("--out", None), ("3", None), ("–steps", "3")]


def test_bad_values(capsys):
    """A value that is no number, not finite or out of bounds is taken, or ends in a traceback."""
    for name, word in BAD:
        with pytest.raises(SystemExit) as end:
            train.parse_args([name] if word is None else [name, word])
        assert end.value.code == 2, (name, word)
        assert name in capsys.readouterr().err.splitlines()[-1], (name, word)


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"n_head": 3}, "n_head 3"),
        ({"n_kv_head": 3}, "n_kv_head 3"),
        ({"dropout": 1}, "dropout is 1"),
        ({"n_layer": 10**9}, "GB"),
        ({"n_embd": 10**6}, "GB"),
        ({"block_size": 2**31}, "GB"),
    ],
)
def test_sizes_that_make_no_model(changes, shown, tmp_path):
    """Sizes that do not fit each other or the memory end in a traceback, or the machine runs out of memory."""
    with pytest.raises(UserError, match=shown) as error:
        train.Training(parameters(**changes), POEMS, tmp_path / "m.pt")
    assert error.value.status == 2


@pytest.mark.parametrize("changes", [{"block_size": 1}, {"block_size": 99}, {"batch_size": 99}, {"n_head": 16}])
def test_extreme_sizes(changes, tmp_path):
    """A window of one character or longer than all poems, a batch of more than there are, or tiny heads crash."""
    training = train.Training(parameters(steps=2, **changes), POEMS, tmp_path / "m.pt")
    assert training.train()
    assert load_checkpoint(tmp_path / "m.pt")[2]["step"] == 2


# ---------------------------------------------------------------------------------------------------
# Corpora


def prose(lines):
    chance = random.Random(3)
    return ["".join(chance.choices("天地玄黄宇宙洪荒，。日月盈昃", k=chance.randrange(1, 90))) for _ in range(lines)]


LATIN = [
    f"the {a} sees a {b}" for a in ("cat", "dog", "fox", "owl", "bee") for b in ("hat", "log", "box", "sun", "sea")
]


@pytest.mark.parametrize(
    ("lines", "status", "said"),
    [
        (prose(40), 0, ""),
        (["".join(prose(30))], 2, "too small a corpus: "),
        (
            list("天地玄黄宇宙洪荒日月盈昃辰宿列张寒来暑往秋收冬藏闰余成岁律吕调阳云腾致雨"),
            0,
            "no forms and no acrostics",
        ),
        (POEMS[:1] * 20, 2, "19 poems that were there already are left out"),
        (LATIN, 0, "no forms and no acrostics"),
        ([poem.replace("，", "，\u200c") for poem in POEMS], 0, "U+200C 11"),
        ([*POEMS, *POEMS[:2]], 0, "2 poems that were there already are left out"),
        ("春风，云水。".encode("gbk"), 2, "not UTF-8"),
        ([], 2, "0 poems to train on, 0 (one in 20, by checksum) to validate"),
        ([poem for poem in POEMS if not is_validation(poem)], 2, "9 poems to train on, 0"),
        ([poem for poem in POEMS if is_validation(poem)], 2, "0 poems to train on, 2"),
    ],
)
def test_corpora_of_all_kinds(lines, status, said, tmp_path, capsys):
    """A text that is no book of poems ends in a traceback, is cut without a word, or leaves a model out of nothing."""
    corpus, out = tmp_path / "text.txt", tmp_path / "new" / "m.pt"
    corpus.write_bytes(lines if isinstance(lines, bytes) else "\n".join(lines).encode())
    assert command(*flags(steps=1), "--corpus", corpus, "--out", out) == status
    ends = capsys.readouterr()
    assert said in ends.err
    assert (ends.err == "") == (said == "")
    assert out.exists() == (status == 0)
    assert status == 0 or contents(tmp_path).keys() == {"text.txt"}
    if status == 0:
        known = set(load_checkpoint(out)[1].chars)
        assert known == {"\n", *"".join(lines).replace("\u200c", "")}


@pytest.mark.parametrize(
    ("text", "told"), [("春，云，", True), ("春。云。", True), ("a, b", True), ("春，\n云。", False)]
)
def test_a_corpus_without_marks(text, told, tmp_path, capsys):
    """Half an hour of training, and only then generate.py says that it can write no poems with that model."""
    (tmp_path / "text.txt").write_bytes(text.encode())
    train.load_corpus(tmp_path / "text.txt")
    assert ("no forms and no acrostics" in capsys.readouterr().err) == told


@pytest.mark.parametrize("spelling", ["tang.txt", "./other/../tang.txt", "other/link", "default"])
def test_the_corpus_in_other_spellings(spelling, tmp_path, monkeypatch):
    """The Tang poems, named in another way or by a link before they were made, are not there."""
    made, folder = [], tmp_path / "data"
    (folder / "other").mkdir(parents=True)
    (folder / "other" / "link").symlink_to(folder / "tang.txt")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(train, "CORPUS", folder / "tang.txt")

    def prepare():
        made.append(1)
        (folder / "tang.txt").write_bytes("\n".join(POEMS).encode())

    monkeypatch.setattr(train, "prepare", prepare)
    given = [] if spelling == "default" else ["--corpus", spelling]
    for times in (1, 2):
        assert command(*flags(steps=0), *given, "--out", tmp_path / "m.pt") == 0
        assert made == [1] * times  # it looks whether the corpus is whole


@pytest.mark.parametrize("missing", ["missing.txt", "", "folder", "/dev/zero"])
def test_a_corpus_that_is_not_there(missing, tmp_path, monkeypatch, capsys):
    """A run that is refused leaves a folder or a lock behind, or reads a device until the memory is full."""
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    assert command(*flags(), "--corpus", missing, "--out", "new/deep/m.pt") == 2
    assert capsys.readouterr().err == f"train.py: --corpus {Path(missing)}: there is no such file\n"
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
