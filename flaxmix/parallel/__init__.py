"""Meshes and shardings: the only place that names mesh axes."""

from flaxmix.parallel.mesh import (
    batch_shards as batch_shards,
    make_mesh as make_mesh,
)
from flaxmix.parallel.specs import (
    REPLICATED as REPLICATED,
    batch_sharding as batch_sharding,
    match_specs as match_specs,
    state_shardings as state_shardings,
)
