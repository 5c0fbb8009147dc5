"""Surrogate of a PDE solver: points with features in, fields at the points out."""

import functools
from collections.abc import Callable

import jax
from flax import nnx
from jaxtyping import Array, Bool, DTypeLike, Float, Key

from flaxmix.layers.norm import NormKind
from flaxmix.mixers import InducedAttention
from flaxmix.models.backbone import Backbone
from flaxmix.models.block import Block
from flaxmix.models.stack import split_key


class Surrogate(Backbone):
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
        dropout: float = 0.0,
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
            dropout: part of the mixers' outputs that is set to 0 where a key is given.
            remat: whether the backward pass recomputes each block from its input.
            dtype: what the blocks compute in; None means the dtype of x. The first
                layer always computes in the dtype of x, so that coordinates keep
                their digits.
            rngs: where the initial parameters come from.

        Raises:
            ValueError: if `blocks` is not positive, `dropout` is not in [0, 1), or
                the mixer rejects a size.
        """
        super().__init__(
            inputs,
            outputs,
            channels=channels,
            blocks=blocks,
            block=lambda rngs: Block(
                channels,
                mixer=mixer,
                norm=norm,
                mlp_ratio=mlp_ratio,
                mlp_layers=mlp_layers,
                dropout=dropout,
                rngs=rngs,
            ),
            norm=norm,
            io_layers=io_layers,
            remat=remat,
            dtype=dtype,
            rngs=rngs,
        )

    def __call__(
        self,
        x: Float[Array, "*B N I"],
        *,
        mask: Bool[Array, "*B N"] | None = None,
        axis_name: str | None = None,
        key: Key[Array, ""] | None = None,
        gumbel_u: Float[Array, "L *B H N M"] | None = None,
    ) -> Float[Array, "*B N O"]:
        """Predicts the fields at every point.

        Args:
            x: features of the points.
            mask: True for real points. Masked points do not matter and get 0.
            axis_name: mesh axis that N is sharded over, inside `jax.shard_map`.
            key: drives dropout and noise; without it there are none.
            gumbel_u: uniforms for the noise of `mixers.TransolverPP` in each block, in
                place of a key.

        Returns:
            The fields, in the dtype of x.
        """
        each = {"key": split_key(key, self.depth)}
        if gumbel_u is None and key is None:
            if getattr(self.blocks.mixer, "evaluation_noise", False):
                # Another one for each block.
                gumbel_u = split_key(jax.random.key(0), self.depth)
        if gumbel_u is not None:
            each["gumbel_u"] = gumbel_u
        h = self._start(x, mask)
        h = self._blocks(h, each=each, mask=mask, axis_name=axis_name)
        return self._finish(h, x, mask)


class SetTransformer(Surrogate):
    """Set Transformer (arXiv:1810.00825): the backbone with `InducedAttention`.

    As compared in arXiv:2608.11519, with an MLP in each block besides those of the
    attention. The paper's own has neither embedding nor norms around the attention.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        channels: int,
        blocks: int,
        heads: int,
        latents: int,
        norm: NormKind = "layer",
        mlp_ratio: float = 2.0,
        io_layers: int = 2,
        dropout: float = 0.0,
        remat: bool = False,
        dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ):
        """Initialises the network: `latents` is the number of inducing points.

        The other arguments are those of `Surrogate`.
        """
        super().__init__(
            inputs,
            outputs,
            channels=channels,
            blocks=blocks,
            mixer=functools.partial(InducedAttention, heads=heads, latents=latents),
            norm=norm,
            mlp_ratio=mlp_ratio,
            io_layers=io_layers,
            dropout=dropout,
            remat=remat,
            dtype=dtype,
            rngs=rngs,
        )
