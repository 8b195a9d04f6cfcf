"""What ``hf-fastpath bench`` runs: decode speed beside stock, and the layouts of quantized weights."""
