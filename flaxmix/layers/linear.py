"""Affine maps of channels, in the precision of their input."""

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from flaxmix.ops.affine import scale_and_shift

Init = Literal["normal", "identity", "uniform"]


class Linear(nnx.Module):
    """y = x W + b, or y = x + x W + b with `skip`.

    Unlike `nnx.Linear`, the master weights are float32 and the product is taken in
    the dtype of x. With `skip`, weight decay pulls the layer towards the identity.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool = True,
        skip: bool = False,
        init: Init = "normal",
        rngs: nnx.Rngs,
    ):
        """Initialises the parameters.

        Args:
            inputs: channels of x.
            outputs: channels of y.
            bias: whether there is a b.
            skip: whether x is added to the result.
            init: "normal" for W ~ N(0, 0.02^2) and b = 0; "identity" for that plus
                the identity; "uniform" for both within 1 / sqrt(inputs) of 0, which
                is PyTorch's own.
            rngs: where the initial parameters come from.

        Raises:
            ValueError: if `skip` or the identity is asked for and the widths differ,
                or `init` is none of these.
        """
        if init not in ("normal", "identity", "uniform"):
            raise ValueError(
                f"init must be 'normal', 'identity' or 'uniform', got {init!r}."
            )
        if init == "identity" and inputs != outputs:
            raise ValueError(
                f"init='identity' needs equal widths, got {inputs} and {outputs}."
            )
        if skip and inputs != outputs:
            raise ValueError(f"skip needs equal widths, got {inputs} and {outputs}.")
        f32, limit = jnp.float32, inputs**-0.5
        uniform = lambda *shape: jax.random.uniform(
            rngs.params(), shape, f32, -limit, limit
        )
        if init == "uniform":
            self.kernel = nnx.Param(uniform(inputs, outputs))
            self.bias = nnx.Param(uniform(outputs)) if bias else None
        else:
            kernel = 0.02 * jax.random.normal(rngs.params(), (inputs, outputs), f32)
            identity = jnp.eye(inputs, dtype=f32) if init == "identity" else 0
            self.kernel = nnx.Param(kernel + identity)
            self.bias = nnx.Param(jnp.zeros(outputs, f32)) if bias else None
        self.skip = skip

    def __call__(self, x: Float[Array, "*B I"]) -> Float[Array, "*B O"]:
        kernel, folded = self._kernel(x)
        y = x @ kernel
        if self.bias is not None:
            y = scale_and_shift(y, bias=self.bias[...])
        return x + y if self.skip and not folded else y

    def heads(self, x: Float[Array, "*B N I"], heads: int) -> Float[Array, "*B N H D"]:
        """`self(x)` with channel h D + d at place d of head h, for the operators.

        The product is taken into their layout, points last: norms and operators that
        follow, and their derivatives, then need no transposition.
        """
        kernel, folded = self._kernel(x)
        y = jnp.einsum("...nc,cd->...dn", x, kernel)
        if self.bias is not None:
            y = scale_and_shift(y, bias=self.bias[...], axis=-2)
        if self.skip and not folded:
            y = jnp.swapaxes(x, -1, -2) + y
        y = y.reshape(*y.shape[:-2], heads, y.shape[-2] // heads, y.shape[-1])
        return jnp.moveaxis(y, -1, -3)

    def _kernel(self, x) -> tuple[Array, bool]:
        """The kernel in the dtype of x, and whether it includes the skip."""
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            raise TypeError(f"a layer needs floating-point inputs, got {x.dtype}.")
        kernel = self.kernel[...]
        # One product instead of a product and a sum; below float32, 1 + W would
        # round most of W away.
        folded = self.skip and jnp.finfo(x.dtype).bits >= 32
        if folded:
            kernel = kernel + jnp.eye(len(kernel), dtype=kernel.dtype)
        return kernel.astype(x.dtype), folded
