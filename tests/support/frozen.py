"""Imported last by the server that ranks are forked from: what it holds is nobody's garbage.

Python's collector writes to every object that it looks at, and so copies the memory that a forked
rank shares with the server: the first collection of a rank cost 1.4 s of CPU. Ranks collect after
every test, and seldom in one: that took a twelfth of their time.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
gc.set_threshold(20_000, 20, 20)
