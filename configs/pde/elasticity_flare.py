"""FLARE on Elasticity, at the paper's settings.

    python -m train.pde configs/pde/elasticity_flare.py

The paper reports 0.71 % (see `elasticity_flarepp.py`, which differs in the mixer).
"""

import dataclasses
from pathlib import Path

from configs.pde.elasticity_flarepp import config as flarepp

config = dataclasses.replace(
    flarepp,
    model=dataclasses.replace(flarepp.model, mixer="flare"),
    run=Path("runs/elasticity_flare"),
)
