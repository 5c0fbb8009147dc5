"""Meshes, shardings and processes: the only place that names mesh axes."""

from flaxmix.parallel.causal import apply_causal as apply_causal
from flaxmix.parallel.chunked import predict_in_chunks as predict_in_chunks
from flaxmix.parallel.context import apply as apply
from flaxmix.parallel.mesh import (
    abstract_mesh as abstract_mesh,
    batch_shards as batch_shards,
    make_mesh as make_mesh,
)
from flaxmix.parallel.processes import (
    check_equal as check_equal,
    global_batch as global_batch,
    is_first as is_first,
    share as share,
    start_processes as start_processes,
    wait_for_all as wait_for_all,
)
from flaxmix.parallel.specs import (
    REPLICATED as REPLICATED,
    batch_sharding as batch_sharding,
    match_specs as match_specs,
    replicate as replicate,
    replicated as replicated,
    state_shardings as state_shardings,
)
