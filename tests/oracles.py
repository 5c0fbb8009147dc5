"""What the library computes, in NumPy float64 with loops, written from the formulas.

Slow and plain on purpose. Only rows that a mask lets through are ever looked at.
"""

import numpy as np


def wide(x):
    return np.asarray(x, np.float64)


def softmax(s):
    p = np.exp(s - s.max())
    return p / p.sum()


def _row(q, keys, values, scale):
    """One query: y = sum_n p_n v_n and L = log sum_n exp(scale q k_n)."""
    if len(keys) == 0:
        return np.zeros(values.shape[-1]), -np.inf
    s = np.array([scale * np.dot(q, key) for key in keys])
    y = sum(p * value for p, value in zip(softmax(s), values, strict=True))
    return y, s.max() + np.log(np.exp(s - s.max()).sum())


def _row_vjp(q, keys, values, scale, dy, dlog):
    """Derivative of `_row` by the Jacobian of softmax, diag(p) - p p^T."""
    p = softmax(np.array([scale * np.dot(q, key) for key in keys]))
    jacobian = np.diag(p) - np.outer(p, p)
    ds = jacobian @ (values @ dy) + p * dlog
    return scale * ds @ keys, scale * np.outer(ds, q), np.outer(p, dy)


def _rows(batch, queries, points, heads, mask, seen):
    """Every (batch item, head, query) with the keys that it sees."""
    for b in np.ndindex(*batch):
        for h in range(heads):
            for i in range(queries):
                sees = [
                    n
                    for n in range(points)
                    if (mask is None or mask[b][n]) and (seen is None or seen[b][i, n])
                ]
                yield b, h, i, sees


def attention(q, k, v, *, mask=None, seen=None, scale=None):
    """q [*B, Q, H, D], k [*B, N, H, D], v [*B, N, H, E]; y [*B, Q, H, E], L [*B, H, Q].

    Each query sees the keys that both `mask` [*B, N] and `seen` [*B, Q, N] let through.
    """
    q, k, v = wide(q), wide(k), wide(v)
    mask = None if mask is None else np.asarray(mask)
    *batch, queries, heads, width = q.shape
    scale = width**-0.5 if scale is None else scale
    y = np.empty((*batch, queries, heads, v.shape[-1]))
    log_mass = np.empty((*batch, heads, queries))
    for b, h, i, sees in _rows(batch, queries, k.shape[-3], heads, mask, seen):
        y[(*b, i, h)], log_mass[(*b, h, i)] = _row(
            q[(*b, i, h)], k[b][sees, h], v[b][sees, h], scale
        )
    return y, log_mass


def attention_vjp(q, k, v, dy, dlog, *, mask=None, seen=None, scale=None):
    """Gradients of sum(dy y) + sum(dlog L) by q, k and v."""
    q, k, v, dy, dlog = wide(q), wide(k), wide(v), wide(dy), wide(dlog)
    mask = None if mask is None else np.asarray(mask)
    *batch, queries, heads, width = q.shape
    scale = width**-0.5 if scale is None else scale
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for b, h, i, sees in _rows(batch, queries, k.shape[-3], heads, mask, seen):
        if sees:
            dq[(*b, i, h)], dkeys, dvalues = _row_vjp(
                q[(*b, i, h)],
                k[b][sees, h],
                v[b][sees, h],
                scale,
                dy[(*b, i, h)],
                dlog[(*b, h, i)],
            )
            dk[b][sees, h] += dkeys
            dv[b][sees, h] += dvalues
    return dq, dk, dv


def _rows_first(latents, batch):
    """[..., H, M, D], with the batch or without, to [*B, M, H, D]."""
    latents = wide(latents)
    latents = np.broadcast_to(latents, (*batch, *latents.shape[-3:]))
    return np.swapaxes(latents, -3, -2)


def gather(q, k, v=None, *, mask=None, scale=None):
    """z = softmax_N(scale q k^T) v [*B, H, M, E] and L [*B, H, M]."""
    batch, v = np.shape(k)[:-3], k if v is None else v
    z, log_mass = attention(_rows_first(q, batch), k, v, mask=mask, scale=scale)
    return np.swapaxes(z, -3, -2), log_mass


def gather_vjp(q, k, v, dz, dlog, *, mask=None, scale=None):
    """Gradients by q (summed over the batch that it lacks), k and v."""
    batch = np.shape(k)[:-3]
    dq, dk, dv = attention_vjp(
        *(_rows_first(q, batch), k, v, _rows_first(dz, batch), dlog),
        mask=mask,
        scale=scale,
    )
    return _sum_to(np.swapaxes(dq, -3, -2), q), dk, dv


def scatter(k, q, z, *, mask=None, scale=None):
    """y = softmax_M(scale k q^T) z [*B, N, H, E], 0 where masked."""
    k = _zeroed(k, mask)
    batch = k.shape[:-3]
    y, _ = attention(k, _rows_first(q, batch), _rows_first(z, batch), scale=scale)
    return _zeroed(y, mask)


