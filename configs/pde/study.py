"""What the paper's models are built and trained with (arXiv:2608.11519, table 8).

Most are alike. `original_flare`, PerceiverIO, LNO and GNOT are those of the study of
FLARE (arXiv:2508.12594), from which the paper takes over the errors of the last three.
beta1 is cycled for all. What decays goes by names, as in the paper's code; the study of
FLARE decayed the latents besides. How the paper trained AB-UPT and the Set Transformer
is not published: they get what most models get, and LayerNorm.
"""

from train.config import ModelConfig, ModelName, OptimizerConfig

SIZES = {
    "original_flare": {"channels": 64, "mlp_ratio": 1.0, "mlp_layers": 3},
    "transolver3": {"options": {"clamp": False}},
    "abupt": {"latents": 512},
    "perceiver_io": {"latents": 512, "mlp_ratio": 4.0},
    "lno": {"blocks": 4, "latents": 256},
}
RATES = {
    "perceiver_io": {"initial_division": 25.0},
    "lno": {"weight_decay": 5e-5, "beta2": 0.99, "warmup": 0.2, "clip": 1e3},
    "gnot": {"initial_division": 25.0, "warmup": 0.3, "clip": 0.1},
}


def model(name: ModelName, latents: int, **sizes) -> ModelConfig:
    """The sizes of a model.

    Args:
        name: of the model.
        latents: of the models that are alike.
        **sizes: what else the data set asks for.
    """
    alike = {"channels": 128, "blocks": 8, "heads": 8, "latents": latents}
    return ModelConfig(name=name, **alike | SIZES.get(name, {}) | sizes)


def optimizer(name: ModelName, **rates) -> OptimizerConfig:
    """The optimiser of a model, with what else the data set asks for."""
    alike = {"learning_rate": 1e-3, "weight_decay": 1e-5, "decay": "reference"}
    return OptimizerConfig(**alike | RATES.get(name, {}) | rates)
