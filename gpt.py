"""A character-level GPT opened up: the model, its KV cache, and how the next character is chosen.

Read it beside the lesson "Generating text and the KV cache", from the top to "Characters"; from
there on it is about characters as ids, files and scripts. A comment `lesson:` marks where one of
the lesson's ideas stands. Shapes stand at the end of lines: B rows, T positions, C = n_embd, V =
vocab_size, H = n_head heads of q, G = n_kv_head heads of k and v, C/H numbers in each head.

The network is GPT-2 (Radford et al. 2019) without biases: learned positions, LayerNorm before each
part, tanh GELU, an output layer tied to the embedding, which gives the logits. The weights have
GPT-2's names and layout, except that its matrices are transposed: (out, in), as nn.Linear has them.
"""

import contextlib
import io
import math
import os
import sys
import time
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

# --------------------------------------------------------------------------------------------------
# The model


@dataclass
class GPTConfig:
    """The sizes of a model; the defaults are the lesson's. Raises ValueError if they do not fit."""

    vocab_size: int
    block_size: int = 128  # the longest text the model sees at once, in characters
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128
    n_kv_head: int | None = None  # heads of k and v, shared evenly among n_head; None: n_head
    dropout: float = 0.05  # in training only, on the embedding and on what each layer adds

    def __post_init__(self):
        self.n_kv_head = self.n_head if self.n_kv_head is None else self.n_kv_head
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd", "n_kv_head"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a whole number, at least 1")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd {self.n_embd} is not a multiple of n_head {self.n_head}")
        if self.n_head % self.n_kv_head:
            wrong = f"n_head {self.n_head} is not a multiple of n_kv_head {self.n_kv_head}"
            raise ValueError(wrong)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}; it must be at least 0 and below 1")


