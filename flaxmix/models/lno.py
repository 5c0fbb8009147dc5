"""Latent Neural Operator: attention to modes, attention between them, and back."""

import functools

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, DTypeLike, Float, Key

from flaxmix import ops
from flaxmix.layers import Linear, ResidualMLP
from flaxmix.layers.norm import NormKind
from flaxmix.mixers.heads import check_latents, head_channels, merge, real, split
from flaxmix.models.block import Block
from flaxmix.models.stack import apply_stack, stack
from flaxmix.ops.stream import spread


class _ModeAttention(nnx.Module):
    """Self-attention between modes, with PyTorch's own initial values."""

    def __init__(self, channels: int, *, heads: int, rngs: nnx.Rngs):
        head_channels(channels, heads)
        self.heads = heads
        linear = lambda: Linear(channels, channels, init="uniform", rngs=rngs)
        self.query = linear()
        self.key = linear()
        self.value = linear()
        self.out = linear()

    def __call__(self, x, *, mask, axis_name, key):
        heads = lambda layer: split(layer(x), self.heads)
        y, _ = ops.attention(heads(self.query), heads(self.key), heads(self.value))
        return self.out(merge(y))


class LNO(nnx.Module):
    """Latent Neural Operator (arXiv:2406.03923) as compared in the FLARE study
    (arXiv:2508.12594).

        t = trunk(x),  s = score(t)  [N, M]
        z = softmax_N(s)^T branch(x),  B blocks of attention between the M modes
        y = head(softmax_M(s) z)

    trunk, branch, score and head are residual MLPs with exact GELU; trunk and branch
    both read the points' features. O(N (L C^2 + M C) + B (M^2 C + M C^2)) time and
    O(N C) memory: s is never held, its last layer is part of both attentions.
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
        remat: bool = False,
        dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ):
        """Initialises all weights and biases uniform within 1 / sqrt(width) of 0.

        Args:
            inputs: features of a point, coordinates included.
            outputs: fields at a point.
            channels: width C of points and modes.
            blocks: number of blocks B between modes.
            heads: number of heads H of these.
            latents: number of modes M.
            norm: kind of the norms; the study has "layer".
            mlp_ratio: hidden width of a block's MLP, in units of C.
            io_layers: hidden residual layers L of the four MLPs.
            remat: whether the backward pass recomputes each block from its input.
            dtype: what all but trunk and branch computes in; None means that of x.
            rngs: where the initial parameters come from.

        Raises:
            ValueError: if `heads` does not divide `channels`, or a size is not
                positive.
        """
        check_latents(latents)
        mlp = lambda inputs, outputs: ResidualMLP(
            inputs,
            channels,
            outputs,
            layers=io_layers,
            activation="exact",
            init="uniform",
            rngs=rngs,
        )
        self.trunk = mlp(inputs, channels)
        self.branch = mlp(inputs, channels)
        self.score = mlp(channels, latents)
        make = lambda rngs: Block(
            channels,
            mixer=functools.partial(_ModeAttention, heads=heads),
            norm=norm,
            mlp_ratio=mlp_ratio,
            activation="exact",
            init="uniform",
            rngs=rngs,
        )
        self.blocks = stack(make, blocks, rngs)
        self.head = mlp(channels, outputs)
        self.remat = remat
        self.dtype = None if dtype is None else jnp.dtype(dtype)

    def __call__(
        self,
        x: Float[Array, "*B N I"],
        *,
        mask: Bool[Array, "*B N"] | None = None,
        axis_name: str | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "*B N O"]:
        """Predicts the fields at every point; see `Surrogate`."""
        points = real(x, mask)
        dtype = x.dtype if self.dtype is None else self.dtype
        t, v = self.trunk(points).astype(dtype), self.branch(points).astype(dtype)
        # The scores' last layer as queries of one head; its bias is a channel of ones.
        last, bias = self.score.last.kernel[...], self.score.last.bias
        assert bias is not None
        q = jnp.concatenate([last, bias[...][None]]).T[None]
        k = self.score.features(t)
        k = jnp.concatenate([k, jnp.ones_like(k[..., :1])], -1)[..., None, :]
        shared = {"mask": mask, "scale": 1.0, "axis_name": axis_name}
        z, _ = ops.gather(q, k, v[..., None, :], **shared)
        z = spread(z, axis_name)[..., 0, :, :]
        z = apply_stack(self.blocks, z, remat=self.remat)
        y = ops.scatter(k, q, z[..., None, :, :], **shared)[..., 0, :]
        return real(self.head(y).astype(x.dtype), mask)
