"""Relation in NumPy float64 with loops, written from the formulas."""

import numpy as np
from scipy.special import expit as sigmoid


def wide(x):
    return np.asarray(x, np.float64)


def silu(x):
    return x * sigmoid(x)


def silu_gradient(x):
    s = sigmoid(x)
    return s + x * s * (1 - s)


def exchange(p1, p2, identity, seen):
    """read [B, Q, H, E] and L [B, H, Q], the keys seen [B, Q, N] being given."""
    p1, p2, identity = wide(p1), wide(p2), wide(identity)
    batch, queries, heads, width = p1.shape
    read = np.zeros((batch, queries, heads, identity.shape[-1]))
    log_mass = np.full((batch, heads, queries), -np.inf)
    for b, i, h in np.ndindex(batch, queries, heads):
        js = np.flatnonzero(seen[b, i])
        if len(js):
            e = np.array([silu(p1[b, i, h] @ p2[b, j, h] / width**0.5) for j in js])
            p = np.exp(e - e.max())
            read[b, i, h] = sum(
                w * identity[b, j, h] for w, j in zip(p / p.sum(), js, strict=True)
            )
            log_mass[b, h, i] = e.max() + np.log(p.sum())
    return read, log_mass


def exchange_vjp(p1, p2, identity, seen, dread, dlog):
    """Gradients of sum(dread read) + sum(dlog L)."""
    p1, p2, identity = wide(p1), wide(p2), wide(identity)
    dread, dlog = wide(dread), wide(dlog)
    dp1, dp2, dident = np.zeros_like(p1), np.zeros_like(p2), np.zeros_like(identity)
    batch, queries, heads, width = p1.shape
    for b, i, h in np.ndindex(batch, queries, heads):
        js = np.flatnonzero(seen[b, i])
        if not len(js):
            continue
        u = np.array([p1[b, i, h] @ p2[b, j, h] / width**0.5 for j in js])
        p = np.exp(silu(u) - silu(u).max())
        p = p / p.sum()
        jacobian = np.diag(p) - np.outer(p, p)
        de = jacobian @ (identity[b, js, h] @ dread[b, i, h]) + p * dlog[b, h, i]
        du = de * silu_gradient(u) / width**0.5
        dp1[b, i, h] += du @ p2[b, js, h]
        dp2[b, js, h] += np.outer(du, p1[b, i, h])
        dident[b, js, h] += np.outer(p, dread[b, i, h])
    return dp1, dp2, dident


def flow(p1, p2, lam, positions, tau=2.0):
    """F [B, H, T, T], row by row from its definition; rows of padding are 0."""
    p1, p2 = wide(p1), wide(p2)
    batch, tokens, heads, width = p1.shape
    result = np.zeros((batch, heads, tokens, tokens))
    for b, h, t in np.ndindex(batch, heads, tokens):
        i = positions[b, t]
        if not i:
            continue
        u = [p1[b, t, h] @ p2[b, j, h] / width**0.5 for j in range(t - i + 1, t + 1)]
        row = [silu(x) - lam * np.log(i) for x in u[:-1]] + [sigmoid(u[-1] / tau)]
        row = np.exp(np.array(row) - max(row))
        result[b, h, t, t - i + 1 : t + 1] = row / row.sum()
    return result


def relation(p1, p2, identity, lam, positions, *, tau=2.0, own=True):
    """Y [B, T, H, E]; without `own`, of earlier tokens alone."""
    weights = flow(p1, p2, lam, positions, tau)
    if not own:
        weights = np.tril(weights, -1)
    return np.einsum("bhij,bjhe->bihe", weights, wide(identity))


def relation_vjp(p1, p2, identity, lam, positions, dy, *, tau=2.0, own=True):
    """Gradients of sum(dy Y) by p1, p2, identity and lam."""
    weights = flow(p1, p2, lam, positions, tau)
    p1, p2, identity, dy = wide(p1), wide(p2), wide(identity), wide(dy)
    moved = weights if own else np.tril(weights, -1)
    dp1, dp2, dlam = np.zeros_like(p1), np.zeros_like(p2), 0.0
    dident = np.einsum("bhij,bihe->bjhe", moved, dy)
    batch, tokens, heads, width = p1.shape
    for b, h, t in np.ndindex(batch, heads, tokens):
        f, i = weights[b, h, t], positions[b, t]
        df = identity[b, :, h] @ dy[b, t, h]
        df = df * (np.arange(tokens) < t + own)
        dr = (np.diag(f) - np.outer(f, f)) @ df
        for j in np.flatnonzero(f):
            u = p1[b, t, h] @ p2[b, j, h] / width**0.5
            if j == t:
                s = sigmoid(u / tau)
                du = dr[j] * s * (1 - s) / tau
            else:
                du = dr[j] * silu_gradient(u)
                dlam -= dr[j] * np.log(i)
            dp1[b, t, h] += du * p2[b, j, h] / width**0.5
            dp2[b, j, h] += du * p1[b, t, h] / width**0.5
    return dp1, dp2, dident, np.asarray(dlam)
