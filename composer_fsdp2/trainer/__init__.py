"""FSDP2 in Composer's Trainer: its conventions as rules, the drop-in, and the patches."""
