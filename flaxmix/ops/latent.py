"""Latent attention: M latents gather from N points, N points read back.

    gather    z = softmax_N(scale q k^T) v,   L = log sum_N exp(scale q k^T)
    scatter   y = softmax_M(scale k q^T) z

Points meet only through the M latents, so time and memory are linear in N. Each has
its own derivative, which recomputes the probabilities block by block over N from the
saved result and log-normaliser. Precision is that of `flaxmix.ops.attention`.
"""

import functools
import math
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

from flaxmix.ops.attention import flat, points_first, points_last
from flaxmix.ops.online import Implementation, Options, attend, finite
from flaxmix.ops.stream import (
    accumulator,
    align,
    block_size,
    check_block,
    check_dropout,
    cut,
    dot,
    drop,
    fold,
    put,
    rank,
    shard_key,
    softmax_gradient,
    split_count,
    zeros,
)


def scores(q, k, mask, noise, rate, start, n):
    """Scores of one block of points [B, H, M, n]; see `_scatter`."""
    s = dot("bhmd,bhdn->bhmn", q, cut(k, start, n), k.dtype)
    if noise is not None:
        g = gumbel(noise, start, s)
        s = s + g if rate is None else s + g * cut(rate, start, n)[:, :, None]
    return s if mask is None else jnp.where(mask[:, None, :, None], s, -jnp.inf)


def gumbel(noise: Any, start, like: Array) -> Array:
    """A block of Gumbel noise [B, H, M, n] from uniforms, given or drawn by keys.

    The two 1e-8 are those of the authors' Transolver++.
    """
    if isinstance(noise, tuple):
        keys, ranks = noise
        draw = lambda key, rank: jax.random.uniform(
            jax.random.fold_in(key, rank), like.shape[1:3], like.dtype
        )
        draw = jax.vmap(jax.vmap(draw, (None, 0), -1))
        u = draw(keys, cut(ranks, start, like.shape[-1]))
    else:
        u = cut(noise, start, like.shape[-1]).astype(like.dtype)
    return -jnp.log(-jnp.log(u + 1e-8) + 1e-8)


def rate_gradient(ds, noise, rate, start):
    """Derivative of the sum of ds * gumbel * rate by a block of `rate`."""
    if noise is None or rate is None:
        return None
    return (ds * gumbel(noise, start, ds)).sum(2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8))
def _scatter(k, q, z, mask, noise, rate, key, dropout, block):
    """Softmax over latents, points last, scale folded into q; see `scatter`.

    k [B, H, D, N]; q [B, H, M, D]; z [B, H, M, E]; mask of latents [B, M] or None;
    noise, added as Gumbel noise to the scores times rate [B, H, N] or None, is uniforms
    [B, H, M, N], or keys [B] and the ranks of the points [B, N], or None. Returns
    y [B, H, E, N].
    """
    operands = k, q, z, mask, noise, rate, key
    return _scatter_forward(*operands, dropout, block)[0]


def _scatter_forward(k, q, z, mask, noise, rate, key, dropout, block):
    dtype, acc, points = k.dtype, accumulator(k.dtype), k.shape[-1]
    batch, heads, _, channels = z.shape

    def body(start, n, carry):
        y, tops, inverses = carry
        s = scores(q, k, mask, noise, rate, start, n)
        top = s.max(2)
        if mask is not None:
            top = finite(top)
        p = jnp.exp(s - top[:, :, None])
        mass = p.sum(2)
        if mask is not None:
            # No latent at all: all probabilities are 0 anyway.
            mass = jnp.where(mass > 0, mass, 1.0)
        inverse = 1 / mass
        p = drop(p, key, dropout, start)
        part = dot("bhmd,bhmn->bhdn", z, p, dtype) * inverse[:, :, None]
        return put(y, part, start), put(tops, top, start), put(inverses, inverse, start)

    init = (
        zeros(k, (batch, heads, channels, points), dtype),
        zeros(k, (batch, heads, points), acc),
        zeros(k, (batch, heads, points), acc),
    )
    y, top, inverse = fold(points, block_size(q, points, block), body, init)
    # Not their log-normaliser: where scores are in the hundreds, its last digit is
    # worth 1e-5 of a probability.
    return y, (k, q, z, mask, noise, rate, key, top, inverse)


