"""The run folder: it alone rebuilds a run."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jax

from flaxmix import parallel
from train import config as configs
from train.log import read_metrics


def open_folder(config: Any, fingerprint: str) -> Path:
    """Makes the run folder, or checks that it belongs to this config and data.

    Of several processes, which all need to see the folder, the first one makes it.

    Raises:
        ValueError: if the folder belongs to another config or data set, or to
            something else; it names the first difference. Also if the processes
            differ in their config or data.
    """
    folder = config.run
    path = folder / "config.json"
    check_processes(config)
    parallel.check_equal(data=fingerprint)
    begun = check_folder(config)
    parallel.wait_for_all("the run folder is made")
    if not begun and parallel.is_first():
        _make_folder(config, fingerprint)
    parallel.wait_for_all("the run folder is there")
    if not path.exists():
        raise ValueError(
            f"{folder} is not there for process {jax.process_index()}: the processes "
            "need one file system."
        )
    if begun:
        found = read_fingerprint(folder)
        if found != fingerprint:
            raise ValueError(
                f"{folder} holds a run on other data: fingerprint {found} became "
                f"{fingerprint}. Choose another folder with --run."
            )
    return folder


def _make_folder(config: Any, fingerprint: str) -> None:
    folder = config.run
    folder.mkdir(parents=True, exist_ok=True)
    # The config comes last: without it the folder is no run.
    write_json(folder / "data.json", {"fingerprint": fingerprint})
    data = config.data
    if data.folder is not None:
        # The run must find its data from any working directory.
        data = dataclasses.replace(data, folder=data.folder.absolute())
    configs.write(dataclasses.replace(config, data=data), folder / "config.json")


def check_processes(config: Any) -> None:
    """Raises ValueError if the processes differ in their config."""
    own = {"distributed": configs.DistributedConfig(), "workers": 0, "progress": True}
    parallel.check_equal(config=repr(dataclasses.replace(config, **own)))


def check_folder(config: Any) -> bool:
    """Whether the run folder holds a run already, of this config.

    Raises:
        ValueError: if it holds a run of another config, or something else.
    """
    folder = config.run
    path = folder / "config.json"
    if path.exists():
        old = configs.read(type(config), path)
        if difference := configs.first_difference(old, config):
            raise ValueError(
                f"{folder} holds a run of another config: {difference}. "
                "Choose another folder with --run."
            )
        return True
    # A run that was killed while its folder was made leaves these.
    begun = {"data.json", "data.tmp", "config.tmp"}
    if folder.exists() and {p.name for p in folder.iterdir()} - begun:
        raise ValueError(f"{folder} is not empty and holds no run.")
    return False


def read_fingerprint(folder: Path) -> str:
    """Of the data that a run was trained on.

    Raises:
        ValueError: if the file that holds it is damaged.
    """
    path = folder / "data.json"
    try:
        return json.loads(path.read_text())["fingerprint"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def write_json(path: Path, value: Any) -> None:
    """Writes JSON in one go."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n")
    temporary.replace(path)


def _finite(error: float | None) -> float:
    """Makes errors comparable: NaN and what was not measured come last."""
    return error if error is not None and math.isfinite(error) else math.inf


def summarize(folder: Path, selections: dict[str, str]) -> dict[str, Any]:
    """Final errors, and the smallest over all evaluations by each selection."""
    rows = [r for r in read_metrics(folder) if any(k in r for k in selections)]
    errors = lambda row: {k: v for k, v in row.items() if k.endswith("_error")}
    results: dict[str, Any] = {"final": {"step": rows[-1]["step"], **errors(rows[-1])}}
    for name, selection in selections.items():
        best = min(rows, key=lambda row: _finite(row.get(name)))
        results[selection] = {"step": best["step"], **errors(best)}
    return results
