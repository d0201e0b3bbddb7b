"""train.py's recipe: texts, batches, the loss of a step, the optimizers and their rates; its flags and corpora."""

import itertools
import math
import random
import runpy
from unittest import mock

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
from gpt import GPT, GPTConfig, Vocabulary

LETTERS = "abcdefghijklmnopqrs"
id_lists = st.lists(st.integers(0, 19), min_size=1, max_size=9)  # a text of one id among them


def some_texts(lengths, seed=0):
    return [torch.randint(20, (length,), generator=seeded(seed + i)) for i, length in enumerate(lengths)]


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


@settings(max_examples=15)
@given(st.integers(10, 30), st.integers(1, 12), st.integers(0, 99))
def test_each_pass_takes_every_text_once(count, batch_size, seed):
    """A text is left out of a pass or comes twice, or two passes or two seeds share an order."""
    texts, steps, orders = [torch.tensor([i, i]) for i in range(count)], math.ceil(count / batch_size), []
    for start, chance in [(0, seed), (steps, seed), (0, seed + 1)]:
        p = parameters(batch_size=batch_size, short_windows=0, long_windows=0, seed=chance)
        taken = [train.step_texts(texts, p, step) for step in range(start, start + steps)]
        assert all(len(batch) == batch_size for batch in taken[:-1])
        orders.append([text[0].item() for batch in taken for text in batch])
    assert all(sorted(order) == list(range(count)) for order in orders)
    assert len(set(map(tuple, orders))) == 3


def test_texts_follow_from_the_seed_and_the_step_alone():
    """What a step learns from depends on the steps before it, or on chance that others draw as well."""
    texts, p = some_texts([5] * 20), parameters(batch_size=4, short_windows=3)
    first = [train.step_texts(texts, p, step) for step in range(12)]
    assert len({tuple(texts[-4].tolist()) for texts in first}) > 6  # each step has windows of its own
    for step in (7, 11, 0):
        random.seed(step)
        torch.rand(1)
        assert all(map(torch.equal, train.step_texts(texts, p, step), first[step]))
        p.seed = 2
        assert not all(map(torch.equal, train.step_texts(texts, p, step)[-4:], first[step][-4:]))
        p.seed = 1


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
    for x, y in train.batches([torch.tensor(ids) for ids in lists], rows):
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


# The loss of a step


def test_a_step_is_the_same_in_any_division(tiny, monkeypatch):
    """Parts of a step weigh each by its own mean, or padding counts, or a part without targets divides by 0."""
    model, whole = tiny(block_size=64).train(), train.batches
    texts = some_texts([2, 61, 7, 1, 8, 30, 3, 61, 1])
    logits = [model(text[None, :-1])[0][0] for text in texts if len(text) > 1]
    mean = F.cross_entropy(torch.cat(logits), torch.cat([text[1:] for text in texts]))
    expected = torch.autograd.grad(mean, list(model.parameters()))

    def padded(texts):  # all in one batch, however much of it is padding
        pad = torch.nn.utils.rnn.pad_sequence
        yield pad(texts, True, 0)[:, :-1], pad(texts, True, -100)[:, 1:]

    def divided(texts):
        for begin, end in [(0, 2), (2, 3), (3, 6), (6, 9)]:
            yield from whole(texts[begin:end], rows=2)

    for division in (whole, padded, divided):
        monkeypatch.setattr(train, "batches", division)
        model.zero_grad()
        assert train.learn(model, texts) == pytest.approx(mean.item(), abs=1e-6)
        for weight, gradient in zip(model.parameters(), expected, strict=True):
            assert (weight.grad - gradient).abs().max() <= 1e-6 * max(1, gradient.abs().max())
    monkeypatch.setattr(train, "batches", whole)
    assert train.learn(model, some_texts([1, 1])) == 0


def test_validation_loss_is_the_mean_over_characters(tiny):
    """Texts of several lengths are averaged by text or by batch, lose characters, or are not seen as the model is."""
    model, texts = tiny(n_head=2, block_size=16), some_texts([2, 17, 16, 15, 5, 1] + [9] * 70)
    weights = {name: weight.detach().numpy() for name, weight in model.named_parameters()}
    pairs = [(text[:-1].numpy(), text[1:].numpy()) for text in texts if len(text) > 1]
    total = sum(reference.loss(weights, 2, x, y) * len(y) for x, y in pairs)
    assert train.validation_loss(model, texts) == pytest.approx(total / sum(len(y) for _, y in pairs), abs=1e-5)


