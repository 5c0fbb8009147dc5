"""Darcy flow: the solver against theory and finite elements, and the files."""

import h5py
import numpy as np
import pytest
import skfem
from scipy import io
from scipy.sparse.linalg import spsolve
from skfem.helpers import dot, grad

from flaxmix.data import cache, darcy, darcy_solver as solver, workers

R = 21
"""Resolution of the small files."""


def noise(index, n):
    return np.random.default_rng(index).standard_normal((n, n))


def series(x, y, terms=199):
    """Solution of -laplace(u) = 1: sum of 16 sin(k pi x) sin(l pi y) /
    (pi^4 k l (k^2 + l^2)) over odd k and l."""
    k = np.arange(1, terms, 2)
    weight = 16 / (np.pi**4 * np.outer(k, k) * (k**2 + k[:, None] ** 2))
    return np.sin(np.pi * np.outer(y, k)) @ weight @ np.sin(np.pi * np.outer(k, x))


def test_constant_permeability_gives_the_series_at_second_order():
    errors = []
    for n in (17, 33, 65):
        points = np.linspace(0, 1, n)
        expected = series(points, points) / 5
        actual = solver.solve(np.full((n, n), 5.0))
        errors.append(abs(actual - expected).max() / expected.max())
    assert errors[0] < 4e-3
    orders = np.log2(np.divide(errors[:-1], errors[1:]))
    np.testing.assert_allclose(orders, 2, atol=0.1)


def smooth(x, y):
    return 2 + np.sin(3 * x + 0.4) * np.cos(2 * y) + x


