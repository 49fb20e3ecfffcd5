"""The ladder of `torchmn doctor`: each rung is a function that looks at one thing and says what it found."""
