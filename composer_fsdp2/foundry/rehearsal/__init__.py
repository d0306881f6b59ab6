"""A run before its first batch: everything is built as the run builds it, the model on meta."""
