"""Train the character-level GPT on the Tang poems.

    python train.py                          # makes checkpoints/gpt.pt as checkpoints/pretrained.pt was made
    python train.py --steps 500              # every name of PARAMETERS is a flag
    python train.py --resume                 # goes on where a run was interrupted

A step learns from poems, each a text of its own between two line breaks, as generation begins and as validation
measures, and from a few texts that begin anywhere. Whatever chance decides at a step (which texts, dropout)
follows from the seed and the number of the step alone. So evaluating more or less often changes nothing, and on a
CPU with the same number of threads a resumed run ends with the same weights, bit for bit.
"""

import argparse
import contextlib
import copy
import math
import random
import sys
import time
import zlib
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from checkpoints import store
from data.poems import CORPUS, read_poems, split
from data.prepare import prepare
from data.script import UserError, caught_signals, check_writable, notice, parse, progress, quoted, run, say, write_file
from gpt import GPTConfig, Vocabulary

# name: (value, least, what it is). Each is also a flag: --batch-size 16. The sizes stand in gpt.py.
PARAMETERS = {
    "steps": (4000, 0, "steps of the optimizers; the poems nine times"),
    "batch_size": (72, 1, "poems a step"),
    "short_windows": (20, 0, "texts of 8 characters a step that begin anywhere in a poem, as 春风 may"),
    "long_windows": (3, 0, "texts of block_size characters a step that begin anywhere and run on through other poems"),
    "block_size": (GPTConfig.block_size, 1, "the longest text the model sees at once, in characters"),
    "n_layer": (GPTConfig.n_layer, 1, "layers"),
    "n_head": (GPTConfig.n_head, 1, "attention heads a layer"),
    "n_kv_head": (GPTConfig.n_kv_head or 0, 0, "heads of keys and values a layer, shared among the n_head; 0: n_head"),
    "n_embd": (GPTConfig.n_embd, 1, "dimensions of a character"),
    "dropout": (GPTConfig.dropout, 0.0, "share of the embedding, and of what each layer adds, left out in training"),
    "muon_lr": (0.03, 0.0, "peak learning rate of Muon, for the matrices of the layers"),
    "muon_decay": (0.1, 0.0, "its weight decay"),
    "adam_lr": (0.006, 0.0, "peak learning rate of AdamW, for embeddings and norms"),
    "adam_decay": (0.1, 0.0, "its weight decay, on the embeddings only"),
    "warmup": (100, 0, "steps to the peak learning rate"),
    "average": (200, 1, "steps over which the weights of the model that is kept are averaged; fewer at first"),
    "final_lr": (0.01, 0.0, "learning rate of the last step, as a share of the peak"),
    "eval_interval": (500, 0, "steps between evaluations (the last step always is one); 0: only the last"),
    "seed": (1, 0, "decides the first weights, the batches and the dropout"),
}
MAY_CHANGE = ("steps", "eval_interval")  # on --resume; anything else would be another run
SHORT = 8  # characters to predict in a short window
LOG_SECONDS = 30  # between lines of progress, where the output is a file
SAMPLE_TEMPERATURE, SAMPLE_SEED = 0.8, 7  # of the poem shown at each evaluation


# The recipe: texts, batches, optimizers, learning rate


def texts_of(poems, vocab, block_size):
    """The texts to learn from, a tensor of ids each: every poem between two line breaks.

    A longer one than block_size + 1 becomes several texts; each begins with the character that the one before
    ended with.
    """
    ids = [vocab.encode(f"\n{poem}\n")[0] for poem in poems]
    return [text[i : i + block_size + 1] for text in ids for i in range(0, len(text) - 1, block_size)]


def step_texts(texts, p, step):
    """The texts of a step (from 0): the next batch_size, in an order that each pass has of its own, and windows."""
    number, place = divmod(step, math.ceil(len(texts) / p.batch_size))
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(p.seed * 2**31 + number))
    chance = random.Random(p.seed * 2**31 + step)
    sizes = [min(SHORT, p.block_size)] * p.short_windows + [p.block_size] * p.long_windows
    windows = [window(texts, size + 1, chance) for size in sizes]
    return [texts[i] for i in order[place * p.batch_size :][: p.batch_size]] + windows


def window(texts, size, chance):
    """`size` ids that begin anywhere in a text and run on through others."""
    first = chance.choice(texts)
    ids = first[chance.randrange(len(first) - 1) :]
    while len(ids) < size:
        ids = torch.cat([ids, chance.choice(texts)[1:]])
    return ids[:size]


