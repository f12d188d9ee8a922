"""What is kept of each sampled token beside the token: its format, and how it is packed on the device."""