def _scatter_backward(dropout, block, saved, dy):
    k, q, z, mask, noise, rate, key, top, inverse = saved
    dtype, acc, points = k.dtype, top.dtype, k.shape[-1]

    def body(start, n, carry):
        dk, dq, dz, drate = carry
        kk, dd = cut(k, start, n), cut(dy, start, n)
        s = scores(q, k, mask, noise, rate, start, n)
        p = jnp.exp(s - cut(top, start, n)[:, :, None])
        p = p * cut(inverse, start, n)[:, :, None]
        dp = dot("bhmd,bhdn->bhmn", z, dd, dtype)
        dp = drop(dp, key, dropout, start)
        ds = softmax_gradient(p, dp)
        dk = put(dk, dot("bhmd,bhmn->bhdn", q, ds, dtype), start)
        dq = dq + dot("bhmn,bhdn->bhmd", ds, kk, dtype)
        dz = dz + dot("bhmn,bhdn->bhmd", drop(p, key, dropout, start), dd, dtype)
        part = rate_gradient(ds, noise, rate, start)
        return dk, dq, dz, None if part is None else put(drate, part, start)

    init = (
        jnp.zeros_like(k),
        zeros(k, q.shape, acc),
        zeros(k, z.shape, acc),
        None if noise is None or rate is None else jnp.zeros_like(rate),
    )
    dk, dq, dz, drate = fold(points, block_size(q, points, block), body, init)
    if rate is not None and drate is None:
        drate = jnp.zeros_like(rate)
    return dk, dq.astype(q.dtype), dz.astype(z.dtype), None, None, drate, None


_scatter.defvjp(_scatter_forward, _scatter_backward)


