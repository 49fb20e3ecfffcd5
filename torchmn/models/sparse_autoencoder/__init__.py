"""A stack of sparse autoencoders with local filters ("GB" in neon).

model.py              SparseAutoencoder
configurations.py     published sizes and schedules; the models of neon's MPI examples
batches.py            batches of labelled images
placement.py          Placement: images and sums over ranks, on one rank or on the grid of a parallel model
pretraining.py        pretrain: stack by stack, without labels
gradients.py          the gradients of pretraining in closed form
fine_tuning.py        fine_tune: with labels
tiles.py              the stacks on tiles, with one halo exchange per stack
tile_features.py      the autograd function of one stack on a tile
overlapped_outputs.py outputs of filters, computed while their halo is on the way
best_units.py         spot_check: the unit that separates a class best
visualization.py      pictures of reconstructions and of optimal stimuli
"""
