"""The picture of what a `BlockMonitor` recorded, on every backend."""

import struct
import time
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from helpers import compiled, small_data, small_model

from keras_bng import SGDNG, BlockMonitor
from keras_bng.tools import picture


def recorded(relative_step=1e-3, gradient_norm=1.0, steps=10, blocks=3, **history):
    """What a monitor has, with these values everywhere."""
    ones = np.ones((steps, blocks))
    return SimpleNamespace(
        blocks=[f"model/dense_{i}" for i in range(blocks)],
        history={
            "step": np.arange(steps),
            "gradient_norm": gradient_norm * ones,
            "relative_step": relative_step * ones,
            "skipped": 0 * ones,
            **history,
        },
    )


def images(figure, column):
    """The drawn values, and their colours, of all panels of a column."""
    panels = [ax for ax in figure.axes if ax.get_label() == picture.PANELS[column][0]]
    return [ax.collections[0] for ax in panels]


def colours(image):
    return image.to_rgba(image.get_array()).reshape(-1, 4)


def texts(figure):
    figure.canvas.draw()
    return [
        text.get_text() for text in figure.findobj(lambda a: hasattr(a, "get_text"))
    ]


def test_the_picture(rng, tmp_path):
    pytest.importorskip("matplotlib")
    seen, other = BlockMonitor(), BlockMonitor(every=3)
    for monitor, optimizer in ((seen, keras.optimizers.SGD()), (other, SGDNG())):
        model = compiled(small_model(), optimizer)
        model.fit(*small_data(rng), batch_size=8, verbose=0, callbacks=[monitor])
    seen.plot(tmp_path / "new" / "one.png", "SGD")
    picture.plot({"SGD": seen, "SGDNG": other}, tmp_path / "two.png")
    for path in (tmp_path / "new" / "one.png", tmp_path / "two.png"):
        assert path.stat().st_size > 8_000


def test_a_picture_of_zeros_and_skips_is_grey(tmp_path):
    pytest.importorskip("matplotlib")
    nan = np.full((10, 3), np.nan)
    for monitor in (
        recorded(0, 0),
        recorded(skipped=np.ones((10, 3))),
        recorded(np.nan, np.nan, skipped=nan),  # not updated
        recorded(np.inf, np.inf),
    ):
        figure = picture.figure_of({"": monitor})
        for column in (0, 1):
            (image,) = images(figure, column)
            red, green, blue, _ = np.unique(colours(image), axis=0)[0]
            assert len(np.unique(colours(image), axis=0)) == 1
            assert red == green == blue
        picture.plot({"": monitor}, tmp_path / "grey.png")
    assert any("grey" in text.lower() for text in texts(figure))


def test_nothing_to_plot():
    with pytest.raises(ValueError, match="no records yet"):
        BlockMonitor().plot("never.png")
    with pytest.raises(ValueError, match="no records yet"):
        picture.png({"SGD": BlockMonitor()})


def test_relative_steps_have_the_same_colours_in_every_picture():
    pytest.importorskip("matplotlib")
    found = []
    for value in (1e-9, 1e-6, 1e-3, 0.09, 10):
        figure = picture.figure_of({"": recorded(value)})
        (image,) = images(figure, 1)
        assert (image.norm.vmin, image.norm.vmax) == (1e-7, 1e-1)
        assert image.colorbar.extend == "both"
        found.append(colours(image)[0])
    # What is beyond has colours of its own, also beside the ends of the scale.
    found += [image.cmap(0.0), image.cmap(1.0), image.cmap.get_bad()]
    for i, one in enumerate(found):
        for j, other in enumerate(found[:i]):
            near = {i, j} == {3, 6}  # 0.09 is the upper end
            assert near or np.abs(np.subtract(one, other)).sum() > 0.25


def test_the_colour_bar_says_what_is_usual():
    pytest.importorskip("matplotlib")
    figure = picture.figure_of({"": recorded()})
    bar = images(figure, 1)[0].colorbar.ax
    assert any("usual" in text.get_text() for text in bar.texts)
    assert any(sorted(line.get_xdata()) == [1e-4, 1e-2] for line in bar.lines)
    shown = texts(figure)
    assert {"1e-7", "1e-6", "1e-5", "1e-4", "1e-3", "1e-2", "1e-1"} <= set(shown)