def test_smooth_permeability_agrees_with_finite_elements_at_second_order():
    mesh = skfem.MeshQuad.init_tensor(*2 * [np.linspace(0, 1, 17)])
    basis = skfem.Basis(mesh, skfem.ElementQuad2())
    u = elements(basis, smooth)
    errors = []
    for n in (17, 33):
        points = np.linspace(0, 1, n)
        x, y = np.meshgrid(points, points)
        actual = solver.solve(smooth(x, y))
        chosen = actual[:: (n - 1) // 16, :: (n - 1) // 16]
        x, y = np.meshgrid(points[:: (n - 1) // 16], points[:: (n - 1) // 16])
        expected = (basis.probes(np.stack([x.ravel(), y.ravel()])) @ u).reshape(17, 17)
        errors.append(abs(chosen - expected).max() / expected.max())
    assert errors[0] < 5e-3
    assert np.log2(errors[0] / errors[1]) == pytest.approx(2, abs=0.15)


def elements(basis, permeability):
    """Solves the same problem by finite elements of scikit-fem."""

    @skfem.BilinearForm
    def flow(u, v, w):
        return permeability(*w.x) * dot(grad(u), grad(v))

    @skfem.LinearForm
    def source(v, _):
        return v

    system = flow.assemble(basis), source.assemble(basis)
    matrix, force, u, inner = skfem.condense(*system, D=basis.get_dofs())
    u[inner] = spsolve(matrix.tocsc(), force, permc_spec="MMD_AT_PLUS_A")
    return u


@pytest.mark.parametrize(
    "resolution, largest, mean",
    [(33, 0.06, 0.03), pytest.param(65, 0.025, 0.015, marks=pytest.mark.slow)],
)
def test_samples_agree_with_finite_elements(resolution, largest, mean):
    """Elements see the jumps of a at cell sides, the scheme smears them over a cell.

    The difference falls with the cell size: of the order of 1 / resolution.
    """
    sides = np.linspace(0, 1, resolution + 1)
    centres = (sides[1:] + sides[:-1]) / 2
    mesh = skfem.MeshQuad.init_tensor(sides, sides)
    basis = skfem.Basis(mesh, skfem.ElementQuad2())
    x, y = np.meshgrid(centres, centres)
    probes = basis.probes(np.stack([x.ravel(), y.ravel()]))
    errors = []
    for index in range(3):
        solved = solver.sample(0, "train", index, resolution)
        a = solved["coeff"].astype(np.float64)

        def cell(x, y, a=a):
            return a[(y * resolution).astype(int), (x * resolution).astype(int)]

        expected = probes @ elements(basis, cell)
        difference = solved["sol"].ravel() - expected
        errors.append(np.linalg.norm(difference) / np.linalg.norm(expected))
    assert max(errors) < largest
    assert np.mean(errors) < mean


def test_rows_are_y():
    """Permeability that varies along columns only, and a solution that shows it."""
    n = 33
    a = np.broadcast_to(np.linspace(1, 9, n), (n, n)).copy()
    u = solver.solve(a)
    np.testing.assert_allclose(u, u[::-1], rtol=0, atol=1e-12)
    # High where the flow is hindered, at small x.
    assert u[n // 2, n // 4] > 1.2 * u[n // 2, -1 - n // 4]
    np.testing.assert_allclose(solver.solve(a.T), u.T, rtol=0, atol=1e-12)


def test_field_is_the_sum_of_its_modes():
    s = 7
    xi = noise(0, s)
    centres = (np.arange(s) + 0.5) / s
    expected = np.zeros((s, s))
    for row in range(s):
        for column in range(s):
            if row == column == 0:
                continue
            scale = 3 / (np.pi**2 * (row**2 + column**2) + 9)
            along_y = np.cos(row * np.pi * centres) * (np.sqrt(2) if row else 1)
            along_x = np.cos(column * np.pi * centres) * (np.sqrt(2) if column else 1)
            expected += xi[row, column] * scale * np.outer(along_y, along_x)
    np.testing.assert_allclose(solver.gaussian_field(xi), expected, atol=1e-13)


def test_permeability_statistics():
    """Two values, half of the area each; neighbours agree, corners hardly so."""
    count = 200
    fields = np.stack([solver.gaussian_field(noise(i, 17)) for i in range(count)])
    signs = np.where(fields >= 0, 1, -1)
    # Of 200 whole fields, and each pixel in them: four standard errors.
    assert abs(signs[:, 3, 8].mean()) < 4 / np.sqrt(count)
    k = np.arange(17)
    size = 3 / (np.pi**2 * (k**2 + k[:, None] ** 2) + 9)
    size[0, 0] = 0
    variance = np.square(fields).mean((1, 2))
    spread = 4 * np.sqrt(2 * np.sum(size**4) / count)
    assert variance.mean() == pytest.approx(np.sum(size**2), abs=spread)
    assert (signs[:, 8, 8] == signs[:, 8, 9]).mean() > 0.8
    a = solver.sample(0, "train", 0, R)["coeff"]
    assert set(np.unique(a)) == {3.0, 12.0}


def test_splines():
    """Exact for cubics, back and forth, the rim included."""
    to_nodes, to_centres = solver._splines(9)
    centres, nodes = (np.arange(9) + 0.5) / 9, np.linspace(0, 1, 9)

    def cubic(x):
        return 1 - 2 * x + 3 * x**2 - 4 * x**3

    np.testing.assert_allclose(to_nodes @ cubic(centres), cubic(nodes), atol=1e-12)
    np.testing.assert_allclose(to_centres @ cubic(nodes), cubic(centres), atol=1e-12)


@pytest.mark.parametrize("resolution, rim", [(85, 0.4), (421, 0.03)])
def test_pressure(resolution, rim):
    """The rim is half a cell inside; coarse splines make peaks of one cell there."""
    solved = solver.sample(1, "test", 0, resolution)
    u = solved["sol"]
    assert u.dtype == solved["coeff"].dtype == np.float32
    outside = np.concatenate([u[0], u[-1], u[:, 0], u[:, -1]])
    assert abs(outside).max() < rim * u.max()
    assert u[1:-1, 1:-1].min() > 0
    # Between the solutions with a = 12 and a = 3 everywhere.
    assert 0.0736 / 12 < u.max() < 0.0737 / 3


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("darcy") / "set"
    return darcy.generate(
        folder, train=5, test=3, resolution=R, processes=2, progress=False
    )


def test_files_are_in_the_published_format(generated):
    names = "piececonst_r21_N5_smooth1.mat", "piececonst_r21_N3_smooth2.mat"
    assert sorted(p.name for p in generated.iterdir()) == sorted([cache.RECORD, *names])
    for name, split in zip(names, ("train", "test"), strict=True):
        arrays = io.loadmat(generated / name)
        for key in ("coeff", "sol"):
            assert arrays[key].dtype == np.float32
            for index, actual in enumerate(arrays[key]):
                expected = solver.sample(0, split, index, R)[key]
                np.testing.assert_array_equal(actual, expected)
    assert (solver.sample(0, "test", 0, R)["coeff"] != arrays["coeff"][1]).any()


def test_generation_is_reproducible(generated, tmp_path):
    again = darcy.generate(
        tmp_path / "5", train=5, test=3, resolution=R, processes=1, progress=False
    )
    for path in generated.iterdir():
        assert path.read_bytes() == (again / path.name).read_bytes()
    other = darcy.generate(
        tmp_path / "3", train=3, test=4, resolution=R, processes=1, progress=False
    )
    for split, count in (("train", 3), ("test", 3)):
        for one, two in zip(
            darcy.read(generated, split), darcy.read(other, split), strict=True
        ):
            np.testing.assert_array_equal(one[:count], two[:count])


def write_7_3(path, arrays):
    """As MATLAB does: HDF5 after 512 bytes of title, axes in the opposite order."""
    with h5py.File(path, "w", userblock_size=512) as file:
        for key, array in arrays.items():
            file[key] = array.T
        file.create_group("#refs#")
    with path.open("r+b") as file:
        title = b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM"
        file.write(title)


@pytest.mark.parametrize("version, stride", [("5", 1), ("7.3", 4)])
def test_generated_and_published_files_load_alike(
    generated, tmp_path, monkeypatch, version, stride
):
    for split, number in (("train", 1), ("test", 2)):
        arrays = dict(zip(("coeff", "sol"), darcy.read(generated, split), strict=True))
        arrays["Kcoeff"] = np.zeros(3)
        path = tmp_path / f"piececonst_r421_N1024_smooth{number}.mat"
        if version == "5":
            io.savemat(path, arrays)
        else:
            write_7_3(path, arrays)
    monkeypatch.setenv("FLAXMIX_CACHE", str(tmp_path / "cache"))
    size = {"train": 4, "test": 2, "stride": stride}
    published = darcy.load(tmp_path, **size)
    made = darcy.load(resolution=R, processes=1, **size)
    monkeypatch.setattr(workers, "compute", None)
    again = darcy.load(resolution=R, **size)
    assert made.fingerprint() == again.fingerprint() == published.fingerprint()
    assert made.channels == (3, 1) and made.grid == 2 * ((R - 1) // stride + 1,)
    for split in ("train", "test"):
        for key in ("x", "y"):
            theirs = getattr(getattr(published, split), key)
            ours = getattr(getattr(made, split), key)
            assert ours.dtype == np.float32
            np.testing.assert_array_equal(theirs, ours)


def test_inputs_and_targets(generated):
    data = darcy.load(generated, train=5, test=3, stride=2)
    n = (R - 1) // 2 + 1
    coeff, sol = darcy.read(generated, "train", stride=2)
    assert coeff.shape == sol.shape == (5, n, n)
    whole = darcy.read(generated, "train")[1]
    sample = data.train[3]
    x, y, a = sample["x"].reshape(n, n, 3).transpose(2, 0, 1)
    for i, j in ((0, 0), (2, 7), (n - 1, 3)):
        assert x[i, j] == pytest.approx(j / (n - 1))
        assert y[i, j] == pytest.approx(i / (n - 1))
        assert sample["y"].reshape(n, n)[i, j] == whole[3, 2 * i, 2 * j]
    assert len(np.unique(a)) == 2
    assert ((a > 0) == (coeff[3] == 12)).all()
    inputs = data.train.x[..., 2]
    np.testing.assert_allclose([inputs.mean(), inputs.std()], [0, 1], atol=1e-3)
    shift = (coeff.mean(dtype=np.float64), coeff.std(dtype=np.float64, ddof=1))
    test = darcy.read(generated, "test", stride=2)[0]
    expected = (test.reshape(3, -1) - shift[0]) / shift[1]
    np.testing.assert_allclose(data.test.x[..., 2], expected, rtol=1e-5)
    encoded = data.targets.encode(data.train.y)
    np.testing.assert_allclose([encoded.mean(), encoded.std()], [0, 1], atol=1e-3)


def test_inaccurate_solution(monkeypatch):
    monkeypatch.setattr(solver, "_TOLERANCE", 0.0)
    with pytest.raises(RuntimeError, match=r"relative residual .*e-1\d, allowed 0e"):
        solver.solve(1 + np.square(noise(0, 9)))


@pytest.mark.parametrize(
    "change", [{"train": 0}, {"test": 0}, {"resolution": 4}, {"seed": -1}]
)
def test_bad_arguments(tmp_path, change):
    arguments = {"train": 1, "test": 1, "resolution": 5, "seed": 0} | change
    values = ", ".join(str(value) for value in arguments.values())
    with pytest.raises(ValueError, match=f"expected, got {values}"):
        darcy.generate(tmp_path / "set", **arguments)


def test_file_that_the_format_cannot_hold(tmp_path):
    with pytest.raises(ValueError, match="7000 samples at resolution 421 exceed the 4"):
        darcy.generate(tmp_path / "set", train=7000, test=1)


def test_bad_loads(generated, monkeypatch):
    with pytest.raises(ValueError, match="train and test must be .* got 1 and 0"):
        darcy.load(generated, train=1, test=0)
    with pytest.raises(ValueError, match="train=6 samples asked for, but .* has 5"):
        darcy.load(generated, train=6, test=1, stride=1)
    with pytest.raises(ValueError, match="test=4 samples asked for, but .* has 3"):
        darcy.load(generated, train=5, test=4, stride=1)
    with pytest.raises(
        ValueError, match="stride 3 does not divide resolution - 1 = 20"
    ):
        darcy.load(generated, train=5, test=3, stride=3)
    monkeypatch.setattr(darcy, "generate", None)
    with pytest.raises(
        ValueError, match="stride 5 does not divide resolution - 1 = 83"
    ):
        darcy.load(resolution=84)
    with pytest.raises(ValueError, match="split must be .* got 'valid'"):
        darcy.read(generated, "valid")
    with pytest.raises(ValueError, match="stride must be at least 1, got 0"):
        darcy.read(generated, "train", stride=0)


def test_grids_that_differ(tmp_path):
    for n, number in ((5, 1), (9, 2)):
        array = np.ones((2, n, n))
        path = tmp_path / f"piececonst_r{n}_N2_smooth{number}.mat"
        io.savemat(path, {"coeff": array, "sol": array})
    with pytest.raises(ValueError, match=r"grids differ: \(5, 5\), \(9, 9\)"):
        darcy.load(tmp_path, train=2, test=2, stride=1)


def test_missing_and_ambiguous_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="has no file piececonst.*smooth1.mat"):
        darcy.read(tmp_path, "train")
    for count in (2, 3):
        (tmp_path / f"piececonst_r5_N{count}_smooth1.mat").touch()
    with pytest.raises(ValueError, match="several files .*: .*_N2_.*, .*_N3_"):
        darcy.read(tmp_path, "train")


@pytest.mark.parametrize("version", ["5", "7.3"])
@pytest.mark.parametrize(
    "change, message",
    [
        ({"coeff": None}, "has no array coeff; it has other, sol"),
        ({"sol": np.ones((2, 5, 4))}, r"sol has shape \(2, 5, 4\), expected \(S, R, R"),
        ({"sol": np.ones((5, 5))}, r"sol has shape \(5, 5\)"),
        ({"sol": np.ones((3, 5, 5))}, r"coeff and sol differ in shape .*\(3, 5, 5\)"),
        ({"sol": np.full((2, 5, 5), np.nan)}, "sol has values that are not finite"),
    ],
)
def test_bad_files(tmp_path, version, change, message):
    arrays = {name: np.ones((2, 5, 5)) for name in ("coeff", "other", "sol")} | change
    arrays = {key: array for key, array in arrays.items() if array is not None}
    path = tmp_path / "piececonst_r5_N2_smooth1.mat"
    (io.savemat if version == "5" else write_7_3)(path, arrays)
    with pytest.raises(ValueError, match=message):
        darcy.read(tmp_path, "train")


def test_group_instead_of_an_array(tmp_path):
    path = tmp_path / "piececonst_r5_N2_smooth1.mat"
    write_7_3(path, {"coeff/inner": np.ones(3)})
    with pytest.raises(ValueError, match="coeff is not an array"):
        darcy.read(tmp_path, "train")
