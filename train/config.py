"""Experiments as frozen dataclasses, from a Python file and the command line."""

import dataclasses
import difflib
import itertools
import os
import runpy
import sys
import typing
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import pydantic
import tyro
from pydantic import Field
from pydantic.dataclasses import dataclass

from flaxmix.layers.norm import NormKind

T = TypeVar("T")

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]

_strict = pydantic.ConfigDict(extra="forbid")

ModelName = Literal[
    "mha",
    "flare",
    "original_flare",
    "flarepp",
    "simplified_flarepp",
    "ablated_flarepp",
    "transolver",
    "transolverpp",
    "transolver3",
    "luna",
    "abupt",
    "set_transformer",
    "perceiver_io",
    "lno",
    "gnot",
]


@dataclass(frozen=True, kw_only=True, config=_strict)
class ElasticityConfig:
    """Stress around a hole: 972 points."""

    name: tyro.conf.Suppress[Literal["elasticity"]] = "elasticity"
    folder: Path | None = None
    """Folder of the published files; None generates a data set once, in the cache."""
    train: Count = 1000
    """First samples, to train on."""
    test: Count = 200
    """Last samples, to test on."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Of generated samples."""


@dataclass(frozen=True, kw_only=True, config=_strict)
class DarcyConfig:
    """Pressure in a porous medium: a square grid."""

    name: tyro.conf.Suppress[Literal["darcy"]] = "darcy"
    folder: Path | None = None
    """Folder of the published files; None generates a data set once, in the cache."""
    train: Count = 1000
    """First samples of the training file."""
    test: Count = 200
    """First samples of the test file."""
    resolution: Count = 421
    """Points a side that generated samples are solved on."""
    stride: Count = 5
    """Every so many-th point is used."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Of generated samples."""


@dataclass(frozen=True, kw_only=True, config=_strict)
class ModelConfig:
    """The shared backbone with a mixer, or another architecture."""

    name: ModelName = "flarepp"
    """The mixer in the shared backbone, or the architecture."""
    channels: Count = 128
    blocks: Count = 8
    heads: Count = 8
    """Must divide `channels`."""
    latents: Count = 64
    """For each head, where a model has any: anchors, slices and modes are latents."""
    mlp_ratio: Positive = 2.0
    """Hidden width of a block's MLP, in units of `channels`."""
    mlp_layers: Annotated[int, Field(ge=0)] = 0
    """Hidden residual layers of a block's MLP; the original FLARE study has 3."""
    io_layers: Annotated[int, Field(ge=0)] = 2
    """Hidden residual layers of the embedding and of the head."""
    norm: NormKind = "layer"
    dropout: Fraction = 0.0
    """Of the mixer's output in each block."""
    options: dict[str, bool | int | float | None | str] = dataclasses.field(
        default_factory=dict
    )
    """Further keyword arguments of the mixer or model, such as `gate_logit 0.5`."""
    remat: bool = False
    """Whether the backward pass recomputes each block: less memory, more time."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What the blocks compute in; master weights stay float32."""

    def __post_init__(self):
        if self.channels % self.heads:
            raise ValueError(
                f"heads={self.heads} must divide channels={self.channels}."
            )
        if int(self.mlp_ratio * self.channels) < 1:
            raise ValueError(
                f"mlp_ratio={self.mlp_ratio} of channels={self.channels} leaves no "
                "hidden channel."
            )


