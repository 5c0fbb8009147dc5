"""FLARE++ on Elasticity, at the paper's settings (arXiv:2608.11519, table 8).

    python -m train.pde configs/pde/elasticity_flarepp.py

The paper reports 0.39 % relative L2 error on the published data, the best of eleven
evaluations on the test set, mean of ten seeds. Name the folder of the published files
with --data.folder; without it a set is generated. Meant for a GPU: 250,000 steps.
"""

from pathlib import Path

from train.config import ElasticityConfig, ModelConfig, OptimizerConfig, PDEConfig

config = PDEConfig(
    data=ElasticityConfig(),
    model=ModelConfig(mixer="flarepp", channels=128, blocks=8, heads=8, latents=64),
    optimizer=OptimizerConfig(learning_rate=1e-3, weight_decay=1e-5),
    epochs=500,
    batch=2,
    run=Path("runs/elasticity_flarepp"),
)
