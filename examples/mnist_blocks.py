"""What happens in each layer: 18 layers of sigmoid units on MNIST, Adam and AdamNG.

Not in the paper: the picture behind its figure. `keras_bng.BlockMonitor` records every
layer's gradient and step while `mnist_mlp.py`'s model trains.

    pip install -e ".[examples]"
    python examples/mnist_blocks.py                           # a minute
    python examples/mnist_blocks.py --algorithms SGDM SGDMNG  # or any others

Measured on all of MNIST, 3 epochs, seed 0, 2 cores, half a minute: the first layer's
gradient has norm 4.8e-11 at the start, the last one's 1.3. With Adam the first layer
moves by 1e-8 of its length a step, and its gradient shrinks further. With AdamNG all
move alike, and after 800 steps all gradients have norms around 1: nothing vanishes
any more. The figure is in the README.
"""

from __future__ import annotations

from typing import Any

import data
import harness
import keras
import mnist_mlp
import report

from keras_bng import BlockMonitor
from keras_bng.tools import picture

DEPTH = 18
EVERY = 10


def train(algorithm: str, epochs: int, digits: data.Data) -> BlockMonitor:
    print(f"\n{algorithm}", flush=True)
    keras.backend.clear_session()  # so that both have the same names of layers
    keras.utils.set_random_seed(0)
    model = mnist_mlp.build_model(DEPTH)
    model.compile(
        optimizer=harness.optimizer(
            algorithm, mnist_mlp.RATES[algorithm][DEPTH], name=algorithm
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    blocks = BlockMonitor(every=EVERY)
    model.fit(
        *digits.train,
        batch_size=mnist_mlp.BATCH,
        epochs=epochs,
        verbose=harness.verbosity(),
        callbacks=[blocks],
    )
    return blocks


def norms_table(monitors: dict[str, BlockMonitor]) -> str:
    rows = []
    for algorithm, blocks in monitors.items():
        for column, step in ((0, "first"), (-1, "last")):
            seen = {name: values[column] for name, values in blocks.history.items()}
            rows.append(
                [
                    algorithm,
                    f"{step} ({seen['step']})",
                    *(
                        f"{seen[name][layer]:.1e}"
                        for name in ("gradient_norm", "relative_step")
                        for layer in (0, -1)
                    ),
                ]
            )
    header = ["algorithm", "step", "gradient norm, layer 1", f"layer {DEPTH}"]
    header += ["relative step, layer 1", f"layer {DEPTH}"]
    return report.table(header, rows)


def main(arguments: Any = None) -> dict[str, BlockMonitor]:
    parser = harness.parser(__doc__, mnist_mlp.PAPER)
    options = harness.parse(parser, arguments)
    if options.seeds:
        parser.error("--seeds: a picture is of one run; the seed is 0")
    digits = data.mnist(options.data, options.data_dir)
    epochs = options.epochs or {"full": 3, "sample": 45}[digits.kind]
    monitors = {
        algorithm: train(algorithm, epochs, digits)
        for algorithm in options.algorithms or ("Adam", "AdamNG")
    }
    path = options.out / "mnist_blocks.png"
    picture.plot(monitors, path)
    print(f"\n{norms_table(monitors)}\n\n{digits.label}; epochs {epochs}, seed 0.")
    print(f"\nFigure: {path}")
    return monitors


if __name__ == "__main__":
    main()
