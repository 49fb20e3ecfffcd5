"""Messages as bytes: their layout, digests, plain values, and sums of them."""
