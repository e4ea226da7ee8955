"""Draft heads as torch modules: small layers that draft from their target's hidden states."""
