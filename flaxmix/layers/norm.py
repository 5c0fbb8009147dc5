"""LayerNorm and RMSNorm layers."""

from typing import Literal

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from flaxmix import ops

NormKind = Literal["layer", "rms"]


class Norm(nnx.Module):
    """LayerNorm (eps 1e-5, scale and bias) or RMSNorm (eps 1e-6, scale)."""

    def __init__(
        self,
        channels: int,
        *,
        kind: NormKind = "layer",
        affine: bool = True,
        eps: float | None = None,
    ):
        """Initialises scale 1 and bias 0.

        Args:
            channels: size of the axis that is normalised.
            kind: "layer" or "rms".
            affine: whether there are parameters.
            eps: added to the variance or mean square; None means 1e-5 for "layer"
                and 1e-6 for "rms".

        Raises:
            ValueError: if `kind` is neither.
        """
        if kind not in ("layer", "rms"):
            raise ValueError(f"kind must be 'layer' or 'rms', got {kind!r}.")
        self.kind = kind
        self.eps = (1e-6 if kind == "rms" else 1e-5) if eps is None else eps
        ones, zeros = jnp.ones(channels), jnp.zeros(channels)
        self.scale = nnx.Param(ones) if affine else None
        self.bias = nnx.Param(zeros) if affine and kind == "layer" else None

    def __call__(self, x: Float[Array, "..."], axis: int = -1) -> Float[Array, "..."]:
        scale = None if self.scale is None else self.scale[...]
        bias = None if self.bias is None else self.bias[...]
        if self.kind == "rms":
            return ops.rms_norm(x, scale, axis=axis, eps=self.eps)
        return ops.layer_norm(x, scale, bias, axis=axis, eps=self.eps)

    def heads(self, x: Float[Array, "*B N H D"]) -> Float[Array, "*B N H D"]:
        """Normalises the D channels of each head, as `self(x)` does, faster.

        It works in the layout of the latent operators, points last, so that the
        transpositions cancel against theirs and fold into the projection.
        """
        return jnp.moveaxis(self(jnp.moveaxis(x, -3, -1), axis=-2), -1, -3)
