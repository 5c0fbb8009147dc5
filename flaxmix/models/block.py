"""The shared residual block."""

from collections.abc import Callable

from flax import nnx
from jaxtyping import Array, Bool, Float

from flaxmix.layers import Norm, ResidualMLP
from flaxmix.layers.norm import NormKind


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
        rngs: nnx.Rngs,
    ):
        """Initialises the block.

        Args:
            channels: width C of the points.
            mixer: makes the mixer, as `mixer(channels, rngs=rngs)`.
            norm: kind of both norms.
            mlp_ratio: hidden width of the MLP, in units of C.
            mlp_layers: hidden residual layers of the MLP.
            rngs: where the initial parameters come from.
        """
        self.mixer_norm = Norm(channels, kind=norm)
        self.mixer = mixer(channels, rngs=rngs)
        self.mlp_norm = Norm(channels, kind=norm)
        self.mlp = ResidualMLP(
            channels,
            int(mlp_ratio * channels),
            channels,
            layers=mlp_layers,
            input_residual=mlp_layers > 0,
            output_residual=mlp_layers > 0,
            rngs=rngs,
        )

    def __call__(
        self,
        x: Float[Array, "*B N C"],
        *,
        mask: Bool[Array, "*B N"] | None = None,
        axis_name: str | None = None,
    ) -> Float[Array, "*B N C"]:
        x = x + self.mixer(self.mixer_norm(x), mask=mask, axis_name=axis_name)
        return x + self.mlp(self.mlp_norm(x))