# lesson: the KV cache
class KVCache:
    """The keys and values of one layer in one text, allocated once for `length` positions.

    (torch.cat, as in the lesson, would copy all of them at every step.) The caller owns it and
    counts the positions that it holds, in `start`.
    """

    def __init__(self, config, batch_size, length, device=None):
        shape = (batch_size, config.n_kv_head, length, config.n_embd // config.n_head)
        self.k = torch.empty(shape, device=device)  # (B, G, length, C/H)
        self.v = torch.empty(shape, device=device)

    def append(self, k, v, start):
        """Store k and v (B, G, T, C/H) from position start on; return all up to their end.

        If k and v have a single row, it is copied to all rows.
        """
        total = start + k.size(2)
        if total > self.k.size(2):
            raise ValueError(f"the cache has room for {self.k.size(2)} positions, not for {total}")
        self.k[:, :, start:total] = k
        self.v[:, :, start:total] = v
        if start == 0:  # k and v are all there is; a single row stays a single row
            return k, v
        return self.k[:, :, :total], self.v[:, :, :total]  # (B, G, total, C/H) each


def causal_mask(T, total, device=None):
    """(T, total) bool: True where query i may look at key j.

    The T queries are the last of total positions: query i stands at position i + (total - T), and
    looks at the keys up to its own.
    """
    # lesson: the offset mask
    return torch.ones(T, total, dtype=torch.bool, device=device).tril(diagonal=total - T)


def attention(x, c_attn, c_proj, config, cache=None, start=0):
    """x (B, T, C), the positions from start on -> (B, T, C).

    Each position attends to itself, to those before it in x, and to those in the cache.
    """
    (B, T, C), H, G = x.shape, config.n_head, config.n_kv_head
    qkv = (x @ c_attn).view(B, T, H + 2 * G, C // H).transpose(1, 2)
    q, k, v = qkv.split_with_sizes([H, G, G], dim=1)  # (B, H, T, C/H), twice (B, G, T, C/H)
    if cache is not None:  # lesson: the KV cache; earlier k and v are looked up
        k, v = cache.append(k, v, start)  # (B, G, total, C/H) each
    # A single query is the newest position and may look at every key: no mask.
    mask = causal_mask(T, k.size(2), x.device) if T > 1 else None
    # lesson: grouped-query attention; if G < H, each head of k and v serves H/G heads of q
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=G < H)  # (B, H, T, C/H)
    return y.transpose(1, 2).reshape(B, T, C) @ c_proj  # (B, T, C)


def mlp(x, c_fc, c_proj):
    return F.gelu(x @ c_fc, approximate="tanh") @ c_proj  # (B, T, C)


class Block(nn.Module):
    """The weights of one layer, by GPT-2's names.

    It has no forward: `GPT.hidden` takes the weights and computes. Calling each part as an
    nn.Module would make up a fifth of the time of a step.
    """

    def __init__(self, config):
        super().__init__()
        C, kv = config.n_embd, config.n_embd // config.n_head * config.n_kv_head
        self.ln_1 = nn.LayerNorm(C, bias=False)
        self.attn = nn.ModuleDict({"c_attn": linear(C, C + 2 * kv), "c_proj": linear(C, C)})
        self.ln_2 = nn.LayerNorm(C, bias=False)
        self.mlp = nn.ModuleDict({"c_fc": linear(C, 4 * C), "c_proj": linear(4 * C, C)})

    def weights(self):
        """ln_1, c_attn (C, C + 2 * kv), c_proj (C, C), ln_2, c_fc (C, 4C), c_proj (4C, C)."""
        parts = (self.ln_1, *self.attn.values(), self.ln_2, *self.mlp.values())
        return [part.weight.t() for part in parts]


def linear(n_in, n_out):
    return nn.Linear(n_in, n_out, bias=False)


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)  # of characters; the output layer
        self.wpe = nn.Embedding(config.block_size, config.n_embd)  # of positions
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, bias=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:  # GPT-2's initialisation: the two c_proj of a layer start smaller
                std = 0.02 / math.sqrt(2 * config.n_layer) if "c_proj" in name else 0.02
                nn.init.normal_(weight, std=std)

    def layers(self):
        """The six weights of each layer; `generate` fetches them once."""
        return [block.weights() for block in self.h]

    def hidden(self, idx, caches=None, start=0, layers=None):
        """idx (B, T), the characters from position start on -> (B, T, C), for the output layer.

        caches: a KVCache for each layer, filled up to start. layers: `self.layers()`, if
        the caller has fetched them.
        Raises ValueError past block_size.
        """
        config, end = self.config, start + idx.size(1)
        if end > config.block_size:
            raise ValueError(f"position {end} is past block_size {config.block_size}; feed less")

        def drop(x):
            return F.dropout(x, config.dropout) if self.training else x

        # lesson: positions from start
        x = drop(F.embedding(idx, self.wte.weight) + self.wpe.weight[start:end])  # (B, T, C)
        shape = (config.n_embd,)
        for i, weights in enumerate(layers or self.layers()):
            ln_1, c_attn, attn_proj, ln_2, c_fc, mlp_proj = weights
            cache = caches[i] if caches else None
            y = torch.layer_norm(x, shape, ln_1)
            x = x + drop(attention(y, c_attn, attn_proj, config, cache, start))  # (B, T, C)
            y = torch.layer_norm(x, shape, ln_2)
            x = x + drop(mlp(y, c_fc, mlp_proj))  # (B, T, C)
        return torch.layer_norm(x, shape, self.ln_f.weight)

    def forward(self, idx, targets=None, caches=None, start=0):
        """idx (B, T) -> (logits (B, T, V), None); with targets (B, T) -> (None, mean loss in nats).

        caches, start: as in `hidden`. The loss is the cross-entropy; a target of -100 does not
        count. It is taken in chunks: all logits of a batch of train.py, 100 MB, would make a
        training step a fifth slower.
        """
        x = self.hidden(idx, caches, start)
        if targets is None:
            return F.linear(x, self.wte.weight), None
        x, targets = x.flatten(0, 1), targets.flatten()  # (B * T, C) and (B * T,)
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=512)
        return None, F.linear_cross_entropy(x, self.wte.weight, targets, options=options)

    @torch.inference_mode()
    def generate(
        self, idx, max_new_tokens, *, temperature=1.0, top_k=None, top_p=None, stop=None,
        constraint=None, use_cache=True, generator=None, watch=None,
    ):  # fmt: skip
        """Write up to max_new_tokens characters after each row of idx (B, T); return all the ids.

        temperature, top_k, top_p: as in `probabilities`. generator: as in `sample`.
        stop: an id that ends a row; the row is filled up with it until all rows have ended.
        constraint: a function of the ids so far (B, t) -> which ids may come next, bool (V,) or
            (B, V). If each row has only one such id, it is forced: appended without the model.
        use_cache: False computes every position again at every step: the same ids, only slower.
        watch: a function to look at a step; called with logits (B, V) and allowed, the constraint's
            answer or None, before every draw.

        The model sees a window of block_size characters. When it is full, its older half is left
        out, and the rest is computed again from position 0: cached k and v hold old positions.
        Call it in eval mode. Raises ValueError for wrong arguments, DecodingError, which names the
        step, for logits of NaN or +infinity, or a constraint that allows nothing.
        """
        check_sampling(temperature, top_k, top_p)
        (B, T), block_size, layers = idx.shape, self.config.block_size, self.layers()
        if T < 1:
            raise ValueError("the prompt is empty; a poem starts after a line break")
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 0")
        room = min(block_size, T + max_new_tokens - 1)  # the last one written is never fed
        caches = [KVCache(self.config, B, room, idx.device) for _ in layers] if use_cache else None
        begin = max(0, T - block_size)  # where the window begins in idx
        start = 0  # how many positions the caches hold, and so the position of the next one
        if use_cache and B > 1 and T > 1 and (idx == idx[0]).all():
            # All rows share the prompt, so prefill one for all; each row feeds its last id below.
            self.hidden(idx[:1, begin:-1], caches, start, layers)
            start = T - 1 - begin
        knobs = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        noise = exponential_noise(generator, B, self.config.vocab_size, steps=32)
        stopped = torch.zeros(B, dtype=torch.bool, device=idx.device)
        for step in range(max_new_tokens):
            if idx.size(1) - begin > block_size:  # not in the lesson: the window moves on by half
                begin, start = begin + (block_size + 1) // 2, 0
            window = idx[:, begin:]  # (B, up to block_size)
            # lesson: constrained decoding
            allowed = constraint(idx) if constraint else None  # (V,) or (B, V)
            if allowed is not None and (allowed.sum(dim=-1) == 1).all():
                # Forced, as an acrostic's heads and marks are. A later step feeds it to the model.
                next_id = allowed.int().argmax(dim=-1).expand(B)  # (B,)
            else:
                if use_cache:  # lesson: the whole prompt (prefill), then only what is new (decode)
                    x = self.hidden(window[:, start:], caches, start, layers)
                    start = window.size(1)
                else:  # lesson: repeated computation, the whole window again at every step
                    x = self.hidden(window, layers=layers)
                logits = F.linear(x[:, -1], self.wte.weight)  # (B, V), of the last position only
                if watch:
                    watch(logits, allowed)
                next_id = choose(logits, next(noise), step + 1, allowed=allowed, **knobs)  # (B,)
            if stop is not None:
                next_id = next_id.masked_fill(stopped, stop)
                stopped |= next_id == stop
            idx = torch.cat([idx, next_id[:, None]], dim=1)  # (B, t + 1)
            if stop is not None and stopped.all():
                break
        with torch.inference_mode(False):
            return idx.clone()  # an ordinary tensor again, which can be written to and trained on


