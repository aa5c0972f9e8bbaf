"""The version, apart from the package so that a build can read it without Keras."""

__version__ = "0.2.0"
