"""The checks of `torchmn doctor`: each is a function that examines one thing and returns a Finding."""
