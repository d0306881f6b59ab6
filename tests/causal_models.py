"""Imported by the server that ranks are forked from: all causal models of Transformers.

Composer looks through them for the class of the model that it is given, which imports them all.
"""

from __future__ import annotations

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

list(MODEL_FOR_CAUSAL_LM_MAPPING.values())
