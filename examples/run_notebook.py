"""Runs `quickstart.ipynb` and saves what it shows, with a hash of its cells.

    pip install -e ".[examples]" nbclient ipykernel
    python examples/run_notebook.py  # two minutes; after every change of a cell

`tests/test_notebook.py` runs it too, and finds saved outputs that are of other cells.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import io
import os
import pathlib
import re
import tempfile
from typing import Any

NOTEBOOK = pathlib.Path(__file__).with_name("quickstart.ipynb")
KEY, HASH = "keras_bng", "sha256 of the code"  # in the notebook's metadata


def read() -> Any:
    import nbformat

    return nbformat.read(NOTEBOOK, as_version=4)


def executed(notebook: Any) -> Any:
    """A copy that has been run, in a process of its own and a folder that goes."""
    from nbclient import NotebookClient

    # Virtual machines may announce AMX and not have it.
    environment = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16", **os.environ}
    environment |= {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
    environment.pop("MPLBACKEND", None)  # the kernel's own shows pictures
    notebook = copy.deepcopy(notebook)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        client = NotebookClient(notebook, timeout=600, resources=resources)
        client.execute(env=environment)
    for cell in code_cells(notebook):
        cell.metadata.pop("execution", None)  # times
        cell.outputs = _kept(cell.outputs)
    return notebook


def _kept(outputs: list[Any]) -> list[Any]:
    """Without what libraries log; what was printed in pieces is joined."""
    kept: list[Any] = []
    for output in outputs:
        if output.get("name") == "stderr":
            continue
        if kept and output.output_type == kept[-1].output_type == "stream":
            kept[-1].text += output.text
        else:
            kept.append(output)
    return kept


def _smaller(png: str) -> str:
    """The same picture with fewer colours, a third of the bytes."""
    from PIL import Image

    file = io.BytesIO()
    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    few = picture.quantize(256, Image.Quantize.MAXCOVERAGE)  # which keeps rare colours
    few.save(file, format="png", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def digest(notebook: Any) -> str:
    """Of the code: other outputs are expected where it changes."""
    code = "\n\n".join(cell.source for cell in code_cells(notebook))
    return hashlib.sha256(code.encode()).hexdigest()


def shown(notebook: Any) -> list[list[Any]]:
    """What each cell shows, but for numbers, which differ from machine to machine.

    Of an output: its kind, what it holds, the words of its first line, and its lines.
    """
    return [
        [_shape(output) for output in cell.outputs] for cell in code_cells(notebook)
    ]


def _shape(output: Any) -> tuple[str, list[str], list[str], int]:
    data = output.get("data", {})
    text = output.get("text", "") or ("" if "image/png" in data else data["text/plain"])
    first = text.partition("\n")[0]
    return (
        output.output_type,
        sorted(data),
        re.findall(r"[^\W\d]+", first),
        len(text.splitlines()),
    )


def main() -> None:
    import nbformat

    notebook = executed(read())
    for output in (o for cell in code_cells(notebook) for o in cell.outputs):
        if "image/png" in output.get("data", {}):
            output.data["image/png"] = _smaller(output.data["image/png"])
    notebook.metadata[KEY] = {HASH: digest(notebook)}
    nbformat.write(notebook, NOTEBOOK)
    print(f"{NOTEBOOK}: {NOTEBOOK.stat().st_size / 1000:.0f} KB")


if __name__ == "__main__":
    main()
