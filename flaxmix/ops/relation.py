"""Full Relation: Self and Exchange relations, formed before the softmax."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from flaxmix.ops.affine import wide
from flaxmix.ops.causal import attend, check_positions, places
from flaxmix.ops.norm import inner

Implementation = Literal["xla", "triton"]
Transport = Literal["full", "exchange"]


def check_relation(tau: float, transport: str = "full") -> None:
    """Raises ValueError if `tau` is not positive or `transport` unknown."""
    if not tau > 0:
        raise ValueError(f"tau must be positive, got {tau}.")
    if transport not in ("full", "exchange"):
        raise ValueError(f"transport must be 'full' or 'exchange', got {transport!r}.")


def exchange(
    p1: Float[Array, "*B Q H D"],
    p2: Float[Array, "*B N H D"],
    identity: Float[Array, "*B N H E"],
    *,
    start: Int[Array, "*B Q"] | None = None,
    stop: Int[Array, "*B Q"] | None = None,
    axis_name: str | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "*B Q H E"], Float[Array, "*B H Q"]]:
    """Reads what came before each token: `read` and L of `flaxmix.ops.relation`.

    O(Q N (D + E)) time a head, half of it skipped where `stop` is not given. Neither
    direction holds more than a tile of scores: memory is O(N (D + E)) a head. The
    derivative keeps the read and each row's maximum and mass. Sharding is that of
    `flaxmix.ops.causal_attention`.

    Args:
        p1: relation coordinates of the reading tokens, the last Q of N.
        p2: those of the tokens that are read.
        identity: information of the tokens that are read.
        start: first place that each query sees, such as that of its document.
        stop: the place after the last one that it sees; None means its own place.
            With `stop`, queries may be any.
        axis_name: mesh axis that Q = N is sharded over, inside `jax.shard_map`.
        implementation: "xla" works everywhere; "triton" is kernels for NVIDIA
            GPUs, not yet measured there. None means "xla".

    Returns:
        The read in the dtype of `p2`, and L in float32 or wider. A token that sees
        nothing gets 0 and -inf.

    Raises:
        ValueError: if `implementation` is none of these, or as
            `flaxmix.ops.causal_attention`.
        NotImplementedError: if "triton" cannot do that, or not here.
    """
    q = (p1 * p1.shape[-1] ** -0.5).astype(p2.dtype)
    if implementation in (None, "xla"):
        options = {"start": start, "stop": stop, "axis_name": axis_name}
        return attend(q, p2, identity, **options, silu=True)
    if implementation != "triton":
        raise ValueError(
            f"implementation must be 'xla' or 'triton', got {implementation!r}."
        )
    if stop is not None or axis_name is not None or p1.shape != p2.shape:
        raise NotImplementedError(
            "the kernel reads all earlier tokens of one device: no stop, no axis_name, "
            f"as many queries as keys, got stop={stop}, axis_name={axis_name!r}, "
            f"{p1.shape[-3]} and {p2.shape[-3]}."
        )
    # Pallas is imported by those alone who ask for it.
    from flaxmix import kernels

    if not kernels.available():
        raise NotImplementedError(
            "implementation='triton' needs an NVIDIA GPU of compute capability 8 or "
            f"more, this process computes on {jax.devices()[0].device_kind!r}."
        )
    return kernels.exchange(q, p2, identity, start)


def finish(
    p1: Float[Array, "*B Q H D"],
    p2: Float[Array, "*B Q H D"],
    identity: Float[Array, "*B Q H E"],
    read: Float[Array, "*B Q H E"],
    log_mass: Float[Array, "*B H Q"],
    count: Int[Array, "*B Q"],
    lam: Float[Array, ""] | float,
    *,
    tau: float = 2.0,
    transport: Transport = "full",
) -> Float[Array, "*B Q H E"]:
    """Joins each token's read with its own information: Y of `flaxmix.ops.relation`.

    Args:
        p1: first coordinates of the tokens.
        p2: second coordinates of the same tokens.
        identity: their own information.
        read: of what came before them, from `exchange`.
        log_mass: L, from `exchange`.
        count: place i of each token in its document, from 1; 0 for padding.
        lam: calibration lambda of the count.
        tau: temperature of the Self relation.
        transport: "full", or "exchange" for the ablation Y_i = g_i read_i.

    Returns:
        Y in the dtype of `identity`; 0 at padding.
    """
    own = inner(wide(p1), wide(p2)) * (p1.shape[-1] ** -0.5 / tau)
    log_count = jnp.log(jnp.maximum(count, 1).astype(own.dtype))[..., None]
    gate = jnp.swapaxes(log_mass, -1, -2) - lam * log_count - jax.nn.sigmoid(own)
    gate = jax.nn.sigmoid(gate)
    wide_read, wide_identity = wide(read), wide(identity)
    if transport == "exchange":
        wide_identity = jnp.zeros_like(wide_identity)
    y = _mix(gate, wide_identity, wide_read)
    return jnp.where(count[..., None, None] > 0, y, 0).astype(identity.dtype)


@jax.custom_vjp
def _mix(gate, a, b):
    """(1 - gate) a + gate b."""
    return a + gate[..., None] * (b - a)


def _mix_gradient(kept, dy):
    gate, a, b = kept
    # Not the automatic one: see `inner`.
    gate = gate[..., None]
    return inner(dy, b - a), (1 - gate) * dy, gate * dy


_mix.defvjp(lambda *args: (_mix(*args), args), _mix_gradient)


def relation(
    p1: Float[Array, "*B T H D"],
    p2: Float[Array, "*B T H D"],
    identity: Float[Array, "*B T H E"],
    lam: Float[Array, ""] | float,
    *,
    positions: Int[Array, "*B T"] | None = None,
    tau: float = 2.0,
    transport: Transport = "full",
    axis_name: str | None = None,
    implementation: Implementation | Literal["materialized"] | None = None,
) -> Float[Array, "*B T H E"]:
    """Full Relation, by `exchange` and `finish` (FlashRelation).

    For tokens i = 1 ... T of one head (eqs. 1-5 and appendix A.1 of its paper),

        u_ij = p1_i . p2_j / sqrt(D),   S_i = sigmoid(u_ii / tau),   E_ij = SiLU(u_ij)
        R_ij = S_i (j = i),   E_ij - lambda log i (j < i),   -inf (j > i)
        Y_i = sum_j softmax_j(R_i.) I_j

    which is exactly a read of what came before and a gate between that and the token:

        read_i = sum_{j<i} softmax_{j<i}(E_i.) I_j,   L_i = log sum_{j<i} exp(E_ij)
        Y_i = (1 - g_i) I_i + g_i read_i,   g_i = sigmoid(L_i - lambda log i - S_i)

    The first token of a document gives its own information. Costs are those of
    `exchange`; "materialized" forms the whole flow as it is defined, in O(T^2) memory.

    Args:
        p1: first relation coordinates, after the rotary embedding.
        p2: second ones, likewise.
        identity: information, after the mixing of heads.
        lam: calibration lambda of the count of earlier tokens.
        positions: place of each token in its document, from 1; 0 for padding, which
            never matters, even NaN, and gets 0. Documents are contiguous and do not
            see each other. None means one document of T tokens.
        tau: temperature of the Self relation.
        transport: "full", or "exchange" for the ablation that moves no own
            information, with the same flow.
        axis_name: mesh axis that T is sharded over, in the order of
            `flaxmix.ops.places`, inside `jax.shard_map`.
        implementation: as in `exchange`, or "materialized" for the definition.

    Returns:
        Y in the dtype of `identity`.

    Raises:
        ValueError: if `transport` or `implementation` is none of these, `tau` not
            positive, or a shape does not match.
        NotImplementedError: if the implementation cannot do that.
    """
    check_relation(tau, transport)
    batch, place = p1.shape[:-2], places(p1.shape[-3], axis_name)
    count, start = jnp.broadcast_to(place + 1, batch), None
    if positions is not None:
        check_positions(positions, batch)
        count = positions
        # Padding sees nothing: it would begin after itself.
        start = place + 1 - positions
        p1, p2, identity = (
            jnp.where(positions[..., None, None] > 0, x, 0) for x in (p1, p2, identity)
        )
    if implementation == "materialized":
        if axis_name is not None:
            raise NotImplementedError(
                f"the materialized form is not sharded, got axis_name={axis_name!r}."
            )
        return _materialized(p1, p2, identity, lam, count, start, tau, transport)
    read, log_mass = exchange(
        *(p1, p2, identity),
        start=start,
        axis_name=axis_name,
        implementation=implementation,
    )
    own = count, lam
    return finish(
        *(p1, p2, identity, read, log_mass), *own, tau=tau, transport=transport
    )


def _materialized(p1, p2, identity, lam, count, start, tau, transport):
    """The definition, with the whole of R and of its softmax."""
    u = jnp.einsum("...ihd,...jhd->...hij", wide(p1), wide(p2)) * p1.shape[-1] ** -0.5
    i, j = jnp.arange(u.shape[-2])[:, None], jnp.arange(u.shape[-1])
    log_count = jnp.log(jnp.maximum(count, 1).astype(u.dtype))
    history = jax.nn.silu(u) - lam * log_count[..., None, :, None]
    history = jnp.where(j < i, history, -jnp.inf)
    if start is not None:
        seen = j >= start[..., None, :, None]
        history = jnp.where(seen, history, -jnp.inf)
    flow = jax.nn.softmax(jnp.where(i == j, jax.nn.sigmoid(u / tau), history), -1)
    if transport == "exchange":
        flow = jnp.where(i == j, 0, flow)
    y = jnp.einsum("...hij,...jhe->...ihe", flow, wide(identity))
    return jnp.where(count[..., None, None] > 0, y, 0).astype(identity.dtype)
