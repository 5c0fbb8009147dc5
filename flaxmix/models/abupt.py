"""AB-UPT on one surface: points attend to anchors that all blocks share."""

from collections.abc import Sequence

import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, DTypeLike, Float, Int, Key

from flaxmix.layers.norm import NormKind
from flaxmix.mixers import AnchorAttention
from flaxmix.models.backbone import Backbone
from flaxmix.models.block import Block
from flaxmix.models.stack import split_key


class ABUPT(Backbone):
    """AB-UPT's surface branch (arXiv:2502.09692) in the backbone of arXiv:2608.11519.

    Some of the points, drawn once for all blocks, are anchors that every point
    attends to, with rotary embedding of the coordinates; see
    `mixers.AnchorAttention`. The MLP has exact GELU, and the norm before it eps 1e-6
    of either kind. With the anchors given it is equivariant to permutations.
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
        coordinates: Sequence[int] | None = None,
        coordinate_scale: float = 1000.0,
        norm: NormKind = "layer",
        mlp_ratio: float = 2.0,
        io_layers: int = 2,
        dropout: float = 0.0,
        remat: bool = False,
        dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ):
        """Initialises the network as `Surrogate`.

        Args:
            inputs: features of a point, coordinates included.
            outputs: fields at a point.
            channels: width C.
            blocks: depth B.
            heads: number of heads H.
            latents: number of anchors A; all points if there are fewer.
            coordinates: which of the features are coordinates, meant to be in [0, 1];
                None for the first three, or fewer.
            coordinate_scale: factor on the coordinates in the rotary embedding.
            norm: kind of the norms.
            mlp_ratio: hidden width of a block's MLP, in units of C.
            io_layers: hidden residual layers of the embedding and of the head.
            dropout: part of the mixers' outputs that is set to 0 where a key is given.
            remat: whether the backward pass recomputes each block from its input.
            dtype: what the blocks compute in; None means the dtype of x. Coordinates
                stay in the dtype of x.
            rngs: where the initial parameters come from.

        Raises:
            ValueError: if `heads` does not divide `channels`, a head has too few
                channels to turn, a coordinate is no feature, a size is not positive,
                or `dropout` is not in [0, 1).
        """
        first = range(min(inputs, 3))
        self.coordinates = tuple(first if coordinates is None else coordinates)
        if not self.coordinates or not all(0 <= c < inputs for c in self.coordinates):
            raise ValueError(
                f"coordinates={self.coordinates} must be some of {inputs} features."
            )

        def mixer(channels, rngs):
            mixer = AnchorAttention(
                channels,
                heads=heads,
                latents=latents,
                coordinate_scale=coordinate_scale,
                rngs=rngs,
            )
            mixer.check_axes(len(self.coordinates))
            return mixer

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
                mlp_eps=1e-6,
                activation="exact",
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
        anchors: Int[Array, "... A"] | None = None,
        permutation: Int[Array, "... N"] | None = None,
    ) -> Float[Array, "*B N O"]:
        """Predicts the fields at every point.

        Args:
            x: features of the points.
            mask: True for real points. Masked points do not matter and get 0.
            axis_name: mesh axis that N is sharded over, inside `jax.shard_map`.
            key: draws the anchors, and drives dropout; None for the same anchors
                every time and no dropout.
            anchors: places of the anchors among all points, [A] or [*B, A]; None
                draws them. With a mask, they have to be real points.
            permutation: in place of `anchors`: an order of the points, the first A of
                which are the anchors.

        Returns:
            The fields, in the dtype of x.
        """
        h = self._start(x, mask)
        mixer: AnchorAttention = self.blocks.mixer
        anchor_mask, first, second = None, None, None
        if key is not None:
            first, second = split_key(key, 2)
        if anchors is None and permutation is not None:
            anchors = permutation[..., : mixer.latents]
        if anchors is None:
            anchors, anchor_mask = mixer.draw(
                x.shape[-2], mask=mask, axis_name=axis_name, key=first
            )
        h = self._blocks(
            h,
            each={"key": split_key(second, self.depth)},
            mask=mask,
            axis_name=axis_name,
            coords=x[..., np.asarray(self.coordinates)],
            anchors=anchors,
            anchor_mask=anchor_mask,
        )
        return self._finish(h, x, mask)
