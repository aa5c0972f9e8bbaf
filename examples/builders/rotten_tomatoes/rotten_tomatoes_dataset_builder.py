"""Rotten Tomatoes: sentences of film reviews, positive or negative (Pang and Lee)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import tensorflow_datasets as tfds

from builders import files

URL = "https://www.cs.cornell.edu/people/pabo/movie-review-data/rt-polaritydata.tar.gz"


class Builder(tfds.core.GeneratorBasedBuilder):
    """A sentence an example; nine of ten are to train on."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES: ClassVar = {"1.0.0": "First release."}
    MANUAL_DOWNLOAD_INSTRUCTIONS = """
    Nothing to do with a network: the archive is downloaded. Without one, put
    `rt-polarity.pos` and `rt-polarity.neg`, in UTF-8, into `rotten_tomatoes/` of this
    directory.
    """

    # SHA-256 of the files in UTF-8; the archive's own are in Windows-1252.
    FILES: ClassVar = {
        "rt-polarity.neg": (
            "2d11cfbc790f1cd96d78339f41ce53ced1efa83cd22d37d6788fa3fe3d17e2fd"
        ),
        "rt-polarity.pos": (
            "4134882974a28d0c7b5151256f0e33a6169984ee7372c279e673f1114f475d58"
        ),
    }
    SENTENCES = 5_331  # in each

    def _info(self) -> tfds.core.DatasetInfo:
        return self.dataset_info_from_configs(
            features=tfds.features.FeaturesDict(
                {
                    "text": tfds.features.Text(),
                    "label": tfds.features.ClassLabel(names=["negative", "positive"]),
                }
            ),
            supervised_keys=("text", "label"),
            homepage="https://www.cs.cornell.edu/people/pabo/movie-review-data/",
        )

    def _split_generators(self, manager: tfds.download.DownloadManager):
        paths = files.manual(manager, "rotten_tomatoes", self.FILES)
        encoding = "utf-8"
        if not paths:
            folder = manager.download_and_extract(URL) / "rt-polaritydata"
            paths = {name: folder / name for name in self.FILES}
            encoding = "windows-1252"
        examples = []
        for label, name in enumerate(sorted(self.FILES)):
            # Not splitlines(): a sentence may contain what it takes for line ends.
            lines = paths[name].read_bytes().decode(encoding).rstrip("\n").split("\n")
            if len(lines) != self.SENTENCES:
                raise ValueError(
                    f"{name} has {len(lines):,} sentences, not {self.SENTENCES:,}."
                )
            examples += [(line.strip(), label) for line in lines]
        order = np.random.default_rng(0).permutation(len(examples))
        examples = [examples[i] for i in order]
        held = len(examples) // 10
        return {
            "train": self._generate_examples(examples[held:]),
            "validation": self._generate_examples(examples[:held]),
        }

    def _generate_examples(self, examples: list[tuple[str, int]]):
        for number, (text, label) in enumerate(examples):
            yield number, {"text": text, "label": label}
