"""A character-level GPT opened up: the model, its KV cache, and how the next character is chosen.

Read it beside the lesson "Generating text and the KV cache". A comment `lesson:` marks where one of
the lesson's ideas stands. Shapes stand at the end of lines: B rows, T positions, C = n_embd, V =
vocab_size, H = n_head heads of q, G = n_kv_head heads of k and v, C/H numbers in each head.

The network is GPT-2 (Radford et al. 2019) without biases: learned positions, LayerNorm before each
part, tanh GELU, an output layer tied to the embedding, which gives the logits. The weights have
GPT-2's names and layout, except that its matrices are transposed: (out, in), as nn.Linear has them.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

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
            if type(value) is not int or value < 1:  # neither True nor a NumPy number
                raise ValueError(f"{name} is {value!r}; it must be a whole number, at least 1")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd {self.n_embd} is not a multiple of n_head {self.n_head}")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_head {self.n_head} does not divide by n_kv_head {self.n_kv_head}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}; it must be at least 0 and below 1")


# lesson: the KV cache
class KVCache:
    """The keys and values of one layer in one text, allocated once for `length` positions.

    (torch.cat, as in the lesson, would copy all of them at every step.) The caller owns it, and
    counts in `start` the positions that it holds.
    """

    def __init__(self, config, batch_size, length, like):
        """like: a tensor, such as the embedding, whose dtype and device the cache takes."""
        shape = (batch_size, config.n_kv_head, length, config.n_embd // config.n_head)
        self.k, self.v = like.new_empty(shape), like.new_empty(shape)  # (B, G, length, C/H) each

    def append(self, k, v, start):
        """Store k and v (B, G, T, C/H) from position start on; return all up to their end."""
        total = start + k.size(2)
        if total > self.k.size(2):
            room = f"the cache has room for {self.k.size(2)} positions"
            raise ValueError(f"{room}: {k.size(2)} more do not fit after position {start}")
        self.k[:, :, start:total] = k
        self.v[:, :, start:total] = v
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
    qkv = F.linear(x, c_attn).view(B, T, H + 2 * G, C // H).transpose(1, 2)
    q, k, v = qkv.split_with_sizes([H, G, G], dim=1)  # (B, H, T, C/H), twice (B, G, T, C/H)
    if cache is not None:  # lesson: the KV cache; earlier k and v are looked up
        k, v = cache.append(k, v, start)  # (B, G, total, C/H) each
    # A single query is the newest position and may look at every key: no mask.
    mask = causal_mask(T, k.size(2), x.device) if T > 1 else None
    # lesson: grouped-query attention; if G < H, each head of k and v serves H/G heads of q
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=G < H)  # (B, H, T, C/H)
    return F.linear(y.transpose(1, 2).reshape(B, T, C), c_proj)  # (B, T, C)


def mlp(x, c_fc, c_proj):
    return F.linear(F.gelu(F.linear(x, c_fc), approximate="tanh"), c_proj)  # (B, T, C)


class Block(nn.Module):
    """One layer. Its weights have GPT-2's names; the parts are functions of them, because calling
    each as an nn.Module would nearly double the time of a step. So hooks on them, a bias added to
    them, or other modules put in their place (LoRA) have no effect: change `forward` instead."""

    def __init__(self, config):
        super().__init__()
        C, kv = config.n_embd, config.n_embd // config.n_head * config.n_kv_head
        self.config = config
        self.ln_1 = nn.LayerNorm(C, bias=False)
        self.attn = nn.ModuleDict({"c_attn": linear(C, C + 2 * kv), "c_proj": linear(C, C)})
        self.ln_2 = nn.LayerNorm(C, bias=False)
        self.mlp = nn.ModuleDict({"c_fc": linear(C, 4 * C), "c_proj": linear(4 * C, C)})
        parts = (self.ln_1, *self.attn.values(), self.ln_2, *self.mlp.values())
        self.weights = tuple(part.weight for part in parts)

    def forward(self, x, cache=None, start=0):
        ln_1, c_attn, attn_proj, ln_2, c_fc, mlp_proj = self.weights
        y = torch.layer_norm(x, ln_1.shape, ln_1)
        x = x + self.drop(attention(y, c_attn, attn_proj, self.config, cache, start))
        y = torch.layer_norm(x, ln_2.shape, ln_2)
        return x + self.drop(mlp(y, c_fc, mlp_proj))  # (B, T, C)

    def drop(self, x):
        return F.dropout(x, self.config.dropout) if self.training else x


def linear(n_in, n_out):
    return nn.Linear(n_in, n_out, bias=False)


class GPT(nn.Module):
    """The model: model(idx) -> (logits, None). Raises ValueError past block_size."""

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

    def hidden(self, idx, caches=None, start=0):
        """idx (B, T), the characters from position start on -> (B, T, C), for the output layer.

        caches: a KVCache for each layer, filled up to start. Raises ValueError past block_size.
        """
        end, block_size = start + idx.size(1), self.config.block_size
        if end > block_size:
            raise ValueError(f"position {end} is past block_size {block_size}; feed less")
        # lesson: positions from start
        x = self.wte(idx) + self.wpe.weight[start:end]  # (B, T, C)
        x = F.dropout(x, self.config.dropout, self.training)
        for i, block in enumerate(self.h):
            x = block(x, caches[i] if caches else None, start)
        return self.ln_f(x)

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
        self, idx, max_new_tokens, *, stop=None, constraint=None, use_cache=True, generator=None,
        **knobs,
    ):  # fmt: skip
        """Write up to max_new_tokens characters after each row of idx (B, T); return all the ids.

        knobs: temperature, top_k, top_p, as in `probabilities`. generator: as in `sample`.
        stop: an id that ends a row; a row that has ended is filled up with it, until all have.
        constraint: a function of the ids so far (B, t) -> which ids may come next, bool (V,) or
            (B, V). If each row has only one such id, it is forced: appended without the model.
        use_cache: False computes every position again at every step: the same ids, only slower.

        The model sees a window of block_size characters. When it is full, its older half is left
        out, and the rest is computed again from position 0: cached k and v hold old positions.
        In train mode dropout stays on, so that no two passes agree: call eval() first.
        Raises ValueError as `probabilities` does, and DecodingError, which names the step.
        """
        (B, T), block_size, wte = idx.shape, self.config.block_size, self.wte.weight
        room = max(1, min(block_size, T + max_new_tokens - 1))  # the last one written is never fed
        caches = [KVCache(self.config, B, room, wte) for _ in self.h] if use_cache else None
        window, start = max(0, T - block_size), 0  # where it begins in idx; its cached positions
        ended = torch.zeros(B, dtype=torch.bool, device=idx.device)
        for step in range(1, max_new_tokens + 1):
            if idx.size(1) - window > block_size:  # not in the lesson: the window moves on by half
                window, start = window + (block_size + 1) // 2, 0
            # lesson: constrained decoding; a row that has ended may have any id
            allowed = constraint(idx) | ended[:, None] if constraint else None  # (B, V)
            if allowed is not None and (ended | (allowed.sum(dim=-1) == 1)).all():
                # Forced, as an acrostic's heads and marks are. A later step feeds it to the model.
                next_id = allowed.int().argmax(dim=-1)  # (B,)
            else:
                # lesson: with a cache first the whole prompt (prefill), then only what is new
                # (decode); without one start stays 0, and the whole window is computed again
                new = idx[:, window + start :]  # (B, t)
                x = self.hidden(new, caches, start)[:, -1]  # (B, C), of the last position only
                start += new.size(1) if use_cache else 0
                logits = F.linear(x, wte)  # (B, V)
                if stop is not None and ended.any():
                    logits[ended] = 0  # whatever they are: NaN too
                try:
                    next_id = sample(logits, generator, allowed=allowed, **knobs)  # (B,)
                except DecodingError as error:
                    raise DecodingError(f"step {step}: {error}") from None
            if stop is not None:
                next_id = next_id.masked_fill(ended, stop)
                ended |= next_id == stop
            idx = torch.cat([idx, next_id[:, None]], dim=1)  # (B, t + 1)
            if stop is not None and ended.all():
                break
        with torch.inference_mode(False):
            return idx.clone()  # an ordinary tensor again, which can be written to and trained on


# Choosing the next character


class DecodingError(RuntimeError):
    """There is no next character to choose."""


def check_sampling(temperature, top_k, top_p):
    """Raise ValueError unless temperature is in [0, 1000000], top_k >= 1 and top_p in (0, 1]."""
    if not 0 <= temperature <= 1e6:
        raise ValueError(f"temperature is {temperature}; it must be from 0 to 1000000")
    if top_k is not None and not top_k >= 1:
        raise ValueError(f"top_k is {top_k}; it must be at least 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}; it must be above 0 and at most 1")


def probabilities(logits, *, temperature=1.0, top_k=None, top_p=None, allowed=None):
    """logits (B, V) -> the probabilities (B, V) of a draw, float32; 0 for what is ruled out.

    Applied in this order; the logits are not written to.
    allowed: which ids may come at all, bool (V,) or (B, V).
    temperature: the logits are divided by it; 0 keeps only the likeliest id, as top_k=1 does.
    top_k: keeps the k likeliest ids, exactly k even among ties; k >= V filters nothing.
    top_p: keeps the fewest, likeliest ids that reach probability p together (Holtzman et al. 2020).
    Raises ValueError as `check_sampling`, DecodingError for logits of NaN or +infinity, and if
    nothing is allowed.
    """
    check_sampling(temperature, top_k, top_p)
    logits = logits.float()
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
    probs = probabilities(logits, **knobs)
    shape = len(probs), sum(group_sizes(probs.size(1)))  # (B, K + W)
    noise = torch.rand(shape, generator=generator, device="cpu", dtype=torch.float32)
    return draw(probs, -noise.clamp_(min=2**-25).log_().to(probs.device))  # finite, and never 0


# lesson: torch.multinomial, which draws by the same probabilities
def draw(probs, noise):
    """Draw one id a row from probs (B, V), exactly by these probabilities -> ids (B,).

    Each candidate's probability is divided by an exponential random number of its own, and the
    largest result wins (the Gumbel-max trick, Gumbel 1954). A group of W neighbouring ids is drawn
    first, then one id in it: about 2 * sqrt(V) random numbers are enough, noise (B, K + W).
    On another device, or without the cache, rounding changes the last bits of probs; the same noise
    still gives the same id, except for a very rare near tie.
    """
    (B, V), (K, W) = probs.shape, group_sizes(probs.size(1))
    groups = F.pad(probs, (0, K * W - V)).view(B, K, W)
    group = (groups.sum(dim=-1) / noise[:, :K]).argmax(dim=-1)  # (B,)
    members = groups[torch.arange(B, device=probs.device), group]  # (B, W)
    return group * W + (members / noise[:, K:]).argmax(dim=-1)


def group_sizes(V):
    """(K, W): V ids make K groups of W, the last one padded; both are about sqrt(V)."""
    W = math.isqrt(V - 1) + 1
    return -(-V // W), W


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
