"""Heads: channel c belongs to head c // D, at place c % D."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def head_channels(channels: int, heads: int) -> int:
    """D = C / H.

    Raises:
        ValueError: if `heads` is not positive or does not divide `channels`.
    """
    if heads < 1 or channels < 1 or channels % heads:
        raise ValueError(f"heads={heads} must divide channels={channels}.")
    return channels // heads


def check_latents(latents: int) -> None:
    """Raises ValueError if `latents` is not positive."""
    if latents < 1:
        raise ValueError(f"latents must be at least 1, got {latents}.")


def split(x: Float[Array, "*B N C"], heads: int) -> Float[Array, "*B N H D"]:
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)


def merge(x: Float[Array, "*B N H D"]) -> Float[Array, "*B N C"]:
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def real(
    x: Float[Array, "*B N C"], mask: Bool[Array, "*B N"] | None
) -> Float[Array, "*B N C"]:
    """Zeroes masked points, so that not even NaN spreads, forward or backward.

    Raises:
        ValueError: if the mask is no boolean array of the batch and point axes of x.
    """
    if x.shape[-2] == 0:
        raise ValueError(f"there are no points in x of shape {x.shape}.")
    if mask is None:
        return x
    if mask.dtype != bool or mask.shape != x.shape[:-1]:
        raise ValueError(
            f"the mask must be a boolean array of shape {x.shape[:-1]}, got "
            f"{mask.dtype} of shape {mask.shape}."
        )
    return jnp.where(mask[..., None], x, 0)


def split_latents(z: Float[Array, "*B M C"], heads: int) -> Float[Array, "*B H M D"]:
    return jnp.swapaxes(split(z, heads), -3, -2)


def merge_latents(z: Float[Array, "*B H M D"]) -> Float[Array, "*B M C"]:
    return merge(jnp.swapaxes(z, -3, -2))
