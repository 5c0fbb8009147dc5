"""The gated feed-forward layer of decoders."""

import jax
from flax import nnx
from jaxtyping import Array, Float

from flaxmix.layers.linear import Linear
from flaxmix.ops.affine import wide


@jax.custom_vjp
def gated(a: Float[Array, "..."], b: Float[Array, "..."]) -> Float[Array, "..."]:
    """SiLU(a) b, which keeps only a and b for the backward pass."""
    return (jax.nn.silu(wide(a)) * wide(b)).astype(b.dtype)


def _gradient(kept, g):
    a, b, g = (wide(x) for x in (*kept, g))
    s = jax.nn.sigmoid(a)
    da, db = g * b * s * (1 + a * (1 - s)), g * a * s
    return da.astype(kept[0].dtype), db.astype(kept[1].dtype)


gated.defvjp(lambda a, b: (gated(a, b), (a, b)), _gradient)


class SwiGLU(nnx.Module):
    """y = W_3 (SiLU(W_1 x) * W_2 x) (arXiv:2002.05202), without biases."""

    def __init__(self, channels: int, hidden: int, *, rngs: nnx.Rngs):
        """Initialises weights N(0, 0.02^2).

        Args:
            channels: width C of x and y.
            hidden: width between.
            rngs: where the initial parameters come from.

        Raises:
            ValueError: if a width is not positive.
        """
        if min(channels, hidden) < 1:
            raise ValueError(
                f"a feed-forward layer needs positive widths, got {channels=} and "
                f"{hidden=}."
            )
        self.gate = Linear(channels, hidden, bias=False, rngs=rngs)
        self.up = Linear(channels, hidden, bias=False, rngs=rngs)
        self.down = Linear(hidden, channels, bias=False, rngs=rngs)

    def __call__(self, x: Float[Array, "*B C"]) -> Float[Array, "*B C"]:
        return self.down(gated(self.gate(x), self.up(x)))
