"""What several kinds of objects in neon's files contain: learning rules, shapes, activations, costs, initializers."""
