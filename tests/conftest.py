"""Eight CPU devices, so that every sharding test runs on every machine."""

import atexit
import gc
import os
import shutil
import tempfile
from pathlib import Path

# Runs that differ in what they do, not in what they compile, compile once. An
# environment variable, so that the processes that tests start share it.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _CACHE = tempfile.mkdtemp(prefix="flaxmix-test-")
    atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _CACHE
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
# Nearly all the time of the suite is compilation. `make slow` repeats the tests of
# numbers with the optimised code that users run.
if "FLAXMIX_TEST_OPTIMIZED" not in os.environ:
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(autouse=True)
def few_programs():
    """Drops compiled programs before the system has no room for more.

    Each takes some memory maps, of which Linux gives a process 65,530.
    """
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()
        gc.collect()
