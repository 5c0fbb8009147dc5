"""Times functions by turns in one run, so that what slows a machine slows all alike."""

import ctypes
import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from train.folder import write_json

LEAST_SECONDS = 0.1
"""That a repeat lasts: calls shorter than this are timed several in a row."""
LEAST_REPEATS = 3
"""Of calls too slow for the time that they are given."""


@dataclasses.dataclass(frozen=True)
class Contender:
    """Something to time.

    Attributes:
        call: does `steps` steps, and returns when they are done.
        parameters: number of them, in all arrays.
        compile_seconds: for tracing and compiling; None where nothing is compiled.
        temporary_bytes: peak beside arguments and results; None if unknown.
        steps: of one call.
    """

    call: Callable[[], Any]
    parameters: int
    compile_seconds: float | None = None
    temporary_bytes: int | None = None
    steps: int = 1


@dataclasses.dataclass(frozen=True)
class Row:
    """What was measured of one contender; times are of one step.

    Attributes:
        ratio: of its median time to that of the first row.
        temporary_ratio: of its temporary memory to that of the first row.
        resident_bytes: by which one more call made the process grow at most; None
            where the system does not tell.
    """

    name: str
    milliseconds: float
    quartiles: tuple[float, float]
    repeats: int
    ratio: float
    temporary_bytes: int | None
    temporary_ratio: float | None
    resident_bytes: int | None
    compile_seconds: float | None
    parameters: int


def compiled(function: Callable, module: Any, *args: Any, steps: int = 1) -> Contender:
    """Compiles `function(module, *args)`, which does `steps` steps."""
    began = time.perf_counter()
    executable = jax.jit(function).lower(module, *args).compile()
    seconds = time.perf_counter() - began
    memory = executable.memory_analysis()
    return Contender(
        call=lambda: jax.block_until_ready(executable(module, *args)),
        parameters=sum(leaf.size for leaf in jax.tree.leaves(module)),
        compile_seconds=seconds,
        temporary_bytes=memory.temp_size_in_bytes if memory else None,
        steps=steps,
    )


def race(
    title: str,
    contenders: Mapping[str, Callable[[], Contender]],
    *,
    repeats: int,
    seconds: float,
) -> list[Row]:
    """Times all contenders by turns and prints a table, progress going to stderr.

    Args:
        title: of the table.
        contenders: what makes each of them.
        repeats: of each.
        seconds: that the repeats of one may take. Slower ones get fewer repeats, but
            `LEAST_REPEATS`.

    Returns:
        A row for each, in order.

    Raises:
        ValueError: if `repeats` is not positive.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}.")
    ready: dict[str, Contender] = {}
    rounds: dict[str, int] = {}
    calls: dict[str, int] = {}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    with Progress(
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        refresh_per_second=2,
    ) as progress:
        task = progress.add_task(title, total=len(contenders) * (1 + repeats))
        for name, make in contenders.items():
            progress.update(task, description=f"compiling {name}")
            ready[name] = make()
            first = _clock(ready[name].call)
            calls[name] = max(1, int(LEAST_SECONDS / first))
            affordable = max(int(seconds / first / calls[name]), LEAST_REPEATS)
            rounds[name] = min(repeats, affordable)
            progress.advance(task)
        for turn in range(repeats):
            for name, one in ready.items():
                if turn < rounds[name]:
                    progress.update(task, description=f"timing {name}")
                    elapsed = sum(_clock(one.call) for _ in range(calls[name]))
                    times[name].append(1e3 * elapsed / calls[name] / one.steps)
                progress.advance(task)
        progress.update(task, description="done")
    growth = {name: _growth(one.call) for name, one in ready.items()}
    rows = _rows(ready, times, growth)
    _print(title, rows)
    return rows


def _clock(call) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _growth(call) -> int | None:
    """Bytes that the process grows by at most while it does one call."""
    try:
        # What is free but kept would hide a part of the growth.
        ctypes.CDLL(None).malloc_trim(0)
        statm = open("/proc/self/statm")
    except (OSError, AttributeError):
        return None
    sizes, done = [], threading.Event()

    def resident():
        statm.seek(0)
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def watch():
        while not done.wait(2e-4):
            sizes.append(resident())

    with statm:
        before = resident()
        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            call()
        finally:
            done.set()
            watcher.join()
    return max([before, *sizes]) - before


def _rows(ready, times, growth) -> list[Row]:
    rows: list[Row] = []
    for name, one in ready.items():
        low, median, high = (
            float(q) for q in np.quantile(times[name], (0.25, 0.5, 0.75))
        )
        memory = one.temporary_bytes
        first = rows[0] if rows else None
        base = first.temporary_bytes if first else memory
        rows.append(
            Row(
                name=name,
                milliseconds=median,
                quartiles=(low, high),
                repeats=len(times[name]),
                ratio=median / first.milliseconds if first else 1.0,
                temporary_bytes=memory,
                temporary_ratio=memory / base if memory and base else None,
                resident_bytes=growth[name],
                compile_seconds=one.compile_seconds,
                parameters=one.parameters,
            )
        )
    return rows


def _print(title: str, rows: Sequence[Row]) -> None:
    caption = f"Ratios are to {rows[0].name}." if rows else ""
    caption += " Grew: what one more call adds to the process at most."
    table = Table(title=title, caption=caption)
    table.add_column("")
    for column in (
        "ms a step",
        "quartiles",
        "ratio",
        "repeats",
        "temp MiB",
        "ratio",
        "grew MiB",
        "compile s",
        "parameters",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        low, high = row.quartiles
        memory = row.temporary_bytes
        table.add_row(
            row.name,
            _text(row.milliseconds),
            f"{_text(low)} - {_text(high)}",
            _text(row.ratio),
            str(row.repeats),
            _text(None if memory is None else memory / 2**20),
            _text(row.temporary_ratio),
            _text(None if row.resident_bytes is None else row.resident_bytes / 2**20),
            _text(row.compile_seconds),
            f"{row.parameters:,}",
        )
    # A file or a pipe has no width to keep to.
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def _text(value: float | None) -> str:
    """Three digits, or all before the point."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}"


def machine() -> dict[str, Any]:
    """Versions and hardware that times are of."""
    packages = ("jax", "jaxlib", "flax", "torch")
    device = jax.devices()[0]
    return {
        "python": platform.python_version(),
        **{
            name: importlib.metadata.version(name)
            for name in packages
            if importlib.util.find_spec(name)
        },
        "platform": device.platform,
        "device": device.device_kind,
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
    }


def write(path: Path, suite: str, sizes: Mapping[str, Any], rows: Sequence[dict]):
    """Writes rows as JSON, with all that they depend on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(
        path,
        {"suite": suite, "sizes": dict(sizes), "machine": machine(), "rows": rows},
    )
