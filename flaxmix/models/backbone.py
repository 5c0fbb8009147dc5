"""What the surrogates of one family share: embedding, scanned blocks, norm, head."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, DTypeLike, Float

from flaxmix.layers import Norm, ResidualMLP
from flaxmix.layers.norm import NormKind
from flaxmix.mixers.heads import real
from flaxmix.models.stack import apply_stack, stack


class Backbone(nnx.Module):
    """embed, B blocks, norm, head; a subclass says what the blocks are."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        channels: int,
        blocks: int,
        block: Callable[[nnx.Rngs], nnx.Module],
        norm: NormKind,
        io_layers: int,
        remat: bool,
        dtype: DTypeLike | None,
        rngs: nnx.Rngs,
    ):
        self.embed = ResidualMLP(
            inputs,
            channels,
            channels,
            layers=io_layers,
            output_residual=True,
            rngs=rngs,
        )
        self.blocks: Any = stack(block, blocks, rngs)
        self.norm = Norm(channels, kind=norm)
        self.head = ResidualMLP(
            channels,
            channels,
            outputs,
            layers=io_layers,
            input_residual=True,
            rngs=rngs,
        )
        self.depth = blocks
        self.remat = remat
        self.dtype = None if dtype is None else jnp.dtype(dtype)

    def _start(self, x: Float[Array, "*B N I"], mask: Bool[Array, "*B N"] | None):
        """Embeds the points, in the dtype that the blocks compute in."""
        h = self.embed(real(x, mask))
        return h if self.dtype is None else h.astype(self.dtype)

    def _blocks(self, carry, **options: Any):
        return apply_stack(self.blocks, carry, remat=self.remat, **options)

    def _finish(self, h, x, mask):
        """The fields, in the dtype of x, and 0 at masked points."""
        return real(self.head(self.norm(h)).astype(x.dtype), mask)
