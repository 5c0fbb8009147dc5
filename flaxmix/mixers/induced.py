"""Attention through inducing points (Set Transformer) as a layer."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Key

from flaxmix import ops
from flaxmix.layers import Linear, Norm
from flaxmix.layers.mlp import exact_gelu
from flaxmix.mixers.heads import (
    check_latents,
    head_channels,
    merge,
    merge_latents,
    real,
    split,
    split_latents,
)
from flaxmix.ops.stream import spread


class _AttentionBlock(nnx.Module):
    """o = LN(q + attention(q, k, v)); y = LN(o + gelu(W_o o))."""

    def __init__(self, channels: int, rngs: nnx.Rngs):
        linear = lambda: Linear(channels, channels, rngs=rngs)
        self.query = linear()
        self.key = linear()
        self.value = linear()
        self.out = linear()
        self.attention_norm = Norm(channels)
        self.output_norm = Norm(channels)

    def finish(self, q, o):
        o = self.attention_norm(q + o)
        return self.output_norm(o + exact_gelu(self.out(o)))


class InducedAttention(nnx.Module):
    """Set Transformer's induced set attention (arXiv:1810.00825).

        h = MAB(I, x),  y = MAB(x, h)
        MAB(a, b):  q = Q a,  o = LN(q + softmax(q (K b)^T / sqrt(C)) V b),
                    LN(o + gelu(W_o o))

    I being M inducing points that are parameters. Scores scale by 1 / sqrt(C), not
    1 / sqrt(D), as in the paper; the paper has ReLU in place of GELU. Its norms are
    LayerNorms always. O(N (C^2 + M C)) time, O(N C) memory, 8 C^2 + 16 C + M C
    parameters.
    """

    def __init__(self, channels: int, *, heads: int, latents: int, rngs: nnx.Rngs):
        """Initialises weights N(0, 0.02^2), biases 0, and inducing points uniform
        within sqrt(6 / (M C + C)) of 0.

        Args:
            channels: width C of the points.
            heads: number of heads H.
            latents: number of inducing points M.
            rngs: where the initial parameters come from.

        Raises:
            ValueError: if `heads` does not divide `channels`, or a size is not
                positive.
        """
        head_channels(channels, heads)
        check_latents(latents)
        self.heads = heads
        limit = math.sqrt(6 / (latents * channels + channels))
        self.inducing = nnx.Param(
            jax.random.uniform(
                rngs.params(), (latents, channels), jnp.float32, -limit, limit
            )
        )
        self.induce = _AttentionBlock(channels, rngs)
        self.read = _AttentionBlock(channels, rngs)

    def __call__(
        self,
        x: Float[Array, "*B N C"],
        *,
        mask: Bool[Array, "*B N"] | None = None,
        axis_name: str | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "*B N C"]:
        x = real(x, mask)
        shared = {
            "mask": mask,
            "scale": x.shape[-1] ** -0.5,
            "axis_name": axis_name,
        }
        points = lambda layer: split(layer(x), self.heads)
        few = lambda layer, z: split_latents(layer(z), self.heads)
        block = self.induce
        q = block.query(self.inducing[...].astype(x.dtype))
        z, _ = ops.gather(
            split_latents(q, self.heads),
            points(block.key),
            points(block.value),
            **shared,
        )
        h = block.finish(q, merge_latents(spread(z, axis_name)))
        block = self.read
        q = block.query(x)
        y = ops.scatter(
            split(q, self.heads), few(block.key, h), few(block.value, h), **shared
        )
        return block.finish(q, merge(y))
