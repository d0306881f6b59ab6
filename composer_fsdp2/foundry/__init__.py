"""LLM Foundry: its config transform and its run files."""