def batches(texts, rows=64):
    """Yield (x, y), each (up to rows, T), of texts of like length: y is one character later, -100 past the end."""
    texts = sorted((text for text in texts if len(text) > 1), key=len)
    while texts:
        n = sum(len(text) <= 1.1 * len(texts[0]) for text in texts[:rows])
        x, y = (pad_sequence(texts[:n], batch_first=True, padding_value=value) for value in (0, -100))
        yield x[:, :-1], y[:, 1:]
        texts = texts[n:]


def losses_of(model, texts):
    """Yield the loss of each batch of texts, weighted: their sum is the mean over all characters, in nats."""
    device, characters = model.wte.weight.device, sum(len(text) - 1 for text in texts)
    for x, y in batches(texts):
        yield model(x.to(device), y.to(device))[1] * ((y >= 0).sum().item() / characters)


def learn(model, texts):
    """Add the gradients of the mean loss of texts, batch by batch; return it."""
    mean = 0.0
    for loss in losses_of(model, texts):
        loss.backward()
        mean += loss.item()
    return mean


@torch.no_grad()
def validation_loss(model, texts):
    """Mean cross-entropy in nats a character over texts, all but the first one predicted, of a model in eval mode."""
    return sum(loss.item() for loss in losses_of(model, texts))


def sample_poem(model, vocab):
    """A poem from the model in the middle of its training, the same chance each time."""
    start = vocab.encode("\n").to(model.wte.weight.device)
    generator = torch.Generator().manual_seed(SAMPLE_SEED)
    ids = model.generate(start, 100, temperature=SAMPLE_TEMPERATURE, stop=vocab.ids["\n"], generator=generator)
    return vocab.decode(ids[0].tolist()).strip()


class Muon(torch.optim.Optimizer):
    """Momentum whose update of a matrix is made orthogonal (Jordan 2024), in the dtype of the weights.

    torch.optim.Muon does it in bfloat16: on a CPU without instructions for that, most of a step's time.
    """

    def __init__(self, matrices, lr, weight_decay, momentum=0.95):
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                mean = self.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight))
                mean.lerp_(weight.grad, 1 - group["momentum"])
                update = orthogonal(weight.grad.lerp(mean, group["momentum"]))  # Nesterov's momentum
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                n_out, n_in = weight.shape
                weight.add_(update, alpha=-group["lr"] * max(1, n_out / n_in) ** 0.5)


def orthogonal(matrix, steps=5):
    """Nearly the orthogonal matrix next to this one, by Newton-Schulz steps with Jordan's coefficients."""
    x = matrix.T if matrix.size(0) > matrix.size(1) else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = 3.4445 * x + (2.0315 * gram @ gram - 4.7750 * gram) @ x
    return x.T if matrix.size(0) > matrix.size(1) else x


def make_optimizers(model, p):
    """Muon for the matrices inside the layers, AdamW for the embeddings and the norms."""
    matrices = [weight for weight in model.h.parameters() if weight.ndim == 2]
    norms = [weight for weight in model.parameters() if weight.ndim == 1]
    embeddings = {"params": [model.wte.weight, model.wpe.weight], "weight_decay": p.adam_decay}
    others = [embeddings, {"params": norms, "weight_decay": 0.0}]
    return [
        Muon(matrices, lr=p.muon_lr, weight_decay=p.muon_decay),
        torch.optim.AdamW(others, lr=p.adam_lr, betas=(0.9, 0.99), fused=True),
    ]


@torch.no_grad()
def update_average(average, model, steps):
    """Move the weights of average towards those of model: to the mean of so many steps, the last ones most."""
    for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
        mean.lerp_(weight, 1 / steps)


def lr_factor(step, p):
    """The learning rate of a step (from 0) as a share of the peak: a straight climb, then straight down to final_lr."""
    if step < p.warmup:
        return (step + 1) / (p.warmup + 1)
    done = (step - p.warmup) / max(1, p.steps - 1 - p.warmup)
    return 1 - (1 - p.final_lr) * done


# The run


