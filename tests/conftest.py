import gc
import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Virtual machines may announce AMX and not have it: bfloat16 would be a SIGILL.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

# With a process a core, torch's threads would wait for each other: 100 times slower.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest

# Frameworks make objects by the million: to look through them all, again and again,
# would be a tenth of the time.
gc.set_threshold(50_000, 10, 20)

# Enough devices to see sums over replicas.
if os.environ["KERAS_BACKEND"] == "tensorflow":
    import tensorflow as tf

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * 2,
    )
elif os.environ["KERAS_BACKEND"] == "jax":
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Neighbours stay with one worker, which may keep what they share."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _fresh_keras():
    import keras

    keras.utils.set_random_seed(0)
    yield
    keras.config.set_dtype_policy("float32")


@pytest.fixture
def without_xla(monkeypatch):
    """Models that ask for XLA do without: compiling one takes longer than its test."""
    import keras

    compile_with = keras.Model.compile

    def compile_without(self, *args, **kwargs):
        compile_with(self, *args, **{**kwargs, "jit_compile": False})

    monkeypatch.setattr(keras.Model, "compile", compile_without)
