"""report.html: the results of a run in one self-contained HTML file."""

from torchmn.experiment.report.page import write_report

__all__ = ["write_report"]
