"""Low-rank adapters, quantized frozen weights, and the matrices they apply to."""
