"""The same network once more, in NumPy alone and sharing nothing with gpt.py: what the tests compare gpt.py with.

`weights` is a dict of arrays by the names in a checkpoint: wte.weight, h.0.attn.c_attn.weight and so on.
The matrices are (out, in), and nothing has a bias. T characters, C dimensions, H heads of D = C/H dimensions,
G of them for keys and values, V characters known.
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


def sizes(weights, n_head):
    """(layers, G, D): G, the heads of keys and values, follows from the shape of c_attn, (C + 2 * G * D, C)."""
    layers = sum(name.endswith("attn.c_attn.weight") for name in weights)
    rows, C = weights["h.0.attn.c_attn.weight"].shape
    D = C // n_head
    return layers, (rows - C) // (2 * D), D


def new_cache(weights, n_head):
    """Room for the keys and values of every layer and position: (layers, 2, G, block_size, D)."""
    layers, G, D = sizes(weights, n_head)
    return np.zeros((layers, 2, G, len(weights["wpe.weight"]), D), np.float32)


def logits(weights, n_head, ids, cache=None, start=0):
    """ids, the characters at positions start .. start+T -> logits (T, V), float32.

    cache: a `new_cache` filled up to position start; it is filled up to start+T. Without one, start is 0.
    """
    cache = new_cache(weights, n_head) if cache is None else cache
    (layers, G, D), T, total = sizes(weights, n_head), len(ids), start + len(ids)
    x = weights["wte.weight"][ids] + weights["wpe.weight"][start:total]  # (T, C)
    C = x.shape[1]
    future = np.arange(total) > np.arange(start, total)[:, None]  # (T, total)
    for i in range(layers):
        parts = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
        w = {part: weights[f"h.{i}.{part}.weight"] for part in parts}
        qkv = layer_norm(x, w["ln_1"]) @ w["attn.c_attn"].T  # (T, C + 2 * G * D)
        q, k, v = (part.reshape(T, -1, D).transpose(1, 0, 2) for part in np.split(qkv, [C, C + G * D], axis=1))
        cache[i, 0, :, start:total], cache[i, 1, :, start:total] = k, v
        q = q.reshape(G, -1, T, D)  # (G, H/G, T, D): neighbouring heads of q share one of k and v
        k, v = cache[i, :, :, None, :total]  # (G, 1, total, D) each
        scores = q @ k.swapaxes(2, 3) / np.float32(np.sqrt(D))  # (G, H/G, T, total)
        scores[..., future] = -np.inf
        y = (softmax(scores) @ v).reshape(n_head, T, D).transpose(1, 0, 2).reshape(T, C)
        x = x + y @ w["attn.c_proj"].T
        x = x + gelu(layer_norm(x, w["ln_2"]) @ w["mlp.c_fc"].T) @ w["mlp.c_proj"].T
    return layer_norm(x, weights["ln_f.weight"]) @ weights["wte.weight"].T


def loss(weights, n_head, ids, targets):
    """The mean cross-entropy in nats of targets (T,) after ids (T,); a target of -100 does not count."""
    probs = softmax(logits(weights, n_head, ids).astype(np.float64))
    counted = targets != -100
    return -np.log(probs[counted, targets[counted]]).mean()


def generate(weights, n_head, ids, rng, temperature=1.0):
    """Yield the ids that follow ids, drawn with the cache, until the window (block_size) is full."""
    cache, start = new_cache(weights, n_head), 0
    while start + len(ids) <= len(weights["wpe.weight"]):
        mass = np.cumsum(softmax(logits(weights, n_head, ids, cache, start)[-1] / np.float32(temperature)), dtype=float)
        start += len(ids)
        ids = [int(np.searchsorted(mass, rng.random() * mass[-1], side="right"))]
        yield ids[0]
