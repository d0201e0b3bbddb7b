"""Train the character-level GPT on the Tang poems.

    python train.py                          # makes checkpoints/gpt.pt as checkpoints/pretrained.pt was made
    python train.py --steps 500              # every name of PARAMETERS is a flag
    python train.py --resume                 # goes on where a run was interrupted

Whatever chance decides at a step (batch, dropout) follows from the seed and the number of the step alone. So
nothing about it has to be saved to resume a run, and evaluating more or less often changes nothing. On a CPU
with the same number of threads a resumed run ends with the same weights, bit for bit.
"""

import argparse
import contextlib
import math
import os
import shlex
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import torch
from tqdm import tqdm

from checkpoints.store import CheckpointError, load_state, pick_device, save_checkpoint, save_state
from data.poems import CORPUS, read_poems, split
from data.prepare import CorpusError, prepare
from data.script import UserError, run, say, write_file
from gpt import GPT, GPTConfig, Vocabulary

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
LOG_SECONDS = 30  # between lines of progress, where the output is a file
SAMPLE_TEMPERATURE, SAMPLE_SEED = 0.8, 7  # of the poem shown at each evaluation


# ---------------------------------------------------------------------------------------------------
# The recipe: text, batches, optimizers, learning rate


def read_pass(poems, vocab, p, number):
    """The training text of a pass: ids (N,), a line break before, between and after the poems; and its starts (S,).

    Each pass has an order of its own, so that nothing can be learned by heart across two poems. A start is
    the place of a line break that a whole window and its last target follow.
    """
    order = torch.randperm(len(poems), generator=torch.Generator().manual_seed(p.seed * 2**31 + number))
    stream = vocab.encode("\n".join(["", *(poems[i] for i in order), ""]))[0]
    return stream, torch.nonzero(stream[: len(stream) - p.block_size] == vocab.ids["\n"])[:, 0]


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


def sample_poem(model, vocab):
    """A poem from the model in the middle of its training, the same chance each time."""
    model.eval()
    start = vocab.encode("\n").to(model.wte.weight.device)
    generator = torch.Generator().manual_seed(SAMPLE_SEED)
    ids = model.generate(start, 100, temperature=SAMPLE_TEMPERATURE, stop=vocab.ids["\n"], generator=generator)
    model.train()
    return vocab.decode(ids[0].tolist()).strip()