class Training:
    """A training run: what is trained, how far it is, and its files.

    out: the best model so far. Beside it .resume.pt, all that --resume needs, and .log.csv, a row an
    evaluation. Raises UserError, status 2, for poems or parameters that make no run.
    """

    STATE = ("step", "characters", "seconds", "best", "losses", "log")  # what changes, beside model and optimizers
    COLUMNS = ("step", "seconds", "training_loss", "validation_loss", "learning_rate", "characters_per_second")

    def __init__(self, p, poems, out, device="cpu"):
        self.p, self.out, self.device = p, out, device
        learned, held_out = split(poems)
        if not learned or not held_out:
            found = f"{len(learned)} poems to train on, {len(held_out)} (one in 20, by checksum) to validate"
            raise UserError(f"too small a corpus: {found}", 2)
        self.vocab = Vocabulary("".join(sorted({"\n"}.union(*poems))))
        self.texts, self.validation = (texts_of(part, self.vocab, p.block_size) for part in (learned, held_out))
        checksum = zlib.crc32("\n".join(poems).encode("utf-8"))
        self.parameters = vars(p) | {"corpus": f"a text of checksum {checksum:08x}"}  # what a run to resume must share
        torch.manual_seed(p.seed)
        sizes = (len(self.vocab), p.block_size, p.n_layer, p.n_head, p.n_embd, p.n_kv_head or None, p.dropout)
        try:
            self.model = store.build(GPTConfig(*sizes), copies=5).to(device).train()
        except ValueError as error:
            raise UserError(str(error), 2) from None
        self.average = copy.deepcopy(self.model).eval()  # of the last weights: it is measured and kept
        self.optimizers = make_optimizers(self.model, p)
        self.step, self.characters, self.seconds, self.best = 0, 0, 0.0, math.inf
        self.losses, self.log = [], []  # of the steps since the last evaluation; a row an evaluation
        self.resume_path, self.log_path = out.with_suffix(".resume.pt"), out.with_suffix(".log.csv")
        self.printed = time.monotonic()  # when the last line of progress was

    def train(self, stopping=lambda: False):
        """Train to the last step; return True, or False when stopping() ended it before, after a save."""
        with progress(total=self.p.steps, initial=self.step, unit="step") as bar:
            while True:
                if self.evaluation_is_due():
                    with self.going_on():
                        self.save()  # so that a stop in the middle of the evaluation loses nothing
                    self.evaluate()
                if self.step == self.p.steps:
                    return True
                if stopping():
                    self.save()
                    return False
                self.take_step()
                self.show_progress(bar)

    def evaluation_is_due(self):
        done = self.log and self.log[-1][0] == self.step
        if self.step == self.p.steps:
            return not (done and self.out.exists())
        return not done and self.step > 0 < self.p.eval_interval and self.step % self.p.eval_interval == 0

    def take_step(self):
        """One step of the optimizers."""
        p, begun = self.p, time.perf_counter()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = optimizer.defaults["lr"] * lr_factor(self.step, p)  # of its peak
        torch.manual_seed(p.seed * 2**31 + self.step)  # the step alone decides which dropout it gets
        texts = step_texts(self.texts, p, self.step)
        loss = learn(self.model, texts)
        self.check_finite("training", self.step + 1, loss)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        update_average(self.average, self.model, min(1 + self.step / 10, p.average))
        self.losses.append(loss)
        self.characters += sum(len(text) - 1 for text in texts)
        self.seconds += time.perf_counter() - begun

    def evaluate(self):
        """Measure the validation loss, say how the run goes, and write the files."""
        loss = validation_loss(self.average, self.validation)
        self.check_finite("validation", self.step, loss)
        trained = sum(self.losses) / len(self.losses) if self.losses else math.nan  # none at step 0
        better = loss < self.best
        lr, rate = self.optimizers[0].param_groups[0]["lr"], self.characters / max(self.seconds, 1e-9)
        numbers = [f"{trained:.4f}" if self.losses else "", f"{loss:.4f}", lr, round(rate)]
        self.log.append([self.step, round(self.seconds, 1), *numbers])
        losses = f"training loss {trained:.3f}" if self.losses else "nothing was trained"
        losses += f"  validation loss {loss:.4f}{'' if better else ' (not the best)'}"
        elapsed = tqdm.format_interval(self.seconds)
        say(f"step {self.step:,}/{self.p.steps:,}  {losses}  {rate:,.0f} characters/s  {elapsed}")
        say(f"    {sample_poem(self.average, self.vocab)}")
        self.losses = []
        with self.going_on():
            if better or not self.out.exists():
                info = {"step": self.step, "val_loss": loss, "seconds": self.seconds}
                info |= {"parameters": dict(vars(self.p)), "torch": str(torch.__version__)}
                store.save_checkpoint(self.out, self.average, self.vocab, info)
                self.best = loss
            lines = (",".join(map(str, row)) + "\n" for row in [self.COLUMNS, *self.log])
            write_file(self.log_path, "".join(lines).encode("utf-8"))
            self.save()  # last: once it is there, this evaluation is not made again

    @contextlib.contextmanager
    def going_on(self):
        """A disk that is full for a while ends no run, but at the last step: the next evaluation saves again."""
        try:
            yield
        except OSError as error:
            if self.step == self.p.steps:
                raise
            notice(f"{error}; going on, the next evaluation saves again")

    def save(self):
        """Write .resume.pt, all that `resume` needs."""
        parts = {name: getattr(self, name).state_dict() for name in ("model", "average")}
        parts |= {"optimizers": [o.state_dict() for o in self.optimizers]}
        parts |= {"state": {name: getattr(self, name) for name in self.STATE}}
        parts |= {"parameters": self.parameters, "threads": torch.get_num_threads()}
        store.save_state(self.resume_path, parts)

    def resume(self):
        """Take up the run in .resume.pt. Raises UserError, status 2, unless it has this corpus and these parameters."""
        path, p = self.resume_path, self.p
        if not path.exists():
            raise UserError(f"{path} is not there: no run was interrupted; start one without --resume", 2)
        saved = store.load_state(path)
        if "optimizers" not in saved:
            raise store.CheckpointError(f"{path} does not hold a run to resume")
        old, done = argparse.Namespace(**saved["parameters"]), saved["state"]["step"]
        for name, value in self.parameters.items():
            if value != getattr(old, name, None) and name not in MAY_CHANGE:
                began = f"the run in {path} began with {getattr(old, name, None)}"
                raise UserError(f"--{flag(name)} is {value}, but {began}", 2)
        if done > p.steps:
            raise UserError(f"--steps is {p.steps:,}, but the run in {path} has done {done:,}; give it more", 2)
        for name in ("model", "average"):
            getattr(self, name).load_state_dict(saved[name])
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
            way = f"delete {self.resume_path} if it is there, and begin anew with lower learning rates"
            good = f"; {self.out} is the last good model" if self.best < math.inf else ""
            raise UserError(f"step {step:,}: the {which} loss is {loss}; {way}{good}")

    def show_progress(self, bar):
        """Move the bar; where the output is a file, print a line every LOG_SECONDS instead."""
        recent = self.losses[-50:]
        words = f"loss {sum(recent) / len(recent):.3f}  {self.characters / self.seconds:,.0f} characters/s"
        with contextlib.suppress(OSError):  # the terminal is gone
            bar.set_postfix_str(words, refresh=False)
            bar.update()
        if bar.disable and time.monotonic() - self.printed > LOG_SECONDS:
            left = tqdm.format_interval((self.p.steps - self.step) * self.seconds / self.step)
            say(f"step {self.step:,}/{self.p.steps:,}  {words}  {left} left")
            self.printed = time.monotonic()


