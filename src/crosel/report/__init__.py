"""One run, or several side by side, as one self-contained web page."""

from crosel.report.write import write_report, write_run_report

__all__ = ["write_report", "write_run_report"]
