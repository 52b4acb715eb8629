"""Reading documents, and caching them on several machines."""
