"""Elasticity: the solver against loops and mechanics, the files against each other."""

import functools
import math

import elasticity_oracle as oracle
import numpy as np
import pytest
import skfem
from scipy import integrate

from flaxmix.data import cache, elasticity, elasticity_solver as solver, workers
from flaxmix.data.elasticity_solver import C1, C2

ROUNDING = 1e-9
"""Relative; forces of 1e2 come from stresses of C1 = 2e5 that cancel, in float64."""

MODULUS = 2 * (C1 + C2)
"""Shear modulus at small strain."""


def modes(index):
    return np.random.default_rng(index).standard_normal((2, 5))


def arrays(mesh):
    """Nodes [N, 2] and elements [E, 9] for the oracle."""
    return mesh.p.T.copy(), mesh.dofs.element_dofs.T


def energy(f):
    """Energy of the solid, from the invariants of the 3-D deformation."""
    full = np.eye(3)
    full[:2, :2] = f
    c = full.T @ full
    c[2, 2] = 1 / np.linalg.det(c[:2, :2])
    assert np.linalg.det(c) == pytest.approx(1)
    first = np.trace(c)
    second = (first**2 - np.trace(c @ c)) / 2
    return C1 * (first - 3) + C2 * (second - 3)


def slope(function, f, step=1e-5):
    """Central differences of function(f) by the four components of f, last."""
    result = np.empty((*np.shape(function(f)), 2, 2))
    for i, j in np.ndindex(2, 2):
        change = np.zeros((2, 2))
        change[i, j] = step
        difference = function(f + change) - function(f - change)
        result[..., i, j] = difference / (2 * step)
    return result


def test_stress_and_tangent_are_slopes_of_the_energy():
    random = np.random.default_rng(0)
    deformation = np.eye(2)[..., None] + 0.2 * random.standard_normal((2, 2, 3))
    stress, tangent = solver.material(deformation)
    for i in range(3):
        f, p, a = deformation[..., i], stress[..., i], tangent[..., i]
        error = 1e-7 * abs(p).max()
        np.testing.assert_allclose(slope(energy, f), p, rtol=0, atol=error)
        by_f = slope(lambda f: solver.material(f)[0], f)
        np.testing.assert_allclose(by_f, a, rtol=0, atol=1e-7 * abs(a).max())


def test_stress_turns_with_the_body():
    f = np.array([[1.2, 0.3], [-0.1, 0.9]])
    turn = np.array([[0.6, -0.8], [0.8, 0.6]])
    actual, _ = solver.material(turn @ f)
    np.testing.assert_allclose(actual, turn @ solver.material(f)[0], rtol=ROUNDING)


def test_small_strain_is_incompressible_plane_stress():
    """s = 2 G (e + tr(e) 1): Poisson's ratio 1/2, Young's modulus 3 G."""
    stress, tangent = solver.material(np.eye(2))
    np.testing.assert_allclose(stress, 0, atol=ROUNDING * MODULUS)
    d = np.eye(2)
    expected = MODULUS * (
        np.einsum("ik,jl->ijkl", d, d)
        + np.einsum("il,jk->ijkl", d, d)
        + 2 * np.einsum("ij,kl->ijkl", d, d)
    )
    np.testing.assert_allclose(tangent, expected, atol=ROUNDING * MODULUS)
    strain = np.diag([-0.5, 1.0])
    pull = np.einsum("ijkl,kl->ij", tangent, strain)
    expected = np.diag([0, 3 * MODULUS])
    np.testing.assert_allclose(pull, expected, atol=ROUNDING * MODULUS)


