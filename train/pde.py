"""Trains a surrogate of a PDE solver.

python -m train.pde configs/pde/elasticity.py [--field value ...]
"""

import dataclasses
import functools
import sys
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.progress import Progress

from flaxmix import data, losses, parallel
from flaxmix.data import darcy, elasticity, pipeline
from train import config as configs, loop, plots
from train.config import (
    DarcyConfig,
    DistributedConfig,
    ElasticityConfig,
    PDEConfig,
)
from train.folder import check_folder, check_processes
from train.models import Model, check_model, make_model
from train.task import Task

TITLES = {
    "final": "final",
    "best_on_test": "best on test (how the papers select: optimistic)",
    "best_on_validation": "best on validation",
}

OWN_BAR = 2**18
"""Points from which on a sample takes long enough for a progress bar of its own."""


def make_dataset(config: ElasticityConfig | DarcyConfig) -> data.Dataset:
    """Reads or generates the data set."""
    if isinstance(config, ElasticityConfig):
        return elasticity.load(
            config.folder, train=config.train, test=config.test, seed=config.seed
        )
    return darcy.load(
        config.folder,
        train=config.train,
        test=config.test,
        resolution=config.resolution,
        stride=config.stride,
        seed=config.seed,
    )


def predict(model, batch, targets: data.Normalizer, mesh, key=None):
    """Fields [B, N, c_out] of a batch in physical units, on a mesh of devices."""
    y = parallel.apply(model, batch["x"], mesh=mesh, mask=batch.get("mask"), key=key)
    return targets.decode(y)


