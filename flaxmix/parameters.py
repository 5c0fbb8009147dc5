"""The parameters of a module as a plain dictionary of named arrays."""

from collections.abc import Mapping
from typing import Any

from flax import nnx


def named_parameters(module: nnx.Module) -> dict[str, Any]:
    """All parameters by dotted name, such as "blocks.mixer.key.kernel".

    Layers scanned over depth share a name; their arrays have a leading axis.
    """
    flat = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return {".".join(map(str, path)): leaf.get_value() for path, leaf in flat}


def with_parameters(module: nnx.Module, arrays: Mapping[str, Any]) -> Any:
    """A copy of a module, or of its `nnx.eval_shape`, with other parameters.

    Raises:
        ValueError: if a parameter is missing, unexpected or of another shape; it
            names the first one.
    """
    graph, state = nnx.split(module, nnx.Param)
    flat = dict(nnx.to_flat_state(state))
    names = {".".join(map(str, path)): path for path in flat}
    for name in sorted(names.keys() ^ arrays.keys()):
        state = "missing" if name in names else "unexpected"
        raise ValueError(f"parameter {name!r} is {state}.")
    for name, path in names.items():
        shape = flat[path].shape
        if arrays[name].shape != shape:
            raise ValueError(
                f"parameter {name!r} has shape {arrays[name].shape}, expected {shape}."
            )
        flat[path] = flat[path].replace(arrays[name])
    return nnx.merge(graph, nnx.from_flat_state(flat))