@pytest.mark.parametrize("refinement, nodes", [(1, solver.NODES), (2, 216 * 17)])
def test_mesh(refinement, nodes):
    around = 108 * refinement
    for index in range(5):
        mesh, rows = solver.mesh(modes(index), refinement)
        xy, elements = arrays(mesh)
        assert xy.shape == (nodes, 2)
        np.testing.assert_array_equal(np.sort(rows), np.arange(nodes))
        np.testing.assert_array_equal(np.unique(elements), np.arange(nodes))
        assert len(np.unique(xy.round(9), axis=0)) == nodes
        assert (xy >= 0).all() and (xy <= 1).all()
        square, hole = xy[rows[:around]], xy[rows[-around:]] - 0.5
        assert ((square == 0) | (square == 1)).any(1).all()
        angle = np.arctan2(hole[:, 1], hole[:, 0])
        expected = solver.radius(modes(index), angle)
        np.testing.assert_allclose(np.hypot(*hole.T), expected, rtol=ROUNDING)
        corners = xy[np.unique(elements[:, :4])]
        for corner in np.ndindex(2, 2):
            assert (corners == corner).all(1).any()
        places = np.stack(np.meshgrid(*2 * [np.linspace(0, 1, 5)])).reshape(2, -1)
        area = skfem.Basis(mesh, skfem.ElementQuad2()).mapping.detDF(places)
        assert area.min() > 0


def test_mesh_fills_the_square_around_the_hole():
    shape = modes(0)
    around = integrate.quad_vec(
        lambda t: solver.radius(shape, np.array([t]))[0] ** 2 / 2, 0, 2 * np.pi
    )
    expected = 1 - around[0]
    errors = []
    for refinement in (1, 2):
        mesh, _ = solver.mesh(shape, refinement)
        area = skfem.Basis(mesh, skfem.ElementQuad2()).dx.sum()
        errors.append(abs(area - expected))
    assert errors[0] < 1e-5
    # Curved quadratic sides enclose an area of fourth-order accuracy.
    assert errors[1] < errors[0] / 10


@pytest.mark.parametrize("scale", [1, 100])
def test_solution_is_in_balance(scale):
    """By the oracle's forces, at strains of 3e-4 and 3e-2."""
    mesh, _ = solver.mesh(modes(3))
    xy, elements = arrays(mesh)
    traction = np.array([30.0, 100.0]) * scale
    # Five steps are enough as long as the stiffness is the slope of the forces.
    flat = solver.solve(mesh, traction=tuple(traction), iterations=6)
    u = flat.reshape(-1, 2)
    force = oracle.forces(xy, elements, u, C1, C2)
    load = oracle.load(xy, elements, traction)
    np.testing.assert_allclose(load.sum(0), traction, rtol=ROUNDING)
    bottom, top = xy[:, 1] == 0, xy[:, 1] == 1
    assert bottom.sum() == top.sum() == 29
    assert not load[~top].any() and not u[bottom].any()
    residual = (force - load)[~bottom]
    assert np.linalg.norm(residual) < 2 * ROUNDING * np.linalg.norm(load)
    np.testing.assert_allclose(force[bottom].sum(0), -traction, rtol=10 * ROUNDING)
    # Moments balance about the deformed positions, where the loads act.
    place = xy + u
    moments = place[:, 0] * force[:, 1] - place[:, 1] * force[:, 0]
    assert abs(moments.sum()) < 10 * ROUNDING * np.linalg.norm(traction)
    expected = oracle.von_mises(xy, elements, u, C1, C2)
    actual = solver.von_mises(mesh, flat)
    np.testing.assert_allclose(actual, expected, rtol=ROUNDING)


def test_uniform_deformation_has_its_stress_everywhere():
    mesh, _ = solver.mesh(modes(0))
    f = np.array([[1.1, 0.2], [-0.1, 0.95]])
    stress = np.zeros((3, 3))
    stress[:2, :2] = solver.material(f)[0] @ f.T
    deviator = stress - np.trace(stress) / 3 * np.eye(3)
    expected = np.sqrt(1.5 * np.square(deviator).sum())
    actual = solver.von_mises(mesh, (mesh.p.T @ (f - np.eye(2)).T).ravel())
    np.testing.assert_allclose(actual, expected, rtol=ROUNDING)


