"""Data sets and normalisers; `flaxmix.data.pipeline` makes batches of them."""

from flaxmix.data.dataset import (
    Dataset as Dataset,
    Fields as Fields,
    Meshes as Meshes,
    Normalizer as Normalizer,
    Sample as Sample,
)
