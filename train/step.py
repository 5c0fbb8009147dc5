"""Optimisation steps, as pure functions of the training state."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, Key

Params = Any
"""Arrays by parameter name."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a step reads and writes, and all that a checkpoint holds."""

    step: Int[Array, ""]
    params: Params
    average: Params
    optimizer: optax.OptState


def init_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step; the average starts at the weights."""
    average = jax.tree.map(jnp.copy, params)
    return TrainState(jnp.zeros((), jnp.int32), params, average, optimizer.init(params))


def noise_key(seed: int) -> Key[Array, ""]:
    """The key of a run that the keys of all its steps are folded from.

    Initialisation folds small counts into the key of the same seed.
    """
    return jax.random.fold_in(jax.random.key(seed), 2**32 - 1)


def train_step(
    state: TrainState,
    batch: dict[str, Array],
    *,
    loss_fn: Callable[[Params, dict[str, Array], Array], Float[Array, ""]],
    optimizer: optax.GradientTransformation,
    ema: float,
    key: Key[Array, ""],
) -> tuple[TrainState, dict[str, Array]]:
    """Takes one gradient step and returns the metrics of the old parameters.

    The step number is folded into the key, so that a resumed run draws the noise that
    one without interruption does.
    """
    key = jax.random.fold_in(key, state.step)
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch, key)
    updates, opt_state = optimizer.update(grads, state.optimizer, state.params)
    params = optax.apply_updates(state.params, updates)
    average = jax.tree.map(lambda a, p: ema * a + (1 - ema) * p, state.average, params)
    metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads)}
    return TrainState(state.step + 1, params, average, opt_state), metrics


def train_steps(
    state: TrainState, batches: dict[str, Array], **options
) -> tuple[TrainState, dict[str, Array]]:
    """Takes one step for each batch in [steps, B, ...], in one call.

    The numbers are those of `train_step` called in turn. One call saves dispatch
    and lets the steps share their temporary memory.
    """
    return jax.lax.scan(lambda s, b: train_step(s, b, **options), state, batches)
