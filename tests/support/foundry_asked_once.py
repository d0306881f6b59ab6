"""Imported by the server that ranks are forked from: what every run of LLM Foundry looks up."""

from __future__ import annotations

import catalogue
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

# Composer looks through all causal models of Transformers for the class of the one that it is
# given, which imports them all.
list(MODEL_FOR_CAUSAL_LM_MAPPING.values())
# LLM Foundry looks through the entry points of all packages for each part of a run, hundreds of
# times: a fifth of a short run. By group, as older Pythons have them, they are found at once.
_points = catalogue.AVAILABLE_ENTRY_POINTS
catalogue.AVAILABLE_ENTRY_POINTS = {
    group: tuple(_points.select(group=group)) for group in _points.groups
}
