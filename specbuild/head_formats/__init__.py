"""Draft heads as other projects publish them."""
