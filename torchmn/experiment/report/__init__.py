"""report.html: a run on one page, in one file, without a network."""

from torchmn.experiment.report.page import write_report

__all__ = ["write_report"]
