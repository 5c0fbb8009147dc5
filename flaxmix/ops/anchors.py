"""Anchors: a few of the points, that all points attend to (arXiv:2502.09692)."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from flaxmix.ops.latent import scatter
from flaxmix.ops.stream import accumulator, rank


def draw_anchors(
    key: Key[Array, ""],
    points: int,
    count: int,
    *,
    mask: Bool[Array, "*B N"] | None = None,
    axis_name: str | None = None,
) -> tuple[Int[Array, "... A"], Bool[Array, "... A"] | None]:
    """Draws `count` different points, or all if there are fewer.

    The draw depends on the key and the number of real points before each point, not
    on how much padding there is or how N is sharded.

    Args:
        key: decides the draw; the same for all items of a batch.
        points: number of points N on this device.
        count: number of anchors A.
        mask: True for real points, of which alone anchors are drawn.
        axis_name: mesh axis that N is sharded over, inside `jax.shard_map`.

    Returns:
        Places of the anchors among all N points, [A] or, with a mask, [*B, A]; and
        with a mask, which of them are anchors at all, else None.
    """
    ranks = rank(mask, points, axis_name)
    place = rank(None, points, axis_name)
    # A number for each rank by itself, so that it does not depend on N.
    bits = lambda key: jax.random.bits(key, dtype=jnp.uint32)
    number = lambda rank: bits(jax.random.fold_in(key, rank))
    numbers = jax.vmap(number)(ranks.reshape(-1)).reshape(ranks.shape)
    numbers = (numbers >> 1).astype(jnp.int32)
    numbers = numbers if mask is None else jnp.where(mask, numbers, -1)
    place = jnp.broadcast_to(place, numbers.shape)

    def top(numbers, place, count):
        numbers, chosen = lax.top_k(numbers, count)
        return numbers, jnp.take_along_axis(place, chosen, -1)

    numbers, place = top(numbers, place, min(count, points))
    if axis_name is not None:
        # The best of each shard's best.
        join = lambda x: lax.all_gather(x, axis_name, axis=x.ndim - 1, tiled=True)
        total = points * lax.axis_size(axis_name)
        numbers, place = top(join(numbers), join(place), min(count, total))
    return place, None if mask is None else numbers >= 0


def take_points(
    x: Float[Array, "*B N C"],
    places: Int[Array, "... A"],
    *,
    axis_name: str | None = None,
) -> Float[Array, "*B A C"]:
    """The points of x at `places` among all N.

    A sharded N costs one sum of A C numbers over `axis_name`.

    Args:
        x: points.
        places: [A], or with the batch axes of x.
        axis_name: mesh axis that N is sharded over, inside `jax.shard_map`.
    """
    if axis_name is not None:
        places = places - lax.axis_index(axis_name) * x.shape[-2]
    here = (places >= 0) & (places < x.shape[-2])
    places = jnp.broadcast_to(places, (*x.shape[:-2], places.shape[-1]))
    found = jnp.take_along_axis(x, places[..., None], -2, mode="clip")
    if axis_name is None:
        return found
    # One of them is not 0; XLA on CPUs does not compile sums in half precision.
    found = jnp.where(here[..., None], found, 0).astype(accumulator(x.dtype))
    return lax.psum(found, axis_name).astype(x.dtype)


def anchor_attention(
    q: Float[Array, "*B N H D"],
    k: Float[Array, "*B A H D"],
    v: Float[Array, "*B A H D"],
    *,
    mask: Bool[Array, "*B N"] | None = None,
    anchor_mask: Bool[Array, "*B A"] | None = None,
    axis_name: str | None = None,
    dropout: float = 0.0,
    key: Key[Array, ""] | None = None,
) -> Float[Array, "*B N H D"]:
    """All points attend to the anchors: softmax_A(q k^T / sqrt(D)) v.

    O(N A D) time a head, O(N D) memory: streamed over the points.

    Args:
        q: queries of the points.
        k: keys of the anchors.
        v: values of the anchors.
        mask: True for real points. Masked points get 0.
        anchor_mask: True for real anchors.
        axis_name: mesh axis that N is sharded over, inside `jax.shard_map`; every
            device holds all anchors.
        dropout: part of the probabilities that is set to 0, the rest being scaled up.
        key: drives the dropout; None for none.
    """
    return scatter(
        q,
        jnp.swapaxes(k, -3, -2),
        jnp.swapaxes(v, -3, -2),
        mask=mask,
        latent_mask=anchor_mask,
        axis_name=axis_name,
        dropout=dropout,
        key=key,
    )
