"""Every Python snippet of the README runs, one after the other, as a reader would."""

import pathlib
import re

import keras
import pytest

README = pathlib.Path(__file__).parent.parent / "README.md"
SNIPPETS = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.M | re.S)


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="TensorFlow only")
def test_the_snippets_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(SNIPPETS) == 5
    namespace = {}
    for i, snippet in enumerate(SNIPPETS):
        exec(compile(snippet, f"README.md, snippet {i + 1}", "exec"), namespace)
    assert type(namespace["lion"]).__name__ == "LionNG"
    assert len(namespace["scaled"]) == 36


def test_the_readme_names_the_versions_of_setup_cfg():
    setup = (README.parent / "setup.cfg").read_text()
    lowest = re.search(r"keras>=(\S+)", setup)[1]
    python = re.search(r"python_requires = >=(\S+)", setup)[1]
    assert f"Python {python} or later, Keras {lowest} or later" in README.read_text()
