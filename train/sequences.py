"""How Relation scales in the number of tokens, beside attention and PyTorch."""

import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from flaxmix import ops
from train.plots import COLOURS, grid
from train.timing import Contender, compiled, race, write


def _arrays(tokens: int, heads: int, width: int, count: int) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    shape = 1, tokens, heads, width
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(count)]


def _passes(function, *arrays: jax.Array) -> Contender:
    """function(*arrays) and its gradients for a given cotangent."""

    def passes(arrays, dy):
        y, pull = jax.vjp(function, *arrays)
        return y, pull(dy)

    return compiled(passes, arrays, arrays[2])


def _full(name: str, tokens: int, heads: int, width: int) -> Contender:
    arrays = _arrays(tokens, heads, width, 3)
    if name == "attention":
        attend = lambda q, k, v: ops.causal_attention(q, k, v)[0]
        return _passes(attend, *arrays)
    form = "materialized" if name == "materialized" else None
    relation = functools.partial(ops.relation, implementation=form)
    return _passes(relation, *arrays, jnp.asarray(0.5))


def _linear(name: Any, tokens: int, heads: int, width: int) -> Contender:
    *arrays, draw = _arrays(tokens, heads, width, 4)
    # Retentions from 0.5 to 1, as at the start of a training run.
    retention = -0.7 * jax.nn.sigmoid(draw)
    form = "scan" if name == "recurrence" else "chunked"
    relation = functools.partial(ops.linear_relation, implementation=form)
    return _passes(lambda *args: relation(*args)[0], *arrays, retention)


def time_relation(
    tokens: tuple[int, ...] = (1024, 2048, 4096),
    linear_tokens: tuple[int, ...] = (4096, 16384, 65536),
    heads: int = 8,
    width: int = 64,
    plain_up_to: int = 4096,
    repeats: int = 9,
    seconds: float = 20,
    json: Path | None = None,
    plot: Path | None = None,
) -> None:
    """Times Full and Linear Relation against the number of tokens.

    One layer's operator, batch 1, float32: forward pass and all gradients. Full
    Relation as it is defined (materialized) and in tiles (FlashRelation), beside causal
    attention of this library and, where torch is installed, PyTorch's, which both do
    less: no SiLU, no Self relation, no calibration. Linear Relation by its recurrence
    and in chunks. What the table counts as parameters are the operator's arrays.

    Args:
        tokens: numbers of tokens T of Full Relation, a table for each.
        linear_tokens: those of Linear Relation.
        heads: number of heads H.
        width: of a head, D.
        plain_up_to: the largest T of the materialized form and of the recurrence.
        repeats: of each.
        seconds: that the repeats of one may take; slower ones get fewer, but 3.
        json: file to write the rows to.
        plot: picture to draw of them.
    """
    sizes = {"batch": 1, "heads": heads, "width": width}
    torch = importlib.util.find_spec("torch") is not None
    rows: list[dict[str, Any]] = []
    cases = [("Full Relation", n) for n in tokens]
    cases += [("Linear Relation", n) for n in linear_tokens]
    for family, n in cases:
        plain = n <= plain_up_to
        contenders: dict[str, Any] = {}
        if family == "Full Relation":
            names = ["materialized"] * plain + ["FlashRelation", "attention"]
            make = _full
            if torch:
                from train import peers

                call = functools.partial(peers.causal_attention, n, heads, width)
                contenders["PyTorch attention"] = lambda call=call: Contender(*call())
        else:
            names, make = ["recurrence"] * plain + ["LinearRelation"], _linear
        made = {name: functools.partial(make, name, n, heads, width) for name in names}
        title = (
            f"{family}, forward and backward: tokens {n:,}, {heads} heads of {width}"
        )
        found = race(title, made | contenders, repeats=repeats, seconds=seconds)
        rows += [{"family": family, "tokens": n, **vars(row)} for row in found]
        if json is not None:
            write(json, "relation", sizes, rows)
    if plot is not None:
        draw(rows, plot)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> Figure:
    """Draws time a token and temporary memory of every contender against T."""
    figure = Figure((10, 4), layout="constrained")
    axes = figure.subplots(1, 2)
    names = list(dict.fromkeys(row["name"] for row in rows))
    for colour, name in zip(COLOURS, names, strict=False):
        mine = [row for row in rows if row["name"] == name]
        t = np.array([row["tokens"] for row in mine])
        style: dict[str, Any] = {"color": colour, "marker": "o", "label": name}
        if mine[0]["family"] == "Linear Relation":
            style["linestyle"] = "--"
        time = np.array([row["milliseconds"] for row in mine])
        axes[0].plot(t, 1e3 * time / t, **style)
        known = [row["temporary_bytes"] for row in mine]
        if None not in known:
            axes[1].plot(t, np.array(known, float) / 2**20, **style)
    axes[0].set(ylabel="forward and backward, µs a token")
    axes[1].set(ylabel="temporary memory, MiB")
    ticks = sorted({row["tokens"] for row in rows})
    for ax in axes:
        ax.set(xlabel="tokens", xscale="log")
        ax.set_xticks(ticks, [f"{t:,}" for t in ticks], rotation=45)
        ax.xaxis.set_minor_formatter(NullFormatter())
        grid(ax, "log")
    axes[0].legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return figure
