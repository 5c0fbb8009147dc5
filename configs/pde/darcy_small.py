"""A small surrogate on generated Darcy, for two CPU cores.

    python -m train.pde configs/pde/darcy_small.py

Solved on a 43 x 43 grid instead of the published 421 x 421, so the numbers do not
compare with the paper's.
"""

from pathlib import Path

from train.config import DarcyConfig, ModelConfig, OptimizerConfig, PDEConfig

config = PDEConfig(
    data=DarcyConfig(train=400, test=100, resolution=43, stride=1),
    model=ModelConfig(name="flarepp", channels=64, blocks=4, heads=4, latents=32),
    optimizer=OptimizerConfig(learning_rate=2e-3, weight_decay=1e-5, ema=0.99),
    epochs=15,
    batch=4,
    evaluation_batch=20,
    evaluations=5,
    gradient_weight=0.1,
    run=Path("runs/darcy_small"),
)
