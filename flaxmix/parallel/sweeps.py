"""Equations of a chunk in the order of sweeps over all chunks.

    Shared   computes shared values from shared values, once
    Sweep    goes through all chunks, up to the next reductions
    Layers   does steps of its own for each layer of a scan over depth

Few sweeps touch the points. What a chunk needs in several is recomputed from its
points, unless it is small, such as its maximum: that is kept for each chunk, and a
sweep over what was kept alone costs next to nothing. So a softmax over all points is
one sweep: the maximum and the sums of each chunk, then the maximum of all, then small
sums that are rescaled by it.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp

from flaxmix.parallel.equations import (
    Equation,
    Program,
    Value,
    evaluate,
    layers_of,
    spread,
)


@dataclasses.dataclass(eq=False)
class Segment:
    """Compiled equations, run(shared, replaced, local, index) -> outputs.

    `index` is the number of the chunk; the buffers of `replaced` go to the outputs.
    """

    shared: list[Value]
    replaced: list[Value]
    local: list[Value]
    run: Callable[..., list[jax.Array]]


@dataclasses.dataclass(eq=False)
class Shared:
    """Shared values, computed once."""

    outputs: list[Value]
    segment: Segment


@dataclasses.dataclass(eq=False)
class Sweep:
    """Goes through all chunks: operands of reductions, then values to be stored.

    A write is a value and the name that it is stored by. `points` tells whether more
    than small values are read.
    """

    reductions: list[Equation]
    writes: list[tuple[Value, Value]]
    points: bool
    segment: Segment


@dataclasses.dataclass(eq=False)
class Layers:
    """A scan over depth: `steps` for each layer.

    Pairs are (value inside, value outside); `carry` (first value, last value) of what
    all chunks share.
    """

    length: int
    shared: list[tuple[Value, Value]]
    stored: list[tuple[Value, Value]]
    each: list[tuple[Value, Value]]
    carry: list[tuple[Value, Value]]
    outputs: list[tuple[Value, Value]]
    steps: "list[Step]"


Step = Shared | Sweep | Layers


def compiled(
    equations: list[Equation],
    given: set[Value],
    local: set[Value],
    outputs: list[Value],
    replaced: Iterable[Value] = (),
) -> Segment:
    """The equations that lead from given values to the outputs."""
    chosen, wanted = _lead(equations, given, outputs)
    inputs = list(dict.fromkeys(v for v in wanted if v in given))
    taken = [v for v in inputs if v in local and v in replaced]
    rest = [v for v in inputs if v in local and v not in taken]
    shared = [v for v in inputs if v not in local]

    def run(shared_values, taken_values, rest_values, index):
        values = [*shared_values, *taken_values, *rest_values]
        known = dict(zip([*shared, *taken, *rest], values, strict=True))
        evaluate(chosen, known, index)
        return [known[v] if v.val is None else jnp.asarray(v.val) for v in outputs]

    return Segment(shared, taken, rest, jax.jit(run, donate_argnums=1))


def _lead(equations, given, outputs) -> tuple[list[Equation], dict[Value, None]]:
    """Equations that outputs need besides what is given, and all that they use."""
    wanted, chosen = dict.fromkeys(v for v in outputs if v.val is None), []
    for e in reversed(equations):
        if any(o in wanted and o not in given for o in e.outputs):
            chosen.append(e)
            wanted |= dict.fromkeys(v for v in e.inputs if v.val is None)
    return chosen[::-1], wanted


def plan(program: Program, local: set[Value], chunk: int) -> tuple[list[Step], Value]:
    """Steps to the one output of a program, and the name that it is stored by.

    Args:
        program: of one chunk.
        local: its inputs that differ from chunk to chunk.
        chunk: points of a chunk.
    """
    spread(program, local)
    result = Value(program.outputs[0].aval)
    planner = _Planner(program, local, chunk)
    return planner.order([(program.outputs[0], result)], []), result


class _Planner:
    """Orders the equations of one program, and those of its scans."""

    def __init__(self, program: Program, local: set[Value], chunk: int):
        self.local, self.chunk = local, chunk
        self.equations, _ = _lead(program.equations, set(), program.outputs)
        self.shared = {v for v in program.inputs if v not in local}
        self.stored = {v for v in program.inputs if v in local}
        self.steps: list[Step] = []
        values = [*program.inputs, *(o for e in self.equations for o in e.outputs)]
        largest = max(math.prod(v.aval.shape) for v in values if v in local)
        self.limit = largest // 4
        # What follows from literals alone is cheaper computed anew than handed on.
        self.constant: set[Value] = set()
        # What follows from points, not from the number of the chunk alone.
        self.held = set(self.stored)
        for e in self.equations:
            if e.plain and e.name != "axis_index" and self.known(e, self.constant):
                self.constant.update(e.outputs)
            if e.body is not None or not self.held.isdisjoint(e.inputs):
                self.held.update(o for o in e.outputs if o in local)

    @staticmethod
    def known(e: Equation, values: set[Value]) -> bool:
        return all(v.val is not None or v in values for v in e.inputs)

    def small(self, v: Value) -> bool:
        """Whether a local value has no axis of points, and is small beside others.

        A width that happens to be a multiple of the chunk looks like one, which costs
        more sweeps, but changes no number.
        """
        # Keys have no place outside of JAX.
        if jnp.issubdtype(v.aval.dtype, jax.dtypes.extended):
            return False
        points = any(size % self.chunk == 0 for size in v.aval.shape)
        return not points and math.prod(v.aval.shape) <= self.limit

    def light(self, v: Value) -> bool:
        return v not in self.local or self.small(v)

    def reach(self, given: set[Value], allowed: Callable[[Value], bool]) -> set[Value]:
        """All values that follow from given ones, by allowed ones alone."""
        reached = {v for v in given if allowed(v)}
        for e in self.equations:
            if e.plain and self.known(e, reached) and all(map(allowed, e.outputs)):
                reached.update(e.outputs)
        return reached

    def order(
        self, writes: list[tuple[Value, Value]], results: list[Value]
    ) -> list[Step]:
        """Steps that store the writes, as (value, name), and compute shared results."""
        for e in self.equations:
            if e.body is not None:
                self.scan(e)
        self.advance(writes, results)
        return self.steps

    def scan(self, e: Equation) -> None:
        assert e.body is not None
        local = self.local
        consts, carry, each = layers_of(e)
        begins = [begin for begin, _ in carry]
        shared = [pair for pair in consts + carry if pair[0] not in local]
        stored = [(i, o) for i, o in consts if i in local and o in self.stored]
        fresh = [pair for pair in consts if pair[0] in local and pair not in stored]
        fresh += [pair for pair in carry if pair[0] in local]
        self.advance(
            [(outer, inner) for inner, outer in fresh],
            [outer for _, outer in shared + each],
        )
        ends = list(zip(begins, e.body.outputs, strict=True))
        carried = [pair for pair in ends if pair[0] not in local]
        # Each chunk's carry takes the place of the last layer's.
        steps = _Planner(e.body, local, self.chunk).order(
            [(end, begin) for begin, end in ends if begin in local],
            [end for _, end in carried],
        )
        outputs = list(zip(begins, e.outputs, strict=True))
        self.steps.append(
            Layers(e.params["length"], shared, stored, each, carried, outputs, steps)
        )
        self.stored.update(o for o in e.outputs if o in local)
        self.shared.update(o for o in e.outputs if o not in local)

    def advance(self, writes: list[tuple[Value, Value]], results: list[Value]) -> None:
        """Steps up to these writes and results, but for scans."""
        goal = [*results, *(v for v, _ in writes)]
        last = None
        while True:
            self.share(results)
            given = self.shared | self.stored
            reached, kept = self.reach(given, self.light), []
            now = self.ready(reached)
            if not now:
                needed, _ = _lead(self.equations, given, goal)
                if all(e.plain for e in needed):
                    break
                reached = self.reach(given, lambda v: True)
                now, kept = self.ready(reached), self.kept(reached, given)
                last = len(self.steps), given, reached
            self.steps.append(self.sweep(now, [(v, v) for v in kept], given))
            self.shared.update(o for e in now for o in e.outputs)
            self.stored.update(kept)
        if last and all(v.val is not None or v in last[2] for v, _ in writes):
            # The last sweep over the points can store them, too.
            place, given, _ = last
            sweep = self.steps[place]
            assert isinstance(sweep, Sweep)
            writes = sweep.writes + writes
            self.steps[place] = self.sweep(sweep.reductions, writes, given)
        elif writes:
            self.steps.append(self.sweep([], writes, given))

    def share(self, results: list[Value]) -> None:
        """A step for the shared values that can be computed now and are of use."""
        reached = self.reach(self.shared, lambda v: v not in self.local)
        fresh = reached - self.shared
        used = {
            v
            for e in self.equations
            if not reached.issuperset(e.outputs)
            for v in e.inputs
            if v not in self.constant
        }
        wanted = used.union(results)
        ordered = (o for e in self.equations for o in e.outputs)
        outputs = [o for o in ordered if o in fresh and o in wanted]
        if outputs:
            segment = compiled(self.equations, self.shared, self.local, outputs)
            self.steps.append(Shared(outputs, segment))
            self.shared.update(outputs)

    def ready(self, reached: set[Value]) -> list[Equation]:
        """Reductions that can be done."""
        return [
            e
            for e in self.equations
            if e.body is None
            and not e.plain
            and self.known(e, reached)
            and self.shared.isdisjoint(e.outputs)
        ]

    def kept(self, reached: set[Value], given: set[Value]) -> list[Value]:
        """Small values of points, for equations that need a later reduction, too."""
        waiting = dict.fromkeys(
            v
            for e in self.equations
            if e.plain and reached.isdisjoint(e.outputs)
            for v in e.inputs
        )
        fresh = (reached - given) & self.held
        return [v for v in waiting if v in fresh and self.small(v)]

    def sweep(
        self,
        reductions: list[Equation],
        writes: list[tuple[Value, Value]],
        given: set[Value],
    ) -> Sweep:
        outputs = [v for e in reductions for v in e.inputs] + [v for v, _ in writes]
        names = [name for _, name in writes]
        segment = compiled(self.equations, given, self.local, outputs, names)
        inputs = segment.replaced + segment.local
        points = not all(map(self.small, inputs))
        return Sweep(reductions, writes, points, segment)
