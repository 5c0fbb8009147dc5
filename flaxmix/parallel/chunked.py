"""Exact inference on meshes that one device does not hold, chunk by chunk."""

import functools
from importlib import util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from flaxmix.parallel.equations import Equation, Value, trace
from flaxmix.parallel.sweeps import Layers, Segment, Shared, Step, Sweep, plan

_AXIS = "chunk of points"
_COMBINE = {"psum": jnp.add, "pmax": jnp.maximum, "pmin": jnp.minimum}


def predict_in_chunks(
    model: Any,
    x: Any,
    *,
    mask: Any = None,
    chunk: int,
    out: np.ndarray | None = None,
    progress: bool = False,
) -> np.ndarray:
    """model(x, mask=mask) for a mesh of any size, up to rounding.

    What a model does with its points sharded over devices is done here with chunks of
    points, one after another on one device, for any model whose points meet through
    reductions alone. Each layer goes through the chunks a few times (FLARE twice,
    FLARE++ three times), recomputing what is as large as a chunk.

    The device holds two chunks at a time, and what all chunks share; the host holds
    what goes from layer to layer, [*B, N, C], and a few small values for each chunk.

    Args:
        model: called as `model(x, mask=, axis_name=)`.
        x: features of the points [*B, N, I], for example a memory map; read chunk by
            chunk.
        mask: True for real points [*B, N]. Masked points do not matter.
        chunk: points worked on at once.
        out: what the fields [*B, N, O] are written to, for example a memory map; None
            for a new array.
        progress: whether to show a progress bar on standard error. Points count each
            time that they are read.

    Returns:
        The fields [*B, N, O], in the dtype of the model's output; `out` if given.

    Raises:
        ValueError: if `chunk` is not positive, x has no points, the mask or `out` is
            of another shape or dtype, `out` is read-only, or the model's points attend
            to each other directly.
        TypeError: if it is called inside `jax.jit`.
    """
    if isinstance(x, core.Tracer):
        raise TypeError("predict_in_chunks reads x from the host: outside of jax.jit.")
    if not isinstance(chunk, int | np.integer) or chunk < 1:
        raise ValueError(f"chunk must be a positive integer, got {chunk!r}.")
    if np.ndim(x) < 2 or x.shape[-2] == 0:
        raise ValueError(f"x must be points [*B, N, inputs], got shape {np.shape(x)}.")
    batch, points = x.shape[:-2], x.shape[-2]
    if mask is not None and (mask.dtype != bool or mask.shape != x.shape[:-1]):
        raise ValueError(
            f"the mask must be a boolean array of shape {x.shape[:-1]}, got "
            f"{mask.dtype} of shape {mask.shape}."
        )
    chunk = min(chunk, points)
    chunks = -(-points // chunk)
    if mask is None and points % chunk:
        # The last chunk is padded.
        mask = np.broadcast_to(np.True_, x.shape[:-1])
    config: Any = jax.config
    leaves, tree = jax.tree.flatten(model)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    steps, inputs, result = _plan(
        tree,
        tuple((leaf.shape, leaf.dtype) for leaf in leaves),
        (x.shape, jax.dtypes.canonicalize_dtype(x.dtype)),
        mask is not None,
        chunk,
        # Decide how a model is traced.
        config.jax_enable_x64,
        config.jax_default_matmul_precision,
    )
    shape, dtype = (*batch, points, result.aval.shape[-1]), result.aval.dtype
    if out is None:
        out = np.empty(shape, dtype)
    elif out.shape != shape or out.dtype != dtype:
        raise ValueError(
            f"out must be {dtype} of shape {shape}, got {out.dtype} of shape "
            f"{out.shape}."
        )
    elif not out.flags.writeable:
        raise ValueError("out must be an array that can be written, it is read-only.")
    with _bar(progress) as bar:
        task = bar.add_task("points", total=_sweeps(steps) * chunks, chunk=chunk)
        run = _Run(chunks, bar, task)
        run.shared = dict(zip(inputs, leaves, strict=False))
        run.stored = {
            name: _Chunks(array, chunk, axis)
            for name, array, axis in zip(
                [*inputs[len(leaves) :], result],
                (x, out) if mask is None else (x, mask, out),
                (-2, -2) if mask is None else (-2, -1, -2),
                strict=True,
            )
        }
        run.steps(steps)
    return out


# As many meshes of one size as there are, from one compilation.
@functools.lru_cache(maxsize=4)
def _plan(
    tree, leaves, x, masked: bool, chunk: int, *_
) -> tuple[list[Step], list[Value], Value]:
    """Steps, what their inputs are stored by, and what the result is stored by."""
    (*batch, points, features), dtype = x
    axis = None if chunk == points else _AXIS

    def arguments(points):
        given = [jax.ShapeDtypeStruct((*batch, points, features), dtype)]
        if masked:
            given.append(jax.ShapeDtypeStruct((*batch, points), jnp.dtype(bool)))
        return [jax.ShapeDtypeStruct(*leaf) for leaf in leaves] + given

    def apply(axis, *values):
        model = jax.tree.unflatten(tree, values[: len(leaves)])
        x, mask = (*values[len(leaves) :], None)[:2]
        return model(x, mask=mask, axis_name=axis)

    # Raises what the whole call would.
    jax.eval_shape(functools.partial(apply, None), *arguments(points))
    program = trace(
        functools.partial(apply, axis), _AXIS, -(-points // chunk), *arguments(chunk)
    )
    local = set(program.inputs[len(leaves) :])
    steps, result = plan(program, local, chunk)
    return steps, program.inputs, result


class _Chunks:
    """Points of an array by chunks of one size, the last one being padded with 0."""

    def __init__(self, array: np.ndarray, chunk: int, axis: int):
        self.array, self.chunk, self.axis = array, chunk, axis

    def _part(self, index: int) -> np.ndarray:
        here = slice(index * self.chunk, (index + 1) * self.chunk)
        return self.array[(..., here) + (slice(None),) * (-1 - self.axis)]

    def __getitem__(self, index: int) -> np.ndarray:
        part = np.asarray(self._part(index))
        missing = self.chunk - part.shape[self.axis]
        if not missing:
            return part
        pads = [(0, 0)] * part.ndim
        pads[self.axis] = (0, missing)
        return np.pad(part, pads)

    def __setitem__(self, index: int, values: np.ndarray) -> None:
        part = self._part(index)
        keep = [slice(None)] * part.ndim
        keep[self.axis] = slice(part.shape[self.axis])
        part[...] = values[tuple(keep)]


class _Run:
    """Runs steps: shared values are on the device, those of chunks on the host."""

    def __init__(self, chunks: int, bar: Progress, task: Any):
        self.chunks, self.bar, self.task = chunks, bar, task
        self.shared: dict[Value, Any] = {}
        self.stored: dict[Value, Any] = {}

    def steps(self, steps: list[Step]) -> None:
        for step in steps:
            if isinstance(step, Shared):
                outputs = self.call(step.segment, 0)
                self.shared.update(zip(step.outputs, outputs, strict=True))
            elif isinstance(step, Sweep):
                self.sweep(step)
            else:
                self.layers(step)

    def call(self, segment: Segment, index: int) -> list[jax.Array]:
        # Without a copy, a chunk could be what is overwritten by its next value.
        put = lambda names: [
            jax.device_put(self.stored[v][index], may_alias=False) for v in names
        ]
        shared = [self.shared[v] for v in segment.shared]
        local = put(segment.replaced), put(segment.local)
        return segment.run(shared, *local, np.int32(index))

    def sweep(self, step: Sweep) -> None:
        totals = [_Total(e) for e in step.reductions for _ in e.inputs]
        previous = None
        for index in range(self.chunks):
            outputs = self.call(step.segment, index)
            for total, part in zip(totals, outputs, strict=False):
                total.add(part)
            # While one chunk is worked on, the next goes to the device, but no more.
            if previous is not None:
                self.store(step, index - 1, previous)
            previous = outputs
        self.store(step, self.chunks - 1, previous)
        names = [v for e in step.reductions for v in e.outputs]
        for name, total in zip(names, totals, strict=True):
            self.shared[name] = total.value()

    def store(self, step: Sweep, index: int, outputs: Any) -> None:
        jax.block_until_ready(outputs)
        if step.points:
            self.bar.advance(self.task)
        values = outputs[len(outputs) - len(step.writes) :]
        for (_, name), value in zip(step.writes, values, strict=True):
            if name not in self.stored:
                self.stored[name] = np.empty((self.chunks, *value.shape), value.dtype)
            self.stored[name][index] = np.asarray(value)

    def layers(self, step: Layers) -> None:
        outside = lambda v: self.shared[v] if v.val is None else jnp.asarray(v.val)
        self.shared.update((inner, outside(v)) for inner, v in step.shared)
        self.stored.update((inner, self.stored[v]) for inner, v in step.stored)
        each, stacked = [v for v, _ in step.each], [outside(v) for _, v in step.each]
        begins = [begin for begin, _ in step.carry]
        for index in range(step.length):
            label = f"layer {index + 1} of {step.length}"
            self.bar.update(self.task, description=label)
            layer = _layer(stacked, np.int32(index))
            self.shared.update(zip(each, layer, strict=True))
            self.steps(step.steps)
            # All ends first: one may be the beginning of another.
            ends = [outside(end) for _, end in step.carry]
            self.shared.update(zip(begins, ends, strict=True))
        self.bar.update(self.task, description="points")
        for begin, out in step.outputs:
            kind = self.stored if begin in self.stored else self.shared
            kind[out] = kind[begin]


@jax.jit
def _layer(stacked: list[jax.Array], index: Any) -> list[jax.Array]:
    return [lax.dynamic_index_in_dim(a, index, keepdims=False) for a in stacked]


class _Total:
    """One reduction over the chunks."""

    def __init__(self, equation: Equation):
        self.equation = equation
        self.parts: list[Any] = []

    def add(self, part: jax.Array) -> None:
        combine = _COMBINE.get(self.equation.name)
        if combine is not None and self.parts:
            self.parts[0] = combine(self.parts[0], part)
        else:
            self.parts.append(part)

    def value(self) -> Any:
        if self.equation.name in _COMBINE:
            return self.parts[0]
        params, parts = self.equation.params, jax.device_get(self.parts)
        join = np.concatenate if params["tiled"] else np.stack
        return jnp.asarray(join(parts, params["all_gather_dimension"]))


def _sweeps(steps: list[Step]) -> int:
    """How often the points are read."""
    layers = [step for step in steps if isinstance(step, Layers)]
    own = sum(isinstance(step, Sweep) and step.points for step in steps)
    return own + sum(step.length * _sweeps(step.steps) for step in layers)


class _Speed(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{(task.speed or 0) * task.fields['chunk']:,.0f} points/s")


def _bar(shown: bool) -> Progress:
    # Without ipywidgets rich warns in notebooks; plain text works there as well.
    notebook = None if util.find_spec("ipywidgets") else False
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        _Speed(),
        TimeRemainingColumn(),
        console=Console(stderr=True, force_jupyter=notebook),
        disable=not shown,
    )
