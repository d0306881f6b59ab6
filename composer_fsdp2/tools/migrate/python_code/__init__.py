"""Finds uses of FSDP1 and reads of shards in Python code and notebooks, with the replacement."""
