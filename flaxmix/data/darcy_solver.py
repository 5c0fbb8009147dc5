"""Solver of `flaxmix.data.darcy`: random permeability, five-point scheme, splines."""

import functools

import numpy as np
from scipy import fft, interpolate, sparse
from scipy.sparse import linalg

PERMEABILITIES = (3.0, 12.0)
"""Where the random field is negative, and elsewhere."""

_SPLITS = ("train", "test")
_TOLERANCE = 1e-9


def sample(
    seed: int, split: str, index: int, resolution: int = 421
) -> dict[str, np.ndarray]:
    """One solved problem: coeff and sol [resolution, resolution], float32.

    Raises:
        RuntimeError: if the linear solve is not accurate.
    """
    random = np.random.default_rng((seed, _SPLITS.index(split), index))
    field = gaussian_field(random.standard_normal((resolution, resolution)))
    a = np.where(field >= 0, PERMEABILITIES[1], PERMEABILITIES[0])
    to_nodes, to_centres = _splines(resolution)
    u = to_centres @ solve(to_nodes @ a @ to_nodes.T) @ to_centres.T
    return {"coeff": a.astype(np.float32), "sol": u.astype(np.float32)}


def gaussian_field(noise: np.ndarray) -> np.ndarray:
    """Gaussian field [s, s] at cell centres from independent normal noise [s, s].

    The coefficient of cos(k pi x) cos(l pi y) (scaled to mean square 1) is
    noise[l, k] 3 (pi^2 (k^2 + l^2) + 9)^-1, and 0 for k = l = 0.
    """
    s = len(noise)
    k = np.arange(s)
    size = 3 / (np.pi**2 * (k**2 + k[:, None] ** 2) + 9)
    size[0, 0] = 0
    return np.asarray(fft.idctn(s * size * noise, norm="ortho"))


def solve(a: np.ndarray) -> np.ndarray:
    """Solves -div(a grad u) = 1, u = 0 on the boundary, by the five-point scheme.

    The flow between neighbours uses the mean of their two permeabilities. Error
    O(h^2) for smooth a.

    Args:
        a: positive permeability [n, n] at the nodes i / (n - 1).

    Returns:
        u [n, n] at the same nodes.

    Raises:
        RuntimeError: if the relative residual is above 1e-9 or not finite.
    """
    n = len(a)
    down = ((a[1:] + a[:-1]) / 2)[:, 1:-1]
    right = ((a[:, 1:] + a[:, :-1]) / 2)[1:-1]
    # From a line of inner nodes to the steps between neighbours, both ends included.
    step = sparse.eye_array(n - 1, n - 2) - sparse.eye_array(n - 1, n - 2, k=-1)
    same = sparse.eye_array(n - 2)
    steps = sparse.vstack([sparse.kron(step, same), sparse.kron(same, step)])
    flow = sparse.diags_array(np.concatenate([down.ravel(), right.ravel()]))
    matrix = sparse.csc_array(steps.T @ flow @ steps)
    force = np.full((n - 2) ** 2, 1 / (n - 1) ** 2)
    factors = linalg.splu(
        matrix,
        permc_spec="MMD_AT_PLUS_A",
        diag_pivot_thresh=0.0,
        options={"SymmetricMode": True},
    )
    inner = factors.solve(force)
    error = np.linalg.norm(matrix @ inner - force) / np.linalg.norm(force)
    if not error <= _TOLERANCE:
        raise RuntimeError(
            f"the pressure has relative residual {error:.1e}, allowed {_TOLERANCE:.0e}."
        )
    u = np.zeros_like(a)
    u[1:-1, 1:-1] = inner.reshape(n - 2, n - 2)
    return u


@functools.lru_cache(maxsize=1)
def _splines(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Spline matrices [n, n] from n cell centres to n nodes of [0, 1], and back."""
    centres, nodes = (np.arange(n) + 0.5) / n, np.linspace(0, 1, n)
    return (
        interpolate.CubicSpline(centres, np.eye(n))(nodes),
        interpolate.CubicSpline(nodes, np.eye(n))(centres),
    )
