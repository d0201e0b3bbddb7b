"""Train the character-level GPT on the Tang poems.

    python train.py                          # makes checkpoints/gpt.pt as checkpoints/pretrained.pt was made
    python train.py --steps 500              # every name of PARAMETERS is a flag
    python train.py --resume                 # goes on where a run was interrupted

Whatever chance decides at a step (batch, dropout) follows from the seed and the number of the step alone. So
nothing about it has to be saved to resume a run, and evaluating more or less often changes nothing. On a CPU
with the same number of threads a resumed run ends with the same weights, bit for bit.
"""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while torch loads; main takes it back

import argparse
import contextlib
import csv
import io
import math
import os
import shlex
import subprocess
import sys
import time
import zlib
from pathlib import Path

import torch
from tqdm import tqdm

from data.poems import CORPUS, read_poems, split
from data.prepare import CorpusError, prepare
from gpt import (
    GPT,
    CheckpointError,
    GPTConfig,
    UserError,
    Vocabulary,
    load_state,
    pick_device,
    run,
    save_checkpoint,
    save_state,
    write_file,
)

# name: (value, least, what it is). Each is also a flag: --batch-size 16. The sizes stand in gpt.py.
PARAMETERS = {
    "steps": (3700, 0, "steps of the optimizers; the text ten times"),
    "batch_size": (32, 1, "windows of block_size characters a step"),
    "block_size": (GPTConfig.block_size, 1, "the longest text the model sees at once, in characters"),
    "n_layer": (GPTConfig.n_layer, 1, "layers"),
    "n_head": (GPTConfig.n_head, 1, "attention heads a layer"),
    "n_kv_head": (GPTConfig.n_kv_head or 0, 0, "heads of keys and values a layer, shared among the n_head; 0: n_head"),
    "n_embd": (GPTConfig.n_embd, 1, "dimensions of a character"),
    "dropout": (GPTConfig.dropout, 0.0, "share of the embedding, and of what each layer adds, left out in training"),
    "poem_share": (0.5, 0.0, "share of the windows that begin with a poem; the others begin anywhere"),
    "muon_lr": (0.03, 0.0, "peak learning rate of Muon, for the matrices of the layers"),
    "muon_decay": (0.1, 0.0, "its weight decay"),
    "adam_lr": (0.006, 0.0, "peak learning rate of AdamW, for embeddings and norms"),
    "adam_decay": (0.1, 0.0, "its weight decay, on the embeddings only"),
    "warmup": (100, 0, "steps to the peak learning rate"),
    "final_lr": (0.01, 0.0, "learning rate of the last step, as a share of the peak"),
    "eval_interval": (500, 0, "steps between evaluations (the last step always is one); 0: only the last"),
    "seed": (1, 0, "decides the first weights, the batches and the dropout"),
}
MAY_CHANGE = ("steps", "eval_interval")  # on --resume; anything else would be another run
LOG_SECONDS = 30  # between progress lines, where the output is a file
SAMPLE_TEMPERATURE, SAMPLE_SEED = 0.8, 7  # of the poem shown at each evaluation


# ---------------------------------------------------------------------------------------------------
# Text


def shuffled(poems, vocab, seed, number):
    """The training text of one pass: ids (N,), a line break before, between and after the poems.

    Each pass has an order of its own, so that nothing can be learned by heart across two poems.
    """
    order = torch.randperm(len(poems), generator=torch.Generator().manual_seed(seed * 2**31 + number))
    return vocab.encode("\n".join(["", *(poems[i] for i in order), ""]))[0]


def poem_starts(stream, vocab, block_size):
    """The places (S,) in stream (N,) of the line breaks that a whole window and its last target follow."""
    return torch.nonzero(stream[: len(stream) - block_size] == vocab.ids["\n"])[:, 0]


def training_batch(stream, starts, p, step_in_pass, steps_per_pass):
    """(x, y) of one step, each (batch_size, block_size), y one character later.

    Row b walks through its own stretch of the stream (N,), a window a step. The rows of the first
    poem_share move on to the next of the starts (S,), because generation begins there too: with a lone
    line break. The others begin anywhere, to learn from a text without its beginning, such as 春风.
    """
    begin = (step_in_pass + steps_per_pass * torch.arange(p.batch_size)) * p.block_size % (len(stream) - p.block_size)
    whole = round(p.batch_size * p.poem_share)
    begin[:whole] = starts[torch.searchsorted(starts, begin[:whole]) % len(starts)]  # after the last start, the first
    windows = stream[begin[:, None] + torch.arange(p.block_size + 1)]  # (batch_size, block_size + 1)
    return windows[:, :-1], windows[:, 1:]


