"""Models that are fed the tokens their cache lacks: on the host through numpy arrays, or on a device."""
