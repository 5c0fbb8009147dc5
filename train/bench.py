"""Times forward and backward passes, all competitors by turns in one run.

    python -m train.bench surrogate [--blocks 4 --channels 64 ...]
    python -m train.bench mixers [--points 1024 16384 --names mha flare ...]
    python -m train.bench models [--points 1024 4096 --blocks 2 ...]
    python -m train.bench latent [--points 972 16384 131072 ...]
    python -m train.bench relation [--tokens 1024 4096 --width 64 ...]
    python -m train.bench context [--points 1048576 --shards 2 4 8 ...]

The last one counts and models instead: how well more devices would do. Each prints
tables and, with --json FILE, writes the same rows with versions, device
and sizes. Compile times hold for an empty compilation cache: do not set
JAX_COMPILATION_CACHE_DIR.
"""

import functools
import importlib.util
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx

from flaxmix import mixers
from train import models, scaling, sequences
from train.config import ModelConfig, fail
from train.timing import Contender, compiled, race, write

MIXERS: dict[str, Any] = {
    **models.MIXERS,
    "luna": mixers.LunaAttention,
    "abupt": mixers.AnchorAttention,
    "set_transformer": mixers.InducedAttention,
}
MODELS = (*models.MIXERS, *models.MODELS)

ANCHORS = 512
"""Of AB-UPT, whose published budget this is: all points where there are fewer."""


def _passes(module: nnx.Module, inputs: tuple, options: dict[str, Any]) -> Contender:
    """Forward and backward pass of module(*inputs, **options).

    The gradients are those of the outputs' squares, halved, with respect to all
    parameters and inputs.
    """

    def passes(module, inputs, options):
        apply = lambda module, inputs: module(*inputs, **options)
        outputs, pull = jax.vjp(apply, module, inputs)
        return outputs, pull(outputs)

    return compiled(passes, module, inputs, options)


def _mixer(name: str, points, *, batch, channels, heads, latents) -> Contender:
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    sizes = {"heads": heads, "latents": latents}
    inputs = (draw(batch, points, channels),)
    options: dict[str, Any] = {"key": jax.random.key(0)}
    if name in ("mha", "luna"):
        del sizes["latents"]
    if name == "luna":
        inputs += (draw(batch, latents, channels),)
    if name == "abupt":
        sizes["latents"] = ANCHORS
        coords = rng.uniform(size=(batch, points, 3))
        options["coords"] = jnp.asarray(coords, jnp.float32)
    mixer = MIXERS[name](channels, **sizes, rngs=nnx.Rngs(0))
    return _passes(mixer, inputs, options)


def _suite(suite, make, points, sizes, names, known, repeats, seconds, json) -> None:
    """Races make(name, points) of all names, once for each number of points."""
    for name in names:
        if name not in known:
            raise ValueError(f"no {name!r} in {suite}; there are {', '.join(known)}.")
    rows = []
    for n in points:
        contenders = {name: functools.partial(make, name, n) for name in names}
        title = _title(suite, {"points": n, **sizes})
        found = race(title, contenders, repeats=repeats, seconds=seconds)
        rows += [{"points": n, **vars(row)} for row in found]
        if json is not None:
            write(json, suite, sizes, rows)


def _title(what, sizes) -> str:
    listed = ", ".join(f"{name} {size:,}" for name, size in sizes.items())
    return f"{what}, forward and backward: {listed}"


def time_mixers(
    points: tuple[int, ...] = (1024, 16384),
    channels: int = 128,
    heads: int = 8,
    latents: int = 64,
    batch: int = 1,
    names: tuple[str, ...] = tuple(MIXERS),
    repeats: int = 7,
    seconds: float = 8,
    json: Path | None = None,
) -> None:
    """Times each mixer of the shared backbone alone, in float32.

    Gradients are those of all parameters and of the input, here random. AB-UPT has
    512 anchors, its published budget, whatever the number of latents; Luna's second
    input has a row for each latent. As in training, both AB-UPT's anchors and the
    noise of Transolver++ are drawn in each step.

    Args:
        points: numbers of points N, a table for each.
        channels: width C.
        heads: number of heads H.
        latents: number of latents M, or of slices or inducing points.
        batch: samples.
        names: of the mixers; times are compared with the first's.
        repeats: of each.
        seconds: that the repeats of one mixer may take; slower ones get fewer, but 3.
        json: file to write the rows to.
    """
    sizes = {
        "batch": batch,
        "channels": channels,
        "heads": heads,
        "latents": latents,
    }
    make = functools.partial(_mixer, **sizes)
    _suite("mixers", make, points, sizes, names, MIXERS, repeats, seconds, json)


