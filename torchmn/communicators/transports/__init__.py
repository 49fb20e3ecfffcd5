"""Transports: implementations that move flat buffers and messages between ranks (MPI, gloo, nccl, threads, solo)."""
