import dataclasses
from pathlib import Path

import pytest

from train import config as configs
from train.config import (
    DarcyConfig,
    ElasticityConfig,
    ModelConfig,
    OptimizerConfig,
    PDEConfig,
)

CONFIGS = sorted(Path("configs/pde").glob("[a-z]*.py"))
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
    assert config.run.name == path.stem
    assert f"python -m train.pde {path}" in path.read_text()


@pytest.mark.parametrize(
    "data,blocks,latents", [("elasticity", 8, 64), ("darcy", 8, 128)]
)
def test_paper_configs_differ_in_the_mixer_alone(data, blocks, latents):
    load = lambda mixer: configs.load(PDEConfig, [f"configs/pde/{data}_{mixer}.py"])
    flare, flarepp = load("flare"), load("flarepp")
    for config in (flare, flarepp):
        m, o = config.model, config.optimizer
        assert (m.channels, m.heads, m.blocks, m.latents) == (128, 8, blocks, latents)
        assert (m.mlp_ratio, m.io_layers, m.norm) == (2.0, 2, "layer")
        assert (o.learning_rate, o.weight_decay, o.clip) == (1e-3, 1e-5, 1.0)
        assert (config.batch, config.epochs, config.data.train) == (2, 500, 1000)
        assert config.gradient_weight == (0.1 if data == "darcy" else 0)
    model = dataclasses.replace(flare.model, mixer="flarepp")
    assert dataclasses.replace(flare, model=model, run=flarepp.run) == flarepp


def test_command_line_overrides():
    argv = [SMALL, "--model.channels", "8", "--optimizer.learning-rate=0.5"]
    argv += ["--model.mixer", "flare", "--run", "x", "--progress", "False"]
    argv += ["--data.folder", "y", "--model.options", "qk_norm", "True"]
    config = configs.load(PDEConfig, argv)
    assert (config.model.channels, config.optimizer.learning_rate) == (8, 0.5)
    assert (config.model.mixer, config.model.options) == ("flare", {"qk_norm": True})
    assert (config.run, config.data.folder) == (Path("x"), Path("y"))
    assert config.progress is False


@pytest.mark.parametrize(
    "argument,nearest",
    [
        ("--optimizer.learning_rat=1e-3", "--optimizer.learning-rate"),
        ("--learning-rate=1e-3", "--optimizer.learning-rate"),
        ("--data.channels=3", "--model.channels"),
        ("--model.channel=8", "--model.channels"),
        ("--epoch=3", "--epochs"),
        ("--data.strid=2", "--data.stride"),
    ],
)
def test_unknown_field_names_the_nearest(capsys, argument, nearest):
    message = rejected(capsys, SMALL, argument)
    assert argument.split("=")[0].lstrip("-") in message
    assert nearest in message


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--model.mixer", "flarep"], "'flarep'"),
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
        options = {"qk_norm": True, "gate_logit": 0.5, "layers": None}
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
