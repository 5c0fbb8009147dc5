"""Causal softmax attention, each query seeing an interval of the keys.

    y_i = sum_j P_ij v_j,   P_ij = softmax_j(e_ij),   L_i = log sum_j exp(e_ij)

over start_i <= j < stop_i, with e = scale q k^T. The derivative recomputes the
probabilities from y and the row's maximum and mass, so neither direction holds more
than a tile of scores. Sequences are shared out over devices by a ring on which every
device has the same work.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from flaxmix.ops import tiles
from flaxmix.ops.attention import flat
from flaxmix.ops.ring import around, hop
from flaxmix.ops.stream import align
from flaxmix.ops.tiles import Bounds, Options, Part


def places(tokens: int, axis_name: str | None) -> Int[Array, "N"]:
    """The place, from 0, of each of this device's tokens in the whole sequence.

    Over R devices it is cut into 2 R chunks, of which device r holds number r and
    then number 2 R - 1 - r: so causal work is the same on all devices.

    Raises:
        ValueError: if the number of tokens is odd.
    """
    if axis_name is None:
        return jnp.arange(tokens, dtype=jnp.int32)
    return _shard_places(tokens, lax.axis_index(axis_name), axis_name)


def _shard_places(tokens: int, shard, axis_name: str) -> Int[Array, "N"]:
    if tokens % 2:
        raise ValueError(f"a shard needs an even number of tokens, got {tokens}.")
    half, last = tokens // 2, 2 * lax.axis_size(axis_name) - 1
    within = jnp.arange(half, dtype=jnp.int32)
    return jnp.concatenate([shard * half + within, (last - shard) * half + within])


def check_positions(positions: Array, shape: tuple[int, ...]) -> None:
    """Raises ValueError if these are no integers [*B, T] of the given shape."""
    if not jnp.issubdtype(positions.dtype, jnp.integer) or positions.shape != shape:
        raise ValueError(
            f"positions must be integers of shape {shape}, got {positions.dtype} of "
            f"shape {positions.shape}."
        )


def causal_attention(
    q: Float[Array, "*B Q H D"],
    k: Float[Array, "*B N H D"],
    v: Float[Array, "*B N H E"],
    *,
    scale: float | None = None,
    start: Int[Array, "*B Q"] | None = None,
    stop: Int[Array, "*B Q"] | None = None,
    axis_name: str | None = None,
) -> tuple[Float[Array, "*B Q H E"], Float[Array, "*B H Q"]]:
    """Causal softmax attention and its log-normaliser.

    O(Q N (D + E)) time a head, half of it skipped where `stop` is not given; memory
    beside inputs and results is O(N) a head that is worked on.

    With `axis_name`, tokens are in the order of `places`. Keys and values go around
    the ring of R devices, in R - 1 hops forward and as many backward, where their
    gradients follow in float32 or wider in R hops; each device takes 1 / R of the work.

    Args:
        q: queries, the last Q of N tokens.
        k: keys.
        v: values.
        scale: factor on the scores; None means 1 / sqrt(D).
        start: first place that each query sees, such as that of its document.
        stop: the place after the last one that it sees; None means its own place + 1.
            With `stop`, queries may be any.
        axis_name: mesh axis that Q = N is sharded over, inside `jax.shard_map`.

    Returns:
        y in the dtype of `k`, and L in float32 or wider. A query that sees no key gets
        y = 0 and L = -inf.

    Raises:
        ValueError: if there is no query, or shapes do not match; if a shard has other
            queries than keys, an odd number of them, or a `stop`.
    """
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    return attend(
        *((q * factor).astype(k.dtype), k, v),
        start=start,
        stop=stop,
        axis_name=axis_name,
        silu=False,
    )


def attend(q, k, v, *, start, stop, axis_name: str | None, silu: bool) -> Any:
    """`causal_attention` with the scale in q; with `silu`, of the keys before i."""
    batch, queries, keys = k.shape[:-3], q.shape[-3], k.shape[-3]
    if k.shape[:-1] != v.shape[:-1] or q.shape[-2:] != k.shape[-2:] or 0 in q.shape:
        raise ValueError(
            "there must be queries, as wide as keys, and as many values as keys, got "
            f"shapes {q.shape}, {k.shape} and {v.shape}."
        )
    for name, limit in (("start", start), ("stop", stop)):
        if limit is not None and limit.shape[-1:] != (queries,):
            raise ValueError(
                f"{name} must have a place for each of {queries} queries, got shape "
                f"{limit.shape}."
            )
    sharded = axis_name is not None and lax.axis_size(axis_name) > 1
    if axis_name is not None and (queries != keys or stop is not None):
        raise ValueError(
            f"shards of {axis_name!r} need as many queries as keys and no stop, got "
            f"{queries} queries, {keys} keys and stop={stop}."
        )
    limits = [None if x is None else flat(x, batch, 1) for x in (start, stop)]
    place = places(keys, axis_name)
    # Parts from other devices vary, even if all devices began with the same.
    others = lax.axis_index(axis_name) if sharded else None
    q, k, v, *limits, place, _ = align(q, k, v, *limits, place, others)
    heads = lambda x: jnp.swapaxes(flat(x, batch, 3), 1, 2)
    operands = heads(q), heads(k), heads(v)
    below = None if stop is not None else keys - queries + (not silu)
    options = Options(silu=silu, below=below)
    if sharded:
        results: Any = _ring(*operands, limits[0], options, axis_name)
    else:
        some = any(x is not None for x in limits)
        bounds = Bounds(place, *limits) if some else None
        results = _local(*operands, bounds, options)
    y, log_mass = results
    y = jnp.swapaxes(y, 1, 2)
    return tuple(x.reshape(*batch, *x.shape[1:]) for x in (y, log_mass))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _local(q, k, v, bounds: Bounds | None, options: Options) -> Any:
    return _local_forward(q, k, v, bounds, options)[0]


def _local_forward(q, k, v, bounds, options):
    part = tiles.forward(q, k, v, bounds, options)
    y = part.z.astype(k.dtype)
    kept = q, k, v, bounds, Part(y, part.top, part.mass)
    return (y, tiles.log_mass(part)), kept


def _local_backward(options, saved, cotangents):
    q, k, v, bounds, part = saved
    grads = tiles.backward(q, k, v, bounds, options, part, cotangents)
    return *_like(grads, (q, k, v)), None


_local.defvjp(_local_forward, _local_backward)


def _like(grads, arrays):
    return [g.astype(a.dtype) for g, a in zip(grads, arrays, strict=True)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _ring(q, k, v, start, options: Options, axis_name: str) -> Any:
    return _ring_forward(q, k, v, start, options, axis_name)[0]


def _visit(i, half: int, axis_name: str, work: Callable) -> Any:
    """work(queries, keys), slices of those that meet at stop i.

    All queries see the first chunk of an earlier device, and none sees its last one;
    both chunks of a later device are seen by the last chunk of queries alone. Either
    is half of all scores, and they hide none but those of other documents.
    """
    return lax.cond(
        lax.axis_index(axis_name) >= i,
        lambda: work(slice(None), slice(half)),
        lambda: work(slice(half, None), slice(None)),
    )


def _whole(x, part: slice, half: int, fill: float = 0.0):
    """[B, H, n, ...] of some tokens, with `fill` for the others."""
    before, after = half * (part.start is not None), half * (part.stop is not None)
    widths = [(0, 0), (0, 0), (before, after), *[(0, 0)] * (x.ndim - 3)]
    return jnp.pad(x, widths, constant_values=fill)


def _some_bounds(i, start, rows: slice, columns: slice, tokens: int, axis_name: str):
    """Bounds of queries against the keys of the device i places before this one."""
    if start is None:
        return None
    shard = (lax.axis_index(axis_name) - i) % lax.axis_size(axis_name)
    return Bounds(_shard_places(tokens, shard, axis_name)[columns], start[:, rows])


def _ring_forward(q, k, v, start, options, axis_name):
    tokens, half = k.shape[2], k.shape[2] // 2
    bounds = _some_bounds(0, start, slice(None), slice(None), tokens, axis_name)
    every = Options(silu=options.silu, below=None)

    def visit(i, part, k, v):
        def work(rows, columns):
            bounds = _some_bounds(i, start, rows, columns, tokens, axis_name)
            arrays = q[:, :, rows], k[:, :, columns], v[:, :, columns]
            z, top, mass = tiles.forward(*arrays, bounds, every)
            whole = functools.partial(_whole, part=rows, half=half)
            return Part(whole(z), whole(top, fill=-jnp.inf), whole(mass))

        return tiles.merge(part, _visit(i, half, axis_name, work))

    part = tiles.forward(q, k, v, bounds, options)
    part = around(visit, part, hop((k, v), axis_name), axis_name, first=1)
    y = part.z.astype(k.dtype)
    kept = q, k, v, start, Part(y, part.top, part.mass)
    return (y, tiles.log_mass(part)), kept


def _ring_backward(options, axis_name, saved, cotangents):
    q, k, v, start, part = saved
    tokens, half = k.shape[2], k.shape[2] // 2
    bounds = _some_bounds(0, start, slice(None), slice(None), tokens, axis_name)
    every = Options(silu=options.silu, below=None)

    def visit(i, sums, k, v):
        def work(rows, columns):
            bounds = _some_bounds(i, start, rows, columns, tokens, axis_name)
            arrays = q[:, :, rows], k[:, :, columns], v[:, :, columns]
            some = jax.tree.map(lambda x: x[:, :, rows], (part, tuple(cotangents)))
            dq, dk, dv = tiles.backward(*arrays, bounds, every, *some)
            return (
                _whole(dq, rows, half),
                _whole(dk, columns, half),
                _whole(dv, columns, half),
            )

        new = _visit(i, half, axis_name, work)
        dq, *sums = jax.tree.map(jnp.add, sums, new)
        # The sums follow their keys; the hop of the last visit takes them home.
        return dq, *hop(tuple(sums), axis_name)

    dq, *sums = tiles.backward(q, k, v, bounds, options, part, cotangents)
    sums = dq, *hop(tuple(sums), axis_name)
    sums = around(visit, sums, hop((k, v), axis_name), axis_name, first=1)
    return *_like(sums, (q, k, v)), None


_ring.defvjp(_ring_forward, _ring_backward)
