"""The strictly causal read of Relation on NVIDIA GPUs, as Pallas kernels for Triton.

    y_i = sum_j P_ij v_j,   P_ij = softmax_j(e_ij),   L_i = log sum_j exp(e_ij)

over start_i <= j < i, with e = SiLU(u) and u = q k^T. One kernel forward. Two backward,
one that sums over keys (dq) and one that sums over queries (dk, dv), so that results
do not depend on the order in which programs run; both recompute the tiles of P:

    dP = dy v^T,   dv = P^T dy
    du = P (dP - row) SiLU'(u),   row = dy . y - dL,   dq = du k,   dk = du^T q

Tiles above the diagonal or before `start` are skipped. Scores, exponentials and sums
are float32; products of half precision add up in float32, and float32 ones are exact
(IEEE, never TF32).

Checked in Pallas' interpreter, lowered for CUDA, and compiled by Triton. Not measured
on a GPU, nor run on one.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from flaxmix.kernels.programs import Sizes, dkv_kernel, dq_kernel, forward_kernel
from flaxmix.ops.stream import align

# Bytes of one row of a tile of scores. 64 rows of half precision are what the four
# warps of a Hopper tensor core take. Products in float32 run without one, on operands
# that are held in registers: 32.
_ROW_BYTES = 128
# Channels at which a tile that is run over is as long as the one that stays; it is
# shorter for more. Compiled for compute capabilities 8.0, 9.0 and 12.0, a program then
# takes 66 KiB of shared memory at most, which all cards since Ampere have.
_CHANNELS = 64
_WARPS, _STAGES = 4, 2
# The widest head that is known to fit.
_WIDEST = 128


def available() -> bool:
    """Whether this process computes on a GPU that the kernels are made for.

    `exchange` does not ask: it can be lowered for a GPU without having one.
    """
    device: Any = jax.devices()[0]
    if device.platform != "gpu" or "cuda" not in device.client.platform_version:
        return False
    return float(device.compute_capability) >= 8


def exchange(
    q: Float[Array, "*B T H D"],
    k: Float[Array, "*B N H D"],
    v: Float[Array, "*B N H E"],
    start: Int[Array, "*B T"] | None = None,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "*B T H E"], Float[Array, "*B H T"]]:
    """y and L of the module's formulas.

    O(T^2 (D + E)) time a head, half of it skipped, and of packed documents all that
    is between them. No tile of scores leaves the chip; the derivative keeps y and each
    row's maximum and mass. Arrays have to lie on one device, or be a device's own part
    of the batch or heads inside `jax.shard_map`: XLA cannot cut a kernel in pieces.

    Args:
        q: queries, with the scale in them.
        k: keys, as many as queries.
        v: values.
        start: first place that each query sees, such as that of its document.
        interpret: whether to run on any device, slowly, by Pallas' interpreter.

    Returns:
        y in the dtype of `v`, and L in float32. A query that sees nothing gets y = 0
        and L = -inf.

    Raises:
        ValueError: if shapes do not match, or the dtypes of `q` and `k` differ.
        NotImplementedError: if arrays are float64, or heads wider than 128 channels.
    """
    if q.shape != k.shape or q.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"the kernel takes one query, key and value for each token and head, got "
            f"q {q.shape}, k {k.shape} and v {v.shape}."
        )
    if q.dtype != k.dtype:
        raise ValueError(f"q and k need one dtype, got {q.dtype} and {k.dtype}.")
    for x in (k, v):
        if x.dtype.itemsize > 4:
            raise NotImplementedError(f"the kernel has no {x.dtype} products.")
        if x.shape[-1] > _WIDEST:
            raise NotImplementedError(
                f"the kernel takes heads of {_WIDEST} channels, got {x.shape[-1]}."
            )
    batch, tokens = q.shape[:-3], q.shape[-3]
    if start is not None:
        start = jnp.broadcast_to(start.astype(jnp.int32), (*batch, tokens))
        start = start.reshape(-1, tokens)
    arrays = align(*(x.reshape(-1, *x.shape[-3:]) for x in (q, k, v)), start)
    results: Any = _exchange(*arrays, interpret)
    return tuple(x.reshape(*batch, *x.shape[1:]) for x in results)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _exchange(q, k, v, start, interpret: bool):
    return _forward(q, k, v, start, interpret)[0]


def _forward(q, k, v, start, interpret):
    row = jax.ShapeDtypeStruct((q.shape[0], q.shape[2], q.shape[1]), jnp.float32)
    y, top, mass = _run(
        forward_kernel, (q, k, v, start), (v, row, row), (q, v), interpret
    )
    return (y, top + jnp.log(mass)), (q, k, v, start, y, top, mass)


def _backward(interpret, saved, cotangents):
    q, k, v, start, y, top, mass = saved
    dy, dlog = cotangents
    inputs = q, k, v, start, dy, top, mass
    dq, row = _run(dq_kernel, (*inputs, y, dlog), (q, top), (q, v), interpret)
    stop = None
    if start is not None:
        rows = _sizes(q, v).rows
        # The place after the last query that sees anything of each tile of keys.
        ends = rows * jnp.arange(1, pl.cdiv(q.shape[1], rows) + 1, dtype=jnp.int32)
        after = jnp.arange(1, q.shape[1] + 1, dtype=jnp.int32)
        stop = jnp.where(start[:, None] < ends[:, None], after, 0).max(-1)
    dk, dv = _run(dkv_kernel, (*inputs, row, stop), (k, v), (q, v), interpret)
    return dq, dk, dv, None


_exchange.defvjp(_forward, _backward)


def _sizes(q, v) -> Sizes:
    """Tiles that suit the wider dtype and the wider head."""
    rows = _ROW_BYTES // max(q.dtype.itemsize, v.dtype.itemsize)
    width = max(_width(q.shape[3]), _width(v.shape[3]))
    columns = min(rows, rows * _CHANNELS // width)
    return Sizes(q.shape[1], q.shape[3], v.shape[3], rows, columns)


def _width(channels: int) -> int:
    """Channels of a tile: a product takes a power of two, and no fewer than 16."""
    return max(16, pl.next_power_of_2(channels))


def _run(kernel, inputs, outputs, operands, interpret: bool):
    """kernel(*inputs) in one program for each tile of rows, head and item.

    A program is given the whole of its head, and cuts its tiles out itself. What a
    tile has beyond the array is masked, not copied.

    Args:
        kernel: the function of references.
        inputs: arrays [B, T, H, C], [B, H, T], [B, T] or [B, tiles], or None.
        outputs: what has the shapes and dtypes of the results.
        operands: q and v, or alike.
        interpret: as in `exchange`.
    """
    sizes = _sizes(*operands)
    tiles = pl.cdiv(sizes.tokens, sizes.rows)

    def spec(x):
        if x is None:
            return None
        if x.ndim == 4:
            block = (None, tiles * sizes.rows, None, _width(x.shape[3]))
            return pl.BlockSpec(block, lambda i, h, b: (b, 0, h, 0))
        if x.ndim == 3:
            block = (None, None, tiles * sizes.rows)
            return pl.BlockSpec(block, lambda i, h, b: (b, h, 0))
        length = tiles * sizes.rows if x.shape[1] == sizes.tokens else x.shape[1]
        return pl.BlockSpec((None, length), lambda i, h, b: (b, 0))

    varying = jax.typeof(operands[0]).manual_axis_type
    return pl.pallas_call(
        functools.partial(kernel, sizes=sizes),
        grid=(tiles, operands[0].shape[2], operands[0].shape[0]),
        in_specs=[spec(x) for x in inputs],
        out_specs=[spec(x) for x in outputs],
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=varying)
            for x in outputs
        ],
        compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=_STAGES),
        interpret=interpret,
        name=f"exchange_{kernel.__name__}",
    )(*inputs)
