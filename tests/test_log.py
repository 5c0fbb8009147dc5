"""Metrics files, TensorBoard events, progress and the start-up table of a run."""

import csv
import io
import json
import math
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c

from train import log as log_module
from train.log import Log, read_metrics, table


def read_csv(folder):
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def read_events(path):
    """Events of one TFRecord file: length, its checksum, payload, its checksum."""
    data, events = path.read_bytes(), []
    while data:
        (size,) = struct.unpack("<Q", data[:8])
        assert struct.unpack("<I", data[8:12])[0] == masked_crc32c(data[:8])
        payload = data[12 : 12 + size]
        (checksum,) = struct.unpack("<I", data[12 + size : 16 + size])
        assert checksum == masked_crc32c(payload)
        events.append(Event.FromString(payload))
        data = data[16 + size :]
    return events


def read_scalars(folder):
    """(step, tag) -> value as TensorBoard joins the files: a START hides the later."""
    scalars = {}
    for path in sorted((folder / "tensorboard").iterdir()):
        for event in read_events(path):
            if event.WhichOneof("what") == "session_log":
                scalars = {k: v for k, v in scalars.items() if k[0] < event.step}
            for value in event.summary.value:
                scalars[event.step, value.tag] = value.simple_value
    return scalars


def run(folder, first, last, **kwargs):
    with Log(
        folder, steps=20, start=first - 1 or None, progress=False, **kwargs
    ) as log:
        for step in range(first, last + 1):
            log.write(step, {"loss": 1 / step})


def terminal(monkeypatch):
    """Makes standard output a terminal of 80 columns, and returns what it gets."""
    stream = io.StringIO()
    stream.isatty = lambda: True
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stdout", stream)
    return stream


@pytest.fixture
def clock(monkeypatch):
    """A clock for the log that only the test moves."""

    class Clock:
        now = 100.0

        def monotonic(self):
            return self.now

        time, time_ns = staticmethod(time.time), staticmethod(time.time_ns)

    clock = Clock()
    monkeypatch.setattr(log_module, "time", clock)
    return clock


def test_rows_are_json_lines_and_readable_before_the_log_is_closed(tmp_path):
    folder = tmp_path / "new" / "run"
    assert read_metrics(folder) == []
    with Log(folder, steps=2, progress=False) as log:
        log.write(1, {"loss": 0.5, "learning_rate": 1e-3})
        log.write(2, {"loss": 0.25})
        lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [{"step": 1, "loss": 0.5, "learning_rate": 1e-3}, {"step": 2, "loss": 0.25}]
    assert [json.loads(line) for line in lines] == rows == read_metrics(folder)


def test_nan_and_infinity_are_valid_json_and_come_back(tmp_path):
    with Log(tmp_path, steps=1, progress=False) as log:
        log.write(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 2.0})

    def refuse(constant):
        raise AssertionError(constant)

    text = (tmp_path / "metrics.jsonl").read_text()
    row = json.loads(text, parse_constant=refuse)
    assert row == {"step": 1, "a": "NaN", "b": "Infinity", "c": "-Infinity", "d": 2}
    (row,) = read_metrics(tmp_path)
    assert math.isnan(row["a"]) and row["b"] == math.inf and row["c"] == -math.inf
    (row,) = read_csv(tmp_path)
    assert math.isnan(float(row["a"])) and float(row["c"]) == -math.inf
    scalars = read_scalars(tmp_path)
    assert math.isnan(scalars[1, "a"]) and scalars[1, "b"] == math.inf


def test_a_metric_must_not_be_called_step(tmp_path):
    with Log(tmp_path, steps=1, progress=False) as log:
        with pytest.raises(ValueError, match="must not have \"step\", got .'loss', 's"):
            log.write(1, {"step": 3.0, "loss": 1.0})
    assert read_metrics(tmp_path) == []


def test_csv_is_whole_after_every_write(tmp_path):
    with Log(tmp_path, steps=9, progress=False) as log:
        for step in range(1, 10):
            log.write(step, {"loss": 1 / step})
            if step % 3 == 0:
                log.flush()  # the step's row is then in the file ...
                log.write(step, {"test_error": 0.1 * step})  # ... and still merges
            rows = read_csv(tmp_path)
            assert (tmp_path / "metrics.csv").read_bytes().endswith(b"\n")
            assert [int(row["step"]) for row in rows] == list(
                range(1, step + (step % 3 == 0))
            )
            if step % 3:
                log.flush()
                assert float(read_csv(tmp_path)[-1]["loss"]) == 1 / step
    rows = read_csv(tmp_path)
    assert [row["test_error"] != "" for row in rows] == 3 * [False, False, True]
    assert all(row["loss"] for row in rows)


