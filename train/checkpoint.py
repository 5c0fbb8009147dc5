"""Checkpoints of a run, by Orbax."""

import math
from pathlib import Path
from typing import Any

import absl.logging
import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as managers

# Orbax tells at length what it does; what matters here raises.
absl.logging.set_verbosity(absl.logging.ERROR)


class Checkpoints:
    """The checkpoints in a folder: the last two and the best by each error.

    Saving runs in the background; an unfinished save is never taken for a
    checkpoint.
    """

    def __init__(
        self, folder: Path, *, best: tuple[str, ...] = (), read_only: bool = False
    ):
        """Opens or makes the folder.

        Args:
            folder: of the checkpoints.
            best: metrics whose smallest value marks a checkpoint to keep.
            read_only: whether nothing may be made or saved.
        """
        policies: list[Any] = [managers.LatestN(2)]
        for name in best:
            smallest = lambda metrics, name=name: metrics.get(name, float("inf"))
            policies.append(managers.BestN(get_metric_fn=smallest, reverse=True, n=1))
        self._folder = Path(folder).absolute()
        self._closed = False
        self._manager = ocp.CheckpointManager(
            self._folder,
            item_handlers={"state": ocp.StandardCheckpointHandler()},
            options=ocp.CheckpointManagerOptions(
                # Orbax writes metrics only if it is given a way to rank them.
                best_fn=lambda metrics: metrics.get(best[0], float("inf")),
                preservation_policy=managers.AnyPreservationPolicy(policies),
                cleanup_tmp_directories=not read_only,
                create=not read_only,
                read_only=read_only,
            ),
        )

    def steps(self) -> list[int]:
        """Steps of all checkpoints, in order; a folder without a state is none."""
        has_state = lambda step: (self._folder / str(step) / "state/_METADATA").exists()
        return sorted(filter(has_state, self._manager.all_steps()))

    def latest(self) -> int | None:
        """The last step, or None."""
        return max(self.steps(), default=None)

    def save(self, step: int, state: Any, metrics: dict[str, float]) -> None:
        """Saves in the background; metrics are kept beside the state."""
        self._manager.save(
            step,
            args=ocp.args.Composite(state=ocp.args.StandardSave(state)),
            metrics=metrics,
        )

    def best(self, metric: str) -> int | None:
        """The step whose checkpoint has the smallest value of a metric."""
        values = [
            ((self._manager.metrics(step) or {}).get(metric, math.nan), step)
            for step in self.steps()
        ]
        known = [pair for pair in values if math.isfinite(pair[0])]
        return min(known)[1] if known else None

    def restore(self, step: int, abstract: Any, shardings: Any) -> Any:
        """Reads a state of the given shapes and dtypes into the given shardings.

        Raises:
            ValueError: if the checkpoint holds another tree, shape or dtype; it
                names the first difference.
        """
        like = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=sharding
            ),
            abstract,
            shardings,
        )
        damaged = f"the checkpoint {self._folder / str(step)} is damaged"
        advice = f"delete it to go on from another of the steps {self.steps()}."
        try:
            found = self._manager.item_metadata(step)["state"]
        except Exception as error:  # Orbax and TensorStore raise many kinds
            raise ValueError(f"{damaged} ({type(error).__name__}); {advice}") from error
        by_name = lambda tree: {
            jax.tree_util.keystr(path, simple=True, separator="/"): leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        }
        saved, wanted = by_name(found), by_name(like)
        for name in sorted(saved.keys() | wanted.keys()):
            describe = lambda leaf: (
                "nothing" if leaf is None else f"{leaf.dtype}{list(leaf.shape)}"
            )
            old, new = describe(saved.get(name)), describe(wanted.get(name))
            if old != new:
                raise ValueError(
                    f"the checkpoint of step {step} does not fit: {name} is {old} "
                    f"there and {new} here."
                )
        try:
            return self._manager.restore(
                step, args=ocp.args.Composite(state=ocp.args.StandardRestore(like))
            )["state"]
        except Exception as error:
            raise ValueError(f"{damaged} ({type(error).__name__}); {advice}") from error

    def close(self) -> None:
        """Waits until everything is saved; twice does no harm."""
        if not self._closed:
            self._closed = True
            self._manager.wait_until_finished()
            self._manager.close()
