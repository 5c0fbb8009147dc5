"""The residual MLP of the FLARE papers."""

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from flaxmix.layers.linear import Init, Linear
from flaxmix.ops.affine import wide

Gelu = Literal["tanh", "exact"]


@jax.custom_vjp
def gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """GELU by its tanh approximation, which keeps only x for the backward pass."""
    return jax.nn.gelu(x)


gelu.defvjp(
    lambda x: (jax.nn.gelu(x), x),
    lambda x, g: jax.vjp(jax.nn.gelu, x)[1](g),
)


@jax.custom_vjp
def exact_gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """GELU, x Phi(x), which keeps only x for the backward pass."""
    return jax.nn.gelu(x, approximate=False)


def _exact_gelu_gradient(x, g):
    # Phi(x) + x phi(x), written out: jax 0.12 cannot take the derivative of erf inside
    # `jax.shard_map`.
    u = wide(x)
    cumulative = 0.5 * lax.erfc(-(0.5**0.5) * u)
    density = jnp.exp(-0.5 * jnp.square(u)) / (2 * jnp.pi) ** 0.5
    return (((cumulative + u * density) * wide(g)).astype(g.dtype),)


exact_gelu.defvjp(
    lambda x: (jax.nn.gelu(x, approximate=False), x), _exact_gelu_gradient
)


class ResidualMLP(nnx.Module):
    """An MLP whose hidden layers are residual, with GELU.

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
        activation: Gelu = "tanh",
        init: Init = "normal",
        rngs: nnx.Rngs,
    ):
        """Initialises the layers.

        Args:
            inputs: channels of x.
            hidden: channels of h.
            outputs: channels of y.
            layers: number of hidden residual layers.
            input_residual: whether x is added to the first h, if the widths agree.
            output_residual: whether h is added to y, if the widths agree.
            activation: GELU by its tanh approximation, or exact.
            init: of every layer, see `Linear`.
            rngs: where the initial parameters come from.

        Raises:
            ValueError: if a width is not positive, `layers` is negative, or
                `activation` is neither.
        """
        if activation not in ("tanh", "exact"):
            raise ValueError(
                f"activation must be 'tanh' or 'exact', got {activation!r}."
            )
        if min(inputs, hidden, outputs) < 1 or layers < 0:
            raise ValueError(
                "an MLP needs positive widths and no negative number of layers, got "
                f"{inputs=}, {hidden=}, {outputs=}, {layers=}."
            )
        linear = lambda i, o: Linear(i, o, init=init, rngs=rngs)
        self.first = linear(inputs, hidden)
        self.hidden = nnx.List(linear(hidden, hidden) for _ in range(layers))
        self.last = linear(hidden, outputs)
        self.activation = activation
        self.input_residual = input_residual and inputs == hidden
        self.output_residual = output_residual and hidden == outputs

    def features(self, x: Float[Array, "*B I"]) -> Float[Array, "*B H"]:
        """The last h."""
        act = gelu if self.activation == "tanh" else exact_gelu
        h = act(self.first(x))
        if self.input_residual:
            h = h + x
        for layer in self.hidden:
            h = h + act(layer(h))
        return h

    def __call__(self, x: Float[Array, "*B I"]) -> Float[Array, "*B O"]:
        h = self.features(x)
        y = self.last(h)
        return y + h if self.output_residual else y