@dataclass(frozen=True, kw_only=True, config=_strict)
class OptimizerConfig:
    """AdamW under a one-cycle schedule, with clipping and a running average."""

    learning_rate: Positive = 1e-3
    """At the peak."""
    weight_decay: NonNegative = 1e-5
    """Times the learning rate."""
    decay: Literal["matrices", "reference"] = "matrices"
    """What decays: matrices, or what the authors' code decays, which goes by names."""
    warmup: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Part of all steps in which the learning rate rises."""
    initial_division: Annotated[float, Field(ge=1)] = 1e4
    """Peak over initial learning rate."""
    final_division: Positive = 1e4
    """Initial over final learning rate."""
    beta1: Fraction = 0.95
    """At both ends of the schedule."""
    beta1_low: Fraction | None = 0.85
    """At the peak of the learning rate; None keeps beta1 constant."""
    beta2: Fraction = 0.999
    eps: Positive = 1e-8
    clip: Positive = 1.0
    """Largest global norm of the gradient."""
    ema: Fraction = 0.999
    """Decay of the running average of the weights, which is evaluated beside them."""


@dataclass(frozen=True, kw_only=True, config=_strict)
class DistributedConfig:
    """Several processes that train together, each with its own devices."""

    coordinator: str | None = None
    """host:port of process 0, "auto" to ask Slurm or MPI, None for one process."""
    processes: Count | None = None
    """How many there are, unless the coordinator is "auto"."""
    process: Annotated[int, Field(ge=0)] | None = None
    """Which of them this is, from 0 on, unless the coordinator is "auto"."""

    def __post_init__(self):
        numbers = self.processes, self.process
        if self.coordinator in (None, "auto") and numbers != (None, None):
            raise ValueError(
                f"processes={self.processes} and process={self.process} need "
                f"coordinator=host:port, got coordinator={self.coordinator!r}."
            )


@dataclass(frozen=True, kw_only=True, config=_strict)
class PDEConfig:
    """A surrogate trained on one data set."""

    data: Annotated[ElasticityConfig | DarcyConfig, Field(discriminator="name")]
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    epochs: Count = 500
    batch: Count = 2
    """Training samples a step, over all devices."""
    evaluation_batch: Count = 5
    validation: Annotated[int, Field(ge=0)] = 0
    """Last training samples that are held out to choose the best weights by."""
    gradient_weight: NonNegative = 0.0
    """Weight of the error of both derivatives in the loss; needs a grid."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Of initial weights, the order of samples, dropout and noise."""
    evaluations: Count = 10
    """Evaluations and checkpoints spread over the run, besides one at its start."""
    checkpoint_every: Count | None = None
    """Steps between further checkpoints."""
    steps_per_call: Count = 20
    """Most steps in one compiled call, which saves dispatch and memory traffic."""
    workers: Annotated[int, Field(ge=0)] = 0
    """Processes that read ahead; 0 for threads."""
    devices: Count = 1
    """Parts of each batch, each on its own devices."""
    context: Count = 1
    """Parts of each sample's points, each on its own device: devices x context in all.
    """
    distributed: DistributedConfig = DistributedConfig()
    run: Path
    """Folder of the run. It is resumed if it exists, so it belongs to one config."""
    progress: bool = True
    """Whether anything is printed."""


FREE = frozenset(
    {
        "workers",
        "devices",
        "context",
        "distributed",
        "progress",
        "run",
        "checkpoint_every",
        "data.folder",
    }
)
"""Fields that a resumed run may change: they do not change what it computes.

The data may have moved to another folder: their fingerprint is compared.
"""


def load(cls: type[T], argv: list[str] | None = None) -> T:
    """The config of `python -m train.NAME FILE [--field value ...]`.

    FILE is a Python file that defines `config`, or a function of that name that makes
    the config for a `--model.name`. A missing file, an unknown field or a wrong value
    exits with code 2 and says which, with the nearest valid name.
    """
    argv = sys.argv[1:] if argv is None else argv
    program = f"{Path(sys.argv[0]).stem} CONFIG"
    if not argv or argv[0].startswith("-"):
        fail(f"usage: {program} [--field value ...]; give a config file first.")
    if not Path(argv[0]).is_file():
        fail(f"no config file {argv[0]!r}.")
    name = _model_name(argv[1:])
    try:
        names = runpy.run_path(argv[0])
        config = names.get("config")
        if callable(config):
            config = config() if name is None else config(name)
    except Exception as error:  # whatever the file does wrong
        fail(f"{argv[0]}: {type(error).__name__}: {error}")
    if "config" not in names:
        fail(f"{argv[0]} defines no `config`.")
    if not isinstance(config, cls):
        fail(f"{argv[0]}: config is a {type(config).__name__}, not a {cls.__name__}.")
    _check_names(argv[1:], list(_fields(config)))
    options = getattr(getattr(config, "model", None), "options", {})
    result: Any = tyro.cli(
        cls,
        # The parser would take only the options that are there already.
        default=_with_options(config, {}) if options else config,
        args=argv[1:],
        prog=program,
        config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff),
    )
    if options:
        result = _with_options(result, options | result.model.options)
    return result


