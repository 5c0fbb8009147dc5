"""What a training run is about: everything that the loop does not know."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import Mesh

from flaxmix import parallel
from flaxmix.parameters import named_parameters
from train.optimizer import make_optimizer
from train.step import TrainState, init_state

Batch = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Task:
    """A model, its data and its errors.

    Attributes:
        init: makes the model from a key.
        loss: mean loss of a batch [B, ...], as loss(model, batch, key, mesh); the key
            is for dropout and noise.
        batches: this process's share of batches without end from a step on, [steps,
            B, ...] for one call each, as batches(start, steps_per_call, mesh).
        evaluate: errors of a model on whole splits, as evaluate(model, mesh).
        finish: draws what people look at, as finish(model, mesh, folder).
        steps: of the whole run.
        interval: steps between evaluations.
        samples: a step.
        fingerprint: of the data.
        rows: of the start-up table.
        selections: errors whose smallest value over the run is reported, each with
            the name of that way to select.
    """

    init: Callable[[jax.Array], nnx.Module]
    loss: Callable[[Any, Batch, jax.Array, Mesh], jax.Array]
    batches: Callable[[int, int, Mesh], Iterator[Batch]]
    evaluate: Callable[[Any, Mesh], dict[str, float]]
    finish: Callable[[Any, Mesh, Path], None]
    steps: int
    interval: int
    samples: int
    fingerprint: str
    rows: Sequence[tuple[str, str]]
    selections: dict[str, str]

    def abstract_model(self) -> nnx.Module:
        """The model with shapes in place of arrays."""
        return nnx.eval_shape(lambda: self.init(jax.random.key(0)))


@dataclasses.dataclass(frozen=True)
class Plan:
    """Shapes and shardings of a run, before anything is computed.

    Attributes:
        model: the model with shapes in place of arrays.
        optimizer: its optimiser.
        init: makes the training state from a key.
        abstract: shapes and dtypes of the training state.
        shardings: of the training state.
    """

    model: nnx.Module
    optimizer: optax.GradientTransformation
    init: Callable[[jax.Array], TrainState]
    abstract: TrainState
    shardings: TrainState


def plan(config: Any, task: Task, mesh: Mesh) -> Plan:
    """Lays a run out on a mesh.

    Raises:
        ValueError: if no decay or sharding rule matches a parameter.
    """
    model = task.abstract_model()
    names = list(named_parameters(model))
    optimizer = make_optimizer(config.optimizer, task.steps, names)
    init = lambda key: init_state(named_parameters(task.init(key)), optimizer)
    abstract = jax.eval_shape(init, jax.random.key(config.seed))
    specs = parallel.match_specs(parallel.REPLICATED, names)
    shardings = parallel.state_shardings(abstract, specs, mesh)
    return Plan(model, optimizer, init, abstract, shardings)
