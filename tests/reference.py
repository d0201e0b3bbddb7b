"""The same network once more, in NumPy alone and sharing nothing with gpt.py: what the tests compare gpt.py with.

`weights` is a dict of arrays by the names in a checkpoint: wte.weight, h.0.attn.c_attn.weight and so on.
The matrices are (out, in), and nothing has a bias. T characters, C dimensions, H heads, G of keys and values, V
characters known.
"""

import numpy as np


def layer_norm(x, weight):
    x = x - x.mean(axis=-1, keepdims=True)
    return weight * x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5)


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.float32(np.sqrt(2 / np.pi)) * (x + 0.044715 * x * x * x)))


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def n_layer(weights):
    return sum(name.endswith("attn.c_attn.weight") for name in weights)


def kv_heads(weights, n_head):
    """G, the heads of keys and values: what c_attn has beside the C rows of the queries."""
    C = weights["wpe.weight"].shape[1]
    return (len(weights["h.0.attn.c_attn.weight"]) - C) * n_head // (2 * C)


def new_cache(weights, n_head):
    """Room for the keys and values of every layer and position: (layers, 2, G, block_size, C/H)."""
    block_size, C = weights["wpe.weight"].shape
    return np.zeros((n_layer(weights), 2, kv_heads(weights, n_head), block_size, C // n_head), np.float32)


def logits(weights, n_head, ids, cache=None, start=0):
    """ids, the characters at positions start .. start+T -> logits (T, V), float32.

    cache: a `new_cache` filled up to position start; it is filled up to start+T. Without one, start is 0.
    """
    cache = new_cache(weights, n_head) if cache is None else cache
    T, total = len(ids), start + len(ids)
    x = weights["wte.weight"][ids] + weights["wpe.weight"][start:total]  # (T, C)
    C, D, G = x.shape[1], x.shape[1] // n_head, kv_heads(weights, n_head)
    future = np.arange(total) > np.arange(start, total)[:, None]  # (T, total)
    for i in range(n_layer(weights)):
        w = {
            part: weights[f"h.{i}.{part}.weight"]
            for part in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
        }
        qkv = layer_norm(x, w["ln_1"]) @ w["attn.c_attn"].T  # (T, C + 2 * G * C/H)
        q, k, v = (part.reshape(T, -1, D).transpose(1, 0, 2) for part in np.split(qkv, [C, C + G * D], axis=1))
        cache[i, 0, :, start:total], cache[i, 1, :, start:total] = k, v
        k, v = cache[i, :, :, :total].repeat(n_head // G, axis=1)  # (H, total, C/H) each
        scores = q @ k.transpose(0, 2, 1) / np.float32(np.sqrt(C // n_head))  # (H, T, total)
        scores[:, future] = -np.inf
        x = x + (softmax(scores) @ v).transpose(1, 0, 2).reshape(T, C) @ w["attn.c_proj"].T
        x = x + gelu(layer_norm(x, w["ln_2"]) @ w["mlp.c_fc"].T) @ w["mlp.c_proj"].T
    return layer_norm(x, weights["ln_f.weight"]) @ weights["wte.weight"].T


def generate(weights, n_head, ids, rng, temperature=1.0):
    """Yield the ids that follow ids, drawn with the cache, until the window (block_size) is full."""
    cache, start = new_cache(weights, n_head), 0
    while start + len(ids) <= len(weights["wpe.weight"]):
        mass = np.cumsum(softmax(logits(weights, n_head, ids, cache, start)[-1] / np.float32(temperature)), dtype=float)
        start += len(ids)
        ids = [int(np.searchsorted(mass, rng.random() * mass[-1], side="right"))]
        yield ids[0]
