"""Several processes that compute as one, on one machine or many."""

import hashlib
import re
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from flaxmix.data.pipeline import Share
from flaxmix.parallel.specs import batch_sharding


def start_processes(
    coordinator: str, *, processes: int | None = None, process: int | None = None
) -> None:
    """Joins this process to the others; to be called before anything is computed.

    Args:
        coordinator: "host:port" of process 0, which all must reach; or "auto" for
            what the cluster says (Slurm, Open MPI and others that JAX knows).
        processes: how many there are; with "auto" the cluster says so.
        process: which one this is, from 0 on; likewise.

    Raises:
        ValueError: if an address has no port or comes without the numbers, or "auto"
            finds nothing.
    """
    if coordinator == "auto":
        try:
            jax.distributed.initialize()
        except ValueError as error:
            raise ValueError(
                "coordinator='auto' finds no cluster (Slurm, Open MPI, ...); give "
                "host:port of process 0, the number of processes and of this one."
            ) from error
        return
    if not re.fullmatch(r".+:\d+", coordinator):
        raise ValueError(f"{coordinator=} is neither host:port nor 'auto'.")
    if processes is None or process is None or not 0 <= process < processes:
        raise ValueError(
            f"{coordinator=} needs the number of processes and which of them, from 0 "
            f"on, this one is; got {processes=} and {process=}."
        )
    jax.distributed.initialize(coordinator, processes, process)


def is_first() -> bool:
    """Whether this process is the one that writes and prints."""
    return jax.process_index() == 0


def wait_for_all(name: str) -> None:
    """Returns when every process has come here; `name` is that of the place."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def check_equal(**values: str) -> None:
    """Raises ValueError, naming the first value that differs between processes."""
    if jax.process_count() == 1:
        return
    for name, value in values.items():
        digest = hashlib.sha256(value.encode()).digest()[:4]
        own = np.frombuffer(digest, np.int32)
        every = np.asarray(multihost_utils.process_allgather(own))
        if (every != every[0]).any():
            raise ValueError(
                f"the processes differ in their {name}: they need the same command "
                "and the same data."
            )


def share(mesh: Mesh) -> Share:
    """The part of every batch that the devices of this process hold.

    Raises:
        ValueError: if a process has no device of the mesh.
    """
    own = np.vectorize(lambda device: device.process_index)(mesh.devices)
    for process in range(jax.process_count()):
        if process not in own:
            raise ValueError(
                f"a mesh of {dict(mesh.shape)} leaves process {process} of "
                f"{jax.process_count()} without a device."
            )
    (low, left), (high, right) = (
        f(np.argwhere(own == jax.process_index()), 0) for f in (np.min, np.max)
    )
    rows, columns = mesh.devices.shape
    return Share(
        rows=(int(low), int(high) + 1, rows),
        points=(int(left), int(right) + 1, columns),
    )


def global_batch(batch: Any, mesh: Mesh, *, stacked: bool = False) -> Any:
    """Arrays over all devices from what each process holds of them.

    Args:
        batch: this process's `share` of arrays [B, N, ...], or [steps, B, N, ...].
        mesh: that B is sharded over by 'data' and N by 'context'.
        stacked: whether there is an axis of steps.
    """
    part, sharding = share(mesh), batch_sharding(mesh, stacked=stacked)

    def place(a):
        shape = list(a.shape)
        for axis, (start, stop, whole) in enumerate((part.rows, part.points)):
            shape[axis + stacked] = shape[axis + stacked] * whole // (stop - start)
        return jax.make_array_from_process_local_data(sharding, a, tuple(shape))

    return jax.tree.map(place, batch)
