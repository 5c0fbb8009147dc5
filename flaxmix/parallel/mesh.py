"""Device meshes."""

import jax
from jax.sharding import AxisType, Mesh


def make_mesh(*, data: int, context: int = 1) -> Mesh:
    """A ('data', 'context') mesh of the first data * context devices.

    Batches are sharded over 'data' and points over 'context'.

    Raises:
        ValueError: if there are fewer devices.
    """
    devices = jax.devices()
    if not 1 <= data * context <= len(devices):
        raise ValueError(
            f"a mesh of data={data} and context={context} needs {data * context} "
            f"devices, there are {len(devices)}."
        )
    return jax.make_mesh(
        (data, context),
        ("data", "context"),
        axis_types=(AxisType.Auto,) * 2,
        devices=devices[: data * context],
    )


def batch_shards(mesh: Mesh) -> int:
    """Parts that a batch is split into."""
    return mesh.shape["data"]


def point_shards(mesh: Mesh) -> int:
    """Parts that the points of a sample are split into."""
    return mesh.shape["context"]
