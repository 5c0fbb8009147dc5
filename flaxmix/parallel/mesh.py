"""Device meshes."""

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh


def make_mesh(*, data: int, context: int = 1) -> Mesh:
    """A ('data', 'context') mesh of the first data * context devices.

    Batches are sharded over 'data' and points over 'context'.

    Raises:
        ValueError: if there are fewer devices, or a part is below 1.
    """
    if min(data, context) < 1:
        raise ValueError(f"data={data} and context={context} must be at least 1.")
    devices = jax.devices()
    if data * context > len(devices):
        message = (
            f"a mesh of data={data} and context={context} needs {data * context} "
            f"devices, there are {len(devices)}."
        )
        if devices[0].platform == "cpu":
            each = -(-data * context // jax.process_count())
            message += (
                f" The environment variable JAX_NUM_CPU_DEVICES={each} gives a process "
                f"{each} on its CPU."
            )
        raise ValueError(message)
    return jax.make_mesh(
        (data, context),
        ("data", "context"),
        axis_types=(AxisType.Auto,) * 2,
        devices=devices[: data * context],
    )


def abstract_mesh(*, data: int, context: int = 1) -> AbstractMesh:
    """The mesh of `make_mesh` without devices: for tracing, not for running."""
    return AbstractMesh(
        (data, context), ("data", "context"), axis_types=(AxisType.Auto,) * 2
    )


def batch_shards(mesh: Mesh) -> int:
    """Parts that a batch is split into."""
    return mesh.shape["data"]
