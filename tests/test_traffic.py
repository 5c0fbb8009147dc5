"""What devices that share points send each other, and what memory points take."""

import collections
import functools
import re

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
import test_context
from flax import nnx
from jax.sharding import AbstractMesh, AxisType

from flaxmix import mixers, parallel
from flaxmix.ops import stream
from train.flops import Collective, collectives
from train.scaling import materialised, sharded_passes

import baseline_cases
from closeness import assert_close

B, C, H, M, D = 2, 24, 3, 5, 8
MESH = AbstractMesh((2, 4), ("data", "context"), axis_types=(AxisType.Auto,) * 2)


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def layer(kind):
    return nnx.eval_shape(lambda: kind(C, heads=H, latents=M, rngs=nnx.Rngs(0)))


def one(name, *sizes):
    return Collective(name, sizes, 4 * int(np.prod(sizes)), 1)


def gathers(count):
    """A maximum, then a sum of values and masses, for each gather."""
    return [one("maximum", B, H, M), one("sum", B, H, M, D + 1)] * count


@pytest.mark.parametrize("points", [1024, 65536])
@pytest.mark.parametrize("kind, count", [(mixers.FlarePP, 2), (mixers.Flare, 1)])
def test_a_mixer_sends_its_latents(kind, count, points):
    """Forward its gathers; backward dz and, of FLARE++, dq, then the parameters."""
    mixer, x = layer(kind), shape(B, points, C)
    found = collectives(functools.partial(parallel.apply, mesh=MESH), mixer, x)
    assert found == gathers(count)
    assert sum(c.bytes for c in found) == count * 4 * B * H * M * (D + 2)
    found = collectives(sharded_passes(mixer, 4), mixer, x)
    latents = gathers(count) + [one("sum", B, H, M, D)] * count
    assert found[: len(latents)] == latents
    # Each parameter once, at the end, whatever the batch and the points.
    rest = collections.Counter(c.shape for c in found[len(latents) :])
    assert rest == collections.Counter(p.shape for p in jax.tree.leaves(mixer))
    assert {c.name for c in found[len(latents) :]} == {"sum"}


def test_half_precision_and_masks_send_the_same_numbers():
    """Values and masses in float32; what is masked need not be told."""
    passes = functools.partial(parallel.apply, mesh=MESH)
    half = shape(B, 64, C, dtype=jnp.bfloat16)
    assert collectives(passes, layer(mixers.FlarePP), half) == gathers(2)
    masked = lambda mixer, x, mask: passes(mixer, x, mask=mask)
    # 63 points are padded to 64.
    for n in (64, 63):
        mask = shape(B, n, dtype=bool)
        assert collectives(masked, layer(mixers.FlarePP), shape(B, n, C), mask) == (
            gathers(2)
        )


def test_one_shard_sends_nothing():
    mixer = layer(mixers.FlarePP)
    assert collectives(sharded_passes(mixer, 1), mixer, shape(B, 64, C)) == []


def traffic(name, points, masked):
    """Bytes of a model's training pass by kind, and what is gathered."""
    surrogates = test_context.SURROGATES
    known = name in surrogates
    make = surrogates[name] if known else baseline_cases.CASES[name][0]

    def passes(model, x, mask):
        apply = functools.partial(parallel.apply, mesh=MESH, mask=mask)
        y, pull = jax.vjp(apply, model, x)
        return pull(y)

    mask = shape(B, points, dtype=bool) if masked else None
    x = shape(B, points, test_context.INPUTS)
    found = collectives(passes, nnx.eval_shape(make), x, mask)
    total = collections.Counter()
    for c in found:
        total[c.name] += c.times * c.bytes
    return total, [c for c in found if c.name == "gather"]


QUICK = "flarepp", "mha", "abupt", "transolverpp"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in test_context.NAMES
    ],
)
def test_what_models_send_does_not_depend_on_points(name):
    for masked in (False, True)[name in QUICK :]:
        (few, gathered), (many, same) = (
            traffic(name, n, masked) for n in (1024, 65536)
        )
        assert gathered == same and few["sum"] > 0
        if name == "mha":
            # The keys, values and sums of all points, around the ring.
            assert many.pop("permute") == 64 * few.pop("permute") > 0
        assert many == few and "permute" not in few
        if name == "abupt" and masked:
            # Real points of each shard, then its candidates: numbers and places.
            shapes = [(B,), (B, M), (B, M)]
        elif name == "abupt":
            shapes = [(M,), (M,)]
        elif name == "transolverpp" and masked:
            # Real points of each shard: noise goes by the rank of a point.
            shapes = [(B,)] * 2
        else:
            shapes = []
        assert [c.shape for c in gathered] == shapes


