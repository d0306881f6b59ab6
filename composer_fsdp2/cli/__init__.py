"""Defines the command `composer-fsdp2` and its subcommands."""