def test_refinement_converges():
    """Fourth-order stress at the hole until the clamped corners' error is reached."""
    lifts, holes = [], []
    for refinement in (1, 2, 4):
        mesh, rows = solver.mesh(modes(0), refinement)
        u = solver.solve(mesh)
        lifts.append(u[1::2][mesh.p[1] == 1].mean())
        stress = solver.von_mises(mesh, u)[rows]
        holes.append(stress[-108 * refinement :: refinement])
    # The corners of the clamp are singular: the energy converges slowly from below.
    assert lifts[0] < lifts[1] < lifts[2]
    assert lifts[2] - lifts[0] < 0.02 * lifts[2]
    assert lifts[2] - lifts[1] < 0.6 * (lifts[1] - lifts[0])
    coarse, fine = (np.linalg.norm(h - holes[2]) for h in holes[:2])
    assert coarse < 0.03 * np.linalg.norm(holes[2])
    assert fine < coarse / 4


def test_radius_follows_its_law():
    """Variance of z: sum of 16 / (pi (k^2 + 9)) over k = 1..5, equal at all angles."""
    random = np.random.default_rng(0)
    angle = np.linspace(0, 2 * np.pi, 7)
    count = 4000
    radii = np.stack(
        [solver.radius(random.standard_normal((2, 5)), angle) for _ in range(count)]
    )
    assert radii.min() > 0.2 and radii.max() < 0.4
    np.testing.assert_allclose(radii[:, 0], radii[:, -1], rtol=ROUNDING)
    z = np.log(0.2 / (radii - 0.2) - 1)
    expected = sum(16 / (np.pi * (k**2 + 9)) for k in range(1, 6))
    # Four standard errors of a variance and of a mean.
    np.testing.assert_allclose(z.var(0), expected, rtol=4 * np.sqrt(2 / count))
    np.testing.assert_allclose(z.mean(0), 0, atol=4 * np.sqrt(expected / count))


def test_sample():
    one, again, other = (solver.sample(*key) for key in ((0, 1), (0, 1), (1, 1)))
    for key in one:
        assert one[key].dtype == np.float32
        np.testing.assert_array_equal(one[key], again[key])
        assert (one[key] != other[key]).any()
    assert (one["sigma"] > 0).all()
    # In random order: neighbours in number are not neighbours in space.
    steps = np.linalg.norm(np.diff(one["xy"], axis=0), axis=-1)
    assert np.median(steps) > 0.3


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("elasticity") / "five"
    elasticity.generate(folder, samples=5, processes=2, progress=False)
    return folder


def test_files_are_in_the_published_format(generated):
    names = ["XY", "rr", "sigma"]
    files = [f"Random_UnitCell_{name}_10.npy" for name in names]
    expected = sorted([*files, cache.RECORD])
    assert sorted(path.name for path in generated.iterdir()) == expected
    xy, radii, sigma = (np.load(generated / file) for file in files)
    assert (xy.shape, radii.shape, sigma.shape) == ((972, 2, 5), (42, 5), (972, 5))
    assert (radii[0] == radii[-1]).all()
    distance = np.linalg.norm(xy - 0.5, axis=1).min(0)
    np.testing.assert_allclose(distance, radii.min(0), rtol=0.01)
    assert 150 < sigma.mean() < 250
    for i in range(5):
        solved = solver.sample(0, i)
        np.testing.assert_array_equal(xy[..., i], solved["xy"])
        np.testing.assert_array_equal(sigma[..., i], solved["sigma"])


def test_generation_is_reproducible(generated, tmp_path):
    three = elasticity.generate(tmp_path / "3", samples=3, processes=1, progress=False)
    five = elasticity.generate(tmp_path / "5", samples=5, processes=1, progress=False)
    for path in generated.iterdir():
        assert path.read_bytes() == (five / path.name).read_bytes()
    for few, many in zip(elasticity.read(three), elasticity.read(five), strict=True):
        np.testing.assert_array_equal(few, many[:3])


