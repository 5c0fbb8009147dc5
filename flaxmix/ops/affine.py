"""Scale and offset of channels, whose gradients are summed in float32."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def wide(x: Array) -> Array:
    """x in float32, or in float64 if it is."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _along(parameter: Array, y: Array, axis: int) -> Array:
    shape = [1] * y.ndim
    shape[axis] = -1
    return parameter.astype(y.dtype).reshape(shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _scale_and_shift(y, scale, bias, axis):
    if scale is not None:
        y = y * _along(scale, y, axis)
    return y if bias is None else y + _along(bias, y, axis)


def _forward(y, scale, bias, axis):
    # Without a scale, y is not needed again.
    kept = None if scale is None else y
    return _scale_and_shift(y, scale, bias, axis), (kept, scale, bias)


def _backward(axis, saved, g):
    y, scale, bias = saved
    others = [i for i in range(g.ndim) if i != axis % g.ndim]
    dscale = dbias = None
    if bias is not None:
        dbias = jnp.sum(wide(g), others).astype(bias.dtype)
    if scale is not None:
        dscale = jnp.sum(wide(g) * wide(y), others).astype(scale.dtype)
        g = g * _along(scale, g, axis)
    return g, dscale, dbias


_scale_and_shift.defvjp(_forward, _backward)


def scale_and_shift(
    y: Float[Array, "..."],
    scale: Float[Array, "C"] | None = None,
    bias: Float[Array, "C"] | None = None,
    *,
    axis: int = -1,
) -> Any:
    """y scale + bias along `axis`, in the dtype of y.

    The gradients of both parameters are sums over all points; they are taken in
    float32 or wider, since half precision loses most of a long sum.

    Args:
        y: any array.
        scale: factor for each entry of `axis`, or None.
        bias: offset for each entry of `axis`, or None.
        axis: the axis of the parameters.
    """
    # Inside `jax.shard_map` a derivative has to vary over the mesh as its argument
    # does; the derivative of this sum adds the devices' parts up.
    vary = lambda p: None if p is None else p + jnp.zeros_like(y, p.dtype, p.shape)
    return _scale_and_shift(y, vary(scale), vary(bias), axis)
