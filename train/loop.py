"""The training loop, for every task."""

import collections
import contextlib
import functools
import itertools
import json
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from flaxmix import parallel
from flaxmix.parameters import with_parameters
from train import log, plots
from train.checkpoint import Checkpoints
from train.flops import count_flops
from train.folder import open_folder, summarize, write_json
from train.optimizer import decayed, one_cycle
from train.step import noise_key, train_step, train_steps
from train.task import Task, plan


def run(config: Any, task: Task) -> dict[str, Any]:
    """Trains, or goes on training, until all steps are done.

    Args:
        config: with `optimizer`, `seed`, `run`, `devices`, `context`,
            `steps_per_call`, `checkpoint_every` and `progress`.
        task: what is trained.

    Returns:
        Final and selected errors, which `results.json` holds too.

    Raises:
        ValueError: if the config and what the run folder holds do not fit, before
            anything is compiled or overwritten.
        FloatingPointError: if a loss, gradient or error is not finite.
    """
    if task.samples % config.devices:
        raise ValueError(
            f"batch={task.samples} must be a multiple of devices={config.devices}."
        )
    mesh = parallel.make_mesh(data=config.devices, context=config.context)
    parallel.share(mesh)  # which no process may be without
    layout = plan(config, task, mesh)
    folder = open_folder(config, task.fingerprint)
    checkpoints = Checkpoints(folder / "checkpoints", best=tuple(task.selections))
    # Also where the folder does not fit: Orbax's threads would complain at the end.
    with contextlib.closing(checkpoints):
        return _run(config, task, mesh, layout, folder, checkpoints)


def _run(config, task, mesh, layout, folder, checkpoints) -> dict[str, Any]:
    model, shardings = layout.model, layout.shardings
    progress = config.progress and parallel.is_first()
    start = checkpoints.latest()
    if start == task.steps:
        # A damaged or missing file is made anew below.
        with contextlib.suppress(OSError, ValueError):
            results = json.loads((folder / "results.json").read_text())
            if progress:
                print(f"{folder} is finished: all {task.steps} steps are done.")
            return results
    old = log.read_metrics(folder) if (folder / "metrics.jsonl").exists() else []
    if start is None and any(row["step"] > 0 for row in old):
        # The first checkpoint precedes the first step: someone took it away.
        raise ValueError(
            f"{folder} has metrics up to step {old[-1]['step']} but no checkpoint; "
            "delete it or choose another folder with --run."
        )
    if start is None:
        init = jax.jit(layout.init, out_shardings=shardings)
        state = init(jax.random.key(config.seed))
    else:
        state = checkpoints.restore(start, layout.abstract, shardings)

    def loss(mesh, params, batch, key):
        return task.loss(with_parameters(model, params), batch, key, mesh)

    options = {
        "loss_fn": functools.partial(loss, mesh),
        "optimizer": layout.optimizer,
        "ema": config.optimizer.ema,
        "key": noise_key(config.seed),
    }
    step = _PerShape(
        jax.jit(
            functools.partial(train_steps, **options),
            in_shardings=(shardings, parallel.batch_sharding(mesh, stacked=True)),
            out_shardings=(shardings, NamedSharding(mesh, P())),
            donate_argnums=0,
        )
    )
    size = steps_per_call(
        config.steps_per_call,
        task.interval,
        task.steps,
        config.checkpoint_every,
        # A run may be resumed with other checkpoints between.
        start or None,
    )
    rate, beta1 = (
        np.asarray(jax.jit(jax.vmap(f))(jnp.arange(task.steps)))
        for f in one_cycle(config.optimizer, task.steps)
    )

    done = start or 0
    # All have read what the first may now write.
    parallel.wait_for_all("the start of the log")
    logger = log.Silent()
    if parallel.is_first():
        logger = log.Log(folder, steps=task.steps, start=start, progress=progress)
    # Closed before results are written: they stand for a run that is all saved.
    with contextlib.closing(checkpoints), logger:

        def check(values, when):
            for name, value in values.items():
                if not math.isfinite(value):
                    raise FloatingPointError(
                        f"{name} is {value} {when}; the last checkpoint is that of "
                        f"step {checkpoints.latest()}."
                    )

        def evaluate():
            errors = task.evaluate(with_parameters(model, state.params), mesh)
            average = task.evaluate(with_parameters(model, state.average), mesh)
            errors |= {f"ema_{name}": error for name, error in average.items()}
            logger.write(done, errors)
            logger.flush()
            # Before saving: a checkpoint of bad weights would end every resumption.
            check(errors, f"after step {done}")
            if done != start:
                checkpoints.save(done, state, errors)
            text = ", ".join(f"{k} {100 * v:.3f} %" for k, v in errors.items())
            logger.print(f"step {done}: {text}")

        def record(at, metrics, seconds):
            metrics = {k: float(v.mean()) for k, v in jax.device_get(metrics).items()}
            metrics |= {
                "learning_rate": float(rate[at - 1]),
                "beta1": float(beta1[at - 1]),
                "samples_per_second": size * task.samples / seconds,
            }
            logger.write(at, metrics)
            logger.progress(
                at,
                loss=metrics["loss"],
                learning_rate=metrics["learning_rate"],
                samples_per_second=metrics["samples_per_second"],
            )
            check(
                {name: metrics[name] for name in ("loss", "grad_norm")},
                f"in steps {at - size + 1} to {at}",
            )

        if start is not None:
            logger.print(f"resuming {folder} after step {start} of {task.steps}")
        batches = iter(())
        if done < task.steps:
            batches = (
                parallel.global_batch(batch, mesh, stacked=True)
                for batch in task.batches(done, size, mesh)
            )
        if progress and done < task.steps:
            first = next(batches)
            batches = itertools.chain([first], batches)
            one = jax.tree.map(
                lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), first
            )
            # Those of all devices together.
            whole = {"loss_fn": functools.partial(loss, parallel.make_mesh(data=1))}
            flops = count_flops(
                functools.partial(train_step, **(options | whole)),
                *(layout.abstract, one),
            )
            groups = decayed(list(layout.abstract.params), config.optimizer.decay)
            rows = _rows(task, layout.abstract.params, groups, mesh, size, flops)
            log.table(str(folder), [*task.rows, *rows])
        # A run that was killed before its first checkpoint starts anew.
        old = [] if start is None else old
        measured = [r for r in old if all(name in r for name in task.selections)]
        at_boundary = done % task.interval == 0 or done == task.steps
        if at_boundary and not any(r["step"] == done for r in measured):
            evaluate()

        ready, began = collections.deque(), time.perf_counter()
        while done < task.steps:
            batch = next(batches)
            if step.compile(state, batch, logger):
                began = time.perf_counter()
            state, metrics = step(state, batch)
            done += size
            ready.append((done, metrics))
            boundary = done % task.interval == 0 or done == task.steps
            checkpoint = done % (config.checkpoint_every or task.steps) == 0
            # One call late, so that the device never waits for the log.
            while ready and (boundary or checkpoint or len(ready) > 1):
                at, metrics = ready.popleft()
                jax.block_until_ready(metrics)
                now = time.perf_counter()
                record(at, metrics, now - began)
                began = now
            if boundary:
                evaluate()
                began = time.perf_counter()
            elif checkpoint:
                logger.flush()
                checkpoints.save(done, state, {})

    task.finish(with_parameters(model, state.params), mesh, folder)
    # The record is complete: only the first process writes it.
    parallel.wait_for_all("the end of the log")
    results = summarize(folder, task.selections)
    if parallel.is_first():
        plots.curves(log.read_metrics(folder), folder / "curves.png")
        write_json(folder / "results.json", results)
    return results


