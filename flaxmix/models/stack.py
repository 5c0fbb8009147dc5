"""Layers stacked over depth."""

from collections.abc import Callable

import jax
from flax import nnx
from jaxtyping import Array


def stack(make: Callable[[nnx.Rngs], nnx.Module], depth: int, rngs: nnx.Rngs):
    """Builds `depth` layers as one module whose arrays have a leading axis.

    Raises:
        ValueError: if `depth` is not positive.
    """
    if depth < 1:
        raise ValueError(f"depth must be at least 1, got {depth}.")
    return jax.vmap(make)(rngs.split(depth))


def apply_stack(layers: nnx.Module, x: Array, *, remat: bool = False, **kwargs):
    """Applies stacked layers in turn: one traced layer, `depth` steps.

    Args:
        layers: what `stack` made.
        x: input of the first layer, of the shape and dtype of every layer's output.
        remat: whether the backward pass recomputes each layer from its input.
        **kwargs: passed to every layer.
    """

    def step(x, layer):
        return layer(x, **kwargs), None

    return jax.lax.scan(jax.checkpoint(step) if remat else step, x, layers)[0]
