"""Floating-point operations and collectives of a function, counted in its jaxpr."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core


def count_flops(function: Callable, *args) -> int:
    """Operations of all matrix products, two for each multiply-add.

    Loops count as often as they run, derivatives as they are written; elementwise
    work, a few per cent here, is left out.

    Args:
        function: any traceable function.
        *args: arrays or `jax.ShapeDtypeStruct`s.
    """
    return _count(jax.make_jaxpr(function)(*args).jaxpr)


def _count(jaxpr: core.Jaxpr) -> int:
    return sum(_equation(equation) for equation in jaxpr.eqns)


def _equation(equation) -> int:
    if equation.primitive.name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        return (
            2
            * equation.outvars[0].aval.size
            * math.prod(shape[axis] for axis in contracted)
        )
    inner = sum(_count(jaxpr) for jaxpr in _inner(equation.params))
    return inner * equation.params.get("length", 1)


@dataclasses.dataclass(frozen=True)
class Collective:
    """An exchange between the devices of a mesh axis.

    Attributes:
        name: "sum", "maximum", "gather" or "permute".
        shape: what each device puts in.
        bytes: of that.
        times: how often it is done.
    """

    name: str
    shape: tuple[int, ...]
    bytes: int
    times: int


# By the names of JAX's primitives; "pvary" and its like move nothing.
_COLLECTIVES = {
    "psum": "sum",
    "psum_invariant": "sum",
    "pmax": "maximum",
    "all_gather": "gather",
    "all_gather_invariant": "gather",
    "ppermute": "permute",
}


def collectives(function: Callable, *args) -> list[Collective]:
    """The collectives inside `jax.shard_map` of a function, in order.

    Loops count as often as they run; a `fori_loop` of unknown length is an error.

    Args:
        function: any traceable function. Its mesh may be a `jax.sharding.AbstractMesh`:
            no devices are needed.
        *args: arrays or `jax.ShapeDtypeStruct`s.
    """
    return list(_exchanges(jax.make_jaxpr(function)(*args).jaxpr, 1))


def _exchanges(jaxpr: Any, times: int) -> Iterator[Collective]:
    for equation in jaxpr.eqns:
        name = _COLLECTIVES.get(equation.primitive.name)
        if name is not None:
            for array in (variable.aval for variable in equation.invars):
                size = array.size * array.dtype.itemsize
                yield Collective(name, array.shape, size, times)
        inner = times * equation.params.get("length", 1)
        for jaxpr in _inner(equation.params):
            found = list(_exchanges(jaxpr, inner))
            if found and equation.primitive.name == "while":
                raise ValueError(f"{found[0]} is in a loop of unknown length.")
            yield from found


def _inner(params):
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, core.ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, core.Jaxpr):
                yield item
