"""Text, or any tokens, from a language model."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, Key

from flaxmix.models import LanguageModel
from flaxmix.models.language import check_lengths
from flaxmix.ops.affine import wide


def generate(
    model: LanguageModel,
    prompt: Int[Array, "B T"],
    *,
    steps: int,
    key: Key[Array, ""] | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    lengths: Int[Array, "B"] | None = None,
    mask: Bool[Array, "B T"] | None = None,
    stop: int | None = None,
    capacity: int | None = None,
) -> Int[Array, "B K"]:
    """Draws K = `steps` tokens after each row of a prompt.

    The prompt is read at once, then one token after the other, with a cache. A program
    is compiled for each shape of the prompt, number of steps and set of options given,
    but not for each of their values. It ends early when all rows have stopped.

    Args:
        model: the model.
        prompt: token ids.
        steps: tokens to draw for each row.
        key: drives the draws; needed unless `temperature` is 0.
        temperature, top_k, top_p: see `sample`.
        lengths: real tokens of each row, its first ones; None for all.
        mask: instead, True for real tokens: a run of each row, such as all but some on
            the left.
        stop: token after which a row ends.
        capacity: tokens that the cache has room for; None for as many as needed.

    Returns:
        The tokens drawn. Those after a stop are the stop token again.

    Raises:
        ValueError: if an option is out of its range, both `lengths` and `mask` are
            given, a row has no real token or they are not a run, or an id of one is
            not in the vocabulary.
    """
    prompt = jnp.asarray(prompt)
    if prompt.ndim != 2 or not jnp.issubdtype(prompt.dtype, jnp.integer):
        raise ValueError(
            f"prompt must be token ids of shape [B, T], got {prompt.dtype} of shape "
            f"{prompt.shape}."
        )
    batch, tokens = prompt.shape
    _check_options(temperature, top_k, top_p)
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}.")
    if stop is not None and not 0 <= stop < model.vocabulary:
        raise ValueError(
            f"stop must be one of the {model.vocabulary} token ids, got {stop}."
        )
    # The last token is not read.
    needed = tokens + steps - 1
    if capacity is not None and capacity < needed:
        raise ValueError(
            f"capacity={capacity} has no room for {tokens} tokens of the prompt and "
            f"{steps} steps, which need {needed}."
        )
    if key is None:
        if isinstance(temperature, Tracer) or temperature > 0:
            raise ValueError(f"temperature={temperature} needs a key, got None.")
        key = jax.random.key(0)
    first, lengths = _rows(batch, tokens, lengths, mask)
    if not any(isinstance(x, Tracer) for x in (prompt, first, lengths)):
        place = np.arange(tokens) - np.asarray(first)[:, None]
        real = (place >= 0) & (place < np.asarray(lengths)[:, None])
        if np.any(bad := real & ~((prompt >= 0) & (prompt < model.vocabulary))):
            raise ValueError(
                f"prompt must hold ids below {model.vocabulary}, got "
                f"{np.asarray(prompt)[bad][0]}."
            )
    return _generate(
        *(model, prompt.astype(jnp.int32), first, lengths, key),
        temperature=jnp.asarray(temperature, jnp.float32),
        top_k=None if top_k is None else jnp.asarray(top_k, jnp.int32),
        top_p=None if top_p is None else jnp.asarray(top_p, jnp.float32),
        stop=None if stop is None else jnp.asarray(stop, jnp.int32),
        steps=steps,
        capacity=needed if capacity is None else capacity,
    )


def sample(
    logits: Float[Array, "*B V"],
    key: Key[Array, ""],
    *,
    temperature: float | Float[Array, ""] = 1.0,
    top_k: int | Int[Array, ""] | None = None,
    top_p: float | Float[Array, ""] | None = None,
) -> Int[Array, "*B"]:
    """Draws a token of each row from softmax(logits / temperature).

    Args:
        logits: of each token.
        key: drives the draws.
        temperature: 0 takes the likeliest token, the first of equals.
        top_k: draws from the k likeliest tokens alone.
        top_p: draws from the likeliest tokens alone, of those left by `top_k` as many
            as it takes for a probability of at least p; always from one.

    Raises:
        ValueError: if `temperature` is negative or not finite, `top_k` below 1 or
            `top_p` not in (0, 1].
    """
    _check_options(temperature, top_k, top_p)
    logits = wide(logits)
    best = jnp.argmax(logits, -1)
    # The largest is 0, so that no small temperature overflows.
    scores = logits - jnp.max(logits, -1, keepdims=True)
    scores = scores / jnp.where(temperature > 0, temperature, 1)
    if top_k is None and top_p is None:
        drawn = jax.random.categorical(key, scores)
    else:
        order = jnp.argsort(scores, -1, descending=True, stable=True)
        scores = jnp.take_along_axis(scores, order, -1)
        rank = jnp.arange(scores.shape[-1])
        if top_k is not None:
            scores = jnp.where(rank < top_k, scores, -jnp.inf)
        if top_p is not None:
            p = jax.nn.softmax(scores)
            # The probability of likelier ones: exactly 0 for the first.
            scores = jnp.where(jnp.cumsum(p, -1) - p < top_p, scores, -jnp.inf)
        drawn = jax.random.categorical(key, scores)[..., None]
        drawn = jnp.take_along_axis(order, drawn, -1)[..., 0]
    return jnp.where(temperature > 0, drawn, best)


def _check_options(temperature: Any, top_k: Any, top_p: Any) -> None:
    known = lambda x: x is not None and not isinstance(x, Tracer)
    if known(temperature) and not 0 <= temperature < math.inf:
        raise ValueError(
            f"temperature must be finite and not negative, got {temperature}."
        )
    if known(top_k) and (top_k < 1 or top_k != int(top_k)):
        raise ValueError(f"top_k must be an integer of at least 1, got {top_k}.")
    if known(top_p) and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], got {top_p}.")


def _rows(batch: int, tokens: int, lengths, mask):
    """The first real token of each row, and how many there are."""
    first = jnp.zeros(batch, jnp.int32)
    if lengths is not None and mask is not None:
        raise ValueError("lengths and mask say the same: give one of them, not both.")
    if mask is not None:
        if mask.shape != (batch, tokens) or mask.dtype != bool:
            raise ValueError(
                f"mask must be a boolean array of shape {(batch, tokens)}, got "
                f"{mask.dtype} of shape {mask.shape}."
            )
        first, lengths = jnp.argmax(mask, -1), jnp.sum(mask, -1)
        if not isinstance(mask, Tracer):
            edges = np.diff(np.asarray(mask, int), axis=-1, prepend=0) == 1
            if np.any(edges.sum(-1) > 1):
                row = int(np.argmax(edges.sum(-1) > 1))
                raise ValueError(f"mask: the real tokens of row {row} are not one run.")
    elif lengths is None:
        lengths = jnp.full(batch, tokens, jnp.int32)
    lengths = jnp.asarray(lengths)
    check_lengths(lengths, batch, 1, tokens)
    return first.astype(jnp.int32), lengths.astype(jnp.int32)


@jax.jit(static_argnames=("steps", "capacity"))
def _generate(
    model, prompt, first, lengths, key, *, temperature, top_k, top_p, stop, steps,
    capacity,
):  # fmt: skip
    batch, tokens = prompt.shape
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p}

    def draw(i, features):
        logits = model.logits(features)
        chosen = sample(logits, jax.random.fold_in(key, i), **options)
        return chosen.astype(jnp.int32)

    # Rows begin with their first real token.
    place = jnp.minimum(first[:, None] + jnp.arange(tokens), tokens - 1)
    prompt = jnp.take_along_axis(prompt, place, -1)
    cache = model.make_cache(batch, capacity)
    features, cache = model.extend_features(prompt, cache, lengths=lengths)
    last = jnp.take_along_axis(features, lengths[:, None, None] - 1, 1)
    token = draw(0, last[:, 0])
    result = jnp.zeros((batch, steps), prompt.dtype)
    result = (result if stop is None else result + stop).at[:, 0].set(token)

    def more(loop):
        i, token, *_ = loop
        return (i < steps) & (True if stop is None else jnp.any(token != stop))

    def step(loop):
        i, token, cache, result = loop
        features, cache = model.extend_features(token[:, None], cache)
        new = draw(i, features[:, 0])
        if stop is not None:
            new = jnp.where(token == stop, stop, new)
        return i + 1, new, cache, result.at[:, i].set(new)

    return lax.while_loop(more, step, (1, token, cache, result))[-1]
