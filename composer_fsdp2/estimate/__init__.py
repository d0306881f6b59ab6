"""Memory, communication and time of a run that has not started, from a step on fake tensors."""
