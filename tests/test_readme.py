"""Every Python snippet of the README runs, one after the other, as a reader would."""

import pathlib
import re
import subprocess
import sys

import keras
import pytest

from benchmarks import targets

README = pathlib.Path(__file__).parent.parent / "README.md"
PATTERN = r"^(<!--[^\n]*-->\n)?```python\n(.*?)^```"
SNIPPETS = re.findall(PATTERN, README.read_text(), re.M | re.S)


def run_snippets(tag, last_line, folder):
    """In a process of their own, as a reader would: strategies do not mix in one."""
    code = [c for comment, c in SNIPPETS if comment.strip("<!- >\n") == tag]
    result = subprocess.run(
        [sys.executable, "-c", "\n".join([*code, last_line])],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="TensorFlow only")
def test_the_snippets_run_in_order(tmp_path):
    last_line = "assert type(lion).__name__ == 'LionNG' and len(scaled) == 36"
    run_snippets("", last_line, tmp_path)
    assert (tmp_path / "trainer" / "saved_model.pb").exists()


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="JAX only")
def test_the_jax_snippet_runs(tmp_path):
    run_snippets("KERAS_BACKEND=jax", "assert len(state) == 7", tmp_path)


def test_every_snippet_is_run_by_some_test():
    tags = {comment.strip("<!- >\n") for comment, _ in SNIPPETS}
    assert tags == {"", "KERAS_BACKEND=jax", "two processes"}  # see test_replicas.py


def test_the_readme_names_the_versions_of_setup_cfg():
    setup = (README.parent / "setup.cfg").read_text()
    lowest = re.search(r"keras>=(\S+)", setup)[1]
    python = re.search(r"python_requires = >=(\S+)", setup)[1]
    assert f"Python {python} or later, Keras {lowest} or later" in README.read_text()


def test_the_table_of_speed_is_that_of_the_published_results():
    assert targets.table() in README.read_text()
