"""The mixers and models of the comparison, one module of each, and its oracle."""

import functools

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flaxmix import mixers, models

import baseline_oracles as mixer_oracles
import model_oracles

# All different, so that no axis can be taken for another.
C, H, D, M, N, INPUTS, OUTPUTS = 24, 3, 8, 5, 12, 4, 2

# Of outputs after tens of sums of 24 terms; gradients besides.
TIGHT = 1e-12
ERROR = 128 * 2**-23
# A rounding to 8 or 11 bits after each of some tens of steps; models are deeper.
HALF = {jnp.bfloat16: 24 * 2**-8, jnp.float16: 24 * 2**-11}


class Packed(nnx.Module):
    """Luna's attention with a packed sequence of its own; both results in one."""

    def __init__(self, channels, *, heads, latents, rngs):
        self.mixer = mixers.LunaAttention(channels, heads=heads, rngs=rngs)
        self.packed = nnx.Param(jax.random.normal(rngs.params(), (latents, channels)))

    def __call__(self, x, *, mask=None, axis_name=None):
        p = self.packed[...].astype(x.dtype)
        p = jnp.broadcast_to(p, (*x.shape[:-2], *p.shape))
        y, packed = self.mixer(x, p, mask=mask, axis_name=axis_name)
        return y + packed.mean(-2, keepdims=True)


class Placed(nnx.Module):
    """Anchor attention with the first three channels as coordinates."""

    def __init__(self, channels, *, heads, latents, rngs):
        self.mixer = mixers.AnchorAttention(
            channels, heads=heads, latents=latents, coordinate_scale=7.0, rngs=rngs
        )

    def __call__(self, x, *, mask=None, axis_name=None, anchors=None):
        return self.mixer(
            x, coords=x[..., :3], mask=mask, axis_name=axis_name, anchors=anchors
        )


def packed_oracle(p, x, mask, module):
    packed = np.broadcast_to(p["packed"], (*x.shape[:-2], *p["packed"].shape))
    y, out = mixer_oracles.luna_attention(p["mixer"], x, packed, mask, heads=H)
    return y + out.mean(-2, keepdims=True)


def anchors_of(mixer, x, mask):
    """Anchors and which of them count, as the module draws them."""
    anchors, real = mixer.draw(x.shape[-2], mask=jnp.asarray(mask))
    anchors = np.broadcast_to(anchors, (*x.shape[:-2], anchors.shape[-1]))
    return {"anchors": anchors, "anchor_mask": None if real is None else np.array(real)}


def placed_oracle(p, x, mask, module):
    given = anchors_of(module.mixer, x, mask)
    return mixer_oracles.anchor_attention(
        p["mixer"], x, mask, heads=H, coords=x[..., :3], coordinate_scale=7.0, **given
    )


def abupt_oracle(p, x, mask, module):
    given = anchors_of(module.blocks.mixer, x, mask)
    options = {"columns": (0, 2), "coordinate_scale": 7.0, "kind": module.norm.kind}
    return model_oracles.abupt(p, x, mask, heads=H, **options, **given)


def simple(oracle, **options):
    return lambda p, x, mask, module: oracle(p, x, mask, heads=H, **options)


def gnot_oracle(p, x, mask, module):
    pos = None if module.grid is None else model_oracles.grid_distances(module.grid)
    return model_oracles.gnot(p, x, mask, heads=H, pos=pos)


def backbone_oracle(p, x, mask, module):
    mixer = functools.partial(mixer_oracles.transolver, heads=H)
    return model_oracles.surrogate(p, x, mask, mixer=mixer, kind="rms")


SIZES = {"heads": H, "latents": M}
# Three blocks: a loop of two is unrolled, and compiles longer.
DEEP = {"channels": C, "blocks": 3, "io_layers": 1, **SIZES}
ABLATIONS = {
    "ablated": {},
    "ablated_all": {
        "seed_norm": True,
        "synthesis_key_norm": "affine",
        "synthesis_value_norm": "affine",
        "reference_norm": "affine",
        "query_norm": "affine",
        "key_norm": True,
        "gate": "raw",
        "share": False,
    },
    "ablated_bare": {
        "seed_norm": False,
        "synthesis_key_norm": False,
        "synthesis_value_norm": False,
        "query_norm": True,
        "key_norm": False,
        "gate": None,
    },
}
FLAREPP = {
    "seed_norm": "affine",
    "synthesis_key_norm": True,
    "synthesis_value_norm": True,
    "reference_norm": True,
    "key_norm": "affine",
    "gate": "sigmoid",
    "share": True,
}


