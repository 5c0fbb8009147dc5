import dataclasses
import operator
import typing
from pathlib import Path

import pytest

from train import config as configs
from train.config import (
    DarcyConfig,
    ElasticityConfig,
    ModelConfig,
    ModelName,
    OptimizerConfig,
    PDEConfig,
)

CONFIGS = sorted(Path("configs/pde").glob("[a-z]*.py"))
CONFIGS.remove(Path("configs/pde/study.py"))
PAPER = [path for path in CONFIGS if not path.stem.endswith("_small")]
SMALL = "configs/pde/darcy_small.py"


def rejected(capsys, *argv) -> str:
    with pytest.raises(SystemExit) as exit_:
        configs.load(PDEConfig, list(argv))
    assert exit_.value.code == 2
    # The message is boxed: take the frame and the line breaks away.
    text = capsys.readouterr()
    return " ".join((text.out + text.err).replace("│", " ").split())


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_configs_load_and_say_their_command(path):
    config = configs.load(PDEConfig, [str(path)])
    assert config.model.name == "flarepp"
    assert config.run.name == path.stem + ("_flarepp" if path in PAPER else "")
    assert f"python -m train.pde {path}" in path.read_text()


def paper(data, name):
    return configs.load(PDEConfig, [f"configs/pde/{data}.py", "--model.name", name])


@pytest.mark.parametrize("name", typing.get_args(ModelName))
@pytest.mark.parametrize("data,latents", [("elasticity", 64), ("darcy", 128)])
def test_paper_configs(data, latents, name):
    config = paper(data, name)
    darcy = data == "darcy"
    own = {
        "original_flare": {
            "model.channels": 64,
            "model.heads": 16 if darcy else 8,
            "model.latents": 256 if darcy else 64,
            "model.mlp_ratio": 1.0,
            "model.mlp_layers": 3,
        },
        "transolver3": {"model.options": {"clamp": False}},
        "abupt": {"model.latents": 512},
        "perceiver_io": {
            "model.latents": 512,
            "model.mlp_ratio": 4.0,
            "optimizer.initial_division": 25.0,
        },
        "lno": {
            "model.channels": 128 if darcy else 192,
            "model.io_layers": 2 if darcy else 3,
            "model.blocks": 4,
            "model.latents": 256,
            "batch": 4,
            "optimizer.beta2": 0.99,
            "optimizer.warmup": 0.2,
            "optimizer.clip": 1000.0,
            "optimizer.weight_decay": 5e-5,
        },
        "gnot": {
            "batch": 4 if darcy else 2,
            "optimizer.warmup": 0.3,
            "optimizer.initial_division": 25.0,
            "optimizer.clip": 0.1,
            "optimizer.weight_decay": 5e-5 if darcy else 1e-5,
        },
    }
    values = {
        "model.name": name,
        "model.channels": 128,
        "model.blocks": 8,
        "model.heads": 8,
        "model.latents": latents,
        "model.mlp_ratio": 2.0,
        "model.mlp_layers": 0,
        "model.io_layers": 2,
        "model.norm": "layer",
        "model.dtype": "float32",
        "model.dropout": 0.0,
        "model.options": {},
        "optimizer.learning_rate": 1e-3,
        "optimizer.weight_decay": 1e-5,
        "optimizer.decay": "reference",
        "optimizer.warmup": 0.1,
        "optimizer.initial_division": 1e4,
        "optimizer.final_division": 1e4,
        "optimizer.beta1": 0.95,
        "optimizer.beta1_low": 0.85,
        "optimizer.beta2": 0.999,
        "optimizer.eps": 1e-8,
        "optimizer.clip": 1.0,
        "batch": 2,
        "epochs": 500,
        "evaluations": 10,
        "gradient_weight": 0.1 if darcy else 0.0,
        "data.train": 1000,
        "data.test": 200,
        "run": Path(f"runs/{data}_{name}"),
    }
    values |= own.get(name, {})
    assert {k: operator.attrgetter(k)(config) for k in values} == values


