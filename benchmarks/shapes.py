"""The variables of five models, by path and shape: nothing else matters to a step."""

from __future__ import annotations

from itertools import pairwise

Shapes = dict[str, tuple[int, ...]]


def mlp() -> Shapes:
    """The paper's MLP of 18 layers for MNIST."""
    widths = [784, *[100] * 17, 10]
    shapes: Shapes = {}
    for i, (inputs, units) in enumerate(pairwise(widths)):
        shapes[f"dense_{i}/kernel"] = (inputs, units)
        shapes[f"dense_{i}/bias"] = (units,)
    return shapes


def resnet(depth: int) -> Shapes:
    """ResNet-20, 32, ..., 110 of He et al. for CIFAR-10."""
    shapes: Shapes = {}
    channels, count = 3, 0
    for width in (16, 32, 64):
        blocks = (depth - 2) // 3 + (width == 16)  # the first convolution comes on top
        for _ in range(blocks):
            shapes[f"conv_{count}/kernel"] = (3, 3, channels, width)
            shapes[f"norm_{count}/gamma"] = (width,)
            shapes[f"norm_{count}/beta"] = (width,)
            channels, count = width, count + 1
    return {**shapes, "dense/kernel": (64, 10), "dense/bias": (10,)}


def dense(layers: int, width: int) -> Shapes:
    shapes: Shapes = {}
    for i in range(layers):
        shapes[f"dense_{i}/kernel"] = (width, width)
        shapes[f"dense_{i}/bias"] = (width,)
    return shapes


def language_model(words: int = 10_000, units: int = 200) -> Shapes:
    shapes: Shapes = {"embedding/embeddings": (words, units)}
    for i in range(2):
        shapes[f"lstm_{i}/lstm_cell/kernel"] = (units, 4 * units)
        shapes[f"lstm_{i}/lstm_cell/recurrent_kernel"] = (units, 4 * units)
        shapes[f"lstm_{i}/lstm_cell/bias"] = (4 * units,)
    return {**shapes, "dense/kernel": (units, words), "dense/bias": (words,)}


def layers(shapes: Shapes) -> list[str]:
    """The layer of each variable."""
    return [path.rsplit("/", 1)[0] for path in shapes]


LARGE = "6 dense 2048"  # 25 M parameters
QUICK = "3 dense 64"  # not one of the workloads: only to see that all works
WORKLOADS = {
    "MLP": mlp(),
    "ResNet-20": resnet(20),
    "ResNet-110": resnet(110),
    LARGE: dense(6, 2048),
    "LSTM": language_model(),
}
SPARSE_ROWS = 4000  # batch 100, 40 words: the rows of an embedding that a step touches
