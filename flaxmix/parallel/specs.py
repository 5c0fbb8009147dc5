"""Which mesh axis each array is split over, by name."""

import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

Rules = Sequence[tuple[str, P]]

REPLICATED: Rules = ((r".*", P()),)
"""Every device holds all parameters."""


def match_specs(rules: Rules, names: Sequence[str]) -> dict[str, P]:
    """The spec of each parameter: that of the first rule whose pattern it contains.

    Args:
        rules: ordered (regular expression, spec) pairs.
        names: of all parameters.

    Raises:
        ValueError: if no rule matches a parameter, or a rule is the first match of
            no parameter.
    """
    specs, unused = {}, dict.fromkeys(pattern for pattern, _ in rules)
    for name in names:
        for pattern, spec in rules:
            if re.search(pattern, name):
                specs[name] = spec
                unused.pop(pattern, None)
                break
        else:
            raise ValueError(f"no rule matches parameter {name!r}.")
    if unused:
        raise ValueError(f"rule {next(iter(unused))!r} matches no parameter.")
    return specs


def state_shardings(state: Any, specs: dict[str, P], mesh: Mesh) -> Any:
    """Shardings of a training state, whose parameters come in several copies.

    Weights, averages and optimiser moments are dictionaries by parameter name; each
    entry is sharded like its parameter. All else is replicated.
    """

    def sharding(path, leaf):
        names = [k.key for k in path if isinstance(k, jax.tree_util.DictKey)]
        name = next((n for n in reversed(names) if n in specs), None)
        return NamedSharding(mesh, P() if name is None else specs[name])

    return jax.tree.map_with_path(sharding, state)


def batch_sharding(mesh: Mesh, *, stacked: bool = False) -> NamedSharding:
    """Sharding of arrays [B, N, ...], or [steps, B, N, ...] if stacked."""
    axes = ("data", "context")
    return NamedSharding(mesh, P(None, *axes) if stacked else P(*axes))


def replicated(mesh: Mesh) -> NamedSharding:
    """Sharding of what every device holds whole, such as a model."""
    return NamedSharding(mesh, P())


def replicate(x: jax.Array, mesh: Mesh) -> jax.Array:
    """Inside `jax.jit`: x as every device, and so every process, has it whole."""
    return jax.lax.with_sharding_constraint(x, replicated(mesh))