def test_gradient_norms_share_a_scale_of_at_least_6_decades():
    pytest.importorskip("matplotlib")
    figure = picture.figure_of({"a": recorded(gradient_norm=0.5), "b": recorded()})
    for image in images(figure, 0):
        assert (image.norm.vmin, image.norm.vmax) == (1e-6, 1)
    monitors = {"a": recorded(gradient_norm=3e-20), "b": recorded(gradient_norm=20)}
    for image in images(picture.figure_of(monitors), 0):
        assert image.norm.vmin == pytest.approx(1e-20)
        assert image.norm.vmax == pytest.approx(100)
        assert image.colorbar is None or image.colorbar.extend == "neither"


def test_each_run_has_a_row_of_its_own():
    pytest.importorskip("matplotlib")
    run = np.array([0] * 4 + [1] + [2] * 5)  # the second has one record
    several = recorded(run=run, step=np.array([0, 1, 2, 3, 4, 0, 1, 2, 3, 4]))
    figure = picture.figure_of({"Adam": several, "SGD": recorded()})
    assert len(images(figure, 0)) == len(images(figure, 1)) == 4
    columns = [image.get_array().shape[1] for image in images(figure, 0)]
    assert columns == [4, 1, 5, 10]
    titles = [ax.get_title(loc="left") for ax in figure.axes]
    assert [t for t in titles if t] == ["Adam run 1", "Adam run 2", "Adam run 3", "SGD"]
    figure = picture.figure_of({"": several})
    assert "run 3" in [ax.get_title(loc="left") for ax in figure.axes]


def test_of_many_runs_the_last_six_are_drawn():
    pytest.importorskip("matplotlib")
    figure = picture.figure_of({"Adam": recorded(run=np.arange(10))})
    titles = [ax.get_title(loc="left") for ax in figure.axes]
    assert [t for t in titles if t] == [f"Adam run {i}" for i in range(5, 11)]
    assert any("last 6 of 10 runs" in text for text in texts(figure))


def test_many_records_are_thinned_out_and_the_last_is_kept():
    pytest.importorskip("matplotlib")
    steps = 20_001
    values = np.ones((steps, 2)) * 1e-3
    values[-1] = 2e-3
    figure = picture.figure_of(
        {"": recorded(steps=steps, blocks=2, relative_step=1, gradient_norm=values)}
    )
    (image,) = images(figure, 0)
    drawn = image.get_array()
    assert 500 <= drawn.shape[1] <= 1000
    assert drawn[0, -1] == 2e-3 and (drawn[:, :-1] == 1e-3).all()
    edges = image.get_coordinates()[0, :, 0]
    assert edges[0] == 0 and edges[-1] > steps - 1
    assert np.diff(edges).max() <= 2 * np.diff(edges).min()  # evenly


def test_png_is_the_same_picture_as_bytes(tmp_path):
    pytest.importorskip("matplotlib")
    monitors = {"a": recorded(), "b": recorded(1e-5)}
    picture.plot(monitors, tmp_path / "picture.png")
    assert picture.png(monitors) == (tmp_path / "picture.png").read_bytes()
    assert picture.png(monitors).startswith(b"\x89PNG")


def test_png_is_fast_and_bounded(rng):
    pytest.importorskip("matplotlib")
    values = 10.0 ** rng.uniform(-9, 0, size=(2000, 18))
    usual = recorded(steps=2000, blocks=18, relative_step=1, gradient_norm=values)
    picture.png({"": usual})
    start = time.perf_counter()
    picture.png({"": usual})
    assert time.perf_counter() - start < 3  # on a machine that is busy
    large = recorded(steps=3000, blocks=300, run=np.arange(3000) // 500)
    width, height = struct.unpack(">II", picture.png({"": large})[16:24])
    assert width < 1200 and height < 4000


@pytest.mark.parametrize("length", [1, 50, 300])
def test_nothing_is_cut_and_the_ends_of_names_are_shown(length):
    pytest.importorskip("matplotlib")
    monitor = recorded(run=np.arange(10))
    monitor.blocks = [f"model/{'n' * length}/query_{i}" for i in range(3)]
    figure = picture.figure_of({"Adam": monitor})
    assert any(text.endswith("n/query_2") for text in texts(figure))
    box = figure.get_tightbbox()  # in inches
    width, height = figure.get_size_inches()
    assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height
    for ax in figure.axes:  # and there is room for what is drawn
        assert ax.get_window_extent().width > 300
