"""Single training steps: what they draw their noise from."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from train.config import OptimizerConfig
from train.optimizer import make_optimizer
from train.step import init_state, noise_key, train_step, train_steps


def setup(seed):
    """A state, and a step whose loss is its noise."""
    params = {"kernel": jnp.ones((3, 5))}
    optimizer = make_optimizer(OptimizerConfig(), 10, list(params))
    step = dict(
        loss_fn=lambda params, batch, key: (
            jax.random.normal(key) + 0 * params["kernel"].sum()
        ),
        optimizer=optimizer,
        ema=0.9,
        key=noise_key(seed),
    )
    return init_state(params, optimizer), step


def losses(state, options, steps):
    step = jax.jit(functools.partial(train_step, **options))
    found = []
    for _ in range(steps):
        state, metrics = step(state, {})
        found.append(float(metrics["loss"]))
    return state, found


def test_noise_follows_from_the_seed_and_the_step_alone():
    state, options = setup(0)
    middle, first = losses(state, options, 3)
    _, second = losses(middle, options, 4)
    whole = first + second
    assert len(set(whole)) == 7
    assert losses(state, options, 7)[1] == whole
    _, metrics = train_steps(state, {"x": jnp.zeros((7, 1))}, **options)
    np.testing.assert_array_equal(metrics["loss"], np.float32(whole))
    elsewhere = dataclasses.replace(state, step=jnp.int32(3))
    assert losses(elsewhere, options, 1)[1] == second[:1]
    assert not set(losses(*setup(1), 7)[1]) & set(whole)


def test_noise_shares_no_key_with_initialisation():
    # nnx.Rngs folds its count into the key of the seed.
    counts = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(3), i))
    keys = jax.random.key_data(counts(jnp.arange(10_000)))
    used = set(map(tuple, keys.tolist()))
    assert len(used) == 10_000
    data = lambda key: tuple(jax.random.key_data(key).tolist())
    assert data(noise_key(3)) not in used | {data(jax.random.key(3))}
