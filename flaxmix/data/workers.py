"""Samples computed in parallel by worker processes."""

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from importlib import util
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

_SINGLE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "VECLIB_MAXIMUM_THREADS": "1",
}


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
    (as it is with `multiprocessing`) and no thread is forked. They have one BLAS
    thread each, so results do not depend on `processes`. They end when the caller
    ends, however that happens.

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
    request = pickle.dumps(function)
    indices: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    replies: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()

    def run(worker: subprocess.Popen) -> None:
        while (index := indices.get()) is not None:
            replies.put((index, _ask(worker, (request, index))))

    for index in range(count):
        indices.put(index)
    stacked: dict[str, np.ndarray] = {}
    workers: list[subprocess.Popen] = []
    threads: list[threading.Thread] = []
    try:
        for _ in range(min(processes, count)):
            workers.append(_start())
            thread = threading.Thread(target=run, args=workers[-1:], daemon=True)
            thread.start()
            threads.append(thread)
        with _interrupts_into(replies), _bar(progress) as bar:
            for _ in bar.track(range(count), description=title):
                index, reply = replies.get()
                if isinstance(reply, KeyboardInterrupt):
                    raise reply
                if not isinstance(reply, dict):
                    reason, details = reply
                    error = RuntimeError(f"{title}: sample {index} {reason}")
                    error.add_note(details)
                    raise error
                for key, value in reply.items():
                    if key not in stacked:
                        stacked[key] = np.empty((count, *value.shape), value.dtype)
                    stacked[key][index] = value
    finally:
        for worker in workers:
            worker.kill()
            indices.put(None)
        for thread in threads:
            thread.join()
        for worker in workers:
            with contextlib.suppress(OSError), worker:
                pass
    return stacked


@contextlib.contextmanager
def _interrupts_into(replies: queue.SimpleQueue) -> Iterator[None]:
    """Makes an interrupt a reply.

    Raised wherever the program stands, it could leave a lock behind closed, for
    which other threads would wait for ever.
    """
    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGINT) != signal.default_int_handler:
        yield
        return
    interrupt = (-1, KeyboardInterrupt())
    signal.signal(signal.SIGINT, lambda *_: replies.put(interrupt))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def serve() -> None:
    """Runs one worker: pickled (function, index) in, results out, until the end.

    A thread reads the requests, so that the end of the requests (the caller
    finished or died) ends the worker at once, in the middle of a sample as well.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "wb")
    # What the function prints must not get between the replies.
    os.dup2(2, 1)
    pending: queue.SimpleQueue[tuple[bytes, int]] = queue.SimpleQueue()

    def listen() -> None:
        with contextlib.suppress(EOFError, pickle.UnpicklingError):
            while True:
                pending.put(pickle.load(sys.stdin.buffer))
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        request, index = pending.get()
        try:
            reply = pickle.dumps(pickle.loads(request)(index))
        except Exception as error:
            reason = f"failed: {type(error).__name__}: {error}"
            reply = pickle.dumps((reason, traceback.format_exc()))
        replies.write(reply)
        replies.flush()


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


def _ask(
    worker: subprocess.Popen, request: tuple[bytes, int]
) -> dict[str, np.ndarray] | tuple[str, str]:
    """A sample, or why there is none: in one line, and the whole story."""
    assert worker.stdin and worker.stdout
    try:
        pickle.dump(request, worker.stdin)
        worker.stdin.flush()
        return pickle.load(worker.stdout)
    except (OSError, EOFError, pickle.UnpicklingError):
        # An exit code that it has already is kept.
        worker.kill()
        reason = f"lost its worker, which ended with exit code {worker.wait()}."
        return reason, "Negative codes are signals."


def _bar(shown: bool) -> Progress:
    # Without ipywidgets rich warns in notebooks; plain text works there as well.
    notebook = None if util.find_spec("ipywidgets") else False
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True, force_jupyter=notebook),
        disable=not shown,
    )
