"""Generated data sets: a cache folder, and folders that are complete or absent."""

import contextlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

import platformdirs

try:
    import fcntl
except ImportError:
    fcntl = None

RECORD = "generation.json"
"""File of a generated folder that says how it was made."""


def default_folder() -> Path:
    """Where generated data sets are kept.

    `$FLAXMIX_CACHE` if it is set and not empty, else the user's cache folder
    (on Linux `~/.cache/flaxmix`). It need not exist.
    """
    chosen = os.environ.get("FLAXMIX_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    return platformdirs.user_cache_path("flaxmix")


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
    except ValueError as error:
        raise ValueError(
            f"{folder / RECORD} is damaged ({error}); delete {folder}."
        ) from error
    if isinstance(record, dict):
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
