"""Full Relation (FlashRelation) as a layer."""

from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Int

from flaxmix import ops
from flaxmix.layers import Linear
from flaxmix.mixers.causal_attention import (
    real_tokens,
    rotary_width,
    rotated,
    written,
)
from flaxmix.mixers.heads import merge, split
from flaxmix.ops.relation import Implementation, Transport, check_relation


class RelationCache(NamedTuple):
    """Second coordinates, rotated, and mixed information of the tokens so far."""

    p2: Float[Array, "*B S H D"]
    identity: Float[Array, "*B S H D"]


class Relation(nnx.Module):
    """Full Relation, W_o relation(P1, P2, I) of `flaxmix.ops.relation`.

        P1 = rotary(W_1 x),  P2 = rotary(W_2 x),  I = givens(W_I x)

    4 C^2 + H / 2 + 1 parameters. O(T^2 C) time; memory O(T C) beside one tile of
    scores. Its cache holds 2 C numbers a token, P2 and I. Called as
    `flaxmix.mixers.CausalAttention` is.

    The arguments give the ablations of the paper's appendix D.1.
    """

    def __init__(
        self,
        channels: int,
        *,
        heads: int,
        tau: float = 2.0,
        givens: bool = True,
        count: bool = True,
        identity_projection: bool = True,
        transport: Transport = "full",
        implementation: Implementation | Literal["materialized"] | None = None,
        rngs: nnx.Rngs,
    ):
        """Initialises weights N(0, 0.02^2), lambda 0.5 and angles 0.

        Args:
            channels: width C of the tokens.
            heads: number of heads H.
            tau: temperature of the Self relation.
            givens: whether neighbouring heads of I are mixed; one head has none.
            count: whether lambda is learned; else it is 0.
            identity_projection: whether there is a W_I; else I = x ("Raw-X").
            transport: "full", or "exchange" to move no own information.
            implementation: see `flaxmix.ops.relation`; with a cache always "xla".
            rngs: where the initial parameters come from.

        Raises:
            ValueError: if `heads` does not divide `channels` into even widths, or is
                odd with `givens`, or an option is none of these.
        """
        check_relation(tau, transport)
        self.heads, self.width = heads, rotary_width(channels, heads)
        self.tau = tau
        self.transport: Transport = transport
        self.implementation: Any = implementation
        linear = lambda: Linear(channels, channels, bias=False, rngs=rngs)
        self.p1, self.p2, self.out = linear(), linear(), linear()
        self.identity = linear() if identity_projection else None
        self.angles = make_angles(channels, heads) if givens else None
        self.lam = nnx.Param(jnp.full((), 0.5, jnp.float32)) if count else None

    def make_cache(self, batch: int, capacity: int, dtype: DTypeLike) -> RelationCache:
        """An empty cache for `capacity` tokens a row."""
        empty = jnp.zeros((batch, capacity, self.heads, self.width), dtype)
        return RelationCache(empty, empty)

    def __call__(
        self,
        x: Float[Array, "*B T C"],
        *,
        layer: int | Int[Array, ""] = 0,
        positions: Int[Array, "*B T"] | None = None,
        axis_name: str | None = None,
        cache: RelationCache | None = None,
    ) -> Any:
        """Mixes the tokens of x.

        Args:
            x: tokens.
            layer: index of the layer, from 0: it says which heads are neighbours.
            positions, axis_name, cache: as in `flaxmix.mixers.CausalAttention`.
        """
        x = real_tokens(x, positions, axis_name, cache)
        p1, p2 = (split(linear(x), self.heads) for linear in (self.p1, self.p2))
        p1, p2 = rotated((p1, p2), positions, axis_name)
        identity = mixed(x, self.identity, self.angles, self.heads, layer)
        lam = 0.0 if self.lam is None else self.lam[...]
        if cache is None or positions is None:
            y = ops.relation(
                *(p1, p2, identity, lam),
                positions=positions,
                tau=self.tau,
                transport=self.transport,
                axis_name=axis_name,
                implementation=self.implementation,
            )
            return self.out(merge(y))
        cache = RelationCache(
            written(cache.p2, p2, positions),
            written(cache.identity, identity, positions),
        )
        read, log_mass = ops.exchange(p1, cache.p2, cache.identity, stop=positions - 1)
        y = ops.finish(
            *(p1, p2, identity, read, log_mass, positions, lam),
            tau=self.tau,
            transport=self.transport,
        )
        return self.out(merge(y)), cache


def make_angles(channels: int, heads: int) -> nnx.Param | None:
    """Givens angles of 0 for pairs of heads; None for a single head.

    Raises:
        ValueError: if `heads` is odd otherwise.
    """
    if heads == 1:
        return None
    if heads % 2:
        raise ValueError(
            f"Givens pairs need an even number of heads, got {heads=} of {channels=}."
        )
    return nnx.Param(jnp.zeros(heads // 2, jnp.float32))


def mixed(
    x: Float[Array, "*B T C"],
    linear: Linear | None,
    angles: nnx.Param | None,
    heads: int,
    layer: int | Int[Array, ""],
) -> Float[Array, "*B T H D"]:
    """I = givens(W_I x), or givens(x) without `linear`."""
    if linear is None:
        identity = split(x, heads)
        return identity if angles is None else turned(identity, angles, layer)
    if angles is None:
        return split(linear(x), heads)
    kernel = turned(split(linear.kernel[...], heads), angles, layer)
    return split(x @ merge(kernel).astype(x.dtype), heads)


def turned(x, angles, layer):
    return ops.givens(x, angles[...], layer=layer)
