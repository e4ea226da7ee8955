"""Models fed by their cache: on the host through numpy arrays, or on a device."""
