"""What other packages make of a layer's gradient, small, large or broken.

    pip install -e ".[benchmarks]" torch
    python -m benchmarks.beside

A layer has a kernel and a bias. The table has the norm of their gradient, of both as
one, after what each package has that comes nearest to normalizing it; 1 is what the
method asks for. Not a matter of speed: `docs/beside.md` has what this prints.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version

import keras
import numpy as np

import keras_bng

Arrays = list[np.ndarray]
SCALES = (1.0, 1e-6, 1e-11, 1e-25, 1e25, 0.0)


def ours(gradients: Arrays) -> Arrays:
    weights = [keras.Variable(np.ones_like(g), name="w") for g in gradients]
    blocks = keras_bng.partition(weights, lambda variable: "layer")
    scaled = keras_bng.normalize(
        [keras.ops.convert_to_tensor(g) for g in gradients], weights, blocks
    )
    return [keras.ops.convert_to_numpy(g) for g in scaled]


def keras_clipnorm(gradients: Arrays) -> Arrays:
    weights = [keras.Variable(np.zeros_like(g)) for g in gradients]
    sgd = keras.optimizers.SGD(1.0, clipnorm=1.0)
    sgd.apply([keras.ops.convert_to_tensor(g) for g in gradients], weights)
    return [-w.numpy() for w in weights]


def optax_norm(eps: float) -> Callable[[Arrays], Arrays]:
    def transformed(gradients: Arrays) -> Arrays:
        import optax

        normalize = optax.normalize_by_update_norm(eps=eps)
        updates, _ = normalize.update(gradients, normalize.init(gradients))
        return [np.asarray(u) for u in updates]

    return transformed


def torch_clip(gradients: Arrays) -> Arrays:
    import torch

    weights = [torch.nn.Parameter(torch.zeros(g.shape)) for g in gradients]
    for weight, g in zip(weights, gradients):
        weight.grad = torch.tensor(g)
    torch.nn.utils.clip_grad_norm_(weights, 1.0)
    return [weight.grad.numpy() for weight in weights]


NEAREST: dict[str, tuple[str, Callable[[Arrays], Arrays]]] = {
    "keras_bng: `normalize`": ("keras_bng", ours),
    "Keras: `clipnorm=1`": ("keras", keras_clipnorm),
    "optax: `normalize_by_update_norm()`": ("optax", optax_norm(1e-6)),
    "optax: the same, `eps=0`": ("optax", optax_norm(0.0)),
    "torch: `clip_grad_norm_(layer, 1)`": ("torch", torch_clip),
}


def layer_gradient(scale: float) -> Arrays:
    rng = np.random.default_rng(0)
    parts = [rng.normal(size=(20, 10)), rng.normal(size=10)]
    length = np.sqrt(sum(np.square(part).sum() for part in parts))
    return [(part / length * scale).astype("float32") for part in parts]


def norm(arrays: Arrays) -> float:
    return float(np.sqrt(sum(np.square(a, dtype="float64").sum() for a in arrays)))


def table() -> str:
    header = ["norm of the gradient", *(f"{scale:g}" for scale in SCALES)]
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for name, (package, transform) in NEAREST.items():
        norms = [norm(transform(layer_gradient(scale))) for scale in SCALES]
        cells = [f"{name}, {version(package)}", *(f"{x:.2g}" for x in norms)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
