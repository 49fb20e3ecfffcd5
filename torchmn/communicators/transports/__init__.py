"""Transports: how flat buffers and small messages get from one rank to another."""
