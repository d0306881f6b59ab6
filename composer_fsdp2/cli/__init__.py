"""The command `composer-fsdp2`, one module a command."""
