"""FLARE as a layer, in the matched form and in that of the original study."""

from flax import nnx
from jaxtyping import Array, Bool, Float, Key

from flaxmix import ops
from flaxmix.layers import Linear, Norm, ResidualMLP
from flaxmix.layers.norm import NormKind
from flaxmix.mixers.heads import (
    check_latents,
    head_channels,
    merge,
    real,
    split,
)
from flaxmix.mixers.streamed import flare_in_blocks, flattened, in_blocks
from flaxmix.ops.stream import check_dropout


class Flare(nnx.Module):
    """FLARE (arXiv:2508.12594) in the shared backbone of arXiv:2608.11519.

        k = x + K x,  v = x + V x,
        z = softmax_N(q k^T / sqrt(D)) v,  y = W_o softmax_M(k q^T / sqrt(D)) z

    with latent queries q that are parameters. O(N (C^2 + M C)) time, O(N C) memory,
    3 C^2 + 3 C + M C parameters.
    """

    def __init__(
        self,
        channels: int,
        *,
        heads: int,
        latents: int,
        qk_norm: bool = False,
        attention_dropout: float = 0.0,
        norm: NormKind = "layer",
        rngs: nnx.Rngs,
    ):
        """Initialises weights and latents N(0, 0.02^2) and biases 0.

        Args:
            channels: width C of the points.
            heads: number of heads H.
            latents: number of latents M, for each head.
            qk_norm: whether latents and keys are normalised over D, for each head.
            attention_dropout: part of the probabilities of every softmax that is set
                to 0 where a key is given.
            norm: kind of those norms.
            rngs: where the initial parameters come from.

        Raises:
            ValueError: if `heads` does not divide `channels`, a size is not
                positive, or a probability is not in [0, 1).
        """
        check_dropout(attention_dropout)
        self.attention_dropout = attention_dropout
        width = head_channels(channels, heads)
        check_latents(latents)
        self.heads = heads
        init = nnx.initializers.normal(0.02)
        self.latents = nnx.Param(init(rngs.params(), (heads, latents, width)))
        self.key = Linear(channels, channels, skip=True, rngs=rngs)
        self.value = Linear(channels, channels, skip=True, rngs=rngs)
        self.query_norm = Norm(width, kind=norm) if qk_norm else None
        self.key_norm = Norm(width, kind=norm) if qk_norm else None
        self.out = Linear(channels, channels, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "*B N C"],
        *,
        mask: Bool[Array, "*B N"] | None = None,
        axis_name: str | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "*B N C"]:
        x = real(x, mask)
        q = self.latents[...]
        q = q if self.query_norm is None else self.query_norm(q)
        if in_blocks(x, q, key, self.attention_dropout):
            mix = lambda x, mask: flare_in_blocks(
                self, q, x, mask=mask, axis_name=axis_name
            )
            return flattened(mix, x, mask)
        y = ops.flare(
            *(q, self.keys(x), self.values(x)),
            mask=mask,
            axis_name=axis_name,
            dropout=self.attention_dropout,
            key=key,
        )
        return self.out(merge(y))

    def keys(self, x: Float[Array, "*B N C"]) -> Float[Array, "*B N H D"]:
        """Keys of the points."""
        k = self.key.heads(x, self.heads)
        return k if self.key_norm is None else self.key_norm.heads(k)

    def values(self, x: Float[Array, "*B N C"]) -> Float[Array, "*B N H D"]:
        """Values of the points."""
        return self.value.heads(x, self.heads)


class OriginalFlare(nnx.Module):
    """FLARE as in its own study (arXiv:2508.12594).

        k = MLP_k(x),  v = MLP_v(x),
        z = softmax_N(s q k^T) v,  y = W_o softmax_M(s k q^T) z

    with residual MLPs. O(N (C^2 + M C)) time, O(N C) memory. Parameters:
    2 (`layers` + 2) (C^2 + C) for the MLPs, C^2 + C + M C for the rest.
    """

    def __init__(
        self,
        channels: int,
        *,
        heads: int,
        latents: int,
        layers: int | None = 3,
        scale: float | None = None,
        rngs: nnx.Rngs,
    ):
        """Initialises weights N(0, 0.02^2), latents N(0, 0.1^2) and biases 0.

        Args:
            channels: width C of the points.
            heads: number of heads H.
            latents: number of latents M, for each head.
            layers: hidden residual layers of the key and the value MLP; None for
                linear maps k = x + K x and v = x + V x.
            scale: factor s on the scores; None means 1 where D <= 16, else
                1 / sqrt(D).
            rngs: where the initial parameters come from.

        Raises:
            ValueError: if `heads` does not divide `channels`, or a size is not
                positive.
        """
        width = head_channels(channels, heads)
        check_latents(latents)
        self.heads = heads
        self.scale = (1.0 if width <= 16 else width**-0.5) if scale is None else scale
        init = nnx.initializers.normal(0.1)
        self.latents = nnx.Param(init(rngs.params(), (heads, latents, width)))

        def projection():
            if layers is None:
                return Linear(channels, channels, skip=True, rngs=rngs)
            return ResidualMLP(
                channels,
                channels,
                channels,
                layers=layers,
                input_residual=True,
                output_residual=True,
                rngs=rngs,
            )

        self.key = projection()
        self.value = projection()
        self.out = Linear(channels, channels, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "*B N C"],
        *,
        mask: Bool[Array, "*B N"] | None = None,
        axis_name: str | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "*B N C"]:
        x = real(x, mask)
        q, options = self.latents[...], {"scale": self.scale, "axis_name": axis_name}
        if in_blocks(x, q):
            mix = lambda x, mask: flare_in_blocks(self, q, x, mask=mask, **options)
            return flattened(mix, x, mask)
        y = ops.flare(q, self.keys(x), self.values(x), mask=mask, **options)
        return self.out(merge(y))

    def keys(self, x: Float[Array, "*B N C"]) -> Float[Array, "*B N H D"]:
        """Keys of the points."""
        return split(self.key(x), self.heads)

    def values(self, x: Float[Array, "*B N C"]) -> Float[Array, "*B N H D"]:
        """Values of the points."""
        return split(self.value(x), self.heads)
