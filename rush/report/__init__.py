"""Reports: what was measured, as one HTML file that works without network. Reads records, needs no torch.

`write_report` draws one ladder, `write_comparison` several side by side (machines or versions).
"""

from rush.report.compare import write_comparison
from rush.report.page import write_report

__all__ = ["write_comparison", "write_report"]
