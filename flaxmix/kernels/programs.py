"""What one program of the exchange kernels does: a tile of tokens of one head.

References are to whole heads, [T, C] or [T], as in `flaxmix.kernels.exchange`.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

_LOG2_E = math.log2(math.e)


class Sizes(NamedTuple):
    """Sizes of the problem and of its tiles.

    Attributes:
        tokens: T.
        channels: of q and k.
        values: of v.
        rows: tokens of the tile that a program works on.
        columns: tokens of the tiles that it runs over.
    """

    tokens: int
    channels: int
    values: int
    rows: int
    columns: int


def forward_kernel(
    q_ref, k_ref, v_ref, start_ref, y_ref, top_ref, mass_ref, *, sizes: Sizes
):
    first, place, start, tiles = _queries(start_ref, sizes)
    q = _load(q_ref, first, sizes.rows, sizes, sizes.channels)

    def tile(j, carry):
        z, top, mass = carry
        keys, k, v = _keys(k_ref, v_ref, j, sizes)
        e, _ = _scores(_dot(q, k, 1, 1), keys[None], place[:, None], start)
        higher = jnp.maximum(top, e.max(1))
        p = _exp(e - higher[:, None])
        shrink = _exp(top - higher)
        z = z * shrink[:, None] + _dot(p.astype(v.dtype), v, 1, 0)
        return z, higher, mass * shrink + p.sum(1)

    # No score is below -0.28, so a maximum can begin at 0, and masses are above 0.7.
    none = jnp.zeros(sizes.rows, jnp.float32)
    z = jnp.zeros((sizes.rows, v_ref.shape[1]), jnp.float32)
    z, top, mass = lax.fori_loop(*tiles, tile, (z, none, none))
    _store(y_ref, first, z * _inverse(mass)[:, None], sizes, sizes.values)
    _store(top_ref, first, top, sizes)
    _store(mass_ref, first, mass, sizes)


def dq_kernel(
    q_ref,
    k_ref,
    v_ref,
    start_ref,
    dy_ref,
    top_ref,
    mass_ref,
    y_ref,
    dlog_ref,
    dq_ref,
    row_ref,
    *,
    sizes: Sizes,
):
    first, place, start, tiles = _queries(start_ref, sizes)
    mine = first, sizes.rows, sizes
    q = _load(q_ref, *mine, sizes.channels)
    dy = _load(dy_ref, *mine, sizes.values)
    y = _load(y_ref, *mine, sizes.values)
    row = (dy.astype(jnp.float32) * y).sum(1) - _load(dlog_ref, *mine)
    top, inverse = _load(top_ref, *mine), _inverse(_load(mass_ref, *mine))

    def tile(j, dq):
        keys, k, v = _keys(k_ref, v_ref, j, sizes)
        e, slope = _scores(_dot(q, k, 1, 1), keys[None], place[:, None], start)
        p = _exp(e - top[:, None]) * inverse[:, None]
        du = p * (_dot(dy, v, 1, 1) - row[:, None]) * slope
        return dq + _dot(du.astype(k.dtype), k, 1, 0)

    dq = jnp.zeros((sizes.rows, q_ref.shape[1]), jnp.float32)
    _store(dq_ref, first, lax.fori_loop(*tiles, tile, dq), sizes, sizes.channels)
    _store(row_ref, first, row, sizes)


def dkv_kernel(
    q_ref,
    k_ref,
    v_ref,
    start_ref,
    dy_ref,
    top_ref,
    mass_ref,
    row_ref,
    stop_ref,
    dk_ref,
    dv_ref,
    *,
    sizes: Sizes,
):
    first = pl.program_id(0) * sizes.rows
    place = first + _iota(sizes.rows)
    k = _load(k_ref, first, sizes.rows, sizes, sizes.channels)
    v = _load(v_ref, first, sizes.rows, sizes, sizes.values)
    stop = sizes.tokens if stop_ref is None else stop_ref[pl.program_id(0)]

    def tile(i, carry):
        dk, dv = carry
        these = i * sizes.columns, sizes.columns, sizes
        queries = these[0] + _iota(sizes.columns)
        start = None
        if start_ref is not None:
            start = _load(start_ref, *these, other=sizes.tokens)[None]
        q = _load(q_ref, *these, sizes.channels)
        dy = _load(dy_ref, *these, sizes.values)
        top, inverse = _load(top_ref, *these), _inverse(_load(mass_ref, *these))
        # Transposed, so that no product has to transpose what was computed here.
        e, slope = _scores(_dot(k, q, 1, 1), place[:, None], queries[None], start)
        p = _exp(e - top[None]) * inverse[None]
        dv = dv + _dot(p.astype(dy.dtype), dy, 1, 0)
        du = p * (_dot(v, dy, 1, 1) - _load(row_ref, *these)[None]) * slope
        return dk + _dot(du.astype(q.dtype), q, 1, 0), dv

    dk = jnp.zeros((sizes.rows, k_ref.shape[1]), jnp.float32)
    dv = jnp.zeros((sizes.rows, v_ref.shape[1]), jnp.float32)
    tiles = (
        _div(first + 1, sizes.columns),
        _div(stop + sizes.columns - 1, sizes.columns),
    )
    dk, dv = lax.fori_loop(*tiles, tile, (dk, dv))
    _store(dk_ref, first, dk, sizes, sizes.channels)
    _store(dv_ref, first, dv, sizes, sizes.values)


def _queries(start_ref, sizes: Sizes) -> tuple[Any, Any, Any, tuple[Any, Any]]:
    """The first query of this program, places and starts of all, tiles of keys."""
    # The last queries see most: begun first, they do not keep the others waiting.
    first = (pl.cdiv(sizes.tokens, sizes.rows) - 1 - pl.program_id(0)) * sizes.rows
    last = jnp.minimum(first + sizes.rows, sizes.tokens) - 1
    end = _div(last + sizes.columns - 1, sizes.columns)
    start, begin = None, jnp.int32(0)
    if start_ref is not None:
        start = _load(start_ref, first, sizes.rows, sizes, other=sizes.tokens)
        begin = _div(jnp.maximum(start.min(), 0), sizes.columns)
        start = start[:, None]
    return first, first + _iota(sizes.rows), start, (begin, end)


def _keys(k_ref, v_ref, j, sizes: Sizes):
    """Places, keys and values of tile j."""
    these = j * sizes.columns, sizes.columns, sizes
    k = _load(k_ref, *these, sizes.channels)
    v = _load(v_ref, *these, sizes.values)
    return these[0] + _iota(sizes.columns), k, v


def _scores(u, key, query, start):
    """SiLU(u), -inf where a query does not see a key; and its derivative."""
    seen = key < query
    if start is not None:
        seen = seen & (key >= start)
    s = 1 / (1 + _exp(-u))
    return jnp.where(seen, u * s, -jnp.inf), s * (1 + u * (1 - s))


def _exp(x):
    """exp(x) as the card computes it. The factor comes after differences of scores,
    so that its rounding does not grow with them."""
    return jnp.exp2(x * _LOG2_E)


def _inverse(mass):
    """1 / mass, which is 0.7 at least, or anything finite where nothing is seen."""
    return 1 / jnp.maximum(mass, 0.5)


def _dot(a, b, contract_a: int, contract_b: int):
    """Product added up in float32, and without TF32 if that is what a and b are."""
    return lax.dot_general(
        a,
        b,
        (((contract_a,), (contract_b,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def _iota(size: int):
    return lax.iota(jnp.int32, size)


def _div(a, b: int):
    # `//` rounds down, which takes more than a card's division does.
    return lax.div(jnp.asarray(a, jnp.int32), np.int32(b))


def _mask(ref, first, size: int, sizes: Sizes, channels: int | None):
    """Which of rows [size] or [size, C] from `first` on there are; None for all."""
    rows = columns = None
    if sizes.tokens % size:
        rows = first + _iota(size) < sizes.tokens
    if channels is not None:
        rows = None if rows is None else rows[:, None]
        if channels != ref.shape[1]:
            columns = (_iota(ref.shape[1]) < channels)[None]
    if rows is None or columns is None:
        mask = columns if rows is None else rows
    else:
        mask = rows & columns
    shape = (size, *ref.shape[1:])
    return None if mask is None else jnp.broadcast_to(mask, shape)


def _load(ref, first, size: int, sizes: Sizes, channels: int | None = None, other=0):
    """Rows [size] or [size, C] from `first` on; `other` for what there is not."""
    mask = _mask(ref, first, size, sizes, channels)
    if mask is None:
        return ref[pl.ds(first, size)]
    other = jnp.asarray(other, ref.dtype)
    return plgpu.load(ref.at[pl.ds(first, size)], mask=mask, other=other)


def _store(ref, first, x, sizes: Sizes, channels: int | None = None):
    mask = _mask(ref, first, x.shape[0], sizes, channels)
    plgpu.store(ref.at[pl.ds(first, x.shape[0])], x.astype(ref.dtype), mask=mask)
