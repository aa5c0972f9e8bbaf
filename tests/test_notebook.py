"""`examples/quickstart.ipynb` runs, and what is saved in it is what its cells show."""

import keras
import pytest
import run_notebook

pytest.importorskip("nbclient", reason="the notebook runs with nbclient and ipykernel")
pytest.importorskip("ipykernel", reason="the notebook runs with nbclient and ipykernel")
pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="it is trained on TensorFlow"
)
STALE = "run `python examples/run_notebook.py`, and look at the pictures"


def test_the_saved_outputs_are_of_the_present_cells():
    notebook = run_notebook.read()
    saved = notebook.metadata[run_notebook.KEY]
    assert saved == {run_notebook.HASH: run_notebook.digest(notebook)}, STALE


def test_every_picture_is_saved_and_the_file_is_small():
    pictures = [
        output
        for cell in run_notebook.code_cells(run_notebook.read())
        for output in cell.outputs
        if "image/png" in output.get("data", {})
    ]
    assert len(pictures) == 3
    assert run_notebook.NOTEBOOK.stat().st_size < 400_000


@pytest.mark.long
def test_a_new_run_shows_what_is_saved():
    notebook = run_notebook.read()
    assert run_notebook.shown(run_notebook.executed(notebook)) == run_notebook.shown(
        notebook
    ), STALE


def test_another_cell_another_table_or_a_lost_picture_is_found():
    notebook = run_notebook.read()
    before = run_notebook.digest(notebook), run_notebook.shown(notebook)
    code = run_notebook.code_cells(notebook)
    code[-1].source += "\n"
    assert run_notebook.digest(notebook) != before[0]
    tables = [o for cell in code for o in cell.outputs if "text" in o]
    tables[0].text = tables[0].text.replace("1", "2")  # other numbers are not stale
    assert run_notebook.shown(notebook) == before[1]
    tables[0].text = tables[0].text.replace("test loss", "loss")
    assert run_notebook.shown(notebook) != before[1]
    notebook = run_notebook.read()
    for cell in run_notebook.code_cells(notebook):
        for output in cell.outputs:
            output.get("data", {}).pop("image/png", None)
    assert run_notebook.shown(notebook) != before[1]