def _with_options(config: Any, options: dict[str, Any]) -> Any:
    model = dataclasses.replace(config.model, options=options)
    return dataclasses.replace(config, model=model)


def _fields(config: Any, prefix: str = ""):
    """Dotted names of all fields."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _fields(value, f"{prefix}{field.name}.")
        elif prefix + field.name != "data.name":  # which its class fixes
            yield prefix + field.name


def _model_name(arguments: list[str]) -> str | None:
    """The value of `--model.name`; exits with the nearest one where there is none."""
    name = None
    for argument, following in itertools.pairwise([*arguments, ""]):
        field, equals, value = argument.partition("=")
        if field == "--model.name":
            name = value if equals else following
    names = typing.get_args(ModelName)
    if not name or name in names:
        return name or None  # one without a value is a mistake that tyro reports
    # As papers write them: FLARE++, AB-UPT.
    plain = {n.replace("_", ""): n for n in names}
    written = name.lower().replace("+", "p")
    written = "".join(filter(str.isalnum, written))
    (near,) = difflib.get_close_matches(written, plain, 1, cutoff=0)
    fail(
        f"no model.name {name!r}; the nearest is {plain[near]!r} of {', '.join(names)}."
    )


def _check_names(arguments: list[str], fields: list[str]) -> None:
    """Exits with the nearest field where an argument names none.

    A field of that name at another level is nearer than any other spelling.
    """
    for argument in arguments:
        name = argument.partition("=")[0].removeprefix("--").replace("-", "_")
        if not argument.startswith("--") or name in (*fields, "help"):
            continue
        leaf = lambda field: field.rpartition(".")[2]
        near = [field for field in fields if leaf(field) == leaf(name)]
        near = near or difflib.get_close_matches(name, fields, 1, cutoff=0)
        fail(
            f"unknown field {argument.partition('=')[0]}; "
            f"the nearest is --{near[0].replace('_', '-')}."
        )


def fail(message: str) -> NoReturn:
    """Says what is wrong with a command and exits with code 2."""
    print(message, file=sys.stderr)
    raise SystemExit(2)


def write(config: Any, path: Path) -> None:
    """Writes a config as JSON, in one go."""
    text = pydantic.TypeAdapter(type(config)).dump_json(config, indent=2).decode()
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text + "\n")
    os.replace(temporary, path)


def read(cls: type[T], path: Path) -> T:
    """Reads what `write` wrote.

    Raises:
        ValueError: if the file is not such a config.
    """
    try:
        return pydantic.TypeAdapter(cls).validate_json(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no config: {error}") from error


def first_difference(old: Any, new: Any, prefix: str = "") -> str | None:
    """Names the first field in which two configs differ, but for those in `FREE`."""
    if type(old) is not type(new) or not dataclasses.is_dataclass(old):
        return None if old == new else f"{prefix}: {old!r} became {new!r}"
    for field in dataclasses.fields(old):
        name = f"{prefix}.{field.name}" if prefix else field.name
        if name not in FREE:
            values = getattr(old, field.name), getattr(new, field.name)
            if difference := first_difference(*values, name):
                return difference
    return None