def make_optimizers(model, p):
    """Muon for the matrices inside the layers (Jordan 2024), AdamW for the embeddings and the norms."""
    matrices = [weight for weight in model.h.parameters() if weight.ndim == 2]
    norms = [weight for weight in model.parameters() if weight.ndim == 1]
    embeddings = {"params": [model.wte.weight, model.wpe.weight], "weight_decay": p.adam_decay}
    others = [embeddings, {"params": norms, "weight_decay": 0.0}]
    return [
        torch.optim.Muon(matrices, lr=p.muon_lr, weight_decay=p.muon_decay, momentum=0.95),
        torch.optim.AdamW(others, lr=p.adam_lr, betas=(0.9, 0.99), fused=True),
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

    STATE = ("step", "seconds", "best", "losses", "log")  # what changes, beside the model and the optimizers
    COLUMNS = ("step", "seconds", "training_loss", "validation_loss", "learning_rate", "characters_per_second")

    def __init__(self, p, poems, out, device="cpu"):
        self.p, self.out, self.device = p, out, device
        self.poems, held_out = split(poems)
        length = sum(len(poem) + 1 for poem in self.poems) + 1  # with the line breaks
        if length <= p.block_size or not held_out:
            found = f"{length} characters to train on, {len(held_out)} poems (one in 20, by checksum) to validate"
            raise UserError(f"too small a corpus for --block-size {p.block_size}: {found}", 2)
        self.vocab = Vocabulary("".join(sorted({"\n"}.union(*poems))))
        self.validation = validation_batches(held_out, self.vocab)
        self.steps_per_pass = math.ceil(length / (p.batch_size * p.block_size))
        checksum = zlib.crc32("\n".join(poems).encode("utf-8"))
        self.parameters = vars(p) | {"corpus": f"a text of checksum {checksum:08x}"}  # what a run to resume must share
        torch.manual_seed(p.seed)
        sizes = (len(self.vocab), p.block_size, p.n_layer, p.n_head, p.n_embd, p.n_kv_head or None, p.dropout)
        try:
            self.model = GPT(GPTConfig(*sizes)).to(device).train()
        except ValueError as error:
            raise UserError(str(error), 2) from None
        self.optimizers = make_optimizers(self.model, p)
        self.step, self.seconds, self.best = 0, 0.0, math.inf
        self.losses, self.log = [], []  # of the steps since the last evaluation; a row an evaluation
        self.resume_path, self.log_path = out.with_suffix(".resume.pt"), out.with_suffix(".log.csv")
        self.files = {path: signature(path) for path in (out, self.resume_path)}  # as this run left them
        self.printed = time.monotonic()  # when the last line of progress was

    def train(self, stopping=lambda: False):
        """Train to the last step; return True, or False when stopping() ended it before, after a save."""
        p, first = self.p, self.step
        bar = tqdm(total=p.steps, initial=first, unit="step", ascii=True, disable=None, dynamic_ncols=True)
        while self.step < p.steps and not stopping():
            begun, step_in_pass = time.perf_counter(), self.step % self.steps_per_pass
            if step_in_pass == 0 or self.step == first:
                stream, starts = read_pass(self.poems, self.vocab, p, self.step // self.steps_per_pass)
            x, y = training_batch(stream, starts, p, step_in_pass, self.steps_per_pass)
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = optimizer.defaults["lr"] * lr_factor(self.step, p)  # of its peak
            torch.manual_seed(p.seed * 2**31 + self.step)  # the step alone decides which dropout it gets
            loss = self.model(x.to(self.device), y.to(self.device))[1]
            self.check_finite("training", self.step + 1, loss.item())
            loss.backward()
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            self.step += 1
            self.losses.append(loss.item())
            self.seconds += time.perf_counter() - begun
            self.show_progress(bar)
            if p.eval_interval and self.step % p.eval_interval == 0:
                self.evaluate()
        finished = self.step == p.steps
        if finished and not (self.log and self.log[-1][0] == self.step and self.out.exists()):
            self.evaluate()
        elif not finished and self.step > first:
            self.save()
        return finished

    def evaluate(self):
        """Measure the validation loss, say how the run goes, and write the files.

        Raises OSError if the last evaluation cannot be saved; before that, the next one saves again.
        """
        loss = validation_loss(self.model, self.validation)
        self.check_finite("validation", self.step, loss)
        trained = sum(self.losses) / len(self.losses) if self.losses else math.nan
        better = loss < self.best
        lr, rate = self.optimizers[0].param_groups[0]["lr"], self.characters_per_second()
        elapsed = tqdm.format_interval(self.seconds)
        self.log.append([self.step, round(self.seconds, 1), round(trained, 4), round(loss, 4), lr, round(rate)])
        losses = f"training loss {trained:.3f}  " if self.losses else ""  # none before the first step
        losses += f"validation loss {loss:.4f}{'' if better else ' (not the best)'}"
        say(f"step {self.step:,}/{self.p.steps:,}  {losses}  {rate:,.0f} characters/s  {elapsed}")
        say(f"    {sample_poem(self.model, self.vocab)}")
        self.losses = []
        try:
            if better or not self.out.exists():
                info = {"step": self.step, "val_loss": loss, "train_loss": trained, "seconds": self.seconds}
                info |= {"parameters": dict(vars(self.p)), "torch": str(torch.__version__)}
                self.write(self.out, save_checkpoint, self.model, self.vocab, info)
                self.best = loss
            self.save()  # before the log, because it finds out whether another run has been here
            lines = (",".join(map(str, row)) + "\n" for row in [self.COLUMNS, *self.log])
            write_file(self.log_path, "".join(lines).encode("utf-8"))
        except OSError as error:
            if self.step == self.p.steps:
                raise
            say(f"{error}; going on, the next evaluation saves again", "stderr")

    def save(self):
        """Write .resume.pt, all that `resume` needs."""
        parts = {"model": self.model.state_dict(), "optimizers": [o.state_dict() for o in self.optimizers]}
        parts |= {"state": {name: getattr(self, name) for name in self.STATE}}
        parts |= {"parameters": self.parameters, "threads": torch.get_num_threads()}
        self.write(self.resume_path, save_state, parts)

    def write(self, path, function, *arguments):
        """Call function(path, *arguments), unless another run has written to path: two would mix."""
        if signature(path) not in (None, self.files[path]):
            raise UserError(f"another run has written {path}; this one ends at step {self.step:,}: use another --out")
        function(path, *arguments)
        self.files[path] = signature(path)

    def resume(self):
        """Take up the run in .resume.pt. Raises UserError, status 2, unless it has this corpus and these parameters."""
        path, p = self.resume_path, self.p
        if not path.exists():
            raise UserError(f"{path} is not there: no run was interrupted; start one without --resume", 2)
        saved = load_state(path)
        missing = {"model", "optimizers", "state", "parameters", "threads"} - set(saved)
        if missing:
            raise CheckpointError(f"{path} does not hold a run to resume: no {', '.join(sorted(missing))}")
        old, done = argparse.Namespace(**saved["parameters"]), saved["state"]["step"]
        for name, value in self.parameters.items():
            if value != getattr(old, name, None) and name not in MAY_CHANGE:
                began = f"the run in {path} began with {getattr(old, name, None)}"
                raise UserError(f"--{flag(name)} is {value}, but {began}", 2)
        if done > p.steps:
            raise UserError(f"--steps is {p.steps:,}, but the run in {path} has done {done:,}; give it more", 2)
        self.model.load_state_dict(saved["model"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        vars(self).update(saved["state"])
        say(f"resuming after step {done:,} of {p.steps:,}")
        if saved["threads"] != torch.get_num_threads():
            say(f"the run had --threads {saved['threads']}: with another number the last bits of the weights differ")
        if done and old.steps != p.steps:
            rates = f"{lr_factor(done - 1, old):.0%} to {lr_factor(done, p):.0%} of its peak"
            say(f"--steps was {old.steps:,}, now it is {p.steps:,}: the learning rate goes from {rates}")

    def check_finite(self, which, step, loss):
        """Raise UserError for a loss of NaN or infinity."""
        if not math.isfinite(loss):
            way = "lower the learning rates"
            if self.resume_path.exists():
                way += f", and delete {self.resume_path} or name another --out"
            if self.best < math.inf:
                way += f"; {self.out} is the last good model"
            raise UserError(f"step {step:,}: the {which} loss is {loss}; {way}")

    def characters_per_second(self):
        return self.step * self.p.batch_size * self.p.block_size / max(self.seconds, 1e-9)

    def show_progress(self, bar):
        """Move the bar; where the output is a file, print a line every LOG_SECONDS instead."""
        recent = self.losses[-50:]
        progress = f"loss {sum(recent) / len(recent):.3f}  {self.characters_per_second():,.0f} characters/s"
        with contextlib.suppress(OSError):  # the terminal is gone
            bar.set_postfix_str(progress, refresh=False)
            bar.update()
        if bar.disable and time.monotonic() - self.printed > LOG_SECONDS:
            left = tqdm.format_interval((self.p.steps - self.step) * self.seconds / self.step)
            say(f"step {self.step:,}/{self.p.steps:,}  {progress}  {left} left")
            self.printed = time.monotonic()


def signature(path):
    """What tells one state of a file from another; None if it is not there."""
    with contextlib.suppress(FileNotFoundError):
        stat = path.stat()
        return stat.st_mtime_ns, stat.st_size, stat.st_ino


# ---------------------------------------------------------------------------------------------------
# The command line


def flag(name):
    return name.replace("_", "-")


def parse_args(argv=None):
    """(parameters, other arguments): the flags are made from PARAMETERS."""
    end = "Ctrl-C saves and says how to go on; a second one leaves at once."
    parser = argparse.ArgumentParser(
        description="Train the character-level GPT on the Tang poems.", epilog=end, allow_abbrev=False
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
    limits = {name: (least, 2**31 if type(least) is int else 1) for name, (_, least, _) in PARAMETERS.items()}
    for name, (least, most) in (limits | {"threads": (1, 1024)}).items():
        if not least <= args[name] <= most:
            parser.error(f"--{flag(name)} is {args[name]}; it must be between {least} and {most}")
    return argparse.Namespace(**{name: args.pop(name) for name in PARAMETERS}), argparse.Namespace(**args)


def check_files(out, corpus):
    """Raise UserError, status 2, unless the run can write all its files, and over no other run's and no input."""
    if out.suffix != ".pt" or out.name.endswith(".resume.pt"):
        raise UserError(f"--out is {out}; its name must end in .pt, and not in .resume.pt", 2)
    if out.resolve() == Path(__file__).resolve().parent / "checkpoints" / "pretrained.pt":
        raise UserError(f"--out is {out}, the shipped model; choose another name", 2)
    for path in (out, out.with_suffix(".resume.pt"), out.with_suffix(".log.csv")):
        trial = path.with_name(f".{path.name}.try")  # as long as the temporary name in write_file
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            trial.touch()
            trial.unlink()
            fault = "it is a folder" if path.is_dir() else None
            if path.resolve() == corpus.resolve():
                fault = "it is the corpus"
        except OSError as error:
            fault = error.strerror
        if fault:
            raise UserError(f"--out {out}: cannot write {path}: {fault}; choose another name", 2)


def check_not_interrupted(path):
    """Raise UserError when the file at path holds a run that was interrupted: a new one would write over it."""
    with contextlib.suppress(FileNotFoundError, CheckpointError, KeyError, TypeError):  # no run to lose
        saved = load_state(path)
        done, steps = saved["state"]["step"], saved["parameters"]["steps"]
        if done < steps:
            way = f"go on with --resume, or delete {path} to begin anew"
            raise UserError(f"{path} holds a run interrupted after step {done:,} of {steps:,}; {way}", 2)


def load_corpus(path):
    """The poems of a corpus file; the Tang poems are prepared if need be. What is odd about them is said."""
    try:
        if path == CORPUS:
            prepare()
        if not path.is_file():
            raise UserError(f"--corpus {path}: there is no such file", 2)
        poems, remarks = read_poems(path)
    except CorpusError as error:
        raise UserError(str(error)) from None
    except OSError as error:
        raise UserError(f"--corpus {path}: {error.strerror}", 2) from None
    except ValueError as error:
        raise UserError(f"--corpus {error}", 2) from None
    for remark in remarks:
        say(remark, "stderr")
    if not all(any(mark in poem for poem in poems) for mark in "，。"):
        say("the corpus has no ， or no 。: generate.py will write no forms and no acrostics with it", "stderr")
    return poems


def catch_signals():
    """Return a function that tells whether Ctrl-C, SIGTERM or SIGHUP has come; a second one ends the run at once."""
    caught = []

    def note(number, frame):
        if caught:
            raise KeyboardInterrupt
        caught.append(number)
        with contextlib.suppress(OSError, ValueError):  # nobody reads it, such as a tee that the same Ctrl-C ended
            os.write(sys.stderr.fileno(), b"\nfinishing this step, then saving; press Ctrl-C again to leave at once\n")

    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number and signal.getsignal(number) != signal.SIG_IGN:  # nohup has it ignored
            signal.signal(number, note)
    return lambda: bool(caught)


def shell_line(words, windows=os.name == "nt"):
    """The line that calls Python with these words, quoted for the system's shell."""
    return (subprocess.list2cmdline if windows else shlex.join)(["python", *words])


def main():
    p, args = parse_args()
    torch.set_num_threads(args.threads)
    device = pick_device(args.device)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32: training bears the rounding, and the GPU gains by it
    check_files(args.out, args.corpus)
    if not args.resume:
        check_not_interrupted(args.out.with_suffix(".resume.pt"))
    poems = load_corpus(args.corpus)
    training = Run(p, poems, args.out, device)
    if args.resume:
        training.resume()
    elif args.out.exists():
        say(f"{args.out} will be replaced at the first evaluation", "stderr")
    say(f"training on {device} with {args.threads} threads, {len(poems):,} poems")
    if training.train(stopping=catch_signals()):
        if signature(args.out) is None or signature(args.out) != training.files[args.out]:
            raise UserError(f"{args.out} was deleted or changed by another program meanwhile")
        script = Path(sys.argv[0]).with_name("generate.py")
        say(f"{args.out} holds the best model; see it: {shell_line([str(script), '--checkpoint', str(args.out)])}")
        return 0
    again = [*(word for word in sys.argv if word != "--resume"), "--resume"]
    say(f"saved; to go on: {shell_line(again)}" if training.step else "ended before step 1: nothing to save", "stderr")
    return 130


if __name__ == "__main__":
    sys.exit(run(main))