def _model(name: Any, points, *, batch, **sizes) -> Contender:
    if name == "abupt":
        sizes["latents"] = ANCHORS
    config, key = ModelConfig(name=name, **sizes), jax.random.key(0)
    model = models.make_model(config, (3, 1), key, coordinates=(0, 1, 2))
    x = np.random.default_rng(0).uniform(size=(batch, points, 3))
    return _passes(model, (jnp.asarray(x, jnp.float32),), {"key": key})


def time_models(
    points: tuple[int, ...] = (1024, 4096),
    channels: int = 128,
    heads: int = 8,
    latents: int = 64,
    blocks: int = 2,
    batch: int = 1,
    names: tuple[str, ...] = MODELS,
    repeats: int = 7,
    seconds: float = 4,
    json: Path | None = None,
) -> None:
    """Times each complete model, in float32: the backbone with each mixer, and others.

    Inputs are random points of the unit cube. Gradients are those of all parameters
    and of the input. AB-UPT has 512 anchors, its published budget, whatever the number
    of latents; anchors and noise are drawn in each step, as in training.

    Args:
        points: numbers of points N, a table for each.
        channels: width C.
        heads: number of heads H.
        latents: number of latents M, or of slices, inducing points or modes.
        blocks: depth B.
        batch: samples.
        names: of the models; times are compared with the first's.
        repeats: of each.
        seconds: that the repeats of one model may take; slower ones get fewer, but 3.
        json: file to write the rows to.
    """
    sizes = {
        "batch": batch,
        "channels": channels,
        "heads": heads,
        "latents": latents,
        "blocks": blocks,
    }
    make = functools.partial(_model, **sizes)
    _suite("models", make, points, sizes, names, MODELS, repeats, seconds, json)


def _step(batch, points, steps, remat, sizes) -> Contender:
    """One call that does `steps` steps of the FLARE++ surrogate."""
    config = ModelConfig(name="flarepp", remat=remat, **sizes)
    model = models.make_model(config, (2, 1), jax.random.key(0))
    rng = np.random.default_rng(0)
    draw = lambda c: jnp.asarray(
        rng.normal(size=(steps, batch, points, c)), jnp.float32
    )
    data = draw(2), draw(1)

    def step(model, batch):
        x, y = batch
        loss = lambda model: jnp.square(model(x) - y).mean()
        value, grads = jax.value_and_grad(loss)(model)
        if steps == 1:
            return grads, value
        # Without an update between them they would be one step.
        return jax.tree.map(lambda p, g: p - 1e-6 * g, model, grads), value

    if steps == 1:
        return compiled(step, model, jax.tree.map(lambda a: a[0], data))
    scan = lambda model, data: jax.lax.scan(step, model, data)
    return compiled(scan, model, data, steps=steps)


def time_surrogate(
    batch: int = 4,
    points: int = 972,
    channels: int = 64,
    heads: int = 4,
    latents: int = 32,
    blocks: int = 4,
    steps_per_call: int = 20,
    repeats: int = 15,
    seconds: float = 60,
    json: Path | None = None,
) -> None:
    """Times a training step of FLARE++, beside PyTorch's where torch is installed.

    PyTorch in eager mode, one step a call, and several steps a call as in training,
    with a plain gradient update between them. Gradients are those of all parameters.

    Args:
        batch: samples a step.
        points: of a sample, N.
        channels: width C.
        heads: number of heads H.
        latents: number of latents M.
        blocks: depth B.
        steps_per_call: of the calls that do several.
        repeats: of each call.
        seconds: that the repeats of one call may take; slower ones get fewer, but 3.
        json: file to write the rows to.
    """
    sizes = {
        "channels": channels,
        "blocks": blocks,
        "heads": heads,
        "latents": latents,
    }
    contenders = {}
    if importlib.util.find_spec("torch"):
        from train import peers

        torch_step = lambda: Contender(*peers.step(batch, points, 2, 1, **sizes))
        contenders["PyTorch"] = torch_step
    for steps in (1, steps_per_call):
        for remat in (False, True):
            name = f"flaxmix, {steps} a call" + (", remat" if remat else "")
            contenders[name] = functools.partial(
                _step, batch, points, steps, remat, sizes
            )
    shown = {"batch": batch, "points": points, **sizes}
    title = _title("FLARE++ surrogate", shown)
    rows = race(title, contenders, repeats=repeats, seconds=seconds)
    if json is not None:
        write(json, "surrogate", shown, [vars(row) for row in rows])


def main(argv: list[str] | None = None) -> None:
    suites = {
        "surrogate": time_surrogate,
        "mixers": time_mixers,
        "models": time_models,
        "latent": scaling.time_latent,
        "context": scaling.model_context,
        "relation": sequences.time_relation,
    }
    try:
        tyro.extras.subcommand_cli_from_dict(
            suites, prog="python -m train.bench", args=argv
        )
    except (ValueError, OSError) as error:
        fail(str(error))


if __name__ == "__main__":
    main()
