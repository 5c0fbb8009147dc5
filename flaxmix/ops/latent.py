"""Latent attention: M latents gather from N points, N points read back.

    gather    z = softmax_N(scale q k^T) v,   L = log sum_N exp(scale q k^T)
    scatter   y = softmax_M(scale k q^T) z

Points meet only through the M latents, so time and memory are linear in N. Each has
its own derivative, which recomputes the probabilities block by block over N from the
saved result and log-normaliser. Precision is that of `flaxmix.ops.attention`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from flaxmix.ops.attention import attend, flat, points_first, points_last
from flaxmix.ops.norm import product_sum
from flaxmix.ops.stream import accumulator, block_size, cut, dot, fold, put, zeros


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _scatter(k, q, z, block, axis_name):
    return _scatter_forward(k, q, z, block, axis_name)[0]


def _scatter_forward(k, q, z, block, axis_name):
    dtype, acc, points = k.dtype, accumulator(k.dtype), k.shape[-1]
    batch, heads, _, channels = z.shape

    def body(start, n, carry):
        y, log_mass = carry
        s = dot("bhmd,bhdn->bhmn", q, cut(k, start, n), dtype)
        top = s.max(2)
        p = jnp.exp(s - top[:, :, None])
        mass = p.sum(2)
        part = dot("bhmd,bhmn->bhdn", z, p, dtype) / mass[:, :, None]
        return put(y, part, start), put(log_mass, top + jnp.log(mass), start)

    init = (
        zeros(k, (batch, heads, channels, points), dtype),
        zeros(k, (batch, heads, points), acc),
    )
    y, log_mass = fold(points, block_size(q, points, block), body, init)
    return y, (k, q, z, y, log_mass)


def _scatter_backward(block, axis_name, saved, dy):
    k, q, z, y, log_mass = saved
    dtype, acc, points = k.dtype, log_mass.dtype, k.shape[-1]
    # Outside the loop: inside it XLA would recompute it for every latent.
    row = product_sum(y.astype(acc), dy.astype(acc), [2])

    def body(start, n, carry):
        dk, dq, dz = carry
        kk, dd = cut(k, start, n), cut(dy, start, n)
        s = dot("bhmd,bhdn->bhmn", q, kk, dtype)
        p = jnp.exp(s - cut(log_mass, start, n)[:, :, None])
        dp = dot("bhmd,bhdn->bhmn", z, dd, dtype)
        ds = p * (dp - cut(row, start, n)[:, :, None])
        dk = put(dk, dot("bhmd,bhmn->bhdn", q, ds, dtype), start)
        dq = dq + dot("bhmn,bhdn->bhmd", ds, kk, dtype)
        return dk, dq, dz + dot("bhmn,bhdn->bhmd", p, dd, dtype)

    init = (jnp.zeros_like(k), zeros(k, q.shape, acc), zeros(k, z.shape, acc))
    dk, dq, dz = fold(points, block_size(q, points, block), body, init)
    if axis_name is not None:
        dq, dz = lax.psum((dq, dz), axis_name)
    return dk, dq.astype(q.dtype), dz.astype(z.dtype)


_scatter.defvjp(_scatter_forward, _scatter_backward)


def gather(
    q: Float[Array, "... H M D"],
    k: Float[Array, "*B N H D"],
    v: Float[Array, "*B N H E"] | None = None,
    *,
    mask: Bool[Array, "*B N"] | None = None,
    scale: float | None = None,
    axis_name: str | None = None,
    block: int | None = None,
) -> tuple[Float[Array, "*B H M E"], Float[Array, "*B H M"]]:
    """Latents gather from points: z = softmax_N(scale q k^T) v.

    O(N M (D + E)) time a head; memory beside inputs and results is one block of
    scores, in both directions. Forward, a sharded N costs one maximum and one sum
    over `axis_name`, of H M (E + 2) numbers in all; backward, one sum of H M D.

    Args:
        q: latent queries, with the batch axes of `k` or none.
        k: keys.
        v: values; None means that the values are the keys.
        mask: True for real points. What masked points hold never matters, even NaN.
        scale: factor on the scores; None means 1 / sqrt(D).
        axis_name: mesh axis that N is sharded over, inside `jax.shard_map`; None
            means that this device holds all N points.
        block: points worked on at once; None chooses by shape and backend.

    Returns:
        z in the dtype of `k`, and L = log sum_N exp(scale q k^T) in float32 or
        wider. A batch item without real points gets z = 0 and L = -inf.
    """
    batch = k.shape[:-3]
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    if mask is not None:
        k = jnp.where(mask[..., None, None], k, 0)
        v = None if v is None else jnp.where(mask[..., None, None], v, 0)
        mask = flat(mask, batch, 1)
    result: Any = attend(
        flat(q * factor, batch, 3).astype(k.dtype),
        flat(points_last(k), batch, 3),
        None if v is None else flat(points_last(v), batch, 3),
        mask,
        False,
        block,
        axis_name,
    )
    z, log_mass = (x.reshape(*batch, *x.shape[1:]) for x in result)
    return z, log_mass


def scatter(
    k: Float[Array, "*B N H D"],
    q: Float[Array, "... H M D"],
    z: Float[Array, "*B H M E"],
    *,
    mask: Bool[Array, "*B N"] | None = None,
    scale: float | None = None,
    axis_name: str | None = None,
    block: int | None = None,
) -> Float[Array, "*B N H E"]:
    """Points read from latents: y = softmax_M(scale k q^T) z.

    Time and memory as `gather`. Each point reads for itself, so a sharded N costs
    nothing forward; backward, one sum of H M (D + E) numbers over `axis_name`.

    Args:
        k: keys of the points.
        q: queries of the latents, with the batch axes of `k` or none.
        z: values of the latents.
        mask: True for real points. Masked points read 0, whatever they hold.
        scale: factor on the scores; None means 1 / sqrt(D).
        axis_name: mesh axis that N is sharded over, inside `jax.shard_map`.
        block: points worked on at once; None chooses by shape and backend.

    Returns:
        What each point read, in the dtype of `k`.
    """
    batch = k.shape[:-3]
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    if mask is not None:
        k = jnp.where(mask[..., None, None], k, 0)
    y: Any = _scatter(
        flat(points_last(k), batch, 3),
        flat(q * factor, batch, 3).astype(k.dtype),
        flat(z, batch, 3),
        block,
        axis_name,
    )
    y = points_first(y.reshape(*batch, *y.shape[1:]))
    return y if mask is None else jnp.where(mask[..., None, None], y, 0)
