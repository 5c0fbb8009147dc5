"""FLARE on Darcy, at the paper's settings.

    python -m train.pde configs/pde/darcy_flare.py

The paper reports 0.76 % (see `darcy_flarepp.py`, which differs in the mixer).
"""

import dataclasses
from pathlib import Path

from configs.pde.darcy_flarepp import config as flarepp

config = dataclasses.replace(
    flarepp,
    model=dataclasses.replace(flarepp.model, mixer="flare"),
    run=Path("runs/darcy_flare"),
)
