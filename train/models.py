"""The models that a config can name."""

import dataclasses
import difflib
import functools
import inspect
import math
import typing
from typing import Any, TypeAlias

import pydantic
from flax import nnx

from flaxmix import mixers, models
from train.config import ModelConfig

MIXERS = {
    "mha": mixers.SelfAttention,
    "flare": mixers.Flare,
    "original_flare": mixers.OriginalFlare,
    "flarepp": mixers.FlarePP,
    "simplified_flarepp": mixers.SimplifiedFlarePP,
    "ablated_flarepp": mixers.AblatedFlarePP,
    "transolver": mixers.Transolver,
    "transolverpp": mixers.TransolverPP,
    "transolver3": mixers.Transolver3,
}
"""What the shared backbone, `models.Surrogate`, mixes the points with."""

MODELS = {
    "luna": models.Luna,
    "abupt": models.ABUPT,
    "set_transformer": models.SetTransformer,
    "perceiver_io": models.PerceiverIO,
    "lno": models.LNO,
    "gnot": models.GNOT,
}
"""Complete architectures."""

OPTIONS: dict[str, dict[str, Any]] = {"transolverpp": {"evaluation_noise": True}}
"""Options that a trained model has unless its config says otherwise."""

Model: TypeAlias = (
    models.Surrogate
    | models.Luna
    | models.ABUPT
    | models.SetTransformer
    | models.PerceiverIO
    | models.LNO
    | models.GNOT
)


def make_model(
    config: ModelConfig,
    channels: tuple[int, int],
    key,
    *,
    coordinates: tuple[int, ...] = (0, 1),
    grid: tuple[int, int] | None = None,
) -> Model:
    """The model, for c_in and c_out channels.

    Args:
        config: its name, sizes and options.
        channels: of the inputs and of the fields.
        key: where the initial parameters come from.
        coordinates: the input channels that are spatial coordinates.
        grid: (rows, columns) if the points are a row-major grid, else None.

    Raises:
        ValueError: if the config asks for what the model has not.
    """
    known = {"coordinates": coordinates, "grid": grid}
    return _constructor(config, known)(*channels, rngs=nnx.Rngs(key))


def check_model(config: ModelConfig) -> None:
    """Checks that a model has all that a config asks for, before there are data.

    Raises:
        ValueError: if it has not; it names the field or the nearest option.
    """
    _constructor(config, {})


def _constructor(config: ModelConfig, known: dict[str, Any]):
    """The class of the model, with all but channels and rngs filled in."""
    name = config.name
    # What takes the options: a mixer in the shared backbone, or the model itself.
    own = MIXERS[name] if name in MIXERS else MODELS[name]
    cls = models.Surrogate if name in MIXERS else own
    given = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    _check_options(name, own, config.options, {*given, "inputs", "outputs"})
    # Any config has a number of latents, whether its model has them or not.
    accepted = {*_parameters(cls), *_parameters(own), "name", "options", "latents"}
    for field in dataclasses.fields(config):
        value = given[field.name]
        # A default may be of no account, a wish may not.
        if field.name not in accepted and value != field.default:
            raise ValueError(
                f"model.{field.name}={value!r}: {name} has no {field.name}."
            )
    options = OPTIONS.get(name, {}) | config.options
    if cls is own:
        return functools.partial(cls, **_accepted(cls, given | known) | options)
    sizes = {field: given[field] for field in ("heads", "latents", "norm")}
    mixer = functools.partial(own, **_accepted(own, sizes), **options)
    return functools.partial(cls, mixer=mixer, **_accepted(cls, given))


def _check_options(name: str, cls: type, options: dict[str, Any], fields: set[str]):
    """Raises ValueError unless the class takes the options beside the fields."""
    own = [o for o in _parameters(cls) if o not in {*fields, "rngs"}]
    for option, value in options.items():
        if option not in own:
            near = difflib.get_close_matches(option, own, 1, cutoff=0)
            raise ValueError(
                f"model.options: {name} has no option {option!r}; "
                f"{f'the nearest is {near[0]!r}' if near else 'it has none'}."
            )
        strict = pydantic.ConfigDict(strict=True)
        hint = typing.get_type_hints(cls.__init__)[option]
        try:
            pydantic.TypeAdapter(hint, config=strict).validate_python(value)
        except ValueError:
            kind = hint.__name__ if isinstance(hint, type) else hint
            raise ValueError(
                f"model.options: {option}={value!r} is no {kind}, which {name} takes."
            ) from None
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"model.options: {option}={value!r} is not finite.")


def _parameters(cls: type) -> list[str]:
    """What the constructor of a class takes."""
    return list(inspect.signature(cls.__init__).parameters)[1:]


def _accepted(cls: type, given: dict[str, Any]) -> dict[str, Any]:
    """Those of the arguments that the constructor of a class takes."""
    return {name: given[name] for name in _parameters(cls) if name in given}
