"""Rotary position embedding over the coordinates of points (arXiv:2104.09864)."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from flaxmix.ops.affine import wide


def rotary_frequencies(width: int, axes: int) -> np.ndarray:
    """10000^(-i / e) for i = 0, 2, ... below e, the channels of one axis [e / 2].

    e is D / axes, rounded down to an even number; the channels left over do not turn.

    Raises:
        ValueError: if D is odd or leaves an axis fewer than two channels.
    """
    each = width // max(axes, 1) // 2 * 2
    if axes < 1 or width % 2 or each < 2:
        raise ValueError(
            f"rotary embedding of {axes} axes needs an even number of channels a head, "
            f"at least {2 * max(axes, 1)}, got {width}."
        )
    return 10000.0 ** (-np.arange(0, each, 2) / each)


def rotary_angles(coords: Float[Array, "*B N A"], width: int) -> Float[Array, "..."]:
    """Angles of each point [*B, N, D / 2], axis by axis: coordinate times frequency.

    In float32, or float64 if the coordinates are: in half precision an angle of
    1,000 rad is off by up to half a turn.

    Args:
        coords: positions of the points.
        width: channels D a head.

    Raises:
        ValueError: if D is odd or leaves an axis fewer than two channels.
    """
    coords = wide(coords)
    frequencies = rotary_frequencies(width, coords.shape[-1])
    angles = coords[..., None] * jnp.asarray(frequencies, coords.dtype)
    angles = angles.reshape(*coords.shape[:-1], -1)
    rest = width // 2 - angles.shape[-1]
    return jnp.pad(angles, [(0, 0)] * (angles.ndim - 1) + [(0, rest)])


def rotate(
    x: Float[Array, "*B N H D"], angles: Float[Array, "*B N P"]
) -> Float[Array, "*B N H D"]:
    """Turns each pair of adjacent channels (2 j, 2 j + 1) by angle j.

        (a, b) -> (a cos - b sin, a sin + b cos)

    Computed in float32 or wider, whatever the dtype of x, which the result has.
    """
    a, b = wide(x)[..., ::2], wide(x)[..., 1::2]
    angles = angles[..., None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    turned = jnp.stack([a * cos - b * sin, a * sin + b * cos], -1)
    return turned.reshape(x.shape).astype(x.dtype)
