"""Elasticity: the solver against mechanics, the files against each other."""

import functools

import numpy as np
import pytest
import skfem
from scipy import integrate
from skfem.helpers import ddot, eye, sym_grad, trace

from flaxmix.data import cache, elasticity

ROUNDING = 1e-9
"""Relative; forces of 1e2 come from stresses of C1 = 2e5 that cancel, in float64."""

SINGLE = 1e-6
"""Relative rounding of float32 results."""

MODULUS = 2 * (elasticity.C1 + elasticity.C2)
"""Shear modulus at small strain."""


def modes(index):
    return np.random.default_rng(index).standard_normal((2, 5))


def energy(f):
    """Energy of the solid, from the invariants of the 3-D deformation."""
    full = np.eye(3)
    full[:2, :2] = f
    c = full.T @ full
    c[2, 2] = 1 / np.linalg.det(c[:2, :2])
    assert np.linalg.det(c) == pytest.approx(1)
    first = np.trace(c)
    second = (first**2 - np.trace(c @ c)) / 2
    return elasticity.C1 * (first - 3) + elasticity.C2 * (second - 3)


def slope(function, f, step=1e-5):
    """Central differences of function(f) by the four components of f."""
    result = np.empty((2, 2, *np.shape(function(f))))
    for i, j in np.ndindex(2, 2):
        change = np.zeros((2, 2))
        change[i, j] = step
        result[i, j] = (function(f + change) - function(f - change)) / (2 * step)
    return result


def test_stress_and_tangent_are_slopes_of_the_energy():
    random = np.random.default_rng(0)
    deformation = np.eye(2) + 0.2 * random.standard_normal((3, 2, 2))
    stress, tangent = elasticity.material(deformation)
    for f, p, a in zip(deformation, stress, tangent, strict=True):
        error = 1e-7 * abs(p).max()
        np.testing.assert_allclose(slope(energy, f), p, rtol=0, atol=error)
        by_f = slope(lambda f: elasticity.material(f)[0], f)
        by_f = np.moveaxis(by_f, (0, 1), (2, 3))
        np.testing.assert_allclose(by_f, a, rtol=0, atol=1e-7 * abs(a).max())


def test_stress_turns_with_the_body():
    f = np.array([[1.2, 0.3], [-0.1, 0.9]])
    turn = np.array([[0.6, -0.8], [0.8, 0.6]])
    actual, _ = elasticity.material(turn @ f)
    np.testing.assert_allclose(actual, turn @ elasticity.material(f)[0], rtol=ROUNDING)


def test_small_strain_is_incompressible_plane_stress():
    """s = 2 G (e + tr(e) 1): Poisson's ratio 1/2, Young's modulus 3 G."""
    stress, tangent = elasticity.material(np.eye(2))
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


@pytest.mark.parametrize("refinement, nodes", [(1, elasticity.NODES), (2, 216 * 17)])
def test_mesh(refinement, nodes):
    for index in range(5):
        xy, elements = elasticity.mesh(modes(index), refinement)
        assert xy.shape == (nodes, 2)
        assert len(np.unique(elements)) == nodes
        assert len(np.unique(xy.round(9), axis=0)) == nodes
        assert (xy >= 0).all() and (xy <= 1).all()
        corners = xy[np.unique(elements[:, [0, 2, 6, 8]])]
        for corner in np.ndindex(2, 2):
            assert (corners == corner).all(1).any()
        _, area = elasticity._gradient(xy, elements, np.linspace(-1, 1, 5))
        assert area.min() > 0


def test_mesh_fills_the_square_around_the_hole():
    shape = modes(0)
    around = integrate.quad_vec(
        lambda t: elasticity.radius(shape, np.array([t]))[0] ** 2 / 2, 0, 2 * np.pi
    )
    expected = 1 - around[0]
    points, weights = np.polynomial.legendre.leggauss(3)
    errors = []
    for refinement in (1, 2):
        _, area = elasticity._gradient(*elasticity.mesh(shape, refinement), points)
        total = (area @ np.outer(weights, weights).ravel()).sum()
        errors.append(abs(total - expected))
    assert errors[0] < 1e-5
    # Curved quadratic sides enclose an area of fourth-order accuracy.
    assert errors[1] < errors[0] / 10


