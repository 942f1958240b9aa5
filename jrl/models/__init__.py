"""Models: the decoder and its blocks, adapters, heads, families of published models, Flax modules of the user's."""
