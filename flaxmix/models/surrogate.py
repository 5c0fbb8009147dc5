"""Surrogate of a PDE solver: points with features in, fields at the points out."""

from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, DTypeLike, Float

from flaxmix.layers import Norm, ResidualMLP
from flaxmix.layers.norm import NormKind
from flaxmix.mixers.heads import real
from flaxmix.models.block import Block
from flaxmix.models.stack import apply_stack, stack


class Surrogate(nnx.Module):
    """The shared backbone: embed, B residual blocks, norm, head.

    Coordinates are plain input features; there is no positional encoding, so the
    network is equivariant to permutations of the points whenever its mixer is. Depth
    is scanned: compile time does not grow with it.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        channels: int,
        blocks: int,
        mixer: Callable[..., nnx.Module],
        norm: NormKind = "layer",
        mlp_ratio: float = 2.0,
        mlp_layers: int = 0,
        io_layers: int = 2,
        remat: bool = False,
        dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ):
        """Initialises the network, in float32.

        Args:
            inputs: features of a point, coordinates included.
            outputs: fields at a point.
            channels: width C.
            blocks: depth B.
            mixer: makes a mixer, as `mixer(channels, rngs=rngs)`; for example
                `functools.partial(mixers.FlarePP, heads=8, latents=64)`.
            norm: kind of the block and output norms.
            mlp_ratio: hidden width of a block's MLP, in units of C.
            mlp_layers: hidden residual layers of a block's MLP.
            io_layers: hidden residual layers of the embedding and of the head.
            remat: whether the backward pass recomputes each block from its input.
            dtype: what the blocks compute in; None means the dtype of x. The first
                layer always computes in the dtype of x, so that coordinates keep
                their digits.
            rngs: where the initial parameters come from.

        Raises:
            ValueError: if `blocks` is not positive, or the mixer rejects a size.
        """
        self.embed = ResidualMLP(
            inputs,
            channels,
            channels,
            layers=io_layers,
            output_residual=True,
            rngs=rngs,
        )
        make = lambda rngs: Block(
            channels,
            mixer=mixer,
            norm=norm,
            mlp_ratio=mlp_ratio,
            mlp_layers=mlp_layers,
            rngs=rngs,
        )
        self.blocks = stack(make, blocks, rngs)
        self.norm = Norm(channels, kind=norm)
        self.head = ResidualMLP(
            channels,
            channels,
            outputs,
            layers=io_layers,
            input_residual=True,
            rngs=rngs,
        )
        self.remat = remat
        self.dtype = None if dtype is None else jnp.dtype(dtype)

    def __call__(
        self,
        x: Float[Array, "*B N I"],
        *,
        mask: Bool[Array, "*B N"] | None = None,
        axis_name: str | None = None,
    ) -> Float[Array, "*B N O"]:
        """Predicts the fields at every point.

        Args:
            x: features of the points.
            mask: True for real points. Masked points do not matter and get 0.
            axis_name: mesh axis that N is sharded over, inside `jax.shard_map`.

        Returns:
            The fields, in the dtype of x.
        """
        h = self.embed(real(x, mask))
        h = h if self.dtype is None else h.astype(self.dtype)
        h = apply_stack(
            self.blocks, h, remat=self.remat, mask=mask, axis_name=axis_name
        )
        return real(self.head(self.norm(h)).astype(x.dtype), mask)
