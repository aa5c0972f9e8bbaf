"""A step on JAX, jitted, that reuses its buffers: Keras, ours, and optax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.optimizers import OPTIMIZERS, built
from benchmarks.shapes import Shapes, layers

OTHERS = (
    "SGDNG by hand",
    "AdamNG by hand",
    "optax adam",
    "optax lamb",
    "optax lars",
)


def new_step(name: str, mode: str, shapes: Shapes) -> Callable[[Any], Any]:
    update, *held = (with_keras if name in OPTIMIZERS else with_optax)(name, shapes)
    jitted = jax.jit(update, donate_argnums=(0, 1))

    def step(gradients: Any) -> None:
        held[:] = jax.block_until_ready(jitted(*held, gradients))

    return step


def with_keras(name: str, shapes: Shapes) -> Any:
    optimizer, variables = built(name, shapes)

    def update(state: Any, weights: Any, gradients: Any) -> Any:
        weights, state = optimizer.stateless_apply(state, gradients, weights)
        return state, weights

    # Copies, for the jitted step gives away the memory of what it is given.
    state = [jnp.array(v.value) for v in optimizer.variables]
    return update, state, [jnp.array(v.value) for v in variables]


def with_optax(name: str, shapes: Shapes) -> Any:
    normalized = normalize_blocks(layers(shapes))
    transform = {
        "SGDNG by hand": optax.chain(normalized, optax.sgd(1e-4, momentum=0.9)),
        "AdamNG by hand": optax.chain(normalized, optax.adam(1e-5)),
        "optax adam": optax.adam(1e-5),
        "optax lamb": optax.lamb(1e-5),
        "optax lars": optax.lars(1e-5),
    }[name]

    def update(state: Any, weights: Any, gradients: Any) -> Any:
        updates, state = transform.update(gradients, state, weights)
        return state, optax.apply_updates(weights, updates)

    weights = [jnp.full(shape, 0.1) for shape in shapes.values()]
    return update, transform.init(weights), weights


def normalize_blocks(layers: list[str]) -> optax.GradientTransformation:
    """Block normalization as one would chain it by hand: no guards, no extremes."""

    def update(gradients: Any, state: Any, parameters: Any = None) -> Any:
        sums: dict[str, Any] = {}
        for layer, gradient in zip(layers, gradients):
            sums[layer] = sums.get(layer, 0.0) + jnp.sum(jnp.square(gradient))
        factors = {layer: jax.lax.rsqrt(total) for layer, total in sums.items()}
        return [g * factors[layer] for layer, g in zip(layers, gradients)], state

    return optax.GradientTransformation(lambda parameters: optax.EmptyState(), update)
