"""Read the environment variables that a launcher (torchrun, srun, `rush train --nproc`) sets for a rank."""

from __future__ import annotations

import os
import re

from rush.errors import MachineError


def launched(name: str, default: int) -> int:
    """The number in an environment variable such as RANK or WORLD_SIZE; a MachineError for anything but a whole number."""
    text = os.environ.get(name, str(default))
    if not re.fullmatch("[0-9]{1,9}", text):
        raise MachineError(
            f"the environment variable {name} is {text!r:.80}, and a launcher sets it to a whole number; unset it, or start "
            "the ranks with --nproc, torchrun or srun."
        )
    return int(text)
