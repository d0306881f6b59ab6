"""Python code and notebooks: uses of FSDP1, and reads of shards, with what to write instead."""