def test_a_config_may_be_a_function_of_the_model(capsys, tmp_path):
    file = tmp_path / "c.py"
    text = """
from pathlib import Path
from train.config import *
def config(name="mha"):
    if name == "gnot":
        raise ValueError("no gnot here")
    model = ModelConfig(name=name, blocks=len(name))
    return PDEConfig(data=DarcyConfig(), model=model, run=Path(name))
"""
    file.write_text(text)
    load = lambda *argv: configs.load(PDEConfig, [str(file), *argv])
    assert (load().model.name, load().model.blocks) == ("mha", 3)
    for argv in (["--model.name", "luna"], ["--model.name=luna"]):
        config = load("--batch", "7", *argv)
        assert (config.model.name, config.model.blocks) == ("luna", 4)
        assert (config.run, config.batch) == (Path("luna"), 7)
        assert load(*argv, "--model.blocks", "2").model.blocks == 2
    assert "ValueError: no gnot here" in rejected(
        capsys, str(file), "--model.name", "gnot"
    )
    assert "model.name" in rejected(capsys, str(file), "--model.name")
    file.write_text("def config(): return 3")
    assert "is a int, not a PDEConfig" in rejected(capsys, str(file))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_help_shows_the_settings_of_the_model(capsys, path):
    with pytest.raises(SystemExit) as exit_:
        configs.load(PDEConfig, [str(path), "--model.name", "lno", "--help"])
    assert exit_.value.code == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "(default: lno)" in text or path not in PAPER
    assert "--model.name" in text and "--optimizer.decay" in text


def test_command_line_overrides():
    argv = [SMALL, "--model.channels", "8", "--optimizer.learning-rate=0.5"]
    argv += ["--model.name", "flare", "--run", "x", "--progress", "False"]
    argv += ["--data.folder", "y", "--model.options", "qk_norm", "True"]
    config = configs.load(PDEConfig, argv)
    assert (config.model.channels, config.optimizer.learning_rate) == (8, 0.5)
    assert (config.model.name, config.model.options) == ("flare", {"qk_norm": True})
    assert (config.run, config.data.folder) == (Path("x"), Path("y"))
    assert config.progress is False


def test_options_keep_their_kinds():
    given = {"a": True, "b": 3, "c": 0.5, "d": None, "e": "sigmoid"}
    words = [str(word) for item in given.items() for word in item]
    config = configs.load(PDEConfig, [SMALL, "--model.options", *words])
    assert config.model.options == given
    assert [type(v) for v in config.model.options.values()] == [
        type(v) for v in given.values()
    ]


@pytest.mark.parametrize(
    "argument,nearest",
    [
        ("--optimizer.learning_rat=1e-3", "--optimizer.learning-rate"),
        ("--learning-rate=1e-3", "--optimizer.learning-rate"),
        ("--data.channels=3", "--model.channels"),
        ("--model.channel=8", "--model.channels"),
        ("--epoch=3", "--epochs"),
        ("--data.strid=2", "--data.stride"),
        ("--model.mixer=mha", "--model.name"),
        ("--data.name=darcy", "--model.name"),
        ("--name=mha", "--model.name"),
    ],
)
def test_unknown_field_names_the_nearest(capsys, argument, nearest):
    message = rejected(capsys, SMALL, argument)
    assert argument.split("=")[0].lstrip("-") in message
    assert nearest in message


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--model.name", "flarep"], "model.name 'flarep'; the nearest is 'flarepp'"),
        (["--model.name=perceiver"], "the nearest is 'perceiver_io'"),
        (["--optimizer.decay", "names"], "'names'"),
        (["--model.dropout", "1"], "less than 1"),
        (["--model.norm", "rmsnorm"], "'rmsnorm'"),
        (["--batch", "0"], "greater than or equal to 1"),
        (["--batch", "two"], "two"),
        (["--optimizer.learning-rate", "-1"], "greater than 0"),
        (["--optimizer.learning-rate", "nan"], "nan"),
        (["--optimizer.warmup", "1.5"], "less than 1"),
        (["--seed", "-1"], "greater than or equal to 0"),
        (["--model.heads", "6"], "heads=6 must divide channels=64"),
    ],
)
def test_wrong_value_is_named(capsys, arguments, message):
    assert message in rejected(capsys, SMALL, *arguments)


@pytest.mark.parametrize("path", PAPER, ids=lambda p: p.stem)
def test_a_misspelt_model_is_named(capsys, path):
    message = rejected(capsys, str(path), "--model.name=simplified_flare")
    assert "the nearest is 'simplified_flarepp'" in message


