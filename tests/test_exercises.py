"""The checks of the exercises: what is right passes, what is wrong gets a sentence that helps.

The solutions under RIGHT and RIGHT_MARKS, and a block_size of 512, are the answers for teachers.
"""

import re
import sys

import exercises
import pytest
import torch
from small_poet import VOCAB, printed

import generate
import gpt
from checkpoints.store import save_checkpoint
from data.script import run
from gpt import GPTConfig


@pytest.fixture(autouse=True)
def settings(as_shipped, monkeypatch):
    """The settings as they ship, with fewer poems; a learner's own solutions are not looked at."""
    for name, value in {"EX1_TOP_P": 0.9, "EX1_POEMS": 2, "EX2_POEMS": 4, "EX3_CHARS": (100, 500)}.items():
        monkeypatch.setattr(exercises, name, value)
    monkeypatch.setattr(exercises, "my_top_p", my_top_p)
    monkeypatch.setattr(exercises, "my_marks", my_marks)
    monkeypatch.setattr(generate, "MAX_CHARS", 12)
    monkeypatch.setattr(GPTConfig, "block_size", 128)


def my_top_p(probs, p):
    raise NotImplementedError


def my_marks(place):
    raise NotImplementedError


@pytest.fixture
def check(poet, capsys, monkeypatch):
    """check(number, solution) -> (status, verdict, all that is printed) of an exercise with that solution."""

    def check(number, solution):
        monkeypatch.setattr(exercises, {1: "my_top_p", 2: "my_marks"}[number], solution)
        status = exercises.check_exercises([number], poet, VOCAB)
        lines = printed(capsys)
        return status, lines[-1].removeprefix(f"  exercise {number}: "), lines

    return check


# Exercise 1


def ranked(rule):
    """A rule for exercise 1 from one on the sorted probabilities and the mass before each, likeliest first."""

    def keep(probs, p):
        values, ids = probs.sort(descending=True)
        return torch.zeros(len(probs), dtype=torch.bool).scatter(0, ids, rule(values, values.cumsum(0) - values, p))

    return keep


def one_by_one(probs, p):
    kept, mass = torch.zeros(len(probs), dtype=torch.bool), 0.0
    for i in probs.argsort(descending=True).tolist():
        if mass >= p - 1e-7:
            break
        kept[i] = True
        mass += probs[i].item()
    return kept


def in_place(probs, p):
    keep = one_by_one(probs, p)
    probs.zero_()  # what it does to its own copy is its own affair
    return keep


RIGHT = {
    "before < p": ranked(lambda values, before, p: before < p),
    "shifted": ranked(lambda values, before, p: ~torch.cat([torch.tensor([False]), (before + values > p)[:-1]])),
    "as in gpt.py": lambda probs, p: gpt.probabilities(probs.log()[None], top_p=p)[0] > 0,
    "one by one": one_by_one,
    "in place": in_place,
}


@pytest.mark.parametrize("name", RIGHT)
def test_exercise_1_takes_what_is_right(check, name):
    """A right top-p, written in another way than ours, was called wrong, or could spoil the poems' own numbers."""
    status, verdict, lines = check(1, RIGHT[name])
    assert (status, verdict) == (0, "right")
    assert lines[0] == "== 练习 1. 温度 1.5：top-k=20 和 top-p=0.9"
    assert [line[:16] for line in lines if "每一步" in line] == ["  top-k=20：每一步留下", "  top-p=0.9：每一步留"]
    assert sum(line.startswith("    ") for line in lines) == 4  # two poems each way


