"""Perceiver IO: encode the points to latents, process these, decode at the points."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, DTypeLike, Float, Key

from flaxmix import ops
from flaxmix.layers import Linear, Norm
from flaxmix.layers.norm import NormKind
from flaxmix.mixers import SelfAttention
from flaxmix.mixers.heads import (
    check_latents,
    head_channels,
    merge,
    merge_latents,
    real,
    split,
    split_latents,
)
from flaxmix.models.backbone import Backbone
from flaxmix.models.block import Block
from flaxmix.ops.stream import spread


class _Encoder(nnx.Module):
    """W_o softmax_N(latents (K norm(x))^T / sqrt(D)) V norm(x)."""

    def __init__(self, channels, heads, latents, norm, rngs):
        self.heads = heads
        latent = jax.random.normal(rngs.params(), (latents, channels), jnp.float32)
        self.latents = nnx.Param(latent)
        self.norm = Norm(channels, kind=norm)
        self.key = Linear(channels, channels, rngs=rngs)
        self.value = Linear(channels, channels, rngs=rngs)
        self.out = Linear(channels, channels, rngs=rngs)

    def __call__(self, x, mask, axis_name):
        u = real(self.norm(x), mask)
        q = split_latents(self.latents[...].astype(x.dtype), self.heads)
        k, v = split(self.key(u), self.heads), split(self.value(u), self.heads)
        z, _ = ops.gather(q, k, v, mask=mask, axis_name=axis_name)
        return self.out(merge_latents(spread(z, axis_name)))


class _Decoder(nnx.Module):
    """W_o softmax_M(Q norm(x) (K norm(z))^T / sqrt(D)) V norm(z)."""

    def __init__(self, channels, heads, norm, rngs):
        self.heads = heads
        self.latent_norm = Norm(channels, kind=norm)
        self.point_norm = Norm(channels, kind=norm)
        linear = lambda: Linear(channels, channels, rngs=rngs)
        self.query = linear()
        self.key = linear()
        self.value = linear()
        self.out = linear()

    def __call__(self, x, z, mask, axis_name):
        u = self.latent_norm(z)
        k = split_latents(self.key(u), self.heads)
        v = split_latents(self.value(u), self.heads)
        q = split(self.query(self.point_norm(x)), self.heads)
        return self.out(merge(ops.scatter(q, k, v, mask=mask, axis_name=axis_name)))


class PerceiverIO(Backbone):
    """Perceiver IO (arXiv:2107.14795) as compared in the FLARE study
    (arXiv:2508.12594).

        z = encoder(embed(x)),  B latent blocks on z,  head(norm(decoder(embed(x), z)))

    Encoder and decoder are one cross attention each, without residual and MLP; the
    latents are queries as they are. The paper's own projects its queries and has
    residuals and MLPs there. O(N (C^2 + M C) + B (M^2 C + M C^2)) time, O(N C) memory.
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
        mlp_ratio: float = 4.0,
        io_layers: int = 2,
        remat: bool = False,
        dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ):
        """Initialises latents N(0, 1), weights N(0, 0.02^2) and biases 0.

        Args:
            inputs: features of a point, coordinates included.
            outputs: fields at a point.
            channels: width C of points and latents.
            blocks: number of latent self-attention blocks B.
            heads: number of heads H.
            latents: number of latents M.
            norm: kind of all norms; the study has "layer".
            mlp_ratio: hidden width of a block's MLP, in units of C.
            io_layers: hidden residual layers of the embedding and of the head.
            remat: whether the backward pass recomputes each block from its input.
            dtype: what all but embedding computes in; None means the dtype of x.
            rngs: where the initial parameters come from.

        Raises:
            ValueError: if `heads` does not divide `channels`, or a size is not
                positive.
        """
        head_channels(channels, heads)
        check_latents(latents)
        super().__init__(
            inputs,
            outputs,
            channels=channels,
            blocks=blocks,
            block=lambda rngs: Block(
                channels,
                mixer=functools.partial(SelfAttention, heads=heads, bias=False),
                norm=norm,
                mlp_ratio=mlp_ratio,
                rngs=rngs,
            ),
            norm=norm,
            io_layers=io_layers,
            remat=remat,
            dtype=dtype,
            rngs=rngs,
        )
        self.encoder = _Encoder(channels, heads, latents, norm, rngs)
        self.decoder = _Decoder(channels, heads, norm, rngs)

    def __call__(
        self,
        x: Float[Array, "*B N I"],
        *,
        mask: Bool[Array, "*B N"] | None = None,
        axis_name: str | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "*B N O"]:
        """Predicts the fields at every point; see `Surrogate`."""
        h = self._start(x, mask)
        z = self._blocks(self.encoder(h, mask, axis_name))
        return self._finish(self.decoder(h, z, mask, axis_name), x, mask)