def test_generated_and_published_files_load_alike(generated, tmp_path, monkeypatch):
    xy, sigma = elasticity.read(generated)
    np.save(
        tmp_path / "Random_UnitCell_XY_10.npy",
        np.stack(list(xy.astype(np.float64)), -1),
    )
    np.save(
        tmp_path / "Random_UnitCell_sigma_10.npy",
        np.asfortranarray(np.stack(list(sigma[..., 0].astype(np.float64)), -1)),
    )
    monkeypatch.setenv("FLAXMIX_CACHE", str(tmp_path / "cache"))
    published = elasticity.load(tmp_path, train=3, test=1)
    made = elasticity.load(train=3, test=2, processes=2)
    monkeypatch.setattr(workers, "compute", None)
    again = elasticity.load(train=3, test=2)
    assert made.fingerprint() == again.fingerprint() != published.fingerprint()
    assert published.channels == made.channels == (2, 1)
    assert (len(published.train), len(published.test)) == (3, 1)
    for split in ("train", "test"):
        for key in ("x", "y"):
            theirs = getattr(getattr(published, split), key)
            ours = getattr(getattr(made, split), key)
            assert theirs.dtype == np.float32
            np.testing.assert_array_equal(theirs, ours[-len(theirs) :])
    np.testing.assert_array_equal(made.train.x, xy[:3])
    np.testing.assert_array_equal(made.test.y, sigma[3:])
    encoded = made.targets.encode(made.train.y)
    np.testing.assert_allclose([encoded.mean(), encoded.std()], [0, 1], atol=1e-3)
    assert made.grid is None and made.coordinates == (0, 1)


@pytest.mark.parametrize("pull, iterations", [(100.0, 1), (math.nan, 20)])
def test_solver_that_does_not_converge(pull, iterations):
    mesh, _ = solver.mesh(modes(0))
    message = f"did not converge in {iterations} steps: relative residual"
    with pytest.raises(RuntimeError, match=message):
        solver.solve(mesh, traction=(0.0, pull), iterations=iterations)


@pytest.mark.parametrize("samples, seed", [(0, 0), (1, -1)])
def test_bad_arguments(tmp_path, samples, seed):
    with pytest.raises(ValueError, match=f"expected, got {samples}, {seed}"):
        elasticity.generate(tmp_path / "set", samples=samples, seed=seed)
    assert not list(tmp_path.iterdir())


def test_bad_counts(generated):
    with pytest.raises(ValueError, match="train and test must be .* got 0 and 1"):
        elasticity.load(generated, train=0, test=1)
    with pytest.raises(ValueError, match=r"4 \+ 2 samples .* has 5"):
        elasticity.load(generated, train=4, test=2)


@pytest.mark.parametrize(
    "shape, kind, message",
    [
        ((971, 2, 3), float, r"XY_10.npy has shape \(971, 2, 3\).*\(972, 2, S\)"),
        ((3, 972, 2), float, r"has shape \(3, 972, 2\)"),
        ((972, 2), float, r"has shape \(972, 2\)"),
        ((972, 2, 3), int, "type int64"),
    ],
)
def test_bad_positions(tmp_path, shape, kind, message):
    np.save(tmp_path / "Random_UnitCell_XY_10.npy", np.zeros(shape, kind))
    with pytest.raises(ValueError, match=message):
        elasticity.read(tmp_path)


def test_bad_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="Random_UnitCell_XY_10.npy is missing"):
        elasticity.read(tmp_path)
    save = functools.partial(np.save, tmp_path / "Random_UnitCell_sigma_10.npy")
    np.save(tmp_path / "Random_UnitCell_XY_10.npy", np.zeros((972, 2, 3)))
    with pytest.raises(FileNotFoundError, match="sigma_10.npy is missing"):
        elasticity.read(tmp_path)
    save(np.zeros((972, 4)))
    with pytest.raises(ValueError, match=r"\(972, 4\).*expected \(972, 3\)"):
        elasticity.read(tmp_path)
    sigma = np.zeros((972, 3))
    sigma[5, 1] = np.inf
    save(sigma)
    with pytest.raises(ValueError, match="sigma_10.npy has values that are not finite"):
        elasticity.read(tmp_path)
    save(np.array([[{}]]), allow_pickle=True)
    with pytest.raises(ValueError, match="allow_pickle=False"):
        elasticity.read(tmp_path)
