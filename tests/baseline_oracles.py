"""The mixers of other papers in NumPy float64, written from their formulas.

Every function takes the parameters `p` as nested dictionaries, points x [*B, N, C]
and a mask [*B, N] or None. A point that is masked is taken out before anything is
computed, and 0 stands in its place in the result.
"""

import math

import numpy as np

import oracles
from oracles import wide

_erf = np.vectorize(math.erf, otypes=[float])


def exact_gelu(x):
    """x Phi(x)."""
    return 0.5 * wide(x) * (1 + _erf(wide(x) / np.sqrt(2)))


def linear(p, x):
    """x W + b; b may be absent."""
    y = wide(x) @ wide(p["kernel"])
    return y + wide(p["bias"]) if "bias" in p else y


def columns(p, part):
    """The linear map to the outputs in `part` alone."""
    return {name: wide(x)[..., part] for name, x in p.items()}


def norm(p, x, kind="layer", *, eps=None):
    """Over the last axis; without parameters where p is empty."""
    function = {"layer": oracles.layer_norm, "rms": oracles.rms_norm}[kind]
    options = {} if eps is None else {"eps": eps}
    return function(x, **p, **options)


def split(x, heads):
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)


def merge(x):
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def parts(channels, heads):
    """The channels of each head."""
    width = channels // heads
    return [slice(h * width, (h + 1) * width) for h in range(heads)]


def attend(q, k, v, heads, *, scale=None):
    """Attention of q [Q, C] to k, v [N, C], head by head."""
    y, _ = oracles.attention(*(split(x, heads) for x in (q, k, v)), scale=scale)
    return merge(y)


def softmax(x):
    """Over the last axis."""
    y = np.empty(x.shape)
    for i in np.ndindex(*x.shape[:-1]):
        y[i] = oracles.softmax(x[i])
    return y


def items(batch, points, mask):
    """The index of each batch item and the indices of its real points."""
    for b in np.ndindex(*batch):
        yield b, np.arange(points) if mask is None else np.flatnonzero(mask[b])


def each(function, outputs, mask, *arrays):
    """Applies function(*rows) to the real rows of each item of arrays [*B, N, ...]."""
    *batch, points, _ = np.shape(arrays[0])
    mask = None if mask is None else np.asarray(mask)
    y = np.zeros((*batch, points, outputs))
    for b, real in items(batch, points, mask):
        if len(real):
            y[b][real] = function(*(wide(x)[b][real] for x in arrays))
    return y


# Transolver, Transolver-3 and Transolver++: slices of points, attention among them.


def average(w, v):
    """Means of v [N, C] by the weights of each slice, w [N, M]."""
    return np.stack([(w_m @ v) / (w_m.sum() + 1e-5) for w_m in w.T])


def among_slices(p, tokens):
    q, k, v = (linear(p[name], tokens) for name in ("query", "key", "value"))
    return attend(q, k, v, 1)


def _temperature(p, h, clamp):
    temperature = float(p["temperature"][h])
    return min(max(temperature, 0.1), 5.0) if clamp else temperature


def transolver(p, x, mask, *, heads, clamp=True):
    """w = softmax_M(slice(point(x)) / t); y = w attention(mean_w(feature(x)))."""

    def item(x):
        point, feature = linear(p["point"], x), linear(p["feature"], x)
        y = np.empty(x.shape)
        for h, part in enumerate(parts(x.shape[-1], heads)):
            logits = linear(p["slice"], point[:, part])
            w = softmax(logits / _temperature(p, h, clamp))
            y[:, part] = w @ among_slices(p, average(w, feature[:, part]))
        return linear(p["out"], y)

    return each(item, np.shape(x)[-1], mask, x)


def transolver3(p, x, mask, *, heads, clamp=True):
    """Averages points in the input space and maps slices, not points, to outputs."""

    def item(x):
        channels = x.shape[-1]
        feature = columns(p["project"], slice(0, channels))
        point = columns(p["project"], slice(channels, None))
        y = np.zeros(x.shape)
        for h, part in enumerate(parts(channels, heads)):
            logits = linear(p["slice"], linear(columns(point, part), x))
            w = softmax(logits / _temperature(p, h, clamp))
            tokens = linear(columns(feature, part), average(w, x))
            y += w @ (among_slices(p, tokens) @ wide(p["out"]["kernel"])[part])
        return y + wide(p["out"]["bias"])

    return each(item, np.shape(x)[-1], mask, x)


def transolverpp(p, x, mask, *, heads, gumbel_u=None):
    """A temperature of each point, and noise from uniforms gumbel_u [*B, H, N, M]."""

    def item(x, *noise):
        point = linear(p["point"], x)
        y = np.empty(x.shape)
        for h, part in enumerate(parts(x.shape[-1], heads)):
            logits = linear(p["slice"], point[:, part])
            for u in noise:
                logits = logits - np.log(-np.log(u[:, h] + 1e-8) + 1e-8)
            head = p["temperature_head"]
            t = exact_gelu(linear(head["first"], point[:, part]))
            t = exact_gelu(linear(head["last"], t))
            w = softmax(logits / np.maximum(t + wide(p["offset"])[h], 0.01))
            y[:, part] = w @ among_slices(p, average(w, point[:, part]))
        return linear(p["out"], y)

    noise = [] if gumbel_u is None else [np.swapaxes(wide(gumbel_u), -3, -2)]
    return each(item, np.shape(x)[-1], mask, x, *noise)


