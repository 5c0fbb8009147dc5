"""FLARE's layers on many points: keys and values exist for one block at a time."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from flaxmix import ops
from flaxmix.mixers.heads import merge
from flaxmix.ops.stream import block_size
from flaxmix.ops.streamed import gather_from, is_large, map_points


def in_blocks(
    x: Array, q: Array, key: Array | None = None, dropout: float = 0.0
) -> bool:
    """Whether a layer with queries [..., H, M, D] streams its points x.

    Dropout is that of whole keys and values.
    """
    dropping = key is not None and dropout > 0
    return not dropping and is_large(x, q.shape[-3] * q.shape[-2])


def _keys_and_values(layer, x):
    return layer.keys(x), layer.values(x)


def _read(params, x, mask):
    layer, q, z = params
    y = ops.scatter(layer.keys(x), q, z, mask=mask, scale=1.0)
    return layer.out(merge(y))


def flare_in_blocks(
    layer: nnx.Module,
    q: Float[Array, "... H M D"],
    x: Float[Array, "B N C"],
    *,
    mask: Bool[Array, "B N"] | None,
    axis_name: str | None,
    scale: float | None = None,
) -> Float[Array, "B N C"]:
    """W_o flare(q, layer.keys(x), layer.values(x)); see `ops.flare`."""
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    q = jnp.broadcast_to(q, (len(x), *q.shape[-3:])) * factor
    z, _ = gather_from(
        *(_keys_and_values, layer, q, x), mask=mask, scale=1.0, axis_name=axis_name
    )
    size = block_size(q, x.shape[-2], None)
    return map_points(_read, (layer, q, z), x, mask=mask, block=size)


def flattened(apply, x: Array, mask: Array | None) -> Array:
    """apply(x, mask) with all batch axes as one."""
    points = x.reshape(-1, *x.shape[-2:])
    mask = None if mask is None else mask.reshape(-1, mask.shape[-1])
    return apply(points, mask).reshape(x.shape)
