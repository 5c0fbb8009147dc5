"""Generated data sets: a cache folder, parallel samples, all-or-nothing folders."""

import contextlib
import json
import logging
import os
import pickle
import queue
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from importlib import metadata, util
from pathlib import Path
from typing import IO, Any, TextIO

import numpy as np
import platformdirs
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)

try:
    import fcntl
except ImportError:
    fcntl = None

RECORD = "generation.json"
"""File of a generated folder that says how it was made."""

_SINGLE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "VECLIB_MAXIMUM_THREADS": "1",
}


def default_folder() -> Path:
    """Where generated data sets are kept.

    `$FLAXMIX_CACHE` if it is set and not empty, else the user's cache folder
    (on Linux `~/.cache/flaxmix`). It need not exist.
    """
    chosen = os.environ.get("FLAXMIX_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    return platformdirs.user_cache_path("flaxmix")


def compute(
    function: Callable[[int], dict[str, np.ndarray]],
    count: int,
    *,
    title: str,
    processes: int | None = None,
    progress: bool = True,
) -> dict[str, np.ndarray]:
    """Stacks function(0), ..., function(count - 1), computed in parallel.

    Workers are fresh interpreters that import the module of `function` and never
    the caller's main script, so no `if __name__ == "__main__"` guard is needed
    and no thread is forked. They have one BLAS thread each, so results do not
    depend on `processes`. They end when the caller ends, however that happens.

    Args:
        function: picklable and importable (at module level, or a
            `functools.partial` of such); gives arrays of the same shapes and
            types for every index.
        count: number of samples.
        title: of the progress bar and of errors.
        processes: number of workers; default `os.cpu_count()`.
        progress: whether to show a progress bar on the standard error.

    Returns:
        For every key of the samples an array [count, ...].

    Raises:
        ValueError: if `count` or `processes` is below 1.
        RuntimeError: if a sample fails; it names the index and has the worker's
            traceback as a note. The other samples are abandoned.
    """
    processes = (os.cpu_count() or 1) if processes is None else processes
    if count < 1 or processes < 1:
        raise ValueError(
            f"count and processes must be at least 1, got {count} and {processes}."
        )
    tasks: queue.SimpleQueue[int] = queue.SimpleQueue()
    replies: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    for index in range(count):
        tasks.put(index)
    stacked: dict[str, np.ndarray] = {}
    workers: list[subprocess.Popen] = []
    threads: list[threading.Thread] = []
    try:
        for _ in range(min(processes, count)):
            workers.append(_start())
            arguments = (workers[-1], function, tasks, replies)
            threads.append(threading.Thread(target=_drive, args=arguments, daemon=True))
            threads[-1].start()
        with _bar(progress) as bar:
            task = bar.add_task(title, total=count)
            for _ in range(count):
                index, reply = replies.get()
                if isinstance(reply, _Failure):
                    error = RuntimeError(f"{title}: sample {index} {reply.reason}")
                    error.add_note(reply.details)
                    raise error
                for key, value in reply.items():
                    if key not in stacked:
                        stacked[key] = np.empty((count, *value.shape), value.dtype)
                    stacked[key][index] = value
                bar.advance(task)
    finally:
        for worker in workers:
            worker.kill()
        for thread in threads:
            thread.join()
        for worker in workers:
            with contextlib.suppress(OSError), worker:
                pass
    return stacked


def build(
    folder: str | os.PathLike,
    parameters: dict[str, Any],
    write: Callable[[Path], None],
    *,
    packages: tuple[str, ...] = (),
) -> Path:
    """Makes a folder that appears complete, under its own name, or not at all.

    `write` fills a hidden sibling, which is synchronised to disk and renamed. A
    folder already made with the same parameters is used as it is. Of several
    processes one writes and the others wait for it; if the file system has no
    locks, each writes its own and the first to finish is kept. What a killed run
    left is removed by the next run for the same folder.

    Args:
        folder: to make; parents are made too. It may exist if it is empty.
        parameters: all that the content depends on, JSON-compatible; kept in
            `generation.json` in the folder.
        write: `write(path)` puts the files into the existing empty `path`.
        packages: distributions whose versions are recorded, for information.

    Returns:
        The folder.

    Raises:
        ValueError: if the folder was made with other parameters.
        FileExistsError: if the folder has other content, or is a file.
    """
    folder = Path(folder).absolute()
    if _finished(folder, parameters):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder.parent / f".{folder.name}.lock") as locked:
        if _finished(folder, parameters):
            return folder
        prefix = f".{folder.name}.partial-"
        if locked:
            for leftover in folder.parent.iterdir():
                if leftover.name.startswith(prefix):
                    shutil.rmtree(leftover, ignore_errors=True)
        partial = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
        try:
            write(partial)
            record = parameters | {
                "versions": {name: metadata.version(name) for name in packages}
            }
            (partial / RECORD).write_text(json.dumps(record, indent=2) + "\n")
            mask = os.umask(0)
            os.umask(mask)
            partial.chmod(0o777 & ~mask)
            for path in partial.iterdir():
                _synchronise(path)
            _synchronise(partial)
            with contextlib.suppress(OSError):
                folder.rmdir()
            try:
                partial.rename(folder)
            except OSError:
                if not _finished(folder, parameters):
                    raise
            _synchronise(folder.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def serve() -> None:
    """Runs one worker: pickled (function, index) in, results out, until the end.

    A thread reads the requests, so that the end of the requests (the caller
    finished or died) ends the worker at once, in the middle of a sample as well.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    # What the function prints must not get between the replies.
    os.dup2(2, 1)
    pending: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def listen() -> None:
        while (message := _receive(requests)) is not None:
            pending.put(message)
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        try:
            function, index = pickle.loads(pending.get())
            reply = pickle.dumps(function(index), pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            reason = f"failed: {type(error).__name__}: {error}"
            reply = pickle.dumps(_Failure(reason, traceback.format_exc()))
        _send(replies, reply)


class _Failure:
    """A sample that could not be computed: one line, and the whole story."""

    def __init__(self, reason: str, details: str):
        self.reason = reason
        self.details = details


def _start() -> subprocess.Popen:
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve()"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | _SINGLE_THREAD,
    )


def _drive(worker: subprocess.Popen, function, tasks, replies) -> None:
    """Hands tasks to one worker, one at a time, until none is left."""
    assert worker.stdin and worker.stdout
    while True:
        try:
            index = tasks.get_nowait()
        except queue.Empty:
            return
        try:
            _send(worker.stdin, pickle.dumps((function, index)))
            message = _receive(worker.stdout)
        except (OSError, ValueError):
            message = None
        except Exception as error:
            replies.put((index, _Failure(f"cannot be sent: {error}", "")))
            return
        if message is None:
            reason = f"lost its worker, which ended with exit code {worker.wait()}."
            replies.put((index, _Failure(reason, "Negative codes are signals.")))
            return
        replies.put((index, pickle.loads(message)))


def _send(pipe: IO[bytes], message: bytes) -> None:
    pipe.write(struct.pack("<Q", len(message)) + message)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> bytes | None:
    """The next message, or None at the end of the pipe."""
    header = pipe.read(8)
    if len(header) < 8:
        return None
    (length,) = struct.unpack("<Q", header)
    message = pipe.read(length)
    return message if len(message) == length else None


def _bar(shown: bool) -> Progress:
    # Without ipywidgets rich warns in notebooks; plain text works there as well.
    notebook = None if util.find_spec("ipywidgets") else False
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _Speed(),
        TimeRemainingColumn(),
        console=Console(stderr=True, force_jupyter=notebook),
        disable=not shown,
    )


class _Speed(ProgressColumn):
    def render(self, task: Task) -> str:
        speed = task.finished_speed or task.speed
        return "" if speed is None else f"{speed:.2f} samples/s"


def _finished(folder: Path, parameters: dict[str, Any]) -> bool:
    """Whether the folder is there with these parameters; raises if with others."""
    if not folder.exists():
        return False
    if not folder.is_dir():
        raise FileExistsError(f"{folder} is a file; a folder is to be made there.")
    try:
        record = json.loads((folder / RECORD).read_text())
    except FileNotFoundError:
        if any(folder.iterdir()):
            raise FileExistsError(
                f"{folder} has files that were not generated; choose another folder."
            ) from None
        return False
    record.pop("versions", None)
    if record != parameters:
        raise ValueError(
            f"{folder} was generated with {record}, not with {parameters}; choose "
            "another folder or delete it."
        )
    return True


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Holds an exclusive lock, freed by the system if the process is killed.

    Yields whether there is a lock: False where the system has none.
    """
    file = _acquire(path)
    try:
        yield file is not None
    finally:
        if file is not None:
            path.unlink(missing_ok=True)
            file.close()


def _acquire(path: Path) -> TextIO | None:
    if fcntl is None:
        return None
    while True:
        file = path.open("w")
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logging.getLogger(__name__).warning(
                    "waiting for another process, which holds %s", path
                )
                fcntl.flock(file, fcntl.LOCK_EX)
            # The last holder may have removed the file that was opened here.
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        except FileNotFoundError:
            pass
        except OSError:
            file.close()
            return None
        file.close()


def _synchronise(path: Path) -> None:
    """Flushes a file or a folder to disk, where the system can do so."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
