"""The optimizer's step: on local shards, norms and clipping, Muon."""
