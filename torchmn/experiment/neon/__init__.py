"""Converts experiment files of neon 0.x to TorchMN's format. Nothing that they name is imported or executed."""

from torchmn.experiment.neon.convert import Converted, convert, is_neon

__all__ = ["Converted", "convert", "is_neon"]
