"""Defines the command `composer-fsdp2`, one module for each subcommand."""
