"""Every Python snippet of the README runs, one after the other, as a reader would."""

import pathlib
import re

import keras
import pytest

README = pathlib.Path(__file__).parent.parent / "README.md"
PATTERN = r"^(<!--[^\n]*-->\n)?```python\n(.*?)^```"
SNIPPETS = re.findall(PATTERN, README.read_text(), re.M | re.S)


def run_snippets(tag):
    namespace = {}
    for i, (comment, snippet) in enumerate(SNIPPETS):
        if comment.strip("<!- >\n") == tag:
            exec(compile(snippet, f"README.md, snippet {i + 1}", "exec"), namespace)
    return namespace


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="TensorFlow only")
def test_the_snippets_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = run_snippets("")
    assert type(namespace["lion"]).__name__ == "LionNG"
    assert len(namespace["scaled"]) == 36
    assert (tmp_path / "trainer" / "saved_model.pb").exists()


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="JAX only")
def test_the_jax_snippet_runs():
    assert len(run_snippets("KERAS_BACKEND=jax")["state"]) == 7


def test_every_snippet_is_run_by_some_test():
    tags = {comment.strip("<!- >\n") for comment, _ in SNIPPETS}
    assert tags == {"", "KERAS_BACKEND=jax", "two processes"}  # see test_replicas.py


def test_the_readme_names_the_versions_of_setup_cfg():
    setup = (README.parent / "setup.cfg").read_text()
    lowest = re.search(r"keras>=(\S+)", setup)[1]
    python = re.search(r"python_requires = >=(\S+)", setup)[1]
    assert f"Python {python} or later, Keras {lowest} or later" in README.read_text()
