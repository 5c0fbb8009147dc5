"""Givens rotations between heads."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from flaxmix.ops.affine import wide


def givens(
    x: Float[Array, "*B T H D"],
    theta: Float[Array, "P"],
    *,
    layer: int | Int[Array, ""],
) -> Float[Array, "*B T H D"]:
    """Rotates pairs of neighbouring heads, each pair by one angle for all D channels.

        (a, b) -> (a cos - b sin, a sin + b cos)

    Pairs of even layers are (1, 2), (3, 4) ... and of odd ones (2, 3), ..., (H, 1),
    so that two layers connect all heads. Orthogonal: norms over the heads stay.

    Args:
        x: heads, of tokens or of the rows of a projection.
        theta: an angle for each of the H / 2 pairs, in that order.
        layer: index of the layer from 0; it may be traced.

    Returns:
        The rotated heads in the dtype of x; products are float32 or wider.

    Raises:
        ValueError: if H is odd or `theta` does not have H / 2 angles.
    """
    heads = x.shape[-2]
    if heads % 2 or theta.shape != (heads // 2,):
        raise ValueError(
            f"pairs of {heads} heads need an even number of them and {heads // 2} "
            f"angles, got {theta.shape}."
        )
    first = jnp.arange(0, heads, 2) + layer % 2
    second = (first + 1) % heads
    cos, sin = jnp.cos(wide(theta)), jnp.sin(wide(theta))
    # As a matrix of heads: the pairs may be traced, and H is small.
    turn = jnp.zeros((heads, heads), cos.dtype)
    turn = turn.at[first, first].set(cos).at[second, second].set(cos)
    turn = turn.at[first, second].set(-sin).at[second, first].set(sin)
    precision = lax.Precision.HIGHEST
    y = jnp.einsum("gh,...hd->...gd", turn, wide(x), precision=precision)
    return y.astype(x.dtype)
