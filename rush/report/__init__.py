"""Reports: measurements as one self-contained HTML file. Reads records, needs no torch.

`write_report` draws one ladder, `write_comparison` several side by side (machines or versions), and `write_picture` only the
ladder as an SVG file, for a README.
"""

from rush.report.compare import write_comparison
from rush.report.ladder_picture import write_picture
from rush.report.page import write_report

__all__ = ["write_comparison", "write_picture", "write_report"]
