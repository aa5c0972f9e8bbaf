"""The JAX part of `update_step`: our JAX backend beside optax, as one jitted update.

Prints one line of JSON. Called by `python -m benchmarks.update_step`.
"""

from __future__ import annotations

import functools
import json
import math
import os
import sys
import time
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import jax
import jax.numpy as jnp
import keras
import optax

import keras_bng
from benchmarks import timing, variables
from benchmarks.shapes import WORKLOADS, dense

BASE = {
    "AdamNG": "optax NG + adam",
    "Keras Adam": "optax adam",
    "optax NG + adam": "optax adam",
    "optax lamb": "optax adam",
    "optax lars": "optax adam",
}


def normalize_blocks(layers: list[str]) -> optax.GradientTransformation:
    """Block normalization as one would chain it by hand: no guards, no extremes."""

    def update(gradients: Any, state: Any, parameters: Any = None) -> Any:
        sums: dict[str, Any] = {}
        for layer, gradient in zip(layers, gradients):
            sums[layer] = sums.get(layer, 0.0) + jnp.sum(jnp.square(gradient))
        factors = {layer: jax.lax.rsqrt(total) for layer, total in sums.items()}
        return [g * factors[layer] for layer, g in zip(layers, gradients)], state

    return optax.GradientTransformation(lambda parameters: optax.EmptyState(), update)


def with_optax(transform: optax.GradientTransformation, weights: list[Any]) -> Any:
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(state: Any, weights: Any, gradients: Any) -> Any:
        updates, state = transform.update(gradients, state, weights)
        return state, optax.apply_updates(weights, updates)

    return step, transform.init(weights), weights


def with_keras(optimizer: keras.optimizers.Optimizer, shapes: Any) -> Any:
    values = variables.make(shapes)
    optimizer.build(values)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(state: Any, weights: Any, gradients: Any) -> Any:
        weights, state = optimizer.stateless_apply(state, gradients, weights)
        return state, weights

    # Copies, for the jitted step gives away the memory of what it is given.
    state = [jnp.array(v.value) for v in optimizer.variables]
    return step, state, [jnp.array(v.value) for v in values]


def measure(shapes: dict[str, tuple[int, ...]], rounds: int) -> dict[str, Any]:
    gradients = variables.gradients(shapes)
    layers = [path.rsplit("/", 1)[0] for path in shapes]
    transforms = {
        "optax adam": optax.adam(1e-5),
        "optax NG + adam": optax.chain(normalize_blocks(layers), optax.adam(1e-5)),
        "optax lamb": optax.lamb(1e-5),
        "optax lars": optax.lars(1e-5),
    }
    made = {
        name: with_optax(transform, [jnp.full(s, 0.1) for s in shapes.values()])
        for name, transform in transforms.items()
    }
    made["Keras Adam"] = with_keras(keras.optimizers.Adam(1e-5), shapes)
    made["AdamNG"] = with_keras(keras_bng.AdamNG(1e-5), shapes)

    jax.jit(jnp.linalg.norm)(gradients[0])  # so that the first case does not pay for it
    first, cases = {}, {}
    for name, (step, state, weights) in made.items():
        start = time.perf_counter()
        held = [*jax.block_until_ready(step(state, weights, gradients))]
        first[name] = [time.perf_counter() - start]

        def case(step: Any = step, held: list[Any] = held) -> None:
            held[:] = jax.block_until_ready(step(*held, gradients))

        cases[name] = case
        case()
    times = timing.interleaved(cases, rounds, seconds=0.2 * rounds)
    rows = {}
    for name in times:
        rows[name] = {
            "seconds": timing.quartiles(times[name])[1],
            "first_seconds": first[name],
        }
        if name in BASE:
            base = BASE[name]
            rows[name]["base"] = base
            rows[name]["ratio"] = timing.ratio(times[name], times[base])
            rows[name]["first_ratio"] = timing.ratio(first[name], first[base])
    parameters = sum(map(math.prod, shapes.values()))
    return {"parameters": parameters, "variables": len(shapes), "rows": rows}


def main() -> None:
    rounds, quick = int(sys.argv[1]), "quick" in sys.argv[2:]
    workloads = {"3 dense 64": dense(3, 64)} if quick else WORKLOADS
    results = {name: measure(shapes, rounds) for name, shapes in workloads.items()}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
