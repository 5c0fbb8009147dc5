"""How latent attention scales: time and memory in N, and over devices by a model."""

import functools
import importlib.util
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table

from flaxmix import mixers, parallel
from flaxmix.mixers.heads import merge, split
from train import models
from train.config import ModelConfig
from train.flops import collectives, count_flops
from train.timing import Contender, compiled, race, write


def materialised(layer: mixers.FlarePP, x: jax.Array) -> jax.Array:
    """`layer(x)` by the formulas as they stand: all N x M probabilities are held."""
    heads = lambda t: split(t, layer.heads)
    assert layer.key_norm is not None
    k0 = layer.plain_norm(heads(layer.synthesis_key(x)))
    k, v = layer.key_norm(heads(layer.key(x))), heads(layer.value(x))
    scale = k.shape[-1] ** -0.5

    def gather(q, k, v):
        spec = "hmd,bnhd->bhmn" if q.ndim == 3 else "bhmd,bnhd->bhmn"
        p = jax.nn.softmax(scale * jnp.einsum(spec, q, k), -1)
        return jnp.einsum("bhmn,bnhd->bhmd", p, v)

    dynamic = gather(layer.seed_norm(layer.seeds[...]), k0, k0)
    gate = jax.nn.sigmoid(layer.gate[...])[:, None, None]
    q = layer.plain_norm(layer.reference[...]) + gate * dynamic
    p = jax.nn.softmax(scale * jnp.einsum("bnhd,bhmd->bhnm", k, q), -1)
    return layer.out(merge(jnp.einsum("bhnm,bhmd->bnhd", p, gather(q, k, v))))


def _passes(apply, layer, x, steps=1) -> Contender:
    def passes(layer, x):
        y, pull = jax.vjp(apply, layer, x)
        return pull(y)

    def step(state, _):
        # Without an update between them they would be one step.
        return jax.tree.map(lambda p, g: p - 1e-6 * g, state, passes(*state)), None

    def several(layer, x):
        return jax.lax.scan(step, (layer, x), length=steps)[0]

    return compiled(passes if steps == 1 else several, layer, x, steps=steps)


def time_latent(
    points: tuple[int, ...] = (972, 16384, 131072),
    channels: int = 128,
    heads: int = 8,
    latents: int = 64,
    batch: int = 1,
    steps_per_call: int = 4,
    repeats: int = 9,
    seconds: float = 30,
    json: Path | None = None,
) -> None:
    """Times a FLARE++ mixer against N, beside PyTorch and the materialised form.

    PyTorch, where torch is installed, with its fused attention, in eager mode. The
    materialised form holds all probabilities, as plain autodiff does. Gradients are
    those of all parameters and of the input, in float32.

    Args:
        points: numbers of points N, a table for each.
        channels: width C.
        heads: number of heads H.
        latents: number of latents M.
        batch: samples.
        steps_per_call: passes in one call, as training does several steps in one, with
            an update between them.
        repeats: of each.
        seconds: that the repeats of one may take; slower ones get fewer, but 3.
        json: file to write the rows to.
    """
    if not points or min(batch, steps_per_call, *points) < 1:
        raise ValueError(f"{batch=}, {steps_per_call=} and {points=} must be positive.")
    sizes = {"channels": channels, "heads": heads, "latents": latents}
    layer = mixers.FlarePP(channels, heads=heads, latents=latents, rngs=nnx.Rngs(0))
    rows = []
    for n in points:
        draw = np.random.default_rng(0).normal(size=(batch, n, channels))
        x = jnp.asarray(draw, jnp.float32)
        contenders: dict[str, Any] = {}
        if importlib.util.find_spec("torch"):
            from train import peers

            mixer = functools.partial(peers.mixer, batch, n, **sizes)
            contenders["PyTorch"] = lambda mixer=mixer: Contender(*mixer())
        for steps in (1, steps_per_call):
            contenders[f"flaxmix, {steps} a call"] = lambda x=x, steps=steps: _passes(
                lambda f, x: f(x), layer, x, steps
            )
        contenders["materialised"] = lambda x=x: _passes(materialised, layer, x)
        shown = ", ".join(f"{k} {v}" for k, v in sizes.items())
        title = f"FLARE++ mixer, forward and backward: N {n:,}, batch {batch}, {shown}"
        found = race(title, contenders, repeats=repeats, seconds=seconds)
        rows += [{"points": n, **vars(row)} for row in found]
        if json is not None:
            write(json, "latent", {"batch": batch, **sizes}, rows)


# Of one H100 SXM: the data sheet's bfloat16 peak and NVLink in one direction, and a
# network of 400 Gbit/s for each. Latencies are assumptions.
PEAK_FLOPS = 989e12
NODE = 8
BANDWIDTH = {"node": 450e9, "network": 50e9}
LATENCY = {"node": 10e-6, "network": 30e-6}