class Predictor:
    """Predictions in physical units, for whole splits of any size.

    Every sample is used once, whatever the batch and the number of devices.
    """

    def __init__(self, targets: data.Normalizer, batch: int):
        self._targets, self._batch = targets, batch
        self._fields = jax.jit(self._predict, static_argnums=2)
        self._errors = jax.jit(self._measure, static_argnums=2)

    def _predict(self, model, batch, mesh):
        fields = predict(model, batch, self._targets, mesh)
        return parallel.replicate(fields, mesh)

    def _measure(self, model, batch, mesh):
        fields = predict(model, batch, self._targets, mesh)
        errors = losses.relative_l2(fields, batch["y"], mask=batch.get("mask"))
        return parallel.replicate(errors, mesh)

    def batches(self, samples, mesh):
        """Every sample once, as (batch, how many of its rows are samples)."""
        # Filling up is internal, so the batch may grow to suit the devices.
        shards = parallel.batch_shards(mesh)
        size = -(-self._batch // shards) * shards
        share = parallel.share(mesh)
        for batch, count in pipeline.evaluation_batches(
            samples, batch=size, share=share
        ):
            yield parallel.global_batch(batch, mesh), count

    def errors(self, model, samples, mesh) -> np.ndarray:
        """Relative L2 error of each sample [S], float64."""
        errors = [
            np.asarray(self._errors(model, batch, mesh), np.float64)[:count]
            for batch, count in self.batches(samples, mesh)
        ]
        return np.concatenate(errors)

    def fields(self, model, sample, mesh) -> np.ndarray:
        """Predicted fields [N, c_out] of one sample."""
        ((batch, _),) = self.batches([sample], mesh)
        return np.asarray(self._fields(model, batch, mesh))[0, : len(sample["x"])]


class ChunkedPredictor:
    """What `Predictor` gives, for samples that no device holds.

    Every sample goes through one device, `chunk` points at a time, by
    `parallel.predict_in_chunks`. Errors are computed on the host, in float64.

    Samples of unequal sizes are padded like batches, so few sizes are compiled.
    """

    def __init__(self, targets: data.Normalizer, chunk: int, *, progress: bool = False):
        """Keeps how to predict.

        Args:
            targets: normaliser of the fields.
            chunk: points worked on at once.
            progress: whether to show bars on standard error: one for all samples in
                a terminal, or one for each where it has very many points.
        """
        self._targets, self._chunk, self._progress = targets, chunk, progress

    def _predict(self, model, batch) -> np.ndarray:
        y = parallel.predict_in_chunks(
            model,
            batch["x"],
            mask=batch.get("mask"),
            chunk=self._chunk,
            progress=self._progress and batch["x"].shape[1] >= OWN_BAR,
        )
        return self._targets.decode(y)

    def errors(self, model, samples, mesh=None) -> np.ndarray:
        """Relative L2 error of each sample [S], float64; `mesh` is not used."""
        batches = pipeline.evaluation_batches(samples, batch=1)
        large, console = len(samples[0]["x"]) >= OWN_BAR, Console(stderr=True)
        shown = self._progress and not large and console.is_terminal
        bar = Progress(console=console, transient=True, disable=not shown)
        errors = []
        with bar:
            for batch, _ in bar.track(batches, len(samples), description="samples"):
                real = batch.get("mask", ...)
                prediction, target = (
                    a[real].astype(np.float64)
                    for a in (self._predict(model, batch), batch["y"])
                )
                size = np.linalg.norm(target)
                errors.append(np.linalg.norm(prediction - target) / (size or 1))
        return np.array(errors)

    def fields(self, model, sample, mesh=None) -> np.ndarray:
        """Predicted fields [N, c_out] of one sample; `mesh` is not used."""
        return self._predict(model, {"x": sample["x"][None]})[0]


@dataclasses.dataclass(frozen=True)
class PDETask(Task):
    """A task with its data and predictor, for evaluation."""

    dataset: data.Dataset
    predictor: Predictor


def make_task(config: PDEConfig) -> PDETask:
    """The task of a config.

    Raises:
        ValueError: if the config asks for what the data or the model cannot give.
        OSError: if the data cannot be read.
    """
    check_model(config.model)
    dataset = make_dataset(config.data)
    held = None
    if config.validation:
        dataset, held = dataset.hold_out(config.validation)
    if config.gradient_weight and dataset.grid is None:
        raise ValueError(
            f"gradient_weight={config.gradient_weight} needs data on a grid; "
            f"{dataset.name} has none."
        )
    if len(dataset.train) < config.batch:
        raise ValueError(
            f"{len(dataset.train)} training samples do not fill batch={config.batch}."
        )
    per_epoch = len(dataset.train) // config.batch
    predictor = Predictor(dataset.targets, config.evaluation_batch)
    splits = {"test_error": dataset.test}
    selections = {"test_error": "best_on_test"}
    if held is not None:
        splits["validation_error"] = held
        selections["validation_error"] = "best_on_validation"

    init = functools.partial(
        make_model,
        config.model,
        dataset.channels,
        coordinates=dataset.coordinates,
        grid=dataset.grid,
    )

    def loss(model, batch, key, mesh):
        prediction = predict(model, batch, dataset.targets, mesh, key)
        value = losses.relative_l2(prediction, batch["y"], mask=batch.get("mask"))
        if config.gradient_weight:
            assert dataset.grid is not None
            # Without the padding that evens shards out.
            points = dataset.grid[0] * dataset.grid[1]
            value = value + config.gradient_weight * losses.relative_gradient_l2(
                prediction[:, :points], batch["y"][:, :points], dataset.grid
            )
        return value.mean()

    def batches(start, steps_per_call, mesh):
        return pipeline.training_batches(
            dataset.train,
            batch=config.batch,
            seed=config.seed,
            start=start,
            steps_per_call=steps_per_call,
            workers=config.workers,
            share=parallel.share(mesh),
        )

    def evaluate(model, mesh):
        return {
            name: float(predictor.errors(model, split, mesh).mean())
            for name, split in splits.items()
        }

    def finish(model, mesh, folder):
        draw({config.model.name: (model, predictor)}, dataset, mesh, folder)

    return PDETask(
        init=init,
        loss=loss,
        batches=batches,
        evaluate=evaluate,
        finish=finish,
        steps=config.epochs * per_epoch,
        interval=-(-config.epochs // config.evaluations) * per_epoch,
        samples=config.batch,
        fingerprint=dataset.fingerprint(),
        rows=[
            ("data", f"{dataset.name}, {dataset.quantity}"),
            ("samples", f"{len(dataset.train)} train, {len(dataset.test)} test"),
            ("points", f"{len(dataset.train[0]['x']):,} in the first sample"),
            ("model", config.model.name),
        ],
        selections=selections,
        dataset=dataset,
        predictor=predictor,
    )


def draw(
    runs: dict[str, tuple[Model, Predictor | ChunkedPredictor]],
    dataset: data.Dataset,
    mesh,
    folder: Path,
) -> dict[str, np.ndarray]:
    """Draws the test sample of median error and the distribution of errors.

    The median is that of the last of `runs`; all are drawn on the same sample.

    Returns:
        The test error of each sample [S], by run.
    """
    errors = {
        name: predictor.errors(model, dataset.test, mesh)
        for name, (model, predictor) in runs.items()
    }
    last = errors[list(runs)[-1]]
    # Not the nearest to the mean of two: rounding would decide between them.
    index = int(np.argsort(last, kind="stable")[(len(last) - 1) // 2])
    sample = dataset.test[index]
    predictions = {
        name: predictor.fields(model, sample, mesh)[:, 0]
        for name, (model, predictor) in runs.items()
    }
    if parallel.is_first():
        plots.fields(
            sample["x"][:, list(dataset.coordinates)],
            sample["y"][:, 0],
            predictions,
            folder / "fields.png",
            quantity=dataset.quantity,
            grid=dataset.grid,
            title=f"{dataset.name}, test sample {index} (of median error)",
        )
        plots.errors(errors, folder / "errors.png")
    return errors


def join(distributed: DistributedConfig) -> None:
    """Joins the other processes, if there are any."""
    if distributed.coordinator is not None:
        parallel.start_processes(
            distributed.coordinator,
            processes=distributed.processes,
            process=distributed.process,
        )


def main(argv: list[str] | None = None) -> None:
    config = configs.load(PDEConfig, argv)
    try:
        join(config.distributed)
        # Before data are read: whether processes agree, and there are the devices.
        check_processes(config)
        mesh = parallel.make_mesh(data=config.devices, context=config.context)
        parallel.share(mesh)
        check_folder(config)  # before data are generated in vain
        results = loop.run(config, make_task(config))
    except (ValueError, OSError) as error:
        configs.fail(str(error))
    except FloatingPointError as error:
        print(error, file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("interrupted; the same command goes on.", file=sys.stderr)
        raise SystemExit(130) from None
    if config.progress and parallel.is_first():
        for selection, errors in results.items():
            text = ", ".join(
                f"{k} {100 * v:.3f} %" for k, v in errors.items() if k != "step"
            )
            print(f"{TITLES[selection]}, step {errors['step']}: {text}")


if __name__ == "__main__":
    main()