def test_csv_takes_a_late_row_of_an_earlier_step(tmp_path):
    with Log(tmp_path, steps=3, progress=False) as log:
        for step in (1, 2, 3):
            log.write(step, {"loss": 1.0})
        log.write(1, {"test_error": 0.5})
    text = (tmp_path / "metrics.csv").read_text()
    assert text == "step,loss,test_error\n1,1.0,0.5\n2,1.0,\n3,1.0,\n"


def test_csv_is_appended_to_and_not_made_anew_every_step(tmp_path, monkeypatch):
    rewrites = []
    rewrite = Log._rewrite_csv
    monkeypatch.setattr(
        Log, "_rewrite_csv", lambda self: (rewrites.append(1), rewrite(self))
    )
    with Log(tmp_path, steps=100, progress=False) as log:
        for step in range(100):
            log.write(step, {"loss": 1.0})
            if step % 10 == 0:
                log.write(step, {"test_error": 1.0})
    assert len(rewrites) == 2  # at the start, and for the first row
    assert len(read_csv(tmp_path)) == 100


def test_resumed_log_has_no_gaps_or_repeats(tmp_path):
    run(tmp_path, 1, 12)
    with Log(tmp_path, steps=20, start=10, progress=False) as log:
        assert [row["step"] for row in read_metrics(tmp_path)] == list(range(1, 11))
        assert [int(row["step"]) for row in read_csv(tmp_path)] == list(range(1, 11))
        for step in range(11, 21):
            log.write(step, {"loss": -1.0})
    expected = [1 / s for s in range(1, 11)] + 10 * [-1.0]
    rows = read_metrics(tmp_path)
    assert [(r["step"], r["loss"]) for r in rows] == list(enumerate(expected, start=1))
    assert [float(row["loss"]) for row in read_csv(tmp_path)] == expected
    assert read_scalars(tmp_path) == {
        (step, "loss"): pytest.approx(value)
        for step, value in enumerate(expected, start=1)
    }


def test_run_without_a_checkpoint_starts_its_log_anew(tmp_path):
    with Log(tmp_path, steps=20, progress=False) as log:
        log.write(0, {"test_error": 1.0})
        log.write(1, {"loss": 1.0})
    run(tmp_path, 1, 2)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
    assert [row["step"] for row in read_csv(tmp_path)] == ["1", "2"]
    assert read_scalars(tmp_path).keys() == {(1, "loss"), (2, "loss")}


@pytest.mark.parametrize("tail", [b'{"step": 3, "lo', b"\0\0\0\n", b"\xff\xfe"])
def test_truncated_last_line_is_dropped(tmp_path, tail):
    run(tmp_path, 1, 2)
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(tail)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
    run(tmp_path, 4, 5)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 4, 5]
    assert [row["step"] for row in read_csv(tmp_path)] == ["1", "2", "4", "5"]


def test_damage_before_the_last_line_is_an_error(tmp_path):
    run(tmp_path, 1, 3)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text().replace('"step": 2', "step"))
    with pytest.raises(ValueError, match="metrics.jsonl, line 2 is not JSON: b'{step"):
        read_metrics(tmp_path)


