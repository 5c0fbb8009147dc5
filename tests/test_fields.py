"""Every field of a config has an effect on what is computed."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from flaxmix import parallel
from flaxmix.data import darcy
from flaxmix.parameters import with_parameters
from train import config as configs, loop, pde
from train.config import DarcyConfig, ModelConfig, OptimizerConfig, PDEConfig
from train.step import noise_key, train_step
from train.task import plan

CHANGES = {
    "data.folder": "other",
    "data.train": 6,
    "data.test": 5,
    "data.stride": 2,
    "model.name": "simplified_flarepp",
    "model.channels": 16,
    "model.blocks": 3,
    "model.heads": 4,
    "model.latents": 5,
    "model.mlp_ratio": 3.0,
    "model.mlp_layers": 1,
    "model.io_layers": 1,
    "model.norm": "rms",
    "model.dropout": 0.1,
    "model.options": {"share": False},
    "model.remat": True,
    "model.dtype": "bfloat16",
    "optimizer.learning_rate": 2e-3,
    "optimizer.weight_decay": 1e-2,
    "optimizer.decay": "reference",
    "optimizer.warmup": 0.2,
    "optimizer.initial_division": 10.0,
    "optimizer.final_division": 10.0,
    "optimizer.beta1": 0.97,
    "optimizer.beta1_low": None,
    "optimizer.beta2": 0.9,
    "optimizer.eps": 1e-6,
    "optimizer.clip": 0.1,
    "optimizer.ema": 0.9,
    "epochs": 7,
    "batch": 2,
    "evaluation_batch": 3,
    "validation": 2,
    "gradient_weight": 0.2,
    "seed": 1,
    "evaluations": 2,
    "checkpoint_every": 3,
    "steps_per_call": 2,
    "devices": 2,
    "context": 2,
}
# The rules differ in parameters that this model has.
BASES = {"optimizer.decay": ("model.name", "transolver")}
ELSEWHERE = {
    "data.name": "chosen by the class of the data config",
    "data.resolution": "of generated data, in test_generation_fields",
    "data.seed": "of generated data, in test_generation_fields",
    "distributed.coordinator": "test_processes",
    "distributed.processes": "test_processes",
    "distributed.process": "test_processes",
    "workers": "test_pipeline and test_training",
    "run": "test_training",
    "progress": "test_training",
}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for name, seed in (("darcy", 0), ("other", 1)):
        darcy.generate(
            folder / name, train=8, test=7, resolution=9, seed=seed, progress=False
        )
    return PDEConfig(
        data=DarcyConfig(folder=folder / "darcy", train=8, test=7, stride=1),
        model=ModelConfig(channels=8, blocks=2, heads=2, latents=3, io_layers=0),
        optimizer=OptimizerConfig(),
        epochs=6,
        batch=4,
        evaluation_batch=4,
        evaluations=1,
        run=folder / "run",
    )


def signature(config):
    """All that a run would compute, without computing it."""
    task = pde.make_task(config)
    size = loop.steps_per_call(
        config.steps_per_call, task.interval, task.steps, config.checkpoint_every
    )
    mesh = parallel.make_mesh(data=config.devices, context=config.context)
    batches = [
        {k: a.tobytes() for k, a in batch.items()}
        for batch in itertools.islice(task.batches(0, 1, mesh), 3)
    ]
    layout = plan(config, task, mesh)
    key = jax.random.key(config.seed)
    batch = jax.tree.map(lambda a: a[0], next(task.batches(0, 1, mesh)))
    step = lambda state, batch: train_step(
        state,
        batch,
        loss_fn=lambda p, b, key: task.loss(
            with_parameters(layout.model, p), b, key, mesh
        ),
        optimizer=layout.optimizer,
        ema=config.optimizer.ema,
        key=noise_key(config.seed),
    )
    sizes = [b["x"].shape for b, _ in task.predictor.batches(task.dataset.test, mesh)]
    return (
        (task.steps, task.interval, size, task.fingerprint, sorted(task.selections)),
        mesh.shape,
        batches,
        jax.random.key_data(key).tolist(),
        str(jax.make_jaxpr(layout.init)(key)),
        str(jax.make_jaxpr(step)(layout.abstract, batch)),
        sizes,
    )


def leaves(config, prefix=""):
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def changed(config, path, value):
    head, _, rest = path.partition(".")
    if rest:
        value = changed(getattr(config, head), rest, value)
    return dataclasses.replace(config, **{head: value})


def test_every_field_is_listed(config):
    assert set(leaves(config)) == {*CHANGES, *ELSEWHERE}


@pytest.fixture(scope="module")
def before(config):
    return signature(config)


def test_the_same_config_computes_the_same(config, before):
    assert signature(config) == before


@pytest.mark.parametrize("path", CHANGES)
def test_a_field_changes_what_is_computed(config, before, path):
    value = CHANGES[path]
    if path == "data.folder":
        value = config.data.folder.parent / value
    if path in BASES:
        config = changed(config, *BASES[path])
        before = signature(config)
    after = signature(changed(config, path, value))
    assert after != before
    # And only a change of numbers makes a run another one.
    free = configs.first_difference(config, changed(config, path, value)) is None
    assert free == (path in configs.FREE)


def test_generation_fields(tmp_path, monkeypatch):
    monkeypatch.setenv("FLAXMIX_CACHE", str(tmp_path))
    load = lambda **kwargs: pde.make_dataset(
        DarcyConfig(train=2, test=2, **{"stride": 1, "resolution": 9, **kwargs})
    )
    first, other = load(), load(seed=1)
    assert first.grid == (9, 9)
    assert load(resolution=11).grid == (11, 11)
    assert first.fingerprint() != other.fingerprint()
    assert first.fingerprint() == load().fingerprint()
    assert not np.array_equal(first.train[0]["y"], other.train[0]["y"])
