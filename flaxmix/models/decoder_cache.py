"""What a decoder keeps of the tokens so far."""

from typing import Any, NamedTuple

from jaxtyping import Array, Int

from flaxmix.mixers.linear_relation import LinearRelationCache


class Cache(NamedTuple):
    """What a decoder keeps of the tokens so far.

    Attributes:
        length: number of tokens of each row.
        layers: caches of the layers of a group, with a leading axis of its repeats.
    """

    length: Int[Array, "B"]
    layers: tuple[Any, ...]

    @property
    def capacity(self) -> int | None:
        """Tokens that a row has room for; None if any number has."""
        for layer in self.layers:
            if not isinstance(layer, LinearRelationCache):
                return layer[0].shape[2]
        return None


def cache_bytes(cache: Cache) -> tuple[int, int]:
    """What a row of a cache takes: bytes for each token, and bytes however long."""
    growing, fixed = 0, cache.length.dtype.itemsize
    for layer in cache.layers:
        for x in layer:
            row = x.size // x.shape[1] * x.dtype.itemsize
            if isinstance(layer, LinearRelationCache):
                fixed += row
            else:
                growing += row // x.shape[2]
    return growing, fixed
