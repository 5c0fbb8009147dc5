"""Floating-point operations of a function, counted in its jaxpr."""

import math
from collections.abc import Callable

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


def _inner(params):
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, core.ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, core.Jaxpr):
                yield item
