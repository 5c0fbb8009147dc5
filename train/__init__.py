"""Training from a checkout: `python -m train.pde configs/pde/...`."""
