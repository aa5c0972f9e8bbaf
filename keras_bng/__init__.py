"""Block-normalized gradient optimizers for Keras 3."""

from keras_bng._version import __version__
from keras_bng.blocks import Block, partition
from keras_bng.normalize import normalize
from keras_bng.optimizer import BlockNormalized
from keras_bng.optimizers import (
    SGDNG,
    AdagradBNG,
    AdagradNG,
    AdamNG,
    RMSpropNG,
    block_normalized,
)
from keras_bng.rules import Adaptive, Clip, Rms, Rule, Unit
from keras_bng.tools.learning_rate import find_learning_rate
from keras_bng.tools.monitor import BlockMonitor
from keras_bng.tools.summary import block_summary

__all__ = [
    "SGDNG",
    "AdagradBNG",
    "AdagradNG",
    "AdamNG",
    "Adaptive",
    "Block",
    "BlockMonitor",
    "BlockNormalized",
    "Clip",
    "RMSpropNG",
    "Rms",
    "Rule",
    "Unit",
    "__version__",
    "block_normalized",
    "block_summary",
    "find_learning_rate",
    "normalize",
    "partition",
]
