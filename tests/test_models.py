"""Every model that a config can name: its size, its options and one step."""

import dataclasses
import functools
import math
import typing

import jax
import pytest
from flax import nnx

from flaxmix import parallel
from flaxmix.parameters import named_parameters, with_parameters
from train import config as configs, pde
from train.config import ModelConfig, ModelName, PDEConfig
from train.models import MIXERS, MODELS, check_model, make_model
from train.step import noise_key, train_step
from train.task import plan

NAMES = typing.get_args(ModelName)
CHANNELS = {"elasticity": (2, 1), "darcy": (3, 1)}
GRIDS = {"elasticity": None, "darcy": (85, 85)}

# At the paper's settings, on Elasticity and on Darcy. L = C^2 + C.
PARAMETERS = {
    "mha": (1_159_681, 1_159_809),
    "flare": (1_093_121, 1_158_785),
    "flarepp": (1_291_329, 1_422_529),
    "ablated_flarepp": (1_291_329, 1_422_529),
    "simplified_flarepp": (1_357_825, 1_423_489),
    "transolver": (1_042_497, 1_051_329),
    "transolverpp": (919_625, 937_673),
    "transolver3": (1_042_497, 1_051_329),
    "luna": (1_566_209, 1_574_529),
    "abupt": (1_159_681, 1_159_809),
    "set_transformer": (1_761_793, 1_827_457),
    # Darcy has 192 more latents in each block and one more input, at C = 64.
    "original_flare": (592_641, 592_641 + 8 * 192 * 64 + 64),
    # C = 128: embedding (c_in + 1) C + 3 L, encoder 512 C + 2 C + 3 L, 8 blocks of
    # 4 C + (3 C^2 + L) + (8 C^2 + 5 C), decoder 4 C + 4 L, head 2 C + 3 L + C + 1.
    # The study of FLARE prints 1.87 M.
    "perceiver_io": (1_864_833, 1_864_961),
    # C = 192 with k = 3 hidden layers, on Darcy C = 128 with k = 2: trunk and branch
    # (c_in + 1) C + (k + 1) L each, score (k + 1) L + 256 (C + 1), 4 blocks of
    # 4 C + 4 L + (4 C^2 + 3 C), head (k + 1) L + C + 1. The study prints 0.92 M.
    "lno": (1_831_745, 762_241),
    # C = 128: two embeddings of 2 (i + 1) C + 2 C^2 + C with i = 2 inputs, on Darcy 64
    # distances, placeholder C, 8 blocks of 10 C + 8 L + 6 (4 C^2 + 3 C) and a gate of
    # 2 (c_in + 1) C + (4 C^2 + 2 C) + 6 C + 3, head (2 C^2 + 2 C) + 2 C + 1. The study
    # prints 4.88 M.
    "gnot": (4_870_553, 4_904_345),
}


def load(*argv):
    return configs.load(PDEConfig, list(argv))


def abstract(config, channels=(2, 1), **known):
    make = functools.partial(make_model, config, channels, **known)
    return nnx.eval_shape(lambda: make(jax.random.key(0)))


def size(model):
    return sum(math.prod(a.shape) for a in named_parameters(model).values())


def test_every_name_has_one_class():
    assert sorted([*MIXERS, *MODELS]) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("data", CHANNELS)
