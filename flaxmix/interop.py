"""Weights from and to the authors' PyTorch code (github.com/vpuri3/FLARE.py)."""

import functools
import itertools
import operator
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from flaxmix.layers import Linear
from flaxmix.mixers import (
    Flare,
    FlarePP,
    OriginalFlare,
    SelfAttention,
    SimplifiedFlarePP,
)
from flaxmix.models import Surrogate

_MIXERS = {
    "mha": SelfAttention,
    "flare": Flare,
    "flarepp": FlarePP,
    "simplifiedflarepp": SimplifiedFlarePP,
}
_OPTIONS = {
    "num_latents": "latents",
    "qk_norm": "qk_norm",
    "share_k0_v0": "share",
    "k_norm": "key_norm",
    "q_fixed_norm": "reference_norm",
    "gate_logit_init": "gate_logit",
}
_NAMES = {
    "embed": "in_proj",
    "mixer_norm": "norm1",
    "mlp_norm": "norm2",
    "mlp": "ffn",
    "norm": "out_proj.0",
    "head": "out_proj.1",
    "first": "fc1",
    "hidden": "fcs",
    "last": "fc2",
    "latents": "latent_q",
    "seeds": "latent_q0",
    "reference": "latent_q_fixed",
    "gate": "gate_logit",
    "seed_norm": "q0_norm",
    "synthesis_norm": "k0_norm",
    "query_norm": "q_norm",
    "key_norm": "k_norm",
    "synthesis_key": "k0_proj",
    "synthesis_value": "v0_proj",
    "key": "k_proj",
    "value": "v_proj",
    "out": "out_proj",
    "qkv": "qkv_proj",
    "kernel": "weight",
    "scale": "weight",
}
# The original study's classes call the same parts otherwise.
_ORIGINAL = _NAMES | {"mixer": "att", "mlp": "mlp"}


def _build(spec: Mapping[str, Any]) -> nnx.Module:
    norm = "rms" if spec["rmsnorm"] else "layer"
    kind, heads = spec["kind"], spec["H"]
    if kind in ("mixer", "backbone"):
        if spec["mixer"] not in _MIXERS:
            raise ValueError(
                f"mixer {spec['mixer']!r} has no counterpart here; "
                f"known are {sorted(_MIXERS)}."
            )
        given = {_OPTIONS[k]: v for k, v in spec["mixer_cfg"].items()}
        cls = functools.partial(_MIXERS[spec["mixer"]], heads=heads, norm=norm, **given)
    elif kind in ("flare_original_mixer", "flare_original"):
        if spec["Lk"] != spec["Lv"]:
            raise ValueError(
                f"key and value MLPs must be equally deep, got Lk={spec['Lk']} "
                f"and Lv={spec['Lv']}."
            )
        scale = {"one": None, "sqrt": (spec["C"] // heads) ** -0.5}
        cls = functools.partial(
            OriginalFlare,
            heads=heads,
            latents=spec["M"],
            layers=None if spec["Lk"] < 0 else spec["Lk"],
            scale=scale.get(spec["attn_scale"], spec["attn_scale"]),
        )
    else:
        raise ValueError(f"kind {kind!r} has no counterpart here.")
    if kind in ("mixer", "flare_original_mixer"):
        return cls(spec["C"], rngs=nnx.Rngs(0))
    return Surrogate(
        spec["c_in"],
        spec["c_out"],
        channels=spec["C"],
        blocks=spec["blocks"],
        mixer=cls,
        norm=norm,
        mlp_ratio=spec["ffn_ratio"],
        mlp_layers=spec.get("Lf", 0),
        rngs=nnx.Rngs(0),
    )


def _entries(module: Any):
    """Yields (path, depth index or None, reference name, transposed) of each array."""
    mixer = getattr(module, "blocks", module)
    mixer = getattr(mixer, "mixer", mixer)
    original = isinstance(mixer, OriginalFlare)
    names = _ORIGINAL if original else _NAMES
    prefix = ["att"] if original and mixer is module else []
    for path, leaf in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        at, parts = module, list(prefix)
        for key in path:
            if isinstance(key, int):
                at = at[key]  # pyright: ignore[reportIndexIssue]
            else:
                at = getattr(at, str(key))
            parts.append(names.get(str(key), str(key)))
            if isinstance(at, Linear) and at.skip:
                parts.append("fc")
        transposed = path[-1] == "kernel"
        if path[0] != "blocks":
            yield path, None, ".".join(parts), transposed
            continue
        for i in range(leaf.shape[0]):
            name = ".".join([parts[0], str(i), *parts[1:]])
            yield path, i, name, transposed


def from_reference(meta: Mapping[str, Any], arrays: Mapping[str, Any]) -> nnx.Module:
    """Builds our module with the weights of the authors' module.

    Args:
        meta: `meta["spec"]` holds the flags of the authors' module: `kind`, `mixer`,
            `mixer_cfg`, `rmsnorm`, and the sizes C, H, M, `blocks`, `c_in`, `c_out`,
            `ffn_ratio`.
        arrays: parameters by their PyTorch names, as in a `state_dict`.

    Returns:
        A mixer or a `Surrogate`, in float64 if the arrays are and x64 is on.

    Raises:
        ValueError: if a flag has no counterpart, or a parameter is missing,
            unexpected or of another shape; it names the first one.
    """
    module = nnx.eval_shape(lambda: _build(meta["spec"]))
    entries = list(_entries(module))
    expected = {name for _, _, name, _ in entries}
    for name in itertools.chain(
        sorted(expected - set(arrays)), sorted(set(arrays) - expected)
    ):
        state = "missing" if name in expected else "unexpected"
        raise ValueError(f"parameter {name!r} is {state}.")
    state = nnx.state(module, nnx.Param)
    flat = dict(nnx.to_flat_state(state))
    for path, group in itertools.groupby(entries, operator.itemgetter(0)):
        shape = flat[path].shape
        stacked, parts = False, []
        for _, i, name, transposed in group:
            stacked = i is not None
            a = np.asarray(arrays[name])
            a = a.T if transposed else a
            own = shape[1:] if stacked else shape
            # The original study stores [H, M, D] latents as a [C, M] buffer.
            latent = path[-1] == "latents" and a.size == np.prod(own)
            if a.shape != own and not latent:
                raise ValueError(
                    f"parameter {name!r} has shape {a.shape}, expected {own}."
                )
            parts.append(a.reshape(own))
        value = jnp.asarray(np.stack(parts) if stacked else parts[0])
        flat[path] = flat[path].replace(value)
    nnx.update(module, nnx.from_flat_state(flat))
    return module


def to_reference(module: nnx.Module) -> dict[str, np.ndarray]:
    """The parameters of a mixer or a `Surrogate` by their PyTorch names."""
    flat = dict(nnx.to_flat_state(nnx.state(module, nnx.Param)))
    arrays = {}
    for path, i, name, transposed in _entries(module):
        a = np.asarray(flat[path][...])
        a = a if i is None else a[i]
        if path[-1] == "latents" and ".att." in f".{name}":
            a = a.reshape(-1, a.shape[1])
        arrays[name] = a.T if transposed else a
    return arrays
