"""Complete models in NumPy float64, written from their formulas.

Parameters `p` are nested dictionaries; those in p["blocks"] have a leading axis of
depth. x [*B, N, inputs], mask [*B, N] or None; masked points give 0.
"""

import functools

import numpy as np

import baseline_oracles as mixers
import oracles
from baseline_oracles import attend, each, exact_gelu, linear, norm, softmax
from oracles import wide


def index(tree, i):
    """Element i of every array of nested dictionaries."""
    if isinstance(tree, dict):
        return {name: index(x, i) for name, x in tree.items()}
    return tree[i]


def layers(tree):
    """The parameters of each layer of a stack in turn."""
    leaf = tree
    while isinstance(leaf, dict):
        leaf = next(iter(leaf.values()))
    return [index(tree, i) for i in range(len(leaf))]


def two_layers(p, x, activation=exact_gelu):
    return linear(p["last"], activation(linear(p["first"], x)))


def embed(p, x):
    return oracles.residual_mlp(p["embed"], x, output_residual=True)


def head(p, x, kind):
    x = norm(p["norm"], x, kind)
    return oracles.residual_mlp(p["head"], x, input_residual=True)


def _outputs(p):
    return p["head"]["last"]["kernel"].shape[-1]


def _masked(x, mask):
    x = wide(x)
    return x if mask is None else np.where(np.asarray(mask)[..., None], x, 0)


def surrogate(
    p,
    x,
    mask,
    *,
    mixer,
    kind="layer",
    activation=oracles.gelu,
    mlp_eps=None,
    gumbel_u=None,
):
    """h <- h + mixer(norm(h)); h <- h + mlp(norm(h)), between two residual MLPs.

    `mixer(p, h, mask)` also gets its part of gumbel_u [blocks, *B, H, N, M].
    """
    h = embed(p, _masked(x, mask))
    for i, block in enumerate(layers(p["blocks"])):
        noise = {} if gumbel_u is None else {"gumbel_u": gumbel_u[i]}
        u = norm(block["mixer_norm"], h, kind)
        h = h + mixer(block["mixer"], u, mask, **noise)
        u = norm(block["mlp_norm"], h, kind, eps=mlp_eps)
        h = h + two_layers(block["mlp"], u, activation)
    return _masked(head(p, h, kind), mask)


def luna_block(p, x, packed, mask, *, heads, kind="layer"):
    """The points x and the packed stream [*B, M, C] after one block."""
    x = _masked(x, mask)
    u, w = norm(p["mixer_norm"], x, kind), norm(p["packed_norm"], packed, kind)
    y_x, y_p = mixers.luna_attention(p["mixer"], u, w, mask, heads=heads)
    h = x + y_x
    u = norm(p["mlp_norm"], h, kind)
    return h + two_layers(p["mlp"], u, oracles.gelu), wide(packed) + y_p


def luna(p, x, mask, *, heads, kind="layer"):
    h = embed(p, _masked(x, mask))
    packed = np.broadcast_to(p["packed"], (*h.shape[:-2], *p["packed"].shape))
    for block in layers(p["blocks"]):
        h, packed = luna_block(block, h, packed, mask, heads=heads, kind=kind)
    return _masked(head(p, h, kind), mask)


def abupt(
    p,
    x,
    mask,
    *,
    heads,
    anchors,
    columns=(0, 1, 2),
    coordinate_scale=1000.0,
    anchor_mask=None,
    kind="layer",
):
    """Attention to anchors, turned by the coordinates in `columns` of the inputs."""
    mixer = functools.partial(
        mixers.anchor_attention,
        heads=heads,
        coords=_masked(x, mask)[..., list(columns)],
        anchors=anchors,
        coordinate_scale=coordinate_scale,
        anchor_mask=anchor_mask,
    )
    options = {"kind": kind, "activation": exact_gelu, "mlp_eps": 1e-6}
    return surrogate(p, x, mask, mixer=mixer, **options)


def set_transformer(p, x, mask, *, heads, kind="layer"):
    mixer = functools.partial(mixers.induced_attention, heads=heads)
    return surrogate(p, x, mask, mixer=mixer, kind=kind)


def _self_attention(p, z, heads):
    q, k, v = (linear(p[name], z) for name in ("query", "key", "value"))
    return linear(p["out"], attend(q, k, v, heads))


