"""Work in blocks over the points, so that no N-sized matrix is ever held.

Arrays here have the points on the last axis: keys and values [B, H, D, N], queries
[B, H, M, D]. Then every product of a softmax attention and of its derivative runs
over long contiguous rows, which is several times faster on CPUs than with
[B, N, H, D]; XLA folds the transposition into the projection before it.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

# Scores held at once. 4 MiB in float32 was the fastest on CPUs; accelerators want
# long blocks and have the memory.
_SCORES = {"cpu": 2**20}
_SCORES_ELSEWHERE = 2**26


def accumulator(dtype) -> jnp.dtype:
    """float32, or float64 for that.

    Raises:
        TypeError: if the dtype is no floating-point one.
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"an operator needs floating-point inputs, got {dtype}.")
    return jnp.promote_types(dtype, jnp.float32)


def dot(spec: str, a: Array, b: Array, dtype) -> Array:
    """Product of operands in `dtype`, added up in float32 or wider."""
    a, b = a.astype(dtype), b.astype(dtype)
    acc = accumulator(dtype)
    if jax.default_backend() == "cpu":
        # The same numbers; XLA on CPUs lacks some products of half precision.
        a, b = a.astype(acc), b.astype(acc)
    return jnp.einsum(spec, a, b, preferred_element_type=acc)


def block_size(q: Array, points: int, block: int | None) -> int:
    """Points a block for queries [B, H, M, D]: the given number, or `free_block`."""
    if block is None:
        return free_block(q.shape[0] * q.shape[1] * q.shape[2], points)
    return min(block, points)


def free_block(rows: int, points: int) -> int:
    """Points a block that fill the score budget, or all if that is hardly more."""
    budget = _SCORES.get(jax.default_backend(), _SCORES_ELSEWHERE)
    block = max(256, budget // max(rows, 1) // 64 * 64)
    return points if points <= 1.25 * block else block


def split_count(rows: int, points: int) -> int:
    """Parts that N points are cut into: 1 on CPUs; elsewhere, enough for some two
    hundred programs at once from `rows` items and heads, of 1,024 points at least."""
    if jax.default_backend() == "cpu":
        return 1
    return max(1, min(256 // max(rows, 1), points // 1024))


def fold(points: int, block: int, body: Callable, init):
    """Folds body(start, size, carry) over blocks; a shorter last one is unrolled."""
    if points <= block:
        return body(0, points, init)
    whole = points // block
    carry = lax.fori_loop(
        0, whole, lambda i, carry: body(i * block, block, carry), init
    )
    rest = points - whole * block
    return body(whole * block, rest, carry) if rest else carry


def cut(x: Array, start, size: int) -> Array:
    if size == x.shape[-1]:
        return x
    return lax.dynamic_slice_in_dim(x, start, size, x.ndim - 1)


def put(x: Array, part: Array, start) -> Array:
    part = part.astype(x.dtype)
    if part.shape == x.shape:
        return part
    return lax.dynamic_update_slice_in_dim(x, part, start, x.ndim - 1)


def zeros(like: Array, shape: tuple[int, ...], dtype, fill: float = 0.0) -> Array:
    """A constant that varies over the same mesh axes as `like` [B, H, ...].

    Loop carries must, inside `jax.shard_map`; a plain `jnp.zeros` does not.
    """
    seed = jnp.zeros_like(like[:, :, 0, 0], dtype) + jnp.asarray(fill, dtype)
    seed = seed.reshape(seed.shape + (1,) * (len(shape) - 2))
    return jnp.broadcast_to(seed, shape)


def _varying(a: Array) -> frozenset[str]:
    """The mesh axes that an array varies over, inside `jax.shard_map`."""
    kind: Any = jax.typeof(a)
    return kind.manual_axis_type.varying


def align(*arrays: Array | None) -> tuple[Any, ...]:
    """Arrays that vary over the same mesh axes, inside `jax.shard_map`.

    A derivative has to vary as its argument does. What is the same on all devices,
    such as a parameter, varies afterwards like the points, and the derivative of this
    adds the devices' parts up: the operators' own derivatives need no collective.
    """
    given = [a for a in arrays if a is not None]
    axes = frozenset().union(*(_varying(a) for a in given))

    return tuple(None if a is None else vary(a, axes) for a in arrays)


def vary(a: Array, axes: Iterable[str]) -> Array:
    """The same array, varying over mesh axes; its derivative is summed over them.

    Sums of half precision are taken in float32: they are more exact, and XLA on CPUs
    does not compile the others.
    """
    missing = tuple(sorted(set(axes) - _varying(a)))
    # An axis may also be one that `jax.make_jaxpr` or `jax.vmap` names.
    if not missing or jax.sharding.get_abstract_mesh().empty:
        return a
    floating = jnp.issubdtype(a.dtype, jnp.floating)
    wide = a.astype(accumulator(a.dtype)) if floating else a
    return lax.pcast(wide, missing, to="varying").astype(a.dtype)


def spread(x: Array, axis_name: str | None) -> Array:
    """What all devices hold alike, such as gathered latents, before layers take it.

    They would otherwise sum its derivative in half precision; see `vary`.
    """
    return x if axis_name is None else vary(x, (axis_name,))


def softmax_gradient(p: Array, dp: Array) -> Array:
    """Derivative of a softmax over latents, p (dp - sum_M p dp), of [B, H, M, n].

    The sum is over the very numbers that it is taken from: where scores are large, one
    p is 1, and the difference has to be 0. It is a product with ones because on CPUs
    a sum over that axis is up to five times slower.
    """
    t = p * dp
    ones = jnp.ones(p.shape[2], p.dtype)
    row = jnp.einsum("bhmn,m->bhn", t, ones, precision=lax.Precision.HIGHEST)
    return t - p * row[:, :, None]


def check_block(block: int | None) -> None:
    """Raises ValueError if `block` is no positive integer."""
    if block is not None and (not isinstance(block, int) or block < 1):
        raise ValueError(f"block must be a positive integer, got {block!r}.")


def check_dropout(dropout: float) -> None:
    """Raises ValueError if `dropout` is not in [0, 1)."""
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be in [0, 1), got {dropout}.")


def drop(p: Array, key: Array | None, dropout: float, start) -> Array:
    """Dropout of a block that begins at point `start`: the same in both directions."""
    if key is None or not dropout:
        return p
    kept = jax.random.bernoulli(jax.random.fold_in(key, start), 1 - dropout, p.shape)
    return jnp.where(kept, p / (1 - dropout), 0)


def rank(mask: Array | None, points: int, axis_name: str | None) -> Int[Array, "... N"]:
    """How many real points come before each, over all shards: [N] or [*B, N].

    What is drawn for each rank does not depend on padding, blocks or shards.
    """
    here = jnp.arange(points, dtype=jnp.int32)
    if mask is None:
        before = 0 if axis_name is None else lax.axis_index(axis_name) * points
        return here + before
    here = jnp.cumsum(mask, -1, dtype=jnp.int32)
    before = jnp.zeros((), jnp.int32)
    if axis_name is not None:
        counts = lax.all_gather(here[..., -1], axis_name, axis=-1)
        earlier = jnp.arange(counts.shape[-1]) < lax.axis_index(axis_name)
        before = jnp.where(earlier, counts, 0).sum(-1)[..., None]
    return jnp.maximum(here - 1 + before, 0)


def shard_key(key: Array | None, axis_name: str | None) -> Array | None:
    """A key of its own for each shard of the points."""
    if key is None or axis_name is None:
        return key
    return jax.random.fold_in(key, lax.axis_index(axis_name))
