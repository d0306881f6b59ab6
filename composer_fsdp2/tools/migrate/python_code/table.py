"""The table of what each use of FSDP1 in Python code becomes; each row has a reason."""

from __future__ import annotations

from composer_fsdp2.tools.migrate.python_code.row import CodeRow
from composer_fsdp2.tools.migrate.python_code.table_torch import TORCH_ROWS
from composer_fsdp2.tools.migrate.python_code.table_trainers import TRAINER_ROWS

__all__ = ["CODE_ROWS"]

CODE_ROWS: tuple[CodeRow, ...] = (*TRAINER_ROWS, *TORCH_ROWS)
"""All uses of FSDP1 that are known; the first row that fits is the one reported."""