def test_patch():
    """A uniform deformation of the curved mesh is in balance, with its stress."""
    xy, elements = elasticity.mesh(modes(0))
    f = np.array([[1.1, 0.2], [-0.1, 0.95]])
    u = xy @ (f - np.eye(2)).T
    force, _ = elasticity.assemble(xy, elements, u)
    inside = np.ones(len(xy), bool)
    inside[: len(np.unique(elements[:54, ::3]))] = False
    inside[-108:] = False
    scale = abs(force).max()
    np.testing.assert_allclose(force[inside], 0, atol=ROUNDING * scale)
    assert abs(force[~inside]).max() == scale
    stress = np.zeros((3, 3))
    stress[:2, :2] = elasticity.material(f)[0] @ f.T
    deviator = stress - np.trace(stress) / 3 * np.eye(3)
    expected = np.sqrt(1.5 * np.square(deviator).sum())
    actual = elasticity.von_mises(xy, elements, u)
    np.testing.assert_allclose(actual, expected, rtol=ROUNDING)


def test_stiffness_is_the_slope_of_the_force():
    xy, elements = elasticity.mesh(modes(0))
    random = np.random.default_rng(1)
    u = 0.002 * random.standard_normal(xy.shape)
    direction = random.standard_normal(xy.shape)
    _, stiffness = elasticity.assemble(xy, elements, u)
    step = 1e-6
    after, before = (
        elasticity.assemble(xy, elements, u + sign * step * direction)[0]
        for sign in (1, -1)
    )
    expected = ((after - before) / (2 * step)).ravel()
    actual = stiffness @ direction.ravel()
    np.testing.assert_allclose(actual, expected, atol=1e-5 * abs(expected).max())
    assert abs(stiffness - stiffness.T).max() < ROUNDING * abs(stiffness).max()


def test_reaction_balances_the_load():
    xy, elements = elasticity.mesh(modes(3))
    u = elasticity.solve(xy, elements, traction=(30.0, 100.0))
    force, _ = elasticity.assemble(xy, elements, u)
    bottom, top = xy[:, 1] == 0, xy[:, 1] == 1
    assert bottom.sum() == top.sum() == 29
    assert not u[bottom].any()
    np.testing.assert_allclose(force[bottom].sum(0), [-30, -100], rtol=ROUNDING)
    np.testing.assert_allclose(force[top].sum(0), [30, 100], rtol=ROUNDING)
    free = force[~(bottom | top)]
    assert np.linalg.norm(free) < 100 * ROUNDING
    # Moments balance about the deformed positions, where the loads act.
    place = xy + u
    moments = place[:, 0] * force[:, 1] - place[:, 1] * force[:, 0]
    assert abs(moments.sum()) < 100 * ROUNDING


def linear(xy, elements):
    """Linear elasticity by scikit-fem, on the same curved elements."""
    corners, inverse = np.unique(elements[:, [0, 6, 8, 2]], return_inverse=True)
    mesh = skfem.MeshQuad(xy[corners].T, inverse.reshape(-1, 4).T)
    numbers = skfem.Basis(mesh, skfem.ElementQuad2()).element_dofs
    place = np.empty((2, len(xy)))
    place[:, numbers] = xy[elements[:, [0, 6, 8, 2, 3, 7, 5, 1, 4]].T].transpose(
        2, 0, 1
    )
    curved = skfem.MeshQuad2(place, mesh.t)
    element = skfem.ElementVector(skfem.ElementQuad2())
    basis = skfem.Basis(curved, element)

    @skfem.BilinearForm
    def stiffness(u, v, _):
        e = sym_grad(u)
        return ddot(2 * MODULUS * (e + eye(trace(e), 2)), sym_grad(v))

    @skfem.LinearForm
    def pull(v, _):
        return elasticity.TRACTION * v[1]

    top = skfem.FacetBasis(curved, element, facets=curved.facets_satisfying(is_top))
    fixed = basis.get_dofs(curved.facets_satisfying(lambda x: x[1] < 1e-9))
    system = skfem.condense(stiffness.assemble(basis), pull.assemble(top), D=fixed)
    u = skfem.solve(*system)
    order = np.empty((len(xy), 2))
    at = basis.doflocs
    for i in range(2):
        dofs = np.arange(i, len(u), 2)
        nearest = abs(at[:, dofs, None] - xy.T[:, None]).max(0).argmin(0)
        order[:, i] = u[dofs[nearest]]
    return order