def test_an_evaluation_leaves_no_trace(tmp_path, monkeypatch):
    """Dropout is on in an evaluation or off in the steps after it, or an evaluation keeps what only gradients need."""
    training, seen, hidden = train.Training(parameters(dropout=0.5), POEMS, tmp_path / "m.pt"), set(), GPT.hidden
    monkeypatch.setattr(
        GPT, "hidden", lambda self, *args: seen.add((self.training, torch.is_grad_enabled())) or hidden(self, *args)
    )
    for work, mode in [(training.take_step, (True, True)), (training.evaluate, (False, False))] * 2:
        seen.clear()
        work()
        assert seen == {mode}
    training.evaluate()
    assert training.log[-1][3] == training.log[-2][3]


# Optimizers and learning rates


@pytest.mark.parametrize(("shape", "dtype"), [((24, 8), torch.float32), ((8, 24), torch.float64), ((1, 5), None)])
def test_muon_is_torchs_in_the_dtype_of_the_weights(shape, dtype, monkeypatch):
    """Muon rounds to bfloat16, or differs from torch's in momentum, decay, the step of a tall matrix or a rate."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self)  # torch's own rounding
    start = torch.randn(shape, generator=seeded(), dtype=dtype)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    optimizers = train.Muon([ours], 0.03, 0.1), torch.optim.Muon([theirs], 0.03, 0.1)
    for step in range(5):
        gradient = torch.randn(shape, generator=seeded(step + 1), dtype=dtype) * step  # 0 at first
        for weight, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.param_groups[0]["lr"] = 0.03 / (step + 1)
            weight.grad = gradient.clone()
            optimizer.step()
        assert ours.dtype == start.dtype
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12 if dtype == torch.float64 else 2e-6)
        assert torch.equal(ours.grad, gradient)


def test_which_weights_go_to_which_optimizer(tiny):
    """A weight is trained twice or never, norms decay, or embeddings go to Muon."""
    model, found = tiny(), []
    optimizers = train.make_optimizers(model, parameters(muon_decay=0.3, adam_decay=0.2, muon_lr=0.5, adam_lr=0.6))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            rule = type(optimizer).__name__, optimizer.defaults["lr"], group["weight_decay"]
            found += [(id(weight), rule) for weight in group["params"]]
    expected = {id(weight): ("Muon", 0.5, 0.3) for weight in model.h.parameters()}
    expected |= {id(model.wte.weight): ("AdamW", 0.6, 0.2), id(model.wpe.weight): ("AdamW", 0.6, 0.2)}
    expected |= {id(weight): ("AdamW", 0.6, 0) for name, weight in model.named_parameters() if "ln" in name}
    assert sorted(found) == sorted(expected.items())
    assert [optimizers[0].defaults["momentum"], *optimizers[1].defaults["betas"]] == [0.95, 0.9, 0.99]


@settings(max_examples=15)
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


# Flags


def test_flags_are_the_parameters():
    """A parameter of the table has no flag, a flag has another default, or its value goes nowhere."""
    p, rest = train.parse_args([])
    assert vars(p) == {name: value for name, (value, *_) in train.PARAMETERS.items()}
    assert not rest.resume
    for name, (value, least, _) in train.PARAMETERS.items():
        changed = train.parse_args([f"--{train.flag(name)}", str(least)])[0]
        assert vars(changed) == vars(p) | {name: least}
        assert type(getattr(changed, name)) is type(value)


def test_the_defaults_made_the_shipped_model():
    """Python train.py makes another model than the one that the lesson shows."""
    made = load_checkpoint(ROOT / "checkpoints" / "pretrained.pt")[2]["parameters"]
    if "average" not in made:
        pytest.skip("the shipped model is older than the recipe")
    p = vars(train.parse_args([])[0])
    assert made == p | {"block_size": made["block_size"]}  # which a lesson has changed in gpt.py


def test_sizes_stand_in_gpt_py(monkeypatch):
    """A size that the lesson has changed in gpt.py does nothing, because train.py has its own."""
    sizes = {"block_size": 33, "n_layer": 3, "n_head": 6, "n_embd": 36, "dropout": 0.25, "n_kv_head": 2}
    for name, value in sizes.items():
        monkeypatch.setattr(GPTConfig, name, value)
    table = runpy.run_path(str(ROOT / "train.py"))["PARAMETERS"]
    assert {name: table[name][0] for name in sizes} == sizes


def test_bad_values(capsys):
    """A value that is not finite or out of bounds is taken, or ends in a traceback."""
    limits = {name: (least, 2**31 if type(least) is int else 1) for name, (_, least, _) in train.PARAMETERS.items()}
    for name, (least, most) in (limits | {"threads": (1, 1024)}).items():
        for value in (least - 1, most + 1, "nan"):
            with pytest.raises(SystemExit) as end:
                train.parse_args([f"--{train.flag(name)}", str(value)])
            assert end.value.code == 2, (name, value)
            assert f"--{train.flag(name)}" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("changes", [{"block_size": 1}, {"block_size": 99}, {"batch_size": 99}, {"n_head": 16}])
def test_extreme_sizes(changes, tmp_path):
    """A window of one character or longer than all poems, a batch of more than there are, or tiny heads crash."""
    training = train.Training(parameters(steps=2, **changes), POEMS, tmp_path / "m.pt")
    assert training.train()
    assert load_checkpoint(tmp_path / "m.pt")[2]["step"] == 2


# Corpora


ONE_EACH = list("天地玄黄宇宙洪荒日月盈昃辰宿列张寒来暑往秋收冬藏闰余成岁律吕调阳云腾致雨")


@pytest.mark.parametrize(
    ("lines", "status", "said"),
    [
        (["天地玄黄，宇宙。" * n for n in range(1, 60)], 0, ""),
        (ONE_EACH, 0, "no forms and no acrostics"),
        ([poem.replace("，", "，\u200c") for poem in POEMS], 0, "U+200C 11"),
        ("春风，云水。".encode("gbk"), 2, "not UTF-8"),
        ([poem for poem in POEMS if not is_validation(poem)], 2, "9 poems to train on, 0"),
        ([poem for poem in POEMS if is_validation(poem)], 2, "0 poems to train on, 2"),
    ],
)
def test_corpora_of_all_kinds(lines, status, said, tmp_path, capsys):
    """A text that is no book of poems ends in a traceback, is cut without a word, or leaves a model out of nothing."""
    corpus, out = tmp_path / "text.txt", tmp_path / "new" / "m.pt"
    corpus.write_bytes(lines if isinstance(lines, bytes) else "\n".join(lines).encode())
    assert command(*flags(steps=1), "--corpus", corpus, "--out", out) == status
    error = capsys.readouterr().err
    assert said in error
    assert bool(error) == bool(said)
    if status:
        assert contents(tmp_path).keys() == {"text.txt"}
    else:
        assert {*load_checkpoint(out)[1].chars} == {"\n", *"".join(lines).replace("\u200c", "")}


@pytest.mark.parametrize(("text", "told"), [("春，云，", True), ("春。云。", True), ("春，\n云。", False)])
def test_a_corpus_without_marks(text, told, tmp_path, capsys):
    """Half an hour of training, and only then generate.py says that it can write no poems with that model."""
    (tmp_path / "text.txt").write_bytes(text.encode())
    train.load_corpus(tmp_path / "text.txt")
    assert ("no forms and no acrostics" in capsys.readouterr().err) == told


@pytest.mark.parametrize("given", [[], ["--corpus", "./other/../tang.txt"], ["--corpus", "other/link"]])
def test_the_corpus_in_other_spellings(given, tmp_path, monkeypatch):
    """The Tang poems, named in another way or by a link before they were made, are not there."""
    made = mock.Mock(side_effect=lambda: (tmp_path / "tang.txt").write_bytes("\n".join(POEMS).encode()))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "link").symlink_to(tmp_path / "tang.txt")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "CORPUS", tmp_path / "tang.txt")
    monkeypatch.setattr(train, "prepare", made)
    assert command(*flags(steps=0), *given, "--out", tmp_path / "m.pt") == 0
    made.assert_called_once_with()
