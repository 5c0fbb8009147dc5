"""Arrays by the authors' names to modules of ours, and back."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from flaxmix import mixers, models, ops
from flaxmix.interop.build import build
from flaxmix.interop.names import prefix, table
from flaxmix.layers import Linear


@dataclasses.dataclass(frozen=True)
class _Entry:
    """One array of the authors'.

    Attributes:
        path: of our parameter.
        index: of the layer, and of the expert, in our stacked array.
        name: of the authors' parameter.
        shape: of the authors' parameter.
        transposed: whether ours is the transpose of theirs; else it is a view of
            the same buffer.
    """

    path: tuple
    index: tuple[int, ...]
    name: str
    shape: tuple[int, ...]
    transposed: bool


def _entries(module: Any) -> Iterator[_Entry]:
    names, start = table(module), prefix(module)
    whole = getattr(module, "blocks", None)
    mixer = module if whole is None else getattr(whole, "mixer", None)
    original = isinstance(mixer, mixers.OriginalFlare)
    for path, leaf in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        at, parts, before = module, list(start), ""
        for key in path:
            if isinstance(key, int):
                at = at[key]  # pyright: ignore[reportIndexIssue]
            else:
                at = getattr(at, str(key))
            key = str(key)
            parts.append(names.get(f"{before}.{key}", names.get(key, key)))
            before = key
            if isinstance(at, Linear) and at.skip:
                parts.append("fc")
        # Depth comes first in our arrays, then the experts.
        stacked = [i for i, key in enumerate(path) if key in _STACKED]
        lengths = leaf.shape[: len(stacked)]
        shape = leaf.shape[len(stacked) :]
        transposed = path[-1] == "kernel"
        for index in np.ndindex(*lengths):
            own = list(parts)
            for place, i in reversed(list(zip(stacked, index, strict=True))):
                own.insert(place + len(start) + 1, str(i))
            name = ".".join(part for part in own if part)
            theirs = _shape(path[-1], shape, original)
            yield _Entry(path, index, name, theirs, transposed)


_STACKED = ("blocks", "experts1", "experts2")


def _shape(name: Any, shape: tuple[int, ...], original: bool) -> tuple[int, ...]:
    if name == "kernel":
        return shape[::-1]
    if name in ("temperature", "offset"):
        return (1, *shape, 1, 1)
    if name == "inducing":
        return (1, *shape)
    if name == "latents" and original:
        # Stored as [C, M], and reinterpreted as [H, M, D].
        heads, latents, width = shape
        return heads * width, latents
    return shape


def _frequencies(module: Any) -> dict[str, np.ndarray]:
    """The buffer that the authors keep beside the weights of AB-UPT."""
    if isinstance(module, models.ABUPT):
        mixer, axes = module.blocks.mixer, len(module.coordinates)
    elif isinstance(module, mixers.AnchorAttention):
        mixer, axes = module, 3
    else:
        return {}
    width = mixer.qkv.kernel.shape[-2] // mixer.heads
    return {"rope.omega": ops.rotary_frequencies(width, axes)}


def from_reference(meta: Mapping[str, Any], arrays: Mapping[str, Any]) -> Any:
    """Builds our module with the weights of the authors' module.

    The result computes what theirs does, such as an unclamped temperature in
    Transolver-3. Only the noise of Transolver++ is not drawn without a key; set
    `evaluation_noise` for that.

    Args:
        meta: `meta["spec"]` holds the flags of the authors' module: `kind`, `mixer`,
            `mixer_cfg`, `rmsnorm`, and the sizes C, H, M, `blocks`, `c_in`, `c_out`,
            `ffn_ratio` as far as the kind has them. AB-UPT has `coordinate_scale`,
            LNO `layers`, GNOT `experts`, `structured` and `grid`, original FLARE
            `attn_scale`, `Lk`, `Lv` and `Lf`.
        arrays: parameters by their PyTorch names, as in a `state_dict`.

    Returns:
        A mixer, a block or a model, in float64 if the arrays are and x64 is on.

    Raises:
        ValueError: if a flag has no counterpart, or a parameter is missing,
            unexpected or of another shape or value; it names the first one.
    """
    if "spec" not in meta:
        raise ValueError("meta lacks 'spec'.")
    module: Any = nnx.eval_shape(lambda: build(meta["spec"]))
    entries = list(_entries(module))
    expected = {entry.name for entry in entries}
    given = set(arrays)
    for name, frequencies in _frequencies(module).items():
        if name in given:
            _check_buffer(name, np.asarray(arrays[name]), frequencies)
            given.remove(name)
    for name in itertools.chain(sorted(expected - given), sorted(given - expected)):
        state = "missing" if name in expected else "unexpected"
        raise ValueError(f"parameter {name!r} is {state}.")
    flat = dict(nnx.to_flat_state(nnx.state(module, nnx.Param)))
    values: dict[tuple, np.ndarray] = {}
    for entry in entries:
        a = np.asarray(arrays[entry.name])
        if not np.issubdtype(a.dtype, np.floating):
            raise ValueError(
                f"parameter {entry.name!r} is {a.dtype}, no floating-point array."
            )
        if a.shape != entry.shape:
            raise ValueError(
                f"parameter {entry.name!r} has shape {a.shape}, expected {entry.shape}."
            )
        shape = flat[entry.path].shape
        value = values.setdefault(entry.path, np.empty(shape, a.dtype))
        own = shape[len(entry.index) :]
        value[entry.index] = a.T if entry.transposed else a.reshape(own)
    for path, value in values.items():
        flat[path] = flat[path].replace(jnp.asarray(value))
    nnx.update(module, nnx.from_flat_state(flat))
    return module


def _check_buffer(name: str, actual: np.ndarray, expected: np.ndarray) -> None:
    close = actual.shape == expected.shape and np.allclose(actual, expected, rtol=1e-6)
    if not close:
        raise ValueError(f"{name!r} is {actual}, expected {expected}.")


def to_reference(module: nnx.Module) -> dict[str, np.ndarray]:
    """The parameters of a mixer, block or model by their PyTorch names.

    Raises:
        ValueError: if the module has no counterpart in the authors' code.
    """
    flat = dict(nnx.to_flat_state(nnx.state(module, nnx.Param)))
    arrays = {}
    for entry in _entries(module):
        a = np.asarray(flat[entry.path][...])[entry.index]
        arrays[entry.name] = a.T if entry.transposed else a.reshape(entry.shape)
    for name, frequencies in _frequencies(module).items():
        arrays[name] = frequencies.astype(next(iter(arrays.values())).dtype)
    return arrays
