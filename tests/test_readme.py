"""All Python snippets of README, CONTRIBUTING and docs run, page by page, in order."""

import json
import os
import pathlib
import re
import subprocess
import sys

import keras
import pytest

import keras_bng
from benchmarks import scaling, targets

ROOT = pathlib.Path(__file__).parent.parent
README = ROOT / "README.md"
PATTERN = r"^(<!--[^\n]*-->\n)?```python\n(.*?)^```"
# The snippets of devices.md need several processes: see test_processes_*.py.
PAGES = {
    page.name: re.findall(PATTERN, page.read_text(), re.M | re.S)
    for page in (README, ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md")))
    if page.name != "devices.md"
}
WITH_SNIPPETS = [name for name, snippets in PAGES.items() if snippets]
ON_EVERY_BACKEND, THIS_BACKEND = "", f"KERAS_BACKEND={keras.backend.backend()}"


def tag(comment):
    return comment.strip("<!- >\n")


def run(code, folder):
    """In a process of its own, as a reader would."""
    # On a busy machine torch's threads wait for each other 100 times as long as they
    # compute.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr[-3000:]


LAST_LINES = {
    README.name: "assert accuracy > 0.95",
    "backends.md": "assert len(scaled) == 4",
    "guide.md": "import os; assert os.path.exists('rates.png')",
    "index.md": "import os; assert os.path.exists('blocks.png')",
}


@pytest.mark.parametrize("page", WITH_SNIPPETS)
def test_the_snippets_of_a_page_run_in_order_on_every_backend(page, tmp_path):
    tags = ON_EVERY_BACKEND, THIS_BACKEND
    code = [code for comment, code in PAGES[page] if tag(comment) in tags]
    run("\n".join([*code, LAST_LINES.get(page, "")]), tmp_path)


def test_these_pages_have_snippets():
    assert sorted(WITH_SNIPPETS) == [
        "CONTRIBUTING.md",
        "README.md",
        "backends.md",
        "caveats.md",
        "guide.md",
        "how.md",
        "index.md",
        "numerics.md",
        "saving.md",
    ]


def test_every_snippet_is_run_on_some_backend():
    tags = {tag(comment) for snippets in PAGES.values() for comment, _ in snippets}
    of_one = {f"KERAS_BACKEND={name}" for name in ("tensorflow", "jax", "torch")}
    assert tags <= {ON_EVERY_BACKEND, *of_one}


def test_the_readme_is_read_in_three_minutes():
    assert len(README.read_text().splitlines()) <= 150


def test_every_link_of_the_readme_leads_somewhere():
    links = re.findall(r"\]\(([^)#]+)", README.read_text())
    assert len(links) > 10
    for link in links:
        assert link.startswith("https://") or (ROOT / link).exists(), link


def test_the_site_has_a_page_for_each_file_of_docs():
    site = (ROOT / "mkdocs.yml").read_text()
    for page in ROOT.glob("docs/*.md"):
        assert f": {page.name}" in site


def test_the_reference_has_every_public_name():
    reference = (ROOT / "docs" / "reference.md").read_text()
    for name in {*keras_bng.__all__} - {"__version__"}:
        assert f"::: keras_bng.{name}\n" in reference, name


def test_contributing_has_every_function_that_a_backend_is_asked_for():
    modules = [p for p in ROOT.glob("keras_bng/**/*.py") if p.parent.name != "backend"]
    code = "".join(path.read_text() for path in modules)
    asked_for = {*re.findall(r"(?<!keras\.)\bbackend\.(\w+)", code)} - {"common", "py"}
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    assert len(asked_for) > 20
    for name in asked_for:
        assert f"`{name}`" in contributing, name


def test_the_readme_names_the_versions_of_setup_cfg():
    setup = (README.parent / "setup.cfg").read_text()
    lowest = re.search(r"keras>=(\S+)", setup)[1]
    python = re.search(r"python_requires = >=(\S+)", setup)[1]
    assert f"Python {python} or later, Keras {lowest} or later" in README.read_text()


def test_the_tables_of_speed_are_those_of_the_published_results():
    assert targets.readme_table() in README.read_text()
    speed = (ROOT / "docs" / "speed.md").read_text()
    assert targets.small_table() in speed
    assert targets.table() in speed
    published = json.loads((ROOT / "benchmarks/results/scaling.json").read_text())
    devices = (ROOT / "docs" / "devices.md").read_text()
    assert scaling.table(published["results"]) in devices
