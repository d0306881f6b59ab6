"""Texts in errors about settings."""

from __future__ import annotations

from composer_fsdp2.config.messages import shortened


def test_a_text_is_cut_where_it_is_too_long():
    assert shortened("abc", 3) == "abc"
    assert shortened("abcd", 3) == "abc..."
