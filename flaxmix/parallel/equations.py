"""What one chunk of the points computes, as equations.

A chunk of points on one device, one after another, is what a shard on many devices is,
and `jax.make_jaxpr` shows what a shard does: equations, some of which are reductions
over all shards. Values are local, of which every chunk has its own, or shared, which
are the same for all chunks: parameters, results of reductions and what follows from
these alone.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.extend import core

# That equations can be evaluated by primitive.bind(*operands, **params) is how JAX
# documents interpreters of its own. The names of primitives and of their parameters are
# not promised anywhere; what is unknown here, and names the axis, is refused.
REDUCTIONS = ("psum", "pmax", "pmin", "all_gather")
# Of those with a derivative of their own, only the function counts here.
_CALLS = ("jit", "closed_call", "remat2", "custom_jvp_call", "custom_vjp_call")


@dataclasses.dataclass(eq=False)
class Value:
    """What an equation computes, or with `val` a number that is part of the model."""

    aval: Any
    val: Any = None


@dataclasses.dataclass(eq=False)
class Equation:
    """outputs = primitive(inputs); `body` is that of a scan that holds reductions."""

    primitive: Any
    params: dict[str, Any]
    inputs: list[Value]
    outputs: list[Value]
    body: "Program | None" = None

    @property
    def name(self) -> str:
        return self.primitive.name

    @property
    def plain(self) -> bool:
        """Whether a chunk by itself can compute it."""
        return self.body is None and self.name not in REDUCTIONS


@dataclasses.dataclass(eq=False)
class Program:
    """Equations from inputs to outputs, called functions being written out."""

    inputs: list[Value]
    equations: list[Equation]
    outputs: list[Value]


def trace(function: Callable, axis: str, chunks: int, *arguments: Any) -> Program:
    """The program of function(*arguments) for one of so many chunks.

    Raises:
        ValueError: if points meet otherwise than through reductions.
    """
    try:
        make = jax.make_jaxpr(function, axis_env=[(axis, chunks)])
        closed = make(*arguments)
    except NotImplementedError as error:
        raise _direct(str(error)) from error
    return _program(closed.jaxpr, closed.consts, axis)


def _direct(how: str) -> ValueError:
    return ValueError(
        f"this model's points attend to each other directly ({how}); only models whose "
        "points meet through sums, maxima and gathered parts, outside of loops or in "
        "a scan over layers, can be run in chunks."
    )


def _program(jaxpr: Any, consts: Sequence[Any], axis: str) -> Program:
    inputs = [Value(v.aval) for v in jaxpr.invars]
    return Program(inputs, *_inline(jaxpr, consts, inputs, axis))


def _inline(jaxpr, consts, inputs, axis) -> tuple[list[Equation], list[Value]]:
    consts = [Value(v.aval, c) for v, c in zip(jaxpr.constvars, consts, strict=True)]
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], consts + inputs, strict=True))
    literal = lambda v: isinstance(v, core.Literal)
    read = lambda v: Value(v.aval, v.val) if literal(v) else known[v]
    equations = []
    for eqn in jaxpr.eqns:
        name, operands = eqn.primitive.name, [read(v) for v in eqn.invars]
        bodies = list(_bodies(eqn.params))
        if name in _CALLS:
            [(body, own)] = bodies
            inner, outputs = _inline(body, own, operands, axis)
            equations += inner
        else:
            outputs = [Value(v.aval) for v in eqn.outvars]
            body = _check(eqn, bodies, axis)
            equations.append(
                Equation(eqn.primitive, eqn.params, operands, outputs, body)
            )
        known.update(zip(eqn.outvars, outputs, strict=True))
    return equations, [read(v) for v in jaxpr.outvars]


def _check(eqn: Any, bodies: list, axis: str) -> Program | None:
    """The body of a scan over layers, if the axis is used there."""
    name, params = eqn.primitive.name, eqn.params
    if _names(params, axis):
        grouped = params.get("axis_index_groups") is not None
        if grouped or name not in (*REDUCTIONS, "axis_index"):
            raise _direct(name)
    used = next(filter(None, (_uses(body, axis) for body, _ in bodies)), None)
    if used is None:
        return None
    [(body, consts), *others] = bodies
    ends = zip(eqn.outvars, body.outvars, strict=True)
    if (
        name != "scan"
        or others
        or params["reverse"]
        # What the layers collect has an axis more.
        or any(out.aval.ndim != end.aval.ndim for out, end in ends)
    ):
        raise _direct(f"{used} in {name}")
    return _program(body, consts, axis)


def _bodies(params: dict[str, Any]) -> Iterator[tuple[Any, Sequence[Any]]]:
    """Functions inside an equation, and their constants."""
    for param in params.values():
        for body in param if isinstance(param, tuple | list) else (param,):
            if isinstance(body, core.ClosedJaxpr):
                yield body.jaxpr, body.consts
            elif isinstance(body, core.Jaxpr):
                yield body, ()


def _names(params: dict[str, Any], axis: str) -> bool:
    return any(
        isinstance(name, str) and name == axis
        for param in params.values()
        for name in (param if isinstance(param, tuple | list) else (param,))
    )


def _uses(jaxpr: Any, axis: str) -> str | None:
    """The first primitive inside that names the axis."""
    for eqn in jaxpr.eqns:
        if _names(eqn.params, axis):
            return eqn.primitive.name
        for body, _ in _bodies(eqn.params):
            if found := _uses(body, axis):
                return found
    return None


def layers_of(e: Equation) -> tuple[list, list, list]:
    """Constants, carries and layers of a scan, as (value inside, value outside)."""
    assert e.body is not None
    pairs = list(zip(e.body.inputs, e.inputs, strict=True))
    # By their axes: how a scan names its parts differs between versions of JAX.
    each = sum(outer.aval.ndim > inner.aval.ndim for inner, outer in pairs)
    stop = len(pairs) - each
    start = stop - len(e.outputs)
    return pairs[:start], pairs[start:stop], pairs[stop:]


def spread(program: Program, local: set[Value]) -> None:
    """Adds to `local` what follows from it and from the number of the chunk."""
    for e in program.equations:
        if e.body is None:
            follows = e.plain and not local.isdisjoint(e.inputs)
            if follows or e.name == "axis_index":
                local.update(e.outputs)
            continue
        consts, carry, each = layers_of(e)
        if any(outer in local for _, outer in each):
            raise _direct("points as layers")
        local.update(inner for inner, outer in consts + carry if outer in local)
        seen = 0
        while seen < len(local):
            seen = len(local)
            spread(e.body, local)
            ends = zip(carry, e.body.outputs, strict=True)
            local.update(begin for (begin, _), end in ends if end in local)
        outputs = zip(e.outputs, carry, strict=True)
        local.update(out for out, (begin, _) in outputs if begin in local)


def evaluate(equations: Iterable[Equation], known: dict[Value, Any], index: Any):
    """Evaluates plain equations, adding to `known`."""
    for e in equations:
        if e.name == "axis_index":
            results = index
        else:
            operands = [known[v] if v.val is None else v.val for v in e.inputs]
            results = e.primitive.bind(*operands, **e.params)
        results = results if e.primitive.multiple_results else [results]
        known.update(zip(e.outputs, results, strict=True))
