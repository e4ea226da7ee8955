"""Small heads, as each trainer writes them, and what they compute."""
