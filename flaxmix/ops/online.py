"""Online softmax over points: what every softmax over N is made of.

Running over the points, a softmax is the maximum of the scores so far, the mass
sum exp(score - maximum) and the sum of the values with these weights. Such parts are
merged exactly, whether they come from blocks, from splits or from devices.

Arrays have the points last, see `flaxmix.ops.stream`, and the scale is folded into the
queries: q [B, H, M, D]; k [B, H, D, N]; v [B, H, E, N] or None for the keys; mask
[B, N] or None; a key drives the dropout of probabilities, None for none.
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from flaxmix.ops.stream import (
    accumulator,
    block_size,
    cut,
    dot,
    drop,
    fold,
    put,
    zeros,
)

Implementation = Literal["xla", "cudnn"]


@dataclasses.dataclass(frozen=True)
class Options:
    """What does not depend on the arrays.

    Attributes:
        dropout: part of the probabilities that is set to 0.
        block: points worked on at once; None chooses.
        splits: parts that the points are cut into, worked on side by side.
        axis_name: mesh axis that the points, not the queries, are sharded over.
        implementation: "cudnn" for the fused forward pass of that library.
    """

    dropout: float = 0.0
    block: int | None = None
    splits: int = 1
    axis_name: str | None = None
    implementation: Implementation = "xla"


def finite(x: Array) -> Array:
    """Replaces the -inf of an empty row, so that differences stay defined."""
    return jnp.where(jnp.isfinite(x), x, 0.0)


def scores(q, k, mask, start, size):
    k = cut(k, start, size)
    s = dot("bhmd,bhdn->bhmn", q, k, k.dtype)
    if mask is not None:
        s = jnp.where(cut(mask, start, size)[:, None, None, :], s, -jnp.inf)
    return s


def nothing(q, k, channels):
    """The part of no points: maximum, mass, sum of values."""
    rows, acc = q.shape[:-1], accumulator(k.dtype)
    return (
        zeros(k, rows, acc, fill=-jnp.inf),
        zeros(k, rows, acc),
        zeros(k, (*rows, channels), acc),
    )


def absorb(part, q, k, v, mask, key, options: Options):
    """The part with these points, too."""
    points = k.shape[-1]

    def body(start, n, part):
        top, mass, y = part
        s = scores(q, k, mask, start, n)
        new = jnp.maximum(top, s.max(-1))
        shift = finite(new)
        p, decay = jnp.exp(s - shift[..., None]), jnp.exp(top - shift)
        return (
            new,
            decay * mass + p.sum(-1),
            decay[..., None] * y + _weigh(p, k, v, key, options, start, n),
        )

    return fold(points, block_size(q, points, options.block), body, part)


def only(q, k, v, mask, key, options: Options):
    """The part of these points alone."""
    points = k.shape[-1]
    if block_size(q, points, options.block) < points:
        start = nothing(q, k, k.shape[2] if v is None else v.shape[2])
        return absorb(start, q, k, v, mask, key, options)
    s = scores(q, k, mask, 0, points)
    top = s.max(-1)
    p = jnp.exp(s - finite(top)[..., None])
    return top, p.sum(-1), _weigh(p, k, v, key, options, 0, points)


def _weigh(p, k, v, key, options, start, n):
    p = drop(p, key, options.dropout, start)
    values = cut(k if v is None else v, start, n)
    return dot("bhmn,bhdn->bhmd", p, values, k.dtype)


def merge(part, maximum, total):
    """Parts as one, given how to take the maximum and the sum over them."""
    top, mass, y = part
    new = maximum(top)
    # One reduction of values and masses together.
    packed = jnp.concatenate([y, mass[..., None]], -1)
    packed = total(jnp.exp(top - finite(new))[..., None] * packed)
    return new, packed[..., -1], packed[..., :-1]


def merge_shards(part, axis_name: str | None):
    """Parts of all devices as one; without an axis, the part itself."""
    if axis_name is None:
        return part
    return merge(
        part,
        lambda x: lax.pmax(x, axis_name),
        lambda x: lax.psum(x, axis_name),
    )


def normalise(part, dtype):
    """y and L of a part, and what of them the derivative needs."""
    top, mass, y = part
    some = mass > 0
    safe = jnp.where(some, mass, 1.0)
    y = y / safe[..., None]
    log_mass = jnp.where(some, finite(top) + jnp.log(safe), -jnp.inf)
    # Not the log-normaliser alone: where scores are in the hundreds, its last digit is
    # worth 1e-5 of a probability.
    return (y.astype(dtype), log_mass), (y, finite(top), 1 / safe)


def per_query(kept, cotangents):
    """What `gradients` needs of each query: dy, sum dy y - dL, maximum, 1 / mass."""
    y, top, inverse = kept
    dy, dlog = cotangents
    return dy, jnp.sum(dy.astype(y.dtype) * y, -1) - dlog, top, inverse


def gradients(q, k, v, mask, key, queries, options: Options, dtype=None):
    """dq by these points, and their dk and dv in the given dtype or their own."""
    dy, row, top, inverse = queries
    operand, points = k.dtype, k.shape[-1]
    values = k if v is None else v

    def body(start, n, carry):
        dq, dk, dv = carry
        kk, vv = cut(k, start, n), cut(values, start, n)
        s = scores(q, k, mask, start, n)
        p = jnp.exp(s - top[..., None]) * inverse[..., None]
        dp = dot("bhmd,bhdn->bhmn", dy, vv, operand)
        ds = p * (drop(dp, key, options.dropout, start) - row[..., None])
        dq = dq + dot("bhmn,bhdn->bhmd", ds, kk, operand)
        dkk = dot("bhmd,bhmn->bhdn", q, ds, operand)
        p = drop(p, key, options.dropout, start)
        dvv = dot("bhmd,bhmn->bhdn", dy, p, operand)
        if v is None:
            return dq, put(dk, dkk + dvv, start), None
        return dq, put(dk, dkk, start), put(dv, dvv, start)

    init = (
        zeros(k, q.shape, top.dtype),
        jnp.zeros_like(k, dtype),
        None if v is None else jnp.zeros_like(v, dtype),
    )
    return fold(points, block_size(q, points, options.block), body, init)


def _parts(x: Array | None, splits: int) -> Array | None:
    """[..., N] as [splits, ..., n], padded with zeros."""
    if x is None:
        return None
    short = -x.shape[-1] % splits
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, short)])
    return jnp.moveaxis(x.reshape(*x.shape[:-1], splits, -1), -2, 0)


def _joined(x: Array | None, points: int) -> Array | None:
    """The inverse of `_parts`."""
    if x is None:
        return None
    x = jnp.moveaxis(x, 0, -2)
    return x.reshape(*x.shape[:-2], -1)[..., :points]


def _of_each(options: Options, q, points: int) -> Options:
    """Options of one split; all of them together hold one block of scores."""
    if options.block is not None:
        return options
    block = -(-block_size(q, points, None) // options.splits)
    return dataclasses.replace(options, block=max(256, block))


def _over_splits(f, queries, k, v, mask, key, splits: int):
    """f(queries, k, v, mask, key) of each of `splits` parts of the points."""
    if mask is None and k.shape[-1] % splits:
        mask = jnp.ones((k.shape[0], k.shape[-1]), bool)
    keys = None if key is None else jax.random.split(key, splits)
    parts = [_parts(x, splits) for x in (k, v, mask)]
    # A batched product on both sides; XLA on CPUs lacks the other one in bfloat16.
    repeat = lambda x: jnp.broadcast_to(x, (splits, *x.shape))
    return jax.vmap(f)(jax.tree.map(repeat, queries), *parts, keys)


def _fused(q, k, v, mask, implementation: Any):
    """The part of all points, by an attention that returns its log-normaliser."""
    tokens = lambda x: jnp.moveaxis(x, -1, 1)
    keys = tokens(k)
    # cuDNN broadcasts a mask over heads, not over queries.
    seen = (k.shape[0], 1, q.shape[2], k.shape[-1])
    y, log_mass = jax.nn.dot_product_attention(
        jnp.swapaxes(q, 1, 2),
        keys,
        keys if v is None else tokens(v),
        mask=None if mask is None else jnp.broadcast_to(mask[:, None, None], seen),
        scale=1.0,
        implementation=implementation,
        return_residual=True,
    )
    acc = accumulator(k.dtype)
    y, log_mass = jnp.swapaxes(y, 1, 2).astype(acc), jnp.swapaxes(log_mass, 1, 2)
    # Where nothing may be seen it returns the mean of all values.
    some = jnp.ones((), bool) if mask is None else mask.any(-1)[:, None, None]
    top = jnp.where(some, log_mass.astype(acc), -jnp.inf)
    return top, jnp.where(some, jnp.ones_like(top), 0), jnp.where(some[..., None], y, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def attend(q, k, v, mask, key, options: Options):
    """y [B, H, M, E] and L [B, H, M]; see `flaxmix.ops.attention`, `gather`."""
    return _forward(q, k, v, mask, key, options)[0]


def _forward(q, k, v, mask, key, options):
    if options.implementation != "xla":
        part = _fused(q, k, v, mask, options.implementation)
    elif options.splits == 1:
        part = only(q, k, v, mask, key, options)
    else:
        one = _of_each(options, q, k.shape[-1])
        each = lambda q, k, v, mask, key: only(q, k, v, mask, key, one)
        parts = _over_splits(each, q, k, v, mask, key, options.splits)
        part = merge(parts, lambda x: x.max(0), lambda x: x.sum(0))
    part = merge_shards(part, options.axis_name)
    result, kept = normalise(part, k.dtype)
    return result, (q, k, v, mask, key, kept)


def _backward(options, saved, cotangents):
    q, k, v, mask, key, kept = saved
    queries = per_query(kept, cotangents)
    if options.splits == 1:
        dq, dk, dv = gradients(q, k, v, mask, key, queries, options)
    else:
        one = _of_each(options, q, k.shape[-1])

        def each(both, k, v, mask, key):
            q, queries = both
            return gradients(q, k, v, mask, key, queries, one)

        dq, dk, dv = _over_splits(each, (q, queries), k, v, mask, key, options.splits)
        dq = dq.sum(0)
        dk, dv = _joined(dk, k.shape[-1]), _joined(dv, k.shape[-1])
    return dq.astype(q.dtype), dk, dv, None, None


attend.defvjp(_forward, _backward)
