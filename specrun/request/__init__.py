"""What a user asks for, and what is known of it while it is decoded."""
