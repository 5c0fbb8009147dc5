"""A small surrogate on generated Elasticity, for two CPU cores.

    python -m train.pde configs/pde/elasticity_small.py
    python -m train.pde configs/pde/elasticity_small.py --model.name flare \
        --run runs/elasticity_small_flare

The numbers to expect are in README.md.
"""

from pathlib import Path

from train.config import ElasticityConfig, ModelConfig, OptimizerConfig, PDEConfig

config = PDEConfig(
    data=ElasticityConfig(train=400, test=100),
    model=ModelConfig(name="flarepp", channels=64, blocks=4, heads=4, latents=32),
    optimizer=OptimizerConfig(learning_rate=2e-3, weight_decay=1e-5, ema=0.99),
    epochs=15,
    batch=4,
    evaluation_batch=20,
    evaluations=5,
    run=Path("runs/elasticity_small"),
)
