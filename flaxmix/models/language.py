"""Decoder language model: tokens in, logits of the next tokens out."""

import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Bool, DTypeLike, Float, Int

from flaxmix.layers import Norm
from flaxmix.mixers import CausalAttention, LinearRelation, Relation
from flaxmix.models.decoder_block import DecoderBlock, DecoderGroup
from flaxmix.models.decoder_cache import Cache
from flaxmix.models.layout import parse_layout, period
from flaxmix.models.stack import apply_stack, stack
from flaxmix.ops.relation import Implementation, Transport
from flaxmix.ops.stream import dot

SIZES: dict[str, dict[str, int]] = {
    name: dict(
        zip(("vocabulary", "channels", "heads", "hidden", "depth"), sizes, strict=True)
    )
    for name, sizes in {
        "10M": (4096, 384, 8, 768, 6),
        "30M": (4096, 512, 8, 1024, 10),
        "100M": (32768, 640, 8, 1280, 20),
        "hybrid-30M": (4096, 480, 8, 960, 12),
    }.items()
}
"""Sizes of the Relation paper, for `LanguageModel(**SIZES["10M"], layout="F", ...)`;
that of softmax attention is layout "A", that of the hybrid "LLLF"."""


class LanguageModel(nnx.Module):
    """Decoder with mixers of the Relation family.

    Tied embedding, pre-RMSNorm blocks of mixer and SwiGLU, RMSNorm; no biases. Depth
    is scanned over the shortest group of layers that repeats: compile time does not
    grow with its repeats.
    """

    def __init__(
        self,
        vocabulary: int,
        *,
        channels: int,
        heads: int,
        hidden: int,
        layout: str | Sequence[str],
        depth: int | None = None,
        tau: float = 2.0,
        givens: bool = True,
        count: bool = True,
        identity_projection: bool = True,
        transport: Transport = "full",
        implementation: Implementation | Literal["materialized"] | None = None,
        remat: bool = False,
        dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ):
        """Initialises the network, in float32; matrices N(0, 0.02^2).

        Args:
            vocabulary: number V of token ids.
            channels: width C of the tokens.
            heads: heads of every mixer.
            hidden: width of the feed-forward layers.
            layout: mixer of each layer, see `parse_layout`: "F6", "(LLLF)3".
            depth: number of layers, to which the layout is repeated; None for the
                layout as it is.
            tau, givens, identity_projection: of the layers F and L, see
                `flaxmix.mixers.Relation`.
            count, transport, implementation: of the layers F, likewise.
            remat: whether the backward pass recomputes each group of layers.
            dtype: what the layers compute in; None means the dtype of the parameters.
            rngs: where the initial parameters come from.

        Raises:
            ValueError: if the layout is malformed or does not divide `depth`, or a
                size or option is rejected.
        """
        letters = parse_layout(layout)
        if depth is not None:
            if depth < 1 or depth % len(letters):
                raise ValueError(
                    f"depth={depth} is no multiple of the {len(letters)} layers of "
                    f"layout={layout!r}."
                )
            letters *= depth // len(letters)
        if vocabulary < 1:
            raise ValueError(f"vocabulary must be at least 1, got {vocabulary}.")
        both = {
            "tau": tau,
            "givens": givens,
            "identity_projection": identity_projection,
        }
        full = {
            "count": count,
            "transport": transport,
            "implementation": implementation,
        }
        mixers = {
            "A": functools.partial(CausalAttention, heads=heads),
            "F": functools.partial(Relation, heads=heads, **both, **full),
            "L": functools.partial(LinearRelation, heads=heads, **both),
        }
        group = period(letters)
        block = lambda letter, rngs: DecoderBlock(
            channels, mixer=mixers[letter], hidden=hidden, rngs=rngs
        )
        make = lambda rngs: DecoderGroup([block(letter, rngs) for letter in group])
        table = jax.random.normal(rngs.params(), (vocabulary, channels), jnp.float32)
        self.embedding = nnx.Param(0.02 * table)
        self.groups: Any = stack(make, len(letters) // len(group), rngs)
        self.norm = Norm(channels, kind="rms")
        self.layout = "".join(letters)
        self.repeats = len(letters) // len(group)
        self.vocabulary = vocabulary
        self.remat = remat
        self.dtype = None if dtype is None else jnp.dtype(dtype)

    def __call__(
        self,
        tokens: Int[Array, "*B T"],
        *,
        positions: Int[Array, "*B T"] | None = None,
        axis_name: str | None = None,
    ) -> Float[Array, "*B T V"]:
        """Logits of the token after each one; see `features` and `logits`."""
        return self.logits(
            self.features(tokens, positions=positions, axis_name=axis_name)
        )

    def features(
        self,
        tokens: Int[Array, "*B T"],
        *,
        positions: Int[Array, "*B T"] | None = None,
        axis_name: str | None = None,
    ) -> Float[Array, "*B T C"]:
        """What the logits are taken from, after the last norm.

        Args:
            tokens: ids from 0 to V - 1. Another one gives NaN for its row.
            positions: place of each token in its document, from 1, such as
                `document_positions` gives; 0 for padding, whose ids never matter, and
                whose features and logits are 0. None means one document of T tokens.
            axis_name: mesh axis that T is sharded over, in the order of
                `flaxmix.ops.places`, inside `jax.shard_map`.

        Raises:
            ValueError: if tokens or positions are no integers, or of other shapes.
        """
        h = apply_stack(
            self.groups,
            self._embed(tokens, positions),
            remat=self.remat,
            each={"repeat": jnp.arange(self.repeats)},
            positions=positions,
            axis_name=axis_name,
        )
        return self.norm(h)

    def logits(self, features: Float[Array, "*B C"]) -> Float[Array, "*B V"]:
        """Products with the embedding of every token, in float32 or wider."""
        return dot("...c,vc->...v", features, self.embedding[...], features.dtype)

    def make_cache(
        self, batch: int, capacity: int, dtype: DTypeLike | None = None
    ) -> Cache:
        """An empty cache.

        Layers A and F keep 2 C numbers a token, layers L a state of C D numbers in
        float32 or wider, however long the row.

        Args:
            batch: number of rows.
            capacity: tokens that each row has room for.
            dtype: of what grows; None means that of the layers.

        Raises:
            ValueError: if `batch` or `capacity` is not positive.
        """
        if min(batch, capacity) < 1:
            raise ValueError(
                f"a cache needs rows and room, got {batch=} and {capacity=}."
            )
        dtype = self._dtype() if dtype is None else dtype
        empty = lambda mixer: jax.tree.map(
            lambda x: jnp.zeros((self.repeats, *x.shape), x.dtype),
            jax.eval_shape(lambda: mixer.make_cache(batch, capacity, dtype)),
        )
        layers = tuple(empty(block.mixer) for block in self.groups.blocks)
        return Cache(jnp.zeros(batch, jnp.int32), layers)

    def extend(
        self,
        tokens: Int[Array, "B T"],
        cache: Cache,
        *,
        lengths: Int[Array, "B"] | None = None,
    ) -> tuple[Float[Array, "B T V"], Cache]:
        """Logits after T more tokens of each row, and the cache with them.

        Prompts in pieces of any size and single tokens are all the same to it.

        Args:
            tokens: what follows the tokens in the cache; see `features`.
            cache: from `make_cache`, or from here.
            lengths: how many tokens are real, the first ones of each row; None for
                all. The others are padding.

        Raises:
            ValueError: if `lengths` are no integers from 0 to T, one for each row, or
                the cache has no room for them, where that can be known.
                Inside `jax.jit` it cannot: what finds no room is then not read by
                later tokens.
        """
        features, cache = self.extend_features(tokens, cache, lengths=lengths)
        return self.logits(features), cache

    def extend_features(
        self,
        tokens: Int[Array, "B T"],
        cache: Cache,
        *,
        lengths: Int[Array, "B"] | None = None,
    ) -> tuple[Float[Array, "B T C"], Cache]:
        """`extend` without the logits, of which one may want some alone."""
        batch, count = tokens.shape
        if batch != len(cache.length):
            raise ValueError(
                f"tokens have {batch} rows, but the cache has {len(cache.length)}."
            )
        added = jnp.full(batch, count, jnp.int32)
        if lengths is not None:
            check_lengths(lengths, batch, 0, count)
            added = jnp.clip(lengths, 0, count).astype(jnp.int32)
        length = cache.length + added
        if not isinstance(length, Tracer) and cache.capacity is not None:
            if (longest := int(np.max(length))) > cache.capacity:
                raise ValueError(
                    f"the cache has capacity={cache.capacity}, but a row would have "
                    f"{longest} tokens."
                )
        i = jnp.arange(count)
        positions = jnp.where(i < added[:, None], cache.length[:, None] + 1 + i, 0)

        def step(carry, group):
            (h, layers), (group, repeat) = carry, group
            # Updated in place: stacked results of a scan would be a second cache.
            one = jax.tree.map(lambda x: x[repeat], layers)
            h, one = group(h, repeat=repeat, positions=positions, caches=one)
            layers = jax.tree.map(lambda x, new: x.at[repeat].set(new), layers, one)
            return (h, layers), None

        carry = self._embed(tokens, positions), cache.layers
        groups = self.groups, jnp.arange(self.repeats)
        (h, layers), _ = lax.scan(step, carry, groups)
        return self.norm(h), Cache(length, layers)

    def _dtype(self) -> jnp.dtype:
        return self.embedding[...].dtype if self.dtype is None else self.dtype

    def _embed(self, tokens, positions):
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(f"tokens must be integers, got {tokens.dtype}.")
        h = (
            self.embedding[...]
            .at[tokens]
            .get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        )
        if positions is not None:
            if positions.shape != tokens.shape:
                raise ValueError(
                    f"positions have shape {positions.shape}, but tokens "
                    f"{tokens.shape}."
                )
            h = jnp.where(positions[..., None] > 0, h, 0)
        return h.astype(self._dtype())


def check_lengths(lengths: Array, batch: int, least: int, most: int) -> None:
    """Raises ValueError if these are no integers [B], or out of their range."""
    if lengths.shape != (batch,) or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(
            f"lengths must be integers of shape {(batch,)}, got {lengths.dtype} of "
            f"shape {lengths.shape}."
        )
    if isinstance(lengths, Tracer):
        return
    if np.any(lengths < least) or np.any(lengths > most):
        raise ValueError(
            f"each row needs {least} to {most} real tokens, got {np.asarray(lengths)}."
        )


def document_positions(
    documents: Int[Array, "*B T"], mask: Bool[Array, "*B T"] | None = None
) -> Int[Array, "*B T"]:
    """Place of each token in its document, from 1; 0 for padding.

    Args:
        documents: an id for the document of each token. A document ends where another
            id or padding follows.
        mask: True for real tokens.
    """
    begins = documents != jnp.roll(documents, 1, -1)
    if mask is not None:
        begins = begins | ~jnp.roll(mask, 1, -1)
    i = jnp.arange(documents.shape[-1])
    first = lax.cummax(jnp.where(begins, i, 0), documents.ndim - 1)
    positions = (i - first + 1).astype(jnp.int32)
    return positions if mask is None else jnp.where(mask, positions, 0)
