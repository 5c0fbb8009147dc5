"""Elasticity: a stretched hyperelastic unit cell with a random hole.

Points of a mesh in, von Mises stress out. The published files of the Geo-FNO
benchmark are read as they are; the same problem and file format can be generated.
"""

import functools
import math
import os
from pathlib import Path

import numpy as np
from scipy import sparse
from scipy.sparse import linalg

from flaxmix.data import cache
from flaxmix.data.dataset import Dataset, Fields, Normalizer

NODES = 972
"""Nodes of every mesh: 54 x 4 elements of 9 nodes, shared nodes counted once."""

C1, C2 = 1.863e5, 9.79e3
"""Rivlin-Saunders constants, in the (unnamed) unit of the stress."""

TRACTION = 100.0
"""Pull on the top side, force per undeformed length."""

_RECIPE = 1
_XY, _SIGMA, _RADII = (
    f"Random_UnitCell_{name}_10.npy" for name in ("XY", "sigma", "rr")
)
_RADII_COUNT = 42
_AROUND, _ACROSS = (13, 14, 13, 14), 4
_GRADING = 1.0
_TOLERANCE = 1e-9


def generate(
    folder: str | os.PathLike,
    *,
    samples: int,
    seed: int = 0,
    processes: int | None = None,
    progress: bool = True,
) -> Path:
    """Solves random unit cells and writes them in the published file format.

    The unit square has a hole around its centre with radius

        r(t) = 0.2 + 0.2 / (1 + exp z(t)),
        z(t) = sum_{k=1}^{5} 4 (a_k cos kt + b_k sin kt) / sqrt(pi (k^2 + 9)),

    a_k, b_k standard normal: z ~ N(0, 4^2 (-Laplacian + 3^2)^-1), truncated. The
    bottom is clamped, the top pulled upwards with the dead load `TRACTION`, the rest
    free. The solid is incompressible in plane stress: with C = F^T F in the plane
    and C_33 = 1 / det C its energy is

        W = C1 (I1 - 3) + C2 (I2 - 3)
          = C1 (tr C + 1 / det C - 3) + C2 (tr C / det C + det C - 3).

    Biquadratic elements on a ring mesh of `NODES` nodes, Newton's method; the von
    Mises stress is evaluated at the nodes of each element and averaged over the
    elements. Nodes are in random order. Sample i depends on (seed, i) alone.
    About 0.1 s a sample on one core.

    Args:
        folder: to make, with `Random_UnitCell_XY_10.npy` [972, 2, samples] node
            positions before loading, `Random_UnitCell_sigma_10.npy` [972, samples]
            stress, `Random_UnitCell_rr_10.npy` [42, samples] radii at equally
            spaced t from 0 to 2 pi, all float32, and `generation.json`.
        samples: number of them.
        seed: of the random holes and node orders.
        processes: that solve in parallel; default all cores.
        progress: whether to show a progress bar.

    Returns:
        The folder. If it has been generated with the same arguments before, it is
        left as it is.

    Raises:
        ValueError: if `samples` or `processes` is below 1 or `seed` below 0, or the
            folder was generated with other arguments.
        FileExistsError: if the folder has other files.
        RuntimeError: if a sample fails, for example if Newton's method does.

    Source: Li, Huang, Liu, Anandkumar, "Fourier neural operator with learned
    deformations for PDEs on general geometries", JMLR 2023, section 5 (Geo-FNO).
    The paper leaves the scaling of z open; here it is as above.
    """
    if samples < 1 or seed < 0:
        raise ValueError(f"samples >= 1, seed >= 0 expected, got {samples}, {seed}.")

    def write(path: Path) -> None:
        arrays = cache.compute(
            functools.partial(sample, seed),
            samples,
            title="elasticity",
            processes=processes,
            progress=progress,
        )
        for name, array in ((_XY, "xy"), (_SIGMA, "sigma"), (_RADII, "radii")):
            np.save(
                path / name, np.ascontiguousarray(np.moveaxis(arrays[array], 0, -1))
            )

    parameters = {
        "recipe": "elasticity",
        "version": _RECIPE,
        "samples": samples,
        "seed": seed,
    }
    return cache.build(folder, parameters, write, packages=("numpy", "scipy"))