def gather(
    q: Float[Array, "... H M D"],
    k: Float[Array, "*B N H D"],
    v: Float[Array, "*B N H E"] | None = None,
    *,
    mask: Bool[Array, "*B N"] | None = None,
    scale: float | None = None,
    axis_name: str | None = None,
    dropout: float = 0.0,
    key: Key[Array, ""] | None = None,
    block: int | None = None,
    splits: int | None = None,
    implementation: Implementation | None = None,
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
        dropout: part of the probabilities that is set to 0, the rest being scaled up;
            which ones depends on `key`, `block`, `splits` and the sharding.
        key: drives the dropout; None for none.
        block: points worked on at once, in each split; None chooses by shape and
            backend.
        splits: parts of N that are worked on side by side and merged: a few latents
            alone keep no accelerator busy. None chooses by shape and backend.
        implementation: "xla", or "cudnn" for that library's fused forward pass, which
            takes bfloat16 and float16 on NVIDIA GPUs, values as wide as the keys and no
            dropout, and holds a mask for each latent. L then has the digits of these
            dtypes, and so have gradients and sums over `axis_name`, which are made
            with it: absolute errors of L are their relative ones. None means "xla".

    Returns:
        z in the dtype of `k`, and L = log sum_N exp(scale q k^T) in float32 or
        wider. A batch item without real points gets z = 0 and L = -inf.

    Raises:
        ValueError: if `dropout` is not in [0, 1), `block` or `splits` not positive, or
            the implementation does not do what is asked of it.
    """
    check_dropout(dropout)
    check_block(block)
    if splits is None:
        splits = split_count(k.shape[-2] * math.prod(k.shape[:-3]), k.shape[-3])
    if splits < 1:
        raise ValueError(f"splits must be at least 1, got {splits}.")
    implementation = implementation or "xla"
    if implementation not in get_args(Implementation):
        raise ValueError(f"no {implementation=}; there are xla and cudnn.")
    if implementation == "cudnn":
        dropping = dropout > 0 and key is not None
        half = jnp.dtype(k.dtype) in (jnp.bfloat16, jnp.float16)
        if dropping or not half or jax.default_backend() != "gpu":
            raise ValueError(
                f"implementation='cudnn' needs bfloat16 or float16 on a GPU and no "
                f"dropout, got {k.dtype} on {jax.default_backend()}"
                f"{' with dropout' if dropping else ''}."
            )
        if v is not None and v.shape[-1] != k.shape[-1]:
            raise ValueError(
                f"implementation='cudnn' needs values as wide as the keys, got "
                f"{v.shape[-1]} and {k.shape[-1]} channels."
            )
    batch = k.shape[:-3]
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    if mask is not None:
        k = jnp.where(mask[..., None, None], k, 0)
        v = None if v is None else jnp.where(mask[..., None, None], v, 0)
        mask = flat(mask, batch, 1)
    q, k, v = align(q, k, v)
    result: Any = attend(
        flat(q * factor, batch, 3).astype(k.dtype),
        flat(points_last(k), batch, 3),
        None if v is None else flat(points_last(v), batch, 3),
        mask,
        shard_key(key if dropout else None, axis_name),
        Options(
            dropout=dropout,
            block=block,
            splits=min(splits, k.shape[-3]),
            axis_name=axis_name,
            implementation=implementation,
        ),
    )
    z, log_mass = (x.reshape(*batch, *x.shape[1:]) for x in result)
    return z, log_mass


def scatter(
    k: Float[Array, "*B N H D"],
    q: Float[Array, "... H M D"],
    z: Float[Array, "*B H M E"],
    *,
    mask: Bool[Array, "*B N"] | None = None,
    latent_mask: Bool[Array, "*B M"] | None = None,
    scale: float | None = None,
    noise: Float[Array, "*B H N M"] | Key[Array, "..."] | None = None,
    rate: Float[Array, "*B N H"] | None = None,
    axis_name: str | None = None,
    dropout: float = 0.0,
    key: Key[Array, ""] | None = None,
    block: int | None = None,
) -> Float[Array, "*B N H E"]:
    """Points read from latents: y = softmax_M(scale k q^T) z.

    With `noise`, the scores are scale k q^T + rate g, g = -log(-log u) being Gumbel
    noise. Time and memory as `gather`. Each point reads for itself, so a sharded N
    costs nothing forward; backward, one sum of H M (D + E) numbers over `axis_name`.

    Args:
        k: keys of the points.
        q: queries of the latents, with the batch axes of `k` or none.
        z: values of the latents.
        mask: True for real points. Masked points read 0, whatever they hold.
        latent_mask: True for latents that may be read. A point without any reads 0.
        scale: factor on the scores; None means 1 / sqrt(D).
        noise: uniforms u, or a key to draw them by, one for all items or one for
            each: block by block, for each point by its rank among the real ones.
        rate: factor on the noise of each point and head; None means 1.
        axis_name: mesh axis that N is sharded over, inside `jax.shard_map`.
        dropout: part of the probabilities that is set to 0, the rest being scaled up;
            which ones depends on `key`, `block` and the sharding.
        key: drives the dropout; None for none.
        block: points worked on at once; None chooses by shape and backend.

    Returns:
        What each point read, in the dtype of `k`.

    Raises:
        ValueError: if `dropout` is not in [0, 1) or `block` not positive.
    """
    check_dropout(dropout)
    check_block(block)
    batch = k.shape[:-3]
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    if mask is not None:
        k = jnp.where(mask[..., None, None], k, 0)
        rate = None if rate is None else jnp.where(mask[..., None], rate, 0)
    if latent_mask is not None:
        q = jnp.where(latent_mask[..., None, :, None], q, 0)
        z = jnp.where(latent_mask[..., None, :, None], z, 0)
    k, q, z, rate = align(k, q, z, rate)
    y: Any = _scatter(
        flat(points_last(k), batch, 3),
        flat(q * factor, batch, 3).astype(k.dtype),
        flat(z, batch, 3),
        None if latent_mask is None else flat(latent_mask, batch, 1),
        flat_noise(noise, k, mask, axis_name),
        None if rate is None else flat(jnp.swapaxes(rate, -1, -2), batch, 2),
        shard_key(key if dropout else None, axis_name),
        dropout,
        block,
    )
    y = points_first(y.reshape(*batch, *y.shape[1:]))
    return y if mask is None else jnp.where(mask[..., None, None], y, 0)


def flat_noise(
    noise: Array | None, k: Array, mask: Array | None, axis_name: str | None
) -> Any:
    """Noise as `_scatter` takes it, for k [*B, N, H, D].

    A key for all items and no mask give keys [1] and ranks [1, N].
    """
    if noise is None:
        return None
    batch = k.shape[:-3]
    if not jnp.issubdtype(noise.dtype, jax.dtypes.prng_key):
        if mask is not None:
            noise = jnp.where(mask[..., None, :, None], noise, 0.5)
        return flat(jnp.swapaxes(noise, -1, -2), batch, 3)
    ranks = rank(mask, k.shape[-3], axis_name)
    if mask is None and noise.ndim == 0:
        batch = ()
    return flat(noise, batch, 0), flat(ranks, batch, 1)