def sharded_passes(model: nnx.Module, shards: int):
    """Forward and backward pass of a model on points that `shards` devices share."""
    mesh = parallel.abstract_mesh(data=1, context=shards)

    def passes(model, x):
        y, pull = jax.vjp(functools.partial(parallel.apply, mesh=mesh), model, x)
        return pull(y)

    return passes


def modelled_seconds(flops: float, exchanged, shards: int, utilisation: float) -> float:
    """Time of a step: arithmetic, then all exchanges, none of them hidden.

    A sum of b bytes over R devices moves 2 (R - 1) / R b bytes through each. Those
    outside of the loop over depth, mostly the parameters', count as one, as XLA
    combines them.
    """
    seconds = flops / (PEAK_FLOPS * utilisation)
    if shards > 1:
        link = "node" if shards <= NODE else "network"
        count = 1 + sum(one.times for one in exchanged if one.times > 1)
        total = sum(one.times * one.bytes for one in exchanged)
        moved = 2 * (shards - 1) / shards * total
        seconds += count * LATENCY[link] + moved / BANDWIDTH[link]
    return seconds


def model_context(
    name: str = "flarepp",
    points: tuple[int, ...] = (2**19, 2**20, 2**23),
    channels: int = 128,
    heads: int = 8,
    latents: int = 64,
    blocks: int = 8,
    shards: tuple[int, ...] = (2, 4, 8, 16, 32, 64),
    utilisation: tuple[float, ...] = (0.02, 0.4),
    json: Path | None = None,
) -> None:
    """Models the strong scaling of context parallelism. Nothing here is measured.

    Floating-point operations and the bytes of all collectives are counted in the
    training pass of a surrogate; their times are assumed: an H100's peak times a
    utilisation, and its links. No exchange is hidden behind arithmetic, which divides
    evenly: efficiency is the part of a device's time that is arithmetic.

    Args:
        name: of the model; one whose points meet in reductions.
        points: numbers of points N.
        channels: width C.
        heads: number of heads H.
        latents: number of latents M.
        blocks: depth B.
        shards: numbers of devices R.
        utilisation: parts of the peak that the arithmetic reaches: what a layer of
            FLARE reached on an H100 in the papers' figures, and a well-tuned one.
        json: file to write the rows to.
    """
    if not points or not shards or min(*points, *shards) < 1:
        raise ValueError(f"{points=} and {shards=} must be positive.")
    if not utilisation or not all(0 < part <= 1 for part in utilisation):
        raise ValueError(f"{utilisation=} must be parts of the peak, in (0, 1].")
    sizes = {"channels": channels, "heads": heads, "latents": latents, "blocks": blocks}
    config = ModelConfig(name=name, **sizes)  # pyright: ignore[reportArgumentType]
    model = nnx.eval_shape(
        lambda: models.make_model(
            config, (3, 1), jax.random.key(0), coordinates=(0, 1, 2)
        )
    )
    table = Table(title=f"MODELLED efficiency of context parallelism: {name}, {sizes}")
    for column in ("N", "R", "collectives", "MiB a step", "TFLOP a device"):
        table.add_column(column, justify="right")
    for part in utilisation:
        table.add_column(f"efficiency at {part:.0%} of the peak", justify="right")
    rows = []
    for n in points:
        x = jax.ShapeDtypeStruct((1, n, 3), jnp.float32)
        for r in shards:
            if n % r:
                raise ValueError(f"{n} points do not come out even over {r} devices.")
            passes = sharded_passes(model, r)
            found = collectives(passes, model, x)
            if any(one.name == "permute" for one in found):
                raise ValueError(f"{name=}: its points travel, which is not modelled.")
            flops = count_flops(passes, model, x)
            efficiency = {
                part: modelled_seconds(flops, [], 1, part)
                / modelled_seconds(flops, found, r, part)
                for part in utilisation
            }
            row = {
                "points": n,
                "devices": r,
                "collectives": sum(one.times for one in found),
                "bytes": sum(one.times * one.bytes for one in found),
                "flops": flops,
                "modelled_efficiency": {str(k): v for k, v in efficiency.items()},
            }
            rows.append(row)
            table.add_row(
                *(f"{n:,}", str(r), str(row["collectives"])),
                *(f"{row['bytes'] / 2**20:.2f}", f"{flops / 1e12:.3g}"),
                *(f"{value:.3f}" for value in efficiency.values()),
            )
    console = Console(width=None if Console().is_terminal else 140)
    console.print(table)
    console.print(
        f"Assumed, not measured: {PEAK_FLOPS / 1e12:.0f} TFLOP/s; up to {NODE} devices "
        f"{BANDWIDTH['node'] / 1e9:.0f} GB/s and {LATENCY['node'] * 1e6:.0f} us a "
        f"collective, beyond {BANDWIDTH['network'] / 1e9:.0f} GB/s and "
        f"{LATENCY['network'] * 1e6:.0f} us; no overlap."
    )
    if json is not None:
        write(json, "context", sizes, rows)