def test_sizes_at_the_settings_of_the_paper(data, name):
    config = load(f"configs/pde/{data}.py", "--model.name", name)
    assert (config.data.name, config.model.name) == (data, name)
    check_model(config.model)
    model = abstract(config.model, CHANNELS[data], grid=GRIDS[data])
    assert size(model) == PARAMETERS[name][list(CHANNELS).index(data)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Generated data, shared by the tests of this file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLAXMIX_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("data", CHANNELS)
def test_small_configs_train_and_evaluate_every_model(cache, data, name):
    tiny = ["--data.train", "4", "--data.test", "1", "--progress", "False"]
    config = load(f"configs/pde/{data}_small.py", "--model.name", name, *tiny)
    task = pde.make_task(config)
    mesh = parallel.make_mesh(data=1)
    layout = plan(config, task, mesh)
    batch = jax.tree.map(lambda a: a[0], next(task.batches(0, 1, mesh)))
    with_params = functools.partial(with_parameters, layout.model)
    step = functools.partial(
        train_step,
        loss_fn=lambda params, *args: task.loss(with_params(params), *args, mesh),
        optimizer=layout.optimizer,
        ema=config.optimizer.ema,
        key=noise_key(0),
    )
    state, metrics = jax.eval_shape(step, layout.abstract, batch)
    kinds = lambda tree: jax.tree.map(lambda a: (a.shape, a.dtype), tree)
    assert kinds(state) == kinds(layout.abstract)
    assert metrics["loss"].shape == metrics["grad_norm"].shape == ()
    predict = lambda params, x: with_params(params)(x)
    y = jax.eval_shape(predict, layout.abstract.params, batch["x"])
    assert (y.shape, y.dtype) == (batch["y"].shape, batch["y"].dtype)


def small(name, **fields):
    sizes = {"channels": 16, "blocks": 2, "heads": 2, "latents": 3}
    return ModelConfig(name=name, **sizes | fields)


@pytest.mark.parametrize(
    "name,option,nearest",
    [
        ("mha", "qk_norms", "the nearest is 'qk_norm'"),
        ("flarepp", "gates", "the nearest is 'gate_logit'"),
        ("abupt", "coordinate", "the nearest is 'coordinates'"),
        ("gnot", "expert", "the nearest is 'experts'"),
        ("lno", "modes", "it has none"),
    ],
)
def test_an_unknown_option_names_the_model_and_the_nearest(name, option, nearest):
    message = f"model.options: {name} has no option '{option}'; {nearest}."
    with pytest.raises(ValueError, match=message):
        check_model(small(name, options={option: 1}))


@pytest.mark.parametrize(
    "name,options,message",
    [
        ("flarepp", {"gate_logit": True}, "gate_logit=True is no float, which flarepp"),
        ("flarepp", {"gate_logit": "0.5 "}, "gate_logit='0.5 ' is no float"),
        ("flarepp", {"gate_logit": math.inf}, "gate_logit=inf is not finite"),
        ("transolver", {"clamp": 1}, "clamp=1 is no bool, which transolver takes"),
        ("gnot", {"experts": 2.5}, "experts=2.5 is no int, which gnot takes"),
        ("ablated_flarepp", {"gate": "sigmoi"}, "gate='sigmoi' is no .*'sigmoid'"),
        # What has its own field is no option.
        ("flarepp", {"heads": 2}, "flarepp has no option 'heads'"),
        ("lno", {"blocks": 2}, "lno has no option 'blocks'"),
        ("luna", {"rngs": 2}, "luna has no option 'rngs'"),
    ],
)
def test_a_wrong_option_is_named(name, options, message):
    with pytest.raises(ValueError, match=message):
        check_model(small(name, options=options))


@pytest.mark.parametrize(
    "name,field,value",
    [
        ("perceiver_io", "dropout", 0.1),
        ("lno", "dropout", 0.1),
        ("gnot", "dropout", 0.1),
        ("gnot", "io_layers", 1),
        ("luna", "mlp_layers", 1),
        ("set_transformer", "mlp_layers", 3),
    ],
)
def test_a_field_that_a_model_lacks_is_named(name, field, value):
    message = f"model.{field}={value}: {name} has no {field}"
    with pytest.raises(ValueError, match=message):
        check_model(small(name, **{field: value}))


@pytest.mark.parametrize(
    "name", ["flarepp", pytest.param("luna", marks=pytest.mark.slow)]
)
def test_dropout_reaches_the_model(name):
    x = jax.random.normal(jax.random.key(1), (7, 2))
    model = make_model(small(name, dropout=0.5), (2, 1), jax.random.key(0))
    first, same, other = (model(x, key=jax.random.key(i)) for i in (0, 0, 1))
    assert (first == same).all() and not (first == other).any()
    plain = make_model(small(name), (2, 1), jax.random.key(0))
    assert (model(x) == plain(x)).all()


def test_models_know_the_data():
    x = "geometry.first.kernel"
    shape = lambda **kwargs: named_parameters(abstract(**kwargs))[x].shape[-2]
    gnot = small("gnot")
    assert shape(config=gnot) == 2
    assert shape(config=gnot, grid=(5, 7)) == 64
    plain = dataclasses.replace(gnot, options={"grid": None})
    assert shape(config=plain, grid=(5, 7)) == 2
    coordinates = lambda config: (
        abstract(config, (4, 1), coordinates=(1, 3)).coordinates
    )
    assert tuple(coordinates(small("abupt"))) == (1, 3)
