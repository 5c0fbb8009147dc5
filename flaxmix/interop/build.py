"""Our modules for the flags of the authors'."""

import functools
from collections.abc import Mapping
from typing import Any

from flax import nnx

from flaxmix import mixers, models

_MIXERS: dict[str, Any] = {
    "mha": mixers.SelfAttention,
    "flare": mixers.Flare,
    "flarepp": mixers.FlarePP,
    "simplifiedflarepp": mixers.SimplifiedFlarePP,
    "flarepp_ablations": mixers.AblatedFlarePP,
    "transolver": mixers.Transolver,
    "transolverpp": mixers.TransolverPP,
    # The authors do not clamp this one.
    "transolver3": functools.partial(mixers.Transolver3, clamp=False),
}
_HAVE_NORMS = ("mha", "flare", "flarepp", "simplifiedflarepp", "flarepp_ablations")
_OPTIONS = {
    "num_latents": "latents",
    "qk_norm": "qk_norm",
    "share_k0_v0": "share",
    "k_norm": "key_norm",
    "q_fixed_norm": "reference_norm",
    "gate_logit_init": "gate_logit",
}
# The ablations' norms, and whether they are on when nothing is said.
_NORMS = {
    "q0": ("seed_norm", False),
    "k0": ("synthesis_key_norm", False),
    "v0": ("synthesis_value_norm", False),
    "q": ("query_norm", False),
    "k": ("key_norm", False),
    "q_fixed": ("reference_norm", True),
}
_PROJECTIONS = {
    "k0": "synthesis_key",
    "v0": "synthesis_value",
    "k": "key",
    "v": "value",
}


KINDS = (
    "mixer",
    "backbone",
    "flare_original_mixer",
    "flare_original",
    "luna_block",
    "luna",
    "anchor_mixer",
    "abupt_surface",
    "set_transformer",
    "perceiverio",
    "lno",
    "gnot",
)


def build(spec: Mapping[str, Any]) -> nnx.Module:
    """The module that a file's `spec` describes.

    Raises:
        ValueError: if a flag has no counterpart or is missing.
    """
    if not isinstance(spec, Mapping) or spec.get("kind") not in KINDS:
        raise ValueError(
            f"no kind of module with a counterpart here in {spec!r}; known are "
            f"{', '.join(KINDS)}."
        )
    try:
        return _build(spec)
    except KeyError as error:
        raise ValueError(f"the spec lacks {error}.") from None
    except (TypeError, AttributeError) as error:
        raise ValueError(f"the spec has a wrong flag or value: {error}") from None


def _build(spec: Mapping[str, Any]) -> nnx.Module:
    kind, rngs = spec["kind"], nnx.Rngs(0)
    if kind in ("mixer", "flare_original_mixer"):
        return _mixer(spec)(spec["C"], rngs=rngs)
    norm = "rms" if spec["rmsnorm"] else "layer"
    sizes = {"channels": spec["C"], "heads": spec["H"]}
    if kind == "anchor_mixer":
        return mixers.AnchorAttention(
            **sizes,
            latents=spec["M"],
            coordinate_scale=spec["coordinate_scale"],
            rngs=rngs,
        )
    if kind == "luna_block":
        ratio = spec["ffn_ratio"]
        return models.LunaBlock(**sizes, norm=norm, mlp_ratio=ratio, rngs=rngs)
    ends = spec["c_in"], spec["c_out"]
    depth = {"blocks": spec["blocks"], "norm": norm, "rngs": rngs}
    if kind in ("backbone", "flare_original"):
        return models.Surrogate(
            *ends,
            channels=spec["C"],
            mixer=_mixer(spec),
            mlp_ratio=spec["ffn_ratio"],
            mlp_layers=spec.get("Lf", 0),
            **depth,
        )
    if kind == "lno":
        layers = spec["layers"]
        return models.LNO(*ends, **sizes, **depth, latents=spec["M"], io_layers=layers)
    sizes["mlp_ratio"] = spec["ffn_ratio"]
    if kind == "gnot":
        grid = tuple(spec["grid"]) if spec["structured"] else None
        if grid and spec.get("ref", 8) != 8:
            raise ValueError(f"the reference grid must be 8 wide, got {spec['ref']}.")
        return models.GNOT(*ends, **sizes, **depth, experts=spec["experts"], grid=grid)
    sizes["latents"] = spec["M"]
    if kind == "abupt_surface":
        scale = spec["coordinate_scale"]
        return models.ABUPT(*ends, **sizes, **depth, coordinate_scale=scale)
    kinds = {
        "luna": models.Luna,
        "set_transformer": models.SetTransformer,
        "perceiverio": models.PerceiverIO,
    }
    return kinds[kind](*ends, **sizes, **depth)


def _mixer(spec: Mapping[str, Any]) -> Any:
    """The mixer's constructor, but for channels and rngs."""
    heads = spec["H"]
    if spec["kind"].startswith("flare_original"):
        if spec["Lk"] != spec["Lv"]:
            raise ValueError(
                f"key and value MLPs must be equally deep, got Lk={spec['Lk']} "
                f"and Lv={spec['Lv']}."
            )
        scale = {"one": None, "sqrt": (spec["C"] // heads) ** -0.5}
        return functools.partial(
            mixers.OriginalFlare,
            heads=heads,
            latents=spec["M"],
            layers=None if spec["Lk"] < 0 else spec["Lk"],
            scale=scale.get(spec["attn_scale"], spec["attn_scale"]),
        )
    name, given = spec["mixer"], dict(spec["mixer_cfg"])
    if name != "mha":
        given.setdefault("num_latents", spec["M"])
    given.pop("kind", None)
    if name not in _MIXERS:
        raise ValueError(
            f"mixer {name!r} has no counterpart here; known are {sorted(_MIXERS)}."
        )
    if name == "simplifiedflarepp" and not given.pop("qk0_norm", True):
        raise ValueError("qk0_norm=False has no counterpart here.")
    options = _ablation(given) if name == "flarepp_ablations" else {}
    for key, value in given.items():
        if key not in _OPTIONS:
            raise ValueError(f"option {key!r} of {name} has no counterpart here.")
        options[_OPTIONS[key]] = value
    if name in _HAVE_NORMS:
        options["norm"] = "rms" if spec["rmsnorm"] else "layer"
    return functools.partial(_MIXERS[name], heads=heads, **options)


def _ablation(given: dict[str, Any]) -> dict[str, Any]:
    """Takes the ablation's own flags out of `given`."""
    options: dict[str, Any] = {"share": False}
    for theirs, (ours, default) in _NORMS.items():
        on = given.pop(f"{theirs}_norm", default)
        affine = given.pop(f"{theirs}_elementwise_affine", False)
        options[ours] = "affine" if on and affine else on
    for theirs, ours in _PROJECTIONS.items():
        options[f"{ours}_bias"] = given.pop(f"{theirs}_use_bias", False)
        identity = given.pop(f"{theirs}_use_residual", theirs == "v")
        options[f"{ours}_identity"] = identity
    options["gate"] = "raw" if given.pop("use_gate", False) else None
    return options
