"""A character-level GPT opened up: the model, its KV cache, and how the next character is chosen.

Read it top to bottom beside the lesson "Generating text and the KV cache". Shapes stand at the end of
the lines that make them: B rows, T positions, C = n_embd, H heads of C/H dimensions, V = vocab_size.

The network is GPT-2 (Radford et al. 2019) without biases: learned positions, LayerNorm before each
part, tanh GELU, the head tied to the embedding. Its parameter names and layout are GPT-2's, except
that the matrices are `nn.Linear`'s (out, in), where GPT-2 stores (in, out).
"""

import contextlib
import io
import math
import os
import pickle
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

# ---------------------------------------------------------------------------------------------------
# The model


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a model. Raises ValueError for sizes that make no model."""

    vocab_size: int
    block_size: int = 128  # the longest text the model sees at once, in characters
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128
    dropout: float = 0.05  # in training only, on the embedding and on what each layer adds

    def __post_init__(self):
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a whole number of at least 1")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd {self.n_embd} does not divide into n_head {self.n_head} heads")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout!r}; it must be at least 0 and below 1")


class KVCache:
    """The keys and values of one layer in one run: room for `length` positions, allocated once.

    It keeps no count of its own: `start`, which every call carries, is the one truth about position.
    """

    def __init__(self, config, batch_size, length, device=None, dtype=None):
        shape = (2, batch_size, config.n_head, length, config.n_embd // config.n_head)
        self.kv = torch.empty(shape, device=device, dtype=dtype)

    def append(self, kv, start):
        """Store kv (2, B, H, T, C/H) from position start on; return all up to its end, (2, B, H, start+T, C/H)."""
        end = start + kv.size(3)
        if end > self.kv.size(3):
            raise ValueError(f"the cache has room for {self.kv.size(3)} positions, not for {end}")
        self.kv[:, :, :, start:end] = kv
        return self.kv[:, :, :, :end]


def causal_mask(T, total, device=None):
    """(T, total) bool: query i, the i-th of the last T positions, sees key j when j <= i + (total - T)."""
    return torch.ones(T, total, dtype=torch.bool, device=device).tril(diagonal=total - T)


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x, cache=None, start=0):
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)
        q, kv = qkv[0], qkv[1:]  # (B, H, T, C/H) and (2, B, H, T, C/H)
        if cache is not None:  # the KV cache: k and v of earlier positions are stored, not computed again
            kv = cache.append(kv, start)  # (2, B, H, total, C/H)
        k, v = kv.unbind()  # (B, H, total, C/H) each
        total = k.size(2)
        # One query sees every key, and a full square is what is_causal means; anything between needs the mask.
        mask = None if T in (1, total) else causal_mask(T, total, x.device)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=1 < T == total)  # (B, H, T, C/H)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))  # (B, T, C)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))  # (B, T, C)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=False)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=False)
        self.mlp = MLP(config)
        self.dropout = config.dropout

    def forward(self, x, cache=None, start=0):
        x = x + self.drop(self.attn(self.ln_1(x), cache, start))  # (B, T, C)
        return x + self.drop(self.mlp(self.ln_2(x)))  # (B, T, C)

    def drop(self, x):
        return F.dropout(x, self.dropout) if self.training else x


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)  # also the head: logits = x @ wte.T
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, bias=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:  # GPT-2's start: 0.02, less where 2 * n_layer branches add up
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * config.n_layer) if "c_proj" in name else 0.02)

    def hidden(self, idx, caches=None, start=0):
        """idx (B, T), the characters at positions start .. start+T -> what the head reads at each, (B, T, C).

        caches: one KVCache a layer, filled up to start. Raises ValueError past block_size.
        """
        end = start + idx.size(1)
        if end > self.config.block_size:
            raise ValueError(f"position {end} is past block_size {self.config.block_size}: feed a shorter text")
        x = self.wte(idx) + self.wpe.weight[start:end]  # (B, T, C)
        if self.training:
            x = F.dropout(x, self.config.dropout)
        for i, block in enumerate(self.h):
            x = block(x, caches[i] if caches else None, start)
        return self.ln_f(x)

    def forward(self, idx, targets=None, caches=None, start=0):
        """idx (B, T) -> (logits (B, T, V), None); with targets (B, T) -> (None, mean cross-entropy in nats).

        A target of -100 does not count. The loss goes chunk by chunk: all logits at once, 100 MB in a
        batch of 4,096 characters, would fit no CPU's cache and double the time of a training step.
        """
        x = self.hidden(idx, caches, start)
        if targets is None:
            return F.linear(x, self.wte.weight), None
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=512)
        return None, F.linear_cross_entropy(x.flatten(0, 1), self.wte.weight, targets.flatten(), options=options)

    @contextlib.contextmanager
    def evaluating(self):
        """Dropout off inside the with statement, and as it was after it."""
        was_training = self.training
        self.eval()
        try:
            yield
        finally:
            self.train(was_training)

    def generate(
        self,
        idx,
        max_new_tokens,
        *,
        temperature=1.0,
        top_k=None,
        top_p=None,
        stop=None,
        constraint=None,
        use_cache=True,
        generator=None,
    ):
        """Write up to max_new_tokens characters after each row of idx (B, T); return ids, prompt first.

        temperature, top_k, top_p, generator: as in `sample`.
        stop: an id; a row that has emitted it is padded with it, and when all rows have, the run ends.
        constraint: a function of the ids so far (B, t) that returns which ids may come next, a bool mask
            (V,) or (B, V); it is asked at every step, with True for at least one id a row.
        use_cache: False computes every position again at every step; the ids are the same, only later.

        The model sees at most block_size characters. When that window is full its oldest half is dropped
        and the rest is fed again, because learned positions cannot slide; of a longer prompt it sees the
        last block_size characters. Raises ValueError for wrong arguments, DecodingError (which names the
        step) for non-finite logits or a constraint that allows nothing.
        """
        check_sampling(temperature, top_k, top_p)
        B, T = idx.shape
        if T < 1:
            raise ValueError("the prompt is empty; a poem starts after a line break")
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 0")
        end, block_size = T + max_new_tokens, self.config.block_size
        ids = torch.cat([idx, idx.new_zeros(B, max_new_tokens)], dim=1)  # (B, T + max_new_tokens)
        stopped = torch.zeros(B, dtype=torch.bool, device=idx.device)
        window = max(0, T - block_size)  # where the text the model sees begins
        fed = window  # how far it has been fed
        with torch.inference_mode(), self.evaluating():
            caches = None
            if use_cache:  # the last character is never fed, so it needs no room
                length = min(block_size, end - 1 - window)
                caches = [KVCache(self.config, B, length, idx.device, self.wte.weight.dtype) for _ in self.h]
            for t in range(T, end):
                if slide(window, t, block_size) != window or not use_cache:
                    window = fed = slide(window, t, block_size)
                # Prefill: the first step feeds the whole prompt. Decode: every later one just the newest character.
                x = self.hidden(ids[:, fed:t], caches, start=fed - window)
                logits = F.linear(x[:, -1], self.wte.weight)  # (B, V), at the last position only
                fed = t
                allowed = None if constraint is None else constraint(ids[:, :t])
                if constraint is not None and getattr(allowed, "dtype", None) != torch.bool:
                    raise TypeError(f"the constraint returned {type(allowed).__name__}, not a tensor of bool")
                try:
                    next_id = sample(
                        logits,
                        temperature=temperature,
                        top_k=top_k,
                        top_p=top_p,
                        allowed=allowed,
                        generator=generator,
                    )  # (B,)
                except DecodingError as error:
                    raise DecodingError(f"step {t - T + 1}: {error}") from None
                if stop is not None:
                    next_id = next_id.masked_fill(stopped, stop)
                    stopped |= next_id == stop
                ids[:, t] = next_id
                if stop is not None and stopped.all():
                    return ids[:, : t + 1]
        return ids


def slide(window, t, block_size):
    """Where the text the model sees begins when it has grown to t characters, given where it began before."""
    return window if t - window <= block_size else window + (block_size + 1) // 2


# ---------------------------------------------------------------------------------------------------
# Choosing the next character


class DecodingError(RuntimeError):
    """There is no next character to choose."""


def check_sampling(temperature, top_k, top_p):
    """Raise ValueError unless temperature >= 0 and finite, top_k None or >= 1, top_p None or in (0, 1]."""
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature is {temperature}; it must be a finite number of at least 0")
    if top_k is not None and not top_k >= 1:
        raise ValueError(f"top_k is {top_k}; it must be at least 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}; it must be above 0 and at most 1")


def probabilities(logits, *, temperature=1.0, top_k=None, top_p=None, allowed=None):
    """logits (B, V) -> the probabilities (B, V) a draw is made from, exactly 0 for what is ruled out.

    Order: constraint, temperature, top-k, renormalise, top-p, renormalise. The logits are not written to.
    temperature: the logits are divided by it; 0 leaves the likeliest id alone.
    top_k: the k likeliest ids, exactly k even among ties; k >= V filters nothing.
    top_p: the fewest ids, likeliest first, whose probabilities reach p (Holtzman et al. 2020).
    allowed: bool (V,) or (B, V). Raises ValueError as `check_sampling`, DecodingError as `generate`.
    """
    check_sampling(temperature, top_k, top_p)
    V = logits.size(-1)
    if allowed is not None:
        logits = torch.where(allowed, logits, float("-inf"))
    if temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, _likeliest(logits, allowed)[:, None], 1.0)
    if temperature != 1:
        # The largest becomes 0 first, so that no temperature can overflow; float32 knows none outside this range.
        temperature = min(max(temperature, torch.finfo(torch.float32).tiny), torch.finfo(torch.float32).max)
        logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    if top_k is not None and top_k < V:
        values, ids = torch.topk(logits, top_k)
        logits = torch.full_like(logits, float("-inf")).scatter_(-1, ids, values)
    probs = torch.softmax(logits, dim=-1)  # (B, V)
    if top_p is not None and top_p < 1:
        values, ids = torch.sort(probs, descending=True)
        mass = values.cpu().cumsum(dim=-1, dtype=torch.float64)  # on the CPU, for Apple's GPUs have no float64
        values[:, 1:].masked_fill_((mass[:, :-1] >= top_p).to(values.device), 0)  # those whose likelier ones reach p
        probs = torch.zeros_like(probs).scatter_(-1, ids, values / values.sum(dim=-1, keepdim=True))
    # One NaN or infinity among the logits, or -inf for all, makes the whole row of a softmax NaN.
    if probs[:, 0].isnan().any():
        raise _no_choice(allowed)
    return probs


def sample(logits, *, temperature=1.0, top_k=None, top_p=None, allowed=None, generator=None):
    """Draw the next ids (B,) from logits (B, V); a pure function of its arguments and the generator's state.

    The arguments are those of `probabilities`; generator: a torch.Generator on the CPU. Temperature 0
    takes the largest logit and draws nothing.
    """
    if temperature == 0:
        check_sampling(temperature, top_k, top_p)
        if allowed is not None:
            logits = torch.where(allowed, logits, float("-inf"))
        return _likeliest(logits, allowed)
    probs = probabilities(logits, temperature=temperature, top_k=top_k, top_p=top_p, allowed=allowed)
    return race(probs, torch.rand(probs.size(0), sum(heats(probs.size(1))), generator=generator))


def heats(V):
    """(first, second): how many uniform numbers a row of `race` over V ids takes in either heat."""
    W = math.isqrt(V)
    return V // W + V % W, W


def race(probs, u):
    """Draw ids (B,) from probs (B, V) by an exponential race; u (B, sum(heats(V))) is uniform noise in [0, 1).

    The id with the largest p / E wins, E = -log u: an exact draw from p (the Gumbel-max trick, Gumbel 1954).
    In two heats that takes 206 random numbers for 6,289 ids: first G groups of W neighbours, each with the
    sum of its p, race against each other and the V % W ids left over; then the ids of the winning group.
    Unlike a draw by cumulative sums it has no edges between ids that a rounding difference could cross.
    """
    B, V = probs.shape
    first, W = heats(V)
    G = V // W
    E = u.clamp(min=2**-25).log_().neg_().to(probs.device)  # finite, so that no p = 0 is level with a p > 0
    groups = probs[:, : G * W].view(B, G, W)
    contestants = torch.cat([groups.sum(dim=-1), probs[:, G * W :]], dim=1)  # (B, G + V % W)
    winner = (contestants / E[:, :first]).argmax(dim=-1)  # (B,)
    group = winner.clamp(max=G - 1)
    inside = groups.gather(1, group[:, None, None].expand(B, 1, W))[:, 0] / E[:, first:]  # (B, W)
    return torch.where(winner < G, group * W + inside.argmax(dim=-1), G * W + winner - G)


def _likeliest(logits, allowed):
    largest, ids = logits.max(dim=-1)
    if not largest.isfinite().all():
        raise _no_choice(allowed)
    return ids


def _no_choice(allowed):
    if allowed is not None and not allowed.any(dim=-1).all():
        return DecodingError("the constraint allows no character at all")
    return DecodingError("non-finite logits (NaN or infinity): the model's weights are damaged")


# ---------------------------------------------------------------------------------------------------
# Characters


class UnknownCharacters(ValueError):
    """A text has characters that the vocabulary lacks."""


class Vocabulary:
    """The characters a model knows; a character's id is its place in `chars`, a string without repeats."""

    def __init__(self, chars):
        self.chars = chars
        self.ids = {char: i for i, char in enumerate(chars)}
        if len(self.ids) != len(chars):
            raise ValueError(f"a vocabulary of {len(chars)} characters has only {len(self.ids)} different ones")

    def __len__(self):
        return len(self.chars)

    def encode(self, text):
        """text -> ids (1, T). Raises UnknownCharacters, which names every one of them."""
        unknown = [char for char in dict.fromkeys(text) if char not in self.ids]
        if unknown:
            names = "  ".join(f"{char if char.isprintable() else ''} U+{ord(char):04X}".strip() for char in unknown)
            raise UnknownCharacters(f"not in the vocabulary of {len(self):,} characters: {names}")
        return torch.tensor([[self.ids[char] for char in text]], dtype=torch.long)

    def decode(self, ids):
        """A list or (T,) tensor of ids -> text."""
        return "".join(self.chars[i] for i in ids)


