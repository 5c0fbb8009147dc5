"""Darcy flow: pressure in a square whose permeability takes two values.

The published files of the Fourier neural operator (FNO) benchmark are read as they
are; the same problem and file format can be generated.
"""

import functools
import os
from pathlib import Path

import h5py
import numpy as np
from scipy import io

from flaxmix.data import cache, workers
from flaxmix.data.darcy_solver import sample
from flaxmix.data.dataset import Dataset, Fields, Normalizer

_RECIPE = 1
_PARTS = {"train": "smooth1", "test": "smooth2"}
_LARGEST = 2**32


def generate(
    folder: str | os.PathLike,
    *,
    train: int,
    test: int,
    resolution: int = 421,
    seed: int = 0,
    processes: int | None = None,
    progress: bool = True,
) -> Path:
    """Solves random Darcy problems and writes them in the published file format.

    -div(a grad u) = 1 in the unit square, u = 0 on its boundary, with a = 12 where
    g >= 0 and 3 elsewhere; g is the Gaussian field

        g ~ N(0, 3^2 (-Laplacian + 3^2)^-2), no flow through the sides, mean 0.

    As in the published data, g, a and the stored u are at the centres of
    resolution x resolution cells. a is carried to a grid of as many nodes that
    includes the boundary by a cubic (not-a-knot) spline, the equation is solved there
    by the five-point scheme with arithmetic means, and u is carried back by another
    such spline. Hence u has small values of either sign, not zeros, at the rim, and
    the permeability of the scheme overshoots where a jumps, at single nodes below 0
    (the matrix stays positive definite). u differs from the exact solution for
    cell-wise constant a by 1 to 2 % in L2 at resolution 65 and 0.5 % at 129, and at
    85 one sample in twenty has a peak of over a tenth of its largest u in a cell at
    the rim; at 421 it stays below 4 %. Solving on a coarser grid is not the same
    as keeping every other value.

    Training sample i depends on (seed, i) alone, and so does test sample i, from
    other random numbers. On one core a sample takes about 0.01 s at resolution 85
    and 1 s (and 0.4 GB) at 421.

    Args:
        folder: to make, with `piececonst_r{resolution}_N{train}_smooth1.mat` for
            training, `..._N{test}_smooth2.mat` for tests and `generation.json`. They
            are MATLAB 5 files with coeff (a) and sol (u), [samples, resolution,
            resolution] float32; first the row (y), then the column (x).
        train: number of training samples.
        test: number of test samples.
        resolution: cells along a side, at least 5.
        seed: of the random fields.
        processes: that solve in parallel; default all cores.
        progress: whether to show a progress bar.

    Returns:
        The folder. If it has been generated with the same arguments before, it is
        left as it is.

    Raises:
        ValueError: if a number is too small, a file would exceed the 4 GB of the
            format, or the folder was generated with other arguments.
        FileExistsError: if the folder has other files.
        RuntimeError: if a sample fails.

    Source: Li et al., "Fourier neural operator for parametric partial differential
    equations", ICLR 2021, section 5.2 and appendix A.3.
    """
    if min(train, test) < 1 or resolution < 5 or seed < 0:
        raise ValueError(
            "train, test >= 1, resolution >= 5 and seed >= 0 expected, got "
            f"{train}, {test}, {resolution}, {seed}."
        )
    if 4 * max(train, test) * resolution**2 >= _LARGEST:
        raise ValueError(
            f"{max(train, test)} samples at resolution {resolution} exceed the 4 GB of "
            "an array in a MATLAB 5 file."
        )

    def write(path: Path) -> None:
        for split, count in (("train", train), ("test", test)):
            arrays = workers.compute(
                functools.partial(sample, seed, split, resolution=resolution),
                count,
                title=f"darcy {split}",
                processes=processes,
                progress=progress,
            )
            file = path / f"piececonst_r{resolution}_N{count}_{_PARTS[split]}.mat"
            io.savemat(file, arrays)
            # In place of the time of writing, so that equal sets are equal files.
            with file.open("r+b") as stored:
                stored.write(b"MATLAB 5.0 MAT-file, by flaxmix".ljust(116))

    parameters = {
        "recipe": "darcy",
        "version": _RECIPE,
        "train": train,
        "test": test,
        "resolution": resolution,
        "seed": seed,
    }
    return cache.build(folder, parameters, write, packages=("numpy", "scipy"))


