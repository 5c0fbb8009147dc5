"""The shared residual block."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Bool, Float, Key

from flaxmix.layers import Norm, ResidualMLP
from flaxmix.layers.linear import Init
from flaxmix.layers.mlp import Gelu
from flaxmix.layers.norm import NormKind
from flaxmix.ops.stream import check_dropout, drop, shard_key


class Block(nnx.Module):
    """x = x + mixer(norm(x)); x = x + MLP(norm(x)).

    The MLP is Linear, GELU, Linear, or with `mlp_layers` a residual MLP with that
    many hidden layers, both of whose residuals are on.
    """

    def __init__(
        self,
        channels: int,
        *,
        mixer: Callable[..., nnx.Module],
        norm: NormKind = "layer",
        mlp_ratio: float = 2.0,
        mlp_layers: int = 0,
        mlp_eps: float | None = None,
        activation: Gelu = "tanh",
        init: Init = "normal",
        dropout: float = 0.0,
        rngs: nnx.Rngs,
    ):
        """Initialises the block.

        Args:
            channels: width C of the points.
            mixer: makes the mixer, as `mixer(channels, rngs=rngs)`.
            norm: kind of both norms.
            mlp_ratio: hidden width of the MLP, in units of C.
            mlp_layers: hidden residual layers of the MLP.
            mlp_eps: eps of the norm before the MLP; None for that of its kind.
            activation: of the MLP, see `ResidualMLP`.
            init: of the MLP, see `Linear`.
            dropout: part of the mixer's outputs that is set to 0 where a key is given.
            rngs: where the initial parameters come from.

        Raises:
            ValueError: if `dropout` is not in [0, 1), or the mixer rejects a size.
        """
        check_dropout(dropout)
        self.dropout = dropout
        self.mixer_norm = Norm(channels, kind=norm)
        self.mixer = mixer(channels, rngs=rngs)
        self.mlp_norm = Norm(channels, kind=norm, eps=mlp_eps)
        self.mlp = ResidualMLP(
            channels,
            int(mlp_ratio * channels),
            channels,
            layers=mlp_layers,
            input_residual=mlp_layers > 0,
            output_residual=mlp_layers > 0,
            activation=activation,
            init=init,
            rngs=rngs,
        )

    def __call__(
        self,
        x: Float[Array, "*B N C"],
        *,
        mask: Bool[Array, "*B N"] | None = None,
        axis_name: str | None = None,
        key: Key[Array, ""] | None = None,
        **inputs: Any,
    ) -> Float[Array, "*B N C"]:
        """Applies the block; `inputs` are further arguments of the mixer."""
        first, second = (None, None) if key is None else jax.random.split(key)
        y = self.mixer(
            self.mixer_norm(x), mask=mask, axis_name=axis_name, key=first, **inputs
        )
        x = x + drop(y, shard_key(second, axis_name), self.dropout, 0)
        return x + self.mlp(self.mlp_norm(x))
