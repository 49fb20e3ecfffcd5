"""report.html: the results of a run in one self-contained HTML file."""

from torchmn.experiment.report.page import RunRecord, write_report

__all__ = ["RunRecord", "write_report"]
