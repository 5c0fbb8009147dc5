"""Evaluates runs from their folders alone, and draws them side by side.

python -m train.evaluate RUN [RUN ...] [--weights final] [--out FOLDER]
                         [--devices D] [--context R] [--chunk n]

Samples too large for one device go over several, D sharing each batch and R the points
of each sample, D x R devices in all; or with --chunk through one device, n points at a
time, which needs memory on the host alone. The errors are the same up to rounding. From
Python:

    mesh = parallel.make_mesh(data=D, context=R)
    run = load(Path("runs/mine"), mesh=mesh)
    test = run.task.dataset.test
    errors = run.task.predictor.errors(run.model, test, mesh)
    fields = run.task.predictor.fields(run.model, test[0], mesh)

    run = load(Path("runs/mine"))
    predictor = pde.ChunkedPredictor(run.task.dataset.targets, chunk=n)
    errors = predictor.errors(run.model, test)
    fields = predictor.fields(run.model, test[0])
"""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from flaxmix import parallel
from flaxmix.parameters import with_parameters
from train import config as configs, pde
from train.checkpoint import Checkpoints
from train.config import PDEConfig
from train.folder import read_fingerprint, write_json
from train.models import Model
from train.step import TrainState
from train.task import plan

Weights = Literal["final", "average", "best_test", "best_validation"]


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A run rebuilt from its folder."""

    config: PDEConfig
    task: pde.PDETask
    model: Model
    state: TrainState
    step: int


def load(
    folder: Path,
    weights: Weights = "final",
    data: Path | None = None,
    mesh: Mesh | None = None,
) -> Loaded:
    """Rebuilds the model of a run, its data and its task.

    Args:
        folder: of the run.
        weights: "final" of the last checkpoint, their "average", or those of the
            checkpoint with the smallest test or validation error.
        data: folder of the data, if it is no longer where the run found it.
        mesh: whose devices get the model; None for the first device.

    Raises:
        FileNotFoundError: if the folder holds no run.
        ValueError: if it holds no such checkpoint, or files of something else.
    """
    folder = Path(folder)
    if not (folder / "config.json").exists():
        raise FileNotFoundError(f"{folder} holds no run (no config.json).")
    config = configs.read(PDEConfig, folder / "config.json")
    if data is not None:
        moved = dataclasses.replace(config.data, folder=data)
        config = dataclasses.replace(config, data=moved)
    task = pde.make_task(config)
    found = read_fingerprint(folder)
    if found != task.fingerprint:
        raise ValueError(
            f"{folder} was trained on other data: fingerprint {found} became "
            f"{task.fingerprint}."
        )
    checkpoints = Checkpoints(folder / "checkpoints", read_only=True)
    if weights in ("final", "average"):
        step = checkpoints.latest()
    else:
        step = checkpoints.best(f"{weights.removeprefix('best_')}_error")
    if step is None:
        raise ValueError(f"{folder} holds no checkpoint for {weights!r}.")
    mesh = parallel.make_mesh(data=1) if mesh is None else mesh
    layout = plan(config, task, mesh)
    state = checkpoints.restore(step, layout.abstract, layout.shardings)
    checkpoints.close()
    params = state.average if weights == "average" else state.params
    return Loaded(config, task, with_parameters(layout.model, params), state, step)


def labels(folders: list[Path], loaded: list[Loaded]) -> list[str]:
    """The models' names, or the folders where two runs share a model."""
    names = [one.config.model.name for one in loaded]
    return names if len(set(names)) == len(names) else [str(f) for f in folders]


def _mesh(devices: int, context: int, chunk: int | None) -> Mesh:
    """The devices to evaluate on: only one if the points come in chunks."""
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}.")
    if chunk is not None and (devices, context) != (1, 1):
        raise ValueError(
            f"--chunk {chunk} takes the points through one device; it does not go "
            f"with --devices {devices} --context {context}."
        )
    return parallel.make_mesh(data=devices, context=context)


def _predictor(run: Loaded, chunk: int | None):
    if chunk is None:
        return run.task.predictor
    return pde.ChunkedPredictor(run.task.dataset.targets, chunk, progress=True)


def main(
    runs: Annotated[list[Path], tyro.conf.Positional],
    weights: Weights = "final",
    out: Path | None = None,
    data: Path | None = None,
    devices: int = 1,
    context: int = 1,
    chunk: int | None = None,
) -> None:
    """Evaluates runs from their folders alone, and draws them side by side.

    Args:
        runs: run folders. The reduction is that of the last against the first.
        weights: which weights are evaluated.
        out: folder of the pictures and of `evaluation.json`; the last run's
            `evaluation` folder if it is not given.
        data: folder of the data, if it is no longer where the runs found it.
        devices: parts of each batch, each on its own devices.
        context: parts of each sample's points, each on its own device.
        chunk: points that go through one device at a time, for samples that it does
            not hold; not together with several devices.
    """
    try:
        mesh = _mesh(devices, context, chunk)
        if not runs or len(set(runs)) < len(runs):
            raise ValueError("name one run folder or several different ones.")
        each = [load(folder, weights, data, mesh) for folder in runs]
        loaded = dict(zip(labels(runs, each), each, strict=True))
        last = loaded[list(loaded)[-1]]
        for name, one in loaded.items():
            if (
                one.task.dataset.test_fingerprint()
                != last.task.dataset.test_fingerprint()
            ):
                raise ValueError(
                    f"{name} and {list(loaded)[-1]} differ in their test set."
                )
        folder = out or runs[-1] / "evaluation"
        errors = pde.draw(
            {name: (one.model, _predictor(one, chunk)) for name, one in loaded.items()},
            last.task.dataset,
            mesh,
            folder,
        )
    except (ValueError, OSError) as error:
        configs.fail(str(error))
    table = Table(title=f"relative L2 error on the test set, {weights} weights")
    for column in ("run", "step", "mean %", "median %", "largest %"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for name, one in loaded.items():
        e = 100 * errors[name]
        values = (e.mean(), np.median(e), e.max())
        table.add_row(name, str(one.step), *(f"{v:.3f}" for v in values))
    Console().print(table)
    report = {
        name: {"step": loaded[name].step, "test_error": float(e.mean())}
        for name, e in errors.items()
    }
    if len(report) > 1:
        first, last = (list(report.values())[i]["test_error"] for i in (0, -1))
        names = list(report)
        change = 100 * (last / first - 1)
        print(f"{names[-1]} against {names[0]}: test error {change:+.1f} % (relative).")
    write_json(folder / "evaluation.json", {"weights": weights, "runs": report})
    print(f"pictures: {folder / 'fields.png'}, {folder / 'errors.png'}")


if __name__ == "__main__":
    tyro.cli(main)