def is_top(x):
    return x[1] > 1 - 1e-9


def test_small_loads_agree_with_scikit_fem():
    xy, elements = elasticity.mesh(modes(1))
    expected = linear(xy, elements)
    errors = []
    for scale in (0.01, 1.0):
        traction = (0.0, scale * elasticity.TRACTION)
        actual = elasticity.solve(xy, elements, traction=traction) / scale
        errors.append(abs(actual - expected).max() / abs(expected).max())
    # The non-linear part is of the order of the strain, 3e-4 at the full load.
    assert errors[1] < 2e-3
    assert errors[0] < 0.02 * errors[1]


def test_refinement_converges():
    """Fourth-order stress at the hole until the clamped corners' error is reached."""
    lifts, holes = [], []
    for refinement in (1, 2, 4):
        xy, elements = elasticity.mesh(modes(0), refinement)
        u = elasticity.solve(xy, elements)
        lifts.append(u[xy[:, 1] == 1, 1].mean())
        stress = elasticity.von_mises(xy, elements, u)
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
        [elasticity.radius(random.standard_normal((2, 5)), angle) for _ in range(count)]
    )
    assert radii.min() > 0.2 and radii.max() < 0.4
    np.testing.assert_allclose(radii[:, 0], radii[:, -1], rtol=ROUNDING)
    z = np.log(0.2 / (radii - 0.2) - 1)
    expected = sum(16 / (np.pi * (k**2 + 9)) for k in range(1, 6))
    # Four standard errors of a variance and of a mean.
    np.testing.assert_allclose(z.var(0), expected, rtol=4 * np.sqrt(2 / count))
    np.testing.assert_allclose(z.mean(0), 0, atol=4 * np.sqrt(expected / count))


def test_sample():
    one, again, other = (elasticity.sample(*key) for key in ((0, 1), (0, 1), (1, 1)))
    for key in one:
        assert one[key].dtype == np.float32
        np.testing.assert_array_equal(one[key], again[key])
        assert (one[key] != other[key]).any()
    assert (one["sigma"] > 0).all()
    # In random order: neighbours in number are not neighbours in space.
    steps = np.linalg.norm(np.diff(one["xy"], axis=0), axis=-1)
    assert np.median(steps) > 0.3


def test_stress_is_known_to_single_precision():
    """Rounding of forces does not show: a tighter solve gives the same stress."""
    xy, elements = elasticity.mesh(modes(2))
    u = elasticity.solve(xy, elements)
    force, stiffness = elasticity.assemble(xy, elements, u)
    free = np.repeat(xy[:, 1] > 0, 2)
    residual = (elasticity._load(xy, elements, (0.0, 100.0)) - force).ravel()[free]
    assert np.linalg.norm(residual) < 1e-9 * 100
    again = u.copy()
    again.reshape(-1)[free] += np.linalg.solve(
        stiffness.toarray()[np.ix_(free, free)], residual
    )
    np.testing.assert_allclose(
        elasticity.von_mises(xy, elements, again),
        elasticity.von_mises(xy, elements, u),
        rtol=SINGLE,
    )


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
        solved = elasticity.sample(0, i)
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
    monkeypatch.setattr(cache, "compute", None)
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


def test_solver_that_does_not_converge():
    xy, elements = elasticity.mesh(modes(0))
    with pytest.raises(RuntimeError, match="did not converge in 1 steps: relative"):
        elasticity.solve(xy, elements, iterations=1)


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