def steps_per_call(most: int, *boundaries: int | None) -> int:
    """The largest number of steps up to `most` that ends at every boundary."""
    common = math.gcd(*(b for b in boundaries if b is not None))
    return max(n for n in range(1, min(most, common) + 1) if common % n == 0)


class _PerShape:
    """A jitted call that is compiled, and says so, once for each shape."""

    def __init__(self, jitted):
        self._jitted, self._compiled = jitted, {}

    def compile(self, state, batch, logger) -> bool:
        """Compiles for the shapes of a batch; False if that was done before."""
        shape = _shape(batch)
        if shape in self._compiled:
            return False
        began = time.perf_counter()
        self._compiled[shape] = self._jitted.lower(state, batch).compile()
        logger.print(
            f"compiled the training step for x {list(batch['x'].shape)} in "
            f"{time.perf_counter() - began:.1f} s "
            f"({len(self._compiled)} compiled so far)"
        )
        return True

    def __call__(self, state, batch):
        return self._compiled[_shape(batch)](state, batch)


def _shape(batch):
    return tuple((name, a.shape) for name, a in sorted(batch.items()))


def _rows(task, params, groups, mesh, size, flops):
    """Start-up table: what is trained, how, and on what."""
    count = lambda names: sum(params[name].size for name in names)
    rows = [
        ("parameters", f"{count(params):,}"),
        ("decayed", f"{count(n for n in params if groups[n]):,}"),
        ("not decayed", f"{count(n for n in params if not groups[n]):,}"),
        ("mesh", ", ".join(f"{k} {v}" for k, v in mesh.shape.items())),
        ("device", mesh.devices.flat[0].device_kind),
        ("FLOPs a step", f"{flops:.3g}"),
        ("steps", f"{task.steps:,}, {size} in a call"),
    ]
    kinds = collections.defaultdict(list)
    for name in params:
        kinds[name.rsplit(".", 1)[-1], groups[name]].append(name)
    for (kind, decay), names in sorted(kinds.items()):
        text = f"{count(names):,} in {len(names)}, {'' if decay else 'not '}decayed"
        rows.append((f"  {kind}", text))
    return rows
