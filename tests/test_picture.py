"""The picture of what a `BlockMonitor` recorded, on every backend."""

import numpy as np
import pytest
from test_monitor import MAKE, watched

from keras_bng import BlockMonitor
from keras_bng.tools import monitor


def test_the_picture(rng, tmp_path):
    pytest.importorskip("matplotlib")
    _, seen = watched(MAKE["SGD"], rng)
    _, other = watched(MAKE["SGDNG"], rng, every=3)
    seen.plot(tmp_path / "new" / "one.png", "SGD")
    monitor.plot({"SGD": seen, "SGDNG": other}, tmp_path / "two.png")
    for path in (tmp_path / "new" / "one.png", tmp_path / "two.png"):
        assert path.stat().st_size > 8_000


def test_a_picture_of_zeros_and_skips_is_grey(tmp_path):
    pytest.importorskip("matplotlib")
    seen = BlockMonitor()
    seen.blocks = ["a", "b"]
    zeros = np.zeros((len(monitor.COLUMNS), 2))
    seen._rows = [(0, zeros), (1, zeros)]
    seen.plot(tmp_path / "zeros.png")


def test_nothing_to_plot():
    with pytest.raises(ValueError, match="no records yet"):
        BlockMonitor().plot("never.png")
