"""`examples/builders/`: TFDS's own tests, and damaged or missing files."""

import hashlib
import pathlib
import shutil
from unittest import mock

import keras
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("the examples are for TensorFlow", allow_module_level=True)

import data
import tensorflow_datasets as tfds
from builders.penn_treebank import penn_treebank_dataset_builder as penn
from builders.rotten_tomatoes import rotten_tomatoes_dataset_builder as rotten

BUILDERS = pathlib.Path(penn.__file__).parents[1]


def dummy(name):
    return BUILDERS / name / "dummy_data" / name


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def tokens(path):
    return len(path.read_text().split()) + len(path.read_text().splitlines())


PENN = {
    "FILES": {
        split: (name, sha256(path), tokens(path))
        for split, (name, *_) in penn.Builder.FILES.items()
        for path in [dummy("penn_treebank") / name]
    },
    "WORDS": 11,
}
ROTTEN = {
    "FILES": {
        name: sha256(dummy("rotten_tomatoes") / name) for name in rotten.Builder.FILES
    },
    "SENTENCES": 6,
}
CASES = [(penn.Builder, PENN), (rotten.Builder, ROTTEN)]


@pytest.fixture
def small():
    """The builders, expecting the dummy data."""
    with (
        mock.patch.multiple(penn.Builder, **PENN),
        mock.patch.multiple(rotten.Builder, **ROTTEN),
    ):
        yield


class PennTreebankTest(tfds.testing.DatasetBuilderTestCase):
    DATASET_CLASS = penn.Builder
    SPLITS = {"train": 3, "validation": 1, "test": 2}

    def setUp(self):
        super().setUp()
        self.enter_context(mock.patch.multiple(penn.Builder, **PENN))


class RottenTomatoesTest(tfds.testing.DatasetBuilderTestCase):
    DATASET_CLASS = rotten.Builder
    SPLITS = {"train": 11, "validation": 1}
    OVERLAPPING_SPLITS = ()

    def setUp(self):
        super().setUp()
        self.enter_context(mock.patch.multiple(rotten.Builder, **ROTTEN))


def prepared(cls, data_dir, manual=None):
    builder = cls(data_dir=data_dir)
    config = tfds.download.DownloadConfig(manual_dir=manual)
    builder.download_and_prepare(download_config=config)
    return builder


@pytest.mark.parametrize("cls, expected", CASES)
def test_manual_files_are_used(cls, expected, tmp_path, small):
    builder = prepared(cls, tmp_path, dummy(cls.name).parent)
    assert builder.is_prepared()


def test_sentences_keep_their_order_and_end(tmp_path, small):
    builder = prepared(penn.Builder, tmp_path, dummy("penn_treebank").parent)
    found = [x["text"] for x in tfds.as_numpy(builder.as_dataset(split="train"))]
    assert found == [
        b"the cat sat on the mat <eos>",
        b"a <unk> ran N miles <eos>",
        b"the cat ran <eos>",
    ]


def test_reviews_are_labelled_and_split_once_and_for_all(tmp_path, small):
    found = []
    for folder in ("a", "b"):
        builder = prepared(
            rotten.Builder, tmp_path / folder, dummy("rotten_tomatoes").parent
        )
        dataset = builder.as_dataset(split="train", as_supervised=True)
        found.append({(t.decode(), int(y)) for t, y in tfds.as_numpy(dataset)})
    assert found[0] == found[1]
    labels = dict(found[0])
    assert labels["a small wonder"] == 1 and labels["a long bore"] == 0
    assert "one of the year's best café comedies ." in labels


@pytest.mark.parametrize("damage", ["truncated", "changed", "missing"])
@pytest.mark.parametrize("cls, expected", CASES)
def test_a_damaged_file_is_a_clear_error_and_leaves_nothing(
    cls, expected, damage, tmp_path, small
):
    manual = tmp_path / "manual"
    shutil.copytree(dummy(cls.name).parent, manual)
    path = sorted((manual / cls.name).iterdir())[-1]
    text = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(text[:-9] if damage == "truncated" else text[::-1])
    message = "is missing" if damage == "missing" else "damaged or another version"
    with pytest.raises((ValueError, FileNotFoundError), match=message) as error:
        prepared(cls, tmp_path / "data", manual)
    assert str(path) in str(error.value)
    assert not list((tmp_path / "data").glob(f"{cls.name}/*/*.tfrecord*"))
    shutil.rmtree(manual)
    shutil.copytree(dummy(cls.name).parent, manual)
    assert prepared(cls, tmp_path / "data", manual).is_prepared()  # and mends


