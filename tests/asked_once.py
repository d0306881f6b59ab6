"""Imported by the server that ranks are forked from: answers every rank would wait for again."""

from __future__ import annotations

from composer.utils.collect_env import get_cpu_model

from composer_fsdp2 import installed

# Composer writes it into every checkpoint and starts a process to find out, once in a process.
get_cpu_model()
# Reads the sources of all that is replaced.
with installed():
    pass
