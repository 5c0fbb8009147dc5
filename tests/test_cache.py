"""Generation: parallel samples, and folders that are complete or absent."""

import functools
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from flaxmix.data import cache, workers

ROOT = Path(__file__).parents[1]
PATIENCE = 60
"""Seconds after which a hanging process fails its test."""


def squares(index):
    return {"square": np.array(index**2, float), "pair": np.array([index, -index])}


def noisy(index):
    print("text on the standard output", flush=True)
    return squares(index)


def surroundings(index):
    os.kill(os.getpid(), signal.SIGINT)
    threads = os.environ["OMP_NUM_THREADS"], os.environ["OPENBLAS_NUM_THREADS"]
    return {"threads": np.array(threads, int), "process": np.array(os.getpid())}


def failing(index):
    if index == 3:
        raise ValueError("no solution here")
    return squares(index)


def dying(index):
    os._exit(5)


def unpicklable(index):
    return {"square": threading.Lock()}


def hanging(index):
    """Finishes two samples, then says who it is and never ends."""
    if index >= 2 and "FLAXMIX_HANG" in os.environ:
        # In one piece: the other process says the same at the same time.
        os.write(2, f"hanging {os.getpid()}\n".encode())
        threading.Event().wait()
    return squares(index)


def write_squares(function, path):
    arrays = workers.compute(function, 4, title="squares", processes=2, progress=False)
    np.savez(path / "squares.npz", **arrays)


def make(folder):
    write = functools.partial(write_squares, hanging)
    return cache.build(folder, {"recipe": "squares"}, write)


