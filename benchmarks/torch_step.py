"""A step on torch: Keras, ours, and block normalization written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.optimizers import OPTIMIZERS, built
from benchmarks.shapes import Shapes, layers

OTHERS = ("SGDNG by hand", "AdamNG by hand")


def new_step(name: str, mode: str, shapes: Shapes) -> Callable[[Any], Any]:
    if name not in OPTIMIZERS:
        return by_hand(name, shapes)
    optimizer, weights = built(name, shapes)

    @torch.no_grad()  # as `fit` calls it
    def step(gradients: Any) -> None:
        optimizer.apply(gradients, weights)

    return step


def by_hand(name: str, shapes: Shapes) -> Callable[[Any], Any]:
    """Block normalization as one would write it in torch: no guards, no extremes."""
    weights = [torch.nn.Parameter(torch.full(s, 0.1)) for s in shapes.values()]
    if name == "SGDNG by hand":
        optimizer = torch.optim.SGD(weights, 1e-4, momentum=0.9, fused=True)
    else:
        optimizer = torch.optim.Adam(weights, 1e-5, fused=True)
    names = [*dict.fromkeys(layers(shapes))]
    layer = torch.tensor([names.index(name) for name in layers(shapes)])

    @torch.no_grad()
    def step(gradients: Any) -> None:
        squares = torch.stack(torch._foreach_norm(gradients)).square()
        sums = torch.zeros(len(names)).index_add(0, layer, squares)
        factors = sums.rsqrt()[layer].unbind()
        for weight, g in zip(weights, torch._foreach_mul(gradients, factors)):
            weight.grad = g
        optimizer.step()

    return step
