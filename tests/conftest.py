"""Eight CPU devices, so that every sharding test runs on every machine."""

import jax

jax.config.update("jax_num_cpu_devices", 8)
