"""Converts configurations of other trainers to FSDP2: tables of data, each row with its reason."""
