"""A stack of sparse autoencoders with local filters (GB), its pretraining and fine-tuning."""
