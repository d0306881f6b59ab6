"""Steps optimizers on local shards: norms, clipping, other forms of state, Muon."""
