"""Physics attention of the Transolver family: points are sorted into soft slices.

    w = softmax_M(k q^T)                    slice weights of each point
    t = sum_N w v / (sum_N w + 1e-5)        slice tokens
    y = sum_M w attention(t)                what each point gets back

As in `flaxmix.ops.latent`, the weights are worked on block by block and recomputed in
the backward pass, so that no N x M matrix is ever held.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Key

from flaxmix.ops.attention import attention, flat, points_last
from flaxmix.ops.latent import flat_noise, rate_gradient, scatter, scores
from flaxmix.ops.stream import (
    accumulator,
    align,
    block_size,
    cut,
    dot,
    fold,
    put,
    softmax_gradient,
    spread,
    zeros,
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _pool(k, q, v, mask, noise, rate, block, axis_name):
    """sum_N w v [B, H, M, E] and sum_N w [B, H, M], w = softmax_M(q k); see `pool`.

    k [B, H, D, N]; q [B, H, M, D]; v [B, H, E, N]; mask [B, N] or None; noise and rate
    as in `flaxmix.ops.latent`.
    """
    return _pool_forward(k, q, v, mask, noise, rate, block, axis_name)[0]


def _pool_forward(k, q, v, mask, noise, rate, block, axis_name):
    dtype, acc, points = k.dtype, accumulator(k.dtype), k.shape[-1]

    def body(start, n, carry):
        pooled, mass, tops, inverses = carry
        s = scores(q, k, None, noise, rate, start, n)
        top = s.max(2)
        p = jnp.exp(s - top[:, :, None])
        inverse = 1 / p.sum(2)
        p = _weights(p * inverse[:, :, None], mask, start, n)
        tops, inverses = put(tops, top, start), put(inverses, inverse, start)
        part = dot("bhmn,bhen->bhme", p, cut(v, start, n), dtype)
        return pooled + part, mass + p.sum(-1), tops, inverses

    init = (
        zeros(k, (*q.shape[:3], v.shape[2]), acc),
        zeros(k, q.shape[:3], acc),
        zeros(k, (*q.shape[:2], points), acc),
        zeros(k, (*q.shape[:2], points), acc),
    )
    size = block_size(q, points, block)
    pooled, mass, top, inverse = fold(points, size, body, init)
    if axis_name is not None:
        packed = jnp.concatenate([pooled, mass[..., None]], -1)
        packed = lax.psum(packed, axis_name)
        pooled, mass = packed[..., :-1], packed[..., -1]
    return (pooled, mass), (k, q, v, mask, noise, rate, top, inverse)


def _weights(p, mask, start, n):
    return p if mask is None else p * cut(mask, start, n)[:, None, None, :]


def _pool_backward(block, axis_name, saved, cotangents):
    k, q, v, mask, noise, rate, top, inverse = saved
    dtype, acc, points = k.dtype, top.dtype, k.shape[-1]
    dpooled, dmass = cotangents
    # Of a slice that is nearly empty these are 1e5 times what comes in: too much for
    # float16, which products with them are not taken in.
    high = acc if dtype == jnp.float16 else dtype

    def body(start, n, carry):
        dk, dq, dv, drate = carry
        vv = cut(v, start, n)
        s = scores(q, k, None, noise, rate, start, n)
        p = jnp.exp(s - cut(top, start, n)[:, :, None])
        p = p * cut(inverse, start, n)[:, :, None]
        p = _weights(p, mask, start, n)
        dvv = dot("bhme,bhmn->bhen", dpooled, p, high)
        dw = dot("bhme,bhen->bhmn", dpooled, vv, high) + dmass[..., None]
        ds = softmax_gradient(p, dw)
        dk = put(dk, dot("bhmd,bhmn->bhdn", q, ds, dtype), start)
        dq = dq + dot("bhmn,bhdn->bhmd", ds, cut(k, start, n), dtype)
        part = rate_gradient(ds, noise, rate, start)
        drate = None if part is None else put(drate, part, start)
        return dk, dq, put(dv, dvv, start), drate

    init = (
        jnp.zeros_like(k),
        zeros(k, q.shape, acc),
        jnp.zeros_like(v),
        None if noise is None or rate is None else jnp.zeros_like(rate),
    )
    size = block_size(q, points, block)
    dk, dq, dv, drate = fold(points, size, body, init)
    if rate is not None and drate is None:
        drate = jnp.zeros_like(rate)
    return dk, dq.astype(q.dtype), dv, None, None, drate


_pool.defvjp(_pool_forward, _pool_backward)


def pool(
    k: Float[Array, "*B N H D"],
    q: Float[Array, "... H M D"],
    v: Float[Array, "*B N H E"],
    *,
    mask: Bool[Array, "*B N"] | None = None,
    noise: Float[Array, "*B H N M"] | Key[Array, "..."] | None = None,
    rate: Float[Array, "*B N H"] | None = None,
    axis_name: str | None = None,
    block: int | None = None,
) -> tuple[Float[Array, "*B H M E"], Float[Array, "*B H M"]]:
    """Slice tokens t = sum_N w v / (sum_N w + 1e-5), w = softmax_M(k q^T).

    O(N M (D + E)) time a head; memory beside inputs and results is one block of
    weights, in both directions. A sharded N costs one sum of H M (E + 1) numbers over
    `axis_name` forward, and one of H M D backward.

    Args:
        k: what decides the slices of each point.
        q: slices, with the batch axes of `k` or none.
        v: what is averaged.
        mask: True for real points. What masked points hold never matters, even NaN.
        noise: uniforms u for Gumbel noise rate g, g = -log(-log u), on the scores; or
            a key to draw them by, one for all items or one for each: block by block,
            for each point by its rank among the real ones.
        rate: factor on the noise of each point and head; None means 1.
        axis_name: mesh axis that N is sharded over, inside `jax.shard_map`.
        block: points worked on at once; None chooses by shape and backend.

    Returns:
        t, and the mass sum_N w of each slice, both in float32 or wider: a mass is
        as large as N.
    """
    batch = k.shape[:-3]
    if mask is not None:
        k = jnp.where(mask[..., None, None], k, 0)
        v = jnp.where(mask[..., None, None], v, 0)
        rate = None if rate is None else jnp.where(mask[..., None], rate, 0)
    k, q, v, rate = align(k, q, v, rate)
    result: Any = _pool(
        flat(points_last(k), batch, 3),
        flat(q, batch, 3).astype(k.dtype),
        flat(points_last(v), batch, 3),
        None if mask is None else flat(mask, batch, 1),
        flat_noise(noise, k, mask, axis_name),
        None if rate is None else flat(jnp.swapaxes(rate, -1, -2), batch, 2),
        block,
        axis_name,
    )
    pooled, mass = (x.reshape(*batch, *x.shape[1:]) for x in result)
    return pooled / (mass[..., None] + 1e-5), mass


def transolver(
    k: Float[Array, "*B N H D"],
    q: Float[Array, "... H M D"],
    v: Float[Array, "*B N H E"],
    *,
    query: Float[Array, "E E"],
    key: Float[Array, "E E"],
    value: Float[Array, "E E"],
    offset: Float[Array, "H E"] | None = None,
    mask: Bool[Array, "*B N"] | None = None,
    noise: Float[Array, "*B H N M"] | Key[Array, "..."] | None = None,
    rate: Float[Array, "*B N H"] | None = None,
    axis_name: str | None = None,
) -> Float[Array, "*B N H E"]:
    """Mixes N points by way of attention between M slice tokens.

        w = softmax_M(k q^T),  t = sum_N w v / (sum_N w + 1e-5) + offset
        y = sum_M w softmax_M(t query (t key)^T / sqrt(E)) t value

    O(N M (D + E)) time a head, and O(N (D + E)) memory.

    Args:
        k: what decides the slices of each point.
        q: slices, with the temperature.
        v: what is averaged into the slice tokens.
        query: kernel of the tokens' queries, shared by the heads.
        key: kernel of their keys.
        value: kernel of their values.
        offset: added to the slice tokens of each head.
        mask: True for real points. Masked points do not matter and get 0.
        noise: as in `pool`.
        rate: as in `pool`.
        axis_name: mesh axis that N is sharded over, inside `jax.shard_map`.

    Returns:
        The mixed points, in the dtype of `k`.
    """
    shared: Any = {"mask": mask, "noise": noise, "rate": rate, "axis_name": axis_name}
    t, _ = pool(k, q, v, **shared)
    t = t if offset is None else t + offset.astype(t.dtype)[:, None]
    t = spread(jnp.swapaxes(t, -3, -2), axis_name).astype(k.dtype)
    project = lambda kernel: t @ kernel.astype(t.dtype)
    z, _ = attention(project(query), project(key), project(value))
    return scatter(k, q, jnp.swapaxes(z, -3, -2), scale=1.0, **shared)
