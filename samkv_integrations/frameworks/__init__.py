"""Code that the connectors of all frameworks share."""
