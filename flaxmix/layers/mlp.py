"""The residual MLP of the FLARE papers."""

import jax
from flax import nnx
from jaxtyping import Array, Float

from flaxmix.layers.linear import Linear


@jax.custom_vjp
def gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """GELU by its tanh approximation, which keeps only x for the backward pass."""
    return jax.nn.gelu(x)


gelu.defvjp(
    lambda x: (jax.nn.gelu(x), x),
    lambda x, g: jax.vjp(jax.nn.gelu, x)[1](g),
)


class ResidualMLP(nnx.Module):
    """An MLP whose hidden layers are residual, with GELU (tanh approximation).

        h = gelu(W_1 x)  (+ x with `input_residual`)
        h = h + gelu(W_i h),  `layers` times
        y = W_2 h  (+ h with `output_residual`)

    A residual between unequal widths is left out, as in the reference.
    """

    def __init__(
        self,
        inputs: int,
        hidden: int,
        outputs: int,
        *,
        layers: int = 0,
        input_residual: bool = False,
        output_residual: bool = False,
        rngs: nnx.Rngs,
    ):
        """Initialises every weight N(0, 0.02^2) and every bias 0.

        Args:
            inputs: channels of x.
            hidden: channels of h.
            outputs: channels of y.
            layers: number of hidden residual layers.
            input_residual: whether x is added to the first h, if the widths agree.
            output_residual: whether h is added to y, if the widths agree.
            rngs: where the initial parameters come from.

        Raises:
            ValueError: if a width is not positive, or `layers` is negative.
        """
        if min(inputs, hidden, outputs) < 1 or layers < 0:
            raise ValueError(
                "an MLP needs positive widths and no negative number of layers, got "
                f"{inputs=}, {hidden=}, {outputs=}, {layers=}."
            )
        self.first = Linear(inputs, hidden, rngs=rngs)
        self.hidden = nnx.List(Linear(hidden, hidden, rngs=rngs) for _ in range(layers))
        self.last = Linear(hidden, outputs, rngs=rngs)
        self.input_residual = input_residual and inputs == hidden
        self.output_residual = output_residual and hidden == outputs

    def __call__(self, x: Float[Array, "*B I"]) -> Float[Array, "*B O"]:
        h = gelu(self.first(x))
        if self.input_residual:
            h = h + x
        for layer in self.hidden:
            h = h + gelu(layer(h))
        y = self.last(h)
        return y + h if self.output_residual else y
