"""What every layer may use: files, limits, messages, settings, several processes. Knows nothing of the layers above."""