def read(
    folder: str | os.PathLike, split: str, *, stride: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Reads a published or generated file, MATLAB 5 or 7.3 (HDF5).

    Args:
        folder: with exactly one `piececonst_r*_N*_smooth1.mat` ("train") or
            `piececonst_r*_N*_smooth2.mat` ("test"), which has coeff and sol
            [S, R, R]. Other arrays in it are not read.
        split: "train" or "test".
        stride: keeps every stride-th row and column; divides R - 1.

    Returns:
        coeff and sol, [S, n, n] float32 each, n = (R - 1) / stride + 1.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if there are several, if `split` or `stride` does not fit, or if
            an array is missing, has another shape, or values that are not finite.
    """
    if split not in _PARTS:
        raise ValueError(f"split must be 'train' or 'test', got {split!r}.")
    if stride < 1:
        raise ValueError(f"stride must be at least 1, got {stride}.")
    pattern = f"piececonst_r*_N*_{_PARTS[split]}.mat"
    files = sorted(Path(folder).glob(pattern))
    if not files:
        raise FileNotFoundError(f"{folder} has no file {pattern}.")
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ValueError(f"{folder} has several files {pattern}: {names}.")
    coeff, sol = (_array(files[0], key, stride) for key in ("coeff", "sol"))
    if coeff.shape != sol.shape:
        raise ValueError(
            f"{files[0]}: coeff and sol differ in shape at stride {stride}: "
            f"{coeff.shape} and {sol.shape}."
        )
    return coeff, sol


def load(
    folder: str | os.PathLike | None = None,
    *,
    train: int = 1000,
    test: int = 200,
    resolution: int = 421,
    stride: int = 5,
    seed: int = 0,
    processes: int | None = None,
) -> Dataset:
    """The Darcy data set: x = (x, y, a) [n n, 3] and y = u [n n, 1].

    x and y run from 0 to 1 in equal steps, x fastest; a is normalised to mean 0 and
    variance 1 over the training set.

    Args:
        folder: of the published files; by default `train` and `test` samples are
            generated on first use in `flaxmix.data.cache.default_folder()`.
        train: number of training samples, the first of the training file.
        test: number of test samples, the first of the test file.
        resolution: of generated samples; unused with `folder`.
        stride: keeps every stride-th row and column; n = (resolution - 1) / stride + 1.
        seed: of generated samples; unused with `folder`.
        processes: that generate in parallel; default all cores.

    Raises:
        ValueError: if a count is below 1 or above what the file has, if `stride` does
            not divide resolution - 1; and as `read` and `generate` do.
        FileNotFoundError: as `read` does.
    """
    if train < 1 or test < 1:
        raise ValueError(f"train and test must be at least 1, got {train} and {test}.")
    if folder is None:
        _check_stride(stride, resolution)
        name = f"darcy-v{_RECIPE}-r{resolution}-n{train}-{test}-s{seed}"
        folder = generate(
            cache.default_folder() / name,
            train=train,
            test=test,
            resolution=resolution,
            seed=seed,
            processes=processes,
        )
    splits = []
    for split, count in (("train", train), ("test", test)):
        coeff, sol = read(folder, split, stride=stride)
        if count > len(coeff):
            raise ValueError(
                f"{split}={count} samples asked for, but {folder} has {len(coeff)}."
            )
        # Copies, so that the samples left out do not stay in memory.
        splits.append((coeff[:count].copy(), sol[:count].copy()))
    (a, u), (_, other) = splits
    if u.shape[1:] != other.shape[1:]:
        raise ValueError(
            f"{folder}: training and test grids differ: {u.shape[1:]}, "
            f"{other.shape[1:]}."
        )
    inputs = Normalizer.fit(a[..., None])
    points = np.linspace(0, 1, a.shape[-1], dtype=np.float32)
    xy = np.stack(np.meshgrid(points, points), -1).reshape(-1, 2)

    def fields(a: np.ndarray, u: np.ndarray) -> Fields:
        a = inputs.encode(a.reshape(len(a), -1, 1))
        place = np.broadcast_to(xy, (len(a), *xy.shape))
        return Fields(np.concatenate([place, a], -1), u.reshape(len(u), -1, 1))

    training = fields(*splits[0])
    return Dataset(
        name="Darcy",
        train=training,
        test=fields(*splits[1]),
        targets=Normalizer.fit(training.y),
        quantity="pressure u (dimensionless)",
        grid=(a.shape[1], a.shape[2]),
    )


def _check_stride(stride: int, resolution: int) -> None:
    if stride < 1 or (resolution - 1) % stride:
        raise ValueError(
            f"stride {stride} does not divide resolution - 1 = {resolution - 1}."
        )


def _array(file: Path, key: str, stride: int) -> np.ndarray:
    """An array [S, n, n] of the file, in float32, with every stride-th point."""
    try:
        array = _read(file, key, stride)
    except Exception as error:  # scipy raises many kinds for damaged files
        if str(file) in str(error):
            raise
        raise ValueError(f"{file} cannot be read: {error}") from error
    if array.dtype.kind not in "fiu":
        raise ValueError(f"{file}: {key} has type {array.dtype}, not real numbers.")
    array = np.ascontiguousarray(array, dtype=np.float32)
    if not np.isfinite(array).all():
        raise ValueError(f"{file}: {key} has values that are not finite.")
    return array


def _read(file: Path, key: str, stride: int) -> np.ndarray:
    if h5py.is_hdf5(file):
        # MATLAB stores the first axis fastest, HDF5 names the slowest axis first.
        with h5py.File(file) as arrays:
            _check(file, key, [name for name in arrays.keys() if name[0] != "#"])
            stored = arrays[key]
            if not isinstance(stored, h5py.Dataset):
                raise ValueError(f"{file}: {key} is not an array.")
            _check_shape(file, key, stored.shape[::-1], stride)
            array = np.asarray(stored[::stride, ::stride]).T
    else:
        _check(file, key, [name for name, _, _ in io.whosmat(file)])
        array = io.loadmat(file, variable_names=[key])[key]
        _check_shape(file, key, array.shape, stride)
        array = array[:, ::stride, ::stride]
    return array


def _check(file: Path, key: str, names: list[str]) -> None:
    if key not in names:
        raise ValueError(
            f"{file} has no array {key}; it has {', '.join(names) or 'none'}."
        )


def _check_shape(file: Path, key: str, shape: tuple[int, ...], stride: int) -> None:
    if len(shape) != 3 or shape[1] != shape[2] or min(shape) < 1:
        raise ValueError(f"{file}: {key} has shape {shape}, expected (S, R, R).")
    _check_stride(stride, shape[1])
