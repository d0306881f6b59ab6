"""Names the private members of torch that this package reads, wraps or resets, in one place.

[Note: private members] FSDP2 has no public way to a unit's unreduced gradients, or to the moments
at which it gathers and reduces. What is used instead may be renamed in any release of torch. So no
other file names private members (a test reads the sources), every one is a row of `PRIVATE_MEMBERS`
with the feature that needs it, and all rows of a run's features are looked up before the model is
changed. The dicts `_parameters`, `_buffers` and `_modules` of modules and the counter `_version` of
tensors may be used anywhere: they have not changed since modules exist, and everybody reads them.

A unit's parameters are gathered and reduced in groups. Groups and their parameters are `Any` in
other folders, which only pass them to functions of this folder.
"""
