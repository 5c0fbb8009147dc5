"""Softmax attention with its log-normaliser, streamed over the keys.

    y = softmax_N(scale q k^T) v,   L = log sum_N exp(scale q k^T)

The derivative recomputes the probabilities from y and L, block by block (eqs. 39-49
of arXiv:2608.11519, appendix B), so neither direction ever holds more than one block
of scores. Scores, exponentials, sums and log-normalisers are float32 (float64 for
float64 inputs); products take operands in the input's dtype and add up in float32.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Key

from flaxmix.ops.ring import around, hop
from flaxmix.ops.stream import (
    accumulator,
    align,
    block_size,
    check_dropout,
    cut,
    dot,
    drop,
    fold,
    put,
    shard_key,
    zeros,
)


def _scores(q, k, mask, causal, start, size, points):
    k = cut(k, start, size)
    s = dot("bhmd,bhdn->bhmn", q, k, k.dtype)
    if mask is not None:
        s = jnp.where(cut(mask, start, size)[:, None, None, :], s, -jnp.inf)
    if causal:
        # Aligned bottom-right: the last query sees every key.
        query = jnp.arange(q.shape[2])[:, None] + (points - q.shape[2])
        s = jnp.where(start + jnp.arange(size) <= query, s, -jnp.inf)
    return s


def finite(x: Array) -> Array:
    """Replaces the -inf of an empty row, so that differences stay defined."""
    return jnp.where(jnp.isfinite(x), x, 0.0)


def _product(p, values, key, dropout, start, n, dtype):
    p = drop(p, key, dropout, start)
    return dot("bhmn,bhdn->bhmd", p, cut(values, start, n), dtype)


def _nothing(q, k, values):
    """Running maximum, mass and y, not yet divided by the mass, of no keys."""
    rows, acc = q.shape[:-1], accumulator(k.dtype)
    return (
        zeros(k, rows, acc, fill=-jnp.inf),
        zeros(k, rows, acc),
        zeros(k, (*rows, values.shape[2]), acc),
    )


def _absorb(carry, q, k, values, mask, key, causal, dropout, block):
    """Running maximum, mass and y with these keys, too."""
    points = k.shape[-1]

    def body(start, n, carry):
        top, mass, y = carry
        s = _scores(q, k, mask, causal, start, n, points)
        new = jnp.maximum(top, s.max(-1))
        shift = finite(new)
        p, decay = jnp.exp(s - shift[..., None]), jnp.exp(top - shift)
        part = _product(p, values, key, dropout, start, n, k.dtype)
        return new, decay * mass + p.sum(-1), decay[..., None] * y + part

    return fold(points, block_size(q, points, block), body, carry)


def _normalise(top, mass, y, dtype):
    """y and L, and what of them the derivative needs."""
    some = mass > 0
    safe = jnp.where(some, mass, 1.0)
    y = y / safe[..., None]
    log_mass = jnp.where(some, finite(top) + jnp.log(safe), -jnp.inf)
    # Not the log-normaliser alone: where scores are in the hundreds, its last digit is
    # worth 1e-5 of a probability.
    return (y.astype(dtype), log_mass), (y, finite(top), 1 / safe)


def _gradients(q, k, v, mask, key, rows, causal, dropout, block, dtype=None):
    """dq by these keys, and their dk and dv in the given dtype or their own.

    rows: dy, sum dy y - dL, the maximum and the inverse of the mass of each query.
    """
    dy, row, top, inverse = rows
    operand, points = k.dtype, k.shape[-1]
    values = k if v is None else v

    def body(start, n, carry):
        dq, dk, dv = carry
        kk, vv = cut(k, start, n), cut(values, start, n)
        s = _scores(q, k, mask, causal, start, n, points)
        p = jnp.exp(s - top[..., None]) * inverse[..., None]
        dp = drop(dot("bhmd,bhdn->bhmn", dy, vv, operand), key, dropout, start)
        ds = p * (dp - row[..., None])
        dq = dq + dot("bhmn,bhdn->bhmd", ds, kk, operand)
        dkk = dot("bhmd,bhmn->bhdn", q, ds, operand)
        dvv = dot("bhmd,bhmn->bhdn", dy, drop(p, key, dropout, start), operand)
        if v is None:
            return dq, put(dk, dkk + dvv, start), None
        return dq, put(dk, dkk, start), put(dv, dvv, start)

    init = (
        zeros(k, q.shape, top.dtype),
        jnp.zeros_like(k, dtype),
        None if v is None else jnp.zeros_like(v, dtype),
    )
    return fold(points, block_size(q, points, block), body, init)


def _rows(kept, cotangents):
    """What `_gradients` needs of each query."""
    y, top, inverse = kept
    dy, dlog = cotangents
    return dy, jnp.sum(dy.astype(y.dtype) * y, -1) - dlog, top, inverse


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7, 8))
def attend(q, k, v, mask, key, causal, dropout, block, axis_name):
    """Attention with points last, scale folded into q; see `attention`, `gather`.

    q [B, H, M, D]; k, v [B, H, D, N], v None for the keys; mask [B, N] or None; key
    drives the dropout of probabilities, None for none. With `axis_name`, the keys are
    sharded and the queries are not.
    Returns y [B, H, M, D] and L [B, H, M].
    """
    return _forward(q, k, v, mask, key, causal, dropout, block, axis_name)[0]


def _forward(q, k, v, mask, key, causal, dropout, block, axis_name):
    points = k.shape[-1]
    values = k if v is None else v
    if block_size(q, points, block) >= points:
        s = _scores(q, k, mask, causal, 0, points, points)
        top = s.max(-1)
        p = jnp.exp(s - finite(top)[..., None])
        mass = p.sum(-1)
        y = _product(p, values, key, dropout, 0, points, k.dtype)
    else:
        init = _nothing(q, k, values)
        top, mass, y = _absorb(init, q, k, values, mask, key, causal, dropout, block)

    if axis_name is not None:
        local, top = top, lax.pmax(top, axis_name)
        # One reduction of values and masses together.
        packed = jnp.concatenate([y, mass[..., None]], -1)
        packed = lax.psum(jnp.exp(local - finite(top))[..., None] * packed, axis_name)
        y, mass = packed[..., :-1], packed[..., -1]

    result, kept = _normalise(top, mass, y, k.dtype)
    return result, (q, k, v, mask, key, kept)


def _backward(causal, dropout, block, axis_name, saved, cotangents):
    q, k, v, mask, key, kept = saved
    rows = _rows(kept, cotangents)
    dq, dk, dv = _gradients(q, k, v, mask, key, rows, causal, dropout, block)
    return dq.astype(q.dtype), dk, dv, None, None


attend.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _ring(q, k, v, mask, key, dropout, block, axis_name):
    """`attend` with the queries sharded, too: the keys travel from shard to shard."""
    return _ring_forward(q, k, v, mask, key, dropout, block, axis_name)[0]


def _stop_key(key, i):
    """A key of its own for each stop, and so for each pair of shards."""
    return None if key is None else jax.random.fold_in(key, i)


def _ring_forward(q, k, v, mask, key, dropout, block, axis_name):
    def visit(i, carry, k, v, mask):
        return _absorb(carry, q, k, v, mask, _stop_key(key, i), False, dropout, block)

    top, mass, y = around(visit, _nothing(q, k, v), (k, v, mask), axis_name)
    result, kept = _normalise(top, mass, y, k.dtype)
    return result, (q, k, v, mask, key, kept)


def _ring_backward(dropout, block, axis_name, saved, cotangents):
    q, k, v, mask, key, kept = saved
    rows, acc = _rows(kept, cotangents), accumulator(k.dtype)

    def visit(i, carry, k, v, mask):
        stop = _stop_key(key, i)
        new = _gradients(q, k, v, mask, stop, rows, False, dropout, block, acc)
        dq, *sums = jax.tree.map(jnp.add, carry, new)
        # The sums follow their keys; the hop of the last visit takes them home.
        return dq, *hop(sums, axis_name)

    init = zeros(k, q.shape, acc), jnp.zeros_like(k, acc), jnp.zeros_like(v, acc)
    dq, dk, dv = around(visit, init, (k, v, mask), axis_name)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, None


_ring.defvjp(_ring_forward, _ring_backward)


def points_last(x: Float[Array, "... N H D"]) -> Float[Array, "... H D N"]:
    """The layout that the streamed operators work in."""
    return jnp.moveaxis(x, -3, -1)


def points_first(x: Float[Array, "... H D N"]) -> Float[Array, "... N H D"]:
    """The layout of the public operators."""
    return jnp.moveaxis(x, -1, -3)


def flat(x: Array, batch: tuple[int, ...], keep: int) -> Array:
    """Broadcasts all but the last `keep` axes to `batch` and merges them into one."""
    tail = x.shape[x.ndim - keep :]
    return jnp.broadcast_to(x, (*batch, *tail)).reshape(-1, *tail)


def attention(
    q: Float[Array, "*B Q H D"],
    k: Float[Array, "*B N H D"],
    v: Float[Array, "*B N H E"],
    *,
    mask: Bool[Array, "*B N"] | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    key: Key[Array, ""] | None = None,
    block: int | None = None,
    axis_name: str | None = None,
) -> tuple[Float[Array, "*B Q H E"], Float[Array, "*B H Q"]]:
    """Softmax attention, y = softmax_N(scale q k^T) v, and its log-normaliser L.

    O(Q N (D + E)) time a head; memory beside inputs and results is one block of
    scores, in both directions.

    With `axis_name`, queries and keys are sharded over R devices: each holds Q and N
    of them, and takes R times that time. Keys, values and masks go around the ring of
    devices, to the next one in R - 1 hops forward and as many backward, where their
    gradients follow in float32 or wider, in R hops. A device holds its own keys, those
    that it works on and those that arrive.

    Args:
        q: queries.
        k: keys.
        v: values.
        mask: True for real keys. What masked keys hold never matters, even NaN.
        causal: query i of Q sees keys 0 ... N - Q + i, so that the last query sees
            all: one new query against a cache of keys is the same call.
        scale: factor on the scores; None means 1 / sqrt(D).
        dropout: part of the probabilities that is set to 0, the rest being scaled up;
            which ones depends on `key`, `block` and the sharding.
        key: drives the dropout; None for none.
        block: keys worked on at once; None chooses by shape and backend.
        axis_name: mesh axis that Q and N are sharded over, inside `jax.shard_map`;
            None means that this device holds all keys.

    Returns:
        y in the dtype of `k`, and L = log sum_N exp(scale q k^T) in float32 or
        wider, of this device's queries. A query that sees no key gets y = 0 and
        L = -inf.

    Raises:
        ValueError: if `dropout` is not in [0, 1).
        NotImplementedError: if `causal` and `axis_name` are given: devices with early
            queries would wait for those with late ones.
    """
    check_dropout(dropout)
    if causal and axis_name is not None:
        raise NotImplementedError(
            f"causal attention cannot shard its points, got axis_name={axis_name!r}."
        )
    batch = k.shape[:-3]
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    if mask is not None:
        k = jnp.where(mask[..., None, None], k, 0)
        v = jnp.where(mask[..., None, None], v, 0)
        mask = flat(mask, batch, 1)
    place = None if axis_name is None else lax.axis_index(axis_name)
    # What travels varies over the axis, even if all devices began with the same.
    q, k, v, mask, _ = align(q, k, v, mask, place)
    operands = (
        flat(jnp.swapaxes(q * factor, -3, -2), batch, 3).astype(k.dtype),
        flat(points_last(k), batch, 3),
        flat(points_last(v), batch, 3),
        mask,
        shard_key(key if dropout else None, axis_name),
    )
    result: Any = (
        attend(*operands, causal, dropout, block, None)
        if axis_name is None
        else _ring(*operands, dropout, block, axis_name)
    )
    y, log_mass = (x.reshape(*batch, *x.shape[1:]) for x in result)
    return jnp.swapaxes(y, -3, -2), log_mass
