"""Softmax attention in tiles of queries: what causal attention and Relation share.

Each query sees an interval of keys. A tile is some queries of some heads against all
keys that one of them may see: then a softmax is complete within its tile, and nothing
is rescaled. Queries come in buckets whose number of keys is static, so that hardly
anything above the diagonal is computed.

    e = u or SiLU(u),  u = q k^T,  P = softmax over the keys seen of e,  z = P v

Arrays are q [B, H, Q, D], with the scale folded in; k [B, H, N, D]; v [B, H, N, E].
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from flaxmix.ops.norm import inner
from flaxmix.ops.online import finite
from flaxmix.ops.stream import accumulator, dot

# Queries of a tile, the fastest on CPUs: products are then wide enough.
_TILE = 256
# Scores of a tile, if that takes more than one head: 1 MiB of them on CPUs.
_SCORES = {"cpu": 2**18}
_SCORES_ELSEWHERE = 2**26


@dataclasses.dataclass(frozen=True)
class Options:
    """What does not depend on the arrays.

    Attributes:
        silu: whether scores are SiLU(u) instead of u.
        below: query i sees no key from i + `below` on; None for no such limit.
    """

    silu: bool
    below: int | None


class Bounds(NamedTuple):
    """Which keys are seen: those at places start <= place < stop.

    Attributes:
        place: of each key [N].
        start: for each query [B, Q], or None.
        stop: for each query [B, Q], or None.
    """

    place: Int[Array, "N"]
    start: Int[Array, "B Q"] | None = None
    stop: Int[Array, "B Q"] | None = None


class Part(NamedTuple):
    """Softmax over some of the keys: result, maximum, mass, in float32 or wider."""

    z: Array
    top: Array
    mass: Array


def merge(a: Part, b: Part) -> Part:
    """The softmax over the keys of both."""
    top = jnp.maximum(a.top, b.top)
    wa = a.mass * jnp.exp(a.top - finite(top))
    wb = b.mass * jnp.exp(b.top - finite(top))
    mass = wa + wb
    safe = jnp.where(mass > 0, mass, 1)
    z = a.z * (wa / safe)[..., None] + b.z * (wb / safe)[..., None]
    return Part(z, top, mass)


def log_mass(part: Part) -> Array:
    """log sum exp of the scores seen; -inf where there are none."""
    some = part.mass > 0
    safe = jnp.where(some, part.mass, 1)
    return jnp.where(some, finite(part.top) + jnp.log(safe), -jnp.inf)


def forward(q, k, v, bounds: Bounds | None, options: Options) -> Part:
    """z [B, H, Q, E], top and mass [B, H, Q]."""
    acc = accumulator(k.dtype)

    def group(heads, bounds):
        q, k, v = heads
        qt, vt = _t(q), _t(v)
        blank = jnp.zeros_like(qt[:, :1], acc)
        zt = jnp.broadcast_to(blank, (len(v), v.shape[2], q.shape[1]))
        top, mass = blank[:, 0], blank[:, 0]

        def tile(k, vt, i, n, carry):
            u = dot("hkd,hdq->hkq", k, _cut(qt, i, n), k.dtype)
            e = u * _sigmoid(u) if options.silu else u
            e = _hide(e, -jnp.inf, i, n, bounds, options)
            top = e.max(1)
            p = jnp.exp(e - finite(top)[:, None])
            mass = p.sum(1)
            z = dot("hdk,hkq->hdq", vt, p, k.dtype)
            z = z / jnp.where(mass > 0, mass, 1)[:, None]
            new = z, top, mass
            return tuple(_put(*pair, i) for pair in zip(carry, new, strict=True))

        for start, stop, keys in _buckets(q.shape[1], k.shape[1], options):
            # One bucket at a time: XLA would keep the scores of several.
            zt, *seen = lax.optimization_barrier((zt, k[:, :keys], vt[..., :keys]))
            work = functools.partial(tile, *seen)
            zt, top, mass = _tiles(start, stop, work, (zt, top, mass))
        return _t(zt), top, mass

    return Part(*_over_heads(group, (q, k, v), bounds, q.shape[2], k.shape[2]))


def backward(q, k, v, bounds, options: Options, kept, cotangents):
    """dq, dk and dv in float32 or wider, of cotangents dz and dlog_mass.

    Args:
        q, k, v, bounds, options: as given to `forward`; possibly a part of the keys.
        kept: z, top and mass over all keys.
        cotangents: of z and of `log_mass`.
    """
    acc = accumulator(k.dtype)
    (z, top, mass), (dz, dlog) = kept, cotangents
    row = inner(dz.astype(acc), z.astype(acc)) - dlog
    inverse = 1 / jnp.where(mass > 0, mass, 1)
    fold = acc == k.dtype
    if fold:
        # The division of every probability is that of its row, done once. Half
        # precision has no numbers that small.
        dz, row = dz * inverse[..., None], row * inverse
    dz = dz.astype(k.dtype)

    def group(heads, bounds):
        q, k, v, dz, row, top, inverse = heads
        qt, kt, dzt = _t(q), _t(k), _t(dz)
        dqt = jnp.zeros_like(qt, acc)
        dk, dv = jnp.zeros_like(k, acc), jnp.zeros_like(v, acc)

        def tile(k, v, kt, i, n, carry):
            dqt, dk, dv = carry
            u = dot("hkd,hdq->hkq", k, _cut(qt, i, n), k.dtype)
            dp = dot("hkd,hdq->hkq", v, _cut(dzt, i, n), k.dtype)
            s = _sigmoid(u)
            e = u * s if options.silu else u
            p = jnp.exp(e - _cut(top, i, n)[:, None])
            p = p if fold else p * _cut(inverse, i, n)[:, None]
            p = _hide(p, 0, i, n, bounds, options)
            du = p * (dp - _cut(row, i, n)[:, None])
            if options.silu:
                du = du * (s * (1 + u * (1 - s)))
            dqt = _put(dqt, dot("hdk,hkq->hdq", kt, du, k.dtype), i)
            dk = dk + dot("hkq,hqd->hkd", du, _cut(q, i, n, 1), k.dtype)
            dv = dv + dot("hkq,hqd->hkd", p, _cut(dz, i, n, 1), k.dtype)
            return dqt, dk, dv

        for start, stop, keys in _buckets(q.shape[1], k.shape[1], options):
            dqt, *seen = lax.optimization_barrier(
                (dqt, k[:, :keys], v[:, :keys], kt[..., :keys])
            )
            sums = jnp.zeros_like(seen[0], acc), jnp.zeros_like(seen[1], acc)
            work = functools.partial(tile, *seen)
            dqt, *sums = _tiles(start, stop, work, (dqt, *sums))
            dk, dv = dk.at[:, :keys].add(sums[0]), dv.at[:, :keys].add(sums[1])
        return _t(dqt), dk, dv

    heads = q, k, v, dz, row, finite(top), inverse
    return _over_heads(group, heads, bounds, q.shape[2], k.shape[2])


def _t(x: Array) -> Array:
    return jnp.swapaxes(x, -1, -2)


def _sigmoid(u: Array) -> Array:
    # The fastest form. Its own derivative would be NaN below -88: never taken.
    return 1 / (1 + jnp.exp(-u))


def _cut(x: Array, start, size: int, axis: int = -1) -> Array:
    axis %= x.ndim
    if size == x.shape[axis]:
        return x
    return lax.dynamic_slice_in_dim(x, start, size, axis)


def _put(x: Array, part: Array, start) -> Array:
    return lax.dynamic_update_slice_in_dim(x, part.astype(x.dtype), start, x.ndim - 1)


def _hide(x, fill, i, n: int, bounds: Bounds | None, options: Options):
    """Scores [h, keys, n] of queries from i on, `fill` where a key is not seen."""
    keys, seen = x.shape[1], []
    if options.below is not None:
        limit = i + options.below + jnp.arange(n)
        seen.append(jnp.arange(keys)[:, None] < limit)
    if bounds is not None:
        place = bounds.place[:keys, None]
        if bounds.start is not None:
            seen.append(place >= _cut(bounds.start, i, n))
        if bounds.stop is not None:
            seen.append(place < _cut(bounds.stop, i, n))
    if not seen:
        return x
    mask = seen[0]
    for more in seen[1:]:
        mask = mask & more
    return jnp.where(mask, x, fill)


def _buckets(queries: int, keys: int, options: Options) -> list[tuple[int, int, int]]:
    """(first query, last + 1, number of keys) of each bucket."""
    if options.below is None:
        return [(0, queries, keys)]
    # About eight, of whole tiles. Two tiles at least where tiles are large: of a loop
    # XLA keeps one alive.
    tile = min(queries, _TILE)
    width = tile * max(1 + (queries > 2048), -(-queries // (8 * tile)))
    return [
        (
            start,
            stop := min(queries, start + width),
            min(keys, max(1, stop - 1 + options.below)),
        )
        for start in range(0, queries, width)
    ]


def _tiles(start: int, stop: int, tile: Callable, carry: Any) -> Any:
    """Folds tile(i, n, carry) over the tiles of queries from `start` to `stop`."""
    size = min(stop - start, _TILE)
    whole, rest = divmod(stop - start, size)
    if whole == 1:
        carry = tile(start, size, carry)
    else:
        carry = lax.fori_loop(
            0, whole, lambda t, carry: tile(start + t * size, size, carry), carry
        )
    return tile(stop - rest, rest, carry) if rest else carry


def _over_heads(group: Callable, heads: tuple, bounds, queries: int, keys: int):
    """group(heads, bounds) of some heads at a time, of arrays [B, H, ...]."""
    batch, count = heads[0].shape[:2]
    budget = _SCORES.get(jax.default_backend(), _SCORES_ELSEWHERE)
    fits = lambda n: n * min(queries, _TILE) * keys <= budget
    size = max(n for n in range(1, count + 1) if count % n == 0 and (n == 1 or fits(n)))
    cut = lambda x: x.reshape(batch * count // size, size, *x.shape[2:])
    repeat = lambda x: jnp.repeat(x, count // size, 0)
    limits = None if bounds is None else (bounds.start, bounds.stop)

    def one(arrays):
        heads, limits = arrays
        return group(heads, None if bounds is None else Bounds(bounds.place, *limits))

    results = lax.map(one, (tuple(map(cut, heads)), jax.tree.map(repeat, limits)))
    return tuple(x.reshape(batch, count, *x.shape[2:]) for x in results)
