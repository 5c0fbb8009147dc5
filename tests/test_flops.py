import jax
import jax.numpy as jnp

from train.flops import count_flops


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
