"""Softmax attention with its log-normaliser, streamed over the keys.

    y = softmax_N(scale q k^T) v,   L = log sum_N exp(scale q k^T)

The derivative recomputes the probabilities from y and L, block by block (eqs. 39-49
of arXiv:2608.11519, appendix B), so neither direction ever holds more than one block
of scores. Scores, exponentials, sums and log-normalisers are float32 (float64 for
float64 inputs); products take operands in the input's dtype and add up in float32.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Key

from flaxmix.ops.online import Options, attend
from flaxmix.ops.ring import ring_attend
from flaxmix.ops.stream import align, check_block, check_dropout, shard_key


def points_last(x: Float[Array, "... N H D"]) -> Float[Array, "... H D N"]:
    """The layout that the streamed operators work in."""
    return jnp.moveaxis(x, -3, -1)


def points_first(x: Float[Array, "... H D N"]) -> Float[Array, "... N H D"]:
    """The layout of the public operators."""
    return jnp.moveaxis(x, -1, -3)


def flat(x: Array, batch: tuple[int, ...], keep: int) -> Array:
    """Broadcasts all but the last `keep` axes to `batch` and merges them into one."""
    tail = x.shape[x.ndim - keep :]
    return jnp.broadcast_to(x, (*batch, *tail)).reshape(-1, *tail)


def attention(
    q: Float[Array, "*B Q H D"],
    k: Float[Array, "*B N H D"],
    v: Float[Array, "*B N H E"],
    *,
    mask: Bool[Array, "*B N"] | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    key: Key[Array, ""] | None = None,
    block: int | None = None,
    axis_name: str | None = None,
) -> tuple[Float[Array, "*B Q H E"], Float[Array, "*B H Q"]]:
    """Softmax attention, y = softmax_N(scale q k^T) v, and its log-normaliser L.

    O(Q N (D + E)) time a head; memory beside inputs and results is one block of
    scores, in both directions.

    With `axis_name`, queries and keys are sharded over R devices: each holds Q and N
    of them, and takes R times that time. Keys, values and masks go around the ring of
    devices, to the next one in R - 1 hops forward and as many backward, where their
    gradients follow in float32 or wider, in R hops. A device holds its own keys, those
    that it works on and those that arrive.

    Args:
        q: queries.
        k: keys.
        v: values.
        mask: True for real keys. What masked keys hold never matters, even NaN.
        scale: factor on the scores; None means 1 / sqrt(D).
        dropout: part of the probabilities that is set to 0, the rest being scaled up;
            which ones depends on `key`, `block` and the sharding.
        key: drives the dropout; None for none.
        block: keys worked on at once; None chooses by shape and backend.
        axis_name: mesh axis that Q and N are sharded over, inside `jax.shard_map`;
            None means that this device holds all keys.

    Returns:
        y in the dtype of `k`, and L = log sum_N exp(scale q k^T) in float32 or
        wider, of this device's queries. A query that sees no key gets y = 0 and
        L = -inf.

    Raises:
        ValueError: if `dropout` is not in [0, 1) or `block` not positive.
    """
    check_dropout(dropout)
    check_block(block)
    batch = k.shape[:-3]
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    if mask is not None:
        k = jnp.where(mask[..., None, None], k, 0)
        v = jnp.where(mask[..., None, None], v, 0)
        mask = flat(mask, batch, 1)
    place = None if axis_name is None else lax.axis_index(axis_name)
    # What travels varies over the axis, even if all devices began with the same.
    q, k, v, mask, _ = align(q, k, v, mask, place)
    operands = (
        flat(jnp.swapaxes(q * factor, -3, -2), batch, 3).astype(k.dtype),
        flat(points_last(k), batch, 3),
        flat(points_last(v), batch, 3),
        mask,
        shard_key(key if dropout else None, axis_name),
    )
    options = Options(dropout=dropout, block=block)
    result: Any = (
        attend(*operands, options)
        if axis_name is None
        else ring_attend(*operands, options, axis_name)
    )
    y, log_mass = (x.reshape(*batch, *x.shape[1:]) for x in result)
    return jnp.swapaxes(y, -3, -2), log_mass
