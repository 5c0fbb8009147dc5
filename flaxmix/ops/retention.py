"""Reads and writes of a state with a retention a channel, in chunks of tokens.

    E_t = (diag(alpha_t) C_{t-1})^T q_t,   C_t = diag(alpha_t) C_{t-1} + k_t v_t^T

so that a token reads what came before it, not itself. With C_0 = 0,

    E_t = sum_{j<t} (q_t . k_j prod_{j<u<=t} alpha_u) v_j

Each product of retentions is split at the middle m of the smallest aligned block that
holds both j and t,

    prod_{j<u<=t} alpha_u = (prod_{m<=u<=t} alpha_u) (prod_{j<u<m} alpha_u)

into a factor for t and one for j. Both are exponentials of plain sums of log alpha, all
at most 0: nothing overflows, no digits cancel as in a difference of cumulative sums,
and alpha = 0 is no exception.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from flaxmix.ops.affine import wide
from flaxmix.ops.norm import inner
from flaxmix.ops.stream import dot

# Tokens of a block whose pairs are all scored before one product with the values:
# products of smaller blocks are not worth a call.
_SMALL = 8


def advance(
    state: Array, q: Array, k: Array, v: Array, g: Array, dtype, *, read: bool
) -> tuple[Array, Array | None]:
    """Advances a state [B, H, D, E] over some chunks of c tokens.

    O(D (E + c)) time a token, in products of matrices. All arrays are float32 or wider.

    Args:
        state: C_0.
        q: what tokens read with [B, H, chunks, c, D], c a power of two.
        k: what they write with.
        v: what they write [B, H, chunks, c, E].
        g: log alpha <= 0; may be -inf.
        dtype: of the operands of products, other than those with the state, which may
            be larger than half precision holds.
        read: whether to read, too.

    Returns:
        The state after the last token, and E [B, H, chunks, c, E] or None.
    """
    levels = list(_levels(g))
    _, since, until = levels[-1]
    write = "bhnkd,bhnke->bhnde", k * jnp.exp(until), v
    written: Any = _product(*write, dtype)
    kept = jnp.exp(since[..., -1, :])
    states = []
    for i in range(g.shape[2]):
        states.append(state)
        state = scale(state, kept[:, :, i]) + written[:, :, i]
    if not read:
        return state, None
    before = "bhnqd,bhnde->bhnqe", q * jnp.exp(since), jnp.stack(states, 2)
    far: Any = _product(*before, state.dtype)
    return state, far + _within(q, k, v, levels, dtype)


def _levels(g: Array) -> Iterator[tuple[int, Array, Array]]:
    """Sums of log retentions [..., c, D] in blocks of h = 1, 2, 4 ... c tokens.

    Yields h, the sums from the start of each token's block to that token, and from
    the token after it to the block's end. Nothing is ever subtracted.
    """
    since, until, h = g, jnp.zeros_like(g), 1
    while True:
        yield h, since, until
        if h == g.shape[-2]:
            return
        (first, second), (before, after) = _halves(since, h), _halves(until, h)
        # The sum over a whole block is what its last token has since the start.
        since = _joined(first, second + first[..., -1:, :], g)
        until = _joined(before + second[..., -1:, :], after, g)
        h *= 2


def _halves(x, h):
    """The first and the second h tokens of each block of 2 h."""
    x = x.reshape(*x.shape[:-2], x.shape[-2] // (2 * h), 2, h, x.shape[-1])
    return x[..., 0, :, :], x[..., 1, :, :]


def _joined(first, second, like):
    return jnp.stack([first, second], -3).reshape(like.shape)


def _within(q, k, v, levels, dtype):
    """Reads of what tokens of the same chunk wrote."""
    small, total = min(_SMALL, q.shape[-2]), jnp.zeros_like(v)
    if small > 1:
        total += _within_small(q, k, v, small, levels, dtype)
    for h, since, until in levels[:-1]:
        if h >= small:
            # Second halves read first ones.
            reading = _halves(q, h)[1] * jnp.exp(_halves(since, h)[1])
            writing = _halves(k, h)[0] * jnp.exp(_halves(until, h)[0])
            scores = _product("...qd,...kd->...qk", reading, writing, dtype)
            read: Any = _product("...qk,...ke->...qe", scores, _halves(v, h)[0], dtype)
            total += _joined(jnp.zeros_like(read), read, v)
    return total


def _within_small(q, k, v, small, levels, dtype):
    """Reads of what tokens of the same small block wrote."""
    blocks = lambda x: x.reshape(*x.shape[:-2], -1, small, x.shape[-1])
    place, i, j = jnp.arange(q.shape[-2]), jnp.arange(small)[:, None], jnp.arange(small)
    scores = jnp.zeros(())
    for h, since, until in levels:
        if h < small:
            # A token reads in a second half or is read in a first: one exponential.
            second = (place // h % 2 == 1)[:, None]
            weight = jnp.exp(jnp.where(second, since, until))
            pair = blocks(q * weight), blocks(k * weight)
            new: Any = _product("...qd,...kd->...qk", *pair, dtype)
            met = (i // (2 * h) == j // (2 * h)) & (i // h > j // h)
            scores = scores + jnp.where(met, new, 0)
    read: Any = _product("...qk,...ke->...qe", scores, blocks(v), dtype)
    return read.reshape(v.shape)


@jax.custom_vjp
def scale(x, s) -> Any:
    """s x, with one s for each vector; its derivative is not automatic: see `inner`."""
    return s[..., None] * x


scale.defvjp(
    lambda x, s: (scale(x, s), (x, s)),
    lambda kept, g: (kept[1][..., None] * g, inner(g, kept[0])),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def _product(spec, a, b, dtype):
    """Product of operands in `dtype`, whose derivatives keep the range of float32."""
    return dot(spec, a, b, dtype)


def _product_forward(spec, a, b, dtype):
    return dot(spec, a, b, dtype), (a.astype(dtype), b.astype(dtype))


def _product_backward(spec, dtype, kept, g):
    a, b = map(wide, kept)
    return jax.vjp(functools.partial(jnp.einsum, spec), a, b)[1](g)


_product.defvjp(_product_forward, _product_backward)
