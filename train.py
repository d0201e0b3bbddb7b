"""Train the character-level GPT on the Tang poems.

    python train.py                          # makes checkpoints/gpt.pt as checkpoints/pretrained.pt was made
    python train.py --steps 500              # every name of PARAMETERS is a flag
    python train.py --resume                 # goes on where a run was interrupted, bit for bit on a CPU

Whatever chance decides at a step (batch, dropout) follows from the seed and the number of the step alone. So
nothing about it has to be saved to resume a run, and evaluating more or less often changes nothing.
"""

import argparse
import contextlib
import csv
import io
import math
import os
import shlex
import signal
import sys
import time
import zlib
from pathlib import Path

import torch
from tqdm import tqdm

from data.prepare import CORPUS, prepare
from gpt import (
    GPT,
    CheckpointError,
    GPTConfig,
    Stop,
    Vocabulary,
    load_state,
    pick_device,
    run,
    save_checkpoint,
    save_state,
    write_file,
)

# name: (value, least, most, what it is). Each is also a flag: --batch-size 16
# Losses in the comments are validation losses after 800 steps with a fifth of the poems, except where they say more;
# they compare within a comment only, for other values were other ones then.
PARAMETERS = {
    "steps": (3700, 0, 10**9, "steps of the optimizers"),  # what two cores do in half an hour: the text ten times
    "batch_size": (32, 1, 10**6, "windows of block_size characters a step"),  # 16: no gain for the same characters
    "block_size": (128, 1, 10**6, "the longest text the model sees at once, in characters"),
    "n_layer": (4, 1, 1000, "layers"),
    "n_head": (4, 1, 1000, "attention heads a layer"),
    "n_embd": (128, 1, 10**5, "dimensions of a character"),
    # 0: 5.10, 0.1: 4.80, 0.2: 4.87. The whole run with 0.15 on the embedding alone ended at 4.085 instead of 4.080,
    # and rhymed less: 0.87 instead of 0.89 of the line ends of 2,000 poems at temperature 0.8.
    "dropout": (0.05, 0.0, 0.99, "share of the embedding, and of what each layer adds, left out in training"),
    # 1/4: 4.79, 1/2: 4.80, 7/8: 4.84. But with 1/4 the whole run put 。 after 春风 with 22 %, where poems have 14 %.
    "poem_share": (0.5, 0.0, 1.0, "share of the windows that begin with a poem; the others begin anywhere"),
    # 0.02 and 0.003 ended 0.09 higher after 1,000 steps with all poems; 0.04 and 0.01 came to the same after 4,200.
    "muon_lr": (0.03, 0.0, 100.0, "peak learning rate of Muon, for the matrices of the layers"),
    # 0.1: 4.79, 0.2: 4.75, 0.4: 4.76, 0.8: 4.84. But in the whole run, five times as long, 0.15 learned more slowly.
    "muon_decay": (0.1, 0.0, 100.0, "its weight decay"),
    "adam_lr": (0.006, 0.0, 100.0, "peak learning rate of AdamW, for embeddings and norms"),
    "adam_decay": (0.1, 0.0, 100.0, "its weight decay, on the embeddings only"),
    "warmup": (100, 0, 10**9, "steps to the peak learning rate"),
    "final_lr": (0.01, 0.0, 1.0, "learning rate of the last step, as a share of the peak"),
    "eval_interval": (500, 0, 10**9, "steps between evaluations (the last step always is one); 0: only the last"),
    "seed": (1, 0, 2**31, "decides the first weights, the batches and the dropout"),
}
MAY_CHANGE = ("steps", "eval_interval")  # on --resume; anything else would be another run
LOG_SECONDS = 30  # between progress lines, where the output is a file
SAMPLE_TEMPERATURE, SAMPLE_SEED = 0.8, 7  # of the poem shown at each evaluation


# ---------------------------------------------------------------------------------------------------
# Text


def read_poems(path):
    """The poems of a corpus file, one a line; only a newline ends a line, and a BOM or CRLF makes no difference."""
    if path != CORPUS and not path.is_file():
        raise Stop(f"--corpus {path}: there is no such file", 2)
    data = prepare() if path == CORPUS else path.read_bytes()
    try:
        text = data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise Stop(f"{path} is not UTF-8: {error}", 2) from None
    return [poem for poem in text.split("\n") if poem]


