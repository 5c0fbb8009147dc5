"""Elasticity in NumPy float64 with loops, from the weak form; no scikit-fem.

For all v: sum over elements of the integral of P(F) : dv/dx = integral of traction . v
over the top, with 9-node elements and 3 x 3 Gauss points. xy [N, 2] are the nodes
and elements [E, 9] their numbers, at `PLACES` in the unit square.
"""

import numpy as np

PLACES = np.array(
    [(0, 0), (1, 0), (1, 1), (0, 1), (0.5, 0), (1, 0.5), (0.5, 1), (0, 0.5), (0.5, 0.5)]
)
GAUSS = [
    ((1 - np.sqrt(0.6)) / 2, 5 / 18),
    (1 / 2, 8 / 18),
    ((1 + np.sqrt(0.6)) / 2, 5 / 18),
]


def quadratic(x, node):
    """Parabola that is 1 at `node` of (0, 1/2, 1), 0 at the others; and its slope."""
    if node == 0.5:
        return 4 * x * (1 - x), 4 - 8 * x
    return (2 * x - 1) * (x - 1 + node), 4 * x - 3 + 2 * node


def slopes(place, corners):
    """dN_a/dx [9, 2] at a place of an element with nodes [9, 2], and det dx/dplace."""
    reference = np.empty((9, 2))
    for a, (x, y) in enumerate(PLACES):
        (along, rise), (across, climb) = quadratic(place[0], x), quadratic(place[1], y)
        reference[a] = rise * across, along * climb
    jacobian = corners.T @ reference
    return reference @ np.linalg.inv(jacobian), np.linalg.det(jacobian)


def true_stress(f, c1, c2):
    """s = 2 C1 (B - B_33) - 2 C2 (B^-1 - 1 / B_33) with B = F F^T, B_33 = 1 / det B."""
    b = f @ f.T
    thick = 1 / np.linalg.det(b)
    eye = np.eye(2)
    return 2 * c1 * (b - thick * eye) - 2 * c2 * (np.linalg.inv(b) - eye / thick)


def forces(xy, elements, u, c1, c2):
    """Internal forces [N, 2] at displacement u [N, 2]."""
    total = np.zeros_like(xy)
    for nodes in elements:
        for x, wx in GAUSS:
            for y, wy in GAUSS:
                slope, area = slopes((x, y), xy[nodes])
                f = np.eye(2) + u[nodes].T @ slope
                nominal = true_stress(f, c1, c2) @ np.linalg.inv(f).T
                total[nodes] += wx * wy * area * slope @ nominal.T
    return total


def load(xy, elements, traction):
    """Forces [N, 2] of the traction on the sides at y = 1."""
    total = np.zeros_like(xy)
    for nodes in elements:
        for side in ((0, 4, 1), (1, 5, 2), (3, 6, 2), (0, 7, 3)):
            side = nodes[list(side)]
            if (xy[side, 1] == 1).all():
                for x, weight in GAUSS:
                    shape = np.array([quadratic(x, node) for node in (0, 0.5, 1)])
                    length = np.linalg.norm(shape[:, 1] @ xy[side])
                    total[side] += weight * length * np.outer(shape[:, 0], traction)
    return total


def von_mises(xy, elements, u, c1, c2):
    """Von Mises stress [N]: the mean over the elements of a node."""
    values = [[] for _ in xy]
    for nodes in elements:
        for node, place in zip(nodes, PLACES, strict=True):
            slope, _ = slopes(place, xy[nodes])
            stress = np.zeros((3, 3))
            stress[:2, :2] = true_stress(np.eye(2) + u[nodes].T @ slope, c1, c2)
            deviator = stress - np.trace(stress) / 3 * np.eye(3)
            values[node].append(np.sqrt(1.5 * np.square(deviator).sum()))
    return np.array([np.mean(value) for value in values])
