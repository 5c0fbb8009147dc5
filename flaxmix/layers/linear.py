"""Affine maps of channels, in the precision of their input."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from flaxmix.ops.affine import scale_and_shift


def near_identity(std: float = 0.02) -> nnx.Initializer:
    """Initialises a square kernel to I + e, with e ~ N(0, std^2)."""

    def init(key, shape, dtype=jnp.float32, out_sharding=None):
        if shape[0] != shape[1]:
            raise ValueError(f"near_identity needs a square kernel, got {shape}.")
        noise = std * jax.random.normal(key, shape, dtype)
        return jnp.eye(shape[0], dtype=dtype) + noise

    return init


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
        kernel_init: nnx.Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        """Initialises W ~ N(0, 0.02^2), or by `kernel_init`, and b = 0.

        Args:
            inputs: channels of x.
            outputs: channels of y.
            bias: whether there is a b.
            skip: whether x is added to the result.
            kernel_init: initialiser of W.
            rngs: where the initial parameters come from.

        Raises:
            ValueError: if `skip` and the widths differ.
        """
        if skip and inputs != outputs:
            raise ValueError(f"skip needs equal widths, got {inputs} and {outputs}.")
        init = nnx.initializers.normal(0.02) if kernel_init is None else kernel_init
        self.kernel = nnx.Param(init(rngs.params(), (inputs, outputs), jnp.float32))
        self.bias = nnx.Param(jnp.zeros(outputs, jnp.float32)) if bias else None
        self.skip = skip

    def __call__(self, x: Float[Array, "*B I"]) -> Float[Array, "*B O"]:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            raise TypeError(f"a layer needs floating-point inputs, got {x.dtype}.")
        kernel = self.kernel[...]
        # One product instead of a product and a sum; below float32, 1 + W would
        # round most of W away.
        folded = self.skip and jnp.finfo(x.dtype).bits >= 32
        if folded:
            kernel = kernel + jnp.eye(len(kernel), dtype=kernel.dtype)
        y = x @ kernel.astype(x.dtype)
        if self.bias is not None:
            y = scale_and_shift(y, bias=self.bias[...])
        return x + y if self.skip and not folded else y
