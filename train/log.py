"""What a run writes and shows while it trains: metrics, TensorBoard, progress."""

import csv
import io
import json
import math
import os
import sys
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table
from rich.text import Text
from tensorboardX import RecordWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore

Row = dict[str, float]
"""The metrics of one write, with its "step"."""


class Log:
    """Metrics files, TensorBoard events and the progress bar of one run.

    Used by one thread, as a context manager. In `folder`:

    - `metrics.jsonl`: one JSON object for each `write`, on disk before `write`
      returns, so that a killed process loses nothing. JSON has no NaN: such values
      are the strings "NaN", "Infinity" and "-Infinity", which `read_metrics` turns
      back into floats. This file is the record; the others are made from it.
    - `metrics.csv`: one row for each step, with the metrics of all its writes and
      a column for every metric so far. Always whole rows. A step's row is added
      when a later step is written, or by `flush`; the file is made anew (and
      replaced in one go) only if a new column or an older step appears.
    - `tensorboard/`: the same numbers as scalars. Buffered: on disk after `flush`,
      which `write` also calls every ten seconds.

    Args:
        folder: of the run; made if it is missing.
        steps: at which the run ends, for the progress bar.
        start: steps already done, None for a new run. Rows beyond it, which a killed
            run wrote after the checkpoint that is now resumed, are dropped, so that
            the joined log has neither gaps nor repeats; a new run drops all. Call
            `flush` before saving a checkpoint to have the same in TensorBoard.
        progress: False for no output at all on the terminal.
    """

    def __init__(
        self,
        folder: Path,
        *,
        steps: int,
        start: int | None = None,
        progress: bool = True,
    ):
        self._folder, self._steps, self._start = folder, steps, start or 0
        folder.mkdir(parents=True, exist_ok=True)
        last = -1 if start is None else start
        kept = [row for row in read_metrics(folder) if row["step"] <= last]
        _replace(folder / "metrics.jsonl", "".join(map(_encode, kept)))
        self._jsonl = open(folder / "metrics.jsonl", "a", buffering=1)
        self._columns: list[str] = []
        self._last = -1
        self._row: Row = {}
        self._rewrite_csv()
        self._events = _open_events(folder / "tensorboard", start)
        self._flushed = self._began = time.monotonic()
        self._printed: tuple[float, float] = (-math.inf, -math.inf)
        self._quiet = not progress
        # Not rich's own test, which FORCE_COLOR (common in CI) turns on in pipes.
        self._bar = _bar() if progress and sys.stdout.isatty() else None
        if self._bar:
            self._task = self._bar.add_task(
                "", total=steps, completed=self._start, text=""
            )

    def __enter__(self) -> "Log":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Appends one row, in 0.15 ms.

        Args:
            step: number of steps done. May repeat: evaluation after training.
            metrics: scalars; anything that `float` takes.

        Raises:
            ValueError: if a metric is called "step".
        """
        if "step" in metrics:
            raise ValueError(f'metrics must not have "step", got {sorted(metrics)}.')
        scalars = {key: float(value) for key, value in metrics.items()}
        row = {"step": step} | scalars
        if self._row and self._row["step"] != step:
            self._write_csv()
        self._row |= row
        self._jsonl.write(_encode(row))
        self._events.write(_scalars(step, scalars))
        if time.monotonic() - self._flushed > 10:
            self._flush_events()

    def flush(self) -> None:
        """Brings all three files up to date, on disk (fsync): milliseconds."""
        self._write_csv()
        self._flush_events()
        os.fsync(self._jsonl.fileno())

    def progress(
        self, step: int, *, loss: float, learning_rate: float, samples_per_second: float
    ) -> None:
        """Shows how far the run is.

        On a terminal this is a bar. Elsewhere it is a line at the first call and at
        the last step, and between them when a tenth of the steps *and* ten seconds
        have passed since the last one.
        """
        speed = f"{samples_per_second:.{0 if samples_per_second >= 100 else 2}f}"
        text = f"loss {loss:.2e} rate {learning_rate:.1e} {speed} samples/s"
        if self._bar:
            self._bar.update(self._task, completed=step, text=text)
            return
        now = time.monotonic()
        at, when = self._printed
        due = step - at >= self._steps / 10 and now - when >= 10
        if self._quiet or not (due or step >= self._steps):
            return
        self._printed = step, now
        elapsed = now - self._began
        left = elapsed * (self._steps - step) / max(step - self._start, 1)
        self.print(
            f"step {step}/{self._steps} ({step / self._steps:.0%}) {text} "
            f"elapsed {_clock(elapsed)} left {_clock(left)}"
        )

    def print(self, text: str) -> None:
        """Prints a line of plain text, above the bar if there is one."""
        if self._bar:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        elif not self._quiet:
            print(text, flush=True)

    def close(self) -> None:
        """Flushes and closes the files and stops the bar; twice does no harm."""
        if self._jsonl.closed:
            return
        if self._bar:
            self._bar.stop()
        try:
            self.flush()
        finally:
            self._events.close()
            self._jsonl.close()

    def _flush_events(self) -> None:
        self._events.flush()
        self._flushed = time.monotonic()

    def _write_csv(self) -> None:
        """Moves the pending row to metrics.csv."""
        row, self._row = self._row, {}
        if not row:
            return
        if row["step"] <= self._last or not row.keys() <= set(self._columns):
            self._rewrite_csv()
            return
        with open(self._folder / "metrics.csv", "a", newline="") as file:
            csv.DictWriter(file, self._columns, lineterminator="\n").writerow(row)
        self._last = row["step"]

    def _rewrite_csv(self) -> None:
        """Makes metrics.csv from metrics.jsonl."""
        steps: dict[float, Row] = {}
        for row in read_metrics(self._folder):
            steps.setdefault(row["step"], {}).update(row)
        rows = [steps[step] for step in sorted(steps)]
        self._columns = list(dict.fromkeys(["step", *(key for r in rows for key in r)]))
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        _replace(self._folder / "metrics.csv", text.getvalue())
        self._last = rows[-1]["step"] if rows else -1


class Silent:
    """The log of every process but the first: nothing is written or shown."""

    def __enter__(self) -> "Silent":
        return self

    def __exit__(self, *_) -> None:
        pass

    def write(self, step: int, metrics: dict[str, float]) -> None:
        pass

    def flush(self) -> None:
        pass

    def progress(self, step: int, **shown: float) -> None:
        pass

    def print(self, text: str) -> None:
        pass


def read_metrics(folder: Path) -> list[Row]:
    """Reads `metrics.jsonl`: rows in the order written, none if there is no file.

    A last line that is incomplete, because its writer was killed or is just writing
    it, is left out.

    Raises:
        ValueError: if another line is not JSON.
    """
    path = Path(folder) / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            if number == len(lines) - 1:
                break
            raise ValueError(f"{path}, line {number} is not JSON: {line!r}") from error
        rows.append({k: float(v) if isinstance(v, str) else v for k, v in row.items()})
    return rows


def table(title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Prints names and values as a table."""
    grid = Table("", "", title=Text(title, "bold"), show_header=False)
    for name, value in rows:
        grid.add_row(Text(name), Text(value))
    Console().print(grid)


