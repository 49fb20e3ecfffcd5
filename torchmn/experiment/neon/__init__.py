"""Experiment files of neon 0.x: read as they are, and said in our words. Nothing that they name is imported or run."""

from torchmn.experiment.neon.convert import Converted, convert, is_neon

__all__ = ["Converted", "convert", "is_neon"]
