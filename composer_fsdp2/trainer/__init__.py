"""Connects FSDP2 with Composer's Trainer: conventions as rules, the drop-in, saves and loads."""
