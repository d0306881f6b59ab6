"""Imported by the server that ranks are forked from: answers every rank would wait for again."""

from __future__ import annotations

import functools

from composer.utils import collect_env

from composer_fsdp2 import installed

# Composer writes these into every checkpoint. It starts a process to find out the first, once in a
# process, and looks at every file of its installation for the second, each time.
collect_env.get_cpu_model()
collect_env.get_composer_commit_hash = functools.cache(collect_env.get_composer_commit_hash)
# Reads the sources of all that is replaced.
with installed():
    pass