def read(folder: str | os.PathLike) -> tuple[np.ndarray, np.ndarray]:
    """Reads published or generated files.

    Args:
        folder: with `Random_UnitCell_XY_10.npy` [972, 2, S] and
            `Random_UnitCell_sigma_10.npy` [972, S]; the published S is 2000.

    Returns:
        Positions [S, 972, 2] and stress [S, 972, 1], float32.

    Raises:
        FileNotFoundError: if one of the files is missing.
        ValueError: if a file has another shape, is not a plain array of numbers, or
            has values that are not finite.
    """
    xy = _array(Path(folder) / _XY, (NODES, 2, None))
    sigma = _array(Path(folder) / _SIGMA, (NODES, xy.shape[-1]))
    return (
        np.ascontiguousarray(np.moveaxis(xy, -1, 0)),
        np.ascontiguousarray(sigma.T[..., None]),
    )


def load(
    folder: str | os.PathLike | None = None,
    *,
    train: int = 1000,
    test: int = 200,
    seed: int = 0,
    processes: int | None = None,
) -> Dataset:
    """The elasticity data set: x = (x, y) [972, 2] as it is, y = stress [972, 1].

    Args:
        folder: of the published files; by default `train + test` samples are
            generated on first use in `flaxmix.data.cache.default_folder()`.
        train: number of training samples, the first ones.
        test: number of test samples, the last ones.
        seed: of generated samples; unused with `folder`.
        processes: that generate in parallel; default all cores.

    Raises:
        ValueError: if a count is below 1, or there are fewer than `train + test`
            samples; and as `read` and `generate` do.
        FileNotFoundError: as `read` does.
    """
    if train < 1 or test < 1:
        raise ValueError(f"train and test must be at least 1, got {train} and {test}.")
    if folder is None:
        name = f"elasticity-v{_RECIPE}-n{train + test}-s{seed}"
        folder = generate(
            cache.default_folder() / name,
            samples=train + test,
            seed=seed,
            processes=processes,
        )
    xy, sigma = read(folder)
    if train + test > len(xy):
        raise ValueError(
            f"train + test = {train} + {test} samples asked for, but {folder} has "
            f"{len(xy)}."
        )
    return Dataset(
        name="Elasticity",
        train=Fields(xy[:train], sigma[:train]),
        test=Fields(xy[-test:], sigma[-test:]),
        targets=Normalizer.fit(sigma[:train]),
        quantity="von Mises stress σ (no units given)",
    )


def sample(seed: int, index: int, refinement: int = 1) -> dict[str, np.ndarray]:
    """One solved cell: xy [N, 2], sigma [N], radii [42], float32.

    N is `NODES` for refinement 1. The hole is the same for every refinement.

    Raises:
        RuntimeError: if Newton's method does not converge.
    """
    random = np.random.default_rng((seed, index))
    modes = random.standard_normal((2, 5))
    xy, elements = mesh(modes, refinement)
    u = solve(xy, elements)
    order = random.permutation(len(xy))
    return {
        "xy": xy[order].astype(np.float32),
        "sigma": von_mises(xy, elements, u)[order].astype(np.float32),
        "radii": radius(modes, np.linspace(0, 2 * np.pi, _RADII_COUNT)).astype(
            np.float32
        ),
    }


def radius(modes: np.ndarray, angle: np.ndarray) -> np.ndarray:
    """Hole radius at angles [n], for (a_k, b_k) = modes [2, 5] of `generate`."""
    k = np.arange(1, modes.shape[1] + 1)
    scale = 4 / np.sqrt(np.pi * (k**2 + 9))
    waves = np.stack([np.cos(k * angle[:, None]), np.sin(k * angle[:, None])])
    z = np.einsum("fk,fnk,k->n", modes, waves, scale)
    return 0.2 + 0.2 / (1 + np.exp(z))