def is_validation(poem):
    """A rule on the poem alone, so that no order, seed or filter can leak a validation poem into training."""
    return zlib.crc32(poem.encode("utf-8")) % 20 == 0


def split(poems):
    """(training poems, validation poems), in the order they come in."""
    held_out = [poem for poem in poems if is_validation(poem)]
    return [poem for poem in poems if not is_validation(poem)], held_out


def shuffled(poems, vocab, seed, number):
    """The training text of one pass: ids (N,), a line break before, between and after the poems.

    Each pass has an order of its own, so that nothing can be learned by heart across two poems
    (measured as in PARAMETERS, 4.73; in one order for all passes, 4.75).
    """
    order = torch.randperm(len(poems), generator=torch.Generator().manual_seed(seed * 2**31 + number))
    return vocab.encode("\n".join(["", *(poems[i] for i in order), ""]))[0]


def training_batch(stream, starts, p, number, steps):
    """(x, y) of one step of the `steps` of a pass, each (batch_size, block_size), y one character later.

    Each row reads its own part of the stream (N,), a window a step. In the first poem_share of the rows a window
    moves on to the next of the starts (S,), where a poem begins: it is read as in generation, after a lone line
    break. The others begin anywhere, which teaches what to make of a text without its beginning, such as 春风.
    """
    begin = (number + steps * torch.arange(p.batch_size)) * p.block_size % (len(stream) - p.block_size)
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
    device, total, count = model.wte.weight.device, 0.0, 0
    with model.evaluating():
        for batch in batches:
            pieces = [part.split(model.config.block_size, dim=1) for part in (batch[:, :-1], batch[:, 1:])]
            for x, y in zip(*pieces, strict=True):
                total += model(x.to(device), y.to(device))[1].item() * y.numel()
                count += y.numel()
    return total / count


# ---------------------------------------------------------------------------------------------------
# Optimizers


def make_optimizers(model, p):
    """Muon for the matrices inside the layers (Jordan 2024), AdamW for the embeddings and the norms.

    AdamW's second beta, measured as in PARAMETERS: 0.95 4.84, 0.99 4.79, 0.999 4.80.
    """
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


