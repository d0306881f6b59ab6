"""Transformations inside a block: what comes before FSDP2."""