def mesh(modes: np.ndarray, refinement: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Ring of 9-node elements between the hole and the square.

    Rays go from the centre at equal angles within each side of the square, whose
    corners are element corners. Along a ray the nodes are finer near the hole.

    Returns:
        Positions [N, 2] and elements [E, 9]. Node 3 i + j of an element is at
        (xi, eta) = (i - 1, j - 1): xi runs around, eta inwards along a ray.
    """
    around = [2 * n * refinement for n in _AROUND]
    across = 2 * _ACROSS * refinement
    angle = np.concatenate(
        [(side - 0.5 + np.arange(n) / n) * np.pi / 2 for side, n in enumerate(around)]
    )
    ray = np.stack([np.cos(angle), np.sin(angle)], -1)
    outer = 0.5 / np.abs(ray).max(-1)
    inner = radius(modes, angle)
    depth = np.linspace(0, 1, across + 1)[:, None]
    depth = 1 - np.expm1(_GRADING * (1 - depth)) / math.expm1(_GRADING)
    xy = 0.5 + (outer + depth * (inner - outer))[..., None] * ray
    # Exactly on the sides, so that they can be found by comparison.
    xy[0] = np.where(np.isclose(xy[0], np.round(xy[0])), np.round(xy[0]), xy[0])
    number = np.arange(xy[..., 0].size).reshape(xy.shape[:2])
    number = np.concatenate([number, number[:, :1]], 1)
    corners = np.lib.stride_tricks.sliding_window_view(number, (3, 3))[::2, ::2]
    return xy.reshape(-1, 2), corners.swapaxes(-1, -2).reshape(-1, 9)


def solve(
    xy: np.ndarray,
    elements: np.ndarray,
    *,
    traction: tuple[float, float] = (0.0, TRACTION),
    iterations: int = 20,
) -> np.ndarray:
    """Displacement [N, 2] of the cell clamped at y = 0 and pulled at y = 1.

    Newton's method from rest, until the residual at the free nodes is below 1e-9 of
    the load (both as Euclidean norms).

    Raises:
        RuntimeError: if that takes more than `iterations` steps.
    """
    load = _load(xy, elements, traction)
    free = np.flatnonzero(np.repeat(xy[:, 1] > 0, 2))
    u = np.zeros_like(xy)
    error = math.inf
    for _ in range(iterations):
        force, stiffness = assemble(xy, elements, u)
        residual = (load - force).ravel()[free]
        error = np.linalg.norm(residual) / np.linalg.norm(load)
        if error < _TOLERANCE:
            return u
        if not np.isfinite(error):
            break
        matrix = stiffness[free][:, free].tocsc()
        u.reshape(-1)[free] += linalg.splu(matrix).solve(residual)
    raise RuntimeError(
        f"Newton's method did not converge in {iterations} steps: relative residual "
        f"{error:.1e}, allowed {_TOLERANCE:.0e}."
    )


def assemble(
    xy: np.ndarray, elements: np.ndarray, u: np.ndarray
) -> tuple[np.ndarray, sparse.csr_matrix]:
    """Internal forces [N, 2] and their derivative [2 N, 2 N] by displacement u."""
    points, weights = np.polynomial.legendre.leggauss(3)
    gradient, area = _gradient(xy, elements, points)
    area = area * np.outer(weights, weights).ravel()
    deformation = np.eye(2) + np.einsum("epai,eaj->epji", gradient, u[elements])
    stress, tangent = material(deformation)
    # The 4 components of F depend on the 18 displacements of an element.
    spread = np.einsum("epak,ij->epikaj", gradient, np.eye(2))
    spread = spread.reshape(*area.shape, 4, -1)
    weighted = area[..., None, None] * tangent.reshape(*area.shape, 4, 4) @ spread
    blocks = np.einsum("epfm,epfn->emn", spread, weighted, optimize=True)
    forces = np.einsum("ep,epik,epak->eai", area, stress, gradient, optimize=True)
    total = np.zeros_like(xy)
    np.add.at(total, elements, forces)
    unknowns = (2 * elements[..., None] + np.arange(2)).reshape(len(elements), -1)
    rows = np.broadcast_to(unknowns[:, :, None], blocks.shape)
    columns = np.broadcast_to(unknowns[:, None, :], blocks.shape)
    entries = (blocks.ravel(), (rows.ravel(), columns.ravel()))
    return total, sparse.csr_matrix(entries, shape=(xy.size, xy.size))


def material(deformation: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Nominal stress P = dW/dF [*B, 2, 2] and dP/dF [*B, 2, 2, 2, 2] at F.

    With t = tr C = F:F, d = det C = det(F)^2 and W(t, d) of `generate`,
    P = 2 W_t F + W_d h, where h = dd/dF = 2 det F cof F.
    """
    f = deformation
    cofactor = np.empty_like(f)
    cofactor[..., 0, 0], cofactor[..., 1, 1] = f[..., 1, 1], f[..., 0, 0]
    cofactor[..., 0, 1], cofactor[..., 1, 0] = -f[..., 1, 0], -f[..., 0, 1]
    j = f[..., 0, 0] * f[..., 1, 1] - f[..., 0, 1] * f[..., 1, 0]
    t = np.square(f).sum((-2, -1))
    d = j**2
    w_t = C1 + C2 / d
    w_d = C2 - C1 / d**2 - C2 * t / d**2
    w_td = -C2 / d**2
    w_dd = 2 * (C1 + C2 * t) / d**3

    def scaled(factor, array):
        return factor.reshape(factor.shape + (1,) * (array.ndim - factor.ndim)) * array

    h = scaled(2 * j, cofactor)
    stress = scaled(2 * w_t, f) + scaled(w_d, h)
    eye = np.eye(2)
    identity = np.einsum("ik,jl->ijkl", eye, eye)
    turn = np.array([[0.0, 1.0], [-1.0, 0.0]])
    cofactor_by_f = np.einsum("ik,jl->ijkl", turn, turn)
    mixed = np.einsum("...ij,...kl->...ijkl", f, h)
    mixed = mixed + np.einsum("...ij,...kl->...ijkl", h, f)
    h_by_f = np.einsum("...ij,...kl->...ijkl", 2 * cofactor, cofactor)
    h_by_f = h_by_f + np.multiply.outer(2 * j, cofactor_by_f)
    tangent = np.multiply.outer(2 * w_t, identity) + scaled(2 * w_td, mixed)
    tangent += scaled(w_d, h_by_f)
    tangent += scaled(w_dd, np.einsum("...ij,...kl->...ijkl", h, h))
    return stress, tangent


def von_mises(xy: np.ndarray, elements: np.ndarray, u: np.ndarray) -> np.ndarray:
    """Von Mises stress [N] at the nodes, the mean over the elements of a node.

    sqrt(s_xx^2 - s_xx s_yy + s_yy^2 + 3 s_xy^2) with the true stress s = P F^T (the
    volume does not change and s_zz = 0).
    """
    gradient, _ = _gradient(xy, elements, np.array([-1.0, 0.0, 1.0]))
    deformation = np.eye(2) + np.einsum("epai,eaj->epji", gradient, u[elements])
    s = np.einsum("epik,epjk->epij", material(deformation)[0], deformation)
    xx, yy, shear = s[..., 0, 0], s[..., 1, 1], s[..., 0, 1]
    values = np.sqrt(xx**2 - xx * yy + yy**2 + 3 * shear**2)
    total = np.bincount(elements.ravel(), values.ravel(), len(xy))
    return total / np.bincount(elements.ravel(), minlength=len(xy))


def _array(file: Path, shape: tuple[int | None, ...]) -> np.ndarray:
    """A finite float32 array from a file; None in the shape is any size."""
    if not file.exists():
        raise FileNotFoundError(f"{file} is missing.")
    array = np.load(file, allow_pickle=False)
    fits = array.ndim == len(shape) and all(
        wanted in (None, found)
        for wanted, found in zip(shape, array.shape, strict=True)
    )
    if not fits or array.dtype.kind != "f":
        wanted = ", ".join("S" if size is None else str(size) for size in shape)
        raise ValueError(
            f"{file} has shape {array.shape} and type {array.dtype}, expected "
            f"({wanted}) and a floating-point type."
        )
    array = array.astype(np.float32)
    if not np.isfinite(array).all():
        raise ValueError(f"{file} has values that are not finite.")
    return array


def _load(xy, elements, traction) -> np.ndarray:
    """Forces [N, 2] of a dead load on the top side, outer sides of elements."""
    edges = elements[:, ::3]
    edges = edges[(xy[edges, 1] == 1).all(-1)]
    points, weights = np.polynomial.legendre.leggauss(3)
    values, slopes = _quadratic(points)
    lengths = np.linalg.norm(np.einsum("pa,eai->epi", slopes, xy[edges]), axis=-1)
    shares = np.einsum("ep,p,pa->ea", lengths, weights, values)
    total = np.zeros_like(xy)
    np.add.at(total, edges, shares[..., None] * np.asarray(traction))
    return total


def _gradient(xy, elements, points) -> tuple[np.ndarray, np.ndarray]:
    """dN_a/dx [E, p^2, 9, 2] at a tensor grid of p reference points, and det J."""
    values, slopes = _quadratic(points)
    by_xi = np.einsum("pa,qb->pqab", slopes, values)
    by_eta = np.einsum("pa,qb->pqab", values, slopes)
    reference = np.stack([by_xi, by_eta], -1).reshape(len(points) ** 2, 9, 2)
    jacobian = np.einsum("eai,pak->epik", xy[elements], reference)
    gradient = np.einsum("pak,epki->epai", reference, np.linalg.inv(jacobian))
    return gradient, np.linalg.det(jacobian)


def _quadratic(x) -> tuple[np.ndarray, np.ndarray]:
    """Lagrange polynomials of nodes -1, 0, 1 and derivatives, [p, 3] each."""
    values = np.stack([x * (x - 1) / 2, 1 - x**2, x * (x + 1) / 2], -1)
    return values, np.stack([x - 0.5, -2 * x, x + 0.5], -1)
