"""Texts in errors about settings."""

from __future__ import annotations

import pytest

from composer_fsdp2 import ConfigError, parse_config
from composer_fsdp2.config.messages import shortened


def test_a_text_is_cut_where_it_is_too_long():
    assert shortened("abc", 3) == "abc"
    assert shortened("abcd", 3) == "abc..."


def test_a_text_that_can_be_no_name_is_refused():
    with pytest.raises(ConfigError, match="A text of 2000000 characters is among the settings"):
        parse_config({"wrap_policy": {"names": ["x" * 2_000_000]}})