def validation_batches(poems, vocab, rows=64):
    """Poems, each alone between two line breaks, as id tensors (up to rows, T), each of poems of one length."""
    lengths = {}
    for poem in poems:
        lengths.setdefault(len(poem), []).append(vocab.encode(f"\n{poem}\n"))
    return [batch for same in lengths.values() for batch in torch.cat(same).split(rows)]


@torch.no_grad()
def validation_loss(model, batches):
    """Mean cross-entropy in nats a character over `validation_batches`, every character after the first predicted.

    Of a poem longer than block_size, each block_size characters are a text of their own.
    """
    device, was_training, total, count = model.wte.weight.device, model.training, 0.0, 0
    model.eval()
    for batch in batches:
        pieces = [part.split(model.config.block_size, dim=1) for part in (batch[:, :-1], batch[:, 1:])]
        for x, y in zip(*pieces, strict=True):
            total += model(x.to(device), y.to(device))[1].item() * y.numel()
            count += y.numel()
    model.train(was_training)
    return total / count


# ---------------------------------------------------------------------------------------------------
# Optimizers


def make_optimizers(model, p):
    """Muon for the matrices inside the layers (Jordan 2024), AdamW for the embeddings and the norms."""
    matrices = [weight for weight in model.h.parameters() if weight.ndim == 2]
    norms = [weight for weight in model.parameters() if weight.ndim == 1]
    groups = [
        {"params": [model.wte.weight, model.wpe.weight], "weight_decay": p.adam_decay},
        {"params": norms, "weight_decay": 0.0},
    ]
    return [
        torch.optim.Muon(matrices, lr=p.muon_lr, weight_decay=p.muon_decay, momentum=0.95),
        torch.optim.AdamW(groups, lr=p.adam_lr, betas=(0.9, 0.99), fused=True),
    ]


def lr_factor(step, p):
    """The learning rate of a step (from 0) as a share of the peak: a straight climb, then straight down to final_lr."""
    if step < p.warmup:
        return (step + 1) / (p.warmup + 1)
    progress = (step - p.warmup) / max(1, p.steps - 1 - p.warmup)
    return 1 - (1 - p.final_lr) * progress


# ---------------------------------------------------------------------------------------------------
# The run


