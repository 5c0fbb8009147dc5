"""FLARE++: latent queries synthesised from the input (arXiv:2608.11519, section 3)."""

from typing import Any

import jax
from jaxtyping import Array, Bool, Float, Key

from flaxmix.ops.flare import flare
from flaxmix.ops.latent import gather
from flaxmix.ops.stream import accumulator


def synthesize(
    seeds: Float[Array, "H M D"],
    k0: Float[Array, "*B N H D"],
    v0: Float[Array, "*B N H D"] | None = None,
    *,
    reference: Float[Array, "H M D"] | None = None,
    gate: Float[Array, "H"] | None = None,
    mask: Bool[Array, "*B N"] | None = None,
    axis_name: str | None = None,
    dropout: float = 0.0,
    key: Key[Array, ""] | None = None,
) -> Float[Array, "*B H M D"]:
    """Routing queries that depend on the input.

        q = reference + sigmoid(gate) softmax_N(seeds k0^T / sqrt(D)) v0

    A sum, not a convex blend. With reference rows and values of unit RMS and
    g = sigmoid(gate), every query has RMS in [1 - g, 1 + g].

    Args:
        seeds: queries that read the input.
        k0: synthesis keys.
        v0: synthesis values; None means that they are the keys.
        reference: the part of the queries that does not depend on the input; None,
            with `gate` None, leaves it and the gate out (simplified FLARE++).
        gate: logit of each head's weight on the synthesised part.
        mask: True for real points.
        axis_name: mesh axis that N is sharded over, inside `jax.shard_map`.
        dropout: part of the probabilities that is set to 0, the rest scaled up.
        key: drives the dropout; None for none.

    Returns:
        Queries in the dtype of `k0`; the sum is taken in float32 or wider.
    """
    dynamic, _ = gather(
        seeds, k0, v0, mask=mask, axis_name=axis_name, dropout=dropout, key=key
    )
    if reference is None and gate is None:
        return dynamic
    if reference is None or gate is None:
        raise ValueError("reference and gate go together: give both or neither.")
    weight = jax.nn.sigmoid(gate.astype(accumulator(k0.dtype)))
    return blend(reference, weight, dynamic)


def blend(
    reference: Float[Array, "H M D"],
    weight: Float[Array, "H"],
    dynamic: Float[Array, "*B H M D"],
) -> Float[Array, "*B H M D"]:
    """reference + weight dynamic, in float32 or wider, in the dtype of `dynamic`."""
    wide = accumulator(dynamic.dtype)
    weight = weight.astype(wide)[:, None, None]
    q = reference.astype(wide) + weight * dynamic.astype(wide)
    return q.astype(dynamic.dtype)


def flarepp(
    seeds: Float[Array, "H M D"],
    k0: Float[Array, "*B N H D"],
    v0: Float[Array, "*B N H D"] | None,
    k: Float[Array, "*B N H D"],
    v: Float[Array, "*B N H D"],
    *,
    reference: Float[Array, "H M D"] | None = None,
    gate: Float[Array, "H"] | None = None,
    mask: Bool[Array, "*B N"] | None = None,
    axis_name: str | None = None,
    dropout: float = 0.0,
    key: Key[Array, ""] | None = None,
) -> Float[Array, "*B N H D"]:
    """Mixes N points by way of M latents whose queries the input decides.

        q = synthesize(seeds, k0, v0, reference, gate),   y = flare(q, k, v)

    All three softmaxes scale by 1 / sqrt(D). Costs half as much again as FLARE:
    O(N M D) time a head, O(N D) memory, two gathers and one scatter.

    Args:
        seeds: queries that read the input.
        k0: synthesis keys.
        v0: synthesis values; None means that they are the keys.
        k: routing keys.
        v: values.
        reference: the part of the queries that does not depend on the input, with
            `gate`; None for both gives simplified FLARE++.
        gate: logit of each head's weight on the synthesised part.
        mask: True for real points. Masked points do not matter and get 0.
        axis_name: mesh axis that N is sharded over, inside `jax.shard_map`.
        dropout: part of the probabilities of all three softmaxes that is set to 0,
            the rest being scaled up.
        key: drives the dropout; None for none.

    Returns:
        The mixed points, in the dtype of `k`.

    Raises:
        ValueError: if only one of `reference` and `gate` is given.
    """
    first, second = (None, None) if key is None else jax.random.split(key)
    shared: Any = {"mask": mask, "axis_name": axis_name, "dropout": dropout}
    q = synthesize(seeds, k0, v0, reference=reference, gate=gate, **shared, key=first)
    return flare(q, k, v, **shared, key=second)
