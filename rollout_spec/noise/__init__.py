"""The noise that samples are drawn with: the definition on the host, and its twins in torch and Triton."""
