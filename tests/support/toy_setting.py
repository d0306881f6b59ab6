"""A setting in one file: what a transformation from elsewhere brings with it."""

from __future__ import annotations

from composer_fsdp2.config.setting import Setting
from composer_fsdp2.config.value_types import count

OUTPUT_FACTOR = Setting(
    name="toy_output_factor",
    default=1,
    values=count("times", least=1),
    meaning="multiplies what every block returns by so much",
)
