import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P

from train.flops import Collective, collectives, count_flops


def test_products_loops_and_derivatives_are_counted():
    a, b = jnp.ones((3, 5)), jnp.ones((5, 7))
    product = 2 * 3 * 5 * 7
    assert count_flops(jnp.matmul, a, b) == product
    assert count_flops(jax.jit(lambda a, b: (a @ b) @ b.T), a, b) == 2 * product
    loop = lambda a, w: jax.lax.scan(lambda a, _: (a @ w, None), a, None, length=4)[0]
    w = jnp.ones((5, 5))
    assert count_flops(loop, a, w) == 4 * 2 * 3 * 5 * 5
    both = jax.grad(lambda a, b: (a @ b).sum(), argnums=(0, 1))
    assert count_flops(both, a, b) == 3 * product
    assert count_flops(jax.vmap(jnp.matmul), a[None], b[None]) == product


MESH = AbstractMesh((4,), ("x",), axis_types=(AxisType.Auto,))
RING = [(i, (i + 1) % 4) for i in range(4)]


def sharded(f):
    return jax.shard_map(f, mesh=MESH, in_specs=P("x"), out_specs=P("x"))


def found(f, *args):
    return collectives(sharded(f), *args)


X = jax.ShapeDtypeStruct((12, 5), jnp.float32)


def test_each_kind_of_collective_and_what_a_device_puts_in():
    def f(x):
        y = lax.psum(x.astype(jnp.bfloat16), "x").sum()
        top = lax.pmax(lax.stop_gradient(x[:, 0]), "x").sum()
        every = lax.all_gather(x[0], "x").sum()
        return lax.ppermute(x, "x", RING) + y.astype(jnp.float32) + top + every

    assert found(jax.jit(f), X) == [
        Collective("sum", (3, 5), 30, 1),
        Collective("maximum", (3,), 12, 1),
        Collective("gather", (5,), 20, 1),
        Collective("permute", (3, 5), 60, 1),
    ]
    # Every array of one call.
    assert found(lambda x: x + sum(lax.psum((x[0, 0], x[0]), "x")), X) == [
        Collective("sum", (), 4, 1),
        Collective("sum", (5,), 20, 1),
    ]


def test_derivatives_are_counted():
    """The derivative of what is alike on all devices is the sum over them."""

    def f(w, x):
        g = jax.shard_map(
            lambda w, x: jnp.sin(w) * x,
            mesh=MESH,
            in_specs=(P(), P("x")),
            out_specs=P("x"),
        )
        return g(w, x).sum()

    w = jax.ShapeDtypeStruct((1, 5), jnp.float32)
    assert collectives(f, w, X) == []
    assert collectives(jax.grad(f), w, X) == [Collective("sum", (1, 5), 20, 1)]


def test_loops_of_known_length_count_as_often_as_they_run():
    hop = lambda x: lax.ppermute(x, "x", RING)

    def scan(x):
        inner = lambda x, _: (hop(x), None)
        outer = lambda x, _: (lax.scan(inner, x, None, length=3)[0], None)
        return lax.scan(outer, x, None, length=7)[0]

    assert found(scan, X) == [Collective("permute", (3, 5), 60, 21)]
    loop = lambda x: lax.fori_loop(0, 4, lambda i, x: hop(x), x)
    # Differentiable, and so a scan.
    both = lambda x: jax.vjp(sharded(loop), x)[1](x)
    assert collectives(both, X) == [Collective("permute", (3, 5), 60, 4)] * 2


def test_loops_of_unknown_length_are_refused():
    hop = lambda x: lax.ppermute(x, "x", RING)
    loop = lambda n, x: lax.fori_loop(0, n, lambda i, x: hop(x), x)
    f = jax.shard_map(loop, mesh=MESH, in_specs=(P(), P("x")), out_specs=P("x"))
    n = jax.ShapeDtypeStruct((), jnp.int32)
    with pytest.raises(ValueError, match="'permute'.* in a loop of unknown length"):
        collectives(f, n, X)
    # Those without collectives may be as long as they like.
    quiet = lambda n, x: lax.fori_loop(0, n, lambda i, x: x + 1, x)
    f = jax.shard_map(quiet, mesh=MESH, in_specs=(P(), P("x")), out_specs=P("x"))
    assert collectives(f, n, X) == []
