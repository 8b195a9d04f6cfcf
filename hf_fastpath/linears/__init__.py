"""Linear layers with weights of few bits: ours, and those that other packages' checkpoints bring."""
