"""What ``hf-fastpath bench`` runs: decode speed beside stock, and products with quantized weights."""