def test_old_log_survives_if_its_replacement_fails(tmp_path, monkeypatch):
    run(tmp_path, 1, 5)
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def fail(*_):
        raise OSError("killed")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="killed"):
        Log(tmp_path, steps=20, start=3, progress=False)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_killed_process_loses_nothing(tmp_path):
    program = """if True:
        import os, signal, sys
        from pathlib import Path
        from train.log import Log
        with Log(Path(sys.argv[1]), steps=20, progress=False) as log:
            for step in range(1, 8):
                log.write(step, {"loss": 1 / step})
                if step == 5:
                    log.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    """
    root = Path(log_module.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", program, tmp_path], cwd=root)
    assert done.returncode == -signal.SIGKILL
    assert [row["step"] for row in read_metrics(tmp_path)] == list(range(1, 8))
    assert [row["step"] for row in read_csv(tmp_path)] == list("123456")
    assert len(read_scalars(tmp_path)) == 5  # up to the flush
    run(tmp_path, 6, 8)
    assert [row["step"] for row in read_metrics(tmp_path)] == list(range(1, 9))
    assert sorted(read_scalars(tmp_path)) == [(step, "loss") for step in range(1, 9)]


def test_tensorboard_is_flushed_every_ten_seconds(tmp_path, clock):
    with Log(tmp_path, steps=3, progress=False) as log:
        log.write(1, {"loss": 1.0})
        clock.now += 9
        log.write(2, {"loss": 1.0})
        assert len(read_scalars(tmp_path)) == 0
        clock.now += 2
        log.write(3, {"loss": 1.0})
        assert len(read_scalars(tmp_path)) == 3


def test_write_is_cheap(tmp_path):
    metrics = dict.fromkeys(["loss", "learning_rate", "grad_norm", "beta1"], 0.1)
    with Log(tmp_path, steps=1000, progress=False) as log:
        times = []
        for step in range(300):
            began = time.perf_counter()
            log.write(step, metrics)
            times.append(time.perf_counter() - began)
    # 0.15 ms on a busy machine; an fsync or a rewrite each time would be beyond 1 ms.
    assert sorted(times)[len(times) // 2] < 1e-3


def progress(log, step):
    log.progress(step, loss=0.125, learning_rate=1e-3, samples_per_second=1234.0)


def test_bar_shows_step_loss_rate_and_speed(tmp_path, monkeypatch):
    stream = terminal(monkeypatch)
    with Log(tmp_path, steps=500, start=100) as log:
        progress(log, 250)
        log.print("saved [bold]step[/bold] 250")
        progress(log, 500)
    text = stream.getvalue()
    assert "100/500" in text and "500/500" in text and "left" in text
    assert "loss 1.25e-01 rate 1.0e-03 1234 samples/s" in text
    assert "\r\x1b[2Ksaved [bold]step[/bold] 250\n" in text  # the bar makes room


def test_bar_is_stopped_by_an_error(tmp_path, monkeypatch):
    stream = terminal(monkeypatch)
    with pytest.raises(RuntimeError, match="diverged"), Log(tmp_path, steps=5) as log:
        log.write(1, {"loss": 1.0})
        raise RuntimeError("diverged")
    assert stream.getvalue().endswith("\x1b[?25h")  # the cursor is back
    assert len(read_csv(tmp_path)) == 1


def test_lines_and_not_a_bar_where_there_is_no_terminal(
    tmp_path, capsys, clock, monkeypatch
):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Log(tmp_path, steps=100) as log:
        for step in range(1, 101):
            clock.now += 4.0
            progress(log, step)
        log.print("[red]" + 200 * "x")
    *lines, text = capsys.readouterr().out.splitlines()
    steps = [int(line.split()[1].split("/")[0]) for line in lines]
    assert steps == [1, 11, 21, 31, 41, 51, 61, 71, 81, 91, 100]
    assert lines[1] == (
        "step 11/100 (11%) loss 1.25e-01 rate 1.0e-03 1234 samples/s "
        "elapsed 0:00:44 left 0:05:56"
    )
    assert text == "[red]" + 200 * "x"


def test_lines_are_ten_seconds_apart(tmp_path, capsys, clock):
    with Log(tmp_path, steps=20) as log:
        for step in range(1, 21):
            clock.now += 1.5
            progress(log, step)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["1/20", "8/20", "15/20", "20/20"]


def test_resumed_run_estimates_from_its_own_steps(tmp_path, capsys, clock):
    with Log(tmp_path, steps=100, start=50) as log:
        clock.now += 20
        progress(log, 60)
    assert "elapsed 0:00:20 left 0:01:20" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("value", "text"), [(0.25, " 0.25 samples/s"), (12345.6, " 12346 samples/s")]
)
def test_speed_is_readable_when_slow_and_when_fast(tmp_path, capsys, value, text):
    with Log(tmp_path, steps=1) as log:
        log.progress(1, loss=1.0, learning_rate=1.0, samples_per_second=value)
    assert text in capsys.readouterr().out


def test_no_progress_is_silent(tmp_path, monkeypatch):
    stream = terminal(monkeypatch)
    with Log(tmp_path, steps=1, progress=False) as log:
        progress(log, 1)
        log.print("text")
    assert stream.getvalue() == ""


def test_table_shows_names_and_values_as_they_are(capsys):
    table("Model [a]", [("parameters", "1,234"), ("decay .*[a-z]/kernel", "[3, 5]")])
    text = capsys.readouterr().out
    assert "Model [a]" in text and "parameters" in text and "1,234" in text
    assert "decay .*[a-z]/kernel" in text and "[3, 5]" in text