# ---------------------------------------------------------------------------------------------------
# Files: what stands at its final name is whole


class CheckpointError(Exception):
    """A file that is no checkpoint of ours, or one that does not fit."""


def write_file(path, data):
    """Put data (bytes) at path by way of a temporary file beside it: afterwards path holds the old or the new, whole.

    Makes missing folders. Raises OSError, naming path; path is then as it was.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(error.errno, f"cannot write {path}: {error.strerror}") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()  # there only when something went wrong


def save_state(path, state):
    """Write a dict of tensors and plain values with torch.save, by `write_file`. Raises TypeError for other values."""
    buffer = io.BytesIO()  # so that a full disk is an OSError, not an error inside torch's writer
    torch.save(state, buffer)
    try:  # numpy scalars and paths can be saved, but not loaded again
        torch.load(io.BytesIO(buffer.getvalue()), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise TypeError(f"{path} is not written, it could not be read: {error}") from None
    write_file(path, buffer.getvalue())


def load_state(path):
    """Read what `save_state` wrote, onto the CPU; no code in the file is run. Raises OSError, CheckpointError."""
    data = Path(path).read_bytes()
    try:
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a file that is not its own, and its own text is long
        raise CheckpointError(f"{path} is damaged or not a checkpoint ({type(error).__name__})") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} is not a checkpoint: it holds a {type(state).__name__}")
    return state


def save_checkpoint(path, model, vocab, info):
    """Write a trained model: weights, sizes, characters and info, a dict of plain values (step, val_loss, ...)."""
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    save_state(path, {"config": asdict(model.config), "chars": vocab.chars, "info": info, "weights": weights})


def load_checkpoint(path, device="cpu"):
    """Read what `save_checkpoint` wrote -> (model in eval mode on device, vocab, info).

    Raises OSError when the file cannot be read, CheckpointError when it is not one, or its parts do not fit.
    """
    state = load_state(path)
    try:
        model = GPT(GPTConfig(**state["config"]))
        vocab = Vocabulary(state["chars"])
        info = dict(state["info"])
        # torch.compile puts _orig_mod. in front of every name.
        weights = {name.removeprefix("_orig_mod."): tensor for name, tensor in state["weights"].items()}
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{path} is not a checkpoint of this project: {error!r}") from None
    if len(vocab) != model.config.vocab_size:
        raise CheckpointError(f"{path}: {len(vocab)} characters, but a vocab_size of {model.config.vocab_size}")
    if len(weights) != len(state["weights"]):
        raise CheckpointError(f"{path} holds some weights twice, with _orig_mod. in front of the name and without")
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:  # it names every missing, unknown or misshapen tensor
        raise CheckpointError(f"{path}: " + " ".join(str(error).split())) from None
    return model.to(device).eval(), vocab, info


# ---------------------------------------------------------------------------------------------------
# What the scripts share


class Stop(Exception):
    """Ends a script with one clear line and an exit status: 1 a run-time failure, 2 wrong usage or input."""

    def __init__(self, message, status=1):
        super().__init__(message)
        self.status = status


def pick_device(name):
    """The torch.device of a name; "auto" is an NVIDIA GPU, else an Apple one, else the CPU. Raises Stop."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        torch.zeros(1, device=name).item()
    except Exception as error:  # each kind of device has its own way to be missing
        raise Stop(f"--device {name}: not there ({str(error).splitlines()[0]}); cpu always is", 2) from None
    return torch.device(name)


def run(main):
    """Call main and return the exit status: 0, 1 or 2 with one line on stderr, 130 for Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):  # UTF-8 even where the terminal's code page or LC_ALL says otherwise
        if hasattr(stream, "reconfigure"):  # None where it was closed before we began
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    try:
        status = main() or 0
        if sys.stdout:
            sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader, such as `head -1`, has seen enough; the flush at exit must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except (Stop, CheckpointError, MemoryError, OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not isinstance(error, DecodingError) and "memory" not in str(error):
            raise  # no user's doing, but a fault of ours
        what = getattr(error, "strerror", None) or (str(error) or "out of memory").splitlines()[0]
        where = f": {error.filename}" if getattr(error, "filename", None) else ""
        print(f"{Path(sys.argv[0]).name}: {what}{where}", file=sys.stderr)
        return getattr(error, "status", 1)
