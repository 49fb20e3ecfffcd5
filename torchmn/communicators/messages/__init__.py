"""Data of messages: encoding of headers and plain values, digests, reductions, and copies to the host."""