# The command line


def flag(name):
    return name.replace("_", "-")


def parse_args(argv=None):
    """(parameters, other arguments): the flags are made from PARAMETERS."""
    end = "Ctrl-C saves and says how to go on; a second one leaves at once."
    parser = argparse.ArgumentParser(description="Train the GPT on the Tang poems.", epilog=end, allow_abbrev=False)
    add = parser.add_argument
    for name, (value, _, what) in PARAMETERS.items():
        add(f"--{flag(name)}", type=type(value), default=value, metavar="N", help=f"{what} ({value})")
    add("--resume", action="store_true", help="go on with the interrupted run")
    add("--corpus", type=Path, default=CORPUS, metavar="FILE", help="another text, a poem a line")
    out = store.CHECKPOINTS / "gpt.pt"
    add("--out", type=Path, default=out, metavar="FILE", help="where the model goes (default: checkpoints/gpt.pt)")
    add("--device", default="auto", help="cpu, cuda or mps (default: a GPU if there is one)")
    add("--threads", type=int, default=torch.get_num_threads(), metavar="N", help="of the CPU (%(default)s)")
    args = vars(parse(parser, argv))
    limits = {name: (least, 2**31 if type(least) is int else 1) for name, (_, least, _) in PARAMETERS.items()}
    for name, (least, most) in (limits | {"threads": (1, 1024)}).items():
        if not least <= args[name] <= most:
            parser.error(f"--{flag(name)} is {args[name]}; it must be between {least} and {most}")
    return argparse.Namespace(**{name: args.pop(name) for name in PARAMETERS}), argparse.Namespace(**args)


