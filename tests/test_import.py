"""`import keras_bng` is free: what works after `import keras` works after it, too."""

import os
import subprocess
import sys

import keras
import pytest

BACKEND = keras.backend.backend()


def run(code):
    """In a new process, with one device, as a user has it."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "KERAS_BACKEND": BACKEND, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def test_it_makes_no_variable():
    run("""
import keras

def refuse(self, *args, **kwargs):
    raise AssertionError("a variable at import")

keras.Variable.__init__ = refuse
import keras_bng
""")


@pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow's devices")
def test_tensorflow_devices_can_be_configured_after_it():
    out = run("""
import keras, keras_bng
import tensorflow as tf

cpu = tf.config.list_physical_devices("CPU")[0]
two = [tf.config.LogicalDeviceConfiguration()] * 2
tf.config.set_logical_device_configuration(cpu, two)
print(len(tf.config.list_logical_devices("CPU")))
""")
    assert out.split() == ["2"]


@pytest.mark.skipif(BACKEND != "jax", reason="JAX's processes")
def test_jax_can_be_distributed_after_it():
    out = run("""
import socket
import keras, keras_bng
import jax

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{free.getsockname()[1]}"
jax.distributed.initialize(address, num_processes=1, process_id=0)
print(jax.process_count())
""")
    assert out.split() == ["1"]


@pytest.mark.skipif(BACKEND != "torch", reason="torch's devices")
def test_torch_is_not_asked_for_a_device():
    run("""
import keras, keras_bng
import torch

assert not torch.cuda.is_initialized()
""")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_can_train():
    out = run("""
import multiprocessing
import numpy as np
import keras, keras_bng

def child(queue):
    layers = [keras.Input((4,)), keras.layers.Dense(300), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(keras_bng.AdamNG(), "mse")
    x = np.random.rand(64, 4).astype("float32")
    model.fit(x, x[:, :1], verbose=0)
    queue.put(1)

fork = multiprocessing.get_context("fork")
queue = fork.Queue()
process = fork.Process(target=child, args=(queue,))
process.start()
process.join(120)
print("hangs" if process.is_alive() else process.exitcode)
process.kill()
""")
    assert out.split() == ["0"]
