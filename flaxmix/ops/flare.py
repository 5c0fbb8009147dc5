"""FLARE: low-rank attention through M learned latents (arXiv:2508.12594)."""

from typing import Any

import jax
from jaxtyping import Array, Bool, Float, Key

from flaxmix.ops.latent import gather, scatter
from flaxmix.ops.stream import align


def flare(
    q: Float[Array, "... H M D"],
    k: Float[Array, "*B N H D"],
    v: Float[Array, "*B N H D"],
    *,
    mask: Bool[Array, "*B N"] | None = None,
    scale: float | None = None,
    axis_name: str | None = None,
    dropout: float = 0.0,
    key: Key[Array, ""] | None = None,
) -> Float[Array, "*B N H D"]:
    """Mixes N points by way of M latents.

        z = softmax_N(scale q k^T) v,   y = softmax_M(scale k q^T) z

    The mixing matrix softmax_M(k q^T) softmax_N(q k^T) has rank M at most. Costs
    O(N M D) time a head and O(N D) memory.

    Args:
        q: latent queries, shared by the batch or one set for each item.
        k: keys.
        v: values.
        mask: True for real points. Masked points do not matter and get 0.
        scale: factor on the scores; None means 1 / sqrt(D). The original study uses
            1 where D <= 16.
        axis_name: mesh axis that N is sharded over, inside `jax.shard_map`.
        dropout: part of the probabilities of both softmaxes that is set to 0, the
            rest being scaled up.
        key: drives the dropout; None for none.

    Returns:
        The mixed points, in the dtype of `k`.
    """
    # Once for both: one sum of their derivatives over the shards.
    q, k, v = align(q, k, v)
    first, second = (None, None) if key is None else jax.random.split(key)
    shared: Any = {"mask": mask, "scale": scale, "axis_name": axis_name}
    z, _ = gather(q, k, v, **shared, dropout=dropout, key=first)
    return scatter(k, q, z, **shared, dropout=dropout, key=second)