def ablated_flarepp(
    p,
    x,
    mask,
    *,
    heads,
    seed_norm=False,
    synthesis_key_norm=False,
    synthesis_value_norm=False,
    query_norm=False,
    key_norm=False,
    reference_norm=False,
    share=False,
    gate=None,
    kind="layer",
):
    """q = reference + g attention(seeds, k0, v0); y = flare(q, k, v).

    Each norm is False, True (without parameters) or "affine". The gate is "sigmoid",
    "raw" or None, which leaves out g and the reference.
    """

    def normed(option, name, x):
        if not option:
            return x
        return norm(p[name] if option == "affine" else {}, x, kind)

    seeds = normed(seed_norm, "seed_norm", wide(p["seeds"]))

    def item(x):
        k0 = split(linear(p["synthesis_key"], x), heads)
        v0 = k0 if share else split(linear(p["synthesis_value"], x), heads)
        k0 = normed(synthesis_key_norm, "synthesis_key_norm", k0)
        v0 = normed(synthesis_value_norm, "synthesis_value_norm", v0)
        q, _ = oracles.gather(seeds, k0, v0)
        if gate is not None:
            g = wide(p["gate"])[:, None, None]
            g = 1 / (1 + np.exp(-g)) if gate == "sigmoid" else g
            reference = normed(reference_norm, "reference_norm", wide(p["reference"]))
            q = reference + g * q
        q = normed(query_norm, "query_norm", q)
        k = split(linear(p["key"], x), heads)
        k = normed(key_norm, "key_norm", k)
        v = split(linear(p["value"], x), heads)
        return linear(p["out"], merge(oracles.flare(q, k, v)))

    return each(item, np.shape(x)[-1], mask, x)


def luna_attention(p, x, w, mask, *, heads):
    """Y_p = attention(w, x, x) [*B, M, C] and Y_x = out(attention(x, Y_p, Y_p))."""
    x, w = wide(x), wide(w)
    mask = None if mask is None else np.asarray(mask)
    y_x, y_p = np.zeros(x.shape), np.empty(w.shape)
    for b, real in items(x.shape[:-2], x.shape[-2], mask):
        u = x[b][real]
        pack = [linear(p[f"pack_{name}"], u) for name in ("key", "value")]
        y_p[b] = attend(linear(p["pack_query"], w[b]), *pack, heads)
        unpack = [linear(p[name], y_p[b]) for name in ("key", "value")]
        y = attend(linear(p["query"], u), *unpack, heads)
        y_x[b][real] = linear(p["out"], y)
    return y_x, y_p


def rotary_table(coords, width, *, coordinate_scale=1000.0):
    """Cosine and sine [*B, N, width / 2] of the angles of each pair of channels.

    The frequencies of the first axis come first; the pairs left over do not turn.
    """
    coords = wide(coords)
    axes = coords.shape[-1]
    usable = width // axes
    usable -= usable % 2
    angles = np.zeros((*coords.shape[:-1], width // 2))
    pair = 0
    for axis in range(axes):
        for i in range(0, usable, 2):
            omega = 10000.0 ** (-i / usable)
            angles[..., pair] = coordinate_scale * coords[..., axis] * omega
            pair += 1
    return np.cos(angles), np.sin(angles)


def rotate(x, cos, sin):
    """(a, b) -> (a cos - b sin, a sin + b cos) of adjacent channels of x [N, H, D]."""
    y = np.array(x)
    for j in range(x.shape[-1] // 2):
        a, b = x[..., 2 * j], x[..., 2 * j + 1]
        c, s = cos[..., j, None], sin[..., j, None]
        y[..., 2 * j], y[..., 2 * j + 1] = a * c - b * s, a * s + b * c
    return y


def anchor_attention(
    p,
    x,
    mask,
    *,
    heads,
    coords,
    anchors,
    coordinate_scale=1000.0,
    anchor_mask=None,
):
    """All points attend to the points at `anchors` [A] or [*B, A]."""
    x = wide(x)
    *batch, points, channels = x.shape
    mask = None if mask is None else np.asarray(mask)
    anchors = np.broadcast_to(anchors, (*batch, np.shape(anchors)[-1]))
    used = True if anchor_mask is None else np.asarray(anchor_mask)
    used = np.broadcast_to(used, anchors.shape)
    q, k, v = (columns(p["qkv"], part) for part in parts(3 * channels, 3))
    scale = {"coordinate_scale": coordinate_scale}
    y = np.zeros(x.shape)
    for b, real in items(batch, points, mask):
        seen = [a for a, use in zip(anchors[b], used[b], strict=True) if use]
        seen = [a for a in seen if a in real]

        def turned(p, rows, b=b):
            h = split(linear(p, x[b][rows]), heads)
            table = rotary_table(wide(coords)[b][rows], channels // heads, **scale)
            return rotate(h, *table)

        values = split(linear(v, x[b][seen]), heads)
        h, _ = oracles.attention(turned(q, real), turned(k, seen), values)
        y[b][real] = linear(p["out"], merge(h))
    return y


def _multihead_block(p, a, b, heads):
    """h = LN(q + attention(q, k, v)); LN(h + gelu(out(h))). The scale is C^(-1/2)."""
    q = linear(p["query"], a)
    k, v = linear(p["key"], b), linear(p["value"], b)
    y = attend(q, k, v, heads, scale=q.shape[-1] ** -0.5)
    h = norm(p["attention_norm"], q + y)
    return norm(p["output_norm"], h + exact_gelu(linear(p["out"], h)))


def induced_attention(p, x, mask, *, heads):
    """Inducing points read the points, and the points read them."""

    def item(x):
        induced = _multihead_block(p["induce"], wide(p["inducing"]), x, heads)
        return _multihead_block(p["read"], x, induced, heads)

    return each(item, np.shape(x)[-1], mask, x)
