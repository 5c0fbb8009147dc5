"""The cache of decoders, and what is drawn with it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flaxmix import models
from flaxmix.generation import generate, sample
from flaxmix.parameters import named_parameters, with_parameters

from closeness import assert_close
from relation_cases import documents, filled

TIGHT = 1e-11
ERROR = 1e-5
V, C, HEADS = 11, 12, 2
LAYOUTS = ["A2", "F3", "L", "LLLF", "(LF)2"]
slow_ones = lambda *names: [pytest.param(x, marks=pytest.mark.slow) for x in names]


@functools.cache
def model(layout, dtype=jnp.float32, **options):
    """A model whose parameters are all far from 0 and from each other."""
    sizes = {"vocabulary": V, "channels": C, "heads": HEADS, "hidden": 10}
    options = {**sizes, "layout": layout, **options}
    make = lambda: models.LanguageModel(**options, rngs=nnx.Rngs(0))
    return filled(make, dtype)


def tokens(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, V, shape), jnp.int32)


@jax.jit
def logits(model, tokens, positions=None):
    return model(tokens, positions=positions)


@jax.jit
def extend(model, tokens, cache, lengths=None):
    return model.extend(tokens, cache, lengths=lengths)


def in_pieces(module, ids, sizes, capacity):
    """Logits of all tokens, given in pieces."""
    cache, parts, start = module.make_cache(len(ids), capacity), [], 0
    for size in sizes:
        part, cache = extend(module, ids[:, start : start + size], cache)
        parts.append(part)
        start += size
    np.testing.assert_array_equal(cache.length, start)
    return jnp.concatenate(parts, 1)


@pytest.mark.parametrize("layout", ["(LF)2", *slow_ones("A2", "F3", "L", "LLLF")])
def test_pieces_equal_the_whole(layout):
    """Seven tokens, then nine one by one; each step has the logits of one pass."""
    with jax.enable_x64(True):
        module, ids = model(layout, jnp.float64), tokens(2, 16)
        actual = in_pieces(module, ids, [7] + [1] * 9, 17)
        assert_close(actual, logits(module, ids), error=TIGHT)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[1] * 5, [64, 1, 1], [3, 5, 1, 7], [1, 64]])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_pieces_equal_the_whole(layout, sizes):
    module, ids = model(layout), tokens(2, sum(sizes))
    actual = in_pieces(module, ids, sizes, sum(sizes) + 2)
    assert_close(actual, logits(module, ids), error=ERROR)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"transport": "exchange"},
        {"identity_projection": False, "tau": 0.7},
        {"givens": False, "count": False},
        {"heads": 1},
    ],
    ids=str,
)
def test_ablations_with_a_cache(options):
    with jax.enable_x64(True):
        module, ids = model("(FL)2", jnp.float64, **options), tokens(2, 6)
        actual = in_pieces(module, ids, [4, 1, 1], 6)
        assert_close(actual, logits(module, ids), error=TIGHT)


@pytest.mark.parametrize("layout", ["A2", *slow_ones("F3", "L", "LLLF", "(LF)2")])
def test_rows_of_unequal_lengths(layout):
    """Rows grow by their own numbers of tokens, also by none."""
    module, ids = model(layout), tokens(3, 9)
    whole = logits(module, ids)
    cache, at = module.make_cache(3, 9), np.zeros(3, int)
    for lengths in ([3, 0, 2], [1, 3, 3], [3, 3, 0], [2, 3, 3]):
        # Padding that no token has an id for.
        piece = np.full((3, 3), -1)
        for row, n in enumerate(lengths):
            piece[row, :n] = ids[row, at[row] : at[row] + n]
        given = jnp.asarray(piece, jnp.int32), cache, jnp.asarray(lengths)
        part, cache = extend(module, *given)
        for row, n in enumerate(lengths):
            expected = whole[row, at[row] : at[row] + n]
            if n:
                assert_close(part[row, :n], expected, error=ERROR)
            assert not np.any(part[row, n:])
        at += lengths
        np.testing.assert_array_equal(cache.length, at)


@pytest.mark.slow
def test_cache_in_half_precision():
    module, ids = model("F3"), tokens(2, 5)
    cache = module.make_cache(2, 5, jnp.bfloat16)
    y, cache = extend(module, ids, cache)
    assert y.dtype == jnp.float32 and cache.layers[0].p2.dtype == jnp.bfloat16
    assert_close(y, logits(module, ids), error=12 * 2**-8)


def test_size_of_a_cache():
    """Two C-wide states a token and full layer, D x D a head and linear one."""
    cache = model("LLLF").make_cache(3, 7)
    assert [type(x).__name__ for x in cache.layers] == [
        *["LinearRelationCache"] * 3,
        "RelationCache",
    ]
    assert cache.layers[3].p2.shape == (1, 3, 7, HEADS, C // HEADS)
    assert cache.layers[0].state.shape == (1, 3, HEADS, 6, 6)
    fixed = 3 * C * (C // HEADS) * 4 + 4
    assert models.cache_bytes(cache) == (2 * C * 4, fixed)
    half = model("LLLF").make_cache(3, 7, jnp.bfloat16)
    assert models.cache_bytes(half) == (2 * C * 2, fixed)
    assert models.cache_bytes(model("A2").make_cache(1, 5)) == (2 * 2 * C * 4, 4)
    assert (cache.capacity, model("L").make_cache(1, 5).capacity) == (7, None)
    total = sum(x.nbytes for x in jax.tree.leaves(cache))
    assert total == 3 * (7 * 2 * C * 4 + fixed)


def test_cache_is_updated_in_place():
    """While tokens are added, it is held once, beside one of its three layers."""

    def run(module, token):
        def step(_, state):
            features, cache = module.extend_features(*state)
            return jnp.argmax(features, -1).astype(jnp.int32), cache

        state = token, module.make_cache(1, 4096)
        return jax.lax.fori_loop(0, 9, step, state)[0]

    used = jax.jit(run).lower(model("F3"), tokens(1, 1)).compile().memory_analysis()
    held = 3 * 2 * 4096 * C * 4
    assert held < used.temp_size_in_bytes < 1.9 * held


def test_room_in_a_cache():
    cache = model("F3").make_cache(2, 5)._replace(length=jnp.asarray([1, 3]))
    step = lambda cache, **more: model("F3").extend(tokens(2, 3), cache, **more)
    with pytest.raises(ValueError, match="capacity=5, .* 6 tokens"):
        step(cache)
    # Rows that need less, and what only running it would tell.
    jax.eval_shape(step, cache, lengths=jnp.asarray([3, 2]))
    jax.eval_shape(step, cache)


@pytest.mark.parametrize(
    "batch, capacity, message",
    [(0, 3, "batch=0 and capacity=3"), (2, 0, "batch=2 and capacity=0")],
)
def test_wrong_caches(batch, capacity, message):
    with pytest.raises(ValueError, match=message):
        model("F3").make_cache(batch, capacity)


@pytest.mark.parametrize("lengths", [[4, 1], [-1, 2], [1], [1.0, 2.0]])
def test_wrong_lengths(lengths):
    module = model("F3")
    extend = models.LanguageModel.extend_features.__wrapped__
    with pytest.raises(ValueError, match="integers of shape|0 to 3 real tokens"):
        cache = module.make_cache(2, 4)
        extend(module, tokens(2, 3), cache, lengths=jnp.asarray(lengths))


def test_rows_of_a_cache():
    cache = model("F3").make_cache(3, 4)
    with pytest.raises(ValueError, match="tokens have 2 rows, .* has 3"):
        models.LanguageModel.extend_features.__wrapped__(
            model("F3"), tokens(2, 1), cache
        )


def greedy(module, row, width):
    """The likeliest tokens until a row has `width`, by a whole pass for each."""
    ids = list(map(int, row))
    while len(ids) < width:
        padded = jnp.asarray([ids + [0] * (width - len(ids))], jnp.int32)
        places = documents([len(ids), len(ids) - width])
        ids.append(int(jnp.argmax(logits(module, padded, places)[0, len(ids) - 1])))
    return ids[len(row) :]


@pytest.mark.parametrize("layout", ["F2", *slow_ones("(LF)2")])
def test_greedy_is_the_argmax_of_whole_passes(layout):
    """Also of rows padded on the right, on the left, and on both sides."""
    module, prompt, steps = model(layout), tokens(3, 6), 5
    lengths = [6, 4, 3]
    rows = [prompt[i, :n] for i, n in enumerate(lengths)]
    expected = [greedy(module, row, 6 + steps)[:steps] for row in rows]
    options = {"steps": steps, "temperature": 0.0}
    for shift in ([0, 0, 0], [0, 2, 3], [0, 1, 2]):
        # Padding that no token has an id for.
        ids, mask = np.full((3, 6), -1), np.zeros((3, 6), bool)
        for i, (left, n) in enumerate(zip(shift, lengths, strict=True)):
            ids[i, left : left + n], mask[i, left : left + n] = rows[i], True
        given = jnp.asarray(ids, jnp.int32)
        actual = generate(module, given, mask=jnp.asarray(mask), **options)
        np.testing.assert_array_equal(actual, expected)
    more = {"lengths": jnp.asarray(lengths), **options}
    np.testing.assert_array_equal(generate(module, prompt, **more), expected)


def test_one_program_for_all_values(monkeypatch):
    module, prompt, key = model("A2"), tokens(2, 3), jax.random.key(0)
    original, traced = models.LanguageModel.extend_features, []

    def counted(self, *args, **options):
        traced.append(args)
        return original(self, *args, **options)

    monkeypatch.setattr(models.LanguageModel, "extend_features", counted)
    draw = functools.partial(generate, module, steps=3)
    some = draw(prompt, key=key, top_k=3, top_p=0.9, stop=1)
    # The prompt, and one token after the other.
    assert len(traced) == 2
    other = {"temperature": 0.3, "top_k": 5, "top_p": 0.2, "stop": 7}
    draw(prompt + 1, key=jax.random.key(1), **other)
    draw(prompt, top_k=1, top_p=1.0, stop=0, temperature=0.0)
    again = draw(prompt, key=key, top_k=3, top_p=0.9, stop=1)
    assert len(traced) == 2
    np.testing.assert_array_equal(some, again)


def test_narrow_choices_are_greedy():
    draw = functools.partial(generate, model("A2"), tokens(2, 4), steps=16)
    expected = draw(temperature=0.0)
    key = jax.random.key(3)
    for options in (
        {"top_k": 1, "top_p": 1.0},
        {"top_k": V, "top_p": 1e-6},
        {"temperature": 1e-9},
    ):
        np.testing.assert_array_equal(draw(key=key, **options), expected)
    # Otherwise it is not, and depends on the key alone.
    some, other = draw(key=key), draw(key=jax.random.key(4))
    assert np.any(some != expected) and np.any(some != other)
    np.testing.assert_array_equal(some, draw(key=key))


def test_steps_draw_anew():
    """Where all tokens are equally likely, nearly all are drawn."""
    module = model("A2")
    flat = with_parameters(
        module, {k: 0 * p for k, p in named_parameters(module).items()}
    )
    drawn = generate(flat, tokens(2, 4), steps=16, key=jax.random.key(0))
    assert len(np.unique(drawn)) > V - 3
    # Rows draw for themselves.
    assert np.sum(drawn[0] == drawn[1]) < 8


def test_stop():
    """From its first stop on, a row is that token; other rows go on.

    Neither that nor a longer cache changes what is drawn before.
    """
    module, prompt, steps = model("A2"), tokens(4, 4), 12
    key = jax.random.key(0)
    free = np.asarray(generate(module, prompt, steps=steps, key=key))
    seen = 0
    for stop in (2, 5):
        expected = free.copy()
        for row in expected:
            if len(where := np.flatnonzero(row == stop)):
                row[where[0] :] = stop
                seen += 0 < where[0] < steps - 1
        actual = generate(module, prompt, steps=steps, key=key, stop=stop, capacity=19)
        np.testing.assert_array_equal(actual, expected)
    assert seen > 1


PROBABILITIES = np.array([0.4, 0.05, 0.25, 0.2, 0.1])


def expected_frequencies(temperature=1.0, top_k=None, top_p=None):
    """By hand: rank, cut, renormalise."""
    p = PROBABILITIES ** (1 / temperature)
    p = p / p.sum()
    kept = list(np.argsort(-p))[:top_k]
    if top_p is not None:
        within, total, some = p[kept] / p[kept].sum(), 0.0, []
        for token, q in zip(kept, within, strict=True):
            if total < top_p:
                some.append(token)
            total += q
        kept = some
    result = np.zeros_like(p)
    result[kept] = p[kept] / p[kept].sum()
    return result


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 3},
        {"top_k": 9},
        # 0.4 + 0.25 are not enough, 0.4 + 0.25 + 0.2 are.
        {"top_p": 0.7},
        {"top_p": 1.0},
        # Of the three likeliest, 0.4 / 0.85 + 0.25 / 0.85 are enough.
        {"top_k": 3, "top_p": 0.75},
        {"temperature": 2.0, "top_k": 4, "top_p": 0.8},
    ],
    ids=str,
)
def test_frequencies(options):
    draws, expected = 20_000, expected_frequencies(**options)
    logits = jnp.broadcast_to(jnp.log(PROBABILITIES) + 7, (draws, 5))
    drawn = jax.jit(lambda key: sample(logits, key, **options))(jax.random.key(0))
    counts = np.bincount(np.asarray(drawn), minlength=5)
    assert not np.any(counts[expected == 0])
    # Five standard deviations.
    deviation = np.sqrt(draws * expected * (1 - expected)) + 1e-9
    assert np.all(np.abs(counts - draws * expected) < 5 * deviation)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_sums_many_small_probabilities(dtype):
    """Of 4,096 equal ones half are drawn."""
    logits = jnp.zeros((1000, 4096), dtype)
    drawn = jax.jit(lambda key: sample(logits, key, top_p=0.5))(jax.random.key(0))
    assert 2000 < drawn.max() < 2048


def test_what_just_suffices_is_enough():
    drawn = sample(jnp.zeros((20, 2)), jax.random.key(0), top_p=0.5)
    assert not np.any(drawn)


def test_equals_go_to_the_first():
    logits = jnp.asarray([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]])
    for options in ({"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-9}):
        for seed in range(5):
            drawn = sample(logits, jax.random.key(seed), **options)
            np.testing.assert_array_equal(drawn, [1, 0])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"temperature": -1.0}, "temperature .* got -1.0"),
        ({"temperature": float("nan")}, "temperature .* got nan"),
        ({"temperature": float("inf")}, "temperature .* got inf"),
        ({"top_k": 0}, "top_k must be an integer of at least 1, got 0"),
        ({"top_k": 1.5}, "top_k .* got 1.5"),
        ({"prompt": jnp.full((2, 4), V)}, f"ids below {V}, got {V}"),
        ({"prompt": jnp.full((2, 4), -1)}, f"ids below {V}, got -1"),
        ({"lengths": jnp.asarray([1.5, 2.0])}, "got float32 of shape"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.5}, "top_p .* got 1.5"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"stop": V}, f"stop must be one of the {V} token ids, got {V}"),
        ({"stop": -1}, "stop .* got -1"),
        ({"capacity": 5}, "capacity=5 has no room for 4 .* 3 steps, which need 6"),
        ({"key": None}, "temperature=1.0 needs a key"),
        ({"lengths": jnp.asarray([0, 2])}, r"1 to 4 real tokens, got \[0 2\]"),
        ({"lengths": jnp.asarray([2, 5])}, r"1 to 4 real tokens, got \[2 5\]"),
        ({"lengths": jnp.asarray([2])}, r"shape \(2,\), got int32 of shape \(1,\)"),
        (
            {"mask": jnp.asarray([[1, 1, 1, 1], [1, 0, 1, 0]], bool)},
            "row 1 are not one run",
        ),
        (
            {"mask": jnp.asarray([[0, 0, 0, 0], [1, 0, 0, 0]], bool)},
            r"real tokens, got \[0 1\]",
        ),
        ({"mask": jnp.ones((2, 3), bool)}, r"shape \(2, 4\), got bool of shape \(2, 3"),
        (
            {"mask": jnp.ones((2, 4), bool), "lengths": jnp.asarray([2, 2])},
            "not both",
        ),
        ({"prompt": jnp.ones((2, 4))}, r"shape \[B, T\], got float32"),
        ({"prompt": jnp.ones(4, int)}, r"got int32 of shape \(4,\)"),
    ],
)
def test_wrong_options(options, message):
    given = {"prompt": tokens(2, 4), "steps": 3, "key": jax.random.key(0), **options}
    with pytest.raises(ValueError, match=message):
        # Without the checks of types that tests add.
        generate.__wrapped__(model("A2"), given.pop("prompt"), **given)
