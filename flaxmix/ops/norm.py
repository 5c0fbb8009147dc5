"""LayerNorm and RMSNorm along any axis, with derivatives from the output.

The derivative keeps the normalised output, which the next layer keeps anyway, and
one reciprocal deviation per row, instead of the input.

    LayerNorm   y = (x - mean x) r,  r = 1 / sqrt(var x + eps),
                dx = r (g - mean g - y mean(g y))
    RMSNorm     y = x r,  r = 1 / sqrt(mean x^2 + eps),
                dx = r (g - y mean(g y))
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from flaxmix.ops.affine import scale_and_shift, wide


def pair_sum(a: Array, b: Array, axes: Sequence[int]) -> tuple[Array, Array]:
    """Sums two arrays over the same axes in one reduction.

    For sums over the channels of [B, H, D, N]: on CPUs twice as fast there as two
    sums of their own. Over the points it is several times slower.
    """
    zero = np.zeros((), a.dtype)
    axes = [axis % a.ndim for axis in axes]
    add = lambda x, y: (x[0] + y[0], x[1] + y[1])
    return lax.reduce((a, b), (zero, zero), add, axes)


@jax.custom_vjp
def inner(a: Array, b: Array) -> Any:
    """Sum of a b over the last axis, of arrays of one shape.

    A sum of products of two arrays is up to a hundred times slower on CPUs in jaxlib
    0.10, unless it is taken together with another one.
    """
    total, other = pair_sum(a * b, a, [-1])
    return total + 0 * other


inner.defvjp(
    lambda a, b: (inner(a, b), (a, b)),
    lambda kept, g: (g[..., None] * kept[1], g[..., None] * kept[0]),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _standardize(x, axis, eps, center):
    return _standardize_forward(x, axis, eps, center)[0]


def _standardize_forward(x, axis, eps, center):
    d = wide(x)
    if center:
        d = d - jnp.mean(d, axis, keepdims=True)
    r = lax.rsqrt(jnp.mean(jnp.square(d), axis, keepdims=True) + eps)
    y = (d * r).astype(x.dtype)
    return y, (y, r)


def _standardize_backward(axis, eps, center, saved, g):
    y, r = saved
    y, full = wide(y), wide(g)
    projection, mean = pair_sum(full * y, full, [axis])
    keep = lambda t: jnp.expand_dims(t, axis) / y.shape[axis]
    # RMSNorm has no use for the mean, but the pair must stay a pair.
    mean = keep(mean if center else 0 * mean)
    return ((r * (full - mean - y * keep(projection))).astype(g.dtype),)


_standardize.defvjp(_standardize_forward, _standardize_backward)


def layer_norm(
    x: Float[Array, "..."],
    scale: Float[Array, "C"] | None = None,
    bias: Float[Array, "C"] | None = None,
    *,
    axis: int = -1,
    eps: float = 1e-5,
) -> Float[Array, "..."]:
    """LayerNorm, (x - mean) / sqrt(var + eps) scale + bias, over `axis`.

    The variance is the biased one. Statistics are taken in float32 or wider.

    Args:
        x: any array.
        scale: factor for each entry of `axis`; None for an affine-free norm.
        bias: offset for each entry of `axis`; needs `scale`.
        axis: the axis that is normalised.
        eps: added to the variance, inside the root.

    Returns:
        The normalised array, in the dtype of `x`.
    """
    y: Any = _standardize(x, axis, eps, True)
    return scale_and_shift(y, scale, bias, axis=axis)


def rms_norm(
    x: Float[Array, "..."],
    scale: Float[Array, "C"] | None = None,
    *,
    axis: int = -1,
    eps: float = 1e-6,
) -> Float[Array, "..."]:
    """RMSNorm, x / sqrt(mean x^2 + eps) scale, over `axis`.

    Args:
        x: any array.
        scale: factor for each entry of `axis`; None for an affine-free norm.
        axis: the axis that is normalised.
        eps: added to the mean square, inside the root.

    Returns:
        The normalised array, in the dtype of `x`.
    """
    y: Any = _standardize(x, axis, eps, False)
    return scale_and_shift(y, scale, axis=axis)
