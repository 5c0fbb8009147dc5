"""The run folder: it alone rebuilds a run."""

import json
from pathlib import Path
from typing import Any

from train import config as configs
from train.log import read_metrics


def open_folder(config: Any, fingerprint: str) -> Path:
    """Makes the run folder, or checks that it belongs to this config and data.

    Raises:
        ValueError: if the folder belongs to another config or data set, or to
            something else; it names the first difference.
    """
    folder = config.run
    path, data = folder / "config.json", folder / "data.json"
    if path.exists():
        old = configs.read(type(config), path)
        if difference := configs.first_difference(old, config):
            raise ValueError(
                f"{folder} holds a run of another config: {difference}. "
                "Choose another folder with --run."
            )
        found = json.loads(data.read_text())["fingerprint"]
        if found != fingerprint:
            raise ValueError(
                f"{folder} holds a run on other data: fingerprint {found} became "
                f"{fingerprint}. Choose another folder with --run."
            )
        return folder
    if folder.exists() and {p.name for p in folder.iterdir()} - {data.name}:
        raise ValueError(f"{folder} is not empty and holds no run.")
    folder.mkdir(parents=True, exist_ok=True)
    # The config comes last: without it the folder is no run.
    write_json(data, {"fingerprint": fingerprint})
    configs.write(config, path)
    return folder


def write_json(path: Path, value: Any) -> None:
    """Writes JSON in one go."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n")
    temporary.replace(path)


def summarize(folder: Path, selections: dict[str, str]) -> dict[str, Any]:
    """Final errors, and the smallest over all evaluations by each selection."""
    rows = [r for r in read_metrics(folder) if any(k in r for k in selections)]
    errors = lambda row: {k: v for k, v in row.items() if k.endswith("_error")}
    results: dict[str, Any] = {"final": {"step": rows[-1]["step"], **errors(rows[-1])}}
    for name, selection in selections.items():
        best = min(rows, key=lambda row: row[name])
        results[selection] = {"step": best["step"], **errors(best)}
    return results