def mixer(kind, **options):
    return lambda: kind(C, **SIZES, **options, rngs=nnx.Rngs(0))


def model(kind, **options):
    return lambda: kind(INPUTS, OUTPUTS, **DEEP | options, rngs=nnx.Rngs(0))


def gnot(**options):
    sizes = {"channels": C, "blocks": 3, "heads": H, "experts": 3}
    return lambda: models.GNOT(INPUTS, OUTPUTS, **sizes, **options, rngs=nnx.Rngs(0))


def backbone():
    inner = functools.partial(mixers.Transolver, **SIZES)
    sizes = {"channels": C, "blocks": 3, "io_layers": 1, "norm": "rms"}
    return models.Surrogate(INPUTS, OUTPUTS, **sizes, mixer=inner, rngs=nnx.Rngs(0))


CASES = {
    "transolver": (mixer(mixers.Transolver), simple(mixer_oracles.transolver)),
    "transolver_free": (
        mixer(mixers.Transolver, clamp=False),
        simple(mixer_oracles.transolver, clamp=False),
    ),
    "transolver3": (mixer(mixers.Transolver3), simple(mixer_oracles.transolver3)),
    "transolverpp": (mixer(mixers.TransolverPP), simple(mixer_oracles.transolverpp)),
    "luna_attention": (mixer(Packed), packed_oracle),
    "anchors": (mixer(Placed), placed_oracle),
    "induced": (
        mixer(mixers.InducedAttention),
        simple(mixer_oracles.induced_attention),
    ),
    **{
        name: (
            mixer(mixers.AblatedFlarePP, **options),
            simple(mixer_oracles.ablated_flarepp, **FLAREPP | options),
        )
        for name, options in ABLATIONS.items()
    },
    "ablated_rms": (
        mixer(mixers.AblatedFlarePP, norm="rms"),
        simple(mixer_oracles.ablated_flarepp, **FLAREPP, kind="rms"),
    ),
    "backbone": (backbone, backbone_oracle),
    "luna": (model(models.Luna), simple(model_oracles.luna)),
    "abupt": (
        model(models.ABUPT, coordinates=(0, 2), coordinate_scale=7.0),
        abupt_oracle,
    ),
    "set_transformer": (
        model(models.SetTransformer, norm="rms"),
        simple(model_oracles.set_transformer, kind="rms"),
    ),
    "perceiver_io": (
        model(models.PerceiverIO),
        simple(model_oracles.perceiver_io),
    ),
    "lno": (model(models.LNO), simple(model_oracles.lno)),
    "gnot": (gnot(), gnot_oracle),
    "gnot_grid": (gnot(grid=(3, 4)), gnot_oracle),
}
# One of each kind, for what does not depend on options.
KINDS = [
    name
    for name in CASES
    if name not in ("transolver_free", "ablated_all", "ablated_bare", "ablated_rms")
]
MODELS = KINDS[KINDS.index("backbone") :]


def features(name):
    return INPUTS if name in MODELS else C


@functools.cache
def randomized(name):
    """A module none of whose parameters is at a special value, in NumPy."""
    graph, params = nnx.split(jax.jit(CASES[name][0])(), nnx.Param)
    rng = np.random.default_rng(0)

    def shift(path, x):
        # Temperatures stay well above 0, where scores would have no bound.
        part = 0.02 if path[-2].key in ("temperature", "offset") else 0.2
        x = np.asarray(x) + part * rng.normal(size=x.shape)
        return x.astype(np.float32)

    return graph, jax.tree.map_with_path(shift, params)


def module(name, dtype=jnp.float32):
    graph, params = randomized(name)
    return nnx.merge(graph, jax.tree.map(lambda x: jnp.asarray(x, dtype), params))


def numpy_params(name):
    _, params = randomized(name)
    return jax.tree.map(lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(params))


def inputs(name, batch=(2,), *, n=N, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(*batch, n, features(name))).astype(np.float32)
    mask = rng.random((*batch, n)) < 0.7
    mask[..., :2] = True
    return jnp.asarray(x, dtype), jnp.asarray(mask)


@jax.jit
def apply(module, x, mask):
    return module(x, mask=mask)


@jax.jit
def value_and_grads(module, x, mask):
    """Outputs, and gradients of a loss on the real points, in one vector."""
    y, back = jax.vjp(lambda module, x: module(x, mask=mask), module, x)
    dmodule, dx = back(jnp.where(mask[..., None], jnp.cos(y), 0))
    # Some gradients are zero by analysis: all are compared with the largest.
    return y, jax.flatten_util.ravel_pytree(dmodule)[0], dx
