"""All Python snippets of README, CONTRIBUTING and docs run, page by page, in order."""

import pathlib
import re
import subprocess
import sys

import keras
import pytest

from benchmarks import targets

ROOT = pathlib.Path(__file__).parent.parent
README = ROOT / "README.md"
PATTERN = r"^(<!--[^\n]*-->\n)?```python\n(.*?)^```"
PAGES = {
    page.name: re.findall(PATTERN, page.read_text(), re.M | re.S)
    for page in (README, ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md")))
}
OTHERS = [name for name, snippets in PAGES.items() if snippets and name != README.name]


def run_snippets(page, tag, last_line, folder):
    """In a process of their own, as a reader would: strategies do not mix in one."""
    code = [c for comment, c in PAGES[page] if comment.strip("<!- >\n") == tag]
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
    run_snippets(README.name, "", last_line, tmp_path)
    assert (tmp_path / "trainer" / "saved_model.pb").exists()


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="JAX only")
def test_the_jax_snippet_runs(tmp_path):
    run_snippets(README.name, "KERAS_BACKEND=jax", "assert len(state) == 7", tmp_path)


def test_the_other_pages_are_these():
    assert OTHERS == ["CONTRIBUTING.md", "guide.md", "how.md", "index.md"]
    tags = {comment for page in OTHERS for comment, _ in PAGES[page]}
    assert tags == {""}


@pytest.mark.parametrize("page", OTHERS)
def test_the_snippets_of_the_other_pages_run_on_every_backend(page, tmp_path):
    run_snippets(page, "", "", tmp_path)


def test_the_site_has_a_page_for_each_file_of_docs():
    site = (ROOT / "mkdocs.yml").read_text()
    for page in ROOT.glob("docs/*.md"):
        assert f": {page.name}" in site


def test_every_snippet_is_run_by_some_test():
    tags = {comment.strip("<!- >\n") for comment, _ in PAGES[README.name]}
    assert tags == {"", "KERAS_BACKEND=jax", "two processes"}  # see test_replicas.py


def test_the_readme_names_the_versions_of_setup_cfg():
    setup = (README.parent / "setup.cfg").read_text()
    lowest = re.search(r"keras>=(\S+)", setup)[1]
    python = re.search(r"python_requires = >=(\S+)", setup)[1]
    assert f"Python {python} or later, Keras {lowest} or later" in README.read_text()


def test_the_tables_of_speed_are_those_of_the_published_results():
    assert targets.small_table() in README.read_text()
    assert targets.table() in (ROOT / "docs" / "speed.md").read_text()
