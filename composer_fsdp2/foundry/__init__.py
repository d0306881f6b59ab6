"""Connects FSDP2 with LLM Foundry: config transform, run files, registries."""
