"""Elasticity: a stretched hyperelastic unit cell with a random hole.

Points of a mesh in, von Mises stress out. The published files of the Geo-FNO
benchmark are read as they are; the same problem and file format can be generated.
"""

import functools
import os
from pathlib import Path

import numpy as np

from flaxmix.data import cache, workers
from flaxmix.data.dataset import Dataset, Fields, Normalizer
from flaxmix.data.elasticity_solver import NODES, sample

_RECIPE = 1
_XY, _SIGMA, _RADII = (
    f"Random_UnitCell_{name}_10.npy" for name in ("XY", "sigma", "rr")
)


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
    About 0.2 s a sample on one core.

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
        arrays = workers.compute(
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
    return cache.build(
        folder, parameters, write, packages=("numpy", "scipy", "scikit-fem")
    )


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


def _array(file: Path, shape: tuple[int | None, ...]) -> np.ndarray:
    """A finite float32 array from a file; None in the shape is any size."""
    if not file.exists():
        raise FileNotFoundError(f"{file} is missing.")
    try:
        array = np.load(file, allow_pickle=False)
    except Exception as error:  # np.load raises many kinds for damaged files
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{file} is an archive, not an array.")
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
