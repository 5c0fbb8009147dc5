"""Losses and errors of fields on points."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from flaxmix.ops.affine import wide


def _norm(x: Float[Array, "*B N C"], mask) -> Float[Array, "*B"]:
    """Euclidean norm over points and channels, with derivative 0 at x = 0."""
    if mask is not None:
        x = jnp.where(mask[..., None], x, 0)
    square = jnp.sum(jnp.square(x), (-2, -1))
    some = square != 0  # True for NaN, which must not pass for 0.
    return jnp.where(some, jnp.sqrt(jnp.where(some, square, 1)), 0)


def relative_l2(
    prediction: Float[Array, "*B N C"],
    target: Float[Array, "*B N C"],
    *,
    mask: Bool[Array, "*B N"] | None = None,
) -> Float[Array, "*B"]:
    """||prediction - target|| / ||target||, for each sample.

    Norms are over all real points and channels of a sample, in float32 or wider. No
    constant is added. Where the prediction is exact the value and the derivative are
    0; where the target is 0 throughout, the value is ||prediction||.

    Args:
        prediction: predicted fields, in the units of the target.
        target: true fields.
        mask: True for real points; what the others hold never matters.

    Raises:
        ValueError: if the shapes differ.
    """
    if prediction.shape != target.shape:
        raise ValueError(
            f"prediction has shape {prediction.shape}, target {target.shape}."
        )
    # Differences, too: those of float16 overflow.
    prediction, target = wide(prediction), wide(target)
    error, size = _norm(prediction - target, mask), _norm(target, mask)
    return error / jnp.where(size != 0, size, 1)


def _differences(u: Float[Array, "*B R K C"], axis: int) -> Float[Array, "*B R K C"]:
    """Central differences along a grid axis; values outside the grid are 0."""
    n = u.shape[axis]
    pad = [(0, 0)] * u.ndim
    pad[axis] = (1, 1)
    padded = jnp.pad(u, pad)
    take = lambda start: jnp.take(padded, jnp.arange(start, start + n), axis)
    return (take(2) - take(0)) / 2


def relative_gradient_l2(
    prediction: Float[Array, "*B N C"],
    target: Float[Array, "*B N C"],
    grid: tuple[int, int],
) -> Float[Array, "*B"]:
    """relative_l2 of the two derivatives on a grid, added up, for each sample.

    Central differences with zeros outside the grid. Before differentiating, the
    border of the prediction (not of the target) is set to 0. The spacing cancels.

    Args:
        prediction: predicted fields on the points of a row-major grid.
        target: true fields.
        grid: (rows, columns), with N = rows columns.

    Raises:
        ValueError: if `grid` does not hold N points, or has none inside its border.
    """
    rows, columns = grid
    if rows * columns != prediction.shape[-2]:
        raise ValueError(f"{grid=} does not hold {prediction.shape[-2]} points.")
    if min(grid) < 3:
        raise ValueError(f"{grid=} has no points inside its border.")
    on_grid = lambda a: a.reshape(*a.shape[:-2], rows, columns, a.shape[-1])
    inner = jnp.pad(jnp.ones((rows - 2, columns - 2), bool), 1)[..., None]
    u, truth = jnp.where(inner, on_grid(prediction), 0), on_grid(target)
    total = 0
    for axis in (-2, -3):
        a, b = _differences(u, axis), _differences(truth, axis)
        flat = lambda d: d.reshape(prediction.shape)
        total = total + relative_l2(flat(a), flat(b))
    return total