def _encode(row: Row) -> str:
    """A row as one line of JSON."""
    if not all(map(math.isfinite, row.values())):
        names = {math.inf: "Infinity", -math.inf: "-Infinity"}
        safe = (v if math.isfinite(v) else names.get(v, "NaN") for v in row.values())
        return json.dumps(dict(zip(row, safe, strict=True))) + "\n"
    return json.dumps(row) + "\n"


def _replace(path: Path, text: str) -> None:
    """Replaces a file so that a reader, or a crash, sees the old or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _open_events(folder: Path, start: int | None) -> RecordWriter:
    """A new event file, behind those of the steps up to `start`.

    RecordWriter and not SummaryWriter, whose queue costs 0.8 ms a row and loses what
    is in it with a killed process.
    """
    folder.mkdir(exist_ok=True)
    if start is None:
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
    # TensorBoard takes the files by name, and hides earlier events from a START on.
    events = RecordWriter(str(folder / f"events.out.tfevents.{time.time_ns()}"))
    events.write(_record(file_version="brain.Event:2"))
    status = SessionLog(status=SessionLog.START)
    events.write(_record(step=(start or 0) + 1, session_log=status))
    events.flush()
    return events


def _scalars(step: int, metrics: Row) -> bytes:
    values = [Summary.Value(tag=k, simple_value=v) for k, v in metrics.items()]
    return _record(step=step, summary=Summary(value=values))


def _record(**fields) -> bytes:
    return Event(wall_time=time.time(), **fields).SerializeToString()


def _bar() -> Progress:
    whole = Column(no_wrap=True)  # On a narrow terminal, only the bar shrinks.
    return Progress(
        MofNCompleteColumn(table_column=whole),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[text]}", table_column=whole),
        TimeElapsedColumn(table_column=whole),
        TimeRemainingColumn(table_column=whole),
        TextColumn("left", table_column=whole),
        refresh_per_second=4,
        expand=True,
    )


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
