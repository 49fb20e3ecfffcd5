"""Untied local filters, L2 pooling and local contrast normalisation, on whole images and on tiles."""
