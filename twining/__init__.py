"""Twining: an exact inference engine and server for GLM-5.3-Flash-class models in EXL3 weights."""

__version__ = "0.1.0"