@pytest.mark.parametrize("wrong", [{"WORDS": 12}, {"FILES": None}])
def test_a_wrong_number_of_tokens_or_words_is_an_error(wrong, tmp_path, small):
    if wrong.get("FILES", 0) is None:
        name, checksum, number = PENN["FILES"]["test"]
        changed = PENN["FILES"] | {"test": (name, checksum, number + 1)}
        wrong = {"FILES": changed}
    with (
        mock.patch.multiple(penn.Builder, **wrong),
        pytest.raises(ValueError, match=r"11 words, not 12|8 tokens, not 9"),
    ):
        prepared(penn.Builder, tmp_path, dummy("penn_treebank").parent)


def test_a_wrong_number_of_sentences_is_an_error(tmp_path, small):
    with (
        mock.patch.object(rotten.Builder, "SENTENCES", 7),
        pytest.raises(ValueError, match=r"rt-polarity\.neg has 6 sentences, not 7"),
    ):
        prepared(rotten.Builder, tmp_path, dummy("rotten_tomatoes").parent)


def test_without_manual_files_they_are_downloaded(tmp_path, small, monkeypatch):
    asked = []

    def download(self, urls):
        asked.append(urls)
        return {name: dummy("penn_treebank") / name for name in urls}

    def download_and_extract(self, url):
        asked.append(url)
        folder = tmp_path / "extracted" / "rt-polaritydata"
        folder.mkdir(parents=True)
        for path in dummy("rotten_tomatoes").iterdir():
            text = path.read_text(encoding="utf-8")
            (folder / path.name).write_text(text, encoding="windows-1252")
        return folder.parent

    manager = tfds.download.DownloadManager
    monkeypatch.setattr(manager, "download", download)
    monkeypatch.setattr(manager, "download_and_extract", download_and_extract)
    for cls in (penn.Builder, rotten.Builder):
        assert prepared(cls, tmp_path / "data").is_prepared()
    urls, url = asked
    assert {*urls.values(), url} == {*penn.Builder.url_infos, *rotten.Builder.url_infos}
    builder = rotten.Builder(data_dir=tmp_path / "data")
    texts = [
        x["text"].decode()
        for split in ("train", "validation")
        for x in tfds.as_numpy(builder.as_dataset(split=split))
    ]
    assert any("café" in text for text in texts)


def test_the_checksums_of_downloads_are_those_of_manual_files():
    for name, checksum, _ in penn.Builder.FILES.values():
        assert penn.Builder.url_infos[penn.URL + name].checksum == checksum


def test_data_says_what_was_loaded(tmp_path, small):
    for name in ("penn_treebank", "rotten_tomatoes"):
        shutil.copytree(dummy(name), tmp_path / "downloads" / "manual" / name)
    corpus = data.penn_treebank("full", str(tmp_path))
    assert corpus.kind == "full"
    assert corpus.label == "Penn Treebank (penn_treebank/1.0.0), 17 + 4 + 8 tokens"
    assert corpus.train[:4].tolist() == ["the", "cat", "sat", "on"]
    reviews = data.rotten_tomatoes("full", str(tmp_path))
    assert reviews.label == "Rotten Tomatoes (rotten_tomatoes/1.0.0), 11 + 1"
    assert reviews.train[0].shape == reviews.train[1].shape == (11,)


def test_samples_are_labelled_and_always_the_same():
    corpora = [data.penn_treebank("sample", None) for _ in range(2)]
    assert corpora[0].label.startswith("SAMPLE")
    assert corpora[0].train.tolist() == corpora[1].train.tolist()
    assert set(corpora[0].test) <= set(corpora[0].train)
    reviews = [data.rotten_tomatoes("sample", None) for _ in range(2)]
    assert reviews[0].label.startswith("SAMPLE")
    assert reviews[0].train[0].tolist() == reviews[1].train[0].tolist()
    assert {*reviews[0].train[1]} == {0, 1}
