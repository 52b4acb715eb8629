"""What the connectors of all frameworks share."""
