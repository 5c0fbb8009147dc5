"""Layers stacked over depth."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Key


def stack(make: Callable[[nnx.Rngs], nnx.Module], depth: int, rngs: nnx.Rngs):
    """Builds `depth` layers as one module whose arrays have a leading axis.

    Raises:
        ValueError: if `depth` is not positive.
    """
    if depth < 1:
        raise ValueError(f"depth must be at least 1, got {depth}.")
    return jax.vmap(make)(rngs.split(depth))


def apply_stack(
    layers: nnx.Module,
    carry: Any,
    *,
    remat: bool = False,
    each: Mapping[str, Any] | None = None,
    **shared,
):
    """Applies stacked layers in turn: one traced layer, `depth` steps.

    Args:
        layers: what `stack` made.
        carry: input of the first layer, or a tuple of inputs, of the shapes and
            dtypes of every layer's output.
        remat: whether the backward pass recomputes each layer from its input.
        each: keyword arguments of the layers with a leading axis over depth.
        **shared: keyword arguments that all layers get alike.
    """

    def step(carry, layer):
        module, each = layer
        inputs = carry if isinstance(carry, tuple) else (carry,)
        return module(*inputs, **each, **shared), None

    step = jax.checkpoint(step) if remat else step
    return jax.lax.scan(step, carry, (layers, dict(each or {})))[0]


def split_key(key: Key[Array, ""] | None, count: int) -> Any:
    """`count` keys, or None without a key."""
    return None if key is None else jax.random.split(key, count)