def set_lr(optimizers, p, factor):
    for optimizer, peak in zip(optimizers, (p.muon_lr, p.adam_lr), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = peak * factor


# ---------------------------------------------------------------------------------------------------
# The run


def train(p, poems, out, device="cpu", resume=False, stopping=lambda: False):
    """Train as the parameters p say; return True when all steps are done, False when stopping() ended it before.

    Writes, at each evaluation, out (the best model so far), its .resume.pt (all that resume needs to go on)
    and log.csv beside it. Raises Stop, CheckpointError or OSError; what was written before then stands.
    """
    poems, held_out = split(poems)
    text = "\n".join(["", *poems, ""])
    vocab = Vocabulary("".join(sorted(set(text).union(*held_out))))
    if len(text) <= p.block_size:
        short = f"a training text of {len(text)} characters is too short for a block_size of {p.block_size}"
        raise Stop(f"{short}; give it more poems, or lower --block-size", 2)
    if not held_out:
        raise Stop(f"none of the {len(poems)} poems is a validation poem (one in 20 is, by its checksum); add some", 2)
    steps_a_pass = math.ceil(len(text) / (p.batch_size * p.block_size))
    validation = validation_batches(held_out, vocab)

    torch.manual_seed(p.seed)
    try:
        model = GPT(GPTConfig(len(vocab), p.block_size, p.n_layer, p.n_head, p.n_embd, p.dropout)).to(device)
    except ValueError as error:
        raise Stop(str(error), 2) from None
    optimizers = make_optimizers(model, p)
    # Everything that changes during a run, beside the model and the optimizers.
    state = {"step": 0, "seconds": 0.0, "best": math.inf, "losses": [], "log": []}
    constants = {"parameters": vars(p), "chars": vocab.chars, "corpus": zlib.crc32(text.encode("utf-8"))}
    resume_path = out.with_suffix(".resume.pt")
    if resume:
        saved = load_resume(resume_path, constants)
        model.load_state_dict(saved["model"])
        for optimizer, its in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(its)
        state = saved["state"]
        print(f"resuming after step {state['step']:,} of {p.steps:,}", flush=True)

    def save_resume():
        parts = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers], "state": state}
        save_state(resume_path, parts | constants)

    def evaluate():
        loss = validation_loss(model, validation)
        if not math.isfinite(loss):
            raise ran_away(state["step"], "validation", loss)
        better = loss < state["best"]
        trained = sum(state["losses"]) / max(1, len(state["losses"]))
        rate = state["step"] * p.batch_size * p.block_size / max(state["seconds"], 1e-9)
        state["log"].append(
            [
                state["step"],
                round(state["seconds"], 1),
                round(trained, 4),
                round(loss, 4),
                p.muon_lr * lr_factor(max(0, state["step"] - 1), p),
                round(rate),
            ]
        )
        state["losses"] = []
        if better:
            state["best"] = loss
            info = {
                "step": state["step"],
                "val_loss": loss,
                "train_loss": trained,
                "seconds": state["seconds"],
                "parameters": dict(vars(p)),
                "torch": str(torch.__version__),
            }
            save_checkpoint(out, model, vocab, info)
        write_log(out.with_name("log.csv"), state["log"])
        save_resume()
        with bar.external_write_mode():
            print(
                f"step {state['step']:,}/{p.steps:,}  training loss {trained:.3f}  validation loss {loss:.4f}"
                f"{'' if better else ' (not the best)'}  {rate:,.0f} characters/s  {clock(state['seconds'])}"
            )
            print(f"    {sample_poem(model, vocab)}", flush=True)

    def ran_away(step, which, loss):
        kept = f"; {out} is the last good model" if state["best"] < math.inf else ""
        return Stop(f"step {step:,}: the {which} loss is {loss}; lower the learning rates{kept}")

    done = state["step"]
    before, printed = time.perf_counter(), time.monotonic()
    with tqdm(total=p.steps, initial=done, unit="step", ascii=True, disable=None, dynamic_ncols=True) as bar:
        if p.steps == 0:
            evaluate()
        for step in range(done, p.steps):
            if stopping():
                save_resume()
                return False
            number = step % steps_a_pass
            if number == 0 or step == done:
                stream = shuffled(poems, vocab, p.seed, step // steps_a_pass)  # (N,)
                starts = torch.nonzero(stream[: len(stream) - p.block_size] == vocab.ids["\n"])[:, 0]
            x, y = training_batch(stream, starts, p, number, steps_a_pass)
            torch.manual_seed(p.seed * 2**31 + step)  # the step alone decides which dropout it gets
            set_lr(optimizers, p, lr_factor(step, p))
            loss = model(x.to(device), y.to(device))[1]
            if not loss.isfinite():
                raise ran_away(step + 1, "training", loss.item())
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            state["step"] = step + 1
            state["losses"].append(loss.item())
            now = time.perf_counter()
            state["seconds"] += now - before
            rate = (step + 1) * p.batch_size * p.block_size / state["seconds"]
            progress = f"loss {sum(state['losses'][-50:]) / len(state['losses'][-50:]):.3f}  {rate:,.0f} characters/s"
            bar.set_postfix_str(progress, refresh=False)
            bar.update()
            if bar.disable and time.monotonic() - printed > LOG_SECONDS:
                left = (p.steps - step - 1) * state["seconds"] / (step + 1)
                print(f"step {step + 1:,}/{p.steps:,}  {progress}  {clock(left)} left", flush=True)
                printed = time.monotonic()
            if step + 1 == p.steps or (p.eval_interval and (step + 1) % p.eval_interval == 0):
                evaluate()
            before = time.perf_counter()
    return True


def load_resume(path, constants):
    """What the run that wrote path needs to go on. Raises Stop when its corpus or parameters are not those here."""
    if not path.exists():
        raise Stop(f"{path} is not there: no run was interrupted; start one without --resume", 2)
    saved = load_state(path)
    missing = {"model", "optimizers", "state", *constants} - set(saved)
    if missing:
        raise CheckpointError(f"{path} does not hold a run to resume: no {', '.join(sorted(missing))}")
    for name, value in constants["parameters"].items():
        was = saved["parameters"].get(name)
        if was != value and name not in MAY_CHANGE:
            raise Stop(f"--{flag(name)} is {value}, but the run in {path} was started with {was}", 2)
    done, steps = saved["state"]["step"], constants["parameters"]["steps"]
    if done > steps:
        raise Stop(f"--steps is {steps:,}, but the run in {path} has done {done:,}; give it more", 2)
    if saved["chars"] != constants["chars"]:
        raise Stop(
            f"the corpus has {len(constants['chars']):,} different characters, the run in {path} began with "
            f"{len(saved['chars']):,} or others: it cannot go on with another corpus",
            2,
        )
    if saved["corpus"] != constants["corpus"]:
        raise Stop(f"the corpus is another text than the run in {path} began with: it cannot go on with it", 2)
    return saved


def refuse_to_lose(path):
    """Raise Stop when the file at path holds a run that was interrupted: a new one would write over it."""
    try:
        saved = load_state(path)
        done, steps = saved["state"]["step"], saved["parameters"]["steps"]
    except (OSError, CheckpointError, KeyError, TypeError):  # no run to lose
        return
    if done < steps:
        go_on = f"go on with --resume, or delete {path} to begin anew"
        raise Stop(f"{path} holds a run interrupted after step {done:,} of {steps:,}; {go_on}", 2)


def write_log(path, rows):
    """Write the evaluations so far as CSV, a row each."""
    file = io.StringIO()
    table = csv.writer(file, lineterminator="\n")
    table.writerow(["step", "seconds", "training_loss", "validation_loss", "learning_rate", "characters_per_second"])
    table.writerows(rows)
    write_file(path, file.getvalue().encode("utf-8"))


def sample_poem(model, vocab):
    """A poem from the model as it is, the same chance each time."""
    start = vocab.encode("\n").to(model.wte.weight.device)
    generator = torch.Generator().manual_seed(SAMPLE_SEED)
    ids = model.generate(start, 100, temperature=SAMPLE_TEMPERATURE, stop=vocab.ids["\n"], generator=generator)
    return vocab.decode(ids[0].tolist()).strip()


def clock(seconds):
    seconds = round(seconds)
    return f"{seconds // 60}:{seconds % 60:02} min"


def flag(name):
    return name.replace("_", "-")


def parse_args(argv=None):
    """(parameters, other arguments): the flags are made from PARAMETERS."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="Ctrl-C saves and says how to go on; a second one leaves at once."
    )
    for name, (value, _, _, what) in PARAMETERS.items():
        parser.add_argument(f"--{flag(name)}", type=type(value), default=value, metavar="N", help=f"{what} ({value})")
    parser.add_argument("--resume", action="store_true", help="go on with the interrupted run")
    parser.add_argument("--corpus", type=Path, default=CORPUS, metavar="FILE", help="another text, a poem a line")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).parent / "checkpoints" / "gpt.pt",
        metavar="FILE",
        help="where the model goes (default: checkpoints/gpt.pt)",
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda or mps (default: a GPU if there is one)")
    args = vars(parser.parse_args(argv))
    p = argparse.Namespace(**{name: args.pop(name) for name in PARAMETERS})
    for name, (_, least, most, _) in PARAMETERS.items():
        if not least <= getattr(p, name) <= most:
            parser.error(f"--{flag(name)} is {getattr(p, name)}; it must be between {least} and {most}")
    if args["out"].suffix != ".pt":
        parser.error(f"--out is {args['out']}; its name must end in .pt")
    return p, argparse.Namespace(**args)


def main():
    p, args = parse_args()
    device = pick_device(args.device)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32: training bears the rounding, and the GPU gains by it
    if not args.out.name or args.out.is_dir():
        raise Stop(f"--out {args.out} is a folder; name a file", 2)
    if not args.resume:
        refuse_to_lose(args.out.with_suffix(".resume.pt"))
    poems = read_poems(args.corpus)
    print(f"training on {device} with {torch.get_num_threads()} threads, {len(poems):,} poems", flush=True)
    if not args.resume and args.out.exists():
        print(f"{args.out} will be replaced at the first evaluation", file=sys.stderr)

    presses = []

    def interrupted(signum, frame):
        if presses:
            raise KeyboardInterrupt
        presses.append(signum)
        with contextlib.suppress(OSError):  # nobody reads it any more, such as a tee that the same Ctrl-C ended
            os.write(2, b"\nfinishing this step, then saving; press Ctrl-C again to leave at once\n")

    signal.signal(signal.SIGINT, interrupted)
    if not train(p, poems, args.out, device, args.resume, stopping=lambda: bool(presses)):
        again = shlex.join(["python", *(word for word in sys.argv if word != "--resume"), "--resume"])
        print(f"saved; to go on: {again}", file=sys.stderr)
        return 130
    print(f"{args.out} holds the best model")
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
