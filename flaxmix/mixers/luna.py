"""Luna's nested attention as a layer."""

from flax import nnx
from jaxtyping import Array, Bool, Float, Key

from flaxmix import ops
from flaxmix.layers import Linear
from flaxmix.mixers.heads import (
    head_channels,
    merge,
    merge_latents,
    real,
    split,
    split_latents,
)
from flaxmix.ops.stream import spread


class LunaAttention(nnx.Module):
    """Luna's pack and unpack attention (arXiv:2106.01540), in the form compared by
    arXiv:2608.11519.

        P = softmax_N(Q_p p (K_p x)^T / sqrt(D)) V_p x
        y = W_o softmax_M(Q x (K P)^T / sqrt(D)) V P

    p being a packed sequence of M tokens that goes from layer to layer beside x.
    O(N (C^2 + M C)) time, O(N C) memory, 7 C^2 + 7 C parameters.

    Luna's own code ties keys and values, norms after each layer instead of before it
    and embeds positions; this form does none of these.
    """

    def __init__(self, channels: int, *, heads: int, rngs: nnx.Rngs):
        """Initialises weights N(0, 0.02^2) and biases 0.

        Args:
            channels: width C of the points and of the packed sequence.
            heads: number of heads H.
            rngs: where the initial parameters come from.

        Raises:
            ValueError: if `heads` does not divide `channels`.
        """
        head_channels(channels, heads)
        self.heads = heads
        linear = lambda: Linear(channels, channels, rngs=rngs)
        self.pack_query = linear()
        self.pack_key = linear()
        self.pack_value = linear()
        self.query = linear()
        self.key = linear()
        self.value = linear()
        self.out = linear()

    def __call__(
        self,
        x: Float[Array, "*B N C"],
        p: Float[Array, "*B M C"],
        *,
        mask: Bool[Array, "*B N"] | None = None,
        axis_name: str | None = None,
        key: Key[Array, ""] | None = None,
    ) -> tuple[Float[Array, "*B N C"], Float[Array, "*B M C"]]:
        """Mixes the points of x by way of p.

        Returns:
            y for the points and P for the packed sequence.
        """
        x = real(x, mask)
        points = lambda layer: split(layer(x), self.heads)
        latents = lambda layer, z: split_latents(layer(z), self.heads)
        shared = {"mask": mask, "axis_name": axis_name}
        z, _ = ops.gather(
            latents(self.pack_query, p),
            points(self.pack_key),
            points(self.pack_value),
            **shared,
        )
        packed = merge_latents(spread(z, axis_name))
        y = ops.scatter(
            points(self.query),
            latents(self.key, packed),
            latents(self.value, packed),
            **shared,
        )
        return self.out(merge(y)), packed