@contextlib.contextmanager
def claimed(out, corpus):
    """Hold out, its folder made, against any other run as long as this one lives; a refused run leaves nothing behind.

    Raises UserError, status 2, for a place that cannot be written, would harm another file, or is held already.
    """
    if out.suffix != ".pt" or out.name.endswith(".resume.pt"):
        raise UserError(f"--out is {out}; its name must end in .pt, and not in .resume.pt", 2)
    kept = {corpus.resolve(), store.CHECKPOINTS / "pretrained.pt"}
    files = [out, out.with_suffix(".resume.pt"), out.with_suffix(".log.csv")]
    if kept & {path.resolve() for path in files}:
        raise UserError(f"--out {out} would write over the shipped model or the corpus; choose another name", 2)
    made = [folder for folder in out.resolve().parents if not folder.exists()]
    lock = FileLock(out.resolve().with_name(f".{out.name}.lock"))
    try:
        try:
            lock.acquire(timeout=0)  # it makes the folder too
        except OSError as error:
            reason = "another run is training it" if isinstance(error, Timeout) else error.strerror or error
            raise UserError(f"--out {out}: {reason}; choose another name", 2) from None
        for path in files:
            check_writable(path)
        yield
    finally:
        with contextlib.suppress(OSError):  # a folder that is not empty stays
            if lock.is_locked:
                lock.release()
                Path(lock.lock_file).unlink(missing_ok=True)
            for folder in made:
                folder.rmdir()


def check_not_interrupted(path):
    """Raise UserError when the file at path holds a run that was interrupted: a new one would write over it."""
    with contextlib.suppress(FileNotFoundError, store.CheckpointError, KeyError, TypeError):  # no run to lose
        saved = store.load_state(path)
        done, steps = saved["state"]["step"], saved["parameters"]["steps"]
        if 0 < done < steps:
            way = f"go on with --resume, or delete {path} to begin anew"
            raise UserError(f"{path} holds a run interrupted after step {done:,} of {steps:,}; {way}", 2)


def load_corpus(path):
    """The poems of a corpus file; the Tang poems are prepared if need be. What is odd about them is said."""
    if path.resolve() == CORPUS.resolve():
        prepare()
    try:
        poems, remarks = read_poems(path)
    except ValueError as error:
        raise UserError(f"--corpus {error}", 2) from None
    for remark in remarks:
        notice(remark)
    if not all(any(mark in poem for poem in poems) for mark in "，。"):
        notice("the corpus has no ， or no 。: generate.py will write no forms and no acrostics with it")
    return poems


def main():
    p, args = parse_args()
    device = store.pick_device(args.device)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32: training bears the rounding, and the GPU gains by it
    if args.corpus.resolve() != CORPUS.resolve() and not args.corpus.is_file():
        raise UserError(f"--corpus {args.corpus}: there is no such file", 2)
    with store.threads(args.threads), torch.random.fork_rng(devices=[]), claimed(args.out, args.corpus):
        if not args.resume:
            check_not_interrupted(args.out.with_suffix(".resume.pt"))
        poems = load_corpus(args.corpus)
        training = Training(p, poems, args.out, device)
        if args.resume:
            training.resume()
        elif args.out.exists():
            notice(f"{args.out} will be replaced at the first evaluation")
        say(f"training on {device} with {args.threads} threads, {len(poems):,} poems")
        with caught_signals() as stopping:
            finished = training.train(stopping)
    if finished:
        show = Path(sys.argv[0]).with_name("generate.py")
        say(f"{args.out} holds the best model; see it: {quoted([str(show), '--checkpoint', str(args.out)])}")
        return 0
    again = [*(word for word in sys.argv if word != "--resume"), "--resume"]
    model = "" if args.out.exists() else f"; there is no {args.out} before the first evaluation"
    notice(f"saved after step {training.step:,}{model}; to go on: {quoted(again)}")
    return 130


if __name__ == "__main__":
    sys.exit(run(main))
