"""The package: what an index shows of the README, and on what the settings agree."""

import configparser
import importlib.util
import pathlib
import re

import pytest

import keras_bng

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ADDRESS = "https://github.com/owner/name"
CODE = re.compile(r"^```.*?^```", re.M | re.S)
HTML = r"<(?:img|a|source)[^>]*?(?:src|href|srcset)=\"([^\"]+)"
TARGETS = re.compile(rf"\]\(([^)\s]+)\)|{HTML}")


def its_setup():
    spec = importlib.util.spec_from_file_location("its_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shown(address):
    return its_setup().description(README, address, "abc")


def targets(text):
    found = ("".join(pair) for pair in TARGETS.findall(CODE.sub("", text)))
    return [target for target in found if not target.startswith("#")]


@pytest.mark.parametrize("address", [None, ADDRESS])
def test_an_index_gets_no_relative_figure_and_no_relative_link(address):
    assert any("://" not in target for target in targets(README))
    assert all(re.match("https?://", target) for target in targets(shown(address)))


def test_with_an_address_each_figure_is_where_it_was():
    before = [target for target in targets(README) if "://" not in target]
    after = [target for target in targets(shown(ADDRESS)) if ADDRESS in target]
    assert len(before) == len(after) > 0
    for old, new in zip(before, after):
        kind = "raw" if old.endswith((".png", ".svg")) else "blob"
        assert new == f"{ADDRESS}/{kind}/abc/{old}"
        assert (ROOT / old.partition("#")[0]).exists()


def test_without_an_address_captions_and_the_names_of_files_stay():
    text = shown(None)
    for caption in re.findall(r"!\[([^\]]+)\]\((?!http)", README):
        assert f"(Figure in the repository: {caption}.)" in text
    for path in re.findall(r"(?<!!)\[[^\]]+\]\((?!http|#)([^)#\s]+)", README):
        assert path in text


@pytest.mark.parametrize("address", [None, ADDRESS])
def test_code_is_shown_as_it_is(address):
    assert CODE.findall(shown(address)) == CODE.findall(README)


def settings():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def test_the_classifiers_name_the_pythons_that_are_tested():
    classifiers = settings()["metadata"]["classifiers"]
    named = set(re.findall(r"Python :: (3\.\d+)", classifiers))
    lowest = settings()["options"]["python_requires"].removeprefix(">=")
    assert min(named, key=lambda v: int(v.split(".")[1])) == lowest
    tested = re.search(r"set -- (3[\d. ]+)", (ROOT / ".ci" / "pythons").read_text())[1]
    # The workflow's own Python, on which the whole suite runs, is the one between.
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    whole = re.search(r'PYTHON: "(3\.\d+)"', workflow)[1]
    assert named == {*tested.split(), whole}


def test_the_version_is_the_same_wherever_it_is_written():
    version = keras_bng.__version__
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    changelog = (ROOT / "CHANGELOG.md").read_text()
    newest = re.search(r"^## (\S+) \((\d{4}-\d\d-\d\d)\)$", changelog, re.M)
    assert newest[1] == version
    assert f"\ndate-released: {newest[2]}\n" in (ROOT / "CITATION.cff").read_text()
