"""Dividing layers between ranks before FSDP2 shards them: tensor parallelism."""