# --------------------------------------------------------------------------------------------------
# Choosing the next character


class DecodingError(RuntimeError):
    """There is no next character to choose."""


def check_sampling(temperature=1.0, top_k=None, top_p=None):
    """Raise ValueError unless temperature is in [0, 1000000], top_k >= 1 and top_p in (0, 1]."""
    if not 0 <= temperature <= 1e6:
        raise ValueError(f"temperature is {temperature}; it must be from 0 to 1000000")
    if top_k is not None and not top_k >= 1:
        raise ValueError(f"top_k is {top_k}; it must be at least 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}; it must be above 0 and at most 1")


def probabilities(logits, *, temperature=1.0, top_k=None, top_p=None, allowed=None):
    """logits (B, V) -> the probabilities (B, V) that a draw is made from; 0 for what is ruled out.

    Applied in this order; the logits are not written to.
    allowed: which ids may come at all, bool (V,) or (B, V).
    temperature: the logits are divided by it; 0 keeps only the likeliest id, as top_k=1 does.
    top_k: keeps the k likeliest ids, exactly k even among ties; k >= V filters nothing.
    top_p: keeps the fewest, likeliest ids that reach probability p together (Holtzman et al. 2020).
    Raises ValueError as `check_sampling`, DecodingError for logits of NaN or +infinity, and if
    nothing is allowed.
    """
    check_sampling(temperature, top_k, top_p)
    if allowed is not None:  # lesson: constrained decoding
        logits = torch.where(allowed, logits, float("-inf"))
    if temperature == 0:
        top_k = 1
    elif temperature != 1:  # lesson: temperature; minus the maximum, so that nothing overflows
        logits = logits - logits.amax(dim=-1, keepdim=True)
        logits /= max(temperature, 1e-30)
    if top_k is not None:  # lesson: top-k; the lesson's `logits < kth` keeps every tie
        values, ids = logits.topk(min(top_k, logits.size(-1)))
        logits = torch.full_like(logits, float("-inf")).scatter(-1, ids, values)
    probs = logits.softmax(dim=-1)  # (B, V)
    if top_p is not None and top_p < 1:  # lesson: top-p, exercise 1
        values, ids = probs.sort(descending=True)
        reached = values.cumsum(dim=-1)[:, :-1] >= top_p  # do the ids before it reach p?
        values[:, 1:].masked_fill_(reached, 0)
        probs = torch.zeros_like(probs).scatter(-1, ids, values)
        probs /= probs.sum(dim=-1, keepdim=True)
    # A NaN or +infinity among the logits, or -infinity for all of them, makes the whole row NaN.
    if any(map(math.isnan, probs[:, 0].tolist())):
        if allowed is not None and not allowed.any(dim=-1).all():
            raise DecodingError("the constraint allows no character at all")
        raise DecodingError("non-finite logits (NaN or infinity): the model's weights are damaged")
    return probs


