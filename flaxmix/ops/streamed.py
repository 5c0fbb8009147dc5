"""Latent attention on points whose keys and values are made block by block.

Where there are many points, their keys, values and all gradients of these take several
times the memory of the points themselves. Here they exist for one block at a time:
each is made from the points when it is needed, and made again by the derivative.
Numbers are those of `flaxmix.ops.latent` up to the order of sums.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from flaxmix.ops.attention import flat, points_last
from flaxmix.ops.online import (
    Options,
    absorb,
    gradients,
    merge_shards,
    normalise,
    nothing,
    per_query,
)
from flaxmix.ops.stream import accumulator, align, block_size, fold, free_block

_LARGE = {"cpu": 2**22}
_LARGE_ELSEWHERE = 2**28
"""Numbers in the points from which on memory is worth the time: some 5 % on CPUs, where
fresh memory costs time, too. Elsewhere not measured: where it may not fit."""


def is_large(x: Float[Array, "*B N C"], rows: int) -> bool:
    """Whether points are so many that their keys and values had better be streamed.

    Args:
        x: points.
        rows: latents of all heads, H M, of one item.
    """
    batch, points = math.prod(x.shape[:-2]), x.shape[-2]
    large = _LARGE.get(jax.default_backend(), _LARGE_ELSEWHERE)
    return x.size >= large and free_block(batch * rows, points) < points


def _cut(x, start, size):
    return None if x is None else lax.dynamic_slice_in_dim(x, start, size, 1)


def _put(x, part, start):
    return lax.dynamic_update_slice_in_dim(x, part.astype(x.dtype), start, 1)


def _vary(params, x):
    """Parameters that vary over the mesh as the points do; see `align`."""
    leaves, structure = jax.tree.flatten(params)
    *leaves, x = align(*leaves, x)
    return jax.tree.unflatten(structure, leaves), x


def _sums(tree):
    """Zeros to add gradients up in."""
    return jax.tree.map(lambda a: jnp.zeros_like(a, accumulator(a.dtype)), tree)


def _add(sums, tree):
    return jax.tree.map(lambda s, a: s + a.astype(s.dtype), sums, tree)


def _narrow(sums, tree):
    return jax.tree.map(lambda s, a: s.astype(a.dtype), sums, tree)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(make, options: Options, params, q, x, mask):
    """x [B, N, C], q [B, H, M, D] scaled, mask [B, N]; see `gather_from`."""
    return _gather_forward(make, options, params, q, x, mask)[0]


def _made(make, params, x):
    k, v = make(params, x)
    return points_last(k), None if v is None else points_last(v)


def _gather_forward(make, options, params, q, x, mask):
    points = x.shape[1]
    size = block_size(q, points, options.block)
    inner = Options(block=size)
    k, v = jax.eval_shape(functools.partial(_made, make), params, _cut(x, 0, 1))

    def body(start, n, part):
        k, v = _made(make, params, _cut(x, start, n))
        return absorb(part, q, k, v, _cut(mask, start, n), None, inner)

    part = nothing(q, q, k.shape[2] if v is None else v.shape[2])
    part = merge_shards(fold(points, size, body, part), options.axis_name)
    result, kept = normalise(part, x.dtype)
    return result, (params, q, x, mask, kept)


def _gather_backward(make, options, saved, cotangents):
    params, q, x, mask, kept = saved
    queries, points = per_query(kept, cotangents), x.shape[1]
    size = block_size(q, points, options.block)
    inner = Options(block=size)

    def body(start, n, carry):
        sums, dq, dx = carry
        make_block = functools.partial(_made, make)
        (k, v), pull = jax.vjp(make_block, params, _cut(x, start, n))
        part = gradients(q, k, v, _cut(mask, start, n), None, queries, inner)
        dparams, dblock = pull(part[1:])
        return _add(sums, dparams), dq + part[0], _put(dx, dblock, start)

    init = _sums(params), _sums(q), jnp.zeros_like(x)
    sums, dq, dx = fold(points, size, body, init)
    return _narrow(sums, params), dq.astype(q.dtype), dx, None


_gather.defvjp(_gather_forward, _gather_backward)


def gather_from(
    make: Callable,
    params: Any,
    q: Float[Array, "... H M D"],
    x: Float[Array, "B N C"],
    *,
    mask: Bool[Array, "B N"] | None = None,
    scale: float | None = None,
    axis_name: str | None = None,
    block: int | None = None,
) -> tuple[Float[Array, "B H M E"], Float[Array, "B H M"]]:
    """`ops.gather(q, k, v)` with k, v = make(params, x), never held for all points.

    Costs `make` once forward and twice, its derivative included, backward. Memory
    beside x and its gradient is that of one block.

    Args:
        make: a function of the module (no closure) that makes keys and values [B, n,
            H, D], or None for equal values, of each point for itself.
        params: what it depends on.
        q: latent queries.
        x: points; what masked ones hold must be finite.
        mask: True for real points.
        scale: factor on the scores; None means 1 / sqrt(D).
        axis_name: mesh axis that N is sharded over, inside `jax.shard_map`.
        block: points worked on at once; None chooses by shape and backend.

    Returns:
        z in the dtype of x, and L in float32 or wider.
    """
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    params, x = _vary(params, x)
    q, x = align(q, x)
    q = flat(q * factor, x.shape[:1], 3).astype(x.dtype)
    options = Options(block=block, axis_name=axis_name)
    result: Any = _gather(make, options, params, q, x, mask)
    return result


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _map(function, size, params, x, mask):
    return _map_forward(function, size, params, x, mask)[0]


def _map_forward(function, size, params, x, mask):
    one = jax.eval_shape(function, params, _cut(x, 0, 1), _cut(mask, 0, 1))

    def body(start, n, y):
        part = function(params, _cut(x, start, n), _cut(mask, start, n))
        return _put(y, part, start)

    init = jnp.broadcast_to(
        jnp.zeros_like(x[..., :1], one.dtype), (*x.shape[:-1], one.shape[-1])
    )
    return fold(x.shape[1], size, body, init), (params, x, mask)


def _map_backward(function, size, saved, dy):
    params, x, mask = saved

    def body(start, n, carry):
        sums, dx = carry
        apply = lambda params, x: function(params, x, _cut(mask, start, n))
        _, pull = jax.vjp(apply, params, _cut(x, start, n))
        dparams, dblock = pull(_cut(dy, start, n))
        return _add(sums, dparams), _put(dx, dblock, start)

    sums, dx = fold(x.shape[1], size, body, (_sums(params), jnp.zeros_like(x)))
    return _narrow(sums, params), dx, None


_map.defvjp(_map_forward, _map_backward)


def map_points(
    function: Callable,
    params: Any,
    x: Float[Array, "B N C"],
    *,
    mask: Bool[Array, "B N"] | None = None,
    block: int,
) -> Float[Array, "B N E"]:
    """function(params, x, mask), block by block; its derivative computes it again.

    Args:
        function: a function of the module (no closure) that maps points [B, n, C]
            each for itself.
        params: what else it depends on.
        x: points.
        mask: True for real points.
        block: points worked on at once.
    """
    params, x = _vary(params, x)
    return _map(function, block, params, x, mask)
