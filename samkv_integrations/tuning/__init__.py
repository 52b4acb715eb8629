"""Which setting is enough on a user's own model and documents, measured without labels."""
