"""Trains a surrogate of a PDE solver.

python -m train.pde configs/pde/elasticity.py [--field value ...]
"""

import dataclasses
import functools
import sys
from pathlib import Path

import jax
import numpy as np

from flaxmix import data, losses, parallel
from flaxmix.data import darcy, elasticity, pipeline
from train import config as configs, loop, plots
from train.config import DarcyConfig, ElasticityConfig, PDEConfig
from train.folder import check_folder
from train.models import Model, check_model, make_model
from train.task import Task

TITLES = {
    "final": "final",
    "best_on_test": "best on test (how the papers select: optimistic)",
    "best_on_validation": "best on validation",
}


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


class Predictor:
    """Predictions in physical units, for whole splits of any size.

    Every sample is used once, whatever the batch and the number of devices.
    """

    def __init__(self, targets: data.Normalizer, batch: int):
        self._targets, self._batch = targets, batch
        self._jitted = jax.jit(self._predict)

    def _predict(self, model, batch):
        y = model(batch["x"], mask=batch.get("mask"))
        prediction = self._targets.decode(y)
        mask = batch.get("mask")
        return prediction, losses.relative_l2(prediction, batch["y"], mask=mask)

    def batches(self, samples, shards: int):
        """Every sample once, as (batch, how many of its rows are samples)."""
        # Filling up is internal, so the batch may grow to suit the devices.
        size = -(-self._batch // shards) * shards
        return pipeline.evaluation_batches(samples, batch=size)

    def _run(self, model, samples, mesh):
        sharding = parallel.batch_sharding(mesh)
        for batch, count in self.batches(samples, parallel.batch_shards(mesh)):
            fields, errors = self._jitted(model, jax.device_put(batch, sharding))
            yield np.asarray(fields)[:count], np.asarray(errors, np.float64)[:count]

    def errors(self, model, samples, mesh) -> np.ndarray:
        """Relative L2 error of each sample [S], float64."""
        return np.concatenate([e for _, e in self._run(model, samples, mesh)])

    def fields(self, model, sample, mesh) -> np.ndarray:
        """Predicted fields [N, c_out] of one sample."""
        ((fields, _),) = self._run(model, [sample], mesh)
        return fields[0, : len(sample["x"])]


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

    def loss(model, batch, key):
        mask = batch.get("mask")
        y = model(batch["x"], mask=mask, key=key)
        prediction = dataset.targets.decode(y)
        value = losses.relative_l2(prediction, batch["y"], mask=mask)
        if config.gradient_weight:
            assert dataset.grid is not None
            value = value + config.gradient_weight * losses.relative_gradient_l2(
                prediction, batch["y"], dataset.grid
            )
        return value.mean()

    def batches(start, steps_per_call):
        return pipeline.training_batches(
            dataset.train,
            batch=config.batch,
            seed=config.seed,
            start=start,
            steps_per_call=steps_per_call,
            workers=config.workers,
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
    runs: dict[str, tuple[Model, Predictor]],
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
    index = int(np.abs(last - np.median(last)).argmin())
    sample = dataset.test[index]
    plots.fields(
        sample["x"][:, list(dataset.coordinates)],
        sample["y"][:, 0],
        {
            name: predictor.fields(model, sample, mesh)[:, 0]
            for name, (model, predictor) in runs.items()
        },
        folder / "fields.png",
        quantity=dataset.quantity,
        grid=dataset.grid,
        title=f"{dataset.name}, test sample {index} (nearest the median error)",
    )
    plots.errors(errors, folder / "errors.png")
    return errors


def main(argv: list[str] | None = None) -> None:
    config = configs.load(PDEConfig, argv)
    try:
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
    if config.progress:
        for selection, errors in results.items():
            text = ", ".join(
                f"{k} {100 * v:.3f} %" for k, v in errors.items() if k != "step"
            )
            print(f"{TITLES[selection]}, step {errors['step']}: {text}")


if __name__ == "__main__":
    main()