def sample(logits, generator=None, **knobs):
    """Draw the next ids (B,) from logits (B, V). knobs and errors: as in `probabilities`.

    generator: a torch.Generator on the CPU, so that a seed means the same on every device.
    """
    return draw(probabilities(logits, **knobs), next(exponential_noise(generator, *logits.shape)))


def choose(logits, noise, step, **knobs):
    """Draw the next ids (B,) from logits (B, V), as `sample`; a DecodingError names the step."""
    try:
        return draw(probabilities(logits, **knobs), noise)
    except DecodingError as error:
        raise DecodingError(f"step {step}: {error}") from None


# lesson: torch.multinomial, which draws by the same probabilities
def draw(probs, noise):
    """Draw one id a row from probs (B, V), exactly by these probabilities -> ids (B,).

    Each candidate's probability is divided by an exponential random number of its own, and the
    largest result wins (the Gumbel-max trick, Gumbel 1954). A group of W neighbouring ids is drawn
    first, then one id in it: about 2 * sqrt(V) random numbers are enough, noise (B, K + W).
    On another device, or without the cache, rounding changes the last bits of probs; the same noise
    still gives the same id, except for a very rare near tie.
    """
    B, V = probs.shape
    K, W = group_sizes(V)
    noise = noise.to(probs.device)
    groups = F.pad(probs, (0, K * W - V)).view(B, K, W)
    group = (groups.sum(dim=-1) / noise[:, :K]).argmax(dim=-1)  # (B,)
    members = groups[torch.arange(B), group]  # (B, W)
    return group * W + (members / noise[:, K:]).argmax(dim=-1)


