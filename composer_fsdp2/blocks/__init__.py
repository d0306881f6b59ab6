"""Changes blocks before FSDP2 shards them: checkpointing, compile, fp8, tiled MLP, chunked loss."""