# What the compiler makes of it.

GROUPS = re.compile(
    r"replica_groups=(\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|\{.*?\}\})"
)


def exchanges(text):
    """Names of the collectives of a compiled program, with their groups."""
    names = "all-reduce", "all-gather", "all-to-all", "collective-permute"
    names += "reduce-scatter", "collective-broadcast"
    found = []
    for line in text.splitlines():
        for name in names:
            if f" {name}(" in line or f" {name}-start(" in line:
                groups = GROUPS.search(line)
                found.append((name, groups and groups[1]))
    return found


def trained(name, mesh):
    """The compiled training pass of a surrogate with points and items sharded."""
    model = test_context.module(name, jnp.float32)
    x, mask, weights = test_context.inputs(64, jnp.float32)
    program = test_context.compiled(name, 64, jnp.float32, mesh)
    return exchanges(program.lower(model, x, mask, weights).compile().as_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, expected",
    [
        ("flarepp", {"all-reduce"}),
        ("mha", {"all-reduce", "collective-permute"}),
    ],
)
def test_compiled_training_pass(name, expected):
    assert {name for name, _ in trained(name, (2, 4))} == expected


def predicted(mesh):
    mesh = parallel.make_mesh(data=mesh[0], context=mesh[1])
    sharding = parallel.batch_sharding(mesh)
    program = jax.jit(
        functools.partial(parallel.apply, mesh=mesh),
        in_shardings=(None, sharding),
        out_shardings=sharding,
    )
    model = nnx.eval_shape(test_context.SURROGATES["flarepp"])
    x = shape(B, 64, test_context.INPUTS)
    return exchanges(program.lower(model, x).compile().as_text())


def test_compiled_prediction_stays_within_an_item():
    """Reductions over 'context' alone; the items of a batch never meet."""
    found = predicted((2, 4))
    assert {name for name, _ in found} == {"all-reduce"} and len(found) == 4
    assert {g for _, g in found} <= {"[2,4]<=[8]", "{{0,1,2,3},{4,5,6,7}}"}
    assert predicted((2, 1)) == []


# Memory.


def passes(apply):
    def passes(mixer, x):
        y, pull = jax.vjp(apply, mixer, x)
        return y, pull(y)

    return jax.jit(passes)


def call(mixer, x):
    return mixer(x)


def test_materialised_form_is_the_mixer():
    with jax.enable_x64(True):
        make = lambda: mixers.FlarePP(C, heads=H, latents=M, rngs=nnx.Rngs(0))
        graph, params = nnx.split(jax.jit(make)())
        rng = np.random.default_rng(0)
        move = lambda p: jnp.asarray(p + 0.2 * rng.normal(size=p.shape))
        mixer = nnx.merge(graph, jax.tree.map(move, params))
        x = jnp.asarray(rng.normal(size=(B, 7, C)))
        flat = lambda found: (found[0], jax.flatten_util.ravel_pytree(found[1])[0])
        actual, expected = (flat(passes(f)(mixer, x)) for f in (materialised, call))
        assert_close(actual, expected, error=1e-12)


def temporary(apply, points, channels, heads, latents):
    mixer = nnx.eval_shape(
        lambda: mixers.FlarePP(channels, heads=heads, latents=latents, rngs=nnx.Rngs(0))
    )
    program = passes(apply).lower(mixer, shape(1, points, channels)).compile()
    return program.memory_analysis().temp_size_in_bytes


def test_memory_is_linear_in_points_and_holds_no_probabilities(monkeypatch):
    # Small blocks, beside which the points themselves show.
    monkeypatch.setitem(stream._SCORES, "cpu", 2**16)
    sizes = {"channels": 16, "heads": 2, "latents": 64}
    few, many = (temporary(call, n, **sizes) for n in (16384, 65536))
    assert 3.6 < many / few < 4.4
    assert temporary(materialised, 16384, **sizes) > 4 * few


@pytest.mark.slow
def test_memory_at_full_width():
    """By the blocks that are chosen there; their scores do not grow with N."""
    sizes = {"channels": 128, "heads": 8, "latents": 64}
    few, more, many = (temporary(call, 2**i, **sizes) for i in (16, 17, 18))
    assert 1.9 < (many - more) / (more - few) < 2.1
    assert temporary(materialised, 2**16, **sizes) > 10 * few
