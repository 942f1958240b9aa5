"""From a scored batch to new weights: packing, losses and gradients, the optimizer."""