WRONG = {  # name -> (a usual mistake, what the verdict says of it)
    "cumsum <= p": (ranked(lambda values, before, p: before + values <= p), "the one that crosses p stays too"),
    "ascending": (lambda probs, p: probs <= probs.sort()[0][(probs.sort()[0].cumsum(0) < p).sum() - 1],
                  "leaves out a likelier one: sort from high to low"),
    "order of the ids": (lambda probs, p: probs.cumsum(0) - probs < p, "put the answer in probs' order"),
    "answer in sorted order": (lambda probs, p: torch.arange(len(probs)) < one_by_one(probs, p).sum(),
                               "put the answer in probs' order"),
    "k for p": (lambda probs, p: exercises.keep_top_k(probs, 20), "one less would do"),
    "none": (lambda probs, p: torch.zeros(len(probs), dtype=torch.bool), "it keeps 0 of"),
    "all that tie": (ranked(lambda values, before, p: values >= values[before < p].min()), "one less would do"),
    "whatever p": (lambda probs, p: RIGHT["before < p"](probs, 0.9), "for p = 0.3 it keeps"),
    "right for three": (lambda probs, p: one_by_one(probs, p) if len(probs) < 9 else probs > 0, "of 46 characters"),
    "a call forgotten": (lambda probs, p: (probs > p).bool, "are its () missing?"),
    "nothing returned": (lambda probs, p: None, "it returns None, not a bool tensor of shape (3,)"),
    "ids": (lambda probs, p: probs.argsort(), "it returns torch.int64 (3,), not a bool tensor of shape (3,)"),
    "a batch": (lambda probs, p: probs[None] > 0, "it returns torch.bool (1, 3), not a bool tensor of shape (3,)"),
    "an error": (lambda probs, p: probs.no_such_thing, r"my_top_p fails in line 1[0-9]+: AttributeError"),
    "exit": (lambda probs, p: sys.exit(3), "fails in line 1[0-9]+: SystemExit"),
    "one argument": (lambda probs: probs > 0, "fails when it is called: TypeError"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_exercise_1_says_what_is_wrong(check, name):
    """A usual mistake passed for right, ended in a traceback, or was told nothing that helps."""
    solution, said = WRONG[name]
    solution.__name__ = "my_top_p"
    status, verdict, lines = check(1, solution)
    assert status == 1
    assert re.match("wrong: (for p = [0-9.]+|my_top_p fails)", verdict)
    assert said in verdict or re.search(said, verdict)
    assert len(lines) == 2  # the heading and the verdict: no poem of what is wrong


def test_poems_of_exercise_1_are_by_the_learners_own_function(poet):
    """The poems came from the shipped top-p, or the numbers of candidates from other steps or ended poems."""
    only = VOCAB.ids["春"]
    made, counts = exercises.write_keeping(poet, VOCAB, lambda probs, p: torch.arange(len(probs)) == only, 0.9)
    assert (made, counts) == ([("春" * 12, False)] * 2, [1] * 24)
    for keep, value in ((exercises.keep_top_k, 20), (one_by_one, 0.9)):
        made, counts = exercises.write_keeping(poet, VOCAB, keep, value)
        kept = []
        for text, ended in made:
            ids = VOCAB.encode("\n" + text + "\n" * ended)
            for t in range(1, ids.size(1)):
                kept.append(keep((poet(ids[:, :t])[0][0, -1] / 1.5).softmax(dim=-1), value).sum().item())
        assert sorted(kept) == sorted(counts)


# Exercise 2

MARKS = {8: "，。", 16: "，。", 24: "，。", 32: "。"}
RIGHT_MARKS = {
    "a table": MARKS.get,
    "a rule": lambda place: None if place % 8 else "。" if place == 32 else "，。",
    "one mark each": {8: "，", 16: "。", 24: "，", 32: "。"}.get,
}


@pytest.mark.parametrize("name", RIGHT_MARKS)
def test_exercise_2_takes_what_is_right(check, name):
    """Right marks, written in another way than ours, were called wrong, or their poems are not of the form."""
    status, verdict, lines = check(2, RIGHT_MARKS[name])
    assert (status, verdict) == (0, "right")
    free, constrained = (line for line in lines if "合格" in line)
    assert free.startswith("  不加约束：4 首里 ")
    assert constrained == "  加约束：4 首里 100% 合格"
    below = lines[lines.index(constrained) + 1 : -1]
    assert len(below) == 3
    assert all(re.fullmatch("    ([^，。]{7}[，。]){3}[^，。]{7}。", line) for line in below)


WRONG_MARKS = {  # name -> (a usual mistake, the place, what the verdict says)
    "empty for None": (lambda place: MARKS.get(place, ""), 1, "it returns '', not None or a string of ， and 。"),
    "none": ({}.get, 8, "a mark must stand there"),
    "comma at the end": (lambda place: None if place % 8 else "，。", 32, "a poem must end with 。"),
    "from 0": (lambda place: MARKS.get(place + 1), 7, "places are counted from 1, marks are the 8th, 16th, 24th, 32nd"),
    "half-width": (lambda place: None if place % 8 else ".", 8, "not None or a string of ， and 。"),
    "a bool": (lambda place: place % 8 == 0, 1, "it returns False, not None or a string"),
    "a call forgotten": (lambda place: MARKS.get, 1, "not None or a string of ， and 。"),
}


@pytest.mark.parametrize("name", WRONG_MARKS)
def test_exercise_2_says_what_is_wrong(check, name):
    """Wrong marks passed for right, or the verdict names no place, or stands below poems of which 100 % are right."""
    solution, place, said = WRONG_MARKS[name]
    status, verdict, lines = check(2, solution)
    assert status == 1
    assert verdict.startswith(f"wrong: for place {place} it returns ")
    assert said in verdict
    assert len(lines) == 2


def test_exercise_2_counts_as_the_rule_says():
    """A poem with a mark too many, too few or at another place was counted as right, or a right one was not."""
    line = "春眠不觉学无止"
    assert exercises.is_quatrain(f"{line}，{line}。{line}，{line}。")
    assert exercises.is_quatrain(f"{line}。{line}，{line}。{line}。")
    for end in ("", f"，{line}", f"，{line}，", f"，{line}。春", f"，春，{line[2:]}。"):
        assert not exercises.is_quatrain(f"{line}，{line}。{line}{end}")


# Exercise 3


@pytest.mark.parametrize(("block_size", "right"), [(128, False), (499, False), (500, True), (512, True)])
def test_exercise_3_asks_for_a_window_that_holds_the_text(poet, capsys, monkeypatch, block_size, right):
    """A block_size in gpt.py that does not hold 500 characters was called right, or one that does wrong."""
    monkeypatch.setattr(GPTConfig, "block_size", block_size)
    monkeypatch.setattr(exercises, "first_difference", lambda model, start, n: None)
    monkeypatch.setattr(exercises, "time_both", lambda model, start, n, runs: (n * n / 1e4, n / 1000))
    assert exercises.check_exercises([3], poet, VOCAB) == (not right)
    heading, *lines, verdict = printed(capsys)
    assert heading == f"== 练习 3. block_size={block_size}，随机权重：写得越长，缓存省得越多"
    if right:
        assert verdict == "  exercise 3: right"
        assert lines[0] == "  写  100 个字，缓存 25 KB，快了 10.0 倍"  # of 2 layers and 16 dimensions
        assert lines[3] == "  写  500 个字，缓存 125 KB，快了 50.0 倍"
        assert [line.count("█") for line in lines[1::3]] == [round(40 / 25), 40]
        assert lines[1] == "    不用缓存   1000 毫秒 ██"
        assert lines[2].rstrip() == "    用缓存      100 毫秒"
    else:
        assert "wrong: 500 characters do not fit" in verdict
        assert f"write 512 for {block_size} in `block_size: int =`, in gpt.py itself" in verdict


@pytest.mark.slow
def test_exercise_3_compares_its_own_model(poet, capsys, monkeypatch):
    """Exercise 3 called a cache that changes the characters right, or compared within the old window."""
    monkeypatch.setattr(GPTConfig, "block_size", 512)
    monkeypatch.setattr(exercises, "time_both", lambda model, start, n, runs: (2, 1))
    assert exercises.check_exercises([3], poet, VOCAB) == 0
    append = gpt.KVCache.append

    def wrong(self, k, v, start):
        return append(self, k * 1e5, v * 1e5, start) if start > 300 else append(self, k, v, start)

    monkeypatch.setattr(gpt.KVCache, "append", wrong)
    assert exercises.check_exercises([3], poet, VOCAB) == 1
    number = re.search(r"wrong: with and without the cache character (\d+) differs", printed(capsys)[-1])[1]
    assert int(number) > 301


# The command


@pytest.mark.parametrize(
    ("numbers", "solved"), [([1, 2], {1}), ([1, 2], {2}), ([2, 1], {1, 2}), ([1], set()), ([2], set())], ids=str
)
def test_the_status_is_of_all_exercises(poet, tmp_path, capsys, monkeypatch, numbers, solved):
    """The status told of the last exercise alone, or of the first; or an unwritten one had no sentence of its own."""
    if 1 in solved:
        monkeypatch.setattr(exercises, "my_top_p", one_by_one)
    if 2 in solved:
        monkeypatch.setattr(exercises, "my_marks", MARKS.get)
    save_checkpoint(tmp_path / "poet.pt", poet, VOCAB, {})
    before = torch.get_num_threads()
    monkeypatch.setattr(sys, "argv", ["exercises.py", *map(str, numbers), "--checkpoint", str(tmp_path / "poet.pt")])
    assert run(exercises.main) == int(not set(numbers) <= solved)
    out, err = capsys.readouterr()
    names = {1: "my_top_p", 2: "my_marks"}
    verdicts = [line.removeprefix("  exercise ") for line in out.splitlines() if "exercise" in line]
    unwritten = "not tried yet: write {} in tests/exercises.py"
    assert verdicts == [f"{n}: {'right' if n in solved else unwritten.format(names[n])}" for n in numbers]
    assert err == f"model: {tmp_path.name}/poet.pt\n"
    assert torch.get_num_threads() == before
