import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from flaxmix import parallel


def test_first_matching_rule_decides():
    rules = [(r"head\.kernel$", P(None, "data")), (r".*", P())]
    specs = parallel.match_specs(rules, ["embed.kernel", "head.kernel"])
    assert specs == {"embed.kernel": P(), "head.kernel": P(None, "data")}


def test_every_parameter_needs_a_rule():
    with pytest.raises(ValueError, match="no rule matches parameter 'b'"):
        parallel.match_specs([("a", P())], ["a", "b"])


def test_every_rule_needs_a_parameter():
    with pytest.raises(ValueError, match="rule 'c' matches no parameter"):
        parallel.match_specs([("a", P()), ("c", P())], ["a"])


@pytest.mark.parametrize("data,context", [(9, 1), (3, 3), (0, 1)])
def test_mesh_needs_devices(data, context):
    with pytest.raises(ValueError, match=f"data={data} and context={context}"):
        parallel.make_mesh(data=data, context=context)


def test_copies_of_a_parameter_are_sharded_like_it():
    mesh = parallel.make_mesh(data=4, context=2)
    state = {"params": {"w": 0, "b": 0}, "adam": ({"w": 0, "b": 0}, {"count": 0})}
    shardings = parallel.state_shardings(state, {"w": P("data"), "b": P()}, mesh)
    specs = jax.tree.map(lambda s: s.spec, shardings)
    assert specs["params"] == {"w": P("data"), "b": P()}
    assert specs["adam"] == ({"w": P("data"), "b": P()}, {"count": P()})


@pytest.mark.parametrize("stacked", [False, True])
def test_batches_are_split_over_data_and_points_over_context(stacked):
    mesh = parallel.make_mesh(data=4, context=2)
    shape = (3, 8, 6, 5)[not stacked :]
    x = jax.device_put(jnp.ones(shape), parallel.batch_sharding(mesh, stacked=stacked))
    local = x.addressable_shards[0].data.shape
    assert local == (3, 2, 3, 5)[not stacked :]
