"""The variables of four models, by path and shape: nothing else matters to a step."""

from __future__ import annotations


def resnet(depth: int) -> dict[str, tuple[int, ...]]:
    """ResNet-20, 32, ..., 110 of He et al. for CIFAR-10."""
    shapes: dict[str, tuple[int, ...]] = {}
    channels, count = 3, 0
    for width in (16, 32, 64):
        blocks = (depth - 2) // 3 + (width == 16)  # the first convolution comes on top
        for _ in range(blocks):
            shapes[f"conv_{count}/kernel"] = (3, 3, channels, width)
            shapes[f"norm_{count}/gamma"] = (width,)
            shapes[f"norm_{count}/beta"] = (width,)
            channels, count = width, count + 1
    return {**shapes, "dense/kernel": (64, 10), "dense/bias": (10,)}


def dense(layers: int, width: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(layers):
        shapes[f"dense_{i}/kernel"] = (width, width)
        shapes[f"dense_{i}/bias"] = (width,)
    return shapes


def language_model(words: int = 10_000, units: int = 200) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"embedding/embeddings": (words, units)}
    for i in range(2):
        shapes[f"lstm_{i}/lstm_cell/kernel"] = (units, 4 * units)
        shapes[f"lstm_{i}/lstm_cell/recurrent_kernel"] = (units, 4 * units)
        shapes[f"lstm_{i}/lstm_cell/bias"] = (4 * units,)
    return {**shapes, "dense/kernel": (units, words), "dense/bias": (words,)}


WORKLOADS = {
    "ResNet-20": resnet(20),
    "ResNet-110": resnet(110),
    "6 dense 2048": dense(6, 2048),
    "LSTM": language_model(),
}
SPARSE_ROWS = 4000  # batch 100, 40 words: the rows of an embedding that a step touches