def perceiver_io(p, x, mask, *, heads, kind="layer"):
    """Latents read the points once, attend to each other, and the points read them."""

    def item(x):
        h = embed(p, x)
        encoder, decoder = p["encoder"], p["decoder"]
        u = norm(encoder["norm"], h, kind)
        k, v = linear(encoder["key"], u), linear(encoder["value"], u)
        z = linear(encoder["out"], attend(wide(encoder["latents"]), k, v, heads))
        for block in layers(p["blocks"]):
            u = norm(block["mixer_norm"], z, kind)
            q, k, v = np.split(linear(block["mixer"]["qkv"], u), 3, axis=-1)
            z = z + linear(block["mixer"]["out"], attend(q, k, v, heads))
            u = norm(block["mlp_norm"], z, kind)
            z = z + two_layers(block["mlp"], u, oracles.gelu)
        q = linear(decoder["query"], norm(decoder["point_norm"], h, kind))
        u = norm(decoder["latent_norm"], z, kind)
        k, v = linear(decoder["key"], u), linear(decoder["value"], u)
        return head(p, linear(decoder["out"], attend(q, k, v, heads)), kind)

    return each(item, _outputs(p), mask, x)


def _lno_mlp(p, x):
    """h = gelu(first(x)); h <- h + gelu(hidden_i(h)); last(h)."""
    h = exact_gelu(linear(p["first"], x))
    for i in range(len(p.get("hidden", {}))):
        h = h + exact_gelu(linear(p["hidden"][i], h))
    return linear(p["last"], h)


def lno(p, x, mask, *, heads, kind="layer"):
    """Scores s [N, M]; z = softmax_N(s)^T branch(x), attention on z, softmax_M(s) z."""

    def item(x):
        s = _lno_mlp(p["score"], _lno_mlp(p["trunk"], x))
        z = softmax(s.T) @ _lno_mlp(p["branch"], x)
        for block in layers(p["blocks"]):
            u = norm(block["mixer_norm"], z, kind)
            z = z + _self_attention(block["mixer"], u, heads)
            u = norm(block["mlp_norm"], z, kind)
            z = z + two_layers(block["mlp"], u)
        return _lno_mlp(p["head"], softmax(s) @ z)

    return each(item, _outputs(p), mask, x)


def grid_distances(shape, *, reference=8):
    """Distances [H W, reference^2] of the points of two grids on the unit square."""

    def grid(rows, cols):
        across = np.linspace(0, 1, cols)
        return [(a, b) for a in np.linspace(0, 1, rows) for b in across]

    return np.array(
        [
            [np.hypot(a - c, b - d) for c, d in grid(reference, reference)]
            for a, b in grid(*shape)
        ]
    )


def linear_attention(p, a, b, heads):
    """q = softmax_D(query(a)), k = softmax_D(key(b)); q (k^T v) / (q sum_N k) + q."""
    q, k, v = linear(p["query"], a), linear(p["key"], b), linear(p["value"], b)
    y = np.empty(q.shape)
    for part in mixers.parts(q.shape[-1], heads):
        q_h, k_h = softmax(q[:, part]), softmax(k[:, part])
        mass = q_h @ k_h.sum(0)
        y[:, part] = q_h @ (k_h.T @ v[:, part]) / mass[:, None] + q_h
    return linear(p["out"], y)


def _mixture(p, gate, x):
    """sum_e gate_e expert_e(x), experts in the leading axis."""
    experts = enumerate(layers(p))
    return sum(gate[:, e, None] * two_layers(expert, x) for e, expert in experts)


def _gnot_block(p, geometry, field, x, heads, kind):
    gate = exact_gelu(linear(p["gate"]["first"], x))
    gate = exact_gelu(linear(p["gate"]["hidden"][0], gate))
    gate = softmax(linear(p["gate"]["last"], gate))
    a = norm(p["geometry_norm"], geometry, kind)
    b = norm(p["field_norm"], field, kind)
    t = geometry + linear_attention(p["cross"], a, b, heads)
    t = t + norm(p["cross_norm"], _mixture(p["experts1"], gate, t), kind)
    u = norm(p["self_norm"], t, kind)
    t = t + linear_attention(p["attend"], u, u, heads)
    return t + norm(p["output_norm"], _mixture(p["experts2"], gate, t), kind)


def gnot(p, x, mask, *, heads, pos=None, kind="layer"):
    """The embeddings read x, or pos [N, P] or [*B, N, P] in its place.

    Every block starts from the same geometry and hands on the field.
    """

    def item(x, e):
        geometry = two_layers(p["geometry"], e)
        field = two_layers(p["field"], e) + wide(p["placeholder"])
        for block in layers(p["blocks"]):
            field = _gnot_block(block, geometry, field, x, heads, kind)
        return two_layers(p["head"], field)

    pos = x if pos is None else pos
    pos = np.broadcast_to(pos, (*np.shape(x)[:-1], np.shape(pos)[-1]))
    return each(item, _outputs(p), mask, x, pos)
