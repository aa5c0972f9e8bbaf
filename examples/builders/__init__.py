"""TFDS builders of the data sets that TFDS does not have."""
