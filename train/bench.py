"""Times a training step, beside PyTorch's where torch is installed.

    python -m train.bench [--blocks 4 --channels 64 ...]

Forward and backward pass of the FLARE++ surrogate, all competitors by turns in one
run: PyTorch in eager mode, one step a call, and several steps a call as in training
(with a plain gradient update between them, without which they would be one step).
"""

import functools
import importlib.util
import os
import platform
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from rich.console import Console
from rich.table import Table

from flaxmix import mixers, models
from flaxmix.parameters import named_parameters, with_parameters


def _ours(batch, points, inputs, outputs, steps, remat, blocks, channels, **mixer):
    make = lambda key: models.Surrogate(
        inputs,
        outputs,
        channels=channels,
        blocks=blocks,
        mixer=functools.partial(mixers.FlarePP, **mixer),
        remat=remat,
        rngs=nnx.Rngs(key),
    )
    model = nnx.eval_shape(lambda: make(jax.random.key(0)))
    params = jax.jit(lambda key: named_parameters(make(key)))(jax.random.key(0))
    rng = np.random.default_rng(0)
    draw = lambda c: jnp.asarray(
        rng.normal(size=(steps, batch, points, c)), jnp.float32
    )
    data = draw(inputs), draw(outputs)

    def step(params, batch):
        x, y = batch
        loss = lambda p: jnp.square(with_parameters(model, p)(x) - y).mean()
        value, grads = jax.value_and_grad(loss)(params)
        if steps == 1:
            return grads, value
        return jax.tree.map(lambda p, g: p - 1e-6 * g, params, grads), value

    if steps == 1:
        function, data = step, jax.tree.map(lambda a: a[0], data)
    else:
        function = lambda params, data: jax.lax.scan(step, params, data)
    began = time.perf_counter()
    compiled = jax.jit(function).lower(params, data).compile()
    seconds = time.perf_counter() - began
    call = lambda: jax.block_until_ready(compiled(params, data))
    memory = compiled.memory_analysis()
    return call, seconds, memory.temp_size_in_bytes if memory else float("nan")


def main(
    batch: int = 4,
    points: int = 972,
    channels: int = 64,
    heads: int = 4,
    latents: int = 32,
    blocks: int = 4,
    steps_per_call: int = 20,
    repeats: int = 15,
) -> None:
    """Times a training step, beside PyTorch's where torch is installed."""
    sizes = {
        "channels": channels,
        "blocks": blocks,
        "heads": heads,
        "latents": latents,
    }
    calls, notes = {}, {}
    if importlib.util.find_spec("torch"):
        from train import peers

        call, _ = peers.step(batch, points, 2, 1, **sizes)
        calls["PyTorch"], notes["PyTorch"] = (call, 1), ("", "")
    for steps in (1, steps_per_call):
        for remat in (False, True):
            name = f"flaxmix, {steps} a call" + (", remat" if remat else "")
            call, seconds, memory = _ours(batch, points, 2, 1, steps, remat, **sizes)
            calls[name] = call, steps
            notes[name] = f"{seconds:.1f}", f"{memory / 2**20:.0f}"
    times = {name: [] for name in calls}
    for call, _ in calls.values():
        call()
    for _ in range(repeats):
        for name, (call, steps) in calls.items():
            # As much work of each kind in a row, so that none profits from a pause.
            count = max(1, steps_per_call // steps // 4)
            began = time.perf_counter()
            for _ in range(count):
                call()
            times[name].append(1e3 * (time.perf_counter() - began) / count / steps)
    first = statistics.median(times[next(iter(times))])
    table = Table(
        title=f"FLARE++ surrogate, forward and backward: batch {batch}, N {points}, "
        f"C {channels}, H {heads}, M {latents}, B {blocks}"
    )
    for column in ("", "ms a step", "quartiles", "ratio", "compile s", "temp MiB"):
        table.add_column(column, justify="right" if column else "left")
    for name, values in times.items():
        low, middle, high = statistics.quantiles(values, n=4)
        table.add_row(
            name,
            f"{middle:.1f}",
            f"{low:.1f} - {high:.1f}",
            f"{middle / first:.2f}",
            *notes[name],
        )
    Console().print(table)
    print(
        f"jax {jax.__version__}, {jax.devices()[0].device_kind}, "
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    )


if __name__ == "__main__":
    tyro.cli(main)
