"""Lists and names in messages."""

from __future__ import annotations

from composer_fsdp2.text import child_name, listed


def test_a_list_is_cut_and_counted():
    assert listed(["a", "b"]) == "'a', 'b'"
    assert listed((str(number) for number in range(7)), 2) == "'0', '1' and 5 more"
    assert listed(["a"], quote="") == "a"
    assert listed([]) == ""


def test_a_child_of_the_root_has_its_own_name():
    assert child_name("", "a") == "a"
    assert child_name("a.b", "c") == "a.b.c"