class Run:
    """A training run: what is trained, how far it is, and its files.

    out: the best model so far. Beside it .resume.pt, all that --resume needs, and .log.csv, a row an
    evaluation. Raises UserError, status 2, for poems or parameters that make no run.
    """

    def __init__(self, p, poems, out, device="cpu"):
        self.p, self.out, self.device = p, Path(out), device
        self.resume_path, self.log_path = self.out.with_suffix(".resume.pt"), self.out.with_suffix(".log.csv")
        self.poems, held_out = split(poems)
        text = "\n".join(["", *self.poems, ""])
        self.vocab = Vocabulary("".join(sorted(set(text).union(*held_out))))
        if len(text) <= p.block_size:
            short = f"a training text of {len(text)} characters is too short for a block_size of {p.block_size}"
            raise UserError(f"{short}; give it more poems, or lower --block-size", 2)
        if not held_out:
            rule = "one in 20 is, by its checksum"
            raise UserError(f"none of the {len(poems)} poems is a validation poem ({rule}); add some", 2)
        self.validation = validation_batches(held_out, self.vocab)
        self.steps_per_pass = math.ceil(len(text) / (p.batch_size * p.block_size))
        self.corpus = zlib.crc32(text.encode("utf-8"))
        torch.manual_seed(p.seed)
        sizes = (len(self.vocab), p.block_size, p.n_layer, p.n_head, p.n_embd, p.n_kv_head or None, p.dropout)
        try:
            self.model = GPT(GPTConfig(*sizes)).to(device).train()
        except ValueError as error:
            raise UserError(str(error), 2) from None
        self.optimizers = make_optimizers(self.model, p)
        self.step, self.seconds, self.best = 0, 0.0, math.inf
        self.printed = time.monotonic()  # when the last line of progress was
        self.losses, self.log = [], []  # of the steps since the last evaluation; a row an evaluation
        self.files = {path: signature(path) for path in (self.out, self.resume_path)}  # as this run left them

    def train(self, stopping=lambda: False):
        """Train to the last step; return True, or False when stopping() ended it before, after saving."""
        p, begun = self.p, self.step
        bar = tqdm(total=p.steps, initial=begun, unit="step", ascii=True, disable=None, dynamic_ncols=True)
        if begun == p.steps and not (self.log and self.out.exists()):
            self.evaluate()
        while self.step < p.steps:
            if stopping():
                if self.step > begun:
                    self.save()
                return False
            step_in_pass, before = self.step % self.steps_per_pass, time.perf_counter()
            if step_in_pass == 0 or self.step == begun:
                stream = shuffled(self.poems, self.vocab, p.seed, self.step // self.steps_per_pass)  # (N,)
                starts = poem_starts(stream, self.vocab, p.block_size)
            x, y = training_batch(stream, starts, p, step_in_pass, self.steps_per_pass)
            self.losses.append(self.train_step(x, y))
            self.seconds += time.perf_counter() - before
            self.show_progress(bar)
            if self.step == p.steps or (p.eval_interval and self.step % p.eval_interval == 0):
                self.evaluate()
        return True

    def train_step(self, x, y):
        """One step of the optimizers on a batch x, y, (batch_size, block_size) each; return its loss."""
        torch.manual_seed(self.p.seed * 2**31 + self.step)  # the step alone decides which dropout it gets
        for optimizer, peak in zip(self.optimizers, (self.p.muon_lr, self.p.adam_lr), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * lr_factor(self.step, self.p)
        loss = self.model(x.to(self.device), y.to(self.device))[1]
        self.check_finite("training", self.step + 1, loss.item())
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return loss.item()

    def evaluate(self):
        """Measure the validation loss, write the files, and say how the run goes.

        Raises OSError if the last evaluation cannot be saved; before that, the next one saves again.
        """
        loss = validation_loss(self.model, self.validation)
        self.check_finite("validation", self.step, loss)
        trained, better = sum(self.losses) / max(1, len(self.losses)), loss < self.best
        lr = self.p.muon_lr * lr_factor(max(0, self.step - 1), self.p)
        self.log.append([self.step, round(self.seconds, 1), round(trained, 4), round(loss, 4), lr, round(self.rate())])
        self.losses = []
        say(
            f"step {self.step:,}/{self.p.steps:,}  training loss {trained:.3f}  validation loss {loss:.4f}"
            f"{'' if better else ' (not the best)'}  {self.rate():,.0f} characters/s  "
            f"{tqdm.format_interval(self.seconds)}\n    {sample_poem(self.model, self.vocab)}"
        )
        try:
            if better or not self.out.exists():
                info = {"step": self.step, "val_loss": loss, "train_loss": trained, "seconds": self.seconds}
                info |= {"parameters": dict(vars(self.p)), "torch": str(torch.__version__)}
                self.write(self.out, save_checkpoint, self.model, self.vocab, info)
                self.best = loss
            write_log(self.log_path, self.log)
            self.save()
        except OSError as error:
            if self.step == self.p.steps:
                raise
            say(f"{error}; going on, the next evaluation saves again", sys.stderr)

    def save(self):
        """Write .resume.pt, all that `resume` needs."""
        state = {name: getattr(self, name) for name in ("step", "seconds", "best", "losses", "log")}
        parts = {"model": self.model.state_dict(), "optimizers": [o.state_dict() for o in self.optimizers]}
        constants = {"parameters": dict(vars(self.p)), "chars": self.vocab.chars, "corpus": self.corpus}
        state |= {"threads": torch.get_num_threads()}
        self.write(self.resume_path, save_state, parts | constants | {"state": state})

    def write(self, path, function, *arguments):
        """Call function(path, *arguments), unless another run has written to path: two would mix."""
        now = signature(path)
        if now not in (None, self.files[path]):
            raise UserError(f"another run has written {path}; this one ends at step {self.step:,}: use another --out")
        function(path, *arguments)
        self.files[path] = signature(path)

    def resume(self):
        """Take up the run in .resume.pt. Raises UserError, status 2, unless it has this corpus and these parameters."""
        path, p = self.resume_path, self.p
        if not path.exists():
            raise UserError(f"{path} is not there: no run was interrupted; start one without --resume", 2)
        saved = load_state(path)
        missing = {"model", "optimizers", "state", "parameters", "chars", "corpus"} - set(saved)
        if missing:
            raise CheckpointError(f"{path} does not hold a run to resume: no {', '.join(sorted(missing))}")
        state, were = saved["state"], saved["parameters"]
        for name, value in vars(p).items():
            if were.get(name) != value and name not in MAY_CHANGE:
                raise UserError(f"--{flag(name)} is {value}, but the run in {path} began with {were.get(name)}", 2)
        if (saved["chars"], saved["corpus"]) != (self.vocab.chars, self.corpus):
            sizes = f"{len(self.vocab):,} different characters here, {len(saved['chars']):,} there"
            raise UserError(f"the corpus is another text than the run in {path} began with ({sizes})", 2)
        if state["step"] > p.steps:
            raise UserError(
                f"--steps is {p.steps:,}, but the run in {path} has done {state['step']:,}; give it more", 2
            )
        self.model.load_state_dict(saved["model"])
        for optimizer, its_state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(its_state)
        if state.pop("threads") != torch.get_num_threads():
            say("the run had another number of threads: its last bits will not be those of an uninterrupted one")
        vars(self).update(state)
        say(f"resuming after step {self.step:,} of {p.steps:,}")
        if were["steps"] < p.steps and self.step > p.warmup:
            rates = f"{lr_factor(self.step - 1, argparse.Namespace(**were)):.0%} to {lr_factor(self.step, p):.0%}"
            say(f"with more steps the learning rate goes from {rates} of its peak")

    def rate(self):
        """Characters a second, without the evaluations."""
        return self.step * self.p.batch_size * self.p.block_size / max(self.seconds, 1e-9)

    def check_finite(self, which, step, loss):
        """Raise UserError for a loss of NaN or infinity."""
        if not math.isfinite(loss):
            kept = f"; {self.out} is the last good model" if self.best < math.inf else ""
            another = f", and begin with another --out or delete {self.resume_path}"
            way = "lower the learning rates" + another * self.resume_path.exists()
            raise UserError(f"step {step:,}: the {which} loss is {loss}; {way}{kept}")

    def show_progress(self, bar):
        """Move the bar; where the output is a file, print a line every LOG_SECONDS instead."""
        recent = self.losses[-50:]
        progress = f"loss {sum(recent) / len(recent):.3f}  {self.rate():,.0f} characters/s"
        try:
            bar.set_postfix_str(progress, refresh=False)
            bar.update()
        except OSError:  # the terminal is gone
            bar.disable = True
        if bar.disable and time.monotonic() - self.printed > LOG_SECONDS:
            left = tqdm.format_interval((self.p.steps - self.step) * self.seconds / self.step)
            say(f"step {self.step:,}/{self.p.steps:,}  {progress}  {left} left")
            self.printed = time.monotonic()


def signature(path):
    """What tells one state of a file from another; None if it is not there."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def say(text, file=None):
    """Print text, clear of the bar. Nobody may be listening any more: the model matters, not its log."""
    name = "stderr" if file is sys.stderr else "stdout"
    try:
        tqdm.write(text, file=getattr(sys, name))
        getattr(sys, name).flush()
    except (OSError, ValueError):  # ValueError: it is closed
        setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


def write_log(path, rows):
    """Write the evaluations so far as CSV, a row each."""
    file = io.StringIO()
    table = csv.writer(file, lineterminator="\n")
    table.writerow(["step", "seconds", "training_loss", "validation_loss", "learning_rate", "characters_per_second"])
    table.writerows(rows)
    write_file(path, file.getvalue().encode("utf-8"))


def sample_poem(model, vocab):
    """A poem from the model as it is, the same chance each time."""
    model.eval()
    start = vocab.encode("\n").to(model.wte.weight.device)
    generator = torch.Generator().manual_seed(SAMPLE_SEED)
    ids = model.generate(start, 100, temperature=SAMPLE_TEMPERATURE, stop=vocab.ids["\n"], generator=generator)
    model.train()
    return vocab.decode(ids[0].tolist()).strip()


# ---------------------------------------------------------------------------------------------------
# The command line


def flag(name):
    return name.replace("_", "-")


def parse_args(argv=None):
    """(parameters, other arguments): the flags are made from PARAMETERS."""
    parser = argparse.ArgumentParser(
        description="Train the character-level GPT on the Tang poems.",
        epilog="Ctrl-C saves and says how to go on; a second one leaves at once.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    for name, (value, _, what) in PARAMETERS.items():
        add(f"--{flag(name)}", type=type(value), default=value, metavar="N", help=f"{what} ({value})")
    out = Path(__file__).resolve().parent / "checkpoints" / "gpt.pt"
    add("--resume", action="store_true", help="go on with the interrupted run")
    add("--corpus", type=Path, default=CORPUS, metavar="FILE", help="another text, a poem a line")
    add("--out", type=Path, default=out, metavar="FILE", help="where the model goes (default: checkpoints/gpt.pt)")
    add("--device", default="auto", help="cpu, cuda or mps (default: a GPU if there is one)")
    add("--threads", type=int, default=torch.get_num_threads(), metavar="N", help="of the CPU (%(default)s)")
    args = vars(parser.parse_args(argv))
    p = argparse.Namespace(**{name: args.pop(name) for name in PARAMETERS})
    for name, (_, least, _) in PARAMETERS.items():
        if not least <= getattr(p, name) < math.inf:
            parser.error(f"--{flag(name)} is {getattr(p, name)}; it must be at least {least}")
    for name, most in (("dropout", 1), ("poem_share", 1), ("final_lr", 1), ("seed", 2**31)):
        if getattr(p, name) > most:
            parser.error(f"--{flag(name)} is {getattr(p, name)}; it must be at most {most}")
    if not 1 <= args["threads"] <= 1024:
        parser.error(f"--threads is {args['threads']}; it must be from 1 to 1024")
    return p, argparse.Namespace(**args)


def check_files(args):
    """Raise UserError, status 2, unless the run can write its files, all of them, and harms no other one."""
    out, corpus = args.out, args.corpus.resolve()
    if out.suffix != ".pt" or out.suffixes[-2:] == [".resume", ".pt"]:
        raise UserError(f"--out is {out}; its name must end in .pt, and not in .resume.pt", 2)
    if out.resolve() == Path(__file__).resolve().parent / "checkpoints" / "pretrained.pt":
        raise UserError(f"--out is {out}, the shipped model; choose another name", 2)
    for path in (out, out.with_suffix(".resume.pt"), out.with_suffix(".log.csv")):
        if path.resolve() == corpus:
            raise UserError(f"--corpus {args.corpus} would be overwritten: choose another --out", 2)
        if path.is_dir():
            raise UserError(f"--out: {path} is a folder; name a file", 2)
        temporary = path.with_name(f".{path.name}.try")  # as long as the name that gpt.write_file takes
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.touch()
            temporary.unlink()
        except OSError as error:
            raise UserError(f"--out: cannot write {path}: {error.strerror}", 2) from None


def check_not_interrupted(path):
    """Raise UserError when the file at path holds a run that was interrupted: a new one would write over it."""
    try:
        saved = load_state(path)
        done, steps = saved["state"]["step"], saved["parameters"]["steps"]
    except (OSError, CheckpointError, KeyError, TypeError):  # no run to lose
        return
    if 0 < done < steps:
        way = f"go on with --resume, or delete {path} to begin anew"
        raise UserError(f"{path} holds a run interrupted after step {done:,} of {steps:,}; {way}", 2)


def load_corpus(path):
    """The poems of a corpus file; the Tang poems are prepared if need be. What is odd about them is said."""
    try:
        if path == CORPUS:
            prepare()
        poems, repeated = read_poems(path)
    except (FileNotFoundError, IsADirectoryError):
        raise UserError(f"--corpus {path}: there is no such file", 2) from None
    except ValueError as error:
        raise UserError(f"--corpus {error}", 2) from None
    except CorpusError as error:
        raise UserError(str(error)) from None
    if repeated:
        say(f"{repeated:,} poems that were there already are left out", sys.stderr)
    if not all(any(mark in poem for poem in poems) for mark in "，。"):
        say("the corpus has no ， or no 。: generate.py will write no forms and no acrostics with it", sys.stderr)
    return poems


def main():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    p, args = parse_args()
    signals = []

    def interrupted(signum, frame):
        if signals:
            raise KeyboardInterrupt
        signals.append(signum)
        with contextlib.suppress(OSError):  # nobody reads it, such as a tee that the same Ctrl-C ended
            os.write(2, b"\nfinishing this step, then saving; press Ctrl-C again to leave at once\n")

    torch.set_num_threads(args.threads)
    device = pick_device(args.device)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32: training bears the rounding, and the GPU gains by it
    check_files(args)
    if not args.resume:
        check_not_interrupted(args.out.with_suffix(".resume.pt"))
    poems = load_corpus(args.corpus)
    training = Run(p, poems, args.out, device)
    if args.resume:
        training.resume()
    elif args.out.exists():
        say(f"{args.out} will be replaced at the first evaluation", sys.stderr)
    say(f"training on {device} with {args.threads} threads, {len(poems):,} poems")
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) != signal.SIG_IGN:  # nohup ignores one
            signal.signal(getattr(signal, name), interrupted)
    if training.train(stopping=lambda: bool(signals)):
        ours = signature(args.out) == training.files[args.out] is not None
        say(f"{args.out} holds the best model" if ours else f"{args.out} was changed or removed meanwhile")
        return 0
    if training.step == 0:
        say("ended before the first step: there is nothing to save", sys.stderr)
        return 130
    words = ["python", *(word for word in sys.argv if word != "--resume"), "--resume"]
    command = subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words)
    say(f"saved; to go on: {command}", sys.stderr)
    return 130


if __name__ == "__main__":
    sys.exit(run(main))
