"""Normalised linear attention of GNOT (arXiv:2302.14376)."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from flaxmix.ops.affine import wide


def linear_attention(
    q: Float[Array, "*B N H D"],
    k: Float[Array, "*B N H D"],
    v: Float[Array, "*B N H E"],
    *,
    mask: Bool[Array, "*B N"] | None = None,
    axis_name: str | None = None,
) -> Float[Array, "*B N H E"]:
    """Linear attention with softmaxes over the channels instead of the points.

        a = softmax_D(q),  b = softmax_D(k),
        y_n = a_n (sum_N b^T v) / (a_n . sum_N b) + a_n

    O(N D E) time a head, O(N D) memory. A sharded N costs one sum of H D (E + 1)
    numbers over `axis_name`. Softmaxes and sums are float32 or wider. Queries and
    values are as wide as each other, since y adds a.

    Args:
        q: queries.
        k: keys.
        v: values.
        mask: True for real points, over which the sums run. What masked keys and
            values hold never matters, even NaN.
        axis_name: mesh axis that N is sharded over, inside `jax.shard_map`.

    Returns:
        y in the dtype of `q`; a alone where there is no real point.
    """
    a = jax.nn.softmax(wide(q), -1)
    b = jax.nn.softmax(wide(k), -1)
    if mask is not None:
        b = jnp.where(mask[..., None, None], b, 0)
        v = jnp.where(mask[..., None, None], v, 0)
    sums = jnp.einsum("...nhd,...nhe->...hde", b, wide(v))
    mass = b.sum(-3)
    if axis_name is not None:
        sums, mass = lax.psum((sums, mass), axis_name)
    weight = jnp.einsum("...nhd,...hd->...nh", a, mass)[..., None]
    read = jnp.einsum("...nhd,...hde->...nhe", a, sums)
    some = weight > 0
    read = jnp.where(some, read / jnp.where(some, weight, 1.0), 0)
    return (read + a).astype(q.dtype)