def python(code, **variables):
    """Starts `code` as an unguarded main script, read from the standard input."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path} | variables,
        start_new_session=True,
    )
    process.stdin.write(code)
    process.stdin.close()
    process.stdin = None
    return process


def test_default_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("FLAXMIX_CACHE", str(tmp_path))
    assert cache.default_folder() == tmp_path
    monkeypatch.setenv("FLAXMIX_CACHE", "~/there")
    assert cache.default_folder() == Path.home() / "there"
    monkeypatch.setenv("FLAXMIX_CACHE", "")
    assert cache.default_folder().name == "flaxmix"


@pytest.mark.parametrize("count, processes", [(1, None), (5, 2)])
def test_compute_stacks_in_order(count, processes):
    arrays = workers.compute(
        noisy, count, title="squares", processes=processes, progress=False
    )
    index = np.arange(count)
    assert arrays["square"].dtype == np.float64
    np.testing.assert_array_equal(arrays["square"], index**2)
    np.testing.assert_array_equal(arrays["pair"], np.stack([index, -index], -1))


def test_workers_are_other_processes_with_one_thread_that_ignore_interrupts():
    arrays = workers.compute(surroundings, 2, title="", processes=1, progress=False)
    assert (arrays["threads"] == 1).all()
    assert os.getpid() not in arrays["process"]


def test_progress_is_shown_on_the_standard_error(capfd):
    workers.compute(squares, 3, title="some squares", processes=1, progress=True)
    out, error = capfd.readouterr()
    assert not out
    assert "some squares" in error and "3/3" in error


def test_failure_names_the_sample():
    with pytest.raises(
        RuntimeError, match="squares: sample 3 failed: ValueError: no solution here"
    ) as caught:
        workers.compute(failing, 5, title="squares", processes=1, progress=False)
    assert "in failing" in caught.value.__notes__[0]


def test_lost_worker_names_the_sample():
    with pytest.raises(RuntimeError, match="sample 0 lost its worker.*exit code 5"):
        workers.compute(dying, 1, title="squares", processes=1, progress=False)


def test_what_a_worker_cannot_find_is_an_error(monkeypatch):
    """A function of a main script is known by name only, and the name is not there."""
    function = functools.partial(squares)
    monkeypatch.setattr(squares, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "squares", squares, raising=False)
    with pytest.raises(RuntimeError, match="sample 0 failed: AttributeError.*squares"):
        workers.compute(function, 1, title="", processes=1, progress=False)


def test_what_cannot_be_returned_is_an_error():
    with pytest.raises(RuntimeError, match="sample 0 failed: TypeError.*lock"):
        workers.compute(unpicklable, 1, title="", processes=1, progress=False)


@pytest.mark.parametrize("count, processes", [(0, 1), (1, 0)])
def test_counts_below_one(count, processes):
    message = f"count and processes must be at least 1, got {count} and {processes}"
    with pytest.raises(ValueError, match=message):
        workers.compute(squares, count, title="", processes=processes)


def test_unguarded_script(tmp_path):
    process = python(f"import test_cache\ntest_cache.make({str(tmp_path / 'a')!r})\n")
    error = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == 0, error
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]


def test_workers_of_the_recipes_do_not_import_jax():
    process = python(
        "import sys\n"
        "import flaxmix.data.darcy_solver, flaxmix.data.elasticity\n"
        "assert not {'jax', 'flax', 'grain'} & {*sys.modules}\n"
    )
    error = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == 0, error


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_stopped_generation_leaves_no_folder_and_no_process(tmp_path, how):
    folder = tmp_path / "set"
    code = f"import test_cache\ntest_cache.make({str(folder)!r})\n"
    process = python(code, FLAXMIX_HANG="1")
    hanging = [process.stderr.readline() for _ in range(2)]
    assert all(line.startswith("hanging") for line in hanging), hanging
    assert list(tmp_path.glob(".set.partial-*"))
    if how == signal.SIGINT:
        # A terminal interrupts the workers as well.
        os.killpg(process.pid, how)
    else:
        process.send_signal(how)
    # The workers hold the pipe as well: its end means that all of them are gone.
    error = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == -how, error
    assert not folder.exists()
    if how == signal.SIGINT:
        assert not list(tmp_path.iterdir())
        return
    make(folder)
    assert [p.name for p in tmp_path.iterdir()] == ["set"]
    with np.load(folder / "squares.npz") as arrays:
        np.testing.assert_array_equal(arrays["square"], [0, 1, 4, 9])


def put(text):
    return lambda path: (path / "content").write_text(text) and None


def test_build_records_parameters_and_versions(tmp_path):
    folder = cache.build(
        tmp_path / "new" / "set", {"seed": 3}, put("one"), packages=("numpy",)
    )
    assert (folder / "content").read_text() == "one"
    record = json.loads((folder / cache.RECORD).read_text())
    assert record == {"seed": 3, "versions": {"numpy": np.__version__}}
    assert [p.name for p in folder.parent.iterdir()] == ["set"]
    assert folder.stat().st_mode == folder.parent.stat().st_mode


def test_build_keeps_what_is_finished(tmp_path):
    for text in ("one", "two"):
        cache.build(tmp_path / "set", {"seed": 3}, put(text))
    assert (tmp_path / "set" / "content").read_text() == "one"
    with pytest.raises(ValueError, match="set was generated with.*3.*, not with.*4"):
        cache.build(tmp_path / "set", {"seed": 4}, put("three"))


def test_build_spares_what_it_did_not_make(tmp_path):
    (tmp_path / "published").mkdir()
    cache.build(tmp_path / "published", {}, put("into an empty folder"))
    (tmp_path / "published" / cache.RECORD).unlink()
    with pytest.raises(FileExistsError, match="files that were not generated"):
        cache.build(tmp_path / "published", {}, put(""))
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError, match="file is a file"):
        cache.build(tmp_path / "file", {}, put(""))


def test_build_removes_leftovers_of_the_same_folder(tmp_path):
    for name in (".set.partial-1", ".other.partial-1"):
        (tmp_path / name).mkdir()
    cache.build(tmp_path / "set", {}, put(""))
    assert sorted(p.name for p in tmp_path.iterdir()) == [".other.partial-1", "set"]


def test_failed_build_leaves_nothing(tmp_path):
    def write(path):
        put("half")(path)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        cache.build(tmp_path / "set", {}, write)
    assert not list(tmp_path.iterdir())


def test_second_builder_waits_and_uses_the_first(tmp_path, caplog):
    entered, waiting = threading.Event(), threading.Event()
    written = []

    class Listener(logging.Handler):
        def emit(self, record):
            waiting.set()

    def write(path):
        entered.set()
        assert waiting.wait(PATIENCE)
        written.append(path)

    log = logging.getLogger(cache.__name__)
    listener = Listener()
    log.addHandler(listener)
    builders = [
        threading.Thread(target=cache.build, args=(tmp_path / "set", {}, write))
        for _ in range(2)
    ]
    builders[0].start()
    assert entered.wait(PATIENCE)
    builders[1].start()
    for builder in builders:
        builder.join(PATIENCE)
    log.removeHandler(listener)
    assert "waiting for another process" in caplog.text
    assert len(written) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["set"]


def test_without_locks_the_first_to_finish_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "fcntl", None)

    def write(path):
        cache.build(tmp_path / "set", {}, put("first"))
        put("second")(path)

    cache.build(tmp_path / "set", {}, write)
    assert (tmp_path / "set" / "content").read_text() == "first"
    assert [p.name for p in tmp_path.iterdir()] == ["set"]
