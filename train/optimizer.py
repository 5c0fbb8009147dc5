"""AdamW with decay groups, one-cycle learning rate and momentum, and clipping."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from train.config import OptimizerConfig

Schedule = Callable[[Any], jax.Array]

DECAY: Sequence[tuple[str, frozenset[str]]] = (
    (r"kernel", frozenset({"matrices", "reference"})),
    # In the authors' code a parameter decays unless its name tells of a bias, a norm,
    # an embedding, a latent or a gate. The names of these do not.
    (r"temperature|inducing|placeholder", frozenset({"reference"})),
    (r"bias|scale|latents|seeds|reference|gate|packed|offset", frozenset()),
)
"""By which `OptimizerConfig.decay` weight decay applies to parameters of a name."""


def decayed(names: Sequence[str], rule: str = "matrices") -> dict[str, bool]:
    """Whether each parameter is decayed.

    Args:
        names: dotted names of all parameters.
        rule: `OptimizerConfig.decay`.

    Raises:
        ValueError: if `DECAY` has no entry for a name.
    """
    groups = {}
    for name in names:
        last = name.rpartition(".")[2]
        matches = [rule in rules for kind, rules in DECAY if re.fullmatch(kind, last)]
        if not matches:
            raise ValueError(f"no decay rule matches parameter {name!r}.")
        groups[name] = matches[0]
    return groups


def one_cycle(config: OptimizerConfig, steps: int) -> tuple[Schedule, Schedule]:
    """Learning rate and beta1 of step s = 0 ... steps - 1 (Smith & Topin 2018).

    Two half cosines: up from rate / initial_division to rate over the first `warmup`
    of the steps, then down to rate / (initial_division final_division). With
    `beta1_low`, beta1 runs the other way, from beta1 to beta1_low and back.
    """
    # At least one step of warm-up, also where `warmup` of the steps is less.
    up = max(config.warmup * steps, 1 + 1e-6) - 1
    last = max(steps - 1, up + 1e-6)
    peak, low = config.learning_rate, config.beta1_low
    first = peak / config.initial_division
    final = first / config.final_division

    def blend(step, start, middle, end):
        step = jnp.asarray(step).astype(jnp.result_type(float))
        # sin^2 instead of (1 + cos) / 2, which cancels where the rate is small.
        part = lambda p: jnp.square(jnp.sin(jnp.pi / 2 * p))
        rising = start + (middle - start) * part(step / up)
        falling = end + (middle - end) * part((last - step) / (last - up))
        return jnp.where(step <= up, rising, falling)

    def beta1(step):
        if low is None:
            return jnp.full((), config.beta1, jnp.result_type(float))
        return blend(step, config.beta1, low, config.beta1)

    return (lambda step: blend(step, first, peak, final)), beta1


def _clip(limit: float) -> optax.GradientTransformation:
    """Scales gradients by min(1, limit / (norm + 1e-6)), as PyTorch does."""

    def update(updates, state, params=None):
        factor = jnp.minimum(1, limit / (optax.tree.norm(updates) + 1e-6))
        return jax.tree.map(lambda g: g * factor, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def make_optimizer(
    config: OptimizerConfig, steps: int, names: Sequence[str]
) -> optax.GradientTransformation:
    """p = p - lr (m / (sqrt v + eps) + decay p), with bias-corrected m and v.

    Args:
        config: rates, betas and limits.
        steps: of the whole schedule.
        names: of all parameters.

    Raises:
        ValueError: if no decay rule matches a name.
    """
    rate, beta1 = one_cycle(config, steps)
    adam = optax.inject_hyperparams(optax.scale_by_adam, static_args=("b2", "eps"))
    return optax.chain(
        _clip(config.clip),
        adam(b1=beta1, b2=config.beta2, eps=config.eps),
        optax.add_decayed_weights(
            config.weight_decay, mask=decayed(names, config.decay)
        ),
        optax.scale_by_learning_rate(rate),
    )
