"""Solver of `flaxmix.data.elasticity`: ring mesh, finite elements, Newton's method."""

import math
from typing import Any

import numpy as np
import skfem
from skfem.helpers import ddot, dot

NODES = 972
"""Nodes of every mesh: 54 x 4 elements of 9 nodes, shared nodes counted once."""

C1, C2 = 1.863e5, 9.79e3
"""Rivlin-Saunders constants, in the (unnamed) unit of the stress."""

TRACTION = 100.0
"""Pull on the top side, force per undeformed length."""

_AROUND, _ACROSS = (13, 14, 13, 14), 4
_GRADING = 1.0
_RADII = 42
_TOLERANCE = 1e-9
_ELEMENT = skfem.ElementVector(skfem.ElementQuad2())
# Three points a direction.
_DEGREE = 5
_FORCE = skfem.LinearForm(lambda v, w: ddot(w.stress, v.grad))
_STIFFNESS = skfem.BilinearForm(
    lambda u, v, w: np.einsum("ijkl...,ij...,kl...", w.tangent, v.grad, u.grad)
)


def sample(seed: int, index: int, refinement: int = 1) -> dict[str, np.ndarray]:
    """One solved cell: xy [N, 2], sigma [N], radii [42], float32.

    N is `NODES` for refinement 1. The hole is the same for every refinement.

    Raises:
        RuntimeError: if Newton's method does not converge.
    """
    random = np.random.default_rng((seed, index))
    modes = random.standard_normal((2, 5))
    cell, rows = mesh(modes, refinement)
    chosen = rows[random.permutation(len(rows))]
    radii = radius(modes, np.linspace(0, 2 * np.pi, _RADII))
    return {
        "xy": cell.p.T[chosen].astype(np.float32),
        "sigma": von_mises(cell, solve(cell))[chosen].astype(np.float32),
        "radii": radii.astype(np.float32),
    }


def radius(modes: np.ndarray, angle: np.ndarray) -> np.ndarray:
    """Hole radius at angles [n], for (a_k, b_k) = modes [2, 5] of `generate`."""
    k = np.arange(1, modes.shape[1] + 1)
    scale = 4 / np.sqrt(np.pi * (k**2 + 9))
    waves = np.stack([np.cos(k * angle[:, None]), np.sin(k * angle[:, None])])
    z = np.einsum("fk,fnk,k->n", modes, waves, scale)
    return 0.2 + 0.2 / (1 + np.exp(z))