def test_heads_that_do_not_divide_channels_are_named(tmp_path):
    message = "heads=6 must divide channels=64"
    with pytest.raises(ValueError, match=message):
        ModelConfig(channels=64, heads=6)
    file = tmp_path / "c.json"
    configs.write(some_config(model=ModelConfig(channels=64, heads=4)), file)
    file.write_text(file.read_text().replace('"heads": 4', '"heads": 6'))
    with pytest.raises(ValueError, match=message):
        configs.read(PDEConfig, file)


def test_config_file_errors(capsys, tmp_path):
    assert "give a config file first" in rejected(capsys)
    assert "give a config file first" in rejected(capsys, "--batch", "2")
    assert "no config file 'nowhere.py'" in rejected(capsys, "nowhere.py")
    file = tmp_path / "c.py"
    file.write_text("cfg = 1")
    assert "defines no `config`" in rejected(capsys, str(file))
    file.write_text("config = 1")
    assert "is a int, not a PDEConfig" in rejected(capsys, str(file))
    file.write_text("from train.config import *\nconfig = ModelConfig(chanels=3)")
    assert "chanels" in rejected(capsys, str(file))


@pytest.mark.parametrize(
    "text,message",
    [
        ("config = (", "SyntaxError"),
        ("import nowhere", "No module named 'nowhere'"),
        ("{}['key']", "KeyError: 'key'"),
        ("open('nowhere.txt')", "nowhere.txt"),
    ],
)
def test_a_config_file_with_a_mistake(capsys, tmp_path, text, message):
    file = tmp_path / "c.py"
    file.write_text(text)
    assert message in rejected(capsys, str(file))


def some_config(**kwargs):
    return PDEConfig(data=DarcyConfig(train=3), run=Path("r"), **kwargs)


def test_json_round_trip(tmp_path):
    for data in (DarcyConfig(stride=2), ElasticityConfig(folder=Path("a/b"))):
        options = {"qk_norm": True, "gate_logit": 0.5, "layers": None, "gate": "raw"}
        config = PDEConfig(data=data, run=Path("r"), model=ModelConfig(options=options))
        configs.write(config, tmp_path / "c.json")
        assert configs.read(PDEConfig, tmp_path / "c.json") == config
    assert [p.name for p in tmp_path.iterdir()] == ["c.json"]


def test_read_rejects_what_is_no_config(tmp_path):
    file = tmp_path / "c.json"
    file.write_text('{"run": "x"}')
    with pytest.raises(ValueError, match=r"c\.json is no config: .*\s+data"):
        configs.read(PDEConfig, file)


def test_first_difference_names_the_field():
    old = some_config()
    assert configs.first_difference(old, some_config()) is None
    new = some_config(model=ModelConfig(channels=64))
    assert configs.first_difference(old, new) == "model.channels: 128 became 64"
    other = dataclasses.replace(old, data=ElasticityConfig())
    assert configs.first_difference(old, other).startswith("data: ")
    optimizer = OptimizerConfig(beta1_low=None)
    assert "optimizer.beta1_low: 0.85 became None" == configs.first_difference(
        old, some_config(optimizer=optimizer)
    )
    free = some_config(workers=2, devices=8, progress=False, checkpoint_every=7)
    assert configs.first_difference(old, free) is None


def test_options_of_a_config_file_can_be_changed():
    """Options beside those of the file, and others for them."""
    load = lambda *argv: configs.load(
        PDEConfig, ["configs/pde/elasticity.py", "--model.name", "transolver3", *argv]
    )
    assert load().model.options == {"clamp": False}
    assert load("--model.options", "clamp", "True").model.options == {"clamp": True}
    both = load("--model.options", "other", "2").model.options
    assert both == {"clamp": False, "other": 2}


@pytest.mark.parametrize(
    "written,name",
    [
        ("FLARE++", "flarepp"),
        ("AB-UPT", "abupt"),
        ("Transolver++", "transolverpp"),
        ("transolver-3", "transolver3"),
        ("Set Transformer", "set_transformer"),
    ],
)
def test_names_as_papers_write_them(written, name, capsys):
    with pytest.raises(SystemExit, match="2"):
        argv = ["configs/pde/elasticity.py", "--model.name", written]
        configs.load(PDEConfig, argv)
    assert f"the nearest is {name!r}" in capsys.readouterr().err
