"""Heads: channel c belongs to head c // D, at place c % D."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def head_channels(channels: int, heads: int) -> int:
    """D = C / H.

    Raises:
        ValueError: if `heads` is not positive or does not divide `channels`.
    """
    if heads < 1 or channels % heads:
        raise ValueError(f"heads={heads} must divide channels={channels}.")
    return channels // heads


def split(x: Float[Array, "*B N C"], heads: int) -> Float[Array, "*B N H D"]:
    return x.reshape(*x.shape[:-1], heads, -1)


def merge(x: Float[Array, "*B N H D"]) -> Float[Array, "*B N C"]:
    return x.reshape(*x.shape[:-2], -1)


def real(
    x: Float[Array, "*B N C"], mask: Bool[Array, "*B N"] | None
) -> Float[Array, "*B N C"]:
    """Zeroes masked points, so that not even NaN spreads, forward or backward."""
    return x if mask is None else jnp.where(mask[..., None], x, 0)