def mesh(modes: np.ndarray, refinement: int = 1) -> tuple[skfem.MeshQuad2, np.ndarray]:
    """Ring of curved 9-node elements between the hole and the square.

    Rays go from the centre at equal angles within each side of the square, whose
    corners are element corners. Along a ray the nodes are finer near the hole.

    Returns:
        The mesh with N nodes, and their numbers [N] row by row: a row is once
        around, the first on the square and the last on the hole.
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
    corners, rows = _topology(across + 1, len(angle))
    places = np.empty((2, rows.size))
    places[:, rows] = xy.reshape(-1, 2).T
    return skfem.MeshQuad2(places, corners), rows


def solve(
    mesh: skfem.MeshQuad2,
    *,
    traction: tuple[float, float] = (0.0, TRACTION),
    iterations: int = 20,
) -> np.ndarray:
    """Displacement [2 N] of the cell clamped at y = 0 and pulled at y = 1.

    Newton's method from rest, until the residual at the free nodes is below 1e-9 of
    the load (both as Euclidean norms). Node n moves by (u[2 n], u[2 n + 1]).

    Raises:
        RuntimeError: if that takes more than `iterations` steps.
    """
    basis = skfem.Basis(mesh, _ELEMENT, intorder=_DEGREE)
    top = basis.boundary(lambda x: x[1] == 1, intorder=_DEGREE)
    load = skfem.LinearForm(lambda v, _: dot(np.array(traction), v)).assemble(top)
    free = basis.complement_dofs(basis.get_dofs(lambda x: x[1] == 0))
    u = basis.zeros()
    error = math.inf
    for _ in range(iterations):
        stress, tangent = material(_deformation(basis, u))
        residual = load - _FORCE.assemble(basis, stress=stress)
        error = np.linalg.norm(residual[free]) / np.linalg.norm(load)
        if error < _TOLERANCE:
            return u
        if not np.isfinite(error):
            break
        stiffness = _STIFFNESS.assemble(basis, tangent=tangent)
        u += skfem.solve(*skfem.condense(stiffness, residual, I=free))
    raise RuntimeError(
        f"Newton's method did not converge in {iterations} steps: relative residual "
        f"{error:.1e}, allowed {_TOLERANCE:.0e}."
    )


def von_mises(mesh: skfem.MeshQuad2, u: np.ndarray) -> np.ndarray:
    """Von Mises stress [N] at the nodes, the mean over the elements of a node.

    sqrt(s_xx^2 - s_xx s_yy + s_yy^2 + 3 s_xy^2) with the true stress s = P F^T (the
    volume does not change and s_zz = 0).
    """
    places = skfem.ElementQuad2.doflocs.T
    nodes = skfem.Basis(mesh, _ELEMENT, quadrature=(places, np.ones(places.shape[1])))
    f = _deformation(nodes, u)
    s = np.einsum("ik...,jk...->ij...", material(f)[0], f)
    values = np.sqrt(s[0, 0] ** 2 - s[0, 0] * s[1, 1] + s[1, 1] ** 2 + 3 * s[0, 1] ** 2)
    numbers = mesh.dofs.element_dofs.T.ravel()
    return np.bincount(numbers, values.ravel()) / np.bincount(numbers)


def material(f: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Nominal stress P = dW/dF [2, 2, *B] and dP/dF [2, 2, 2, 2, *B] at F [2, 2, *B].

    With t = tr C = F:F, d = det C = det(F)^2 and W(t, d) of `generate`,
    P = 2 W_t F + W_d h, where h = dd/dF = 2 det F cof F.
    """
    cofactor = np.array([[f[1, 1], -f[1, 0]], [-f[0, 1], f[0, 0]]])
    j = f[0, 0] * f[1, 1] - f[0, 1] * f[1, 0]
    t = ddot(f, f)
    d = j**2
    w_t = C1 + C2 / d
    w_d = C2 - (C1 + C2 * t) / d**2
    w_td = -C2 / d**2
    w_dd = 2 * (C1 + C2 * t) / d**3
    h = 2 * j * cofactor
    turn = np.array([[0.0, 1.0], [-1.0, 0.0]])
    f_by_f = np.einsum("ik,jl->ijkl", np.eye(2), np.eye(2))
    cofactor_by_f = np.einsum("ik,jl->ijkl", turn, turn)
    h_by_f = 2 * _outer(cofactor, cofactor) + np.multiply.outer(cofactor_by_f, 2 * j)
    tangent = (
        np.multiply.outer(f_by_f, 2 * w_t)
        + 2 * w_td * (_outer(f, h) + _outer(h, f))
        + w_d * h_by_f
        + w_dd * _outer(h, h)
    )
    return 2 * w_t * f + w_d * h, tangent


def _deformation(basis: skfem.Basis, u: np.ndarray) -> np.ndarray:
    """F = 1 + du/dx [2, 2, elements, points]."""
    displacement: Any = basis.interpolate(u)
    return np.eye(2)[:, :, None, None] + displacement.grad


def _outer(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.einsum("ij...,kl...->ijkl...", a, b)


def _topology(rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Corners [4, elements] of a ring mesh, and its node numbers row by row.

    Nodes are numbered as scikit-fem does: corners, middles of sides, then middles of
    elements. Within an element they are in the order of `skfem.ElementQuad2`.
    """
    place = np.arange(rows * columns).reshape(rows, columns)
    place = np.concatenate([place, place[:, :1]], 1)
    windows = np.lib.stride_tricks.sliding_window_view(place, (3, 3))[::2, ::2]
    elements = windows.reshape(-1, 9).T[[0, 2, 8, 6, 1, 5, 7, 3, 4]]
    _, corners = np.unique(elements[:4], return_inverse=True)
    corners = corners.reshape(4, -1)
    straight = skfem.MeshQuad(np.zeros((2, corners.max() + 1)), corners)
    numbers = np.empty(rows * columns, int)
    numbers[elements] = skfem.Dofs(straight, skfem.ElementQuad2()).element_dofs
    return corners, numbers