def scatter_vjp(k, q, z, dy, *, mask=None, scale=None):
    """Gradients by k, q (summed over the batch that it lacks) and z."""
    k, dy = _zeroed(k, mask), _zeroed(dy, mask)
    batch, rows = k.shape[:-3], (*k.shape[:-3], k.shape[-2], k.shape[-3])
    dk, dq, dz = attention_vjp(
        *(k, _rows_first(q, batch), _rows_first(z, batch), dy, np.zeros(rows)),
        scale=scale,
    )
    return dk, _sum_to(np.swapaxes(dq, -3, -2), q), np.swapaxes(dz, -3, -2)


def _zeroed(x, mask):
    x = wide(x)
    return x if mask is None else np.where(np.asarray(mask)[..., None, None], x, 0)


def _sum_to(gradient, x):
    extra = gradient.ndim - np.ndim(x)
    return gradient.sum(tuple(range(extra)))


def flare(q, k, v, *, mask=None, scale=None):
    z, _ = gather(q, k, v, mask=mask, scale=scale)
    return scatter(k, q, z, mask=mask, scale=scale)


def synthesize(seeds, k0, v0=None, *, reference=None, gate=None, mask=None):
    """q = reference + sigmoid(gate) softmax_N(seeds k0^T / sqrt(D)) v0."""
    q, _ = gather(seeds, k0, v0, mask=mask)
    if reference is None:
        return q
    for h, logit in enumerate(wide(gate)):
        q[..., h, :, :] /= 1 + np.exp(-logit)
        q[..., h, :, :] += wide(reference)[h]
    return q


def flarepp(seeds, k0, v0, k, v, *, reference=None, gate=None, mask=None):
    q = synthesize(seeds, k0, v0, reference=reference, gate=gate, mask=mask)
    return flare(q, k, v, mask=mask)


def _along(function, axis, *arrays):
    """Applies function(*rows) -> row to the rows along `axis`."""
    arrays = [np.moveaxis(wide(x), axis, -1) for x in arrays]
    y = np.empty(arrays[0].shape)
    for i in np.ndindex(*y.shape[:-1]):
        y[i] = function(*(x[i] for x in arrays))
    return np.moveaxis(y, -1, axis)


def layer_norm(x, scale=None, bias=None, *, axis=-1, eps=1e-5):
    """(x - mean) / sqrt(var + eps) scale + bias, with the biased variance."""
    scale = 1.0 if scale is None else wide(scale)
    bias = 0.0 if bias is None else wide(bias)

    def row(x):
        d = x - sum(x) / len(x)
        return d / np.sqrt(sum(d**2) / len(x) + eps) * scale + bias

    return _along(row, axis, x)


def rms_norm(x, scale=None, *, axis=-1, eps=1e-6):
    """x / sqrt(mean x^2 + eps) scale."""
    scale = 1.0 if scale is None else wide(scale)
    row = lambda x: x / np.sqrt(sum(x**2) / len(x) + eps) * scale
    return _along(row, axis, x)


def norm_vjp(x, scale, dy, *, axis=-1, eps, center):
    """Gradients by x, scale and bias, from the Jacobian of one row."""
    count = np.shape(x)[axis]
    factor = np.ones(count) if scale is None else wide(scale)
    project = np.eye(count) - (np.ones((count, count)) / count if center else 0)

    def plain(x):
        d = project @ x
        return d / np.sqrt(np.dot(d, d) / count + eps)

    def row(x, dy):
        d = project @ x
        r = 1 / np.sqrt(np.dot(d, d) / count + eps)
        jacobian = (r * np.eye(count) - r**3 * np.outer(d, d) / count) @ project
        return jacobian.T @ (factor * dy)

    others = tuple(i for i in range(np.ndim(x)) if i != axis % np.ndim(x))
    dscale = (wide(dy) * _along(plain, axis, x)).sum(others)
    return _along(row, axis, x, dy), dscale, wide(dy).sum(others)


def gelu(x):
    """x Phi(x) in the tanh approximation."""
    x = wide(x)
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def linear(p, x, *, skip=False):
    """x W + b, or x + x W + b; p holds `kernel` [I, O] and `bias` [O]."""
    x = wide(x)
    y = np.empty((*x.shape[:-1], p["kernel"].shape[1]))
    for o in range(y.shape[-1]):
        y[..., o] = (x * p["kernel"][:, o]).sum(-1) + p["bias"][o]
    return x + y if skip else y


def residual_mlp(p, x, *, input_residual=False, output_residual=False):
    """p holds `first`, `hidden` {0, 1, ...} and `last`.

    A residual between unequal widths is left out.
    """
    x = wide(x)
    h = gelu(linear(p["first"], x))
    if input_residual and h.shape == x.shape:
        h = h + x
    for i in range(len(p.get("hidden", {}))):
        h = h + gelu(linear(p["hidden"][i], h))
    y = linear(p["last"], h)
    return y + h if output_residual and y.shape == h.shape else y