def group_sizes(V):
    """(K, W): V ids make K groups of W, the last one padded; both are about sqrt(V)."""
    W = math.isqrt(V - 1) + 1
    return -(-V // W), W


def exponential_noise(generator, B, V, steps=1):
    """Yield the noise (B, K + W) of one draw after another, made for `steps` draws at once."""
    while True:
        u = torch.rand(steps, B, sum(group_sizes(V)), generator=generator)
        yield from -u.clamp_(min=2**-25).log_()  # u can be 0, and the noise must be finite


# --------------------------------------------------------------------------------------------------
# Characters


class Vocabulary:
    """The characters a model knows, a string; the id of a character is its place in it."""

    def __init__(self, chars):
        self.chars = chars
        self.ids = {char: i for i, char in enumerate(chars)}
        if len(self.ids) != len(chars):
            raise ValueError(f"of {len(chars)} characters only {len(self.ids)} are different")

    def __len__(self):
        return len(self.chars)

    def encode(self, text):
        """text -> ids (1, T). Raises ValueError, which names every unknown character once."""
        unknown = [char for char in dict.fromkeys(text) if char not in self.ids]
        if unknown:
            names = (f"{char if char.isprintable() else ''} U+{ord(char):04X}" for char in unknown)
            names = "  ".join(name.strip() for name in names)
            raise ValueError(f"not in the vocabulary of {len(self):,} characters: {names}")
        return torch.tensor([[self.ids[char] for char in text]], dtype=torch.long)

    def decode(self, ids):
        """A list or (T,) tensor of ids -> text."""
        return "".join(self.chars[i] for i in ids)


# --------------------------------------------------------------------------------------------------
# Saving and loading


class CheckpointError(Exception):
    """A file that is no checkpoint of ours, or whose parts do not fit."""


def out_of_memory(error):
    """Whether error says so; torch has no exception of its own for it on a CPU."""
    torchs = isinstance(error, RuntimeError) and not isinstance(error, DecodingError)
    return isinstance(error, MemoryError) or (torchs and "memory" in str(error))


def save_state(path, state):
    """torch.save by way of a temporary file: path always holds the old state or the new one, whole.

    state: a dict of tensors and plain Python values. Raises OSError, which names path.
    """
    buffer = io.BytesIO()  # torch's own writer raises RuntimeError for a full disk
    torch.save(state, buffer)
    write_file(path, buffer.getvalue())


def write_file(path, data):
    """Write data (bytes) as `save_state` does."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp")  # overwrites one left by a killed run
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        for patience in (0.1, 0.2, 0.4, 0.8, 0):  # seconds, for a virus scanner that holds the file
            try:
                os.replace(temporary, path)
                break
            except PermissionError:
                if not patience:
                    raise
                time.sleep(patience)
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()  # there only when something went wrong


def load_state(path):
    """Read what `save_state` wrote, onto the CPU; no code in the file is run.

    Raises OSError when the file cannot be read, CheckpointError when it is damaged or not ours.
    """
    with open(path, "rb") as file:
        try:
            damaged = zipfile.ZipFile(file).testzip()  # torch.load does not notice a flipped bit
            file.seek(0)
            state = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises many kinds, with long texts
            if out_of_memory(error):
                raise
            damaged = type(error).__name__
    if damaged:
        raise CheckpointError(f"{path} is damaged or not a checkpoint ({damaged}); fetch it again")
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} is not a checkpoint: it holds a {type(state).__name__}")
    return state


def save_checkpoint(path, model, vocab, info):
    """Save a trained model: sizes, characters, weights, and info, a dict of plain values."""
    parts = {"config": asdict(model.config), "chars": vocab.chars, "info": info}
    save_state(path, parts | {"weights": dict(model.state_dict())})


def load_checkpoint(path, device="cpu"):
    """-> (model in eval mode on device, vocab, info). Raises OSError, CheckpointError."""
    state = load_state(path)
    if "optimizers" in state:
        raise CheckpointError(f"{path} is for train.py --resume; name the file without .resume")
    try:
        model = GPT(GPTConfig(**state["config"]))
        model.load_state_dict(state["weights"])  # names every missing, unknown or misshapen tensor
        vocab, info = Vocabulary(state["chars"]), dict(state["info"])
        if len(vocab) != model.config.vocab_size:
            raise ValueError(f"{len(vocab)} characters, vocab_size {model.config.vocab_size}")
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        if out_of_memory(error):
            raise
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path} is not a checkpoint of this project: {reason}") from None
    return model.to(device).eval(), vocab, info


# --------------------------------------------------------------------------------------------------
# How a script ends


class UserError(Exception):
    """Ends a script with one line. status: 1 for a failure, 2 for wrong usage or wrong input."""

    def __init__(self, message, status=1):
        super().__init__(message)
        self.status = status


def pick_device(name):
    """The torch.device of a name; auto is an NVIDIA GPU, else an Apple one, else the CPU."""
    if name == "auto":
        has_mps = torch.backends.mps.is_available()
        name = "cuda" if torch.cuda.is_available() else "mps" if has_mps else "cpu"
    try:
        torch.zeros(1, device=name).item()
    except Exception as error:  # each kind of device has its own way to be missing
        reason = str(error).splitlines()[0][:80]
        raise UserError(f"--device {name}: not there ({reason}); cpu always is", 2) from None
    return torch.device(name)


def run(main):
    """Call main and return the exit status: 0, 1 or 2 with one line on stderr, 130 for Ctrl-C.

    A fault of the program, which is no user's, is raised.
    """
    for name in ("stdout", "stderr"):  # UTF-8 on every terminal; a closed one gets nothing
        stream = getattr(sys, name) or open(os.devnull, "w")  # noqa: SIM115
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
        setattr(sys, name, stream)
    try:
        status = main() or 0
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader, such as `head -1`, has enough; stay silent at exit too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except (UserError, CheckpointError, OSError, MemoryError, RuntimeError) as error:
        what = str(error)
        if isinstance(error, OSError) and error.strerror:
            what = f"{error.filename or 'the output'}: {error.strerror}"
        if out_of_memory(error):
            what = "out of memory; choose smaller sizes, or less at once"
        elif isinstance(error, RuntimeError) and not isinstance(error, DecodingError):
            raise  # a fault of the program, not of the user: show where
        with contextlib.suppress(OSError):  # nobody reads it
            print(f"{Path(sys.argv[0]).name}: {what}", file=sys.stderr, flush=True)
        return getattr(error, "status", 1)
