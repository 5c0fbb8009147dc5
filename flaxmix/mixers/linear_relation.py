"""Linear Relation as a layer."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Int

from flaxmix.layers import Linear
from flaxmix.mixers.causal_attention import real_tokens, rotary_width, rotated
from flaxmix.mixers.heads import merge, split
from flaxmix.mixers.relation import make_angles, mixed
from flaxmix.ops.linear_relation import linear_relation
from flaxmix.ops.relation import check_relation
from flaxmix.ops.stream import accumulator, dot


class LinearRelationCache(NamedTuple):
    """The state after the tokens so far, float32 or wider."""

    state: Float[Array, "*B H D D"]


class LinearRelation(nnx.Module):
    """Linear Relation, W_o linear_relation(P1, P2, I) of `flaxmix.ops`.

        P1 = rotary(W_1 x),  P2 = rotary(W_2 x),  I = givens(W_I x)
        log alpha = -exp(A_log) softplus(W_up W_down x + dt_bias),  W_up for each head

    5 C^2 + H D^2 + 2 C + H / 2 parameters. O(T C D) time; its cache holds C D numbers
    in float32 whatever T. Called as `flaxmix.mixers.Relation` is.
    """

    def __init__(
        self,
        channels: int,
        *,
        heads: int,
        tau: float = 2.0,
        givens: bool = True,
        identity_projection: bool = True,
        rngs: nnx.Rngs,
    ):
        """Initialises weights N(0, 0.02^2), angles 0, and the retention.

        That is A ~ U(1, 16), and dt_bias such that its softplus is log-uniform in
        [1e-3, 1e-1], as in Kimi Delta Attention (arXiv:2510.26692).

        Args:
            channels: width C of the tokens.
            heads: number of heads H.
            tau: temperature of the Self relation.
            givens: whether neighbouring heads of I are mixed; one head has none.
            identity_projection: whether there is a W_I; else I = x ("Raw-X").
            rngs: where the initial parameters come from.

        Raises:
            ValueError: if `heads` does not divide `channels` into even widths, or is
                odd with `givens`, or `tau` is not positive.
        """
        check_relation(tau)
        self.heads, self.width = heads, rotary_width(channels, heads)
        self.tau = tau
        linear = lambda: Linear(channels, channels, bias=False, rngs=rngs)
        self.p1, self.p2, self.out = linear(), linear(), linear()
        self.identity = linear() if identity_projection else None
        self.angles = make_angles(channels, heads) if givens else None
        self.down = linear()
        shape, f32 = (heads, self.width), jnp.float32
        up = 0.02 * jax.random.normal(rngs.params(), (*shape, self.width), f32)
        self.up = nnx.Param(up)
        uniform = lambda low, high: jax.random.uniform(
            rngs.params(), shape, f32, low, high
        )
        self.A_log = nnx.Param(jnp.log(uniform(1.0, 16.0)))
        dt = jnp.exp(uniform(np.log(1e-3), np.log(1e-1)))
        # The inverse of softplus.
        self.dt_bias = nnx.Param(dt + jnp.log(-jnp.expm1(-dt)))

    def make_cache(
        self, batch: int, capacity: int, dtype: DTypeLike
    ) -> LinearRelationCache:
        """An empty cache, for any number of tokens."""
        del capacity
        shape = batch, self.heads, self.width, self.width
        return LinearRelationCache(jnp.zeros(shape, accumulator(dtype)))

    def __call__(
        self,
        x: Float[Array, "*B T C"],
        *,
        layer: int | Int[Array, ""] = 0,
        positions: Int[Array, "*B T"] | None = None,
        axis_name: str | None = None,
        cache: LinearRelationCache | None = None,
    ) -> Any:
        """Mixes the tokens of x; the arguments are those of `Relation`."""
        x = real_tokens(x, positions, axis_name, cache)
        p1, p2 = (split(linear(x), self.heads) for linear in (self.p1, self.p2))
        p1, p2 = rotated((p1, p2), positions, axis_name)
        y, state = linear_relation(
            p1,
            p2,
            mixed(x, self.identity, self.angles, self.heads, layer),
            self.log_retention(x),
            state=None if cache is None else cache.state,
            positions=positions,
            tau=self.tau,
            axis_name=axis_name,
        )
        y = self.out(merge(y))
        return y if cache is None else (y, LinearRelationCache(state))

    def log_retention(self, x: Float[Array, "*B T C"]) -> Float[Array, "*B T H D"]:
        """log alpha of each token and channel, <= 0, in float32 or wider."""
        wide = accumulator(x.dtype)
        down = split(self.down(x), self.heads)
        rate = dot("...thd,hde->...the", down, self.up[...], x.dtype)
        rate = jax.nn.softplus(rate + self.dt_bias[...].astype(wide))
        return -jnp.exp(self.A_log[...].astype(wide)) * rate
